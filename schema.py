"""The config as dataclasses: types and invariants, no values (those live in config/*.yaml), and the way in.

`launch(main)` is what an entrypoint calls. It composes the YAML and the command line with Hydra, checks everything
that can be checked before a process group starts, and hands `main` a frozen `Config`: no OmegaConf object gets past
this file. A mistake is one line from rank 0 that names the key, the value and the fix; every rank exits with 2.

Import this module before torch: it refuses Python and package versions that are too old in one line.
"""

import argparse
import contextlib
import difflib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import preemption

PROJECT_DIR = Path(__file__).resolve().parent


class ConfigError(ValueError):
    """A mistake of the user's: its text is the one line that the user reads."""


class RunError(RuntimeError):
    """A failure while running that every rank raises alike: its text is the one line that the user reads."""


def exit_with(message: str, *, rank_variable: str = "RANK", code: int = 2) -> NoReturn:
    """Print one line from the process whose `rank_variable` is 0, or from the only one, and exit with `code` on all."""
    if int(os.environ.get(rank_variable, "0")) == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        # torchrun ends the other ranks as soon as one exits, also a rank 0 that has not spoken yet: let it go first.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(10)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """The tools' command line: complains in one line, as the entrypoints do; its help is the module's docstring."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        exit_with(message)


def check_versions(requirements: Path = PROJECT_DIR / "requirements.txt") -> None:
    """Exit with one line if Python or a package that training imports is missing or outside requirements.txt.

    Reads the packages' metadata, so that it works where importing the package would fail.
    """
    if sys.version_info < (3, 10):  # noqa: UP036  (pip's check is not always in between)
        exit_with(f"Python {sys.version.split()[0]} is too old: this recipe needs Python 3.10 or newer")
    from packaging.requirements import Requirement

    needed = {"torch", "torchvision", "timm", "hydra-core", "omegaconf", "pydantic", "megatron-fsdp"}
    for line in requirements.read_text().splitlines():
        if not (line := line.split("#")[0].strip()):
            continue
        requirement = Requirement(line)
        if requirement.name not in needed:
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            exit_with(f"{requirement.name} is not installed: pip install -r {requirements.name}")
        if not requirement.specifier.contains(found, prereleases=True):
            wanted = f"{requirement.name}{requirement.specifier}"
            exit_with(f"{requirement.name} {found} is installed, this recipe needs {wanted}: pip install '{wanted}'")


def _import_timm_without_wandb() -> None:
    """The utilities of timm import wandb where it is installed, on every rank, and fail with it: let them find none."""
    if "wandb" not in sys.modules:
        sys.modules["wandb"] = None  # makes `import wandb` an ImportError, which timm expects
        importlib.import_module("timm")
        del sys.modules["wandb"]


if Path(sys.argv[0]).stem.startswith("train_"):  # an entrypoint, not what else imports this file
    preemption.listen()  # from here on: importing torch takes seconds
check_versions()
_import_timm_without_wandb()

import hydra  # noqa: E402  (after the check of its version)
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.errors import HydraException, OverrideParseException  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402
from pydantic import (  # noqa: E402
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass  # noqa: E402

Rate = Annotated[float, Field(ge=0, lt=1)]  # a probability that leaves something over
Fraction = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Size = PositiveInt | tuple[PositiveInt, PositiveInt]  # one number or [height, width]
Range = tuple[PositiveFloat, PositiveFloat]
Channels = Annotated[tuple[float, ...], Field(min_length=1)]  # one value for all channels, or one a channel
PositiveChannels = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]

section = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of a size that is given as one number or as two."""
    return (size, size) if isinstance(size, int) else size


@section
class ModelConfig:
    """The arguments of `vit.VisionTransformer`, under timm's names."""

    img_size: Size
    patch_size: Size
    in_chans: Literal[1, 3]
    num_classes: PositiveInt
    global_pool: Literal["token", "avg", "map"]
    embed_dim: PositiveInt
    depth: PositiveInt
    num_heads: PositiveInt
    mlp_ratio: PositiveFloat
    qkv_bias: bool
    proj_bias: bool
    qk_norm: bool
    init_values: PositiveFloat | None
    class_token: bool
    no_embed_class: bool
    reg_tokens: NonNegativeInt
    pre_norm: bool
    fc_norm: bool | None
    drop_rate: Rate
    pos_drop_rate: Rate
    patch_drop_rate: Rate
    proj_drop_rate: Rate
    attn_drop_rate: Rate
    drop_path_rate: Rate
    drop_path_schedule: Literal["linear", "constant"]
    pos_embed: Literal["learn", "sincos"]
    representation_size: PositiveInt | None
    init_head_bias: float
    freeze: Literal["backbone", "patch_embed"] | None
    act_layer: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
    norm_eps: PositiveFloat
    fused_attn: bool
    transformer_engine: bool
    implementation: Literal["ours", "timm", "hf"]

    def __post_init__(self) -> None:
        for side, patch in zip(pair(self.img_size), pair(self.patch_size), strict=True):
            if side % patch:
                raise ConfigError(
                    f"model.img_size={self.img_size} is not a multiple of model.patch_size={self.patch_size}: "
                    f"instead of {side} use {side // patch * patch or patch} or {(side // patch + 1) * patch}"
                )
        if self.embed_dim % self.num_heads:
            raise ConfigError(
                f"model.num_heads={self.num_heads} does not divide model.embed_dim={self.embed_dim}: "
                f"use one of {[n for n in range(1, self.embed_dim + 1) if self.embed_dim % n == 0][:12]}"
            )
        if self.global_pool == "token" and not self.class_token:
            raise ConfigError("model.global_pool=token pools the class token: set model.class_token=true or pool avg")
        if self.pos_embed == "sincos" and (self.embed_dim % 4 or self.embed_dim < 8):
            raise ConfigError(
                f"model.embed_dim={self.embed_dim} with model.pos_embed=sincos: use a multiple of 4, 8 or more"
            )
        if int(self.embed_dim * self.mlp_ratio) < 1:
            raise ConfigError(f"model.mlp_ratio={self.mlp_ratio} leaves the MLP no width: use a larger one")
        for key, lacks in (
            ("transformer_engine", self.transformer_engine),
            ("representation_size", self.representation_size is not None),
            ("drop_path_schedule", self.drop_path_schedule != "linear"),
        ):
            if lacks and self.implementation != "ours":
                raise ConfigError(
                    f"model.{key}={json.dumps(getattr(self, key))} with model.implementation={self.implementation}, "
                    "which has no such thing: set model.implementation=ours"
                )
        if self.transformer_engine and self.act_layer == "gelu":
            raise ConfigError(
                "model.act_layer=gelu with model.transformer_engine=true: TransformerEngine's GELU is the tanh form; "
                "set model.act_layer=gelu_tanh"
            )
        if self.transformer_engine and not self.fused_attn:
            raise ConfigError(
                "model.fused_attn=false with model.transformer_engine=true, whose attention is always fused: "
                "set model.fused_attn=true"
            )


_NUMBER, _PART = r"\d+(?:\.\d+)?", r"0\.\d*[1-9]\d*"
_AUTO_AUGMENT = (rf"mstd{_NUMBER}", "-mstd0.5")
# The policies of data.auto_augment, with the options that timm.data.auto_augment reads and how they are written. timm
# itself takes an option that it cannot read (rand-mfoo, rand-tfoo) for its default without a word.
_POLICIES = {
    "rand": (
        rf"m\d+|n[1-9]|p(?:{_PART}|1)|mstd{_NUMBER}|mmax[1-9]\d*|inc[01]|t(?:weights|3aw|3a)",
        "-m9-n2-p0.5-mstd0.5-mmax10-inc1-tweights",
    ),
    "original": _AUTO_AUGMENT,
    "originalr": _AUTO_AUGMENT,
    "v0": _AUTO_AUGMENT,
    "v0r": _AUTO_AUGMENT,
    "3a": _AUTO_AUGMENT,
    "augmix": (rf"m\d+|w[1-9]|d[1-9]|a(?:{_PART}|[1-9]\d*)|b[01]|mstd{_NUMBER}", "-m3-w3-d2-a1-b0-mstd0.5"),
}


def _check_policy(policy: str) -> None:
    """Refuse a `data.auto_augment` that timm does not know, or would not do as it is written."""
    name, *options = policy.split("-")
    if name not in _POLICIES:
        raise ConfigError(
            f"data.auto_augment={policy}: timm has no policy {name}; use null, {', '.join(_POLICIES)}, with options as "
            "in rand-m9-mstd0.5-inc1"
        )
    pattern, example = _POLICIES[name]
    given = {}
    for option in options:
        if not re.fullmatch(pattern, option):
            raise ConfigError(f"data.auto_augment={policy}: what {name} takes is written as in {name}{example}")
        key = re.match(r"t|[a-z]+", option)[0]
        if key in given:
            raise ConfigError(f"data.auto_augment={policy}: {key} is given twice; leave one of them out")
        given[key] = option.removeprefix(key)
    magnitude, most = int(given.get("m", 0)), int(given.get("mmax", 10))
    if magnitude > most:
        longer = f" or {policy.replace(f'-mmax{most}', '')}-mmax{magnitude}" if name == "rand" else ""
        raise ConfigError(
            f"data.auto_augment={policy}: timm cuts the magnitude off at {most}; "
            f"use {policy.replace(f'-m{magnitude}', f'-m{most}')}{longer}"
        )


