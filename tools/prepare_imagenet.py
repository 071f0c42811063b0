"""ILSVRC2012's own archives to class folders, or straight to tar shards.

    python tools/prepare_imagenet.py /downloads /data/imagenet
    python tools/prepare_imagenet.py /downloads /data/imagenet-shards --shards

ARCHIVES is the folder that holds them, as they were downloaded:

    ILSVRC2012_img_train.tar         1000 tars of one class each
    ILSVRC2012_img_val.tar           50,000 images in one folder
    ILSVRC2012_devkit_t12.tar.gz     their classes; needed for val

TARGET gets train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, or what tools/make_shards.py makes of these folders, to the byte
(--shards), for which it may be a bucket, s3://bucket/prefix. Nothing else is written: the archives are read in place.
An image has its name when it is whole, and a run that was stopped goes on where it was. At the end the images are
counted; what is missing is said, with exit code 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import Parser, exit_with

import argparse
import concurrent.futures
import io
import os
import re
import tarfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from timm.data import ImageNetInfo
from tqdm import tqdm

import make_shards
from runtime.bucket import Bucket
from schema import ConfigError

TRAIN, VAL, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
DEVKIT_FILES = ("meta.mat", "ILSVRC2012_validation_ground_truth.txt")  # in its folder data
WNIDS = tuple(sorted(ImageNetInfo().label_names()))
NUM_IMAGES = {"train": 1_281_167, "val": 50_000}


class ArchivedImage(NamedTuple):
    """Where an image lies in an archive."""

    wnid: str
    name: str
    offset: int
    size: int

    def read(self, descriptor: int) -> bytes:
        """The image's file, from the archive's."""
        data = os.pread(descriptor, self.size, self.offset)
        if len(data) != self.size:
            raise OSError(f"the archive ended within {self.name}: it has changed meanwhile")
        return data


class Devkit(NamedTuple):
    """What the development kit says."""

    val_wnids: list[str]  # of image 1, 2, ...
    num_train: dict[str, int]  # wnid -> images


def read_devkit(archive: Path) -> Devkit:
    """The classes of the validation images.

    data/ILSVRC2012_validation_ground_truth.txt has a number a line, of an order that data/meta.mat defines: that of
    the sorted wnids is another.

    Raises:
        ConfigError: the archive is not what it should be, or scipy, which reads meta.mat, is missing.
    """
    try:
        from scipy.io import loadmat
    except ImportError:
        raise ConfigError(f"scipy is not installed, which reads meta.mat of {DEVKIT}: pip install scipy") from None
    files = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = os.path.basename(member.name)
                if name in DEVKIT_FILES and (file := tar.extractfile(member)) is not None:
                    files[name] = file.read()
        synsets = loadmat(io.BytesIO(files["meta.mat"]), squeeze_me=True)["synsets"]
        leaves = [synset for synset in synsets if synset["num_children"] == 0]  # the others are their hypernyms
        wnids = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in leaves}
        numbers = files["ILSVRC2012_validation_ground_truth.txt"].split()
        return Devkit(
            val_wnids=[wnids[int(number)] for number in numbers],
            num_train={str(synset["WNID"]): int(synset["num_train_images"]) for synset in leaves},
        )
    except (OSError, EOFError, zlib.error, tarfile.TarError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{archive} cannot be read, download it again ({type(error).__name__}: {reason})") from error


def members(file: Any, *, length: int, name: str) -> Iterator[tarfile.TarInfo]:
    """The files in a tar of `length` bytes.

    Raises:
        ConfigError: the tar is damaged or cut short.
    """
    end, last = 0, "its start"
    try:
        for member in tarfile.TarFile(fileobj=file):
            end, last = member.offset_data + -(-member.size // 512) * 512 * member.isreg(), member.name
            if end > length:
                raise ConfigError(f"{name} is cut short within {member.name}: download it again")
            if member.isreg():
                yield member
    except tarfile.TarError as error:
        raise ConfigError(f"{name} is damaged after {last}, download it again: {error}") from error
    file.seek(end)  # where tarfile ends silently at anything that is no header
    if file.read(512).strip(b"\0"):
        raise ConfigError(f"{name} is damaged after {last}: download it again")


class TrainArchive:
    """ILSVRC2012_img_train.tar: a tar of one tar a class."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            found = list(members(file, length=path.stat().st_size, name=path.name))
        self.parts = {member.name.removesuffix(".tar"): member for member in found}
        if unknown := sorted(set(self.parts) - set(WNIDS)):
            raise ConfigError(f"{path} holds {unknown[0]}, which is no class of ILSVRC2012: is it another archive?")
        self.num_bytes = sum(member.size for member in found)

    def images(self, part: str) -> Iterator[ArchivedImage]:
        """Of the class `part`, in the order of the archive."""
        whole = self.parts[part]
        with tarfile.open(self.path, "r:") as outer:
            inner = outer.extractfile(whole)
            assert inner is not None  # `members` gives regular files only
            for member in members(inner, length=whole.size, name=f"{self.path.name}: {whole.name}"):
                offset = whole.offset_data + member.offset_data
                yield ArchivedImage(part, os.path.basename(member.name), offset, member.size)


