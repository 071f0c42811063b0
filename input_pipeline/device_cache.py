"""A data set of small images whole in the device's memory: cropped and augmented there, a batch at a time.

Reading, decoding and augmenting a 32-pixel image takes a CPU core half a millisecond, in which a GPU trains a small
model on a dozen. With data.resident=true the training images, all of one size, are decoded once; after that loader
processes only draw what is to happen to each sample (`AugmentationPlans`), in the order and from the generators that
the images' own path draws from (`imagenet_dataset.ImageDataset`, `augment.Augment`), and the device does it
(`DeviceCache`). So sample n has the same crop, flips, operations and erased box either way, whatever the number of
workers and ranks.

Validation images, which every evaluation crops alike, stay there as the loader gave them (`CachedBatches`).

The arithmetic is Pillow's, on floats that hold whole numbers of 0..255. Images come out equal to the other path's up
to rounding, but for what fills erased boxes: the same distribution, from a store of `NUM_NOISES` images of noise.
"""

import functools
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from input_pipeline.augment import RandomErasing, auto_augment_policy, crop_box, ops_of
from input_pipeline.decode import Decoder, ImageError, UnreadableError
from input_pipeline.image_folders import Folder
from input_pipeline.tar_shards import Shards
from runtime import seeding
from schema import Config, RunError, pair

logger = logging.getLogger(__name__)
NUM_NOISES = 512
# The operations, by their place in this list; 0 leaves an image as it is.
KINDS = ["none", "affine", "autocontrast", "equalize", "invert", "posterize", "solarize", "solarize_add", "color"]
KINDS += ["contrast", "brightness", "sharpness", "blur"]
OP_WIDTH = 7  # numbers of an operation in a plan: its kind and up to six arguments
Key = tuple[int, int]  # sample number, index into the data set


class DecodedImages(Dataset):
    """Decoded images (C, Y, X), uint8, uncropped, and labels; indexed by their number."""

    def __init__(self, images: Folder | Shards, cfg: Config) -> None:
        self.images = images
        self.decoder = Decoder.of(cfg.data, cfg.model.in_chans)
        self.shape = self._load(0).shape

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, list[str]]:
        image = self._load(index)
        if image.shape != self.shape:
            (height, width), (first_height, first_width) = image.shape[1:], self.shape[1:]
            raise UnreadableError(
                f"{self.images.name(index)} is {height} x {width} pixels and {self.images.name(0)} "
                f"{first_height} x {first_width}: data.resident=true keeps images of one size; set it to false"
            )
        return image, int(self.images.labels[index]), []

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int, list[str]]]:
        """A batch, as torch asks for it; what is not on this machine is fetched while the first ones are decoded."""
        last = indices[-1] + 1
        self.images.expect(indices, range(last, min(last + len(indices), len(self))))
        return [self[index] for index in indices]

    def _load(self, index: int) -> torch.Tensor:
        try:
            return self.decoder.tensor(self.images.read(index))
        except UnreadableError:
            raise
        except (OSError, ImageError) as error:
            raise UnreadableError(f"cannot read {self.images.name(index)}: {error}; mend it") from error


class AugmentationPlans(Dataset):
    """What is to happen to a sample: a row of P numbers; indexed by (sample number, index).

    A row: the image's index; top, left, height and width of the crop; whether it is flipped left to right, and top
    to bottom; `num_ops` operations of `OP_WIDTH` numbers; top, bottom, left and right of the erased box and the noise
    to fill it with.

    Args:
        pixels: whose images they are.
        cfg: the run's.
    """

    def __init__(self, pixels: DecodedImages, cfg: Config) -> None:
        self.pixels, self.cfg, self.seed = pixels, cfg.data, cfg.seed
        self.frame = torch.empty(pixels.shape, dtype=torch.uint8, device="meta")
        self.policy, self.num_ops, kinds = None, 0, set()
        if self.cfg.auto_augment:
            self.policy = auto_augment_policy(self.cfg, cfg.model.in_chans)
            for op in ops_of(self.policy):
                kind, arguments = _recorded(op.name, pair(self.cfg.image_size))
                op.aug_fn = functools.partial(_note, KINDS.index(kind), arguments)
                kinds.add(kind)
            self.num_ops = getattr(self.policy, "num_layers", 2)  # AutoAugment's have up to two
        self.jitter = transforms.ColorJitter(*self.cfg.color_jitter[:3]) if self.cfg.color_jitter else None
        if self.jitter:
            self.num_ops += 3
            kinds |= {"brightness", "contrast", "color"}
        self.kinds = sorted(kinds, key=KINDS.index)
        self.erase = RandomErasing(self.cfg) if self.cfg.random_erasing else None

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, key: Key) -> tuple[list[float], int]:
        number, index = key
        with seeding.sample(self.seed, number):
            row = [float(index), *self._draw()]
        return row, int(self.pixels.images.labels[index])

    def _draw(self) -> list[float]:
        """A row but for the index, drawn as `ImageDataset` and `Augment` draw, in their order."""
        row = [float(value) for value in crop_box(self.frame, self.cfg)]
        row += [float(bool(p) and torch.rand(1).item() < p) for p in (self.cfg.hflip, self.cfg.vflip)]
        ops: list[list[float]] = cast(Any, self.policy)([]) if self.policy else []  # of `_note`s, for an image
        if self.jitter:
            jitter = cast(Any, self.jitter)  # torchvision annotates lists, and keeps tuples
            order, *factors, _ = jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
            kinds = [KINDS.index(kind) for kind in ("brightness", "contrast", "color")]
            ops += [[kinds[i], factors[i]] for i in order.tolist() if i < 3 and factors[i] is not None]
        for op in [*ops, *[[0.0]] * (self.num_ops - len(ops))]:
            row += [*map(float, op), *[0.0] * (OP_WIDTH - len(op))]
        box = self.erase and self.erase.draw_box(*pair(self.cfg.image_size))
        return row + ([*map(float, box), float(torch.randint(NUM_NOISES, ()))] if box else [0.0] * 5)


