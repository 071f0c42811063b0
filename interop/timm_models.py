"""model=timm:<name>: what of a config follows from the name of a model of timm's."""

import contextlib
import functools
import inspect
import json
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import timm
import timm.models.deit
import timm.models.eva
import timm.models.naflexvit
import timm.models.vision_transformer
import timm.models.vision_transformer_hybrid
import timm.models.vision_transformer_relpos
import torch

from interop.weights_in import check_pretrained
from interop.weights_out import EVA_NAMES
from schema import ConfigError, ModelConfig, pair

RELATIVE = timm.models.vision_transformer_relpos.VisionTransformerRelPos
DISTILLED = timm.models.deit.VisionTransformerDistilled
NAFLEX = timm.models.naflexvit.NaFlexVit
MODULES = ("deit", "eva", "naflexvit", "vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos")
# The options of timm's NaFlexVit that vit.py has a place for.
NAFLEX_NAMES = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "scale_mlp_norm", "scale_attn_inner_norm")
NAFLEX_NAMES += ("qkv_bias", "qk_norm", "proj_bias", "init_values", "class_token", "reg_tokens", "pos_embed")
NAFLEX_NAMES += ("pos_embed_grid_size", "pre_norm", "final_norm", "fc_norm", "global_pool", "act_layer")
ACTIVATIONS = {torch.nn.GELU: "gelu", torch.nn.SiLU: "silu", torch.nn.ReLU: "relu", None: "gelu"}
# The regularization of a training, not the architecture.
NOT_OF_THE_NAME = {"num_classes", "drop_rate", "drop_path_rate"}
NOT_OF_THE_NAME |= {f"{where}_drop_rate" for where in ("pos", "patch", "proj", "attn")}


def overrides_of(name: str) -> list[str]:
    """The overrides that model=timm:<name> stands for: architecture, size of the images, evaluation, first weights.

    Raises:
        ConfigError: timm has no such model or weights, or vit.py has not all of its parts.
    """
    try:
        check_pretrained(name)
        values: dict[str, Any] = {f"model.{key}": value for key, value in arguments_of(name).items()}
    except ConfigError as error:
        raise ConfigError(f"model=timm:{name}: {error}") from error
    settings = timm.get_pretrained_cfg(name)
    assert settings is not None  # check_pretrained sees to it
    values |= {f"data.{key}": getattr(settings, key) for key in ("mean", "std", "crop_pct", "interpolation")}
    if call_of(name)[0] is NAFLEX:  # whose images have as many patches as one of input_size, in their own aspect ratio
        patches = math.prod(settings.input_size[1:]) // math.prod(values["model.patch_size"])
        values |= {"data.packing.enabled": True, "data.packing.patches_per_image": patches}
        del values["data.crop_pct"]
    values["checkpoint.init_from"] = f"timm:{name}"
    return ["model=vit_base_patch16_224", *(f"{key}={json.dumps(value)}" for key, value in values.items())]


class _BuiltError(Exception):
    """In the place of a model: the class and its arguments."""


@contextlib.contextmanager
def _nothing_built() -> Iterator[None]:
    """Let timm's builder stand aside: its functions hand it a class and arguments, and tell nobody else."""

    def stop(cls: type, _variant: str, _pretrained: bool, **given: Any) -> None:
        raise _BuiltError(cls, given)

    modules = [getattr(timm.models, name) for name in MODULES]
    builder = modules[0].build_model_with_cfg
    try:
        for module in modules:
            module.build_model_with_cfg = stop
        yield
    finally:
        for module in modules:
            module.build_model_with_cfg = builder


@functools.cache
def call_of(name: str) -> tuple[type, dict[str, Any]]:
    """The class of a name of timm's and all its arguments: of the name, of its weights, and the class's defaults."""
    try:
        with _nothing_built(), torch.device("meta"):  # of a hybrid the ResNet is built
            return type(timm.create_model(name)), {}
    except _BuiltError as built:
        cls, given = built.args
    settings = timm.get_pretrained_cfg(name)
    assert settings is not None  # each name that timm builds has them
    of_weights: dict[str, Any] = {"in_chans": settings.input_size[0]}
    if settings.fixed_input_size:
        of_weights["img_size"] = settings.input_size[1:]
    # The distilled one's own signature names no arguments.
    signed = timm.models.vision_transformer.VisionTransformer if cls is DISTILLED else cls
    defaults = {key: parameter.default for key, parameter in inspect.signature(signed).parameters.items()}
    known = {key: value for key, value in (of_weights | given).items() if key in defaults and value is not None}
    return cls, defaults | known


def _parts_of(layer: Any) -> tuple[Any, dict[str, Any]]:
    """A class and its keywords, of a class or a partial."""
    return (layer.func, layer.keywords) if isinstance(layer, functools.partial) else (layer, {})


