"""Save, resume, prune. A checkpoint is complete or not there.

    <ckpt_dir>/step_00000100/      torch.distributed.checkpoint (DCP) files: tensors, and .metadata
                state.json         step, run id, best result, model config, class names, ...: plain JSON
    <ckpt_dir>/best.json           step and value of the best validation metric; pruning spares that step
    <ckpt_dir>/final_model/        model.safetensors with timm's names, config.json that timm builds from, a model card

One key space for all strategies: `model.<timm name>` and `optim.<timm name>.<exp_avg | exp_avg_sq | step>` (SGD:
`momentum_buffer`; frozen tensors have none); with EMA `ema.<timm name>`; with FP8's delayed scaling
`fp8.<layer>.<scale | amax_history>_<fwd | bwd>`. A run with other settings of EMA or FP8 does without those two. The
tensors handed to DCP are the live ones (DTensors where sharded), so a load writes straight into them, whatever strategy
and world size wrote the files. Hyper-parameters come from the config, never from a checkpoint.

Where a run starts:

1. From the newest checkpoint in checkpoint.ckpt_dir that is whole. With checkpoint.resume_from_checkpoint=false the
   checkpoints there are moved aside first.
2. Where there is none, from the weights that checkpoint.init_from names, at step 0, with an optimizer at zero.
3. Where that is null, too, from the weights of the random initialization.
"""

import concurrent.futures
import dataclasses
import json
import logging
import os
import pickle
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from interop import weights_in, weights_out
from interop.dcp_reader import Reader
from interop.step_weights import DATA_SETTINGS, stored_tensors
from optim import Ema
from runtime.collectives import from_rank_0, raise_on_all_ranks
from runtime.files import write_json
from runtime.parameter_names import timm_name
from runtime.run_folder import set_status
from runtime.session import Session
from runtime.step_folders import STEP_FOLDER, step_folders
from runtime.tensors import chunks_of, describe, local_slice, to_local
from schema import Config, ConfigError, EmaConfig, RunError, RunSizes, to_plain

logger = logging.getLogger(__name__)
# Options of the model that change no weight and no logit in evaluation: a resumed run may change them.
FREE_OPTIONS = {f"{where}drop_rate" for where in ("", "pos_", "patch_", "proj_", "attn_")}
FREE_OPTIONS |= {"drop_path_rate", "drop_path_schedule", "init_head_bias", "implementation", "transformer_engine"}
SLOWEST_DISK = 20e6  # bytes a second: a save that shows no sign of life for longer hangs
# What of the config final_model's README.md tells, besides what state.json has for a resume.
RECIPE = ("optimizer", "lr_scheduler", "max_grad_norm", "loss", "ema", "precision")


class TrainState:
    """The tensors of a run: weights under timm's names, their averages, the optimizer's state, FP8's scales."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaling: dict[str, torch.Tensor],
        ema: EmaConfig,
        *,
        after_load: Callable[[], None] = lambda: None,
        after_exchange: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes the parameters as they are now, wrapped and sharded; they must stay the same objects.

        Args:
            model: the wrapped model.
            optimizer: with its state in being.
            scaling: the state of FP8's delayed scaling, the same on every rank; empty without.
            ema: whether weights are averaged, and how.
            after_load: called once the weights were written, for strategies that compute with copies of them.
            after_exchange: called after that, where weights change between two forward passes (EMA), and after an
                evaluation, for strategies that keep gathered copies from one to the next.
        """
        self.weights = {timm_name(name): parameter for name, parameter in model.named_parameters()}
        self.trained = [weight for weight in self.weights.values() if weight.requires_grad]
        self.optimizer = optimizer
        self.scaling = scaling
        self.ema = None if ema.decay is None else Ema(self.weights, ema)
        self.after_load = after_load
        self.after_exchange = after_exchange

    def exchanged(self) -> None:
        """The weights were exchanged for their averages, or back."""
        self.after_load()
        self.after_exchange()

    def tensors(self, step: int | None = None) -> dict[str, Any]:
        """The live tensors, nested as DCP takes them; with `step`, every counter of updates stands at it."""
        of = self.optimizer.state
        states = {name: of[weight] for name, weight in self.weights.items() if of.get(weight)}
        for name, state in states.items():
            if step is not None and "step" in state and to_local(self.weights[name]).numel() == 0:
                # Megatron-FSDP gives an empty shard no gradient, so the optimizer skips it and its counter stands
                # still; the counter is one for all ranks, and DCP takes any rank's.
                state["step"].fill_(step)
        parts = {"model": self.weights, "optim": states, "fp8": self.scaling}
        parts["ema"] = self.ema.averages if self.ema else {}
        return {name: part for name, part in parts.items() if part}

    def num_bytes(self) -> int:
        """What a checkpoint of the whole job takes on the disk, in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _leaves(self.tensors()))


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where a run goes on from."""

    step: int
    run_id: str  # the same over resumes
    best: dict[str, Any] | None  # {"step", "metric", "value"} of the best validation so far
    is_unscored: bool = False  # whether the step's evaluation was broken off
    samples: int = 0  # images that the run has trained on, each counted as often as it was seen


