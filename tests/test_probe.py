"""tools/probe.py: neighbours by brute force, a probe at its loss's one minimum, features by hand."""

import launch

import contextlib
import json
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, run_command

import infer
import probe
import train_ddp


@contextlib.contextmanager
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def clouds(seed, images, classes=7, width=12, spread=1.5):
    """Features around a centre a class, and labels."""
    centres = np.random.default_rng(99).normal(size=(classes, width))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, images)
    return centres[labels] + spread * rng.normal(size=(images, width)), labels


def brute_force(train, labels, val, answers, k, temperature):
    """Top-1 and top-5 hits of DINO's weighted votes (arXiv 2104.14294), an image and a neighbour at a time."""
    top1 = top5 = 0
    for image, answer in zip(val, answers, strict=True):
        cosines = [other @ image / (np.linalg.norm(other) * np.linalg.norm(image)) for other in train]
        votes = {}
        for index in sorted(range(len(train)), key=lambda i: -cosines[i])[:k]:
            votes[labels[index]] = votes.get(labels[index], 0) + np.exp(cosines[index] / temperature)
        order = sorted(votes, key=lambda label: -votes[label])
        top1 += order[0] == answer
        top5 += answer in order[:5]
    return [top1, top5]


@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_votes_are_dinos(monkeypatch, temperature):
    """In batches that do not divide the images; with fewer than five classes among the neighbours, too."""
    monkeypatch.setattr(probe, "QUERIES", 7)
    (train, labels), (val, answers) = clouds(0, 90), clouds(1, 40)
    ks = (1, 3, 20, 90)
    tensors = [torch.from_numpy(each) for each in (train, labels, val, answers)]
    with alone():
        hits = probe.knn_hits(*tensors, k=ks, temperature=temperature, num_classes=7)
    wanted = [brute_force(train, labels, val, answers, k, temperature) for k in ks]
    assert hits.tolist() == wanted
    assert len({tuple(row) for row in wanted}) > 2


def test_votes_stay_finite():
    similarity, classes = torch.tensor([[1.0, 0.9, 0.9]]), torch.tensor([[2, 0, 0]])
    for temperature, best in ((1e-4, 2), (1.0, 0)):
        (votes,) = probe.votes_of(similarity, classes, k=[3], temperature=temperature, num_classes=3)
        assert votes.isfinite().all()
        assert votes.argmax() == best


def gradient(features, labels, weight, bias, l2):
    """Of mean cross-entropy + l2 / 2 |weight|^2, by the formula."""
    logits = features @ weight.T + bias
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    errors = odds / odds.sum(axis=1, keepdims=True) - np.eye(len(bias))[labels]
    return errors.T @ features / len(features) + l2 * weight, errors.mean(axis=0)


@pytest.mark.parametrize("l2", [1e-3, 1e-1])
def test_probe_is_at_the_minimum_of_its_loss(monkeypatch, l2):
    """Which is convex: where the gradient is zero, and nowhere else."""
    monkeypatch.setattr(probe, "ROWS", 16)
    features, labels = clouds(2, 150)
    tensors = torch.from_numpy(features), torch.from_numpy(labels)
    with alone():
        weight, bias, taken = probe.fit_linear(*tensors, num_classes=7, l2=l2, iterations=500)
        few = probe.fit_linear(*tensors, num_classes=7, l2=l2, iterations=2)
    for part in gradient(features, labels, weight.numpy(), bias.numpy(), l2):
        assert np.abs(part).max() < 2e-6
    assert 2 < taken < 500
    assert few[2] == 2
    assert max(np.abs(part).max() for part in gradient(features, labels, few[0].numpy(), few[1].numpy(), l2)) > 1e-4


def scores(capsys, *arguments):
    probe.main([*map(str, arguments), "--workers", "0"])
    return capsys.readouterr().out.splitlines()


def scored(lines):
    """Without the iterations, of which rounding may make one more."""
    return [line.split(", ")[:3] for line in lines[1:]]


def features_by_hand(model, folder):
    """Of an exported model: what its head gets, image by image."""
    model, config = infer.load_model(model)
    reader = infer.Reader(model, config)
    taken = []
    model.head.register_forward_pre_hook(lambda _, given: taken.append(given[0][0].double().numpy()))
    labels = []
    for label, place in enumerate(sorted(folder.iterdir())):
        for file in sorted(place.iterdir()):
            with torch.inference_mode():
                model(reader(file.read_bytes())[None])
            labels.append(label)
    return np.stack(taken), np.array(labels)


