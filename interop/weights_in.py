"""Somebody's weights, read under timm's names (`read`) and made to fit a config (`fit`)."""

import argparse
import contextlib
import dataclasses
import difflib
import json
import logging
import math
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import timm
import torch
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed, resample_patch_embed, resize_rel_pos_bias_table
from torch import Tensor

from interop import hugging_face, jax_files
from interop.dcp_reader import Reader
from interop.step_weights import (
    DATA_SETTINGS,
    first_few,
    joined,
    load_tensors,
    read_json,
    read_state,
    read_step_weights,
    reading,
    stored_tensors,
)
from runtime.parameter_names import from_hugging_face_name, without_wrappers
from runtime.step_folders import newest_step
from schema import ROPE_ONLY, ConfigError, DataConfig, ModelConfig, pair

logger = logging.getLogger(__name__)
TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
NESTS = ("model", "state_dict", "model_state_dict", "module")  # under which files of others keep the weights
AVERAGE = re.compile(r"(.*_)?ema(_.*)?")  # and their averages: state_dict_ema, model_ema, ema_state_dict, ema, ...
HUB_NAME = re.compile(r"[\w-][\w.-]*/(?!.*\.(safetensors|npz|pt|pth|bin|ckpt|tar)$)[\w.-]+")  # owner and model, no file
# Options that no tensor's shape tells. Another value is refused, but for those in `TELL`, of which a line tells.
TELL = ("act_layer", "norm_eps")
UNSEEN = ("num_heads", *TELL, "rope_type", *ROPE_ONLY, "block_fn")
ROPE_TYPES = {"RotaryEmbeddingCat": "cat", "RotaryEmbeddingDinoV3": "dinov3", "RotaryEmbeddingMixed": "mixed"}
HEAD = ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")  # the second one with model.distilled
TABLE = "relative_position_bias_table"
HIDDEN = ("pre_logits.fc.weight", "pre_logits.fc.bias")  # of a head with model.representation_size


@dataclasses.dataclass(frozen=True)
class Source:
    """Somebody's weights."""

    weights: dict[str, Tensor]  # on the CPU, under timm's names
    grid: tuple[int, int] | None  # height and width, in patches, that the position embeddings were made for
    description: str  # what the user gave, and what was found there
    # What is known of `UNSEEN`, as ModelConfig names them.
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    classes: tuple[str, ...] = ()  # in the order of the head's rows; empty = unknown
    data: dict[str, Any] = dataclasses.field(default_factory=dict)  # known DATA_SETTINGS of its evaluation


def read(source: str) -> Source:
    """Weights from one of these, without optimizer state.

    - a step_XXXXXXXX folder of ours, or a folder that holds some, of which the newest complete one is taken
    - a torch.save file (.pt .pth .bin .ckpt .tar), of tensors alone or with them under a name such as "model"
    - a .safetensors file; a config.json beside it tells its grid
    - a .npz file of Google's JAX code, vision_transformer or big_vision
    - a folder with model.safetensors or pytorch_model.bin, and the config.json of timm or of Hugging Face's ViT
    - a folder of torch.distributed.checkpoint, of tensors alone or with them under a name such as "model"
    - timm:<model name>, or the bare name, with or without a tag; local-dir:<folder>
    - <owner>/<name> on the Hugging Face hub, a folder as above; hf-hub:<owner>/<name>, as timm reads it

    Raises:
        ConfigError: none of these, or damaged, or the hub is out of reach; one line that names the source and the fix.
    """
    with _about(source):
        path = Path(source.removeprefix("local-dir:"))
        if source.startswith("timm:") or (not path.exists() and timm.is_model(source)):
            return _source_of_timms(pretrained(source.removeprefix("timm:")), source)
        if source.startswith("hf-hub:"):
            return _source_of_timms(built_by_timm(source), source)
        if path.is_dir() and not source.startswith("local-dir:") and (folder := newest_step(path)):
            return _read_step(source, folder)
        if (path / ".metadata").is_file():
            return _read_dcp_folder(source, path)
        if path.is_dir():
            return _read_folder(source, path)
        if path.is_file() and path.suffix == ".safetensors":
            beside = path.with_name("config.json")
            return _read_file(source, path, beside if beside.is_file() else None)
        if path.is_file() and path.suffix in TORCH_FILES:
            return _read_file(source, path, None)
        if path.is_file() and path.suffix == ".npz":
            return _source_of(jax_files.read_model(path), source)
        if path.is_file():
            raise ConfigError(f"a file must end in .safetensors, .npz or one of {' '.join(TORCH_FILES)}: rename it")
        if HUB_NAME.fullmatch(source) and not path.parent.exists():  # else it is meant for a path
            return _read_hub_folder(source)
        known = timm.list_models() + timm.list_pretrained()
        similar = difflib.get_close_matches(source.split(":")[-1], known, n=1)
        raise ConfigError(
            "there is no such file or folder, and timm has no such model: "
            + (f"did you mean timm:{similar[0]}?" if similar else "give a path, or timm:<model name>")
        )


