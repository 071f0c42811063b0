"""tools/replay.py: a recorded step is taken again, and one that was computed otherwise is named."""

import launch

import json
import re
import shutil
import sys

import pytest
import yaml
from conftest import TINY, read_metrics, run_command

import replay
import train_fsdp2


@pytest.fixture(scope="module")
def finished(image_folder, tmp_path_factory):
    """A run of FSDP2 with checkpoints of steps 4, 8 and 10, and with dropout, which random numbers decide."""
    folder = tmp_path_factory.mktemp("replayed") / "run"
    overrides = [*TINY, f"data.path={image_folder}", f"output_dir={folder}", "num_train_steps=10"]
    overrides += ["checkpoint.save_every_n_steps=4", "checkpoint.max_checkpoints=null"]
    overrides += ["model.drop_rate=0.1", "ema.decay=0.9"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_fsdp2.py"])
        train_fsdp2.main(launch.load_config("L0_sanity", overrides, script="train_fsdp2"))
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(finished, tmp_path / "run")


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        replay.main([*map(str, arguments)])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def change(run, step, **values):
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["step"] == step and "train/loss" in line:
            line |= {f"train/{key}": line[f"train/{key}"] + value for key, value in values.items()}
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_step_is_the_same_and_one_that_was_computed_otherwise_is_named(run, capsys):
    before = files(run)
    with pytest.MonkeyPatch.context() as patch:
        saver = replay.checkpoint.Saver.save
        patch.setattr(replay.checkpoint.Saver, "save", saver)  # replay replaces it for the rest of its process
        assert replay.main([str(run), "7"]) == 0
        assert "step 7, taken again from step_00000004, is the same" in capsys.readouterr().out
        assert files(run) == before
        assert not (run / "replay_7").exists()
        change(run, 6, grad_norm=1e-7)
        assert replay.main([str(run), "7"]) == 1
        said = capsys.readouterr().out
        assert "differs from step_00000004 on: step 6: train/grad_norm is " in said
        assert replay.main([str(run), "10"]) == 0  # from step 8, which is later than the wrong one


def test_what_cannot_be_taken_again_is_one_line(run, capsys, monkeypatch):
    assert refused(capsys, run / "no", 7).endswith("no is no run's folder: metrics.jsonl is missing")
    assert refused(capsys, run, 99).endswith("take one that was logged, such as 9 or 10")
    assert refused(capsys, run, 4).endswith(
        "no checkpoint before step 4 is there (of steps: 4, 8, 10): take a later one"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refused(capsys, run, 7)
    assert "was trained by 1 processes of train_fsdp2.py, these are 2: start torchrun" in line
    assert line.endswith(f"--nproc-per-node 1 tools/replay.py {run} 7")


def test_a_step_of_an_earlier_start_with_other_options_is_no_difference(tiny, tmp_path, capsys, monkeypatch):
    """config.yaml is the last start's; what that has otherwise is named, and its own steps are taken again as ever."""
    monkeypatch.setattr(sys, "argv", ["train_fsdp2.py"])
    often = ["checkpoint.save_every_n_steps=2", "checkpoint.max_checkpoints=null"]
    for options in (["optimizer.lr=1e-2", "num_train_steps=6"], ["optimizer.lr=2e-3", "num_train_steps=10"]):
        train_fsdp2.main(launch.load_config("L0_sanity", [*tiny, *often, *options], script="train_fsdp2"))
    run = tmp_path / "run"
    capsys.readouterr()
    line = refused(capsys, run, 6)
    assert line.startswith(f"error: step 6 was taken with optimizer.lr=0.01, and {run}/config.yaml, of the run's last")
    monkeypatch.setattr(replay.checkpoint.Saver, "save", replay.checkpoint.Saver.save)
    assert replay.main([str(run), "7"]) == 0  # from step 6, where the last start began
    assert "step 7, taken again from step_00000006, is the same" in capsys.readouterr().out
    shutil.rmtree(run / "checkpoints/step_00000006")  # pruned: on the way to step 7 are two of the first start
    with pytest.raises(SystemExit) as caught:
        replay.main([str(run), "7"])
    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: step 6: train/")
    assert "but step_00000004 was written with optimizer.lr=0.01, which" in line
    change(run, 9, loss=1e-7)
    assert replay.main([str(run), "10"]) == 1  # of one start, and computed otherwise


def test_augmentation_may_have_changed_at_a_resume(tiny, tmp_path, capsys, monkeypatch):
    """No checkpoint tells it: what is said of a step before says so, and nothing of it of a step after."""
    monkeypatch.setattr(sys, "argv", ["train_fsdp2.py"])
    often = ["checkpoint.save_every_n_steps=2", "checkpoint.max_checkpoints=null"]
    for options in (["data.hflip=0.0", "num_train_steps=4"], ["data.hflip=1.0", "num_train_steps=6"]):
        length = "lr_scheduler.num_training_steps=6"
        train_fsdp2.main(launch.load_config("L0_sanity", [*tiny, *often, length, *options], script="train_fsdp2"))
    monkeypatch.setattr(replay.checkpoint.Saver, "save", replay.checkpoint.Saver.save)
    run = tmp_path / "run"
    assert replay.main([str(run), "3"]) == 1
    end = "; unless options of data were changed when the run went on at step 4\n"
    assert capsys.readouterr().out.endswith(end)
    assert replay.main([str(run), "5"]) == 0
    change(run, 5, loss=1e-7)
    assert replay.main([str(run), "5"]) == 1
    assert "unless" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"seed": 5}, "seed"),
        ({"model": {"drop_rate": 0.3}}, "model.drop_rate"),
        ({"data": {"interpolation": "bilinear"}}, "data.interpolation"),
        ({"max_grad_norm": 7.0}, "max_grad_norm"),
    ],
)
def test_other_options_of_an_earlier_start_are_named(run, capsys, options, key):
    values = yaml.safe_load((run / "config.yaml").read_text())
    for name, value in options.items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert f"step 6 was taken with {key}=" in refused(capsys, run, 6)


