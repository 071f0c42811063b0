"""Lists of images: kept, made again when a folder changes, the same whoever asks; labels of a flat val folder."""

import launch  # noqa: F401  (before torch)

import itertools
import os
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from torchvision.datasets import ImageFolder

import schema
from input_pipeline import image_folders
from input_pipeline.image_folders import scan

LIST = "import folders, sys; f = image_folders.scan(sys.argv[1], 'train'); print(len(f), f.name(len(f) - 1))"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A data folder of three classes, ten minutes old, and a cache folder of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "data"
    for split, name, i in itertools.product(("train", "val"), ("a", "b", "c"), range(4)):
        file = root / split / name / f"{i}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    age(root)
    scan.cache_clear()
    return root


def age(root):
    """Make every folder's last change lie back: a list made within two seconds of one is not kept."""
    then = time.time() - 600
    for folder in [root, *root.rglob("*/")]:
        os.utime(folder, (then, then))


def fresh(root, split="train"):
    """What a new process would find."""
    scan.cache_clear()
    return scan(str(root), split).samples


@pytest.fixture
def listings(monkeypatch):
    """Counts how often folders are read."""
    seen, real = [], image_folders._list
    monkeypatch.setattr(image_folders, "_list", lambda *args: seen.append(args[0]) or real(*args))
    return seen


def test_list_is_kept_and_equals_torchvisions(tree, listings):
    want = ImageFolder(f"{tree}/train").samples
    assert fresh(tree) == fresh(tree) == want
    assert len(listings) == 1
    assert fresh(tree, "val") == fresh(tree, "val") == ImageFolder(f"{tree}/val").samples
    assert len(listings) == 2
    assert scan(str(tree), "train").skipped == {}


def test_list_is_made_again_after_every_change(tree, listings):
    def changed(change):
        fresh(tree)
        before = len(listings)
        change()
        assert fresh(tree) == ImageFolder(f"{tree}/train").samples
        assert len(listings) > before
        age(tree)

    changed(lambda: (tree / "train/b/9.png").touch())
    changed(lambda: (tree / "train/b/0.jpg").unlink())
    changed(lambda: (tree / "train/c/0.jpg").rename(tree / "train/a/7.jpg"))
    changed(lambda: (tree / "train/b").rename(tree / "train/z"))
    (tree / "more").mkdir()
    (tree / "more/x.jpg").touch()
    changed(lambda: (tree / "train/linked").symlink_to(tree / "more"))
    changed(lambda: (tree / "more/y.jpg").touch())  # behind a link


def test_counts_of_what_was_left_out_are_kept_too(tree, listings):
    for name in ("Thumbs.db", ".hidden.jpg", "readme"):
        (tree / "train/a" / name).touch()
    (tree / "train/a/gone.jpg").symlink_to("nowhere")
    age(tree)
    want = {"*.db": 1, "hidden": 1, "no extension": 1, "dangling link or folder": 1}
    for _ in range(2):
        fresh(tree)
        assert scan(str(tree), "train").skipped == want
    assert len(listings) == 1


def test_a_change_within_the_clocks_tick_is_seen(tree, listings):
    """A list made right after a change is not kept: the next file could come without another time."""
    (tree / "train/a/5.jpg").touch()
    fresh(tree)
    times = (tree / "train/a").stat()
    (tree / "train/a/6.jpg").touch()
    os.utime(tree / "train/a", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fresh(tree) == ImageFolder(f"{tree}/train").samples


def test_a_damaged_list_is_made_again(tree, listings):
    want = fresh(tree)
    file = tree / ".index/train.npz"
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"PK\x03\x04" + b"\0" * 500):
        file.write_bytes(content)
        assert fresh(tree) == want
    assert len(listings) == 4
    assert fresh(tree) == want
    assert len(listings) == 4


