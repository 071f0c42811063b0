"""Training images in a bucket: the batches are those of the same shards in a folder, each byte is fetched once."""

import launch

import fcntl
import os
import pickle
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import TINY, batches, error_of, loaders_of
from PIL import Image
from shard_files import FORK, files_of, run_tool, simple

pytest.importorskip("boto3")
pytest.importorskip("moto")

import evaluate
import imagenet_dataset
import make_shards
from input_pipeline import block_cache, tar_shards
from input_pipeline.decode import UnreadableError
from runtime import bucket as bucket_module
from runtime.bucket import Bucket

pytestmark = [
    pytest.mark.usefixtures("no_listing_kept"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]
SHARDS = "s3://bucket/made"


@pytest.fixture(scope="module")
def in_bucket(server, image_folder):
    """The shards of `made_shards`, made in the bucket."""
    server.set()
    assert run_tool(make_shards, image_folder, SHARDS, "--samples-per-shard", 7) == 0
    return SHARDS


@pytest.fixture(autouse=True)
def quick(server, monkeypatch):
    """Blocks of which a shard has many."""
    monkeypatch.setattr(block_cache, "BLOCK", 2048)
    server.set()


@pytest.fixture
def copied(in_bucket, made_shards, request):
    """The same shards in a prefix of this test's own, to be damaged."""
    source, target = Bucket.of(in_bucket), Bucket.of(f"s3://bucket/{request.node.name}")
    for key in source.list():
        target.put(key, source.get(key))
    return target


def config(path, cache, *overrides):
    image = ["data=imagenet", "data.source=webdataset", "data.shard_streams=2", f"data.path={path}"]
    room = [f"data.cache_dir={cache}", "data.cache_gb=0.01"] if cache else []
    return launch.load_config(
        "L0_sanity", [*TINY, *image, "data.num_workers=0", "output_dir=unused", *room, *overrides]
    )


def is_same(found, want):
    found, want = list(found), list(want)
    return len(found) == len(want) and all(
        torch.equal(one, other) for a, b in zip(found, want, strict=True) for one, other in zip(a, b, strict=True)
    )


def shard_sizes(path, split="train"):
    return [stored.size for key, stored in Bucket.of(path).list(f"{split}/").items()]


# make_shards


def test_a_bucket_gets_the_bytes_that_a_folder_gets_and_goes_on_where_it_was(
    copied, in_bucket, image_folder, made_shards
):
    there = {key: copied.get(key) for key in copied.list() if not key.endswith(".npz")}
    assert there == files_of(made_shards)
    lost = ["train/train-000003.tar", "train.index.npz", "classes.txt"]
    copied.delete(lost)
    etags = copied.list()
    assert run_tool(make_shards, image_folder, copied, "--samples-per-shard", 7) == 0
    assert {key: copied.get(key) for key in copied.list() if not key.endswith(".npz")} == files_of(made_shards)
    assert etags.items() <= copied.list().items()
    tar_shards.load(str(copied), "train", "raise")


def test_what_does_not_fit_what_is_in_the_bucket_is_refused(copied, image_folder, capsys):
    before = copied.list()
    assert run_tool(make_shards, image_folder, copied, "--samples-per-shard", 8) == 2
    assert f"{copied}/train.plan.json is of other images" in capsys.readouterr().err
    copied.delete(["train.plan.json"])
    assert run_tool(make_shards, image_folder, copied) == 2
    assert f"{copied}/train holds shards that this tool did not make" in capsys.readouterr().err
    assert run_tool(make_shards, copied, "s3://bucket/other") == 2
    assert "images are read from a folder of this machine" in capsys.readouterr().err
    assert before.keys() - copied.list().keys() == {"train.plan.json"}


def test_index_of_shards_that_other_tools_made(in_bucket, tmp_path, server, capsys):
    """In one folder, one of them damaged: as in a folder of this machine."""
    simple(tmp_path / "foreign", [3, 2])
    whole = (tmp_path / "foreign/train/train-1.tar").read_bytes()
    (tmp_path / "foreign/train/train-1.tar").write_bytes(whole[:1200])
    shutil.copytree(tmp_path / "foreign/train", tmp_path / "foreign/val")
    target = Bucket.of("s3://bucket/foreign")
    for split in ("train", "val"):
        for file in (tmp_path / "foreign" / split).iterdir():
            target.put(f"x-{split}-{file.name[-5]}.tar", file.read_bytes())
    assert "train.index.npz is missing or not whole: run `python tools/make_shards.py --index s3://bucket/foreign`" in (
        error_of(tar_shards.load, str(target), "train", "skip")
    )
    assert run_tool(make_shards, "--index", target) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "train: 3 images of 3 classes in 2 shards" in lines
    assert any(line.startswith("train: damaged: x-train-1.tar: ") for line in lines)
    assert "there is no s3://bucket/foreign/classes.txt, one class name a line: classes are called 0, 1, 2 ..." in lines
    server.set()
    assert run_tool(make_shards, "--index", target) == 1
    assert server.counts()["bytes_out"] < 20_000  # no shard is read again


# Reading


def test_batches_are_those_of_the_folder_for_any_workers_ranks_and_resume(in_bucket, made_shards, tmp_path, server):
    """Over bad lines, too; each with blocks of its own to fetch."""
    want = list(batches(config(made_shards, None, "num_train_steps=8")))
    server.set(fail=0.03, cut=0.03)
    for workers, world_size, start_step in ((0, 1, 0), (2, 2, 5)):
        cfg = config(in_bucket, tmp_path / f"{workers}{world_size}", "num_train_steps=8", f"data.num_workers={workers}")
        assert is_same(batches(cfg, world_size=world_size, start_step=start_step), want[start_step:])
    assert server.counts()["faults"]["cut"] > 0
    server.set()
    val, ours = (loaders_of(config(*where))[1] for where in ((made_shards, None), (in_bucket, tmp_path / "01")))
    assert is_same(ours, val)


def test_a_byte_is_fetched_once_a_machine_and_a_second_epoch_fetches_nothing(in_bucket, tmp_path, server):
    """60 images in batches of 24: the third step begins the second epoch."""
    cfg = config(in_bucket, tmp_path, "data.num_workers=1", "num_train_steps=5")
    total, fetched = sum(shard_sizes(in_bucket)), []
    for rank in (0, 1, 0):
        loader = loaders_of(cfg, rank=rank, world_size=2)[0]
        server.set()
        assert len(list(loader)) == 5
        fetched.append(server.counts()["bytes_out"])
    assert total * 0.8 < sum(fetched) < total * 1.05
    assert fetched[2] == 0
    kept = sum(size for _, size, _ in block_cache._files(block_cache.Room(str(tmp_path), 1).path))
    assert total * 0.8 < kept < total * 1.05


@pytest.mark.slow
def test_ranks_at_the_same_time_fetch_no_block_twice(in_bucket, tmp_path, server):
    cfg = config(in_bucket, tmp_path, "data.num_workers=2", "num_train_steps=5")
    ranks = [loaders_of(cfg, rank=rank, world_size=2)[0] for rank in range(2)]
    server.set(latency_s=0.01)
    for _ in zip(*ranks, strict=True):
        pass
    total = sum(shard_sizes(in_bucket))
    assert server.counts()["bytes_out"] < 1.05 * total  # no header is counted


def test_a_resume_reads_less_than_a_shard_a_stream(image_folder, tmp_path, server, monkeypatch):
    monkeypatch.setattr(block_cache, "AHEAD", 8)
    target = "s3://bucket/large"
    assert run_tool(make_shards, image_folder, target, "--samples-per-shard", 30) == 0  # 2 shards, a stream each
    cfg = config(target, tmp_path, "global_batch_size=8", "num_train_steps=20")
    loader = loaders_of(cfg, start_step=8)[0]  # the second epoch begins: at the start of the shards
    server.set()
    next(iter(loader))
    time.sleep(1.0)  # what is read ahead counts, too
    read = server.counts()["bytes_out"]
    smallest = min(shard_sizes(target))
    assert 0 < read < 2 * smallest * 0.7


def test_shards_that_come_next_are_fetched_before_they_are_needed(in_bucket, tmp_path, server):
    """Each batch but the first begins shards; the last one is of the next epoch."""
    cfg = config(in_bucket, tmp_path, "num_train_steps=3")
    server.set()
    batches_of_run = iter(loaders_of(cfg)[0])
    next(batches_of_run)
    total, deadline = sum(shard_sizes(in_bucket)), time.monotonic() + 60
    while server.counts()["bytes_out"] < 0.9 * total:
        assert time.monotonic() < deadline, server.counts()
        time.sleep(0.05)


def test_the_folder_of_blocks_stays_within_its_bound(in_bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(block_cache, "THREADS", 2)
    cfg = config(in_bucket, tmp_path, "data.cache_gb=2e-5")
    folder = block_cache.Room(str(tmp_path), 1).path
    assert len(list(loaders_of(cfg)[0])) == 6
    kept = sum(size for _, size, _ in block_cache._files(folder))
    assert 10_000 < kept <= 20_000 + block_cache.CHECKED_EVERY * 2100 < sum(shard_sizes(in_bucket))


def test_small_images_are_kept_on_the_device(tmp_path):
    for i in range(24):
        for split in ("train", "val"):
            (tmp_path / "small" / split / f"c{i % 3}").mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (i, 2 * i, 255 - i)).save(tmp_path / "small" / split / f"c{i % 3}/{i}.png")
    target = "s3://bucket/small"
    for where in (tmp_path / "shards", target):
        assert run_tool(make_shards, tmp_path / "small", where, "--samples-per-shard", 7) == 0
    options = ["data.resident=true", "num_train_steps=3"]
    want = batches(config(tmp_path / "shards", None, *options))
    assert is_same(batches(config(target, tmp_path / "cache", *options, "data.num_workers=2")), want)


def test_loader_processes_that_are_spawned_get_what_they_need(in_bucket, made_shards, tmp_path):
    found = imagenet_dataset.list_images(config(in_bucket, tmp_path).data, "train")
    found.expect([0])  # threads and connections are not passed on
    local = tar_shards.load(str(made_shards), "train", "raise")
    assert pickle.loads(pickle.dumps(found)).read(3) == local.read(3)


# Blocks


def cache(bucket, key, folder, gigabytes=1.0):
    room = block_cache.Room(str(folder), gigabytes)
    room.prepare(streams=1)
    return block_cache.BlockCache(bucket, [(key, bucket.list(key)[key])], room), room.path


def hold_the_lock(path, is_held):
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"half")
        file.flush()
        is_held.set()
        time.sleep(600)


