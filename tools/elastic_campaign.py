"""Let nodes join, leave and die while a run goes on, and ask that its batches and losses are those of a straight one.

    python tools/elastic_campaign.py --events 100 --minutes 40 --output benchmarks/elastic_campaign_cpu.json

Runs of DDP and FSDP2 under one to four torchruns on a CPU, a rank each; the place where they meet (the rendezvous
store) is a process of its own. Events come at random moments, some while the one before is still being digested:

    join         one more torchrun starts
    leave        SIGTERM to a torchrun
    kill node    SIGKILL of a torchrun and its rank
    kill rank    SIGKILL of a rank

Each rank notes the samples of every step that it takes. Afterwards the samples of the steps that count must be those of
the stream, each once; after joins and leaves alone no step may have been taken twice, after a kill at most those of a
save interval. Where torchruns end by themselves, having waited 60 s for what a node that has left was to say, all of
them are started again, as a scheduler would; that is counted, and is no event.

From each checkpoint from which a start went on, a lone process takes that start's steps again: their losses must agree
to 1e-6. (Over a whole run they cannot: sums over ranks are added up in another order, and the difference grows, as
between any two numbers of ranks.) How far the last weights are from a lone process's is reported.

torchrun is as a user starts it, but for the start of its ranks: they are forks of a process that has imported torch.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import launch

import argparse
import collections
import contextlib
import importlib
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import trainer
from benchmark import provenance
from imagenet_dataset import ImageDataset
from interrupted_runs import conftest
from runtime import preemption

FORK = multiprocessing.get_context("fork")
NODES, EVERY = 4, 10  # at most; steps between saves
PAUSE_S = 0.04  # of a rank after each step: events shall hit runs of tens of steps, not of thousands
WEIGHTS = {"join": 35, "leave": 25, "kill node": 20, "kill rank": 20}
KILLS = ("kill node", "kill rank")
OVER = "torchruns ended by themselves"
WAITED_IN_VAIN = "wait timeout after 60000ms"  # for ranks or an address, from a node that left just after a rendezvous
TOLERANCE = 1e-6
# A run of steps that does not end: the last start of a life is told where.
LONG = ["num_train_steps=1000000", "lr_scheduler.num_training_steps=20000"]
LIVES = {  # name -> script and overrides; 16 images are not for 3 ranks: one of them stands by
    "ddp": ("train_ddp", ["global_batch_size=24"]),
    "fsdp2, micro batches of 2": ("train_fsdp2", ["global_batch_size=24", "micro_batch_size=2"]),
    "ddp, one of three stands by": ("train_ddp", ["global_batch_size=16", "distributed.stand_by=true"]),
    "fsdp2, one of three stands by": ("train_fsdp2", ["global_batch_size=16", "distributed.stand_by=true"]),
}


# In the processes of a run


def note_steps(folder: Path, pause_s: float) -> None:
    """Write a line for every step that this process takes: of which start, as which rank, with which samples."""
    get, step_of = ImageDataset.__getitem__, trainer.train_step
    taken: list[Any] = []
    place = {"start": os.environ.get("MASTER_PORT"), "rank": int(os.environ.get("RANK", "0"))}
    place |= {"ranks": int(os.environ.get("WORLD_SIZE", "1"))}
    lines = open(folder / f"steps.{os.getpid()}.jsonl", "a")  # noqa: SIM115

    def get_and_note(self: ImageDataset, key: Any) -> Any:
        taken.append(key)
        return get(self, key)

    def step_and_note(*args: Any, step: int, **kwargs: Any) -> Any:
        taken.clear()
        result = step_of(*args, step=step, **kwargs)
        lines.write(json.dumps(place | {"step": step, "time": time.time(), "samples": taken}) + "\n")
        lines.flush()
        time.sleep(pause_s)
        return result

    ImageDataset.__getitem__, trainer.train_step = get_and_note, step_and_note


def as_rank(folder: Path, script: str, overrides: list[str], environment: dict[str, str]) -> None:
    """What `python <script>.py <overrides>` does once all is imported; ends the process."""
    code: Any = 1
    try:
        preemption.listen()
        os.environ.clear()
        os.environ.update(environment)
        cfg = launch.load_config("L0_sanity", overrides, script=script)
        launch.compose = lambda *_: (cfg, [])
        sys.argv = [f"{script}.py"]
        main = importlib.import_module(script).main

        def noting_main(cfg: Any) -> Any:
            note_steps(folder, PAUSE_S)  # here: the number of ranks is that of those that train
            return main(cfg)

        launch.launch(noting_main)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code or 0)


class Forked:
    """What torchrun asks of a process that it started, of one that it forked."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.pid, self.returncode = os.fork(), None
        if self.pid == 0:
            os.setsid()
            work()
        while self.poll() is None and os.getpgid(self.pid) != self.pid:  # torchrun signals its group
            time.sleep(0.001)

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int | None:
        """Its exit code; None if it has not ended by then."""
        deadline = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.returncode


