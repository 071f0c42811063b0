"""Class folders on a disk: which images there are, in which order, of which classes.

    <path>/train/<class>/<image>    <path>/val/<class>/<image>

Listing ImageNet takes minutes on a network file system, so the list is kept (`_index`).
"""

import concurrent.futures
import contextlib
import csv
import dataclasses
import functools
import gzip
import hashlib
import json
import os
import tarfile
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from input_pipeline import listing_cache
from schema import ConfigError

# What is an image, by the end of its name. Anything else in a class folder is counted and left alone.
IMAGE_EXTENSIONS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}

Sample = tuple[str, int]  # file, label


@dataclasses.dataclass(frozen=True, eq=False)
class Folder:
    """The images of one split, in arrays: lists of a million objects would be copied by every loader process."""

    root: str
    classes: tuple[str, ...]
    files: bytes  # paths below root, one after another
    ends: np.ndarray  # int64, (N + 1): file i is files[ends[i] : ends[i + 1]]
    labels: np.ndarray  # int64, (N)
    skipped: dict[str, int]  # why -> how many entries

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """The image's path."""
        return os.path.join(self.root, os.fsdecode(self.files[self.ends[index] : self.ends[index + 1]]))

    def read(self, index: int) -> bytes:
        """The image's file."""
        with open(self.name(index), "rb") as file:
            return file.read()

    @property
    def samples(self) -> list[Sample]:
        """(path, label) of every image, as a list."""
        return [(self.name(i), int(label)) for i, label in enumerate(self.labels)]


@functools.cache
def scan(path: str, split: str) -> Folder:
    """List one split: classes in the order of their sorted names (as torchvision's ImageFolder), files sorted within.

    The training folder decides the classes, and their numbers, for both splits; a class may be missing in val. Hidden
    folders are no classes; within a class, hidden files, files that are no images by their name, dangling links and
    folders are skipped and counted. ILSVRC's val folder may stay flat, as it was unpacked, if its labels lie beside it
    (`_flat_labels`). The list is kept in <path>/.index, or in the user's cache folder where that cannot be written,
    and is made again when a folder has changed.

    Raises:
        ConfigError: the folder is missing, has no class folders or no images, or a class that training lacks.
    """
    root = _unpacked(Path(path)) / split
    if not root.is_dir():
        raise ConfigError(
            f"data.path={path}: there is no folder {root}; expected <data.path>/train and <data.path>/val"
        )
    return list_folder(root, None if split == "train" else scan(path, "train").classes)