@contextlib.contextmanager
def _about(source: str) -> Iterator[None]:
    """Puts the key and the source before a complaint."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"checkpoint.init_from={source}: {error}") from error.__cause__


def _read_step(source: str, folder: Path) -> Source:
    state = read_state(folder, "model", "classes")
    model = state["model"]
    tensors, kind = read_step_weights(folder)
    with reading(folder / "state.json"):
        options = {key: model[key] for key in UNSEEN}
        img_size = model["img_size"]
    description = f"{source} ({kind})" if folder == Path(source) else f"{source} ({folder.name}, {kind})"
    data = _settings(state.get("data", {}))
    return Source(tensors, _grid(img_size, tensors), description, options, tuple(state["classes"]), data)


def _read_folder(source: str, folder: Path) -> Source:
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if file is None or not (folder / "config.json").is_file():
        raise ConfigError(
            f"it holds neither a complete step_XXXXXXXX nor {' or '.join(WEIGHT_FILES)} beside a config.json: "
            "give the folder or the file that has the weights"
        )
    return _read_file(source, file, folder / "config.json")


def _read_dcp_folder(source: str, folder: Path) -> Source:
    """Weights that anybody saved with DCP; an optimizer's state, for one, which lies there too, is not read."""
    with reading(folder):
        way_of = Reader(folder).read_metadata().planner_data or {}  # to a tensor in what was saved
        nested: dict[Any, Any] = {}
        keys: dict[Tensor, str] = {}  # by identity
        for key, entry in stored_tensors(folder).items():
            *above, last = way_of.get(key, (key,))
            there = nested
            for name in above:
                there = there.setdefault(name, {})
            there[last] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            keys[there[last]] = key
        content, average = _unnested(nested)
        tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in content.items()}
        load_tensors(folder, {keys[content[name]]: tensor for name, tensor in tensors.items()})
    return Source(_timm_names(tensors), _naflex_grid(tensors), _described(source, average))


def _read_file(source: str, file: Path, config_file: Path | None) -> Source:
    """A file of tensors, and what `config_file`, timm's or Hugging Face's config.json, says of them."""
    config = read_json(config_file) if config_file else {}
    if config.get("model_type", "vit") != "vit":
        raise ConfigError(f"config.json has model_type={config['model_type']}: of Hugging Face's models only vit fits")
    if file.suffix == ".safetensors":
        with reading(file):
            content = load_file(file)
    else:
        content = _read_torch_file(file)
    content, average = _unnested(content)
    tensors = _timm_names(content)
    with reading("config.json"):
        if config_file and config.get("model_type") == "vit":  # Hugging Face's
            labels = config.get("id2label") or {}
            classes = [labels[key] for key in sorted(labels, key=int)]
            processor = config_file.with_name("preprocessor_config.json")
            settings = read_json(processor) if processor.is_file() else {}
            data = {"mean": settings.get("image_mean"), "std": settings.get("image_std")}
            activations: dict[Any, str] = {theirs: ours for ours, theirs in hugging_face.ACTIVATIONS.items()}
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
            if architecture := config.get("architecture"):
                of_name = "_rpn_" in architecture or architecture.startswith("eva02_enormous")
                options = options | {"block_fn": _block_fn(options.get("use_post_norm", of_name))}
            if options.get("use_rot_pos_emb") is False:
                options = options | {"rope_type": None}
            # timm's older files have the evaluation's settings at the top.
            size = (config.get("pretrained_cfg") or config).get("input_size") or (None, None, None)
            img_size = options.get("img_size") or size[1:]
        known = {key: options[key] for key in UNSEEN if options.get(key) is not None}
        description = _described(source, average)
        grid = _naflex_grid(content) or _grid(img_size, tensors)
        if _naflex_grid(content) and timm.is_model(name := config.get("architecture", "")):
            with torch.device("meta"):
                _check_positions(timm.create_model(name))
        return Source(tensors, grid, description, known, tuple(classes), _settings(data))


