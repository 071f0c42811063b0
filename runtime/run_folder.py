"""The folder of a run: its lock, its logs, its status, and what it says of how it was made."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import timm
import torch
import torch.cuda.nccl
import torchvision
import yaml
from tqdm import tqdm
from typing_extensions import override

from runtime.files import write_json, written_whole
from runtime.session import Session
from schema import Config, ConfigError, leaves, to_plain

logger = logging.getLogger(__name__)
PROJECT_DIR = Path(__file__).resolve().parent.parent


def lock_folder(folder: Path, key: str) -> TextIO:
    """An open, locked file in the folder that `key` names.

    The kernel lets go of the lock when the process dies, however it does. A POSIX lock is the process's own: loader
    processes, which outlive a killed rank by seconds, do not inherit it.

    Raises:
        ConfigError: a live run holds it, or the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+")  # noqa: SIM115  (the caller closes it)
    except OSError as error:
        raise _not_writable(key, folder, error) from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            logger.warning(
                "%s=%s is on a file system without locks (%s): a second run in it would not be noticed",
                *(key, folder, error.strerror),
            )
            return lock
        lock.seek(0)
        raise ConfigError(
            f"{key}={folder} is in use by a live run ({lock.read().strip()}): "
            f"wait for it, or give this run another {key}"
        ) from None
    lock.truncate(0)
    try:
        lock.write(f"process {os.getpid()} on {platform.node()}\n")
        lock.flush()
    except OSError as error:  # a full disk
        raise _not_writable(key, folder, error) from None
    return lock


def _not_writable(key: str, folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{key}={folder} cannot be written to ({error.strerror}): make room, or give another folder")


def set_up_logging(session: Session) -> None:
    """Rank 0 to the console and train.log; other ranks speak from warnings up, with their rank."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _ConsoleHandler | _LogFileHandler):  # main() called again in one process, by a test
            root.removeHandler(handler)
            handler.close()
    formatter = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    if not session.is_main:
        formatter = logging.Formatter(f"%(asctime)s [rank {session.rank}] %(levelname)s %(message)s", "%H:%M:%S")
    handlers: list[logging.Handler] = [_ConsoleHandler()]
    if session.is_main:
        log = session.output_dir / "train.log"  # paths may hold bytes that are no UTF-8
        try:
            handlers.append(_LogFileHandler(log, encoding="utf-8", errors="backslashreplace"))
        except OSError as error:
            raise _not_writable("output_dir", session.output_dir, error) from None
    for handler in handlers:
        handler.setFormatter(formatter)
        handler.setLevel(logging.INFO if session.is_main else logging.WARNING)
        root.addHandler(handler)
    root.setLevel(logging.INFO)


class _ConsoleHandler(logging.StreamHandler):
    """Console lines, written above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


class _LogFileHandler(logging.FileHandler):
    """train.log; that its disk takes no more is told once."""

    is_told = False

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)  # a line that is wrong in itself
        elif not self.is_told:
            self.is_told = True  # before the line, which comes here, too
            logger.warning("%s cannot be written: the run goes on without", self.baseFilename)


def _git_commit() -> str:
    """COMMIT, for a copy without .git (an image), or what git says, if there is one."""
    found = os.environ.get("COMMIT", "")
    if not found and shutil.which("git"):
        command = ["git", "-C", PROJECT_DIR, "describe", "--always", "--dirty", "--abbrev=12"]
        found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return found or "unknown"


def write_config(cfg: Config, session: Session) -> None:
    """config.yaml, on rank 0: with what values the folder's run trains."""
    if session.is_main:
        try:
            with written_whole(session.output_dir / "config.yaml") as file:
                yaml.safe_dump(to_plain(cfg), file, sort_keys=False)
        except OSError as error:
            raise _not_writable("output_dir", session.output_dir, error) from None


def changed_keys(cfg: Config, session: Session) -> list[str]:
    """What this config has otherwise than the folder's config.yaml: key=value, and what the file has."""
    written = leaves(yaml.safe_load((session.output_dir / "config.yaml").read_text()))
    now = leaves(to_plain(cfg))
    return [f"{key}={now[key]} (there {written.get(key)})" for key in now if now[key] != written.get(key)]


def write_provenance(cfg: Config, session: Session) -> None:
    """What runs on what, into the log; config.yaml of a new run."""
    if not (session.output_dir / "config.yaml").exists():  # a run that goes on writes it anew, a finished one does not
        write_config(cfg, session)
    card = torch.cuda.get_device_name() if session.device.type == "cuda" else platform.processor() or "CPU"
    logger.info(
        "torch %s, torchvision %s, timm %s, Python %s, commit %s",
        *(torch.__version__, torchvision.__version__, timm.__version__, platform.python_version(), _git_commit()),
    )
    if session.device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        logger.info("CUDA %s, cuDNN %s, NCCL %s", torch.version.cuda, torch.backends.cudnn.version(), nccl)
    logger.info("%d processes on %s, output in %s", session.world_size, card, session.output_dir)


def set_status(session: Session, state: str, step: int | None = None) -> None:
    """Write status.json, whole or not at all; `step` stays what it was if it is not given.

    So do the seconds, until it is known what this start goes on from. A disk that takes no more ends no run: it may
    have room again, and checkpoints may be elsewhere.
    """
    if not session.is_main:
        return
    before, totals = read_status(session), session.phases.totals()
    step = before.get("step", 0) if step is None else step
    goodput = {"goodput": totals} if totals else {"goodput": before["goodput"]} if "goodput" in before else {}
    now = {"state": state, "step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    with going_on(session.output_dir / "status.json"):
        write_json(session.output_dir / "status.json", now | goodput)


def read_status(session: Session) -> dict[str, Any]:
    """What status.json says; empty where there is none."""
    path = session.output_dir / "status.json"
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError:  # not ours any more; it says nothing that a run needs
        logger.warning("%s is not JSON: passed over", path)
        return {}


@contextlib.contextmanager
def going_on(file: Path) -> Iterator[None]:
    """Inside, a file that cannot be written is told once, until it can again, and ends nothing."""
    try:
        yield
        _untold.discard(file)
    except OSError as error:
        if file not in _untold:
            logger.warning("%s cannot be written (%s): the run goes on without", file, error.strerror)
        _untold.add(file)


_untold: set[Path] = set()  # files that lack what could not be written