@section
class DataConfig:
    """Where pictures come from, how they are cut and what else happens to those of the training set."""

    source: Literal["folder", "webdataset", "synthetic"]
    path: str | None
    image_size: Size
    num_workers: NonNegativeInt
    resident: bool
    decoder: Literal["pillow", "torchvision", "nvjpeg"]
    exif_orientation: bool
    max_pixels: PositiveInt
    on_error: Literal["raise", "skip"]
    max_errors: NonNegativeInt
    shard_streams: PositiveInt
    repeated_augmentation: PositiveInt
    crop_scale: Range
    crop_ratio: Range
    hflip: Probability
    vflip: Probability
    auto_augment: str | None
    color_jitter: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=3, max_length=4)] | None
    random_erasing: Probability
    mixup: NonNegativeFloat
    cutmix: NonNegativeFloat
    mixup_prob: Probability
    mixup_switch_prob: Probability
    interpolation: Literal["bilinear", "bicubic"]
    crop_pct: Fraction
    mean: Channels
    std: PositiveChannels
    num_synthetic_train: PositiveInt | None
    num_synthetic_val: PositiveInt | None

    def __post_init__(self) -> None:
        if self.source != "synthetic" and self.path is None:
            raise ConfigError("data.path=null: give the folder that holds train/ and val/, data.path=/data/imagenet")
        if self.source == "synthetic" and None in (self.num_synthetic_train, self.num_synthetic_val):
            raise ConfigError("data.source=synthetic needs data.num_synthetic_train and data.num_synthetic_val")
        if self.decoder == "nvjpeg" and self.on_error == "skip":
            raise ConfigError(
                "data.on_error=skip with data.decoder=nvjpeg: the GPU decodes when the batch has been put together; "
                "use data.decoder=torchvision"
            )
        for key, refused, fix in (
            ("source", self.source == "synthetic", "there are no files to keep; use folder"),
            ("decoder", self.decoder == "nvjpeg", "use data.decoder=torchvision, whose time counts once only"),
            ("on_error", self.on_error == "skip", "all pictures are read at the start; use raise"),
            ("auto_augment", (self.auto_augment or "").startswith("augmix"), "use one of the other policies"),
            ("color_jitter", len(self.color_jitter or ()) == 4, "give three numbers, without hue"),
        ):
            if self.resident and refused:
                value = getattr(self, key)
                value = list(value) if isinstance(value, tuple) else value
                raise ConfigError(f"data.{key}={value} with data.resident=true: {fix}, or set data.resident=false")
        for key in ("vflip", "auto_augment", "color_jitter", "random_erasing"):
            if self.decoder == "nvjpeg" and (value := getattr(self, key)):
                raise ConfigError(
                    f"data.{key}={value} with data.decoder=nvjpeg, which crops and flips from left to right only: "
                    "use data.decoder=torchvision"
                )
        if self.crop_scale[0] > self.crop_scale[1] or self.crop_scale[1] > 1:
            raise ConfigError(f"data.crop_scale={list(self.crop_scale)} is not an ascending range within 0..1")
        if self.crop_ratio[0] > self.crop_ratio[1]:
            raise ConfigError(f"data.crop_ratio={list(self.crop_ratio)} is not an ascending range")
        if self.auto_augment is not None:
            _check_policy(self.auto_augment)
        if self.color_jitter and any(hue > 0.5 for hue in self.color_jitter[3:]):
            raise ConfigError(f"data.color_jitter={list(self.color_jitter)}: the fourth number, hue, is at most 0.5")


@section
class OptimizerConfig:
    """What updates the weights; None for what the named optimizer does not have."""

    name: Literal["adamw", "sgd", "lamb", "muon"]
    lr: PositiveFloat
    betas: tuple[Rate, Rate] | None
    eps: PositiveFloat | None
    momentum: Rate | None
    weight_decay: NonNegativeFloat
    layer_decay: Fraction | None

    def __post_init__(self) -> None:
        takes = {"sgd": ("momentum",), "muon": ("betas", "eps", "momentum")}.get(self.name, ("betas", "eps"))
        for key in ("betas", "eps", "momentum"):
            value = getattr(self, key)
            if value is None and key in takes:
                raise ConfigError(f"optimizer.{key}=null, but optimizer.name={self.name} needs a value: give one")
            if value is not None and key not in takes:
                value = list(value) if isinstance(value, tuple) else value
                raise ConfigError(
                    f"optimizer.{key}={value}: optimizer.name={self.name} takes {' and '.join(takes)}; set it to null"
                )


