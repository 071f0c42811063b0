"""Class folders on a disk: which images there are, in which order, of which classes.

    <path>/train/<class>/<image>    <path>/val/<class>/<image>

Listing ImageNet takes minutes on a network file system, so the list is kept (`_index`).
"""

import concurrent.futures
import contextlib
import csv
import dataclasses
import errno
import functools
import gzip
import hashlib
import json
import logging
import os
import tarfile
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from input_pipeline import listing_cache
from schema import ConfigError

logger = logging.getLogger(__name__)
# What is an image, by the end of its name. Anything else in a class folder is counted and left alone.
IMAGE_EXTENSIONS = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff"}
IMAGE_EXTENSIONS |= {".ppm", ".pgm"}
# Folders that systems make by themselves (Synology, macOS, Windows, ext4): no classes, wherever they lie.
SYSTEM_FOLDERS = {"@eaDir", "__MACOSX", "$RECYCLE.BIN", "System Volume Information", "lost+found"}
PASSING_ERRORS = {errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR}  # of network file systems

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

    def expect(self, indices: list[int], later: Sequence[int] = ()) -> None:
        """These are read next, then the later ones: nothing to do, the system reads ahead."""

    def name(self, index: int) -> str:
        """The image's path."""
        return os.path.join(self.root, os.fsdecode(self.files[self.ends[index] : self.ends[index + 1]]))

    def read(self, index: int) -> bytes:
        """The image's file; what a network file system refuses in passing is asked for again, for three seconds.

        Raises:
            OSError: it cannot be read.
        """
        for pause in (0.1, 0.9, 2.0, None):
            try:
                with open(self.name(index), "rb") as file:
                    return file.read()
            except OSError as error:
                if error.errno not in PASSING_ERRORS or pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError

    @property
    def samples(self) -> list[Sample]:
        """(path, label) of every image, as a list."""
        return [(self.name(i), int(label)) for i, label in enumerate(self.labels)]


@functools.cache
def scan(path: str, split: str) -> Folder:
    """List one split: classes in the order of their sorted names (as torchvision's ImageFolder), files sorted within.

    The training folder decides the classes, and their numbers, for both splits; a class may be missing in val. Hidden
    folders and `SYSTEM_FOLDERS` are no classes. Within a class, images may lie in folders of any depth, which are read
    in the order of their names; hidden files, files that are no images by their name, and links to nothing are skipped
    and counted. ILSVRC's val folder may stay flat, as it was unpacked, if its labels lie beside it
    (`_flat_labels`). The list is kept in <path>/.index, or in the user's cache folder where that cannot be written,
    and is made again when a folder has changed.

    Raises:
        ConfigError: the folder is missing, has no class folders or no images, or a class that training lacks; a folder
            cannot be read.
    """
    root = _unpacked(Path(path)) / split
    if not root.is_dir():
        raise ConfigError(
            f"data.path={path}: there is no folder {root}; expected <data.path>/train and <data.path>/val"
        )
    return list_folder(root, None if split == "train" else scan(path, "train").classes)


def list_folder(root: Path, classes: tuple[str, ...] | None = None, *, given: str | None = None) -> Folder:
    """The images of one folder of class folders; `classes` numbers them, by default their own sorted names.

    `given` is the option that complaints name, with its value; None is data.path, which `root` is a split of.

    Raises:
        ConfigError: as `scan`.
    """
    split, given = root.name, given or f"data.path={root.parent}"
    if not root.is_dir():
        raise ConfigError(f"{given}: there is no folder {root}: give one that holds class folders of images")
    found, num_dangling = _class_folders(root, given)
    flat = _flat_labels(root, classes) if classes and not found else {}
    if not found and not flat:
        raise ConfigError(
            f"{given}: {root} holds no class folders; expected {split}/<class>/<image>"
            + (f", or a flat {split}/ with val.txt or LOC_val_solution.csv beside it" if classes else "")
        )
    classes = classes or found
    if unknown := sorted(set(found or flat.values()) - set(classes)):
        raise ConfigError(f"{given}: {root / unknown[0]} is a class that the training folder does not have")

    folders = [name for name in classes if name in found] if found else [""]
    with _index(root, [classes, sorted(flat.items())], folders) as index:
        if index.content is None:
            index.content = _list(root, given, folders, flat, {name: label for label, name in enumerate(classes)})
        files, ends, labels, skipped, _ = index.content
    if not len(labels):
        raise ConfigError(f"{given}: {root} holds no images; skipped: {skipped}")
    if num_dangling:
        skipped = skipped | {"class that is a link to nothing": num_dangling}
    return Folder(str(root), classes, files, ends, labels, skipped)


def _class_folders(root: Path, given: str) -> tuple[tuple[str, ...], int]:
    """Names of the class folders, sorted; and the number of links to nothing, one of which may be meant for one."""
    found, num_dangling = [], 0
    for entry in _entries(root, given):
        if entry.name.startswith(".") or entry.name in SYSTEM_FOLDERS:
            continue
        if _is(entry.is_dir):
            found.append(entry.name)
        elif entry.is_symlink() and not os.path.exists(entry.path):
            num_dangling += 1
            logger.warning("%s is a link to nothing: no class; the labels of those after it move up", entry.path)
    return tuple(sorted(found)), num_dangling


