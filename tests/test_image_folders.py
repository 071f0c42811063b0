"""Lists of images: torchvision's ImageFolder's, kept, made again when a folder changes, the same whoever asks.

Labels of a flat val folder; the bundled archive, unpacked once.
"""

import launch  # noqa: F401  (before torch)

import collections
import errno
import gzip
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from configs import data_config
from conftest import ROOT, error_of, fork_context, loaders_of, make_files
from PIL import Image
from torchvision.datasets import ImageFolder

import imagenet_dataset
import schema
from imagenet_dataset import PADDING
from input_pipeline import image_folders
from input_pipeline.image_folders import scan

LIST = "f = image_folders.scan(sys.argv[1], 'train'); print(len(f), f.name(len(f) - 1))"


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
    want = {"*.db": 1, "hidden": 1, "no extension": 1, "link to nothing": 1}
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
    imports = "import sys, time; from input_pipeline import image_folders"
    spy = f"{imports}; real = image_folders._list; image_folders._list = {slow}; {LIST}"
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


ARCHIVE = ROOT / "data/fashion_mnist_demo.tar.gz"


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


# Folders

CLEAN = ["10/b.jpg", "10/a.png", "2/X.JPEG", "2/c.webp", "2/B.jpg", "1/z.PNG", "1/1.jpg", "1/10.jpg", "1/2.jpg"]


STRAY = {
    "hidden": ["1/._1.jpg", "1/.DS_Store", "10/._b.JPEG", "2/.hidden.png"],
    "*.txt": ["1/notes.txt", "2/NOTES.TXT"],
    "*.npy": ["10/x.npy"],
    "*.jpg_old": ["10/b.jpg_old"],
    "no extension": ["2/README"],
}
STRAY_BESIDE = [".ipynb_checkpoints/1.png", ".git/x.jpg", "labels.txt", "stray.jpg", "._1", "1/folder.jpg/"]
STRAY_BESIDE += ["@eaDir/1.jpg", "__MACOSX/1.jpg"]  # what Synology and macOS leave behind


def relative(samples, root):
    return [(os.path.relpath(file, root), label) for file, label in samples]


@pytest.mark.parametrize("split", ["train", "val"])
def test_classes_and_files_are_image_folders(tmp_path, split):
    path = make_files(tmp_path, [f"{s}/{file}" for s in ("train", "val") for file in CLEAN])
    found, expected = scan(path, split), ImageFolder(f"{path}/{split}")
    assert found.classes == tuple(expected.classes) == ("1", "10", "2")  # sorted as text
    assert found.samples == expected.samples
    assert found.skipped == {}


@pytest.mark.parametrize("letters", ["ab", "bA", "éez", "Zz_", "a-b"])
def test_class_order_is_image_folders_for_any_names(tmp_path, letters):
    names = [*letters, letters, letters + "1"]
    path = make_files(tmp_path, [f"{s}/{name}/0.png" for s in ("train", "val") for name in names])
    assert list(scan(path, "val").classes) == ImageFolder(f"{path}/train").classes


