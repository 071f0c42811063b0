"""Process group, device, output folder and logging of one process; what every entrypoint does first and last."""

from schema import PROJECT_DIR, Config, ConfigError, RunError

import contextlib
import dataclasses
import fcntl
import itertools
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, TypeVar

import timm
import torch
import torch.distributed as dist
import torchvision
import yaml
from torch.distributed.tensor import DTensor

import preemption

logger = logging.getLogger(__name__)
TIMEOUT = timedelta(minutes=10)  # of a collective: a rank that waits longer gives up
_sessions = itertools.count()
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Session:
    """What one process knows of its place in the job."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    output_dir: Path
    afterwards: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """Work for rank 0 alone, done when the process group is gone: nobody waits for it in a collective."""
    parent: int = dataclasses.field(default_factory=os.getppid)
    """The process that started this one."""
    stop: preemption.Stop = dataclasses.field(default_factory=lambda: preemption.Stop(TIMEOUT))
    """Whether the run was asked to stop."""

    @property
    def is_main(self) -> bool:
        """Whether this process prints, logs and writes the small files."""
        return self.rank == 0

    @property
    def is_orphan(self) -> bool:
        """Whether the torchrun that started this process is gone, which would otherwise stop it when another fails."""
        return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent


@contextlib.contextmanager
def dist_session(cfg: Config) -> Iterator[Session]:
    """Folder and lock, logging, process group; on the way out the status and an orderly end.

    Started without torchrun, the job is this one process. CUDA gets NCCL (and gloo beside it, for tensors in host
    memory), a machine without CUDA gloo.

    Raises:
        ConfigError: a live run holds the output folder.
    """
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    # Modulo: srun may show each task its own card only. Two ranks on one card are NCCL's to refuse.
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    session = Session(rank, local_rank, world_size, device, Path(cfg.output_dir))

    def lock() -> None:
        held.enter_context(_lock(session.output_dir, "output_dir"))
        ckpt_dir = Path(cfg.checkpoint.ckpt_dir or session.output_dir)
        if session.output_dir.absolute() not in (ckpt_dir.absolute(), *ckpt_dir.absolute().parents):
            held.enter_context(_lock(ckpt_dir, "checkpoint.ckpt_dir"))

    with contextlib.ExitStack() as held:
        held.enter_context(preemption.listening())
        store = _store()
        _rank_0_first(lock, session, store)
        _set_up_logging(session)
        set_kernels(cfg)
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
        if session.is_main:
            _write_provenance(cfg, session)
        set_status(session, "running")
        try:
            yield session
            session.stop.close()
            dist.barrier()
            dist.destroy_process_group()
            if session.stop.signal:
                set_status(session, "preempted")  # now: what follows may take longer than there is left
            for work in session.afterwards if session.is_main else ():
                work()
        except BaseException:
            # No destroy_process_group here: it can wait for ranks that wait for this one. Exiting ends the job at once,
            # because torchrun stops the others.
            set_status(session, "failed")
            raise
        if not session.stop.signal:
            set_status(session, "finished")


def _store() -> dist.Store:
    """Where the processes find each other: torchrun's store, or one in memory for a lone process, which needs no port.

    torchrun keeps its store over --max-restarts, and a process may train more than once: each attempt gets names of its
    own, because gloo would connect to the addresses of the attempt before (seen with torch 2.14.1).
    """
    if "WORLD_SIZE" not in os.environ:
        return dist.HashStore()
    # torchrun's store is there before its processes: one that finds none is an orphan, and waits in vain.
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=30) if is_torchruns else TIMEOUT))
    store.set_timeout(TIMEOUT)
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_sessions)}"
    return dist.PrefixStore(attempt, store)


def _rank_0_first(work: Callable[[], None], session: Session, store: dist.Store) -> None:
    """work() on rank 0, while there is no process group yet; the others wait in the store for how it went.

    Without this they would wait for rank 0 in the process group's start, where no signal of torchrun's is heard.

    Raises:
        ConfigError: on all ranks alike, if it failed.
    """
    if session.is_main:
        reason = ""
        try:
            work()
        except ConfigError as error:
            reason = str(error)
        store.set("rank_0", reason)
        deadline = time.monotonic() + 10
        while reason and store.add("heard", 0) < session.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)  # the store may live in this process
    else:
        reason = store.get("rank_0").decode()
        store.add("heard", 1)
    if reason:
        raise ConfigError(reason)


def _lock(folder: Path, key: str) -> TextIO:
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
        raise ConfigError(f"{key}={folder} cannot be written to ({error.strerror}): give another folder") from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        raise ConfigError(
            f"{key}={folder} is in use by a live run ({lock.read().strip()}): "
            f"wait for it, or give this run another {key}"
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}\n")
    lock.flush()
    return lock


def _set_up_logging(session: Session) -> None:
    """Rank 0 to the console and train.log; other ranks speak from warnings up, with their rank."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _OurHandler | _OurFileHandler):  # main() called again in one process, by a test
            root.removeHandler(handler)
            handler.close()
    formatter = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    if not session.is_main:
        formatter = logging.Formatter(f"%(asctime)s [rank {session.rank}] %(levelname)s %(message)s", "%H:%M:%S")
    handlers: list[logging.Handler] = [_OurHandler()]
    if session.is_main:
        handlers.append(_OurFileHandler(session.output_dir / "train.log"))
    for handler in handlers:
        handler.setFormatter(formatter)
        handler.setLevel(logging.INFO if session.is_main else logging.WARNING)
        root.addHandler(handler)
    root.setLevel(logging.INFO)


