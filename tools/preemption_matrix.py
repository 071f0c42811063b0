"""Send runs a preemption's signals in every phase, start them again, and ask that they end as if nothing happened.

    python tools/preemption_matrix.py --output benchmarks/preemption_cpu.json

Signal x target x phase, for DDP and FSDP2 on two CPU processes under torchrun, with a loader worker each; some of it
with a console that takes nothing. A life is one run of one script: it is started once for each cell and signalled at a
random moment of that phase, then left alone to its end. A cell counts once a rank was seen in its phase as the signal
was sent; until then it is tried again. Each start is a torchrun of its own, but for signals to ranks that have imported
everything: there the same processes start the run again, because a start takes ten times what the cell does. In each
cell all ranks must stop at one step and save it once, status.json must say `preempted` and that step, and torchrun's
code must be 0, or 1 where it was signalled itself. At the end the losses of every step, the scores, the best result and
the final weights must equal the straight run's bit for bit.
"""

import argparse
import collections
import dataclasses
import functools
import importlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark import provenance
from interrupted_runs import ROOT, alive, compare, conftest, mark_phase, start_environment

TERM, USR1, INT, HUP = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP
SIGNALS = {number.name: [number] for number in (TERM, USR1, INT, HUP)} | {"SIGUSR1, SIGTERM": [USR1, TERM]}
# All processes, torchrun, the ranks and their workers: what `scancel --signal`, Ctrl-C and a closing terminal reach.
TARGETS = {"one rank": SIGNALS, "all ranks": SIGNALS, "torchrun": SIGNALS}
TARGETS |= {"all processes": ("SIGUSR1", "SIGINT", "SIGHUP")}
# Of the start: importing, waiting for the other ranks, reading the checkpoint, and from there to the first update.
START = ("import", "group", "restore", "first step")
PHASES = (*START, "step", "evaluation", "save")
CONSOLES = ("file", "closed pipe", "full disk")
SCRIPTS = ("train_ddp", "train_fsdp2")
STEPS, SAVE_EVERY, EVALUATE_EVERY = 400, 7, 5
KEYS = ("train/loss", "train/grad_norm", "train/lr", "val/loss", "val/top1", "val/top5", "val/images")
GRACE = 60  # seconds: on two busy cores a start alone takes half of them; torchrun itself is told to wait as long


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is sent to whom, when, and where the run's lines go."""

    phase: str
    target: str
    signal: str
    console: str = "file"

    @property
    def is_in_place(self) -> bool:
        """Whether the ranks can start the run again by themselves."""
        return self.phase != "import" and self.target.endswith(("rank", "ranks"))


def cells(phases: Sequence[str]) -> list[Cell]:
    """All that take no start of their own; of those that do, each signal in some phases, and one in the others."""
    found = [Cell(phase, target, name) for target in TARGETS for phase in phases for name in TARGETS[target]]
    each, two, one = ("import", "step", "save"), ("step",), {"torchrun": "SIGTERM", "all processes": "SIGUSR1"}
    found = [
        cell
        for cell in found
        if cell.is_in_place
        or cell.phase in (two if "," in cell.signal else each)
        or cell.signal == one.get(cell.target)
    ]
    for console in CONSOLES[1:]:
        found += [Cell(phase, "one rank", "SIGTERM", console) for phase in phases if phase != "import"]
        found += [Cell(phase, "torchrun", "SIGTERM", console) for phase in phases if phase == "step"]
    return found


def rank_main(folder: str, script: str, *overrides: str) -> None:
    """One rank: an entrypoint that writes its phase and its step to a file as it goes, for the sender to read."""
    from runtime import preemption

    preemption.listen()  # as launch.py does for an entrypoint
    rank = os.environ["RANK"]
    file = os.open(Path(folder, f"phase.{rank}"), os.O_CREAT | os.O_WRONLY)
    os.pwrite(file, b"import    ", 0)
    Path(folder, f"pid.{rank}").write_text(str(os.getpid()))

    import launch

    import torch.distributed as dist

    import checkpoint
    import trainer

    mark = functools.partial(mark_phase, file)

    mark("group", dist, "init_process_group", 0.05, then="build")
    mark("restore", checkpoint, "restore", 0.05, then="first step")
    mark("save", checkpoint.Saver, "_write", 0.01)
    mark("save", checkpoint.Saver, "_commit", 0.01)
    mark("step", trainer, "clip_grad_norm_", 0.02)
    mark("evaluation", trainer, "evaluate", 0)
    call = trainer.Normalize.__call__

    def slowly(self: trainer.Normalize, images: Any) -> Any:
        time.sleep(0.02)
        return call(self, images)

    trainer.Normalize.__call__ = slowly
    arguments = [str(ROOT / f"{script}.py"), *overrides]
    sys.argv = list(arguments)  # Hydra's part of `launch` adds to it
    main = importlib.import_module(script).main
    launch.launch(main)
    for number in itertools.count() if os.environ["IN_PLACE"] == "yes" else ():
        os.pwrite(file, b"stopped   ", 0)  # the run that has ended ignores signals: the second of two may be late
        while not (told := list(Path(folder).glob(f"next.{number}.*"))):
            time.sleep(0.01)
        if told[0].suffix == ".no":
            return
        for each in preemption.SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        preemption.listen()
        os.pwrite(file, b"restart   ", 0)
        sys.argv = list(arguments)
        launch.launch(main)


