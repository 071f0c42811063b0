"""Train what a config describes with timm's and torch's own parts, in a plain loop, to compare the recipe with.

    python tools/compare.py --output benchmarks/timm_cifar10.json -- \
        --config-name cifar10_vit data.path=/data/cifar10 num_epochs=75 seed=1

Model, first weights, loader, augmentation, mixup, loss, optimizer, schedule and average of the weights are timm's, put
together as its train.py does. The number of steps, the learning rate of each, and what is evaluated when, are those of
the entrypoints. One process, on one GPU or the CPU. What the config asks for and this loop cannot do is refused.

A teacher (distillation.kind=hard with model.distilled=true) is read, gets images of its size and answers by the names
of classes as in the entrypoints; the rest is timm's VisionTransformerDistilled and TokenDistillationTask. kind=soft is
refused: where DeiT's code and ours have a mean over images and classes, timm's loss has one over images alone.

Not as in the entrypoints, on purpose: Pillow decodes and crops, whatever `data.decoder` says; an epoch ends with its
last whole batch; timm draws the random numbers, and decays the map pool's query; nothing is saved but the result.

The result: `top1` of the last evaluation, `validation` and `losses` by step, `images_per_second` (median over the log
intervals, without evaluation and the first tenth), `train_s` (the loop, with evaluation and compilation), `wall_s`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import launch

import functools
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import timm.utils
import torch
import torch.nn.functional as F
from timm.data import ImageDataset, Mixup, auto_augment, create_loader, resolve_model_data_config
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from timm.optim import Muon, create_optimizer_v2, param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from timm.task import ClassificationTask, TokenDistillationTask
from torch import nn

import distillation
import imagenet_dataset
import vit
from benchmark import config_name_and_overrides, write
from input_pipeline import augment
from input_pipeline.image_folders import Folder
from interop.models import TimmModel
from interop.weights_out import timm_arguments
from runtime import process_group
from schema import LATER_OPTIONS, Config, ConfigError, RunError, pair, peak_lr

# What this loop can honour one value of.
ONLY: str = """
    fp8_config.enabled=false model.transformer_engine=false model.representation_size=null
    model.drop_path_schedule=linear model.init_head_bias=0.0 model.freeze=null lr_scheduler.name=cosine
    data.source=folder data.repeated_augmentation=1 data.on_error=raise data.exif_orientation=false
    data.max_pixels=178956970 checkpoint.init_from=null wandb.mode=disabled tensorboard.enabled=false
    profiler.trace=false profiler.memory_snapshot=false optimizer.state_dtype=fp32
    distillation.shard_teacher=false data.packing.enabled=false
