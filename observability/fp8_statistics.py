"""How well FP8 holds the operands of the blocks' linear layers: fp8_config.log_statistics_every_n_steps.

Every n steps a line a layer and operand goes to <output_dir>/fp8_statistics.jsonl, over the whole global batch:

    {"step": 100, "layer": "blocks.0.attn.qkv", "operand": "input", "amax": 6.1, "underflow": 0.002, "overflow": 0.0}

    operand    input | weight | gradient (of the layer's output)
    amax       the largest magnitude
    underflow  share of the values that are not zero and become zero
    overflow   share of the values beyond the largest that the scale in use leaves room for, which they become

Only delayed scaling, whose scales are older than the values, can overflow. FP8 weights (quantized_model_init) have no
others to compare with: their shares are null. What TransformerEngine's fused layers keep to themselves (the output of a
norm, the inside of an MLP) is computed here once more, in BF16, from the layer's input and its output's gradient.

nvdlfw-inspect's LogFp8TensorStats, which TransformerEngine has for this, is not used: the layers then leave their
kernels that norm and quantize at once (version 2.20), so that the numbers of a step would depend on whether it is
logged. Here hooks watch, on such steps only.
"""

import contextlib
import functools
import importlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from runtime.parameter_names import without_wrappers
from runtime.session import Session
from schema import Config

NAME = "fp8_statistics.jsonl"
CHUNK = 2**24  # values that are compared at a time, in FP32
# By TransformerEngine's names.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": lambda x: F.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1],
}


class Fp8Statistics:
    """Watches the layers in FP8 on the steps that are logged; between them they have no hooks."""

    def __init__(self, model: nn.Module, cfg: Config, session: Session) -> None:
        self.every = cfg.fp8_config.log_statistics_every_n_steps if cfg.fp8_config.enabled else None
        self.session = session
        # Whole blocks; with selective an MLP recomputes by itself, not through its forward.
        self.recomputes = cfg.activation_checkpointing is True
        self.found: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}  # layer, operand -> amax, counts
        self.inputs: dict[str, torch.Tensor] = {}  # of the MLPs, and the gradients of their outputs
        self.gradients: dict[str, torch.Tensor] = {}
        if self.every is not None:
            engine = importlib.import_module("transformer_engine.pytorch")
            kinds = (engine.LayerNormLinear, engine.Linear, engine.LayerNormMLP)
            named = ((without_wrappers(name), module) for name, module in model.named_modules())
            self.layers = {name: module for name, module in named if isinstance(module, kinds)}

    @contextlib.contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Inside is step number `step`; then its statistics are written, if it is one of those that are logged."""
        if self.every is None or step % self.every:
            yield
            return
        with contextlib.ExitStack() as hooks:
            for name, layer in self.layers.items():
                before = functools.partial(self._before_forward, name)
                after = functools.partial(self._after_forward, name)
                hooks.callback(layer.register_forward_pre_hook(before).remove)
                hooks.callback(layer.register_forward_hook(after).remove)
            yield
        self._write(step)
        self.found.clear()
        self.inputs.clear()
        self.gradients.clear()

    @torch.no_grad()
    def _before_forward(self, name: str, layer: Any, args: tuple[torch.Tensor, ...]) -> None:
        """Keep an MLP's input for its inner gradient; where blocks are recomputed that of the second pass, not both."""
        if hasattr(layer, "fc1_weight") and self.recomputes == _recomputing():
            self.inputs[name] = args[0].detach()
            self._note_inner_gradient(name, layer)

    @torch.no_grad()
    def _after_forward(self, name: str, layer: Any, args: tuple[torch.Tensor, ...], output: Any) -> None:
        if not layer.fp8 or _recomputing():
            return
        output = output[0] if isinstance(output, tuple) else output  # the other is the norm's, for the next layer
        x = args[0].detach()
        with _plain(x):
            if hasattr(layer, "layer_norm_weight"):
                x = _normed(layer, x)
            if hasattr(layer, "fc1_weight"):
                self._note(f"{name}.fc1", "input", x, layer, "fwd", 0)
                self._note(f"{name}.fc1", "weight", layer.fc1_weight, layer, "fwd", 1)
                hidden = ACTIVATIONS[layer.activation](_fc1(layer, x))
                self._note(f"{name}.fc2", "input", hidden, layer, "fwd", 3)
                self._note(f"{name}.fc2", "weight", layer.fc2_weight, layer, "fwd", 4)
            else:
                self._note(name, "input", x, layer, "fwd", 0)
                self._note(name, "weight", layer.weight, layer, "fwd", 1)
        if output.requires_grad:  # not so in a linear probe
            output.register_hook(functools.partial(self._in_backward, name, layer))

    @torch.no_grad()
    def _in_backward(self, name: str, layer: Any, gradient: torch.Tensor) -> None:
        if hasattr(layer, "fc1_weight"):
            self._note(f"{name}.fc2", "gradient", gradient, layer, "bwd", 2)
            self.gradients[name] = gradient
            self._note_inner_gradient(name, layer)
        else:
            self._note(name, "gradient", gradient, layer, "bwd", 0)

    def _note_inner_gradient(self, name: str, layer: Any) -> None:
        """The gradient inside an MLP, as soon as both what it came from and what comes back are there.

        A recomputed block's second pass may begin before or after the gradient arrives at its MLP.
        """
        if name not in self.inputs or name not in self.gradients:
            return
        x, gradient = self.inputs.pop(name), self.gradients.pop(name)
        with _plain(x):
            inner = _fc1(layer, _normed(layer, x))
            of_hidden = gradient.to(x.dtype) @ _values(layer.fc2_weight).to(x.dtype)
            # An activation's derivative is a diagonal: what multiplies it from the right does so from the left.
            if layer.activation == "swiglu":  # two of them, of the gate's half and of the other
                gate, value = inner.chunk(2, dim=-1)
                of_gate = torch.func.jvp(F.silu, (gate,), (of_hidden * value,))[1]
                of_inner = torch.cat([of_gate, of_hidden * F.silu(gate)], dim=-1)
            else:
                of_inner = torch.func.jvp(ACTIVATIONS[layer.activation], (inner,), (of_hidden,))[1]
        self._note(f"{name}.fc1", "gradient", of_inner, layer, "bwd", 0)

    def _note(self, name: str, operand: str, tensor: torch.Tensor, layer: Any, way: str, index: int) -> None:
        """Add one tensor's numbers to those of the step; `index` is its place among the layer's quantizers."""
        before = self.found.get((name, operand))
        if operand == "weight" and before is not None:
            return  # the same in each microbatch
        values = _values(tensor)
        largest = values.abs().max().float()
        if _is_quantized(tensor):
            new = values.new_zeros(3, dtype=torch.float64)
        else:
            new = _counts(values, layer.quantizers[f"scaling_{way}"][index], layer.fp8_meta.get(f"fp8_max_{way}"))
        if before is not None:
            largest, new = torch.maximum(before[0], largest), before[1] + new
        self.found[name, operand] = largest, new

    def _write(self, step: int) -> None:
        """Over all ranks, by rank 0: the one place where the host waits."""
        keys = sorted(self.found)
        if not keys:
            return
        amax = torch.stack([self.found[key][0] for key in keys])
        counts = torch.stack([self.found[key][1] for key in keys])
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        dist.all_reduce(counts)
        if not self.session.is_main:
            return
        with open(self.session.output_dir / NAME, "a") as file:
            for (layer, operand), largest, (small, large, total) in zip(
                keys, amax.tolist(), counts.tolist(), strict=True
            ):
                row = {"step": step, "layer": layer, "operand": operand}
                row["amax"] = largest if math.isfinite(largest) else None
                row |= {"underflow": small / total if total else None, "overflow": large / total if total else None}
                file.write(json.dumps(row) + "\n")


