"""What one sees of a run, and that looking never harms it: trackers, metrics, profiles, reports, the doctor, the image.

One set of two processes runs everything that needs a run; the rest are functions with files of their own.
"""

import launch

import contextlib
import functools
import gzip
import importlib.machinery
import io
import itertools
import json
import logging
import re
import shutil
import struct
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, TINY, column, loaders_of, read_metrics, run_tasks
from packaging.requirements import Requirement
from PIL import Image

import doctor
import report
import schema
import vit_te
from observability import metrics, profiling
from runtime import run_folder, shared_memory
from runtime.session import Session

KEY = "5f0c" * 10  # what a wandb key looks like
FAILURES = ("import raises", "init raises", "log raises", "summary raises", "finish raises", "init hangs")


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    """(outcomes of all tasks, folder)."""
    folder = tmp_path_factory.mktemp("seeing")

    def task(name, *overrides, script="train_ddp", output=None, **more):
        base = [*TINY, f"data.path={image_folder}", f"output_dir={folder / (output or name)}"]
        return {"name": name, "script": script, "overrides": [*base, *overrides], **more}

    often = ["evaluation.every_n_steps=2", "checkpoint.save_every_n_steps=2", "checkpoint.max_checkpoints=null"]
    length = ["num_train_steps={}", "lr_scheduler.num_training_steps=8", *often]
    tasks = [task("quiet", "num_train_steps=2", call="train_and_tell")]
    for stop in (4, 8):
        begun = [length[0].format(stop), *length[1:]]
        tasks.append(task(f"offline-{stop}", *begun, "wandb.mode=offline", output="offline", before="wait_a_second"))
    for name, before in (("first", None), ("again", "lose_newest_checkpoint")):
        begun = [length[0].format(4 if name == "first" else 8), *length[1:], "tensorboard.enabled=true"]
        tasks.append(task(f"board-{name}", *begun, output="board", **({"before": before} if before else {})))
    for name, stop, before in (("a", 4, "stub_wandb"), ("b", 8, "stub_wandb"), ("c", 8, "stub_wandb")):
        begun = [length[0].format(stop), *length[1:], "wandb.mode=online", "wandb.init_args.project=vit"]
        tasks.append(task(f"stub-{name}", *begun, output="stub", before=before))
    for failure in FAILURES:
        online = ["num_train_steps=3", "wandb.mode=online", f"wandb.init_args.name={failure}"]
        tasks.append(task(failure, *online, before="stub_wandb", call="train_and_tell"))
    window = ["profiler.trace=true", "profiler.first_step=3", "profiler.num_steps=2"]
    tasks.append(task("traced", *window, "profiler.ranks=[1]", script="train_fsdp2"))
    tasks.append(task("untraced", *window, "num_train_steps=7", "profiler.ranks=null", output="traced"))
    tasks.append(task("doctor", call="doctor"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", KEY)
        return run_tasks(tasks, nproc=2, folder=folder), folder


def calls(folder, name):
    return [json.loads(line) for line in (folder / name / "calls.jsonl").read_text().splitlines()]


def wandb_records(file):
    """Records of an offline run's file: protobufs in LevelDB's log format, 32 KiB a block, after 7 bytes of header."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record


# wandb and TensorBoard


def test_neither_library_is_imported_unless_asked_for(runs):
    """U04."""
    outcomes, folder = runs
    assert [rank["metrics"]["loaded"] for rank in outcomes["quiet"]] == [[], []]
    assert not (folder / "quiet/wandb").exists()


def test_wandb_is_one_run_of_rank_0_on_one_axis_over_resumes(runs):
    """U03: against a stub. The third launch finds the run finished and does not even call."""
    _, folder = runs
    made = calls(folder, "stub")
    assert {call["rank"] for call in made} == {0}
    inits = [call["kwargs"] for call in made if call["call"] == "init"]
    assert len(inits) == 2
    run_id = json.loads((folder / "stub/checkpoints/step_00000008/state.json").read_text())["run_id"]
    assert [(i["id"], i["resume"], i["mode"], i["project"]) for i in inits] == [(run_id, "allow", "online", "vit")] * 2
    assert inits[1]["config"] == yaml.safe_load((folder / "stub/config.yaml").read_text())
    assert {"call": "define_metric", "rank": 0, "name": "*", "axis": "step"} in made
    rows = [call["data"] for call in made if call["call"] == "log"]
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["step"] for row in rows if "val/top1" in row] == [2, 4, 6, 8]
    want = read_metrics(folder / "stub")
    for row in rows:
        assert row.items() <= {k: v for k, v in want[row["step"]].items() if v is not None}.items()
    best = json.loads((folder / "stub/checkpoints/best.json").read_text())
    summary = [call["data"] for call in made if call["call"] == "summary"][-1]
    assert (summary["summary/best_step"], summary["summary/best_val/top1"]) == (best["step"], best["value"])
    assert [call["call"] for call in made].count("finish") == 2


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failing_wandb_is_one_warning_and_the_run_goes_on(runs, failure):
    """U04: also for the other rank, and also if wandb never comes back."""
    outcomes, folder = runs
    assert json.loads((folder / failure / "status.json").read_text())["state"] == "finished"
    assert column(folder, failure, "train/loss") == column(folder, "offline", "train/loss")[:3]
    assert max(rank["metrics"]["seconds"] for rank in outcomes[failure]) < 10
    warnings = [line for line in (folder / failure / "train.log").read_text().splitlines() if " wandb: " in line]
    assert len(warnings) == 1, warnings
    assert "the run goes on without it" in warnings[0]
    if "hangs" not in failure and "import" not in failure:
        assert f"OSError: no route to {failure.split()[0]};" in warnings[0]


def test_offline_wandb_for_real(runs):
    """The file that `wandb sync` sends holds every value, the config and the summary, of both launches."""
    _, folder = runs
    files = sorted((folder / "offline/wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1  # the id
    assert len(files) == 2
    rows, summary, configs = [], {}, []
    for record in (record for file in files for record in wandb_records(file)):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
        elif record.WhichOneof("record_type") == "summary":
            summary |= {item.key: json.loads(item.value_json) for item in record.summary.update if item.key}
        elif record.WhichOneof("record_type") == "run" and record.run.config.update:
            configs.append({item.key: json.loads(item.value_json) for item in record.run.config.update})
    merged = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    want = read_metrics(folder / "offline")
    assert sorted(merged) == sorted(want) == [1, 2, 3, 4, 5, 6, 7, 8]
    for step, values in want.items():
        assert merged[step] == pytest.approx({k: v for k, v in values.items() if v is not None}, rel=1e-6)
    assert configs[0]["optimizer"]["lr"] == 1e-3
    assert "summary/best_val/top1" in summary


def test_no_key_is_in_any_file(runs):
    _, folder = runs
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert any("wandb" in file.parts for file in files)
    assert [file for file in files if KEY.encode() in file.read_bytes()] == []


def test_tensorboard_holds_each_step_once_and_as_it_was_taken_last(runs):
    """The second launch had lost the last checkpoint: it takes steps 3 and 4 again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder = runs
    events = EventAccumulator(str(folder / "board/tensorboard"), purge_orphaned_data=True)
    events.Reload()
    want = read_metrics(folder / "board")
    lines = [json.loads(line)["step"] for line in (folder / "board/metrics.jsonl").read_text().splitlines()]
    assert lines.count(3) == 2  # it did take it again
    for key in ("train/loss", "val/top1"):
        points = {event.step: event.value for event in events.Scalars(key)}
        assert len(points) == len(events.Scalars(key))
        assert points == pytest.approx({step: row[key] for step, row in want.items() if key in row}, rel=1e-6)
    text = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert yaml.safe_load(text.strip("`\n"))["num_train_steps"] == 8


def test_keys_are_refused_in_the_config():
    for where in ("settings={api_key: " + KEY + "}", "config.nested.Access_Token=" + KEY):
        with pytest.raises(schema.ConfigError) as caught:
            launch.load_config("L0_sanity", [f"+wandb.init_args.{where}"])
        assert KEY not in str(caught.value)
        assert "WANDB_API_KEY" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "package"), [("wandb.mode=offline", "wandb"), ("tensorboard.enabled=true", "tensorboard")]
)
def test_a_library_that_is_asked_for_and_not_there_is_refused(monkeypatch, tmp_path, override, package):
    """A folder that wandb left behind is no package, either."""
    cfg = launch.load_config("L0_sanity", [override])
    launch.check_script(cfg, "train_ddp", 1)
    (tmp_path / package).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder])
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(schema.ConfigError) as caught:
        launch.check_script(cfg, "train_ddp", 1)
    assert re.match(rf"{override}, but {package} is not installed: pip install {package}, or set ", str(caught.value))