"""
# Of a model's newer options, those that timm's VisionTransformer has itself; others are of its Eva or of other blocks.
VISION_TRANSFORMERS = ("scale_attn_norm", "scale_mlp_norm", "final_norm", "dynamic_img_size", "distilled")


def check(cfg: Config) -> None:
    """Refuse by name what this loop cannot do, then what no entrypoint can.

    Raises:
        ConfigError: naming the key, the value and the value to use.
    """
    if cfg.data.size_schedule is not None:
        raise ConfigError("data.size_schedule: tools/compare.py trains with one image size; set it to null")
    if cfg.distillation.kind == "soft":
        raise ConfigError(
            "distillation.kind=soft: tools/compare.py has timm's loss, where the teacher's part is "
            f"model.num_classes={cfg.model.num_classes} times DeiT's; set it to hard"
        )
    side, policy = max(pair(cfg.model.img_size)), cfg.data.auto_augment
    wanted = dict(item.split("=") for item in ONLY.split())
    others = {key: value for key, value in LATER_OPTIONS.items() if key not in VISION_TRANSFORMERS}
    wanted |= {f"model.{key}": json.dumps(value).strip('"') for key, value in others.items()}
    if cfg.model.implementation == "hf":
        wanted["model.implementation"] = "timm"
    if pair(cfg.model.img_size) != (side, side):  # timm's evaluation keeps the image's proportions, ours does not
        wanted["model.img_size"] = str(side)
    if cfg.micro_batch_size != cfg.global_batch_size:
        wanted["micro_batch_size"] = "null"
    if cfg.activation_checkpointing == "selective":  # which timm has not
        wanted["activation_checkpointing"] = "true"
    if cfg.distillation.kind != "none":  # timm has no such loss for one head
        wanted["model.distilled"] = "true"
    if policy and "3a" not in policy:  # timm leaves the jitter out beside any other
        wanted["data.color_jitter"] = "null"
    for key, value in wanted.items():
        given = json.dumps(functools.reduce(getattr, key.split("."), cfg)).strip('"')
        if given != value:
            raise ConfigError(f"{key}={given}: tools/compare.py, which is timm's parts alone, needs {key}={value}")
    if (world_size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(f"WORLD_SIZE={world_size}: tools/compare.py is one process; start it without torchrun")
    launch.check_script(cfg, "compare", 1)
    imagenet_dataset.run_sizes(cfg, 1)


def build_model(cfg: Config) -> VisionTransformer:
    """The model, with timm's first weights; fixed positions, if it has them, are the entrypoints'."""
    norm_layer, arguments = vit.norm_layer(cfg.model), timm_arguments(vars(cfg.model))
    model_class = VisionTransformerDistilled if cfg.model.distilled else VisionTransformer
    model = model_class(**arguments, num_classes=cfg.model.num_classes, norm_layer=norm_layer)
    vit.set_fused_attn(model, cfg.model)
    if cfg.model.pos_embed == "sincos":  # which timm has not
        model.pos_embed = nn.Parameter(vit.sincos_positions(cfg.model), requires_grad=False)
    return model


def build_loader(cfg: Config, split: str, device: torch.device) -> Any:
    """Batches of normalised images (B, C, Y, X) and labels (B,), brought to `device` where that is a GPU.

    Raises:
        ConfigError: timm does not find the images that the entrypoints find.
    """
    data, channels, on_cuda = cfg.data, cfg.model.in_chans, device.type == "cuda"
    found = imagenet_dataset.list_images(data, split)
    assert isinstance(found, Folder)  # ONLY: data.source=folder
    class_map = {name: label for label, name in enumerate(found.classes)}  # of both splits: val may lack a class
    try:
        dataset = ImageDataset(found.root, class_map=class_map, input_img_mode="L" if channels == 1 else "RGB")
    except RuntimeError as error:  # not one
        raise ConfigError(f"data.path={data.path}: {' '.join(str(error).split())}") from error
    if len(dataset) != len(found):
        raise ConfigError(f"data.path={data.path}: timm finds {len(dataset)} of the {len(found)} images in {split}")
    dataset._max_retries = 1  # data.on_error=raise: timm would take the next image
    # Pillow 13 refuses the 0 bits of some of timm's policies.
    auto_augment.NAME_TO_OP |= dict.fromkeys(("Posterize", "PosterizeIncreasing"), augment._posterize)
    same = "hflip vflip auto_augment color_jitter interpolation crop_pct num_workers"
    return create_loader(
        dataset,
        input_size=(channels, *pair(data.image_size)),
        batch_size=cfg.global_batch_size,
        is_training=split == "train",
        scale=data.crop_scale,
        ratio=data.crop_ratio,
        re_prob=data.random_erasing,
        re_mode="pixel",
        device=device,
        pin_memory=on_cuda,
        use_prefetcher=on_cuda,
        use_multi_epochs_loader=split == "train",  # the workers go on between epochs
        **{name: getattr(data, name) for name in same.split()},
        **mean_and_std(cfg),
    )


def mean_and_std(cfg: Config) -> dict[str, Any]:
    """Those of each channel: in the config one value may stand for all."""
    values = {"mean": cfg.data.mean, "std": cfg.data.std}
    return {key: value * (cfg.model.in_chans // len(value)) for key, value in values.items()}


def build_loss(cfg: Config) -> tuple[Mixup | None, nn.Module]:
    """What mixes a batch and smooths its labels, if anything mixes; loss(logits, targets), a mean over the batch."""
    smoothing, data, mixup = cfg.loss.label_smoothing, cfg.data, None
    if data.mixup or data.cutmix:
        probabilities = {"prob": data.mixup_prob, "switch_prob": data.mixup_switch_prob}
        classes = {"num_classes": cfg.model.num_classes, "label_smoothing": smoothing}
        mixup = Mixup(data.mixup, data.cutmix, **probabilities, **classes)
    if cfg.loss.name == "sigmoid":
        threshold, sums = cfg.loss.bce_target_thresh, cfg.loss.bce_sum
        return mixup, BinaryCrossEntropy(smoothing, target_threshold=threshold, sum_classes=sums)
    return mixup, SoftTargetCrossEntropy() if mixup else LabelSmoothingCrossEntropy(smoothing)


class _Teacher(nn.Module):
    """A teacher as timm's task asks it, with images of its own mean and deviation, which are in `pretrained_cfg`."""

    def __init__(self, teacher: distillation.Teacher) -> None:
        super().__init__()
        self.model, self.answers = teacher.model, teacher.answers
        self.pretrained_cfg = resolve_model_data_config(teacher.model)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.answers(images)


