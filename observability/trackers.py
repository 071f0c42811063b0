"""wandb and TensorBoard, beside metrics.jsonl: on rank 0 only, and never a reason for a run to stop or to wait.

Each library is called from a thread of its own. If it raises, or does not reach its server, the run logs one warning
and goes on without it; metrics.jsonl has every value anyway. Training and validation share one axis, the step.
"""

import contextlib
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from schema import Config, to_plain

logger = logging.getLogger(__name__)
PATIENCE = 20.0  # seconds that a finished run waits for a library to finish, too: less than torchrun lets it live


class WandbTracker:
    """One run at Weights & Biases, the same one over all resumes: its id is the run's own, which checkpoints keep."""

    name = "wandb"

    def __init__(self, cfg: Config, output_dir: Path, run_id: str, start_step: int) -> None:
        import wandb  # only where it is asked for

        self.wandb = wandb
        args = dict(cfg.wandb.init_args)
        # What the console shows is in train.log already, and wandb would catch a progress bar's every move.
        args["settings"] = {"console": "off"} | (args.get("settings") or {})
        ours = {"mode": cfg.wandb.mode, "id": run_id, "resume": "allow", "dir": str(output_dir)}
        self.args: dict[str, Any] = {"config": to_plain(cfg)} | ours | args

    def start(self) -> None:
        """Reach the server, or open the file of an offline run."""
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(PATIENCE))  # wandb's own limit, at exit too
        with _no_questions():
            self.run = self.wandb.init(**self.args)
        # An axis of our own: by its own counter, which only grows, wandb would drop the steps that a resumed run takes
        # for the second time.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send one step's values, as one row."""
        self.run.log({"step": step, **values})

    def finish(self, summary: dict[str, float]) -> None:
        """Send the summary, then close the run."""
        try:
            self.run.summary.update(summary)
        finally:
            self.run.finish()


class TensorBoardTracker:
    """Event files in <output_dir>/tensorboard: one curve a metric, over all resumes."""

    name = "tensorboard"

    def __init__(self, cfg: Config, output_dir: Path, run_id: str, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only where it is asked for

        self.make = lambda: SummaryWriter(output_dir / "tensorboard", purge_step=start_step + 1)  # later lines count
        self.texts = {"run_id": run_id, "config": f"```\n{yaml.safe_dump(to_plain(cfg), sort_keys=False)}```"}
        self.start_step = start_step

    def start(self) -> None:
        """Open the event file."""
        self.writer = self.make()
        for name, text in self.texts.items():
            self.writer.add_text(name, text, self.start_step)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write one point a metric; they are on the disk when it returns."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self, summary: dict[str, float]) -> None:
        """Write the summary as a text, then close the file."""
        self.writer.add_text("summary", f"```\n{json.dumps(summary, indent=1)}\n```", self.start_step)
        self.writer.close()


class TrackerThread:
    """The thread that calls one library, and the one place where its errors are caught."""

    def __init__(self, kind: type[WandbTracker] | type[TensorBoardTracker], *args: Any) -> None:
        self.name = kind.name
        self.is_over = False
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._feed, name=self.name, daemon=True)
        with self._failures():
            # Imported in the main thread: a loader process that is forked in the middle of an import could find the
            # import's lock taken for good.
            self.tracker = kind(*args)
            self.calls.put(self.tracker.start)
            self.thread.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Hand over one step's values; returns at once."""
        if not self.is_over:
            self.calls.put(lambda: self.tracker.log(step, values))

    def finish(self, summary: dict[str, float]) -> None:
        """Hand over the summary, and wait for the library to be done, but no longer than PATIENCE."""
        if self.is_over:
            return
        self.calls.put(lambda: self.tracker.finish(summary))
        self.calls.put(None)
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            self._give_up(f"not done {PATIENCE:.0f} s after the run")

    def _feed(self) -> None:
        """What the thread does: make the calls that were handed over, in order, until None."""
        with self._failures():
            while (call := self.calls.get()) is not None:
                call()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any kind: it is not our code, and no run should end for it
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._give_up(f"{type(error).__name__}: {text}")

    def _give_up(self, reason: str) -> None:
        if not self.is_over:
            self.is_over = True
            logger.warning("%s: %s; the run goes on without it, metrics.jsonl has every value", self.name, reason)


def start(cfg: Config, output_dir: Path, *, run_id: str, start_step: int) -> list[TrackerThread]:
    """A running thread for each library that the config asks for; call it on rank 0."""
    asked_for = {WandbTracker: cfg.wandb.mode != "disabled", TensorBoardTracker: cfg.tensorboard.enabled}
    return [TrackerThread(kind, cfg, output_dir, run_id, start_step) for kind, is_on in asked_for.items() if is_on]


@contextlib.contextmanager
def _no_questions() -> Iterator[None]:
    """Inside, there is no terminal: without a key wandb would ask for one there, and the run would wait."""
    stdin = sys.stdin
    with open(os.devnull) as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = stdin
