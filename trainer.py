"""The one step, the one training loop and the one evaluation."""

import contextlib
import dataclasses
import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import checkpoint
from imagenet_dataset import PADDING, Batch, build_loaders, list_images, resident_images, stage_sizes
from input_pipeline.augment import Mixup
from observability.fp8_statistics import Fp8Statistics
from observability.metrics import MetricLogger, Speed, top_k_hits
from observability.profiling import Profiler
from optim import clip_grad_norm_, lr_at
from packing import Packed
from runtime import cuda_graphs, preemption, seeding, shared_memory
from runtime.phases import START_ALLOWANCE_S
from runtime.process_group import set_kernels
from runtime.run_folder import changed_keys, set_status, write_config
from runtime.session import Session
from schema import Config, DistillationConfig, LossConfig, RunError, RunSizes, peak_lr, peak_lr_in_words

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
        teacher: teacher(images) -> logits, to learn from beside the labels; None without distillation.
        release: called before another stage's run is made: lets go of what garbage collection cannot.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    grad_sync: Callable[[bool], contextlib.AbstractContextManager]
    mesh: DeviceMesh
    state: checkpoint.TrainState
    flops_per_image: float
    teacher: Callable[[torch.Tensor], torch.Tensor] | None
    release: Callable[[], None] = lambda: None


class NonFiniteError(RunError):
    """The loss or the gradient norm was not finite; the text names the step."""


@dataclasses.dataclass
class Progress:
    """Where the loop is: what a stop has to save, and the next start to go on from."""

    step: int
    """Finished updates."""
    best: dict[str, Any] | None
    """The best validation result so far: {"step", "metric", "value"}."""
    is_unscored: bool
    """Whether the evaluation of `step` was broken off, for the next start to do again."""
    scores: dict[str, float] | None = None
    """What the evaluation of `step` found; None where there was none."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one update leaves to be logged; tensors stay on the device."""

    loss: torch.Tensor
    """This rank's part: the mean over its microbatches, a float32 scalar."""
    grad_norm: torch.Tensor
    """Global, before clipping, a float32 scalar."""
    lr: float
    padding: torch.Tensor | None
    """With data.packing: the share of this rank's tokens that no image has, a float32 scalar."""


def train(build: Callable[[Config, Session, RunSizes], Run], cfg: Config, session: Session) -> dict[str, float]:
    """One training run, from where its checkpoints left it; returns the last value of every metric.

    With data.size_schedule the run is a row of stages, each with images of one size. A stage ends with a checkpoint,
    and the next one begins as a resumed run does, with all that knows the size made anew: model, optimizer, loaders,
    graphs. So it makes no difference whether the run was stopped before a border, at it or after it.

    Args:
        build: makes what a strategy decides, of the run or of a stage.
        cfg: the run's.
        session: the process's.

    Raises:
        NonFiniteError: on all ranks together, at the next log step or save after it happened.
        RunError: on all ranks together: a checkpoint could not be written.
    """
    configs = cfg.stages()
    stages = list(zip(configs, stage_sizes(cfg, session.world_size), strict=False))
    if absent := len(configs) - len(stages):
        logger.warning("data.size_schedule: the run ends before its last %d entries", absent)
    beginning = None
    if len(stages) > 1:
        beginning = checkpoint.beginning_of(cfg, session)
        first = beginning.step - beginning.is_unscored
        stages = [*(stage for stage in stages[:-1] if first < stage[1].last_step), stages[-1]]
    metrics, profiler, resident = None, None, None
    for number, (stage, sizes) in enumerate(stages):
        if number:
            logger.info("from step %d on images of %s px", sizes.first_step + 1, stage.model.img_size)
            stage, beginning = _at_border(stage, session), None
        set_kernels(stage)
        run = build(stage, session, sizes)
        resumed = checkpoint.restore(run.state, stage, session, sizes, beginning)
        loaders = build_loaders(stage, sizes, rank=session.rank, start_step=resumed.step, resident=resident)
        if metrics is None or profiler is None:
            total = sizes.num_train_steps
            metrics = MetricLogger(cfg, session, start_step=resumed.step, total_steps=total, run_id=resumed.run_id)
            profiler = Profiler(cfg, session, start_step=resumed.step)
        given = {"loaders": loaders, "resumed": resumed, "metrics": metrics, "profiler": profiler}
        progress = train_stage(run, stage, session, sizes, whole=cfg, **given)
        if session.stop.signal:
            break
        resident = resident_images(loaders[0])
        run.release()
        del run, loaders, given  # before the next stage's are made
    assert metrics is not None  # the last stage is always there
    assert profiler is not None
    profiler.close()
    metrics.close(progress.step, progress.best)
    set_status(session, "running", progress.step)
    return metrics.last


