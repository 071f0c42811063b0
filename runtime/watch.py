"""Who holds the job up: names the rank that hangs, its phase and its line, and ends the run; names slow ranks.

A thread of each rank tells the others once a second, through the job's store and a connection of its own, what its
rank is doing: phase, step, source line, whether it waits for other ranks, and whether it is stuck. A rank is stuck when
for distributed.hang_timeout_s neither its loop has come further nor it or a process of its own, such as a loader, has
computed, read or written anything. So a long first step that compiles, a slow disk that still delivers or a large save
that still writes is no hang. Three more rules:

- What may be still for long says so: a save gets time for its bytes (a disk's flush shows nothing), the start ten
  minutes.
- A host that waits for its GPU computes all the while. There a training step counts as stuck after ten times the
  longest one of this start, too, but not less than distributed.hang_timeout_s.
- A rank that tells nothing for distributed.hang_timeout_s is stopped, gone, or its interpreter does not run.

One rank that hangs makes all others wait for it in a collective. So the one that is named is the one that tells
nothing; else the one that is stuck and does not wait for others; else, where all wait, those that have come least far.

Rank 0 decides, and the last rank, which is mostly on another node, in case rank 0 is the one. Each rank then writes the
stacks of its threads to <output_dir>/stacks and ends with 1; torchrun ends the stopped one, or starts all anew.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import json
import multiprocessing
import os
import platform
import statistics
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from runtime.run_folder import PROJECT_DIR, set_status
from runtime.session import Session

SAMPLE_S = 0.25  # between two looks at the loop
BEAT_S = 1.0  # between two messages to the others
CONFIRM_S = 2.0  # for which a verdict must stand: ranks that stop together are noticed one after the other
WINDOW = 120  # looks, by which a rank's share of work is judged: 30 s
BUSY_CORES = 0.05  # less than this share of a core is no sign of life
TORCH_DIR = str(Path(torch.__file__).parent)


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a rank tells the others."""

    number: int  # no two are equal: a rank whose beat is the same as before has told nothing
    host: str
    pid: int
    phase: str
    step: int
    count: int  # signs of progress
    where: str  # source line
    still_s: float  # without a sign of life
    waits: bool  # for other ranks
    is_stuck: bool
    busy: dict[str, int]  # phase -> looks in which the rank did not wait for others, of the newest WINDOW
    looks: int
    is_over: bool = False

    def says(self) -> str:
        """What the line says of a rank that hangs."""
        return f"{self.phase}, step {self.step}, at {self.where}"


def blamed(beats: list[Beat], silent_s: list[float], timeout_s: float) -> list[int]:
    """The ranks that hold up the others; empty while none does.

    Args:
        beats: each rank's newest.
        silent_s: seconds since it came.
        timeout_s: distributed.hang_timeout_s.
    """
    alive = [rank for rank, beat in enumerate(beats) if not beat.is_over]
    if silent := [rank for rank in alive if silent_s[rank] > timeout_s]:
        return silent
    stuck = [rank for rank in alive if beats[rank].is_stuck]
    guilty = [rank for rank in stuck if not beats[rank].waits]
    if not guilty and len(stuck) == len(beats):
        guilty = stuck
    least = min((beats[rank].count for rank in guilty), default=0)
    return [rank for rank in guilty if beats[rank].count == least]


def slow(beats: list[Beat], factor: float) -> dict[int, tuple[float, str]]:
    """Rank -> how many times as long as the median one it works in a step, and the phase of most of that.

    In a step all ranks take the same time: who is done waits for the others. Work is what is not such waiting.
    """
    if len(beats) < 2 or any(beat.looks < WINDOW for beat in beats):
        return {}
    shares = [sum(beat.busy.values()) / beat.looks for beat in beats]
    found = {}
    for rank, share in enumerate(shares):
        others = max(statistics.median(shares[:rank] + shares[rank + 1 :]), 1 / WINDOW)
        if share > factor * others and share - others > 0.1:
            found[rank] = (share / others, max(beats[rank].busy, key=lambda phase: beats[rank].busy[phase]))
    return found


