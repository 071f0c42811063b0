"""A model of the config, ready to be wrapped: its class, recomputation and compilation of its blocks."""

import functools
from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import vit
import vit_te
from schema import Fp8Config, ModelConfig


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


def prepare_blocks(model: vit.TrainableModel, *, activation_checkpointing: bool, compile: bool) -> None:
    """Recompute and compile block by block, before sharding and inside its hooks: recompute -> compile -> shard.

    Wraps each block's `forward` rather than the block, so that no wrapper shows in parameter names and no strategy's
    hook is traced.
    """
    # TransformerEngine's recomputes in FP8, with the scales of the first pass.
    recompute = vit_te.transformer_engine().checkpoint if model.cfg.transformer_engine else checkpoint
    for block in model.shard_units():
        forward: Callable = block.forward
        if activation_checkpointing:
            forward = functools.partial(recompute, forward, use_reentrant=False)
        block.forward = torch.compile(forward) if compile else forward
