"""Images in tar shards, WebDataset's layout, read at any place without a scan.

    <path>/train/*.tar    <path>/val/*.tar        or all in one folder: <path>/*train*.tar, <path>/*val*.tar
    <path>/classes.txt    the classes' names, one a line, the first is class 0; without it they are called 0, 1, 2 ...
    <path>/train.index.npz, <path>/val.index.npz  made from the shards where missing or older than one of them

In a shard `<key>.<image ending>` is an image and `<key>.cls` its class number; a key ends at the first dot of the
file's name. Other files of a key are left alone. The index says where in its tar each image lies, so that any process
reads any image with one `pread`, and `epoch_order` says in which order: a function of (seed, epoch), so that there is
no state of a reader to save, and worker count, world size and resumes change nothing.

<path> may be a bucket, s3://bucket/prefix, with the same names below the prefix. Then a run only reads: the index has
to be there, made by tools/make_shards.py, and the shards have to be those that it lists, by size and ETag.
"""

import concurrent.futures
import functools
import io
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from input_pipeline import listing_cache
from input_pipeline.block_cache import BlockCache, Extent, Room
from input_pipeline.image_folders import IMAGE_EXTENSIONS
from runtime import bucket, seeding
from runtime.bucket import Bucket, BucketError, NoObjectError, Stored
from runtime.files import written_whole
from schema import ConfigError

OPEN_SHARDS = 256  # files that a process holds open at most; a common limit is 1024
THREADS = 16  # shards that are listed at the same time: on a network file system each waits for answers
LISTED_AT_ONCE = 8 * 2**20  # bytes of a request that lists a shard in a bucket: a header lies before each image
IN_THE_ENVIRONMENT = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL in the environment"

# As WebDataset splits a name: folders may have dots, the last part of a key has none.
KEY = re.compile(r"(?P<key>(?:.*/|)[^.]+)\.(?P<ending>[^/]*)", re.DOTALL)
ROW = np.dtype([("offset", np.int64), ("size", np.int64), ("label", np.int64), ("key_size", np.int64)])

CUT = "shards cut short"
NO_LABEL = "samples without a label"
NO_IMAGE = "samples without an image"
NOT_A_NUMBER = "labels that are no class number"
TWICE = "keys that a shard has twice"
OUTSIDE = "labels outside the classes"
STRAY = "hidden or without an ending"  # the one that is no damage


class Tar(NamedTuple):
    """A shard as the file system or the bucket shows it; `name` is below data.path."""

    name: str
    size: int
    version: int | str  # when it was changed last, in ns; its ETag


class Listed(NamedTuple):
    """What a shard holds. `found`: kind of damage -> how often, and a text that names the first."""

    tar: Tar
    rows: np.ndarray  # of ROW, in the order of the images in the file
    keys: bytes  # one after another
    found: dict[str, tuple[int, str]]


class Shards:
    """The images of one split, in arrays: lists of a million objects would be copied by every loader process.

    Attributes:
        classes: their names; a label is a place among them.
        labels: int64, (N).
        skipped: why -> how many were left out.
        files: the shards' paths.
        shard: int64, (N): which of `files` holds an image; ascending, and within a file in the file's order.
    """

    def __init__(
        self, path: Path | Bucket, listed: list[Listed], classes: tuple[str, ...], skipped: dict[str, int]
    ) -> None:
        rows = np.concatenate([shard.rows for shard in listed])
        ends = np.cumsum(rows["key_size"])
        is_kept = rows["label"] < len(classes)
        self.classes, self.skipped = classes, skipped
        self.files = tuple(_address(path, shard.tar) for shard in listed)
        self.shard = np.repeat(np.arange(len(listed)), [len(shard.rows) for shard in listed])[is_kept]
        self.labels = rows["label"][is_kept]
        self._offsets, self._sizes = rows["offset"][is_kept], rows["size"][is_kept]
        self._keys = b"".join(shard.keys for shard in listed)
        self._key_starts, self._key_ends = (ends - rows["key_size"])[is_kept], ends[is_kept]
        self._open = functools.lru_cache(OPEN_SHARDS)(_File)

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open = functools.lru_cache(OPEN_SHARDS)(_File)

    def expect(self, indices: list[int], later: Sequence[int] = ()) -> None:
        """These are read next, then the later ones: nothing to do, the system reads ahead."""

    def name(self, index: int) -> str:
        """The image's shard and key, for messages."""
        key = self._keys[self._key_starts[index] : self._key_ends[index]]
        return f"{self.files[self.shard[index]]}: {os.fsdecode(key)}"

    def read(self, index: int) -> bytes:
        """The image's file.

        Raises:
            OSError: the shard cannot be read or has become shorter; the text need not name it, `name` does.
        """
        file = self._open(self.files[self.shard[index]])  # a name keeps it open while another thread opens more
        data = os.pread(file.descriptor, self._sizes[index], self._offsets[index])
        if len(data) < self._sizes[index]:
            raise OSError("the shard ends before the image does: it has changed since this run started")
        return data