# Metrics and the console


def test_metrics_tell_the_epoch_and_its_seconds(runs):
    """60 images in batches of 24: 2.5 steps an epoch."""
    _, folder = runs
    assert column(folder, "stub", "train/epoch") == pytest.approx([step / 2.5 for step in range(1, 9)], abs=1e-4)
    seconds = column(folder, "stub", "train/epoch_seconds")  # resumed at step 4, in mid-epoch, without its start
    assert [value is None for value in seconds] == [True, True, False, False, True, True, True, False]
    assert {row["train/gpu_utilization"] for row in read_metrics(folder / "stub").values()} <= {None, *range(2)}
    for key in ("train/memory_allocated_gib", "train/memory_reserved_gib"):
        assert key in read_metrics(folder / "stub")[1]


def session(folder, **changes):
    values = {"rank": 0, "local_rank": 0, "world_size": 1, "device": torch.device("cpu"), "output_dir": folder}
    return Session(**(values | changes))


def test_an_epochs_seconds_are_those_between_its_first_and_last_step(monkeypatch, tmp_path):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    speed = metrics.Speed(session(tmp_path), start_step=0, images_per_step=10, images_per_epoch=40, flops_per_image=1.0)
    seen = []
    for step in range(1, 13):
        now += step
        speed.count(step)
        seen.append(speed.read()["train/epoch_seconds"])
    assert seen == [None, None, None, 10.0, 10.0, 10.0, 10.0, 26.0, 26.0, 26.0, 26.0, 42.0]


