"""Exports: a folder that timm or Hugging Face's transformers load, from one of our step_XXXXXXXX folders."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from timm.data.imagenet_info import ImageNetInfo
from torch import Tensor

from interop import hugging_face
from interop.model_card import model_card
from interop.step_weights import StepWeights, read_state
from runtime.files import write_json
from runtime.parameter_names import HUGGING_FACE_BLOCK, HUGGING_FACE_REST
from schema import EVA_ONLY, REL_POS, ROPE_ONLY, WITH_REL_POS, ConfigError, no_architecture, pair, timm_architecture

# Arguments of the model that timm lacks, or means otherwise; num_classes has a place of its own in timm's files.
OURS_ALONE = {"norm_eps", "transformer_engine", "drop_path_schedule", "pos_embed", "representation_size"}
OURS_ALONE |= {"init_head_bias", "freeze", "fused_attn", "implementation", "num_classes", "distilled"}
# What is told by the choice of timm's model (schema.timm_architecture), and what only one of its two classes takes.
BY_ARCHITECTURE = {"norm_layer", "mlp_layer", "act_layer"}
EVA_NAMES = {  # ours -> that of timm's Eva
    "reg_tokens": "num_reg_tokens",
    "pre_norm": "use_pre_transformer_norm",
    "scale_mlp_norm": "scale_mlp",
    "scale_attn_norm": "scale_attn_inner",
}


def export_timm(step_folder: Path, target: Path, *, raw: bool = False) -> str:
    """Write a step folder's weights as timm reads them: model.safetensors, the config.json it builds from, README.md.

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
    state = read_state(step_folder, "model", "classes", "data")
    if timm_architecture(state["model"]) is None:
        raise ConfigError(no_architecture(state["model"]))
    if size := state["model"].get("representation_size"):
        raise ConfigError(
            f"model.representation_size={size} cannot be exported: timm's ViTs have a linear head; fine-tune with "
            "checkpoint.init_from and model.representation_size=null"
        )
    weights = StepWeights.of(step_folder, raw=raw)
    config = _timm_config(state)
    _write_folder(target, weights, dict, {"config.json": config, "README.md": model_card(state, config, weights)})
    return weights.kind


def timm_arguments(model: dict[str, Any]) -> dict[str, Any]:
    """A config's model as arguments of timm's VisionTransformer, or of its Eva, but num_classes."""
    known = {key: value for key, value in model.items() if key not in OURS_ALONE}
    if model["rel_pos_type"] is not None:
        fc_norm = model["fc_norm"] if model["fc_norm"] is not None else model["global_pool"] == "avg"
        left_out = {*WITH_REL_POS, *EVA_ONLY, *ROPE_ONLY, "norm_layer", "attn_type", "rope_type", "block_fn"}
        left_out.add("no_embed_class")
        return {key: value for key, value in known.items() if key not in left_out} | {"fc_norm": fc_norm}
    known = {key: value for key, value in known.items() if key not in {"block_fn", "attn_layer", *REL_POS}}
    if model["rope_type"] is None and model["attn_type"] == "rope":
        is_diff = model["attn_layer"] == "diff"
        names_norm = model["norm_layer"] == "rmsnorm" or model["block_fn"] != "Block" or is_diff
        more = {"norm_layer": model["norm_layer"]} if names_norm else {}
        more |= {"attn_layer": "diff"} if is_diff else {}
        positions = {"pos_embed": "none"} if model["pos_embed"] == "none" else {}
        left_out = {"norm_layer", "mlp_layer", "attn_type", *EVA_ONLY, *ROPE_ONLY, "rope_type"}
        return {key: value for key, value in known.items() if key not in left_out} | more | positions
    at_the_end = model["fc_norm"] if model["fc_norm"] is not None else model["global_pool"] == "avg"
    left_out = {*BY_ARCHITECTURE, "final_norm", "fc_norm", "proj_bias", "rope_type"}
    return {EVA_NAMES.get(key, key): value for key, value in known.items() if key not in left_out} | {
        "swiglu_mlp": model["mlp_layer"] != "mlp",
        "use_post_norm": model["block_fn"] == "ResPostBlock",
        "use_abs_pos_emb": model["pos_embed"] != "none",
        "use_rot_pos_emb": model["rope_type"] is not None,
        "rope_type": model["rope_type"] or "cat",
        "rope_rescale_coords": None,  # Sapiens2's augmentation of positions, which we have not
        "use_fc_norm": model["final_norm"] and at_the_end,
        "use_post_transformer_norm": model["final_norm"] and not at_the_end,
    }


