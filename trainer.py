"""The one training loop and the one evaluation."""

from schema import Config, LossConfig, RunError, micro_batch

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import checkpoint
import preemption
import shared_memory
from augment import Mixup
from distributed import Session, set_status
from imagenet_dataset import PADDING, num_train_steps, pictures, sizes
from metrics import MetricLogger, Speed
from optim import clip_grad_norm_, lr_at
from profiling import Profiler

logger = logging.getLogger(__name__)
NEVER = torch.iinfo(torch.int64).max


@dataclasses.dataclass(frozen=True)
class Run:
    """What an entrypoint hands to the loop: everything that a strategy decides.

    Attributes:
        model: called as model(images, is_first_microbatch=None) -> logits.
        optimizer: over the (sharded) parameters.
        grad_sync: grad_sync(is_last) is the context of one forward and backward pass; only the last of a step's
            microbatches needs its gradients reduced over ranks.
        mesh: the device mesh.
        state: the tensors to save, load and clip, under timm's names.
        flops_per_image: of one forward pass.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    grad_sync: Callable[[bool], contextlib.AbstractContextManager]
    mesh: DeviceMesh
    state: checkpoint.TrainState
    flops_per_image: float


class NonFiniteError(RunError):
    """The loss or the gradient norm was not finite; the text names the step."""


def train(
    run: Run,
    cfg: Config,
    session: Session,
    *,
    loaders: tuple[DataLoader, DataLoader],
    resumed: checkpoint.Resumed,
) -> dict[str, float]:
    """Train from `resumed.step` to the end of the run; returns the last value of every metric.

    Raises:
        NonFiniteError: on all ranks together, at the next log step or save after it happened.
        RunError: on all ranks together: a checkpoint could not be written.
    """
    train_loader, val_loader = loaders
    device = session.device
    _, accumulation = micro_batch(cfg, session.world_size)
    total_steps = num_train_steps(cfg)
    start_step, best = resumed.step, resumed.best
    _introduce(run, cfg, session, start_step=start_step, total_steps=total_steps)
    shared_memory.warn_if_small(cfg, session)
    normalize, mixup = Normalize(cfg, device), Mixup(cfg)
    parameters = [weight for weight in run.state.weights.values() if weight.requires_grad]
    metrics = MetricLogger(cfg, session, start_step=start_step, total_steps=total_steps, run_id=resumed.run_id)
    speed = Speed(
        session,
        start_step=start_step,
        images_per_step=cfg.global_batch_size,
        images_per_epoch=sizes(cfg)[0],
        # Three forward passes' worth: one forward, two in the backward, of which a linear probe has next to nothing.
        # Recomputation does not count.
        flops_per_image=run.flops_per_image * (1 if cfg.model.freeze == "backbone" else 3),
    )
    profiler = Profiler(cfg, session, start_step=start_step)
    saver = checkpoint.Saver(run.state, cfg, session, run_id=resumed.run_id)
    first_bad_step = torch.full((), NEVER, device=device)  # stays on the device until a log step or a save reads it

    run.model.train()
    session.stop.agreed(wait=True)  # makes its group, before the loaders fork their workers
    with preemption.held():
        batches = iter(train_loader)
    done, is_unscored = start_step, resumed.is_unscored
    if is_unscored:  # the run was stopped in the evaluation of that step
        result = score(run, val_loader, normalize, device=device, is_stopped=session.stop.agreed)
        is_unscored = result is None
        if not is_unscored:
            metrics.write(start_step, result)
            best = _best_of(start_step, result, best, cfg.evaluation.best_metric)
            saver.set_score(start_step, best)

    are_together = True  # whether the hosts have just waited for each other
    for step in range(start_step + 1, total_steps + 1):
        # 0. Stop here if any rank was asked to: all ranks at the same step.
        if session.stop.agreed(wait=are_together):
            break
        is_last_step = step == total_steps
        lr = lr_at(step, cfg)
        for group in run.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]

        # 1. Forward and backward: the gradient of k microbatches is that of one batch of the same images.
        loss = torch.zeros((), device=device)
        for microbatch in range(accumulation):
            waiting_since = time.perf_counter()
            images, labels = next(batches)
            speed.waited += time.perf_counter() - waiting_since
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            _seed_dropout(cfg.seed, step, session.rank, microbatch)
            is_first = None if accumulation == 1 else microbatch == 0
            with run.grad_sync(microbatch == accumulation - 1):
                images, targets = mixup(normalize(images), labels, step)
                logits = run.model(images, is_first_microbatch=is_first).float()
                part = loss_of(logits, targets, cfg.loss) / accumulation
                part.backward()
            loss += part.detach()

        # 2. Clip and update.
        grad_norm = clip_grad_norm_(parameters, cfg.max_grad_norm)
        run.optimizer.step()
        run.optimizer.zero_grad()
        if run.state.ema:
            run.state.ema.update(step)
        is_bad = ~(loss.isfinite() & grad_norm.isfinite())
        first_bad_step = torch.where(is_bad & (first_bad_step == NEVER), step, first_bad_step)
        done = step
        speed.count(step)
        metrics.bar.update()

        # 3. Log: the one place where the host waits for the device.
        if step % cfg.logger.frequency == 0 or is_last_step or step == 1:
            _stop_if_not_finite(first_bad_step, saver)
            dist.all_reduce(loss)
            values = {
                "train/loss": loss.item() / session.world_size,
                "train/grad_norm": grad_norm.item(),
                "train/lr": lr,
            }
            metrics.write(step, values | speed.read())
            set_status(session, "running", step)

        # 4. Evaluate, then save: a step's checkpoint knows its score, and a new best always has one.
        is_new_best = False
        if _is_due(step, cfg.evaluation.every_n_steps, is_last_step):
            # Asked before, too: while the loader forks its workers, nothing of this may be under way in gloo's threads.
            is_unscored = session.stop.agreed(wait=True)
            if not is_unscored:
                result = score(run, val_loader, normalize, device=device, is_stopped=session.stop.agreed)
                is_unscored = result is None
            if is_unscored:
                break
            metrics.write(step, result)
            best = _best_of(step, result, best, cfg.evaluation.best_metric)
            is_new_best = best is not None and best["step"] == step
            speed.restart()
        is_save_due = is_new_best or is_last_step or _is_due(step, cfg.checkpoint.save_every_n_steps)
        are_together = is_save_due and cfg.checkpoint.ckpt_dir is not None
        if are_together:
            _stop_if_not_finite(first_bad_step, saver)
            saver.save(step, best)
            speed.restart()
        profiler.step()

    profiler.close()
    if session.stop.signal:
        if done > max(start_step, saver.step) and cfg.checkpoint.ckpt_dir is not None:
            _stop_if_not_finite(first_bad_step, saver)
            saver.save(done, best, is_unscored=is_unscored)
        logger.info("stopped after step %d: a rank received %s", done, session.stop.signal.name)
    saver.wait()
    is_finished = start_step >= total_steps and not resumed.is_unscored
    if is_finished:
        logger.info("nothing to do: the run is finished (step %d of %d)", start_step, total_steps)
    if cfg.checkpoint.ckpt_dir is not None and cfg.checkpoint.save_final_model and not session.stop.signal:
        session.afterwards.append(lambda: checkpoint.save_final_model(cfg, replace=not is_finished))
    metrics.close(done, best)
    set_status(session, "running", done)
    return metrics.last


def score(run: Run, loader: DataLoader, normalize: "Normalize", **options: Any) -> dict[str, float | int] | None:
    """`evaluate` of the weights and, with EMA, of their averages; None if either was stopped."""
    result = evaluate(run.model, loader, normalize, **options)
    if result is None or run.state.ema is None:
        return result
    with run.state.ema.in_model(run.state.exchanged):
        averaged = evaluate(run.model, loader, normalize, **options)
    return averaged and result | {f"val/ema_{key}": averaged[f"val/{key}"] for key in ("loss", "top1")}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: DataLoader,
    normalize: "Normalize",
    *,
    device: torch.device,
    is_stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float | int] | None:
    """Loss and accuracy over the whole validation set, every image counted once at any world size and batch size.

    All ranks run equally many batches of one size; what fills up the last ones carries no label and counts for nothing.
    Leaves the model in training mode, as it found it. Asks `is_stopped` before each batch, on all ranks alike, and
    returns None if it is.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, top-1 hits, top-5 hits, images
    model.eval()
    with preemption.held():
        batches = iter(loader)
    for images, labels in batches:
        if is_stopped():
            model.train()
            return None
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        logits = model(normalize(images)).float()
        is_image = labels != PADDING
        losses = F.cross_entropy(logits, labels, ignore_index=PADDING, reduction="none")
        top5 = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]  # B 5
        rows = torch.stack([losses, top5[:, 0].float(), top5.any(dim=1).float(), is_image.float()])  # 4 B
        sums += rows.double().sum(dim=1)  # padding adds nothing: its loss is ignored and no class is its label
    model.train()
    dist.all_reduce(sums)
    loss, top1, top5, images = sums.tolist()
    return {"val/loss": loss / images, "val/top1": top1 / images, "val/top5": top5 / images, "val/images": int(images)}


