"""What a user sees: starting, failing, logging, folders. Real processes, started as from a shell."""

import launch  # noqa: F401  (before torch)

import json
import os
import pty
import re
import subprocess
import sys
import time

import pytest
from conftest import ROOT, read_metrics, run_command


@pytest.fixture(scope="module")
def piped(image_folder, tmp_path_factory):
    """A run started from another folder with relative paths, its output in pipes: by two processes, then by one."""
    from conftest import TINY

    home = tmp_path_factory.mktemp("elsewhere")
    (home / "tiny").symlink_to(image_folder)
    overrides = [*TINY, "data.path=./tiny", "output_dir=out", "evaluation.every_n_steps=3"]
    first = run_command([ROOT / "train_ddp.py", *overrides, "num_train_steps=3"], nproc=2, cwd=home)
    second = run_command([ROOT / "train_ddp.py", *overrides], cwd=home)
    return home, first, second


def test_paths_are_relative_to_where_one_starts_and_the_same_command_resumes(piped):
    """From another folder; also by another number of processes."""
    home, first, second = piped
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert sorted(p.name for p in home.iterdir()) == ["out", "tiny"]
    assert "resumed from" in second.stderr
    assert "step 3)" in second.stderr
    assert sorted(read_metrics(home / "out")) == [1, 2, 3, 4, 5, 6]


def test_one_run_leaves_one_folder_with_everything_in_it(piped):
    home, _, _ = piped
    names = {p.name for p in (home / "out").iterdir()}
    assert names == {".lock", "checkpoints", "config.yaml", "metrics.jsonl", "status.json", "train.log"}
    status = json.loads((home / "out/status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 6)
    assert status.keys() == {"state", "step", "time", "goodput"}
    assert {p.name for p in (home / "out/checkpoints").iterdir()} >= {"best.json", "final_model", "step_00000006"}


def test_output_in_a_file_has_each_line_once_and_no_bar(piped):
    _, first, _ = piped
    assert "\r" not in first.stdout + first.stderr
    steps = re.findall(r"step (\d)/3  loss", first.stderr)
    assert steps == ["1", "2", "3"]
    assert len(re.findall(r"val/top1", first.stderr)) == 1


def test_the_final_model_is_timms(piped):
    import timm
    import torch

    home, _, _ = piped
    folder = home / "out/checkpoints/final_model"
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 6)
    assert model.pretrained_cfg["label_names"] == [f"class_{letter}" for letter in "abcdef"]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_ddp", "train_fsdp2"])
def test_plain_python_on_a_terminal_shows_a_bar(script, tiny):
    """One process without torchrun, attached to a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, f"{script}.py", *tiny], cwd=ROOT, stdout=slave, stderr=slave, stdin=slave, close_fds=True
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the terminal is gone: the process has ended
            break
        if not chunk:
            break
        shown += chunk
    assert process.wait(60) == 0, shown.decode()
    assert b"\r" in shown
    assert b"6/6" in shown


@pytest.mark.slow
def test_a_second_live_run_is_refused_and_the_first_goes_on(tiny, tmp_path):
    """The lock names the run that holds it; a dead run holds none."""
    command = [sys.executable, "train_ddp.py", *tiny, "num_train_steps=100000", "checkpoint.ckpt_dir=null"]
    first = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "run/metrics.jsonl").exists():
            assert time.monotonic() < deadline
            assert first.poll() is None
            time.sleep(0.2)
        second = run_command(["train_fsdp2.py", *tiny])
        assert second.returncode == 2
        assert f"output_dir={tmp_path / 'run'} is in use by a live run (process {first.pid}" in second.stderr
        assert second.stderr.count("\n") == 1
        assert first.poll() is None
        assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "running"
    finally:
        first.kill()
        first.wait()
    assert run_command(["train_fsdp2.py", *tiny, "num_train_steps=2"]).returncode == 0


@pytest.mark.slow
def test_one_ranks_failure_ends_all_quickly_with_its_own_message(tiny, tmp_path):
    """Rank 0 alone finds that the folder for checkpoints is a file, before the process group is there."""
    (tmp_path / "file").write_text("not a folder")
    start = time.monotonic()
    done = run_command(["train_fsdp2.py", *tiny, f"checkpoint.ckpt_dir={tmp_path / 'file'}"], nproc=2)
    assert done.returncode != 0
    assert time.monotonic() - start < 60
    errors = re.findall(r"^error: checkpoint.ckpt_dir=\S*/file cannot be written to \(.*\):", done.stderr, re.MULTILINE)
    assert len(errors) == 1


@pytest.mark.slow
def test_a_non_finite_loss_is_one_line(tiny):
    done = run_command(["train_ddp.py", *tiny, "optimizer.lr=1e30"])
    assert done.returncode == 1
    assert len(re.findall("^error: .*not finite at step 2", done.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in done.stderr