def _at_border(stage: Config, session: Session) -> Config:
    """Get ready for another image size; the stage's config, which goes on from the checkpoint of the one before it."""
    session.phases.begin("starting", START_ALLOWANCE_S)
    gc.collect()  # a wrapped model is full of circles
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
    torch.compiler.reset()  # else a second size would have torch.compile make all sizes dynamic
    return dataclasses.replace(stage, checkpoint=dataclasses.replace(stage.checkpoint, resume_from_checkpoint=True))


def train_stage(
    run: Run,
    cfg: Config,
    session: Session,
    sizes: RunSizes,
    *,
    whole: Config,
    loaders: tuple[Iterable[Batch], Iterable[Batch]],
    resumed: checkpoint.Resumed,
    metrics: MetricLogger,
    profiler: Profiler,
) -> Progress:
    """Train from `resumed.step` to the end of the run, or of a stage; returns where that left it.

    Args:
        run: what the entrypoint made.
        cfg: the run's or the stage's.
        session: the process's.
        sizes: the run's or the stage's.
        whole: the run's config.
        loaders: of training and validation.
        resumed: where to go on from.
        metrics: the run's.
        profiler: the run's.
    """
    train_loader, val_loader = loaders
    last_step, saves = sizes.last_step, cfg.checkpoint.ckpt_dir is not None
    ends_run = last_step == sizes.num_train_steps
    was_finished = resumed.step >= last_step and not resumed.is_unscored
    if not was_finished:
        write_config(whole, session)
    _introduce(run, cfg, session, sizes, start_step=resumed.step)
    shared_memory.warn_if_small(cfg, session)
    normalize, mixup = Normalize(cfg, session.device), Mixup(cfg)
    metrics.show_bar(resumed.step, last_step)
    # Three forward passes' worth: one forward, two in the backward, of which a linear probe has next to nothing.
    # Neither recomputation nor a teacher's forward pass counts.
    flops = run.flops_per_image * (1 if cfg.model.freeze == "backbone" else 3)
    speed = Speed(session, cfg, sizes, start_step=resumed.step, flops_per_image=flops)
    fp8_statistics = Fp8Statistics(run.model, cfg, session)
    saver = checkpoint.Saver(run.state, cfg, session, sizes, resumed=resumed, whole=whole)
    check = FiniteCheck(session.device, saver)
    progress = Progress(resumed.step, resumed.best, resumed.is_unscored)
    forward_backward = pass_of(run, cfg, sizes)

    def is_stopped() -> bool:
        session.phases.tick()  # a batch further
        return session.stop.agreed()

    @session.phases.during("evaluation")
    def evaluate_now() -> bool:
        """Score the weights and note the best result; False where a stop broke it off."""
        # Asked before, too: while the loader forks its workers, nothing of this may be under way in gloo's threads.
        result = None
        if not session.stop.agreed(wait=True):
            copies = sizes.world_size // sizes.dp_size
            options = {"device": session.device, "copies": copies, "is_stopped": is_stopped}
            result = score(run, val_loader, normalize, **options)
        progress.is_unscored = result is None
        run.state.after_exchange()  # a recorded pass gathers the weights for itself, and says so to nobody
        if result is None:
            return False
        metrics.write(progress.step, result)
        progress.scores = result
        progress.best = _best_of(progress.step, result, progress.best, cfg.evaluation.best_metric)
        speed.restart()
        return True

    run.model.train()
    session.stop.agreed(wait=True)  # makes its group, before the loaders fork their workers
    with preemption.held():
        batches = iter(train_loader)
    if progress.is_unscored and evaluate_now():  # the run was stopped in the evaluation of the step it goes on from
        saver.set_score(progress.step, progress.best, progress.scores)
        if cfg.data.packing.enabled:  # rows of several lengths: the training's would be compiled for any length, too
            torch.compiler.reset()

    session.phases.begin("training")
    hosts_are_together = True  # whether the ranks have just waited for each other
    for step in range(resumed.step + 1, last_step + 1):
        # 0. Stop here if any rank was asked to: all ranks at the same step.
        session.phases.step = step
        if session.stop.agreed(wait=hosts_are_together):
            break
        is_last_step = step == last_step

        # 1. and 2. Forward and backward, clip, update.
        with fp8_statistics.of(step):
            result = train_step(
                run,
                forward_backward,
                speed.timed(batches),
                cfg,
                sizes,
                step=step,
                rank=sizes.dp_rank(session.rank),
                normalize=normalize,
                mixup=mixup,
            )
        progress.step, progress.scores = step, None
        check.note(step, result)
        speed.count(step)
        metrics.count(sizes.global_batch_size)

        # 3. Log: the one place where the host waits for the device.
        if step % cfg.logger.frequency == 0 or is_last_step or step == 1:
            check.stop_if_not_finite()
            metrics.write(step, _values_of(result, session) | speed.read())
            session.phases.logged()
            set_status(session, "running", step)

        # 4. Evaluate, then save: a step's checkpoint knows its score, and a new best always has one.
        if _is_due(step - sizes.first_step, sizes.evaluate_every, is_last_step):
            check.stop_if_not_finite()
            if not evaluate_now():
                break
        is_new_best = progress.best is not None and progress.best["step"] == step
        hosts_are_together = saves and (
            is_new_best or is_last_step or _is_due(step - sizes.first_step, sizes.save_every)
        )
        if hosts_are_together:
            check.stop_if_not_finite()
            saver.save(step, progress.best, scores=progress.scores)
            speed.restart()
        profiler.step()

    if session.stop.signal:
        if saves and progress.step > max(resumed.step, saver.step):
            check.stop_if_not_finite()
            scores = {"scores": progress.scores, "is_unscored": progress.is_unscored}
            saver.save(progress.step, progress.best, **scores)
        logger.info("stopped after step %d: a rank received %s", progress.step, session.stop.signal.name)
    saver.wait()
    if was_finished:
        logger.info("nothing to do: the run is finished (step %d of %d)", resumed.step, last_step)
        if session.is_main and (changed := changed_keys(whole, session)):
            logger.warning("config.yaml stays as the run had it, without %s", ", ".join(changed[:5]))
    if saves and ends_run and cfg.checkpoint.save_final_model and not session.stop.signal:
        session.afterwards.append(lambda: checkpoint.save_final_model(cfg, replace=not was_finished))
    return progress


