"""Kill processes that save to a bucket at chosen moments, and ask what the next one finds there, from an empty folder.

    python tools/bucket_campaign.py --kills 300 --output benchmarks/bucket_campaign_cpu.json

Saves are synchronous or asynchronous, by chance. The bucket is moto's S3 server behind a proxy that fails, cuts and
delays 5 % of the requests each. A process goes on from the newest checkpoint, saves step after step through
checkpoint.py, tensors that are functions of the step, keeps the two newest and a best one, and is killed (SIGKILL) at a
random moment of one of the phases below. Each next process begins in an empty local folder. It must find a step that
has a manifest in the bucket, none older than the last whose save had returned, and every bit of that step.

`start` is until the first save; `write` is DCP's writing; `upload` that of the parts; `commit` is from the last part to
the manifest; `prune` the deleting of earlier ones.
"""

import argparse
import collections
import contextlib
import dataclasses
import gc
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmark import provenance
from interrupted_runs import ROOT, conftest, mark_phase

PHASES = ("start", "write", "upload", "commit", "prune")
FAULTS = {"fail": 0.05, "cut": 0.05, "delay": 0.05, "delay_s": 0.5}
URL = "s3://bucket/campaign"
SAVES = 12  # of a process that is not killed before


def fill(tensors: Any, step: int) -> None:
    """Put into every tensor what belongs to the step, all bits of it random."""
    import torch

    from checkpoint import _leaves

    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in _leaves(tensors):
            noise = torch.randint(-(2**31), 2**31, tensor.shape, generator=generator, dtype=torch.int64)
            tensor.copy_(noise.to(torch.int32).view(torch.float32) if tensor.dtype == torch.float32 else noise)


def changed_bytes(tensors: Any, step: int) -> int:
    """Bytes that are not what belongs to the step."""
    import torch

    from checkpoint import _leaves

    def as_bytes() -> list[torch.Tensor]:
        return [tensor.detach().clone().flatten().view(torch.uint8) for tensor in _leaves(tensors)]

    got = as_bytes()
    fill(tensors, step)
    return sum(int((a != b).sum()) for a, b in zip(got, as_bytes(), strict=True))


def saver_main(cfg: Any, phases: int, report: Connection) -> None:
    """One process: go on from what is there, tell what was found, save on. Runs in a fork."""
    import checkpoint
    from imagenet_dataset import run_sizes
    from optim import build_optimizer
    from runtime.checkpoint_places import InBucket
    from runtime.process_group import dist_session
    from vit import VisionTransformer

    with dist_session(cfg) as session:
        model = VisionTransformer(cfg.model)
        model.init_weights(cfg.seed)
        optimizer = build_optimizer(model, cfg, no_weight_decay=model.no_weight_decay())
        state, sizes = checkpoint.TrainState(model, optimizer, {}, cfg.ema), run_sizes(cfg, 1)
        resumed = checkpoint.restore(state, cfg, session, sizes)
        changed = changed_bytes(state.tensors(), resumed.step) if resumed.step else 0
        report.send({"found": resumed.step, "changed": changed, "there": manifests()})
        mark_phase(phases, "write", checkpoint.dcp, "save", 0.003, then="between")
        mark_phase(phases, "upload", InBucket, "collect", 0.003, then="between")
        mark_phase(phases, "commit", InBucket, "commit", 0.003, then="between")
        mark_phase(phases, "prune", InBucket, "prune", 0.003, then="between")
        saver = checkpoint.Saver(state, cfg, session, sizes, resumed=resumed)
        best = resumed.best
        for step in range(resumed.step + 1, resumed.step + 1 + SAVES):
            fill(state.tensors(), step)
            if step % 3 == 0:
                best = {"step": step, "metric": "val/top1", "value": step / 1e6}
            saver.save(step, best)
            saver.wait()
            report.send({"saved": step})


class Life:
    """A process that saves, forked from this one, which has imported all that it needs."""

    def __init__(self, folder: Path, cfg: Any) -> None:
        folder.mkdir()
        self.file, self.folder = folder / "phase", folder
        phases = os.open(self.file, os.O_CREAT | os.O_WRONLY)
        os.pwrite(phases, b"start     ", 0)
        self.reports, report = Pipe(duplex=False)
        self.messages: list[dict[str, Any]] = []
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                saver_main(cfg, phases, report)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        report.close()
        os.close(phases)

    def phase(self) -> str:
        """Where it is."""
        return self.file.read_text().strip()

    def read(self) -> None:
        """Take in what it has told."""
        with contextlib.suppress(EOFError):
            while self.reports.poll():
                self.messages.append(self.reports.recv())

    def ended(self) -> int | None:
        """Its status, once it has ended."""
        self.read()
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return status if pid else None

    def told(self, key: str) -> list[Any]:
        """All values that it has told of `key`."""
        return [message[key] for message in self.messages if key in message]