def loss_of(logits: torch.Tensor, targets: torch.Tensor, cfg: LossConfig) -> torch.Tensor:
    """The training loss, a mean over the batch, of `logits` (B, num_classes), float32.

    `targets` are labels (B,) or, with mixup, shares (B, num_classes); label smoothing takes each share t to
    (1 - smoothing) t + smoothing / num_classes (Szegedy et al., arXiv 1512.00567), before `loss.bce_target_thresh`, as
    in timm. softmax: cross-entropy. sigmoid: binary cross-entropy of every class, summed over classes by big_vision
    (loss.bce_sum), averaged by timm and DeiT III, where every class of a mixed picture counts in full (threshold 0).
    """
    if cfg.name == "softmax":
        return F.cross_entropy(logits, targets, label_smoothing=cfg.label_smoothing)
    if targets.ndim == 1:
        targets = torch.zeros_like(logits).scatter_(1, targets[:, None], 1.0)
    targets = (1 - cfg.label_smoothing) * targets + cfg.label_smoothing / logits.shape[1]
    if cfg.bce_target_thresh is not None:
        targets = (targets > cfg.bce_target_thresh).float()
    loss = F.binary_cross_entropy_with_logits(logits, targets)
    return loss * logits.shape[1] if cfg.bce_sum else loss


