"""wandb and TensorBoard: one run, every value, no key in a file, and no harm to a run where they fail."""

import launch

import importlib.machinery
import json
import re
import struct
import sys

import pytest
import yaml
from conftest import WANDB_FAILURES, WANDB_KEY, column, read_metrics

import schema


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


def test_neither_library_is_imported_unless_asked_for(observed):
    outcomes, folder = observed
    assert [rank["metrics"]["loaded"] for rank in outcomes["quiet"]] == [[], []]
    assert not (folder / "quiet/wandb").exists()


def test_wandb_is_one_run_of_rank_0_on_one_axis_over_resumes(observed):
    """Against a stub. The third launch finds the run finished and does not even call."""
    _, folder = observed
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


@pytest.mark.parametrize("failure", WANDB_FAILURES)
def test_a_failing_wandb_is_one_warning_and_the_run_goes_on(observed, failure):
    """Also for the other rank, and also if wandb never comes back."""
    outcomes, folder = observed
    assert json.loads((folder / failure / "status.json").read_text())["state"] == "finished"
    assert column(folder, failure, "train/loss") == column(folder, "offline", "train/loss")[:3]
    assert max(rank["metrics"]["seconds"] for rank in outcomes[failure]) < 10
    warnings = [line for line in (folder / failure / "train.log").read_text().splitlines() if " wandb: " in line]
    assert len(warnings) == 1, warnings
    assert "the run goes on without it" in warnings[0]
    if "hangs" not in failure and "import" not in failure:
        assert f"OSError: no route to {failure.split()[0]};" in warnings[0]


def test_offline_wandb_for_real(observed):
    """The file that `wandb sync` sends holds every value, the config and the summary, of both launches."""
    _, folder = observed
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


def test_no_key_is_in_any_file(observed):
    _, folder = observed
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert any("wandb" in file.parts for file in files)
    assert [file for file in files if WANDB_KEY.encode() in file.read_bytes()] == []


def test_tensorboard_holds_each_step_once_and_as_it_was_taken_last(observed):
    """The second launch had lost the last checkpoint: it takes steps 3 and 4 again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder = observed
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
    for where in ("settings={api_key: " + WANDB_KEY + "}", "config.nested.Access_Token=" + WANDB_KEY):
        with pytest.raises(schema.ConfigError) as caught:
            launch.load_config("L0_sanity", [f"+wandb.init_args.{where}"])
        assert WANDB_KEY not in str(caught.value)
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
