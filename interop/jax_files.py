"""ViTs of Google's JAX code: the .npz files of vision_transformer (AugReg, in21k) and big_vision."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from interop.step_weights import first_few, reading
from schema import ConfigError

PREFIXES = ("", "opt/target/", "params/", "params/img/")  # before the names of the model's arrays; the last is SigLIP's


def read_model(file: Path) -> nn.Module:
    """A model of timm's, of the sizes that the arrays tell, with the weights as timm's own loader reads them.

    A hidden layer of the head, which timm leaves out, is its `pre_logits.fc`, as in `vit.VisionTransformer`.

    Raises:
        ConfigError: it cannot be read, or is another kind of model.
    """
    from timm.models.vision_transformer import VisionTransformer as TimmViT  # with all of timm, for few runs

    with reading(file):
        with np.load(file) as content:  # it unpickles nothing
            found = {name: content[name] for name in content.files}
        prefix = next((prefix for prefix in PREFIXES if f"{prefix}embedding/kernel" in found), None)
        if prefix is None:
            raise ConfigError(
                f"it holds the arrays {first_few(found)}, and no embedding/kernel as ViTs of Google's JAX code do: "
                "save the weights under timm's names, with torch.save or as safetensors"
            )
        arrays = {name.removeprefix(prefix): array for name, array in found.items() if name.startswith(prefix)}
        with torch.random.fork_rng(devices=[]):  # timm draws weights first: not from the run's own generator
            model = TimmViT(**_sizes(arrays), weight_init="skip")
            if "pre_logits/bias" in arrays:
                hidden = nn.Linear(*arrays["pre_logits/kernel"].shape)
                weight, bias = (torch.from_numpy(arrays[f"pre_logits/{part}"]) for part in ("kernel", "bias"))
                hidden.load_state_dict({"weight": weight.T, "bias": bias})
                model.pre_logits = nn.ModuleDict({"fc": hidden})
                model.head = nn.Linear(hidden.out_features, model.num_classes)
        model.load_pretrained(str(file))
        taken, held = sum(p.numel() for p in model.parameters()), sum(array.size for array in arrays.values())
        if taken != held:  # timm takes what it knows, and would leave a ResNet before the blocks, for one, alone
            raise ConfigError(f"it holds {held} numbers, and a plain ViT of its sizes {taken}: it is of another model")
    return model


def _sizes(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The arguments of timm's VisionTransformer."""
    height, width, channels, dim = arrays["embedding/kernel"].shape
    layers = {match[1] for name in arrays if (match := re.match(r"Transformer/encoderblock_(\d+)/", name))}
    stacked = arrays.get("Transformer/encoderblock/LayerNorm_0/scale")  # big_vision's scan: all layers in one array
    # The ends of names in one block, or in all of them -> shapes.
    block = {
        "/".join(name.split("/")[-2:]): array.shape
        for name, array in arrays.items()
        if re.match("Transformer/encoderblock(_0)?/", name)
    }
    rows = next(array.shape[1] for name, array in arrays.items() if name.endswith("pos_embedding"))
    has_position = math.isqrt(rows) ** 2 != rows  # the class token: the images are squares
    side = math.isqrt(rows - has_position)
    return {
        "img_size": (side * height, side * width),
        "patch_size": (height, width),
        "in_chans": channels,
        "num_classes": len(arrays.get("head/bias", ())),
        "global_pool": "map" if "MAPHead_0/probe" in arrays else "token" if "cls" in arrays else "avg",
        "embed_dim": dim,
        "depth": len(layers) if stacked is None else len(stacked),
        "num_heads": block["query/bias"][-2],
        "mlp_ratio": block["Dense_0/bias"][-1] / dim,
        "class_token": "cls" in arrays,
        "no_embed_class": not has_position,
        "fc_norm": False,  # the norm is the encoder's, also before a mean
    }