@pytest.mark.parametrize("split", ["train", "val"])
def test_stray_entries_are_left_out_and_counted(tmp_path, split):
    clean = ImageFolder(make_files(tmp_path / "clean", CLEAN))
    stray = [file for files in STRAY.values() for file in files]
    files = [f"{s}/{file}" for s in ("train", "val") for file in [*CLEAN, *stray, *STRAY_BESIDE]]
    path = make_files(tmp_path / "messy", files)
    for s in ("train", "val"):
        (Path(path) / s / "1/dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
        (Path(path) / s / "dangling").symlink_to(tmp_path / "nowhere")

    found = scan(path, split)
    assert found.classes == ("1", "10", "2")
    assert relative(found.samples, f"{path}/{split}") == relative(clean.samples, tmp_path / "clean")
    expected = {why: len(files) for why, files in STRAY.items()}
    assert found.skipped == expected | {"link to nothing": 1, "class that is a link to nothing": 1}


@pytest.mark.parametrize("where", ["images", "images/more"])
def test_images_in_folders_below_a_class_are_in_torchvisions_order(tmp_path, where):
    files = [f"{c}/{w}{i}.jpg" for c in "ab" for w in ("", f"{where}/", "aside/") for i in (10, 2)]
    path = make_files(tmp_path, [f"{s}/{file}" for s in ("train", "val") for file in files])
    assert scan(path, "train").samples == ImageFolder(f"{path}/train").samples
    assert len(scan(path, "val")) == 12


def test_links_in_a_circle_end(tmp_path):
    path = make_files(tmp_path, ["train/a/1.jpg", "val/a/1.jpg"])
    (tmp_path / "train/a/again").symlink_to(tmp_path / "train/a", target_is_directory=True)
    (tmp_path / "train/a/itself.jpg").symlink_to("itself.jpg")
    found = scan(path, "train")
    assert (len(found), found.skipped) == (1, {"link to nothing": 1})


def test_a_list_is_made_again_where_a_folders_time_was_set_back(tree):
    age(tree)
    fresh(tree)
    times = (tree / "train/a").stat()
    (tree / "train/a/new.jpg").touch()
    os.utime(tree / "train/a", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fresh(tree) == ImageFolder(f"{tree}/train").samples


def test_what_a_network_file_system_refuses_in_passing_is_asked_again(tmp_path, monkeypatch):
    path = make_files(tmp_path, ["train/a/1.jpg", "val/a/1.jpg"])
    found, refusals, real = scan(path, "train"), [errno.ESTALE, errno.EACCES], open

    def refusing(file, *args):
        if str(file).endswith("1.jpg") and refusals:
            number = refusals.pop(0)
            raise OSError(number, os.strerror(number))
        return real(file, *args)

    monkeypatch.setattr("builtins.open", refusing)
    monkeypatch.setattr(image_folders.time, "sleep", lambda _: None)
    with pytest.raises(PermissionError):
        found.read(0)
    refusals[:] = [errno.ESTALE] * 3
    found.read(0)
    refusals[:] = [errno.ESTALE] * 4
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        found.read(0)


def test_links_to_images_and_to_class_folders_are_followed(tmp_path):
    path = make_files(tmp_path / "data", ["train/a/0.png", "val/a/0.png"])
    make_files(tmp_path / "elsewhere", ["1.png", "2.png"])
    (tmp_path / "data/train/a/link.png").symlink_to(tmp_path / "elsewhere/1.png")
    (tmp_path / "data/train/b").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert scan(path, "train").samples == ImageFolder(f"{path}/train").samples
    assert len(scan(path, "train").samples) == 4


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_class_without_validation_images_does_not_shift_labels(tmp_path, how):
    train = [f"train/{name}/{i}.png" for name in "abcd" for i in range(2)]
    val = ["val/a/0.png", "val/c/0.png", "val/c/1.png", "val/d/0.png", *(["val/b/"] if how == "empty" else [])]
    path = make_files(tmp_path, train + val)
    class_to_idx = ImageFolder(f"{path}/train").class_to_idx
    found = scan(path, "val")
    assert found.classes == tuple("abcd")
    expected = [(file.removeprefix("val/"), class_to_idx[file[4]]) for file in val if file.endswith(".png")]
    assert relative(found.samples, f"{path}/val") == expected
    cfg = data_config(path, "global_batch_size=8")
    imagenet_dataset.run_sizes(cfg, 1)
    labels = torch.cat([batch[1] for batch in loaders_of(cfg, rank=0, world_size=1, start_step=0)[1]])
    assert labels[labels != PADDING].tolist() == [0, 2, 2, 3]


@pytest.mark.parametrize("path", ["", "/"])
def test_path_without_a_name_is_refused_like_any_other(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    assert "train" in error_of(scan, path, "train")


def test_data_in_the_working_folder_can_be_used(tmp_path, monkeypatch):
    make_files(tmp_path, ["train/a/0.png", "val/a/0.png"])
    monkeypatch.chdir(tmp_path)
    assert [Path(file).name for file, _ in scan(".", "train").samples] == ["0.png"]


# The bundled data


def _scan_at_once(barrier, path, answer):
    """In a process of its own: wait for the others, then ask for the data."""
    barrier.wait(timeout=300)
    counts = {
        split: dict(collections.Counter(Path(file).parent.name for file, _ in scan(path, split).samples))
        for split in ("train", "val")
    }
    Path(answer).write_text(json.dumps(counts))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The data set after four processes asked for it at once; what each saw; every name that was ever beside it."""
    folder, answers = tmp_path_factory.mktemp("bundled"), tmp_path_factory.mktemp("answers")
    shutil.copy(ARCHIVE, folder)
    context = fork_context()
    barrier = context.Barrier(4)
    arguments = [(barrier, str(folder / "fashion_mnist_demo"), str(answers / f"{i}.json")) for i in range(4)]
    processes = [context.Process(target=_scan_at_once, args=each) for each in arguments]
    names = set()
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        names |= set(os.listdir(folder))
        time.sleep(0.005)
    assert [process.exitcode for process in processes] == [0] * 4
    return folder, [json.loads(Path(answer).read_text()) for _, _, answer in arguments], names


def test_bundled_data_have_ten_even_classes_for_each_process(unpacked):
    _, answers, _ = unpacked
    with tarfile.open(ARCHIVE) as tar:
        names = sorted({Path(name).parent.name for name in tar.getnames() if name.endswith(".jpg")})
    assert len(names) == 10
    expected = {"train": dict.fromkeys(names, 400), "val": dict.fromkeys(names, 50)}
    assert answers == [expected] * 4


def test_bundled_data_are_unpacked_whole(unpacked):
    folder, _, _ = unpacked
    with tarfile.open(ARCHIVE) as tar:
        expected = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
    found = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*/**/*")
        if file.is_file() and ".index" not in file.parts
    }
    assert found == expected
    assert len(expected) > 4500


def test_bundled_data_are_unpacked_once_and_leave_nothing_beside_them(unpacked):
    folder, _, names = unpacked
    kept = {"fashion_mnist_demo", "fashion_mnist_demo.lock", ARCHIVE.name}
    assert set(os.listdir(folder)) == kept
    assert len(names - kept) <= 1, names  # the one temporary folder of the one that unpacked


@pytest.fixture(scope="module")
def small_archive(tmp_path_factory):
    """Bytes of an archive as the bundled one, of twenty images."""
    folder = tmp_path_factory.mktemp("archive")
    rng = np.random.default_rng(0)
    for split, i in itertools.product(("train", "val"), range(10)):
        (folder / f"small/{split}/a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"small/{split}/a/{i}.png")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add(folder / "small", "small", filter=lambda member: member.replace(mtime=0, deep=False))
    return gzip.compress(content.getvalue(), mtime=0)


def test_archive_beside_the_folder_is_unpacked(tmp_path, small_archive):
    (tmp_path / "small.tar.gz").write_bytes(small_archive)
    path = str(tmp_path / "small")
    assert [len(scan(path, split).samples) for split in ("train", "val")] == [10, 10]
    assert scan(path, "train").samples == ImageFolder(f"{path}/train").samples


@pytest.mark.parametrize(
    "damage", ["no archive", "empty", "cut", "cut at the end", "zeros within", "one bit", "checksum", "another name"]
)
def test_broken_archive_is_refused_by_name_and_leaves_nothing(tmp_path, small_archive, damage):
    whole = small_archive
    middle = len(whole) // 2
    content = {
        "no archive": b"<html>not found</html>" * 100,
        "empty": b"",
        "cut": whole[:middle],
        "cut at the end": whole[:-20],
        "zeros within": whole[:middle] + bytes(64) + whole[middle + 64 :],
        "one bit": whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :],
        "checksum": whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:],
        "another name": whole,
    }[damage]
    name = "other" if damage == "another name" else "small"
    archive = tmp_path / f"{name}.tar.gz"
    archive.write_bytes(content)
    text = error_of(scan, str(tmp_path / name), "train")
    assert str(archive) in text
    assert set(os.listdir(tmp_path)) <= {archive.name, f"{name}.lock"}
