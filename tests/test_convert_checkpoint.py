"""tools/convert_checkpoint.py: says what it wrote, or what is wrong."""

import errno
import os
import runpy
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from weight_files import assert_same_bits, cut_off, plain_file, small, write_step

from interop import weights_out


def test_the_tool_says_what_it_wrote(stored_weights, tmp_path, monkeypatch, capsys):
    _, folder, tensors = stored_weights
    arguments = [str(folder), str(tmp_path / "out"), "--format", "timm"]
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *arguments])
    runpy.run_path(str(ROOT / "tools/convert_checkpoint.py"), run_name="__main__")
    printed, errors = capsys.readouterr()
    assert errors == ""
    (line,) = printed.splitlines()
    assert line.startswith(f"wrote {tmp_path}/out (timm, ")
    assert line.endswith(f"from {folder}/step_00000012")
    assert_same_bits(plain_file(tmp_path / "out"), tensors)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("checkpoints there --format hugging-face", "there is there already"),
        ("there new --format timm", "there is no complete step_XXXXXXXX folder"),
        ("registers new --format hugging-face", "model.reg_tokens=4"),
        ("damaged new --format timm", "cannot be read"),
        ("checkpoints file/new --format timm", "TARGET=file/new cannot be written (Not a directory): give a folder"),
        ("checkpoints new --format onnx", "invalid choice: 'onnx'"),
        ("checkpoints new", "--format"),
    ],
)
def test_the_tool_complains_in_one_line(arguments, complaint, stored_weights, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("file").touch()
    Path("checkpoints").symlink_to(stored_weights[1])
    write_step(Path("registers"), small("reg_tokens=4"))
    damaged, _ = write_step(Path("damaged"), small())
    cut_off(damaged / ".metadata")
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *arguments.split()])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / "tools/convert_checkpoint.py"), run_name="__main__")
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert complaint in line
    assert not list(Path("there").iterdir())
    assert not Path("new").exists()


def test_a_full_disk_is_one_line_and_keeps_no_half(stored_weights, tmp_path, monkeypatch, capsys):
    def full(path, *_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights_out, "_write_safetensors", full)
    arguments = [str(stored_weights[1]), str(tmp_path / "out"), "--format", "timm"]
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / "tools/convert_checkpoint.py"), run_name="__main__")
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: TARGET={tmp_path}/out cannot be written (No space left on device): give a folder")
    assert not list(tmp_path.iterdir())