@section
class LrSchedulerConfig:
    """The learning rate as a function of the step."""

    name: Literal["cosine", "linear", "rsqrt", "constant"]
    num_warmup_steps: NonNegativeInt
    warmup_start_lr: NonNegativeFloat
    num_training_steps: PositiveInt | None
    num_cooldown_steps: NonNegativeInt
    rsqrt_timescale: PositiveInt | None
    min_lr: NonNegativeFloat

    def __post_init__(self) -> None:
        name = f"lr_scheduler.name={self.name}"
        if self.warmup_start_lr and not self.num_warmup_steps:
            raise ConfigError(
                f"lr_scheduler.warmup_start_lr={self.warmup_start_lr} has no meaning with "
                "lr_scheduler.num_warmup_steps=0: set 0"
            )
        if self.name == "rsqrt" and self.rsqrt_timescale is None:
            raise ConfigError(f"lr_scheduler.rsqrt_timescale=null, but {name} needs a value: 10000 is big_vision's")
        if self.name != "rsqrt" and self.rsqrt_timescale is not None:
            raise ConfigError(
                f"lr_scheduler.rsqrt_timescale={self.rsqrt_timescale} has no meaning with {name}: set null"
            )
        if self.name in ("cosine", "linear"):
            if self.num_cooldown_steps:
                raise ConfigError(
                    f"lr_scheduler.num_cooldown_steps={self.num_cooldown_steps} with {name}, which falls to min_lr by "
                    "itself: set 0; for steps at min_lr after that make lr_scheduler.num_training_steps shorter"
                )
        elif self.min_lr and not self.num_cooldown_steps:
            raise ConfigError(
                f"lr_scheduler.min_lr={self.min_lr} has no meaning with {name}: set 0, or give "
                "lr_scheduler.num_cooldown_steps"
            )


@section
class LossConfig:
    """What is minimised; evaluation is always cross-entropy on the labels."""

    name: Literal["softmax", "sigmoid"]
    label_smoothing: Rate
    bce_sum: bool
    bce_target_thresh: Rate | None

    def __post_init__(self) -> None:
        if self.name == "softmax" and self.bce_sum:
            raise ConfigError("loss.bce_sum=true with loss.name=softmax: set it to false, or loss.name=sigmoid")
        if self.name == "softmax" and self.bce_target_thresh is not None:
            raise ConfigError(
                f"loss.bce_target_thresh={self.bce_target_thresh} with loss.name=softmax: set it to null, or "
                "loss.name=sigmoid"
            )


@section
class EmaConfig:
    """The exponential moving average of the weights, under the names of timm's ModelEmaV3."""

    decay: Rate | None
    use_warmup: bool
    warmup_gamma: PositiveFloat
    warmup_power: PositiveFloat


@section
class EvaluationConfig:
    """When to evaluate, and which number makes a checkpoint the best."""

    every_n_steps: PositiveInt | None
    best_metric: Literal["val/top1", "val/top5", "val/loss", "val/ema_top1", "val/ema_loss"]


@section
class CheckpointConfig:
    """Where and when to save, and what to go on from."""

    ckpt_dir: str | None
    save_every_n_steps: PositiveInt | None
    resume_from_checkpoint: bool
    init_from: str | None
    async_save: bool
    max_checkpoints: PositiveInt | None
    save_final_model: bool


@section
class LoggerConfig:
    """Console and metrics.jsonl."""

    frequency: PositiveInt


@section
class WandbConfig:
    """Weights & Biases."""

    mode: Literal["disabled", "offline", "online"]
    init_args: dict[str, Any]

    def __post_init__(self) -> None:
        for name in _names(self.init_args):
            if re.search(r"api_?key|token|secret|password", name, re.IGNORECASE):
                raise ConfigError(
                    f"wandb.init_args: {name} would be written to config.yaml: leave it out, and use `wandb login` or "
                    "the environment variable WANDB_API_KEY"
                )


def _names(nested: Any) -> list[str]:
    """All keys of dicts within dicts."""
    if not isinstance(nested, dict):
        return []
    return [*nested, *(name for value in nested.values() for name in _names(value))]


@section
class TensorboardConfig:
    """TensorBoard."""

    enabled: bool


@section
class ProfilerConfig:
    """What to profile, of which steps and ranks."""

    trace: bool
    memory_snapshot: bool
    first_step: PositiveInt
    num_steps: PositiveInt
    ranks: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None
    record_shapes: bool
    with_stack: bool


@section
class DistributedConfig:
    """Sizes of the mesh axes; None = derived from the world size."""

    dp_outer: PositiveInt | None
    dp_shard: PositiveInt | None
    tp: Literal[1] | None


@section
class DdpConfig:
    """DistributedDataParallel."""

    bucket_cap_mb: PositiveInt
    cuda_graphs: bool


@section
class Fsdp2Config:
    """torch.distributed.fsdp.fully_shard."""

    reshard_after_forward: bool
    cpu_offload: bool


@section
class MfsdpConfig:
    """megatron_fsdp.fully_shard_model."""

    zero_dp_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
    outer_dp_sharding_strategy: Literal["no_shard", "optim"]

    def __post_init__(self) -> None:
        if self.outer_dp_sharding_strategy == "optim" and self.zero_dp_strategy != "optim_grads_params":
            raise ConfigError(
                f"mfsdp.outer_dp_sharding_strategy=optim needs mfsdp.zero_dp_strategy=optim_grads_params, "
                f"not {self.zero_dp_strategy}"
            )


