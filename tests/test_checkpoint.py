"""Checkpoints: complete or not there, exact, from any strategy and world size to any other. On CPU.

What needs several processes runs in two sets of them a world size: the first saves, the second, from scratch, goes on
with what the others have saved; what begins or ends with more than two processes is slow. The rest calls checkpoint.py
in this process, a job of one rank.
"""

import launch

import functools
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import (
    CPU_SCRIPTS,
    ROOT,
    Job,
    assert_same,
    column,
    error_of,
    read_metrics,
    run_command,
    run_tasks,
    session_of,
    started_once,
    task_of,
    weights,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from weight_files import plant

import checkpoint
import schema
from runtime.checkpoint_places import Folder
from runtime.process_group import dist_session
from runtime.step_folders import step_folders

FEW, MANY = (1, 2), (3, 4)  # processes: with many, two cores take minutes
WORLD_SIZES = [*FEW, *(pytest.param(size, marks=pytest.mark.slow) for size in MANY)]
WHOLE = "lr_scheduler.num_training_steps=6"


@pytest.fixture(scope="module")
def saved(image_folder, tmp_path_factory):
    """A function: world size -> (outcomes, folder) of what is saved there."""

    @started_once
    def start(nproc):
        folder = tmp_path_factory.mktemp(f"saved_{nproc}")
        task, tasks = functools.partial(task_of, image_folder, folder), []
        for script in CPU_SCRIPTS:
            half = ["num_train_steps=3", WHOLE, "checkpoint.save_final_model=false"]
            tasks.append(task(f"half-{script}", script, *half))
            tasks.append(task(f"straight-{script}", script))
        if nproc == 2:
            every = ["checkpoint.save_every_n_steps=1", "checkpoint.max_checkpoints=null", "data.num_workers=0"]
            every += ["evaluation.every_n_steps=3", "num_train_steps=4"]
            for script in CPU_SCRIPTS:
                for way in ("false", "true"):
                    options = [*every, f"checkpoint.async_save={way}"]
                    tasks.append(task(f"async-{way}-{script}", script, *options))
            for way in ("false", "true"):
                full = ["checkpoint.save_every_n_steps=2", f"checkpoint.async_save={way}"]
                options = {"before": "fill_the_disk_of_rank_1", "may_fail": True}
                tasks.append(task(f"full-{way}", "train_fsdp2", *full, **options))
            apart = f"checkpoint.ckpt_dir={folder}/apart-${{oc.env:RANK}}"
            tasks.append(task("apart", "train_ddp", apart, may_fail=True))
        return run_tasks(tasks, nproc=nproc, folder=folder), folder

    return start


def changes_one(script, source, size, nproc):
    """A resume under another script, or at another world size, but not both."""
    return (script == source) != (size == nproc)


@pytest.fixture(scope="module")
def resumed(saved, image_folder, tmp_path_factory):
    """A function: (world size, sizes, whether they are `changes_one`) -> (outcomes, folder).

    What was saved at these sizes goes on at the first.
    """

    @started_once
    def start(where):
        nproc, sizes, changing_one = where
        folder = tmp_path_factory.mktemp(f"resumed_{nproc}_from_{sizes[0]}")
        task, tasks = functools.partial(task_of, image_folder, folder), []
        for script in CPU_SCRIPTS:
            for source, size in itertools.product(CPU_SCRIPTS, sizes):
                if changes_one(script, source, size, nproc) == changing_one:
                    name = f"{script}-from-{source}-{size}"
                    shutil.copytree(saved(size)[1] / f"half-{source}", folder / name)
                    tasks.append(task(name, script))
            if changing_one:
                continue
            init = [f"checkpoint.init_from={saved(1)[1]}/half-train_ddp/checkpoints", "num_train_steps=1"]
            init += ["optimizer.lr=1e-30", "optimizer.weight_decay=0", "model.num_classes=8"]
            tasks.append(task(f"init-{script}", script, *init))
        return run_tasks(tasks, nproc=nproc, folder=folder), folder

    return start


@pytest.mark.parametrize(
    ("size", "nproc", "script", "source"),
    [
        pytest.param(*way, marks=[pytest.mark.slow] if max(way[:2]) > 2 or changes_one(*way[2:], *way[:2]) else [])
        for way in itertools.product((*FEW, *MANY), (*FEW, *MANY), CPU_SCRIPTS, CPU_SCRIPTS)
    ],
)
def test_any_to_any(saved, resumed, nproc, script, source, size):
    """Three steps there and three here are six steps; bit for bit where the sums are the same.

    The fast ones change nothing, or script and world size together; tests/test_trainer.py has another script alone.
    """
    _, folder = resumed((nproc, FEW if size in FEW else MANY, changes_one(script, source, size, nproc)))
    name = f"{script}-from-{source}-{size}"
    exact = size == nproc and (script == source or nproc < 3)
    _, straight = saved(nproc if exact else 1)
    want = f"straight-{script if exact else 'train_ddp'}"
    assert_same(weights(folder, name), weights(straight, want), 0.0 if exact else 1e-5)
    losses, wanted = column(folder, name, "train/loss"), column(straight, want, "train/loss")
    assert len(losses) == 6
    assert losses[3:] == (wanted[3:] if exact else pytest.approx(wanted[3:], abs=1e-5))
    assert column(folder, name, "train/lr") == column(straight, want, "train/lr")


@pytest.mark.parametrize("nproc", WORLD_SIZES)
@pytest.mark.parametrize("script", CPU_SCRIPTS)
def test_init_from_is_not_resume(saved, resumed, nproc, script):
    """Weights only, another head drawn anew, the step and the schedule from the start."""
    _, folder = resumed((nproc, FEW, False))
    got = weights(folder, f"init-{script}")
    at = saved(1)[1] / "half-train_ddp/checkpoints/step_00000003"
    want = {f"model.{name}": torch.empty_like(tensor) for name, tensor in got.items() if "head" not in name}
    dcp.load(want, checkpoint_id=at, no_dist=True)
    assert_same({f"model.{name}": t for name, t in got.items() if "head" not in name}, want, 1e-25)
    assert got["head.weight"].shape == (8, 24)
    assert 0.01 < got["head.weight"].std() < 0.03
    assert got["head.bias"].abs().max() < 1e-25
    assert list(read_metrics(folder / f"init-{script}")) == [1]
    assert read_metrics(folder / f"init-{script}")[1]["train/lr"] == pytest.approx(1e-30 / 2)
    assert "drawn anew: head.weight, head.bias" in (folder / f"init-{script}/train.log").read_text()


@pytest.mark.parametrize("script", CPU_SCRIPTS)
def test_async_saves_hold_their_steps_weights(saved, script):
    """A save every step, training going on meanwhile, and the process ends right after the last one.

    And its scores, where it was evaluated.
    """
    _, folder = saved(2)
    metrics = read_metrics(folder / f"async-true-{script}")
    assert column(folder, f"async-true-{script}", "train/loss") == column(folder, f"async-false-{script}", "train/loss")
    for step in range(1, 5):
        loaded = []
        for way in ("true", "false"):
            at = folder / f"async-{way}-{script}/checkpoints/step_{step:08d}"
            entries = dcp.FileSystemReader(at).read_metadata().state_dict_metadata
            state = {key: torch.full(entry.size, torch.nan) for key, entry in entries.items()}
            dcp.load(state, checkpoint_id=at, no_dist=True)
            loaded.append(state)
            scores = {key: value for key, value in metrics[step].items() if key.startswith("val/")}
            assert bool(scores) == (step in (3, 4))
            assert json.loads((at / "state.json").read_text())["scores"] == (scores or None)
        assert_same(*loaded)
        assert not any(tensor.isnan().any() for tensor in loaded[0].values())
    assert_same(weights(folder, f"async-true-{script}"), weights(folder, f"async-false-{script}"))


@pytest.mark.parametrize("way", ["false", "true"])
def test_a_full_disk_stops_all_ranks_and_leaves_the_checkpoint_before(saved, way):
    """Rank 1 cannot write its part of step 4."""
    outcomes, folder = saved(2)
    errors = {rank["error"] for rank in outcomes[f"full-{way}"]}
    assert len(errors) == 1
    (error,) = errors
    assert error.startswith("RunError: step 4 could not be saved to ")
    assert "File too large" in error
    assert "GiB are free" in error
    assert "\n" not in error
    root = folder / f"full-{way}/checkpoints"
    assert set(step_folders(root)) == {2}
    assert checkpoint._problem(root / "step_00000002") is None
    assert json.loads((folder / f"full-{way}/status.json").read_text())["state"] == "failed"


def test_a_folder_that_is_not_shared_is_refused(saved):
    outcomes, _ = saved(2)
    errors = {rank["error"] for rank in outcomes["apart"]}
    assert len(errors) == 1
    assert "is not the same folder on every node: rank 1 does not see" in errors.pop()


# One rank, in this process


@pytest.fixture
def job(tiny, tmp_path):
    """A function: overrides -> a job of one rank: config, session, live state, and ways to save and to restore."""
    opened = []

    def start(*overrides):
        one = Job([*tiny, *overrides], opened)
        one.root = tmp_path / "run/checkpoints"
        return one

    yield start
    for each in list(opened):
        each.close()


DAMAGES = {
    "no index": lambda folder: (folder / ".metadata").unlink(),
    "no state": lambda folder: (folder / "state.json").unlink(),
    "state cut short": lambda folder: cut(folder / "state.json"),
    "state of zeros": lambda folder: (folder / "state.json").write_bytes(bytes(100)),
    "index cut short": lambda folder: cut(folder / ".metadata"),
    "index of zeros": lambda folder: (folder / ".metadata").write_bytes(bytes(1000)),
    "file cut short": lambda folder: cut(next(folder.glob("*.distcp"))),
    "file gone": lambda folder: next(folder.glob("*.distcp")).unlink(),
    "file empty": lambda folder: next(folder.glob("*.distcp")).write_bytes(b""),
    "half-written": lambda folder: folder.rename(folder.with_suffix(".tmp")),
    "empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(job, damage, caplog):
    """The one before it is taken; a later save in its place works and loses nothing."""
    first = job("checkpoint.max_checkpoints=null")
    first.restore()
    first.save(8, 10)
    first.close()
    DAMAGES[damage](first.root / "step_00000010")
    second = job("checkpoint.max_checkpoints=null")
    with caplog.at_level(logging.WARNING):
        assert second.restore().step == 8
    assert second.model.head.bias.eq(8).all()
    assert any("skipping" in text and "step_00000010" in text for text in caplog.messages)
    second.save(10)
    assert set(step_folders(second.root)) == {8, 10}
    assert checkpoint._problem(second.root / "step_00000010") is None


def test_steps_are_numbers(job):
    """9 < 10 < 100, also beyond eight digits."""
    first = job("checkpoint.max_checkpoints=2")
    first.restore()
    first.save(9, 10, 100)
    assert set(step_folders(first.root)) == {10, 100}
    first.save(99_999_999, 100_000_000)
    first.close()
    second = job("checkpoint.max_checkpoints=2")
    assert second.restore().step == 100_000_000


def test_pruning_spares_the_best_and_what_it_does_not_know(job):
    """And an earlier deletion that was cut short is finished."""
    one = job("checkpoint.max_checkpoints=1")
    one.restore()
    best = {"step": 2, "metric": "val/top1", "value": 0.5}
    one.save(2, best=best)
    for name in ("step_notes", "step_2", "step_00000001.tmp", "step_notes.tmp", "other"):
        (one.root / name).mkdir()
    one.save(4, 6, best=best)
    names = {path.name for path in one.root.iterdir()} - {"best.json", ".lock"}
    assert names == {"step_00000002", "step_00000006", "step_notes", "step_2", "step_notes.tmp", "other"}
    assert json.loads((one.root / "best.json").read_text()) == best
    better = {"step": 8, "metric": "val/top1", "value": 0.6}
    one.save(8, best=better)
    assert set(step_folders(one.root)) == {8}


def test_the_best_result_is_part_of_each_checkpoint(job):
    """Also where the process died before best.json was written; an older checkpoint knows the best of its time."""
    first = job("checkpoint.max_checkpoints=null")
    first.restore()
    old, new = ({"step": step, "metric": "val/top1", "value": value} for step, value in ((2, 0.5), (4, 0.7)))
    first.save(2, best=old)
    first.save(4, best=new)
    first.close()
    (first.root / "best.json").write_text(json.dumps(old))
    second = job("checkpoint.max_checkpoints=null")
    assert second.restore().best == new
    assert json.loads((first.root / "best.json").read_text()) == new
    second.close()
    cut(next((first.root / "step_00000004").glob("*.distcp")))
    third = job("checkpoint.max_checkpoints=null")
    assert third.restore().best == old


@pytest.mark.parametrize("way", ["resume", "init_from"])
def test_a_run_refuses_a_checkpoint_that_was_tampered_with(job, tmp_path, way):
    """Nothing that its index holds runs, and the run does not start from another checkpoint instead."""
    first = job("checkpoint.max_checkpoints=null")
    first.restore()
    first.save(2, 4)
    first.close()
    plant(first.root / "step_00000004", tmp_path / "it-ran")
    if way == "resume":
        second, source = job(), ""
    else:
        moved = first.root.replace(tmp_path / "downloaded")
        second, source = job(f"checkpoint.init_from={moved}"), f"checkpoint.init_from={moved}: "
    line = error_of(second.restore)
    folder = (first.root if way == "resume" else moved) / "step_00000004"
    assert line.startswith(f"{source}{folder}/.metadata is refused: it names {os.system.__module__}.system, which is")
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("optimizer", "lamb", "optimizer.name=lamb, not adamw"),
        ("classes", ["a"], "another list of classes"),
        ("model", {"depth": 7}, "model.depth=7, not 2"),
    ],
)
def test_another_run_is_refused_by_the_first_difference(job, key, value, expected):
    first = job()
    first.restore()
    first.save(2)
    first.close()
    file = first.root / "step_00000002/state.json"
    state = json.loads(file.read_text())
    state[key] = state[key] | value if isinstance(value, dict) else value
    file.write_text(json.dumps(state))
    with pytest.raises(schema.ConfigError, match=expected) as caught:
        job().restore()
    assert "\n" not in str(caught.value)


