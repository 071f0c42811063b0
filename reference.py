"""timm's own VisionTransformer in our loop, to compare with: model.implementation=timm.

The same data, start, optimizer, checkpoints and exports; the blocks, the forward pass and what it costs are timm's.
"""

from schema import ModelConfig

import dataclasses
import functools

import torch
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn

import vit
from weights import OURS_ALONE


class TimmVisionTransformer(TimmViT):
    """timm's model, with what the entrypoints ask of one: see `vit.VisionTransformer`, whose methods these are."""

    def __init__(self, cfg: ModelConfig) -> None:
        arguments = {
            field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg) if field.name not in OURS_ALONE
        }
        norm_layer = functools.partial(nn.LayerNorm, eps=cfg.norm_eps)
        super().__init__(**arguments, num_classes=cfg.num_classes, norm_layer=norm_layer, weight_init="skip")
        self.cfg = cfg
        self.scaling: dict[str, torch.Tensor] = {}  # of FP8, which it does not have
        self.head.init_bias = cfg.init_head_bias
        self.pos_embed.requires_grad_(cfg.pos_embed == "learn")
        vit.freeze(self, cfg)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """(B, C, Y, X) -> (B, num_classes)."""
        return super().forward(x.to(self.patch_embed.proj.weight.dtype))

    init_weights = vit.VisionTransformer.init_weights
    reset_scaling = vit.VisionTransformer.reset_scaling
    shard_units = vit.VisionTransformer.shard_units
    no_weight_decay = vit.VisionTransformer.no_weight_decay
    flops_per_image = vit.VisionTransformer.flops_per_image
