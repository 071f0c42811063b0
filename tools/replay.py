"""Take a recorded step of a run again, and say whether loss and gradient norm are the same in every digit.

    python tools/replay.py runs/demo 800
    torchrun --standalone --nproc-per-node 8 tools/replay.py runs/large 120000

Starts from the nearest checkpoint before the step, with the run's own config, script and number of processes, and
compares every step up to the asked one that metrics.jsonl has. A run is a function of its config and its seed: on the
same kind of machine, with the same packages, a step that differs was computed wrongly, then or now. So a replay on each
of a cluster's machines finds the one that computes wrongly.

The run's folder stays as it is; what the replay writes is in <RUN>/replay_<STEP>, and deleted at the end. Paths in the
config are relative to where the run was started: start this there. config.yaml is that of the run's last start: a step
that an earlier one took with other options is refused, as far as its checkpoint tells them. Exit code 0: the same; 1:
it differs, and the first such step is named; 2: it cannot be taken again, in one line that says why. torchrun makes a 1
of each but 0.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import launch

import dataclasses
import importlib
import json
import os
import re
import shutil

import yaml
from pydantic import TypeAdapter, ValidationError

import checkpoint
from runtime import preemption
from runtime.bucket import is_bucket
from runtime.step_folders import step_folders
from schema import Config, ConfigError, RunError, leaves

KEYS = ("train/loss", "train/grad_norm")
Rows = dict[int, dict[str, float]]  # step -> its values of KEYS


@dataclasses.dataclass(frozen=True)
class Replay:
    """What to take again, and how."""

    cfg: Config
    script: str
    start: Path  # the checkpoint
    recorded: Rows
    changed: list[str]
    """What the start that wrote the checkpoint had otherwise than `cfg`: the steps after it may be of either."""


def rows(folder: Path) -> Rows:
    """The training lines of metrics.jsonl; of a step that was taken twice the later one."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:  # the torn last line of a run that was killed
            continue
        if KEYS[0] in values:
            found[values["step"]] = {key: values[key] for key in KEYS}
    return found


