"""The Vision Transformer on TransformerEngine's fused layers: its blocks, its import, FP8's recipes and state.

The parameters of the fused layers have names of their own, which runtime/parameter_names.py maps to timm's.
FP8 multiplies in 8 bits: every operand is scaled to fit, by a factor a tensor (delayed and current scaling) or a block.
The linear layers of the blocks are quantized, all or those that the config names; residual stream, norms, attention,
patch embedding and head stay in BF16 or FP32. Delayed scaling takes the factor from the largest values of past steps,
and so has a state.
"""

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from schema import ConfigError, Fp8Config, ModelConfig, fp8_layers
from vit import LayerScale, VisionTransformer, act_layer, norm_layer, scaled, times

# TransformerEngine names the attention backend that it chooses if these say so when it is imported.
os.environ.setdefault("NVTE_DEBUG", "1")
os.environ.setdefault("NVTE_DEBUG_LEVEL", "1")
# GELU in the epilogue of cuBLASLt's matrix product, not in a kernel of its own after it, where the product is in BF16:
# a step of B/16 with 512 images takes 133.7 ms for 139.5
# (H200, TransformerEngine 2.20.2; benchmarks/levers_h200x1.log).
os.environ.setdefault("NVTE_BIAS_GELU_NVFUSION", "0")
# Layer norms by cuDNN: TransformerEngine has no tuned kernel for some widths, 1280 (ViT-H) among them, where its own
# take 19.8 of 216.8 ms a step in FP8 (H200; benchmarks/levers_h200x1.log). At 768 and 1024 the two are alike.
os.environ.setdefault("NVTE_NORM_FWD_USE_CUDNN", "1")
os.environ.setdefault("NVTE_NORM_BWD_USE_CUDNN", "1")
# TransformerEngine's names of activations. Its GELU is the tanh form; it has none of the erf form.
TE_ACTIVATIONS = {"gelu_tanh": "gelu", "quick_gelu": "qgelu", "relu": "relu", "silu": "silu"}
# Parameter -> the dimension along which tensor parallelism cuts it; what is not here is whole on each rank.
CUTS = {
    "column": {"weight": 0, "bias": 0},
    "row": {"weight": 1},
    "LayerNormMLP": {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1},
}


class LinearLayers:
    """Makes the linear layers of a block: those that fp8_config.layers chooses in FP8, the others always in BF16.

    With a mesh `tp` each is this rank's part of the layer.
    """

    def __init__(self, recipe: Any | None, chosen: frozenset[str], block: int, tp: DeviceMesh | None) -> None:
        self.recipe, self.chosen, self.prefix, self.tp = recipe, chosen, f"blocks.{block}.", tp

    def in_fp8(self, name: str) -> bool:
        """Whether FP8 is on and the block's layer `name`, in timm's words, is chosen."""
        return self.recipe is not None and self.prefix + name in self.chosen

    def make(self, name: str, kind: str, *args: Any, **options: Any) -> nn.Module:
        """TransformerEngine's layer of the class `kind`.

        One that is not chosen is called outside of FP8 wherever it is called, and its weights are no FP8 ones. Its
        `forward` is wrapped rather than the layer, so that no wrapper shows in parameter names.
        """
        engine = transformer_engine()
        build, options = getattr(engine, kind), options | {"device": default_device()}
        by = "column" if name in ("attn.qkv", "mlp.fc1") else "row"  # of the transposed weight, as Megatron-LM says it
        if self.tp:
            mode = {"set_parallel_mode": True} if kind == "LayerNormMLP" else {"parallel_mode": by}
            options |= mode | {"tp_group": self.tp.get_group()}
        if self.recipe is None or self.in_fp8(name):
            layer = build(*args, **options)
        else:
            with engine.quantized_model_init(enabled=False, recipe=self.recipe):
                layer = build(*args, **options)
            layer.forward = functools.partial(_forward_in_bf16, layer.forward, self.recipe)
        if self.tp:
            say_parts(layer, CUTS[kind if kind == "LayerNormMLP" else by], self.tp)
        return layer


