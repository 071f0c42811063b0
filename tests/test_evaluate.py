"""tools/evaluate.py: a model's accuracy on a folder is the run's own."""

import launch  # noqa: F401  (before torch)

import json
import shutil

import pytest
from conftest import ROOT, read_metrics, run_command

import evaluate


@pytest.mark.parametrize(
    ("model", "nproc"),
    [
        ("checkpoints", None),
        ("checkpoints/final_model", None),
        pytest.param("checkpoints", 2, marks=pytest.mark.slow),
    ],
)
def test_evaluation_is_the_runs_own(trained_run, image_folder, tmp_path, capsys, model, nproc):
    """From the checkpoint and from the exported model, by one process and by two, in batches that do not divide 23."""
    want = read_metrics(trained_run)[6]
    counts = {path.name: len(list(path.iterdir())) for path in (image_folder / "val").iterdir()}
    output = tmp_path / "scores.json"
    options = ["--batch-size", 4, "--workers", 1, "--per-class", "--output", output]
    arguments = [*map(str, (trained_run / model, image_folder / "val", *options))]
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


def test_evaluation_goes_by_class_names_and_names_what_is_wrong(trained_run, image_folder, tmp_path, capsys):
    shutil.copytree(image_folder / "val/class_e", tmp_path / "some/class_e")  # the fifth, alone
    arguments = [str(trained_run / "checkpoints"), str(tmp_path / "some"), "--workers", "0", "--per-class"]
    evaluate.main(arguments)
    assert capsys.readouterr().out.splitlines()[-1].endswith("class_e")
    shutil.copytree(image_folder / "val/class_e", tmp_path / "some/stranger")
    with pytest.raises(SystemExit) as caught:
        evaluate.main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "some/stranger is a class that the training folder does not have" in line
