"""Plain weights in and out, all under timm's names.

`read` takes a checkpoint of ours, a torch.save or safetensors file, a timm or Hugging Face folder, or the name of a
timm model; `fit` makes what it read fit a config; `export_timm` and `export_hugging_face` write a folder from one of
our step_XXXXXXXX folders, of which they read weights and state.json, never the optimizer's state.
"""

from schema import ConfigError, DataConfig, ModelConfig, pair

import argparse
import contextlib
import dataclasses
import difflib
import json
import logging
import math
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from timm.data import ImageNetInfo
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import get_arch_name, is_model_pretrained
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from distributed import write_json

logger = logging.getLogger(__name__)
STEP_FOLDER = re.compile(r"step_(\d{8,})")
TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
NESTS = ("model", "state_dict", "model_state_dict", "module")  # under which files of others keep the weights
WRAPPERS = {"module", "_orig_mod", "model"}  # parts of names that DDP, torch.compile and Lightning add
HEAD = ("head.weight", "head.bias")
# Keys of the config's data section that a model is evaluated with.
DATA_SETTINGS = ("mean", "std", "interpolation", "crop_pct", "exif_orientation", "max_pixels")
HIDDEN = ("pre_logits.fc.weight", "pre_logits.fc.bias")  # of a head with model.representation_size

# Arguments of the model that timm lacks, or means otherwise; num_classes has a place of its own in timm's files.
OURS_ALONE = {"norm_eps", "transformer_engine", "drop_path_schedule", "pos_embed", "representation_size"}
OURS_ALONE |= {"init_head_bias", "freeze", "fused_attn", "implementation", "num_classes"}

# A layer in timm -> the same in Hugging Face's ViT. The first name is transformers 4's, which 5 writes to files, too;
# the second one is that of transformers 5's modules. q, k and v are the thirds of timm's attn.qkv.
HUGGING_FACE_BLOCK = {
    "norm1": ("layernorm_before",),
    "attn.q": ("attention.attention.query", "attention.q_proj"),
    "attn.k": ("attention.attention.key", "attention.k_proj"),
    "attn.v": ("attention.attention.value", "attention.v_proj"),
    "attn.proj": ("attention.output.dense", "attention.o_proj"),
    "norm2": ("layernorm_after",),
    "mlp.fc1": ("intermediate.dense", "mlp.fc1"),
    "mlp.fc2": ("output.dense", "mlp.fc2"),
}
HUGGING_FACE_REST = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj.weight": "vit.embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "vit.embeddings.patch_embeddings.projection.bias",
    "norm.weight": "vit.layernorm.weight",
    "norm.bias": "vit.layernorm.bias",
    "head.weight": "classifier.weight",
    "head.bias": "classifier.bias",
}
HUGGING_FACE_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}
# What Hugging Face's ViT can be: option -> which values it has, and why no others.
HUGGING_FACE_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "img_size": (lambda value: len({*pair(value)}) == 1, "its pictures are squares"),
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
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Somebody's weights."""

    weights: dict[str, Tensor]  # on the CPU, under timm's names
    grid: tuple[int, int] | None  # height and width, in patches, that the position embeddings were made for
    description: str  # what the user gave, and what was found there
    # What is known of num_heads, act_layer and norm_eps, which no tensor's shape tells, as ModelConfig names them.
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    classes: tuple[str, ...] = ()  # in the order of the head's rows; empty = unknown
    data: dict[str, Any] = dataclasses.field(default_factory=dict)  # known DATA_SETTINGS of its evaluation