def _timm_config(state: dict[str, Any]) -> dict[str, Any]:
    """What timm's `local-dir:` loader reads: architecture, the arguments that differ, and the evaluation's settings."""
    model, data = state["model"], state["data"]
    packing = data.get("packing")
    # A model of images in their own aspect ratio takes them there, too, one size after the other.
    sizes = {"dynamic_img_size": True} if packing else {}
    return {
        "architecture": timm_architecture(model),  # timm's entry point; every argument is given below
        "num_classes": model["num_classes"],
        "num_features": model["embed_dim"],
        "global_pool": model["global_pool"],
        "model_args": timm_arguments(model) | sizes,
        "pretrained_cfg": {
            "input_size": [model["in_chans"], *pair(model["img_size"])],
            "num_classes": model["num_classes"],
            "interpolation": data["interpolation"],
            "crop_pct": data["crop_pct"],
            "crop_mode": "center",
            "mean": _each_channel(data["mean"], model),
            "std": _each_channel(data["std"], model),
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if model["distilled"] else "head",
            **({"label_names": state["classes"]} if state["classes"] else {}),
            **({"label_descriptions": names} if (names := descriptions(state["classes"])) else {}),
        },
        "decoding": {key: data[key] for key in ("exif_orientation", "max_pixels")},  # infer.py's; timm has no such
        **({"packing": packing} if packing else {}),  # likewise
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
    where the image is 3, 7, 11, ... pixels larger than the crop: theirs lies one pixel further left or up.

    Args:
        step_folder: of ours.
        target: folder that is replaced.
        raw: the weights themselves, also where there is a moving average of them.

    Returns:
        What was written: "EMA weights" or "weights".

    Raises:
        ConfigError: the checkpoint is damaged, or Hugging Face's ViT cannot express one of the model's options.
    """
    state = read_state(step_folder, "model", "classes", "data")
    model = state["model"]
    for key, (supports, why) in hugging_face.LIMITS.items():
        if not supports(model.get(key)):
            value = json.dumps(model[key]).strip('"')
            raise ConfigError(f"model.{key}={value} cannot be exported to Hugging Face: {why}; export to timm")
    weights = StepWeights.of(step_folder, raw=raw)
    files = {"config.json": _hugging_face_config(state), "preprocessor_config.json": _hugging_face_processor(state)}
    _write_folder(target, weights, _to_hugging_face, files)
    return weights.kind


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
        "hidden_act": hugging_face.ACTIVATIONS[model["act_layer"]],
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
        "do_convert_rgb": model["in_chans"] == 3,  # it has no way to grey: images must be grey already for one channel
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


def _each_channel(values: list[float], model: dict[str, Any]) -> list[float]:
    """One value a channel, of one for all or of as many as there are channels."""
    return list(values) * (model["in_chans"] // len(values))


def _write_folder(
    target: Path, weights: StepWeights, convert: Callable[[dict[str, Tensor]], dict[str, Tensor]], files: dict[str, Any]
) -> None:
    """model.safetensors and small files, in a folder that is whole or not there; a block at a time is in memory.

    Args:
        target: folder that is replaced.
        weights: what is written.
        convert: from timm's names and tensors to those of the file, of all or of some.
        files: name -> content of the other files: text, or what becomes JSON.
    """
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_safetensors(temporary / "model.safetensors", weights, convert)
        for name, content in files.items():
            if isinstance(content, str):
                (temporary / name).write_text(content)
            else:
                write_json(temporary / name, content)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        raise


def _write_safetensors(
    path: Path, weights: StepWeights, convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """A file of float32 tensors, block by block; the library's writer wants all at once.

    The form (https://huggingface.co/docs/safetensors): the length of a JSON header, 8 bytes; the header, in which each
    tensor has its place in what follows; the tensors' bytes, little-endian, without gaps.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in sorted(convert(weights.on_meta()).items()):
        begin, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(tensors: dict[str, Tensor]) -> None:  # a function, so that a block is gone before the next is read
        for name, tensor in tensors.items():
            begin, _ = header[name]["data_offsets"]
            file.seek(8 + len(text) + begin)
            file.write(tensor.to(torch.float32).contiguous().numpy().astype("<f4", copy=False).data)

    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for names in weights.blocks():
            write(convert(weights.read(names)))
