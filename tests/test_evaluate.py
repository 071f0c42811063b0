"""tools/evaluate.py: a model's accuracy on a folder is the run's own."""

import launch  # noqa: F401  (before torch)

import json
import pkgutil
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, error_of, read_metrics, run_command
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import RealLabelsImagenet
from weight_files import write_teacher

import evaluate
import infer
from input_pipeline import tar_shards


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


def test_shards_are_evaluated_as_the_folder_that_they_were_made_from(
    trained_run, made_shards, image_folder, nameless, tmp_path, capsys
):
    """In every layout that training takes; without classes.txt, or a model's names, by the labels' numbers."""

    def answer(model, folder, *options):
        evaluate.main([*map(str, (model, folder, *options)), "--workers", "0"])
        return capsys.readouterr().out.replace(str(folder), "FOLDER")

    model = trained_run / "checkpoints"
    want = answer(model, image_folder / "val", "--per-class")
    assert "FOLDER: 23 images" in want
    flat, other = tmp_path / "flat", tmp_path / "other"
    places = ((flat, "x-val-{}"), (flat, "x-train-{}"), (other / "test", "{}"), (other / "val", "val-{}"))
    for place, name in places:
        place.mkdir(parents=True, exist_ok=True)
        for i, file in enumerate(sorted((made_shards / ("train" if "train" in name else "val")).glob("*.tar"))):
            shutil.copy(file, place / f"{name.format(i)}.tar")
    for place in (flat, other):
        shutil.copy(made_shards / "classes.txt", place)
    for folder in (made_shards / "val", made_shards, flat, other / "test"):
        assert answer(model, folder, "--per-class") == want, folder
    assert answer(nameless, other / "test") == want.splitlines()[0] + "\n"
    (flat / "classes.txt").unlink()
    for each in (model, nameless):
        tar_shards.load.cache_clear()
        assert answer(each, flat).splitlines() == want.splitlines()[:1]

    for names, split, complaint in (
        ("abcde", "test", "has label 5, there are 5 classes"),
        ("abcdxf", "test", "class_x is no class of the model's 6"),
        ("abcdxf", "val", "class_x is no class of the model's 6"),
    ):
        (other / "classes.txt").write_text("".join(f"class_{letter}\n" for letter in names))
        tar_shards.load.cache_clear()
        with pytest.raises(SystemExit) as caught:
            answer(model, other / split)
        assert caught.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert complaint in line


@pytest.fixture(scope="module")
def nameless(trained_run, tmp_path_factory):
    """The model of six classes, as a folder that does not tell their names."""
    folder = shutil.copytree(trained_run / "checkpoints/final_model", tmp_path_factory.mktemp("model") / "nameless")
    config = json.loads((folder / "config.json").read_text())
    del config["pretrained_cfg"]["label_names"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def linked(root, classes):
    """A folder with links to class folders under other names."""
    root.mkdir()
    for name, target in classes.items():
        (root / name).symlink_to(target)
    return str(root)


def test_without_names_classes_are_told_by_their_numbers_or_refused(
    trained_run, nameless, image_folder, tmp_path, capsys
):
    """No answer is a number for other classes than the folder's."""
    classes = sorted((image_folder / "val").iterdir())

    def score(*arguments):
        evaluate.main([*map(str, arguments), "--workers", "0"])
        return capsys.readouterr().out.split(":")[-1]

    model = trained_run / "checkpoints/final_model"
    some, padded = {str(i): classes[i] for i in (2, 5)}, {f"{i:02d}": classes[i] for i in (2, 5)}
    named = score(model, linked(tmp_path / "named", {path.name: path for path in some.values()}))
    assert "images, top-1" in named
    assert score(nameless, image_folder / "val") == score(model, image_folder / "val")
    assert score(nameless, linked(tmp_path / "numbers", some)) == named
    assert score(nameless, linked(tmp_path / "padded", padded)) == named
    with pytest.raises(SystemExit) as caught:
        score(nameless, linked(tmp_path / "some", {path.name: path for path in some.values()}))
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "the folder's 2 classes, class_c, class_f, cannot be told among the model's 6 outputs" in line


@pytest.mark.parametrize(
    ("classes", "names", "outputs"),
    [
        ("b c", "a b c d", (1, 2)),
        ("0 1 10 2", "", (0, 1, 10, 2)),  # as sorted names come
        ("a b c d", "", (0, 1, 2, 3)),
        ("1 2 3 4", "", (0, 1, 2, 3)),  # of four outputs: from one
        ("1 2", "", (1, 2)),
        ("b e", "a b c d", "e is no class of the model's 4, a, b, c, ..."),
        ("a b c", "", "the folder's 3 classes, a, b, c, cannot be told among the model's 4 outputs"),
        ("1 10 2 3", "", "the folder's 4 classes, 1, 10, 2, ..., cannot be told"),  # numbers or places?
        ("1 a b", "", "the folder's 3 classes, 1, a, b, cannot be told"),
        ("0 00", "", "the folder's 2 classes, 0, 00, cannot be told"),
        ("a b c d e", "", "the folder's 5 classes, a, b, c, ..., cannot be told"),
    ],
)
def test_outputs_of_classes(classes, names, outputs):
    num_outputs = 11 if "0 1 10" in classes else 4
    arguments = tuple(classes.split()), tuple(names.split()), num_outputs
    if isinstance(outputs, tuple):
        assert evaluate.outputs_of(*arguments) == outputs
    else:
        assert outputs in error_of(evaluate.outputs_of, *arguments)


# ImageNet's other sets, of noise under their names, against what timm's validate.py does with a model's logits


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """A folder with a model of ImageNet's classes, without names and with them in another order, and 24 images."""
    folder = tmp_path_factory.mktemp("imagenet")
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    write_teacher(folder / "nameless", "vit_tiny_patch16_224", num_classes=1000, **size)
    shutil.copytree(folder / "nameless", folder / "named")
    tensors = load_file(folder / "named/model.safetensors")
    flipped = {name: tensors[name].flip(0).contiguous() for name in ("head.weight", "head.bias")}
    save_file(tensors | flipped, folder / "named/model.safetensors")
    content = json.loads((folder / "named/config.json").read_text())
    content["pretrained_cfg"]["label_names"] = evaluate.wnids()[::-1]
    (folder / "named/config.json").write_text(json.dumps(content))
    rng = np.random.default_rng(0)
    (folder / "pictures").mkdir()
    for i in range(24):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"pictures/{i:02d}.png")
    return folder


