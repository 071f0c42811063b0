"""Class folders to batches, in an order that is a function of (seed, step) alone.

    <path>/train/<class>/<picture>    <path>/val/<class>/<picture>

The training set is one endless stream of samples. Sample n = step x global batch + position; its epoch is n // N, its
place in that epoch's permutation n % N, and its augmentation follows from (seed, n). So neither the worker count, nor
the world size, nor the number of resumes can change what a step sees, and no loader state is ever saved: a resumed run
starts the stream at its step. Batches are uint8 (B, C, Y, X); they are normalised on the device.
"""

from schema import Config, ConfigError, DataConfig, micro_batch, pair

import contextlib
import dataclasses
import fcntl
import functools
import gzip
import math
import random
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import InterpolationMode, v2

import preemption

# What is a picture, by the end of its name. Anything else in a class folder is counted and left alone.
IMAGE_EXTENSIONS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
PADDING = -1  # label of the images that fill up the last validation batch; they count for nothing

Sample = tuple[str, int]  # file, label


@dataclasses.dataclass(frozen=True)
class Folder:
    """The pictures of one split."""

    classes: tuple[str, ...]
    samples: list[Sample]
    skipped: dict[str, int]  # why -> how many entries


def check(cfg: Config) -> None:
    """Everything about the data that must be right before a process group starts.

    Raises:
        ConfigError: a folder is missing or empty, it has more classes than the model, a validation class is unknown to
            the training set, or the training set is smaller than one batch.
    """
    num_train, _, classes = sizes(cfg)
    if len(classes) > cfg.model.num_classes:
        raise ConfigError(
            f"data.path={cfg.data.path} has {len(classes)} classes, model.num_classes={cfg.model.num_classes}: "
            f"set model.num_classes={len(classes)}"
        )
    if num_train < cfg.global_batch_size:
        raise ConfigError(
            f"global_batch_size={cfg.global_batch_size} is more than the {num_train} training images of "
            f"{cfg.data.path or 'data.num_synthetic_train'}: use at most {num_train}"
        )
    if num_train_steps(cfg) < 1:
        raise ConfigError(f"num_epochs={cfg.num_epochs} of {num_train} images is less than one step: train longer")


def num_train_steps(cfg: Config) -> int:
    """Optimizer updates of the run: as given, or floor(epochs x images / global batch)."""
    if cfg.num_train_steps is not None:
        return cfg.num_train_steps
    # The number as it was typed: 4.1 x 60 / 2 is 123, in floats a little less.
    return math.floor(Fraction(str(cfg.num_epochs)) * sizes(cfg)[0] / cfg.global_batch_size)


def sizes(cfg: Config) -> tuple[int, int, tuple[str, ...]]:
    """Training images, validation images, class names."""
    if cfg.data.source == "synthetic":
        return cfg.data.num_synthetic_train, cfg.data.num_synthetic_val, ()
    train = scan(cfg.data.path, "train")
    return len(train.samples), len(scan(cfg.data.path, "val").samples), train.classes


