"""tools/report.py: a table and curves of runs that are over, going on or cut short."""

import contextlib
import functools
import io
import json
import sys

import numpy as np
import pytest
from conftest import read_metrics
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
    (run / "status.json").write_text('{"state": "running", "step": 4, "time": ""}')
    (run / "config.yaml").write_text("global_batch_size: 8\n")
    read = report.read(run)
    assert read.curve("train/loss") == ([1, 2, 3, 4], [5, 4, 3, 2])
    assert read.peak_lr() is None
    read.config |= {"optimizer": {"lr": 1e-4, "lr_base_size": 2, "lr_base_scale": "linear"}}
    assert "| peak learning rate | 4.00e-04 |" in report.table([read])
    assert "| state | running, step 4 |" in report.table([read])  # of a config that says little, too
    report.draw([read], tmp_path / "image.png")


def test_a_report_of_no_run_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        report.main()
    assert caught.value.code == f"error: {tmp_path} is no run's folder: metrics.jsonl is missing"