def pass_of(run: Run, cfg: Config, sizes: RunSizes) -> cuda_graphs.ForwardBackward:
    """A function: (number of the microbatch, images, targets) -> its part of the step's loss, gradients added up."""

    def forward_backward(
        microbatch: int, images: torch.Tensor, targets: torch.Tensor, answers: torch.Tensor | None = None
    ) -> torch.Tensor:
        is_first = None if sizes.accumulation == 1 else microbatch == 0
        with run.grad_sync(microbatch == sizes.accumulation - 1):
            logits = run.model(images, is_first_microbatch=is_first).float()
            part = objective(logits, targets, answers, cfg) / sizes.accumulation
            part.backward()
        return part.detach()

    one_pass: cuda_graphs.ForwardBackward = forward_backward
    if cfg.cuda_graphs:
        one_pass = cuda_graphs.GraphedPass(forward_backward, run.optimizer, accumulation=sizes.accumulation)
    if (teacher := run.teacher) is None:
        return one_pass
    # Asked outside of a recorded pass: what timm's models do on the way is not ours.
    return lambda microbatch, images, targets: one_pass(microbatch, images, targets, teacher(images))


def train_step(
    run: Run,
    forward_backward: cuda_graphs.ForwardBackward,
    batches: Iterator[Batch],
    cfg: Config,
    sizes: RunSizes,
    *,
    step: int,
    rank: int,
    normalize: "Normalize",
    mixup: Mixup,
) -> StepResult:
    """Update number `step`, 1 being the first, from the next microbatches; the host does not wait for the device."""
    lr = lr_at(step, cfg, sizes)
    for group in run.optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]

    # 1. Forward and backward: the gradient of k microbatches is that of one batch of the same images.
    device = normalize.mean.device
    loss = torch.zeros((), device=device)
    padding: list[torch.Tensor] = []
    for microbatch in range(sizes.accumulation):
        images, labels = next(batches)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        seeding.dropout(cfg.seed, step, rank, microbatch)
        if isinstance(images, Packed):
            padding.append(images.padding_fraction(cfg.model.num_prefix_tokens()))
        loss += forward_backward(microbatch, *mixup(normalize(images), labels, step))

    # 2. Clip and update.
    grad_norm = clip_grad_norm_(run.state.trained, cfg.max_grad_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if run.state.ema:
        run.state.ema.update(step)
    return StepResult(loss, grad_norm, lr, torch.stack(padding).mean() if padding else None)


class FiniteCheck:
    """The first step whose loss or gradient norm was not finite, kept on the device until a log step or a save asks."""

    def __init__(self, device: torch.device, saver: checkpoint.Saver) -> None:
        self.first_bad_step = torch.full((), NEVER, device=device)
        self.saver = saver

    def note(self, step: int, result: StepResult) -> None:
        """Take up one step, without waiting for the device."""
        is_bad = ~(result.loss.isfinite() & result.grad_norm.isfinite())
        self.first_bad_step = torch.where(is_bad & (self.first_bad_step == NEVER), step, self.first_bad_step)

    def stop_if_not_finite(self) -> None:
        """Raise on all ranks alike if a step of any rank was not finite; an earlier save ends first.

        Raises:
            NonFiniteError: naming the step.
        """
        first = self.first_bad_step.clone()
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
        if first.item() != NEVER:
            self.saver.wait()
            raise NonFiniteError(
                f"the loss or the gradient norm was not finite at step {first.item()}: nothing was saved since; "
                "lower optimizer.lr, lengthen lr_scheduler.num_warmup_steps or set model.qk_norm=true"
            )


def _values_of(result: StepResult, session: Session) -> dict[str, float | None]:
    """A step's metrics, its loss and its padding averaged over ranks."""
    loss = result.loss.clone()
    dist.all_reduce(loss)
    values = {
        "train/loss": loss.item() / session.world_size,
        "train/grad_norm": result.grad_norm.item(),
        "train/lr": result.lr,
    }
    if result.padding is not None:
        padding = result.padding.clone()
        dist.all_reduce(padding)
        values["train/padding_fraction"] = padding.item() / session.world_size
    return values


def score(run: Run, loader: Iterable[Batch], normalize: "Normalize", **options: Any) -> dict[str, float | int] | None:
    """`evaluate` of the weights and, with EMA, of their averages; None if either was stopped."""
    result = evaluate(run.model, loader, normalize, **options)
    if result is None or run.state.ema is None:
        return result
    with run.state.ema.in_model(run.state.exchanged):
        averaged = evaluate(run.model, loader, normalize, **options)
    if averaged is None:
        return None
    return result | {f"val/ema_{key}": averaged[f"val/{key}"] for key in ("loss", "top1")}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Iterable[Batch],
    normalize: "Normalize",
    *,
    device: torch.device,
    copies: int = 1,
    is_stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float | int] | None:
    """Loss and accuracy over the whole validation set, every image counted once at any world size and batch size.

    All ranks run equally many batches of one size; what fills up the last ones carries no label and counts for nothing.
    `copies` ranks run the same ones (tensor parallelism). Leaves the model in training mode, as it found it. Asks
    `is_stopped` before each batch, on all ranks alike, and returns None if it is.
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
        top1, top5 = top_k_hits(logits, labels).unbind(1)
        rows = torch.stack([losses, top1.float(), top5.float(), is_image.float()])  # 4 B
        sums += rows.double().sum(dim=1)  # padding adds nothing: its loss is ignored and no class is its label
    model.train()
    dist.all_reduce(sums)
    loss, top1, top5, images = (sums / copies).tolist()
    if not images:
        raise RunError("none of the validation images could be read (data.on_error=skip): mend them, or data.path")
    return {"val/loss": loss / images, "val/top1": top1 / images, "val/top5": top5 / images, "val/images": int(images)}


def objective(logits: torch.Tensor, targets: torch.Tensor, answers: torch.Tensor | None, cfg: Config) -> torch.Tensor:
    """What a step minimises: `loss_of`, and beside it how far the student is from its teacher's `answers`, as in DeiT.

    With `model.distilled` the first of the two heads' `logits` (2, B, num_classes) learns the labels and the second one
    the answers; without, one head (B, num_classes) learns both. Without answers two heads learn the labels by their
    mean, as timm fine-tunes such a model.
    """
    if answers is None:
        return loss_of(logits.mean(dim=0) if cfg.model.distilled else logits, targets, cfg.loss)
    of_labels, of_answers = logits.unbind() if cfg.model.distilled else (logits, logits)
    alpha = cfg.distillation.alpha
    distilled = distillation_loss(of_answers, answers, cfg.distillation)
    return (1 - alpha) * loss_of(of_labels, targets, cfg.loss) + alpha * distilled


def distillation_loss(logits: torch.Tensor, answers: torch.Tensor, cfg: DistillationConfig) -> torch.Tensor:
    """Of the student's `logits` and the teacher's `answers`, both (B, num_classes), float32.

    hard: cross-entropy with the teacher's class. soft: tau^2 times the divergence of both at temperature tau, a mean
    over images and classes. The paper's equation 2 has the mean over images; this is DeiT's code (losses.py).
    """
    if cfg.kind == "hard":
        return F.cross_entropy(logits, answers.argmax(dim=1))
    ours, theirs = (F.log_softmax(each / cfg.tau, dim=1) for each in (logits, answers))
    return F.kl_div(ours, theirs, reduction="sum", log_target=True) * cfg.tau**2 / logits.numel()


def loss_of(logits: torch.Tensor, targets: torch.Tensor, cfg: LossConfig) -> torch.Tensor:
    """The training loss, a mean over the batch, of `logits` (B, num_classes), float32.

    `targets` are labels (B,) or, with mixup, shares (B, num_classes); label smoothing takes each share t to
    (1 - smoothing) t + smoothing / num_classes (Szegedy et al., arXiv 1512.00567), before `loss.bce_target_thresh`, as
    in timm. softmax: cross-entropy. sigmoid: binary cross-entropy of every class, summed over classes by big_vision
    (loss.bce_sum), averaged by timm and DeiT III, where every class of a mixed image counts in full (threshold 0).
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
    """uint8 images (B, C, Y, X), or in rows, to floats of the data's mean 0 and deviation 1, on the device."""

    def __init__(self, cfg: Config, device: torch.device) -> None:
        def per_channel(values: tuple[float, ...]) -> torch.Tensor:
            return 255 * torch.tensor(values, device=device).view(1, -1, 1, 1)

        self.mean, self.std = per_channel(cfg.data.mean), per_channel(cfg.data.std)

    def __call__(self, images: torch.Tensor | Packed) -> Any:
        """(B, C, Y, X) or rows, uint8 -> the same, float32."""
        if isinstance(images, Packed):
            return images.normalized(self.mean, self.std)
        return (images.float() - self.mean) / self.std


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