def restore(state: TrainState, cfg: Config, session: Session, sizes: RunSizes) -> Resumed:
    """Put `state` where the run starts from, by the order at the top of this file, and say where that is.

    All ranks load what rank 0 found. Checks first that checkpoints can be written at all.

    Raises:
        ConfigError: the folder cannot take checkpoints; the checkpoint is of another model, another class list or
            another optimizer, or was tampered with; `init_from` does not fit the model.
    """
    if cfg.checkpoint.ckpt_dir is not None:
        _preflight(state, Path(cfg.checkpoint.ckpt_dir), session)
    found = from_rank_0(raise_on_all_ranks(lambda: _find(cfg, session) if session.is_main else None, error=ConfigError))
    if found is None:
        if (source := cfg.checkpoint.init_from) is not None:
            raise_on_all_ranks(lambda: _init_from(source, state, cfg, sizes), error=ConfigError)
            if state.ema:
                state.ema.restart()
        session.phases.place(0, None)
        return Resumed(0, from_rank_0(uuid.uuid4().hex[:12]), None)

    folder, saved = found
    tensors = state.tensors(saved["step"])
    entries = stored_tensors(folder)
    stored = {key: tuple(entry.size) for key, entry in entries.items()}
    has_ema = any(key.startswith("ema.") for key in stored)
    if state.ema and not has_ema:
        del tensors["ema"]
        logger.info("%s has no moving average: it starts at the weights of step %d", folder, saved["step"])
    elif has_ema and not state.ema:
        logger.info("%s has a moving average, which ema.decay=null ignores", folder)
    _check_same(saved, stored, tensors, folder, cfg, sizes)
    if "fp8" in tensors and (absent := _absent_scaling(saved, stored, state.scaling, cfg)):
        tensors["fp8"] = {name: tensor for name, tensor in state.scaling.items() if name not in absent}
        layers = sorted({name.rpartition(".")[0] for name in absent})
        logger.warning(
            "%s has no scales of this FP8 recipe for %d layers (%s, ...): they are found anew in the first steps",
            *(folder, len(layers), layers[0]),
        )
    for dtype, into in _conversions({key: entry.properties.dtype for key, entry in entries.items()}, tensors["optim"]):
        logger.info("%s has the optimizer's state in %s, which this run keeps in %s: converted", folder, dtype, into)
    dcp.load(tensors, storage_reader=Reader(folder))
    state.after_load()
    if state.ema and not has_ema:
        state.ema.restart()
    if session.is_main:
        _write_best(folder.parent, saved["best"])
    session.phases.place(saved["step"], saved.get("goodput"))
    logger.info("resumed from %s (step %d)", folder, saved["step"])
    for line in _stream_changes(saved, cfg, sizes):
        logger.warning("%s", line)
    is_unscored = saved.get("is_unscored", False)
    return Resumed(saved["step"], saved["run_id"], saved["best"], is_unscored, saved["samples"])


def _stream(cfg: Config, sizes: RunSizes) -> dict[str, int]:
    """What decides which image a sample of the stream is."""
    return {
        "seed": cfg.seed,
        "global_batch_size": cfg.global_batch_size,
        "num_train_images": sizes.num_train_images,
        "repeated_augmentation": cfg.data.repeated_augmentation,
    }


