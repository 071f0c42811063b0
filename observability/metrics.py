"""What a run reports: metrics.jsonl, the console line, the progress bar, the summary; and how speed is computed."""

import errno
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from observability import trackers
from runtime.run_folder import going_on
from runtime.session import Session
from schema import Config, RunSizes

logger = logging.getLogger(__name__)
T = TypeVar("T")
# In metrics.jsonl, wandb and TensorBoard, but too much for a console line.
QUIET = {"train/memory_allocated_gib", "train/memory_reserved_gib", "train/epoch_seconds"}

# Dense BF16 rates of tensor cores, TFLOP/s, by the card's name as torch gives it without NVIDIA and GeForce. Where a
# source has the rate with sparsity, half of it. Sources, NVIDIA's own: for data-centre cards the product's datasheet
# (A100, H100, H200, L4, L40S, A10, A30, A40, HGX B200, GB200 NVL72, ...), for RTX cards the tables "Peak BF16 Tensor
# TFLOPS with FP32 Accumulate" of the architectures' white papers (Ampere GA102 V2, Ada V2, RTX Blackwell).
PEAK_BF16_TFLOPS = {
    "A100": 312,
    "A800": 312,
    "H100": 989.4,  # SXM
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H800": 989.4,
    "H800 PCIe": 756,
    "H200": 989.4,
    "H200 NVL": 835,
    "H20": 148,
    "GH200": 989.4,
    "B200": 2250,
    "GB200": 2500,
    "L4": 121,
    "L40": 181,
    "L40S": 362,
    "A10": 125,
    "A30": 165,
    "A40": 149.7,
    "RTX A6000": 154.8,
    "RTX 6000 Ada": 364.2,
    "RTX 3080": 59.5,
    "RTX 3090": 71,
    "RTX 4080": 97.5,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
}
# What may follow in the name of the same card: "A100-SXM4-80GB", "A100 80GB PCIe", "GH200 480GB", "H100 80GB HBM3".
SAME_CARD = r"(?:[- ](?:SXM\d?|PCIE?|\d+GB|HBM\w+|Generation))*"


def top_k_hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(B, 2), bool: whether the label has the largest logit, and whether it is among the five largest.

    Args:
        logits: (B, num_classes).
        labels: (B,); one that is no class, such as padding's, is never a hit.
    """
    hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]  # B 5
    return torch.stack([hits[:, 0], hits.any(dim=1)], dim=1)


def peak_flops(device: torch.device) -> float | None:
    """Dense BF16 FLOP/s of the card by its datasheet; None for a CPU, or a card, or a part of one, not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ").removeprefix("GeForce ")
    known = [card for card in PEAK_BF16_TFLOPS if re.fullmatch(re.escape(card) + SAME_CARD, name, re.IGNORECASE)]
    return 1e12 * PEAK_BF16_TFLOPS[max(known, key=len)] if known else None


def utilization(device: torch.device) -> float | None:
    """Share (0 to 1) of the last second, or sixth of one, in which the card computed anything; None where unknown.

    NVML's number, by way of torch.cuda.utilization, which needs the package nvidia-ml-py and a whole card.
    """
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # the errors of a library that may not be there to name them
        return None


class Speed:
    """Images/s, step time, share of it spent waiting for data, memory, MFU and place in the epoch since `read`.

    `flops_per_image` are those of training on it, for the MFU.
    """

    def __init__(
        self, session: Session, cfg: Config, sizes: RunSizes, *, start_step: int, flops_per_image: float
    ) -> None:
        self.device, self.phases = session.device, session.phases
        self.images_per_step, self.sizes = sizes.global_batch_size, sizes
        self.epoch = self._epoch(start_step)
        # An epoch's time, with evaluation and saving, is known where the run sees it from its start on.
        self.epoch_start = time.perf_counter() if start_step == 0 else None
        self.epoch_seconds: float | None = None
        given = cfg.logger.peak_tflops
        peak = peak_flops(session.device) if given is None else 1e12 * given
        if peak is None and session.device.type == "cuda" and session.is_main:
            logger.warning(
                "train/mfu stays null: the rate of %s is not known here; give logger.peak_tflops=<dense BF16 TFLOP/s>",
                torch.cuda.get_device_name(session.device),
            )
        self.mfu_per_image_rate = flops_per_image / (peak * session.world_size) if peak else None
        self.restart()

    def restart(self) -> None:
        """Start a new interval: after a log line, and after what is not training (evaluation, saving)."""
        self.start = time.perf_counter()
        self.waited = 0.0
        self.steps = 0

    def timed(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; the time that getting each one takes counts as waiting for data."""
        while True:
            waiting_since = time.perf_counter()
            try:
                with self.phases.during("waiting"):
                    batch = next(batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - waiting_since
            yield batch

    def count(self, step: int) -> None:
        """Note that step `step` is done, and when an epoch ends: by the host's clock, which is a step ahead."""
        self.steps += 1
        before, self.epoch = self.epoch, self._epoch(step)
        if int(before) == int(self.epoch):
            return
        now = time.perf_counter()
        if self.epoch_start is not None:
            self.epoch_seconds = now - self.epoch_start
        self.epoch_start = now

    def _epoch(self, step: int) -> float:
        return self.sizes.samples_at(step) / self.sizes.num_train_images

    def read(self) -> dict[str, float | None]:
        """The interval's means by metric name, rounded; starts the next one. Call it when the device has caught up."""
        seconds = (time.perf_counter() - self.start) / max(self.steps, 1)
        rate = self.images_per_step / seconds
        cuda = self.device.type == "cuda"
        values = {
            "train/images_per_second": round(rate, 2),
            "train/step_time_s": round(seconds, 6),
            "train/data_wait_fraction": round(self.waited / max(self.steps, 1) / seconds, 4),
            "train/memory_peak_gib": _gib(torch.cuda.max_memory_allocated()) if cuda else None,
            "train/memory_allocated_gib": _gib(torch.cuda.memory_allocated()) if cuda else None,
            "train/memory_reserved_gib": _gib(torch.cuda.memory_reserved()) if cuda else None,
            "train/gpu_utilization": utilization(self.device),
            "train/mfu": round(rate * self.mfu_per_image_rate, 4) if self.mfu_per_image_rate else None,
            "train/epoch": round(self.epoch, 4),
            "train/epoch_seconds": round(self.epoch_seconds, 3) if self.epoch_seconds else None,
        }
        self.restart()
        return values


def _gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 3)