def test_utilization_is_a_share_or_null(monkeypatch):
    card = torch.device("cuda", 0)
    assert metrics.utilization(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 97)
    assert metrics.utilization(card) == 0.97

    def absent(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", absent)
    assert metrics.utilization(card) is None


def test_the_end_of_a_run_is_summed_up(runs):
    _, folder = runs
    log = (folder / "stub/train.log").read_text()
    rates = re.findall(r"done: steps (\d) to (\d) in \d+ s, ([\d,]+) images/s", log)
    assert [(first, last) for first, last, _ in rates] == [("1", "4"), ("5", "8")]
    best = json.loads((folder / "stub/checkpoints/best.json").read_text())
    where = folder / f"stub/checkpoints/step_{best['step']:08d}"
    assert f"best: top1 {best['value']:.4f} at step {best['step']}, in {where}\n" in log
    assert where.is_dir()
    assert log.count("24 = 12 images x 2 ranks x 1 microbatches; steps 5 to 8, 3.2 passes over 60 images") == 1


def test_output_in_files_has_no_carriage_return(runs):
    """U07: with real wandb, warnings and all."""
    _, folder = runs
    output = (folder / "output.txt").read_bytes()
    assert b"\r" not in output
    assert len(re.findall(rb"step 8/8  loss", output)) == 3  # offline, board, stub: rank 0 alone


def test_the_bar_on_a_terminal_has_an_eta(monkeypatch, tmp_path):
    class Terminal(io.StringIO):
        isatty = staticmethod(lambda: True)

    cfg = launch.load_config("L0_sanity", [*TINY, "data.path=unused", f"output_dir={tmp_path}"])
    shown = {}
    for kind in (Terminal, io.StringIO):
        monkeypatch.setattr(sys, "stderr", kind())
        logger = metrics.MetricLogger(cfg, session(tmp_path), start_step=2, total_steps=6, run_id="x")
        logger.bar.mininterval = 0
        logger.bar.update()
        logger.write(3, {"train/loss": 0.5})
        time.sleep(0.01)
        logger.bar.update()
        logger.close(4, None)
        shown[kind] = sys.stderr.getvalue()
    assert re.search(r"\r.* 4/6 \[\d\d:\d\d<\d\d:\d\d, .*loss=0\.5000", shown[Terminal])
    assert shown[io.StringIO] == ""


def test_a_run_knows_its_commit_with_and_without_git(monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert run_folder._git_commit() == "unknown"
    monkeypatch.setenv("COMMIT", "v1-4-gabc")  # as the image sets it
    assert run_folder._git_commit() == "v1-4-gabc"


# /dev/shm


@pytest.mark.parametrize(("free", "warns"), [(64 * 2**20, True), (16 * 2**30, False)])
def test_small_shared_memory_is_warned_of(monkeypatch, caplog, tmp_path, free, warns):
    """D14: Docker's 64 MiB, 8 loader processes, 384 px."""
    sizes = ["model.img_size=384", "model.patch_size=16", "model.in_chans=3", "data=synthetic", "data.num_workers=8"]
    cfg = launch.load_config("L0_sanity", [*sizes, "global_batch_size=64", "num_train_steps=2", "micro_batch_size=16"])
    # 2 ranks, 2 loaders of 8 processes that each work 2 batches ahead, 16 images of 3 bytes a pixel.
    needed = 2 * 2 * 8 * 2 * 16 * 3 * 384 * 384
    assert shared_memory.needed(cfg, world_size=2, ranks_here=2) == needed
    loaders = loaders_of(cfg, rank=0, world_size=2, start_step=0)
    assert len(loaders) == shared_memory.LOADERS
    assert {loader.prefetch_factor for loader in loaders} == {shared_memory.AHEAD}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free, total=free, used=0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with caplog.at_level(logging.WARNING):
        shared_memory.warn_if_small(cfg, session(tmp_path, world_size=2))
        shared_memory.warn_if_small(cfg, session(tmp_path, rank=1, local_rank=1))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == warns
    if warns:
        for fragment in ("/dev/shm has 64 MiB free", f"{needed / 2**20:.0f} MiB", "--shm-size", "data.num_workers=8"):
            assert fragment in texts[0]
    rows = list(doctor.check_shared_memory(cfg, 2, 2))
    assert [row.state for row in rows] == ["warn" if warns else "ok"]
    assert ("--shm-size" in rows[0].remedy) == warns


# Profiles


def test_a_trace_is_of_the_chosen_steps_and_ranks(runs):
    _, folder = runs
    files = {file.name for file in (folder / "traced/profile").iterdir()}
    assert files == {"trace_rank1_steps3-4.json.gz", "top_rank1_steps3-4.txt"}
    with gzip.open(folder / "traced/profile/trace_rank1_steps3-4.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 2
    assert sum("AdamW.step" in name and name.startswith("Optimizer.step#") for name in names) == 2
    assert "aten::" in (folder / "traced/profile/top_rank1_steps3-4.txt").read_text()
    # The next launch begins behind the window: one line says so, on each rank.
    output = (folder / "output.txt").read_text()
    assert output.count("profiler: no profile: the run goes on after step 6, past 3") == 2


def test_a_memory_snapshot_is_of_the_chosen_steps(monkeypatch, tmp_path):
    """Against stand-ins for the two functions, which need CUDA."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled="all": done.append((step, "record", enabled))
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: done.append((step, "dump", Path(path).name)))
    snapshot = ["profiler.memory_snapshot=true", "profiler.first_step=3", "profiler.num_steps=2"]
    cfg = launch.load_config("L0_sanity", [*TINY, *snapshot, "profiler.ranks=[0,2]"])
    profiling.check(cfg, 3)
    for rank in (0, 1):
        step = 0
        profiler = profiling.Profiler(cfg, session(tmp_path, rank=rank), start_step=0)
        while step < 6:
            step += 1
            profiler.step()
        profiler.close()
    assert done == [(2, "record", "all"), (4, "dump", "memory_rank0_steps3-4.pickle"), (4, "record", None)]


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["profiler.trace=true", "profiler.ranks=[0,2]"], ["profiler.ranks=[0, 2]", "no rank 2 in a job of 2"]),
        (["profiler.trace=true", "profiler.first_step=5"], ["profiler.first_step=5", "step 7", "step 6"]),
        (["profiler.memory_snapshot=true"], ["profiler.memory_snapshot=true", "CUDA"]),
    ],
)
def test_a_profile_that_cannot_be_is_refused(monkeypatch, overrides, fragments):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = launch.load_config("L0_sanity", [*TINY, "data=synthetic", *overrides])
    with pytest.raises(schema.ConfigError) as caught:
        profiling.check(cfg, 2)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
    off = launch.load_config("L0_sanity", [*TINY, "data=synthetic", "profiler.ranks=[7]", "profiler.first_step=99"])
    profiling.check(off, 2)  # what is off is not looked at


# tools/report.py


@pytest.fixture(scope="module")
def reported(runs, tmp_path_factory):
    """A function: runs' folders -> (table as a list of rows, image)."""
    _, folder = runs

    @functools.cache
    def make(*names):
        output = tmp_path_factory.mktemp("report") / "out"
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
            arguments = [str(folder / name) for name in names] + ["--output", str(output)]
            patch.setattr(sys, "argv", ["report.py", *arguments])
            report.main()
        text = output.with_suffix(".md").read_text()
        assert shown.getvalue() == text
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        return table, np.asarray(Image.open(output.with_suffix(".png")).convert("RGB"))

    return make


def test_a_report_has_a_table_and_a_image(reported, runs):
    _, folder = runs
    table, image = reported("board", "quiet")
    assert table[0] == ["", "board", "quiet"]
    facts = {row[0]: row[1:] for row in table}
    rows = read_metrics(folder / "board")
    assert facts["state"] == ["finished, step 8", "finished, step 2"]
    assert facts["last val/top1"] == [f"{rows[8]['val/top1']:.4f}", "-"]
    best = max(row["val/top1"] for row in rows.values() if "val/top1" in row)
    step = min(step for step, row in rows.items() if row.get("val/top1") == best)
    assert facts["best"][0] == f"val/top1 {best:.4f} at step {step}"
    rates = [rows[step]["train/images_per_second"] for step in range(2, 9)]  # not step 1's, which is the start
    assert facts["images/s, median"][0] == f"{sorted(rates)[3]:,.0f}"
    assert "MFU, median" not in facts  # on a CPU
    colours = {tuple(colour) for colour in image.reshape(-1, 3)}
    assert {(31, 119, 180), (255, 127, 14)} <= colours  # a line of each run, in the first two of matplotlib's colours


def test_a_report_takes_the_later_line_and_leaves_a_torn_one(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": step, "train/loss": loss} for step, loss in ((1, 5), (2, 4), (3, 9), (3, 3), (4, 2))]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 5, "tra')
    (run / "status.json").write_text('{"state": "running", "step": 4, "time": ""}')
    (run / "config.yaml").write_text("global_batch_size: 8\n")
    read = report.read(run)
    assert read.curve("train/loss") == ([1, 2, 3, 4], [5, 4, 3, 2])
    assert "| state | running, step 4 |" in report.table([read])  # of a config that says little, too
    report.draw([read], tmp_path / "image.png")


def test_a_report_of_no_run_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        report.main()
    assert caught.value.code == f"error: {tmp_path} is no run's folder: metrics.jsonl is missing"


# tools/doctor.py


def test_the_doctor_of_two_ranks(runs):
    """The table once, by rank 0; every check is there; a wrong setting is a warning with its remedy."""
    outcomes, _ = runs
    first, second = (rank["metrics"] for rank in outcomes["doctor"])
    assert (first["code"], second) == (0, {"code": 0, "shown": ""}), first["shown"]
    table = first["shown"]
    for check in ("Python", "packages", "train_ddp.py", "train_fsdp2.py", "train_mfsdp.py", "data", "output_dir"):
        assert len(re.findall(rf"^{check} ", table, re.MULTILINE)) == 1, check
    assert re.search(r"^all-reduce +ok +gloo, 2 ranks: 16 MiB in [\d.]+ ms, [\d.]+ GB/s a link$", table, re.MULTILINE)
    assert re.search(r"60 training and 23 validation images, 6 classes; one process", table)
    assert re.search(r"^CPU +warn .*\n +.*-> lower data.num_workers to", table, re.MULTILINE)
    assert table.endswith("0 broken, 1 warnings\n") or "/dev/shm" in table


def test_the_doctor_alone_exits_with_1_if_something_is_broken(monkeypatch, capsys, tmp_path):
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.main([f"data.path={tmp_path}", f"output_dir={tmp_path}"]) == 1
    shown = capsys.readouterr().out
    problem = rf"^data +BROKEN +data.path={tmp_path}: there is no folder .*\n( +.*\n)? +-> "
    assert re.search(problem, shown, re.MULTILINE)
    assert re.search(r"^all-reduce +ok +\w+ starts, alone", shown, re.MULTILINE)
    assert shown.endswith("1 broken, 0 warnings\n")
    assert not torch.distributed.is_initialized()


def test_the_doctor_compares_versions(tmp_path):
    (tmp_path / "requirements.txt").write_text("torch>=99\nnumpy>=1\nno-such-thing>=1\nabsent>=2  # optional: why\n")
    (tmp_path / "requirements-gpu.txt").write_text("-r requirements.txt\ntransformer-nothing>=2\n")
    rows = {row.check: row for row in doctor.check_packages(tmp_path)}
    assert rows["torch"].state == "BROKEN"
    assert rows["torch"].found.endswith(" is installed")
    assert rows["torch"].remedy == "pip install 'torch>=99'"
    states = [rows[name].state for name in ("no-such-thing", "absent", "transformer-nothing")]
    assert states == ["BROKEN", "note", "note"]
    assert rows["packages"].found == f"numpy {np.__version__}"


def test_the_doctor_finds_two_cudnns(tmp_path):
    for folder in ("system", "torch/lib", "home/lib64"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libcudnn.so.9").write_text(folder)
    (tmp_path / "link").symlink_to(tmp_path / "torch/lib")  # the same one by another name
    environment = {"LD_LIBRARY_PATH": f"{tmp_path / 'link'}:{tmp_path / 'nowhere'}", "CUDNN_HOME": f"{tmp_path}/home"}
    ldconfig = f"\tlibcudnn.so.9 (libc6,x86-64) => {tmp_path}/system/libcudnn.so.9\n\tlibc.so.6 => /lib/libc.so.6\n"
    found = doctor.find_cudnn(environment, ldconfig, [tmp_path / "torch/lib"])
    assert [file.parent.relative_to(tmp_path).as_posix() for file in found] == ["torch/lib", "home/lib64", "system"]
    versions = {"torch/lib": "9.19.0", "system": "9.14.0", "home/lib64": "9.19.0"}
    (row,) = doctor.check_cudnn(found, lambda file: versions[file.read_text()])
    assert row.state == "warn"
    assert "9.14.0 in" in row.found
    assert "LD_LIBRARY_PATH=" in row.remedy
    (row,) = doctor.check_cudnn(found[:2], lambda file: versions[file.read_text()])
    assert row.state == "ok"


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU")
def test_the_doctor_has_transformer_engine_imported_without_a_gpu(monkeypatch):
    """In the image on a machine without one: its questions to the card would raise."""

    monkeypatch.setattr(doctor, "_installed", lambda: {"transformer_engine": "2.20.2"})
    monkeypatch.setattr(vit_te, "transformer_engine", object)
    (row,) = doctor.check_transformer_engine()
    assert "without a GPU" in row.found


def test_the_doctor_tells_nodes_apart(monkeypatch):
    same, there = doctor.Row("Python", "ok", "3.12"), doctor.Row("GPU 0", "BROKEN", "off the bus", "dmesg")
    versions = [doctor.Row("packages", "ok", text) for text in ("torch 2.11", "torch 2.14")]
    everyone = [("a", [same, versions[0]]), ("a", [same]), ("b", [same, there, versions[1]])]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda out, mine: out.__setitem__(slice(None), everyone)
    )
    rows = {row.check: row.state for row in doctor.together([])}
    assert rows == {
        "Python": "ok", "packages (a)": "ok", "packages (b)": "ok", "GPU 0 (b)": "BROKEN", "nodes": "BROKEN"
    }  # fmt: skip


# The image


def ignored(path):
    """Whether .dockerignore keeps a file out: the last pattern that matches it or a folder above it counts."""
    from fnmatch import fnmatchcase

    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("!")
        names = ["/".join(path.parts[: i + 1]) for i in range(len(path.parts))]
        if pattern.startswith("**/"):
            matches = any(fnmatchcase(part, pattern[3:]) for part in path.parts)
        else:  # an asterisk does not match a slash
            matches = any(n.count("/") == pattern.count("/") and fnmatchcase(n, pattern) for n in names)
        if matches:
            out = not line.startswith("!")
    return out


def instructions():
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]


def test_what_the_image_copies_is_there_and_small():
    copied = [rest.split() for name, rest in instructions() if name == "COPY"]
    sources = [source for words in copied for source in [w for w in words if not w.startswith("--")][:-1]]
    assert sources == ["requirements.txt", "requirements-gpu.txt", "."]
    for source in sources:
        assert (ROOT / source).exists()
        assert source == "." or not ignored(Path(source))
    files = [p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file() and not set(p.parts) & {".git", ".venv"}]
    context = [path for path in files if not ignored(path)]
    assert sum((ROOT / path).stat().st_size for path in context) < 8 * 2**20
    needed = {*ROOT.glob("*.py"), *ROOT.glob("config/**/*.yaml"), *ROOT.glob("tools/*.py"), ROOT / "NOTICE"}
    needed |= {ROOT / "data/fashion_mnist_demo.tar.gz", ROOT / "LICENSE"}
    assert {path.relative_to(ROOT) for path in needed} <= set(context)
    for left in ("runs/x/metrics.jsonl", ".git/HEAD", "__pycache__/a.pyc", "data/fashion_mnist_demo/a.jpg", ".venv/x"):
        assert ignored(Path(left)), left


def test_what_the_image_installs_is_in_the_requirements():
    installs = re.findall(
        r"pip install (.*?)(?:&&|$)", " ".join(rest for name, rest in instructions() if name == "RUN")
    )
    assert len(installs) == 2
    for arguments in installs:
        words = arguments.split()
        files = [word for flag, word in itertools.pairwise(words) if flag == "-r"]
        options = [word for word in words if word.startswith("-")]
        assert len(words) == len(options) + len(files) + words.count("-c")  # and no package by its name
        assert files
        assert all((ROOT / file).is_file() for file in files)
    pins = [line.split("#")[0].strip() for line in (ROOT / "requirements-gpu.txt").read_text().splitlines()]
    assert "transformer-engine" in [Requirement(pin).name for pin in pins if pin and not pin.startswith("-r")]
    (base,) = [rest for name, rest in instructions() if name == "FROM"]
    version = re.match(r"pytorch/pytorch:([\d.]+)-cuda[\d.]+-cudnn9-devel$", base)[1]  # with a compiler
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    (torchs,) = [Requirement(line) for line in lines if re.match(r"torch\b", line)]
    assert torchs.specifier.contains(version)


def test_the_image_does_not_run_as_root_and_says_how_it_is_run():
    names = [name for name, _ in instructions()]
    users = [rest for name, rest in instructions() if name == "USER"]
    assert users[-1] == "${UID}"
    assert names.index("USER") < names.index("CMD")
    header = (ROOT / "Dockerfile").read_text().split("FROM")[0]
    assert "docker run --rm --gpus=all --shm-size=16G" in header
    assert "torchrun --standalone --nproc-per-node 8 train_fsdp2.py" in header


def test_the_devcontainer_is_the_image():
    text = re.sub(r"^//.*$", "", (ROOT / ".devcontainer/devcontainer.json").read_text(), flags=re.MULTILINE)
    container = json.loads(text)
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (ROOT / ".devcontainer" / container["build"]["context"]).resolve() == ROOT
    assert f'useradd --create-home --uid "${{UID}}" {container["remoteUser"]}' in (ROOT / "Dockerfile").read_text()
    assert container["runArgs"] == ["--gpus=all", "--shm-size=16G"]


def test_notices_name_whose_work_is_used():
    notice = (ROOT / "NOTICE").read_text()
    assert "timm" in notice
    assert "Fashion-MNIST" in notice
    assert (ROOT / re.search(r"data/\w+LICENSE", notice)[0]).is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


# On a GPU


@pytest.mark.gpu
def test_gpu_metrics_profiles_and_doctor(image_folder, tmp_path):
    from conftest import ON_GPU

    wanted = ["profiler.trace=true", "profiler.memory_snapshot=true", "profiler.first_step=3", "profiler.num_steps=2"]
    base = [*TINY, *ON_GPU, *wanted, f"data.path={image_folder}", f"output_dir={tmp_path / 'run'}", "num_train_steps=6"]
    tasks = [
        {"name": "run", "script": "train_fsdp2", "overrides": base},
        {"name": "doctor", "script": "train_fsdp2", "overrides": base, "call": "doctor"},
    ]
    outcomes = run_tasks(tasks, nproc=1, folder=tmp_path / "tasks")
    row = read_metrics(tmp_path / "run")[6]
    assert 0 < row["train/memory_allocated_gib"] <= row["train/memory_peak_gib"] <= row["train/memory_reserved_gib"]
    assert row["train/gpu_utilization"] is None or 0 <= row["train/gpu_utilization"] <= 1
    names = {file.name.split("_")[0]: file for file in (tmp_path / "run/profile").iterdir()}
    assert set(names) == {"trace", "top", "memory"}
    with gzip.open(names["trace"]) as file:
        assert any(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])
    assert names["memory"].stat().st_size > 10_000
    shown = outcomes["doctor"][0]["metrics"]["shown"]
    print(shown)
    assert re.search(r"^GPU 0 +(ok|warn)", shown, re.MULTILINE)