def _forward_in_bf16(forward: Callable[..., Any], recipe: Any, *args: Any, **kwargs: Any) -> Any:
    with transformer_engine().autocast(enabled=False, recipe=recipe):
        return forward(*args, **kwargs)


def fused_norm(cfg: ModelConfig) -> dict[str, Any]:
    """The model's norm as an argument of the layers that begin with one."""
    return {"eps": cfg.norm_eps, "normalization": "RMSNorm" if cfg.norm_layer == "rmsnorm" else "LayerNorm"}


class TEAttention(nn.Module):
    """norm1 and timm's Attention, AttentionRope or EvaAttention on TransformerEngine's layers.

    Rows of a fused QKV weight are in timm's order, [q | k | v].
    """

    def __init__(self, cfg: ModelConfig, kv_heads: int, row_multiple: int, layers: LinearLayers) -> None:
        super().__init__()
        self.row_multiple = row_multiple
        width, ranks = cfg.embed_dim, layers.tp.size() if layers.tp else 1
        head_width = width // cfg.num_heads
        self.num_heads, self.kv_heads = cfg.num_heads // ranks, kv_heads // ranks  # this rank's
        in_eva, norm = cfg.attn_type == "eva", fused_norm(cfg)
        key_bias = cfg.qkv_bias and not in_eva
        self.is_fused = cfg.qkv_fused
        if cfg.qkv_fused:
            self.qkv = layers.make("attn.qkv", "LayerNormLinear", width, 3 * width, bias=key_bias, **norm)
        else:
            kv_width, norm = kv_heads * head_width, norm | {"return_layernorm_output": True}
            self.q_proj = layers.make("attn.q_proj", "LayerNormLinear", width, width, bias=cfg.qkv_bias, **norm)
            self.k_proj = layers.make("attn.k_proj", "Linear", width, kv_width, bias=key_bias)
            self.v_proj = layers.make("attn.v_proj", "Linear", width, kv_width, bias=cfg.qkv_bias)
        self.q_bias, self.v_bias = (
            nn.Parameter(torch.empty(width)) if in_eva and cfg.qkv_fused and cfg.qkv_bias else None for _ in range(2)
        )
        self.q_norm, self.k_norm = (norm_layer(cfg)(head_width) if cfg.qk_norm else nn.Identity() for _ in range(2))
        if cfg.qk_norm and layers.tp:  # of (B, N, H, K) with this rank's heads
            for each in (self.q_norm, self.k_norm):
                parallelize_module(each, layers.tp, SequenceParallel(sequence_dim=2, use_local_output=True))
        self.num_prefix_tokens, self.rotate_half = cfg.num_prefix_tokens(), cfg.rope_rotate_half
        self.core = transformer_engine().DotProductAttention(
            self.num_heads,
            head_width,
            num_gqa_groups=self.kv_heads,
            attention_dropout=cfg.attn_drop_rate,
            qkv_format="bshd",
            attn_mask_type="no_mask",
        )
        self.attn_drop_rate = cfg.attn_drop_rate
        self.norm = norm_layer(cfg)(width) if cfg.scale_attn_norm else nn.Identity()
        self.proj = layers.make("attn.proj", "Linear", width, width, bias=cfg.proj_bias)
        self.proj_drop = nn.Dropout(cfg.proj_drop_rate)

    def reset_parameters(self) -> None:
        """A value for builders that go module by module, until `init_weights` draws it."""
        for parameter in self.parameters(recurse=False):
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None, is_first_microbatch: bool | None) -> torch.Tensor:
        """(B, N, D) -> (B, N, D)."""
        options = {"multiple": self.row_multiple, "is_first_microbatch": is_first_microbatch}
        heads = self.num_heads + 2 * self.kv_heads
        qkv = on_rows(self.project, x, **options).unflatten(-1, (heads, -1))  # B N H+2H' K
        q, k, v = split_heads(qkv, self.num_heads, self.kv_heads)  # B N H K, twice B N H' K
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)  # autocast norms in FP32
        if rope is not None:
            q, k = self.rotated(q, rope), self.rotated(k, rope)
        x = self.norm(self.attend(q, k, v)).to(v.dtype)
        return self.proj_drop(on_rows(self.proj, x, **options))

    def project(self, x: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        """norm1, and queries, keys and values side by side: (..., D) -> (..., (H + 2H') K)."""
        if not self.is_fused:
            q, x = self.q_proj(x, is_first_microbatch=is_first_microbatch)  # x normed, for the other two
            k, v = (layer(x, is_first_microbatch=is_first_microbatch) for layer in (self.k_proj, self.v_proj))
            return torch.cat([q, k, v], dim=-1)
        qkv = self.qkv(x, is_first_microbatch=is_first_microbatch)
        if self.q_bias is None or self.v_bias is None:
            return qkv
        return qkv + torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias]).type_as(qkv)

    def rotated(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Queries or keys (B, N, H, K), those of patches turned by their positions, of `VisionTransformer.rotary`."""
        rope = rope[:, None] if rope.ndim == 2 else rope.transpose(-3, -2)  # N 1 2K, or with heads: (B) N H 2K
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        return torch.cat([prefix, apply_rot_embed_cat(patches, rope, half=self.rotate_half)], dim=1)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Queries (B, N, H, K), keys and values (B, N, H', K) -> (B, N, D)."""
        if q.shape[1] % 128 != 64:
            return self.core(q, k, v)
        # By torch, whose cuDNN attention process_group.set_kernels has turned off for these numbers of tokens:
        # TransformerEngine's is cuDNN's, with NaN gradients for 64, 192, 576, ... tokens whose logits are all far below
        # zero (H100, TransformerEngine 2.20, cuDNN 9.19: benchmarks/attention_nan_te_h100x1.log;
        # https://github.com/pytorch/pytorch/issues/196678).
        log_attention_by_torch(q.shape[1])
        dropout, is_grouped = self.attn_drop_rate if self.training else 0.0, self.kv_heads < self.num_heads
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # B H N K
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, enable_gqa=is_grouped)
        return x.transpose(1, 2).flatten(2)