def line_of(frame: FrameType) -> str:
    """The innermost line of this repository's, and the innermost of all where that is another's."""

    def text(frame: FrameType) -> str:
        path = Path(frame.f_code.co_filename)
        shown = path.relative_to(PROJECT_DIR) if _is_ours(str(path)) else Path(*path.parts[-2:])
        return f"{shown}:{frame.f_lineno} ({frame.f_code.co_name})"

    ours: FrameType | None = frame
    while ours is not None and not _is_ours(ours.f_code.co_filename):
        ours = ours.f_back
    return text(frame) if ours is None or ours is frame else f"{text(ours)}, in {text(frame)}"


def _is_ours(path: str) -> bool:
    return path.startswith(str(PROJECT_DIR)) and "site-packages" not in path


def waits_for_others(frame: FrameType) -> bool:
    """Whether a thread whose innermost frame this is waits for other ranks, or computes gradients, which may."""
    path = frame.f_code.co_filename
    while path == f"{TORCH_DIR}/_ops.py" and frame.f_back is not None:
        frame = frame.f_back
        path = frame.f_code.co_filename
    if path.startswith(f"{TORCH_DIR}/distributed/"):
        return not path.startswith(f"{TORCH_DIR}/distributed/checkpoint/")  # which reads and writes files
    return path == f"{TORCH_DIR}/autograd/graph.py" or path == str(PROJECT_DIR / "runtime/preemption.py")


class Activity:
    """Whether this process and those that it started compute, read or write, by /proc; without one, always."""

    def __init__(self) -> None:
        self.last: tuple[float, float, int] | None = None  # time, core seconds, bytes

    def is_seen(self) -> bool:
        """Whether there was any since the last call."""
        if not Path("/proc/self/task").is_dir():
            return True
        pids = self._pids()
        cores = time.process_time() - time.thread_time()  # not this thread's own looking
        cores += sum(self._core_seconds(pid) for pid in pids[1:])
        content = sum(self._bytes(pid) for pid in pids)
        now = time.monotonic()
        before, self.last = self.last, (now, cores, content)
        if before is None:
            return True
        looking = 4096 + 1024 * len(pids)  # bytes of /proc that the looking itself reads
        return cores - before[1] > BUSY_CORES * (now - before[0]) or abs(content - before[2]) > looking

    def _pids(self) -> list[int]:
        found = [os.getpid()]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (task / "children").read_text().split())
        return found

    def _core_seconds(self, pid: int) -> float:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def _bytes(self, pid: int) -> int:
        with contextlib.suppress(OSError):  # another user's, or it has just ended
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            return sum(int(line.split()[1]) for line in lines if line.split(":")[0] in COUNTED)
        return 0


COUNTED = ("rchar", "wchar", "read_bytes", "write_bytes")


