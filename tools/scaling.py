"""How a step scales over the GPUs of a machine: models x blocks x strategies x 1, 2, 4, ... GPUs, beside the estimate.

    python tools/scaling.py --output benchmarks/scaling_h200x8.json
    python tools/scaling.py --measured benchmarks/scaling_h200x8.json --output again.json    # beside today's estimate

For each model and number of GPUs `tools/benchmark.py strategies` is started once. One GPU is measured on all of them at
the same time, each a run of its own: cards differ by some per cent, share the machine's power and cooling, and a step
on several waits for the slowest. So there are two scalings of N GPUs: over the sum of what each makes alone, and over N
times the slowest. A start that fails says why, and the rest goes on; the files are written after each, so that a time
limit leaves what came before it. What tools/estimate.py says stands beside, also for GPUs that are not there.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import benchmark
import estimate
import peers

MODELS = {"base_patch16": 512, "gigantic_patch14": 16}  # model -> images a GPU: the two that others publish


def estimated(model: str, variant: str, images: int, gpus: int, script: str) -> dict[str, float]:
    """Images/s and peak GiB by tools/estimate.py."""
    batch = (f"global_batch_size={images * gpus}", f"micro_batch_size={images}")
    with estimate.cards_are_here():
        cfg = peers.config(model, None, *peers.OURS[variant], *batch, script=script)  # that of the run
        network = estimate.ASSUMED["network GB/s a card"]
        way = estimate.estimate(cfg, script, gpus, estimate.Shape.of(cfg), network=network)
    return {
        "estimated_images_per_second": round(images * gpus / way.step, 1),
        "estimated_peak_gib": round(way.peak, 1),
    }


def measured(size: str, groups: list[list[str]], folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one start on each group of GPUs, all at the same time; images/s are the mean, `of_each` has them all.

    A start that ends early adds a row with an `error`, and is null in `of_each`.
    """
    cores, starts = sorted(os.sched_getaffinity(0)), []
    for number, group in enumerate(groups):
        output = folder / f"{size.replace(':', '_')}_{len(group)}_{number}.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(group)}"]
        command += [str(benchmark.ROOT / "tools/benchmark.py"), "strategies", "--sizes", size]
        command += ["--variants", args.variants, "--scripts", *args.scripts, "--steps", str(args.steps)]
        mine = cores[number * len(cores) // len(groups) : (number + 1) * len(cores) // len(groups)] or cores
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(group)}
        with open(output.with_suffix(".log"), "w") as log:
            process = subprocess.Popen(
                ["taskset", "--cpu-list", ",".join(map(str, mine)), *command, "--output", str(output)],
                env=environment,
                stdout=log,
                stderr=log,
            )
        starts.append((process, output))
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    errors, until = [], time.monotonic() + args.timeout
    for number, (process, output) in enumerate(starts):
        try:
            process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun, which ends its ranks
            process.wait()
        for row in json.loads(output.read_text())["results"]["rows"] if output.exists() else []:
            found.setdefault((row["variant"], row["script"]), {})[number] = row
        if process.returncode:
            errors.append({"model": size.partition(":")[0], "gpus": len(groups[0]), "error": why(output)})
    rows = []
    for each in found.values():
        rates = [each[number]["images_per_second"] if number in each else None for number in range(len(groups))]
        mean = statistics.mean(row["images_per_second"] for row in each.values())
        rows.append(next(iter(each.values())) | {"images_per_second": round(mean, 1), "of_each": rates})
    return rows + errors[:1]


def why(output: Path) -> str:
    """The first line that looks like an error of Python's in the log of a start; what follows are torchrun's."""
    log = output.with_suffix(".log").read_text()
    said = re.findall(r"^(?:\[rank\d+\]: ?)?((?:[\w.]*Error|error|SystemExit)\b.*)", log, re.MULTILINE)
    return (said or ["ended by --timeout, or by a signal"])[0][:200]