def test_a_block_of_a_process_that_was_killed_is_written_again(server, tmp_path):
    bucket, data = Bucket.of("s3://bucket/blocks"), bytes(range(256)) * 20
    bucket.put("one", data)
    blocks, folder = cache(bucket, "one", tmp_path)
    assert blocks.read(0, 2000, 2400) == data[2000:4400]
    assert blocks.read(0, 5119, 1) == data[-1:]
    assert blocks.read(0, 2048, 0) == b""
    files = sorted(folder.iterdir())
    assert [file.stat().st_size for file in files] == [2053, 2053, 1029]
    for file in files:
        file.write_bytes(b"")
    is_held = FORK.Event()
    process = FORK.Process(target=hold_the_lock, args=(files[1], is_held))
    process.start()
    assert is_held.wait(60)
    assert blocks._fetch(0, 1, wait=False) is None
    os.kill(process.pid, signal.SIGKILL)
    assert blocks.read(0, 2000, 2400) == data[2000:4400]  # waits for the lock
    process.join(60)


def test_a_shard_that_is_replaced_or_removed_is_named(copied, tmp_path):
    overrides = ["data.on_error=skip", "data.max_errors=60"]
    for name, text in (("replaced", "was replaced after its index was made"), ("removed", "NoSuchKey")):
        cfg = config(copied, tmp_path / name)
        tar_shards.load.cache_clear()
        found = imagenet_dataset.list_images(cfg.data, "train")
        skipping = loaders_of(config(copied, tmp_path / name, *overrides))[0]
        data = copied.get("train/train-000002.tar")
        if name == "replaced":
            copied.put("train/train-000002.tar", data + bytes(512))
        else:
            copied.delete(["train/train-000002.tar"])
        dataset = imagenet_dataset.ImageDataset(found, cfg, is_train=True)
        index = found.shard.tolist().index(2)
        with pytest.raises(UnreadableError, match=text) as caught:
            dataset[0, index]
        assert str(caught.value).startswith(f"cannot read {copied}/train/train-000002.tar: class_")
        list(skipping)
        assert len(skipping.unreadable) == 7
        assert f"train/train-000002.tar was {name} after train.index.npz was made" in error_of(
            tar_shards._index_in_bucket, copied, "train"
        )
        copied.put("train/train-000002.tar", data)


