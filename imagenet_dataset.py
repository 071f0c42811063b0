"""Class folders or tar shards to batches, in an order that is a function of (seed, step) alone.

    <path>/train/<class>/<image>    <path>/val/<class>/<image>        data.source=folder
    <path>/train/*.tar                <path>/val/*.tar                    data.source=webdataset, a folder or s3://

The training set is one endless stream of samples. Sample n = step x global batch + position; its epoch is n // N, its
place in that epoch's order n % N, and its augmentation follows from (seed, n). So neither the worker count, nor
the world size, nor the number of resumes can change what a step sees, and no loader state is ever saved: a resumed run
starts the stream at its step. Batches are uint8 (B, C, Y, X), or with data.packing images in rows (`packing.Packed`);
they are normalised on the device. Where data.size_schedule changes the global batch, the stream goes on where the steps
before ended (`RunSizes.samples_at`).
"""

import functools
import gc
import logging
import math
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, default_collate
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from input_pipeline import aspect, tar_shards
from input_pipeline.augment import Augment, crop_box
from input_pipeline.block_cache import Room
from input_pipeline.decode import (
    Decoder,
    Encoded,
    GpuDecodePrefetcher,
    ImageError,
    Jpeg,
    UnreadableError,
    crop_extreme_aspect,
    encode,
)
from input_pipeline.device_cache import (
    AugmentationPlans,
    CachedBatches,
    DecodedImages,
    DeviceAugment,
    DeviceCache,
    collate_plans,
)
from input_pipeline.image_folders import Folder, scan
from packing import Packed, even_rows, longest_image
from runtime import preemption, seeding
from runtime.bucket import is_bucket
from schema import Config, ConfigError, DataConfig, RankError, RunSizes, pair

logger = logging.getLogger(__name__)
LONGEST_TMPDIR = 75  # of a socket's 107 characters, what multiprocessing's /pymp-xxxxxxxx/listener-xxxxxxxx leaves
LEAST_AHEAD = 1024  # images of a bucket that a batch names with those that come later
LENGTHS = 128  # that rows may have in evaluation: each new one costs an allocator of GPU memory something
PADDING = -1  # label of the images that fill up the last validation batch; they count for nothing

Key = tuple[int, int]  # sample number, index into the data set
Batch = tuple[torch.Tensor | Packed, torch.Tensor]  # images (B, C, Y, X), uint8, or in rows; and labels (B,)
Grid = tuple[int, int]  # rows and columns of patches
# A row of `Packed.patches`; grids and labels of its images; failures.
Row = tuple[torch.Tensor, list[Grid], list[int], list[str]]
Order = Callable[[int], np.ndarray | torch.Tensor]  # epoch -> the order in which it has the images, integers (N,)
ImageSource = Folder | tar_shards.Shards  # labels, name(index), read(index)


def run_sizes(cfg: Config, world_size: int) -> RunSizes:
    """The run's record of sizes, or that of its first stage; raises as `stage_sizes`."""
    return stage_sizes(cfg, world_size)[0]


def stage_sizes(cfg: Config, world_size: int) -> list[RunSizes]:
    """The records of the run's stages, once everything about the data was found right; before a process group starts.

    Raises:
        ConfigError: a folder is missing or empty, it has more classes than the model, a validation class is unknown to
            the training set, or the training set is smaller than one batch.
    """
    if cfg.data.source == "synthetic":
        num_train, num_val, classes = cfg.data.num_synthetic_train or 0, cfg.data.num_synthetic_val or 0, ()
    else:
        train = list_images(cfg.data, "train")
        num_train, num_val, classes = len(train), len(list_images(cfg.data, "val")), train.classes
    if cfg.data.num_workers and (excess := len(tempfile.gettempdir()) - LONGEST_TMPDIR) > 0:
        raise ConfigError(
            f"TMPDIR={tempfile.gettempdir()} is {excess} characters too long for the sockets of loader processes: set "
            "TMPDIR=/tmp, or data.num_workers=0"
        )
    if len(classes) > cfg.model.num_classes:
        raise ConfigError(
            f"data.path={cfg.data.path} has {len(classes)} classes, model.num_classes={cfg.model.num_classes}: "
            f"set model.num_classes={len(classes)}"
        )
    if num_train < (largest := max(stage.global_batch_size for stage in cfg.stages())):
        raise ConfigError(
            f"global_batch_size={largest} is more than the {num_train} training images of "
            f"{cfg.data.path or 'data.num_synthetic_train'}: use at most {num_train}"
        )
    data = {"num_train_images": num_train, "num_val_images": num_val, "classes": classes}
    return RunSizes.stages(cfg, world_size=world_size, **data)