class TESplitMlp(nn.Module):
    """norm2 and timm's Mlp, GluMlp or SwiGLU layer by layer.

    For what TransformerEngine's fused MLP lacks: the erf GELU, a gate's matrix of its own, dropout or a norm inside,
    FP8 in one layer alone.
    """

    def __init__(self, cfg: ModelConfig, layers: LinearLayers) -> None:
        super().__init__()
        width, hidden, norm, bias = cfg.embed_dim, cfg.mlp_hidden(), fused_norm(cfg), cfg.proj_bias
        self.kind = cfg.mlp_layer
        if self.kind == "swiglu":
            norm |= {"return_layernorm_output": True}
            self.fc1_g = layers.make("mlp.fc1_g", "LayerNormLinear", width, hidden, bias=bias, **norm)
            self.fc1_x = layers.make("mlp.fc1_x", "Linear", width, hidden, bias=bias)
        else:
            rows = 2 * hidden if self.kind == "glu" else hidden
            self.fc1 = layers.make("mlp.fc1", "LayerNormLinear", width, rows, bias=bias, **norm)
        self.act = act_layer(cfg)()
        self.drop = nn.Dropout(cfg.proj_drop_rate)
        self.norm = norm_layer(cfg)(hidden) if cfg.scale_mlp_norm else nn.Identity()
        self.fc2 = layers.make("mlp.fc2", "Linear", hidden, width, bias=bias)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        """(..., D) -> (..., D)."""
        options = {"is_first_microbatch": is_first_microbatch}
        if self.kind == "swiglu":
            gate, x = self.fc1_g(x, **options)  # x normed, for fc1_x
            x = self.act(gate) * self.fc1_x(x, **options)
        elif self.kind == "glu":
            gate, x = self.fc1(x, **options).chunk(2, dim=-1)
            x = self.act(gate) * x
        else:
            x = self.act(self.fc1(x, **options))
        x = self.norm(self.drop(x)).to(x.dtype)  # autocast norms in FP32
        return self.drop(self.fc2(x, **options))


