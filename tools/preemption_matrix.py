"""Send runs a preemption's signals in every phase, start them again, and ask that they end as if nothing happened.

    python tools/preemption_matrix.py --output benchmarks/preemption_cpu.json

Signal x target x phase, for DDP and FSDP2 on two CPU processes under torchrun, with a loader worker each. A life is one
run of one script: it is started once for each cell and signalled at a random moment of that phase, then left alone to
its end. Each start is a torchrun of its own, but for signals to ranks once they train: there the same processes start
the run again, because a start takes ten times what the cell does. In each cell all ranks must stop at one step and save
it once, status.json must say `preempted` and that step, and torchrun's code must be 0, or 1 where it was signalled
itself. At the end the losses of every step, the scores, the best result and the final weights must equal the straight
run's bit for bit.
"""

import argparse
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

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
SIGNALS = {"SIGTERM": [TERM], "SIGUSR1": [USR1], "SIGUSR1, SIGTERM": [USR1, TERM]}
# All processes: torchrun, the ranks and their workers, which `scancel --signal` reaches, with the signal of slurm.sh.
TARGETS = {"one rank": SIGNALS, "all ranks": SIGNALS, "torchrun": SIGNALS, "all processes": ("SIGUSR1",)}
PHASES = ("start", "step", "evaluation", "save")
SCRIPTS = ("train_ddp", "train_fsdp2")
STEPS, SAVE_EVERY, EVALUATE_EVERY = 400, 7, 5
KEYS = ("train/loss", "train/grad_norm", "train/lr", "val/loss", "val/top1", "val/top5", "val/images")
GRACE = 60  # seconds: on two busy cores a start alone takes half of them; torchrun itself is told to wait as long


def rank_main(folder: str, script: str, *overrides: str) -> None:
    """One rank: an entrypoint that writes its phase and its step to a file as it goes, for the sender to read."""
    from runtime import preemption

    preemption.listen()  # as launch.py does for an entrypoint
    import launch

    rank = os.environ["RANK"]
    file = os.open(Path(folder, f"phase.{rank}"), os.O_CREAT | os.O_WRONLY)
    os.pwrite(file, b"start     ", 0)
    Path(folder, f"pid.{rank}").write_text(str(os.getpid()))

    import checkpoint
    import trainer

    mark = functools.partial(mark_phase, file)

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
    launch.launch(importlib.import_module(script).main)
    for number in range(int(os.environ["AGAIN"])):
        os.pwrite(file, b"stopped   ", 0)
        while not Path(folder, f"go.{number}").exists():
            time.sleep(0.01)
        os.pwrite(file, b"start     ", 0)
        sys.argv = list(arguments)
        launch.launch(importlib.import_module(script).main)


def start(folder: Path, script: str, overrides: list[str], *, again: int = 0) -> subprocess.Popen:
    """A torchrun; its ranks start the run again `again` times, each time when go.<number> appears."""
    for path in [*folder.glob("phase.*"), *folder.glob("pid.*"), *folder.glob("go.*")]:
        path.unlink()
    env = start_environment(PET_SIGNALS_TO_HANDLE="SIGTERM,SIGINT,SIGHUP,SIGUSR1", AGAIN=str(again))
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(GRACE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [__file__, "rank", folder, script, *overrides]
    with open(folder / "log.txt", "w") as log:
        return subprocess.Popen(list(map(str, command)), cwd=ROOT, env=env, stdout=log, stderr=log)


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
    run: subprocess.Popen, folder: Path, rng: random.Random, numbers: list[signal.Signals], target: str, wanted: str
) -> tuple[list[str | None], float]:
    """Wait for the phase, and send; returns the phases of both ranks when it was sent and the seconds to the end."""
    deadline = time.monotonic() + 120
    while wanted not in phases(folder) or (wanted == "start" and not (folder / "pid.1").exists()):
        assert run.poll() is None, (folder / "log.txt").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, {"start": 4.0, "step": 0.3}.get(wanted, 0.02)))
    ranks = [int((folder / f"pid.{rank}").read_text()) for rank in (0, 1)]
    targets = {"one rank": [rng.choice(ranks)], "all ranks": ranks, "torchrun": [run.pid]}
    hit = phases(folder)
    sent = time.monotonic()
    for number in numbers:
        for pid in targets.get(target) or [run.pid, *children(run.pid)]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # a helper process that has just ended
                assert target == "all processes"
        time.sleep(0.05)
    while run.poll() is None and set(phases(folder)) != {"stopped"}:
        assert time.monotonic() < sent + 120, (folder / "log.txt").read_text()[-3000:]
        time.sleep(0.01)
    while (
        run.poll() is not None and any(alive(pid) for pid in ranks) and time.monotonic() < sent + 120
    ):  # a rank that outlives torchrun counts
        time.sleep(0.02)
    return hit, time.monotonic() - sent