def changed_since(facts: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """What a checkpoint was written with, by its state.json, and config.yaml has otherwise: key=value of the former."""
    sections = {key: facts[key] for key in ("model", "fp8_config", "data") if key in facts}
    then, stream = leaves(facts.get("recipe", {}) | sections), facts.get("stream", {})
    then |= {key: stream[key] for key in ("seed", "global_batch_size") if key in stream}
    if "repeated_augmentation" in stream:
        then["data.repeated_augmentation"] = stream["repeated_augmentation"]
    unlike = ["ema.", "checkpoint.init_from", "data.packing."]  # decides nothing of what is compared; is counted there
    if values["data"]["size_schedule"]:
        unlike += ["model.img_size", "global_batch_size"]  # there the stage's
    now = leaves(values)
    return [
        f"{key}={value}"
        for key, value in then.items()
        if key in now and now[key] != value and not key.startswith(tuple(unlike))
    ]


def plan(run: Path, step: int, world_size: int) -> Replay:
    """What a replay of `step` needs.

    Raises:
        ConfigError: there is no such run, line or checkpoint, it takes another number of processes, or the step was
            taken with other options than those of the run's last start.
    """
    try:
        recorded, values = rows(run), yaml.safe_load((run / "config.yaml").read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{run} is no run's folder: {Path(error.filename or '').name} is missing") from None
    if step not in recorded:
        near = sorted(recorded, key=lambda known: abs(known - step))[:2]
        known = " or ".join(map(str, sorted(near))) or "none yet"
        raise ConfigError(f"step {step} is not in {run}/metrics.jsonl: take one that was logged, such as {known}")
    if is_bucket(values["checkpoint"]["ckpt_dir"]):
        raise ConfigError(
            f"{run} has its checkpoints in a bucket, checkpoint.ckpt_dir={values['checkpoint']['ckpt_dir']}: a replay "
            "reads a folder, so train with checkpoint.ckpt_dir=FOLDER to replay steps"
        )
    saved = step_folders(Path(values["checkpoint"]["ckpt_dir"] or run))
    before = [known for known in saved if known < step]
    if not before:
        there = ", ".join(map(str, saved)) or "none"
        raise ConfigError(f"no checkpoint before step {step} is there (of steps: {there}): take a later one")
    # The checkpoint after the step was written by the start that took it; the one before may be an earlier start's.
    after = [known for known in saved if known >= step]
    facts = json.loads((saved[min(after, default=max(before))] / "state.json").read_text())
    if "script" not in facts:
        raise ConfigError(f"{run}'s checkpoints do not say by which script: they are of an earlier version")
    if facts["world_size"] != world_size:
        command = f"torchrun --standalone --nproc-per-node {facts['world_size']} tools/replay.py {run} {step}"
        raise ConfigError(
            f"{run} was trained by {facts['world_size']} processes of {facts['script']}.py, these are {world_size}: "
            f"start {command}"
        )
    if after and (changed := changed_since(facts, values)):
        raise ConfigError(
            f"step {step} was taken with {' '.join(changed)}, and {run}/config.yaml, of the run's last start, has that "
            f"otherwise: replay a step after {min(after)}, or a copy of the run whose config.yaml has these values"
        )
    changed = changed_since(json.loads((saved[max(before)] / "state.json").read_text()), values)
    folder = run / f"replay_{step}"
    values["lr_scheduler"]["num_training_steps"] = facts["schedule_steps"]
    values |= {"num_train_steps": step, "num_epochs": None, "output_dir": str(folder)}
    values["logger"]["frequency"] = 1
    values["evaluation"] |= {"every_n_steps": None, "every_n_epochs": None}
    values["checkpoint"] |= {"ckpt_dir": str(folder / "checkpoints"), "resume_from_checkpoint": True}
    values["checkpoint"] |= {"save_final_model": False, "async_save": False, "max_checkpoints": None}
    values["checkpoint"] |= {"save_every_n_steps": None, "save_every_n_epochs": None}
    values["wandb"]["mode"], values["tensorboard"]["enabled"] = "disabled", False
    values["profiler"] |= {"trace": False, "memory_snapshot": False}
    try:
        cfg = TypeAdapter(Config).validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{run}/config.yaml: {key}: {first['msg']}; it is of another version") from None
    launch.check_script(cfg, facts["script"], world_size)
    return Replay(cfg, facts["script"], saved[max(before)], recorded, changed)


def first_difference(got: Rows, recorded: Rows, *, after: int) -> str | None:
    """The first step after `after` that is in both and differs, and how."""
    for step in sorted(step for step in got.keys() & recorded.keys() if step > after):
        for key in KEYS:
            if got[step][key] != recorded[step][key]:
                return f"step {step}: {key} is {got[step][key]!r}, recorded is {recorded[step][key]!r}"
    return None


def main(argv: list[str] | None = None) -> int:
    """Parse, replay, compare; returns the exit code."""
    parser = launch.Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's output_dir")
    parser.add_argument("step", type=int, metavar="STEP")
    args = parser.parse_args(argv)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        replay = plan(args.run, args.step, world_size)
    except ConfigError as error:
        launch.exit_with(str(error))
    folder = Path(replay.cfg.output_dir)
    if rank == 0:  # the others wait for it in the process group's start, and look for the checkpoint after that
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / replay.start.name).symlink_to(replay.start.resolve())
    save = checkpoint.Saver.save

    def save_before_the_step(saver: checkpoint.Saver, step: int, *rest: Any, **options: Any) -> None:
        if step < args.step:  # where data.size_schedule changes the size, and the replay goes on from
            save(saver, step, *rest, **options)

    checkpoint.Saver.save = save_before_the_step  # type: ignore[method-assign]
    try:
        importlib.import_module(replay.script).main(replay.cfg)
        preemption.ignore()
        if rank:
            return 0
        got = rows(folder)
    except (ConfigError, RunError) as error:
        launch.exit_with(str(error))
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return tell(args.run, args.step, replay, got)


def tell(run: Path, step: int, replay: Replay, got: Rows) -> int:
    """Print what came out; the exit code."""
    if step not in got:
        launch.exit_with(f"the replay was stopped before step {step}: start it again")
    start = int(replay.start.name.removeprefix("step_"))
    compared = [one for one in got if one > start and one in replay.recorded]
    if difference := first_difference(got, replay.recorded, after=start):
        if replay.changed:  # no sign of a wrong machine: the first of these steps may be of the start before
            launch.exit_with(
                f"{difference}; but {replay.start.name} was written with {' '.join(replay.changed)}, which "
                f"{run}/config.yaml has otherwise: which start took that step is not known; replay a step after a "
                "later checkpoint"
            )
        log = run / "train.log"
        said = re.findall(r"resumed from \S+ \(step (\d+)\)", log.read_text(errors="replace")) if log.exists() else []
        later = [resumed for resumed in map(int, said) if resumed > start]
        doubt = f"; unless options of data were changed when the run went on at step {later[-1]}" if later else ""
        print(f"{run} differs from {replay.start.name} on: {difference}{doubt}")
        return 1
    print(
        f"{run}: step {step}, taken again from {replay.start.name}, is the same: loss and gradient norm of "
        f"{len(compared)} logged steps are equal in every digit"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
