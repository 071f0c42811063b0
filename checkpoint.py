"""Save, resume, prune. A checkpoint is complete or not there.

    <ckpt_dir>/step_00000100/      torch.distributed.checkpoint (DCP) files: tensors, and .metadata
                state.json         step, run id, best result, model config, class names, ...: plain JSON
    <ckpt_dir>/best.json           step and value of the best validation metric; pruning spares that step
    <ckpt_dir>/torchruns.json      with resume_from_checkpoint=false: who took part in the last start
    <ckpt_dir>/final_model/        model.safetensors with timm's names, config.json that timm builds from, a model card

ckpt_dir is a folder that all nodes share, or s3://bucket/prefix; what differs is in runtime/checkpoint_places.py.

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

With data.size_schedule each image size's part of the run, a stage, ends with a checkpoint, and the next one starts from
that, in the same processes or in others: its positions are resampled for the new grid (`Regrid`).
"""

import concurrent.futures
import dataclasses
import json
import logging
import math
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
from interop.step_weights import DATA_SETTINGS, reading, stored_tensors
from optim import Ema
from runtime.bucket import BucketError, is_bucket
from runtime.checkpoint_places import Folder, Found, fetched, gib, local_dir, place_of
from runtime.collectives import from_rank_0, raise_on_all_ranks
from runtime.parameter_names import timm_name
from runtime.run_folder import set_status
from runtime.session import Session
from runtime.tensors import chunks_of, describe, local_slice, to_local
from schema import LATER_OPTIONS, Config, ConfigError, EmaConfig, ModelConfig, RunError, RunSizes, Size, pair, to_plain

logger = logging.getLogger(__name__)
# Options of the model that change no weight and no logit in evaluation: a resumed run may change them.
FREE_OPTIONS = {f"{where}drop_rate" for where in ("", "pos_", "patch_", "proj_", "attn_")}
FREE_OPTIONS |= {
    "dynamic_img_size",
    "drop_path_rate",
    "drop_path_schedule",
    "init_head_bias",
    "implementation",
    "transformer_engine",
}
POSITIONS = "pos_embed"  # the one tensor whose shape follows from the image size
SLOWEST_DISK = 20e6  # bytes a second: a save that shows no sign of life for longer hangs
# What of the config final_model's README.md tells, besides what state.json has for a resume.
RECIPE = ("optimizer", "lr_scheduler", "max_grad_norm", "loss", "distillation", "ema", "precision")


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


@dataclasses.dataclass(frozen=True)
class Beginning:
    """What a run will go on from, found before there is a model."""

    place: Folder
    found: Found | None

    @property
    def step(self) -> int:
        """Finished updates."""
        return self.found.state["step"] if self.found else 0

    @property
    def is_unscored(self) -> bool:
        """Whether that step's evaluation was broken off."""
        return self.found is not None and self.found.state.get("is_unscored", False)


def beginning_of(cfg: Config, session: Session) -> Beginning:
    """Look for the newest checkpoint, once for all ranks.

    Raises:
        ConfigError: the place of the checkpoints cannot be used, or one was tampered with.
    """
    place = place_of(cfg, session.rank)
    place.check(0, session)
    return Beginning(place, _newest(place, cfg, session))