class MetricLogger:
    """Writes a run's metrics to every outlet, on rank 0; on other ranks it only remembers the last values."""

    def __init__(self, cfg: Config, session: Session, *, start_step: int, total_steps: int, run_id: str) -> None:
        self.session = session
        self.enabled = session.is_main
        self.start_step, self.total_steps = start_step, total_steps
        self.images = 0
        self.ckpt_dir = cfg.checkpoint.ckpt_dir
        self.start = time.perf_counter()
        self.last: dict[str, float] = {}
        self.outlets: list[trackers.TrackerThread] = []
        self.bar = tqdm(disable=True)
        if not self.enabled:
            return
        path = session.output_dir / "metrics.jsonl"
        _cut_torn_line(path)
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115  (open for the length of the run; line by line)
        if start_step < total_steps:
            self.outlets = trackers.start(cfg, session.output_dir, run_id=run_id, start_step=start_step)

    def show_bar(self, step: int, last_step: int) -> None:
        """The bar from here on: a stage's own, since its rate and the time left are those of images of one size."""
        self.bar.close()
        is_shown = self.enabled and sys.stderr.isatty()
        self.bar = tqdm(total=last_step, initial=step, unit="step", dynamic_ncols=True, disable=not is_shown)

    def count(self, images: int) -> None:
        """Note that a step of so many images is done."""
        self.images += images
        self.bar.update()

    def write(self, step: int, values: dict[str, float | None]) -> None:
        """One line of metrics.jsonl, one on the console, one point in wandb and TensorBoard."""
        known = {key: value for key, value in values.items() if value is not None}
        self.last.update(known)
        if not self.enabled:
            return
        self._append(json.dumps({"step": step, **values}).encode() + b"\n")
        logger.info("step %d/%d  %s", step, self.total_steps, "  ".join(_readable(values)))
        if "train/loss" in known:
            self.bar.set_postfix(loss=f"{known['train/loss']:.4f}", refresh=False)
        for outlet in self.outlets:
            outlet.log(step, known)

    def _append(self, line: bytes) -> None:
        """A whole line or none of it, where the disk is full."""
        path = Path(self.file.name)
        with going_on(path):
            end = path.stat().st_size
            if self.file.write(line) < len(line):
                self.file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self, step: int, best: dict[str, Any] | None) -> None:
        """Log what was done up to `step`, and close everything; call it last.

        wandb and TensorBoard are waited for after the process group is gone, so that no other rank is held up.
        """
        self.bar.close()
        if not self.enabled:
            return
        self.file.close()
        summary = self._summary(step, best)
        for outlet in self.outlets:
            self.session.afterwards.append(lambda outlet=outlet: outlet.finish(summary))

    def _summary(self, step: int, best: dict[str, Any] | None) -> dict[str, float]:
        seconds = time.perf_counter() - self.start
        rate = self.images / seconds
        summary = {"summary/seconds": round(seconds, 3), "summary/images_per_second": round(rate, 2)}
        if step > self.start_step:
            logger.info(
                "done: steps %d to %d in %s, %s images/s with evaluation and saving",
                *(self.start_step + 1, step, _duration(seconds), f"{rate:,.0f}"),
            )
        if best is not None:
            summary |= {"summary/best_step": best["step"], f"summary/best_{best['metric']}": best["value"]}
            place = f"in {self.ckpt_dir}/step_{best['step']:08d}" if self.ckpt_dir else "not saved"
            name = best["metric"].removeprefix("val/")
            logger.info("best: %s %.4f at step %d, %s", name, best["value"], best["step"], place)
        return summary


def _duration(seconds: float) -> str:
    """What people read: 12 s, 2 min 51 s, 3 h 05 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _readable(values: dict[str, Any]) -> list[str]:
    """Short names and few digits for the console: loss 0.6931  lr 1.00e-03  images/s 1,234."""
    texts = []
    for key, value in values.items():
        if value is None or key in QUIET:
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