class BucketShards(Shards):
    """The same, of shards in a bucket."""

    def __init__(
        self,
        path: Bucket,
        listed: list[Listed],
        classes: tuple[str, ...],
        skipped: dict[str, int],
        room: Room,
    ) -> None:
        super().__init__(path, listed, classes, skipped)
        objects = [(shard.tar.name, Stored(shard.tar.size, str(shard.tar.version))) for shard in listed]
        self._blocks = BlockCache(path, objects, room)

    def expect(self, indices: list[int], later: Sequence[int] = ()) -> None:
        """These are read next, then the later ones: fetch what holds them."""
        self._blocks.expect(self._extents(indices), self._extents(later))

    def _extents(self, indices: Sequence[int]) -> list[Extent]:
        places = np.asarray(indices, np.int64)
        return list(zip(*(each[places].tolist() for each in (self.shard, self._offsets, self._sizes)), strict=True))

    def read(self, index: int) -> bytes:
        """The image's file.

        Raises:
            OSError: the shard cannot be read or was replaced; the text need not name it, `name` does.
        """
        return self._blocks.read(int(self.shard[index]), int(self._offsets[index]), int(self._sizes[index]))


class _File:
    """A file that is open as long as somebody holds this; a forked process may read it too, `pread` has no position."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` is gone when Python ends
        if hasattr(self, "descriptor"):
            close(self.descriptor)


def epoch_order(shards: Shards, epoch: int, *, seed: int, streams: int) -> np.ndarray:
    """Sample of each place of an epoch: int64, (N), every sample once.

    The shards, permuted by (seed, epoch), lie one after another on a tape, which is cut into `streams` pieces whose
    lengths differ by at most one. Place p has sample p // streams of piece p % streams. So a batch comes from `streams`
    places that move through their shards from start to end. Neighbours within a shard stay neighbours on the tape: the
    samples must have been shuffled when the shards were made.
    """
    first = np.searchsorted(shards.shard, np.arange(len(shards.files) + 1)).tolist()
    order = seeding.permutation(len(shards.files), seed, epoch)
    tape = np.concatenate([np.arange(first[shard], first[shard + 1]) for shard in order])
    length, longer = divmod(len(tape), streams)  # the first `longer` pieces have one more
    place = np.arange(len(tape))
    piece = place % streams
    return tape[piece * length + np.minimum(piece, longer) + place // streams]


@functools.cache
def load(
    path: str,
    split: str,
    on_error: Literal["raise", "skip"],
    *,
    default_classes: tuple[str, ...] = (),
    room: Room | None = None,
) -> Shards:
    """The images of one split; makes the index first where that is needed and <path> is a folder.

    Classes come from classes.txt; without it they are `default_classes`, or else the numbers from 0 to the highest in
    the training shards.
    `on_error` says what happens to damage: a shard that is cut short, a sample without image or label, a label that
    is no number or no class, a second sample of a key. `skip` counts it in `skipped` and takes the rest: of a shard
    that is cut short the samples before the cut, of a key that is there twice the first.
    `room` is for what is read from a bucket; without it images of a bucket are listed, and cannot be read.

    Raises:
        ConfigError: there are no shards or no samples; the index cannot be written or, in a bucket, is missing or not
            of these shards; or, with `raise`, damage, named by shard and key.
    """
    root = _root(path)
    listed = make_index(path, split) if isinstance(root, Path) else _index_in_bucket(root, split)
    classes = class_names(path) or default_classes or None
    if classes is None and split == "train":
        highest = max((int(shard.rows["label"].max()) for shard in listed if len(shard.rows)), default=-1)
        classes = tuple(map(str, range(highest + 1)))
    elif classes is None:
        classes = load(path, "train", on_error, room=room).classes

    texts, skipped = damage(listed, classes)
    if texts and on_error == "raise":
        counts = ", ".join(f"{count} {kind}" for kind, count in skipped.items() if kind != STRAY)
        raise ConfigError(
            f"data.path={path}: {texts[0]}; in all: {counts}. Make the shards again, or leave out what is damaged "
            "with data.on_error=skip"
        )
    if isinstance(root, Bucket) and room is not None:
        shards = BucketShards(root, listed, classes, skipped, room)
    else:
        shards = Shards(root, listed, classes, skipped)
    if not len(shards):
        raise ConfigError(f"data.path={path}: the {split} shards hold no samples; left out: {skipped}")
    return shards


def damage(listed: list[Listed], classes: tuple[str, ...]) -> tuple[list[str], dict[str, int]]:
    """A text for the first of each kind of damage in each shard; and why -> how many are left out, damage or not."""
    texts, skipped = [], Counter()
    for shard in listed:
        skipped += Counter({kind: count for kind, (count, _) in shard.found.items()})
        texts += [text for kind, (_, text) in shard.found.items() if kind != STRAY]
        outside = np.flatnonzero(shard.rows["label"] >= len(classes))
        if len(outside):
            skipped[OUTSIDE] += len(outside)
            row, start = shard.rows[outside[0]], int(shard.rows["key_size"][: outside[0]].sum())
            key = os.fsdecode(shard.keys[start : start + row["key_size"]])
            texts.append(f"{shard.tar.name}: {key} has label {row['label']}, there are {len(classes)} classes")
    return texts, dict(skipped)


def _root(path: str) -> Path | Bucket:
    return Bucket.of(path) if bucket.is_bucket(path) else Path(path).absolute()


def _address(root: Path | Bucket, tar: Tar) -> str:
    return str(root / tar.name) if isinstance(root, Path) else root.url(tar.name)


def no_bucket(path: str | Bucket, error: BucketError) -> ConfigError:
    """What a bucket says at the start, with the fix."""
    return ConfigError(f"data.path={path}: {error}; check the bucket's name and {IN_THE_ENVIRONMENT}")


def class_names(path: str) -> tuple[str, ...] | None:
    """The lines of classes.txt; None without it."""
    root = _root(path)
    try:
        content = (root / "classes.txt").read_bytes() if isinstance(root, Path) else root.get("classes.txt")
    except FileNotFoundError:
        return None
    except BucketError as error:
        raise no_bucket(str(root), error) from error
    names = content.decode(errors="surrogateescape").replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")
    classes = tuple(name.removesuffix("\r") for name in names.split("\n"))
    if repeated := [name for name, count in Counter(classes).items() if count > 1 or not name]:
        raise ConfigError(f"{root}/classes.txt: {repeated[0]!r} is no name of one class; one a line, each once")
    return classes


def find(path: str, split: str) -> list[Tar]:
    """The shards of one split by their names.

    Raises:
        ConfigError: there are none, or one cannot be looked at.
    """
    root = _root(path)
    if isinstance(root, Bucket):
        return _find_in_bucket(root, split)
    in_folder = root / split
    beside = _beside(split)
    for folder in (in_folder, root):
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".tar") and not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            continue
        if names := [name for name in names if folder is in_folder or beside.search(name.lower())]:
            break
    else:
        raise ConfigError(
            f"data.path={path}: there are no shards {in_folder}/*.tar; tools/make_shards.py makes them from class "
            "folders, and compressed ones must be unpacked to .tar"
        )
    try:
        stats = [os.stat(folder / name) for name in names]
    except OSError as error:  # a dangling link
        raise ConfigError(f"data.path={path}: a shard cannot be looked at: {error}") from error
    return [
        Tar(os.path.relpath(folder / name, root), stat.st_size, stat.st_mtime_ns)
        for name, stat in zip(names, stats, strict=True)
    ]


def _beside(split: str) -> re.Pattern:
    """What the name of a shard has that lies among those of other splits."""
    return re.compile(rf"(?<![a-z]){'train' if split == 'train' else 'val(idation)?'}(?![a-z])")


def _find_in_bucket(root: Bucket, split: str) -> list[Tar]:
    try:
        for below in (f"{split}/", ""):
            names = {key.removeprefix(below): stored for key, stored in root.list(below).items()}
            names = {name: names[name] for name in sorted(names) if re.fullmatch(r"[^/.][^/]*\.tar", name)}
            found = [
                Tar(below + name, stored.size, stored.etag)
                for name, stored in names.items()
                if below or _beside(split).search(name.lower())
            ]
            if found:
                return found
    except BucketError as error:
        raise no_bucket(root, error) from error
    raise ConfigError(
        f"data.path={root}: there are no shards {root.url(split)}/*.tar; `python tools/make_shards.py SOURCE {root}` "
        "makes them from class folders"
    )


def _index_in_bucket(root: Bucket, split: str) -> list[Listed]:
    """The index, if it is of the shards that are there.

    Raises:
        ConfigError: it is missing or not, or there are no shards.
    """
    tars, name = find(str(root), split), f"{split}.index.npz"
    try:
        listed = _read_index(io.BytesIO(root.get(name)))
    except NoObjectError:
        listed = []
    except BucketError as error:
        raise no_bucket(root, error) from error
    if [shard.tar for shard in listed] == tars:
        return listed
    if not listed:
        reason = f"{name} is missing or not whole"
    else:
        known = {shard.tar.name: shard.tar for shard in listed}
        there = {tar.name: tar for tar in tars}
        changed = [each for each in sorted(known.keys() | there.keys()) if known.get(each) != there.get(each)]
        what = (
            "replaced" if changed[0] in known and changed[0] in there else "added" if changed[0] in there else "removed"
        )
        reason = f"{changed[0]} was {what} after {name} was made ({len(changed)} shards in all)"
    raise ConfigError(f"data.path={root}: {reason}: run `python tools/make_shards.py --index {root}`")


def make_index(path: str, split: str, known: list[Listed] | None = None) -> list[Listed]:
    """What the split's shards hold, from the index or, where a shard is not as the index saw it, from the shard.

    One process does that, the others wait for it; the index is replaced when it is whole. Shards in a bucket are read
    from start to end where neither the index nor `known` tells what they hold.

    Raises:
        ConfigError: there are no shards, or the index cannot be written.
    """
    root = _root(path)
    if isinstance(root, Bucket):
        return _make_index_in_bucket(root, split, known or [])
    tars, file = find(path, split), root / f"{split}.index.npz"
    listed = _read_index(file)
    if [shard.tar for shard in listed] == tars:
        return listed
    try:
        with listing_cache.one_process(root / f".{split}.index.lock"):
            in_index = {shard.tar: shard for shard in _read_index(file)}
            listed = _list_all(root, split, tars, in_index)
            with written_whole(file, "wb") as target:
                _write_index(target, listed)
    except OSError as error:
        raise ConfigError(
            f"data.path={path}: {file.name} is missing or older than the shards and cannot be made ({error}): run "
            f"`python tools/make_shards.py --index {path}` where the folder is writable"
        ) from error
    return listed


def _make_index_in_bucket(root: Bucket, split: str, known: list[Listed]) -> list[Listed]:
    tars, name = find(str(root), split), f"{split}.index.npz"
    try:
        try:
            listed = _read_index(io.BytesIO(root.get(name)))
        except NoObjectError:
            listed = []
        if [shard.tar for shard in listed] != tars:
            listed = _list_all(root, split, tars, {shard.tar: shard for shard in [*listed, *known]})
            target = io.BytesIO()
            _write_index(target, listed)
            root.put(name, target.getvalue())
    except BucketError as error:
        raise no_bucket(root, error) from error
    return listed


def _list_all(root: Path | Bucket, split: str, tars: list[Tar], known: dict[Tar, Listed]) -> list[Listed]:
    """What these shards hold; those that are not known are read."""
    unknown = [tar for tar in tars if tar not in known]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        work = threads.map(functools.partial(list_shard, root), unknown)
        bar = tqdm(work, f"index of {split}", len(unknown), unit="shard", disable=None if unknown else True)
        known = known | {shard.tar: shard for shard in bar}
    return [known[tar] for tar in tars]


class _Object(io.RawIOBase):
    """An object as a file to read, a request for each read: for a BufferedReader."""

    def __init__(self, root: Bucket, tar: Tar) -> None:
        self._root, self._tar, self._place = root, tar, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        self._place = place + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._tar.size}[whence]
        return self._place

    def readinto(self, target: Any) -> int:
        data = self._root.get(self._tar.name, self._place, len(target), etag=str(self._tar.version))
        target[: len(data)] = data
        self._place += len(data)
        return len(data)


def _opened(root: Path | Bucket, tar: Tar) -> IO[bytes]:
    if isinstance(root, Path):
        return open(root / tar.name, "rb")
    return io.BufferedReader(_Object(root, tar), LISTED_AT_ONCE)


def list_shard(root: Path | Bucket, tar: Tar) -> Listed:
    """What a tar's headers say."""
    samples: dict[str, dict[str, Any]] = {}
    found: dict[str, tuple[int, str]] = {}

    def note(kind: str, text: str) -> None:
        count, first = found.get(kind, (0, f"{tar.name}: {text}".replace("\n", "\\n")))
        found[kind] = (count + 1, first)

    with _opened(root, tar) as file:
        try:
            _read_headers(file, tar.size, samples, note)
        except tarfile.TarError as error:  # not a tar from its start, or a header that tarfile cannot pass over
            note(CUT, f"is no whole, plain tar ({error})")
    rows, keys = [], []
    for key, sample in sorted(samples.items(), key=lambda item: item[1].get("image", (0, 0))):
        if "image" not in sample:
            note(NO_IMAGE, f"{key} has no image, only a .cls; endings of images are {sorted(IMAGE_EXTENSIONS)}")
        elif "label" not in sample:
            note(NO_LABEL, f"{key} has no label, {key}.cls")
        elif not (text := sample["label"].strip()).isdigit() or len(text) > 9:
            note(NOT_A_NUMBER, f"{key}.cls holds {sample['label'][:20]!r}, not a class number")
        else:
            keys.append(os.fsencode(key))
            rows.append((*sample["image"], int(text), len(keys[-1])))
    return Listed(tar, np.array(rows, dtype=ROW), b"".join(keys), found)


