"""A model of the config, ready to be wrapped: its class, recomputation and compilation of its blocks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import vit
import vit_te
from schema import Fp8Config, ModelConfig, Recompute


def build_model(cfg: ModelConfig, fp8: Fp8Config, tp: DeviceMesh | None = None) -> vit.TrainableModel:
    """The model of the config: plain, on TransformerEngine's layers, or another library's; `init_weights` fills it.

    With a mesh `tp` of more than one rank its blocks are cut over them (`split_blocks`).
    """
    if tp and tp.size() > 1:
        return split_blocks(cfg, fp8, tp)
    if cfg.implementation != "ours":
        from interop import baselines  # imports all of timm

        return (baselines.TimmViT if cfg.implementation == "timm" else baselines.HuggingFaceViT)(cfg)
    return vit_te.TEVisionTransformer(cfg, fp8) if cfg.transformer_engine else vit.VisionTransformer(cfg)


def split_blocks(cfg: ModelConfig, fp8: Fp8Config, tp: DeviceMesh) -> vit.TrainableModel:
    """Tensor parallelism (Shoeybi et al., arXiv 1909.08053): a rank has its share of each block's heads and MLP.

    Queries, keys and values and the MLP's first layer are cut by rows, the layers that follow them by columns, whose
    outputs are summed over the ranks: two all-reduces a block, and two in its backward pass. Norms, LayerScale, the
    patch embedding, positions, pooling and head are whole on every rank, which computes the same with them.
    """
    if cfg.transformer_engine:
        return vit_te.TEVisionTransformer(cfg, fp8, tp)
    model = vit.VisionTransformer(cfg)
    for block in model.blocks:
        layers = {"attn.qkv": ColwiseParallel(), "attn.proj": RowwiseParallel()}
        layers |= {"mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel()}
        if cfg.qk_norm:  # whose input (B, H, N, K) has this rank's heads
            layers |= {f"attn.{q}_norm": SequenceParallel(sequence_dim=1, use_local_output=True) for q in "qk"}
        parallelize_module(block, tp, layers)
        for size in ("num_heads", "attn_dim"):
            setattr(block.attn, size, getattr(block.attn, size) // tp.size())
    return model


def prepare_blocks(model: vit.TrainableModel, *, activation_checkpointing: Recompute, compile: bool) -> None:
    """Recompute and compile block by block, before sharding and inside its hooks: recompute -> compile -> shard.

    Wraps each block's `forward`, or its MLP's, rather than the module, so that no wrapper shows in parameter names and
    no strategy's hook is traced.
    """
    engine = vit_te.transformer_engine() if model.cfg.transformer_engine else None
    # TransformerEngine's recomputes in FP8, with the scales of the first pass.
    recompute: Callable = engine.checkpoint if engine else checkpoint
    for block in model.shard_units():
        if activation_checkpointing == "selective":
            # Both stop before the MLP's last product, for whose result nothing asks in the backward pass. The fused
            # MLP's own way keeps its input, which is the residual stream; torch's the norm's output. Only
            # TransformerEngine's checkpoint, around its MLP with dropout, goes on to the end.
            mlp: Any = block.mlp
            if engine is None:
                mlp.__class__ = _recomputed(type(mlp))
            elif isinstance(mlp, engine.LayerNormMLP):
                mlp.checkpoint = True
            else:
                mlp.forward = functools.partial(recompute, mlp.forward, use_reentrant=False)
        forward: Callable = block.forward
        if activation_checkpointing is True:
            forward = functools.partial(recompute, forward, use_reentrant=False)
        block.forward = torch.compile(forward) if compile else forward


@functools.cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """The class `kind`, whose forward recomputes its inside.

    A class, as FSDP2 makes them, and not another `forward` in each module: torch.compile (2.11) would compile every
    block again for that.
    """

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(kind.forward, self, x, use_reentrant=False)

    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward})
