"""What this process is doing, how far it has come, and where the seconds of a run went, over all its starts.

    starting     from the process group to the first step: building the model, loading a checkpoint, starting loaders
    training     steps
    waiting      for the next batch of a step
    evaluation   with the reading of its images
    saving       checkpoints and final_model
    lost         what was done since the checkpoint that the next start went on from, and the time until that start
    stopped      between an orderly end (preempted, finished) and the next start

They add up to the time that has passed since the run's first start. Rank 0's are the run's.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

START_ALLOWANCE_S = 600.0  # to form groups, load weights, list and open data
KINDS = ("starting", "training", "waiting", "evaluation", "saving", "lost", "stopped")


class Phases:
    """One process's. Only the loop's thread changes it; the watch's reads it."""

    def __init__(self) -> None:
        self.name = "starting"
        self.allowance_s = START_ALLOWANCE_S
        """Seconds beyond the usual that this phase may pass without a sign of life."""
        self.step = 0
        """The update that is under way."""
        self.count = 0
        """Signs of progress: equal on all ranks where they are at the same place."""
        self.logs = 0
        """Log lines of this start."""
        self.longest_s: dict[str, float] = {}
        """Phase -> its longest time between two signs of progress, since the first log line."""
        self.since = time.monotonic()
        self.start = time.time()
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self.ended: dict[str, Any] | None = None  # status.json of the start before this one, if that ended in order
        self.began: float | None = None  # when the run's first start was; None until `place`

    def begin(self, name: str, allowance_s: float = 0.0) -> None:
        """From here on it is `name`."""
        self._switch(name, allowance_s)

    @contextlib.contextmanager
    def during(self, name: str, allowance_s: float = 0.0) -> Iterator[None]:
        """Inside, it is `name`; seconds inside count for that alone."""
        before = self.name, self.allowance_s
        self._switch(name, allowance_s)
        try:
            yield
        finally:
            self._switch(*before)

    def tick(self) -> None:
        """A sign of progress within a phase."""
        self._switch(self.name, self.allowance_s)

    def logged(self) -> None:
        """A log line was written. Until the first one, compilers and caches make every phase longer than it will be."""
        self.tick()
        self.logs += 1
        if self.logs == 1:
            self.longest_s.clear()

    def _switch(self, name: str, allowance_s: float) -> None:
        now = time.monotonic()
        passed = now - self.since
        self.seconds[self.name] += passed
        self.longest_s[self.name] = max(passed, self.longest_s.get(self.name, 0.0))
        self.since, self.name, self.allowance_s = now, name, allowance_s
        self.count += 1

    def place(self, step: int, saved: dict[str, Any] | None) -> None:
        """Say what this start goes on from: the checkpoint of `step`, which has the `totals` of when it was written.

        What came after it is lost, unless the run then ended in order, with no further step. A start that goes on from
        its own checkpoint (data.size_schedule) has said so before, and counts on.
        """
        if self.began is not None:
            return
        earlier, gap = saved, "lost"
        if self.ended is not None and self.ended["step"] == step:
            earlier, gap = self.ended["goodput"], "stopped"
        self.began = self.start
        if earlier is not None:
            self.began = earlier["began"]
            for kind, seconds in earlier["seconds"].items():
                self.seconds[kind] += seconds
            self.seconds[gap] += max(self.start - earlier["until"], 0.0)

    def totals(self) -> dict[str, Any] | None:
        """`began`, `until` (now), and the seconds of each kind in between; None before `place`."""
        if self.began is None:
            return None
        seconds = dict(self.seconds)
        seconds[self.name] += time.monotonic() - self.since
        until = self.began + sum(seconds.values())
        return {
            "began": round(self.began, 3),
            "until": round(until, 3),
            "seconds": {kind: round(value, 3) for kind, value in seconds.items()},
        }
