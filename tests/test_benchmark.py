"""tools/benchmark.py: what it makes of a run that it stops, and of a profile."""

import argparse
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

import benchmark

RUN = """
import json, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[1].removeprefix("output_dir="))
folder.mkdir()
def note(state):
    (folder / "status.json").write_text(json.dumps({"state": state, "step": 7}))
def stop(*_):
    note("preempted")
    sys.exit(0)
"""
LINE = '(folder / "metrics.jsonl").write_text(json.dumps({"step": 7, "train/loss": 2.0}) + "\\n")'
# How a run goes on -> the state that counts, or the error.
RUNS = {
    "is_stopped_while_it_ends": (f'{LINE}; note("finished"); time.sleep(100)', "finished"),
    "saves_when_it_is_stopped": (f'{LINE}; note("running"); signal.signal(15, stop); time.sleep(100)', "preempted"),
    "is_stopped_before_its_first_step": ('note("running"); signal.signal(15, stop); time.sleep(100)', "its first step"),
    "dies_when_it_is_stopped": (f'{LINE}; note("running"); time.sleep(100)', "failed with"),
    "fails_by_itself": (f'{LINE}; note("finished"); sys.exit("the disk is full")', "the disk is full"),
}


@pytest.mark.slow
def test_a_run_past_its_timeout_is_stopped_and_counts(monkeypatch, tmp_path):
    """Real signals through torchrun, to scripts that end as a run may."""
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    args = argparse.Namespace(nproc=1, overrides=[], timeout=25)

    def outcome(name):
        (tmp_path / f"{name}.py").write_text(RUN + RUNS[name][0])
        try:
            lines, status = benchmark.run(name, tmp_path / name, args)
        except SystemExit as error:
            return str(error)
        assert lines == [{"step": 7, "train/loss": 2.0}]
        return status["state"]

    with ThreadPoolExecutor() as pool:
        got = dict(zip(RUNS, pool.map(outcome, RUNS), strict=True))
    for name, (_, want) in RUNS.items():
        assert want in got[name], name


def test_a_profile_counts_kernels_and_not_the_ranges_around_them():
    def event(device, name, start, end):
        return SimpleNamespace(device_type=device, name=name, time_range=SimpleNamespace(start=start, end=end))

    events = [
        event(DeviceType.CPU, "Optimizer.step#Muon.step", 0, 10_000),
        event(DeviceType.CUDA, "Optimizer.step#Muon.step", 1_000, 10_000),
        event(DeviceType.CUDA, "gemm_a", 1_000, 3_000),
        event(DeviceType.CUDA, "ncclDevKernel_AllReduce", 2_000, 5_000),
        event(DeviceType.CUDA, "multi_tensor_apply_kernel", 8_000, 11_000),
    ]
    got = benchmark.summarise(events, steps=2)
    assert got["step_ms"] == 5
    assert got["gpu_idle_ms"] == 1.5
    assert got["communication_not_hidden_ms"] == 1
    assert {kind: ms for kind, ms in got["kernels_ms"].items() if ms} == {
        "communication": 1.5,
        "matrix products": 1,
        "optimizer": 1.5,
    }
    assert got["kernels_a_step"] == 1
