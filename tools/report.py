"""Draw one or several runs as one image, and compare them in a Markdown table.

    python tools/report.py runs/demo                              # runs/demo/report.png and report.md
    python tools/report.py runs/a runs/b runs/c --output compare  # compare.png and compare.md

Reads metrics.jsonl, status.json and config.yaml, of a run that is still going on too; needs no GPU and no torch. A step
that a resumed run took twice counts as it was taken last. Of a run with fp8_statistics.jsonl
(fp8_config.log_statistics_every_n_steps) it draws how FP8 held each layer's operands, too: report_fp8.png.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import schema

Rows = dict[int, dict[str, Any]]  # step -> its metrics
LOWER_IS_BETTER = {"val/loss"}


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of one a line."""
    for line in file.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # the torn last line of a killed run
            continue


def fail(message: str) -> NoReturn:
    """As launch.exit_with, whose module wants torch: one line, exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


class Run:
    """What the folder of one run says."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.rows: Rows = {}
        for values in json_lines(folder / "metrics.jsonl"):
            self.rows.setdefault(values["step"], {}).update(values)
        self.rows = dict(sorted(self.rows.items()))
        file = folder / "fp8_statistics.jsonl"
        rows = json_lines(file) if file.exists() else ()
        self.fp8 = {(row["step"], row["layer"], row["operand"]): row for row in rows}
        self.config = yaml.safe_load((folder / "config.yaml").read_text())
        self.status = json.loads((folder / "status.json").read_text())

    def setting(self, key: str) -> Any:
        """The config's value of a dotted key; None where it has none."""
        value = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def curve(self, key: str, scale: float = 1.0) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it has any."""
        points = [(step, row[key] * scale) for step, row in self.rows.items() if row.get(key) is not None]
        return [step for step, _ in points], [value for _, value in points]

    def median(self, key: str) -> float | None:
        """Over all log lines but step 1's, which is the time of starting up."""
        steps, values = self.curve(key)
        steady = [value for step, value in zip(steps, values, strict=True) if step > 1] or values
        return statistics.median(steady) if steady else None

    def last(self, key: str) -> float | None:
        """The newest value."""
        values = self.curve(key)[1]
        return values[-1] if values else None

    def best(self) -> tuple[str, float, int] | None:
        """The metric that decides, its best value, and the first step that had it."""
        key = self.setting("evaluation.best_metric")
        steps, values = self.curve(key)
        if not values:
            return None
        value = (min if key in LOWER_IS_BETTER else max)(values)
        return key, value, steps[values.index(value)]

    def peak_lr(self) -> float | None:
        """The peak learning rate; None where config.yaml does not say."""
        lr, base, batch = map(self.setting, ("optimizer.lr", "optimizer.lr_base_size", "global_batch_size"))
        if None in (lr, base, batch):
            return lr
        return schema.scaled_lr(lr, batch, base, self.setting("optimizer.lr_base_scale"))

    def hours_of_all(self) -> float | None:
        """From the run's first start to its newest sign, by status.json; None where it says nothing of that."""
        goodput = self.status.get("goodput")
        return (goodput["until"] - goodput["began"]) / 3600 if goodput else None

    def shares(self) -> str | None:
        """The share of training in that time, and what the rest was."""
        seconds = self.status.get("goodput", {}).get("seconds")
        if not seconds:
            return None
        whole = sum(seconds.values())
        parts = {kind: value / whole for kind, value in seconds.items() if value and kind != "training"}
        rest = ", ".join(f"{kind} {share:.1%}" for kind, share in sorted(parts.items(), key=lambda part: -part[1]))
        return f"{seconds['training'] / whole:.1%}; {rest}"

    def hours(self) -> float:
        """Training alone: each log line's mean step time, times the steps since the line before."""
        steps, seconds = self.curve("train/step_time_s")
        return sum(t * (b - a) for (a, b), t in zip(itertools.pairwise([0, *steps]), seconds, strict=True)) / 3600


def read(folder: Path) -> Run:
    """A run, or one line about what is wrong with its folder."""
    try:
        run = Run(folder)
    except FileNotFoundError as error:
        fail(f"{folder} is no run's folder: {Path(error.filename).name} is missing; give a run's output_dir")
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        fail(f"{folder} cannot be read: {type(error).__name__}: {error}")
    if not run.rows:
        fail(f"{folder} has no metrics yet: wait for the first log line")
    return run


