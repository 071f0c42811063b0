"""Save, resume, prune, export. A checkpoint is complete or not there.

    <ckpt_dir>/step_00000100/      torch.distributed.checkpoint (DCP) files: tensors, and .metadata
                state.json         step, run id, model and FP8 config, class names: plain JSON
    <ckpt_dir>/best.json           step and value of the best validation metric; pruning spares that step
    <ckpt_dir>/final_model/        model.safetensors with timm's names, config.json that timm builds from

One key space for all strategies: `model.<timm name>` and `optim.<timm name>.<exp_avg | exp_avg_sq | step>`; with FP8's
delayed scaling also `fp8.<layer>.<scale | amax_history>_<fwd | bwd>`, which a run with other settings does without. The
tensors handed to DCP are the live ones (DTensors where sharded), so a load writes straight into them, whatever strategy
and world size wrote the files. Hyper-parameters come from the config, never from a checkpoint.
"""

from schema import Config, ConfigError, pair

import dataclasses
import json
import logging
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from distributed import Session, set_status, to_local, to_plain, write_json
from imagenet_dataset import sizes
from vit import timm_name

logger = logging.getLogger(__name__)
STEP_FOLDER = re.compile(r"step_(\d{8,})")
# Options of the model that change no weight and no logit in evaluation: a resumed run may change them.
FREE_OPTIONS = {f"{where}drop_rate" for where in ("", "pos_", "patch_", "proj_", "attn_")}
FREE_OPTIONS |= {"drop_path_rate", "transformer_engine"}


class TrainState:
    """The tensors of a run: weights under timm's names, the optimizer's state of each, FP8's scales."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaling: dict[str, torch.Tensor],
        *,
        after_load: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes the parameters as they are now, wrapped and sharded; they must stay the same objects.

        Args:
            model: the wrapped model.
            optimizer: with its state in being.
            scaling: the state of FP8's delayed scaling, the same on every rank; empty without.
            after_load: called once the weights were written, for strategies that compute with copies of them.
        """
        self.weights = {timm_name(name): parameter for name, parameter in model.named_parameters()}
        self.optimizer = optimizer
        self.scaling = scaling
        self.after_load = after_load

    def tensors(self, step: int) -> dict[str, Any]:
        """The live tensors, nested as DCP takes them."""
        states = {name: self.optimizer.state[weight] for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            if to_local(weight).numel() == 0:
                # Megatron-FSDP gives an empty shard no gradient, so the optimizer skips it and its counter stands
                # still; the counter is one for all ranks, and DCP takes any rank's.
                states[name]["step"].fill_(step)
        return {"model": self.weights, "optim": states} | ({"fp8": self.scaling} if self.scaling else {})


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where a run goes on from."""

    step: int
    run_id: str  # the same over resumes
    best: dict[str, Any] | None  # {"step", "metric", "value"} of the best validation so far


def restore(state: TrainState, cfg: Config, session: Session) -> Resumed:
    """Load the newest complete checkpoint into `state`; without one, or with resuming off, start at step 0.

    All ranks load what rank 0 found.

    Raises:
        ConfigError: the checkpoint is of another model, another class list or another optimizer.
    """
    found: list[Any] = [None]
    if session.is_main:
        found = [_find(cfg)]
    dist.broadcast_object_list(found)
    folder, run_id, best = found[0]
    if folder is None:
        return Resumed(0, run_id, None)

    saved = json.loads((folder / "state.json").read_text())
    tensors = state.tensors(saved["step"])
    _check_same(saved, tensors, folder, cfg)
    if "fp8" in tensors and not _has_scaling(saved, state.scaling, folder, cfg):
        del tensors["fp8"]
        logger.warning("%s has no scales for this FP8 recipe: they are found anew in the first steps", folder)
    dcp.load(tensors, checkpoint_id=folder)
    state.after_load()
    logger.info("resumed from %s (step %d)", folder, saved["step"])
    return Resumed(saved["step"], saved["run_id"], best)


def _find(cfg: Config) -> tuple[Path | None, str, dict[str, Any] | None]:
    """Rank 0's decision: the folder to resume from, the id of the run, the best result so far."""
    if cfg.checkpoint.ckpt_dir is not None:
        ckpt_dir = Path(cfg.checkpoint.ckpt_dir)
        if not cfg.checkpoint.resume_from_checkpoint:
            _set_aside(ckpt_dir)
        elif complete := _complete_checkpoints(ckpt_dir, warn=True):
            folder = complete[max(complete)]
            return folder, json.loads((folder / "state.json").read_text())["run_id"], _read_best(ckpt_dir)
    return None, uuid.uuid4().hex[:12], None


def _check_same(saved: dict[str, Any], tensors: dict[str, Any], folder: Path, cfg: Config) -> None:
    """Refuse a checkpoint by the name of the first difference. DCP alone would ignore keys that the model lacks."""
    advice = "use that config, another output_dir, or checkpoint.resume_from_checkpoint=false"
    for key, value in to_plain(cfg)["model"].items():
        if key not in FREE_OPTIONS and saved["model"].get(key) != value:
            raise ConfigError(f"{folder} was written with model.{key}={saved['model'].get(key)}, not {value}: {advice}")
    if saved["classes"] != list(sizes(cfg)[2]):
        raise ConfigError(f"{folder} was written with another list of classes than data.path={cfg.data.path}: {advice}")
    stored = {key: shape for key, shape in _stored_shapes(folder).items() if not key.startswith("fp8.")}
    wanted = {f"model.{name}": tuple(weight.shape) for name, weight in tensors["model"].items()}
    for name, entries in tensors["optim"].items():
        wanted |= {f"optim.{name}.{key}": tuple(value.shape) for key, value in entries.items()}
    for key in sorted(stored.keys() | wanted.keys()):
        if stored.get(key) != wanted.get(key):
            raise ConfigError(f"{folder}: {key} is {stored.get(key)} there and {wanted.get(key)} in this run: {advice}")


def _has_scaling(saved: dict[str, Any], scaling: dict[str, torch.Tensor], folder: Path, cfg: Config) -> bool:
    """Whether a checkpoint holds FP8's scales for the very layers and recipe of this run."""
    stored = {key: shape for key, shape in _stored_shapes(folder).items() if key.startswith("fp8.")}
    wanted = {f"fp8.{name}": tuple(tensor.shape) for name, tensor in scaling.items()}
    then, now = saved["fp8_config"], to_plain(cfg)["fp8_config"]
    return stored == wanted and all(then[key] == now[key] for key in ("fp8_recipe", "fp8_format", "fp8_recipe_kwargs"))


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: tuple(entry.size) for key, entry in metadata.items()}


def save(state: TrainState, cfg: Config, session: Session, *, step: int, run_id: str) -> None:
    """Write step_<step> on all ranks: under a temporary name, renamed by rank 0 once every rank has written."""
    ckpt_dir = Path(cfg.checkpoint.ckpt_dir)
    final = ckpt_dir / f"step_{step:08d}"
    temporary = final.with_suffix(".tmp")
    if session.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    dcp.save(state.tensors(step), checkpoint_id=temporary)
    if session.is_main:
        content = {
            "step": step,
            "run_id": run_id,
            "samples": step * cfg.global_batch_size,
            "model": to_plain(cfg)["model"],
            "fp8_config": to_plain(cfg)["fp8_config"],
            "classes": list(sizes(cfg)[2]),
        }
        write_json(temporary / "state.json", content)
        os.replace(temporary, final)
        set_status(session, "running", step)
    dist.barrier()


def prune(cfg: Config, session: Session, best: dict[str, Any] | None) -> None:
    """Delete, on rank 0, all but the `max_checkpoints` newest complete checkpoints and the best one."""
    if not session.is_main or cfg.checkpoint.max_checkpoints is None:
        return
    complete = _complete_checkpoints(Path(cfg.checkpoint.ckpt_dir))
    for step in sorted(complete)[: -cfg.checkpoint.max_checkpoints]:
        if best and step == best["step"]:
            continue
        try:
            # Renamed first: half a deletion must not look like a checkpoint.
            doomed = complete[step].with_suffix(".tmp")
            os.replace(complete[step], doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            logger.warning("could not delete %s: %s", complete[step], error)


def _read_best(ckpt_dir: Path) -> dict[str, Any] | None:
    path = ckpt_dir / "best.json"
    return json.loads(path.read_text()) if path.exists() else None


def write_best(cfg: Config, session: Session, best: dict[str, Any]) -> None:
    """Write best.json: {"step", "metric", "value"}. The step's checkpoint must be complete."""
    if session.is_main:
        write_json(Path(cfg.checkpoint.ckpt_dir) / "best.json", best)


def _complete_checkpoints(ckpt_dir: Path, *, warn: bool = False) -> dict[int, Path]:
    """Step -> folder, for folders that were renamed to their final name and hold what a checkpoint holds."""
    complete = {}
    for folder in sorted(ckpt_dir.glob("step_*")) if ckpt_dir.is_dir() else ():
        match = STEP_FOLDER.fullmatch(folder.name)
        if match and (folder / ".metadata").is_file() and (folder / "state.json").is_file():
            complete[int(match[1])] = folder
        elif warn:
            logger.warning("skipping %s: not a complete checkpoint", folder)
    return complete


def _set_aside(ckpt_dir: Path) -> None:
    """A fresh start in a used folder: move the earlier run's checkpoints out of the way, lose none."""
    earlier = [*_complete_checkpoints(ckpt_dir).values(), *(p for p in [ckpt_dir / "best.json"] if p.exists())]
    if (ckpt_dir / "final_model").exists():
        earlier.append(ckpt_dir / "final_model")
    if not earlier:
        return
    number = 1 + sum(1 for _ in ckpt_dir.glob("earlier_*"))
    aside = ckpt_dir / f"earlier_{number:03d}"
    aside.mkdir()
    for path in earlier:
        path.rename(aside / path.name)
    logger.warning("checkpoint.resume_from_checkpoint=false: moved the earlier run's checkpoints to %s", aside)


def save_final_model(cfg: Config, *, replace: bool) -> None:
    """Write final_model/ from the newest complete checkpoint: weights only, no optimizer state is read, one process.

    Without `replace`, one that is there already stays as it is.
    """
    ckpt_dir = Path(cfg.checkpoint.ckpt_dir)
    if not replace and (ckpt_dir / "final_model").is_dir():
        return
    complete = _complete_checkpoints(ckpt_dir)
    export(complete[max(complete)], ckpt_dir / "final_model", cfg)


def export(folder: Path, target: Path, cfg: Config) -> None:
    """A DCP folder's weights as safetensors with timm's names, beside the config.json that timm builds from.

    `timm.create_model("local-dir:<target>", pretrained=True)` gives the trained model.
    """
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = {
        key.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if key.startswith("model.")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is: this is one process's work
        dcp.load({"model": weights}, checkpoint_id=folder, no_dist=True)

    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
    write_json(temporary / "config.json", timm_config(cfg))
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    logger.info("wrote %s from %s", target, folder.name)


def timm_config(cfg: Config) -> dict[str, Any]:
    """What timm's `local-dir:` loader reads: architecture, the arguments that differ, and the evaluation's settings."""
    model, data = to_plain(cfg)["model"], cfg.data
    del model["norm_eps"]  # timm's ViTs always use 1e-6; schema.py refuses to export another value
    del model["transformer_engine"]
    height, width = pair(data.image_size)
    channels = cfg.model.in_chans
    classes = list(sizes(cfg)[2])
    return {
        "architecture": "vit_base_patch16_224",  # timm's entry point; every argument is given below
        "num_classes": model.pop("num_classes"),
        "num_features": cfg.model.embed_dim,
        "global_pool": cfg.model.global_pool,
        "model_args": model,
        "pretrained_cfg": {
            "input_size": [channels, height, width],
            "num_classes": cfg.model.num_classes,
            "interpolation": data.interpolation,
            "crop_pct": data.crop_pct,
            "crop_mode": "center",
            "mean": list(data.mean) * (channels // len(data.mean)),
            "std": list(data.std) * (channels // len(data.std)),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            **({"label_names": classes} if classes else {}),
        },
    }