def logits_of(imagenet):
    """The nameless model's, of the pictures in order."""
    model, config = infer.load_model(imagenet / "nameless")
    reader = infer.Reader(model, config)
    with torch.inference_mode():
        return model(torch.stack([reader(path.read_bytes()) for path in sorted((imagenet / "pictures").iterdir())]))


def placed(imagenet, root, names):
    """A folder of class folders with the pictures under `names`, <class>/<file>, in order."""
    for picture, name in zip(sorted((imagenet / "pictures").iterdir()), names, strict=True):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, root / name)
    return str(root)


def scores(capsys, *arguments):
    """Images, top-1, top-5 and what is said after them."""
    evaluate.main([*map(str, arguments), "--workers", "0", "--batch-size", "5"])
    line = capsys.readouterr().out.splitlines()[0]
    count, top1, top5, words = re.search(r": (\d+) images, top-1 (\S+), top-5 (\d\.\d+)(.*)", line).groups()
    return int(count), float(top1), float(top5), words


@pytest.mark.parametrize("model", ["nameless", "named"])
def test_real_labels_are_timms(imagenet, tmp_path, capsys, model):
    logits = logits_of(imagenet)
    table = RealLabelsImagenet([""] * 50_000).real_labels
    files = []
    for i, ranks in enumerate(logits.topk(9, dim=1).indices.tolist()):
        wanted = (ranks[0], ranks[2], ranks[8], None)[i % 4]  # right at once, among five, not among them; no label
        fits = (name for name, labels in table.items() if (wanted in labels if labels else wanted is None))
        files.append(next(name for name in fits if name not in files))
    timms = RealLabelsImagenet([*files, *[""] * (50_000 - len(files))])
    timms.add_result(logits)
    count, top1, top5, words = scores(
        capsys,
        imagenet / model,
        placed(imagenet, tmp_path / "val", [f"n01440764/{name}" for name in files]),
        "--real-labels",
    )
    assert (count, words) == (18, " by ReaL's labels")
    assert top1 == pytest.approx(timms.get_accuracy(1) / 100, abs=1e-4)
    assert top5 == pytest.approx(timms.get_accuracy(5) / 100, abs=1e-4)
    assert 0.3 < top1 < top5 < 1


@pytest.mark.parametrize("model", ["nameless", "named"])
@pytest.mark.parametrize("name", ["imagenet-a", "imagenet-r", "a file"])
def test_answers_are_among_the_valid_labels_alone(imagenet, tmp_path, capsys, model, name):
    if name == "a file":
        indices = list(range(10, 990, 7))
        outputs = indices if model == "nameless" else [999 - index for index in indices]
        (tmp_path / "list.txt").write_text("".join(f"{output}\n" for output in outputs))
        name = tmp_path / "list.txt"
    else:
        content = pkgutil.get_data("timm.data", f"_info/{name.replace('-', '_')}_indices.txt")
        indices = [int(line) for line in content.split()]
    among = logits_of(imagenet)[:, indices]  # as validate.py has it
    ranks = among.topk(9, dim=1).indices
    labels = [row[(0, 2, 8)[i % 3]].item() for i, row in enumerate(ranks)]
    folder = placed(
        imagenet, tmp_path / "set", [f"{evaluate.wnids()[indices[k]]}/{i}.png" for i, k in enumerate(labels)]
    )
    found = scores(capsys, imagenet / model, folder, "--valid-labels", name)
    assert found == (
        24,
        pytest.approx(1 / 3, abs=1e-4),
        pytest.approx(2 / 3, abs=1e-4),
        f" among {len(indices)} classes",
    )
    assert scores(capsys, imagenet / model, folder)[1] < 1 / 3