def table(runs: list[Run]) -> str:
    """A Markdown table: a run a column, a fact a row; rows that no run has a value for are left out."""

    def number(spec: str, value: Any) -> str:
        return "-" if value is None else format(value, spec)

    def best(run: Run) -> str | None:
        found = run.best()
        return "{} {:.4f} at step {:,}".format(*found) if found else None

    def model(run: Run) -> str:
        parts = {"width": "embed_dim", "depth": "depth", "patch": "patch_size", "image": "img_size"}
        known = {name: run.setting(f"model.{key}") for name, key in parts.items()}
        return ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)

    facts: dict[str, Callable[[Run], str | None]] = {
        "state": lambda run: f"{run.status['state']}, step {run.status['step']:,}",
        "model": model,
        "global batch size": lambda run: number(",", run.setting("global_batch_size")),
        "precision": lambda run: run.setting("precision"),
        "peak learning rate": lambda run: number(".2e", run.peak_lr()),
        "epochs": lambda run: number(".2f", run.last("train/epoch")),
        "hours of training": lambda run: number(".2f", run.hours()),
        "hours since its first start": lambda run: number(".2f", run.hours_of_all()),
        "goodput": lambda run: run.shares(),
        "best": best,
        "last train/loss": lambda run: number(".4f", run.last("train/loss")),
        "last val/loss": lambda run: number(".4f", run.last("val/loss")),
        "last val/top1": lambda run: number(".4f", run.last("val/top1")),
        "last val/top5": lambda run: number(".4f", run.last("val/top5")),
        "last val/ema_top1": lambda run: number(".4f", run.last("val/ema_top1")),
        "images/s, median": lambda run: number(",.0f", run.median("train/images_per_second")),
        "step time, median, s": lambda run: number(".4f", run.median("train/step_time_s")),
        "waiting for data, median": lambda run: number(".1%", run.median("train/data_wait_fraction")),
        "MFU, median": lambda run: number(".3f", run.median("train/mfu")),
        "GPU utilization, median": lambda run: number(".0%", run.median("train/gpu_utilization")),
        "peak memory, GiB": lambda run: number(".2f", max(run.curve("train/memory_peak_gib")[1], default=None)),
    }
    lines = [["", *(run.name for run in runs)], ["---", *("---:" for _ in runs)]]
    for name, fact in facts.items():
        cells = [fact(run) or "-" for run in runs]
        if set(cells) != {"-"}:
            lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"


def smooth(values: list[float]) -> list[float]:
    """A running mean over a fiftieth of the curve, for curves of more than 100 points."""
    half = len(values) // 100
    return [statistics.fmean(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))]


# Title, what the axis says, and the curves: metric, name, line style, factor.
PANELS = [
    ("Loss", "", [("train/loss", "train", "-", 1), ("val/loss", "val", "--", 1), ("val/ema_loss", "val EMA", ":", 1)]),
    (
        "Accuracy",
        "%",
        [
            ("val/top1", "top-1", "-", 100),
            ("val/top5", "top-5", "--", 100),
            ("val/ema_top1", "top-1 EMA", ":", 100),
        ],
    ),
    ("Learning rate", "", [("train/lr", "", "-", 1)]),
    ("Gradient norm, before clipping", "", [("train/grad_norm", "", "-", 1)]),
    ("Speed", "images/s", [("train/images_per_second", "", "-", 1)]),
    (
        "GPU memory, rank 0",
        "GiB",
        [("train/memory_reserved_gib", "reserved", "--", 1), ("train/memory_peak_gib", "peak allocated", "-", 1)],
    ),
]