def _stream_changes(saved: dict[str, Any], cfg: Config, sizes: RunSizes) -> list[str]:
    """A line for each thing by which this run's stream of samples is not the one that the checkpoint's run saw."""
    then, now = saved.get("stream"), _stream(cfg, sizes)
    if then is None:  # written before 0.2
        return []
    lines = []
    if then["global_batch_size"] != now["global_batch_size"]:
        seen, goes_on = saved["step"] * then["global_batch_size"], saved["step"] * now["global_batch_size"]
        what = f"{abs(goes_on - seen)} samples are {'left out' if goes_on > seen else 'seen again'}"
        lines.append(
            f"global_batch_size was {then['global_batch_size']}, is {now['global_batch_size']}: "
            f"step {saved['step'] + 1} begins at sample {goes_on} of the stream, not at {seen}; {what}"
        )
    for key in ("seed", "num_train_images", "repeated_augmentation"):
        if then[key] != now[key]:
            lines.append(
                f"{key} was {then[key]}, is {now[key]}: from step {saved['step'] + 1} on the images come in another "
                "order; some of this epoch's are seen again, some not at all"
            )
    return lines


def _preflight(state: TrainState, ckpt_dir: Path, session: Session) -> None:
    """Refuse a folder that could not take a checkpoint, before the first step rather than at the first save."""
    name = f".preflight-{from_rank_0(uuid.uuid4().hex)}"
    key = f"checkpoint.ckpt_dir={ckpt_dir}"

    def write() -> None:
        if not session.is_main:
            return
        try:
            ckpt_dir.mkdir(parents=True, exist_ok=True)
            for left in ckpt_dir.glob(".preflight-*"):  # by a run that was killed right here
                left.unlink()
            (ckpt_dir / name).touch()
        except OSError as error:
            raise ConfigError(f"{key} cannot be written to ({error.strerror}): give another folder") from None
        needed, free = state.num_bytes(), shutil.disk_usage(ckpt_dir).free
        if free < needed:
            (ckpt_dir / name).unlink()
            raise ConfigError(
                f"{key} has {_gib(free)} free, a checkpoint takes {_gib(needed)}: make room or give another folder"
            )

    def read() -> None:
        deadline = time.monotonic() + 10  # a network file system may show a new file late
        while not (ckpt_dir / name).exists():
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise ConfigError(
                f"{key} is not the same folder on every node: rank {session.rank} does not see rank 0's file; "
                "give a folder on a shared file system"
            )

    raise_on_all_ranks(write, error=ConfigError)
    try:
        raise_on_all_ranks(read, error=ConfigError)
    finally:
        if session.is_main:
            (ckpt_dir / name).unlink()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def _init_from(name: str, state: TrainState, cfg: Config, sizes: RunSizes) -> None:
    """Copy this rank's part of somebody's weights into the model; the optimizer stays at zero."""
    source = weights_in.read(name)
    shapes = {name: weight.shape for name, weight in state.weights.items()}
    tensors, fresh = weights_in.fit(source, cfg.model, shapes, sizes.classes)
    with torch.no_grad():
        for name, tensor in tensors.items():
            to_local(state.weights[name]).copy_(local_slice(tensor, state.weights[name]))
    state.after_load()
    left = f"; drawn anew: {', '.join(fresh)}" if fresh else ""
    logger.info("loaded %d of %d tensors from %s%s", len(tensors), len(state.weights), source.description, left)
    if others := weights_in.other_settings(source, cfg.data):
        logger.warning("these weights were evaluated with %s, this run does otherwise", " ".join(others))


def _find(cfg: Config, session: Session) -> tuple[Path, dict[str, Any]] | None:
    """Rank 0's decision: the newest checkpoint that is whole, and its state.json.

    Raises:
        ConfigError: a checkpoint's index was tampered with.
    """
    if cfg.checkpoint.ckpt_dir is None:
        return None
    ckpt_dir = Path(cfg.checkpoint.ckpt_dir)
    if not cfg.checkpoint.resume_from_checkpoint and not session.is_restart:
        _set_aside(ckpt_dir)
        return None
    complete = step_folders(ckpt_dir)
    for folder in sorted(ckpt_dir.glob("step_*")):
        if folder not in complete.values():
            logger.warning("skipping %s: not a complete checkpoint", folder)
    for step in sorted(complete, reverse=True):
        if problem := _problem(complete[step]):
            logger.warning("skipping %s: %s", complete[step], problem)
        else:
            return complete[step], json.loads((complete[step] / "state.json").read_text())
    return None


