"""README.md of an exported folder: a model card in Hugging Face's form, of what the checkpoint knows and nothing else.

Form: https://huggingface.co/docs/hub/model-cards. A licence, a data set's name and what a model is fit for are not
known here; who publishes the folder adds them.
"""

import json
from typing import Any

from interop.step_weights import StepWeights
from schema import pair

USE = """\
```python
import timm

model = timm.create_model("local-dir:<this folder>", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```

Or, with the code that it was trained with: `python infer.py <this folder> image.jpg`
"""


def model_card(state: dict[str, Any], config: dict[str, Any], weights: StepWeights) -> str:
    """The card's text.

    Args:
        state: of the step folder; older ones have fewer facts, and so has the card.
        config: the config.json beside it.
        weights: those that are exported.
    """
    accuracy = _accuracy(state, weights)
    head = ["library_name: timm", "pipeline_tag: image-classification", "tags:", "- image-classification", "- timm"]
    if "top1" in accuracy:
        head += ["metrics:", "- accuracy"]
    sections = {
        "Model": _table(_model(state, weights)),
        "Images": _table(_images(config)),
        "Training": _table(_training(state)),
        "Accuracy": _in_words(accuracy, state) if accuracy else "Not known of these weights.\n",
        "Use": USE,
    }
    body = "".join(f"\n## {title}\n\n{text}" for title, text in sections.items())
    return "\n".join(["---", *head, "---", "", "# Vision Transformer for image classification", body])


def _table(rows: dict[str, str]) -> str:
    return "".join(["| | |\n| --- | --- |\n", *(f"| {name} | {value} |\n" for name, value in rows.items())])


def _model(state: dict[str, Any], weights: StepWeights) -> dict[str, str]:
    model = state["model"]
    parameters = sum(tensor.numel() for tensor in weights.on_meta().values())
    kind = "moving average (EMA) of the weights" if weights.part == "ema" else "weights"
    return {
        "architecture": f"timm's `VisionTransformer{'Distilled' if model.get('distilled') else ''}`; `config.json` has "
        "every argument",
        "width, depth, heads": f"{model['embed_dim']}, {model['depth']}, {model['num_heads']}",
        "patches": "{} x {} pixels".format(*pair(model["patch_size"])),
        "pooling": f"`{model['global_pool']}`",
        "classes": f"{model['num_classes']}",
        "parameters": f"{parameters:,}",
        "weights": f"{kind} at step {state['step']}, float32" if "step" in state else f"{kind}, float32",
    }


def _images(config: dict[str, Any]) -> dict[str, str]:
    found = config["pretrained_cfg"]
    return {
        "size": "{1} x {2} pixels, channels: {0}".format(*found["input_size"]),
        "evaluation": f"{found['interpolation']} resize, {_cut(config)}",
        "mean, standard deviation": f"{found['mean']}, {found['std']}",
    }


def _cut(config: dict[str, Any]) -> str:
    if packing := config.get("packing"):
        return f"whole, in its own aspect ratio, at most {packing['patches_per_image']} patches (`data.packing`)"
    return f"centre crop, `crop_pct={config['pretrained_cfg']['crop_pct']}`"


def _training(state: dict[str, Any]) -> dict[str, str]:
    stream, recipe = state.get("stream"), state.get("recipe")
    rows = {}
    if "script" in state and "world_size" in state:
        rows["script"] = f"`{state['script']}`, processes: {state['world_size']}"
    if "step" in state:
        rows["steps"] = f"{state['step']:,}"
    if stream:
        passes = state["samples"] / stream["num_train_images"]
        rows["images"] = f"{state['samples']:,} in all, {passes:.4g} epochs of {stream['num_train_images']:,}"
        rows["global batch"], rows["seed"] = f"{stream['global_batch_size']:,}", f"{stream['seed']}"
    if recipe:
        rows["started from"] = _start(recipe["checkpoint.init_from"])
        rows |= {
            name: _settings(_told_of(value) if name == "distillation" else value)
            for name, value in recipe.items()
            if name != "checkpoint.init_from"
        }
    elif "optimizer" in state:
        rows["optimizer"] = state["optimizer"]
    return rows


def _told_of(distillation: dict[str, Any]) -> dict[str, Any]:
    """Of the section `distillation` what says how the model came to be."""
    kind, teacher = distillation["kind"], distillation["teacher"]
    if kind == "none":
        return {"kind": kind}
    is_public = teacher.startswith(("timm:", "hf-hub:"))  # a path says more of a machine than of a model
    keys = ["kind", *(["teacher"] if is_public else []), "alpha", *(["tau"] if kind == "soft" else [])]
    return {key: distillation[key] for key in keys}


def _start(init_from: str | None) -> str:
    if init_from is None:
        return "random weights"
    # A path says more of a machine than of a model.
    return f"`{init_from}`" if init_from.startswith(("timm:", "hf-hub:")) else "other weights (`checkpoint.init_from`)"


def _settings(value: Any) -> str:
    """A key's value, or those of a section's keys that have one."""
    if not isinstance(value, dict):
        return f"`{json.dumps(value)}`"
    return ", ".join(f"`{key}={json.dumps(each)}`" for key, each in value.items() if each is not None)


def _accuracy(state: dict[str, Any], weights: StepWeights) -> dict[str, float]:
    """What the evaluation of the step found of these weights: top1, top5, loss and images, what there is of them."""
    scores: dict[str, Any] = state.get("scores") or {}
    if not scores and (best := state.get("best")) and best["step"] == state["step"]:
        scores = {best["metric"]: best["value"]}  # of a checkpoint that has no scores of its own
    prefix = "val/ema_" if weights.part == "ema" else "val/"
    found = {key: scores.get(f"{prefix}{key}") for key in ("top1", "top5", "loss")}
    found = {key: value for key, value in found.items() if value is not None}
    return found | ({"images": scores["val/images"]} if found and "val/images" in scores else {})


def _in_words(accuracy: dict[str, float], state: dict[str, Any]) -> str:
    names = {"top1": "top-1", "top5": "top-5", "loss": "cross-entropy"}
    values = ", ".join(f"{names[key]} {value:.4f}" for key, value in accuracy.items() if key in names)
    of = f" on {accuracy['images']:,} validation images" if "images" in accuracy else " in validation"
    return f"{values}{of}, by the run's own evaluation at step {state['step']}.\n"
