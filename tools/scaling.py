"""How a step scales over the GPUs of a machine: models x blocks x strategies x 1, 2, 4, ... GPUs, beside the estimate.

    python tools/scaling.py --output benchmarks/scaling_h200x8.json

Each row is a run of an entrypoint under torchrun on synthetic images, as `tools/benchmark.py train` makes it. A row
that fails says why, and the rest goes on; the files are written after each row, so that what a time limit cuts off
leaves the others. What tools/estimate.py says stands beside, also for numbers of GPUs that are not there.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import benchmark
import estimate

MODELS = {"base_patch16": 512, "gigantic_patch14": 16}  # model -> images a GPU: the two that others publish
BLOCKS = {
    "compiled": ("compile=true",),
    "te": ("model.transformer_engine=true", "model.act_layer=gelu_tanh"),
    "fp8": ("model.transformer_engine=true", "model.act_layer=gelu_tanh", "fp8_config.enabled=true"),
}
SHORT = ("data=synthetic", "num_epochs=null", "num_train_steps=40", "logger.frequency=10", "compile=false")
SHORT += ("lr_scheduler.num_warmup_epochs=null", "lr_scheduler.num_warmup_steps=10", *benchmark.NO_EVALUATION)
SHORT += ("checkpoint.save_every_n_steps=null", "checkpoint.save_every_n_epochs=null")
CONFIG = "vit_base_patch16_224"


def overrides_of(model: str, block: str, batch: int, gpus: int, extra: list[str]) -> list[str]:
    """What changes `CONFIG` into the row's run; the later of two values counts."""
    given = [f"model=vit_{model}_224", *SHORT, *BLOCKS[block], f"global_batch_size={batch * gpus}", *extra]
    last = {value.split("=")[0]: value for value in given}
    return list(last.values())


def estimated(model: str, block: str, batch: int, gpus: int, script: str, extra: list[str]) -> dict[str, float]:
    """Images/s and peak GiB by tools/estimate.py."""
    with estimate.cards_are_here():
        cfg = estimate.config_of(CONFIG, overrides_of(model, block, batch, gpus, extra), script)
        cfg = dataclasses.replace(cfg, micro_batch_size=batch)
        way = estimate.estimate(
            cfg, script, gpus, estimate.Shape.of(cfg), network=estimate.ASSUMED["network GB/s a card"]
        )
    return {
        "estimated_images_per_second": round(batch * gpus / way.step, 1),
        "estimated_peak_gib": round(way.peak, 1),
    }


def with_scaling(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with its images/s over as many times those of the same run on one GPU."""
    key = ("model", "block", "script")
    alone = {tuple(row[k] for k in key): row.get("images_per_second") for row in rows if row["gpus"] == 1}
    found = []
    for row in rows:
        one, now = alone.get(tuple(row[k] for k in key)), row.get("images_per_second")
        found.append(row | ({"scaling": round(now / (row["gpus"] * one), 3)} if one and now else {}))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    keys = ("model", "block", "script", "gpus", "images_per_second", "scaling", "memory_peak_gib")
    keys += ("estimated_images_per_second", "estimated_peak_gib", "error")
    lines = ["| " + " | ".join(keys) + " |", "|" + " --- |" * len(keys)]
    return (
        "\n".join([*lines, *("| " + " | ".join(str(row.get(key, "")) for key in keys) + " |" for row in rows)]) + "\n"
    )


def draw(rows: list[dict[str, Any]], output: str) -> None:
    """Images/s over GPUs, a panel a model: measured as lines, estimated as crosses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, grid = plt.subplots(1, len(models), figsize=(6 * len(models), 4.5), squeeze=False)
    for axes, model in zip(grid[0], models, strict=True):
        for kind in dict.fromkeys((row["block"], row["script"]) for row in rows if row["model"] == model):
            mine = [row for row in rows if (row["model"], row["block"], row["script"]) == (model, *kind)]
            label = ", ".join(kind)
            measured = [(row["gpus"], row["images_per_second"]) for row in mine if "images_per_second" in row]
            (line,) = axes.plot([n for n, _ in measured], [rate for _, rate in measured], marker="o", label=label)
            guessed = [(row["gpus"], row["estimated_images_per_second"]) for row in mine]
            axes.plot([n for n, _ in guessed], [r for _, r in guessed], "x", color=line.get_color())
        axes.set(xlabel="GPUs", ylabel="images/s (x: estimated)", title=model, xscale="log", yscale="log")
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(output, dpi=100)


def measured(row: dict[str, Any], overrides: list[str], timeout: float) -> dict[str, Any]:
    """What the run showed, or why it did not."""
    options = {"scripts": [row["script"]], "nproc": row["gpus"], "keep": None, "warmup": 10, "timeout": timeout}
    args = argparse.Namespace(**options, overrides=["--config-name", CONFIG, *overrides])
    try:
        found = benchmark.train(args)[row["script"]]
    except SystemExit as error:
        return {"error": str(error.code).strip().splitlines()[-1][:200]}
    return {key: found[key] for key in ("images_per_second", "step_time_s", "mfu", "memory_peak_gib", "wall_s")}


def main() -> None:
    """Run, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=[f"{name}:{batch}" for name, batch in MODELS.items()])
    parser.add_argument("--blocks", nargs="+", default=["te", "fp8"], choices=BLOCKS)
    parser.add_argument("--scripts", nargs="+", default=["train_ddp", "train_fsdp2", "train_mfsdp"])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--timeout", type=float, default=120, help="seconds a run")
    parser.add_argument("overrides", nargs="*", help="after --: the entrypoints' own arguments")
    args = parser.parse_args()
    meta = benchmark.provenance()
    there = int(meta["card"].split()[0]) if "CPU" not in meta["card"] else 0
    rows: list[dict[str, Any]] = []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for each in args.models:
        model, _, batch = each.partition(":")
        for block in args.blocks:
            for script in args.scripts:
                for gpus in args.gpus:
                    run = (model, block, int(batch or MODELS[model]), gpus)
                    row: dict[str, Any] = {"model": model, "block": block, "script": script, "gpus": gpus}
                    row["images_a_gpu"] = run[2]
                    row |= estimated(*run, script, args.overrides)
                    if gpus <= there:
                        row |= measured(row, overrides_of(*run, args.overrides), args.timeout)
                    rows = with_scaling([*rows, row])
                    print(rows[-1], file=sys.stderr, flush=True)
                    benchmark.write(args.output, rows, meta)
                    args.output.with_suffix(".md").write_text(table(rows))
                    draw(rows, str(args.output.with_suffix(".png")))


if __name__ == "__main__":
    main()