def test_blocks_that_cannot_be_kept_end_the_run_and_skip_no_image(in_bucket, tmp_path):
    cfg = config(in_bucket, tmp_path, "data.on_error=skip", "data.num_workers=1")
    loader = loaders_of(cfg)[0]
    shutil.rmtree(block_cache.Room(str(tmp_path), 1).path)
    with pytest.raises(UnreadableError) as caught:
        list(loader)
    assert str(caught.value).startswith(f"data.cache_dir: a block cannot be kept in {tmp_path}/vit-blocks-")
    assert len(str(caught.value).splitlines()) == 1
    assert loader.unreadable == set()


# Mistakes


def test_mistakes_are_one_line(in_bucket, tmp_path, monkeypatch):
    def said(path, *overrides, cache=tmp_path):
        tar_shards.load.cache_clear()
        return error_of(lambda: imagenet_dataset.run_sizes(config(path, cache, *overrides), 1))

    assert "data.source=folder with data.path=s3://bucket/made: a bucket holds shards" in said(
        in_bucket, "data.source=folder"
    )
    assert "s3:// names no bucket: write s3://bucket/prefix" in said("s3://")
    text = said("s3://no-such-bucket/x")
    assert text.startswith(
        "data.path=s3://no-such-bucket/x: s3://no-such-bucket/x/train/: NoSuchBucket; check the bucket"
    )
    assert "data.path=s3://bucket/nothing: there are no shards s3://bucket/nothing/train/*.tar" in said(
        "s3://bucket/nothing"
    )
    assert "data.cache_gb=1e-06 with data.shard_streams=2: 2 places" in said(in_bucket, "data.cache_gb=1e-6")
    assert "data.cache_gb=1e+09: " in said(in_bucket, "data.cache_gb=1e9")
    assert error_of(evaluate.images_of, Path(in_bucket), None).startswith(f"FOLDER={in_bucket}: give a folder")
    (tmp_path / "file").touch()
    assert f"data.cache_dir={tmp_path}/file: " in said(in_bucket, cache=tmp_path / "file")
    folder = block_cache.Room(str(tmp_path), 1).path
    folder.chmod(0o777)
    assert "can be written to by another user" in said(in_bucket)
    folder.chmod(0o700)
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    bucket_module._client.cache_clear()
    text = said(in_bucket)
    bucket_module._client.cache_clear()
    assert text.startswith(
        "data.path=s3://bucket/made: s3://bucket/made/train/: Unable to locate credentials; check the "
    )
