"""Where the seconds of a run went: they add up to the time that has passed, over all starts."""

import launch

import json
import time

import pytest
import torch

import train_ddp
from runtime.phases import KINDS, Phases


def passed(totals):
    return totals["until"] - totals["began"]


def test_seconds_inside_a_phase_count_for_it_alone(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def take(seconds):
        clock[0] += seconds

    phases = Phases()
    phases.place(0, None)
    take(1)
    phases.begin("training")
    take(2)
    with phases.during("evaluation"):
        take(4)
        with phases.during("saving"):
            take(8)
    take(16)
    totals = phases.totals()
    wanted = {"starting": 1, "training": 18, "evaluation": 4, "saving": 8}
    assert totals["seconds"] == dict.fromkeys(KINDS, 0) | wanted
    assert passed(totals) == pytest.approx(31)
    assert phases.longest_s["evaluation"] == 4


def test_the_first_log_line_ends_the_time_in_which_all_takes_longer(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    phases = Phases()
    phases.begin("training")
    for seconds, longest in ((60, {}), (2, {"training": 2}), (1, {"training": 2})):
        clock[0] += seconds
        phases.logged()
        assert phases.longest_s == longest


@pytest.mark.parametrize(
    ("state", "step", "kind", "training"),
    [("running", 8, "lost", 10), ("preempted", 4, "stopped", 30), ("preempted", 8, "lost", 10), (None, 8, "lost", 10)],
)
def test_the_time_since_a_checkpoint_is_lost_unless_the_run_ended_with_it(state, step, kind, training):
    """The checkpoint is of step 4, and 20 s of training old when the run ended, 100 s before this start."""
    phases = Phases()
    began = phases.start - 130
    seconds = dict.fromkeys(KINDS, 0.0)
    saved = {"began": began, "until": began + 10, "seconds": seconds | {"training": 10.0}}
    last = {"began": began, "until": began + 30, "seconds": seconds | {"training": 30.0}}
    phases.ended = {"step": step, "goodput": last} if state == "preempted" else None
    phases.place(4, saved)
    totals = phases.totals()
    assert totals["seconds"]["training"] == training
    assert totals["seconds"][kind] == pytest.approx(130 - training, abs=0.01)
    assert totals["until"] == pytest.approx(time.time(), abs=0.5)


def test_a_run_in_three_starts_adds_up(tiny, tmp_path):
    """One to the end, one that fails after its last save, one that goes on from there."""

    def start(*overrides):
        train_ddp.main(launch.load_config("L0_sanity", [*tiny, *overrides], script="train_ddp"))
        return json.loads((tmp_path / "run/status.json").read_text())["goodput"]

    before = time.time()
    first = start("evaluation.every_n_steps=3")
    assert passed(first) == pytest.approx(sum(first["seconds"].values()), abs=0.01)
    assert first["seconds"]["lost"] == first["seconds"]["stopped"] == 0
    assert min(first["seconds"][kind] for kind in ("starting", "training", "waiting", "evaluation", "saving")) > 0
    time.sleep(0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.Profiler.step", fail_at_the_third_call())
        with pytest.raises(ZeroDivisionError):
            start("num_train_steps=12", "checkpoint.save_every_n_steps=7")
    torch.distributed.destroy_process_group()
    last = start("num_train_steps=12", "checkpoint.save_every_n_steps=7")
    assert last["began"] == first["began"]
    assert passed(last) == pytest.approx(sum(last["seconds"].values()), abs=0.01)
    assert passed(last) == pytest.approx(time.time() - before, abs=0.5)
    assert last["seconds"]["stopped"] > 0.3
    assert last["seconds"]["lost"] > 0


def fail_at_the_third_call():
    calls = []

    def step(_self):
        calls.append(1)
        return 1 / (3 - len(calls))

    return step
