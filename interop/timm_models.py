"""model=timm:<name>: what of a config follows from the name of a model of timm's."""

import json
from typing import Any

import timm
import torch
from torch import nn

from interop.weights_in import check_pretrained
from schema import ConfigError

ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "ReLU": "relu", "SiLU": "silu"}


def overrides_of(name: str) -> list[str]:
    """The overrides that model=timm:<name> stands for: architecture, size of the images, evaluation, first weights.

    Raises:
        ConfigError: timm has no such model or weights, or vit.py has not all of its parts.
    """
    try:
        check_pretrained(name)
        with torch.device("meta"):
            model = timm.create_model(name)
        values = {f"model.{key}": value for key, value in arguments_of(model).items()}
    except ConfigError as error:
        raise ConfigError(f"model=timm:{name}: {error}") from error
    settings: Any = model.pretrained_cfg
    values |= {f"data.{key}": settings[key] for key in ("mean", "std", "crop_pct", "interpolation")}
    values["checkpoint.init_from"] = f"timm:{name}"
    return ["model=vit_base_patch16_224", *(f"{key}={json.dumps(value)}" for key, value in values.items())]


def arguments_of(model: Any) -> dict[str, Any]:
    """The arguments of `vit.VisionTransformer` for a model of timm's, but for the number of classes.

    What a tensor's name or shape shows and these lack is refused by name when the weights are read.

    Raises:
        ConfigError: vit.py has no such blocks.
    """
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import Block, VisionTransformer

    if not isinstance(model, VisionTransformer):
        raise ConfigError(f"it is timm's {type(model).__name__}: give a VisionTransformer, timm.list_models('vit*')")
    block: Any = model.blocks[0]
    kind = type(block)
    parts = [kind.__name__, *(type(getattr(block, key)).__name__ for key in ("norm1", "attn", "mlp"))]
    activation = type(getattr(block.mlp, "act", None)).__name__
    is_plain = kind is Block and parts[1:] == ["LayerNorm", "Attention", "Mlp"] and activation in ACTIVATIONS
    if not is_plain:
        raise ConfigError(f"its blocks ({', '.join([*parts, activation])}) are not vit.py's: give a plain ViT")

    def has(part: nn.Module) -> bool:
        return not isinstance(part, nn.Identity)

    return {
        "img_size": list(model.patch_embed.img_size or ()),
        "patch_size": list(model.patch_embed.patch_size),
        "in_chans": model.patch_embed.proj.in_channels,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": block.attn.num_heads,
        "mlp_ratio": block.mlp.fc1.out_features / model.embed_dim,
        "qkv_bias": block.attn.qkv.bias is not None,
        "proj_bias": block.attn.proj.bias is not None,
        "qk_norm": has(block.attn.q_norm),
        "init_values": block.ls1.init_values if has(block.ls1) else None,
        "class_token": model.cls_token is not None,
        "no_embed_class": model.no_embed_class,
        "reg_tokens": model.num_reg_tokens,
        "distilled": isinstance(model, VisionTransformerDistilled),
        "pre_norm": has(model.norm_pre),
        "fc_norm": has(model.fc_norm),
        "act_layer": ACTIVATIONS[activation],
        "norm_eps": block.norm1.eps,
    }