class ValArchive:
    """ILSVRC2012_img_val.tar: all images in one folder."""

    def __init__(self, path: Path, devkit: Devkit) -> None:
        self.path, self.devkit = path, devkit
        self.parts = ("",)
        self.num_bytes = path.stat().st_size

    def images(self, part: str) -> Iterator[ArchivedImage]:
        """All, in the order of the archive."""
        with open(self.path, "rb") as file:
            for member in members(file, length=self.num_bytes, name=self.path.name):
                name = os.path.basename(member.name)
                number = re.fullmatch(r"ILSVRC2012_val_(\d{8})\.JPEG", name)
                if number is None or not 1 <= int(number[1]) <= len(self.devkit.val_wnids):
                    raise ConfigError(f"{self.path} holds {name}, which has no label in {DEVKIT}")
                yield ArchivedImage(self.devkit.val_wnids[int(number[1]) - 1], name, member.offset_data, member.size)


Archive = TrainArchive | ValArchive


def visit(
    archive: Archive, split: str, visitor: Callable[[int, ArchivedImage], None], workers: int
) -> list[ArchivedImage]:
    """Call visitor(descriptor of the archive, image) for each image, a class a thread; returns all."""
    descriptor = os.open(archive.path, os.O_RDONLY)
    stopped, counting = threading.Event(), threading.Lock()
    with (
        tqdm(total=archive.num_bytes, desc=split, unit="B", unit_scale=True, disable=None) as bar,
        concurrent.futures.ThreadPoolExecutor(workers) as threads,
    ):

        def one(part: str) -> list[ArchivedImage]:
            found = []
            for image in archive.images(part):
                if stopped.is_set():
                    raise InterruptedError
                visitor(descriptor, image)
                found.append(image)
                with counting:
                    bar.update(image.size)
            return found

        try:
            work = [threads.submit(one, part) for part in archive.parts]
            return [image for done in work for image in done.result()]
        except BaseException:
            stopped.set()
            threads.shutdown(cancel_futures=True)
            raise
        finally:
            os.close(descriptor)


def to_folders(archive: Archive, target: Path, split: str, workers: int) -> list[ArchivedImage]:
    """Write the images that are not there yet, each under a temporary name first."""
    for wnid in WNIDS:
        (target / split / wnid).mkdir(parents=True, exist_ok=True)

    def write(descriptor: int, image: ArchivedImage) -> None:
        file = target / split / image.wnid / image.name
        if file.exists() and file.stat().st_size == image.size:
            return
        temporary = file.with_name(f".{file.name}.tmp")  # not written_whole: a wait for the disk, 1.3 million times
        temporary.write_bytes(image.read(descriptor))
        os.replace(temporary, file)

    return visit(archive, split, write, workers)