@functools.cache
def scan(path: str, split: str) -> Folder:
    """List one split: classes in the order of their sorted names (as torchvision's ImageFolder), files sorted within.

    The training folder decides the classes, and their numbers, for both splits; a class may be missing in val. Hidden
    folders are no classes; within a class, hidden files, files that are no pictures by their name, dangling links and
    folders are skipped and counted.

    Raises:
        ConfigError: the folder is missing, has no class folders or no pictures, or a class that training lacks.
    """
    root = _unpacked(Path(path)) / split
    if not root.is_dir():
        raise ConfigError(
            f"data.path={path}: there is no folder {root}; expected <data.path>/train and <data.path>/val"
        )
    found = tuple(sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")))
    classes = found if split == "train" else scan(path, "train").classes
    if not found:
        raise ConfigError(f"data.path={path}: {root} holds no class folders; expected {split}/<class>/<picture>")
    if unknown := sorted(set(found) - set(classes)):
        raise ConfigError(f"data.path={path}: {root / unknown[0]} is a class that the training folder does not have")

    samples, skipped = [], Counter()
    for label, name in enumerate(classes):
        for file in sorted((root / name).iterdir()) if (root / name).is_dir() else ():
            if file.name.startswith("."):
                skipped["hidden"] += 1
            elif file.suffix.lower() not in IMAGE_EXTENSIONS:
                skipped[f"*{file.suffix.lower()}" if file.suffix else "no extension"] += 1
            elif not file.is_file():
                skipped["dangling link or folder"] += 1
            else:
                samples.append((str(file), label))
    if not samples:
        raise ConfigError(f"data.path={path}: {root} holds no pictures; skipped: {dict(skipped)}")
    return Folder(classes, samples, dict(skipped))


def _unpacked(path: Path) -> Path:
    """`path`, unpacked from <path>.tar.gz beside it if the folder is not there yet.

    Safe with several ranks and several jobs: one unpacks, under a lock, into a temporary folder that is renamed when it
    is whole; the others wait for it.

    Raises:
        ConfigError: the archive cannot be unpacked there.
    """
    path = path.absolute()
    archive = path.parent / f"{path.name}.tar.gz"
    if path.exists() or not archive.is_file():
        return path
    try:
        with open(path.with_name(path.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
                with gzip.open(archive) as content, tarfile.open(fileobj=content, mode="r:") as tar:
                    # The safe filter where this Python has it (3.10.12, 3.11.4 and later).
                    tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
                    tar.extractall(folder)
                    while content.read(2**20):  # to the end, where the checksum is
                        pass
                (Path(folder) / path.name).rename(path)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"data.path={path}: cannot unpack {archive} there: {reason}") from error
    return path


class FolderDataset(Dataset):
    """Decoded, cropped uint8 pictures (C, Y, X) with their labels; indexed by (sample number, index)."""

    def __init__(self, samples: list[Sample], transform: v2.Transform, *, seed: int, in_chans: int) -> None:
        self.samples = samples
        self.transform = transform
        self.seed = seed
        self.mode = "L" if in_chans == 1 else "RGB"

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        number, index = key
        if index == PADDING:
            index, label = 0, PADDING
        else:
            label = self.samples[index][1]
        with seeded(self.seed, number):
            return self.transform(self._decode(self.samples[index][0])), label

    def _decode(self, file: str) -> Image.Image:
        try:
            with Image.open(file) as image:
                return image.convert(self.mode)
        except Exception as error:  # a decoder may raise anything; what the user needs is the file's name
            raise OSError(f"cannot read {file}: {type(error).__name__}: {error}") from error


class SyntheticDataset(Dataset):
    """Pictures of noise in place of files: a few, drawn once and handed out in turn, so that nothing is computed."""

    def __init__(self, num_images: int, shape: tuple[int, int, int], num_classes: int, *, seed: int) -> None:
        self.num_images = num_images
        self.num_classes = num_classes
        generator = torch.Generator().manual_seed(seed)
        self.pool = torch.randint(0, 256, (64, *shape), dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        _, index = key
        return self.pool[index % len(self.pool)], PADDING if index == PADDING else index % self.num_classes


@contextlib.contextmanager
def seeded(seed: int, number: int) -> Iterator[None]:
    """Torch's, NumPy's and Python's generators at a point that follows from (seed, number); the caller's come back."""
    state = np.random.SeedSequence([seed, number]).generate_state(3).tolist()
    torch_cpu = torch.default_generator  # not torch.manual_seed: it seeds every accelerator too, 0.5 ms a picture
    before = torch_cpu.get_state(), np.random.get_state(), random.getstate()
    torch_cpu.manual_seed(state[0])
    np.random.seed(state[1])
    random.seed(state[2])
    try:
        yield
    finally:
        torch_cpu.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


class TrainSampler(Sampler):
    """Microbatches of one rank from `start_step` on: lists of (sample number, index into the data set)."""

    def __init__(self, cfg: Config, num_images: int, *, rank: int, world_size: int, start_step: int) -> None:
        self.seed = cfg.seed
        self.global_batch_size = cfg.global_batch_size
        self.micro_batch_size, self.accumulation = micro_batch(cfg, world_size)
        self.num_images = num_images
        self.rank = rank
        self.steps = range(start_step, num_train_steps(cfg))

    def __len__(self) -> int:
        return len(self.steps) * self.accumulation

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        per_rank = self.micro_batch_size * self.accumulation
        for step in self.steps:
            first = step * self.global_batch_size + self.rank * per_rank
            for start in range(first, first + per_rank, self.micro_batch_size):
                yield [(n, self.index(n)) for n in range(start, start + self.micro_batch_size)]

    def index(self, number: int) -> int:
        """The image that sample `number` of the stream is."""
        epoch, place = divmod(number, self.num_images)
        return int(self._permutation(epoch)[place])

    @functools.lru_cache(maxsize=2)  # noqa: B019  (a batch can span two epochs; a sampler lives as long as its run)
    def _permutation(self, epoch: int) -> torch.Tensor:
        seed = np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)[0]
        return torch.randperm(self.num_images, generator=torch.Generator().manual_seed(int(seed >> 1)))


class EvalSampler(Sampler):
    """Every image once over all ranks, in as many batches of the same size on each; the rest is padding."""

    def __init__(self, num_images: int, *, batch_size: int, rank: int, world_size: int) -> None:
        self.num_images = num_images
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return -(-self.num_images // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in range(len(self)):
            first = (batch * self.world_size + self.rank) * self.batch_size
            yield [(i, i if i < self.num_images else PADDING) for i in range(first, first + self.batch_size)]


def train_transform(cfg: DataConfig) -> v2.Transform:
    """PIL picture to a uint8 tensor (C, Y, X): random resized crop, flip."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(
                pair(cfg.image_size),
                scale=cfg.crop_scale,
                ratio=cfg.crop_ratio,
                interpolation=InterpolationMode(cfg.interpolation),
                antialias=True,
            ),
            v2.RandomHorizontalFlip(cfg.hflip),
            v2.PILToTensor(),
        ]
    )


def eval_transform(cfg: DataConfig) -> v2.Transform:
    """PIL picture to a uint8 tensor (C, Y, X): resize by crop_pct, centre crop, as timm's create_transform does.

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


def _dataset(cfg: Config, split: str) -> Dataset:
    if cfg.data.source == "synthetic":
        num_images = cfg.data.num_synthetic_train if split == "train" else cfg.data.num_synthetic_val
        shape = (cfg.model.in_chans, *pair(cfg.data.image_size))
        return SyntheticDataset(num_images, shape, cfg.model.num_classes, seed=cfg.seed)
    transform = train_transform(cfg.data) if split == "train" else eval_transform(cfg.data)
    samples = scan(cfg.data.path, split).samples
    return FolderDataset(samples, transform, seed=cfg.seed, in_chans=cfg.model.in_chans)


def build_loaders(cfg: Config, *, rank: int, world_size: int, start_step: int) -> tuple[DataLoader, DataLoader]:
    """The training stream from `start_step` on, a microbatch an item, and the validation set, a batch an item."""
    train_set, val_set = _dataset(cfg, "train"), _dataset(cfg, "val")
    micro, _ = micro_batch(cfg, world_size)
    samplers = (
        TrainSampler(cfg, len(train_set), rank=rank, world_size=world_size, start_step=start_step),
        EvalSampler(len(val_set), batch_size=micro, rank=rank, world_size=world_size),
    )
    options = {
        "num_workers": cfg.data.num_workers,
        "persistent_workers": cfg.data.num_workers > 0,
        "pin_memory": torch.cuda.is_available(),
        "worker_init_fn": preemption.shield,  # a stop is asked of the ranks; workers go on until they end
        "generator": torch.Generator(),  # a loader draws a seed for its workers: not from the run's own generator
    }
    return tuple(
        DataLoader(dataset, batch_sampler=sampler, **options)
        for dataset, sampler in zip((train_set, val_set), samplers, strict=True)
    )