def _problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint whose files are there: an index that cannot be read, a file cut short."""
    try:
        json.loads((folder / "state.json").read_text())["best"]
        metadata = Reader(folder).read_metadata()
    except ConfigError:  # not damage: nothing but the folder's author puts other classes into an index
        raise
    except (OSError, EOFError, ValueError, LookupError, AttributeError, TypeError, pickle.UnpicklingError) as error:
        return f"its index cannot be read ({type(error).__name__}: {error})"
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (folder / name).stat().st_size < end:
            return f"{name} is cut short"
    return None


def _check_same(
    saved: dict[str, Any],
    stored: dict[str, tuple[int, ...]],
    tensors: dict[str, Any],
    folder: Path,
    cfg: Config,
    sizes: RunSizes,
) -> None:
    """Refuse a checkpoint by the name of the first difference. DCP alone would ignore keys that the model lacks."""
    advice = "use that config, another output_dir, or checkpoint.resume_from_checkpoint=false"
    for key, value in to_plain(cfg)["model"].items():
        if key not in FREE_OPTIONS and saved["model"].get(key) != value:
            raise ConfigError(f"{folder} was written with model.{key}={saved['model'].get(key)}, not {value}: {advice}")
    if saved["classes"] != list(sizes.classes):
        raise ConfigError(f"{folder} was written with another list of classes than data.path={cfg.data.path}: {advice}")
    if saved["optimizer"] != cfg.optimizer.name:
        raise ConfigError(
            f"{folder} was written with optimizer.name={saved['optimizer']}, not {cfg.optimizer.name}: {advice}"
        )
    ignored = ("fp8.",) if "ema" in tensors else ("fp8.", "ema.")
    stored = {key: shape for key, shape in stored.items() if not key.startswith(ignored)}
    wanted = {
        f"{part}.{name}": tuple(weight.shape)
        for part in ("model", "ema")
        for name, weight in tensors.get(part, {}).items()
    }
    for name, entries in tensors["optim"].items():
        wanted |= {f"optim.{name}.{key}": tuple(value.shape) for key, value in entries.items()}
    for key in sorted(stored.keys() | wanted.keys()):
        if stored.get(key) != wanted.get(key):
            raise ConfigError(f"{folder}: {key} is {stored.get(key)} there and {wanted.get(key)} in this run: {advice}")


def _conversions(
    stored: dict[str, torch.dtype], states: dict[str, dict[str, torch.Tensor]]
) -> set[tuple[torch.dtype, torch.dtype]]:
    """Types of the optimizer's tensors in a checkpoint, by key, that this run has in another, and that one.

    DCP copies what it reads into the live tensors, which rounds to their type.
    """
    pairs = {
        (stored[f"optim.{name}.{key}"], tensor.dtype) for name, state in states.items() for key, tensor in state.items()
    }
    return {(dtype, into) for dtype, into in pairs if dtype != into}


def _absent_scaling(
    saved: dict[str, Any], stored: dict[str, tuple[int, ...]], scaling: dict[str, torch.Tensor], cfg: Config
) -> set[str]:
    """Of the run's state of FP8's scales what a checkpoint lacks: other layers', or all of it if of another recipe."""
    then, now = saved["fp8_config"], to_plain(cfg)["fp8_config"]
    if any(then[key] != now[key] for key in ("fp8_recipe", "fp8_format", "fp8_recipe_kwargs")):
        return set(scaling)
    return {name for name, tensor in scaling.items() if stored.get(f"fp8.{name}") != tuple(tensor.shape)}