def refusal(name: str) -> str | None:
    """What vit.py has no place for in a model of timm's; None: nothing."""
    cls, given = call_of(name)
    if cls is timm.models.eva.Eva:
        return None
    if cls is NAFLEX:
        plain, cfg = timm.models.naflexvit.NaFlexVitCfg(), given["cfg"]
        for option, value in vars(plain).items():
            if option not in (*NAFLEX_NAMES, *NOT_OF_THE_NAME) and (other := getattr(cfg, option)) != value:
                return f"other positions, blocks or layers ({option}={other})"
        return "factorized positions (pos_embed=factorized)" if cfg.pos_embed == "factorized" else None
    if cls is RELATIVE:
        return None
    if cls not in (timm.models.vision_transformer.VisionTransformer, DISTILLED):
        return f"it is a {cls.__name__}, no VisionTransformer or Eva"
    if _parts_of(given.get("embed_layer", timm.layers.PatchEmbed))[0] is not timm.layers.PatchEmbed:
        return "a convolutional network before the blocks (embed_layer)"
    return None


def arguments_of(name: str) -> dict[str, Any]:
    """The architecture of a name of timm's, as `ModelConfig` has it.

    Raises:
        ConfigError: vit.py has no place for a part of it.
    """
    if why := refusal(name):
        raise ConfigError(f"{why}, which vit.py has not: give one of docs/models.md")
    cls, given = call_of(name)
    if cls is NAFLEX:
        return _naflex_arguments(given)
    norm, keywords = _parts_of(given["norm_layer"])
    is_rms = norm is not None and "rms" in norm.__name__.lower()
    given = given | {"norm_layer": "rmsnorm" if is_rms else "layernorm", "norm_eps": keywords.get("eps", 1e-6)}
    given["distilled"] = cls is DISTILLED
    if cls is timm.models.eva.Eva:
        given |= {ours: given[theirs] for ours, theirs in EVA_NAMES.items()}
        is_aligned = given["scale_mlp"] or given["swiglu_align_to"]
        given["mlp_layer"] = ("swiglu" if is_aligned else "glu") if given["swiglu_mlp"] else "mlp"
        given["act_layer"] = "silu" if given["swiglu_mlp"] else "gelu"
        given["pos_embed"] = "learn" if given["use_abs_pos_emb"] else "none"
        given["rope_type"] = given["rope_type"] if given["use_rot_pos_emb"] else None
        after_pooling = given["global_pool"] == "avg" if given["use_fc_norm"] is None else given["use_fc_norm"]
        after_blocks = given["use_post_transformer_norm"]
        after_blocks = not after_pooling if after_blocks is None else after_blocks
        given |= {"fc_norm": after_pooling, "final_norm": after_blocks or after_pooling}
        given["rope_temperature"] = float(given["rope_temperature"])
        given["block_fn"] = "ResPostBlock" if given["use_post_norm"] else "Block"
    else:
        given["block_fn"] = _parts_of(given["block_fn"])[0].__name__.replace("RelPos", "")
        given["attn_layer"] = "diff" if given.get("attn_layer") == "diff" else "attn"
        if cls is RELATIVE:
            given |= {"pos_embed": "none", "mlp_layer": timm.layers.Mlp}
        act = given["act_layer"]
        given["act_layer"] = act if isinstance(act, str) else ACTIVATIONS[act]
        given["mlp_layer"] = "glu" if _parts_of(given["mlp_layer"])[0] is timm.layers.GluMlp else "mlp"
    patch = pair(given["patch_size"])
    # As many patches as fit: timm takes images of 384 pixels for patches of 14, too.
    sides = tuple(side - side % step for side, step in zip(pair(given["img_size"]), patch, strict=True))
    given |= {"patch_size": patch, "img_size": sides}
    known = {field.name for field in fields(ModelConfig)} - NOT_OF_THE_NAME  # pyright: ignore[reportArgumentType]
    return {key: value for key, value in given.items() if key in known}


def _naflex_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """`arguments_of` timm's NaFlexVit, whose positions are a grid of their own and of patches alone."""
    cfg = given["cfg"]
    found = {name: getattr(cfg, name) for name in NAFLEX_NAMES}
    patch = pair(cfg.patch_size)
    found |= {"patch_size": patch, "in_chans": given["in_chans"], "no_embed_class": True}
    found["scale_attn_norm"] = found.pop("scale_attn_inner_norm")
    grid = found.pop("pos_embed_grid_size")
    found["img_size"] = tuple(side * step for side, step in zip(grid, patch, strict=True))
    found["pos_embed"] = "learn" if cfg.pos_embed == "learned" else "none"
    found["act_layer"] = cfg.act_layer or "gelu"
    return found | {"norm_layer": "layernorm", "norm_eps": 1e-6, "mlp_layer": "mlp", "distilled": False}
