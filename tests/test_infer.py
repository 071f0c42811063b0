"""A trained model at work: its accuracy on a folder, its answers for any file.

References: the run's own evaluation, timm.
"""

import launch  # noqa: F401  (before torch)

import json
import shutil

import pytest
import timm
import torch
from conftest import ROOT, TINY, read_metrics, run_command
from PIL import Image

import evaluate
import infer
import schema


@pytest.fixture(scope="module")
def run(image_folder, tmp_path_factory):
    """A run of six steps on `images`; its folder."""
    folder = tmp_path_factory.mktemp("run")
    done = run_command(
        [ROOT / "train_ddp.py", *TINY, f"data.path={image_folder}", f"output_dir={folder}", "evaluation.every_n_steps=6"]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_evaluation_is_the_runs_own(run, image_folder, tmp_path, capsys):
    """From the checkpoint by two processes, and from the exported model by one, in batches that do not divide 23."""
    want = read_metrics(run)[6]
    counts = {path.name: len(list(path.iterdir())) for path in (image_folder / "val").iterdir()}
    for model, nproc in ((run / "checkpoints", 2), (run / "checkpoints/final_model", None)):
        output = tmp_path / f"{nproc}.json"
        options = ["--batch-size", 4, "--workers", 1, "--per-class", "--output", output]
        arguments = [*map(str, (model, image_folder / "val", *options))]
        if nproc is None:
            evaluate.main(arguments)
            printed = capsys.readouterr().out
        else:
            done = run_command([ROOT / "tools/evaluate.py", *arguments], nproc=nproc)
            assert done.returncode == 0, done.stderr[-2000:]
            printed = done.stdout
        found = json.loads(output.read_text())
        assert found["images"] == want["val/images"] == 23
        assert found["top1"] == pytest.approx(want["val/top1"])
        assert found["top5"] == pytest.approx(want["val/top5"])
        assert {name: row["images"] for name, row in found["classes"].items()} == counts
        hits = sum(row["top1"] * row["images"] for row in found["classes"].values())
        assert hits / 23 == pytest.approx(want["val/top1"])
        assert f"23 images, top-1 {want['val/top1']:.4f}" in printed


def test_evaluation_goes_by_class_names_and_names_what_is_wrong(run, image_folder, tmp_path, capsys):
    shutil.copytree(image_folder / "val/class_e", tmp_path / "some/class_e")  # the fifth, alone
    arguments = [str(run / "checkpoints"), str(tmp_path / "some"), "--workers", "0", "--per-class"]
    evaluate.main(arguments)
    assert capsys.readouterr().out.splitlines()[-1].endswith("class_e")
    shutil.copytree(image_folder / "val/class_e", tmp_path / "some/stranger")
    with pytest.raises(SystemExit) as caught:
        evaluate.main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "some/stranger is a class that the training folder does not have" in line


def test_answers_are_timms(run, image_folder, tmp_path, capsys):
    """Probabilities from timm's own model and transform; files of every kind; those that cannot be read are named."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    for i, path in enumerate(sorted((image_folder / "val").rglob("*.jpg"))[:5]):
        shutil.copy(path, folder / f"{i}.jpg")
    Image.new("RGBA", (40, 30), (200, 100, 50, 128)).save(folder / "6.png")
    Image.new("CMYK", (40, 30), (0, 200, 100, 0)).save(folder / "7.jpg")
    (folder / "8.jpg").write_bytes(b"no image")
    (folder / "readme.txt").write_text("not asked for")
    model = run / "checkpoints/final_model"
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


def test_a_checkpoint_answers_as_its_export(run, image_folder):
    (model, config), (other, _) = (infer.load_model(run / "checkpoints" / name) for name in ("final_model", "."))
    image = infer.Reader(model, config)(next((image_folder / "val").rglob("*.jpg")).read_bytes())[None]
    assert torch.equal(model(image), other(image))


@pytest.mark.parametrize("what", ["no model", "no images"])
def test_mistakes_are_one_line(run, tmp_path, what):
    (tmp_path / "empty").mkdir()
    model = tmp_path / "empty" if what == "no model" else run / "checkpoints/final_model"
    with pytest.raises(schema.ConfigError, match="no model of ours" if what == "no model" else "holds no images"):
        infer.load_model(model) and list(infer.find([tmp_path / "empty"]))
    with pytest.raises(schema.ConfigError, match=r"gone.jpg is not there"):
        list(infer.find([tmp_path / "gone.jpg"]))


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
