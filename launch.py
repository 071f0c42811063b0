"""The way in: versions, signals, Slurm's variables, the config's composition, checks of the machine, exit codes.

`launch(main)` is what an entrypoint calls. It composes the YAML and the command line with Hydra, checks everything
that can be checked before a process group starts, and hands `main` a frozen `Config`: no OmegaConf object gets past
this file. A mistake is one line from rank 0 that names the key, the value and the fix; every rank exits with 2.

Import this module before torch: it refuses Python and package versions that are too old in one line, and in an
entrypoint it listens for signals from then on.
"""

import argparse
import contextlib
import difflib
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

from runtime import console, preemption

PROJECT_DIR = Path(__file__).resolve().parent
CONFIG_DIR = PROJECT_DIR / "config"
GROUPS = ("model", "data")  # the parts of a config that are files to choose from
CONFIG_NAME_FLAGS = ("--config-name", "-cn")
# Hydra's flags that take a value -> one for an example.
FLAGS_WITH_VALUE = {
    **dict.fromkeys(CONFIG_NAME_FLAGS, "vit_base_patch16_224"),
    **dict.fromkeys(("--config-path", "-cp", "--config-dir", "-cd"), "/my/configs"),
    **dict.fromkeys(("--cfg", "-c"), "job"),
    **dict.fromkeys(("--package", "-p"), "optimizer"),
    "--experimental-rerun": "config.pickle",
}


def exit_with(message: str, *, rank_variable: str | None = "RANK", code: int = 2) -> NoReturn:
    """Print one line from the process whose `rank_variable` is 0, or from the only one, and exit with `code` on all.

    With None every process speaks for itself.
    """
    if rank_variable is None or int(os.environ.get(rank_variable) or "0") == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        # torchrun ends the other ranks as soon as one exits, also a rank 0 that has not spoken yet: let it go first.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(10)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """The tools' command line: complains in one line, as the entrypoints do; its help is the module's docstring."""

    def __init__(self, description: str | None) -> None:
        console.never_raise()  # neither a path that is no UTF-8 nor a reader that has ended
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        exit_with(message)