@section
class Fp8RecipeKwargs:
    """Arguments of transformer_engine.common.recipe's classes; None = TransformerEngine's own value.

    Not among them: FP8 attention (fp8_dpa, fp8_mha: beta in TransformerEngine 2.20), backward_override (LayerNormMLP
    lacks it there), reduce_amax (scales that differ over ranks could not be saved as one), and what TransformerEngine
    reads from environment variables.
    """

    margin: NonNegativeInt | None
    amax_history_len: PositiveInt | None
    amax_compute_algo: Literal["max", "most_recent"] | None
    x_block_scaling_dim: Literal[1, 2] | None
    w_block_scaling_dim: Literal[1, 2] | None
    grad_block_scaling_dim: Literal[1, 2] | None


@section
class Fp8Config:
    """FP8 in the linear layers of TransformerEngine's blocks."""

    enabled: bool
    fp8_recipe: Literal[
        "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"
    ]
    fp8_format: Literal["HYBRID", "E4M3"] | None
    fp8_recipe_kwargs: Fp8RecipeKwargs
    quantized_model_init: bool

    def arguments(self) -> dict[str, Any]:
        """The recipe's arguments that have a value."""
        return {name: value for name, value in vars(self.fp8_recipe_kwargs).items() if value is not None}

    def __post_init__(self) -> None:
        known = {
            "DelayedScaling": ("margin", "amax_history_len", "amax_compute_algo"),
            "Float8BlockScaling": ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"),
        }.get(self.fp8_recipe, ())
        for name, value in self.arguments().items():
            if name not in known:
                raise ConfigError(
                    f"fp8_config.fp8_recipe_kwargs.{name}={value}: {self.fp8_recipe} takes "
                    f"{', '.join(known) or 'none of them'}; set it to null"
                )
        if self.quantized_model_init and not self.enabled:
            raise ConfigError("fp8_config.quantized_model_init=true needs fp8_config.enabled=true")


@section
class Config:
    """One run. Sections are the YAML's sections."""

    num_train_steps: PositiveInt | None
    num_epochs: PositiveFloat | None
    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt | None
    seed: NonNegativeInt
    precision: Literal["bf16", "fp32"]
    compile: bool
    activation_checkpointing: bool
    max_grad_norm: PositiveFloat | None
    output_dir: str
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    lr_scheduler: LrSchedulerConfig
    ema: EmaConfig
    loss: LossConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    logger: LoggerConfig
    wandb: WandbConfig
    tensorboard: TensorboardConfig
    profiler: ProfilerConfig
    distributed: DistributedConfig
    ddp: DdpConfig
    fsdp2: Fsdp2Config
    mfsdp: MfsdpConfig
    fp8_config: Fp8Config

    def __post_init__(self) -> None:
        if (self.num_train_steps is None) == (self.num_epochs is None):
            given = f"num_train_steps={self.num_train_steps} num_epochs={self.num_epochs}"
            raise ConfigError(f"{given}: give exactly one of them and set the other to null")
        if pair(self.data.image_size) != pair(self.model.img_size):
            raise ConfigError(
                f"data.image_size={self.data.image_size} is not model.img_size={self.model.img_size}: "
                "set model.img_size only, the data follow it"
            )
        if self.global_batch_size % self.data.repeated_augmentation:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"data.repeated_augmentation={self.data.repeated_augmentation}: change one of them"
            )
        for key, values in (("mean", self.data.mean), ("std", self.data.std)):
            if len(values) not in (1, self.model.in_chans):
                raise ConfigError(
                    f"data.{key}={list(values)} has {len(values)} values, model.in_chans={self.model.in_chans}: "
                    "give one value, or one a channel"
                )
        if self.model.in_chans == 1 and self.data.color_jitter and any(self.data.color_jitter[2:]):
            raise ConfigError(
                f"data.color_jitter={list(self.data.color_jitter)} with model.in_chans=1: grey pictures have no "
                "saturation and no hue; set the third and fourth number to 0"
            )
        smoothed = self.loss.label_smoothing / self.model.num_classes
        if self.loss.bce_target_thresh is not None and smoothed > self.loss.bce_target_thresh:
            raise ConfigError(
                f"loss.label_smoothing={self.loss.label_smoothing} lifts every class above "
                f"loss.bce_target_thresh={self.loss.bce_target_thresh}: set loss.label_smoothing=0"
            )
        if self.checkpoint.save_final_model and self.checkpoint.ckpt_dir and self.model.norm_eps != 1e-6:
            raise ConfigError(
                f"model.norm_eps={self.model.norm_eps} cannot be exported, timm's ViTs have 1e-6: "
                "set checkpoint.save_final_model=false"
            )
        if self.checkpoint.save_final_model and self.checkpoint.ckpt_dir and self.model.representation_size:
            raise ConfigError(
                f"model.representation_size={self.model.representation_size} cannot be exported, timm's ViTs have a "
                "linear head: set checkpoint.save_final_model=false"
            )
        if self.model.transformer_engine and self.compile:
            raise ConfigError(
                "compile=true with model.transformer_engine=true: torch.compile cannot see into TransformerEngine's "
                "layers; set one of them to false"
            )
        if self.model.transformer_engine and self.precision != "bf16":
            raise ConfigError(f"precision={self.precision} with model.transformer_engine=true: set precision=bf16")
        if self.fp8_config.enabled:
            if not self.model.transformer_engine:
                raise ConfigError("fp8_config.enabled=true needs model.transformer_engine=true")
            hidden = int(self.model.embed_dim * self.model.mlp_ratio)
            for key, width in (("embed_dim", self.model.embed_dim), ("embed_dim x model.mlp_ratio", hidden)):
                if width % 16:
                    raise ConfigError(
                        f"model.{key}={width} with fp8_config.enabled=true: FP8 needs a multiple of 16; "
                        f"use {width // 16 * 16 or 16} or {(width // 16 + 1) * 16}"
                    )
        if self.ema.decay is None and "ema_" in self.evaluation.best_metric:
            raise ConfigError(
                f"evaluation.best_metric={self.evaluation.best_metric} with ema.decay=null: give ema.decay a value, or "
                "use val/top1"
            )
        if self.lr_scheduler.min_lr > self.optimizer.lr:
            raise ConfigError(
                f"lr_scheduler.min_lr={self.lr_scheduler.min_lr} is above optimizer.lr={self.optimizer.lr}: lower it"
            )
        if self.lr_scheduler.warmup_start_lr > self.optimizer.lr:
            raise ConfigError(
                f"lr_scheduler.warmup_start_lr={self.lr_scheduler.warmup_start_lr} is above "
                f"optimizer.lr={self.optimizer.lr}: lower it"
            )


