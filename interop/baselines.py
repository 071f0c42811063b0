"""timm's and Hugging Face's own ViT in our loop, to compare with: model.implementation=timm | hf.

The same data, start, optimizer and exports; the blocks, the forward pass and what it costs are theirs. Hugging Face's
queries, keys and values are three tensors: its checkpoints have blocks.N.attn.q, .k and .v in place of attn.qkv.
"""

import importlib
from collections.abc import Sequence

import timm.models.vision_transformer
import torch
from torch import nn

import vit
from interop import hugging_face
from interop.weights_out import timm_arguments
from runtime.parameter_names import timm_name
from runtime.tensors import local_slice, to_local
from schema import ModelConfig, pair


class TimmViT(vit.TrainableModel, timm.models.vision_transformer.VisionTransformer):
    """timm's model, as the entrypoints take one."""

    def __init__(self, cfg: ModelConfig) -> None:
        arguments = timm_arguments(vars(cfg))
        super().__init__(**arguments, num_classes=cfg.num_classes, norm_layer=vit.norm_layer(cfg), weight_init="skip")
        self.cfg = cfg
        self.scaling = {}  # it has no FP8
        assert self.pos_embed is not None  # timm can do without, schema.py has no such value
        self.pos_embed.requires_grad_(cfg.pos_embed == "learn")
        vit.set_fused_attn(self, cfg)
        vit.freeze(self, cfg)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """(B, C, Y, X) -> (B, num_classes)."""
        return super().forward(x.to(self.patch_embed.proj.weight.dtype))

    def shard_units(self) -> Sequence[nn.Module]:
        """The blocks."""
        return list(self.blocks)


class HuggingFaceViT(vit.TrainableModel):
    """transformers.ViTForImageClassification, as the entrypoints take a model."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        transformers = importlib.import_module("transformers")
        config = transformers.ViTConfig(
            image_size=pair(cfg.img_size)[0],
            patch_size=pair(cfg.patch_size)[0],
            num_channels=cfg.in_chans,
            hidden_size=cfg.embed_dim,
            num_hidden_layers=cfg.depth,
            num_attention_heads=cfg.num_heads,
            intermediate_size=int(cfg.embed_dim * cfg.mlp_ratio),
            hidden_act=hugging_face.ACTIVATIONS[cfg.act_layer],
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            layer_norm_eps=cfg.norm_eps,
            qkv_bias=cfg.qkv_bias,
            num_labels=cfg.num_classes,
            attn_implementation="sdpa" if cfg.fused_attn else "eager",
        )
        with torch.random.fork_rng(devices=[]):  # it draws weights, of which none stays
            self.hugging_face = transformers.ViTForImageClassification(config)
        self.cfg = cfg
        self.scaling = {}  # it has no FP8
        self.hugging_face.vit.embeddings.position_embeddings.requires_grad_(cfg.pos_embed == "learn")
        vit.freeze(self, cfg)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """(B, C, Y, X) -> (B, num_classes)."""
        kernel = self.hugging_face.vit.embeddings.patch_embeddings.projection.weight
        return self.hugging_face(pixel_values=x.to(kernel.dtype)).logits

    @torch.no_grad()
    def init_weights(self, seed: int, device: torch.device | None = None) -> None:
        """Take the first weights of our own model, which each rank draws whole."""
        with device or next(self.parameters()).device:
            ours = vit.VisionTransformer(self.cfg)
        ours.init_weights(seed)
        start = ours.state_dict()
        for name in [name for name in start if ".attn.qkv." in name]:
            for part, third in zip("qkv", start[name].chunk(3), strict=True):
                start[name.replace(".attn.qkv.", f".attn.{part}.")] = third
        for name, parameter in self.named_parameters():
            to_local(parameter).copy_(local_slice(start[timm_name(name)], parameter))

    def shard_units(self) -> Sequence[nn.Module]:
        """The blocks."""
        return list(self.hugging_face.vit.layers)