def number(kind: type[int] | type[float], least: int, *, is_above: bool = False) -> Callable[[str], int | float]:
    """A type for argparse: a finite number, `least` or more, or with `is_above` more than that."""

    def parsed(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf or (is_above and value == least):
            whole = "a whole number, " if kind is int else ""
            bound = f"more than {least}" if is_above else f"{least} or more"
            raise argparse.ArgumentTypeError(f"{text}: give {whole}{bound}")
        return value

    return parsed


def check_versions(requirements: Path = PROJECT_DIR / "requirements.txt") -> None:
    """Exit with one line if Python or a package that training imports is missing or outside requirements.txt.

    Reads the packages' metadata, so that it works where importing the package would fail.
    """
    if sys.version_info < (3, 10):  # noqa: UP036  (pip's check is not always in between)
        exit_with(f"Python {sys.version.split()[0]} is too old: this recipe needs Python 3.10 or newer")
    from packaging.requirements import Requirement

    needed = {"torch", "torchvision", "timm", "hydra-core", "omegaconf", "pydantic", "megatron-fsdp"}
    for line in requirements.read_text().splitlines():
        if not (line := line.split("#")[0].strip()):
            continue
        requirement = Requirement(line)
        if requirement.name not in needed:
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            exit_with(f"{requirement.name} is not installed: pip install -r {requirements.name}")
        if not requirement.specifier.contains(found, prereleases=True):
            wanted = f"{requirement.name}{requirement.specifier}"
            exit_with(f"{requirement.name} {found} is installed, this recipe needs {wanted}: pip install '{wanted}'")


class _FoundNotRun(types.ModuleType):
    """timm or timm.data: its modules can be imported, and it runs itself when it is asked for anything else.

    `import timm.layers` would run both, and with them 500 modules of models, Hugging Face's client and its HTTP client:
    a second of every start, and a file system's answers for 800 files. A run of ours needs timm's layers alone.
    """

    def __getattr__(self, name: str) -> Any:
        # timm's utilities import wandb where it is installed, on every rank, and fail with it: let them find none.
        # None is documented: it makes `import wandb` an ImportError, which timm expects.
        if hides_wandb := "wandb" not in sys.modules:
            sys.modules["wandb"] = cast(Any, None)
        try:
            importlib.import_module("timm.models")  # first, as timm does it: its data package needs some of it
            if type(self) is _FoundNotRun:  # what was imported has not asked for it
                cast(Any, self).__class__ = types.ModuleType
                cast(Any, self.__spec__).loader.exec_module(self)
        finally:
            if hides_wandb:
                del sys.modules["wandb"]
        return getattr(self, name)


def put_timm_off() -> None:
    """Let timm run no more of itself than the modules that a run imports, and the rest once something asks for it."""
    if "timm" in sys.modules:
        return
    for name in ("timm", "timm.data"):
        package = importlib.util.module_from_spec(cast(Any, importlib.util.find_spec(name)))
        package.__class__ = _FoundNotRun
        sys.modules[name] = package
    timm = cast(Any, sys.modules["timm"])
    timm.data, timm.__version__ = sys.modules["timm.data"], importlib.metadata.version("timm")


IS_ENTRYPOINT = Path(sys.argv[0]).stem.startswith("train_")  # not a tool or a test that imports this file
if IS_ENTRYPOINT:
    preemption.listen()  # from here on: importing torch takes seconds
    gc.disable()  # until main runs: nearly nothing that imports make is garbage, and each pass visits all of it
check_versions()
if IS_ENTRYPOINT:
    put_timm_off()

from schema import (  # noqa: E402  (after the versions' check)
    Config,
    ConfigError,
    NodeLeftError,
    RankError,
    RunError,
    SizeChange,
    idle_keys,
    known_keys,
    leaves,
    split_batch,
    to_plain,
)
from schema import typed as as_typed  # noqa: E402


def check_script(cfg: Config, script: str, world_size: int) -> None:
    """Refuse by name what this script or this machine cannot honour.

    Raises:
        ConfigError: naming the key, the value and the fix.
    """
    import torch

    import vit_te
    from interop import hugging_face

    for key, is_on, package in (
        (f"wandb.mode={cfg.wandb.mode}", cfg.wandb.mode != "disabled", "wandb"),
        (f"tensorboard.enabled={as_typed(cfg.tensorboard.enabled)}", cfg.tensorboard.enabled, "tensorboard"),
    ):
        if is_on and not _is_importable(package):
            switch = key.split("=")[0] + ("=disabled" if package == "wandb" else "=false")
            raise ConfigError(f"{key}, but {package} is not installed: pip install {package}, or set {switch}")
    if cfg.model.implementation == "hf":
        hugging_face.check(cfg.model)
    if cfg.model.transformer_engine:
        if not torch.cuda.is_available():
            raise ConfigError("model.transformer_engine=true needs a CUDA GPU: set it to false here")
        vit_te.transformer_engine()
        vit_te.recipe(cfg.fp8_config)
    if cfg.fp8_config.quantized_model_init:
        if script != "train_mfsdp":
            raise ConfigError(
                f"fp8_config.quantized_model_init=true: {script}.py's optimizer updates the weights that the layers "
                "hold, and FP8 ones lose small updates; set it to false or use train_mfsdp.py, which has FP32 ones too"
            )
        for key, wanted in (("zero_dp_strategy", "optim_grads_params"), ("outer_dp_sharding_strategy", "no_shard")):
            if getattr(cfg.mfsdp, key) != wanted:
                raise ConfigError(
                    f"mfsdp.{key}={getattr(cfg.mfsdp, key)} with fp8_config.quantized_model_init=true: "
                    f"Megatron-FSDP has FP8 weights only with {wanted}"
                )
    if cfg.compile:
        _check_compiler()
    if cfg.data.decoder == "nvjpeg" and not torch.cuda.is_available():
        raise ConfigError("data.decoder=nvjpeg needs a CUDA GPU: use data.decoder=torchvision")
    if (cfg.data.mixup or cfg.data.cutmix) and (micro := split_batch(cfg, world_size).micro_batch_size) % 2:
        key = "mixup" if cfg.data.mixup else "cutmix"
        raise ConfigError(
            f"data.{key}={getattr(cfg.data, key)} mixes pairs, and micro_batch_size={micro} (on {world_size} ranks) is "
            "odd: use an even one, or set data.mixup=0 data.cutmix=0"
        )
    if cfg.cuda_graphs:
        for key, lacks in (
            ("activation_checkpointing", cfg.activation_checkpointing),
            ("fsdp2.cpu_offload", script == "train_fsdp2" and cfg.fsdp2.cpu_offload),
        ):
            if lacks:
                raise ConfigError(f"cuda_graphs=true records no {key}={as_typed(lacks)}: set one of them to false")
        if not torch.cuda.is_available():
            raise ConfigError("cuda_graphs=true needs a CUDA GPU: set it to false here")
    axes = cfg.distributed
    _check_tensor_parallel(cfg, script)
    tp, outer = axes.tp or 1, axes.dp_outer or 1
    shard = axes.dp_shard or world_size // tp // outer
    if script == "train_ddp" and (axes.dp_outer, axes.dp_shard) != (None, None):
        key, value = ("dp_outer", axes.dp_outer) if axes.dp_outer else ("dp_shard", axes.dp_shard)
        raise ConfigError(f"distributed.{key}={value}: DDP does not shard; set it to null or use train_fsdp2.py")
    if outer * shard * tp != world_size:
        product = f"distributed.dp_outer={outer} x distributed.dp_shard={as_typed(axes.dp_shard)}"
        product += f" x distributed.tp={tp}" if tp > 1 else ""
        leave = ", or leave distributed.dp_shard null" if axes.dp_shard else ""
        raise ConfigError(f"{product} is not the world size of {world_size}: give axes whose product it is{leave}")
    if script == "train_mfsdp":
        if cfg.model.implementation != "ours":
            raise ConfigError(
                f"model.implementation={cfg.model.implementation}: Megatron-FSDP initialises module by module, which "
                "this one cannot; use train_fsdp2.py"
            )
        if cfg.distillation.shard_teacher:
            raise ConfigError(
                "distillation.shard_teacher=true: train_mfsdp.py keeps a teacher whole; set it to false, or use "
                "train_fsdp2.py"
            )
        for key, is_frozen in (("freeze", cfg.model.freeze), ("pos_embed", cfg.model.pos_embed == "sincos")):
            if is_frozen:
                raise ConfigError(
                    f"model.{key}={getattr(cfg.model, key)}: Megatron-FSDP keeps what is not trained in BF16 alone, "
                    "and checkpoints would lose the rest; use train_fsdp2.py"
                )
        if outer > 1 and shard == 1:
            # Seen with 0.6.1: gradients of two replicas, each one rank, are twice DDP's (tests/test_gpu.py compares
            # them). By its code the division by the number of ranks is left to the reduction inside a shard group.
            raise ConfigError(
                f"distributed.dp_outer={outer} with one rank a shard: Megatron-FSDP multiplies gradients by {outer} "
                "there (like NVIDIA/Megatron-LM#6660); set distributed.dp_outer=null, or use train_fsdp2.py"
            )
        if not torch.cuda.is_available():
            raise ConfigError(
                "train_mfsdp.py needs a CUDA GPU (Megatron-FSDP has no CPU path): use train_fsdp2.py here"
            )
        if cfg.mfsdp.outer_dp_sharding_strategy != "no_shard" and outer == 1:
            raise ConfigError("mfsdp.outer_dp_sharding_strategy=optim needs distributed.dp_outer above 1")
        if cfg.precision != "bf16":
            raise ConfigError(
                f"precision={cfg.precision}: train_mfsdp.py computes in bf16; use train_fsdp2.py for fp32"
            )
    from packaging.version import Version

    if cfg.model.is_eva and Version(version := importlib.metadata.version("timm")) < Version("1.0.31"):
        key = "attn_type" if cfg.model.rope_type is None else "rope_type"
        raise ConfigError(
            f"model.{key}={getattr(cfg.model, key)} needs timm 1.0.31 or newer, this is {version}: pip install -U timm"
        )
    rounding = {"train_fsdp2": ("FSDP2", ", or set precision=fp32"), "train_mfsdp": ("Megatron-FSDP", "")}
    if script in rounding and cfg.model.rope_type == "mixed" and cfg.precision != "fp32":
        strategy, other_fix = rounding[script]
        raise ConfigError(
            f"model.rope_type=mixed with precision={cfg.precision}: {strategy} would round its trained frequencies to "
            f"BF16; use train_ddp.py{other_fix}"
        )
    if script == "train_fsdp2" and cfg.fsdp2.cpu_offload and not torch.cuda.is_available():
        raise ConfigError("fsdp2.cpu_offload=true needs a CUDA GPU: without one everything is in host memory already")
    for stage in cfg.stages()[1:]:
        check_script(stage, script, world_size)


def ranks_to_use(cfg: Config, script: str, world_size: int) -> int:
    """With distributed.stand_by the largest number of ranks, of those there are, that the config takes; else all."""
    for ranks in range(world_size, 0, -1) if cfg.distributed.stand_by else ():
        with contextlib.suppress(ConfigError):
            check_script(cfg, script, ranks)
            for stage in cfg.stages():
                split_batch(stage, ranks)
            return ranks
    return world_size  # what is wrong has nothing to do with their number


def _refuse_later_options(cfg: Config, where: str) -> None:
    """Refuse a model with one of `schema.LATER_OPTIONS`.

    Raises:
        ConfigError: naming the option; `where` says what refuses it, and the fix.
    """
    for key in cfg.model.later_options():
        raise ConfigError(f"model.{key}={as_typed(getattr(cfg.model, key))} {where}")


def _check_tensor_parallel(cfg: Config, script: str) -> None:
    """Refuse what `distributed.tp` cannot cut, or was not seen to work with.

    Raises:
        ConfigError: naming the key, the value and the fix.
    """
    tp, model = cfg.distributed.tp or 1, cfg.model
    if tp == 1:
        return
    key = f"distributed.tp={tp}"
    if script != "train_fsdp2":
        raise ConfigError(f"{key}: {script}.py does not cut matrices; set it to null or use train_fsdp2.py")
    if model.implementation != "ours":
        raise ConfigError(f"{key} with model.implementation={model.implementation}: use ours")
    _refuse_later_options(cfg, f"with {key}, which does not cut such blocks: set distributed.tp=null")
    if cfg.distillation.kind != "none":
        raise ConfigError(
            f"distillation.kind={cfg.distillation.kind} with {key}: not seen to work; set distillation.kind=none, or "
            "distributed.tp=null"
        )
    hidden, multiple = int(model.embed_dim * model.mlp_ratio), 16 if cfg.fp8_config.enabled else 1
    fits = [
        n
        for n in range(2, model.num_heads + 1)
        if model.num_heads % n == 0 and model.embed_dim // n % multiple == 0 and hidden % (n * multiple) == 0
    ]
    if tp not in fits:
        fp8 = ", in multiples of 16 for FP8" if multiple > 1 else ""
        raise ConfigError(
            f"{key} cannot share out model.num_heads={model.num_heads} and the {hidden} units of the MLP evenly{fp8}: "
            f"use {', '.join(map(str, fits)) or 'none'}"
        )
    for name in ("attn_drop_rate", "proj_drop_rate"):
        if rate := getattr(model, name):
            raise ConfigError(
                f"model.{name}={rate} with {key}: each rank would drop the same places of its own heads; set it to 0"
            )
    if cfg.cuda_graphs:
        raise ConfigError(f"cuda_graphs=true with {key}: not seen to work; set cuda_graphs=false")


def _check_compiler() -> None:
    """What torch.compile asks for itself, in its words a hundred lines: C++ on a CPU; on a GPU C, which Triton wants.

    Raises:
        ConfigError: there is none.
    """
    import torch

    if torch.cuda.is_available():  # as triton.runtime.build has it
        found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        missing = "" if found and shutil.which(found.split()[0]) else "C compiler (CC, gcc or clang)"
    else:
        from torch._inductor import config, cpp_builder

        try:
            cpp_builder.get_cpp_compiler()
            missing = ""
        except RuntimeError:
            missing = f"C++ compiler ({', '.join(name for name in config.cpp.cxx if name)})"
    if missing:
        raise ConfigError(
            f"compile=true, but there is no working {missing}: install one (apt-get install g++), name it by "
            f"the variable {'CC' if torch.cuda.is_available() else 'CXX'}, or set compile=false"
        )


def check_options(cfg: Config, script: str, typed: list[str]) -> str | None:
    """Refuse by name what the command line gives and this run would pass over; a sentence on what its files give so.

    What somebody types is meant for this run. What stands in a file may be meant for another: a recipe serves all three
    scripts, and a switch that is turned off on the command line leaves the file's values for it behind.

    Args:
        cfg: the run's.
        script: the entrypoint's name.
        typed: keys of the command line, sections among them.

    Raises:
        ConfigError: a typed key, unless it has its default or asks for nothing (null, false, 0).
    """
    idle, standard = idle_keys(cfg, script), leaves(_base_values())
    passed_over: dict[str, list[str]] = {}
    for key, value in leaves(to_plain(cfg)).items():
        where = next((part for part in idle if f"{key}.".startswith(f"{part}.")), None)
        asks_for_nothing = not value and where not in ("ddp", "fsdp2", "mfsdp")
        if where is None or asks_for_nothing or value == standard.get(key):
            continue
        why, fix = idle[where]
        shown = f"{key}={as_typed(value)}"
        if any(f"{key}.".startswith(f"{given}.") for given in typed):
            raise ConfigError(f"{shown} does nothing {why}: leave it out, or {fix}")
        passed_over.setdefault(why, []).append(shown)
    said = [f"{', '.join(keys)} {why}" for why, keys in passed_over.items()]
    return f"without effect in this run: {'; '.join(said)}" if said else None


def check_demo(arguments: list[str]) -> str | None:
    """A sentence for a model that is chosen without a config for it: the rest is then the demo's."""
    flags, overrides = _flags_and_overrides(arguments)
    chosen = [override for override in overrides if override.startswith("model=") and override != "model=micro"]
    if not chosen or any(flag.split("=")[0] in CONFIG_NAME_FLAGS for flag in flags):
        return None
    return (
        f"{chosen[-1]} without --config-name: all else is that of L0_sanity, the demo (its images, learning rate and "
        "precision); for ImageNet add --config-name vit_base_patch16_224 data.path=/data/imagenet"
    )


@functools.cache
def _base_values() -> dict[str, Any]:
    """Each key's value in the base files, from which all configs start."""
    import yaml

    parts = {"": "defaults", "model": "model/vit_base_patch16_224", "data": "data/imagenet"}
    loaded = {name: yaml.safe_load((CONFIG_DIR / f"{file}.yaml").read_text()) for name, file in parts.items()}
    return loaded.pop("") | loaded


def _is_importable(package: str) -> bool:
    """Whether the package is installed; a folder of its name, such as wandb leaves behind, is no package."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _one_line(error: Exception) -> str:
    """Hydra's, OmegaConf's and pydantic's complaints, each as one line with the key, the value and the fix."""
    from hydra.errors import OverrideParseException
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors()[0]
        if isinstance(raised := first.get("ctx", {}).get("error"), ConfigError):  # by a rule of schema.py
            return str(raised)
        # A union reports each member with its name in the location; the key is what stands before it.
        key = ".".join(str(part) for part in first["loc"])
        key = next((known for known in sorted(known_keys(), key=len, reverse=True) if key.startswith(known)), key)
        same_key = [e for e in error.errors() if e["loc"][: key.count(".") + 1] == first["loc"][: key.count(".") + 1]]
        if first["type"] == "unexpected_keyword_argument" and key == "data.size_schedule":
            return f"{key}: an entry has no {first['loc'][-1]}; it has {', '.join(known_keys(SizeChange))}"
        if first["type"] == "unexpected_keyword_argument":
            key = ".".join(str(part) for part in first["loc"])
            return f"unknown key {key}={_shown(first['input'])}{_did_you_mean(key)}"
        if first["type"] == "missing" and key != ".".join(str(part) for part in first["loc"]):
            lacks = f"{name} is missing" if isinstance(name := first["loc"][-1], str) else "too few values"
            return f"{key}={_shown(first['input'])}: {lacks}"
        if first["type"] == "missing":
            return f"{key} is missing: give it a value in the YAML or on the command line"
        if first["type"] == "string_too_short":
            fix = "give a folder" if key == "output_dir" else "give a value, or null"
            return f"{key}= is empty (a shell variable that is not set?): {fix}"
        # Of [0], whose one value is refused, pydantic says that it is too short, too, "after validation".
        told = [
            e for e in same_key if e["type"] != "too_short" or len(e["input"]) < e.get("ctx", {}).get("min_length", 0)
        ]
        wanted = " or ".join(dict.fromkeys(e["msg"][0].lower() + e["msg"][1:] for e in told))
        wanted = wanted.replace("tuple should", "list should").replace(" after validation", "")
        return f"{key}={_shown(first['input'])}: {wanted}"
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        advice = f"""; a value with = ( ) [ ] {{ }} # , or spaces wants quotes of its own: '{key}="{value}"'"""
        return f"cannot read {error.override!r} on the command line" + (advice if value else ": give KEY=VALUE")
    text = " ".join(line.strip() for line in str(error).split("Config search path")[0].splitlines() if line.strip())
    if match := re.search(r"Missing mandatory value: .*full_key: (\S+)", text):
        return f"{match[1]} is missing: give it on the command line, {match[1]}=..."
    if match := re.search(r"Cannot find primary config '([^']*)'", text):
        close = difflib.get_close_matches(Path(match[1]).stem, _files(), n=1)
        advice = f"did you mean {close[0]}?" if close else "see config/, or give --config-dir for a folder of your own"
        return f"there is no config {match[1]!r}: {advice}"
    if match := re.search(r"use \+(wandb\.init_args\..*)", str(error)):  # a mapping of anything
        return f"{match[1]}: the config has no such argument yet; add it with a plus, +{match[1]}"
    if match := re.search(r"Could not override '([^']+)'", text):
        return f"unknown key {match[1]}{_did_you_mean(match[1])}"
    return text


def _shown(value: Any) -> str:
    """A value as a command line has it, but text in quotes ('4' is no number), and nan and inf."""
    return repr(value) if isinstance(value, str | float) else as_typed(value).replace('"', "")


def _did_you_mean(key: str) -> str:
    close = difflib.get_close_matches(key, known_keys(), n=1)
    return f": did you mean {close[0]}?" if close else ": no such key in config/defaults.yaml"


def _files(folder: str = "") -> list[str]:
    """The names that a command line has for the files of config/<folder>."""
    return sorted(file.stem for file in (CONFIG_DIR / folder).glob("*.yaml") if file.stem != "defaults")


def _to_config(raw: Any) -> Config:
    from omegaconf import OmegaConf
    from pydantic import TypeAdapter

    plain: Any = OmegaConf.to_container(raw, resolve=True, throw_on_missing=True)
    # No shell reads a YAML file: there, too, ~ is the home folder.
    paths = [(None, "output_dir"), ("data", "path"), ("distillation", "teacher")]
    paths += [("checkpoint", key) for key in ("ckpt_dir", "local_dir", "init_from")]
    for section, key in paths:
        values = plain if section is None else plain.get(section)
        if isinstance(values, dict) and isinstance(path := values.get(key), str) and path.startswith("~"):
            values[key] = os.path.expanduser(path)
            if values[key].startswith("~"):
                name = f"{section}.{key}" if section else key
                raise ConfigError(f"{name}={path}: there is no such home folder (HOME is not set); give the whole path")
    return TypeAdapter(Config).validate_json(json.dumps(plain))  # strict, and a JSON list may become a tuple


def _complaints() -> tuple[type[Exception], ...]:
    """What composing and checking a config may raise; also makes ${project_dir:} known to OmegaConf."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from pydantic import ValidationError

    OmegaConf.register_new_resolver("project_dir", lambda: str(PROJECT_DIR), replace=True)
    return HydraException, OmegaConfBaseException, ValidationError


# The two keys of a length, in steps and in epochs.
LENGTHS = (
    ("num_train_steps", "num_epochs"),
    ("lr_scheduler.num_warmup_steps", "lr_scheduler.num_warmup_epochs"),
    ("evaluation.every_n_steps", "evaluation.every_n_epochs"),
    ("checkpoint.save_every_n_steps", "checkpoint.save_every_n_epochs"),
)


def typed_values(overrides: list[str]) -> dict[str, Any]:
    """Key -> value of what a command line gives, but for the choice of a file in config/model/ or config/data/.

    Raises:
        ConfigError: it takes a key away, or chooses by a value that is no name.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(overrides)
    for override in parsed:
        if override.is_delete() and (key := override.key_or_group) in known_keys():
            raise ConfigError(
                f"{key} is missing: ~{key} on the command line takes it away, and every key needs a value; give "
                f"{key}=... instead"
            )
        if (key := override.key_or_group) in GROUPS and not isinstance(override.value(), str | list | dict):
            raise ConfigError(f"{override.input_line}: give a file of config/{key}/, one of {', '.join(_files(key))}")
    return {o.key_or_group: o.value() for o in parsed if not (o.key_or_group in GROUPS and isinstance(o.value(), str))}


def _other_lengths(typed: dict[str, Any]) -> list[str]:
    """Overrides that unset a file's length where the command line gives it by the other key alone."""
    extra = []
    for pair in LENGTHS:
        for given, other in (pair, pair[::-1]):
            if typed.get(given) is not None and other not in typed:
                extra.append(f"{other}=null")
    return extra


def _with_timms(overrides: list[str]) -> list[str]:
    """The same overrides, with what model=timm:<name> stands for in its place, before all others, which go first.

    Raises:
        ConfigError: timm has no such model, or it is none of ours.
    """
    chosen = [override for override in overrides if override.startswith("model=timm:")]
    if not chosen:
        return overrides
    from interop import timm_models  # imports all of timm

    rest = [override for override in overrides if not override.startswith("model=")]
    return [*timm_models.overrides_of(chosen[-1].removeprefix("model=timm:")), *rest]


def load_config(config_name: str = "L0_sanity", overrides: list[str] | None = None, *, script: str = "test") -> Config:
    """Compose and check a config from Python, as the command line of `script` would, but for `check_options`.

    Raises:
        ConfigError: a typo, a wrong type or a contradiction, in one line.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    complaints, overrides, config_name = _complaints(), overrides or [], config_name.removesuffix(".yaml")
    try:
        extra = _other_lengths(typed_values(overrides))
        overrides = [*_with_timms(overrides), *extra, f"hydra.job.name={script}"]
        with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3", job_name=script):
            raw = hydra.compose(config_name, overrides, return_hydra_config=True)
        HydraConfig.instance().set_config(raw)
        OmegaConf.set_struct(raw, False)
        raw.pop("hydra")
        return _to_config(raw)
    except complaints as error:
        raise ConfigError(_one_line(error)) from error


def _flags_and_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their values, and the overrides; either may come first on the command line.

    argparse takes overrides in one row only: with ours at the end, flags after the user's would split them. And it
    would take the first of them for the value of a flag that has none.

    Raises:
        ConfigError: a flag has no value.
    """
    flags, overrides, rest = [], [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        flags.append(argument)
        has_word = bool(rest) and not rest[0].startswith("-")
        if argument in FLAGS_WITH_VALUE:
            if not has_word:
                raise ConfigError(f"{argument} needs a value, as {argument} {FLAGS_WITH_VALUE[argument]}")
            flags.append(rest.pop(0))
        elif argument in ("--info", "-i"):
            flags.append(rest.pop(0) if has_word and "=" not in rest[0] else "all")  # what it stands for alone
        if argument.split("=")[0] in CONFIG_NAME_FLAGS:  # Hydra takes either, but names the run's folder by it
            flags[-1] = flags[-1].removesuffix(".yaml")
    return flags, overrides


def compose(script: str, arguments: list[str]) -> tuple[Config, list[str]]:
    """The config of a command line of `script`, by hydra.main, and the keys that it gives.

    hydra.main is there for the command line (--config-name, --cfg, --help, overrides), and only for that. Training runs
    outside Hydra, which would otherwise catch its exceptions and set up logging of its own.

    Raises:
        ConfigError: a typo, a wrong type or a contradiction, in one line.
    """
    import hydra

    complaints, composed, is_read = _complaints(), [], []

    if {"-m", "--multirun"} & set(arguments):
        raise ConfigError("--multirun would train run after run under one torchrun: start one command a run")

    @hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="L0_sanity")
    def keep(raw: Any) -> None:
        is_read.append(True)
        composed.append(_to_config(raw))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing several lines and exiting
    flags, overrides = _flags_and_overrides(arguments)
    complaint = io.StringIO()
    try:
        typed = typed_values(overrides)
        ours = ["hydra/job_logging=none", "hydra/hydra_logging=none", f"hydra.job.name={script}"]
        sys.argv[1:] = [*flags, *_with_timms(overrides), *_other_lengths(typed), *ours]
        with contextlib.redirect_stderr(complaint):
            try:
                keep()
            except complaints:
                raise
            except ValueError as error:  # Hydra's, of words that do not go together, unless it is one of ours
                if is_read:
                    raise
                raise ConfigError(f"{' '.join([*flags, *overrides])}: {' '.join(str(error).split())}") from error
    except complaints as error:
        raise ConfigError(_one_line(error)) from error
    except SystemExit as error:  # argparse: an unknown flag
        if error.code:
            raise ConfigError(complaint.getvalue().strip().splitlines()[-1]) from error
        raise
    if not composed:  # --help, --cfg, --info: Hydra printed what was asked for
        sys.exit(0)
    return composed[0], list(typed)


def use_srun() -> None:
    """Give the tasks of `srun python train_x.py`, without torchrun, the variables that torchrun would give them.

    Without them each task would be a run of its own. SLURM_STEP_NUM_TASKS is set by srun only, not in a batch script or
    an salloc shell. The address is the step's first node, the port follows from the job and the step; MASTER_ADDR and
    MASTER_PORT go first.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    is_shell = any(name.startswith("SLURM_PTY_") for name in os.environ)  # srun --pty: one terminal, one process
    if tasks == 1 or is_shell or "WORLD_SIZE" in os.environ:
        return
    slurm = {name: os.environ[f"SLURM_{name}"] for name in ("PROCID", "LOCALID", "STEP_NODELIST", "JOB_ID", "STEP_ID")}
    first = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", slurm["STEP_NODELIST"]).split(",")[0]  # n[07-09,12],m1 -> n07
    os.environ |= {"RANK": slurm["PROCID"], "LOCAL_RANK": slurm["LOCALID"], "WORLD_SIZE": str(tasks)}
    os.environ.setdefault("MASTER_ADDR", first)
    os.environ.setdefault("MASTER_PORT", str(20000 + (int(slurm["JOB_ID"]) * 10 + int(slurm["STEP_ID"])) % 10000))


def check_environment() -> None:
    """Refuse variables of a launcher that are not whole: left over in a shell, or set by hand and empty.

    Raises:
        ConfigError: naming the variables and what to do.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ[name] for name in names if name in os.environ}
    shown = " ".join(f"{name}={value}" for name, value in given.items())
    advice = f"start the script with torchrun, or `unset {' '.join(given)}` for a run of one process"
    if given.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        if missing := [name for name in names if name not in given and name != "LOCAL_RANK"]:
            raise ConfigError(f"{shown}, but no {' and no '.join(missing)}: {advice}")
        for name in given.keys() - {"MASTER_ADDR"}:
            if not given[name].isdecimal():
                raise ConfigError(f"{name}={given[name]!r} is no number: {advice}")
        if int(given["RANK"]) >= int(given["WORLD_SIZE"]):
            raise ConfigError(f"{shown}: there is no such rank; {advice}")
    if "GLOO_SOCKET_IFNAME" in os.environ:
        wanted, known = os.environ["GLOO_SOCKET_IFNAME"].split(","), [name for _, name in socket.if_nameindex()]
        if unknown := [name for name in wanted if name not in known]:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={','.join(wanted)}: this machine has no network interface {unknown[0]!r}; "
                f"use one of {', '.join(known)}, or unset it"
            )


