"""A model of the config, ready to be wrapped: its class, recomputation and compilation of its blocks."""

import functools
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

import vit
import vit_te
from schema import Fp8Config, ModelConfig


def build_model(cfg: ModelConfig, fp8: Fp8Config) -> vit.TrainableModel:
    """The model of the config: plain, on TransformerEngine's layers, or another library's; `init_weights` fills it."""
    if cfg.implementation != "ours":
        from interop import baselines  # imports all of timm

        return (baselines.TimmViT if cfg.implementation == "timm" else baselines.HuggingFaceViT)(cfg)
    return vit_te.TEVisionTransformer(cfg, fp8) if cfg.transformer_engine else vit.VisionTransformer(cfg)


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