def test_a_tensor_too_many_is_refused_by_name(job):
    """DCP alone would ignore it."""
    first = job()
    first.restore()
    first.save(2)
    first.close()
    folder = first.root / "step_00000002"
    tensors = first.state.tensors(2)
    tensors["model"] = tensors["model"] | {"extra.weight": torch.zeros(3)}
    kept = (folder / "state.json").read_bytes()
    shutil.rmtree(folder)
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    (folder / "state.json").write_bytes(kept)
    with pytest.raises(schema.ConfigError, match=r"model.extra.weight is \(3,\) there and None"):
        job().restore()


def test_everything_is_read_without_unpickling_anything_of_ours(job, tmp_path):
    """JSON, and tensors that torch loads with weights_only=True once its own tool has put them into one file."""
    one = job()
    one.restore()
    one.save(2, best={"step": 2, "metric": "val/top1", "value": float(torch.tensor(0.25))})
    folder = one.root / "step_00000002"
    assert json.loads((folder / "state.json").read_text())["best"]["value"] == 0.25
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    loaded = torch.load(tmp_path / "one.pt", weights_only=True)
    assert_same(loaded["model"], {name: w.detach() for name, w in one.state.weights.items()})


def test_a_folder_without_room_is_refused_before_the_first_step(job, monkeypatch):
    """How much is free and how much a checkpoint takes. The file system's answer cannot be had otherwise."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(schema.ConfigError, match=r"has 9.31e-07 GiB free, a checkpoint takes \S+ GiB: make room"):
        job().restore()


def test_a_folder_that_cannot_be_written_is_refused(job, tmp_path):
    (tmp_path / "file").write_text("")
    one = job()
    with pytest.raises(schema.ConfigError, match=r"checkpoint.ckpt_dir=.*file/x cannot be written to \(Not a dir"):
        Folder(tmp_path / "file/x", 0).check(one.state.num_bytes(), one.session)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["apart", "within"])
def test_another_run_on_the_same_checkpoints_is_refused_while_it_lives(tiny, tmp_path, place):
    """Two output folders, one ckpt_dir. A killed run holds nothing, even while its loader processes live on."""
    folder = {"apart": "shared", "within": "other/checkpoints"}[place]  # the latter is the holder's default
    shared = f"checkpoint.ckpt_dir={tmp_path}/{folder}"
    code = (
        "import launch, os, sys, time\n"
        "from runtime.process_group import dist_session\n"
        "cfg = launch.load_config('L0_sanity', sys.argv[1:])\n"
        "with dist_session(cfg):\n"
        "    if os.fork() == 0: time.sleep(60)\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    holder_has = [shared, f"output_dir={tmp_path}/other"] if place == "apart" else [f"output_dir={tmp_path}/other"]
    command = [sys.executable, "-c", code, *tiny, *holder_has]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        assert holder.stdout.readline() == "held\n"
        cfg = launch.load_config("L0_sanity", [*tiny, shared])
        with (
            pytest.raises(schema.ConfigError, match=r"checkpoint\.ckpt_dir=.* is in use by a live run"),
            dist_session(cfg),
        ):
            pass
        holder.kill()
        holder.wait()
        with dist_session(cfg):
            pass
    finally:
        os.killpg(holder.pid, signal.SIGKILL)


def test_an_orphan_saves_nothing_more_unless_it_was_asked_to_stop(job, monkeypatch):
    one = job()
    one.restore()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    one.save(2)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(schema.RunError, match="torchrun is gone: stopping before the save of step 4"):
        one.save(4)
    assert set(step_folders(one.root)) == {2}
    os.kill(os.getpid(), signal.SIGTERM)
    assert one.session.stop.agreed()
    one.save(6)
    assert set(step_folders(one.root)) == {2, 6}


def test_a_job_begins_anew_once_however_its_nodes_come_and_go(job):
    """resume_from_checkpoint=false: torchrun's own count stays at zero where nodes join, and is each torchrun's own."""
    one = job("checkpoint.resume_from_checkpoint=false")
    one.restore()
    for names, goes_on in (
        ([None], False),  # plain python
        (["a"], False),  # a job of one node
        (["a", "b"], True),  # b joins
        (["b", "c"], True),  # a dies, c joins
        (["d"], False),  # another job
        (["d"], True),  # a rank failed
        ([None], False),
    ):
        one.save(2)
        assert (checkpoint._find(one.saver.place, one.cfg, names) is not None) == goes_on, names
    assert len(list(one.root.glob("earlier_*"))) == 4
    shutil.rmtree(one.root / "earlier_001")  # to save room: the others' numbers are not taken again
    one.save(2)
    one.saver.place.set_aside()
    assert {path.name for path in one.root.glob("earlier_*")} == {f"earlier_{number:03d}" for number in (2, 3, 4, 5)}


def test_a_torchrun_has_a_name_of_its_own(tmp_path, monkeypatch):
    assert session_of(tmp_path).torchrun is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert session_of(tmp_path).torchrun == session_of(tmp_path).torchrun
    assert session_of(tmp_path).torchrun != session_of(tmp_path, parent=os.getpid()).torchrun


@pytest.mark.slow
def test_ranks_whose_torchrun_died_stop_before_the_next_save(tiny, tmp_path):
    """And another start, once they are gone, goes on."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [ROOT / "tests/worker.py", tmp_path / "tasks.json", tmp_path]
    overrides = [*tiny, "num_train_steps=100000", "checkpoint.save_every_n_steps=5", "logger.frequency=5"]
    hooked = {"name": "long", "script": "train_ddp", "overrides": overrides, "before": "sleep_at_each_step"}
    (tmp_path / "tasks.json").write_text(json.dumps([hooked]))
    run = subprocess.Popen(list(map(str, command)), env=dict(os.environ, PYTHONPATH=str(ROOT)), stderr=subprocess.PIPE)
    root = tmp_path / "run/checkpoints"
    wait_for(lambda: step_folders(root), 60)
    run.kill()
    wait_for(lambda: (tmp_path / "long.0.json").exists() and (tmp_path / "long.1.json").exists(), 60)
    errors = {json.loads((tmp_path / f"long.{rank}.json").read_text())["error"] for rank in (0, 1)}
    (error,) = errors
    assert error.startswith("RunError: torchrun is gone: stopping before the save of step ")
    stopped_at = int(error.split("step ")[1].split(";")[0])
    assert max(step_folders(root)) == stopped_at - 5
    done = run_command([ROOT / "train_ddp.py", *overrides, f"num_train_steps={stopped_at}"])
    assert done.returncode == 0, done.stderr
    assert f"resumed from {root}/step_{stopped_at - 5:08d}" in done.stderr


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
