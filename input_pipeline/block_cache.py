"""A bucket's objects, read as if they lay on this machine: in blocks, fetched ahead and shared by its processes.

A block is `BLOCK` bytes of an object, a file of its own in a folder of this machine. All loader processes of all its
ranks read the same places of the same shards at about the same time, each another image: so a block is fetched once a
machine, by whoever comes first, and the others find it. Before it reads a batch, a process says which bytes the batch
needs and which the ones after it do (`expect`), and threads fetch their blocks in this order, many at a time.

A block's file is locked while it is being written and ends with `MARK` when it is whole. A process that is killed
loses its lock, and the next one writes the block again. Files beyond the folder's bound go, the oldest first.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from input_pipeline.decode import UnreadableError
from runtime.bucket import Bucket, BucketError, Stored
from schema import ConfigError

BLOCK = 4 * 2**20  # bytes
THREADS = 8  # of each process, each with a request of its own
AHEAD = 64  # blocks after those of a batch, but a quarter of the folder's bound at most
CHECKED_EVERY = 8  # blocks that a process writes between two looks at the folder's size
MARK = b"whole"

Extent = tuple[int, int, int]  # number of the object, first byte, bytes


class Room(NamedTuple):
    """Where blocks are kept: data.cache_dir and data.cache_gb."""

    folder: str | None
    gigabytes: float

    @property
    def path(self) -> Path:
        """A folder of this user's alone: what lies there is trained on."""
        return Path(self.folder or tempfile.gettempdir()) / f"vit-blocks-{os.getuid()}"

    def prepare(self, *, streams: int) -> None:
        """Make the folder, and see that there is enough room for so many places that are read at the same time.

        Raises:
            ConfigError: there is not, or the folder cannot be made or is another user's.
        """
        least = 4 * streams * BLOCK / 1e9  # read, the one before, the one ahead, and one more for slow readers
        if self.gigabytes < least:
            raise ConfigError(
                f"data.cache_gb={self.gigabytes:g} with data.shard_streams={streams}: {streams} places of the shards "
                f"that are read at the same time need {least:.2g}; set data.cache_gb={least:.2g}"
            )
        where = f"data.cache_dir={self.folder or 'null'}: {self.path}"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            stat = self.path.stat()
            kept = sum(size for _, size, _ in _files(self.path))
            free = (shutil.disk_usage(self.path).free + kept) / 1e9
        except OSError as error:
            raise ConfigError(f"{where} cannot be made ({error.strerror}): name another folder") from error
        if stat.st_uid != os.getuid() or stat.st_mode & 0o022:
            raise ConfigError(f"{where} can be written to by another user: remove it, or name another folder")
        if free < self.gigabytes:
            raise ConfigError(
                f"data.cache_gb={self.gigabytes:g}: {self.path} has room for {free:.2g}; set less, or data.cache_dir"
            )


