"""A profile of chosen steps on chosen ranks, by the config's `profiler` section, in <output_dir>/profile.

    trace_rank0_steps20-22.json.gz  torch.profiler's timeline, for https://ui.perfetto.dev
    top_rank0_steps20-22.txt        its longest operations, as a table
    memory_rank0_steps20-22.pickle  allocations and frees with their stacks, for https://docs.pytorch.org/memory_viz

The steps in a name are the first and the last profiled one.
"""

import logging

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from runtime.session import Session
from schema import Config, ConfigError, RunSizes

logger = logging.getLogger(__name__)


def check(cfg: Config, sizes: RunSizes) -> None:
    """Refuse what cannot be profiled, before a process group starts.

    Raises:
        ConfigError: a rank or a step that the run does not have; a memory snapshot without CUDA.
    """
    wanted, last = cfg.profiler, cfg.profiler.first_step + cfg.profiler.num_steps - 1
    if not (wanted.trace or wanted.memory_snapshot):
        return
    if wanted.memory_snapshot and not torch.cuda.is_available():
        raise ConfigError("profiler.memory_snapshot=true needs a CUDA GPU: set it to false here")
    ranks = list(wanted.ranks or ())
    if absent := [rank for rank in ranks if rank >= sizes.world_size]:
        raise ConfigError(
            f"profiler.ranks={ranks}: there is no rank {absent[0]} in a job of {sizes.world_size}; "
            "leave it out, or set null for all ranks"
        )
    if last > (total := sizes.num_train_steps):
        raise ConfigError(
            f"profiler.first_step={wanted.first_step} and profiler.num_steps={wanted.num_steps} end at step {last}, "
            f"the run at step {total}: profile earlier or fewer steps"
        )


class Profiler:
    """Profiles this rank's steps, if the config asks for any; call `step` after each one."""

    def __init__(self, cfg: Config, session: Session, *, start_step: int) -> None:
        wanted = cfg.profiler
        self.first, self.last = wanted.first_step, wanted.first_step + wanted.num_steps - 1
        self.done = start_step
        self.profile = None
        is_chosen = wanted.ranks is None or session.rank in wanted.ranks
        self.is_snapshot_due = wanted.memory_snapshot and is_chosen
        if not is_chosen or not (wanted.trace or wanted.memory_snapshot):
            return
        self.folder = session.output_dir / "profile"
        self.name = f"rank{session.rank}_steps{self.first}-{self.last}"
        if start_step >= self.first:
            logger.warning("profiler: no profile: the run goes on after step %d, past %d", start_step, self.first)
            self.is_snapshot_due = False
            return
        self.folder.mkdir(exist_ok=True)
        if wanted.trace:
            before = self.first - 1 - start_step
            warmup = min(before, 1)  # a step that is traced and thrown away: the first one pays for the tracer's start
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (session.device.type == "cuda")
            self.profile = profile(
                activities=activities,
                schedule=schedule(wait=before - warmup, warmup=warmup, active=wanted.num_steps, repeat=1),
                on_trace_ready=self._write_trace,
                record_shapes=wanted.record_shapes,
                with_stack=wanted.with_stack,
            )
            self.profile.start()
        self._before_step()

    def step(self) -> None:
        """Note that one more step is done."""
        self.done += 1
        if self.profile is not None:
            self.profile.step()
            if self.done == self.last:
                self.close()
        if self.is_snapshot_due and self.done == self.last:
            self._write_snapshot()
        self._before_step()

    def close(self) -> None:
        """Stop tracing; where the run ended early, what was traced until then is written."""
        if self.profile is not None:
            self.profile.stop()
            self.profile = None

    def _before_step(self) -> None:
        if self.is_snapshot_due and self.done == self.first - 1:
            # The leading underscore notwithstanding, the documented way to a memory snapshot: "Understanding CUDA
            # Memory Usage" in torch's documentation, https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
            torch.cuda.memory._record_memory_history()

    def _write_snapshot(self) -> None:
        self.is_snapshot_due = False
        path = self.folder / f"memory_{self.name}.pickle"
        try:
            torch.cuda.memory._dump_snapshot(str(path))  # documented as _record_memory_history is
            logger.info("profiler: wrote %s", path)
        except OSError as error:
            logger.warning("profiler: could not write %s: %s", path, error)
        torch.cuda.memory._record_memory_history(enabled=None)

    def _write_trace(self, profile: profile) -> None:
        path = self.folder / f"trace_{self.name}.json.gz"
        try:
            profile.export_chrome_trace(str(path))
            key = "self_cuda_time_total" if ProfilerActivity.CUDA in profile.activities else "self_cpu_time_total"
            table = profile.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=80)
            (self.folder / f"top_{self.name}.txt").write_text(table)
            logger.info("profiler: wrote %s", path)
        except OSError as error:  # a full disk is no reason to lose the run
            logger.warning("profiler: could not write %s: %s", path, error)
