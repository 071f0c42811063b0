"""tools/prepare_imagenet.py: ILSVRC2012's archives become folders or shards, as torchvision's ImageNet has them."""

import io
import os
import shutil
import signal
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from shard_files import FORK, content, files_of, run_tool, tar_of
from torchvision.datasets import ImageFolder
from torchvision.datasets import imagenet as torchvision_imagenet

import make_shards
import prepare_imagenet

pytestmark = [
    pytest.mark.usefixtures("no_listing_kept"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]


# ILSVRC2012's archives

WNIDS = ("n01440764", "n01443537", "n01484850", "n01491361")


IDS = {1: WNIDS[2], 2: WNIDS[0], 3: WNIDS[3], 4: WNIDS[1]}  # ILSVRC's numbers are not in the order of the wnids


TRAIN_COUNTS = dict(zip(WNIDS, (5, 1, 4, 30), strict=True))


NUM_VAL = 11


@pytest.fixture(scope="module")
def ilsvrc(tmp_path_factory):
    """Archives of ILSVRC2012's structure, with 4 classes."""
    savemat = pytest.importorskip("scipy.io").savemat
    root = tmp_path_factory.mktemp("ilsvrc")
    rng = np.random.default_rng(0)
    inner = []
    for wnid in ("n01491361", "n01440764", "n01484850", "n01443537"):
        numbers = rng.permutation(1000)[: TRAIN_COUNTS[wnid]]
        names = [f"{wnid}_{number}" for number in numbers]
        tar_of(root / "inner.tar", [(f"{name}.JPEG", content(name, rng.integers(1, 3000))) for name in names])
        inner.append((f"{wnid}.tar", (root / "inner.tar").read_bytes()))
    tar_of(root / "ILSVRC2012_img_train.tar", inner)
    (root / "inner.tar").unlink()
    numbers = rng.permutation(NUM_VAL) + 1
    tar_of(
        root / "ILSVRC2012_img_val.tar",
        [(f"ILSVRC2012_val_{n:08d}.JPEG", content(f"val{n}", rng.integers(1, 3000))) for n in numbers],
    )
    fields = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height"]
    fields.append("num_train_images")
    rows = [(n, IDS[n], f"fish {n}, thing", "a fish", 0, [], 0, TRAIN_COUNTS[IDS[n]]) for n in IDS]
    rows.append((5, "n00001740", "entity", "all", 2, [1, 2], 3, 0))
    table = np.array([tuple(row) for row in rows], dtype=[(name, object) for name in fields])
    meta = io.BytesIO()
    savemat(meta, {"synsets": table.reshape(-1, 1)})
    truth = "".join(f"{rng.integers(1, 5)}\n" for _ in range(NUM_VAL)).encode()
    with tarfile.open(root / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as tar:
        for name, data in (("meta.mat", meta.getvalue()), ("ILSVRC2012_validation_ground_truth.txt", truth)):
            member = tarfile.TarInfo(f"ILSVRC2012_devkit_t12/data/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return root


@pytest.fixture
def four_classes(monkeypatch):
    """An ILSVRC2012 of these archives' size."""
    monkeypatch.setattr(prepare_imagenet, "WNIDS", WNIDS)
    monkeypatch.setattr(prepare_imagenet, "NUM_IMAGES", {"train": sum(TRAIN_COUNTS.values()), "val": NUM_VAL})


@pytest.fixture
def prepared(ilsvrc, four_classes, tmp_path):
    assert run_tool(prepare_imagenet, ilsvrc, tmp_path / "prepared") == 0
    return tmp_path / "prepared"


def test_prepared_folders_are_torchvision_s(ilsvrc, prepared, tmp_path, monkeypatch):
    reference = tmp_path / "reference"
    shutil.copytree(ilsvrc, reference)
    monkeypatch.setattr(torchvision_imagenet, "check_integrity", lambda file, md5=None: os.path.isfile(file))
    for split in ("train", "val"):
        theirs = torchvision_imagenet.ImageNet(reference, split)
        want = {Path(file).name: (label, Path(file).read_bytes()) for file, label in theirs.samples}
        ours = ImageFolder(prepared / split)
        assert {Path(file).name: (label, Path(file).read_bytes()) for file, label in ours.samples} == want
        assert theirs.wnids == ours.classes
    assert len(want) == NUM_VAL


def test_prepared_shards_are_those_of_the_prepared_folders(ilsvrc, prepared, tmp_path):
    options = ["--samples-per-shard", 6, "--seed", 4]
    assert run_tool(make_shards, prepared, tmp_path / "two_steps", *options) == 0
    assert run_tool(prepare_imagenet, ilsvrc, tmp_path / "one_step", "--shards", *options) == 0
    assert files_of(tmp_path / "one_step") == files_of(tmp_path / "two_steps")
    assert len(list((tmp_path / "one_step/train").glob("*.tar"))) == 7


def test_a_killed_preparation_goes_on(ilsvrc, prepared, tmp_path):
    target = tmp_path / "killed"
    whole = files_of(prepared)

    def slowly():  # as a slow disk
        original = prepare_imagenet.ArchivedImage.read
        prepare_imagenet.ArchivedImage.read = lambda *args: (time.sleep(0.01), original(*args))[1]
        run_tool(prepare_imagenet, ilsvrc, target)

    process = FORK.Process(target=slowly)
    process.start()
    while len(list(target.rglob("n*.JPEG"))) < 12:
        assert process.is_alive()
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    there = {name: data for name, data in files_of(target).items() if not Path(name).name.startswith(".")}
    assert 12 <= len(there) < len(whole)
    assert there.items() <= whole.items()  # no part of an image under an image's name
    kept = min(target.rglob("n*.JPEG"))
    before = kept.stat()
    short = max(target.rglob("n*.JPEG"))
    os.truncate(short, 0)  # as a machine that lost its power may leave it
    assert run_tool(prepare_imagenet, ilsvrc, target) == 0
    assert files_of(target) == whole
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_what_is_missing_is_said(ilsvrc, tmp_path, monkeypatch, capsys):
    assert run_tool(prepare_imagenet, ilsvrc, tmp_path / "out") == 1  # against the whole of ILSVRC2012
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 1
    assert "train: 4 of 1000 classes, no n01494475, n01496331" in text
    assert "train: 40 of 1,281,167 images" in text
    assert "val: 11 of 50,000 images; val: no ILSVRC2012_val_00000012.JPEG, " in text
    assert len(list((tmp_path / "out/train").iterdir())) == 1000  # a label is the same whatever is missing

    monkeypatch.setattr(prepare_imagenet, "WNIDS", WNIDS)
    devkit = prepare_imagenet.read_devkit(ilsvrc / prepare_imagenet.DEVKIT)
    assert devkit.num_train == TRAIN_COUNTS
    found = list(prepare_imagenet.TrainArchive(ilsvrc / prepare_imagenet.TRAIN).images(WNIDS[3]))
    assert "29 of 30 of n01491361" in " ".join(prepare_imagenet.missing("train", found[:-1], devkit))
    assert run_tool(prepare_imagenet, tmp_path, tmp_path / "out") == 2
    assert "lacks ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar, ILSVRC2012_devkit" in capsys.readouterr().err


def test_damaged_archives_are_named(ilsvrc, four_classes, tmp_path, capsys, monkeypatch):
    archives = tmp_path / "archives"

    def fresh():
        shutil.rmtree(archives, ignore_errors=True)
        shutil.copytree(ilsvrc, archives)
        return archives / prepare_imagenet.TRAIN, archives / prepare_imagenet.VAL, archives / prepare_imagenet.DEVKIT

    train, val, devkit = fresh()
    os.truncate(train, train.stat().st_size // 2)
    assert run_tool(prepare_imagenet, archives, tmp_path / "a") == 2
    assert "ILSVRC2012_img_train.tar is cut short within n" in capsys.readouterr().err
    train, val, devkit = fresh()
    with tarfile.open(train) as tar:
        second = tar.getmembers()[1]
    with tarfile.open(train) as tar, tarfile.open(fileobj=tar.extractfile(second)) as inner:
        third = inner.getmembers()[2]
    with open(train, "r+b") as file:
        file.seek(second.offset_data + third.offset)
        file.write(b"\xff" * 512)
    assert run_tool(prepare_imagenet, archives, tmp_path / "b") == 2
    assert f"{second.name} is damaged after " in capsys.readouterr().err
    os.truncate(val, val.stat().st_size // 2)
    assert run_tool(prepare_imagenet, archives, tmp_path / "c", "--splits", "val") == 2
    assert "ILSVRC2012_img_val.tar is cut short within ILSVRC2012_val_" in capsys.readouterr().err
    os.truncate(devkit, 100)
    assert run_tool(prepare_imagenet, archives, tmp_path / "d", "--splits", "val") == 2
    assert "ILSVRC2012_devkit_t12.tar.gz cannot be read" in capsys.readouterr().err
    train, val, devkit = fresh()
    shutil.copy(val, train)
    assert run_tool(prepare_imagenet, archives, tmp_path / "e", "--splits", "train") == 2
    assert "is no class of ILSVRC2012" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert run_tool(prepare_imagenet, archives, tmp_path / "f") == 2
    assert "pip install scipy" in capsys.readouterr().err
    assert run_tool(prepare_imagenet, archives, tmp_path / "f", "--splits", "val") == 2