def list_images(cfg: DataConfig, split: str) -> ImageSource:
    """What `data.path` holds of one split, class folders or tar shards.

    Raises:
        ConfigError: as `scan`, `tar_shards.load` and `Room.prepare` say.
    """
    if cfg.source == "folder":
        return scan(cfg.path, split)
    if not is_bucket(cfg.path):
        return tar_shards.load(cfg.path, split, cfg.on_error)
    room = Room(cfg.cache_dir, cfg.cache_gb)
    room.prepare(streams=cfg.shard_streams)
    return tar_shards.load(cfg.path, split, cfg.on_error, room=room)


class Keys(list[Key]):
    """Those of a batch, and the images that are read after them, on all ranks: for what fetches images ahead."""

    def __init__(self, keys: Iterable[Key], later: Sequence[int]) -> None:
        super().__init__(keys)
        self.later = later


class ImageDataset(Dataset):
    """Cropped uint8 images (C, Y, X), labels, and what could not be read; indexed by (sample number, index).

    Args:
        images: where they come from.
        cfg: the run's.
        is_train: an image that cannot be read is replaced by the next one that can, in training; in validation it
            counts for nothing. Either only with data.on_error=skip.
    """

    def __init__(self, images: ImageSource, cfg: Config, *, is_train: bool) -> None:
        self.images, self.is_train, self.seed = images, is_train, cfg.seed
        self.skips = cfg.data.on_error == "skip"
        self.decoder = Decoder.of(cfg.data, cfg.model.in_chans)
        self.use_gpu = is_train and cfg.data.decoder == "nvjpeg"
        self.cfg, self.patch = cfg.data, pair(cfg.model.patch_size)
        self.augment, self.eval_transform = Augment(cfg.data), eval_transform(cfg.data)
        size = self.patch if cfg.data.packing.enabled else pair(cfg.data.image_size)
        self.nothing = torch.zeros(cfg.model.in_chans, *size, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> tuple[Any, int, list[str]]:
        return self.item(key)

    def item(self, key: Key, patches: int | None = None) -> tuple[Any, int, list[str]]:
        """An image, its label and failures; of at most so many `patches` in its own aspect ratio, or of image_size."""
        number, index = key
        if index == PADDING:
            return self.nothing, PADDING, []
        failures = []
        with seeding.sample(self.seed, number):
            for tried in range(index, index + len(self)):
                place = tried % len(self)
                try:
                    return self._load(place, patches), int(self.images.labels[place]), failures
                except UnreadableError:
                    raise  # no fault of this image
                except (OSError, ImageError) as error:
                    failures.append(f"cannot read {self.images.name(place)}: {error}")
                    if not self.skips:
                        cannot_skip = self.cfg.resident or self.cfg.decoder == "nvjpeg"
                        advice = "mend it" if cannot_skip else "mend it, or set data.on_error=skip"
                        raise UnreadableError(f"{failures[0]}; {advice}") from error
                    if not self.is_train:
                        return self.nothing, PADDING, failures
        raise UnreadableError(f"{failures[0]}, nor any other image")

    def __getitems__(self, keys: list[Key]) -> list[tuple[Any, int, list[str]]]:
        """A batch, as torch asks for it; what is not on this machine is fetched while the first ones are decoded."""
        self.expect(keys)
        return [self[key] for key in keys]

    def expect(self, keys: list[Key]) -> None:
        """Have fetched what `item` will be asked for and is not on this machine."""
        later = keys.later if isinstance(keys, Keys) else ()
        self.images.expect([index for _, index in keys if index != PADDING], later)

    def _load(self, index: int, patches: int | None = None) -> torch.Tensor | Jpeg:
        data = self.images.read(index)
        if not self.is_train:  # decoded and resized as timm's and torchvision's numbers were made
            image = crop_extreme_aspect(self.decoder.pillow(data))
            if patches is None:
                return self.eval_transform(image)
            return aspect.whole(image, self.cfg.interpolation, self.patch, patches)
        header = self.decoder.open(data)
        if self.use_gpu and self.decoder.is_plain_jpeg(header) and data.endswith(b"\xff\xd9"):  # not cut short
            box = crop_box(header, self.cfg)
            return Jpeg(self.images.name(index), data, box, flip=torch.rand(()).item() < self.cfg.hflip)
        image = self.decoder.tensor(data, header)
        if patches is not None:
            return self.augment(aspect.random_crop(image, self.cfg, self.patch, patches))
        image = F.resized_crop(
            image,
            *crop_box(image, self.cfg),
            list(pair(self.cfg.image_size)),
            interpolation=InterpolationMode(self.cfg.interpolation),
            antialias=True,
        )
        return self.augment(image)


def _collate(items: list[tuple[Any, int, list[str]]]) -> tuple[torch.Tensor | Encoded, torch.Tensor, list[str]]:
    """Images, or what the GPU is to decode; labels; failures."""
    content, labels, failures = zip(*items, strict=True)
    labels, failures = torch.tensor(labels), [text for texts in failures for text in texts]
    if any(isinstance(item, Jpeg) for item in content):
        return encode(content), labels, failures
    return default_collate(list(content)), labels, failures


class SyntheticDataset(Dataset):
    """Images of noise in place of files: a few, drawn once and handed out in turn, so that nothing is computed."""

    def __init__(self, num_images: int, shape: tuple[int, int, int], num_classes: int, *, seed: int) -> None:
        self.num_images = num_images
        self.num_classes = num_classes
        generator = torch.Generator().manual_seed(seed)
        self.pool = torch.randint(0, 256, (64, *shape), dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, int, list[str]]:
        _, index = key
        return self.pool[index % len(self.pool)], PADDING if index == PADDING else index % self.num_classes, []


class PackedRows(Dataset):
    """Images of a data set in rows of `data.packing.images_per_row`; indexed by a list of keys, a microbatch.

    In training what is left of a row is shared out evenly among the images that follow, and each becomes as large as
    its aspect ratio allows within that: as rows and columns of patches are whole, it leaves some to the next. Which
    images share a row follows from their positions in the batch.
    In evaluation, where an image's pixels depend on no other one, each has the same share at most. Their order is free:
    they are put into rows of about one length, and the batch's rows are as long as the longest.
    """

    def __init__(self, images: ImageDataset, cfg: Config, *, is_train: bool) -> None:
        self.images, self.is_train = images, is_train
        self.patch, self.prefix = pair(cfg.model.patch_size), cfg.model.num_prefix_tokens()
        self.share = cfg.patches_per_image()
        self.images_per_row, self.tokens_per_row = cfg.data.packing.images_per_row, cfg.tokens_per_row()
        self.longest = _longest_image(cfg)
        self.patch_pixels = cfg.model.in_chans * math.prod(self.patch)
        self.step = max(1, self.tokens_per_row // LENGTHS)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, keys: list[Key]) -> list[Row]:
        """The rows of a microbatch, as torch asks for them."""
        self.images.expect(keys)
        if self.is_train:
            return [self.row(row) for row in _in_rows(keys, self.images_per_row)]
        items = [self.images.item(key, self.share) for key in keys]
        lengths = [math.prod(self._grid(image)) + self.prefix for image, *_ in items]
        rows = even_rows(lengths, self.images_per_row)
        longest = max(sum(lengths[place] for place in row) for row in rows)
        tokens = min(self.tokens_per_row, -(-longest // self.step) * self.step)
        return [self._filled([items[place] for place in row], tokens) for row in rows]

    def row(self, keys: list[Key]) -> Row:
        """The row of these images, in training."""
        items, left = [], self.tokens_per_row
        for number, key in enumerate(keys):
            room = min(left // (len(keys) - number), self.longest) - self.prefix
            items.append(self.images.item(key, room))
            left -= math.prod(self._grid(items[-1][0])) + self.prefix
        return self._filled(items, self.tokens_per_row)

    def _grid(self, image: torch.Tensor) -> Grid:
        return image.shape[1] // self.patch[0], image.shape[2] // self.patch[1]

    def _filled(self, items: list[tuple[torch.Tensor, int, list[str]]], tokens: int) -> Row:
        row = torch.zeros(tokens, self.patch_pixels, dtype=torch.uint8)
        end = 0
        for image, *_ in items:
            patches = aspect.patches_of(image, self.patch)
            start, end = end + self.prefix, end + self.prefix + len(patches)
            row[start:end] = patches
        images, labels, failures = zip(*items, strict=True)
        return row, [self._grid(image) for image in images], list(labels), [text for each in failures for text in each]


def _longest_image(cfg: Config) -> int:
    return longest_image(cfg.tokens_per_row(), cfg.data.packing.images_per_row)


def _in_rows(keys: list[Key], images_per_row: int) -> list[list[Key]]:
    return [keys[start : start + images_per_row] for start in range(0, len(keys), images_per_row)]


class SyntheticRows(Dataset):
    """Rows of noise, a few, in aspect ratios from 2 : 3 to 3 : 2, drawn once and handed out in turn."""

    def __init__(self, num_images: int, cfg: Config, *, seed: int) -> None:
        self.num_images, self.num_classes = num_images, cfg.model.num_classes
        self.images_per_row = cfg.data.packing.images_per_row
        rows = PackedRows(cast(ImageDataset, self), cfg, is_train=True)
        self.channels, self.patch = cfg.model.in_chans, rows.patch
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = [rows.row([(0, 0)] * self.images_per_row) for _ in range(16)]

    def item(self, key: Key, patches: int) -> tuple[torch.Tensor, int, list[str]]:
        """An image of noise."""
        ratio = 1.5 ** (2 * torch.rand((), generator=self.generator).item() - 1)
        size = aspect.size_of((1000, round(1000 * ratio)), self.patch, patches)
        image = torch.randint(0, 256, (self.channels, *size), dtype=torch.uint8, generator=self.generator)
        return image, 0, []

    def __len__(self) -> int:
        return self.num_images

    def __getitems__(self, keys: list[Key]) -> list[Row]:
        """The rows of a microbatch, as torch asks for them."""
        found = []
        for row in _in_rows(keys, self.images_per_row):
            patches, grids, *_ = self.pool[row[0][0] // self.images_per_row % len(self.pool)]
            labels = [PADDING if index == PADDING else index % self.num_classes for _, index in row]
            found.append((patches, grids, labels, []))
        return found


def _collate_rows(longest: int, rows: list[Row]) -> tuple[Packed, torch.Tensor, list[str]]:
    """Rows as one batch, whose images have at most `longest` tokens; labels; failures."""
    patches, grids, labels, failures = zip(*rows, strict=True)
    grids, labels = (torch.tensor([each for row in rows for each in row]) for rows in (grids, labels))
    return Packed(torch.stack(patches), grids, longest), labels, [text for texts in failures for text in texts]


class TrainSampler(Sampler):
    """Microbatches of one rank from `start_step` on: lists of (sample number, index into the data set).

    Args:
        cfg: the run's.
        sizes: the run's.
        order: of each epoch's images.
        rank: this process's.
        start_step: finished updates.
        ahead: images that a batch names with those that come later.
    """

    def __init__(
        self,
        cfg: Config,
        sizes: RunSizes,
        order: Order,
        *,
        rank: int,
        start_step: int,
        ahead: int = 0,
    ) -> None:
        self.sizes, self.global_batch_size = sizes, sizes.global_batch_size
        self.micro_batch_size, self.accumulation = sizes.micro_batch_size, sizes.accumulation
        self.num_images = sizes.num_train_images
        self.repeats = cfg.data.repeated_augmentation
        self.order = functools.lru_cache(maxsize=2)(order)  # a batch can span two epochs
        self.rank = rank
        self.steps = range(start_step, sizes.last_step)
        self.ahead = min(ahead, sizes.num_train_images)

    def __len__(self) -> int:
        return len(self.steps) * self.accumulation

    def __iter__(self) -> Iterator[list[Key]]:
        per_rank = self.micro_batch_size * self.accumulation
        for step in self.steps:
            first = self.sizes.samples_at(step) + self.rank * per_rank
            for start in range(first, first + per_rank, self.micro_batch_size):
                end = start + self.micro_batch_size
                last = max(end, min(start + self.ahead, self.sizes.samples_at(self.steps.stop)))
                indices = self.indices(np.arange(start, last))
                keys = zip(range(start, end), indices[: end - start].tolist(), strict=True)
                yield Keys(keys, indices[end - start :].tolist())

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """The images that these samples of the stream are.

        With repeated augmentation (Hoffer et al., arXiv 1901.09335) a batch has each of its images `repeats` times,
        half a batch and so on apart, and the stream of images goes that much slower; an epoch still is N samples.
        """
        step, position = np.divmod(numbers - self.sizes.first_sample, self.global_batch_size)
        images = self.global_batch_size // self.repeats
        before = self.sizes.first_sample // self.repeats
        epochs, places = np.divmod(before + step * images + position % images, self.num_images)
        found = np.empty_like(numbers)
        for epoch in np.unique(epochs).tolist():
            found[epochs == epoch] = np.asarray(self.order(epoch))[places[epochs == epoch]]
        return found


class EvalSampler(Sampler):
    """Every image once over all ranks, in as many batches of the same size on each; the rest is padding.

    `ahead`: images that a batch names with those that come later.
    """

    def __init__(self, num_images: int, *, batch_size: int, rank: int, world_size: int, ahead: int = 0) -> None:
        self.num_images, self.ahead = num_images, ahead
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return -(-self.num_images // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in range(len(self)):
            first = (batch * self.world_size + self.rank) * self.batch_size
            end = first + self.batch_size
            keys = [(i, i if i < self.num_images else PADDING) for i in range(first, end)]
            yield Keys(keys, range(end, min(first + self.ahead, self.num_images)))


def eval_transform(cfg: DataConfig) -> v2.Transform:
    """PIL image to a uint8 tensor (C, Y, X): resize by crop_pct, centre crop, as timm's create_transform does.

    A square size resizes the short side; a rectangle resizes height and width to the same share each.
    """
    size = pair(cfg.image_size)
    scaled = [int(side / cfg.crop_pct) for side in size]
    resize = scaled[0] if size[0] == size[1] else scaled
    return v2.Compose(
        [
            v2.Resize(resize, interpolation=InterpolationMode(cfg.interpolation), antialias=True),
            v2.CenterCrop(size),
            v2.PILToTensor(),
        ]
    )


class Loader(DataLoader):
    """Batches of (images, labels); says what could not be read, and gives up when that is too much."""

    def __init__(
        self, dataset: Dataset, sampler: Sampler, cfg: Config, *, collate: Callable = _collate, pin_memory: bool = True
    ) -> None:
        if cfg.data.num_workers:
            # A forked worker would destroy the garbage that it inherits, and with a process group or a wrapped model of
            # before (a stage, a test) threads that it has not: seen to end in a segmentation fault.
            gc.collect()
        super().__init__(
            dataset,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=cfg.data.num_workers,
            persistent_workers=cfg.data.num_workers > 0,
            pin_memory=pin_memory and torch.cuda.is_available(),
            timeout=cfg.data.worker_timeout_s if cfg.data.num_workers else 0,
            # A stop is asked of the ranks; workers go on until they end.
            worker_init_fn=functools.partial(preemption.shield, rank=os.getpid()),
            generator=torch.Generator(),  # a loader draws a seed for its workers: not from the run's own generator
        )
        self.cfg = cfg
        self.unreadable: set[str] = set()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        batches = super().__iter__()  # its workers start now, not at the first batch
        _name_this_rank(self.cfg.data)
        return self._readable(batches)

    def _readable(self, batches: Iterator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            try:
                images, labels, failures = next(batches)
            except StopIteration:
                return
            except UnreadableError as error:
                raise error.as_raised() from None
            except RuntimeError as error:
                if not str(error).startswith("DataLoader"):
                    raise
                raise _no_batch(error, self.cfg.data) from error
            for text in failures:
                self._report(text)
            yield images, labels

    def _report(self, text: str) -> None:
        if text in self.unreadable:
            return
        self.unreadable.add(text)
        if len(self.unreadable) > self.cfg.data.max_errors:
            raise UnreadableError(f"{text}; more than data.max_errors={self.cfg.data.max_errors} images cannot be read")
        logger.warning("%s; left out (%d so far)", text, len(self.unreadable))


def _name_this_rank(cfg: DataConfig) -> None:
    """Torch's handler of SIGCHLD raises where the loop happens to be when a worker is killed: as our error, too.

    It outlives the loader, and so must not hold it: its workers would live on.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or hasattr(handler, "names_this_rank"):
        return

    def named(*args: Any) -> None:
        try:
            handler(*args)
        except RuntimeError as error:
            raise _no_batch(error, cfg) from error

    vars(named)["names_this_rank"] = True
    signal.signal(signal.SIGCHLD, named)


def _no_batch(error: RuntimeError, cfg: DataConfig) -> RankError:
    """Torch's words for a worker that was killed, or for one that sends nothing, as our error."""
    reason = str(error).splitlines()[0].rstrip(". ")
    return RankError(
        f"no batch came from the loader processes: {reason}; see the lines above, `dmesg` where memory ran out, "
        f"data.num_workers={cfg.num_workers} and data.worker_timeout_s={cfg.worker_timeout_s}"
    )


def build_loaders(
    cfg: Config, sizes: RunSizes, *, rank: int, start_step: int, resident: torch.Tensor | None = None
) -> tuple[Iterable[Batch], Iterable[Batch]]:
    """The training stream from `start_step` on, a microbatch an item, and the validation set, a batch an item.

    `resident`: the `resident_images` of a stream before it.
    """
    rank = sizes.dp_rank(rank)
    order: Order = functools.partial(seeding.shuffled, sizes.num_train_images, cfg.seed)
    ahead = max(LEAST_AHEAD, 2 * cfg.global_batch_size) if is_bucket(cfg.data.path) else 0
    each_once = EvalSampler(
        sizes.num_val_images, batch_size=sizes.micro_batch_size, rank=rank, world_size=sizes.dp_size, ahead=ahead
    )
    shape = (cfg.model.in_chans, *pair(cfg.data.image_size))
    is_packed = cfg.data.packing.enabled
    collate = functools.partial(_collate_rows, _longest_image(cfg)) if is_packed else _collate
    if cfg.data.source == "synthetic":
        train_set, val_set = (
            SyntheticRows(num_images, cfg, seed=cfg.seed)
            if is_packed
            else SyntheticDataset(num_images, shape, cfg.model.num_classes, seed=cfg.seed)
            for num_images in (sizes.num_train_images, sizes.num_val_images)
        )
        sampler = TrainSampler(cfg, sizes, order, rank=rank, start_step=start_step)
        return Loader(train_set, sampler, cfg, collate=collate), Loader(val_set, each_once, cfg, collate=collate)

    train, val = list_images(cfg.data, "train"), list_images(cfg.data, "val")
    if isinstance(train, tar_shards.Shards):
        order = functools.partial(tar_shards.epoch_order, train, seed=cfg.seed, streams=cfg.data.shard_streams)
    sampler = TrainSampler(cfg, sizes, order, rank=rank, start_step=start_step, ahead=ahead)
    train_set, val_set = (ImageDataset(images, cfg, is_train=images is train) for images in (train, val))
    if is_packed:
        train_set, val_set = (PackedRows(images, cfg, is_train=images is train_set) for images in (train_set, val_set))
    val_loader = Loader(val_set, each_once, cfg, collate=collate)
    if cfg.data.resident:
        decoded = DecodedImages(train, cfg)
        every_image = BatchSampler(range(len(train)), batch_size=512, drop_last=False)
        plans = AugmentationPlans(decoded, cfg)
        planned = Loader(plans, sampler, cfg, collate=collate_plans, pin_memory=False)
        augment = DeviceAugment(plans, cfg, _device())
        train_loader = DeviceCache(Loader(decoded, every_image, cfg), planned, augment, resident)
        shape = (len(val_loader) * sizes.micro_batch_size, *shape)
        return train_loader, CachedBatches(val_loader, shape, _device())
    train_loader = Loader(train_set, sampler, cfg, collate=collate)
    if cfg.data.decoder == "nvjpeg":
        return GpuDecodePrefetcher(train_loader, cfg, _device()), val_loader
    return train_loader, val_loader


def resident_images(loader: Iterable[Batch]) -> torch.Tensor | None:
    """With data.resident: the decoded images of a training stream that was read, uncropped, whatever the image size."""
    return loader.images if isinstance(loader, DeviceCache) else None


def noise(cfg: Config, sizes: RunSizes, device: torch.device) -> torch.Tensor | Packed:
    """A microbatch in the shape of the training's, as the model gets it."""
    channels, images = cfg.model.in_chans, sizes.micro_batch_size
    if not cfg.data.packing.enabled:
        return torch.rand((images, channels, *pair(cfg.model.img_size)), device=device)
    rows, pixels = images // cfg.data.packing.images_per_row, channels * math.prod(pair(cfg.model.patch_size))
    grids = torch.tensor([(1, cfg.patches_per_image())] * images, device=device)
    return Packed(torch.rand((rows, cfg.tokens_per_row(), pixels), device=device), grids, _longest_image(cfg))


def _device() -> torch.device:
    """This process's, which `process_group.dist_session` has chosen."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
