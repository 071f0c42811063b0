"""Profiles: of the chosen steps and ranks, or refused."""

import launch

import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY, read_metrics, run_tasks, session_of

import schema
from imagenet_dataset import run_sizes
from observability import profiling

# Profiles


def test_a_trace_is_of_the_chosen_steps_and_ranks(observed):
    _, folder = observed
    files = {file.name for file in (folder / "traced/profile").iterdir()}
    assert files == {"trace_rank1_steps3-4.json.gz", "top_rank1_steps3-4.txt"}
    with gzip.open(folder / "traced/profile/trace_rank1_steps3-4.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 2
    assert sum("AdamW.step" in name and name.startswith("Optimizer.step#") for name in names) == 2
    assert "aten::" in (folder / "traced/profile/top_rank1_steps3-4.txt").read_text()
    # The next launch begins behind the window: one line says so, on each rank.
    output = (folder / "output.txt").read_text()
    assert output.count("profiler: no profile: the run goes on after step 6, past 3") == 2


def test_a_memory_snapshot_is_of_the_chosen_steps(monkeypatch, tmp_path):
    """Against stand-ins for the two functions, which need CUDA."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled="all": done.append((step, "record", enabled))
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: done.append((step, "dump", Path(path).name)))
    snapshot = ["profiler.memory_snapshot=true", "profiler.first_step=3", "profiler.num_steps=2"]
    cfg = launch.load_config("L0_sanity", [*TINY, "data=synthetic", *snapshot, "profiler.ranks=[0,2]"])
    profiling.check(cfg, run_sizes(cfg, 3))
    for rank in (0, 1):
        step = 0
        profiler = profiling.Profiler(cfg, session_of(tmp_path, rank=rank), start_step=0)
        while step < 6:
            step += 1
            profiler.step()
        profiler.close()
    assert done == [(2, "record", "all"), (4, "dump", "memory_rank0_steps3-4.pickle"), (4, "record", None)]


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["profiler.trace=true", "profiler.ranks=[0,2]"], ["profiler.ranks=[0, 2]", "no rank 2 in a job of 2"]),
        (["profiler.trace=true", "profiler.first_step=5"], ["profiler.first_step=5", "step 7", "step 6"]),
        (["profiler.memory_snapshot=true"], ["profiler.memory_snapshot=true", "CUDA"]),
    ],
)
def test_a_profile_that_cannot_be_is_refused(monkeypatch, overrides, fragments):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = launch.load_config("L0_sanity", [*TINY, "data=synthetic", *overrides])
    with pytest.raises(schema.ConfigError) as caught:
        profiling.check(cfg, run_sizes(cfg, 2))
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
    off = launch.load_config("L0_sanity", [*TINY, "data=synthetic", "profiler.ranks=[7]", "profiler.first_step=99"])
    profiling.check(off, run_sizes(off, 2))  # what is off is not looked at


# On a GPU


@pytest.mark.gpu
def test_gpu_metrics_profiles_and_doctor(image_folder, tmp_path):
    from conftest import ON_GPU

    wanted = ["profiler.trace=true", "profiler.memory_snapshot=true", "profiler.first_step=3", "profiler.num_steps=2"]
    base = [*TINY, *ON_GPU, *wanted, f"data.path={image_folder}", f"output_dir={tmp_path / 'run'}", "num_train_steps=6"]
    tasks = [
        {"name": "run", "script": "train_fsdp2", "overrides": base},
        {"name": "doctor", "script": "train_fsdp2", "overrides": base, "call": "doctor"},
    ]
    outcomes = run_tasks(tasks, nproc=1, folder=tmp_path / "tasks")
    row = read_metrics(tmp_path / "run")[6]
    assert 0 < row["train/memory_allocated_gib"] <= row["train/memory_peak_gib"] <= row["train/memory_reserved_gib"]
    assert row["train/gpu_utilization"] is None or 0 <= row["train/gpu_utilization"] <= 1
    names = {file.name.split("_")[0]: file for file in (tmp_path / "run/profile").iterdir()}
    assert set(names) == {"trace", "top", "memory"}
    with gzip.open(names["trace"]) as file:
        assert any(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])
    assert names["memory"].stat().st_size > 10_000
    shown = outcomes["doctor"][0]["metrics"]["shown"]
    print(shown)
    assert re.search(r"^GPU 0 +(ok|warn)", shown, re.MULTILINE)