# Folder's files, ends, labels, skipped; and each folder within a class folder, with the times of its last change.
Listed = tuple[bytes, np.ndarray, np.ndarray, dict[str, int], list[tuple[str, int, int]]]


def _list(root: Path, given: str, folders: list[str], flat: dict[str, str], label_of: dict[str, int]) -> Listed:
    """Read the folders, many at a time: on a network file system each waits for an answer.

    Raises:
        ConfigError: a folder cannot be read.
    """

    def one(folder: str) -> tuple[list[str], Counter, list[tuple[str, int, int]]]:
        """Images of a class folder and of those below it; paths from `root`, folder by folder as torchvision has it."""
        by_folder, skipped, below, seen = {}, Counter(), [], set()
        waiting = [folder]
        while waiting:
            here = waiting.pop()
            if (real := os.path.realpath(root / here)) in seen:  # links that lead in a circle
                continue
            seen.add(real)
            if here != folder:
                below.append((here, *_changed(root / here)))
            names = by_folder[here] = []
            for entry in _entries(root / here, given):
                suffix = os.path.splitext(entry.name)[1].lower()
                if entry.name.startswith(".") or entry.name in SYSTEM_FOLDERS:
                    skipped["hidden"] += 1
                elif not flat and _is(entry.is_dir):
                    waiting.append(os.path.join(here, entry.name))
                elif suffix not in IMAGE_EXTENSIONS:
                    skipped[f"*{suffix}" if suffix else "no extension"] += 1
                elif not _is(entry.is_file):
                    skipped["link to nothing"] += 1
                elif flat and entry.name not in flat:
                    skipped["without a label"] += 1
                else:
                    names.append(entry.name)
        images = [os.path.join(here, name) for here in sorted(by_folder) for name in sorted(by_folder[here])]
        return images, skipped, below

    files, labels, skipped, nested = [], [], Counter(), []
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        for folder, (images, more, below) in zip(folders, threads.map(one, folders), strict=True):
            files += [os.fsencode(image) for image in images]
            labels += [label_of[flat[os.path.basename(image)] if flat else folder] for image in images]
            skipped += more
            nested += below
    ends = np.cumsum([0, *map(len, files)], dtype=np.int64)
    return b"".join(files), ends, np.array(labels, dtype=np.int64), dict(skipped), nested


def _entries(folder: Path, given: str) -> list[os.DirEntry]:
    """What a folder holds.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        is_refused = error.errno in (errno.EACCES, errno.EPERM)
        advice = "mend its rights" if is_refused else "see whether it and its file system are still there"
        raise ConfigError(f"{given}: {folder} cannot be read ({error.strerror}): {advice}") from None


def _is(kind: Callable[[], bool]) -> bool:
    """DirEntry.is_file() or is_dir(); a link that leads to itself, which makes them raise, is neither."""
    try:
        return kind()
    except OSError:
        return False


def _changed(folder: Path) -> tuple[int, int]:
    """When files came or went: the folder's time, which a copying tool may set back, and that of its entry."""
    stat = os.stat(folder)
    return stat.st_mtime_ns, stat.st_ctime_ns


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
    times = [_changed(root / folder) for folder in folders]
    mark = hashlib.sha256(json.dumps([str(root.absolute()), facts, folders, times]).encode()).hexdigest()
    place = _index_folder(root)
    if place is None:
        yield _Index(None)
        return
    file = place / f"{root.name}.npz"
    with listing_cache.one_process(place / f"{root.name}.lock"):
        kept = _Index(_kept(root, file, mark))
        was_kept = kept.content is not None
        yield kept
        if kept.content is None or was_kept:
            return
        files, ends, labels, skipped, nested = kept.content
        # A file that comes within the clock's tick of its folder's time would not show.
        newest = max([mtime for mtime, _ in times] + [mtime for _, mtime, _ in nested])
        if time.time_ns() - newest > 2e9:
            arrays = {"files": np.frombuffer(files, np.uint8), "ends": ends, "labels": labels}
            listing_cache.write(file, [mark, skipped, nested], arrays)


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


def _kept(root: Path, file: Path, mark: str) -> Listed | None:
    """The list in a file, if it is of the folders as they are now."""
    if (found := listing_cache.read(file)) is None or found[0][0] != mark:
        return None
    (_, skipped, nested), arrays = found
    nested = [(folder, mtime, ctime) for folder, mtime, ctime in nested]
    try:
        if any(_changed(root / folder) != (mtime, ctime) for folder, mtime, ctime in nested):
            return None
    except OSError:  # a folder is gone
        return None
    return arrays["files"].tobytes(), arrays["ends"], arrays["labels"], skipped, nested


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
