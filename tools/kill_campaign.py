"""Kill training runs at chosen moments, start them again, and ask that they end as if nothing had happened.

    python tools/kill_campaign.py --kills 60 --output benchmarks/kill_campaign_cpu.json

Runs of DDP and FSDP2 on two CPU processes under torchrun, with sync and async saves. Each is started again and again;
a start is killed (`kill -9` of one rank, of all ranks, or of torchrun alone) in a step, in a save, between a save's
last byte and its name, or while old checkpoints are deleted, at a random moment of that phase. A last start is left
alone. Its losses of every step and its final weights must equal the straight run's bit for bit, and no start may find
that it cannot go on.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmark import provenance
from interrupted_runs import ROOT, alive, compare, conftest, mark_phase, start_environment

PHASES = ("start", "step", "write", "commit", "prune")
VICTIMS = ("one rank", "all ranks", "torchrun")
STEPS, EVERY = 40, 4
KEYS = ("train/loss", "train/grad_norm", "train/lr", "val/loss", "val/top1")


def rank_main() -> None:
    """One rank: an entrypoint whose phases are written to a file as they begin, for the killer to read."""
    import launch

    import checkpoint
    import trainer

    folder, script, *overrides = sys.argv[2:]
    rank = os.environ["RANK"]
    Path(folder, f"pid.{rank}").write_text(str(os.getpid()))
    file = os.open(Path(folder, f"phase.{rank}"), os.O_CREAT | os.O_WRONLY)

    mark = functools.partial(mark_phase, file)

    mark("write", checkpoint.Saver, "_write")
    mark("commit", checkpoint.Saver, "_commit", 0.01)  # where a kill is most likely to tear something
    mark("prune", checkpoint.Saver, "_prune", 0.01)
    mark("step", trainer, "clip_grad_norm_", 0.01)
    os.pwrite(file, b"start   ", 0)
    importlib.import_module(script).main(launch.load_config("L0_sanity", overrides, script=script))


def command(folder: Path, script: str, overrides: list[str]) -> list[str | Path]:
    """A start of two ranks, each of them this program's `rank_main`."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(__file__, "rank", folder, script, *overrides),
    ]


def start(folder: Path, script: str, overrides: list[str]) -> subprocess.Popen:
    """A torchrun of its own, which leaves its ranks' phases and process ids in the folder, and its log."""
    for path in [*folder.glob("phase.*"), *folder.glob("pid.*")]:
        path.unlink()
    log = open(folder / "log.txt", "a")  # noqa: SIM115
    arguments = list(map(str, command(folder, script, overrides)))
    return subprocess.Popen(arguments, cwd=ROOT, env=start_environment(), stdout=log, stderr=log)


def phase(folder: Path) -> str | None:
    """Where rank 0 is."""
    try:
        return (folder / "phase.0").read_text().strip()
    except FileNotFoundError:
        return None


def kill_once(run: subprocess.Popen, folder: Path, rng: random.Random, wanted: str, victim: str) -> str | None:
    """Wait for the phase, a random number of times, then kill; returns the phase that was hit, None if it ended."""
    times, entered, last = rng.randint(1, 4), 0, None
    while run.poll() is None:
        now = phase(folder)
        entered += now == wanted and last != wanted
        last = now
        if entered >= (1 if wanted == "start" else times):
            break
        time.sleep(0.0005)
    else:
        return None
    time.sleep(rng.uniform(0, 3.0 if wanted == "start" else 0.03))
    hit = phase(folder)
    pids = [int((folder / f"pid.{rank}").read_text()) for rank in (0, 1) if (folder / f"pid.{rank}").exists()]
    if run.poll() is not None or not pids:
        return None
    targets = {"one rank": [rng.choice(pids)], "all ranks": pids, "torchrun": [run.pid]}[victim]
    struck = False
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):  # it ended in this very moment
            os.kill(pid, signal.SIGKILL)
            struck = True
    run.wait(timeout=120)
    deadline = time.monotonic() + 120
    while any(alive(pid) for pid in pids):  # orphans end by themselves, before their next save
        assert time.monotonic() < deadline, "ranks live on"
        time.sleep(0.05)
    return hit if struck else None


def campaign(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """All runs; returns what was hit and how each run ended."""
    rng = random.Random(seed)
    image_folder = conftest().make_images(folder / "images")
    kinds = [(script, way) for script in ("train_ddp", "train_fsdp2") for way in ("false", "true")]
    moments = collections.Counter()
    ends = []
    for index, (script, way) in enumerate(kinds):
        base = [*conftest().TINY, f"data.path={image_folder}", f"num_train_steps={STEPS}", "data.num_workers=1"]
        base += [
            f"checkpoint.save_every_n_steps={EVERY}",
            f"checkpoint.async_save={way}",
            "evaluation.every_n_steps=10",
        ]
        base += ["checkpoint.max_checkpoints=2"]
        straight = folder / f"straight-{script}-{way}"
        straight.mkdir()
        assert start(straight, script, [*base, f"output_dir={straight / 'run'}"]).wait(timeout=300) == 0
        share = kills // len(kinds) + (index < kills % len(kinds))
        done, lives = 0, 0
        while done < share:
            life = folder / f"life-{script}-{way}-{lives}"
            life.mkdir()
            lives += 1
            overrides = [*base, f"output_dir={life / 'run'}"]
            hits = []
            while done < share and len(hits) < 6:
                wanted, victim = rng.choice(PHASES), rng.choice(VICTIMS)
                hit = kill_once(start(life, script, overrides), life, rng, wanted, victim)
                if hit is None:  # it reached the end first
                    break
                hits.append((hit, victim))
                moments[f"{hit}, {victim}"] += 1
                done += 1
                print(f"{script} async={way} kill {done}/{share}: {hit}, {victim}", flush=True)
            code = start(life, script, overrides).wait(timeout=300)
            ends.append(
                {"script": script, "async": way == "true", "kills": hits, "end": compare(code, life, straight, KEYS)}
            )
            print(json.dumps(ends[-1]), flush=True)
            shutil.rmtree(life)
    return {"kills": sum(moments.values()), "moments": dict(sorted(moments.items())), "runs": ends}


def main() -> None:
    """Parse, kill, write; exits with 1 where a run did not end as if nothing had happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        results = campaign(args.kills, args.seed, Path(folder))
    args.output.write_text(json.dumps({"meta": provenance(), "results": results}, indent=1) + "\n")
    bad = [run for run in results["runs"] if run["end"] != "identical"]
    print(f"{results['kills']} kills, {len(results['runs'])} runs, {len(bad)} not identical; moments hit:")
    print("\n".join(f"{count:4d}  {moment}" for moment, count in results["moments"].items()))
    sys.exit(bool(bad))


if __name__ == "__main__":
    rank_main() if sys.argv[1:2] == ["rank"] else main()
