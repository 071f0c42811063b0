"""Files that are whole or not there."""

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def written_whole(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file to write to, which gets its name when all is on the disk: a reader finds the old one or the new one.

    Args:
        path: of the file, which is replaced.
        mode: "w" or "wb".
    """
    # On a shared disk another node can have a process of the same number.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # on the disk before it has the name
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole."""
    with written_whole(path) as file:
        file.write(json.dumps(content) + "\n")