def build_teacher(cfg: Config, device: torch.device) -> _Teacher:
    """The config's teacher on `device`, checked as in the entrypoints.

    Raises:
        ConfigError: there is no such model, it has other classes or channels, or takes no images of the size it gets.
    """
    model = distillation.read_model(cfg).to(device)
    order = distillation.order_of(model, cfg, imagenet_dataset.run_sizes(cfg, 1))
    teacher = distillation.Teacher(model, cfg, order, device)
    teacher.try_out()
    return _Teacher(teacher)


class _InFloat32(nn.Module):
    """A loss of logits that autocast left in BF16."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(logits.float(), targets)


def build_task(
    model: TimmModel, loss: nn.Module, cfg: Config, device: torch.device
) -> ClassificationTask | TokenDistillationTask:
    """task(images, labels)["loss"] is what a step minimises: `loss`, and with a teacher the answers' part beside it.

    Raises:
        ConfigError: as `build_teacher`.
    """
    criterion = _InFloat32(loss)
    if cfg.distillation.kind == "none":
        return ClassificationTask(model, criterion, device=device, verbose=False)
    model.pretrained_cfg = mean_and_std(cfg)  # by which timm takes an image back to its pixels, for the teacher
    options = {"distill_type": "hard", "task_loss_weight": 1 - cfg.distillation.alpha}
    return TokenDistillationTask(model, build_teacher(cfg, device), criterion, device=device, verbose=False, **options)


def build_optimizer(model: VisionTransformer, cfg: Config) -> torch.optim.Optimizer:
    """The optimizer, with timm's groups of parameters."""
    if cfg.optimizer.name == "muon":
        return _muon(model, cfg)
    fused = {"fused": True} if next(model.parameters()).is_cuda else {}
    betas = {"betas": cfg.optimizer.betas, "eps": cfg.optimizer.eps}
    name, options = {
        "adamw": ("adamw", betas | fused),
        "lamb": ("lamb", betas | {"max_grad_norm": None}),  # the loop clips
        "sgd": ("momentum", {"momentum": cfg.optimizer.momentum}),  # without Nesterov's
    }[cfg.optimizer.name]
    options |= {key: getattr(cfg.optimizer, key) for key in ("weight_decay", "layer_decay")}
    return create_optimizer_v2(model, name, lr=peak_lr(cfg), **options)


def _muon(model: VisionTransformer, cfg: Config) -> Muon:
    """Timm's Muon for the blocks' matrices, with Jordan's coefficients, and its AdamW for all else."""
    options = cfg.optimizer
    groups = param_groups_layer_decay(
        model, options.weight_decay, model.no_weight_decay(), layer_decay=options.layer_decay or 1.0
    )
    in_blocks = {id(p) for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2}
    for group in groups:  # each of one layer, and of what decays or of what does not
        of_blocks = id(group["params"][0]) in in_blocks
        group |= {"use_fallback": not of_blocks, "nesterov": of_blocks}
    values = {key: getattr(options, key) for key in ("betas", "eps", "momentum")}
    return Muon(groups, lr=peak_lr(cfg), ns_coefficients="original", **values)


def build_scheduler(optimizer: torch.optim.Optimizer, cfg: Config) -> CosineLRScheduler:
    """`step_update(step)` before update number `step`, 1 being the first, sets the rate of optim.lr_at."""
    schedule, sizes = cfg.lr_scheduler, imagenet_dataset.run_sizes(cfg, 1)
    warmup = {"warmup_t": sizes.num_warmup_steps, "warmup_lr_init": schedule.warmup_start_lr, "warmup_prefix": True}
    length = max(sizes.schedule_steps - sizes.num_warmup_steps, 1)  # of the cosine, after the warmup
    return CosineLRScheduler(optimizer, t_initial=length, lr_min=schedule.min_lr, t_in_epochs=False, **warmup)