class Normalize:
    """uint8 pictures (B, C, Y, X) to floats of the data's mean 0 and deviation 1, on the device."""

    def __init__(self, cfg: Config, device: torch.device) -> None:
        def per_channel(values: tuple[float, ...]) -> torch.Tensor:
            return 255 * torch.tensor(values, device=device).view(1, -1, 1, 1)

        self.mean, self.std = per_channel(cfg.data.mean), per_channel(cfg.data.std)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """(B, C, Y, X), uint8 -> float32."""
        return (images.float() - self.mean) / self.std


def _seed_dropout(seed: int, step: int, rank: int, microbatch: int) -> None:
    """Dropout and drop path follow from (seed, step, rank, microbatch), so no generator's state need be saved."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank, microbatch]).generate_state(1, np.uint64)[0] >> 1))


def _is_due(step: int, every_n_steps: int | None, is_last_step: bool = False) -> bool:
    return every_n_steps is not None and (step % every_n_steps == 0 or is_last_step)


def _is_better(value: float, best: dict[str, Any] | None, metric: str) -> bool:
    """Whether `value` beats the best result so far; a tie does not, NaN does not. Another metric starts anew."""
    if not math.isfinite(value) or best is None or best["metric"] != metric:
        return math.isfinite(value)
    return value < best["value"] if metric.endswith("loss") else value > best["value"]


def _best_of(step: int, result: dict[str, Any], best: dict[str, Any] | None, metric: str) -> dict[str, Any] | None:
    """The best result so far, `result` of `step` included."""
    if _is_better(result[metric], best, metric):
        return {"step": step, "metric": metric, "value": result[metric]}
    return best


def _stop_if_not_finite(first_bad_step: torch.Tensor, saver: checkpoint.Saver) -> None:
    """Raise on all ranks alike if the loss or the gradient norm of any rank was not finite; an earlier save ends."""
    first = first_bad_step.clone()
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if first.item() != NEVER:
        saver.wait()
        raise NonFiniteError(
            f"the loss or the gradient norm was not finite at step {first.item()}: nothing was saved since; "
            "lower optimizer.lr, lengthen lr_scheduler.num_warmup_steps or set model.qk_norm=true"
        )


def _introduce(run: Run, cfg: Config, session: Session, *, start_step: int, total_steps: int) -> None:
    """Say what runs, once."""
    micro, accumulation = micro_batch(cfg, session.world_size)
    parameters = sum(weight.numel() for weight in run.state.weights.values())
    logger.info("mesh %s, %.2f M parameters, %s", run.mesh, parameters / 1e6, cfg.precision)
    logger.info(
        "global batch %d = %d images x %d ranks x %d microbatches; steps %d to %d, %.4g passes over %d images",
        *(cfg.global_batch_size, micro, session.world_size, accumulation, start_step + 1, total_steps),
        *(total_steps * cfg.global_batch_size / sizes(cfg)[0], sizes(cfg)[0]),
    )
    if cfg.data.source != "synthetic":
        for split in ("train", "val"):
            found = pictures(cfg.data, split)
            logger.info("%s: %d images, skipped %s", split, len(found), found.skipped or "nothing")
            labels = set(np.unique(found.labels).tolist())
            if absent := [name for label, name in enumerate(found.classes) if label not in labels]:
                logger.warning("%s: no images of %d classes: %s", split, len(absent), ", ".join(absent[:10]))
