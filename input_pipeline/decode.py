"""Bytes of an image, whatever is in them, to the right pixels: on the CPU one by one, on the GPU a batch at a time.

Every image ends as 8-bit RGB (or grey, for models of one channel):

    CMYK, YCbCr, Lab, palettes   converted by Pillow, which also undoes Adobe's inversion
    16 bits a channel            divided by 257, so that white stays white; other depths are refused
    transparency                 laid over white
    animations                   the first frame
    EXIF orientation             applied if `data.exif_orientation` says so; unreadable EXIF counts as none
    wrong extension              the content decides

Pillow decodes what the reference numbers of timm and torchvision were made with. torchvision's decoder gives the same
pixels faster, since both are libjpeg-turbo; it takes JPEGs only, everything else goes to Pillow.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_jpeg

from schema import Config, DataConfig, RankError, pair

Image.MAX_IMAGE_PIXELS = None  # Pillow's own bound is fixed at two values; ours is data.max_pixels
ORIENTATION = 0x0112  # EXIF tag
WHITE = (255, 255, 255, 255)


class ImageError(ValueError):
    """An image that cannot be used; the text says why, without its name."""


class UnreadableError(RankError, OSError):
    """An image that ends the run; the text names it. It may come from a loader process."""

    def as_raised(self) -> "UnreadableError":
        """The error as it was raised: a DataLoader hands it on with the whole traceback of the process as its text."""
        return UnreadableError(str(self).rsplit(f"{type(self).__name__}: ", 1)[-1].strip())


class Decoder:
    """What images are decoded with.

    Args:
        in_chans: 3 for RGB, 1 for grey.
        decoder: torchvision or pillow; nvjpeg means torchvision here, for what the GPU does not take.
        exif_orientation: turn images as EXIF says.
        max_pixels: of an image; more are refused.
    """

    def __init__(self, in_chans: int, *, decoder: str, exif_orientation: bool, max_pixels: int) -> None:
        self.mode = "L" if in_chans == 1 else "RGB"
        self.exif_orientation = exif_orientation
        self.max_pixels = max_pixels
        self.use_pillow = decoder == "pillow"

    @classmethod
    def of(cls, cfg: DataConfig, in_chans: int) -> "Decoder":
        """What the config says."""
        exif, most = cfg.exif_orientation, cfg.max_pixels
        return cls(in_chans, decoder=cfg.decoder, exif_orientation=exif, max_pixels=most)

    def open(self, data: bytes) -> Image.Image:
        """The header, read and checked; no pixel is decoded.

        Raises:
            ImageError: not an image, or one of more than `max_pixels`.
        """
        with _named_errors():
            image = Image.open(io.BytesIO(data))
        width, height = image.size
        if width * height > self.max_pixels:
            raise ImageError(f"{width} x {height} pixels are more than data.max_pixels={self.max_pixels}")
        return image

    def pillow(self, data: bytes, header: Image.Image | None = None) -> Image.Image:
        """An image of this decoder's mode; `header` is what `open` gave, if it was called.

        Raises:
            ImageError: it cannot be read.
        """
        image = header or self.open(data)
        with _named_errors():
            image.load()  # before EXIF is asked for: what damage that meets, `_orientation` forgives
            if self.exif_orientation:
                image = _upright(image)
            image = _eight_bits(image)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
            return image.convert(self.mode)

    def tensor(self, data: bytes, header: Image.Image | None = None) -> torch.Tensor:
        """(C, Y, X), uint8: the same pixels as `pillow`, by torchvision's decoder where that is faster.

        Raises:
            ImageError: it cannot be read.
        """
        header = header or self.open(data)
        if not self.use_pillow and self.is_plain_jpeg(header):
            mode = ImageReadMode.GRAY if self.mode == "L" else ImageReadMode.RGB
            # What torchvision refuses, Pillow refuses in clearer words, or can read after all.
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of bytes, which cannot be written to; decode_jpeg does not
                decoded = decode_jpeg(torch.frombuffer(data, dtype=torch.uint8), mode=mode)
                assert isinstance(decoded, torch.Tensor)  # not a list, as it was given one file
                return decoded
        array = np.array(self.pillow(data, header))
        return torch.from_numpy(array).view(*array.shape[:2], -1).permute(2, 0, 1)

    def is_plain_jpeg(self, image: Image.Image) -> bool:
        """Whether a JPEG decoder alone gives the right pixels: no CMYK, nothing to turn.

        Grey from colour is Pillow's sum of RGB, which JPEG's own luminance differs from by rounding.
        """
        is_known = image.format in ("JPEG", "MPO") and image.mode in (("L",) if self.mode == "L" else ("L", "RGB"))
        return is_known and (not self.exif_orientation or _orientation(image) == 1)


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Whatever a decoder raises, as ImageError; its warnings about odd but readable files are dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except ImageError:
            raise
        except UnidentifiedImageError as error:
            raise ImageError("not an image of a known format") from error
        except Exception as error:  # decoders raise anything: OSError, SyntaxError, struct.error, RuntimeError, ...
            reason = (str(error).splitlines() or [""])[0]
            raise ImageError(f"{type(error).__name__}: {reason}") from error


def _orientation(image: Image.Image) -> int:
    """1 to 8; 1, upright, also where EXIF says nothing sensible or cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            orientation = image.getexif().get(ORIENTATION, 1)
    except Exception:  # damaged EXIF is no reason to lose the image
        return 1
    return orientation if orientation in range(1, 9) else 1


def _upright(image: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(image) if _orientation(image) != 1 else image


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits scaled to 8; Pillow's own conversion would clip it to white."""
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ImageError(f"grey values from {values.min()} to {values.max()} are not of 16 bits")
        return Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if image.mode == "F":
        raise ImageError("floating-point pixels have no known range")
    return image


@dataclasses.dataclass
class Jpeg:
    """A JPEG for the GPU's decoder, and what to do with it: cut out (top, left, height, width), perhaps mirror."""

    name: str
    data: bytes
    box: tuple[int, int, int, int]
    flip: bool


@dataclasses.dataclass
class Encoded:
    """A batch in which the images at `jpegs`' places are still to be decoded; the others are in `images`.

    One tensor holds all files: a tensor each would cost a file descriptor each on the way from the loader's process.
    """

    jpegs: dict[int, Jpeg]  # place in the batch -> all but the data
    lengths: list[int]
    files: torch.Tensor
    images: dict[int, torch.Tensor]

    def pin_memory(self) -> "Encoded":
        """Called by DataLoader. nvJPEG reads from ordinary memory: there is nothing to do."""
        return self


def encode(items: Sequence[Jpeg | torch.Tensor]) -> Encoded:
    """Put a batch together for `decode_on_gpu`."""
    jpegs = {place: item for place, item in enumerate(items) if isinstance(item, Jpeg)}
    files = np.frombuffer(b"".join(item.data for item in jpegs.values()), np.uint8)
    return Encoded(
        jpegs={place: dataclasses.replace(item, data=b"") for place, item in jpegs.items()},
        lengths=[len(item.data) for item in jpegs.values()],
        files=torch.from_numpy(files),
        images={place: item for place, item in enumerate(items) if isinstance(item, torch.Tensor)},
    )


def decode_on_gpu(batch: Encoded, cfg: Config, device: torch.device) -> torch.Tensor:
    """(B, C, Y, X), uint8: torchvision's nvJPEG decoder, then each crop resized with torch's antialiasing.

    nvJPEG rounds its inverse transform otherwise and spreads the halved colour channels otherwise than libjpeg-turbo:
    tests/test_gpu_decode.py holds the tolerance.

    Raises:
        UnreadableError: a JPEG cannot be decoded; the text names it.
    """
    size = pair(cfg.data.image_size)
    num_images = len(batch.jpegs) + len(batch.images)
    images = torch.empty(num_images, cfg.model.in_chans, *size, dtype=torch.uint8, device=device)
    mode = ImageReadMode.GRAY if cfg.model.in_chans == 1 else ImageReadMode.RGB
    files = list(batch.files.split(batch.lengths))
    try:
        decoded = decode_jpeg(files, mode=mode, device=device)
    except RuntimeError:  # which one was it?
        for jpeg, file in zip(batch.jpegs.values(), files, strict=True):
            try:
                decode_jpeg([file], mode=mode, device=device)
            except RuntimeError as error:
                raise UnreadableError(f"cannot read {jpeg.name}: {str(error).splitlines()[0]}; mend it") from error
        raise
    for (place, jpeg), image in zip(batch.jpegs.items(), decoded, strict=True):
        top, left, height, width = jpeg.box
        crop = image[None, :, top : top + height, left : left + width].float()
        resized = F.interpolate(crop, size, mode=cfg.data.interpolation, antialias=True)
        images[place] = resized[0].round_().clamp_(0, 255)
    for place, image in batch.images.items():
        images[place] = image.to(device)
    flips = torch.tensor([place in batch.jpegs and batch.jpegs[place].flip for place in range(num_images)])
    return torch.where(flips.to(device)[:, None, None, None], images.flip(-1), images)


def crop_extreme_aspect(image: Image.Image) -> Image.Image:
    """An image of which the short side can be resized without the long one becoming endless: its middle, 8 : 1."""
    width, height = image.size
    longest = 8 * min(width, height)
    left, top = max(0, width - longest) // 2, max(0, height - longest) // 2
    return image.crop((left, top, width - left, height - top)) if left or top else image


class GpuDecodePrefetcher:
    """Batches of a loader, decoded on the GPU `depth` batches ahead, by as many threads in streams of their own.

    One batch's images are cut and resized while the next one's are decoded.
    """

    def __init__(self, loader: DataLoader, cfg: Config, device: torch.device, *, depth: int = 2) -> None:
        self.loader, self.cfg, self.device, self.depth = loader, cfg, device, depth

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self._decoded(iter(self.loader))  # whose workers start now, not at the first batch

    def _decoded(self, batches: Iterator) -> Iterator[tuple[Any, ...]]:
        with concurrent.futures.ThreadPoolExecutor(self.depth, "nvjpeg") as threads:
            coming: collections.deque = collections.deque()
            for batch, *rest in batches:
                coming.append((threads.submit(self._decode, batch), rest))
                if len(coming) > self.depth:
                    yield self._take(*coming.popleft())
            while coming:
                yield self._take(*coming.popleft())

    def _decode(self, batch: Encoded | torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
        torch.cuda.set_device(self.device)
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            if isinstance(batch, Encoded):
                images = decode_on_gpu(batch, self.cfg, self.device)
            else:  # no image was for the GPU
                images = batch.to(self.device)
            return images, stream.record_event()

    def _take(self, decoded: concurrent.futures.Future, rest: list[Any]) -> tuple[Any, ...]:
        images, ready = decoded.result()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(ready)
        images.record_stream(current)
        return images, *rest
