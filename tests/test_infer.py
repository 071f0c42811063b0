"""infer.py: answers for any file; against timm's own model and transform."""

import launch  # noqa: F401  (before torch)

import json
import os
import shutil

import pytest
import timm
import torch
from conftest import error_of
from PIL import Image
from weight_files import Planted, cut_off

import infer
import schema


def test_answers_are_timms(trained_run, image_folder, tmp_path, capsys):
    """Probabilities from timm's own model and transform; files of every kind; those that cannot be read are named."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    for i, path in enumerate(sorted((image_folder / "val").rglob("*.jpg"))[:5]):
        shutil.copy(path, folder / f"{i}.jpg")
    Image.new("RGBA", (40, 30), (200, 100, 50, 128)).save(folder / "6.png")
    Image.new("CMYK", (40, 30), (0, 200, 100, 0)).save(folder / "7.jpg")
    (folder / "8.jpg").write_bytes(b"no image")
    (folder / "readme.txt").write_text("not asked for")
    model = trained_run / "checkpoints/final_model"
    options = ["--json", tmp_path / "answers.json", "--sheet", tmp_path / "sheet.png", "--batch-size", 3, "--top", 6]
    with pytest.raises(SystemExit) as caught:
        infer.main([*map(str, (model, folder, *options, "--device", "cpu"))])
    assert caught.value.code == 1
    printed, errors = capsys.readouterr()
    assert errors.splitlines() == [f"error: cannot read {folder}/8.jpg: not an image of a known format"]
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert [answer["file"] for answer in answers] == [
        f"{folder}/{name}" for name in ("0.jpg", "1.jpg", "2.jpg", "3.jpg", "4.jpg", "6.png", "7.jpg")
    ]
    reference = timm.create_model(f"local-dir:{model}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(reference))
    for answer in answers[:5]:
        with torch.no_grad():
            (want,) = reference(transform(Image.open(answer["file"]).convert("RGB"))[None]).softmax(dim=1)
        assert sum(found["probability"] for found in answer["top"]) == pytest.approx(1, abs=1e-5)
        assert [f["probability"] for f in answer["top"]] == pytest.approx(sorted(want.tolist(), reverse=True), abs=1e-6)
        best = reference.pretrained_cfg["label_names"][int(want.argmax())]
        assert answer["top"][0]["class"] == best
        assert f"{answer['file']}: {best} " in printed
    sheet = Image.open(tmp_path / "sheet.png")
    assert sheet.width == 4 * 232
    assert sheet.height > 2 * 224


def test_a_checkpoint_answers_as_its_export(trained_run, image_folder):
    (model, config), (other, _) = (
        infer.load_model(trained_run / "checkpoints" / name) for name in ("final_model", ".")
    )
    image = infer.Reader(model, config)(next((image_folder / "val").rglob("*.jpg")).read_bytes())[None]
    assert torch.equal(model(image), other(image))


@pytest.mark.parametrize("what", ["no model", "no images"])
def test_mistakes_are_one_line(trained_run, tmp_path, what):
    (tmp_path / "empty").mkdir()
    model = tmp_path / "empty" if what == "no model" else trained_run / "checkpoints/final_model"
    with pytest.raises(schema.ConfigError, match="no model of ours" if what == "no model" else "holds no images"):
        infer.load_model(model) and list(infer.find([tmp_path / "empty"]))
    with pytest.raises(schema.ConfigError, match=r"gone.jpg is not there"):
        list(infer.find([tmp_path / "gone.jpg"]))


def test_a_model_that_is_damaged_or_holds_a_command_is_one_line(trained_run, tmp_path):
    """An exported folder, whose weights may be in a pickle, too."""
    for name in ("damaged", "planted"):
        shutil.copytree(trained_run / "checkpoints/final_model", tmp_path / name)
    cut_off(tmp_path / "damaged/model.safetensors")
    (tmp_path / "planted/model.safetensors").unlink()
    torch.save({"head.bias": Planted(tmp_path / "it-ran")}, tmp_path / "planted/pytorch_model.bin")
    for name, reason in (("damaged", "deserializing header"), ("planted", f"{os.system.__module__}.system")):
        line = error_of(infer.load_model, tmp_path / name)
        assert line.startswith(f"{tmp_path}/{name} is no model of ours or timm's (")
        assert reason in line
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "meta"])
def test_a_device_that_is_not_there_is_one_line(tmp_path, capsys, device):
    with pytest.raises(SystemExit) as caught:
        infer.main([str(tmp_path), str(tmp_path), "--device", device])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --device {device} cannot be used here (")
    assert line.endswith("): use --device cpu")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--batch-size -3", "--batch-size: -3: give a whole number, 1 or more"),
        ("--batch-size 0", "--batch-size: 0: give a whole number, 1 or more"),
        ("--batch-size two", "--batch-size: two: give a whole number, 1 or more"),
        ("--top -1", "--top: -1: give a whole number, 1 or more"),
        ("--top 0", "--top: 0: give a whole number, 1 or more"),
        ("--json no/x.json", "--json no/x.json cannot be written (No such file or directory): give a file in a folder"),
        ("--json there", "--json there cannot be written (Is a directory): give a file in a folder"),
        ("--sheet no/x.png", "--sheet no/x.png cannot be written (No such file or directory): give a file in a folder"),
        ("--sheet x.foo", "--sheet x.foo: Pillow writes no .foo: give a .png"),
        ("--sheet x", "--sheet x: Pillow writes no file without an extension: give a .png"),
        ("--sheet x.h5", "--sheet x.h5: Pillow writes no .h5: give a .png"),
    ],
)
def test_options_are_refused_before_the_work(tmp_path, monkeypatch, capsys, options, complaint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(infer, "load_model", None)
    with pytest.raises(SystemExit) as caught:
        infer.main([".", ".", *options.split(), "--device", "cpu"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_looking_whether_a_file_can_be_written_leaves_no_trace(tmp_path):
    (tmp_path / "old").write_text("content")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("old", "link", "new"):
        infer.check_target("--json", tmp_path / name)
    assert (tmp_path / "old").read_text() == "content"
    assert {path.name for path in tmp_path.iterdir()} == {"old", "link"}


def test_a_disk_that_has_become_full_is_one_line(trained_run, image_folder, capsys):
    """And the answers are there."""
    with pytest.raises(SystemExit) as caught:
        infer.main([str(trained_run / "checkpoints"), str(image_folder / "val"), "--json", "/dev/full"])
    assert caught.value.code == 1
    printed, errors = capsys.readouterr()
    assert len(printed.splitlines()) == 23
    (line,) = errors.splitlines()
    assert line.startswith("error: --json /dev/full could not be written ([Errno 28] No space left on device): ")
