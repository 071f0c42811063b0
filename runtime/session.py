"""What one process knows of its place in the job."""

import dataclasses
import os
import platform
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
    def torchrun(self) -> str | None:
        """The torchrun that started this process, by a name that no other has; None where there is none."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        stat = Path(f"/proc/{self.parent}/stat")
        # When it began, too: numbers of processes come again.
        began = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else ""
        return f"{platform.node()} {self.parent} {began}"

    @property
    def is_orphan(self) -> bool:
        """Whether the torchrun that started this process is gone, which would otherwise stop it when another fails."""
        return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent
