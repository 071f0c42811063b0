"""The config as dataclasses: types and rules. The values are in config/*.yaml; the way from there to here is launch.py.

A rule that a config breaks is a `ConfigError`, one line that names the key, the value and the fix.
"""

import dataclasses
import difflib
import fnmatch
import json
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction as ExactFraction
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass


class ConfigError(ValueError):
    """A mistake of the user's: its text is the one line that the user reads."""


class RunError(RuntimeError):
    """A failure while running that every rank raises alike: its text is the one line that the user reads."""


class RankError(RunError):
    """A failure of this rank alone, which speaks for itself; torchrun then ends the others."""


class NodeLeftError(RunError):
    """Another node left the run, and this one is saved: its torchrun starts it again with the nodes that are left."""


Rate = Annotated[float, Field(ge=0, lt=1)]  # a probability that leaves something over
Fraction = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Size = PositiveInt | tuple[PositiveInt, PositiveInt]  # one number or [height, width]
Range = tuple[PositiveFloat, PositiveFloat]
Recompute = bool | Literal["selective"]
Place = Annotated[str, Field(min_length=1)]  # a path or a name: an empty one would be the current folder, or the root
Channels = Annotated[tuple[float, ...], Field(min_length=1)]  # one value for all channels, or one a channel
PositiveChannels = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _at_most_one(steps_key: str, steps: int | None, epochs_key: str, epochs: float | None) -> None:
    if steps is not None and epochs is not None:
        raise ConfigError(f"{steps_key}={steps} {epochs_key}={epochs}: give at most one of them, set the other to null")


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of a size that is given as one number or as two."""
    return (size, size) if isinstance(size, int) else size


# Options that came later than the others -> the value that leaves a model as it was before them. Of older checkpoints
# these are the values. Tensor parallelism and others' models have none of them; TransformerEngine's: `TE_OPTIONS`.
LATER_OPTIONS: dict[str, Any] = {
    "mlp_layer": "mlp",
    "swiglu_align_to": 0,
    "scale_mlp_norm": False,
    "scale_attn_norm": False,
    "attn_type": "rope",
    "qkv_fused": True,
    "num_kv_heads": None,
    "attn_only_layer_scale": False,
    "final_norm": True,
    "dynamic_img_size": False,
    "rope_type": None,
    "rope_temperature": 100.0,
    "rope_rotate_half": False,
    "rope_grid_indexing": "ij",
    "rope_grid_offset": 0.0,
    "ref_feat_shape": None,
    "attn_pool_num_heads": None,
    "attn_pool_mlp_ratio": None,
    "norm_layer": "layernorm",
    "distilled": False,
    "block_fn": "Block",
    "attn_layer": "attn",
    "rel_pos_type": None,
    "rel_pos_dim": None,
    "shared_rel_pos": False,
}
EVA_ONLY = ("qkv_fused", "num_kv_heads", "attn_only_layer_scale", "swiglu_align_to")
EVA_ONLY += ("attn_pool_num_heads", "attn_pool_mlp_ratio")
PARALLEL = ("ParallelScalingBlock", "DiffParallelScalingBlock")  # attention and MLP of one norm, added as one
# What timm's VisionTransformerRelPos has no place for -> the value to be without.
WITH_REL_POS: dict[str, Any] = {"pos_embed": "none", "mlp_layer": "mlp", "attn_layer": "attn", "act_layer": "gelu"}
WITH_REL_POS |= {"reg_tokens": 0, "proj_bias": True, "pre_norm": False, "final_norm": True, "distilled": False}
WITH_REL_POS |= {"scale_mlp_norm": False, "scale_attn_norm": False, "dynamic_img_size": False}
WITH_REL_POS |= {"pos_drop_rate": 0.0, "patch_drop_rate": 0.0}
REL_POS = ("rel_pos_type", "rel_pos_dim", "shared_rel_pos")
ROPE_ONLY = ("rope_temperature", "rope_rotate_half", "rope_grid_indexing", "rope_grid_offset", "ref_feat_shape")
# What models on TransformerEngine's blocks may have of them, and positions of no kind.
TE_OPTIONS = ("mlp_layer", "scale_mlp_norm", "scale_attn_norm", "norm_layer", "final_norm", "dynamic_img_size")
TE_OPTIONS += ("attn_type", "rope_type", "pos_embed", *ROPE_ONLY, *EVA_ONLY)


def typed(value: Any) -> str:
    """A value as a command line has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The arguments of `vit.VisionTransformer`, under timm's names."""

    img_size: Size
    """Pixels, one number or [height, width]; a multiple of patch_size."""
    patch_size: Size
    """Pixels of a patch, one number or [height, width]."""
    in_chans: Literal[1, 3]
    """Colour channels: 3 = RGB, 1 = grey."""
    num_classes: PositiveInt
    """Number of classes, the outputs of the head."""
    global_pool: Literal["token", "avg", "map"]
    """What the head reads: token (class token) | avg (mean of the patch tokens) | map (attention pooling)."""
    embed_dim: PositiveInt
    """Width of a token."""
    depth: PositiveInt
    """Number of blocks."""
    num_heads: PositiveInt
    """Attention heads of a block; divides embed_dim."""
    block_fn: Literal[
        "Block", "ResPostBlock", "ParallelThingsBlock", "ParallelScalingBlock", "DiffParallelScalingBlock"
    ]
    """timm's: Block | ResPostBlock (norms after the branches) | ParallelThingsBlock (two attentions, then two MLPs,
    side by side) | ParallelScalingBlock (MLP beside attention, after one norm) | DiffParallelScalingBlock (with
    differential attention)."""
    mlp_ratio: PositiveFloat
    """Width of the MLP's hidden layer over embed_dim; of glu without rope_type both halves, as in timm."""
    mlp_layer: Literal["mlp", "glu", "swiglu"]
    """mlp | glu (gated; gate and value in one matrix) | swiglu (in two, with rope_type). The gate's act_layer: silu."""
    swiglu_align_to: NonNegativeInt
    """swiglu: the hidden width is rounded up to a multiple of it; 0 = as it is."""
    scale_mlp_norm: bool
    """A norm inside the MLP, before its last matrix."""
    scale_attn_norm: bool
    """A norm inside the attention, before its output projection."""
    attn_layer: Literal["attn", "diff"]
    """attn | diff (differential: one attention minus a trained share of another, each with half of a head)."""
    attn_type: Literal["rope", "eva"]
    """rope (timm's Attention, or AttentionRope with rope_type) | eva (timm's EvaAttention: keys without a bias)."""
    qkv_bias: bool
    """Biases of the projections to queries, keys and values."""
    qkv_fused: bool
    """One matrix for queries, keys and values; false = three (with rope_type)."""
    num_kv_heads: PositiveInt | tuple[PositiveInt, ...] | None
    """Heads of keys and values, one number or one a block, with qkv_fused false; null = num_heads."""
    proj_bias: bool
    """Biases of the attention's output projection and of the MLP."""
    qk_norm: bool
    """Normalise queries and keys."""
    init_values: PositiveFloat | None
    """First value of LayerScale, with ResPostBlock of its norms; null = no LayerScale."""
    attn_only_layer_scale: bool
    """LayerScale after the attention alone (with rope_type)."""
    class_token: bool
    """A class token before the patch tokens."""
    no_embed_class: bool
    """true = no position embedding for the class and register tokens."""
    reg_tokens: NonNegativeInt
    """Number of register tokens."""
    distilled: bool
    """A distillation token and a head of its own for it, as timm's deit_*_distilled_* have; the answer is the mean of
    both heads."""
    pre_norm: bool
    """A norm after the embeddings (as CLIP does)."""
    final_norm: bool
    """A norm after the blocks, or after the pooling, as fc_norm says; false = none."""
    fc_norm: bool | None
    """A norm after the pooling instead of before; null = with global_pool avg only."""
    drop_rate: Rate
    """Dropout before the head."""
    pos_drop_rate: Rate
    """Dropout after the position embedding."""
    patch_drop_rate: Rate
    """Share of the patch tokens dropped in training."""
    proj_drop_rate: Rate
    """Dropout in the attention's output projection and in the MLP."""
    attn_drop_rate: Rate
    """Dropout of attention weights."""
    drop_path_rate: Rate
    """Stochastic depth: probability that a block's branch is left out for an image."""
    drop_path_schedule: Literal["linear", "constant"]
    """Ours: linear (from 0 in the first block to drop_path_rate in the last) | constant."""
    pos_embed: Literal["learn", "sincos", "none"]
    """learn | sincos (ours: sines and cosines of column and row, not trained) | none."""
    dynamic_img_size: bool
    """Take images of other sizes, too, multiples of patch_size: positions are resampled."""
    rope_type: Literal["cat", "dinov3", "mixed"] | None
    """Rotary positions, in blocks as timm's Eva has them: cat (EVA-02) | dinov3 | mixed (trained, a head and block);
    null = none."""
    rope_temperature: PositiveFloat
    """Rotary positions: ratio of the longest to the shortest wavelength, about (DINOv3: 100, EVA-02: 10000)."""
    rope_rotate_half: bool
    """Rotary positions: pair channel i with i + half (DINOv3) instead of with its neighbour (EVA-02)."""
    rope_grid_indexing: Literal["ij", "xy"]
    """Rotary positions: ij (rows first) | xy."""
    rope_grid_offset: float
    """Rotary positions, cat and dinov3: is added to rows and columns."""
    ref_feat_shape: Size | None
    """Rotary positions, cat: rows and columns of patches that positions are scaled to; null = as they are."""
    rel_pos_type: Literal["mlp", "bias"] | None
    """Relative positions, added to attention's logits, in timm's VisionTransformerRelPos: mlp (of the distance, drops
    an eighth of its units in training) | bias (a table of distances); null = none."""
    rel_pos_dim: PositiveInt | None
    """Relative positions, mlp: its hidden width; null = 128."""
    shared_rel_pos: bool
    """Relative positions: one for all blocks instead of one a block."""
    attn_pool_num_heads: PositiveInt | None
    """Heads of the attention pooling, with rope_type; null = num_heads."""
    attn_pool_mlp_ratio: PositiveFloat | None
    """mlp_ratio of the attention pooling, with rope_type; null = mlp_ratio."""
    representation_size: PositiveInt | None
    """Ours: width of a hidden tanh layer in the head, as in the ViT paper; null = none."""
    init_head_bias: float
    """Ours: the head's bias at the start; -6.9 = -log(1000) suits the sigmoid loss."""
    freeze: Literal["backbone", "patch_embed"] | None
    """Ours: what is not trained: backbone (a linear probe) | patch_embed; null = nothing."""
    act_layer: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
    """Activation of the MLP: gelu | gelu_tanh | quick_gelu | relu | silu."""
    norm_layer: Literal["layernorm", "rmsnorm"]
    """layernorm | rmsnorm."""
    norm_eps: PositiveFloat
    """Ours: eps of the norms; timm has no such argument (its ViTs use 1e-6, those like CLIP and DINOv3 1e-5)."""
    fused_attn: bool
    """timm's TIMM_FUSED_ATTN. false = two products and a softmax, for torch.compile to fuse as it can: faster with 64
    or 144 tokens, which do not fill the fused kernel's tiles, slower with 65 or 197."""
    transformer_engine: bool
    """Ours: blocks on TransformerEngine's fused layers; needs act_layer gelu_tanh, not gelu, but in timm's Eva."""
    implementation: Literal["ours", "timm", "hf"]
    """ours | timm | hf (Hugging Face's): their own model in our loop, to compare with."""

    def grid_size(self) -> tuple[int, int]:
        """Rows and columns of patches in an image."""
        (height, width), (patch_height, patch_width) = pair(self.img_size), pair(self.patch_size)
        return height // patch_height, width // patch_width

    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: class, distillation and register tokens."""
        return self.class_token + self.distilled + self.reg_tokens

    def num_tokens(self, patches: int | None = None) -> int:
        """Tokens of an image in the blocks, in training: the patches that are kept, and those before them.

        Args:
            patches: of the image; None: of one of img_size.
        """
        patches = patches or math.prod(self.grid_size())
        kept = max(1, int(patches * (1 - self.patch_drop_rate))) if self.patch_drop_rate else patches
        return self.num_prefix_tokens() + kept

    @property
    def is_eva(self) -> bool:
        """Blocks, names and first weights are those of timm's Eva, not of its VisionTransformer."""
        return self.rope_type is not None or self.attn_type == "eva"

    @property
    def has_own_block(self) -> bool:
        """Blocks are `vit.Block` and not other ones of timm's."""
        return not self.is_eva and (self.block_fn, self.attn_layer, self.rel_pos_type) == ("Block", "attn", None)

    def num_branches(self) -> int:
        """Residual branches of a block, of which stochastic depth leaves out some."""
        return 1 if self.block_fn in PARALLEL else 4 if self.block_fn == "ParallelThingsBlock" else 2

    def norms_after_pooling(self) -> bool:
        """The last norm, if there is one, is after the pooling."""
        return self.global_pool == "avg" if self.fc_norm is None else self.fc_norm

    def kv_heads(self) -> tuple[int, ...]:
        """Heads of keys and values, of each block."""
        heads = self.num_kv_heads or self.num_heads
        return (heads,) * self.depth if isinstance(heads, int) else heads

    def mlp_hidden(self) -> int:
        """Width of what an MLP's last matrix multiplies."""
        hidden = int(self.embed_dim * self.mlp_ratio)
        if self.mlp_layer == "glu" and not self.is_eva:
            return hidden // 2
        return hidden + (-hidden % self.swiglu_align_to if self.swiglu_align_to else 0)

    def mlp_weights(self) -> int:
        """Weights of the matrices of an MLP."""
        return self.embed_dim * self.mlp_hidden() * (2 if self.mlp_layer == "mlp" else 3)

    def later_options(self) -> dict[str, Any]:
        """Those of `LATER_OPTIONS` that this model has, and positions of no kind; key -> the value to be without."""
        found = {key: plain for key, plain in LATER_OPTIONS.items() if getattr(self, key) != plain}
        return found | ({"pos_embed": "learn"} if self.pos_embed == "none" else {})

    def _check_later_options(self) -> None:
        """Refuse, by name, what timm's VisionTransformer or its Eva has no place for."""
        if not self.is_eva:
            for key in EVA_ONLY:
                if getattr(self, key) != (plain := LATER_OPTIONS[key]):
                    raise ConfigError(
                        f"model.{key}={typed(getattr(self, key))} is of timm's Eva: give model.rope_type, or set "
                        f"model.{key}={typed(plain)}"
                    )
        gated = self.mlp_layer != "mlp"
        wants: list[tuple[bool, str, str, str]] = [
            (gated and self.act_layer != "silu", "act_layer", f"with model.mlp_layer={self.mlp_layer}", "silu"),
            (self.mlp_layer == "swiglu" and not self.is_eva, "mlp_layer", "without model.rope_type", "glu"),
            (not self.final_norm and self.fc_norm is True, "fc_norm", "with model.final_norm=false", "null"),
        ]
        if self.is_eva:
            blocks = "in timm's Eva (model.rope_type, model.attn_type=eva)"
            two = self.scale_mlp_norm or self.swiglu_align_to > 0  # timm's rule for one matrix or two
            wants += [
                (not self.proj_bias, "proj_bias", blocks, "true"),
                (not gated and self.act_layer != "gelu", "act_layer", blocks, "gelu"),
                (self.mlp_layer == "glu" and two, "mlp_layer", f"{blocks} with its norm or alignment", "swiglu"),
                (self.mlp_layer == "swiglu" and not two, "mlp_layer", f"{blocks}, not aligned", "glu"),
                (not gated and self.swiglu_align_to > 0, "swiglu_align_to", "with model.mlp_layer=mlp", "0"),
                (self.rope_type == "mixed" and self.rope_rotate_half, "rope_rotate_half", "with mixed", "false"),
                (
                    self.rope_type == "mixed" and set(self.kv_heads()) != {self.num_heads},
                    "num_kv_heads",
                    "with mixed, which has frequencies for model.num_heads",
                    "null",
                ),
                (self.attn_type == "eva" and bool(self.num_kv_heads), "num_kv_heads", "with attn_type=eva", "null"),
                (self.qkv_fused and bool(self.num_kv_heads), "qkv_fused", "with model.num_kv_heads", "false"),
            ]
        for is_refused, key, where, value in wants:
            if is_refused:
                raise ConfigError(f"model.{key}={typed(getattr(self, key))} {where}: set model.{key}={value}")
        if self.mlp_layer == "glu" and not self.is_eva and int(self.embed_dim * self.mlp_ratio) % 2:
            raise ConfigError(f"model.mlp_ratio={self.mlp_ratio} gives glu an odd width: use another")
        if self.rope_type and (head := self.embed_dim // self.num_heads) % 4:
            raise ConfigError(
                f"model.rope_type={self.rope_type} with heads of {head} channels (model.embed_dim / model.num_heads): "
                "use a multiple of 4"
            )
        self._check_blocks()
        kv_heads = self.kv_heads()
        if len(kv_heads) != self.depth or any(self.num_heads % heads for heads in kv_heads):
            raise ConfigError(
                f"model.num_kv_heads={typed(self.num_kv_heads)}: give one number or model.depth={self.depth} of them, "
                f"each a divisor of model.num_heads={self.num_heads}"
            )
        pool_heads = self.attn_pool_num_heads or self.num_heads
        if self.embed_dim % pool_heads:
            raise ConfigError(
                f"model.attn_pool_num_heads={pool_heads} does not divide model.embed_dim={self.embed_dim}"
            )

    def _check_blocks(self) -> None:
        """Refuse, by name, what timm's other blocks, its VisionTransformerRelPos and its DiffAttention have not."""
        block, norms_after = f"with model.block_fn={self.block_fn}", self.block_fn == "ResPostBlock"
        is_other, is_diff = self.block_fn != "Block" and not self.is_eva, self.attn_layer == "diff"
        in_eva: dict[str, Any] = {"rel_pos_type": None, "attn_layer": "attn"}
        in_eva |= {} if norms_after else {"block_fn": "Block"}
        post_norm: dict[str, Any] = {"qk_norm": False, "num_kv_heads": None, "init_values": None}
        post_norm |= {"attn_only_layer_scale": False} | ({} if self.scale_mlp_norm else {"swiglu_align_to": 0})
        parallel: dict[str, Any] = {"scale_mlp_norm": False, "scale_attn_norm": False, "attn_layer": "attn"}
        limits: tuple[tuple[bool, str, dict[str, Any]], ...] = (
            (self.rel_pos_type is not None, f"with model.rel_pos_type={self.rel_pos_type}", WITH_REL_POS),
            (self.is_eva, "in timm's Eva", in_eva),
            (self.is_eva and norms_after, block, post_norm),
            (self.block_fn in PARALLEL, block, parallel),
            (is_other, block, {"mlp_layer": "mlp", "distilled": False}),
            (is_diff, "with model.attn_layer=diff", {"mlp_layer": "mlp", "distilled": False}),
        )
        for key, value, where in ((k, v, where) for applies, where, all in limits if applies for k, v in all.items()):
            if getattr(self, key) != value:
                raise ConfigError(f"model.{key}={typed(getattr(self, key))} {where}: set model.{key}={typed(value)}")
        if self.rel_pos_type and (self.block_fn not in ("Block", "ResPostBlock") or self.global_pool == "map"):
            key, fix = ("global_pool", "avg") if self.global_pool == "map" else ("block_fn", "Block or ResPostBlock")
            where = f"with model.rel_pos_type={self.rel_pos_type}"
            raise ConfigError(f"model.{key}={getattr(self, key)} {where}: set model.{key}={fix}")
        if (is_diff or self.block_fn == "DiffParallelScalingBlock") and self.embed_dim // self.num_heads % 2:
            given = block if self.block_fn == "DiffParallelScalingBlock" else "with model.attn_layer=diff"
            raise ConfigError(
                f"model.num_heads={self.num_heads} gives heads of {self.embed_dim // self.num_heads} channels {given}, "
                "which halves them: use another"
            )

    def __post_init__(self) -> None:
        img_size, patch_size = typed(self.img_size), typed(self.patch_size)
        for side, patch in zip(pair(self.img_size), pair(self.patch_size), strict=True):
            if side % patch:
                raise ConfigError(
                    f"model.img_size={img_size} is not a multiple of model.patch_size={patch_size}: "
                    f"instead of {side} use {side // patch * patch or patch} or {(side // patch + 1) * patch}"
                )
        if self.embed_dim % self.num_heads:
            raise ConfigError(
                f"model.num_heads={self.num_heads} does not divide model.embed_dim={self.embed_dim}: "
                f"use one of {[n for n in range(1, self.embed_dim + 1) if self.embed_dim % n == 0][:12]}"
            )
        if self.global_pool == "token" and not self.class_token:
            raise ConfigError("model.global_pool=token pools the class token: set model.class_token=true or pool avg")
        if self.distilled:
            self._check_distilled()
        if self.pos_embed == "sincos" and (self.embed_dim % 4 or self.embed_dim < 8):
            raise ConfigError(
                f"model.embed_dim={self.embed_dim} with model.pos_embed=sincos: use a multiple of 4, 8 or more"
            )
        if int(self.embed_dim * self.mlp_ratio) < 1:
            raise ConfigError(f"model.mlp_ratio={self.mlp_ratio} leaves the MLP no width: use a larger one")
        self._check_later_options()
        for key, is_used in (
            *((key, True) for key in self.later_options()),
            ("transformer_engine", self.transformer_engine),
            ("representation_size", self.representation_size is not None),
            ("drop_path_schedule", self.drop_path_schedule != "linear"),
        ):
            if is_used and self.implementation != "ours":
                raise ConfigError(
                    f"model.{key}={typed(getattr(self, key))} with model.implementation={self.implementation}, "
                    "which has no such thing: set model.implementation=ours"
                )

    def _check_distilled(self) -> None:
        """Refuse what timm's VisionTransformerDistilled has not, or what was not seen to work with two heads."""
        for key, is_so, wanted, why in (
            ("global_pool", self.global_pool == "token", "token", "its two heads read two tokens"),
            ("reg_tokens", self.reg_tokens == 0, "0", "timm's has no others"),
            ("no_embed_class", not self.no_embed_class, "false", "timm's has positions for both"),
            ("fc_norm", not self.fc_norm, "null", "timm's has its norm before the heads"),
            ("representation_size", self.representation_size is None, "null", "its heads are linear"),
            ("rope_type", self.rope_type is None, "null", "timm's Eva has no such token"),
            ("attn_type", self.attn_type == "rope", "rope", "timm's Eva has no such token"),
            ("final_norm", self.final_norm, "true", "not seen to work"),
            ("transformer_engine", not self.transformer_engine, "false", "not seen to work"),
        ):
            if not is_so:
                value = typed(getattr(self, key))
                raise ConfigError(f"model.{key}={value} with model.distilled=true ({why}): set model.{key}={wanted}")


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
        key = next(re.finditer(r"t|[a-z]+", option))[0]
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
class SizeChange:
    """An entry of `data.size_schedule`: what changes at an epoch. What it leaves out stays as it was before."""

    epoch: PositiveFloat
    """Epochs of the run before it, rounded down to steps."""
    img_size: Size
    """model.img_size from there on."""
    global_batch_size: PositiveInt | None = None
    """global_batch_size from there on."""
    lr: PositiveFloat | None = None
    """optimizer.lr of a schedule that begins anew there, and ends with the run or at the next entry that has one."""
    num_warmup_epochs: PositiveFloat | None = None
    """With lr: that schedule's warmup; left out = none."""


def schedule_text(changes: Sequence[SizeChange]) -> str:
    """Entries of `data.size_schedule` as a command line has them."""
    entries = [{key: value for key, value in dataclasses.asdict(each).items() if value is not None} for each in changes]
    return json.dumps(entries, separators=(",", ":")).replace('"', "")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PackingConfig:
    """Images that keep their aspect ratio, several in a row of tokens, as NaViT has it (arXiv 2307.06304)."""

    enabled: bool
    """Images keep their aspect ratio, in training and evaluation: each a grid of patches of its own, several in a row
    of tokens, which they fill."""
    patches_per_image: PositiveInt | None
    """Patches that an image has on average, at most, and at most in evaluation; null = as many as one of
    model.img_size."""
    images_per_row: PositiveInt
    """Images that share a row of tokens; divides the micro batch. In training what one leaves goes to the next ones, so
    more of them leave less padding."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Where images come from, how they are cut and what else happens to those of the training set."""

    source: Literal["folder", "webdataset", "synthetic"]
    """folder (train/<class>/<image>) | webdataset (train/*.tar) | synthetic (noise)."""
    path: Place | None
    """Folder that holds train/ and val/, given on the command line: data.path=/data/imagenet; with source webdataset
    also s3://bucket/prefix; null with source synthetic only."""
    image_size: Size
    """Pixels of an image as the model gets it, always model.img_size: one setting drives the model and both crops."""
    size_schedule: tuple[SizeChange, ...] | None
    """Other sizes than model.img_size from an epoch on, as [{epoch: 200, img_size: 48}]; an entry may give
    global_batch_size, too, and lr with num_warmup_epochs, with which the learning rate's schedule begins anew; null =
    one size."""
    num_workers: NonNegativeInt
    """Loader processes a rank; the order and the pixels do not depend on it."""
    worker_timeout_s: PositiveInt
    """Seconds that loader processes may take for a batch; then the run ends, naming the rank."""
    resident: bool
    """For small images of one size: they are decoded once, kept in the device's memory, and in training cropped and
    augmented there; for sets that fit and models that outrun the loader."""
    decoder: Literal["pillow", "torchvision", "nvjpeg"]
    """Of training: torchvision (pixels as pillow's, resized to within 2 of 255, twice as fast) | pillow | nvjpeg (on
    the GPU; crop and flip only). Evaluation is always pillow's."""
    exif_orientation: bool
    """Turn images as EXIF says, in training, evaluation and inference; false as timm does."""
    max_pixels: PositiveInt
    """An image of more pixels counts as unreadable (Pillow's bound)."""
    on_error: Literal["raise", "skip"]
    """An image that cannot be read: raise (stop, naming it) | skip (the next one instead of it in training, nothing in
    evaluation)."""
    max_errors: NonNegativeInt
    """With on_error skip: unreadable images a rank leaves out before it stops all the same."""
    shard_streams: PositiveInt
    """With source webdataset: places of the shards that are read at the same time, in turn."""
    cache_dir: Place | None
    """With a path in a bucket: folder of each machine, not shared by several, that keeps what was read; null = one in
    TMPDIR."""
    cache_gb: PositiveFloat
    """With a path in a bucket: gigabytes of it that cache_dir keeps; all of the set's, and it is fetched once only."""
    repeated_augmentation: PositiveInt
    """Training: times that a batch holds each of its images, differently augmented."""
    crop_scale: Range
    """Training: area of the random resized crop, as a share of the image's."""
    crop_ratio: Range
    """Training: aspect ratio of the random resized crop, width over height."""
    hflip: Probability
    """Training: probability of a horizontal flip."""
    vflip: Probability
    """Training: probability of a vertical flip."""
    auto_augment: str | None
    """Training: timm's string for a policy: rand-m9-mstd0.5-inc1 (RandAugment), original and v0 (AutoAugment), 3a
    (3-Augment), augmix-m3-w3, ...; null = none."""
    color_jitter: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=3, max_length=4)] | None
    """Training: strength of brightness, contrast, saturation and, if four, hue; null = none."""
    random_erasing: Probability
    """Training: probability that a box becomes noise."""
    mixup: NonNegativeFloat
    """Training: alpha of mixup's Beta(alpha, alpha); 0 = off."""
    cutmix: NonNegativeFloat
    """Training: alpha of cutmix's Beta(alpha, alpha); 0 = off."""
    mixup_prob: Probability
    """Training: share of the steps that mix at all."""
    mixup_switch_prob: Probability
    """Training: where both are on, share of cutmix."""
    interpolation: Literal["bilinear", "bicubic"]
    """Of resizing: bilinear | bicubic, both antialiased."""
    crop_pct: Fraction
    """Evaluation: resize the short side to image_size / crop_pct, then crop the centre."""
    packing: PackingConfig
    """Images that keep their aspect ratio, several in a row of tokens, as NaViT has it (arXiv 2307.06304)."""
    mean: Channels
    """Mean of the pixel values in 0..1: one for all channels, or one a channel."""
    std: PositiveChannels
    """Standard deviation of the pixel values in 0..1: one for all channels, or one a channel."""
    num_synthetic_train: PositiveInt | None
    """Training images of noise, with source synthetic; null with the others."""
    num_synthetic_val: PositiveInt | None
    """Validation images of noise, with source synthetic; null with the others."""

    def __post_init__(self) -> None:
        if self.source != "synthetic" and self.path is None:
            raise ConfigError("data.path=null: give the folder that holds train/ and val/, data.path=/data/imagenet")
        if self.source == "synthetic" and None in (self.num_synthetic_train, self.num_synthetic_val):
            raise ConfigError("data.source=synthetic needs data.num_synthetic_train and data.num_synthetic_val")
        if self.source == "folder" and str(self.path).startswith("s3://"):
            raise ConfigError(
                f"data.source=folder with data.path={self.path}: a bucket holds shards; make them with "
                f"tools/make_shards.py and set data.source=webdataset"
            )
        if self.decoder == "nvjpeg" and self.on_error == "skip":
            raise ConfigError(
                "data.on_error=skip with data.decoder=nvjpeg: the GPU decodes when the batch has been put together; "
                "use data.decoder=torchvision"
            )
        for key, refused, fix in (
            ("source", self.source == "synthetic", "there are no files to keep; use folder"),
            ("decoder", self.decoder == "nvjpeg", "use data.decoder=torchvision, whose time counts once only"),
            ("on_error", self.on_error == "skip", "all images are read at the start; use raise"),
            ("auto_augment", (self.auto_augment or "").startswith("augmix"), "use one of the other policies"),
            ("color_jitter", len(self.color_jitter or ()) == 4, "give three numbers, without hue"),
        ):
            if self.resident and refused:
                value = typed(getattr(self, key))
                raise ConfigError(f"data.{key}={value} with data.resident=true: {fix}, or set data.resident=false")
        for key in ("vflip", "auto_augment", "color_jitter", "random_erasing"):
            if self.decoder == "nvjpeg" and (value := getattr(self, key)):
                raise ConfigError(
                    f"data.{key}={typed(value)} with data.decoder=nvjpeg, which crops and flips from left to right "
                    "only: use data.decoder=torchvision"
                )
        for key, values in (("mean", self.mean), ("std", self.std)):
            if not all(0 <= value <= 1 for value in values):
                scaled = [round(value / 255, 4) for value in values]
                is_of_bytes = max(values) > 1 and min(values) >= 0
                advice = f"divide those of the 0..255 scale by 255, data.{key}={scaled}" if is_of_bytes else "mend them"
                raise ConfigError(f"data.{key}={list(values)} is not within 0..1, the scale of pixel values: {advice}")
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
    """adamw | sgd | lamb | muon (of the blocks' matrices; adamw of all else)."""
    lr: PositiveFloat
    """Peak learning rate; with lr_base_size that of a batch of so many images."""
    lr_base_size: PositiveInt | None
    """Images of the batch that lr is meant for: the peak is lr * global_batch_size / lr_base_size; null = lr itself.
    The other rates, lr_scheduler.min_lr and warmup_start_lr, are not scaled."""
    lr_base_scale: Literal["linear", "sqrt"]
    """lr_base_size: the peak goes with the batch (linear) | with its square root (sqrt)."""
    betas: tuple[Rate, Rate] | None
    """Decay of the averages of gradients and their squares; null with sgd, which has none."""
    eps: PositiveFloat | None
    """Added to the denominator of an update; null with sgd, which has none."""
    state_dtype: Literal["fp32", "bf16"]
    """Of adamw's two averages: fp32 (8 bytes a parameter) | bf16 (4; betas of at most 0.992)."""
    momentum: Rate | None
    """Momentum of sgd and of muon's matrices; null with adamw and lamb, which have none."""
    weight_decay: NonNegativeFloat
    """Weight decay of matrices only; multiplied by the learning rate, as torch does."""
    layer_decay: Fraction | None
    """Learning rate of each layer over that of the one above, the head's being lr; null = 1."""

    def __post_init__(self) -> None:
        takes = {"sgd": ("momentum",), "muon": ("betas", "eps", "momentum")}.get(self.name, ("betas", "eps"))
        for key in ("betas", "eps", "momentum"):
            value = getattr(self, key)
            if value is None and key in takes:
                raise ConfigError(f"optimizer.{key}=null, but optimizer.name={self.name} needs a value: give one")
            if value is not None and key not in takes:
                raise ConfigError(
                    f"optimizer.{key}={typed(value)}: optimizer.name={self.name} takes {' and '.join(takes)}; set it "
                    "to null"
                )
        if self.state_dtype == "bf16":
            self._check_bf16_state()

    def _check_bf16_state(self) -> None:
        """Refuse what cannot have its state in BF16.

        A BF16 number has 8 significant bits: the next one is at most 2^-7 = 0.8 % away. An average that decays by less
        than half of that, as with 0.999, is rounded back to where it was, in each step anew, and never decays. With
        1 - 2^-7 = 0.992 and below each decay is a step of BF16 at least, from any number.
        """
        if self.name != "adamw":
            raise ConfigError(
                f"optimizer.state_dtype=bf16 with optimizer.name={self.name}, whose state is fp32: set fp32, or "
                "optimizer.name=adamw"
            )
        assert self.betas is not None  # adamw takes them
        if max(self.betas) > 1 - 2**-7:
            raise ConfigError(
                f"optimizer.betas={list(self.betas)} with optimizer.state_dtype=bf16: an average that decays by less "
                "than 2^-7 a step is lost in BF16's rounding; give at most 0.992, as [0.9, 0.95]"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LrSchedulerConfig:
    """The learning rate as a function of the step."""

    name: Literal["cosine", "linear", "rsqrt", "constant"]
    """Its course after the warmup: cosine or linear (to min_lr) | rsqrt | constant."""
    num_warmup_steps: NonNegativeInt | None
    """Steps from warmup_start_lr at step 0 to lr, in a straight line; may exceed the run. Give this or
    num_warmup_epochs and set the other to null."""
    num_warmup_epochs: PositiveFloat | None
    """The warmup in epochs, rounded down to steps; null = as num_warmup_steps says."""
    warmup_start_lr: NonNegativeFloat
    """Learning rate at step 0, where the warmup begins."""
    num_training_steps: PositiveInt | None
    """Steps of the schedule, after which the last rate stays; null = the run's."""
    num_cooldown_steps: NonNegativeInt
    """rsqrt and constant: last steps of the schedule, a straight line down to min_lr."""
    rsqrt_timescale: PositiveInt | None
    """rsqrt: steps after the warmup until the rate is lr / sqrt(2); null with the others."""
    min_lr: NonNegativeFloat
    """Learning rate of the schedule's last step."""

    def __post_init__(self) -> None:
        name = f"lr_scheduler.name={self.name}"
        if (self.num_warmup_steps is None) == (self.num_warmup_epochs is None):
            raise ConfigError(
                f"lr_scheduler.num_warmup_steps={typed(self.num_warmup_steps)} "
                f"lr_scheduler.num_warmup_epochs={typed(self.num_warmup_epochs)}: give exactly one of them and set the "
                "other to null"
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
    """softmax (cross-entropy) | sigmoid (binary cross-entropy of every class)."""
    label_smoothing: Rate
    """Share of a target that is spread evenly over all classes."""
    bce_sum: bool
    """sigmoid: sum over the classes (big_vision) instead of their mean (timm, DeiT III)."""
    bce_target_thresh: Rate | None
    """sigmoid: targets above it are 1, the others 0 (DeiT III: 0.0); null = as they are."""

    def __post_init__(self) -> None:
        if self.name == "softmax" and self.bce_sum:
            raise ConfigError("loss.bce_sum=true with loss.name=softmax: set it to false, or loss.name=sigmoid")
        if self.name == "softmax" and self.bce_target_thresh is not None:
            raise ConfigError(
                f"loss.bce_target_thresh={self.bce_target_thresh} with loss.name=softmax: set it to null, or "
                "loss.name=sigmoid"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DistillationConfig:
    """Learning from a teacher's answers, as DeiT does (arXiv 2012.12877)."""

    kind: Literal["none", "hard", "soft"]
    """none | hard (the class that the teacher answers is a second label) | soft (all of its probabilities are)."""
    teacher: Place | None
    """Model to learn from: a final_model or checkpoint folder, timm's folder, timm:<model name>, hf-hub:<owner>/<name>;
    null with kind none."""
    alpha: Fraction
    """Share of the teacher's part in the loss; the rest is the labels'."""
    tau: PositiveFloat
    """soft: temperature, by which the logits of both are divided."""
    image_size: Size | None
    """Pixels of an image as the teacher gets it, resized from the student's; null = as the student gets it."""
    shard_teacher: bool
    """Each rank keeps its part of the teacher's weights, which are gathered in use; false = all of them."""

    def __post_init__(self) -> None:
        if self.kind != "none" and self.teacher is None:
            raise ConfigError(
                f"distillation.kind={self.kind} with distillation.teacher=null: give a teacher, as "
                "timm:regnety_160.deit_in1k, or set distillation.kind=none"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EmaConfig:
    """The exponential moving average of the weights, under the names of timm's ModelEmaV3."""

    decay: Rate | None
    """Share of the average that stays at an update; null = no average."""
    use_warmup: bool
    """A shorter average at first: 1 - (1 + step / warmup_gamma)^-warmup_power, up to decay."""
    warmup_gamma: PositiveFloat
    """use_warmup: steps by which its formula divides; more = a slower rise."""
    warmup_power: PositiveFloat
    """use_warmup: exponent of its formula; more = a faster rise."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationConfig:
    """When to evaluate, and which number makes a checkpoint the best."""

    every_n_steps: PositiveInt | None
    """Steps between evaluations; the last step evaluates too. Give this or every_n_epochs and set the other to null;
    both null = never."""
    every_n_epochs: PositiveFloat | None
    """Epochs between evaluations, rounded down to steps; null = as every_n_steps says."""
    best_metric: Literal["val/top1", "val/top5", "val/loss", "val/ema_top1", "val/ema_loss"]
    """val/top1, val/top5, val/ema_top1 (higher is better) | val/loss, val/ema_loss (lower)."""

    def __post_init__(self) -> None:
        _at_most_one("evaluation.every_n_steps", self.every_n_steps, "evaluation.every_n_epochs", self.every_n_epochs)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Where and when to save, and what to go on from."""

    ckpt_dir: Place | None
    """Folder of the checkpoints, which all nodes share, or s3://bucket/prefix; null = no checkpoints."""
    local_dir: Place | None
    """With ckpt_dir or init_from in a bucket: the folder on each node for what its ranks write and read there; null =
    <output_dir>/checkpoints. It needs room for a node's parts of two checkpoints, on rank 0's node for a whole one and
    final_model."""
    save_every_n_steps: PositiveInt | None
    """Steps between checkpoints. Give this or save_every_n_epochs and set the other to null; both null = only a new
    best and the last step."""
    save_every_n_epochs: PositiveFloat | None
    """Epochs between checkpoints, rounded down to steps; null = as save_every_n_steps says."""
    resume_from_checkpoint: bool
    """Go on from the newest complete checkpoint in ckpt_dir, if there is one."""
    init_from: Place | None
    """Weights to start a new run from: a checkpoint folder, a .pt, .safetensors or .npz file, a timm or Hugging Face
    folder, timm:<model name>, <owner>/<name> on the Hugging Face hub, a checkpoint or final_model of ours in a bucket;
    null = random ones. A checkpoint in ckpt_dir goes first."""
    async_save: bool
    """Copy to host memory, then write while training goes on."""
    max_checkpoints: PositiveInt | None
    """Newest checkpoints that are kept, besides the best; null = all."""
    save_final_model: bool
    """Write <ckpt_dir>/final_model (safetensors with timm's names) after the last step."""

    def __post_init__(self) -> None:
        for key, path in {"ckpt_dir": self.ckpt_dir, "init_from": self.init_from}.items():
            if path is not None and "://" in path and not path.startswith("s3://"):
                raise ConfigError(
                    f"checkpoint.{key}={path} is no folder and no s3://bucket/prefix: give one; services that speak S3 "
                    "are reached by AWS_ENDPOINT_URL"
                )
        if self.local_dir is not None and "://" in self.local_dir:
            raise ConfigError(f"checkpoint.local_dir={self.local_dir} must be a folder on each node: give a path")
        steps, epochs = "checkpoint.save_every_n_steps", "checkpoint.save_every_n_epochs"
        _at_most_one(steps, self.save_every_n_steps, epochs, self.save_every_n_epochs)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoggerConfig:
    """Console and metrics.jsonl."""

    frequency: PositiveInt
    """Steps between log lines; the only host synchronisation of the loop."""
    peak_tflops: PositiveFloat | None
    """Dense BF16 TFLOP/s of a card, for train/mfu; null = by its datasheet, where observability/metrics.py knows it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WandbConfig:
    """Weights & Biases."""

    mode: Literal["disabled", "offline", "online"]
    """disabled (wandb is not even imported) | offline (wandb sync sends it later) | online."""
    init_args: dict[str, Any]
    """Passed to wandb.init; add others as +wandb.init_args.<name>=<value>."""

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
    """Write for TensorBoard; false = it is not even imported."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProfilerConfig:
    """What to profile, of which steps and ranks."""

    trace: bool
    """torch.profiler: a timeline (https://ui.perfetto.dev) and a table of what took longest."""
    memory_snapshot: bool
    """The CUDA allocator's history, for https://docs.pytorch.org/memory_viz."""
    first_step: PositiveInt
    """First step that is profiled, after those that warm up."""
    num_steps: PositiveInt
    """Number of steps that are profiled."""
    ranks: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None
    """Ranks that are profiled; null = all."""
    record_shapes: bool
    """Record the shapes of the operations' inputs."""
    with_stack: bool
    """Record the source lines of the operations; slow."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DistributedConfig:
    """Sizes of the mesh axes; None = derived from the world size."""

    dp_outer: PositiveInt | None
    """FSDP2, Megatron-FSDP: replicas of the sharded group (HSDP); null = 1."""
    dp_shard: PositiveInt | None
    """FSDP2, Megatron-FSDP: ranks that share one copy of the weights; null = by the world size."""
    tp: PositiveInt | None
    """FSDP2: ranks that share each block's matrices and attention heads (tensor parallelism); null = 1."""
    hang_timeout_s: PositiveFloat | None
    """Seconds without progress or any sign of life, 20 say, after which the ranks that hang are named and the run ends;
    null = never. A debugger that stops a rank looks like a hang."""
    slow_rank_factor: Annotated[float, Field(gt=1)] | None
    """Work of a rank in a step, over the median rank's, 1.5 say, from which on it is named as slow; null = never."""
    stand_by: bool
    """The run takes as many ranks as divide the batch, and the last ones do nothing; false = such a number is refused.
    For nodes that join and leave."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DdpConfig:
    """DistributedDataParallel."""

    bucket_cap_mb: PositiveInt
    """Size of the buckets in which gradients travel, MiB."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Fsdp2Config:
    """torch.distributed.fsdp.fully_shard."""

    reshard_after_forward: bool
    """true = ZeRO-3; false keeps the weights gathered until the backward pass (ZeRO-2)."""
    gathered_blocks: NonNegativeInt
    """With reshard_after_forward: this many of the last blocks stay gathered until their backward pass, which comes
    first; a gather less for each, and its weights in memory (in the forward pass's precision)."""
    cpu_offload: bool
    """Weights, gradients and optimizer in host memory; needs CUDA."""

    def __post_init__(self) -> None:
        if self.gathered_blocks and not self.reshard_after_forward:
            raise ConfigError(
                f"fsdp2.gathered_blocks={self.gathered_blocks} with fsdp2.reshard_after_forward=false, with which all "
                "blocks stay gathered: set one of them to its default"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MfsdpConfig:
    """megatron_fsdp.fully_shard_model."""

    zero_dp_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
    """no_shard | optim | optim_grads | optim_grads_params (ZeRO-0 to 3)."""
    outer_dp_sharding_strategy: Literal["no_shard", "optim"]
    """What the dp_outer axis shards: no_shard | optim, which needs dp_outer > 1."""

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
    """DelayedScaling: scales are divided by 2^margin; null = TransformerEngine's own."""
    amax_history_len: PositiveInt | None
    """DelayedScaling: steps that are looked back on; null = TransformerEngine's own."""
    amax_compute_algo: Literal["max", "most_recent"] | None
    """DelayedScaling: max (over those steps) | most_recent; null = TransformerEngine's own."""
    x_block_scaling_dim: Literal[1, 2] | None
    """Float8BlockScaling, the input: 1 (1 x 128 values a scale) | 2 (128 x 128); null = TransformerEngine's own."""
    w_block_scaling_dim: Literal[1, 2] | None
    """Float8BlockScaling, the weight: 1 | 2 likewise; null = TransformerEngine's own."""
    grad_block_scaling_dim: Literal[1, 2] | None
    """Float8BlockScaling, the gradient: 1 | 2 likewise; null = TransformerEngine's own."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Fp8Config:
    """FP8 in the linear layers of TransformerEngine's blocks."""

    enabled: bool
    """Compute in FP8; needs model.transformer_engine=true."""
    fp8_recipe: Literal[
        "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"
    ]
    """DelayedScaling | Float8CurrentScaling | Float8BlockScaling (Hopper and newer) | MXFP8BlockScaling |
    NVFP4BlockScaling (compute capability 10.0)."""
    fp8_format: Literal["HYBRID", "E4M3"] | None
    """HYBRID (E4M3 forward, E5M2 backward) | E4M3; null = the recipe's own."""
    fp8_recipe_kwargs: Fp8RecipeKwargs
    """Arguments of the recipe; null = TransformerEngine's own value."""
    layers: tuple[str, ...] | None
    """Which of the blocks' linear layers, by patterns over blocks.<number>.{attn.qkv, attn.proj, mlp.fc1, mlp.fc2}:
    [blocks.[1-9].*, blocks.10.*] leaves the first and last of 12 blocks in BF16; null = all."""
    quantized_model_init: bool
    """train_mfsdp.py: layers hold FP8 weights only, the optimizer FP32 ones."""
    log_statistics_every_n_steps: PositiveInt | None
    """Steps between lines on how well FP8 holds each layer's operands, in <output_dir>/fp8_statistics.jsonl; such a
    step takes longer and more memory; null = never."""

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
    """Optimizer updates of the run. Give this or num_epochs and set the other to null."""
    num_epochs: PositiveFloat | None
    """Epochs of the run; its steps are floor(num_epochs * images / global_batch_size)."""
    global_batch_size: PositiveInt
    """Images of a step: micro_batch_size * ranks * accumulation, which is derived."""
    micro_batch_size: PositiveInt | None
    """Images a rank and forward pass; null = global_batch_size / ranks, no accumulation."""
    seed: NonNegativeInt
    """Every random number of the run follows from it, the step and the position."""
    precision: Literal["bf16", "fp32"]
    """bf16 (FP32 weights and optimizer, BF16 compute) | fp32 (TF32 off everywhere)."""
    compile: bool
    """torch.compile, block by block."""
    cuda_graphs: bool
    """One launch for a microbatch's forward and backward pass, recorded in step 12: the GPU no longer waits for its
    host."""
    activation_checkpointing: Recompute
    """Compute again in the backward pass, for less memory: true = each block, a third more compute | selective = the
    inside of each MLP, about a tenth more | false = nothing."""
    max_grad_norm: PositiveFloat | None
    """Bound of the gradients' global norm, which is logged all the same; null = no clipping."""
    output_dir: Place
    """The run's folder, the same on every rank."""
    model: ModelConfig
    """The network: arguments of vit.VisionTransformer, from a file in config/model/."""
    data: DataConfig
    """The images: where they are and what happens to them, from a file in config/data/."""
    optimizer: OptimizerConfig
    """What updates the weights."""
    lr_scheduler: LrSchedulerConfig
    """The learning rate as a function of the step."""
    ema: EmaConfig
    """Moving average of the weights, evaluated beside them; final_model is made of it."""
    loss: LossConfig
    """What is minimised in training; val/loss is cross-entropy whatever stands here."""
    distillation: DistillationConfig
    """A teacher, whose answers to the student's own augmented images are learned beside the labels."""
    evaluation: EvaluationConfig
    """When to evaluate, and which number makes a checkpoint the best."""
    checkpoint: CheckpointConfig
    """Where and when to save, and what to start from."""
    logger: LoggerConfig
    """Console and metrics.jsonl."""
    wandb: WandbConfig
    """Weights & Biases, of rank 0; its id stays over resumes, a failure is one warning."""
    tensorboard: TensorboardConfig
    """TensorBoard, of rank 0: tensorboard --logdir <output_dir>/tensorboard."""
    profiler: ProfilerConfig
    """What to profile, into <output_dir>/profile; profiled steps are slower than others."""
    distributed: DistributedConfig
    """Sizes of the mesh's axes; what a script cannot honour is refused by name."""
    ddp: DdpConfig
    """train_ddp.py: DistributedDataParallel."""
    fsdp2: Fsdp2Config
    """train_fsdp2.py: torch.distributed.fsdp.fully_shard."""
    mfsdp: MfsdpConfig
    """train_mfsdp.py: megatron_fsdp.fully_shard_model."""
    fp8_config: Fp8Config
    """FP8 in the linear layers of TransformerEngine's blocks."""

    def __post_init__(self) -> None:
        if (self.num_train_steps is None) == (self.num_epochs is None):
            given = f"num_train_steps={typed(self.num_train_steps)} num_epochs={typed(self.num_epochs)}"
            raise ConfigError(f"{given}: give exactly one of them and set the other to null")
        if pair(self.data.image_size) != pair(self.model.img_size):
            raise ConfigError(
                f"data.image_size={typed(self.data.image_size)} is not model.img_size={typed(self.model.img_size)}: "
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
                f"data.color_jitter={list(self.data.color_jitter)} with model.in_chans=1: grey images have no "
                "saturation and no hue; set the third and fourth number to 0"
            )
        smoothed = self.loss.label_smoothing / self.model.num_classes
        if self.loss.bce_target_thresh is not None and smoothed > self.loss.bce_target_thresh:
            raise ConfigError(
                f"loss.label_smoothing={self.loss.label_smoothing} lifts every class above "
                f"loss.bce_target_thresh={self.loss.bce_target_thresh}: set loss.label_smoothing=0"
            )
        if self.checkpoint.save_final_model and self.checkpoint.ckpt_dir and not timm_architecture(vars(self.model)):
            raise ConfigError(f"{no_architecture(vars(self.model))}: set checkpoint.save_final_model=false")
        if self.checkpoint.save_final_model and self.checkpoint.ckpt_dir and self.model.representation_size:
            raise ConfigError(
                f"model.representation_size={self.model.representation_size} cannot be exported, timm's ViTs have a "
                "linear head: set checkpoint.save_final_model=false"
            )
        if self.activation_checkpointing and self.model.freeze == "backbone":
            raise ConfigError(
                f"activation_checkpointing={typed(self.activation_checkpointing)} with model.freeze=backbone: the "
                "blocks have no backward pass; set activation_checkpointing=false"
            )
        if self.activation_checkpointing == "selective" and self.model.num_branches() != 2:
            raise ConfigError(
                f"activation_checkpointing=selective with model.block_fn={self.model.block_fn}, which has not one MLP "
                "by itself: set true or false"
            )
        if self.fsdp2.gathered_blocks > self.model.depth:
            raise ConfigError(
                f"fsdp2.gathered_blocks={self.fsdp2.gathered_blocks} is more than model.depth={self.model.depth}: "
                "give at most that"
            )
        if self.distillation.kind != "none":
            self._check_distillation()
        if self.data.size_schedule is not None:
            self._check_size_schedule(self.data.size_schedule)
        if self.data.packing.enabled:
            self._check_packing()
        self._check_transformer_engine()
        if self.fp8_config.enabled:
            fp8_layers(self.model, self.fp8_config.layers)
            if self.cuda_graphs and (every := self.fp8_config.log_statistics_every_n_steps) is not None:
                raise ConfigError(
                    f"fp8_config.log_statistics_every_n_steps={every} with cuda_graphs=true, whose replays no "
                    "hook sees: set one of them to false or null"
                )
            model = self.model
            half = " / 2" if model.mlp_layer == "glu" and not model.is_eva else ""
            head = model.embed_dim // model.num_heads
            for key, width in (
                ("embed_dim", model.embed_dim),
                (f"embed_dim x model.mlp_ratio{half}", model.mlp_hidden()),
                *(("embed_dim / model.num_heads x model.num_kv_heads", head * heads) for heads in model.kv_heads()),
            ):
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
        for key in ("min_lr", "warmup_start_lr"):
            if (rate := getattr(self.lr_scheduler, key)) > peak_lr(self):
                raise ConfigError(f"lr_scheduler.{key}={rate} is above {peak_lr_in_words(self)}: lower it")

    def stages(self) -> tuple["Config", ...]:
        """This config; with data.size_schedule one for each entry's part of the run, too, none of which has that."""
        if self.data.size_schedule is None:
            return (self,)
        data = dataclasses.replace(self.data, size_schedule=None)
        stages = [dataclasses.replace(self, data=data)]
        for change in self.data.size_schedule:
            before = stages[-1]
            values: dict[str, Any] = {
                "model": dataclasses.replace(before.model, img_size=change.img_size),
                "data": dataclasses.replace(data, image_size=change.img_size),
                "global_batch_size": change.global_batch_size or before.global_batch_size,
            }
            if change.lr is not None:
                warmup = change.num_warmup_epochs
                lengths: dict[str, Any] = {"num_warmup_steps": None, "num_warmup_epochs": warmup}
                if warmup is None:
                    lengths = {"num_warmup_steps": 0, "num_warmup_epochs": None, "warmup_start_lr": 0.0}
                values["optimizer"] = dataclasses.replace(before.optimizer, lr=change.lr)
                values["lr_scheduler"] = dataclasses.replace(before.lr_scheduler, **lengths)
            stages.append(dataclasses.replace(before, **values))
        return tuple(stages)

    def _check_size_schedule(self, changes: tuple[SizeChange, ...]) -> None:
        """Refuse a schedule that is none, a stage that is no run, and what was not seen to work with several sizes."""
        key = "data.size_schedule"
        epochs = [change.epoch for change in changes]
        if not changes:
            raise ConfigError(f"{key}=[] changes nothing: give an entry, as [{{epoch: 200, img_size: 48}}], or null")
        if epochs != sorted(set(epochs)):
            raise ConfigError(f"{key} has the epochs {typed(epochs)}: put its entries in their order")
        if self.num_epochs is not None and epochs[-1] >= self.num_epochs:
            raise ConfigError(
                f"{key} has an entry for epoch {epochs[-1]:g}, num_epochs={self.num_epochs:g} ends before it: train "
                f"longer, or leave the entry out ({key}=null: all of them)"
            )
        for change in changes:
            if change.num_warmup_epochs is not None and change.lr is None:
                raise ConfigError(
                    f"{key}, epoch {change.epoch:g}: num_warmup_epochs={change.num_warmup_epochs:g} without lr, whose "
                    "warmup it would be: give lr, or leave it out"
                )
        rel_pos, teacher = self.model.rel_pos_type, self.distillation.kind
        for given, is_refused, fix in (
            ("checkpoint.ckpt_dir=null", self.checkpoint.ckpt_dir is None, "give it a folder: a size ends with a save"),
            ("model.transformer_engine=true", self.model.transformer_engine, "set it to false; not seen to work"),
            (f"model.rel_pos_type={rel_pos}", rel_pos is not None, "set null; not seen to work"),
            (f"distillation.kind={teacher}", teacher != "none", "set none; not seen to work"),
        ):
            if is_refused:
                raise ConfigError(f"{given} with {key}: {fix}, or {key}=null")
        try:
            self.stages()
        except ValidationError as error:
            raised = error.errors()[0].get("ctx", {}).get("error")
            if not isinstance(raised, ConfigError):
                raise
            raise ConfigError(f"{key}: {raised}") from None

    def _check_distillation(self) -> None:
        """Refuse what was not seen to work with a teacher."""
        if self.model.transformer_engine:
            raise ConfigError(
                f"model.transformer_engine=true with distillation.kind={self.distillation.kind}: not seen to work; set "
                "model.transformer_engine=false, or distillation.kind=none"
            )

    def patches_per_image(self) -> int:
        """Patches of an image: as many as img_size has or, with packing, its share of a row."""
        packing = self.data.packing
        return (packing.enabled and packing.patches_per_image) or math.prod(self.model.grid_size())

    def tokens_per_row(self) -> int:
        """Tokens of a row, with packing: the shares of its images, class and register tokens among them."""
        return self.data.packing.images_per_row * (self.patches_per_image() + self.model.num_prefix_tokens())

    def _check_packing(self) -> None:
        """Refuse what has no meaning for images in rows, or was not seen to work with them."""
        model, data = self.model, self.data
        for key, value, is_refused, why, fix in (
            ("model.implementation", model.implementation, model.implementation != "ours", "others' models", "ours"),
            ("model.transformer_engine", True, model.transformer_engine, "its blocks take images of one size", "false"),
            (
                "model.rope_type",
                model.rope_type,
                model.rope_type is not None,
                "its blocks have other positions",
                "null",
            ),
            ("model.attn_type", model.attn_type, model.attn_type != "rope", "its blocks are timm's Eva's", "rope"),
            ("model.block_fn", model.block_fn, model.block_fn != "Block", "not seen to work", "Block"),
            ("model.attn_layer", model.attn_layer, model.attn_layer != "attn", "not seen to work", "attn"),
            ("model.rel_pos_type", model.rel_pos_type, model.rel_pos_type is not None, "not seen to work", "null"),
            (
                "data.size_schedule",
                schedule_text(data.size_schedule or ()),
                data.size_schedule is not None,
                "not seen to work",
                "null",
            ),
            ("model.distilled", True, model.distilled, "not seen to work", "false"),
            ("model.global_pool", "map", model.global_pool == "map", "not seen to work", "avg"),
            ("model.fused_attn", False, not model.fused_attn, "images are told apart in the fused function", "true"),
            ("model.patch_drop_rate", model.patch_drop_rate, model.patch_drop_rate > 0, "rows would have holes", "0"),
            ("model.attn_drop_rate", model.attn_drop_rate, model.attn_drop_rate > 0, "its kernel has no dropout", "0"),
            ("data.mixup", data.mixup, data.mixup > 0, "images differ in size", "0"),
            ("data.cutmix", data.cutmix, data.cutmix > 0, "images differ in size", "0"),
            ("data.resident", True, data.resident, "it is for images of one size", "false"),
            ("data.decoder", data.decoder, data.decoder == "nvjpeg", "the GPU cuts to one size", "torchvision"),
            ("distillation.kind", self.distillation.kind, self.distillation.kind != "none", "not seen to work", "none"),
            ("distributed.tp", self.distributed.tp, (self.distributed.tp or 1) > 1, "not seen to work", "null"),
            ("cuda_graphs", True, self.cuda_graphs, "not seen to work", "false"),
        ):
            if is_refused:
                raise ConfigError(
                    f"{key}={typed(value)} with data.packing.enabled=true ({why}): set {key}={fix}, or "
                    "data.packing.enabled=false"
                )
        if (width := model.embed_dim // model.num_heads) % 8:
            raise ConfigError(
                f"model.num_heads={model.num_heads} makes heads of {width} channels, data.packing.enabled=true needs a "
                "multiple of 8: use another number"
            )

    def _check_transformer_engine(self) -> None:
        """One line with everything that TransformerEngine's layers want and this config has otherwise."""
        asked_for = "fp8_config.enabled" if self.fp8_config.enabled else "model.transformer_engine"
        if not (self.fp8_config.enabled or self.model.transformer_engine):
            return
        gelu = self.model.act_layer == "gelu"  # in timm's Eva, which has no other, by torch
        wants = (
            (not self.model.transformer_engine, "model.transformer_engine=false", "true", "FP8 is in its layers only"),
            (gelu and not self.model.is_eva, "model.act_layer=gelu", "gelu_tanh", "its GELU is the tanh form"),
            (not self.model.fused_attn, "model.fused_attn=false", "true", "its attention is always fused"),
            (self.compile, "compile=true", "false", "torch.compile cannot see into its layers"),
            (self.precision != "bf16", f"precision={self.precision}", "bf16", "it computes in BF16"),
            *(
                (True, f"model.{key}={typed(getattr(self.model, key))}", typed(plain), "its blocks have no such thing")
                for key, plain in self.model.later_options().items()
                if key not in TE_OPTIONS
            ),
        )
        is_not_so = [(given, f"{given.split('=')[0]}={wanted}", why) for is_off, given, wanted, why in wants if is_off]
        if is_not_so:
            given, fixes, reasons = (list(part) for part in zip(*is_not_so, strict=True))
            raise ConfigError(
                f"{asked_for}=true with {' '.join(given)} ({'; '.join(reasons)}): set {' '.join(fixes)}, or start from "
                "--config-name vit_te_base_patch16_224"
            )


# model.block_fn -> a model of timm's that has it.
ARCHITECTURES = {
    "Block": "vit_dwee_patch16_reg1_gap_256",  # asked for with differential attention
    "ResPostBlock": "vit_base_patch16_rpn_224",
    "ParallelThingsBlock": "vit_base_patch16_18x2_224",
    "ParallelScalingBlock": "vit_base_patch16_xp_224",
    "DiffParallelScalingBlock": "vit_dpwee_patch16_reg1_gap_256",
}
RELATIVE_ARCHITECTURES = {"Block": "vit_relpos_base_patch16_224", "ResPostBlock": "vit_relpos_base_patch16_rpn_224"}


def timm_architecture(model: Mapping[str, Any]) -> str | None:
    """The model of timm's that has what no argument of timm's tells: the class, the norm, a gated MLP; None: none has.

    Args:
        model: of a config or a checkpoint, by key.
    """
    is_eva = model["rope_type"] is not None or model["attn_type"] == "eva"
    norm, eps = model["norm_layer"], model["norm_eps"]
    if model["rel_pos_type"] is not None:
        architecture = RELATIVE_ARCHITECTURES[model["block_fn"]]
        return architecture if (norm, eps) == ("layernorm", 1e-6) else None
    if not is_eva and (model["block_fn"] != "Block" or model["attn_layer"] == "diff"):
        return ARCHITECTURES[model["block_fn"]] if eps == 1e-6 else None
    if model["distilled"]:
        is_timms = (norm, eps, model["mlp_layer"]) == ("layernorm", 1e-6, "mlp")
        return "deit_base_distilled_patch16_224" if is_timms else None
    if is_eva:
        if model["block_fn"] == "ResPostBlock":
            return "eva02_enormous_patch14_clip_224" if (norm, eps) == ("layernorm", 1e-6) else None
        known = {("layernorm", 1e-6): "eva02_base_patch14_224", ("layernorm", 1e-5): "vit_base_patch16_dinov3"}
        return (known | {("rmsnorm", 1e-6): "vit_base_patch16_sapiens2"}).get((norm, eps))
    if model["mlp_layer"] == "glu":
        return "vit_giant_patch14_dinov2" if eps == 1e-6 else None
    known = {("layernorm", 1e-6): "vit_base_patch16_224", ("layernorm", 1e-5): "vit_base_patch16_clip_224"}
    return (known | {("rmsnorm", 1e-6): "vit_base_patch16_224"}).get((norm, eps))


def no_architecture(model: Mapping[str, Any]) -> str:
    """Why there is none, in words."""
    if model["norm_layer"] == "rmsnorm" and model["norm_eps"] == 1e-6:
        return "model.norm_layer=rmsnorm cannot be exported, timm's model of these options has layernorm"
    also = " with norm_layer=layernorm, mlp_layer other than glu, block_fn=Block and attn_layer=attn, 1e-5"
    if model["rel_pos_type"] is not None:
        also = " with rel_pos_type=null, 1e-5"
    return f"model.norm_eps={model['norm_eps']} cannot be exported, timm's ViTs have 1e-6 or,{also}"


def fp8_layers(cfg: ModelConfig, patterns: tuple[str, ...] | None) -> frozenset[str]:
    """The blocks' linear layers that `fp8_config.layers` chooses, by timm's names.

    Raises:
        ConfigError: a pattern chooses none.
    """
    layers = ["attn.qkv"] if cfg.qkv_fused else ["attn.q_proj", "attn.k_proj", "attn.v_proj"]
    layers += ["attn.proj", *(["mlp.fc1_g", "mlp.fc1_x"] if cfg.mlp_layer == "swiglu" else ["mlp.fc1"]), "mlp.fc2"]
    names = [f"blocks.{number}.{layer}" for number in range(cfg.depth) for layer in layers]
    if patterns is None:
        return frozenset(names)
    if not patterns:
        raise ConfigError(
            "fp8_config.layers=[] chooses no layer: set fp8_config.enabled=false, or null for all of them"
        )
    chosen: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            near = ", ".join(difflib.get_close_matches(pattern, names, n=3, cutoff=0))
            raise ConfigError(f"fp8_config.layers: {pattern!r} chooses no layer; the nearest names are {near}")
        chosen.update(matching)
    return frozenset(chosen)


def scaled_lr(lr: float, batch_size: int, base_size: int, base_scale: str) -> float:
    """Learning rate of a batch, where `lr` is that of `base_size` images; to the numbers of timm's train.py."""
    ratio = batch_size / base_size
    return lr * (ratio**0.5 if base_scale == "sqrt" else ratio)


def peak_lr(cfg: Config) -> float:
    """The learning rate at the end of the warmup."""
    options = cfg.optimizer
    if options.lr_base_size is None:
        return options.lr
    return scaled_lr(options.lr, cfg.global_batch_size, options.lr_base_size, options.lr_base_scale)


def peak_lr_in_words(cfg: Config) -> str:
    """`peak_lr` by the keys that it follows from."""
    given, base = f"optimizer.lr={cfg.optimizer.lr:g}", cfg.optimizer.lr_base_size
    if base is None:
        return given
    ratio = f"{cfg.global_batch_size} / {base}"
    return f"{given} x {f'sqrt({ratio})' if cfg.optimizer.lr_base_scale == 'sqrt' else ratio} = {peak_lr(cfg):g}"


def known_keys(cls: type = Config, prefix: str = "") -> list[str]:
    """Every key that a user can type, dotted."""
    keys = []
    for name, field in cls.__dataclass_fields__.items():
        keys.append(prefix + name)
        if hasattr(field.type, "__dataclass_fields__"):
            keys += known_keys(field.type, f"{prefix}{name}.")
    return keys


def idle_keys(cfg: Config, script: str) -> dict[str, tuple[str, str]]:
    """Keys and sections that do nothing in a run of `script` with this config -> why, and what puts them to work.

    What contradicts is refused by the rules above and by launch.check_script; this is what would be passed over.
    """
    found: dict[str, tuple[str, str]] = {}

    def idle(section: str, keys: str, why: str, fix: str) -> None:
        for key in keys.split():
            # The first reason stays: it is the one to mend first.
            found.setdefault(f"{section}.{key}" if section else key, (why, fix))

    for strategy in ("ddp", "fsdp2", "mfsdp"):
        if script != f"train_{strategy}":
            idle("", strategy, f"in {script}.py", f"use train_{strategy}.py")
    if cfg.model.drop_path_rate == 0:
        idle("model", "drop_path_schedule", "with model.drop_path_rate=0", "give model.drop_path_rate a value")
    if not cfg.model.class_token and not cfg.model.reg_tokens:
        why = "with model.class_token=false and model.reg_tokens=0"
        idle("model", "no_embed_class", why, "set model.class_token=true")
    model = cfg.model
    if model.rope_type is None:
        idle("model", " ".join(ROPE_ONLY), "with model.rope_type=null", "give model.rope_type")
    if model.rel_pos_type != "mlp":
        rel_pos = f"with model.rel_pos_type={typed(model.rel_pos_type)}"
        idle("model", "rel_pos_dim", rel_pos, "use model.rel_pos_type=mlp")
    if model.rel_pos_type is None:
        idle("model", "shared_rel_pos", "with model.rel_pos_type=null", "give model.rel_pos_type")
    if model.rope_type != "cat":
        idle("model", "ref_feat_shape", f"with model.rope_type={typed(model.rope_type)}", "use model.rope_type=cat")
    if model.rope_type == "mixed":
        idle("model", "rope_grid_offset", "with model.rope_type=mixed", "use model.rope_type=cat")
    if model.global_pool != "map":
        pool = "attn_pool_num_heads attn_pool_mlp_ratio"
        idle("model", pool, f"with model.global_pool={model.global_pool}", "use model.global_pool=map")
    if model.pos_embed == "none":
        idle("model", "no_embed_class", "with model.pos_embed=none", "set model.pos_embed=learn")
    if model.mlp_layer != "swiglu":
        idle("model", "swiglu_align_to", f"with model.mlp_layer={model.mlp_layer}", "use model.mlp_layer=swiglu")
    if model.attn_type == "rope" and model.init_values is None:
        idle("model", "attn_only_layer_scale", "with model.init_values=null", "give model.init_values a value")
    if cfg.model.freeze == "backbone":
        idle("optimizer", "layer_decay", "with model.freeze=backbone", "set model.freeze=null")

    source = f"with data.source={cfg.data.source}"
    if cfg.data.source == "synthetic":
        reading = "path decoder exif_orientation max_pixels on_error interpolation crop_pct"
        augmentation = "crop_scale crop_ratio hflip vflip auto_augment color_jitter random_erasing"
        idle("data", f"{reading} {augmentation}", f"{source}, images of noise", "use data.source=folder")
    else:
        idle("data", "num_synthetic_train num_synthetic_val", source, "use data=synthetic")
    if cfg.data.source != "webdataset":
        idle("data", "shard_streams", source, "use data.source=webdataset")
    if not str(cfg.data.path).startswith("s3://"):
        why = f"with data.path={typed(cfg.data.path)}"
        idle("data", "cache_dir cache_gb", why, "give a data.path in a bucket, s3://bucket/prefix")
    if cfg.data.num_workers == 0:
        idle("data", "worker_timeout_s", "with data.num_workers=0", "set data.num_workers=1")
    if cfg.data.on_error != "skip":
        idle("data", "max_errors", f"with data.on_error={cfg.data.on_error}", "set data.on_error=skip")
    if not (cfg.data.mixup and cfg.data.cutmix):
        why, fix = f"with data.mixup={cfg.data.mixup:g} and data.cutmix={cfg.data.cutmix:g}", "set both above 0"
        idle("data", "mixup_switch_prob", why, fix)
        if not (cfg.data.mixup or cfg.data.cutmix):
            idle("data", "mixup_prob", why, "set one of them above 0")

    if cfg.data.packing.enabled:
        idle("data", "crop_pct", "with data.packing.enabled=true, where nothing is cut off", "leave it as it is")
    else:
        sizes = "packing.patches_per_image packing.images_per_row"
        idle("data", sizes, "with data.packing.enabled=false", "set data.packing.enabled=true")

    if cfg.optimizer.lr_base_size is None:
        idle("optimizer", "lr_base_scale", "with optimizer.lr_base_size=null", "give optimizer.lr_base_size")
    schedule = cfg.lr_scheduler
    if schedule.name in ("rsqrt", "constant") and not schedule.num_cooldown_steps:
        why = f"with lr_scheduler.name={schedule.name} and lr_scheduler.num_cooldown_steps=0"
        idle("lr_scheduler", "num_training_steps", why, "give lr_scheduler.num_cooldown_steps")
    if cfg.distillation.kind == "none":
        why, fix = "with distillation.kind=none", "set distillation.kind=hard"
        idle("distillation", "teacher alpha tau image_size shard_teacher", why, fix)
    elif cfg.distillation.kind == "hard":
        idle("distillation", "tau", "with distillation.kind=hard", "set distillation.kind=soft")
    if cfg.ema.decay is None:
        idle("ema", "use_warmup warmup_gamma warmup_power", "with ema.decay=null", "set ema.decay=0.9999")
    elif not cfg.ema.use_warmup:
        idle("ema", "warmup_gamma warmup_power", "with ema.use_warmup=false", "set ema.use_warmup=true")
    if (cfg.evaluation.every_n_steps, cfg.evaluation.every_n_epochs) == (None, None):
        idle("evaluation", "best_metric", "without evaluations", "give evaluation.every_n_epochs")
    if cfg.checkpoint.ckpt_dir is None:
        saving = "save_every_n_steps save_every_n_epochs async_save max_checkpoints save_final_model"
        why, fix = "with checkpoint.ckpt_dir=null", "give checkpoint.ckpt_dir a folder"
        idle("checkpoint", f"{saving} resume_from_checkpoint", why, fix)
    if not any(str(path).startswith("s3://") for path in (cfg.checkpoint.ckpt_dir, cfg.checkpoint.init_from)):
        why = "without a bucket in checkpoint.ckpt_dir or checkpoint.init_from"
        idle("checkpoint", "local_dir", why, "give checkpoint.ckpt_dir=s3://bucket/prefix")
    if cfg.wandb.mode == "disabled":
        idle("wandb", "init_args", "with wandb.mode=disabled", "set wandb.mode=offline")
    if not cfg.profiler.trace:
        idle("profiler", "record_shapes with_stack", "with profiler.trace=false", "set profiler.trace=true")
        if not cfg.profiler.memory_snapshot:
            why = "with profiler.trace=false and profiler.memory_snapshot=false"
            idle("profiler", "first_step num_steps ranks", why, "set profiler.trace=true")
    if not cfg.fp8_config.enabled:
        recipe = "fp8_recipe fp8_format fp8_recipe_kwargs layers log_statistics_every_n_steps"
        idle("fp8_config", recipe, "with fp8_config.enabled=false", "set fp8_config.enabled=true")
    return found


def to_plain(cfg: Config) -> dict[str, Any]:
    """The config as dicts, lists and scalars, as it stands in config.yaml."""
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted keys."""
    flat = {}
    for key, value in values.items():
        flat |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """How a global batch is cut: micro_batch_size images a rank and forward pass, `accumulation` passes a step."""

    micro_batch_size: int
    accumulation: int


def split_batch(cfg: Config, world_size: int) -> BatchSplit:
    """The batch arithmetic: global = micro x ranks x accumulation, where the ranks of a tp group count as one.

    Raises:
        ConfigError: the global batch is not micro batch x ranks x a whole number.
    """
    tp = cfg.distributed.tp or 1
    ranks = world_size // tp
    micro = cfg.micro_batch_size or max(cfg.global_batch_size // ranks, 1)
    accumulation, rest = divmod(cfg.global_batch_size, micro * ranks)
    if rest or not accumulation:
        nearest = max(accumulation, 1) * micro * ranks
        advice = f"use global_batch_size={nearest}, or another micro_batch_size"
        parts, left = divmod(cfg.global_batch_size, cfg.micro_batch_size or 1)
        if not left:  # the divisors of `parts` are the numbers of ranks that would do
            below, *above = (
                next((n * tp for n in side if parts % n == 0), 0)
                for side in (range(ranks, 0, -1), range(ranks + 1, parts + 1))
            )
            numbers = " or ".join(str(n) for n in (below, *above) if n)
            advice += f", or {numbers} ranks; with distributed.stand_by=true {below} of the {world_size} would train"
        raise ConfigError(
            f"global_batch_size={cfg.global_batch_size} is not micro_batch_size={micro} x {ranks} ranks "
            f"x a whole number of accumulation steps: {advice}"
        )
    packing = cfg.data.packing
    if packing.enabled and micro % packing.images_per_row:
        raise ConfigError(
            f"data.packing.images_per_row={packing.images_per_row} does not divide micro_batch_size={micro}: use "
            f"{math.gcd(micro, packing.images_per_row)}, or another micro_batch_size"
        )
    return BatchSplit(micro, accumulation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSizes:
    """The numbers that follow from the config, the ranks and the data: made once a run, passed to all that need one.

    With data.size_schedule a stage, the part of the run with images of one size, has a record of its own.

    Attributes:
        world_size: ranks of the job.
        dp_size: ranks whose batches differ, world_size / distributed.tp.
        global_batch_size: images of a step.
        micro_batch_size: images a rank and forward pass.
        accumulation: forward passes a step.
        num_train_images: images of an epoch.
        num_val_images: images of an evaluation.
        classes: their names, in the order of their labels; empty for synthetic data.
        num_train_steps: optimizer updates of the run.
        first_step: updates before the stage; 0 without stages.
        first_sample: of the stream of samples, where the stage begins.
        last_step: the stage's last update; num_train_steps without stages.
        size_before: the image size of the stage before this one; None in the first.
        schedule_start: updates before the learning rate's schedule, 0 but where a stage has one of its own.
        num_warmup_steps: updates of that schedule until the learning rate is at its peak.
        schedule_steps: updates over which it runs.
        evaluate_every: steps between evaluations; None = never.
        save_every: steps between checkpoints; None = only a new best and the last.
    """

    world_size: int
    dp_size: int
    global_batch_size: int
    micro_batch_size: int
    accumulation: int
    num_train_images: int
    num_val_images: int
    classes: tuple[str, ...]
    num_train_steps: int
    first_step: int
    first_sample: int
    last_step: int
    size_before: Size | None
    schedule_start: int
    num_warmup_steps: int
    schedule_steps: int
    evaluate_every: int | None
    save_every: int | None

    def dp_rank(self, rank: int) -> int:
        """Which of the `dp_size` parts of a batch is this rank's; the ranks of a tp group are neighbours."""
        return rank * self.dp_size // self.world_size

    def samples_at(self, step: int) -> int:
        """Samples of the stream before the update that follows `step`, one of this stage or the one before it."""
        return self.first_sample + (step - self.first_step) * self.global_batch_size

    @classmethod
    def of(cls, cfg: Config, **data: Any) -> "RunSizes":
        """The record of a run, or of its first stage, on `data` as of `stages`."""
        return cls.stages(cfg, **data)[0]

    @classmethod
    def stages(
        cls, cfg: Config, *, world_size: int, num_train_images: int, num_val_images: int, classes: tuple[str, ...] = ()
    ) -> list["RunSizes"]:
        """The records of the stages of `cfg.stages()` that the run reaches, on data of these sizes; one without stages.

        Raises:
            ConfigError: a batch does not divide, or the run or a stage would have no step.
        """
        configs, changes = cfg.stages(), cfg.data.size_schedule or ()
        batches = [split_batch(stage, world_size) for stage in configs]

        def steps(epochs: float | None, stage: Config, *, after: int = 0) -> int:
            assert epochs is not None  # the rules of the sections leave no other case
            # The number as it was typed: 4.1 x 60 / 2 is 123, in floats a little less.
            return math.floor((ExactFraction(str(epochs)) * num_train_images - after) / stage.global_batch_size)

        def interval(every_n_steps: int | None, every_n_epochs: float | None, stage: Config) -> int | None:
            return every_n_steps if every_n_epochs is None else max(steps(every_n_epochs, stage), 1)

        starts = [(0, 0)]  # of the stages: updates and samples before them
        for stage, change in zip(configs, changes, strict=False):
            step, sample = starts[-1]
            if (length := steps(change.epoch, stage, after=sample)) < 1:
                raise ConfigError(
                    f"data.size_schedule, epoch {change.epoch:g}: less than a step of {stage.global_batch_size} images "
                    "lies before it: change the size later"
                )
            starts.append((step + length, sample + length * stage.global_batch_size))
        step, sample = starts[-1]
        total = step + steps(cfg.num_epochs, configs[-1], after=sample) if cfg.num_train_steps is None else None
        if total is not None and total <= step:
            where = f" after epoch {changes[-1].epoch:g}" if changes else ""
            raise ConfigError(
                f"num_epochs={cfg.num_epochs} of {num_train_images} images is less than one step{where}: train longer"
            )
        total = cfg.num_train_steps or total
        assert total is not None

        # Which stage the schedule of each one's learning rate began with, and the step of its end.
        owners = [0]
        for number, change in enumerate(changes, 1):
            owners.append(owners[-1] if change.lr is None else number)
        found = []
        for number, (stage, batch, owner) in enumerate(zip(configs, batches, owners, strict=True)):
            first_step, first_sample = starts[number]
            if first_step >= total:
                break
            later = [starts[other][0] for other in sorted({*owners}) if other > owner]
            schedule_end = min(later, default=cfg.lr_scheduler.num_training_steps or total)
            if schedule_end <= starts[owner][0]:
                raise ConfigError(
                    f"lr_scheduler.num_training_steps={schedule_end} is not after step {starts[owner][0]}, where an lr "
                    "of data.size_schedule begins a schedule: give more steps of the run, or null"
                )
            warmup = stage.lr_scheduler.num_warmup_steps
            if warmup is None:
                warmup = steps(stage.lr_scheduler.num_warmup_epochs, configs[owner])
            evaluation, saving = stage.evaluation, stage.checkpoint
            found.append(
                cls(
                    world_size=world_size,
                    dp_size=world_size // (cfg.distributed.tp or 1),
                    global_batch_size=stage.global_batch_size,
                    micro_batch_size=batch.micro_batch_size,
                    accumulation=batch.accumulation,
                    num_train_images=num_train_images,
                    num_val_images=num_val_images,
                    classes=classes,
                    num_train_steps=total,
                    first_step=first_step,
                    first_sample=first_sample,
                    last_step=min(starts[number + 1][0], total) if number < len(changes) else total,
                    size_before=configs[number - 1].model.img_size if number else None,
                    schedule_start=starts[owner][0],
                    num_warmup_steps=warmup,
                    schedule_steps=schedule_end - starts[owner][0],
                    evaluate_every=interval(evaluation.every_n_steps, evaluation.every_n_epochs, stage),
                    save_every=interval(saving.save_every_n_steps, saving.save_every_n_epochs, stage),
                )
            )
        return found