def restore(
    state: TrainState, cfg: Config, session: Session, sizes: RunSizes, beginning: Beginning | None = None
) -> Resumed:
    """Put `state` where the run starts from, by the order at the top of this file, and say where that is.

    All ranks load what rank 0 found: `beginning`, where that is known. Checks first that checkpoints can be written at
    all.

    Raises:
        ConfigError: the folder cannot take checkpoints; the checkpoint is of another model, another class list or
            another optimizer, or was tampered with; `init_from` does not fit the model.
    """
    started = time.perf_counter()
    place = found = None
    if cfg.checkpoint.ckpt_dir is not None:
        place = beginning.place if beginning else place_of(cfg, session.rank)
        place.check(state.num_bytes(), session)
        found = beginning.found if beginning else _newest(place, cfg, session)
    if place is None or found is None:
        if (source := cfg.checkpoint.init_from) is not None:
            raise_on_all_ranks(lambda: _init_from(source, state, cfg, sizes), error=ConfigError)
            state.after_load()
            if state.ema:
                state.ema.restart()
        session.phases.place(0, None)
        return Resumed(0, from_rank_0(uuid.uuid4().hex[:12]), None)

    folder, saved = raise_on_all_ranks(lambda: place.opened(found), error=ConfigError), found.state
    tensors = state.tensors(saved["step"])
    entries = stored_tensors(folder)
    stored = {key: tuple(entry.size) for key, entry in entries.items()}
    has_ema = any(key.startswith("ema.") for key in stored)
    if state.ema and not has_ema:
        del tensors["ema"]
        logger.info("%s has no moving average: it starts at the weights of step %d", found.name, saved["step"])
    elif has_ema and not state.ema:
        logger.info("%s has a moving average, which ema.decay=null ignores", found.name)
    size_before = cfg.model.img_size
    if sizes.size_before is not None and saved["step"] == sizes.first_step:
        size_before = sizes.size_before
    regrid = None if pair(size_before) == pair(cfg.model.img_size) else Regrid(tensors, cfg.model, size_before)
    _check_same(saved, stored, tensors, found.name, cfg, sizes, size_before)
    if "fp8" in tensors and (absent := _absent_scaling(saved, stored, state.scaling, cfg)):
        tensors["fp8"] = {name: tensor for name, tensor in state.scaling.items() if name not in absent}
        layers = sorted({name.rpartition(".")[0] for name in absent})
        logger.warning(
            "%s has no scales of this FP8 recipe for %d layers (%s, ...): they are found anew in the first steps",
            *(found.name, len(layers), layers[0]),
        )
    for dtype, into in _conversions(
        {key: entry.properties.dtype for key, entry in entries.items()}, tensors.get("optim", {})
    ):
        logger.info(
            "%s has the optimizer's state in %s, which this run keeps in %s: converted", found.name, dtype, into
        )
    with reading(found.name, advice=place.advice):
        dcp.load(tensors, storage_reader=Reader(folder, lambda names: place.fetch(found, names)))
    if regrid:
        regrid.copy()
    state.after_load()
    if state.ema and not has_ema:
        state.ema.restart()
    place.tidy(folder)
    raise_on_all_ranks(lambda: place.write_best(saved["best"]) if session.is_main else None)
    session.phases.place(saved["step"], saved.get("goodput"))
    resampled = ", its positions resampled for the new size" if regrid else ""
    seconds = time.perf_counter() - started
    logger.info("resumed from %s (step %d) in %.3f s%s", found.name, saved["step"], seconds, resampled)
    for line in _stream_changes(saved, cfg, sizes):
        logger.warning("%s", line)
    is_unscored = saved.get("is_unscored", False)
    return Resumed(saved["step"], saved["run_id"], saved["best"], is_unscored, saved["samples"])


def _newest(place: Folder, cfg: Config, session: Session) -> Found | None:
    """What rank 0 decides to go on from, on all ranks."""
    torchruns: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(torchruns, session.torchrun)
    newest = raise_on_all_ranks(lambda: _find(place, cfg, torchruns) if session.is_main else None, error=ConfigError)
    return from_rank_0(newest)


class Regrid:
    """Positions of another grid than the model's, read from a checkpoint and resampled as they are copied into it.

    Weights and averages are resampled as `init_from` does it (timm's bicubic). The optimizer's moments are, too, but
    linearly: then none becomes negative, and no first moment larger, against the root of its second one, than the
    largest that was there, so that the first update after the change is an ordinary one. Counters of updates stay.
    """

    def __init__(self, tensors: dict[str, Any], cfg: ModelConfig, size_before: Size) -> None:
        """Has `tensors` ask for positions of the grid before, whole, in place of the live ones.

        Args:
            tensors: as `TrainState.tensors` gives them; is changed.
            cfg: of the model as it is now.
            size_before: the image size that the checkpoint's model had.
        """
        self.cfg = cfg
        self.grid = dataclasses.replace(cfg, img_size=size_before).grid_size()
        rows = math.prod(self.grid) - math.prod(cfg.grid_size())
        self.pairs: list[tuple[torch.Tensor, torch.Tensor, str]] = []  # what is read, where it goes, how

        def before(live: torch.Tensor, interpolation: str) -> torch.Tensor:
            whole = torch.empty(live.shape[0], live.shape[1] + rows, *live.shape[2:], dtype=live.dtype)
            self.pairs.append((whole, live, interpolation))
            return whole

        for part in ("model", "ema"):
            if POSITIONS in tensors.get(part, {}):
                tensors[part] = tensors[part] | {POSITIONS: before(tensors[part][POSITIONS], "bicubic")}
        if moments := tensors.get("optim", {}).get(POSITIONS):
            resampled = {key: before(value, "bilinear") if value.ndim == 3 else value for key, value in moments.items()}
            tensors["optim"] = tensors["optim"] | {POSITIONS: resampled}

    @torch.no_grad()
    def copy(self) -> None:
        """Into the model, the averages and the optimizer, this rank's part of each."""
        for whole, live, interpolation in self.pairs:
            resampled = weights_in.resample_positions(whole, self.grid, self.cfg, interpolation=interpolation)
            to_local(live).copy_(local_slice(resampled, live))