class Saver:
    """Writes checkpoints: under a temporary name, renamed by rank 0 once every rank has written, then prunes.

    With checkpoint.async_save only a copy to host memory (pinned, where there is CUDA) holds up the training; a thread
    writes it, one checkpoint at a time. That takes host memory of the size of a rank's part of a checkpoint.
    """

    def __init__(self, state: TrainState, cfg: Config, session: Session, sizes: RunSizes, *, resumed: Resumed) -> None:
        self.state, self.cfg, self.session, self.resumed = state, cfg, session, resumed
        self.in_flight: concurrent.futures.Future | None = None
        self.step = 0  # of what was written last, or is being written
        self.group: dist.ProcessGroup | None = None  # None: the job's own
        if cfg.checkpoint.ckpt_dir is None:
            return
        self.ckpt_dir = Path(cfg.checkpoint.ckpt_dir)
        self.allowance_s = state.num_bytes() / sizes.world_size / SLOWEST_DISK
        self.facts = {
            "run_id": resumed.run_id,
            "script": Path(sys.argv[0]).stem,  # with the next two, for tools/replay.py
            "world_size": sizes.world_size,
            "schedule_steps": sizes.schedule_steps,
            "stream": _stream(cfg, sizes),
            "model": to_plain(cfg)["model"],
            "fp8_config": to_plain(cfg)["fp8_config"],
            "optimizer": cfg.optimizer.name,
            "recipe": {key: to_plain(cfg)[key] for key in RECIPE} | {"checkpoint.init_from": cfg.checkpoint.init_from},
            "classes": list(sizes.classes),
            "data": {key: to_plain(cfg)["data"][key] for key in DATA_SETTINGS},
        }
        if cfg.checkpoint.async_save:
            group = dist.new_group(backend="gloo")  # the thread's collectives must not meet the loop's
            assert isinstance(group, dist.ProcessGroup)  # every rank is in it
            self.group = group
            self.thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
            self.copies = _host_copies(state.tensors())  # now: pinning memory takes long

    def save(
        self,
        step: int,
        best: dict[str, Any] | None,
        *,
        scores: dict[str, float] | None = None,
        is_unscored: bool = False,
    ) -> None:
        """Write step_<step> on all ranks, or begin to; waits for the one before.

        Args:
            step: updates that the state holds.
            best: the best result so far; if it is this step's, best.json will say so.
            scores: what the evaluation of this step found; None = there was none.
            is_unscored: the evaluation of this step was broken off, for the next start to do again.

        Raises:
            RunError: on all ranks alike, this save or the one before could not be written, or torchrun is gone.
        """
        with self.session.phases.during("saving", self.allowance_s):
            self._save(step, best, scores=scores, is_unscored=is_unscored)

    def _save(
        self, step: int, best: dict[str, Any] | None, *, scores: dict[str, float] | None, is_unscored: bool
    ) -> None:
        asked = time.perf_counter()
        self.wait()
        started = time.perf_counter()
        self.goodput = self.session.phases.totals()
        self.step, self.scores, self.is_unscored = step, scores, is_unscored
        temporary = self.ckpt_dir / f"step_{step:08d}.tmp"

        def prepare() -> None:
            # A run that was asked to stop saves all the same: it holds the folder's lock, and this is its last save.
            if self.session.is_orphan and not self.session.stop.signal:
                raise RunError(f"torchrun is gone: stopping before the save of step {step}; start the run again")
            if self.session.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)

        raise_on_all_ranks(prepare)
        tensors = self.state.tensors(step)
        if self.cfg.checkpoint.async_save:
            _copy(tensors, self.copies)
            self.in_flight = self.thread.submit(self._write, self.copies, temporary, best)
        else:
            self._write(tensors, temporary, best)
            set_status(self.session, "running", step)
        how = "copied, to be written" if self.in_flight else "saved"
        waited = f", after {started - asked:.3f} s for the one before" if started - asked > 1e-3 else ""
        logger.info("step %d: %s in %.3f s%s", step, how, time.perf_counter() - started, waited)

    def set_score(self, step: int, best: dict[str, Any] | None, scores: dict[str, float] | None) -> None:
        """Give the checkpoint of `step`, saved unscored, its scores and the best result so far."""

        def write() -> None:
            file = self.ckpt_dir / f"step_{step:08d}" / "state.json"
            now = {"best": best, "scores": scores, "is_unscored": False}
            write_json(file, json.loads(file.read_text()) | now)
            _write_best(self.ckpt_dir, best)

        raise_on_all_ranks(lambda: write() if self.session.is_main else None)

    def wait(self) -> None:
        """Return when nothing is in flight.

        Raises:
            RunError: on all ranks alike, what was in flight could not be written.
        """
        if self.in_flight is not None:
            written, self.in_flight = self.in_flight, None
            with self.session.phases.during("saving", self.allowance_s):
                written.result()
            set_status(self.session, "running", self.step)

    def _write(self, tensors: dict[str, Any], temporary: Path, best: dict[str, Any] | None) -> None:
        try:
            dcp.save(tensors, checkpoint_id=temporary, process_group=self.group)
            raise_on_all_ranks(
                lambda: self._commit(temporary, best) if self.session.is_main else None, group=self.group
            )
        except (CheckpointException, RunError) as error:
            reasons = [wrapped[0] for wrapped in getattr(error, "failures", {}).values()] or [error]
            raise RunError(
                f"step {self.step} could not be saved to {self.ckpt_dir}: {str(reasons[0]).splitlines()[0]}; a "
                f"checkpoint takes {_gib(self.state.num_bytes())}, {_gib(shutil.disk_usage(self.ckpt_dir).free)} are "
                "free; the checkpoints before it are as they were"
            ) from None

    def num_samples(self) -> int:
        """Images trained on up to the step that is saved, over all resumes, each counted as often as it was seen."""
        return self.resumed.samples + (self.step - self.resumed.step) * self.cfg.global_batch_size

    def _commit(self, temporary: Path, best: dict[str, Any] | None) -> None:
        """What rank 0 does when every rank has written."""
        final = temporary.with_suffix("")
        state = {"step": self.step, "samples": self.num_samples(), "best": best, "scores": self.scores}
        state |= {"is_unscored": self.is_unscored, "goodput": self.goodput}
        write_json(temporary / "state.json", state | self.facts)
        if final.exists():  # and was skipped at the start, so it is damaged
            final.rename(final.with_suffix(f".damaged-{uuid.uuid4().hex[:6]}"))
        os.replace(temporary, final)
        if best and best["step"] == self.step:
            _write_best(self.ckpt_dir, best)
        self._prune(best)

    def _prune(self, best: dict[str, Any] | None) -> None:
        """Delete all but the `max_checkpoints` newest complete checkpoints and the best one, and what was given up."""
        complete = step_folders(self.ckpt_dir)
        newest = self.cfg.checkpoint.max_checkpoints or len(complete)
        doomed = [complete[step] for step in sorted(complete)[:-newest] if not best or step != best["step"]]
        # Renamed first: half a deletion must not look like a checkpoint. An earlier one's end is deleted here, too.
        for folder in [*doomed, *self.ckpt_dir.glob("step_*.tmp")]:
            if not STEP_FOLDER.fullmatch(folder.stem):
                continue
            try:
                shutil.rmtree(folder.replace(folder.with_suffix(".tmp")))
            except OSError as error:
                logger.warning("could not delete %s: %s", folder, error)