def _recomputing() -> bool:
    """Whether this is a second forward pass, of recomputed blocks."""
    return importlib.import_module("transformer_engine.pytorch.distributed").in_fp8_activation_recompute_phase()


def _plain(like: torch.Tensor) -> contextlib.AbstractContextManager:
    """Without autocast: here each operation says its type."""
    return torch.autocast(like.device.type, enabled=False)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient; of an FP8 one what it stands for."""
    return tensor.detach().dequantize() if _is_quantized(tensor) else tensor.detach()


def _is_quantized(tensor: torch.Tensor) -> bool:
    """Whether it is an FP8 tensor of TransformerEngine's."""
    return isinstance(tensor, importlib.import_module("transformer_engine.pytorch").QuantizedTensor)


def _normed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What a fused layer multiplies: its norm of `x`."""
    weight, width = layer.layer_norm_weight.detach().float(), (x.shape[-1],)
    if layer.normalization == "RMSNorm":
        return F.rms_norm(x.float(), width, weight, layer.eps).to(x.dtype)
    return F.layer_norm(x.float(), width, weight, layer.layer_norm_bias.detach().float(), layer.eps).to(x.dtype)


def _fc1(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """An MLP's first product, before the activation."""
    bias = layer.fc1_bias
    bias = bias.detach().to(x.dtype) if bias is not None and bias.numel() else None
    return F.linear(x, _values(layer.fc1_weight).to(x.dtype), bias)


def _counts(values: torch.Tensor, quantizer: Any, largest: float | None) -> torch.Tensor:
    """Of a tensor's values: how many become zero, how many are cut off, how many there are; float64.

    Rounded by TransformerEngine itself, by a copy of the quantizer that leaves no trace in delayed scaling's history.
    """
    limit, copy = math.inf, quantizer.copy()
    if hasattr(copy, "amax"):  # delayed scaling's, whose scale is there before the values
        assert largest is not None
        copy.scale, copy.amax = quantizer.scale.clone(), torch.zeros_like(quantizer.amax)
        limit = largest / copy.scale
    copy.internal = copy.optimize_for_gemm = False
    copy.set_usage(rowwise=True, columnwise=False)
    rounded = copy(values.contiguous()).dequantize()
    sums = values.new_zeros(3, dtype=torch.float64)
    for part, after in zip(values.reshape(-1).split(CHUNK), rounded.reshape(-1).split(CHUNK), strict=True):
        exact = part.float()
        cut_off = (exact.abs() > limit).sum()
        vanished = ((after == 0) & (exact != 0)).sum()
        sums += torch.stack([vanished, cut_off, torch.full_like(cut_off, len(part))])
    return sums