def test_a_checkpoint_is_scored_by_the_images_of_a_folder_or_of_shards(
    trained_run, image_folder, made_shards, tmp_path, capsys
):
    """The same from the checkpoint and the export, in any batches; as by hand."""
    model = trained_run / "checkpoints/final_model"
    (train, labels), (val, answers) = (features_by_hand(model, image_folder / split) for split in ("train", "val"))
    output = tmp_path / "probe.json"
    lines = scores(capsys, model, image_folder, "--k", 5, 20, "--l2", 0.01, 1, "--batch-size", 4, "--output", output)
    assert lines[0] == f"{image_folder}: 23 images by 60 training images, 24 features"
    found = json.loads(output.read_text())
    assert (found["images"], found["train_images"], found["features"]) == (23, 60, 24)
    for k in (5, 20):
        top1, top5 = brute_force(train, labels, val, answers, k, 0.07)
        assert found["knn"][str(k)] == {"top1": pytest.approx(top1 / 23), "top5": pytest.approx(top5 / 23)}
        assert f"knn, k={k}: top-1 {top1 / 23:.4f}, top-5 {top5 / 23:.4f}" in lines
    scaled = [(each - train.mean(axis=0)) / train.std(axis=0) for each in (train, val)]
    with alone():
        options = {"num_classes": 6, "l2": 0.01, "iterations": 1000}
        weight, bias, _ = probe.fit_linear(torch.from_numpy(scaled[0]), torch.from_numpy(labels), **options)
    right = ((scaled[1] @ weight.numpy().T + bias.numpy()).argmax(axis=1) == answers).mean()
    assert found["linear"]["0.01"]["top1"] == pytest.approx(right, abs=1 / 23 + 1e-6)
    assert lines[-1].endswith("iterations, to the end")
    again = scores(capsys, trained_run / "checkpoints", made_shards, "--k", 5, 20, "--l2", 0.01, 1)
    assert scored(again) == scored(lines)
    only = scores(capsys, model, image_folder, "--methods", "linear", "--iterations", 1, "--precision", "bf16")
    assert len(only) == 2
    assert only[1].endswith("1 iterations, all, a higher --iterations may score otherwise")


def test_images_of_a_run_with_packing_have_sizes_of_their_own(tiny, tmp_path, image_folder, capsys, monkeypatch):
    """As by hand, image by image."""
    monkeypatch.setattr(sys, "argv", ["train_ddp.py"])
    options = ["data.packing.enabled=true", "data.packing.images_per_row=4", "num_train_steps=1"]
    train_ddp.main(launch.load_config("L0_sanity", [*tiny, *options], script="train_ddp"))
    model = tmp_path / "run/checkpoints/final_model"
    (train, labels), (val, answers) = (features_by_hand(model, image_folder / split) for split in ("train", "val"))
    top1, top5 = brute_force(train, labels, val, answers, 5, 0.07)
    lines = scores(capsys, model, image_folder, "--k", 5, "--methods", "knn", "--batch-size", 4)
    assert lines[-1] == f"knn, k=5: top-1 {top1 / 23:.4f}, top-5 {top5 / 23:.4f}"


@pytest.mark.slow
def test_two_processes_score_the_same(trained_run, image_folder, capsys):
    arguments = [str(trained_run / "checkpoints"), str(image_folder), "--batch-size", "4"]
    done = run_command([ROOT / "tools/probe.py", *arguments, "--workers", "0"], nproc=2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert scored(done.stdout.splitlines()) == scored(scores(capsys, *arguments))


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (["--k", "61"], "--k 61 of 60 training images: give at most as many"),
        (["--k", "0"], "--k: 0: give a whole number, 1 or more"),
        (["--l2", "-1"], "--l2: -1: give 0 or more"),
        (["--l2", "nan"], "--l2: nan: give 0 or more"),
        (["--temperature", "-1"], "--temperature: -1: give 0 or more"),
        (["--batch-size", "0"], "--batch-size: 0: give a whole number, 1 or more"),
        (
            ["--output", "/nowhere/x.json"],
            "--output /nowhere/x.json cannot be written (No such file or directory): give",
        ),
        (["--temperature", "0"], "--temperature 0.0: give more than 0"),
        (["--methods", "svm"], "svm"),
    ],
)
def test_what_cannot_be_is_refused_by_name(trained_run, image_folder, capsys, options, fragment):
    with pytest.raises(SystemExit) as caught:
        scores(capsys, trained_run / "checkpoints", image_folder, *options)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert fragment in line


def test_a_folder_without_training_images_is_one_line(trained_run, image_folder, capsys):
    with pytest.raises(SystemExit) as caught:
        scores(capsys, trained_run / "checkpoints", image_folder / "val")
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    val = image_folder / "val"
    assert line == f"error: FOLDER={val}: there is no folder {val}/train: give {image_folder}"
