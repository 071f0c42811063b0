"""tools/benchmark.py: what it makes of a run that it stops, and of a profile."""

import launch  # noqa: F401  (before torch)

import argparse
import functools
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY
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
def wait():
    (folder / "waits").touch()
    time.sleep(100)
"""
LINE = '(folder / "metrics.jsonl").write_text(json.dumps({"step": 7, "train/loss": 2.0}) + "\\n")'
# How a run goes on -> the state that counts, or the error.
RUNS = {
    "is_stopped_while_it_ends": (f'{LINE}; note("finished"); wait()', "finished"),
    "saves_when_it_is_stopped": (f'{LINE}; note("running"); signal.signal(15, stop); wait()', "preempted"),
    "is_stopped_before_its_first_step": ('note("running"); signal.signal(15, stop); wait()', "its first step"),
    "dies_when_it_is_stopped": (f'{LINE}; note("running"); wait()', "failed with"),
    "fails_by_itself": (f'{LINE}; note("finished"); sys.exit("the disk is full")', "the disk is full"),
}


@pytest.mark.slow
def test_a_run_past_its_timeout_is_stopped_and_counts(monkeypatch, tmp_path):
    """Real signals through torchrun, to scripts that end as a run may."""
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)

    def outcome(name):
        (tmp_path / f"{name}.py").write_text(RUN + RUNS[name][0])
        args = argparse.Namespace(nproc=1, overrides=[], timeout=300)
        has_ended = threading.Event()

        def time_out():  # once the script is where it waits, however long its start took
            while not has_ended.wait(0.1):
                if (tmp_path / name / "waits").exists():
                    args.timeout = 0

        waiting = threading.Thread(target=time_out)
        waiting.start()
        try:
            lines, status = benchmark.run(name, tmp_path / name, args)
        except SystemExit as error:
            return str(error)
        finally:
            has_ended.set()
            waiting.join()
        assert lines == [{"step": 7, "train/loss": 2.0}]
        return status["state"]

    with ThreadPoolExecutor() as pool:
        got = dict(zip(RUNS, pool.map(outcome, RUNS), strict=True))
    for name, (_, want) in RUNS.items():
        assert want in got[name], (name, got[name])
        assert benchmark.processes_of(tmp_path / name) == []


def test_a_rank_that_torchrun_left_behind_is_ended(tmp_path, monkeypatch):
    """As happens where torchrun is signalled while it starts the rank: here it has gone already."""
    monkeypatch.setattr(benchmark, "STOP_S", 0.5)
    command = [sys.executable, "-c", "import time; time.sleep(100)", f"output_dir={tmp_path}"]
    for ignoring in (False, True):
        hook = functools.partial(signal.signal, signal.SIGTERM, signal.SIG_IGN) if ignoring else None
        left = subprocess.Popen(command, preexec_fn=hook)
        gone = subprocess.Popen(["true"])
        threading.Thread(target=left.wait).start()  # as init does
        assert benchmark.ended(gone, tmp_path) is not ignoring
        assert left.wait() == (-signal.SIGKILL if ignoring else -signal.SIGTERM)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["compare"], "compare needs a CUDA GPU"),
        (["strategies"], "strategies needs a CUDA GPU"),
        (["profile", "--script", "train_ddp"], "profile needs a CUDA GPU"),
        (["train"], "--scripts train_mfsdp needs a CUDA GPU"),
        (["save"], "--scripts train_mfsdp needs a CUDA GPU"),
        (["save", "--scripts", "train_ddp", "--every", "1"], "--every=1: give 2 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(monkeypatch, capsys, tmp_path, arguments, key):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments, "--output", str(tmp_path / "new/x.json")])
    with pytest.raises(SystemExit) as raised:
        benchmark.main()
    error = capsys.readouterr().err
    assert raised.value.code == 2
    assert error.startswith(f"error: {key}")
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


START = """
import os, sys
from pathlib import Path

def say(text):
    print(text, file=sys.stderr, flush=True)
say("12:34 a warning of somebody's, which says step 1/ and no time of ours")
say("12:34:56 torch 2.14.1")
compiled = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
with open(Path(__file__).with_name("starts.txt"), "a") as starts:
    print("warm" if compiled.exists() else "cold", file=starts)
compiled.mkdir(exist_ok=True)
say("12:34:57 step 1/3  loss 2.3")
say("12:34:57 step 2/3  loss 2.2")
if "fails=true" in sys.argv:
    sys.exit("the disk is full")
say("12:34:57 step 3/3  loss 2.1")
"""


def test_a_start_is_timed_without_and_with_the_compilers_caches(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # of the user's, who has compiled all this before
    (tmp_path / "train_ddp.py").write_text(START)
    args = argparse.Namespace(scripts=["train_ddp"], nproc=0, steps=3, timeout=60, overrides=[])
    got = benchmark.start(args)["train_ddp"]
    assert list(got) == ["first", "second"]
    for row in got.values():
        assert list(row) == ["log_s", "step_1_s", "step_3_s"]
        assert list(row.values()) == sorted(row.values())
    assert (tmp_path / "starts.txt").read_text().split() == ["cold", "warm"]
    assert len(capsys.readouterr().out.splitlines()) == 2
    with pytest.raises(SystemExit, match=r"train_ddp ended with 1 before step 3(.*\n)+the disk is full"):
        benchmark.start(argparse.Namespace(**(vars(args) | {"overrides": ["fails=true"]})))


@pytest.mark.slow
def test_saves_and_a_resume_are_timed(capsys):
    """Two real starts: the second goes on from the first one's checkpoint, and has asynchronous saves."""
    overrides = ["--config-name", "L0_sanity", *TINY, "data=synthetic"]
    args = argparse.Namespace(scripts=["train_ddp"], nproc=1, every=2, timeout=200, overrides=overrides)
    first, second = benchmark.save(args).values()
    assert (first["async_save"], second["async_save"]) == (False, True)
    assert "resume_s" not in first
    assert 0 < second["resume_s"] < 60
    for row in (first, second):
        assert len(row["stalls_s"]) == len(row["waits_s"]) == 3
        assert row["stall_s"] == max(row["stalls_s"][1:])
    assert len(capsys.readouterr().out.splitlines()) == 2


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