def kill(life: Life, rng: random.Random, wanted: str) -> tuple[str | None, int]:
    """Wait for the phase, a random number of times, then kill; the phase that was hit, None where it ended first."""
    times, entered, last = rng.randint(1, 2), 0, None
    deadline = time.monotonic() + 300
    while (status := life.ended()) is None:
        now = life.phase()
        entered += now == wanted and last != wanted
        last = now
        if entered >= (1 if wanted == "start" else times):
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {wanted} in 300 s: {(life.folder / 'log.txt').read_text()[-2000:]}")
        time.sleep(0.0005)
    else:
        return None, status
    time.sleep(rng.uniform(0, 1.0 if wanted == "start" else 0.06))
    hit = life.phase()
    os.kill(life.pid, signal.SIGKILL)
    _, status = os.waitpid(life.pid, 0)
    life.read()
    return (hit if os.WIFSIGNALED(status) else None), status


def manifests() -> set[int]:
    """The steps that have a manifest in the bucket, by a listing of keys alone."""
    from runtime.bucket import Bucket

    return {int(key[5:13]) for key in Bucket.of(URL).list("step_") if key.endswith("/manifest.json")}


def campaign(kills: int, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """All processes; after each kill, what was hit so far and what each next one found."""
    import launch

    rng = random.Random(seed)
    images = conftest().make_images(folder / "images")
    base = [*conftest().TINY, f"data.path={images}", f"checkpoint.ckpt_dir={URL}", "checkpoint.max_checkpoints=2"]
    cfg = launch.load_config("L0_sanity", [*base, "num_train_steps=100000", "output_dir=unused"], script="train_ddp")
    moments: collections.Counter = collections.Counter()
    bad: list[str] = []
    lives, done, durable, resumes, changed = 0, 0, 0, 0, 0
    while done < kills and len(bad) < 6:
        before = manifests()
        place, way = folder / f"life{lives}", rng.choice((False, True))
        saving = dataclasses.replace(cfg.checkpoint, local_dir=str(place / "local"), async_save=way)
        life = Life(place, dataclasses.replace(cfg, output_dir=str(place / "run"), checkpoint=saving))
        lives += 1
        hit, status = kill(life, rng, rng.choice(PHASES))
        if hit is not None:
            moments[f"{hit}, {'asynchronous' if way else 'synchronous'}"] += 1
            done += 1
        elif status:
            bad.append(f"life {lives} failed: {(life.folder / 'log.txt').read_text()[-1500:]}")
        for found in life.told("found"):
            resumes += 1
            changed += life.told("changed")[0]
            # A manifest of the process before may have reached the server after it was gone.
            there = {0, *life.told("there")[0]}
            if found not in there or found < max(before, default=0) or found < durable:
                bad.append(f"life {lives} found step {found}, of {before} and then {there}; {durable} was saved")
        durable = max([durable, *life.told("saved")])
        shutil.rmtree(life.folder)
        if done % 20 == 0 and hit is not None:
            print(f"{done} kills, {resumes} resumes, {len(bad)} false, {changed} bytes changed", flush=True)
        result = {"kills": done, "moments": dict(sorted(moments.items())), "resumes": resumes}
        yield result | {"steps": durable, "false_resumes": len(bad), "bytes_changed": changed, "failures": bad}


def main() -> None:
    """Parse, kill, write; exits with 1 where a resume was not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    sys.path[:0] = [str(ROOT)]
    conftest()
    import bucket_server  # pyright: ignore[reportMissingImports]  (conftest's folder)

    import checkpoint  # noqa: F401  (the forks then have it)

    meta = provenance()
    os.environ["COMMIT"] = meta["commit"]  # else each process asks git
    gc.freeze()
    logging.getLogger("botocore").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with bucket_server.serving(folder) as server:
            os.environ |= server.environment
            server.set(**FAULTS)
            start = time.monotonic()
            results: dict[str, Any] = {}
            for results in campaign(args.kills, args.seed, folder):
                results |= {"minutes": round((time.monotonic() - start) / 60, 1), "asked_of_the_proxy": FAULTS}
                results |= {"server": server.counts()}
                # Now, so that a campaign that is broken off has left what it found.
                args.output.write_text(json.dumps({"meta": meta, "results": results}, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    sys.exit(bool(results["false_resumes"] or results["bytes_changed"]))


if __name__ == "__main__":
    main()
