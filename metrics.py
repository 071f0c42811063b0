"""What a run tells: metrics.jsonl, the console line, the progress bar, wandb; and the arithmetic of speed."""

from schema import Config

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from distributed import Session, to_plain

logger = logging.getLogger(__name__)

# Dense BF16 rates of the vendors' datasheets, FLOP/s; matched against the device's name, longest first.
PEAK_BF16_FLOPS = {
    "A100": 312e12,
    "GH200": 989.4e12,
    "H100": 989.4e12,  # SXM
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989.4e12,
    "B200": 2250e12,
    "L40S": 362e12,
}


def peak_flops(device: torch.device) -> float | None:
    """BF16 FLOP/s of the card by its datasheet; None where unknown, on a CPU too."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = sorted((key for key in PEAK_BF16_FLOPS if key in name), key=len)
    return PEAK_BF16_FLOPS[known[-1]] if known else None


class Speed:
    """Images/s, step time, share of it spent waiting for data, memory and MFU since the last `read`."""

    def __init__(self, session: Session, *, images_per_step: int, flops_per_image: float) -> None:
        self.device = session.device
        self.images_per_step = images_per_step
        peak = peak_flops(session.device)
        # Training is three forward passes' worth: one forward, two in the backward. Recomputation does not count.
        self.mfu_per_image_rate = 3 * flops_per_image / (peak * session.world_size) if peak else None
        self.restart()

    def restart(self) -> None:
        """Begin a new interval here: after a log line, and after time that is not training's (evaluation, saving)."""
        self.start = time.perf_counter()
        self.waited = 0.0
        self.steps = 0

    def read(self) -> dict[str, float | None]:
        """The interval's means, rounded to what is meant; starts the next interval. Call it in step with the device."""
        seconds = (time.perf_counter() - self.start) / max(self.steps, 1)
        rate = self.images_per_step / seconds
        cuda = self.device.type == "cuda"
        values = {
            "train/images_per_second": round(rate, 2),
            "train/step_time_s": round(seconds, 6),
            "train/data_wait_fraction": round(self.waited / max(self.steps, 1) / seconds, 4),
            "train/memory_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if cuda else None,
            "train/mfu": round(rate * self.mfu_per_image_rate, 4) if self.mfu_per_image_rate else None,
        }
        self.restart()
        return values


class MetricLogger:
    """Writes on rank 0, does nothing elsewhere."""

    def __init__(self, cfg: Config, session: Session, *, start_step: int, total_steps: int, run_id: str) -> None:
        self.enabled = session.is_main
        self.total_steps = total_steps
        self.last: dict[str, float] = {}
        self.wandb = None
        self.bar = tqdm(
            total=total_steps,
            initial=start_step,
            unit="step",
            dynamic_ncols=True,
            disable=not (self.enabled and sys.stderr.isatty()),
        )
        if not self.enabled:
            return
        path = session.output_dir / "metrics.jsonl"
        _cut_torn_line(path)
        self.file = open(path, "a", buffering=1)  # noqa: SIM115  (open for the length of the run; line by line)
        if cfg.wandb.mode != "disabled":
            import wandb  # only where it is asked for

            ours = {"mode": cfg.wandb.mode, "id": run_id, "resume": "allow", "dir": str(session.output_dir)}
            self.wandb = wandb.init(config=to_plain(cfg), **ours | cfg.wandb.init_args)

    def write(self, step: int, values: dict[str, float | None]) -> None:
        """One line of metrics.jsonl, one on the console, one point in wandb."""
        self.last.update({key: value for key, value in values.items() if value is not None})
        if not self.enabled:
            return
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        logger.info("step %d/%d  %s", step, self.total_steps, "  ".join(_readable(values)))
        if self.wandb:
            self.wandb.log({k: v for k, v in values.items() if v is not None}, step=step)

    def close(self) -> None:
        """Flush and close everything; the last thing a run does with it."""
        self.bar.close()
        if self.enabled:
            self.file.close()
        if self.wandb:
            self.wandb.finish()


def _readable(values: dict[str, Any]) -> list[str]:
    """Short names and sensible digits for the console: loss 0.6931  lr 1.00e-03  images/s 1,234."""
    texts = []
    for key, value in values.items():
        if value is None:
            continue
        name = key.removeprefix("train/").replace("images_per_second", "images/s").replace("_", " ")
        if name == "lr":
            texts.append(f"{name} {value:.2e}")
        elif name in ("images/s", "val/images"):
            texts.append(f"{name} {value:,.0f}")
        else:
            texts.append(f"{name} {value:.4f}")
    return texts


def _cut_torn_line(path: Path) -> None:
    """A killed run can leave half a line behind: cut it, so that every line of the file is JSON."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
            file.flush()
            os.fsync(file.fileno())
