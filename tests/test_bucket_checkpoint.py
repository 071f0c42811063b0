"""Checkpoints in a bucket: runtime/checkpoint_places.py, and runs that save to moto's S3 server and go on from it.

Each "node" of a run of two processes has a folder of its own: local_dir has the rank in its name.
"""

import launch

import argparse
import functools
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from conftest import (
    Job,
    assert_same,
    column,
    error_of,
    run_command,
    run_tasks,
    task_of,
    tiny_config,
)
from safetensors.torch import load

pytest.importorskip("boto3")
pytest.importorskip("moto")

import doctor
import infer
import schema
import train_ddp
from runtime.bucket import Bucket, BucketError
from runtime.checkpoint_places import MANIFEST, InBucket, fetched, model_path, place_of, sha256

WHOLE = "lr_scheduler.num_training_steps=6"


@pytest.fixture
def bucket(server, request):
    """A prefix of the test's own; the server makes no mistakes."""
    server.set()
    return Bucket.of(f"s3://bucket/{request.node.name.replace('[', '/').removesuffix(']')}")


@pytest.fixture
def job(tiny, tmp_path, bucket):
    """A function: overrides -> a job of one rank with an empty local folder, and ways to save and to restore."""
    opened = []

    def start(*overrides, local=None):
        local = tmp_path / f"local{len(os.listdir(tmp_path))}" if local is None else local
        places = [f"checkpoint.ckpt_dir={bucket}", f"checkpoint.local_dir={local}"]
        one = Job([*tiny, *places, *overrides], opened)
        one.local = local
        return one

    yield start
    for each in list(opened):
        each.close()


def complete(bucket):
    """The steps that have a manifest."""
    return [int(key.split("/")[0][5:]) for key in bucket.list("step_") if key.endswith(MANIFEST)]


# One rank, in this process


