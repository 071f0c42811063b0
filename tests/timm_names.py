"""timm's names as configs of ours: what timm builds for a name, and what of that we have no place for."""

import launch

import contextlib
import functools
import inspect
from dataclasses import fields, replace
from unittest import mock

import timm
import timm.models.eva
import timm.models.vision_transformer
import timm.models.vision_transformer_hybrid
import timm.models.vision_transformer_relpos
import torch

from interop.weights_out import EVA_NAMES
from schema import ModelConfig, pair

MODULES = ("eva", "vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos")
SIZES = {"img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_kv_heads"}
SMALL = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 7}


class BuiltError(Exception):
    """In the place of a model: the class and the arguments."""


@functools.cache
def call_of(name):
    """timm's class and all of its arguments, those of the name and the class's own defaults."""

    def stop(cls, variant, pretrained, **kwargs):
        raise BuiltError(cls, kwargs)

    with contextlib.ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch(f"timm.models.{module}.build_model_with_cfg", stop))
        try:
            with torch.device("meta"):  # a hybrid builds its ResNet first
                timm.create_model(name)
        except BuiltError as built:
            cls, given = built.args
    defaults = {key: p.default for key, p in inspect.signature(cls).parameters.items()}
    return cls, defaults | {key: value for key, value in given.items() if key in defaults}


def parts_of(layer):
    """A class and its keywords, of a class or a partial."""
    return (layer.func, layer.keywords) if isinstance(layer, functools.partial) else (layer, {})


def refusal(cls, given):
    """What of a name we have no place for; None: nothing."""
    if cls is timm.models.vision_transformer_relpos.VisionTransformerRelPos:
        return "relative positions (VisionTransformerRelPos)"
    if cls is timm.models.eva.Eva:
        return "norms after the branches (use_post_norm)" if given["use_post_norm"] else None
    if parts_of(given["embed_layer"])[0] is not timm.layers.PatchEmbed:
        return "a convolutional network before the blocks (embed_layer)"
    if given["attn_layer"] == "diff":
        return "differential attention (attn_layer)"
    kind = parts_of(given["block_fn"])[0].__name__
    return None if kind == "Block" else f"other blocks (block_fn={kind})"


@functools.cache
def base():
    overrides = ["model=vit_base_patch16_224", "output_dir=/tmp/unused", "checkpoint.save_final_model=false"]
    return launch.load_config("L0_sanity", overrides, script="train_ddp").model


@functools.cache
def config_of(name):
    """Our config of a name that we can express."""
    cls, given = call_of(name)
    norm, keywords = parts_of(given["norm_layer"])
    is_rms = norm is not None and "rms" in norm.__name__.lower()
    given = given | {"norm_layer": "rmsnorm" if is_rms else "layernorm", "norm_eps": keywords.get("eps", 1e-6)}
    if cls is timm.models.eva.Eva:
        given |= {ours: given[theirs] for ours, theirs in EVA_NAMES.items()}
        is_aligned = given["scale_mlp"] or given["swiglu_align_to"]
        given["mlp_layer"] = ("swiglu" if is_aligned else "glu") if given["swiglu_mlp"] else "mlp"
        given["act_layer"] = "silu" if given["swiglu_mlp"] else "gelu"
        given["pos_embed"] = "learn" if given["use_abs_pos_emb"] else "none"
        if not given["use_rot_pos_emb"]:
            given["rope_type"] = None
        after_pooling = given["global_pool"] == "avg" if given["use_fc_norm"] is None else given["use_fc_norm"]
        after_blocks = given["use_post_transformer_norm"]
        after_blocks = not after_pooling if after_blocks is None else after_blocks
        given |= {"fc_norm": after_pooling, "final_norm": after_blocks or after_pooling}
        given["rope_temperature"] = float(given["rope_temperature"])
    else:
        names = {torch.nn.GELU: "gelu", torch.nn.SiLU: "silu", None: "gelu"}
        act = given["act_layer"]
        given["act_layer"] = act if isinstance(act, str) else names[act]
        given["mlp_layer"] = "glu" if parts_of(given["mlp_layer"])[0] is timm.layers.GluMlp else "mlp"
    for size in ("img_size", "patch_size"):
        given[size] = pair(given[size])
    known = {field.name for field in fields(ModelConfig)}
    return replace(base(), **{key: value for key, value in given.items() if key in known})


def small(cfg):
    """The same architecture in a size of milliseconds, and timm's arguments for that."""
    sizes = dict(SMALL)
    if isinstance(cfg.num_kv_heads, tuple):
        sizes["num_kv_heads"] = (4, 2)
    return replace(cfg, **sizes), sizes


def shallow(cfg):
    """The same widths with two blocks, and timm's arguments for that."""
    sizes = {"depth": 2, "img_size": cfg.img_size}  # else timm takes that of its weights
    if isinstance(cfg.num_kv_heads, tuple):
        sizes["num_kv_heads"] = cfg.num_kv_heads[-2:]
    return replace(cfg, **sizes), sizes


def architecture(cfg):
    """A config without its sizes: names that have the same one differ in them alone."""
    return tuple((key, value) for key, value in vars(cfg).items() if key not in SIZES)
