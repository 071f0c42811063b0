"""The config as dataclasses: types and rules. The values are in config/*.yaml; the way from there to here is launch.py.

A rule that a config breaks is a `ConfigError`, one line that names the key, the value and the fix.
"""

import dataclasses
import json
import math
import re
from fractions import Fraction as ExactFraction
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass


class ConfigError(ValueError):
    """A mistake of the user's: its text is the one line that the user reads."""


class RunError(RuntimeError):
    """A failure while running that every rank raises alike: its text is the one line that the user reads."""


Rate = Annotated[float, Field(ge=0, lt=1)]  # a probability that leaves something over
Fraction = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Size = PositiveInt | tuple[PositiveInt, PositiveInt]  # one number or [height, width]
Range = tuple[PositiveFloat, PositiveFloat]
Channels = Annotated[tuple[float, ...], Field(min_length=1)]  # one value for all channels, or one a channel
PositiveChannels = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _at_most_one(steps_key: str, steps: int | None, epochs_key: str, epochs: float | None) -> None:
    if steps is not None and epochs is not None:
        raise ConfigError(f"{steps_key}={steps} {epochs_key}={epochs}: give at most one of them, set the other to null")


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of a size that is given as one number or as two."""
    return (size, size) if isinstance(size, int) else size


@dataclass(frozen=True, kw_only=True, config=STRICT)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LrSchedulerConfig:
    """The learning rate as a function of the step."""

    name: Literal["cosine", "linear", "rsqrt", "constant"]
    num_warmup_steps: NonNegativeInt | None
    num_warmup_epochs: PositiveFloat | None
    warmup_start_lr: NonNegativeFloat
    num_training_steps: PositiveInt | None
    num_cooldown_steps: NonNegativeInt
    rsqrt_timescale: PositiveInt | None
    min_lr: NonNegativeFloat

    def __post_init__(self) -> None:
        name = f"lr_scheduler.name={self.name}"
        if (self.num_warmup_steps is None) == (self.num_warmup_epochs is None):
            given = f"num_warmup_steps={self.num_warmup_steps} lr_scheduler.num_warmup_epochs={self.num_warmup_epochs}"
            raise ConfigError(
                f"lr_scheduler.{given}".replace("None", "null") + ": give exactly one of them and set the other to null"
            )
        if self.warmup_start_lr and self.num_warmup_steps == 0:
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EmaConfig:
    """The exponential moving average of the weights, under the names of timm's ModelEmaV3."""

    decay: Rate | None
    use_warmup: bool
    warmup_gamma: PositiveFloat
    warmup_power: PositiveFloat


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationConfig:
    """When to evaluate, and which number makes a checkpoint the best."""

    every_n_steps: PositiveInt | None
    every_n_epochs: PositiveFloat | None
    best_metric: Literal["val/top1", "val/top5", "val/loss", "val/ema_top1", "val/ema_loss"]

    def __post_init__(self) -> None:
        _at_most_one("evaluation.every_n_steps", self.every_n_steps, "evaluation.every_n_epochs", self.every_n_epochs)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Where and when to save, and what to go on from."""

    ckpt_dir: str | None
    save_every_n_steps: PositiveInt | None
    save_every_n_epochs: PositiveFloat | None
    resume_from_checkpoint: bool
    init_from: str | None
    async_save: bool
    max_checkpoints: PositiveInt | None
    save_final_model: bool

    def __post_init__(self) -> None:
        steps, epochs = "checkpoint.save_every_n_steps", "checkpoint.save_every_n_epochs"
        _at_most_one(steps, self.save_every_n_steps, epochs, self.save_every_n_epochs)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoggerConfig:
    """Console and metrics.jsonl."""

    frequency: PositiveInt


@dataclass(frozen=True, kw_only=True, config=STRICT)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TensorboardConfig:
    """TensorBoard."""

    enabled: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProfilerConfig:
    """What to profile, of which steps and ranks."""

    trace: bool
    memory_snapshot: bool
    first_step: PositiveInt
    num_steps: PositiveInt
    ranks: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None
    record_shapes: bool
    with_stack: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DistributedConfig:
    """Sizes of the mesh axes; None = derived from the world size."""

    dp_outer: PositiveInt | None
    dp_shard: PositiveInt | None
    tp: Literal[1] | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DdpConfig:
    """DistributedDataParallel."""

    bucket_cap_mb: PositiveInt
    cuda_graphs: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Fsdp2Config:
    """torch.distributed.fsdp.fully_shard."""

    reshard_after_forward: bool
    cpu_offload: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
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


def known_keys(cls: type = Config, prefix: str = "") -> list[str]:
    """Every key that a user can type, dotted."""
    keys = []
    for name, field in cls.__dataclass_fields__.items():
        keys.append(prefix + name)
        if hasattr(field.type, "__dataclass_fields__"):
            keys += known_keys(field.type, f"{prefix}{name}.")
    return keys


def to_plain(cfg: Config) -> dict[str, Any]:
    """The config as dicts, lists and scalars, as it stands in config.yaml."""
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """How a global batch is cut: micro_batch_size images a rank and forward pass, `accumulation` passes a step."""

    micro_batch_size: int
    accumulation: int


def split_batch(cfg: Config, world_size: int) -> BatchSplit:
    """The batch arithmetic: global = micro x ranks x accumulation.

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
    return BatchSplit(micro, accumulation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSizes:
    """The numbers that follow from the config, the ranks and the data: made once a run, passed to all that need one.

    Attributes:
        world_size: ranks of the job.
        micro_batch_size: images a rank and forward pass.
        accumulation: forward passes a step.
        num_train_images: images of an epoch.
        num_val_images: images of an evaluation.
        classes: their names, in the order of their labels; empty for synthetic data.
        num_train_steps: optimizer updates of the run.
        num_warmup_steps: updates until the learning rate is at its peak.
        schedule_steps: updates over which the learning rate's schedule runs.
        evaluate_every: steps between evaluations; None = never.
        save_every: steps between checkpoints; None = only a new best and the last.
    """

    world_size: int
    micro_batch_size: int
    accumulation: int
    num_train_images: int
    num_val_images: int
    classes: tuple[str, ...]
    num_train_steps: int
    num_warmup_steps: int
    schedule_steps: int
    evaluate_every: int | None
    save_every: int | None

    @classmethod
    def of(
        cls, cfg: Config, *, world_size: int, num_train_images: int, num_val_images: int, classes: tuple[str, ...] = ()
    ) -> "RunSizes":
        """The record of a run on data of these sizes.

        Raises:
            ConfigError: the batch does not divide, or the run would have no step.
        """
        batch = split_batch(cfg, world_size)

        def steps(epochs: float) -> int:
            # The number as it was typed: 4.1 x 60 / 2 is 123, in floats a little less.
            return math.floor(ExactFraction(str(epochs)) * num_train_images / cfg.global_batch_size)

        def interval(every_n_steps: int | None, every_n_epochs: float | None) -> int | None:
            return every_n_steps if every_n_epochs is None else max(steps(every_n_epochs), 1)

        total = steps(cfg.num_epochs) if cfg.num_train_steps is None else cfg.num_train_steps
        if total < 1:
            raise ConfigError(
                f"num_epochs={cfg.num_epochs} of {num_train_images} images is less than one step: train longer"
            )
        schedule, saving = cfg.lr_scheduler, cfg.checkpoint
        warmup = schedule.num_warmup_steps
        return cls(
            world_size=world_size,
            micro_batch_size=batch.micro_batch_size,
            accumulation=batch.accumulation,
            num_train_images=num_train_images,
            num_val_images=num_val_images,
            classes=classes,
            num_train_steps=total,
            num_warmup_steps=steps(schedule.num_warmup_epochs) if warmup is None else warmup,
            schedule_steps=schedule.num_training_steps or total,
            evaluate_every=interval(cfg.evaluation.every_n_steps, cfg.evaluation.every_n_epochs),
            save_every=interval(saving.save_every_n_steps, saving.save_every_n_epochs),
        )