def start(
    folder: Path, script: str, overrides: list[str], *, console: str = "file", in_place: bool = False
) -> subprocess.Popen:
    """A torchrun. `in_place`: each time the run has stopped, its ranks wait for a file next.<number>.again or .no."""
    for path in [*folder.glob("phase.*"), *folder.glob("pid.*"), *folder.glob("next.*")]:
        path.unlink()
    env = start_environment(PET_SIGNALS_TO_HANDLE="SIGTERM,SIGINT,SIGHUP,SIGUSR1", IN_PLACE="yes" if in_place else "no")
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(GRACE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [__file__, "rank", folder, script, *overrides]
    (folder / "log.txt").write_text("")
    if console == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full" if console == "full disk" else folder / "log.txt", os.O_WRONLY | os.O_APPEND)
    try:
        return subprocess.Popen(list(map(str, command)), cwd=ROOT, env=env, stdout=writer, stderr=writer)
    finally:
        os.close(writer)


def phases(folder: Path) -> list[str | None]:
    """Where both ranks are; [None] before they say."""
    try:
        return [(folder / f"phase.{rank}").read_text().strip() for rank in (0, 1)]
    except FileNotFoundError:
        return [None]


def children(pid: int) -> list[int]:
    """All processes below one."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *children(int(child))]
    return found


def signal_once(
    run: subprocess.Popen, folder: Path, rng: random.Random, cell: Cell
) -> tuple[list[str | None], bool, float]:
    """Wait for the phase, and send.

    Returns:
        The phases of both ranks when it was sent, whether a rank that it went to was in the cell's, the seconds to the
        end.
    """
    deadline = time.monotonic() + 120
    while cell.phase not in phases(folder) or not (folder / "pid.0").exists() or not (folder / "pid.1").exists():
        assert run.poll() is None, (folder / "log.txt").read_text()[-3000:]
        assert time.monotonic() < deadline, f"{cell}: the phase did not come, but {phases(folder)}"
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, {"import": 1.0, "step": 0.3}.get(cell.phase, 0.02)))
    ranks = [int((folder / f"pid.{rank}").read_text()) for rank in (0, 1)]
    found = phases(folder)
    one = rng.choice([pid for pid, phase in zip(ranks, found, strict=True) if phase == cell.phase] or ranks)
    targets = {"one rank": [one], "all ranks": ranks, "torchrun": [run.pid]}
    sent = time.monotonic()
    for number in SIGNALS[cell.signal]:
        for pid in targets.get(cell.target) or [run.pid, *children(run.pid)]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # a helper process that has just ended
                assert cell.target == "all processes"
        time.sleep(0.05)
    while run.poll() is None and set(phases(folder)) != {"stopped"}:
        assert time.monotonic() < sent + 120, (folder / "log.txt").read_text()[-3000:]
        time.sleep(0.01)
    while (
        run.poll() is not None and any(alive(pid) for pid in ranks) and time.monotonic() < sent + 120
    ):  # a rank that outlives torchrun counts
        time.sleep(0.02)
    return found, cell.phase in found, time.monotonic() - sent


def check(folder: Path, code: int | None, target: str, seconds: float, log: str) -> str | None:
    """What is wrong with how the run stopped; None if nothing is. The code is None where the processes go on.

    `log` is what this start added to train.log.
    """
    status = json.loads((folder / "run/status.json").read_text())
    step = status["step"]
    if seconds > GRACE:
        return f"{seconds:.0f} s until all ranks had ended"
    if status["state"] != "preempted":
        return f"state {status['state']}"
    if code not in ((1,) if target in ("torchrun", "all processes") else (0, None)):
        return f"code {code}"
    if re.findall(r"stopped after step (\d+)", log) != [str(step)]:
        return "not stopped once, at the step of status.json"
    newest = max((folder / "run/checkpoints").glob("step_????????"), default=None)
    if step and (newest is None or int(newest.name[5:]) != step):
        return f"stopped at {step}, newest checkpoint {newest}"
    if len(re.findall(rf"step {step}: saved in", log)) > 1:
        return f"step {step} was saved more than once"
    if re.search(rf'File "{ROOT}/[\w/]+.py", line', (folder / "log.txt").read_text()):
        return "a rank ended with a traceback"
    return None


def matrix(
    scripts: Sequence[str], wanted: Sequence[str], seed: int, folder: Path, report: Callable[[dict], None]
) -> None:
    """All lives, a row a cell and a row an end, each handed to `report` as it comes."""
    rng = random.Random(seed)
    image_folder = conftest().make_images(folder / "images")
    for script in scripts:
        base = [*conftest().TINY, f"data.path={image_folder}", f"num_train_steps={STEPS}", "micro_batch_size=6"]
        base += [f"checkpoint.save_every_n_steps={SAVE_EVERY}", f"evaluation.every_n_steps={EVALUATE_EVERY}"]
        base += ["data.num_workers=1"]
        straight, life = folder / f"straight-{script}", folder / f"life-{script}"
        straight.mkdir()
        life.mkdir()
        assert start(straight, script, [*base, f"output_dir={straight / 'run'}"]).wait(timeout=600) == 0
        launched = functools.partial(start, life, script, [*base, f"output_dir={life / 'run'}"])

        def act(run: subprocess.Popen, cell: Cell, script: str = script, life: Path = life) -> bool:
            """Send a cell's signal, look, report; whether its phase was hit."""
            train_log = life / "run/train.log"
            before = len(train_log.read_text()) if train_log.exists() else 0
            found, is_hit, seconds = signal_once(run, life, rng, cell)
            log = train_log.read_text()[before:]
            wrong = check(life, run.poll(), cell.target, seconds, log)
            step = json.loads((life / "run/status.json").read_text())["step"]
            row = {"script": script, **dataclasses.asdict(cell), "phases seen": found, "hit": is_hit}
            report(row | {"code": run.poll(), "step": step, "seconds": round(seconds, 2), "wrong": wrong})
            if wrong:
                print(log[-3000:], (life / "log.txt").read_text()[-3000:], flush=True)
            return is_hit

        todo = cells(wanted)
        for cell in todo:
            while not cell.is_in_place and not act(launched(console=cell.console), cell):
                pass
        for console in CONSOLES:
            in_place = collections.deque(cell for cell in todo if cell.is_in_place and cell.console == console)
            if not in_place:
                continue
            run = launched(console=console, in_place=True)
            for number in itertools.count():
                if act(run, in_place[0]):
                    in_place.popleft()
                (life / f"next.{number}.{'again' if in_place else 'no'}").touch()
                if not in_place:
                    assert run.wait(timeout=120) == 0, (life / "log.txt").read_text()[-3000:]
                    break
        code = launched().wait(timeout=600)
        report({"script": script, "end": compare(code, life, straight, KEYS)})


def main() -> None:
    """Parse, signal, write; exits with 1 where a cell or an end is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    rows = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        matrix(args.scripts, args.phases, args.seed, Path(folder), report)
    sent, ends = [row for row in rows if "phase" in row], [row for row in rows if "end" in row]
    hits = [row for row in sent if row["hit"]]
    bad = [row for row in sent if row["wrong"]] + [row for row in ends if row["end"] != "identical"]
    summary = {"cells": len(hits), "runs": len(ends), "bad": len(bad), "slowest_s": max(row["seconds"] for row in sent)}
    summary |= {"tried again": len(sent) - len(hits)}
    summary |= {key: collections.Counter(row[key] for row in hits) for key in ("phase", "target", "signal", "console")}
    print(json.dumps(summary))
    text = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = json.dumps({"meta": provenance(), "summary": summary}, indent=1)[:-2]
    args.output.write_text(f'{head},\n "results": [\n{text}\n ]\n}}\n')
    sys.exit(bool(bad))


if __name__ == "__main__":
    rank_main(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main()