def _write_best(ckpt_dir: Path, best: dict[str, Any] | None) -> None:
    """best.json, {"step", "metric", "value"}, as the newest checkpoint knows it."""
    if best is None:
        (ckpt_dir / "best.json").unlink(missing_ok=True)
    else:
        write_json(ckpt_dir / "best.json", best)


def _leaves(tensors: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in tensors.values():
        yield from _leaves(value) if isinstance(value, dict) else [value]


def _host_copies(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same nesting, with room in host memory for this rank's part of each tensor.

    Each is a plain tensor that tells DCP which part of the whole it is.
    """
    on_cuda = any(tensor.device.type == "cuda" for tensor in _leaves(tensors))

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copy(entry) for key, entry in value.items()}
        local = torch.empty(to_local(value).shape, dtype=value.dtype, device="cpu", pin_memory=on_cuda)
        if isinstance(value, DTensor):
            chunks = chunks_of(value)
            describe(local, lambda: local, lambda: chunks, value.size())
        return local

    return copy(tensors)


@torch.no_grad()
def _copy(tensors: dict[str, Any], copies: dict[str, Any]) -> None:
    """Fill the copies; when it returns, the tensors may change."""
    for tensor, copy in zip(_leaves(tensors), _leaves(copies), strict=True):
        copy.copy_(to_local(tensor), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _set_aside(ckpt_dir: Path) -> None:
    """A fresh start in a used folder: move the earlier run's checkpoints out of the way, lose none."""
    earlier = [*step_folders(ckpt_dir).values(), *(p for p in [ckpt_dir / "best.json"] if p.exists())]
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
    assert cfg.checkpoint.ckpt_dir is not None  # where nothing is saved, this is not called
    ckpt_dir = Path(cfg.checkpoint.ckpt_dir)
    if not replace and (ckpt_dir / "final_model").is_dir():
        return
    complete = step_folders(ckpt_dir)
    newest = complete[max(complete)]
    kind = weights_out.export_timm(newest, ckpt_dir / "final_model")
    logger.info("wrote %s, the %s of %s", ckpt_dir / "final_model", kind, newest.name)