def as_node(folder: Path, port: int, meeting: str, script: str, overrides: list[str]) -> None:
    """A torchrun of one rank; those of one `meeting` find each other."""
    os.setsid()
    sys.stdout = sys.stderr = open(folder / "log.txt", "a", buffering=1)  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}

    def popen(_handler: Any, _args: Any, environment: dict[str, str]) -> Any:
        return Forked(lambda: as_rank(folder, script, overrides, environment))

    subprocess_handler.SubprocessHandler._popen = popen  # type: ignore[method-assign]
    # For a log of events that nobody keeps, torch looks up its caller in all modules that are there: seconds each time.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    # torchrun's own values are 30 s of waiting for more nodes and 15 s until a node counts as dead.
    patience = "is_host=false,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=6"
    torchrun.main(
        [
            *("--nnodes", f"1:{NODES}", "--nproc-per-node", "1", "--max-restarts", "10000"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", meeting),
            *("--rdzv-conf", patience, f"{script}.py"),
        ]
    )


def as_store(connection: Any) -> None:
    """Where the nodes meet."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()  # until the campaign closes its end


def alone(folder: Path, pieces: list[tuple[int, int]], source: Path, script: str, overrides: list[str]) -> None:
    """One process takes steps first + 1 to last of each piece, from `source`'s checkpoint of step `first`."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    main = importlib.import_module(script).main
    note_steps(folder, 0.0)
    with open(folder / "log.txt", "w") as log:
        os.dup2(log.fileno(), 2)
    for first, last in pieces:
        run = folder / f"{first}-{last}"
        if first:
            name = f"step_{first:08d}"
            shutil.copytree(source / "checkpoints" / name, run / "checkpoints" / name)
        length = [f"output_dir={run}", f"num_train_steps={last}", "checkpoint.save_every_n_steps=null"]
        main(launch.load_config("L0_sanity", [*overrides, *length], script=script))


# The campaign


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run that took a step: time of the first, ranks, step -> rank -> samples; in order of time.

    A step that not all ranks of a start took is left out; a line that a kill cut short is, too.
    """
    starts: dict[Any, dict[str, Any]] = {}
    for path in folder.glob("steps.*.jsonl"):
        for text in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                line = json.loads(text)
                empty = {"time": line["time"], "ranks": line["ranks"], "steps": {}}
                start = starts.setdefault((line["start"], line["ranks"]), empty)
                start["time"] = min(start["time"], line["time"])
                start["steps"].setdefault(line["step"], {})[line["rank"]] = line["samples"]
    for start in starts.values():
        start["steps"] = {step: got for step, got in sorted(start["steps"].items()) if len(got) == start["ranks"]}
    return sorted((start for start in starts.values() if start["steps"]), key=lambda start: start["time"])


def history(starts: list[dict[str, Any]]) -> dict[int, int]:
    """Step -> the number of the start that took it last: the steps that count."""
    return {step: number for number, start in enumerate(starts) for step in start["steps"]}


def check_samples(starts: list[dict[str, Any]], batch: int, straight: dict[int, Any]) -> list[str]:
    """What is wrong with the samples of the steps that count: each step's are the stream's, in the stream's order.

    `straight` are a lone process's, step by step, which must be numbered without a gap themselves.
    """
    wrong = []
    counts = history(starts)
    for step in range(1, max(counts) + 1):
        if step not in counts:
            wrong.append(f"step {step} is missing")
            continue
        got = starts[counts[step]]["steps"][step]
        samples = [tuple(sample) for rank in sorted(got) for sample in got[rank]]
        if [number for number, _ in samples] != list(range((step - 1) * batch, step * batch)):
            wrong.append(f"step {step} took samples {[number for number, _ in samples]}")
        elif step in straight and samples != [tuple(sample) for sample in straight[step]]:
            wrong.append(f"step {step} took other images than a lone process")
    return wrong


def check_repeats(starts: list[dict[str, Any]], events: list[dict[str, Any]]) -> tuple[list[int], list[str]]:
    """Of each start but the first the steps of the one before that it took again; those that are too many.

    Not those of starts before that: what a kill has taken is made up for by one start or by several.
    """
    repeats, wrong = [], []
    for before, start in itertools.pairwise(starts):
        newest, first = max(before["steps"]), min(start["steps"])
        again = newest + 1 - first
        kinds = [event["kind"] for event in events if before["time"] <= event["time"] <= start["time"]]
        most = EVERY if any(kind in KILLS for kind in kinds) else 0
        repeats.append(again)
        if not 0 <= again <= most:
            wrong.append(f"the start at step {first} came after step {newest} and {kinds or 'nothing'}")
    return repeats, wrong


def pieces_of(starts: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(step of the checkpoint, last step that counts) of each start that has steps that count."""
    counts, pieces = history(starts), []
    for number, start in enumerate(starts):
        if kept := [step for step in start["steps"] if counts[step] == number]:
            pieces.append((min(start["steps"]) - 1, max(kept)))
    return pieces


class Life:
    """A run, its nodes, and what happens to them."""

    def __init__(self, folder: Path, script: str, overrides: list[str], rng: random.Random) -> None:
        folder.mkdir()
        self.folder, self.script, self.overrides, self.rng = folder, script, overrides, rng
        self.nodes: list[Any] = []
        self.events: list[dict[str, Any]] = []
        self.meetings, self.waited = 1, 0

    @contextlib.contextmanager
    def meeting_place(self) -> Iterator[None]:
        """The store process, and no process left behind."""
        ours, its = FORK.Pipe()
        store = FORK.Process(target=as_store, args=(its,), daemon=True)
        store.start()
        self.port = ours.recv()
        try:
            yield
        finally:
            for node in self.nodes:
                self._kill(node)
            store.kill()
            store.join()

    def join(self, *more: str) -> None:
        """One more node."""
        arguments = (self.folder, self.port, f"campaign-{self.meetings}", self.script, [*self.overrides, *more])
        node = FORK.Process(target=as_node, args=arguments)
        node.start()
        self.nodes.append(node)

    def _ranks(self, node: Any) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(pid) for pid in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()]
        return []

    def _leave(self, nodes: list[Any]) -> None:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(node.pid, signal.SIGTERM)
        for node in nodes:
            node.join(90)
            self._kill(node)

    def _kill(self, node: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(node.pid, signal.SIGSTOP)  # it shall not start a rank now
        for pid in [*self._ranks(node), node.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.join()

    def happen(self, kind: str) -> None:
        """Make it so."""
        event = {"kind": kind, "time": time.time(), "nodes": len(self.nodes), "step": self.newest_step()}
        if kind == "join":
            self.join()
        elif kind == "kill rank":
            ranks = self._ranks(self.rng.choice(self.nodes))
            event["struck"] = bool(ranks)  # else it was between two starts
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        else:
            node = self.nodes.pop(self.rng.randrange(len(self.nodes)))
            if kind == "leave":
                self._leave([node])
            else:
                self._kill(node)
        self.events.append(event)

    def draw(self) -> str:
        """What may happen next; the last node does not go."""
        possible = dict(WEIGHTS)
        if len(self.nodes) == NODES:
            del possible["join"]
        if len(self.nodes) == 1:
            del possible["leave"], possible["kill node"]
        return self.rng.choices(list(possible), list(possible.values()))[0]

    def newest_step(self) -> int:
        """The last step that the run logged; 0 before."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return json.loads((self.folder / "run/metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0

    def lines(self) -> int:
        """How often the run logged a step."""
        with contextlib.suppress(OSError):
            return (self.folder / "run/metrics.jsonl").read_text().count("\n")
        return 0

    def go_on(self, steps: int, timeout_s: float) -> None:
        """Wait until all nodes train together and have logged so many more steps.

        Raises:
            AssertionError: they do not.
        """
        deadline, wanted, seen = time.monotonic() + timeout_s, None, None
        while wanted is None or self.lines() < wanted:
            if any(node.exitcode is not None for node in self.nodes):
                self.start_over()
                wanted = None
            assert time.monotonic() < deadline, f"no step for {timeout_s} s, {len(self.nodes)} nodes: {self.log()}"
            ranks = [self._ranks(node) for node in self.nodes]
            if not all(ranks) or ranks != seen:  # another start: its steps count from its first one on
                wanted, seen = (self.lines() + steps, ranks) if all(ranks) else (None, None)
            time.sleep(0.05)

    def start_over(self) -> None:
        """What a scheduler does where torchruns ended by themselves: end the others too, and start as many anew.

        Raises:
            AssertionError: it was not for having waited in vain for a node that had left, which is torchrun's own.
        """
        codes = [node.exitcode for node in self.nodes]
        assert self._waits_in_vain() > self.waited, f"torchruns ended with {codes}: {self.log()}"
        self.events.append({"kind": OVER, "time": time.time(), "nodes": len(codes), "step": self.newest_step()})
        self._leave(self.nodes)
        self.waited = self._waits_in_vain()
        self.meetings += 1  # torchrun has closed the other one
        self.nodes = []
        for _ in codes:
            self.join()

    def _waits_in_vain(self) -> int:
        return (self.folder / "log.txt").read_text().count(WAITED_IN_VAIN)

    def log(self) -> str:
        """The last that the nodes said."""
        return (self.folder / "log.txt").read_text()[-4000:]

    def end(self) -> int:
        """All nodes leave; two new ones take some more steps and finish the run. Returns its last step."""
        self._leave(self.nodes)
        self.nodes.clear()
        self.events.append({"kind": "leave", "time": time.time(), "nodes": 0, "step": self.newest_step()})
        last = self.newest_step() + 20
        self.meetings += 1
        for _ in range(2):
            self.join(f"num_train_steps={last}")
        for node in self.nodes:
            node.join(600)
        codes = [node.exitcode for node in self.nodes]
        assert codes == [0, 0], f"the last start ended with {codes}: {self.log()}"
        self.nodes.clear()
        return last


def life_of(folder: Path, script: str, overrides: list[str], images: Path, rng: random.Random) -> Life:
    """A run on `images` that begins when a node joins."""
    base = [*conftest().TINY, *LONG, f"data.path={images}", "data.num_workers=0", *overrides]
    base += [f"checkpoint.save_every_n_steps={EVERY}", "checkpoint.max_checkpoints=null"]
    return Life(folder, script, [*base, f"output_dir={folder / 'run'}"], rng)


def verdict(life: Life, last: int) -> dict[str, Any]:
    """What became of a run that took `last` steps, against a lone process."""
    run, starts = life.folder / "run", steps_of(life.folder)
    pieces = pieces_of(starts)
    lone = {}
    for name, wanted, more in (
        ("straight", [(0, last)], []),
        ("pieces", pieces, ["checkpoint.save_final_model=false"]),
    ):
        (life.folder / name).mkdir()
        arguments = (life.folder / name, wanted, run, life.script, [*life.overrides, *more])
        lone[name] = FORK.Process(target=alone, args=arguments)
        lone[name].start()
    for name, process in lone.items():
        process.join()
        assert process.exitcode == 0, (life.folder / name / "log.txt").read_text()[-4000:]
    straight = {step: got[0] for step, got in steps_of(life.folder / "straight")[0]["steps"].items()}
    batch = len(straight[1])
    read_metrics, weights = conftest().read_metrics, conftest().weights
    logged, losses = read_metrics(run), {}
    for first, end in pieces:
        again = read_metrics(life.folder / f"pieces/{first}-{end}")
        losses |= {step: again[step]["train/loss"] for step in range(first + 1, end + 1)}
    worst = {step: abs(logged[step]["train/loss"] / loss - 1) for step, loss in losses.items()}
    drift = read_metrics(life.folder / f"straight/0-{last}")
    wrong = check_samples(starts, batch, straight)
    repeats, too_many = check_repeats(starts, life.events)
    wrong += too_many
    wrong += [f"the loss of step {step} is off by {value:.1e}" for step, value in worst.items() if value > TOLERANCE]
    a, b = weights(life.folder, "run"), weights(life.folder / "straight", f"0-{last}")
    return {
        "steps": last,
        "starts": len(starts),
        "starts_by_ranks": dict(sorted(collections.Counter(start["ranks"] for start in starts).items())),
        "started_over": sum(event["kind"] == OVER for event in life.events),
        "samples": last * batch,
        "steps_taken_again": {"most": max(repeats), "in_all": sum(repeats)},
        "losses_compared": len(worst),
        "largest_loss_difference": max(worst.values()),
        "largest_loss_difference_to_straight": max(
            abs(logged[step]["train/loss"] / drift[step]["train/loss"] - 1) for step in drift
        ),
        "largest_weight_difference_to_straight": max((a[key] - b[key]).abs().max().item() for key in b),
        "wrong": wrong,
    }


def campaign(args: Any, folder: Path, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All lives; `tell` gets the results so far after each event."""
    began = time.monotonic()
    images = conftest().make_images(folder / "images")
    results: dict[str, Any] = {"events": 0, "kinds": {}, "lives": []}
    for index, (name, (script, overrides)) in enumerate(LIVES.items()):
        share = args.events // len(LIVES) + (index < args.events % len(LIVES))
        if not share:
            continue
        deadline = began + 60 * args.minutes * (index + 1) / len(LIVES)
        place = folder / f"life-{index}"
        life = life_of(place, script, overrides, images, random.Random(args.seed + index))
        found: dict[str, Any] = {"life": name, "events": life.events}
        results["lives"].append(found)
        try:
            with life.meeting_place():
                life.join()
                life.go_on(5, 600)
                for number in range(share):
                    if time.monotonic() > deadline:
                        break
                    life.happen(kind := life.draw())
                    results["events"] += 1
                    results["kinds"][kind] = results["kinds"].get(kind, 0) + 1
                    print(f"{name}: {number + 1}/{share} {kind}, {len(life.nodes)} nodes", flush=True)
                    tell(results)
                    if life.rng.random() < 0.25:  # the next event comes while this one is being digested
                        time.sleep(life.rng.uniform(0, 4))
                    else:
                        life.go_on(life.rng.randint(2, 25), 600)
                life.go_on(5, 600)
                last = life.end()
            found |= verdict(life, last)
        except AssertionError as error:
            found["wrong"] = [str(error)]
        print(json.dumps({key: value for key, value in found.items() if key != "events"}), flush=True)
        tell(results)
        shutil.rmtree(place)
    return results


def main() -> None:
    """Parse, disturb, compare, write; exits with 1 where something was lost, repeated or different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=40, help="no more events after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="written anew after each event")
    args = parser.parse_args()

    torch.set_num_threads(1)
    for script in sorted({script for script, _ in LIVES.values()}):
        importlib.import_module(script)
    meta = provenance()

    def tell(results: dict[str, Any]) -> None:
        args.output.write_text(json.dumps({"meta": meta, "results": results}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        results = campaign(args, Path(folder), tell)
    wrong = [line for life in results["lives"] for line in life["wrong"]]
    print(f"{results['events']} events {results['kinds']}, {len(wrong)} wrong")
    print("\n".join(line[:300] for line in wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