class BlockCache:
    """The objects of a bucket.

    Args:
        bucket: that holds them.
        objects: key, size and ETag of each; only these versions are read.
        room: for the blocks; `Room.prepare` was called.
    """

    def __init__(self, bucket: Bucket, objects: list[tuple[str, Stored]], room: Room) -> None:
        self._bucket, self._objects = bucket, objects
        self._folder, self._limit = room.path, room.gigabytes * 1e9
        self._written = 0
        self._reader: _Reader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_reader": None}

    def read(self, number: int, start: int, size: int) -> bytes:
        """Bytes of an object; fetches what is not there.

        Raises:
            OSError: they cannot be fetched, or the object was replaced.
            UnreadableError: blocks cannot be kept.
        """
        parts, end = [], start + size
        for block in range(start // BLOCK, -(-end // BLOCK)):
            first = block * BLOCK
            descriptor = self._open(number, block)
            if descriptor is None:
                descriptor = self._fetch(number, block, wait=True)
                assert descriptor is not None  # it waits until it has it
            with _closing(descriptor):
                low = max(start - first, 0)
                parts.append(os.pread(descriptor, min(end - first, BLOCK) - low, low))
        return b"".join(parts)

    def expect(self, extents: list[Extent], later: Iterable[Extent] = ()) -> None:
        """Fetch these bytes, then the first of the later ones, in threads; what was expected before is forgotten."""
        blocks = dict.fromkeys(_blocks(extents))
        most = len(blocks) + min(AHEAD, int(self._limit / 4 / BLOCK))
        for block in _blocks(later):
            if len(blocks) >= most:
                break
            blocks[block] = None
        if self._reader is None or self._reader.process != os.getpid():  # threads do not survive a fork
            self._bucket.connect()
            self._reader = _Reader(self._fetch_ahead)
        self._reader.do(list(blocks))

    def _fetch_ahead(self, number: int, block: int) -> bool:
        """Whether the block is there now."""
        with contextlib.suppress(OSError):  # who needs the block tries again, and says what is wrong
            descriptor = self._open(number, block)
            if descriptor is None:
                descriptor = self._fetch(number, block, wait=False)
            if descriptor is not None:
                os.close(descriptor)
                return True
        return False

    def _length(self, number: int, block: int) -> int:
        return min(BLOCK, self._objects[number][1].size - block * BLOCK)

    def _path(self, number: int, block: int) -> str:
        key, stored = self._objects[number]
        return f"{self._folder}/{_name(self._bucket.url(key), stored.etag)}-{BLOCK}-{block}"

    def _open(self, number: int, block: int) -> int | None:
        """The block's file, if it is whole."""
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(self._path(number, block), os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(descriptor).st_size == self._length(number, block) + len(MARK):
                return descriptor
            os.close(descriptor)
        return None

    def _fetch(self, number: int, block: int, *, wait: bool) -> int | None:
        """The block's file, written by this process or another one; None if that is at it and we do not wait."""
        (key, stored), path, length = self._objects[number], self._path(number, block), self._length(number, block)
        with self._kept():
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with self._kept():
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(descriptor)
                    return None
            if os.fstat(descriptor).st_size != length + len(MARK):
                try:
                    data = self._bucket.get(key, block * BLOCK, length, etag=stored.etag)
                except BucketError as error:
                    if error.code != "PreconditionFailed":
                        raise
                    raise OSError("the shard was replaced after its index was made: make the index again") from error
                if len(data) != length:
                    raise OSError("the shard ends before the image does")
                with self._kept(), open(descriptor, "wb", buffering=0, closefd=False) as file:
                    for part in (data, MARK):  # in this order: the mark says that all before it is there
                        view = memoryview(part)
                        while view:
                            view = view[file.write(view) :]
                self._written += 1
                if self._written % CHECKED_EVERY == 1:
                    self._make_room()
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # who waits need not wait until it is read
            return descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnreadableError(
                f"data.cache_dir: a block cannot be kept in {self._folder}: {error.strerror}"
            ) from error

    def _make_room(self) -> None:
        files = sorted(_files(self._folder))
        excess = sum(size for _, size, _ in files) - self._limit
        for _, size, path in files:
            if excess <= 0:
                break
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                os.unlink(path)
            excess -= size


class _Reader:
    """Threads of this process, which fetch blocks of the newest list; they end with it, whatever they wait for."""

    def __init__(self, fetch: Any) -> None:
        self.process, self._fetch = os.getpid(), fetch
        self._changed, self._blocks, self._found = threading.Condition(), deque(), set()
        for _ in range(THREADS):
            threading.Thread(target=self._work, name="block reader", daemon=True).start()

    def do(self, blocks: list[tuple[int, int]]) -> None:
        """Fetch these in place of those that wait; those that were found before are not looked for again."""
        with self._changed:
            self._found &= set(blocks)
            self._blocks = deque(block for block in blocks if block not in self._found)
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._blocks:
                    self._changed.wait()
                block = self._blocks.popleft()
            if self._fetch(*block):
                self._found.add(block)


def _blocks(extents: Iterable[Extent]) -> Iterator[tuple[int, int]]:
    """Object and number of each block that holds some of these bytes, again and again."""
    for number, start, size in extents:
        for block in range(start // BLOCK, -(-(start + size) // BLOCK)):
            yield number, block


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _files(folder: Path) -> Iterator[tuple[int, int, str]]:
    """Time, size and path of each block."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat()
                yield stat.st_mtime_ns, stat.st_size, entry.path


@functools.lru_cache(4096)
def _name(url: str, etag: str) -> str:
    """Another for each version of an object and, on Linux, each start of the machine: a crash may lose contents."""
    file = Path("/proc/sys/kernel/random/boot_id")
    boot = file.read_text() if file.exists() else ""
    return hashlib.sha256(f"{boot} {url} {etag}".encode()).hexdigest()[:32]