class Watch:
    """The thread of one rank."""

    def __init__(
        self,
        session: Session,
        store: dist.Store | None,
        *,
        hang_timeout_s: float | None,
        slow_rank_factor: float | None,
    ) -> None:
        self.session = session
        self.store = store.clone() if store is not None and session.world_size > 1 else None
        self.timeout_s = float("inf") if hang_timeout_s is None else hang_timeout_s
        self.factor = float("inf") if slow_rank_factor is None else slow_rank_factor
        self.loop = threading.current_thread().ident
        self.over = threading.Event()
        self.activity = Activity()
        self.looks: collections.deque[str | None] = collections.deque(maxlen=WINDOW)
        self.count, self.alive_at = -1, time.monotonic()
        self.beats = 0
        self.seen: dict[int, tuple[bytes, float]] = {}  # rank -> its newest beat, and when that came
        self.verdict: tuple[list[int], float] | None = None  # whom, and since when
        self.told_slow: dict[int, float] = {}
        self.reached_at = time.monotonic()  # when the store last answered
        self.threads = [threading.Thread(target=work, name="watch", daemon=True) for work in (self._watch, self._guard)]

    def start(self) -> None:
        """Begin to watch, if anything is asked for."""
        if (self.timeout_s, self.factor) == (float("inf"), float("inf")):
            self.threads = []
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """This rank is done: nothing of it is awaited any more."""
        self.over.set()
        for thread in self.threads:
            thread.join(2 * BEAT_S)

    def _watch(self) -> None:
        due, looked_at = 0.0, time.monotonic()
        try:
            while not self.over.wait(SAMPLE_S):
                now = time.monotonic()
                if now - looked_at > 5 * BEAT_S:  # this process itself was stopped, or had no core: it knows nothing
                    self.alive_at, self.verdict = now, None
                    self.seen = {rank: (beat, now) for rank, (beat, _) in self.seen.items()}
                looked_at = now
                where, waits = self._look()
                if self.session.phases.name in ("training", "waiting"):
                    self.looks.append(None if waits else self.session.phases.name)
                if now >= due and where is not None:
                    due = now + BEAT_S
                    self._exchange(self._beat(where, waits))
            if self.store is not None:
                self.store.set(f"watch/{self.session.rank}", "over")
        except RuntimeError:  # the store is gone, and with it the torchrun that ends this job
            return

    def _guard(self) -> None:
        """The store itself may hang, with the process that holds it."""
        if self.store is None:
            return
        looked_at = time.monotonic()
        while self.threads[0].is_alive() and not self.over.wait(BEAT_S):
            now = time.monotonic()
            if now - looked_at > 5 * BEAT_S:
                self.reached_at = now
            looked_at = now
            if now - self.reached_at > self.timeout_s + CONFIRM_S:
                holder = "torchrun on" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0 on"
                self._end(
                    f"{holder} {os.environ.get('MASTER_ADDR')}, which holds the job's store, tells nothing for "
                    f"{now - self.reached_at:.0f} s",
                    speaks=self.session.rank == self.session.world_size - 1,
                )

    def _look(self) -> tuple[str | None, bool]:
        """Where the loop is, or the thread that writes a checkpoint while the loop waits for that; whether it waits.

        No frame is kept: it would keep its variables, an update's gradients among them.
        """
        frames = sys._current_frames()
        frame = frames.get(self.loop or 0)
        if self.session.phases.name == "saving":
            for thread in threading.enumerate():
                other = frames.get(thread.ident or 0)
                is_idle = other is None or other.f_code.co_filename.endswith("concurrent/futures/thread.py")
                if thread.name.startswith("checkpoint") and not is_idle:
                    frame = other
        if frame is None:
            return None, False
        return line_of(frame), self.session.world_size > 1 and waits_for_others(frame)

    def _beat(self, where: str, waits: bool) -> Beat:
        phases, now = self.session.phases, time.monotonic()
        name, count, allowance_s = phases.name, phases.count, phases.allowance_s
        if count != self.count:
            self.count, self.alive_at, self.activity.last = count, now, None
        elif self.activity.is_seen():
            self.alive_at = now
        still_s = now - self.alive_at
        is_stuck = still_s > self.timeout_s + allowance_s
        if self.session.device.type == "cuda" and name == "training" and phases.logs >= 3:
            longest_s = phases.longest_s.get(name, float("inf"))
            is_stuck = is_stuck or now - phases.since > max(self.timeout_s, 10 * longest_s)
        self.beats += 1
        return Beat(
            self.beats,
            platform.node(),
            os.getpid(),
            name,
            phases.step,
            count,
            where,
            round(max(still_s, now - phases.since if is_stuck else 0.0), 1),
            waits,
            is_stuck,
            dict(collections.Counter(phase for phase in list(self.looks) if phase is not None)),
            len(self.looks),
        )

    def _exchange(self, beat: Beat) -> None:
        """Tell the others, hear of a verdict, and at the judges come to one."""
        session = self.session
        if self.store is None:
            self.reached_at = time.monotonic()
            self._judge([beat], [0.0])
            return
        self.store.set(f"watch/{session.rank}", json.dumps(dataclasses.asdict(beat)))
        if self.store.check(["watch/verdict"]):
            self._end(self.store.get("watch/verdict").decode().partition(" ")[2], speaks=False)
        self.reached_at = now = time.monotonic()
        if session.rank not in (0, session.world_size - 1):
            return
        keys = [f"watch/{rank}" for rank in range(session.world_size)]
        if len(self.seen) < session.world_size and not self.store.check(keys):
            return
        for rank, found in enumerate(self.store.multi_get(keys)):
            if self.seen.get(rank, (b"", now))[0] != found:
                self.seen[rank] = (found, now)
        told = [self.seen[rank] for rank in range(session.world_size)]
        beats = [OVER if found == b"over" else Beat(**json.loads(found)) for found, _ in told]
        self._judge(beats, [now - came for _, came in told])

    def _judge(self, beats: list[Beat], silent_s: list[float]) -> None:
        now, ranks = time.monotonic(), blamed(beats, silent_s, self.timeout_s)
        if not ranks:
            self.verdict = None
        elif self.verdict is None or self.verdict[0] != ranks:
            self.verdict = (ranks, now)
        elif now - self.verdict[1] >= CONFIRM_S:
            self._end(self._text(beats, silent_s, ranks), speaks=True)
        if self.session.is_main:
            for rank, (factor, phase) in slow(beats, self.factor).items():
                if now - self.told_slow.get(rank, -1e9) > 600:
                    self.told_slow[rank] = now
                    self._say(
                        f"warning: rank {rank} ({beats[rank].host}) is slow: for {WINDOW * SAMPLE_S:.0f} s it worked "
                        f"{factor:.1f} times as long in a step as the median rank, most of it in {phase}"
                    )

    def _text(self, beats: list[Beat], silent_s: list[float], ranks: list[int]) -> str:
        parts = []
        for rank in ranks:
            beat, silent = beats[rank], silent_s[rank]
            is_silent = silent > self.timeout_s
            how = f"tells nothing for {silent:.0f} s, last" if is_silent else f"hangs for {beat.still_s:.0f} s"
            parts.append(f"rank {rank} ({beat.host}, process {beat.pid}) {how} in {beat.says()}")
        return "; ".join(parts)

    def _end(self, text: str, *, speaks: bool) -> None:
        """End this process; the first judge's words are everybody's."""
        session = self.session
        if speaks and self.store is not None and time.monotonic() - self.reached_at < self.timeout_s:
            ours = f"{session.rank} {text}"
            speaks = self.store.compare_set("watch/verdict", "", ours).decode() == ours
        if self.over.is_set():
            return
        folder = session.output_dir / "stacks"
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            with open(folder / f"rank_{session.rank:04d}.txt", "a") as file:
                print(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}", file=file, flush=True)
                faulthandler.dump_traceback(file)
        if speaks:
            self._say(
                f"error: {text}; stacks of all ranks in {folder}; the key is "
                f"distributed.hang_timeout_s={self.timeout_s:g}"
            )
            with contextlib.suppress(OSError, ValueError):
                set_status(dataclasses.replace(session, rank=0), "failed")
        time.sleep(CONFIRM_S)  # in which all write their stacks: torchrun ends the others once one has gone
        for worker in multiprocessing.active_children():
            worker.kill()  # one that is stopped would stay
        os._exit(1)

    def _say(self, text: str) -> None:
        """On the console as other errors, and in train.log."""
        print(text, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError), open(self.session.output_dir / "train.log", "a") as log:
            print(f"{time.strftime('%H:%M:%S')} {text}", file=log)


OVER = Beat(0, "", 0, "over", 0, 0, "", 0.0, True, False, {}, 0, is_over=True)