def draw(runs: list[Run], path: Path) -> None:
    """The image: a panel a quantity, a colour a run."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, FuncFormatter

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, grid = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    colours = mpl.color_sequences["tab10" if len(runs) <= 10 else "tab20"]
    last = max(step for run in runs for step in run.rows)
    for axes, (title, unit, curves) in zip(grid.flat, PANELS, strict=True):
        drawn = {}
        for run, colour in zip(runs, itertools.cycle(colours)):
            for key, name, style, scale in curves:
                steps, values = run.curve(key, scale)
                if key == "train/images_per_second" and len(steps) > 1 and steps[0] == 1:
                    steps, values = steps[1:], values[1:]  # step 1 is the time of starting up
                if not steps:
                    continue
                # One point is a dot; few are a line with dots; many are a faint line and its running mean.
                marker = "o" if len(steps) <= 25 else None
                is_noisy = len(steps) > 100 and key in ("train/loss", "train/grad_norm", "train/images_per_second")
                if is_noisy:
                    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.6)
                    values = smooth(values)
                axes.plot(steps, values, style, color=colour, linewidth=1.5, marker=marker, markersize=3)
                drawn[name] = style
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_ylabel(unit)
        axes.set_xlabel("step")
        axes.set_xlim(-0.02 * last, 1.02 * last)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if not drawn:
            axes.text(0.5, 0.5, "not measured in these runs", ha="center", va="center", transform=axes.transAxes)
            axes.set(xticks=[], yticks=[], xlabel="")
        elif title in ("Speed", "GPU memory, rank 0", "Learning rate"):
            axes.set_ylim(bottom=0)
        if title == "Learning rate":
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if len(drawn) > 1:  # which quantity is which style; the colours are the runs', named below
            handles = [Line2D([], [], color="0.3", linestyle=style) for style in drawn.values()]
            axes.legend(handles, drawn.keys(), frameon=False, loc="best")
    handles = [Line2D([], [], color=colour, linewidth=3) for _, colour in zip(runs, itertools.cycle(colours))]
    names = [run.name if len(runs) > 1 else f"{run.name}: {run.status['state']}" for run in runs]
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(runs), 5), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# A number of fp8_statistics.jsonl, and its title.
FP8_NUMBERS = {
    "underflow": "become zero, share of the values",
    "overflow": "cut off, share of the values",
    "amax": "largest value, powers of two",
}


def draw_fp8(run: Run, path: Path) -> None:
    """Heat maps of how FP8 held the operands of each layer: layers down, steps across; grey where it is not known."""
    import matplotlib as mpl
    import numpy as np

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    steps = sorted({step for step, _, _ in run.fp8})
    layers = sorted({layer for _, layer, _ in run.fp8}, key=_in_order)
    operands = ("input", "weight", "gradient")
    figure, grid = plt.subplots(3, 3, figsize=(13, 4 + 0.12 * 3 * len(layers)), layout="constrained", squeeze=False)
    for row, (number, title) in zip(grid, FP8_NUMBERS.items(), strict=True):
        for axes, operand in zip(row, operands, strict=True):
            cells = [[run.fp8.get((step, layer, operand), {}).get(number) for step in steps] for layer in layers]
            values = np.array(cells, dtype=float)  # None becomes NaN
            if number == "amax":
                values = np.log2(np.where(values > 0, values, np.nan))
            limits = {} if number == "amax" else {"vmin": 0, "vmax": max(np.nanmax(values, initial=0), 1e-9)}
            axes.set_facecolor("0.8")
            image = axes.imshow(values, aspect="auto", interpolation="nearest", **limits)
            axes.set_title(f"{operand}: {title}", loc="left", fontsize=9)
            shown = range(0, len(steps), max(len(steps) // 6, 1))
            axes.set_xticks(list(shown), [f"{steps[i]:,}" for i in shown])
            axes.set_yticks(range(len(layers)), layers if axes is row[0] else [""] * len(layers), fontsize=5)
            figure.colorbar(image, ax=axes, shrink=0.9)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    figure.suptitle(f"{run.name}: FP8")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _in_order(layer: str) -> tuple[int, int]:
    """Blocks by number, the linear layers of a block as they come."""
    _, block, name = layer.split(".", 2)
    return int(block), ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2").index(name)


def main() -> None:
    """Parse, read, draw, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's output_dir")
    parser.add_argument("--output", type=Path, help="where to write, without .png and .md; RUN/report for one run")
    args = parser.parse_args()
    runs = [read(folder) for folder in args.runs]
    if len({run.name for run in runs}) < len(runs):  # the same last part: say more of the paths
        common = Path(os.path.commonpath([folder.resolve() for folder in args.runs]))
        for run, folder in zip(runs, args.runs, strict=True):
            run.name = str(folder.resolve().relative_to(common))
    output = args.output or (args.runs[0] / "report" if len(runs) == 1 else Path("report"))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        draw(runs, output.with_name(output.name + ".png"))
        output.with_name(output.name + ".md").write_text(table(runs))
        for run in [run for run in runs if run.fp8]:
            end = "_fp8.png" if len(runs) == 1 else f"_fp8_{run.name.replace(os.sep, '_')}.png"
            draw_fp8(run, output.with_name(output.name + end))
    except OSError as error:
        fail(f"--output {output} cannot be written to ({error.strerror}): give a name in another folder")
    print(table(runs), end="")
    print(f"\nwrote {output}.png and {output}.md", file=sys.stderr)


if __name__ == "__main__":
    main()