def collate_plans(items: list[tuple[list[float], int]]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Rows (B, P), float64, labels (B,) and no failures.

    Arrays, which travel in the message of the worker's process: a tensor's way, by a file descriptor, takes longer.
    """
    rows, labels = zip(*items, strict=True)
    return np.array(rows), np.array(labels), []


def _note(kind: int, arguments: Callable[..., list[float]], ops: list, *given: float, **_: Any) -> list:
    """Stands in for an operation of timm's: timm hands over `ops`, a list, where it would hand over an image.

    Returns the list with one more entry: the operation's kind and the arguments that timm drew for it.
    """
    return [*ops, [kind, *arguments(*given)]]


def _recorded(name: str, size: tuple[int, int]) -> tuple[str, Callable[..., list[float]]]:
    """The kind that timm's operation `name` is, and what makes its arguments of timm's.

    Affine ones are six numbers, the place in the image (x, y) that a place in the result shows, as Pillow has them.
    """
    height, width = size
    for end in ("Increasing", "Original"):
        name = name.removesuffix(end)
    return {
        "ShearX": ("affine", lambda factor: [1, factor, 0, 0, 1, 0]),
        "ShearY": ("affine", lambda factor: [1, 0, 0, factor, 1, 0]),
        "TranslateXRel": ("affine", lambda share: [1, 0, share * width, 0, 1, 0]),
        "TranslateYRel": ("affine", lambda share: [1, 0, 0, 0, 1, share * height]),
        "Rotate": ("affine", functools.partial(_rotation, height, width)),
        "AutoContrast": ("autocontrast", lambda: []),
        "Equalize": ("equalize", lambda: []),
        "Invert": ("invert", lambda: []),
        "Posterize": ("posterize", lambda bits: [2 ** (8 - min(bits, 8))]),
        "Solarize": ("solarize", lambda threshold: [threshold]),
        "SolarizeAdd": ("solarize_add", lambda add: [add]),
        "Color": ("color", lambda factor: [factor]),
        "Desaturate": ("color", lambda factor: [1 - factor]),
        "Contrast": ("contrast", lambda factor: [factor]),
        "Brightness": ("brightness", lambda factor: [factor]),
        "Sharpness": ("sharpness", lambda factor: [factor]),
        "GaussianBlur": ("blur", lambda radius: [radius]),
        "GaussianBlurRand": ("blur", lambda factor: [random.uniform(0.1, 2 * factor)]),
    }[name]


def _rotation(height: int, width: int, degrees: float) -> list[float]:
    """As PIL.Image.rotate, about the middle."""
    sine, cosine = math.sin(-math.radians(degrees)), math.cos(-math.radians(degrees))
    x, y = width / 2, height / 2
    return [cosine, sine, x - cosine * x - sine * y, -sine, cosine, y + sine * x - cosine * y]


class DeviceCache:
    """Batches of (images, labels) of the images in the device's memory, as the plans have them.

    Args:
        decoded: a loader of all images in turn, from `DecodedImages`.
        plans: a loader of `AugmentationPlans`, microbatches of this rank.
        augment: does what the plans say, on the device that keeps the images.
        images: what another one read of `decoded`, which is left alone then.
    """

    def __init__(
        self, decoded: DataLoader, plans: DataLoader, augment: "DeviceAugment", images: torch.Tensor | None = None
    ) -> None:
        self.decoded: DataLoader | None = decoded
        self.plans, self.augment, self.device = plans, augment, augment.device
        self.images = images

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Reads the images now, and starts the workers.

        Raises:
            UnreadableError: an image cannot be read, or has another size; the text names it.
            RunError: they need more memory than there is.
        """
        if self.images is None:
            assert self.decoded is not None
            self.images, self.decoded = self._read(self.decoded), None  # whose processes end with it
        return self._augmented(self.images, iter(self.plans))

    def _augmented(self, images: torch.Tensor, plans: Iterator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for plan, labels in plans:
            yield self.augment(images, torch.from_numpy(plan)), torch.from_numpy(labels)

    def _read(self, decoded: DataLoader) -> torch.Tensor:
        dataset = cast(DecodedImages, decoded.dataset)
        started, shape = time.perf_counter(), (len(dataset), *dataset.shape)
        needed = math.prod(shape)
        _make_sure_of(needed, shape[0], self.device)
        cache, place = torch.empty(shape, dtype=torch.uint8, device=self.device), 0
        for images, _ in decoded:
            cache[place : place + len(images)] = images.to(self.device, non_blocking=True)
            place += len(images)
        seconds = time.perf_counter() - started
        logger.info("%d images (%.2f GiB) are on the device after %.1f s", place, needed / 2**30, seconds)
        return cache


class CachedBatches:
    """The batches of a loader, in the device's memory after the first pass: for validation, where none ever changes.

    Args:
        loader: of batches of uint8 images (B, C, Y, X) and labels (B,).
        shape: of them all, (batches x B, C, Y, X).
        device: which keeps them.
    """

    def __init__(self, loader: Iterable, shape: tuple[int, ...], device: torch.device) -> None:
        self.loader: Iterable | None = loader
        self.shape, self.device = shape, device
        self.batches: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Starts the workers, the first time.

        Raises:
            RunError: they need more memory than there is.
        """
        if self.batches is not None:
            return iter(self.batches)
        assert self.loader is not None
        _make_sure_of(math.prod(self.shape), self.shape[0], self.device)
        return self._kept(iter(self.loader))

    def _kept(self, batches: Iterator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        kept = []
        for images, labels in batches:
            kept.append((images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)))
            yield kept[-1]
        self.batches, self.loader = kept, None  # whose processes end with it


def _make_sure_of(needed: int, num_images: int, device: torch.device) -> None:
    """Refuse what takes more than half of the device's free memory, in bytes."""
    if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]) / 2:
        raise RunError(
            f"data.resident=true: {num_images} images take {needed / 2**30:.1f} GiB, more than half of the "
            f"{free / 2**30:.1f} GiB that are free on the GPU: set it to false"
        )


