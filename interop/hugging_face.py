"""Which options of a model Hugging Face's ViT supports, and its names for activations."""

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from typing import Any

from schema import LATER_OPTIONS, ConfigError, ModelConfig, pair

# timm's name, which model.act_layer takes -> Hugging Face's.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}
# Option of the model -> whether Hugging Face's ViT supports a value of it, and why it supports no others.
LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "img_size": (lambda value: len({*pair(value)}) == 1, "its images are squares"),
    "patch_size": (lambda value: len({*pair(value)}) == 1, "its patches are squares"),
    "class_token": (lambda value: value, "it always has a class token"),
    "global_pool": (lambda value: value == "token", "it classifies by the class token"),
    "reg_tokens": (lambda value: value == 0, "it has no register tokens"),
    "no_embed_class": (lambda value: not value, "its class token has a position"),
    "init_values": (lambda value: value is None, "it has no LayerScale"),
    "qk_norm": (lambda value: not value, "it does not normalise queries and keys"),
    "proj_bias": (lambda value: value, "its projections have biases"),
    "pre_norm": (lambda value: not value, "it has no norm after the embeddings"),
    "fc_norm": (lambda value: not value, "its norm is before the pooling"),
    "representation_size": (lambda value: value is None, "its head is linear"),
    "pos_embed": (lambda value: value != "none", "its tokens have positions"),
}
LIMITS |= {
    key: (lambda value, plain=plain: value == plain, "it has no such thing") for key, plain in LATER_OPTIONS.items()
}
# Option -> the value to give it, where it is not false, null or 0; images and patches of two sides have none.
TO_GIVE = {"class_token": "true", "global_pool": "token", "proj_bias": "true", "img_size": None, "patch_size": None}
TO_GIVE |= dict.fromkeys(("no_embed_class", "qk_norm", "pre_norm", "fc_norm"), "false")
TO_GIVE |= dict.fromkeys(("init_values", "representation_size"), "null")
TO_GIVE |= {key: json.dumps(plain).strip('"') for key, plain in LATER_OPTIONS.items()} | {"pos_embed": "learn"}


def check(cfg: ModelConfig) -> None:
    """Refuse a model that Hugging Face's ViT cannot express, or any if transformers is not installed.

    Raises:
        ConfigError: names the key, its value, the reason and all that is to be given to have it.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("model.implementation=hf, but transformers is not installed: pip install -r requirements.txt")
    rates = [field.name for field in dataclasses.fields(cfg) if field.name.endswith("_rate")]
    limits = LIMITS | {rate: (lambda value: value == 0, "its dropout is elsewhere") for rate in rates}
    refused = [(key, why) for key, (supports, why) in limits.items() if not supports(getattr(cfg, key))]
    if not refused:
        return
    key, why = refused[0]
    value = json.dumps(getattr(cfg, key)).strip('"')
    to_give = [f"model.{key}={TO_GIVE.get(key, 0)}" for key, _ in refused if TO_GIVE.get(key, 0) is not None]
    advice = f"add {' '.join(to_give)}, or " if len(to_give) == len(refused) else ""
    raise ConfigError(f"model.{key}={value} with model.implementation=hf: {why}; {advice}use ours or timm")
