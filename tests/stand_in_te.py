"""A stand-in for TransformerEngine on a CPU: what vit_te.py asks of it, in torch, with FP8 by torch's casts.

It keeps TransformerEngine's rules of state (version 2.20): what a layer does follows from the innermost `autocast`, its
weights' kind from the `quantized_model_init` that it was built in. Its numbers are those of no kernel: gradients pass
the rounding as they are.
"""

import contextlib
import sys
import types

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}
E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)


class State:
    """FP8GlobalStateManager's part of it."""

    enabled, recipe, fp8_parameters, depth, recomputing = False, None, False, 0, False


@contextlib.contextmanager
def autocast(enabled=True, *, recipe=None):
    before = State.enabled, State.recipe
    State.enabled, State.recipe = enabled, recipe
    State.depth += 1
    try:
        yield
    finally:
        State.enabled, State.recipe = before
        State.depth -= 1


@contextlib.contextmanager
def quantized_model_init(enabled=True, *, recipe=None, preserve_high_precision_init_val=False):
    before, State.fp8_parameters = State.fp8_parameters, enabled
    try:
        yield
    finally:
        State.fp8_parameters = before


def checkpoint(function, *args, use_reentrant, **kwargs):
    """Recomputes as the first pass was, outside of whose autocast the backward pass is."""
    enabled, recipe = State.enabled, State.recipe

    def again(*args, **kwargs):
        with autocast(enabled, recipe=recipe):
            return function(*args, **kwargs)

    @contextlib.contextmanager
    def second():
        State.recomputing = True
        yield
        State.recomputing = False

    contexts = {"context_fn": lambda: (contextlib.nullcontext(), second()), "preserve_rng_state": False}
    # To its end, as TransformerEngine's: torch's would leave off, by an exception, with the last tensor that it needs.
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return torch.utils.checkpoint.checkpoint(again, *args, use_reentrant=use_reentrant, **contexts, **kwargs)


class Rounded:
    """A quantized tensor."""

    def __init__(self, values):
        self.values = values

    def dequantize(self):
        return self.values


class Quantizer:
    """Of a tensor; with a `scale` it is delayed scaling's, which notes each tensor's largest value in `amax`."""

    def __init__(self, kind, scale=None, amax=None):
        self.kind, self.internal, self.optimize_for_gemm = kind, True, True
        if scale is not None:
            self.scale, self.amax = scale, amax

    def copy(self):
        return Quantizer(self.kind, *((self.scale, self.amax) if hasattr(self, "scale") else ()))

    def set_usage(self, *, rowwise, columnwise):
        pass

    def __call__(self, tensor):
        dtype, largest = self.kind
        if hasattr(self, "scale"):
            scale = self.scale
            self.amax.copy_(tensor.abs().max())
        else:
            scale = largest / tensor.float().abs().max().clamp(min=1e-12)
        scaled = (tensor.float() * scale).clamp(-largest, largest)
        return Rounded((scaled.to(dtype).float() / scale).to(tensor.dtype))


class QuantizedTensor(torch.Tensor):
    """FP8 weights are none here: a layer's `primary_weights_in_fp8` says that they would be."""


class Layer(nn.Module):
    """TransformerEngineBaseModule."""

    num_gemms = 1

    def __init__(self):
        super().__init__()
        self.fp8, self.fp8_meta, self.quantizers = False, {}, {}
        self.primary_weights_in_fp8 = State.fp8_parameters
        self.passes = []  # whether each was in FP8

    def init_fp8_metadata(self, num_gemms=1):
        assert num_gemms == self.num_gemms
        self.fp8 = State.enabled
        if not self.fp8 or self.quantizers:
            return
        self.fp8_meta |= {"recipe": State.recipe, "fp8_max_fwd": E4M3[1], "fp8_max_bwd": E5M2[1]}
        for way, count, kind in (("fwd", 3 * num_gemms, E4M3), ("bwd", 2 * num_gemms, E5M2)):
            scale, history = torch.ones(count, device="cpu"), torch.zeros(16, count, device="cpu")  # "cuda" there
            self.fp8_meta[f"scaling_{way}"] = types.SimpleNamespace(scale=scale, amax_history=history)
            delayed = State.recipe.delayed()
            self.quantizers[f"scaling_{way}"] = [
                Quantizer(kind, *((scale[i : i + 1], history[0, i : i + 1]) if delayed else ())) for i in range(count)
            ]

    def begin(self):
        self.init_fp8_metadata(self.num_gemms)
        self.passes.append(self.fp8)

    def product(self, x, weight, bias, gemm):
        if self.fp8:
            sizes = {"rows": len(x.flatten(0, -2)), "in": weight.shape[1], "out": weight.shape[0]}
            assert not any(size % 16 for size in sizes.values()), sizes
            forward = self.quantizers["scaling_fwd"]
            x = x + (forward[3 * gemm](x.detach()).dequantize() - x.detach())
            weight = weight + (forward[3 * gemm + 1](weight.detach()).dequantize() - weight.detach())
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def norm(self, x):
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self.eps)
        return F.layer_norm(x, (x.shape[-1],), self.layer_norm_weight, self.layer_norm_bias, self.eps)

    def add_norm(self, width, eps, normalization):
        assert normalization in ("LayerNorm", "RMSNorm")
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = nn.Parameter(torch.zeros(width))
        self.layer_norm_bias = nn.Parameter(torch.zeros(width)) if normalization == "LayerNorm" else None


