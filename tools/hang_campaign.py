"""Make ranks, loaders and saves hang, and ask that the run ends by itself, naming the rank that did; and what it costs.

    python tools/hang_campaign.py --hangs 56 --output benchmarks/hang_campaign_cpu.json

Runs of DDP and FSDP2 under torchrun, two or three processes on a CPU. In each, one thing of one rank hangs at a
random step: the process is stopped (SIGSTOP), its interpreter is (a C function that keeps Python's lock), its loader
process is stopped or killed, its update, its evaluation or its write of a checkpoint (a pipe that nobody reads,
synchronous and asynchronous) does not return. The run must name that rank alone, and the phase, and end with a code
that is not 0. Others only look as if: a first step, a loader and a save that take three times
distributed.hang_timeout_s but show signs of life, and a slow rank. These must go on to their end; the slow rank must be
named as slow.
"""

import argparse
import ctypes
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark import provenance
from interrupted_runs import ROOT, conftest, start_environment

ANY = ("starting", "training", "waiting", "evaluation", "saving")
HANGS = {  # what hangs -> the phases that may be named
    "process stopped": ANY,
    "interpreter stopped": ANY,  # where it was up to a second before, some steps here
    "loader stopped": ("waiting",),
    "loader killed": (),  # the loader's own error
    "update": ("training",),
    "evaluation": ("evaluation",),
    "save": ("saving",),
    "async save": ("saving",),
}
LIVES = ("slow first step", "slow loader", "slow save", "slow rank")
STEPS = {"slow rank": 200}  # of the runs that reach their end; the others would go on for hours
TIMEOUT_S = 5.0


def first_call(owner: Any, name: str, number: int, act: Callable[[], None]) -> None:
    """Call `act` before call `number` of owner.name."""
    original, calls = getattr(owner, name), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            act()
        return original(*args, **kwargs)

    setattr(owner, name, counting)


def for_ever() -> None:
    """Do not come back."""
    threading.Event().wait()


def trickle(folder: Path, seconds: float) -> None:
    """Write a little, again and again: slow, but alive."""
    end = time.monotonic() + seconds
    with open(folder / f"trickle.{os.getpid()}", "wb", buffering=0) as file:
        while time.monotonic() < end:
            file.write(bytes(65536))
            time.sleep(0.5)


def prepare(kind: str, step: int, folder: Path) -> None:
    """Arrange for what hangs, in the rank that it shall hit; `folder` is for its files."""
    from torch.distributed.checkpoint import filesystem

    import imagenet_dataset
    import trainer

    def soon(act: Callable[[], None]) -> Callable[[], None]:
        return lambda: threading.Timer(random.uniform(0, 0.2), act).start()

    def to_loaders(number: int) -> None:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, number)

    def into_a_pipe() -> None:
        os.mkfifo(folder / "pipe")
        open(folder / "pipe", "wb")  # noqa: SIM115

    def slow_images() -> None:
        load = imagenet_dataset.ImageDataset._load
        times = []

        def slowly(self: Any, *place: Any) -> Any:
            times.append(1)
            if len(times) == 30:
                trickle(folder, 3 * TIMEOUT_S)
            return load(self, *place)

        imagenet_dataset.ImageDataset._load = slowly  # type: ignore[method-assign]

    def spin() -> None:
        end = time.monotonic() + 3 * TIMEOUT_S
        while time.monotonic() < end:
            pass

    def each_step() -> None:
        step_of = trainer.train_step

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.25)
            return step_of(*args, **kwargs)

        trainer.train_step = slowly

    in_a_step = (trainer, "clip_grad_norm_", step)
    in_a_save = (filesystem.FileSystem, "create_stream", step)
    arrange: dict[str, Callable[[], None]] = {
        "process stopped": lambda: first_call(*in_a_step, soon(lambda: os.kill(os.getpid(), signal.SIGSTOP))),
        "interpreter stopped": lambda: first_call(*in_a_step, lambda: ctypes.PyDLL(None).sleep(10**6)),
        "loader stopped": lambda: first_call(*in_a_step, soon(lambda: to_loaders(signal.SIGSTOP))),
        "loader killed": lambda: first_call(*in_a_step, soon(lambda: to_loaders(signal.SIGKILL))),
        "update": lambda: first_call(*in_a_step, for_ever),
        "evaluation": lambda: first_call(trainer, "top_k_hits", step, for_ever),
        "save": lambda: first_call(*in_a_save, into_a_pipe),
        "async save": lambda: first_call(*in_a_save, into_a_pipe),
        "slow first step": lambda: first_call(trainer, "clip_grad_norm_", 1, spin),
        "slow loader": slow_images,
        "slow save": lambda: first_call(
            filesystem.FileSystem, "create_stream", 1, lambda: trickle(folder, 3 * TIMEOUT_S)
        ),
        "slow rank": each_step,
    }
    arrange[kind]()