def _packing(cfg: Config) -> dict[str, Any]:
    """What an evaluation needs to know of images in their own aspect ratio; empty without data.packing."""
    return {"packing": {"patches_per_image": cfg.patches_per_image()}} if cfg.data.packing.enabled else {}


def _stream(cfg: Config, sizes: RunSizes) -> dict[str, int]:
    """What decides which image a sample of the stream is."""
    return {
        "seed": cfg.seed,
        "global_batch_size": cfg.global_batch_size,
        "first_step": sizes.first_step,
        "first_sample": sizes.first_sample,
        "num_train_images": sizes.num_train_images,
        "repeated_augmentation": cfg.data.repeated_augmentation,
    }


def _stream_changes(saved: dict[str, Any], cfg: Config, sizes: RunSizes) -> list[str]:
    """A line for each thing by which this run's stream of samples is not the one that the checkpoint's run saw."""
    then, now = saved.get("stream"), _stream(cfg, sizes)
    if then is None:  # written before 0.2
        return []
    lines = []
    # In older checkpoints the stream is counted from step 0 on.
    since = saved["step"] - then.get("first_step", 0)
    seen, goes_on = then.get("first_sample", 0) + since * then["global_batch_size"], sizes.samples_at(saved["step"])
    if seen != goes_on:
        what = f"{abs(goes_on - seen)} samples are {'left out' if goes_on > seen else 'seen again'}"
        batches = then["global_batch_size"], now["global_batch_size"]
        why = "data.size_schedule is another" if batches[0] == batches[1] else "global_batch_size was {}, is {}"
        lines.append(
            f"{why.format(*batches)}: "
            f"step {saved['step'] + 1} begins at sample {goes_on} of the stream, not at {seen}; {what}"
        )
    for key in ("seed", "num_train_images", "repeated_augmentation"):
        if then[key] != now[key]:
            lines.append(
                f"{key} was {then[key]}, is {now[key]}: from step {saved['step'] + 1} on the images come in another "
                "order; some of this epoch's are seen again, some not at all"
            )
    return lines


def _init_from(name: str, state: TrainState, cfg: Config, sizes: RunSizes) -> None:
    """Copy this rank's part of somebody's weights into the model; the optimizer stays at zero."""
    if is_bucket(name):
        name = str(fetched(name, local_dir(cfg) / "init_from"))
    source = weights_in.read(name)
    shapes = {name: weight.shape for name, weight in state.weights.items()}
    tensors, fresh = weights_in.fit(source, cfg.model, shapes, sizes.classes)
    with torch.no_grad():
        for name, tensor in tensors.items():
            to_local(state.weights[name]).copy_(local_slice(tensor, state.weights[name]))
    left = f"; drawn anew: {', '.join(fresh)}" if fresh else ""
    logger.info("loaded %d of %d tensors from %s%s", len(tensors), len(state.weights), source.description, left)
    if others := weights_in.other_settings(source, cfg.data):
        logger.warning("these weights were evaluated with %s, this run does otherwise", " ".join(others))


def _has_begun(place: Folder, torchruns: list[str | None]) -> bool:
    """Whether this job has started here before: one of its torchruns took part in the start before this.

    Torchrun itself counts restarts after failures alone, not those for a node that joins, whose own count is zero.
    """
    ours = {name for name in torchruns if name is not None}
    return bool(ours) and bool(ours & set(place.exchange("torchruns.json", sorted(ours)) or ()))


def _find(place: Folder, cfg: Config, torchruns: list[str | None]) -> Found | None:
    """Rank 0's decision: the newest checkpoint that is whole.

    Raises:
        ConfigError: a checkpoint's index was tampered with.
    """
    if not cfg.checkpoint.resume_from_checkpoint and not _has_begun(place, torchruns):
        place.set_aside(Path(cfg.output_dir) / name for name in ("metrics.jsonl", "fp8_statistics.jsonl"))
        return None
    for name in place.incomplete():
        logger.warning("skipping %s: not a complete checkpoint", name)
    for step in reversed(place.steps()):
        found = place.find(step)
        if problem := found if isinstance(found, str) else _problem(place.opened(found), found.sizes):
            logger.warning("skipping %s/step_%08d: %s", place, step, problem)
        else:
            assert isinstance(found, Found)
            return found
    return None