class Linear(Layer):
    def __init__(self, width, out, *, bias, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))
        self.register_parameter("bias", nn.Parameter(torch.empty(out)) if bias else None)

    def forward(self, x, is_first_microbatch=None):
        self.begin()
        return self.product(x, self.weight, self.bias, 0)


class LayerNormLinear(Linear):
    def __init__(self, width, out, *, eps, bias, normalization, return_layernorm_output=False, device=None):
        super().__init__(width, out, bias=bias)
        self.add_norm(width, eps, normalization)
        self.return_layernorm_output = return_layernorm_output

    def forward(self, x, is_first_microbatch=None):
        x = self.norm(x)
        y = super().forward(x)
        return (y, x) if self.return_layernorm_output else y


class LayerNormMLP(Layer):
    num_gemms = 2

    def __init__(self, width, hidden, *, eps, bias, activation, normalization, device=None):
        super().__init__()
        self.activation = activation
        self.add_norm(width, eps, normalization)
        rows = 2 * hidden if activation == "swiglu" else hidden
        for name, shape in (("fc1", (rows, width)), ("fc2", (width, hidden))):
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(shape)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(shape[0])) if bias else None)

    def forward(self, x, is_first_microbatch=None):
        self.begin()
        x = ACTIVATIONS[self.activation](self.product(self.norm(x), self.fc1_weight, self.fc1_bias, 0))
        return self.product(x, self.fc2_weight, self.fc2_bias, 1)


class DotProductAttention(nn.Module):
    def __init__(self, num_heads, head_width, *, num_gqa_groups, attention_dropout, qkv_format, attn_mask_type):
        super().__init__()
        assert (qkv_format, attn_mask_type) == ("bshd", "no_mask")
        assert num_heads % num_gqa_groups == 0
        self.heads, self.width = [num_heads, num_gqa_groups, num_gqa_groups], head_width

    def forward(self, q, k, v):
        assert [t.shape[2] for t in (q, k, v)] == self.heads
        assert {(t.dtype, t.shape[3], t.stride(3)) for t in (q, k, v)} == {(v.dtype, self.width, 1)}
        k, v = (t.repeat_interleave(self.heads[0] // self.heads[1], 2) for t in (k, v))
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).flatten(2)


class SplitAlongDim:
    @staticmethod
    def apply(x, dim, sizes):
        return x.split(sizes, dim)


class Recipe:
    def __init__(self, name):
        self.name = name

    def delayed(self):
        return self.name == "DelayedScaling"

    def mxfp8(self):
        return False

    nvfp4 = mxfp8


def install(patch):
    """Until pytest's `patch` is undone, `import transformer_engine` finds this."""

    def module(name, **content):
        made = types.ModuleType(f"transformer_engine{name}")
        made.__dict__.update(content)
        patch.setitem(sys.modules, made.__name__, made)

    kinds = [
        Linear,
        LayerNormLinear,
        LayerNormMLP,
        DotProductAttention,
        autocast,
        quantized_model_init,
        checkpoint,
        QuantizedTensor,
    ]
    checks = ["is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available"]
    recipes = ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"]
    module("")
    module(".common")
    module(".common.recipe", **{name: lambda name=name: Recipe(name) for name in recipes})
    module(
        ".pytorch",
        **{kind.__name__: kind for kind in kinds},
        **{check: lambda return_reason: (True, "") for check in checks},
    )
    module(".pytorch.distributed", in_fp8_activation_recompute_phase=lambda: State.recomputing)
    module(".pytorch.utils", SplitAlongDim=SplitAlongDim)
    module(".pytorch.quantization", FP8GlobalStateManager=types.SimpleNamespace(reset=lambda: None))
    State.enabled, State.recipe, State.fp8_parameters, State.depth = False, None, False, 0