def micro_batch(cfg: Config, world_size: int) -> tuple[int, int]:
    """Images a rank and forward pass, and forward passes a step: the batch arithmetic in one place.

    Raises:
        ConfigError: the global batch is not micro batch x ranks x a whole number.
    """
    micro = cfg.micro_batch_size or max(cfg.global_batch_size // world_size, 1)
    accumulation, rest = divmod(cfg.global_batch_size, micro * world_size)
    if rest or not accumulation:
        nearest = max(accumulation, 1) * micro * world_size
        raise ConfigError(
            f"global_batch_size={cfg.global_batch_size} is not micro_batch_size={micro} x {world_size} ranks "
            f"x a whole number of accumulation steps: use global_batch_size={nearest}, or another micro_batch_size"
        )
    return micro, accumulation


def check_script(cfg: Config, script: str, world_size: int) -> None:
    """Refuse by name what this script or this machine cannot honour.

    Raises:
        ConfigError: naming the key, the value and the fix.
    """
    import torch

    import te

    for key, is_on, package in (
        (f"wandb.mode={cfg.wandb.mode}", cfg.wandb.mode != "disabled", "wandb"),
        (f"tensorboard.enabled={str(cfg.tensorboard.enabled).lower()}", cfg.tensorboard.enabled, "tensorboard"),
    ):
        if is_on and not _is_importable(package):
            switch = key.split("=")[0] + ("=disabled" if package == "wandb" else "=false")
            raise ConfigError(f"{key}, but {package} is not installed: pip install {package}, or set {switch}")
    if cfg.model.implementation == "hf":
        import reference

        reference.check_hugging_face(cfg.model)
    if cfg.model.transformer_engine:
        if not torch.cuda.is_available():
            raise ConfigError("model.transformer_engine=true needs a CUDA GPU: set it to false here")
        te.transformer_engine()
        te.recipe(cfg.fp8_config)
    if cfg.fp8_config.quantized_model_init:
        if script != "train_mfsdp":
            raise ConfigError(
                f"fp8_config.quantized_model_init=true: {script}.py's optimizer updates the weights that the layers "
                "hold, and FP8 ones lose small updates; set it to false or use train_mfsdp.py, which has FP32 ones too"
            )
        for key, wanted in (("zero_dp_strategy", "optim_grads_params"), ("outer_dp_sharding_strategy", "no_shard")):
            if getattr(cfg.mfsdp, key) != wanted:
                raise ConfigError(
                    f"mfsdp.{key}={getattr(cfg.mfsdp, key)} with fp8_config.quantized_model_init=true: "
                    f"Megatron-FSDP has FP8 weights only with {wanted}"
                )
    if cfg.data.decoder == "nvjpeg" and not torch.cuda.is_available():
        raise ConfigError("data.decoder=nvjpeg needs a CUDA GPU: use data.decoder=torchvision")
    if (cfg.data.mixup or cfg.data.cutmix) and (micro := micro_batch(cfg, world_size)[0]) % 2:
        key = "mixup" if cfg.data.mixup else "cutmix"
        raise ConfigError(
            f"data.{key}={getattr(cfg.data, key)} mixes pairs, and micro_batch_size={micro} (on {world_size} ranks) is "
            "odd: use an even one, or set data.mixup=0 data.cutmix=0"
        )
    if script == "train_ddp" and cfg.ddp.cuda_graphs:
        for key, lacks in (
            ("model.transformer_engine=true", cfg.model.transformer_engine),
            ("activation_checkpointing=true", cfg.activation_checkpointing),
        ):
            if lacks:
                raise ConfigError(f"ddp.cuda_graphs=true records no {key}: set one of them to false")
        if not torch.cuda.is_available():
            raise ConfigError("ddp.cuda_graphs=true needs a CUDA GPU: set it to false here")
    axes = cfg.distributed
    outer, shard = axes.dp_outer or 1, axes.dp_shard or world_size // (axes.dp_outer or 1)
    if script == "train_ddp" and (axes.dp_outer, axes.dp_shard) != (None, None):
        key, value = ("dp_outer", axes.dp_outer) if axes.dp_outer else ("dp_shard", axes.dp_shard)
        raise ConfigError(f"distributed.{key}={value}: DDP does not shard; set it to null or use train_fsdp2.py")
    if outer * shard != world_size:
        raise ConfigError(
            f"distributed.dp_outer={axes.dp_outer} x distributed.dp_shard={axes.dp_shard} is not the world size of "
            f"{world_size}: leave one of them null"
        )
    if script == "train_mfsdp":
        if cfg.model.implementation != "ours":
            raise ConfigError(
                f"model.implementation={cfg.model.implementation}: Megatron-FSDP initialises module by module, which "
                "this one cannot; use train_fsdp2.py"
            )
        for key, is_frozen in (("freeze", cfg.model.freeze), ("pos_embed", cfg.model.pos_embed == "sincos")):
            if is_frozen:
                raise ConfigError(
                    f"model.{key}={getattr(cfg.model, key)}: Megatron-FSDP keeps what is not trained in BF16 alone, "
                    "and checkpoints would lose the rest; use train_fsdp2.py"
                )
        if not torch.cuda.is_available():
            raise ConfigError(
                "train_mfsdp.py needs a CUDA GPU (Megatron-FSDP has no CPU path): use train_fsdp2.py here"
            )
        if cfg.mfsdp.outer_dp_sharding_strategy != "no_shard" and outer == 1:
            raise ConfigError("mfsdp.outer_dp_sharding_strategy=optim needs distributed.dp_outer above 1")
        if cfg.precision != "bf16":
            raise ConfigError(
                f"precision={cfg.precision}: train_mfsdp.py computes in bf16; use train_fsdp2.py for fp32"
            )
    if script == "train_fsdp2" and cfg.fsdp2.cpu_offload and not torch.cuda.is_available():
        raise ConfigError("fsdp2.cpu_offload=true needs a CUDA GPU: without one everything is in host memory already")


def _is_importable(package: str) -> bool:
    """Whether the package is installed; a folder of its name, such as wandb leaves behind, is no package."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def known_keys(cls: type = Config, prefix: str = "") -> list[str]:
    """Every key that a user can type, dotted."""
    keys = []
    for name, field in cls.__dataclass_fields__.items():
        keys.append(prefix + name)
        if hasattr(field.type, "__dataclass_fields__"):
            keys += known_keys(field.type, f"{prefix}{name}.")
    return keys


def _one_line(error: Exception) -> str:
    """Hydra's, OmegaConf's and pydantic's complaints, each as one line with the key, the value and the fix."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        if isinstance(first.get("ctx", {}).get("error"), ConfigError):
            return str(first["ctx"]["error"])
        # A union reports each member with its name in the location; the key is what stands before it.
        key = ".".join(str(part) for part in first["loc"])
        key = next((known for known in sorted(known_keys(), key=len, reverse=True) if key.startswith(known)), key)
        same_key = [e for e in error.errors() if e["loc"][: key.count(".") + 1] == first["loc"][: key.count(".") + 1]]
        if first["type"] == "unexpected_keyword_argument":
            key = ".".join(str(part) for part in first["loc"])
            return f"unknown key {key}={first['input']!r}{_did_you_mean(key)}"
        if first["type"] == "missing" and key != ".".join(str(part) for part in first["loc"]):
            return f"{key}={first['input']!r}: too few values"
        if first["type"] == "missing":
            return f"{key} is missing: give it a value in the YAML or on the command line"
        wanted = " or ".join(dict.fromkeys(e["msg"][0].lower() + e["msg"][1:] for e in same_key))
        return f"{key}={first['input']!r}: {wanted}"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r} on the command line: {str(error).splitlines()[0]}"
    text = " ".join(line.strip() for line in str(error).split("Config search path")[0].splitlines() if line.strip())
    if match := re.search(r"Missing mandatory value: .*full_key: (\S+)", text):
        return f"{match[1]} is missing: give it on the command line, {match[1]}=..."
    if match := re.search(r"Could not override '([^']+)'", text):
        return f"unknown key {match[1]}{_did_you_mean(match[1])}"
    return text


def _did_you_mean(key: str) -> str:
    close = difflib.get_close_matches(key, known_keys(), n=1)
    return f": did you mean {close[0]}?" if close else ": no such key in config/defaults.yaml"


def _to_config(raw: Any) -> Config:
    plain = OmegaConf.to_container(raw, resolve=True, throw_on_missing=True)
    return TypeAdapter(Config).validate_json(json.dumps(plain))  # strict, and a JSON list may become a tuple


OmegaConf.register_new_resolver("project_dir", lambda: str(PROJECT_DIR), replace=True)


def load_config(config_name: str = "L0_sanity", overrides: list[str] | None = None, *, script: str = "test") -> Config:
    """Compose and check a config from Python, as the command line of `script` would.

    Raises:
        ConfigError: a typo, a wrong type or a contradiction, in one line.
    """
    try:
        with hydra.initialize_config_dir(str(PROJECT_DIR / "config"), version_base="1.3", job_name=script):
            raw = hydra.compose(config_name, [*(overrides or []), f"hydra.job.name={script}"], return_hydra_config=True)
        HydraConfig.instance().set_config(raw)
        OmegaConf.set_struct(raw, False)
        raw.pop("hydra")
        return _to_config(raw)
    except (HydraException, OmegaConfBaseException, ValidationError) as error:
        raise ConfigError(_one_line(error)) from error


