"""The README's commands work as printed."""

import launch  # noqa: F401  (before torch)

import json

import pytest
from conftest import ROOT, run_command


@pytest.mark.slow
def test_the_readmes_commands_work_as_printed(tmp_path):
    """Pre-train, fine-tune, evaluate, infer: one after the other from a folder like the repository, two steps a run."""
    block = next(
        b for b in (ROOT / "README.md").read_text().split("```") if b.strip().startswith("python train_ddp.py\n")
    )
    commands = [line.split() for line in block.strip().splitlines()]
    assert [command[1] for command in commands] == ["train_ddp.py", "train_ddp.py", "tools/evaluate.py", "infer.py"]
    for name in ("train_ddp.py", "infer.py", "tools", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    for _, script, *arguments in commands:
        short = ["num_train_steps=2", "lr_scheduler.num_warmup_steps=1"] if script == "train_ddp.py" else []
        done = run_command([script, *arguments, *short], cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert len(answers) == 50
    assert len(answers[0]["top"]) == 5
    assert (tmp_path / "answers.png").stat().st_size > 1000
