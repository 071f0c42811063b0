"""What a data set holds, kept on the disk once it was listed: one .npz file of arrays and a note, whole or none."""

import contextlib
import fcntl
import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from runtime.files import written_whole


def read(file: Path | IO[bytes]) -> tuple[Any, dict[str, np.ndarray]] | None:
    """The note and the arrays of a listing; None if there is none, or not a whole one."""
    try:
        with np.load(file) as arrays:
            note = json.loads(arrays["about"].tobytes())
            return note, {name: arrays[name] for name in arrays.files if name != "about"}
    except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile):
        return None


def write(file: Path, note: Any, arrays: dict[str, np.ndarray]) -> None:
    """Keep a listing; `note` is JSON."""
    with written_whole(file, "wb") as target:
        write_to(target, note, arrays)


def write_to(target: IO[bytes], note: Any, arrays: dict[str, np.ndarray]) -> None:
    """Write a listing to an open file."""
    named: dict[str, Any] = {"about": np.frombuffer(json.dumps(note).encode(), np.uint8), **arrays}
    np.savez(target, **named)


@contextlib.contextmanager
def one_process(lock_file: Path) -> Iterator[None]:
    """Inside is one process of a machine at a time; the others wait. The file stays.

    On a file system without locks all go in: each then writes the same, and the last one's is kept.
    """
    with open(lock_file, "w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