def _described(source: str, average: str) -> str:
    return f"{source} (EMA weights, {average})" if average else source


def _timm_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return from_naflex(_from_hugging_face(_plain_names(tensors)))


def _read_torch_file(file: Path) -> Any:
    """A torch.save file's content, tensors mapped from the file where its format can be."""
    with reading(file, advice="give a whole file of torch.save"):
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


def _unnested(content: Any) -> tuple[dict[str, Tensor], str]:
    """The state dict within what a file holds, and the key of the averaged weights if it is theirs, else "".

    Averages go first, as in our own checkpoints and in timm.
    """
    kind = ""
    while nest := _nest(content):
        kind = kind or (nest if AVERAGE.fullmatch(nest) else "")
        content = content[nest]
    if not isinstance(content, dict) or not any(isinstance(value, Tensor) for value in content.values()):
        found = (
            f"the keys {first_few(map(str, content))}" if isinstance(content, dict) else f"a {type(content).__name__}"
        )
        raise ConfigError(f"it holds {found}, not tensors by name: torch.save the model's state_dict()")
    if strangers := [str(key) for key, value in content.items() if not isinstance(value, Tensor)]:
        raise ConfigError(f"{first_few(strangers)} among its weights is no tensor: torch.save the model's state_dict()")
    return content, kind


def _nest(content: Any) -> str | None:
    """The key under which the weights are; None if they are not below another one.

    Raises:
        ConfigError: there are several.
    """
    if not isinstance(content, dict):
        return None
    filled = [key for key, value in content.items() if isinstance(key, str) and isinstance(value, dict) and value]
    averages = [key for key in filled if AVERAGE.fullmatch(key)]
    nests = averages or [key for key in filled if key in NESTS]
    if len(nests) > 1:
        raise ConfigError(f"it holds {' and '.join(nests)}: torch.save the one that you mean alone")
    return next(iter(nests), None)


def _plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, without the parts of their names that wrappers added."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name == "n_averaged":  # torch's AveragedModel counts its updates there
            continue
        short = without_wrappers(name)
        if short in plain:
            raise ConfigError(f"it holds {short} twice, under different wrappers' names: keep one of the models")
        plain[short] = tensor
    return plain


