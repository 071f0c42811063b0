"""Standard output and error of a run that outlives them: a closed terminal, a pipe whose reader ended, a full disk."""

import contextlib
import sys
from typing import Any, TextIO


class Unbreakable:
    """A text stream whose writes are lost, and raise nothing, once the file behind it takes no more of them."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """The number of characters, whether they arrived or not."""
        try:
            return self.stream.write(text)
        except UnicodeEncodeError as error:  # a path that is no UTF-8, or a terminal that knows ASCII only
            return self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError):  # ValueError: the stream was closed
            return len(text)

    def flush(self) -> None:
        """Pass on what is buffered, if it can be."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def never_raise() -> None:
    """From here on no line of the console ends the run; train.log has them all. Calling it again changes nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Unbreakable):
            setattr(sys, name, Unbreakable(stream))
