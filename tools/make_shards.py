"""Class folders or Parquet to tar shards in WebDataset's layout, or index files for shards that are there.

    python tools/make_shards.py /data/imagenet /data/imagenet-shards
    python tools/make_shards.py /data/imagenet-1k-parquet /data/imagenet-shards
    python tools/make_shards.py /data/imagenet s3://bucket/imagenet
    python tools/make_shards.py --index /data/imagenet-shards

SOURCE holds train/<class>/<image> and val/<class>/<image>, as data.path of a run; the files go into the shards as
they are. TARGET gets train/train-000000.tar ..., val/val-000000.tar ..., classes.txt and an index for each split: train
on it with data.source=webdataset data.path=TARGET. The order is shuffled by --seed. The same images and options give
the same bytes. A run that was stopped goes on where it was: shards that are whole are kept.

TARGET may be a bucket, with boto3's own variables in the environment: a shard is written to a file below --scratch
first, and uploaded when it is whole.

SOURCE may also hold a Parquet data set in Hugging Face's layout: train*.parquet and validation*.parquet (else
test*.parquet), right there, in data/ or in folders of these names, with columns image {bytes, path} and label, and the
features in the schema. The images are unpacked to files below --scratch first, which takes their size in space once
more until the end.

--index lists shards that other tools made (train/*.tar and val/*.tar, or all in one folder), says what is damaged, and
writes the index files; a folder that is read-only needs them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import Parser, exit_with, number

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from input_pipeline import parquet_images, tar_shards
from input_pipeline.image_folders import scan
from runtime import seeding
from runtime.bucket import Bucket, NoObjectError, is_bucket
from schema import ConfigError

SPLITS = ("train", "val")
OF_ANOTHER = "is of other images, classes, seed or shard size: give those"


@dataclasses.dataclass(frozen=True)
class ImageList:
    """ImageList of one split, in an order that is the same each time.

    Attributes:
        classes: their names.
        names: <class>/<file name> of each image.
        labels: place of its class among `classes`.
        sizes: sizes() are the files' bytes.
        read: read(i) is an image's file.
    """

    classes: tuple[str, ...]
    names: list[str]
    labels: list[int]
    sizes: Callable[[], np.ndarray]
    read: Callable[[int], bytes]


def from_folder(source: str, split: str) -> ImageList:
    """The images that a run with data.path=source would have.

    Raises:
        ConfigError: as `scan` says.
    """
    folder = scan(source, split)
    files = [file for file, _ in folder.samples]
    if folder.skipped:
        print(f"{split}: skipped {folder.skipped}")
    return ImageList(
        classes=folder.classes,
        names=[f"{folder.classes[label]}/{os.path.basename(file)}" for file, label in folder.samples],
        labels=[int(label) for _, label in folder.samples],
        sizes=lambda: np.array([os.path.getsize(file) for file in tqdm(files, "sizes", unit="file", disable=None)]),
        read=lambda index: Path(files[index]).read_bytes(),
    )


def from_parquet(source: str, split: str, scratch: Path, columns: tuple[str, str] | None) -> ImageList:
    """The images of a Parquet data set.

    Raises:
        ConfigError: as `parquet_images.ParquetImages` says.
    """
    found = parquet_images.ParquetImages(source, split, scratch, columns)
    return ImageList(found.classes, found.names, found.labels.tolist(), sizes=lambda: found.sizes, read=found.read)


def keys_of(names: list[str]) -> list[tuple[str, str]]:
    """(key, ending) of each image: WebDataset's keys have no dot in their last part, and none is there twice."""
    taken, keys = set(), []
    for name in names:
        stem, ending = os.path.splitext(name)
        folder, _, stem = stem.rpartition("/")
        first = key = f"{folder}/{stem.replace('.', '_')}"
        number = 0
        while key in taken:  # a.jpg and a.png, or a.b.jpg and a_b.jpg
            number += 1
            key = f"{first}_{number}"
        taken.add(key)
        ending = ending.lower()
        keys.append((key, ".jpg" if ending == ".jpeg" else ending))  # the name that readers of shards ask for
    return keys