def _read_headers(file: IO[bytes], length: int, samples: dict[str, dict[str, Any]], note: Any) -> None:
    """Fill `samples` with {image: (offset, size), label: text of its .cls} by key; `note` what is wrong."""
    end, last = 0, "its start"
    for member in tarfile.TarFile(fileobj=file):
        has_data = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
        end, last = member.offset_data + (-(-member.size // 512) * 512 if has_data else 0), member.name
        if end > length:
            note(CUT, f"ends within {member.name}")
            return
        if not member.isreg():
            continue
        name = KEY.fullmatch(member.name)
        if name is None or member.issparse():
            note(STRAY, member.name)
            continue
        key, ending = name["key"], f".{name['ending'].lower()}"
        part = "image" if ending in IMAGE_EXTENSIONS else "label" if ending == ".cls" else None
        if part is None:
            continue
        sample = samples.setdefault(key, {})
        if part in sample:
            if not sample.get("twice"):
                note(TWICE, f"{key} is there twice")
            sample["twice"] = True
        elif part == "image":
            sample["image"] = (member.offset_data, member.size)
        else:
            file.seek(member.offset_data)  # tarfile seeks the next header itself
            sample["label"] = file.read(min(member.size, 64))
    # A tar ends with blocks of zeros: without them the rest is missing, or a header after `last` is damaged.
    file.seek(end)
    if file.read(512) != bytes(512):
        note(CUT, f"is cut off after {last}")


def _read_index(file: Path | IO[bytes]) -> list[Listed]:
    """The index, nothing if there is none or not a whole one."""
    if (kept := listing_cache.read(file)) is None:
        return []
    about, arrays = kept
    rows, keys = arrays["rows"], arrays["keys"].tobytes()
    listed, row, key = [], 0, 0
    for tar, num_rows, num_bytes, found in about:
        noted = {kind: (count, first) for kind, (count, first) in found.items()}
        listed.append(Listed(Tar(*tar), rows[row : row + num_rows], keys[key : key + num_bytes], noted))
        row, key = row + num_rows, key + num_bytes
    return listed


def _write_index(target: IO[bytes], listed: list[Listed]) -> None:
    about = [[shard.tar, len(shard.rows), len(shard.keys), shard.found] for shard in listed]
    rows = np.concatenate([shard.rows for shard in listed])
    keys = np.frombuffer(b"".join(shard.keys for shard in listed), np.uint8)
    listing_cache.write_to(target, about, {"rows": rows, "keys": keys})