def _compose_from_command_line(script: str) -> Config:
    """Run hydra.main for its command line (--config-name, --cfg, --help, overrides), and only for that.

    Training runs outside Hydra, which would otherwise catch its exceptions and set up logging of its own.

    Raises:
        ConfigError: a typo, a wrong type or a contradiction, in one line.
    """
    composed: list[Any] = []

    if {"-m", "--multirun"} & set(sys.argv[1:]):
        raise ConfigError("--multirun would train run after run under one torchrun: start one command a run")

    @hydra.main(version_base="1.3", config_path=str(PROJECT_DIR / "config"), config_name="L0_sanity")
    def keep(raw: Any) -> None:
        composed.append(_to_config(raw))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing several lines and exiting
    sys.argv[1:] += ["hydra/job_logging=none", "hydra/hydra_logging=none", f"hydra.job.name={script}"]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            keep()
    except (HydraException, OmegaConfBaseException, ValidationError) as error:
        raise ConfigError(_one_line(error)) from error
    except SystemExit as error:  # argparse: an unknown flag
        if error.code:
            raise ConfigError(complaint.getvalue().strip().splitlines()[-1]) from error
        raise
    if not composed:  # --help, --cfg, --info: Hydra printed what was asked for
        sys.exit(0)
    return composed[0]


def use_srun() -> None:
    """Give the tasks of `srun python train_x.py`, without torchrun, the variables that torchrun would give them.

    Without them each task would be a run of its own. SLURM_STEP_NUM_TASKS is set by srun only, not in a batch script or
    an salloc shell. The address is the step's first node, the port follows from the job and the step; MASTER_ADDR and
    MASTER_PORT go first.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1 or "WORLD_SIZE" in os.environ:
        return
    slurm = {name: os.environ[f"SLURM_{name}"] for name in ("PROCID", "LOCALID", "STEP_NODELIST", "JOB_ID", "STEP_ID")}
    first = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", slurm["STEP_NODELIST"]).split(",")[0]  # n[07-09,12],m1 -> n07
    os.environ |= {"RANK": slurm["PROCID"], "LOCAL_RANK": slurm["LOCALID"], "WORLD_SIZE": str(tasks)}
    os.environ.setdefault("MASTER_ADDR", first)
    os.environ.setdefault("MASTER_PORT", str(20000 + (int(slurm["JOB_ID"]) * 10 + int(slurm["STEP_ID"])) % 10000))


def launch(main: Callable[[Config], dict[str, float]]) -> None:
    """Run an entrypoint: compose, check, train; a mistake is one line and exit code 2, before process groups start."""
    from torch.distributed.elastic.multiprocessing.errors import record

    import imagenet_dataset
    import profiling

    use_srun()
    script = Path(sys.argv[0]).stem
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        cfg = _compose_from_command_line(script)
        check_script(cfg, script, world_size)
        micro_batch(cfg, world_size)
    except ConfigError as error:
        exit_with(str(error))
    try:
        imagenet_dataset.check(cfg)
    except ConfigError as error:  # about files: each node has its own, and the first rank of each speaks
        exit_with(str(error), rank_variable="LOCAL_RANK")
    try:
        profiling.check(cfg, world_size)
        record(main)(cfg)  # torchrun then shows this process's error as the root cause
    except ConfigError as error:
        exit_with(str(error))
    except RunError as error:
        exit_with(str(error), code=1)
    preemption.ignore()  # Python's own end would give the signals their default back: a late one would be a failure