def list_folder(root: Path, classes: tuple[str, ...] | None = None) -> Folder:
    """The images of one folder of class folders; `classes` numbers them, by default their own sorted names.

    Raises:
        ConfigError: as `scan`.
    """
    path, split = root.parent, root.name
    found = tuple(sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")))
    flat = _flat_labels(root, classes) if classes and not found else {}
    if not found and not flat:
        raise ConfigError(
            f"data.path={path}: {root} holds no class folders; expected {split}/<class>/<image>"
            + (f", or a flat {split}/ with val.txt or LOC_val_solution.csv beside it" if classes else "")
        )
    classes = classes or found
    if unknown := sorted(set(found or flat.values()) - set(classes)):
        raise ConfigError(f"data.path={path}: {root / unknown[0]} is a class that the training folder does not have")

    folders = [name for name in classes if name in found] if found else [""]
    with _index(root, [classes, sorted(flat.items())], folders) as index:
        if index.content is None:
            index.content = _list(root, folders, flat, {name: label for label, name in enumerate(classes)})
        files, ends, labels, skipped = index.content
    if not len(labels):
        raise ConfigError(f"data.path={path}: {root} holds no images; skipped: {skipped}")
    return Folder(str(root), classes, files, ends, labels, skipped)


Listed = tuple[bytes, np.ndarray, np.ndarray, dict[str, int]]  # Folder's files, ends, labels, skipped


def _list(root: Path, folders: list[str], flat: dict[str, str], label_of: dict[str, int]) -> Listed:
    """Read the folders, many at a time: on a network file system each waits for an answer."""

    def one(folder: str) -> tuple[list[str], Counter]:
        names, skipped = [], Counter()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                suffix = os.path.splitext(entry.name)[1].lower()
                if entry.name.startswith("."):
                    skipped["hidden"] += 1
                elif suffix not in IMAGE_EXTENSIONS:
                    skipped[f"*{suffix}" if suffix else "no extension"] += 1
                elif not entry.is_file():
                    skipped["dangling link or folder"] += 1
                elif flat and entry.name not in flat:
                    skipped["without a label"] += 1
                else:
                    names.append(entry.name)
        return sorted(names), skipped

    files, labels, skipped = [], [], Counter()
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        for folder, (names, more) in zip(folders, threads.map(one, folders), strict=True):
            files += [os.fsencode(os.path.join(folder, name)) for name in names]
            labels += [label_of[flat[name] if flat else folder] for name in names]
            skipped += more
    ends = np.cumsum([0, *map(len, files)], dtype=np.int64)
    return b"".join(files), ends, np.array(labels, dtype=np.int64), dict(skipped)


def _flat_labels(root: Path, classes: tuple[str, ...]) -> dict[str, str]:
    """File name -> class name of a val folder without class folders, from what is distributed with it.

    Beside `val`: val.txt, lines of a file name and its class, as a name or as the number of the class (Caffe's list,
    which numbers the sorted wnids); or LOC_val_solution.csv (Kaggle's). ILSVRC's own ground truth numbers classes in
    an order of its own; tools/prepare_imagenet.py reads that.

    Raises:
        ConfigError: a line that is not understood.
    """
    text, table = root.parent / "val.txt", root.parent / "LOC_val_solution.csv"
    labels = {}
    if text.is_file():
        for number, line in enumerate(text.read_text().splitlines(), 1):
            name, _, label = line.strip().rpartition(" ")
            if label.isdecimal() and label not in classes and int(label) < len(classes):
                label = classes[int(label)]
            if not name or label not in classes:
                raise ConfigError(f"{text}:{number}: {line!r} is not a file name and one of the training classes")
            labels[os.path.basename(name)] = label
    elif table.is_file():
        with open(table, newline="") as file:
            for row in csv.DictReader(file):
                labels[f"{row['ImageId']}.JPEG"] = row["PredictionString"].split()[0]
    return labels


@dataclasses.dataclass
class _Index:
    """A kept list of files, None if there is none that still holds."""

    content: Listed | None


@contextlib.contextmanager
def _index(root: Path, facts: list[Any], folders: list[str]) -> Iterator[_Index]:
    """The list kept for `root`, read if no folder has changed since, and written if the caller made one.

    A folder changes its time when a file in it comes or goes. One process of a machine makes the list, the others
    wait for it. Where nothing can be written, every process makes its own.
    """
    times = [os.stat(root / folder).st_mtime_ns for folder in folders]
    mark = hashlib.sha256(json.dumps([str(root.absolute()), facts, folders, times]).encode()).hexdigest()
    place = _index_folder(root)
    if place is None:
        yield _Index(None)
        return
    file = place / f"{root.name}.npz"
    with listing_cache.one_process(place / f"{root.name}.lock"):
        kept = _Index(_kept(file, mark))
        was_kept = kept.content is not None
        yield kept
        # A file that comes within the clock's tick of its folder's time would not show.
        if kept.content is not None and not was_kept and time.time_ns() - max(times) > 2e9:
            files, ends, labels, skipped = kept.content
            arrays = {"files": np.frombuffer(files, np.uint8), "ends": ends, "labels": labels}
            listing_cache.write(file, [mark, skipped], arrays)


def _index_folder(root: Path) -> Path | None:
    """Beside the split, where all nodes see it; else in the user's cache folder."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    mine = caches / "vision-transformer-recipe" / hashlib.sha256(str(root.absolute()).encode()).hexdigest()[:16]
    # A user without a home keeps "~" in the path: no place to write to.
    for place in (root.parent / ".index", *([mine] if mine.is_absolute() else [])):
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                return place
    return None


def _kept(file: Path, mark: str) -> Listed | None:
    """The list in a file, if it is of the folders as they are now."""
    if (found := listing_cache.read(file)) is None or found[0][0] != mark:
        return None
    (_, skipped), arrays = found
    return arrays["files"].tobytes(), arrays["ends"], arrays["labels"], skipped


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
        with listing_cache.one_process(path.with_name(path.name + ".lock")):
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