def batches(loaded: Iterable, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What timm's loader gives, safe from its next batches.

    Before timm 1.0.30 its PrefetchLoader copies and normalizes them on a stream of its own and does not tell the
    allocator that ours reads them: the memory of a batch that this loop has let go of, but whose kernels still wait,
    goes to a later one (huggingface/pytorch-image-models#2784). timm's validate.py reads every loss, and so waits.
    """
    for images, labels in loaded:
        if device.type == "cuda":
            for tensor in (images, labels):
                tensor.record_stream(torch.cuda.current_stream(device))
        yield images, labels


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any, autocast: Callable, device: torch.device) -> dict[str, float | int]:
    """Loss and accuracy over the whole validation set."""
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, top-1 hits, top-5 hits, images
    is_training = model.training
    model.eval()
    for images, labels in batches(loader, device):
        with autocast():
            logits = model(images).float()
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]  # B 5
        losses = F.cross_entropy(logits, labels, reduction="none")
        rows = [losses, hits[:, 0].float(), hits.any(dim=1).float(), torch.ones_like(losses)]
        sums += torch.stack(rows).double().sum(dim=1)
    model.train(is_training)
    loss, top1, top5, images = sums.tolist()
    return {"loss": loss / images, "top1": top1 / images, "top5": top5 / images, "images": int(images)}


def train(cfg: Config) -> dict[str, Any]:
    """Train and evaluate; returns the results but for `wall_s`.

    Raises:
        ConfigError: timm does not find the images that the entrypoints find; the teacher does not fit.
        RunError: the loss of a log step was not finite.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_bf16 = cfg.precision == "bf16"
    process_group.set_kernels(cfg)  # the entrypoints': timm has none of its own
    torch.backends.cudnn.benchmark = is_bf16
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=is_bf16)
    timm.utils.random_seed(cfg.seed)
    model = build_model(cfg).to(device)
    model.set_grad_checkpointing(cfg.activation_checkpointing is True)
    optimizer = build_optimizer(model, cfg)
    scheduler = build_scheduler(optimizer, cfg)
    ema = timm.utils.ModelEmaV3(model, **vars(cfg.ema)) if cfg.ema.decay is not None else None
    for each in [model, *([ema.module] if ema else [])] if cfg.compile else []:
        each.compile()  # torch.compile, of the whole
    train_loader, val_loader = (build_loader(cfg, split, device) for split in ("train", "val"))
    mixup, loss_of = build_loss(cfg)
    task = build_task(model, loss_of, cfg, device)  # a teacher is not compiled, as in the entrypoints
    sizes = imagenet_dataset.run_sizes(cfg, 1)
    total_steps, every = sizes.num_train_steps, sizes.evaluate_every
    epochs = itertools.chain.from_iterable(itertools.repeat(train_loader))

    losses, speeds, validation = {}, [], []
    start = interval_start = time.perf_counter()
    interval_steps = 0
    model.train()
    for step, (images, labels) in enumerate(itertools.islice(batches(epochs, device), total_steps), 1):
        if mixup:
            images, labels = mixup(images, labels)
        with autocast():
            loss = task(images, labels)["loss"]
        loss.backward()
        if cfg.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        scheduler.step_update(step)
        optimizer.step()
        optimizer.zero_grad()
        if ema:
            ema.update(model, step=step)
        interval_steps += 1
        is_last_step = step == total_steps
        if step % cfg.logger.frequency == 0 or is_last_step or step == 1:
            losses[step] = round(loss.item(), 6)  # the host waits for the device
            if not math.isfinite(losses[step]):
                raise RunError(f"the loss was not finite at step {step}")
            speeds.append(interval_steps * cfg.global_batch_size / (time.perf_counter() - interval_start))
            print(f"step {step} of {total_steps}: loss {losses[step]}, {speeds[-1]:.0f} images/s", flush=True)
            interval_start, interval_steps = time.perf_counter(), 0
        if every is not None and (step % every == 0 or is_last_step):
            result = evaluate(model, val_loader, autocast, device)
            if ema:
                averaged = evaluate(ema.module, val_loader, autocast, device)
                result |= {f"ema_{key}": averaged[key] for key in ("loss", "top1")}
            validation.append({"step": step} | {f"val/{key}": value for key, value in result.items()})
            print(json.dumps(validation[-1]), flush=True)
            interval_start, interval_steps = time.perf_counter(), 0
    return {
        "top1": validation[-1]["val/top1"] if validation else None,
        "images_per_second": round(statistics.median(speeds[math.ceil(len(speeds) / 10) :] or speeds), 2),
        "train_s": round(time.perf_counter() - start, 3),
        "validation": validation,
        "losses": losses,
    }


def main(argv: list[str] | None = None) -> None:
    """Parse, check, train, write."""
    start = time.perf_counter()
    parser = launch.Parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the result, as JSON")
    parser.add_argument("overrides", nargs="*", help="after --: an entrypoint's own arguments")
    args = parser.parse_args(argv)
    try:
        cfg = launch.load_config(*config_name_and_overrides(args.overrides), script="compare")
        check(cfg)
        results = train(cfg)
    except (ConfigError, RunError) as error:
        launch.exit_with(str(error), code=2 if isinstance(error, ConfigError) else 1)
    results["wall_s"] = round(time.perf_counter() - start, 3)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write(args.output, results)
    print(json.dumps({key: value for key, value in results.items() if key not in ("losses", "validation")}))


if __name__ == "__main__":
    main()
