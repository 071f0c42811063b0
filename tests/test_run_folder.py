"""What a run's folder says of how the run was made."""

import launch

import shutil

import pytest
import torch
import yaml

import train_ddp
from runtime import run_folder
from schema import ConfigError


def test_a_run_knows_its_commit_with_and_without_git(monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert run_folder._git_commit() == "unknown"
    monkeypatch.setenv("COMMIT", "v1-4-gabc")  # as the image sets it
    assert run_folder._git_commit() == "v1-4-gabc"


def test_config_yaml_is_of_the_run_that_trained(tiny, tmp_path, caplog):
    """Neither a finished run's next start nor one that is refused changes it; one that goes on does."""

    def start(*overrides):
        caplog.clear()
        train_ddp.main(launch.load_config("L0_sanity", [*tiny, *overrides], script="train_ddp"))

    file = tmp_path / "run/config.yaml"
    start()
    first = file.read_bytes()
    start("optimizer.lr=5e-4", "seed=3")
    assert file.read_bytes() == first
    assert "nothing to do: the run is finished (step 6 of 6)" in caplog.text
    said = "config.yaml stays as the run had it, without seed=3 (there 0), optimizer.lr=0.0005 (there 0.001)"
    assert [line.message for line in caplog.records if "config.yaml" in line.message] == [said]
    start()
    assert "config.yaml" not in caplog.text
    with pytest.raises(ConfigError):
        start("model.depth=1")
    torch.distributed.destroy_process_group()  # which a process that fails leaves to its end
    assert file.read_bytes() == first
    start("num_train_steps=8", "optimizer.lr=5e-4")
    assert yaml.safe_load(file.read_text())["optimizer"]["lr"] == 5e-4
    start("num_train_steps=2", "checkpoint.resume_from_checkpoint=false")
    assert yaml.safe_load(file.read_text())["num_train_steps"] == 2
