"""tools/make_shards.py: tar shards from class folders, the same bytes after any interruption."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from shard_files import FORK, content, files_of, keys, run_tool, simple
from torchvision.datasets import ImageFolder

import make_shards
from input_pipeline import tar_shards

pytestmark = [
    pytest.mark.usefixtures("no_listing_kept"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]


# make_shards


@pytest.mark.parametrize("split", ["train", "val"])
def test_shards_hold_the_folder_s_images_once_each_under_torchvision_s_labels(made_shards, image_folder, split):
    folder, found = ImageFolder(image_folder / split), tar_shards.load(str(made_shards), split, "raise")
    want = sorted((Path(file).read_bytes(), label) for file, label in folder.samples)
    assert sorted((found.read(i), int(found.labels[i])) for i in range(len(found))) == want
    assert found.classes == tuple(folder.classes)
    assert found.labels.dtype == np.int64
    assert found.skipped == {}
    names = {f"{Path(file).parent.name}/{Path(file).stem}" for file, _ in folder.samples}
    assert set(keys(found)) == names
    assert found.name(0).startswith(f"{made_shards}/{split}/{split}-000000.tar: class_")
    assert len(set(found.labels[:7])) > 3  # shuffled: the folder begins with one class


def test_the_same_images_give_the_same_bytes_and_another_seed_another_order(made_shards, image_folder, tmp_path):
    assert run_tool(make_shards, image_folder, tmp_path / "again", "--samples-per-shard", 7, "--workers", 1) == 0
    assert files_of(tmp_path / "again") == files_of(made_shards)
    assert run_tool(make_shards, image_folder, tmp_path / "other", "--samples-per-shard", 7, "--seed", 1) == 0
    found, other = (tar_shards.load(str(path), "train", "raise") for path in (made_shards, tmp_path / "other"))
    assert sorted(keys(found)) == sorted(keys(other))
    assert keys(found) != keys(other)


def test_size_by_megabytes(image_folder, tmp_path):
    assert run_tool(make_shards, image_folder, tmp_path, "--megabytes-per-shard", "0.01") == 0
    found = tar_shards.load(str(tmp_path), "train", "raise")
    assert len(found) == 60
    sizes = [len(found.read(i)) for i in range(60)]
    per_shard = np.bincount(found.shard, weights=sizes)
    assert len(per_shard) == pytest.approx(sum(sizes) / 10_000, abs=1)
    assert all(abs(size - 10_000) <= max(sizes) for size in per_shard[:-1])


def test_keys_follow_webdataset_s_rule_and_are_unique():
    names = ["v1.2/a.jpg", "v1.2/a.png", "v1.2/a_1.JPEG", "v1.2/b.c.WEBP", "v1.2/b_c.jpeg"]
    want = ["v1.2/a.jpg", "v1.2/a_1.png", "v1.2/a_1_1.jpg", "v1.2/b_c.webp", "v1.2/b_c_1.jpg"]
    assert ["".join(key) for key in make_shards.keys_of(names)] == want


def test_what_does_not_fit_what_is_there_is_refused(made_shards, image_folder, tmp_path, capsys):
    target = tmp_path / "copy"
    shutil.copytree(made_shards, target)
    before = files_of(target)
    for options in (["--seed", "5"], ["--samples-per-shard", "8"], []):
        assert run_tool(make_shards, image_folder, target, *options) == 2
        assert "train.plan.json is of other images" in capsys.readouterr().err
    (target / "classes.txt").write_text("another\n")
    assert run_tool(make_shards, image_folder, target, "--samples-per-shard", 7) == 2
    assert "classes.txt is of other images, classes" in capsys.readouterr().err
    (target / "classes.txt").write_bytes(before["classes.txt"])
    assert run_tool(make_shards, image_folder, target, "--samples-per-shard", 7) == 0  # all there already
    assert files_of(target) == before
    with open(target / ".make_shards.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_tool(make_shards, image_folder, target, "--samples-per-shard", 7) == 2
        assert "another process makes shards in" in capsys.readouterr().err
    simple(tmp_path / "foreign", [2])
    assert run_tool(make_shards, image_folder, tmp_path / "foreign") == 2
    assert "shards that this tool did not make" in capsys.readouterr().err


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """400 small files in two classes, which take make_shards a while."""
    root = tmp_path_factory.mktemp("many")
    for i in range(400):
        for split in ("train", "val") if i < 8 else ("train",):
            (root / split / f"c{i % 2}").mkdir(parents=True, exist_ok=True)
            (root / split / f"c{i % 2}" / f"{i}.jpg").write_bytes(content(f"{i}", 2000))
    return root


def killed_when(condition, tool, *arguments):
    """Start a tool as a process of its own and SIGKILL it when `condition` first holds."""
    process = FORK.Process(target=run_tool, args=(tool, *arguments))
    process.start()
    while not condition():
        assert process.is_alive(), "ended before it could be killed"
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_killed_make_shards_goes_on_and_ends_with_the_same_bytes(many, tmp_path):
    options = ["--samples-per-shard", 5]
    assert run_tool(make_shards, many, tmp_path / "straight", *options) == 0
    target = tmp_path / "killed"
    for shards_there in (3, 30, 60):
        killed_when(
            lambda n=shards_there: len(list(target.glob("train/*.tar"))) >= n, make_shards, many, target, *options
        )
        whole = {file: file.stat().st_ino for file in target.glob("train/*.tar")}
        assert len(whole) < 80
        for file in whole:
            with tarfile.open(file) as tar:
                assert len(tar.getmembers()) == 10
    assert run_tool(make_shards, many, target, *options) == 0
    assert files_of(target) == files_of(tmp_path / "straight")
    assert not list(target.rglob("*.tmp"))
    assert {file: file.stat().st_ino for file in whole} == whole  # kept, not written again


def test_a_image_that_cannot_be_read_stops_make_shards_by_name_and_a_second_run_mends_it(many, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(many, source)
    make_shards.scan(str(source), "train")
    lost = source / "train/c1/77.jpg"
    lost.rename(tmp_path / "77.jpg")
    before, sys.argv = sys.argv, ["make_shards", str(source), str(tmp_path / "out")]  # its list is made already
    try:
        with pytest.raises(SystemExit):
            make_shards.main()
    finally:
        sys.argv = before
    assert str(lost) in capsys.readouterr().err
    (tmp_path / "77.jpg").rename(lost)
    assert run_tool(make_shards, source, tmp_path / "out") == 0
    assert len(tar_shards.load(str(tmp_path / "out"), "train", "raise")) == 400


@pytest.mark.slow
def test_tools_start_as_a_user_starts_them_and_complain_in_one_line(tmp_path):
    commands = {
        ("make_shards.py", "--index", tmp_path): "there are no shards",
        ("prepare_imagenet.py", tmp_path, tmp_path / "out"): "lacks ILSVRC2012_img_train.tar",
    }
    started = [
        subprocess.Popen(
            [sys.executable, ROOT / "tools" / tool, *rest], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        for tool, *rest in commands
    ]
    for process, text in zip(started, commands.values(), strict=True):
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 2
        assert len(errors.splitlines()) == 1, errors
        assert text in errors