def test_a_run_goes_on_over_a_change_of_the_image_size(tiny, tmp_path, bucket):
    """From what it put into the bucket itself; the losses are those of a run in a folder."""
    change = [*tiny, "data.size_schedule=[{epoch:1.2,img_size:24,global_batch_size:12}]"]
    places = [f"checkpoint.ckpt_dir={bucket}", f"checkpoint.local_dir={tmp_path / 'local'}"]
    for name, where in (("in_bucket", places), ("in_folder", [])):
        overrides = [*change, *where, f"output_dir={tmp_path / name}"]
        train_ddp.main(launch.load_config("L0_sanity", overrides, script="train_ddp"))
    assert complete(bucket) == [3, 6]
    losses = [column(tmp_path, name, "train/loss") for name in ("in_bucket", "in_folder")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_a_checkpoint_is_its_parts_and_a_manifest_and_comes_back_bit_for_bit(job, bucket):
    """Into an empty local folder; a folder that has the parts is not sent them again."""
    first = job()
    assert first.restore().step == 0
    first.save(2)
    manifest = json.loads(bucket.get(f"step_00000002/{MANIFEST}"))
    keys = {f"step_00000002/{manifest['start']}/{name}" for name in manifest["files"]}
    assert {".metadata", "__0_0.distcp"} == set(manifest["files"])
    assert set(bucket.list("step_")) == keys | {f"step_00000002/{MANIFEST}"}
    assert manifest["state"]["step"] == 2
    assert not [key for key in bucket.list() if "preflight" in key]
    want = {name: weight.detach().clone() for name, weight in first.state.weights.items()}
    first.close()

    second = job()
    assert second.restore().step == 2
    assert_same({name: weight.detach() for name, weight in second.state.weights.items()}, want)
    assert {path.name for path in second.local.iterdir()} == {f"step_00000002-{manifest['start']}", ".lock"}
    second.close()

    # The parts are gone for good but not their sizes: whoever fetched them would see another SHA-256.
    for key in keys:
        bucket.put(key, bytes(bucket.list(key)[key].size))
    third = job(local=second.local)
    assert third.restore().step == 2
    assert_same({name: weight.detach() for name, weight in third.state.weights.items()}, want)
    third.close()
    fourth = job()
    assert "does not have the SHA-256 that its manifest says" in error_of(fourth.restore)


def without_manifest(bucket, start):
    bucket.delete([f"step_00000010/{MANIFEST}"])


def manifest_cut(bucket, start):
    bucket.put(f"step_00000010/{MANIFEST}", bucket.get(f"step_00000010/{MANIFEST}")[:100])


def part_gone(bucket, start):
    bucket.delete([f"step_00000010/{start}/__0_0.distcp"])


def part_cut(bucket, start):
    bucket.put(f"step_00000010/{start}/__0_0.distcp", bucket.get(f"step_00000010/{start}/__0_0.distcp")[:-1])


def name_that_leads_away(bucket, start):
    manifest = bucket.get(f"step_00000010/{MANIFEST}").decode().replace("__0_0.distcp", "../../planted")
    bucket.put(f"step_00000010/{MANIFEST}", manifest.encode())


@pytest.mark.parametrize("damage", [without_manifest, manifest_cut, part_gone, part_cut, name_that_leads_away])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(job, bucket, damage, caplog):
    """The one before it is taken; a later save in its place works."""
    first = job()
    first.restore()
    first.save(8, 10)
    damage(bucket, first.saver.place.start)
    first.close()
    second = job()
    with caplog.at_level(logging.WARNING):
        assert second.restore().step == 8
    assert second.model.head.bias.eq(8).all()
    assert any("skipping" in text and "step_00000010" in text for text in caplog.messages)
    second.save(10)
    second.close()
    third = job()
    assert third.restore().step == 10


def test_pruning_spares_the_best_and_deletes_what_no_manifest_names(job, bucket):
    """What a killed save left, too; keys that are not ours stay. Local folders keep the newest step alone."""
    one = job("checkpoint.max_checkpoints=1")
    one.restore()
    best = {"step": 2, "metric": "val/top1", "value": 0.5}
    one.save(2, best=best)
    others = ["step_notes/a", "step_00000003/notes.txt", "other"]
    dead = ["step_00000003/0123456789ab/__0_0.distcp", "step_00000002/0123456789ab/__0_0.distcp"]
    for key in others + dead:
        bucket.put(key, b"x")
    one.save(4, 6, best=best)
    assert complete(bucket) == [2, 6]
    assert set(others) <= bucket.list().keys()
    assert not set(dead) & bucket.list().keys()
    assert json.loads(bucket.get("best.json")) == best
    assert [path.name for path in one.local.glob("step_*")] == [f"step_00000006-{one.saver.place.start}"]
    one.saver.set_score(6, {"step": 6, "metric": "val/top1", "value": 0.6}, {"val/top1": 0.6})
    assert json.loads(bucket.get("best.json"))["step"] == 6
    one.close()
    assert job().restore().best["step"] == 6


def test_a_fresh_start_moves_the_earlier_run_aside_and_loses_nothing(job, bucket):
    first = job()
    first.restore()
    first.save(2, best={"step": 2, "metric": "val/top1", "value": 0.5})
    bucket.put("final_model/model.safetensors", b"x")
    before = {key: bucket.get(key) for key in bucket.list() if key != "writer.json"}
    first.close()
    second = job("checkpoint.resume_from_checkpoint=false")
    assert second.restore().step == 0
    assert {key: bucket.get(f"earlier_001/{key}") for key in before} == before
    assert set(bucket.list()) == {f"earlier_001/{key}" for key in before} | {"writer.json"}
    second.save(2)
    second.close()
    assert fetched(bucket.url("earlier_001"), second.local).joinpath("state.json").exists()
    # One is copied elsewhere and deleted: the number of another is not taken again.
    third = job("checkpoint.resume_from_checkpoint=false")
    third.restore()
    kept = {key: bucket.get(key) for key in bucket.list("earlier_002/")}
    bucket.delete(bucket.list("earlier_001/"))
    third.save(4)
    third.close()
    job("checkpoint.resume_from_checkpoint=false").restore()
    assert kept
    assert {key: bucket.get(key) for key in bucket.list("earlier_002/")} == kept
    assert bucket.list("earlier_003/")


def test_an_earlier_start_that_still_runs_stops_at_its_next_save(job, bucket, tiny, tmp_path):
    """And deletes nothing any more; what the other one saved is as it was."""
    one = job()
    one.restore()
    one.save(2)
    other = InBucket(str(bucket), tmp_path / "other", 0)
    other.claim()  # as the start of another run does
    before = bucket.list("step_00000002")
    with pytest.raises(schema.RunError, match=r"another run has started there .*give each run its own") as caught:
        one.save(4)
    assert len(str(caught.value).splitlines()) == 1
    assert complete(bucket) == [2]
    assert bucket.list("step_00000002") == before


def test_a_manifest_of_an_earlier_start_that_came_late_is_replaced(job, bucket):
    """The last request of a process that was killed may reach the service after the next one has looked."""
    one = job()
    one.restore()
    one.save(2)
    late = bucket.get(f"step_00000002/{MANIFEST}")
    bucket.delete([f"step_00000002/{MANIFEST}"])
    one.close()
    two = job()
    assert two.restore().step == 0
    assert bucket.create(f"step_00000002/{MANIFEST}", late)
    two.save(2)
    two.close()
    assert json.loads(bucket.get(f"step_00000002/{MANIFEST}"))["start"] != json.loads(late)["start"]
    assert job().restore().step == 2


@pytest.mark.parametrize("when", ["create", "replace"])
def test_a_manifest_of_a_later_start_is_never_replaced(job, bucket, tmp_path, monkeypatch, when):
    """Whenever it comes: before ours, or just before ours would take the place of an earlier one."""
    one = job()
    one.restore()
    one.save(2)
    theirs = bucket.get(f"step_00000002/{MANIFEST}").replace(one.saver.place.start.encode(), b"0123456789ab")
    ours = getattr(Bucket, when)

    def later(self, key, data, *args):
        if when == "create":
            InBucket(str(bucket), tmp_path / "other", 0).claim()
        self.put(key, theirs)
        return ours(self, key, data, *args)

    monkeypatch.setattr(Bucket, when, later)
    with pytest.raises(schema.RunError, match=r"another run (has started there|writes s3://).*give each run its own"):
        one.save(2)
    assert bucket.get(f"step_00000002/{MANIFEST}") == theirs


def test_a_save_that_cannot_be_uploaded_is_one_line_and_the_one_before_stays(job, bucket, monkeypatch):
    one = job()
    one.restore()
    one.save(2)

    def upload(self, file, key):
        raise BucketError(f"{self.url(key)}: AccessDenied")

    monkeypatch.setattr(Bucket, "upload", upload)
    with pytest.raises(
        schema.RunError, match=r"step 4 could not be saved to s3://.*AccessDenied; .* as they were"
    ) as e:
        one.save(4)
    assert len(str(e.value).splitlines()) == 1
    one.close()
    two = job()
    assert two.restore().step == 2


@pytest.mark.parametrize(
    ("url", "reason"),
    [("s3://nobody/run", "NoSuchBucket"), ("s3:///run", "names no bucket")],
)
def test_a_bucket_that_cannot_be_used_is_refused_before_the_first_step(job, url, reason):
    assert reason in error_of(job(f"checkpoint.ckpt_dir={url}").restore)


def test_a_service_that_overwrites_is_refused(job, monkeypatch):
    monkeypatch.setattr(Bucket, "create", lambda self, key, data: self.put(key, data) is None)
    assert "use one that has conditional writes" in error_of(job().restore)


def test_a_local_folder_without_room_is_refused(job, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert "checkpoint.local_dir=" in (text := error_of(job().restore))
    assert "a node's parts of two checkpoints take" in text


def test_only_the_files_that_a_load_reads_are_fetched(job, bucket, server):
    one = job()
    one.restore()
    one.save(2)
    one.close()
    place = place_of(one.cfg)
    place.folder = one.local.with_name("empty")
    found = place.find(2)
    folder = place.opened(found)
    assert {path.name for path in folder.iterdir() if not path.name.endswith(".lock")} == {".metadata", "state.json"}
    place.fetch(found, ["__0_0.distcp"])
    assert sha256(folder / "__0_0.distcp") == found.sha256["__0_0.distcp"]
    server.set()
    place.fetch(found, ["__0_0.distcp"])
    assert server.counts()["requests"] == 0


def test_other_schemes_and_a_local_folder_in_a_bucket_are_refused():
    assert "is no folder and no s3://bucket/prefix" in error_of(tiny_config, "checkpoint.ckpt_dir=gs://bucket/run")
    assert "is no folder and no s3://bucket/prefix" in error_of(tiny_config, "checkpoint.init_from=gs://bucket/run")
    assert "must be a folder on each node" in error_of(tiny_config, "checkpoint.local_dir=s3://bucket/run")


def test_tools_take_a_model_from_a_bucket(job, bucket):
    """The newest of a run's, one of its steps; where there is none, one line."""
    one = job()
    one.restore()
    one.save(2, 4)
    for url in (str(bucket), bucket.url("step_00000004")):
        model, config = infer.load_model(model_path(url))
        assert model.head.bias.eq(4).all()
        assert config["num_classes"] == 6
    with pytest.raises(argparse.ArgumentTypeError, match="holds no complete checkpoint and no final_model"):
        model_path("s3://bucket/nothing")
    assert model_path("runs/demo") == Path("runs/demo")
    (row,) = [row for row in doctor.check_disk(one.cfg) if row.check == "checkpoint.local_dir"]
    assert "2 checkpoints" in row.found


# Runs of two processes, each a node


def nodes(bucket, folder, name):
    """Overrides: checkpoints in the bucket, and a local folder for each rank."""
    return [f"checkpoint.ckpt_dir={bucket}", f"checkpoint.local_dir={folder}/{name}-${{oc.env:RANK}}"]


WAYS = [("train_ddp", "false"), ("train_fsdp2", "true")]  # checkpoint.async_save; every pair: tests/test_checkpoint.py


@pytest.fixture(scope="module")
def runs(server, image_folder, tmp_path_factory):
    """Outcomes and folder of: a straight run, three steps into a bucket, the other three from there, with faults."""
    folder = tmp_path_factory.mktemp("runs")
    task, tasks = functools.partial(task_of, image_folder, folder), []
    server.set(fail=0.05, cut=0.05, delay=0.05, delay_s=0.2)
    tasks.append(task("straight", "train_ddp"))
    half = ["num_train_steps=3", WHOLE, "checkpoint.save_every_n_steps=1", "evaluation.every_n_steps=2"]
    for script, way in WAYS:
        of = Bucket.of(f"s3://bucket/runs/{script}")
        into = [*nodes(f"{of}-{way}", folder, f"first-{script}-{way}"), f"checkpoint.async_save={way}"]
        tasks.append(task(f"half-{script}-{way}", script, *half, *into))
        then = nodes(f"{of}-{way}", folder, f"second-{script}-{way}")
        tasks.append(task(f"half-{script}-{way}-on", script, *then, output=f"half-{script}-{way}"))
    stopped = [*nodes("s3://bucket/runs/stopped", folder, "stopped"), "checkpoint.save_every_n_steps=100"]
    before = "sigusr1_to_rank_1_in_the_first_step"
    tasks.append(task("stopped", "train_fsdp2", *stopped, before=before, look=True))
    weights = "checkpoint.init_from=s3://bucket/runs/train_ddp-false"
    begin = ["num_train_steps=1", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]
    for name, source in (("step", weights), ("final", f"{weights}/final_model")):
        local = f"checkpoint.local_dir={folder}/init-{name}-${{oc.env:RANK}}"
        tasks.append(task(f"init-{name}", "train_ddp", source, local, *begin))
    outcomes = run_tasks(tasks, nproc=2, folder=folder)
    server.set()
    return outcomes, folder


def final_model(url):
    """The tensors of a final_model in a bucket."""
    return load(Bucket.of(url).get("final_model/model.safetensors"))


@pytest.mark.parametrize(("script", "way"), WAYS)
def test_three_steps_and_three_are_six_through_a_bucket_that_fails(runs, script, way):
    """Bit for bit, on a node whose folder is empty."""
    _, folder = runs
    url = f"s3://bucket/runs/{script}-{way}"
    straight = folder / "straight/checkpoints/final_model/model.safetensors"
    assert_same(final_model(url), load(straight.read_bytes()))
    name = f"half-{script}-{way}"
    assert column(folder, name, "train/loss") == column(folder, "straight", "train/loss")
    assert complete(Bucket.of(url))[-1] == 6
    assert len(complete(Bucket.of(url))) <= 3  # two, and the best
    for rank in (0, 1):
        local = folder / f"second-{script}-{way}-{rank}"
        assert len(list(local.glob("step_*"))) == 1
    names = {p.name for p in (folder / f"second-{script}-{way}-1").glob("step_*/*") if not p.name.endswith(".lock")}
    assert "__1_0.distcp" in names
    assert "__0_0.distcp" not in names  # its own rank's alone


def test_a_run_that_is_stopped_saves_to_the_bucket(runs):
    outcomes, _ = runs
    status = outcomes["stopped"][0]["metrics"]["status"]
    assert status["state"] == "preempted"
    assert 0 < status["step"] < 6
    assert complete(Bucket.of("s3://bucket/runs/stopped")) == [status["step"]]


@pytest.mark.parametrize("name", ["step", "final"])
def test_weights_to_start_from_may_be_in_a_bucket(runs, name):
    _, folder = runs
    got = load((folder / f"init-{name}/checkpoints/final_model/model.safetensors").read_bytes())
    assert_same(got, final_model("s3://bucket/runs/train_ddp-false"), 1e-25)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "nproc"), [(2, 1), (1, 2), (2, 3)])
def test_another_world_size_goes_on(runs, server, image_folder, tmp_path, size, nproc):
    """From empty folders; one process more or less sums in another order."""
    _, folder = runs
    url = f"s3://bucket/sizes/{size}-{nproc}"
    half = ["num_train_steps=3", WHOLE]
    task = functools.partial(task_of, image_folder, tmp_path)
    run_tasks([task("half", "train_fsdp2", *half, *nodes(url, tmp_path, "a"))], nproc=size, folder=tmp_path / "one")
    run_tasks([task("half", "train_fsdp2", *nodes(url, tmp_path, "b"))], nproc=nproc, folder=tmp_path / "two")
    straight = folder / "straight/checkpoints/final_model/model.safetensors"
    assert_same(final_model(url), load(straight.read_bytes()), 1e-5)


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_one_line_and_exit_code_2(server, tiny):
    done = run_command(["train_ddp.py", *tiny, "checkpoint.ckpt_dir=s3://nobody/run"], nproc=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: checkpoint.ckpt_dir=s3://nobody/run cannot be used (s3://nobody/run/")
    assert "exitcode  : 2" in done.stderr