def launch(main: Callable[[Config], dict[str, float]]) -> None:
    """Run an entrypoint: compose, check, train; a mistake is one line and exit code 2, before process groups start."""
    from torch.distributed.elastic.multiprocessing.errors import record

    import imagenet_dataset
    from observability import profiling
    from runtime import process_group

    console.never_raise()
    use_srun()
    try:
        check_environment()
    except ConfigError as error:
        exit_with(str(error), rank_variable=None)
    script = Path(sys.argv[0]).stem
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = sys.argv[1:]
    try:
        cfg, typed = compose(script, arguments)
        there, world_size = world_size, ranks_to_use(cfg, script, world_size)
        check_script(cfg, script, world_size)
        notes = [check_options(cfg, script, typed), check_demo(arguments)]
        split_batch(cfg, world_size)
    except ConfigError as error:
        exit_with(str(error))
    try:
        sizes = imagenet_dataset.run_sizes(cfg, world_size)
    except ConfigError as error:  # about files: each node has its own, and the first rank of each speaks
        exit_with(str(error), rank_variable="LOCAL_RANK")
    if world_size < there:
        notes.append(f"the batch does not divide by {there} ranks: ranks {world_size} to {there - 1} stand by")
        os.environ |= {"WORLD_SIZE": str(world_size), "RANKS_STANDING_BY": str(there - world_size)}
        if int(os.environ["RANK"]) >= world_size:
            main = process_group.stand_by
    for note in notes if os.environ.get("RANK", "0") == "0" else ():
        if note:
            print(f"note: {note}", file=sys.stderr, flush=True)
    gc.freeze()  # what imports made stays; later passes, those at a process's end and in forked loaders, leave it out
    gc.enable()
    try:
        profiling.check(cfg, sizes)
        record(main)(cfg)  # torchrun then shows this process's error as the root cause
    except ConfigError as error:
        exit_with(str(error))
    except NodeLeftError as error:
        exit_with(str(error), rank_variable="LOCAL_RANK", code=1)
    except RankError as error:
        exit_with(f"rank {os.environ.get('RANK', '0')}: {error}", rank_variable=None, code=1)
    except RunError as error:
        exit_with(str(error), code=1)
    preemption.ignore()  # Python's own end would give the signals their default back: a late one would be a failure