def check(folder: Path, code: int | None, target: str, seconds: float, log: str) -> str | None:
    """What is wrong with how the run stopped; None if nothing is. The code is None where the processes go on."""
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
    if re.search(rf'File "{ROOT}/\w+.py", line', log):
        return "a rank ended with a traceback"
    return None


def matrix(scripts: Sequence[str], seed: int, folder: Path, report: Callable[[dict], None]) -> None:
    """All lives, a row a cell and a row an end, each handed to `report` as it comes."""
    rng = random.Random(seed)
    image_folder = conftest().make_images(folder / "images")
    for script in scripts:
        base = [
            *conftest().TINY,
            f"data.path={image_folder}",
            f"num_train_steps={STEPS}",
            "data.num_workers=1",
            "micro_batch_size=6",
        ]
        base += [f"checkpoint.save_every_n_steps={SAVE_EVERY}", f"evaluation.every_n_steps={EVALUATE_EVERY}"]
        straight = folder / f"straight-{script}"
        straight.mkdir()
        assert start(straight, script, [*base, f"output_dir={straight / 'run'}"]).wait(timeout=600) == 0
        life = folder / f"life-{script}"
        life.mkdir()
        overrides = [*base, f"output_dir={life / 'run'}"]
        cells = [(p, t, name) for t, p in itertools.product(TARGETS, PHASES) for name in TARGETS[t]]
        in_place = [cell for cell in cells if cell[0] != "start" and cell[1].endswith(("rank", "ranks"))]
        seen = 0  # characters of the log that belong to earlier cells

        def act(run, phase, target, name, script=script, life=life):
            nonlocal seen
            hit, seconds = signal_once(run, life, rng, SIGNALS[name], target, phase)
            log = (life / "log.txt").read_text()
            wrong = check(life, run.poll(), target, seconds, log[seen:])
            seen = len(log)
            step = json.loads((life / "run/status.json").read_text())["step"]
            row = {"script": script, "target": target, "phase": phase, "signal": name, "phases hit": hit}
            report(row | {"code": run.poll(), "step": step, "seconds": round(seconds, 2), "wrong": wrong})
            if wrong:
                print(log[-6000:], flush=True)

        for cell in cells:
            if cell not in in_place:
                seen = 0
                act(start(life, script, overrides), *cell)
        run, seen = start(life, script, overrides, again=len(in_place)), 0
        for number, cell in enumerate(in_place):
            act(run, *cell)
            (life / f"go.{number}").touch()
        report({"script": script, "end": compare(run.wait(timeout=600), life, straight, KEYS)})


def main() -> None:
    """Parse, signal, write; exits with 1 where a cell or an end is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    rows = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        matrix(args.scripts, args.seed, Path(folder), report)
    cells, ends = [row for row in rows if "phase" in row], [row for row in rows if "end" in row]
    bad = [row for row in cells if row["wrong"]] + [row for row in ends if row["end"] != "identical"]
    summary = {"cells": len(cells), "runs": len(ends), "bad": len(bad), "slowest_s": max(c["seconds"] for c in cells)}
    print(json.dumps(summary))
    text = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = json.dumps({"meta": provenance(), "summary": summary}, indent=1)[:-2]
    args.output.write_text(f'{head},\n "results": [\n{text}\n ]\n}}\n')
    sys.exit(bool(bad))


if __name__ == "__main__":
    rank_main(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main()