class DeviceAugment:
    """What `AugmentationPlans` has drawn, done to a batch: B images, C channels, Y X after the crop."""

    def __init__(self, plans: AugmentationPlans, cfg: Config, device: torch.device) -> None:
        self.cfg, self.device, self.num_ops = cfg.data, device, plans.num_ops
        self.size = height, width = pair(cfg.data.image_size)
        self.erases = plans.erase is not None
        # One graph for every layer of operations, so all that crops and operations give back is contiguous.
        self.layer = torch.compile(self._layer) if cfg.compile else self._layer
        self.crop = torch.compile(self._crop) if cfg.compile else self._crop
        self.ops = [(KINDS.index(kind), getattr(self, f"_{kind}")) for kind in plans.kinds]
        channels, levels = cfg.model.in_chans, (cfg.data.mean, cfg.data.std)
        mean, std = (255 * torch.tensor(values, device=device).view(-1, 1, 1) for values in levels)
        self.fill = mean.round().clamp(0, 255)  # of what an affine operation uncovers
        self.rows, self.columns = (torch.arange(n, device=device, dtype=torch.float32) for n in (height, width))
        if self.erases:
            generator = torch.Generator(device).manual_seed(cfg.seed)
            noise = torch.randn(NUM_NOISES, channels, height, width, generator=generator, device=device)
            self.noise = (noise * std + mean).round_().clamp_(0, 255)
        self.spread = [_spread(n, device) for n in (height, width)] if "blur" in plans.kinds else None

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
        """Images (N, C, any, any), uint8, and rows of plans (B, P), float64, to images (B, C, Y, X), uint8."""
        if self.device.type == "cuda":  # else the copy may wait for the device (CUDA's API synchronization behavior)
            plan = plan.pin_memory()
        plan = plan.to(self.device, non_blocking=True)
        index, plan = plan[:, 0].long(), plan[:, 1:].float()
        crop, ops, erased = plan.split([6, OP_WIDTH * self.num_ops, 5], dim=1)
        images = self.crop(images[index], crop)
        for op in ops.split(OP_WIDTH, dim=1):
            images = self.layer(images, op)
        if self.erases:
            images = self._erase(images, erased)
        return images.to(torch.uint8)

    def _crop(self, images: torch.Tensor, crop: torch.Tensor) -> torch.Tensor:
        """Crop, antialiased resize and flips, as two products with matrices: columns first, rounded, then rows."""
        top, left, height, width, hflip, vflip = crop.unbind(1)
        interpolation = self.cfg.interpolation
        columns = _resampling(left, width, images.shape[3], self.size[1], hflip, interpolation)
        rows = _resampling(top, height, images.shape[2], self.size[0], vflip, interpolation)
        images = torch.einsum("bcyx,bjx->bcyj", images.float(), columns).round().clamp(0, 255)
        return torch.einsum("bcyx,biy->bcix", images, rows).round().clamp(0, 255).contiguous()

    def _layer(self, images: torch.Tensor, op: torch.Tensor) -> torch.Tensor:
        """One operation an image: each kind done to all, and taken where it was drawn."""
        result, arguments = images, op[:, 1:, None, None, None]
        for number, kind in self.ops:
            result = torch.where((op[:, 0] == number)[:, None, None, None], kind(images, *arguments.unbind(1)), result)
        return result

    def _erase(self, images: torch.Tensor, erased: torch.Tensor) -> torch.Tensor:
        top, bottom, left, right, noise = erased[:, :, None].unbind(1)
        rows = (self.rows >= top) & (self.rows < bottom)  # B Y
        columns = (self.columns >= left) & (self.columns < right)  # B X
        return torch.where(rows[:, None, :, None] & columns[:, None, None], self.noise[noise[:, 0].long()], images)

    # The operations, of Pillow's ImageOps, ImageEnhance and Image.transform: images (B, C, Y, X) and, if they take one,
    # an argument (B, 1, 1, 1).

    def _affine(self, images: torch.Tensor, *matrix: torch.Tensor) -> torch.Tensor:
        """Sampled at where each pixel's middle lies in the image; what is outside is filled."""
        a, b, c, d, e, f = matrix
        x, y = self.columns + 0.5, self.rows[:, None] + 0.5
        x, y = a * x + b * y + c, d * x + e * y + f  # B 1 Y X
        height, width = self.size
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        x, y = x - 0.5, y - 0.5
        columns, across = _taps(x, width, self.cfg.interpolation)  # B T Y X
        rows, down = _taps(y, height, self.cfg.interpolation)
        place = (rows[:, :, None] * width + columns[:, None]).flatten(1)  # B TTYX
        values = images.flatten(2).gather(2, place[:, None].expand(-1, images.shape[1], -1))
        values = values.unflatten(2, (rows.shape[1], columns.shape[1], height, width))  # B C T T Y X
        result = (values * down[:, None, :, None] * across[:, None, None]).sum((2, 3))
        # Rounded down, but not what a sum of float32 shares leaves just below a whole number.
        return torch.where(inside, (result + 1e-3).clamp(0, 255).floor(), self.fill)

    def _autocontrast(self, images: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
        stretched = ((images - low) * (255 / (high - low).clamp(min=1))).floor().clamp(0, 255)
        return torch.where(high > low, stretched, images)

    def _equalize(self, images: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        values = images.flatten(2).long()
        counts = torch.zeros(*images.shape[:2], 256, device=images.device)
        counts.scatter_add_(2, values, torch.ones_like(values, dtype=torch.float32))
        highest = values.amax(2, keepdim=True)
        step = ((values.shape[2] - counts.gather(2, highest)) / 255).floor()
        before = counts.cumsum(2) - counts
        table = ((before + (step / 2).floor()) / step.clamp(min=1)).floor().clamp(0, 255)
        return torch.where(step[..., None] > 0, table.gather(2, values).view_as(images), images)

    def _invert(self, images: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return 255 - images

    def _posterize(self, images: torch.Tensor, step: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        step = step.clamp(min=1)  # of those that have another operation, 0
        return (images / step).floor() * step

    def _solarize(self, images: torch.Tensor, threshold: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.where(images < threshold, images, 255 - images)

    def _solarize_add(self, images: torch.Tensor, add: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.where(images < 128, (images + add).clamp(max=255), images)

    def _color(self, images: torch.Tensor, factor: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return _blend(_grey(images), images, factor)

    def _contrast(self, images: torch.Tensor, factor: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return _blend((_grey(images).mean((2, 3), keepdim=True) + 0.5).floor(), images, factor)

    def _brightness(self, images: torch.Tensor, factor: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return _blend(0.0, images, factor)

    def _sharpness(self, images: torch.Tensor, factor: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """Pillow's SMOOTH is the mean of 3 x 3 pixels with the middle one five times; the border stays."""
        nine = F.avg_pool2d(images, 3, stride=1, divisor_override=1)
        smooth = ((nine + 4 * images[:, :, 1:-1, 1:-1]) / 13 + 0.5).floor()
        height, width = self.size
        rows, columns = (self.rows % (height - 1) > 0)[:, None], self.columns % (width - 1) > 0
        return _blend(torch.where(rows & columns, F.pad(smooth, (1, 1, 1, 1)), images), images, factor)

    def _blur(self, images: torch.Tensor, radius: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        rows, columns = (_blurring(radius.flatten(), spread) for spread in self.spread or ())
        images = torch.einsum("bcyx,bjx->bcyj", images, columns)
        return torch.einsum("bcyx,biy->bcix", images, rows).round().clamp(0, 255).contiguous()


def _resampling(
    start: torch.Tensor, length: torch.Tensor, source: int, size: int, is_flipped: torch.Tensor, interpolation: str
) -> torch.Tensor:
    """Weights (B, size, source) that resize `length` (B,) pixels from `start` on to `size`, as torch with antialias.

    The kernel is stretched where pixels are lost, and what it takes from outside the crop is left out.
    """
    start, length = start[:, None, None], length[:, None, None]
    scale = length / size
    result, place = (torch.arange(n, device=start.device, dtype=torch.float32) for n in (size, source))
    result = torch.where(is_flipped[:, None] > 0, size - 1 - result, result)[:, :, None]
    place = place - start + 0.5
    x = ((place - scale * (result + 0.5)) / scale.clamp(min=1)).abs()
    if interpolation == "bicubic":  # a = -0.5
        weights = torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2) * (x < 2)
    else:
        weights = (1 - x).clamp(min=0)
    weights = weights * ((place > 0) & (place < length))
    return weights / weights.sum(2, keepdim=True)


def _taps(x: torch.Tensor, size: int, interpolation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Which pixels (B, T, Y, X) of `size` along an axis make up the one at `x` (B, 1, Y, X), and their shares.

    Linear, or cubic with a = -1, as in Pillow's Geometry.c; beyond the border its last pixel goes on.
    """
    neighbours = torch.arange(-1, 3, device=x.device).view(1, -1, 1, 1)
    distance = (x - x.floor() - neighbours).abs()
    if interpolation == "bicubic":
        near, far = (distance - 2) * distance**2 + 1, ((5 - distance) * distance - 8) * distance + 4
        weights = torch.where(distance < 1, near, far)
    else:
        weights = (1 - distance).clamp(min=0)
    return (x.floor() + neighbours).clamp(0, size - 1).long(), weights


def _grey(images: torch.Tensor) -> torch.Tensor:
    """Pillow's luminance (B, 1, Y, X), in whole numbers that float32 holds exactly."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, dim=1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor()


def _blend(base: torch.Tensor | float, images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """PIL.Image.blend: cut off at black and white, and rounded down."""
    return (base + factor * (images - base)).clamp(0, 255).floor()


def _spread(size: int, device: torch.device) -> torch.Tensor:
    """(7, size, size): 1 where a pixel's neighbour at -3 .. 3 lies, the border's going on."""
    place = torch.arange(size, device=device)
    return torch.stack([F.one_hot((place + d).clamp(0, size - 1), size) for d in range(-3, 4)]).float()


def _blurring(radius: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """(B, size, size): Pillow's Gaussian blur, of `radius` (B,) up to 2, is three times a box of a fractional radius.

    Source: Gwosdek et al., Theoretical Foundations of Gaussian Convolution by Extended Box Filtering (SSVM 2011), and
    Pillow's BoxBlur.c.
    """
    variance = radius**2 / 3
    whole = ((torch.sqrt(12 * variance + 1) - 1) / 2).floor()
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    box = (whole + part)[:, None]
    distance = torch.arange(-3, 4, device=radius.device).abs()
    once = torch.einsum("bd,dij->bij", (box + 1 - distance).clamp(0, 1) / (2 * box + 1), spread)
    return once @ once @ once