def _problem(folder: Path, sizes: dict[str, int] | None = None) -> str | None:
    """What is wrong with a checkpoint whose files are there: an index that cannot be read, a file cut short.

    Args:
        folder: with the index and state.json.
        sizes: of all files, in bytes, where the others are elsewhere.
    """
    try:
        json.loads((folder / "state.json").read_text())["best"]
        metadata = Reader(folder).read_metadata()
    except ConfigError:  # not damage: nothing but the folder's author puts other classes into an index
        raise
    except (OSError, EOFError, ValueError, LookupError, AttributeError, TypeError, pickle.UnpicklingError) as error:
        return f"its index cannot be read ({type(error).__name__}: {error})"
    if sizes is None:
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    for place in metadata.storage_data.values():
        if place.relative_path not in sizes:
            return f"{place.relative_path} is missing"
        if sizes[place.relative_path] < place.offset + place.length:
            return f"{place.relative_path} is cut short"
    return None


def _check_same(
    saved: dict[str, Any],
    stored: dict[str, tuple[int, ...]],
    tensors: dict[str, Any],
    name: str,
    cfg: Config,
    sizes: RunSizes,
    img_size: Size,
) -> None:
    """Refuse a checkpoint by the name of the first difference. DCP alone would ignore keys that the model lacks.

    `img_size` is what it must have been written with.
    """
    advice = "use that config, another output_dir, or checkpoint.resume_from_checkpoint=false"
    options = LATER_OPTIONS | saved["model"]
    for key, value in (to_plain(cfg)["model"] | {"img_size": json.loads(json.dumps(img_size))}).items():
        if key not in FREE_OPTIONS and options.get(key) != value:
            raise ConfigError(f"{name} was written with model.{key}={options.get(key)}, not {value}: {advice}")
    if saved["classes"] != list(sizes.classes):
        raise ConfigError(f"{name} was written with another list of classes than data.path={cfg.data.path}: {advice}")
    if saved["optimizer"] != cfg.optimizer.name:
        raise ConfigError(
            f"{name} was written with optimizer.name={saved['optimizer']}, not {cfg.optimizer.name}: {advice}"
        )
    ignored = ("fp8.",) if "ema" in tensors else ("fp8.", "ema.")
    stored = {key: shape for key, shape in stored.items() if not key.startswith(ignored)}
    wanted = {
        f"{part}.{weight_name}": tuple(weight.shape)
        for part in ("model", "ema")
        for weight_name, weight in tensors.get(part, {}).items()
    }
    for weight_name, entries in tensors.get("optim", {}).items():  # sgd without momentum has no state
        wanted |= {f"optim.{weight_name}.{key}": tuple(value.shape) for key, value in entries.items()}
    for key in sorted(stored.keys() | wanted.keys()):
        if stored.get(key) != wanted.get(key):
            raise ConfigError(f"{name}: {key} is {stored.get(key)} there and {wanted.get(key)} in this run: {advice}")


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
    """Writes checkpoints: all ranks their parts, then rank 0 what makes it complete, then prunes.

    With checkpoint.async_save only a copy to host memory (pinned, where there is CUDA) holds up the training; a thread
    writes it, one checkpoint at a time. That takes host memory of the size of a rank's part of a checkpoint.
    """

    def __init__(
        self,
        state: TrainState,
        cfg: Config,
        session: Session,
        sizes: RunSizes,
        *,
        resumed: Resumed,
        whole: Config | None = None,
    ) -> None:
        """Makes what all saves share.

        Args:
            state: what is saved.
            cfg: the run's, or that of its stage.
            session: the process's.
            sizes: the run's, or that of its stage.
            resumed: where the run goes on from.
            whole: the run's, where `cfg` is a stage's.
        """
        self.state, self.cfg, self.session, self.resumed = state, cfg, session, resumed
        self.in_flight: concurrent.futures.Future | None = None
        self.step = 0  # of what was written last, or is being written
        self.group: dist.ProcessGroup | None = None  # None: the job's own
        if cfg.checkpoint.ckpt_dir is None:
            return
        self.place = place_of(cfg, session.rank)
        self.place.claim()
        self.allowance_s = state.num_bytes() / sizes.world_size / SLOWEST_DISK + self.place.allowance_s
        self.facts = {
            "run_id": resumed.run_id,
            "script": Path(sys.argv[0]).stem,  # with the next two, for tools/replay.py
            "world_size": sizes.world_size,
            "schedule_steps": cfg.lr_scheduler.num_training_steps or sizes.num_train_steps,
            "stream": _stream(cfg, sizes),
            "model": to_plain(cfg)["model"],
            "fp8_config": to_plain(cfg)["fp8_config"],
            "optimizer": cfg.optimizer.name,
            "recipe": _recipe(whole or cfg),
            "classes": list(sizes.classes),
            "data": {key: to_plain(cfg)["data"][key] for key in DATA_SETTINGS} | _packing(cfg),
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

        def prepare() -> Path:
            # A run that was asked to stop saves all the same: it holds the folder's lock, and this is its last save.
            if self.session.is_orphan and not self.session.stop.signal:
                raise RunError(f"torchrun is gone: stopping before the save of step {step}; start the run again")
            return self.place.begin(step)

        folder = raise_on_all_ranks(prepare)
        tensors = self.state.tensors(step)
        if self.cfg.checkpoint.async_save:
            _copy(tensors, self.copies)
            self.in_flight = self.thread.submit(self._write, self.copies, folder, best)
        else:
            self._write(tensors, folder, best)
            set_status(self.session, "running", step)
        how = "copied, to be written" if self.in_flight else "saved"
        waited = f", after {started - asked:.3f} s for the one before" if started - asked > 1e-3 else ""
        logger.info("step %d: %s in %.3f s%s", step, how, time.perf_counter() - started, waited)

    def set_score(self, step: int, best: dict[str, Any] | None, scores: dict[str, float] | None) -> None:
        """Give the checkpoint of `step`, saved unscored, its scores and the best result so far."""

        def write() -> None:
            self.place.update(step, {"best": best, "scores": scores, "is_unscored": False})
            self.place.write_best(best)

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

    def _write(self, tensors: dict[str, Any], folder: Path, best: dict[str, Any] | None) -> None:
        try:
            dcp.save(tensors, checkpoint_id=folder, process_group=self.group)
            parts = self.place.collect(folder, self.group)
            raise_on_all_ranks(
                lambda: self._commit(folder, best, parts) if self.session.is_main else None, group=self.group
            )
        except (CheckpointException, RunError) as error:
            reasons = [wrapped[0] for wrapped in getattr(error, "failures", {}).values()] or [error]
            where = "free" if self.place.is_shared else f"free in {self.place.folder}"
            raise RunError(
                f"step {self.step} could not be saved to {self.place}: {str(reasons[0]).splitlines()[0]}; a "
                f"checkpoint takes {gib(self.state.num_bytes())}, {gib(shutil.disk_usage(self.place.folder).free)} are "
                f"{where}; the checkpoints before it are as they were"
            ) from None
        self.place.tidy(folder)

    def num_samples(self) -> int:
        """Images trained on up to the step that is saved, over all resumes, each counted as often as it was seen."""
        return self.resumed.samples + (self.step - self.resumed.step) * self.cfg.global_batch_size

    def _commit(self, folder: Path, best: dict[str, Any] | None, parts: dict[str, Any]) -> None:
        """What rank 0 does when every rank has written."""
        state = {"step": self.step, "samples": self.num_samples(), "best": best, "scores": self.scores}
        state |= {"is_unscored": self.is_unscored, "goodput": self.goodput}
        self.place.commit(self.step, folder, state | self.facts, parts)
        if best and best["step"] == self.step:
            self.place.write_best(best)
        self._prune(best)

    def _prune(self, best: dict[str, Any] | None) -> None:
        """Delete all but the `max_checkpoints` newest complete checkpoints and the best one, and what was given up."""
        complete = self.place.steps()
        newest = self.cfg.checkpoint.max_checkpoints or len(complete)
        self.place.prune([step for step in complete[:-newest] if not best or step != best["step"]])


def _recipe(cfg: Config) -> dict[str, Any]:
    plain = to_plain(cfg)
    recipe = {key: plain[key] for key in RECIPE} | {"checkpoint.init_from": cfg.checkpoint.init_from}
    if cfg.data.size_schedule is not None:
        recipe["data.size_schedule"] = plain["data"]["size_schedule"]
    return recipe


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


def save_final_model(cfg: Config, *, replace: bool) -> None:
    """Write final_model/ from the newest complete checkpoint: weights only, no optimizer state is read, one process.

    Without `replace`, one that is there already stays as it is.

    Raises:
        RunError: the bucket did not give the checkpoint, or did not take the model.
    """
    try:
        place = place_of(cfg)
        if not replace and place.has_final_model():
            return
        newest = place.find(place.steps()[-1])
        if isinstance(newest, str):
            raise RunError(f"final_model cannot be written, of the newest checkpoint in {place} {newest}")
        folder = place.opened(newest)
        place.fetch(newest, newest.sizes)
        kind = weights_out.export_timm(folder, place.folder / "final_model")
        place.publish_final_model()
    except BucketError as error:
        raise RunError(f"final_model could not be written: {error}; start the run again") from None
    logger.info("wrote %s/final_model, the %s of step_%08d", place, kind, newest.step)