def to_shards(archive: Archive, target: Path | Bucket, split: str, args: argparse.Namespace) -> list[ArchivedImage]:
    """List the archive, then read it in the order of the shards."""
    found = visit(archive, f"list of {split}", lambda *_: None, args.workers)
    found.sort(key=lambda image: (image.wnid, image.name))
    label = {wnid: number for number, wnid in enumerate(WNIDS)}
    with open(archive.path, "rb") as file:
        images = make_shards.ImageList(
            classes=WNIDS,
            names=[f"{image.wnid}/{image.name}" for image in found],
            labels=[label[image.wnid] for image in found],
            sizes=lambda: np.array([image.size for image in found]),
            read=lambda i: found[i].read(file.fileno()),
        )
        make_shards.write_split(target, split, images, args)
    return found


def missing(split: str, found: list[ArchivedImage], devkit: Devkit | None) -> list[str]:
    """What ILSVRC2012 has and `found` lacks, a line each."""
    count, lines = Counter(image.wnid for image in found), []
    if absent := [wnid for wnid in WNIDS if wnid not in count]:
        lines.append(f"{split}: {len(WNIDS) - len(absent)} of {len(WNIDS)} classes, no {_some(absent)}")
    if len(found) != NUM_IMAGES[split]:
        lines.append(f"{split}: {len(found):,} of {NUM_IMAGES[split]:,} images")
        if split == "val":
            names = {image.name for image in found}
            wanted = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, NUM_IMAGES[split] + 1)]
            lines.append(f"{split}: no {_some([name for name in wanted if name not in names])}")
        elif devkit is not None:
            wrong = [(wnid, number) for wnid, number in devkit.num_train.items() if count[wnid] != number]
            lines.append(f"{split}: {_some([f'{count[wnid]} of {number} of {wnid}' for wnid, number in wrong])}")
    return lines


def _some(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def prepare(args: argparse.Namespace) -> list[str]:
    """Do it; returns what is missing, a line each.

    Raises:
        ConfigError: an archive is missing, damaged, or another one than it should be.
        OSError: a file cannot be read or written.
    """
    if isinstance(args.target, Bucket) and not args.shards:
        raise ConfigError(f"TARGET={args.target}: class folders are written to a folder of this machine; give --shards")
    needed = {"train": [TRAIN], "val": [VAL, DEVKIT]}
    names = [name for split in args.splits for name in needed[split]]
    if absent := [name for name in names if not (args.archives / name).is_file()]:
        raise ConfigError(
            f"{args.archives} lacks {', '.join(absent)}: download ILSVRC2012 from https://image-net.org, or give "
            "--splits train or --splits val"
        )
    devkit = read_devkit(args.archives / DEVKIT) if "val" in args.splits else None
    lines = []
    for split in args.splits:
        if split == "train":
            archive = TrainArchive(args.archives / TRAIN)
        else:
            assert devkit is not None  # read above
            archive = ValArchive(args.archives / VAL, devkit)
        if args.shards or not isinstance(args.target, Path):
            found = to_shards(archive, args.target, split, args)
        else:
            found = to_folders(archive, args.target, split, args.workers)
            print(f"{split}: {len(found):,} images of {len({p.wnid for p in found})} classes, {args.target / split}")
        lines += missing(split, found, devkit)
    return lines


def main() -> None:
    """Parse, work, say what is missing."""
    parser = Parser(__doc__)
    parser.add_argument("archives", metavar="ARCHIVES", type=Path)
    parser.add_argument("target", metavar="TARGET", type=make_shards.folder_or_bucket)
    parser.add_argument("--splits", nargs="+", choices=("train", "val"), default=["train", "val"])
    parser.add_argument("--shards", action="store_true", help="write tar shards in place of class folders")
    make_shards.add_options(parser)
    try:
        lines = prepare(parser.parse_args())
    except (ConfigError, OSError) as error:
        exit_with(str(error))
    except KeyboardInterrupt:
        exit_with("stopped: the same command again goes on", code=130)
    if lines:
        exit_with(f"incomplete, download the archives again: {'; '.join(lines)}", code=1)


if __name__ == "__main__":
    main()
