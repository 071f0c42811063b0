"""What one process knows of its place in the job."""

import dataclasses
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from runtime import preemption
from runtime.phases import Phases

TIMEOUT = timedelta(minutes=10)  # of a collective: a rank that waits longer gives up


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

    phases: Phases = dataclasses.field(default_factory=Phases)
    """What this process is doing."""

    @property
    def is_main(self) -> bool:
        """Whether this process prints, logs and writes the small files."""
        return self.rank == 0

    @property
    def is_restart(self) -> bool:
        """Whether torchrun started this process again (--max-restarts), to go on with what the earlier one saved."""
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    @property
    def is_orphan(self) -> bool:
        """Whether the torchrun that started this process is gone, which would otherwise stop it when another fails."""
        return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent
