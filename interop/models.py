"""Whole models, built by timm: what infer.py and the tools ask, and the teacher that a student learns from."""

import json
import tempfile
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError

from interop import weights_in, weights_out
from runtime.step_folders import newest_step
from schema import ConfigError

TimmModel = Any  # an nn.Module with timm's pretrained_cfg and num_classes


def load_model(source: Path | str) -> tuple[TimmModel, dict[str, Any]]:
    """The model of an exported folder, built by timm, or of one of our checkpoints, and the folder's config.json.

    Of timm:<model name> and hf-hub:<owner>/<name> it is timm's own, of any kind, without a config.json.

    Raises:
        ConfigError: it is none of these.
    """
    name, source = str(source), Path(source)
    if name.startswith(("timm:", "hf-hub:")):
        try:
            is_timms = name.startswith("timm:")
            model = weights_in.pretrained(name.removeprefix("timm:")) if is_timms else weights_in.built_by_timm(name)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        return model.eval(), {}
    if (step := newest_step(source)) is not None:
        with tempfile.TemporaryDirectory() as folder:
            weights_out.export_timm(step, Path(folder) / "model")
            return load_model(Path(folder) / "model")
    try:
        config = json.loads((source / "config.json").read_text())
        with torch.random.fork_rng(devices=[]):  # timm draws weights before it loads others
            model = timm.create_model(f"local-dir:{source}", pretrained=True)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{source} is no model of ours or timm's ({reason}): give a final_model") from error
    return model.eval(), config