def plan(images: ImageList, args: argparse.Namespace) -> list[np.ndarray]:
    """The images of each shard: an order shuffled by the seed, in parts of about equal number or size."""
    order = seeding.permutation(len(images.names), args.seed)
    if args.megabytes_per_shard is None:
        return np.array_split(order, -(-len(order) // args.samples_per_shard))
    sizes = images.sizes()[order]
    number = np.floor((np.cumsum(sizes) - sizes) / (args.megabytes_per_shard * 1e6))
    return np.split(order, np.flatnonzero(np.diff(number)) + 1)


def write_split(target: Path | Bucket, split: str, images: ImageList, args: argparse.Namespace) -> None:
    """Write classes.txt, the shards of one split that are not there yet, and their index.

    Raises:
        ConfigError: the target holds shards of other images, classes or options, or another process writes there.
        OSError: an image cannot be read or a shard cannot be written.
    """
    parts, keys = plan(images, args), keys_of(images.names)
    content = hashlib.sha256()
    for part in parts:
        content.update(json.dumps([(keys[i], images.labels[i]) for i in part]).encode())
    if unfit := [name for name in images.classes if not name or "\n" in name or "\r" in name]:
        raise ConfigError(f"class {unfit[0]!r} cannot stand in classes.txt, one name a line: rename its folder")
    facts = {"pictures": len(keys), "shards": len(parts), "sha256": content.hexdigest()}
    small = {
        "classes.txt": "".join(f"{name}\n" for name in images.classes).encode(errors="surrogateescape"),
        f"{split}.plan.json": (json.dumps(facts) + "\n").encode(),
    }
    work = ShardWork(split, parts, keys, images, workers=args.workers)
    if isinstance(target, Path):
        _write_to_folder(target, split, small, work)
    else:
        _write_to_bucket(target, split, small, work, args.scratch)
    print(f"{split}: {len(keys)} images of {len(images.classes)} classes in {len(parts)} shards, {target}/{split}")


def _write_to_folder(target: Path, split: str, small: dict[str, bytes], work: "ShardWork") -> None:
    (target / split).mkdir(parents=True, exist_ok=True)
    with _alone(target):
        is_ours = (target / f"{split}.plan.json").exists()
        if not is_ours and any((target / split).glob("*.tar")):
            raise ConfigError(f"{target / split} holds shards that this tool did not make: give a new folder")
        for name, data in small.items():
            _agree(target / name, data)
        there = {file.name for file in (target / split).glob("*.tar")}
        work.write(there, lambda name, write: _replace(target / split / name, write))
        tar_shards.make_index(str(target), split)


def _write_to_bucket(
    target: Bucket, split: str, small: dict[str, bytes], work: "ShardWork", scratch: Path | None
) -> None:
    """Two processes at once write the same bytes, or one of them is refused: there is no lock in a bucket."""
    there = {key.removeprefix(f"{split}/"): stored for key, stored in target.list(f"{split}/").items()}
    try:
        target.get(f"{split}.plan.json")
    except NoObjectError:
        if any(name.endswith(".tar") for name in there):
            raise ConfigError(
                f"{target.url(split)} holds shards that this tool did not make: give a new prefix"
            ) from None
    for name, data in small.items():
        if not target.create(name, data):
            raise ConfigError(f"{target.url(name)} {OF_ANOTHER}, or a new prefix")
    listed = []
    with tempfile.TemporaryDirectory(prefix="make_shards-", dir=scratch) as folder:

        def store(name: str, write: Callable[[IO[bytes]], None]) -> None:
            file = Path(folder) / name
            with open(file, "wb") as out:
                write(out)
            target.upload(file, f"{split}/{name}")
            about = tar_shards.Tar(name, file.stat().st_size, 0)
            listed.append(tar_shards.list_shard(Path(folder), about))
            file.unlink()

        work.write(set(there), store)
    now = {tar.name: tar for tar in tar_shards.find(str(target), split)}  # with the ETags
    known = [shard._replace(tar=now[f"{split}/{shard.tar.name}"]) for shard in listed]
    tar_shards.make_index(str(target), split, known)


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    with open(target / ".make_shards.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process makes shards in {target}: wait for it") from None
        yield


def _agree(file: Path, data: bytes) -> None:
    """Write a small file, or see that it is there with the same content."""
    if file.exists():
        if file.read_bytes() != data:
            raise ConfigError(f"{file} {OF_ANOTHER}, or a new folder")
        return
    _replace(file, lambda target: target.write(data))


def _replace(file: Path, write: Callable[[Any], Any]) -> None:
    """Give `file` its name when it is whole on the disk; one name for what is not, so that a kill leaves it once."""
    temporary = file.with_name(f".{file.name}.tmp")
    with open(temporary, "wb") as target:
        write(target)
        target.flush()
        os.fsync(target.fileno())
    os.replace(temporary, file)


class ShardWork:
    """The shards of one split, to be written by some threads.

    Args:
        split: the first part of their names.
        parts: the images of each.
        keys: (key, ending) of each image.
        images: all of the split.
        workers: shards that are written at the same time.
    """

    def __init__(
        self, split: str, parts: list[np.ndarray], keys: list[tuple[str, str]], images: ImageList, *, workers: int
    ) -> None:
        self.split, self.parts, self.keys, self.images, self.workers = split, parts, keys, images, workers
        self._stopped, self._counting = threading.Event(), threading.Lock()

    def write(self, there: set[str], store: Callable[[str, Callable[[IO[bytes]], None]], None]) -> None:
        """Have each shard that is not `there` stored, by its name and a function that writes it to an open file."""
        with (
            tqdm(total=len(self.keys), desc=self.split, unit="image", disable=None) as bar,
            concurrent.futures.ThreadPoolExecutor(self.workers) as threads,
        ):

            def count(number: int) -> None:
                with self._counting:
                    bar.update(number)

            def one(number: int) -> None:
                name, part = f"{self.split}-{number:06d}.tar", self.parts[number]
                if name in there:
                    count(len(part))
                else:
                    store(name, lambda target: self._write_shard(part, target, count))

            try:
                for work in [threads.submit(one, number) for number in range(len(self.parts))]:
                    work.result()
            except BaseException:
                self._stopped.set()
                threads.shutdown(cancel_futures=True)
                raise

    def _write_shard(self, part: np.ndarray, target: IO[bytes], count: Callable[[int], None]) -> None:
        with tarfile.open(fileobj=target, mode="w") as tar:
            for i in part:
                if self._stopped.is_set():
                    raise InterruptedError
                (key, ending), data = self.keys[i], self.images.read(i)
                _add(tar, key + ending, data)
                _add(tar, f"{key}.cls", str(self.images.labels[i]).encode())
                count(1)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # no time, owner or mode of its own: the same image gives the same bytes
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def index(path: str) -> bool:
    """Write the index files of shards that are there and say what they hold; returns whether all is whole.

    Raises:
        ConfigError: there are no shards, or an index cannot be written.
    """
    is_whole = True
    for split in SPLITS:
        listed = tar_shards.make_index(path, split)
        found = tar_shards.load(path, split, "skip")
        print(f"{split}: {len(found)} images of {len(found.classes)} classes in {len(listed)} shards")
        texts, skipped = tar_shards.damage(listed, found.classes)
        for text in texts:
            print(f"{split}: damaged: {text}")
        if skipped:
            print(f"{split}: left out: {skipped}")
        is_whole &= not texts
    if tar_shards.class_names(path) is None:
        print(f"there is no {path}/classes.txt, one class name a line: classes are called 0, 1, 2 ...")
    return is_whole


def add_options(parser: argparse.ArgumentParser) -> None:
    """What shards are made with."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--samples-per-shard", type=number(int, 1), default=1000, metavar="N", help="at most (1000)")
    size.add_argument(
        "--megabytes-per-shard", type=number(float, 0, is_above=True), metavar="MB", help="about, of 10^6 bytes"
    )
    parser.add_argument("--seed", type=number(int, 0), default=0, help="of the order (0)")
    parser.add_argument("--workers", type=number(int, 1), default=8, help="files worked on at the same time (8)")
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="FOLDER",
        help="of a Parquet SOURCE's unpacked images and of shards for a bucket (TARGET/.unpacked; TMPDIR for a bucket)",
    )


def folder_or_bucket(text: str) -> Path | Bucket:
    """What TARGET names."""
    return Bucket.of(text) if is_bucket(text) else Path(text)


def make(args: argparse.Namespace) -> None:
    """Shards of both splits.

    Raises:
        ConfigError: as `from_folder`, `from_parquet` and `write_split` say.
    """
    if is_bucket(args.source):
        raise ConfigError(f"SOURCE={args.source}: images are read from a folder of this machine; download them")
    if args.scratch is not None:
        args.scratch.mkdir(parents=True, exist_ok=True)
    if not parquet_images.is_parquet(args.source):
        if args.columns:
            raise ConfigError(f"--columns is for Parquet, and {args.source} holds no *.parquet: leave it out")
        for split in SPLITS:
            write_split(args.target, split, from_folder(args.source, split), args)
        return
    name = hashlib.sha256(os.path.realpath(args.source).encode()).hexdigest()[:16]
    above = args.target if isinstance(args.target, Path) else Path(tempfile.gettempdir())
    scratch = (args.scratch or above) / f".unpacked-{name}"  # kept by a run that is stopped, for the next one
    for split in SPLITS:
        files = parquet_images.find(args.source, split)
        print(f"{split}: {len(files)} Parquet files, the first is {files[0]}")
        write_split(args.target, split, from_parquet(args.source, split, scratch, args.columns), args)
    shutil.rmtree(scratch)


def main() -> None:
    """Parse and run."""
    parser = Parser(__doc__)
    parser.add_argument("source", metavar="SOURCE", nargs="?")
    parser.add_argument("target", metavar="TARGET", nargs="?", type=folder_or_bucket)
    parser.add_argument("--index", metavar="FOLDER", help="only write the index files of the shards in FOLDER")
    parser.add_argument("--columns", nargs=2, metavar=("IMAGE", "LABEL"), help="of a Parquet SOURCE (image label)")
    add_options(parser)
    args = parser.parse_args()
    if (args.index is None) == (args.target is None):
        parser.error("give SOURCE and TARGET, or --index FOLDER")
    try:
        if args.index is not None:
            sys.exit(0 if index(args.index) else 1)
        make(args)
    except (ConfigError, OSError) as error:
        exit_with(str(error))
    except KeyboardInterrupt:
        exit_with("stopped: the same command again goes on", code=130)


if __name__ == "__main__":
    main()
