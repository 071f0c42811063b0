"""tools/report.py: a table and curves of runs that are over, going on or cut short."""

import contextlib
import functools
import io
import json
import sys

import numpy as np
import pytest
from conftest import read_metrics
from matplotlib.axes import Axes
from PIL import Image

import report

# tools/report.py


@pytest.fixture(scope="module")
def reported(observed, tmp_path_factory):
    """A function: runs' folders -> (table as a list of rows, image)."""
    _, folder = observed

    @functools.cache
    def make(*names):
        output = tmp_path_factory.mktemp("report") / "out"
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
            arguments = [str(folder / name) for name in names] + ["--output", str(output)]
            patch.setattr(sys, "argv", ["report.py", *arguments])
            report.main()
        text = output.with_suffix(".md").read_text()
        assert shown.getvalue() == text
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        return table, np.asarray(Image.open(output.with_suffix(".png")).convert("RGB"))

    return make


def test_a_report_has_a_table_and_a_image(reported, observed):
    _, folder = observed
    table, image = reported("board", "quiet")
    assert table[0] == ["", "board", "quiet"]
    facts = {row[0]: row[1:] for row in table}
    rows = read_metrics(folder / "board")
    assert facts["state"] == ["finished, step 8", "finished, step 2"]
    assert facts["last val/top1"] == [f"{rows[8]['val/top1']:.4f}", "-"]
    best = max(row["val/top1"] for row in rows.values() if "val/top1" in row)
    step = min(step for step, row in rows.items() if row.get("val/top1") == best)
    assert facts["best"][0] == f"val/top1 {best:.4f} at step {step}"
    rates = [rows[step]["train/images_per_second"] for step in range(2, 9)]  # not step 1's, which is the start
    assert facts["images/s, median"][0] == f"{sorted(rates)[3]:,.0f}"
    assert "MFU, median" not in facts  # on a CPU
    colours = {tuple(colour) for colour in image.reshape(-1, 3)}
    assert {(31, 119, 180), (255, 127, 14)} <= colours  # a line of each run, in the first two of matplotlib's colours


def test_a_report_takes_the_later_line_and_leaves_a_torn_one(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": step, "train/loss": loss} for step, loss in ((1, 5), (2, 4), (3, 9), (3, 3), (4, 2))]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 5, "tra')
    seconds = {"training": 900.0, "waiting": 0.0, "saving": 300.0, "lost": 600.0}
    goodput = {"began": 5000.0, "until": 6800.0, "seconds": seconds}
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 4, "time": "", "goodput": goodput}))
    (run / "config.yaml").write_text("global_batch_size: 8\n")
    read = report.read(run)
    assert read.curve("train/loss") == ([1, 2, 3, 4], [5, 4, 3, 2])
    assert read.peak_lr() is None
    read.config |= {"optimizer": {"lr": 1e-4, "lr_base_size": 2, "lr_base_scale": "linear"}}
    assert "| peak learning rate | 4.00e-04 |" in report.table([read])
    assert "| state | running, step 4 |" in report.table([read])  # of a config that says little, too
    assert "| goodput | 50.0%; lost 33.3%, saving 16.7% |" in report.table([read])
    assert "| hours since its first start | 0.50 |" in report.table([read])
    report.draw([read], tmp_path / "image.png")


def test_a_report_has_a_heat_map_of_what_fp8_held(tmp_path, monkeypatch):
    """A row a layer, in the blocks' order, a column a step, the later line of a step; grey where nothing is known."""
    for name in ("a", "b"):
        run = tmp_path / name
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 5}\n')
        (run / "status.json").write_text('{"state": "running", "step": 1, "time": ""}')
        (run / "config.yaml").write_text("global_batch_size: 8\n")
    layers = [f"blocks.{i}.{layer}" for i in (0, 2, 10) for layer in ("attn.qkv", "mlp.fc2")]
    numbers = {"amax": 2.0, "underflow": 0.0, "overflow": 0.0}
    rows = [
        {"step": step, "layer": layer, "operand": operand} | numbers
        for step in (10, 20)
        for layer in reversed(layers)
        for operand in ("input", "weight", "gradient")
    ]
    rows += [{"step": 20, "layer": "blocks.10.mlp.fc2", "operand": "input"} | numbers | {"underflow": 0.5}]
    rows += [{"step": 20, "layer": "blocks.0.attn.qkv", "operand": "weight"} | numbers | {"underflow": None}]
    lines = "\n".join(map(json.dumps, rows)) + '\n{"step": 30, "lay'
    (tmp_path / "a/fp8_statistics.jsonl").write_text(lines)
    drawn = []
    imshow = Axes.imshow
    monkeypatch.setattr(Axes, "imshow", lambda self, values, **how: drawn.append(values) or imshow(self, values, **how))
    arguments = [str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "c")]
    monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
    with contextlib.redirect_stdout(io.StringIO()):
        report.main()
    assert {path.name for path in tmp_path.glob("c*")} == {"c.png", "c.md", "c_fp8_a.png"}
    assert len(drawn) == 9
    underflow_of_inputs, underflow_of_weights = drawn[0], drawn[1]
    assert underflow_of_inputs.shape == (6, 2)
    assert underflow_of_inputs[5, 1] == 0.5
    assert underflow_of_inputs.sum() == 0.5
    assert np.isnan(underflow_of_weights[0, 1])
    assert np.isnan(underflow_of_weights).sum() == 1
    assert (drawn[6] == 1).all()  # amax, powers of two


@pytest.mark.parametrize("what", ["no run", "no folder", "no metrics", "no target"])
def test_a_report_of_no_run_is_one_line(tmp_path, monkeypatch, capsys, what):
    run, target = tmp_path / "run", tmp_path / "out"
    complaint = f"{run} is no run's folder: metrics.jsonl is missing; give a run's output_dir"
    if what != "no folder":
        run.mkdir()
    if what in ("no metrics", "no target"):
        (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 5}\n' if what == "no target" else "")
        (run / "status.json").write_text('{"state": "running", "step": 1, "time": ""}')
        (run / "config.yaml").write_text("global_batch_size: 8\n")
        complaint = f"{run} has no metrics yet: wait for the first log line"
    if what == "no target":
        target = run / "metrics.jsonl/out"
        complaint = f"--output {target} cannot be written to (File exists): give a name in another folder"
    monkeypatch.setattr(sys, "argv", ["report.py", str(run), "--output", str(target)])
    with pytest.raises(SystemExit) as caught:
        report.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {complaint}\n"