def rank_main() -> None:
    """One rank of a run; `victim` is where something hangs, or -1 for a run of `measure`."""
    import launch

    kind, victim, step, folder, script, *overrides = sys.argv[2:]
    module = importlib.import_module(script)
    if kind == "cost":
        count_cost(Path(folder))
    elif int(victim) == int(os.environ["RANK"]):
        prepare(kind, int(step), Path(folder))
    cfg = launch.load_config("L0_sanity", overrides, script=script)
    sys.argv = [f"{script}.py"]
    launch.compose = lambda *_: (cfg, [])  # the rest of the way in, with its exit codes, is a run's own
    launch.launch(module.main)


def run(folder: Path, kind: str, nproc: int, victim: int, step: int, script: str, overrides: list[str]) -> Any:
    """The finished torchrun of one event, its output, and the seconds from then to the line and to its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    command += [__file__, "rank", kind, str(victim), str(step), str(folder), script, *overrides]
    environment = start_environment(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    with open(folder / "log.txt", "wb") as log:
        started = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            code = started.wait(timeout=400)
        except subprocess.TimeoutExpired:
            started.terminate()  # torchrun ends its ranks, which are in sessions of their own
            started.wait()
            code = None
    return code, (folder / "log.txt").read_text()


def event(kind: str, script: str, rng: random.Random, folder: Path, images: Path, timeout_s: float) -> dict[str, Any]:
    """One run; what was seen, and whether it is right."""
    nproc = rng.choice((2, 2, 2, 3))
    victim, step = rng.randrange(nproc), rng.randint(2, 12)
    if "save" in kind:
        step = rng.randint(1, 3)
    if kind == "evaluation":
        step = rng.randint(1, 4)
    overrides = [*conftest().TINY, f"data.path={images}", f"output_dir={folder / 'run'}", "data.num_workers=1"]
    overrides += [f"num_train_steps={STEPS.get(kind, 40 if kind in LIVES else 10**5)}", "logger.frequency=20"]
    overrides += [
        f"distributed.hang_timeout_s={timeout_s}",
        "distributed.slow_rank_factor=1.5",
        f"checkpoint.async_save={str(kind == 'async save').lower()}",
    ]
    saves = "save" in kind or kind == "process stopped"
    overrides += ["checkpoint.save_every_n_steps=5"] if saves else []
    overrides += ["evaluation.every_n_steps=6"] if kind in ("evaluation", "process stopped") else []
    code, output = run(folder, kind, nproc, victim, step, script, overrides)
    lines = re.findall(r"^(?:error|warning): .*$", output, re.MULTILINE)
    named = [line for line in lines if line.startswith("error: rank")]
    found = {"kind": kind, "script": script, "ranks": nproc, "victim": victim, "timeout_s": timeout_s, "code": code}
    found["line"] = next(iter(named or lines), None)
    if kind in LIVES:
        slow = [int(rank) for rank in re.findall(r"rank (\d+) \([^)]*\) is slow", output)]
        found["right"] = code == 0 and not named and slow == ([victim] if kind == "slow rank" else [])
    elif kind == "loader killed":
        found["right"] = code not in (0, None) and any(
            line.startswith(f"error: rank {victim}: no batch") for line in named
        )
    else:
        ranks = [int(rank) for line in named for rank in re.findall(r"rank (\d+) \(", line)]
        seconds = re.search(r"(?:tells nothing|hangs) for (\d+) s(?:, last)? in (\w+), step \d+, at \S+:\d+", output)
        stacks = len(list((folder / "run/stacks").glob("*.txt")))
        found |= {"seconds": int(seconds[1]) if seconds else None, "stacks": stacks}
        right = code not in (0, None) and ranks == [victim] and seconds is not None and seconds[2] in HANGS[kind]
        found["right"] = right and stacks >= nproc - ("stopped" in kind and "loader" not in kind)
    if not found["right"]:
        found["output"] = output[-3000:]
    return found


def count_cost(folder: Path) -> None:
    """Switch the watch on and off, 100 steps each, and note the seconds of every step."""
    import trainer
    from runtime import process_group

    made: list[Any] = []
    original = process_group.Watch

    class Kept(original):
        def __init__(self, session: Any, store: Any, **keys: Any) -> None:
            made[:] = [session, store, keys]
            super().__init__(session, store, **keys)
            self.start, self.close = (lambda: None), (lambda: None)  # type: ignore[method-assign]

    process_group.Watch = Kept  # type: ignore[misc]
    step_of = trainer.train_step
    state: dict[str, Any] = {"watch": None, "seconds": {True: [], False: []}, "last": None, "block": 0}

    def timed(*args: Any, step: int, **kwargs: Any) -> Any:
        now = time.perf_counter()
        if state["last"] is not None and step % 100 > 10:  # not the first steps of a block
            state["seconds"][state["watch"] is not None].append(now - state["last"])
        if step % 100 == 0:
            if state["watch"]:
                state["watch"].close()
                state["watch"] = None
            else:
                state["block"] += 1
                session, store, keys = made
                state["watch"] = original(session, process_group.dist.PrefixStore(str(state["block"]), store), **keys)
                state["watch"].start()
            text = {("on" if on else "off"): values for on, values in state["seconds"].items()}
            (folder / f"cost.{os.environ['RANK']}.json").write_text(json.dumps(text))
        state["last"] = time.perf_counter()
        return step_of(*args, step=step, **kwargs)

    trainer.train_step = timed


def measure(folder: Path, steps: int) -> dict[str, Any]:
    """The mean seconds of a step with the watch and without, in turn within one run of DDP on two ranks."""
    overrides = [*conftest().TINY, "data=synthetic", f"output_dir={folder / 'run'}", f"num_train_steps={steps}"]
    overrides += ["model.embed_dim=192", "data.num_workers=0", "logger.frequency=1000"]
    code, output = run(folder, "cost", 2, -1, 0, "train_ddp", overrides)
    assert code == 0, output[-3000:]
    times = json.loads((folder / "cost.0.json").read_text())
    on, off = (statistics.median(times[key]) for key in ("on", "off"))
    means = {
        f"mean_{key}_s": statistics.fmean(sorted(times[key])[: int(0.95 * len(times[key]))]) for key in ("on", "off")
    }
    return {"steps": {key: len(times[key]) for key in times}, "median_on_s": on, "median_off_s": off} | means


def main() -> None:
    """Parse, let things hang, measure, write; exits with 1 where a rank was named wrongly or not at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hangs", type=int, default=56)
    parser.add_argument("--lives", type=int, default=8, help="runs that only look as if they hung")
    parser.add_argument("--steps", type=int, default=4000, help="of the run that measures what the watch costs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    rng, events = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as name:
        images = conftest().make_images(Path(name, "images"))
        cases = [
            (kinds, index)
            for kinds, count in ((list(HANGS), args.hangs), (LIVES, args.lives))
            for index in range(count)
        ]
        for kinds, index in cases:
            kind, script = kinds[index % len(kinds)], ("train_ddp", "train_fsdp2")[index // len(kinds) % 2]
            folder = Path(name, f"{kind}-{index}")
            folder.mkdir()
            # Some of several kinds with the configs' own value; the others sooner.
            timeout_s = 20.0 if index % 8 == index // 8 and kind in HANGS else TIMEOUT_S
            events.append(event(kind, script, rng, folder, images, timeout_s))
            print(json.dumps(events[-1]), flush=True)
            shutil.rmtree(folder)
        folder = Path(name, "cost")
        folder.mkdir()
        cost = measure(folder, args.steps) if args.steps else None
    hangs = [one for one in events if one["kind"] in HANGS]
    lives = [one for one in events if one["kind"] in LIVES]
    counts = {
        "hangs": len(hangs),
        "named_rightly": sum(one["right"] for one in hangs),
        "alive": len(lives),
        "went_on_rightly": sum(one["right"] for one in lives),
    }
    results = counts | {"cost": cost, "events": events}
    args.output.write_text(json.dumps({"meta": provenance(), "results": results}, indent=1) + "\n")
    print(json.dumps(counts | {"cost": cost}, indent=1))
    sys.exit(any(not one["right"] for one in events))


if __name__ == "__main__":
    rank_main() if sys.argv[1:2] == ["rank"] else main()