class _OurHandler(logging.StreamHandler):
    """Console lines, written above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)


class _OurFileHandler(logging.FileHandler):
    """train.log."""


def set_kernels(cfg: Config) -> None:
    """fp32 means it: no TF32 in matrix products, convolutions or cuDNN. bf16 leaves FP32 products on TF32.

    No attention of cuDNN's, which torch prefers on Hopper: its gradients were NaN in a run of 64 tokens after 785 steps
    (H100, torch 2.11; https://github.com/pytorch/pytorch/issues/196678 has the cause;
    benchmarks/attention_nan_h100x1.log).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest" if cfg.precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = cfg.precision != "fp32"


def _git_commit() -> str:
    """COMMIT, for a copy without .git (an image), or what git says, if there is one."""
    found = os.environ.get("COMMIT", "")
    if not found and shutil.which("git"):
        command = ["git", "-C", PROJECT_DIR, "describe", "--always", "--dirty", "--abbrev=12"]
        found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return found or "unknown"


def _write_provenance(cfg: Config, session: Session) -> None:
    (session.output_dir / "config.yaml").write_text(yaml.safe_dump(to_plain(cfg), sort_keys=False))
    card = torch.cuda.get_device_name() if session.device.type == "cuda" else platform.processor() or "CPU"
    logger.info(
        "torch %s, torchvision %s, timm %s, Python %s, commit %s",
        *(torch.__version__, torchvision.__version__, timm.__version__, platform.python_version(), _git_commit()),
    )
    if session.device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        logger.info("CUDA %s, cuDNN %s, NCCL %s", torch.version.cuda, torch.backends.cudnn.version(), nccl)
    logger.info("%d processes on %s, output in %s", session.world_size, card, session.output_dir)


def to_plain(cfg: Config) -> dict[str, Any]:
    """The config as dicts, lists and scalars, as it stands in config.yaml."""
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def set_status(session: Session, state: str, step: int | None = None) -> None:
    """Write status.json, whole or not at all; `step` stays what it was if it is not given."""
    if not session.is_main:
        return
    path = session.output_dir / "status.json"
    if step is None:
        step = json.loads(path.read_text())["step"] if path.exists() else 0
    write_json(path, {"state": state, "step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file by way of a temporary name, so that a reader finds the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        os.fsync(file.fileno())  # whole on the disk before the name is
    os.replace(temporary, path)


def together(work: Callable[[], T], *, group: dist.ProcessGroup | None = None, error: type[Exception] = RunError) -> T:
    """work() on every rank of the group, and its result; where it fails on one, all raise, with that one's reason.

    Raises:
        error: a rank's work raised OSError or `error`; the text is the lowest such rank's.
    """
    result, reason = None, None
    try:
        result = work()
    except (OSError, error) as caught:
        reason = str(caught)
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    if first := next(filter(None, reasons), None):
        raise error(first)
    return result


def local_slice(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of `full` that this rank holds of `like`, a plain tensor or a DTensor of the same global shape.

    Asks the tensor itself for its offsets, by the protocol of torch.distributed.checkpoint: Megatron-FSDP shards
    unevenly, so that DTensor's own arithmetic does not hold for it.
    """
    if not isinstance(like, DTensor):
        return full
    (chunk,) = like.__create_chunk_list__()
    return full[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own storage of a tensor, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