def with_scaling(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with its images/s over those of its GPUs, each alone, and over as many times the slowest's."""
    key = ("model", "variant", "script")
    alone = {tuple(row.get(k) for k in key): row["of_each"] for row in rows if row["gpus"] == 1 and "of_each" in row}
    found = []
    for row in rows:
        rates = alone.get(tuple(row.get(k) for k in key), [])[: row["gpus"]]
        if row["gpus"] > 1 and "of_each" in row and len(rates) == row["gpus"] and all(rates):
            row = row | {"scaling": round(row["images_per_second"] / sum(rates), 3)}
            row |= {"scaling_of_slowest": round(row["images_per_second"] / len(rates) / min(rates), 3)}
        found.append(row)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    keys = ("model", "variant", "script", "gpus", "images_per_second", "share_of_gemm", "scaling", "scaling_of_slowest")
    keys += ("peak_gib", "first_step_s", "estimated_images_per_second", "estimated_peak_gib", "error")
    lines = ["| " + " | ".join(keys) + " |", "|" + " --- |" * len(keys)]
    lines += ["| " + " | ".join(str(row.get(key, "")) for key in keys) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], output: str) -> None:
    """Images/s of a GPU over the number of them, a panel a model: measured as lines, estimated dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "error" not in row]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, grid = plt.subplots(1, max(len(models), 1), figsize=(6 * max(len(models), 1), 4.5), squeeze=False)
    for axes, model in zip(grid[0], models, strict=False):
        for kind in dict.fromkeys((row["variant"], row["script"]) for row in rows if row["model"] == model):
            mine = [row for row in rows if (row["model"], row["variant"], row["script"]) == (model, *kind)]
            for key, style in (("images_per_second", "o-"), ("estimated_images_per_second", "x--")):
                label = ", ".join(kind).removeprefix("ours, ") if style == "o-" else None
                there = [(row["gpus"], row[key] / row["gpus"]) for row in mine if key in row]
                color = axes.lines[-1].get_color() if label is None else None
                axes.plot([n for n, _ in there], [rate for _, rate in there], style, color=color, label=label)
        axes.set(xlabel="GPUs", ylabel="images/s of a GPU (dashed: estimated)", title=model, xscale="log")
        axes.set_ylim(bottom=0)
        ticks = sorted({row["gpus"] for row in rows})
        axes.set_xticks(ticks, ticks)
        axes.minorticks_off()
        axes.legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(output, dpi=100)
    plt.close(figure)


def main() -> None:
    """Run, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", default=[f"{name}:{images}" for name, images in MODELS.items()])
    parser.add_argument("--variants", default="TE, BF16|delayed", help="a regular expression over the names of ours")
    parser.add_argument("--scripts", nargs="+", default=["train_ddp", "train_fsdp2", "train_mfsdp"])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=10, help="that count, a row")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a start")
    parser.add_argument("--measured", type=Path, help="a file that this tool wrote, whose runs are not made again")
    args = parser.parse_args()
    before = json.loads(args.measured.read_text()) if args.measured else None
    meta = benchmark.provenance() if before is None else before["meta"] | {"estimated": benchmark.provenance()}
    there = int(meta["card"].split()[0]) if "CPU" not in meta["card"] else 0
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(there)))).split(",")
    variants = [name for name in peers.OURS if re.search(args.variants, name)]
    rows: list[dict[str, Any]] = []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for size, gpus in itertools.product(args.sizes, args.gpus):
        model, _, images = size.partition(":")
        images, known = int(images or MODELS[model]), {}
        for variant, script in itertools.product(variants, args.scripts):
            row = {"model": model, "images_a_gpu": images, "gpus": gpus, "variant": variant, "script": script}
            known[variant, script] = row | estimated(model, variant, images, gpus, script)
        if before is not None:
            kept = [row for row in before["results"] if (row["model"], row["gpus"]) == (model, gpus)]
            found = [row for row in kept if "of_each" in row or "error" in row]
        elif gpus <= there:
            groups = [[card] for card in cards] if gpus == 1 else [cards[:gpus]]
            with tempfile.TemporaryDirectory() as folder:
                found = measured(f"{model}:{images}", groups, Path(folder), args)
        else:
            found = []
        rows += [row | known.pop((row.get("variant"), row.get("script")), {}) for row in found]
        rows = with_scaling([*rows, *known.values()])
        for row in rows[-len(variants) * len(args.scripts) :]:
            print(json.dumps(row), flush=True)
        benchmark.write(args.output, rows, meta)
        args.output.with_suffix(".md").write_text(table(rows))
        draw(rows, str(args.output.with_suffix(".png")))


if __name__ == "__main__":
    main()