def read(source: str) -> Source:
    """Weights from one of these, without optimizer state.

    - a step_XXXXXXXX folder of ours, or a folder that holds some, of which the newest complete one is taken
    - a torch.save file (.pt .pth .bin .ckpt .tar), of tensors alone or with them under a name such as "model"
    - a .safetensors file; a config.json beside it tells its grid
    - a folder with model.safetensors or pytorch_model.bin, and the config.json of timm or of Hugging Face's ViT
    - timm:<model name>, or the bare name, with or without a tag; local-dir:<folder>

    Raises:
        ConfigError: none of these, or damaged; one line that names the source and the fix.
    """
    with _about(source):
        path = Path(source.removeprefix("local-dir:"))
        if source.startswith("timm:") or (not path.exists() and timm.is_model(source)):
            return _read_timm_model(source, source.removeprefix("timm:"))
        if path.is_dir() and not source.startswith("local-dir:") and (folder := newest_step(path)):
            return _read_step(source, folder)
        if path.is_dir():
            return _read_folder(source, path)
        if path.is_file() and path.suffix == ".safetensors":
            beside = path.with_name("config.json")
            return _read_file(source, path, beside if beside.is_file() else None)
        if path.is_file() and path.suffix in TORCH_FILES:
            return _read_file(source, path, None)
        if path.is_file():
            raise ConfigError(f"a file must end in .safetensors or one of {' '.join(TORCH_FILES)}: rename it")
        known = timm.list_models() + timm.list_pretrained()
        similar = difflib.get_close_matches(source.split(":")[-1], known, n=1)
        raise ConfigError(
            "there is no such file or folder, and timm has no such model: "
            + (f"did you mean timm:{similar[0]}?" if similar else "give a path, or timm:<model name>")
        )


def newest_step(path: Path) -> Path | None:
    """`path` itself if it is one of our step folders, else the newest complete one in it; None if there is none."""

    def is_complete(folder: Path) -> bool:
        return (folder / ".metadata").is_file() and (folder / "state.json").is_file()

    if is_complete(path):
        return path
    steps = {int(match[1]): p for p in path.glob("step_*") if (match := STEP_FOLDER.fullmatch(p.name))}
    return next((steps[step] for step in sorted(steps, reverse=True) if is_complete(steps[step])), None)


@contextlib.contextmanager
def _about(source: str) -> Iterator[None]:
    """Puts the key and the source before a complaint."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"checkpoint.init_from={source}: {error}") from error.__cause__


@contextlib.contextmanager
def _reading(what: str | Path, *, advice: str = "give a whole copy") -> Iterator[None]:
    """Turns whatever a reader raises into one line.

    Raises:
        ConfigError: the reader raised; names `what`.
    """
    try:
        yield
    except ConfigError:
        raise
    # The reader of a damaged file, or a download, may raise anything; what the user needs is its name.
    except (Exception, CheckpointException) as error:
        if isinstance(error, CheckpointException):  # a BaseException, around the one that says what happened
            error = next(iter(error.failures.values()))[0]
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else "it ends too early"
        raise ConfigError(f"{what} cannot be read ({type(error).__name__}: {reason}): {advice}") from error


def _read_json(path: Path) -> dict[str, Any]:
    with _reading(path):
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is not a JSON object: give a whole copy")
        return content


def _read_step(source: str, folder: Path) -> Source:
    state = _read_state(folder, "model", "classes")
    model = state["model"]
    tensors, kind = _read_step_weights(folder)
    with _reading(folder / "state.json"):
        options = {key: model[key] for key in ("num_heads", "act_layer", "norm_eps")}
        img_size = model["img_size"]
    description = f"{source} ({kind})" if folder == Path(source) else f"{source} ({folder.name}, {kind})"
    data = _settings(state.get("data", {}))
    return Source(tensors, _grid(img_size, tensors), description, options, tuple(state["classes"]), data)


def _read_state(folder: Path, *keys: str) -> dict[str, Any]:
    """A step folder's state.json, which must have `keys`."""
    state = _read_json(folder / "state.json")
    for key in keys:
        if key not in state:
            raise ConfigError(f"{folder}/state.json has no {key!r}: it is not of this recipe, or of an older one")
    return state


