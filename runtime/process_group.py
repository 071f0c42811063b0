"""Process group, device, run folder and logging of one process; what every entrypoint does first and last."""

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime import cuda_graphs, preemption
from runtime.bucket import is_bucket
from runtime.checkpoint_places import local_dir
from runtime.run_folder import lock_folder, read_status, set_status, set_up_logging, write_provenance
from runtime.session import TIMEOUT, Session
from runtime.watch import Watch
from schema import Config, ConfigError, NodeLeftError, RunError

# For all processes to be there, where no torchrun has seen to that.
JOIN_TIMEOUT = timedelta(seconds=60)
_sessions = itertools.count()


@contextlib.contextmanager
def dist_session(cfg: Config) -> Iterator[Session]:
    """Folder and lock, logging, process group; on the way out the status and an orderly end.

    Started without torchrun, the job is this one process. CUDA gets NCCL (and gloo beside it, for tensors in host
    memory), a machine without CUDA gloo.

    Raises:
        ConfigError: a live run holds the output folder.
        NodeLeftError: at the very end, all is saved: on the ranks of nodes that torchrun shall start again.
    """
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    # Modulo: srun may show each task its own card only. Two ranks on one card are NCCL's to refuse.
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    session = Session(rank, local_rank, world_size, device, Path(cfg.output_dir))

    def lock() -> None:
        held.enter_context(lock_folder(session.output_dir, "output_dir"))
        key, folder = "checkpoint.ckpt_dir", Path(cfg.checkpoint.ckpt_dir or session.output_dir)
        if is_bucket(cfg.checkpoint.ckpt_dir):
            key, folder = "checkpoint.local_dir", local_dir(cfg)
        if folder.absolute() != session.output_dir.absolute():  # within it, too: another run's ckpt_dir can be there
            held.enter_context(lock_folder(folder, key))

    with contextlib.ExitStack() as held:
        held.enter_context(preemption.listening())
        store = _store()
        _rank_0_first(lock, session, store)
        set_up_logging(session)
        if cuda:
            torch.cuda.set_device(device)
            held.enter_context(cuda_graphs.stream(enabled=cfg.cuda_graphs))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
        watch = Watch(
            session,
            store if world_size > 1 else None,
            hang_timeout_s=cfg.distributed.hang_timeout_s,
            slow_rank_factor=cfg.distributed.slow_rank_factor,
        )
        watch.start()
        if session.is_main:
            write_provenance(cfg, session)
            session.phases.ended = _orderly_end(session)
        set_status(session, "running")
        try:
            yield session
            _leave_process_group(session, watch)
            if session.stop.signal:
                set_status(session, "preempted")  # now: what follows may take longer than there is left
            with session.phases.during("saving"):
                for work in session.afterwards if session.is_main else ():
                    work()
        except BaseException:
            # No destroy_process_group here: it can wait for ranks that wait for this one. Exiting ends the job at once,
            # because torchrun stops the others.
            watch.close()  # the error ends this process: the others need not
            set_status(session, "failed")
            raise
        if session.is_main and "RANKS_STANDING_BY" in os.environ:
            _release(store, "preempted" if session.stop.signal else "finished")
        if not session.stop.signal:
            set_status(session, "finished")
        elif preemption.another_node_left():
            raise _node_left()


def _node_left() -> NodeLeftError:
    count, most = (os.environ[f"TORCHELASTIC_{name}"] for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return NodeLeftError(
        f"another node left the run: torchrun starts this one's ranks again, restart {int(count) + 1} of {most}"
    )


def stand_by(_cfg: Config) -> dict[str, float]:
    """What a rank does that the run has no use for: nothing, until the run has ended or this rank is asked to stop.

    It stays, because torchrun ends or restarts all ranks of a node together, and a node that has ended its ranks waits
    for the others to end, too, and is not there when they need it.

    Raises:
        NodeLeftError: as the ranks that train.
        RunError: the run failed.
    """
    with preemption.listening():
        try:
            store = _store()
            while not preemption.is_asked() and not store.check(["over"]):
                time.sleep(0.2)
            if preemption.is_asked():
                return {}
            state = store.get("over").decode()
            store.add("released", 1)
        except (dist.DistError, RuntimeError):
            raise RunError("this rank stood by, and the run failed") from None
        if state == "preempted" and preemption.another_node_left():
            raise _node_left()
    return {}


def _release(store: dist.Store, state: str) -> None:
    """Tell the ranks that stand by that the run is over; the store may end with this process, so wait for them."""
    store.set("over", state)
    ranks, deadline = int(os.environ.get("RANKS_STANDING_BY", "0")), time.monotonic() + JOIN_TIMEOUT.seconds
    while store.add("released", 0) < ranks and time.monotonic() < deadline:
        time.sleep(0.05)


def _leave_process_group(session: Session, watch: Watch) -> None:
    """All ranks together; no rank needs another from here on."""
    session.stop.close()
    dist.barrier()
    watch.close()
    dist.destroy_process_group()


def _orderly_end(session: Session) -> dict[str, Any] | None:
    """status.json of an earlier start that ended by itself or by a signal, with all its seconds."""
    status = read_status(session)
    return status if status.get("state") in ("finished", "preempted") and "goodput" in status else None


def _store() -> dist.Store:
    """Where the processes find each other: torchrun's store, or one in memory for a lone process, which needs no port.

    torchrun keeps its store over --max-restarts, and a process may train more than once: each attempt gets names of its
    own, because gloo would connect to the addresses of the attempt before (seen with torch 2.14.1). Where rank 0 makes
    the store, it is new at each attempt, and its name must not be: each of several torchruns counts its own restarts.
    """
    if "WORLD_SIZE" not in os.environ:
        return dist.HashStore()
    # torchrun's store is there before its processes: one that finds none is an orphan, and waits in vain.
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    asks = threading.Timer(5.0, lambda: print(f"waiting for the other processes: {_where()}", file=sys.stderr))
    if not is_torchruns and os.environ.get("RANK") == "0":
        asks.start()
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=30) if is_torchruns else JOIN_TIMEOUT))
    except (dist.DistError, OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ConfigError(f"the processes do not find each other: {reason}; {_where()}") from None
    finally:
        asks.cancel()
    store.set_timeout(TIMEOUT)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_torchruns else "0"
    return dist.PrefixStore(f"{restarts}.{next(_sessions)}", store)


def _where() -> str:
    """The variables that say where the processes meet, and what to do if they are not meant."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    names += ("SLURM_STEP_NUM_TASKS",) if "SLURM_STEP_NUM_TASKS" in os.environ else ()
    given = " ".join(f"{name}={os.environ.get(name, '')}" for name in names)
    advice = "start all tasks with srun" if len(names) > 4 else "start the script with torchrun"
    return f"{given}: {advice}, or unset {names[-1] if len(names) > 4 else 'these variables'} for a run of one process"


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


def set_kernels(cfg: Config) -> None:
    """fp32 means it: no TF32 in matrix products, convolutions or cuDNN. bf16 leaves FP32 products on TF32.

    Attention is cuDNN's, which torch prefers on Hopper, but for 64, 192, 320, ... tokens: its gradients were NaN in a
    run of 64 tokens after 785 steps (H100, torch 2.11; https://github.com/pytorch/pytorch/issues/196678 has the cause;
    benchmarks/attention_nan_h100x1.log).
    """
    torch.backends.cuda.enable_cudnn_sdp(cfg.model.num_tokens() % 128 != 64)
    torch.set_float32_matmul_precision("highest" if cfg.precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = cfg.precision != "fp32"
