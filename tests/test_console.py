"""A console that takes no more lines ends no run."""

import errno
import io
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from runtime.console import Unbreakable


class Broken(io.StringIO):
    """A stream whose writes fail as those of a closed terminal, an ended reader or a full disk do."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def write(self, text):
        raise OSError(self.number, os.strerror(self.number))

    def flush(self):
        self.write("")


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE, errno.ENOSPC])
def test_lines_that_nobody_takes_are_lost(number):
    stream = Unbreakable(Broken(number))
    assert print("a line", file=stream, flush=True) is None
    stream.stream = io.StringIO()
    print("another", file=stream)
    assert stream.stream.getvalue() == "another\n"
    assert stream.isatty() is False


@pytest.mark.slow
def test_a_run_goes_on_when_the_reader_of_its_lines_has_ended(tiny, tmp_path):
    command = [sys.executable, "train_ddp.py", *tiny, "num_train_steps=40"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    next(line for line in run.stdout if "step 2/40" in line)
    run.stdout.close()
    assert run.wait(120) == 0
    assert '"finished"' in (tmp_path / "run/status.json").read_text()
    assert "step 40/40" in (tmp_path / "run/train.log").read_text()