def test_checkpoints_in_a_bucket_are_refused(run, capsys):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub("ckpt_dir: .*", "ckpt_dir: s3://bucket/run", config))
    assert "has its checkpoints in a bucket, checkpoint.ckpt_dir=s3://bucket/run" in refused(capsys, run, 6)


def test_a_step_after_a_change_of_the_size(tiny, tmp_path, capsys, monkeypatch):
    """From the checkpoint of the border, and over the border where that is gone."""
    options = ["data.size_schedule=[{epoch:1.2,img_size:24,global_batch_size:12}]", "num_train_steps=5"]
    often = ["checkpoint.save_every_n_steps=2", "checkpoint.max_checkpoints=null", "model.drop_rate=0.1"]
    monkeypatch.setattr(sys, "argv", ["train_fsdp2.py"])
    train_fsdp2.main(launch.load_config("L0_sanity", [*tiny, *options, *often], script="train_fsdp2"))
    run = tmp_path / "run"
    monkeypatch.setattr(replay.checkpoint.Saver, "save", replay.checkpoint.Saver.save)
    assert replay.main([str(run), "4"]) == 0
    assert "step 4, taken again from step_00000003, is the same" in capsys.readouterr().out
    shutil.rmtree(run / "checkpoints/step_00000003")
    assert replay.main([str(run), "4"]) == 0
    said = capsys.readouterr().out
    assert "step 4, taken again from step_00000002, is the same: loss and gradient norm of 2 logged steps" in said
    loss = read_metrics(run)[4]["train/loss"]
    change(run, 4, loss=1e-7)
    assert replay.main([str(run), "4"]) == 1
    assert f"step 4: train/loss is {loss!r}, recorded is" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_ddp", "train_fsdp2"])
def test_two_processes(script, tiny, tmp_path):
    options = ["num_train_steps=8", "checkpoint.save_every_n_steps=3", "checkpoint.max_checkpoints=null"]
    assert run_command([f"{script}.py", *tiny, *options], nproc=2).returncode == 0
    done = run_command(["tools/replay.py", tmp_path / "run", 5], nproc=2)
    assert done.returncode == 0, done.stderr
    assert "step 5, taken again from step_00000003, is the same" in done.stdout
    change(tmp_path / "run", 5, loss=1e-9)
    done = run_command(["tools/replay.py", tmp_path / "run", 5], nproc=2)
    assert done.returncode == 1
    assert "differs from step_00000003 on: step 5: train/loss is" in done.stdout