def test_where_the_data_cannot_be_written_the_users_cache_is(tree, listings, monkeypatch, tmp_path):
    """As root nothing is read only, so the folder's name is taken by a file."""
    (tree / ".index").write_text("in the way")
    age(tree)
    assert fresh(tree) == fresh(tree)
    assert len(listings) == 1
    (tmp_path / "cache").rename(tmp_path / "away")
    (tmp_path / "cache").write_text("in the way, too")
    assert fresh(tree) == ImageFolder(f"{tree}/train").samples
    assert len(listings) == 2


def test_processes_of_a_machine_make_it_once(tree):
    for i in range(2000):
        (tree / f"train/a/many{i}.jpg").touch()
    age(tree)
    slow = "lambda *a: print('listing') or time.sleep(1.5) or real(*a)"  # so that all are there at the same time
    spy = f"import folders, time; real = image_folders._list; image_folders._list = {slow}; {LIST}"
    running = [
        subprocess.Popen([sys.executable, "-c", spy, tree], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in running]
    assert sum(output.count("listing") for output in outputs) == 1
    assert {output.replace("listing\n", "") for output in outputs} == {f"2012 {tree}/train/c/3.jpg\n"}


# Flat validation folders


@pytest.fixture
def flat(tree):
    """val/ as ILSVRC's archive unpacks: six files, no class folders."""
    for file in [*(tree / "val").rglob("*.jpg")]:
        file.unlink()
    for folder in [*(tree / "val").iterdir()]:
        folder.rmdir()
    for i in range(1, 7):
        (tree / f"val/ILSVRC2012_val_{i:08d}.JPEG").touch()
    return tree


LABELS = ["c", "a", "b", "b", "c", "a"]


@pytest.mark.parametrize("kind", ["numbers", "names", "kaggle"])
def test_flat_val_folder_with_its_labels(flat, kind):
    names = [f"ILSVRC2012_val_{i:08d}" for i in range(1, 7)]
    if kind == "kaggle":
        rows = [f"{name},{label} 12 30 400 300 {label} 1 1 2 2 " for name, label in zip(names, LABELS, strict=True)]
        (flat / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *reversed(rows)]) + "\n")
    else:
        values = LABELS if kind == "names" else ["abc".index(label) for label in LABELS]
        (flat / "val.txt").write_text("".join(f"{n}.JPEG {v}\n" for n, v in zip(names, values, strict=True)))
    want = [(f"{flat}/val/{name}.JPEG", "abc".index(label)) for name, label in zip(names, LABELS, strict=True)]
    assert fresh(flat, "val") == want


def test_flat_val_folder_without_labels_says_what_is_missing(flat):
    with pytest.raises(schema.ConfigError, match=r"val holds no class folders; .* val.txt or LOC_val_solution.csv"):
        fresh(flat, "val")


def test_a_file_that_the_labels_lack_is_counted(flat):
    (flat / "val.txt").write_text("".join(f"ILSVRC2012_val_{i:08d}.JPEG {i % 3}\n" for i in range(1, 6)))
    assert len(fresh(flat, "val")) == 5
    assert scan(str(flat), "val").skipped == {"without a label": 1}


@pytest.mark.parametrize("line", ["ILSVRC2012_val_00000001.JPEG 3", "ILSVRC2012_val_00000001.JPEG d", "nonsense"])
def test_a_label_of_no_class_is_named(flat, line):
    (flat / "val.txt").write_text(line + "\n")
    with pytest.raises(schema.ConfigError, match=r"val.txt:1: .* is not a file name and one of the training classes"):
        fresh(flat, "val")


def test_a_class_named_by_a_number_is_meant_by_its_name(flat):
    for old, new in (("a", "10"), ("b", "2"), ("c", "1")):
        (flat / "train" / old).rename(flat / "train" / new)
    (flat / "val.txt").write_text("".join(f"ILSVRC2012_val_{i:08d}.JPEG {i % 2 + 1}\n" for i in range(1, 7)))
    scan.cache_clear()
    assert scan(str(flat), "train").classes == ("1", "10", "2")
    assert [label for _, label in fresh(flat, "val")] == [2, 0, 2, 0, 2, 0]  # 2 and 1 by name, not third and second