class TEBlock(nn.Module):
    """`Block` or `EvaBlock` on TransformerEngine's fused layers: the same function, the same options, other kernels."""

    def __init__(self, cfg: ModelConfig, place: int, *, row_multiple: int, layers: LinearLayers) -> None:
        super().__init__()
        self.row_multiple, width = row_multiple, cfg.embed_dim
        self.attn = TEAttention(cfg, cfg.kv_heads()[place], row_multiple, layers)
        activation = "swiglu" if cfg.mlp_layer == "glu" else TE_ACTIVATIONS.get(cfg.act_layer)
        self.mlp = (
            TESplitMlp(cfg, layers)
            if activation is None
            or cfg.mlp_layer == "swiglu"
            or cfg.proj_drop_rate
            or cfg.scale_mlp_norm
            or layers.in_fp8("mlp.fc1") != layers.in_fp8("mlp.fc2")
            else layers.make(
                "mlp.fc1",
                "LayerNormMLP",
                width,
                cfg.mlp_hidden(),
                bias=cfg.proj_bias,
                activation=activation,
                **fused_norm(cfg),
            )
        )
        # LayerScale is a module in timm's VisionTransformer, a parameter in its Eva.
        self.init_values = cfg.init_values  # asked for by _initialize
        self.ls1 = self.ls2 = nn.Identity()
        self.gamma_1 = self.gamma_2 = None
        if cfg.is_eva and cfg.init_values is not None:
            self.gamma_1 = nn.Parameter(torch.empty(width))
            self.gamma_2 = None if cfg.attn_only_layer_scale else nn.Parameter(torch.empty(width))
        elif cfg.init_values is not None:
            self.ls1, self.ls2 = (LayerScale(width, cfg.init_values) for _ in range(2))

    def reset_parameters(self) -> None:
        """As `TEAttention.reset_parameters`."""
        for parameter in self.parameters(recurse=False):
            nn.init.zeros_(parameter)

    def forward(
        self,
        x: torch.Tensor,
        keep: torch.Tensor | None = None,
        rope: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """(B, N, D) -> (B, N, D); `keep` as `Block` has it, `rope` as `EvaBlock`."""
        attn = self.attn(x, rope, is_first_microbatch)
        x = x + scaled(times(self.ls1(attn), self.gamma_1), keep, 0)
        mlp = on_rows(self.mlp, x, self.row_multiple, is_first_microbatch=is_first_microbatch)
        return x + scaled(times(self.ls2(mlp), self.gamma_2), keep, 1)


class TEVisionTransformer(VisionTransformer):
    """`VisionTransformer` with `TEBlock`s: other kernels, the same function, FP8 if the config asks for it."""

    def __init__(self, cfg: ModelConfig, fp8: Fp8Config, tp: DeviceMesh | None = None) -> None:
        self.recipe, chosen = recipe(fp8), fp8_layers(cfg, fp8.layers)

        def block(cfg: ModelConfig, place: int) -> TEBlock:
            layers = LinearLayers(self.recipe, chosen, place, tp)
            return TEBlock(cfg, place, row_multiple=row_multiple(self.recipe), layers=layers)

        forget_earlier_models()
        with quantized_weights(self.recipe, enabled=fp8.quantized_model_init):
            super().__init__(cfg, block=block)
        log_attention_backend()
        self.scaling = scaling_state(self, self.recipe, chosen)

    def run_blocks(
        self, x: torch.Tensor, extras: Iterable[tuple[torch.Tensor | None, ...]], is_first_microbatch: bool | None
    ) -> torch.Tensor:
        """(B, N, D) -> (B, N, D), by `VisionTransformer.forward`'s arguments."""
        with quantized(self.recipe, self.scaling):
            for block, extra in zip(self.blocks, extras, strict=True):
                x = block(x, *extra, is_first_microbatch=is_first_microbatch)
        return x


def say_parts(layer: nn.Module, cuts: dict[str, int], tp: DeviceMesh) -> None:
    """Tell FSDP2, the optimizers and checkpoints, by DTensors, which part of each parameter this rank of `tp` has.

    TransformerEngine makes the parts and sums over them (`tp_group`), but its parameters are plain tensors, and plain
    ones it must get: `with_local_parameters`.
    """
    for name, dim in cuts.items():
        part = layer._parameters.get(name)
        if part is not None and part.numel():
            layer._parameters[name] = nn.Parameter(DTensor.from_local(part.data, tp, [Shard(dim)], run_check=False))
    layer.forward = with_local_parameters(layer)


def with_local_parameters(layer: nn.Module) -> Callable[..., torch.Tensor]:
    """The layer's forward, which then finds its DTensors' local parts as its parameters."""
    forward = layer.forward

    @functools.wraps(forward)
    def on_parts(*args: Any, **kwargs: Any) -> torch.Tensor:
        parameters: dict[str, Any] = layer._parameters
        whole = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
        parameters.update({name: p.to_local() for name, p in whole.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            parameters.update(whole)

    return on_parts


def transformer_engine() -> ModuleType:
    """transformer_engine.pytorch, imported where it is asked for.

    Raises:
        ConfigError: it is not installed, or its import fails; then with the first line of its own message.
    """
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "transformer_engine":
            raise ConfigError(
                "model.transformer_engine=true, but TransformerEngine is not installed: "
                "pip install --no-build-isolation -r requirements-gpu.txt"
            ) from None
        raise ConfigError(f"model.transformer_engine=true, but its import fails: {error}") from error
    except (ImportError, OSError, RuntimeError) as error:  # a library of the wrong version: cuDNN, torch, CUDA
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model.transformer_engine=true, but its import fails: {first_line}") from error


def recipe(cfg: Fp8Config) -> Any | None:
    """TransformerEngine's recipe object of a config; None where FP8 is off.

    Raises:
        ConfigError: the GPU cannot do it, or TransformerEngine refuses the arguments.
    """
    if not cfg.enabled:
        return None
    engine = transformer_engine()
    is_available = {
        "DelayedScaling": engine.is_fp8_available,
        "Float8CurrentScaling": engine.is_fp8_available,
        "Float8BlockScaling": engine.is_fp8_block_scaling_available,
        "MXFP8BlockScaling": engine.is_mxfp8_available,
        "NVFP4BlockScaling": engine.is_nvfp4_available,
    }[cfg.fp8_recipe]
    possible, reason = is_available(return_reason=True)
    if not possible:
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        raise ConfigError(
            f"fp8_config.fp8_recipe={cfg.fp8_recipe} on a GPU of compute capability {capability}: "
            f"{reason.rstrip('.')}; use DelayedScaling or Float8CurrentScaling"
        )
    recipes = importlib.import_module("transformer_engine.common.recipe")
    arguments = cfg.arguments()
    if cfg.fp8_format is not None:
        arguments["fp8_format"] = recipes.Format[cfg.fp8_format]
    try:
        return getattr(recipes, cfg.fp8_recipe)(**arguments)
    except (AssertionError, TypeError) as error:
        raise ConfigError(f"fp8_config.fp8_recipe_kwargs={cfg.arguments()}: {str(error).splitlines()[0]}") from error


def default_device() -> str:
    """The default device of torch, in the form that TransformerEngine wants.

    Its own default is "cuda" whatever torch's is, and it leaves weights without storage for "meta" but not for
    torch.device("meta"), which it compares with the string (2.20).
    """
    return str(torch.get_default_device())


def quantized_weights(recipe: Any | None, *, enabled: bool) -> contextlib.AbstractContextManager:
    """Layers built inside hold FP8 weights only; their full values are kept aside until a strategy takes them."""
    if not enabled:
        return contextlib.nullcontext()
    return transformer_engine().quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True)


def row_multiple(recipe: Any | None) -> int:
    """Rows (images x tokens) of a matrix product must be a multiple of this.

    TransformerEngine 2.20 asks for 8 in words (assert_dim_for_fp8_exec), but the weight gradient's product, whose
    leading dimension they are, fails unless it is 16 (CanonicalizeGemmInput in cublaslt_gemm.cu, seen on an H100). The
    other two are from transformer_engine.pytorch.quantization.get_align_size_for_quantization.
    """
    if recipe is None:
        return 1
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


def on_rows(layer: Callable[..., torch.Tensor], x: torch.Tensor, multiple: int, **kwargs: Any) -> torch.Tensor:
    """layer(x), (..., D) -> (..., D'), with rows added inside to a multiple of `multiple` and cut off outside.

    What is added is the last row again, so that no tensor's largest value changes, and with it no scale; its gradient
    is zero.
    """
    rows = x.flatten(0, -2)
    missing = -len(rows) % multiple
    if not missing:
        return layer(x, **kwargs)
    filled = torch.cat([rows, rows[-1:].expand(missing, -1)])
    return layer(filled, **kwargs)[: len(rows)].unflatten(0, x.shape[:-1])


def split_heads(qkv: torch.Tensor, num_heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed queries, keys and values, (B, N, H + 2H', K), as three views, of `num_heads` H and twice `kv_heads` H'.

    By TransformerEngine's own split, from a module that it does not document: the three gradients are views of one
    tensor, which it hands back as it is. torch's split copies them into a new one, and the documented `qkv_layer`
    argument of its attention adds up three zero-filled ones: 12 % of a ViT-L/16 step on an H100 (version 2.20).
    """
    split = importlib.import_module("transformer_engine.pytorch.utils").SplitAlongDim
    return split.apply(qkv, 2, [num_heads, kv_heads, kv_heads])


@contextlib.contextmanager
def quantized(recipe: Any | None, state: dict[str, torch.Tensor]) -> Iterator[None]:
    """The context of one pass through the blocks: FP8 by `recipe`, or nothing for None.

    Without gradients (in evaluation) delayed scaling's state is left as it was found: TransformerEngine notes the
    largest values in row 0 of the history in every pass, and the next training step would count them as its own.
    """
    if recipe is None:
        yield
        return
    noted = [] if torch.is_grad_enabled() else [t[0] for name, t in state.items() if "amax_history" in name]
    before = [row.clone() for row in noted]
    with transformer_engine().autocast(recipe=recipe):
        yield
    if noted:
        torch._foreach_copy_(noted, before)


@torch.no_grad()
def scaling_state(model: nn.Module, recipe: Any | None, chosen: frozenset[str]) -> dict[str, torch.Tensor]:
    """Delayed scaling's live tensors, created if need be: "<layer>.<scale | amax_history>_<fwd | bwd>".

    Of the layers that are `chosen`, by timm's names; TransformerEngine's MLP has its state by its own name.

    Empty for the other recipes, which have no state. Ranks hold the same values, because TransformerEngine reduces the
    largest values over the job. These tensors stand in for `_extra_state`, whose size changes at the first FP8 forward
    pass (TransformerEngine 2.20).
    """
    if recipe is None or not recipe.delayed():
        return {}
    engine = transformer_engine()
    kinds = engine.LayerNormLinear | engine.Linear | engine.LayerNormMLP
    layers: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds) and {name, f"{name}.fc1"} & chosen
    }
    state: dict[str, torch.Tensor] = {}
    with engine.autocast(recipe=recipe):
        for name, layer in layers.items():
            layer.init_fp8_metadata(num_gemms=2 if isinstance(layer, engine.LayerNormMLP) else 1)
            for way in ("fwd", "bwd"):
                scaling = layer.fp8_meta[f"scaling_{way}"]
                state[f"{name}.scale_{way}"] = scaling.scale
                state[f"{name}.amax_history_{way}"] = scaling.amax_history
    return state


def forget_earlier_models() -> None:
    """Empty TransformerEngine's process-wide list of layers whose scales it updates.

    A process that trains more than once (tests do) would otherwise keep the earlier models alive and update them.
    """
    importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager.reset()


def log_attention_backend() -> None:
    """Let through what TransformerEngine's logger says of its choice of an attention backend, each choice once."""
    logger = logging.getLogger("DotProductAttention")
    for old in list(logger.filters):
        logger.removeFilter(old)
    logger.addFilter(_once())


def log_attention_by_torch(tokens: int) -> None:
    """Say, once and where TransformerEngine would, that torch's attention stands in for its own."""
    logging.getLogger("DotProductAttention").info(
        "Running with torch's attention for %d tokens (vit_te.TEAttention)", tokens
    )


def _once() -> Callable[[logging.LogRecord], bool]:
    seen = set()

    def is_news(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_new = text not in seen
        seen.add(text)
        return is_new and (text.startswith("Running with") or record.levelno >= logging.WARNING)

    return is_news
