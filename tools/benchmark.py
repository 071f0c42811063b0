"""Measure what the recipe does on a machine, and write it to a file that says how it was measured.

    python tools/benchmark.py train --nproc 2 --output benchmarks/h100x2_b16.json -- \
        --config-name vit_base_patch16_224 data=synthetic num_epochs=null num_train_steps=50

`train` runs the three entrypoints one after the other, each in processes of its own, with the same overrides, and reads
their metrics.jsonl: the whole loss curve, and the median of speed, MFU and memory over the log lines after the warm-up.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "torchvision", "timm", "megatron-fsdp", "transformer-engine", "torchdata", "hydra-core")


def provenance() -> dict[str, Any]:
    """Command, card, versions, commit and date: what every result file carries."""
    import torch

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    described = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
    )
    return {
        "command": " ".join(["python", *sys.argv]),
        "card": f"{len(cards)} x {cards[0]}" if cards else f"CPU, {os.cpu_count()} cores",
        "versions": versions,
        "commit": os.environ.get("COMMIT") or described.stdout.strip() or "unknown",  # COMMIT: for a copy without .git
        "date": time.strftime("%Y-%m-%d"),
    }


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run the entrypoints and gather their metrics."""
    results = {}
    for script in args.scripts:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc}"]
            command += [ROOT / f"{script}.py", *args.overrides, f"output_dir={folder}", "checkpoint.ckpt_dir=null"]
            done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=args.timeout)
            if done.returncode:
                sys.exit(f"{script} failed with {done.returncode}:\n{done.stderr[-4000:]}")
            lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        rows = [line for line in lines if "train/loss" in line]
        steady = [row for row in rows if row["step"] > args.warmup] or rows[-1:]

        def median(key: str, steady: list[dict] = steady) -> float | None:
            values = [row[key] for row in steady if row[key] is not None]
            return round(statistics.median(values), 4) if values else None

        results[script] = {
            "images_per_second": median("train/images_per_second"),
            "step_time_s": median("train/step_time_s"),
            "mfu": median("train/mfu"),
            "data_wait_fraction": median("train/data_wait_fraction"),
            "memory_peak_gib": median("train/memory_peak_gib"),
            "losses": {row["step"]: round(row["train/loss"], 6) for row in rows},
            "validation": [line for line in lines if "val/top1" in line],
        }
        print(json.dumps({"script": script} | {k: v for k, v in results[script].items() if k != "losses"}), flush=True)
    return results


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    sub = commands.add_parser("train", help="images/s, MFU, memory and loss curves of the entrypoints")
    sub.add_argument("--scripts", nargs="+", default=["train_ddp", "train_fsdp2", "train_mfsdp"])
    sub.add_argument("--nproc", type=int, default=1)
    sub.add_argument("--warmup", type=int, default=10, help="steps that do not count")
    sub.add_argument("--timeout", type=float, default=300, help="seconds a script")
    sub.add_argument("--output", type=Path, required=True)
    sub.add_argument("overrides", nargs="*", help="after --: the entrypoints' own arguments")
    args = parser.parse_args()
    report = {"meta": provenance(), "results": train(args)}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