def _read_step_weights(folder: Path, *, raw: bool = False) -> tuple[dict[str, Tensor], str]:
    """The weights of a step folder in one process, and what they are; DCP reads nothing but what it is asked for.

    Their moving average, if the run had one and `raw` does not ask for the weights themselves.
    """
    with _reading(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is: this is one process's work
        entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        part = "ema" if not raw and any(key.startswith("ema.") for key in entries) else "model"
        tensors = {
            key.removeprefix(f"{part}."): torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in entries.items()
            if key.startswith(f"{part}.")
        }
        dcp.load({part: tensors}, checkpoint_id=folder, no_dist=True)
    return _joined(tensors), {"ema": "EMA weights", "model": "weights"}[part]


def _read_folder(source: str, folder: Path) -> Source:
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if file is None or not (folder / "config.json").is_file():
        raise ConfigError(
            f"it holds neither a complete step_XXXXXXXX nor {' or '.join(WEIGHT_FILES)} beside a config.json: "
            "give the folder or the file that has the weights"
        )
    return _read_file(source, file, folder / "config.json")


def _read_file(source: str, file: Path, config_file: Path | None) -> Source:
    config = _read_json(config_file) if config_file else {}
    if config.get("model_type", "vit") != "vit":
        raise ConfigError(f"config.json has model_type={config['model_type']}: of Hugging Face's models only vit fits")
    if file.suffix == ".safetensors":
        with _reading(file):
            content = load_file(file)
    else:
        content = _read_torch_file(file)
    tensors = _from_hugging_face(_plain_names(_unnested(content)))
    with _reading("config.json"):
        if config.get("model_type") == "vit":
            labels = config.get("id2label") or {}
            classes = [labels[key] for key in sorted(labels, key=int)]
            processor = config_file.with_name("preprocessor_config.json")
            settings = _read_json(processor) if processor.is_file() else {}
            data = {"mean": settings.get("image_mean"), "std": settings.get("image_std")}
            activations = {theirs: ours for ours, theirs in HUGGING_FACE_ACTIVATIONS.items()}
            activation = config.get("hidden_act")
            img_size = config.get("image_size")
            options = {
                "num_heads": config.get("num_attention_heads"),
                "act_layer": activations.get(activation, activation),
                "norm_eps": config.get("layer_norm_eps"),
            }
        else:
            classes = (config.get("pretrained_cfg") or {}).get("label_names") or ()
            data = config.get("pretrained_cfg") or config
            options = config.get("model_args") or {}
            # timm's older files have the evaluation's settings at the top.
            size = (config.get("pretrained_cfg") or config).get("input_size") or (None, None, None)
            img_size = options.get("img_size") or size[1:]
        known = {key: options[key] for key in ("num_heads", "act_layer", "norm_eps") if options.get(key) is not None}
        return Source(tensors, _grid(img_size, tensors), source, known, tuple(classes), _settings(data))


def _read_torch_file(file: Path) -> Any:
    """A torch.save file's content, tensors mapped from the file where its format can be."""
    with _reading(file, advice="give a whole file of torch.save"):
        try:
            # The training scripts of timm, DeiT and MAE save the command line's arguments beside the weights.
            with torch.serialization.safe_globals([argparse.Namespace]):
                return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except pickle.UnpicklingError as error:
            if match := re.search(r"GLOBAL ([\w.]+)", str(error)):
                raise ConfigError(
                    f"it holds {match[1]}, which is more than weights, and loading it could run code: torch.save its "
                    "state dict alone"
                ) from error
            raise


def _unnested(content: Any) -> dict[str, Tensor]:
    """The state dict within what a file holds."""
    while isinstance(content, dict) and (
        nest := next((key for key in NESTS if isinstance(content.get(key), dict)), None)
    ):
        content = content[nest]
    if not isinstance(content, dict) or not any(isinstance(value, Tensor) for value in content.values()):
        found = f"the keys {_some(map(str, content))}" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise ConfigError(f"it holds {found}, not tensors by name: torch.save the model's state_dict()")
    if strangers := [str(key) for key, value in content.items() if not isinstance(value, Tensor)]:
        raise ConfigError(f"{_some(strangers)} among its weights is no tensor: torch.save the model's state_dict()")
    return content


def _plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, without the parts of their names that wrappers added."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        if short in plain:
            raise ConfigError(f"it holds {short} twice, under different wrappers' names: keep one of the models")
        plain[short] = tensor
    return plain


def from_hugging_face_name(name: str) -> str:
    """A parameter's name in timm, of one in Hugging Face's ViT; what timm lacks, and names of others, stay.

    Queries, keys and values, which are thirds of timm's attn.qkv, become attn.q, attn.k and attn.v.
    """
    rest = {theirs.removeprefix("vit."): ours for ours, theirs in HUGGING_FACE_REST.items()}
    layers = {theirs: ours for ours, names in HUGGING_FACE_BLOCK.items() for theirs in names}
    short = name.removeprefix("vit.")
    match = re.fullmatch(r"(?:encoder\.layer|layers)\.(\d+)\.(.+)\.(weight|bias)", short)
    if match and match[2] in layers:
        return f"blocks.{match[1]}.{layers[match[2]]}.{match[3]}"
    return rest.get(short, name)


def _from_hugging_face(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's names to timm's; names of others, and those that timm lacks, stay. The pooler is left out."""
    if not any(name.endswith("embeddings.patch_embeddings.projection.weight") for name in tensors):
        return tensors
    is_pooler = re.compile(r"(vit\.)?pooler\.").match
    return _joined({from_hugging_face_name(name): tensor for name, tensor in tensors.items() if not is_pooler(name)})


def _joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with attn.q, attn.k and attn.v of a layer as timm's attn.qkv."""
    joined = dict(tensors)
    for name in [name for name in joined if ".attn.q." in name]:
        thirds = [name.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
        if all(third in joined for third in thirds):
            joined[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat([joined.pop(third) for third in thirds])
    return joined


def _read_timm_model(source: str, name: str) -> Source:
    if not timm.is_model(name):
        similar = difflib.get_close_matches(name, timm.list_models() + timm.list_pretrained(), n=1)
        raise ConfigError(
            "timm has no such model: " + (f"did you mean {similar[0]}?" if similar else "see timm.list_models('vit*')")
        )
    if not is_model_pretrained(name):
        tags = timm.list_pretrained(f"{get_arch_name(name)}.*")
        raise ConfigError(f"timm has no such weights: {f'use one of {_some(tags)}' if tags else 'use another model'}")
    # timm draws weights before it loads others: not from the run's own generator.
    with torch.random.fork_rng(devices=[]), _reading("it", advice="get it on a network, or give a file or a folder"):
        model = timm.create_model(name, pretrained=True)
    if not isinstance(model, TimmViT):
        raise ConfigError(f"it is timm's {type(model).__name__}: give a VisionTransformer, timm.list_models('vit*')")
    options, data = {"num_heads": model.blocks[0].attn.num_heads}, _settings(model.pretrained_cfg)
    return Source(model.state_dict(), model.patch_embed.grid_size, source, options, data=data)


def _settings(found: dict[str, Any]) -> dict[str, Any]:
    """Of what somebody's config says, the known settings of the evaluation, under our names, which are timm's."""
    return {key: found[key] for key in DATA_SETTINGS if found.get(key) is not None}


def _grid(img_size: Any, tensors: dict[str, Tensor]) -> tuple[int, int] | None:
    """Height and width in patches, of an image size as config files have it; None if it or the patches are unknown."""
    kernel = tensors.get("patch_embed.proj.weight")
    sides = [img_size] * 2 if isinstance(img_size, int) else img_size
    if kernel is None or kernel.ndim != 4 or not sides or None in sides:
        return None
    return sides[0] // kernel.shape[2], sides[1] // kernel.shape[3]


def fit(
    source: Source, cfg: ModelConfig, wanted: dict[str, torch.Size], classes: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], list[str]]:
    """What to copy into a model of `cfg`, as float32, and the names that stay as they were drawn.

    Position embeddings are resampled to the model's grid, and patch embeddings to its patch size, as timm does it. Only
    the head may be left out, if the source has none, one for other classes or one with another hidden layer; the same
    classes in another order have its rows put in ours.

    Args:
        source: what `read` gave.
        cfg: of the model.
        wanted: name -> shape of all of the model's parameters, under timm's names.
        classes: the run's, in order; compared where the source knows its own.

    Raises:
        ConfigError: anything else is missing, unexpected or of another shape; or the grid of the position embeddings
            is unknown; or the source has another number of heads, which no shape shows.
    """
    with _about(source.description):
        _compare_options(source, cfg)
        tensors = dict(source.weights)
        fresh = []
        rows = next((tensors[name].shape[:1] for name in HEAD if name in tensors), ())
        known = bool(source.classes and classes)
        hidden = tensors[HIDDEN[0]].shape[0] if HIDDEN[0] in tensors else None
        if hidden != cfg.representation_size:
            fresh = [name for name in (*HIDDEN, *HEAD) if name in wanted]
            tensors = {name: tensor for name, tensor in tensors.items() if name not in (*HIDDEN, *HEAD)}
        elif tuple(rows) != (cfg.num_classes,) or (known and {*source.classes} != {*classes}):
            fresh = list(HEAD)
            tensors = {name: tensor for name, tensor in tensors.items() if name not in HEAD}
        elif known and source.classes != classes:
            order = [source.classes.index(name) for name in classes]
            order += range(len(classes), cfg.num_classes)  # outputs that no class has
            tensors |= {name: tensors[name][order] for name in HEAD if name in tensors}
            logger.info("%s has the classes in another order: its head's rows are put in ours", source.description)
        _compare_shapes(tensors, {name: shape for name, shape in wanted.items() if name not in fresh})
        tensors = {name: tensor.to(torch.float32).contiguous() for name, tensor in tensors.items()}
        kernel = tensors["patch_embed.proj.weight"]
        tensors["patch_embed.proj.weight"] = resample_patch_embed(kernel, wanted["patch_embed.proj.weight"][2:])
        tensors["pos_embed"] = _resample_positions(tensors["pos_embed"], source.grid, cfg)
        return tensors, fresh


def _compare_options(source: Source, cfg: ModelConfig) -> None:
    for key, theirs in source.options.items():
        ours = getattr(cfg, key)
        if theirs != ours and key == "num_heads":
            raise ConfigError(
                f"it was trained with {theirs} heads, model.num_heads={ours}: set model.num_heads={theirs}"
            )
        if theirs != ours:
            logger.warning("%s was trained with model.%s=%s, this run has %s", source.description, key, theirs, ours)


def _compare_shapes(tensors: dict[str, Tensor], wanted: dict[str, torch.Size]) -> None:
    """Refuse what does not match by name and shape, but for the lengths that are resampled.

    Raises:
        ConfigError: how many are missing, unexpected and of another shape, and the first of each.
    """

    def fixed(name: str, shape: torch.Size) -> tuple[int | None, ...]:
        resampled = {"pos_embed": (1,), "patch_embed.proj.weight": (2, 3)}.get(name, ())
        return tuple(None if axis in resampled else length for axis, length in enumerate(shape))

    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted]
    reshaped = [
        f"{name} {list(tensors[name].shape)} for {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and fixed(name, tensors[name].shape) != fixed(name, shape)
    ]
    found = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    if problems := [f"{len(names)} {what} ({_some(names)})" for what, names in found.items() if names]:
        raise ConfigError(
            f"its {len(tensors)} tensors do not fit the model: {'; '.join(problems)}; set the model.* options that it "
            "was trained with"
        )


def _resample_positions(pos_embed: Tensor, grid: tuple[int, int] | None, cfg: ModelConfig) -> Tensor:
    """(1, rows, D) to (1, the model's rows, D): class and register tokens' rows stay, the grid's are resampled.

    Args:
        pos_embed: of a source that has the model's class and register tokens.
        grid: that the embeddings were made for; None: the model's if the number of rows is, else a square.
        cfg: of the model.

    Raises:
        ConfigError: the grid is unknown, or not that of this many rows.
    """
    height, width = (side // patch for side, patch in zip(pair(cfg.img_size), pair(cfg.patch_size), strict=True))
    tokens = cfg.class_token + cfg.reg_tokens
    prefix = 0 if cfg.no_embed_class else tokens
    rows = pos_embed.shape[1]

    def grid_of(patches: int) -> tuple[int, int] | None:
        side = math.isqrt(max(patches, 0))
        guesses = [(height, width), (side, side)] if grid is None else [grid]
        return next((guess for guess in guesses if math.prod(guess) == patches > 0), None)

    if old := grid_of(rows - prefix):
        # timm leaves equal numbers of rows alone only if the grids are equal, too: 2 x 8 becomes 4 x 4.
        return resample_abs_pos_embed(pos_embed, [height, width], list(old), num_prefix_tokens=prefix)
    found = f"its pos_embed has {rows} rows, {prefix} of them for tokens, and {rows - prefix} patches are"
    option = f"set model.no_embed_class={str(not cfg.no_embed_class).lower()}"
    others_fit = tokens and grid_of(rows - (tokens - prefix))
    if grid is not None:
        advice = option if others_fit else "give the config.json of these weights"
        raise ConfigError(f"{found} not the {grid[0]} x {grid[1]} of its config: {advice}")
    advice = "give a folder whose config.json tells the image size" + (f", or {option}" if others_fit else "")
    raise ConfigError(f"{found} neither this model's {height} x {width} nor a square: {advice}")


def _some(names: Iterable[str], count: int = 3) -> str:
    """The first few names."""
    names = list(names)
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def export_timm(step_folder: Path, target: Path, *, raw: bool = False) -> str:
    """Write a step folder's weights as timm reads them: model.safetensors, and the config.json it builds from.

    `timm.create_model("local-dir:<target>", pretrained=True)` gives the trained model. `target` is replaced.

    Args:
        step_folder: of ours.
        target: folder that is replaced.
        raw: the weights themselves, also where there is a moving average of them.

    Returns:
        What was written: "EMA weights" or "weights".

    Raises:
        ConfigError: the checkpoint is damaged, or timm has no place for one of the model's options.
    """
    state = _read_state(step_folder, "model", "classes", "data")
    if state["model"]["norm_eps"] != 1e-6:
        raise ConfigError(f"model.norm_eps={state['model']['norm_eps']} cannot be exported: timm's ViTs have 1e-6")
    if size := state["model"].get("representation_size"):
        raise ConfigError(
            f"model.representation_size={size} cannot be exported: timm's ViTs have a linear head; fine-tune with "
            "checkpoint.init_from and model.representation_size=null"
        )
    tensors, kind = _read_step_weights(step_folder, raw=raw)
    _write_folder(target, tensors, {"config.json": _timm_config(state)})
    return kind


def timm_arguments(model: dict[str, Any]) -> dict[str, Any]:
    """Those of a config's model keys that timm's VisionTransformer takes, but num_classes."""
    return {key: value for key, value in model.items() if key not in OURS_ALONE}


def _timm_config(state: dict[str, Any]) -> dict[str, Any]:
    """What timm's `local-dir:` loader reads: architecture, the arguments that differ, and the evaluation's settings."""
    model, data = state["model"], state["data"]
    return {
        "architecture": "vit_base_patch16_224",  # timm's entry point; every argument is given below
        "num_classes": model["num_classes"],
        "num_features": model["embed_dim"],
        "global_pool": model["global_pool"],
        "model_args": timm_arguments(model),
        "pretrained_cfg": {
            "input_size": [model["in_chans"], *pair(model["img_size"])],
            "num_classes": model["num_classes"],
            "interpolation": data["interpolation"],
            "crop_pct": data["crop_pct"],
            "crop_mode": "center",
            "mean": _each_channel(data["mean"], model),
            "std": _each_channel(data["std"], model),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            **({"label_names": state["classes"]} if state["classes"] else {}),
            **({"label_descriptions": names} if (names := descriptions(state["classes"])) else {}),
        },
        "decoding": {key: data[key] for key in ("exif_orientation", "max_pixels")},  # infer.py's; timm has no such
    }


def descriptions(classes: Iterable[str]) -> dict[str, str]:
    """What ImageNet's wnids mean, by timm's table: class name -> description; empty if a class is no wnid."""
    pattern = re.compile(r"n\d{8}")
    if not classes or not all(pattern.fullmatch(name) for name in classes):
        return {}
    table = ImageNetInfo()
    try:
        return {name: table.label_name_to_description(name) for name in classes}
    except KeyError:
        return {}


def export_hugging_face(step_folder: Path, target: Path, *, raw: bool = False) -> str:
    """Write a step folder's weights as a ViTForImageClassification, with the image processor of our evaluation.

    Names are those of transformers 4, which 5 reads and writes as well. Its processors cut half a pixel off differently
    where the picture is 3, 7, 11, ... pixels larger than the crop: theirs lies one pixel further left or up.

    Args:
        step_folder: of ours.
        target: folder that is replaced.
        raw: the weights themselves, also where there is a moving average of them.

    Returns:
        What was written: "EMA weights" or "weights".

    Raises:
        ConfigError: the checkpoint is damaged, or Hugging Face's ViT cannot express one of the model's options.
    """
    state = _read_state(step_folder, "model", "classes", "data")
    model = state["model"]
    for key, (has, why) in HUGGING_FACE_LIMITS.items():
        if not has(model.get(key)):
            value = json.dumps(model[key]).strip('"')
            raise ConfigError(f"model.{key}={value} cannot be exported to Hugging Face: {why}; export to timm")
    tensors, kind = _read_step_weights(step_folder, raw=raw)
    files = {"config.json": _hugging_face_config(state), "preprocessor_config.json": _hugging_face_processor(state)}
    _write_folder(target, _to_hugging_face(tensors), files)
    return kind


def _to_hugging_face(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under transformers 4's names."""
    renamed = {}
    for name, tensor in tensors.items():
        if name in HUGGING_FACE_REST:
            renamed[HUGGING_FACE_REST[name]] = tensor
            continue
        _, number, name = name.split(".", 2)
        layer, kind = name.rsplit(".", 1)
        parts = {layer: tensor}
        if layer == "attn.qkv":
            parts = {f"attn.{part}": third for part, third in zip("qkv", tensor.chunk(3), strict=True)}
        for part, value in parts.items():
            renamed[f"vit.encoder.layer.{number}.{HUGGING_FACE_BLOCK[part][0]}.{kind}"] = value
    return renamed


def _hugging_face_config(state: dict[str, Any]) -> dict[str, Any]:
    model, classes = state["model"], state["classes"]
    # A label for each output, by Hugging Face's own name for one that has none.
    labels = [*classes, *(f"LABEL_{i}" for i in range(len(classes), model["num_classes"]))]
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "image_size": pair(model["img_size"])[0],
        "patch_size": pair(model["patch_size"])[0],
        "num_channels": model["in_chans"],
        "hidden_size": model["embed_dim"],
        "num_hidden_layers": model["depth"],
        "num_attention_heads": model["num_heads"],
        "intermediate_size": int(model["embed_dim"] * model["mlp_ratio"]),
        "hidden_act": HUGGING_FACE_ACTIVATIONS[model["act_layer"]],
        "qkv_bias": model["qkv_bias"],
        "layer_norm_eps": model["norm_eps"],
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def _hugging_face_processor(state: dict[str, Any]) -> dict[str, Any]:
    """What `imagenet_dataset.eval_transform` and the normalisation on the device do."""
    model, data = state["model"], state["data"]
    size = pair(model["img_size"])[0]
    return {
        "image_processor_type": "BitImageProcessor",  # the one that resizes the short side, then crops
        "do_convert_rgb": model["in_chans"]
        == 3,  # it has no way to grey: pictures must be grey already for one channel
        "do_resize": True,
        "size": {"shortest_edge": int(size / data["crop_pct"])},
        "resample": {"bilinear": 2, "bicubic": 3}[data["interpolation"]],  # Pillow's numbers
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _each_channel(data["mean"], model),
        "image_std": _each_channel(data["std"], model),
    }


def other_settings(source: Source, cfg: DataConfig) -> list[str]:
    """With what the weights were evaluated and this run evaluates otherwise: data.mean=[0.5, 0.5, 0.5] and so on."""
    found = []
    for key, theirs in source.data.items():
        ours = getattr(cfg, key)
        # One value stands for all channels.
        is_other = ours != theirs if isinstance(ours, str) else not np.allclose(ours, theirs, rtol=0, atol=1e-3)
        if is_other:
            theirs = list(theirs) if isinstance(theirs, tuple) else theirs
            found.append(f"data.{key}={theirs}")
    return found


def _each_channel(values: list[float], model: dict[str, Any]) -> list[float]:
    """One value a channel, of one for all or of as many as there are channels."""
    return list(values) * (model["in_chans"] // len(values))


def _write_folder(target: Path, tensors: dict[str, Tensor], files: dict[str, Any]) -> None:
    """model.safetensors and JSON files, in a folder that is whole or not there."""
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {name: tensor.to(torch.float32).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        write_json(temporary / name, content)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
