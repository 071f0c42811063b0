"""tools/scaling.py: its arithmetic, its files, a row that fails; the runs themselves are benchmark.py's."""

import json
import sys

import pytest

import benchmark
import scaling


def test_scaling_is_against_the_same_run_on_one_gpu():
    rows = [
        {"model": "a", "block": "te", "script": "train_ddp", "gpus": 1, "images_per_second": 100.0},
        {"model": "a", "block": "te", "script": "train_ddp", "gpus": 4, "images_per_second": 360.0},
        {"model": "a", "block": "fp8", "script": "train_ddp", "gpus": 4, "images_per_second": 500.0},
        {"model": "a", "block": "te", "script": "train_ddp", "gpus": 8, "error": "no"},
    ]
    assert [row.get("scaling") for row in scaling.with_scaling(rows)] == [1.0, 0.9, None, None]


def test_the_later_of_two_values_counts():
    overrides = scaling.overrides_of("base_patch16", "compiled", 512, 4, ["num_train_steps=5"])
    assert "global_batch_size=2048" in overrides
    assert "compile=true" in overrides
    assert "num_train_steps=5" in overrides
    assert len({value.split("=")[0] for value in overrides}) == len(overrides)


def test_a_row_that_fails_says_why(monkeypatch):
    def failing(args):
        assert (args.nproc, args.scripts, args.overrides[:2]) == (2, ["train_ddp"], ["--config-name", scaling.CONFIG])
        sys.exit("train_ddp failed with 1:\nTraceback\nOutOfMemoryError: no")

    monkeypatch.setattr(benchmark, "train", failing)
    row = {"script": "train_ddp", "gpus": 2}
    assert scaling.measured(row, [], 10) == {"error": "OutOfMemoryError: no"}


def test_what_is_not_there_is_estimated(monkeypatch, tmp_path):
    """Without a GPU no run is made; the files are there, and more GPUs make more images."""
    monkeypatch.setattr(benchmark, "train", lambda args: pytest.fail("a run"))
    output = tmp_path / "scaling.json"
    chosen = ["--models", "base_patch16:512", "--scripts", "train_ddp", "train_fsdp2", "--gpus", "1", "8"]
    monkeypatch.setattr(sys, "argv", ["tools/scaling.py", "--output", str(output), *chosen])
    monkeypatch.setattr(benchmark, "provenance", lambda: {"card": "CPU, 2 cores"})
    scaling.main()
    rows = json.loads(output.read_text())["results"]
    assert len(rows) == 2 * 2 * 2
    assert "images_per_second" not in rows[0]
    for one, eight in zip(rows[::2], rows[1::2], strict=True):
        assert (one["gpus"], eight["gpus"]) == (1, 8)
        assert 6 < eight["estimated_images_per_second"] / one["estimated_images_per_second"] <= 8
    assert output.with_suffix(".md").read_text().count("\n") == 2 + len(rows)
    assert output.with_suffix(".png").stat().st_size > 1000
