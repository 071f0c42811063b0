"""tools/scaling.py: its arithmetic, its starts, its files, a start that fails; the measuring is benchmark.py's."""

import argparse
import json
import sys

import pytest

import benchmark
import scaling

# Stands for torchrun and its ranks: as many rows as it is asked for, images/s by the cards that it was given.
RANKS = """
import json, os, sys
of = lambda name: sys.argv[sys.argv.index(name) + 1]
cards = [int(card) for card in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
rate = sum(100 - 10 * card for card in cards) * (1 if len(cards) == 1 else 0.9)
row = {"model": "base_patch16", "images_a_gpu": 512, "gpus": len(cards), "script": "train_ddp"}
rows = [row | {"variant": "ours, TE, BF16", "images_per_second": rate}]
json.dump({"results": {"rows": rows}}, open(of("--output"), "w"))
if len(cards) == 4:
    print("step 1/30")
    print("[rank3]: torch.OutOfMemoryError: CUDA out of memory", flush=True)
    print("ChildFailedError: of torchrun")
    sys.exit(1)
"""


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """No GPU is asked: in place of torchrun and benchmark.py there is a program that says what it was given."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\n{RANKS}")
    stand_in.chmod(0o755)
    monkeypatch.setattr(scaling.sys, "executable", str(stand_in))
    return argparse.Namespace(variants="BF16", scripts=["train_ddp"], steps=10, timeout=60)


def test_one_gpu_is_measured_on_all_at_once(ranks, tmp_path):
    (row,) = scaling.measured("base_patch16:512", [["0"], ["1"]], tmp_path, ranks)
    assert (row["of_each"], row["images_per_second"]) == ([100, 90], 95)


def test_scaling_is_over_the_gpus_own_rates(ranks, tmp_path):
    alone = scaling.measured("base_patch16:512", [["0"], ["1"], ["2"]], tmp_path, ranks)
    two = scaling.measured("base_patch16:512", [["0", "1"]], tmp_path, ranks)
    one, found = scaling.with_scaling([*alone, *two])
    assert "scaling" not in one
    assert found["scaling"] == 0.9  # of 100 and 90, not of the third one's 80
    assert found["scaling_of_slowest"] == 0.95


def test_a_start_that_fails_says_why(ranks, tmp_path):
    """What it had measured stays."""
    row, error = scaling.measured("base_patch16:512", [["0", "1", "2", "3"]], tmp_path, ranks)
    assert row["images_per_second"] > 0
    assert error == {"model": "base_patch16", "gpus": 4, "error": "torch.OutOfMemoryError: CUDA out of memory"}


def test_a_card_that_failed_is_not_taken_for_another():
    row = {"model": "a", "variant": "te", "script": "train_ddp"}
    one = row | {"gpus": 1, "images_per_second": 150.0, "of_each": [None, 100.0, 200.0]}
    two = row | {"gpus": 2, "images_per_second": 250.0, "of_each": [250.0]}
    assert "scaling" not in scaling.with_scaling([one, two])[1]
    one["of_each"] = [100.0, 200.0, None]
    assert scaling.with_scaling([one, two])[1]["scaling"] == 0.833


def test_what_is_not_there_is_estimated(monkeypatch, tmp_path):
    """Without a GPU no run is made; the files are there, and more GPUs make more images."""
    monkeypatch.setattr(scaling, "measured", lambda *_: pytest.fail("a run"))
    output = tmp_path / "scaling.json"
    chosen = ["--sizes", "base_patch16:512", "--scripts", "train_ddp", "train_fsdp2", "--gpus", "1", "8"]
    monkeypatch.setattr(sys, "argv", ["tools/scaling.py", "--output", str(output), *chosen])
    monkeypatch.setattr(benchmark, "provenance", lambda: {"card": "CPU, 2 cores"})
    scaling.main()
    rows = json.loads(output.read_text())["results"]
    assert len(rows) == 2 * 2 * 2
    assert "images_per_second" not in rows[0]
    for one, eight in zip(rows[:4], rows[4:], strict=True):
        assert (one["gpus"], eight["gpus"]) == (1, 8)
        assert 6 < eight["estimated_images_per_second"] / one["estimated_images_per_second"] <= 8
    assert output.with_suffix(".md").read_text().count("\n") == 2 + len(rows)
    assert output.with_suffix(".png").stat().st_size > 1000


def test_an_older_file_gets_todays_estimate(monkeypatch, tmp_path):
    """Its runs stay as they were, and are not made again."""
    monkeypatch.setattr(scaling, "measured", lambda *_: pytest.fail("a run"))
    row = {"model": "base_patch16", "images_a_gpu": 512, "gpus": 1, "variant": "ours, TE, BF16", "script": "train_ddp"}
    runs = [row | {"images_per_second": 4000.0, "of_each": [4000.0], "estimated_images_per_second": 1.0}]
    runs += [row | {"gpus": 2, "images_per_second": 7000.0, "of_each": [7000.0]}]
    (tmp_path / "old.json").write_text(json.dumps({"meta": {"card": "2 x H200", "commit": "abc"}, "results": runs}))
    chosen = ["--measured", str(tmp_path / "old.json"), "--sizes", "base_patch16:512", "--scripts", "train_ddp"]
    chosen += ["--variants", "TE, BF16", "--gpus", "1", "2", "4", "--output", str(tmp_path / "new.json")]
    monkeypatch.setattr(sys, "argv", ["tools/scaling.py", *chosen])
    scaling.main()
    found = json.loads((tmp_path / "new.json").read_text())
    assert found["meta"]["commit"] == "abc"
    assert [row.get("images_per_second") for row in found["results"]] == [4000.0, 7000.0, None]
    assert all(row["estimated_images_per_second"] > 3000 for row in found["results"])