@pytest.mark.parametrize("model", ["nameless", "named"])
def test_imagenets_classes_go_by_numbers_and_by_wnids(imagenet, tmp_path, capsys, model):
    """As the folders of ImageNet-V2 and of Sketch are called, and of a part of either."""
    right = logits_of(imagenet).argmax(dim=1).tolist()
    labels = [label if i % 2 else (label + 1) % 1000 for i, label in enumerate(right)]
    for root, name in (("v2", str), ("sketch", lambda label: evaluate.wnids()[label])):
        folder = placed(imagenet, tmp_path / root, [f"{name(label)}/{i}.png" for i, label in enumerate(labels)])
        count, top1, _, _ = scores(capsys, imagenet / model, folder)
        assert (count, top1) == (24, 0.5)


@pytest.mark.parametrize(
    ("model", "options", "fragment"),
    [
        ("nameless", ["--real-labels", "--per-class"], "--real-labels with --per-class"),
        ("nameless", ["--real-labels", "--valid-labels", "imagenet-a"], "--real-labels with --valid-labels"),
        ("nameless", ["--real-labels"], "00.png is no ILSVRC2012_val_<number>.JPEG of ImageNet's validation set"),
        ("nameless", ["--valid-labels", "imagenet-a"], "--valid-labels imagenet-a lacks 0 of "),
        ("nameless", ["--valid-labels", "nowhere.txt"], "--valid-labels nowhere.txt is no list that can be read"),
        ("nameless", ["--valid-labels", __file__], "which is none of the model's 1000 outputs"),
        ("other", ["--real-labels"], "--real-labels is for models of ImageNet's 1000 classes, this one has 6 others"),
        (
            "other",
            ["--valid-labels", "imagenet-r"],
            "--valid-labels imagenet-r is for models of ImageNet's 1000 classes",
        ),
    ],
)
def test_labels_that_do_not_fit_are_refused_by_name(imagenet, nameless, tmp_path, capsys, model, options, fragment):
    folder = placed(imagenet, tmp_path / "set", [f"0/{i:02d}.png" for i in range(24)])
    with pytest.raises(SystemExit) as caught:
        scores(capsys, nameless if model == "other" else imagenet / model, folder, *options)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert fragment in line


@pytest.mark.parametrize(
    ("folder", "complaint"),
    [
        ("gone", "FOLDER={0}/gone: there is no folder {0}/gone: give one that holds class folders of images"),
        ("empty", "FOLDER={0}/empty: {0}/empty holds no class folders; expected empty/<class>/<image>"),
        ("set", "FOLDER={0}/set is a whole data set, not its class folders: give {0}/set/val"),
    ],
)
@pytest.mark.parametrize("has_names", [True, False])
def test_a_wrong_folder_is_named_as_it_was_given(
    trained_run, nameless, image_folder, tmp_path, capsys, folder, complaint, has_names
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "set").symlink_to(image_folder)
    complaint = complaint.format(tmp_path).replace(f"{tmp_path}/set", str(image_folder))
    with pytest.raises(SystemExit) as caught:
        evaluate.main([str(trained_run / "checkpoints" if has_names else nameless), str(tmp_path / folder)])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {complaint}")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--batch-size", "0"], "--batch-size: 0: give a whole number, 1 or more"),
        (["--batch-size", "-2"], "--batch-size: -2: give a whole number, 1 or more"),
        (["--workers", "-1"], "--workers: -1: give a whole number, 0 or more"),
        (
            ["--output", "/nowhere/x.json"],
            "--output /nowhere/x.json cannot be written (No such file or directory): give",
        ),
    ],
)
def test_options_are_refused_before_the_work(trained_run, image_folder, monkeypatch, capsys, options, complaint):
    monkeypatch.setattr(infer, "load_model", None)
    with pytest.raises(SystemExit) as caught:
        evaluate.main([str(trained_run / "checkpoints"), str(image_folder / "val"), *options])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_read_is_one_line(trained_run, image_folder, tmp_path, capfd, workers):
    """From a loader process, too."""
    shutil.copytree(image_folder / "val", tmp_path / "val")
    bad = next((tmp_path / "val/class_e").iterdir())
    bad.write_text("no image")
    with pytest.raises(SystemExit) as caught:
        evaluate.main([str(trained_run / "checkpoints"), str(tmp_path / "val"), "--workers", str(workers)])
    torch.distributed.destroy_process_group()  # which a process that fails leaves to its end
    assert caught.value.code == 1
    assert capfd.readouterr().err.splitlines()[-1] == f"error: cannot read {bad}: not an image of a known format"