def _introduce(run: Run, cfg: Config, session: Session, sizes: RunSizes, *, start_step: int) -> None:
    """Say what runs, once."""
    last_step, num_images = sizes.last_step, sizes.num_train_images
    parameters = sum(weight.numel() for weight in run.state.weights.values())
    span = f"steps {start_step + 1} to {last_step}" if start_step < last_step else f"no step after {start_step}"
    logger.info("mesh %s, %.2f M parameters, %s", run.mesh, parameters / 1e6, cfg.precision)
    logger.info(
        "global batch %d = %d images x %d ranks x %d microbatches; %s, %.4g epochs of %d images",
        *(cfg.global_batch_size, sizes.micro_batch_size, sizes.dp_size, sizes.accumulation),
        *(span, sizes.samples_at(last_step) / num_images, num_images),
    )
    if cfg.optimizer.lr_base_size is not None:
        logger.info("peak learning rate: %s", peak_lr_in_words(cfg))
    if session.is_main:
        for text in _odd_lengths(run, cfg, sizes):
            logger.warning(text)
    if cfg.data.source != "synthetic":
        for split in ("train", "val"):
            found = list_images(cfg.data, split)
            logger.info("%s: %d images, skipped %s", split, len(found), found.skipped or "nothing")
            labels = set(np.unique(found.labels).tolist())
            if absent := [name for label, name in enumerate(found.classes) if label not in labels]:
                logger.warning("%s: no images of %d classes: %s", split, len(absent), ", ".join(absent[:10]))


def _odd_lengths(run: Run, cfg: Config, sizes: RunSizes) -> Iterator[str]:
    """What is allowed, but seldom meant: a warmup or an average that is longer than the run."""
    steps = sizes.num_train_steps
    if sizes.schedule_start + sizes.num_warmup_steps > steps:
        last = lr_at(steps, cfg, sizes)
        yield (
            f"the warmup of {sizes.num_warmup_steps} steps is longer than the run of {steps}: the learning rate ends "
            f"at {last:.3g}, {last / peak_lr(cfg):.1%} of {peak_lr_in_words(cfg)}; a tenth of the run would be "
            f"lr_scheduler.num_warmup_steps={steps // 10}"
        )
    ema = None if sizes.first_step else run.state.ema  # said once
    if ema is not None and (share := math.prod(ema.decay(step) for step in range(2, steps + 1))) > 0.1:
        fix = "" if cfg.ema.use_warmup else "ema.use_warmup=true or "
        shorter = 0.01 ** (1 / max(steps - 1, 1))
        yield (
            f"ema.decay={cfg.ema.decay} over {steps} steps: {share:.0%} of the average, which final_model is made of, "
            f"will be the first step's weights; set {fix}ema.decay={shorter:.3g}"
        )