def _from_hugging_face(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's names to timm's; names of others, and those that timm lacks, stay. The pooler is left out."""
    if not any(name.endswith("embeddings.patch_embeddings.projection.weight") for name in tensors):
        return tensors
    is_pooler = re.compile(r"(vit\.)?pooler\.").match
    return joined({from_hugging_face_name(name): tensor for name, tensor in tensors.items() if not is_pooler(name)})


def from_naflex(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and shapes of timm's NaFlexVit to those of its VisionTransformer; others stay.

    The reverse of timm.models.naflexvit.checkpoint_filter_fn. Positions are a row each, and a patch's pixels are (C,
    height, width) instead of (height, width, C).
    """
    found = {
        name.replace("embeds.proj.", "patch_embed.proj.").removeprefix("embeds."): t for name, t in tensors.items()
    }
    if found.keys() == tensors.keys():
        return tensors
    if (table := found.get("pos_embed")) is not None and table.ndim == 4:
        found["pos_embed"] = table.flatten(1, 2)
    kernel = found.get("patch_embed.proj.weight")
    if kernel is not None and kernel.ndim == 2:
        pixels = kernel.shape[1]
        channels = next((n for n in (3, 1) if pixels % n == 0 and math.isqrt(pixels // n) ** 2 == pixels // n), None)
        if channels is None:
            raise ConfigError(f"its patches of {pixels} numbers are no squares of 3 or 1 channels: give others")
        side = math.isqrt(pixels // channels)
        found["patch_embed.proj.weight"] = kernel.unflatten(1, (side, side, channels)).permute(0, 3, 1, 2)
    return found


def _check_positions(model: Any) -> None:
    """Refuse a NaFlexVit of timm's that resamples its positions as vit.py does not: no tensor would show it.

    Raises:
        ConfigError: naming its option.
    """
    from timm.models.naflexvit import NaFlexVitCfg

    for option, value in vars(NaFlexVitCfg()).items():
        is_way = option.startswith("pos_embed_") and option != "pos_embed_grid_size"
        if is_way and (other := getattr(model.embeds, option)) != value:
            raise ConfigError(f"its {option} is {other}, vit.py resamples positions with {value}: give other weights")


def _naflex_grid(tensors: dict[str, Tensor]) -> tuple[int, int] | None:
    """Rows and columns of the positions of timm's NaFlexVit; None: it is none, or has no such table."""
    table = next((tensor for name, tensor in tensors.items() if name.endswith("embeds.pos_embed")), None)
    return None if table is None or table.ndim != 4 else (table.shape[1], table.shape[2])


def pretrained(name: str) -> Any:
    """A model of timm's, with its trained weights.

    Raises:
        ConfigError: timm has no such model or weights, or the hub is out of reach.
    """
    check_pretrained(name)
    return built_by_timm(name)


def check_pretrained(name: str) -> None:
    """Refuse a name of which timm has no model, or no weights.

    Raises:
        ConfigError: with the nearest name, or what weights there are.
    """
    from timm.models import get_arch_name, is_model_pretrained  # takes a second, for few runs

    if not timm.is_model(name):
        similar = difflib.get_close_matches(name, timm.list_models() + timm.list_pretrained(), n=1)
        raise ConfigError(
            "timm has no such model: " + (f"did you mean {similar[0]}?" if similar else "see timm.list_models('vit*')")
        )
    if not is_model_pretrained(name):
        tags = timm.list_pretrained(f"{get_arch_name(name)}.*")
        raise ConfigError(
            f"timm has no such weights: {f'use one of {first_few(tags)}' if tags else 'use another model'}"
        )


def built_by_timm(name: str) -> Any:
    """A model of timm's, of any kind, of the hub or of a folder, with its trained weights.

    Raises:
        ConfigError: it is not there, or damaged, or the hub is out of reach.
    """
    # timm draws weights before it loads others: not from the run's own generator.
    with torch.random.fork_rng(devices=[]), _downloading("it"):
        return timm.create_model(name, pretrained=True)


def _source_of_timms(model: Any, source: str) -> Source:
    from timm.models.eva import Eva
    from timm.models.naflexvit import NaFlexVit
    from timm.models.vision_transformer import VisionTransformer as TimmViT
    from timm.models.vision_transformer_relpos import VisionTransformerRelPos

    if not isinstance(model, TimmViT | Eva | NaFlexVit | VisionTransformerRelPos):
        raise ConfigError(
            f"it is timm's {type(model).__name__}: give a VisionTransformer or an Eva, timm.list_models('vit*')"
        )
    if isinstance(model, NaFlexVit):
        _check_positions(model)
    found = cast(dict[str, Any], model.pretrained_cfg)  # create_model puts it on the module
    classes = tuple(found.get("label_names") or ())
    return dataclasses.replace(_source_of(model, source), classes=classes, data=_settings(found))


def _read_hub_folder(source: str) -> Source:
    """A folder of the hub, of Hugging Face's ViT or of timm, in the cache that their libraries use, too."""
    import huggingface_hub  # with an HTTP client, for few runs
    from huggingface_hub.errors import EntryNotFoundError

    with _downloading("there is no such file or folder, and of the Hugging Face hub it"):
        folder = Path(huggingface_hub.hf_hub_download(source, "config.json")).parent
        try:
            huggingface_hub.hf_hub_download(source, WEIGHT_FILES[0])
        except EntryNotFoundError:
            huggingface_hub.hf_hub_download(source, WEIGHT_FILES[1])
        with contextlib.suppress(EntryNotFoundError):
            huggingface_hub.hf_hub_download(source, "preprocessor_config.json")
    return _read_folder(source, folder)


@contextlib.contextmanager
def _downloading(what: str) -> Iterator[None]:
    """`reading`, of the hub, whose library would say a line or two for each time that it tries again."""
    library = logging.getLogger("huggingface_hub")
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        with reading(what, advice="get it on a network, or give a file or a folder"):
            yield
    finally:
        library.setLevel(level)


def _source_of(model: Any, source: str) -> Source:
    block = model.blocks[0]
    options: dict[str, Any] = {
        "num_heads": next(module.num_heads for module in block.modules() if hasattr(module, "num_heads")),
        "block_fn": _block_fn("ResPost" in type(block).__name__ or "PostNorm" in type(block).__name__),
    }
    if (rope := getattr(model, "rope", None)) is not None:
        options["rope_type"] = ROPE_TYPES.get(type(rope).__name__, type(rope).__name__)
        ours = {"grid_offset": "rope_grid_offset", "grid_indexing": "rope_grid_indexing"}
        ours |= {"temperature": "rope_temperature", "rotate_half": "rope_rotate_half"}
        options |= {key: getattr(rope, name) for name, key in ours.items() if hasattr(rope, name)}
        if hasattr(rope, "ref_feat_shape"):
            options["ref_feat_shape"] = rope.ref_feat_shape
    tensors = model.state_dict()
    grid = _naflex_grid(tensors) if "embeds.proj.weight" in tensors else model.patch_embed.grid_size
    return Source(from_naflex(tensors), grid, source, options)


def _block_fn(norms_after: Any) -> str:
    """`Block` stands for all but ResPostBlock here: that one has `Block`'s tensors, others have their own."""
    return "ResPostBlock" if norms_after else "Block"


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
            is unknown; or the source has another number of heads, which no shape shows, or a number that is none.
    """
    with _about(source.description):
        _compare_options(source, cfg)
        tensors = dict(source.weights)
        fresh: list[str] = []
        rows = next((tensors[name].shape[:1] for name in HEAD if name in tensors), ())
        known = bool(source.classes and classes)
        hidden = tensors[HIDDEN[0]].shape[0] if HIDDEN[0] in tensors else None
        if hidden != cfg.representation_size:
            fresh = [name for name in (*HIDDEN, *HEAD) if name in wanted]
            tensors = {name: tensor for name, tensor in tensors.items() if name not in (*HIDDEN, *HEAD)}
        elif tuple(rows) != (cfg.num_classes,) or (known and {*source.classes} != {*classes}):
            fresh = [name for name in HEAD if name in wanted]
            tensors = {name: tensor for name, tensor in tensors.items() if name not in HEAD}
        elif known and source.classes != classes:
            order = [source.classes.index(name) for name in classes]
            order += range(len(classes), cfg.num_classes)  # outputs that no class has
            tensors |= {name: tensors[name][order] for name in HEAD if name in tensors}
            logger.info("%s has the classes in another order: its head's rows are put in ours", source.description)
        _compare_shapes(tensors, {name: shape for name, shape in wanted.items() if name not in fresh})
        tensors = {name: tensor.to(torch.float32).contiguous() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if broken := int((~torch.isfinite(tensor)).sum()):
                raise ConfigError(
                    f"{broken} of the {tensor.numel()} numbers in {name} are NaN or infinite: give other weights, of "
                    "before that training broke down"
                )
        kernel = tensors["patch_embed.proj.weight"]
        tensors["patch_embed.proj.weight"] = resample_patch_embed(kernel, list(wanted["patch_embed.proj.weight"][2:]))
        if "pos_embed" in tensors:
            tensors["pos_embed"] = resample_positions(tensors["pos_embed"], source.grid, cfg)
        for name, tensor in tensors.items():
            if name.endswith(TABLE):
                tensors[name] = _resample_table(tensor, source.grid, cfg)
        return tensors, fresh


def _compare_options(source: Source, cfg: ModelConfig) -> None:
    # Trained frequencies are among the weights, and without rotary positions their options say nothing.
    idle = () if {source.options.get("rope_type"), cfg.rope_type} <= {"cat", "dinov3"} else ROPE_ONLY
    for key, theirs in source.options.items():
        ours = getattr(cfg, key)
        if key == "ref_feat_shape":
            theirs, ours = (size and pair(size if isinstance(size, int) else tuple(size)) for size in (theirs, ours))
        if theirs == ours or key in idle or (key == "block_fn" and "ResPostBlock" not in (theirs, ours)):
            continue
        if key == "num_heads":
            raise ConfigError(
                f"it was trained with {theirs} heads, model.num_heads={ours}: set model.num_heads={theirs}"
            )
        if key not in TELL:
            text = json.dumps(theirs).replace(" ", "").strip('"')
            raise ConfigError(f"it was trained with model.{key}={text}, this run has {ours}: set model.{key}={text}")
        else:
            logger.warning("%s was trained with model.%s=%s, this run has %s", source.description, key, theirs, ours)


def _compare_shapes(tensors: dict[str, Tensor], wanted: dict[str, torch.Size]) -> None:
    """Refuse what does not match by name and shape, but for the lengths that are resampled.

    Raises:
        ConfigError: how many are missing, unexpected and of another shape, and the first of each.
    """

    def fixed(name: str, shape: torch.Size) -> tuple[int | None, ...]:
        resampled = {"pos_embed": (1,), "patch_embed.proj.weight": (2, 3)}.get(
            name, (0,) if name.endswith(TABLE) else ()
        )
        return tuple(None if axis in resampled else length for axis, length in enumerate(shape))

    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted]
    reshaped = [
        f"{name} {list(tensors[name].shape)} for {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and fixed(name, tensors[name].shape) != fixed(name, shape)
    ]
    found = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    if problems := [f"{len(names)} {what} ({first_few(names)})" for what, names in found.items() if names]:
        raise ConfigError(
            f"its {len(tensors)} tensors do not fit the model: {'; '.join(problems)}; set the model.* options that it "
            "was trained with"
        )


def resample_positions(
    pos_embed: Tensor, grid: tuple[int, int] | None, cfg: ModelConfig, *, interpolation: str = "bicubic"
) -> Tensor:
    """(1, rows, D) to (1, the model's rows, D): class and register tokens' rows stay, the grid's are resampled.

    Args:
        pos_embed: of a source that has the model's class and register tokens.
        grid: that the embeddings were made for; None: the model's if the number of rows is, else a square.
        cfg: of the model.
        interpolation: timm's default, or "bilinear", which makes no number that lies outside of the given ones.

    Raises:
        ConfigError: the grid is unknown, or not that of this many rows.
    """
    height, width = (side // patch for side, patch in zip(pair(cfg.img_size), pair(cfg.patch_size), strict=True))
    tokens = cfg.num_prefix_tokens()
    prefix = 0 if cfg.no_embed_class else tokens
    rows = pos_embed.shape[1]

    def grid_of(patches: int) -> tuple[int, int] | None:
        side = math.isqrt(max(patches, 0))
        guesses = [(height, width), (side, side)] if grid is None else [grid]
        return next((guess for guess in guesses if math.prod(guess) == patches > 0), None)

    if old := grid_of(rows - prefix):
        # timm leaves equal numbers of rows alone only if the grids are equal, too: 2 x 8 becomes 4 x 4.
        options = {"num_prefix_tokens": prefix, "interpolation": interpolation}
        return resample_abs_pos_embed(pos_embed, [height, width], list(old), **options)
    found = f"its pos_embed has {rows} rows, {prefix} of them for tokens, and {rows - prefix} patches are"
    option = f"set model.no_embed_class={str(not cfg.no_embed_class).lower()}"
    others_fit = tokens and grid_of(rows - (tokens - prefix))
    if grid is not None:
        advice = option if others_fit else "give the config.json of these weights"
        raise ConfigError(f"{found} not the {grid[0]} x {grid[1]} of its config: {advice}")
    advice = "give a folder whose config.json tells the image size" + (f", or {option}" if others_fit else "")
    raise ConfigError(f"{found} neither this model's {height} x {width} nor a square: {advice}")


def _resample_table(table: Tensor, grid: tuple[int, int] | None, cfg: ModelConfig) -> Tensor:
    """A table of relative positions (distances, heads) for the model's grid, as timm does it.

    Args:
        table: of a source that has a class token if the model has one.
        grid: that the table was made for; None: the model's if the number of rows is, else a square.
        cfg: of the model.

    Raises:
        ConfigError: it was made for no square, of which timm 1.0.29 knows nothing.
    """
    new, extra = cfg.grid_size(), 3 * cfg.class_token
    rows = math.prod(2 * side - 1 for side in new) + extra
    if grid == new or (grid is None and len(table) == rows):
        return table
    side = math.isqrt(max(len(table) - extra, 0))
    if side**2 != len(table) - extra or (grid is not None and grid[0] != grid[1]):
        raise ConfigError(
            f"its relative positions, a table of {len(table)} rows, are for no square of patches, and cannot be "
            f"resampled to {new[0]} x {new[1]}: set model.img_size to what it was trained with"
        )
    return resize_rel_pos_bias_table(table, new, (rows, table.shape[1]))


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
