"""Host memory of a large model's start: is it ever whole on one rank, or twice?

    python tools/start_memory.py vit_huge_patch14_224 --ranks 4 --output benchmarks/start_memory_cpu.json

MODEL is a name of config/model/. Processes on a CPU start train_fsdp2.py's own `main` on images of noise and, in
place of the training, save, resume from that and write final_model. Of each part the highest resident memory of a
rank is taken (the kernel's own mark, VmHWM), less what the process had before `main`, less what the rank has to hold
then: its shard of weights, gradients and optimizer state. What is left should be a block at most, whole, and a
constant.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import launch  # noqa: E402  (before torch)

import torch.distributed as dist  # noqa: E402

import checkpoint  # noqa: E402
import trainer  # noqa: E402
from benchmark import provenance  # noqa: E402
from dry_run import num_bytes  # noqa: E402
from imagenet_dataset import run_sizes  # noqa: E402
from schema import Config  # noqa: E402

M_MMAP_THRESHOLD = -3
FIXED = ["data=synthetic", "precision=fp32", "compile=false", "num_epochs=null", "num_train_steps=1"]
FIXED += ["global_batch_size=4", "data.num_workers=0", "evaluation.every_n_steps=null"]


def status(key: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


class Watch:
    """Highest resident memory of a part of the run, above that at the beginning."""

    def __init__(self) -> None:
        # Freed memory goes back to the system at once, so that a mark is of what was in use.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
        gc.collect()
        self.before = status("VmRSS")
        self.parts: dict[str, dict[str, int]] = {}

    @contextlib.contextmanager
    def part(self, name: str, held: Callable[[], int]) -> Iterator[None]:
        """What happens inside is that part, in which the rank has to hold `held` bytes, as told at its end."""
        Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew
        yield
        peak, needed = status("VmHWM") - self.before, held()
        self.parts[name] = {"peak": peak, "held": needed, "more": peak - needed}


def measure(cfg: Config) -> dict[str, Any]:
    """The start of a run of train_fsdp2.py on this rank: bytes by part, of a block and of all parameters."""
    entrypoint, watch, weights = importlib.import_module("train_fsdp2"), Watch(), []
    build_optimizer, init, sizes_of = entrypoint.build_optimizer, contextlib.ExitStack(), {}

    def optimizer_of(model: Any, *args: Any, **options: Any) -> Any:
        weights.extend(model.parameters())
        init.close()
        sizes_of["parameters"] = sum(p.numel() for p in weights)
        sizes_of["block"] = max(4 * sum(p.numel() for p in unit.parameters()) for unit in model.shard_units())

        def held() -> int:  # gradients, of zero, among them
            return 2 * num_bytes(weights) + num_bytes([list(state.values()) for state in optimizer.state.values()])

        with watch.part("optimizer", held):
            optimizer = build_optimizer(model, *args, **options)
        return optimizer

    def train(build: Callable[..., trainer.Run], cfg: Config, session: Any) -> dict:
        def held() -> int:
            return num_bytes(run.state.tensors(step=1))

        sizes = run_sizes(cfg, session.world_size)
        run = build(cfg, session, sizes)
        resumed = checkpoint.restore(run.state, cfg, session, sizes)
        saver = checkpoint.Saver(run.state, cfg, session, sizes, resumed=resumed)
        with watch.part("save", held):
            saver.save(1, None)
        with watch.part("resume", held):
            assert checkpoint.restore(run.state, cfg, session, sizes).step == 1
        with watch.part("final_model", held):
            if session.is_main:
                checkpoint.save_final_model(cfg, replace=True)
            dist.barrier()
        return {}

    with mock.patch.multiple(entrypoint, build_optimizer=optimizer_of, train=train):
        init.enter_context(watch.part("init", lambda: num_bytes(weights)))
        entrypoint.main(cfg)
    return sizes_of | {"parts": watch.parts}


def as_rank(folder: Path, overrides: list[str]) -> None:
    """One rank, which writes what it measured into the folder."""
    found = measure(launch.load_config("vit_base_patch16_224", overrides, script="train_fsdp2"))
    (folder / f"rank.{os.environ['RANK']}.json").write_text(json.dumps(found))


def of_model(name: str, ranks: int, overrides: list[str]) -> dict[str, Any]:
    """The row of a model: GiB, of the rank that took most of each part beyond what it has to hold."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        chosen = [f"model={name}", f"output_dir={folder}/run", *FIXED, *overrides]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([*torchrun, __file__, "--rank", folder, *chosen], check=True, env=environment)
        found = [json.loads(file.read_text()) for file in Path(folder).glob("rank.*.json")]
    parts = {
        part: {key: round(value / 2**30, 3) for key, value in max((f["parts"][part] for f in found), key=_more).items()}
        for part in found[0]["parts"]
    }
    return {"model": name, "parameters": found[0]["parameters"], "block": found[0]["block"] / 2**30, "parts": parts}


def _more(part: dict[str, int]) -> int:
    return part["more"]


def main() -> None:
    """Parse, measure, print and write."""
    if sys.argv[1:2] == ["--rank"]:
        as_rank(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = launch.Parser(__doc__)
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="names of config/model/; key=value are overrides for all of them"
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_intermixed_args()
    overrides = [name for name in args.models if "=" in name]
    rows = []
    for name in args.models:
        if name in overrides:
            continue
        rows.append(of_model(name, args.ranks, overrides))
        print(json.dumps(rows[-1]), flush=True)
        content = {"meta": provenance(), "ranks": args.ranks, "unit": "GiB", "results": rows}
        args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
