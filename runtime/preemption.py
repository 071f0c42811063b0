"""Stop when asked: a signal to any rank of the job stops all of them after one and the same step.

SIGTERM (torchrun's and Slurm's), SIGUSR1 (slurm.sh's), SIGINT (Ctrl-C) and SIGHUP (a closed terminal) all mean the
same. A second Ctrl-C ends the process at once. What was ignored from the start stays so, as nohup has it for SIGHUP.

A handler only notes the signal, and notes it again if it comes again. Between two steps and between two batches of an
evaluation the ranks ask each other: a maximum over one number in host memory, begun at one step and read at the next.
So the answer is the same everywhere at the same step, however far the ranks are apart, and no host waits for its
device. The loop then saves, once, and `status.json` says `preempted`. Before the first step nothing is saved. An
evaluation is broken off; its checkpoint is marked, and the next start begins with that evaluation.

A node may also leave a run that goes on without it (`another_node_left`).

Imports nothing but the standard library at first: launch.py listens before torch, whose import takes seconds.
"""

import collections
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# The terminal sends Ctrl-C to all processes, and torchrun hands it on to its own: the same one, seconds later at most.
HANDED_ON_S = 3.0
# Torchruns that are asked alike, or that see a node join, signal their ranks within this time.
ALL_TOLD_S = 3.0
_received: list[int] = []
_first_interrupt: list[float] = []


def _note(number: int, _frame: Any) -> None:
    if number == signal.SIGINT:
        now = time.monotonic()
        patience = HANDED_ON_S if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
        if _first_interrupt and now - _first_interrupt[0] > patience:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        _first_interrupt[:] = _first_interrupt or [now]
    _received.append(number)


def listen() -> None:
    """From here on the signals are noted, and end the process no more."""
    for number in SIGNALS:
        is_optional = number in (signal.SIGINT, signal.SIGHUP)
        if not (is_optional and signal.getsignal(number) is signal.SIG_IGN):
            signal.signal(number, _note)


def ignore() -> None:
    """Let the signals pass: in a process that is done."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Block the signals while workers are forked: one that came before `shield` is called would end the worker."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def shield(_worker: int, *, rank: int) -> None:
    """Let the signals pass in a loader's worker, which must go on feeding its rank; a `worker_init_fn`.

    `rank` is the process that the worker works for: its parent only where workers are forked.

    Not those of the rank itself: multiprocessing ends a worker by SIGTERM, when the rank ends by an error, and waits
    for it. Where Python cannot tell who sent a signal (macOS), the worker is not shielded.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return

    def watch() -> None:
        while signal.sigwaitinfo(SIGNALS).si_pid != rank:
            pass
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # so that they wait for the thread
    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Listen for as long as a run lasts; afterwards all is as before, and nothing is noted."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    listen()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()
        _first_interrupt.clear()


def is_asked() -> bool:
    """Whether this very process received a signal."""
    return bool(_received)


def another_node_left() -> bool:
    """Whether other nodes alone were asked to stop, in a job that torchrun --max-restarts keeps; takes up to 3 seconds.

    A torchrun that is signalled leaves, and signals no ranks but its own. Those of the others have stopped with them,
    and must end by an error, for their torchruns to start them again with the nodes that are left: after an orderly end
    a torchrun waits for the one that has gone, and closes the job to all. When a node joins, or all are asked, each
    torchrun signals its ranks.
    """
    attempts = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    count, most = attempts
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1 or count >= most:
        return False
    deadline = time.monotonic() + ALL_TOLD_S
    while not is_asked() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_asked()


class Stop:
    """Whether this run was asked to stop. Every call of `agreed` is one that all ranks make."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.signal: signal.Signals | None = None  # once all ranks know of it
        self.group: Any = None
        self.pending: collections.deque[tuple[Any, Any]] = collections.deque()  # what was begun: its work, its number

    def agreed(self, *, wait: bool = False) -> bool:
        """Whether a rank had noted a signal when it made the call before this one; the same answer on all ranks.

        Args:
            wait: ask about this call instead: where all ranks have waited for each other anyway.
        """
        import torch
        import torch.distributed as dist

        if self.signal is not None:
            return True
        number = torch.tensor(_received[0] if _received else 0)
        if dist.get_world_size() == 1:
            self._read(number)
            return self.signal is not None
        if self.group is None:
            self.group = dist.new_group(backend="gloo", timeout=self.timeout)
        work = dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        self.pending.append((work, number))
        while len(self.pending) > (0 if wait else 1):
            work, number = self.pending.popleft()
            work.wait()
            self._read(number)
        return self.signal is not None

    def _read(self, number: Any) -> None:
        if self.signal is None and number.item():
            self.signal = signal.Signals(number.item())

    def close(self) -> None:
        """Wait for what is under way, so that the process group can end."""
        while self.pending:
            self.pending.popleft()[0].wait()
