"""How the processes of a job find each other, and how those end that the run has no use for."""

import itertools
import os
import signal
import threading
from unittest import mock

import pytest
import torch.distributed as dist
from conftest import tiny_config

import schema
from runtime import preemption, process_group


@pytest.mark.parametrize(("agent_store", "meet"), [("False", True), ("True", False)])
def test_torchruns_that_restarted_a_different_number_of_times_meet_in_a_new_store(monkeypatch, agent_store, meet):
    """A torchrun that joins has restarted nothing yet. Its own store, which stays, has names of each attempt."""
    shared = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(shared, 0, 2)]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent_store)

    def store(restarts):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.setattr(process_group, "_sessions", itertools.count())  # of a process of its own
        return process_group._store()

    store("1").set("key", "value")
    assert store("0").check(["key"]) == meet


@pytest.mark.parametrize(
    ("state", "another_left", "raises"),
    [
        ("finished", True, None),
        ("preempted", False, None),  # all were asked, and this rank's signal came late
        ("preempted", True, schema.NodeLeftError),
        ("failed", True, schema.RunError),
        ("asked", True, None),
    ],
)
def test_a_rank_that_stands_by_ends_as_the_run_does(monkeypatch, state, another_left, raises):
    """With the run, by its own signal, or as the store vanishes; rank 0 waits until all of them know."""
    store, released = dist.HashStore(), []
    lost = mock.Mock(side_effect=dist.DistNetworkError("Connection reset by peer"))
    seen = mock.Mock(wraps=store, **({"check": lost} if state == "failed" else {}))
    monkeypatch.setattr(process_group, "_store", lambda: run.start() or seen)
    monkeypatch.setattr(preemption, "another_node_left", lambda: another_left)
    monkeypatch.setenv("RANKS_STANDING_BY", "1")
    for name in ("RESTART_COUNT", "MAX_RESTARTS"):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", "2")

    def ends():
        if state == "asked":
            os.kill(os.getpid(), signal.SIGTERM)
        elif state != "failed":
            process_group._release(store, state)
            released.append(store.add("released", 0))

    run = threading.Timer(0.5, ends)
    if raises is None:
        assert process_group.stand_by(tiny_config()) == {}
    else:
        with pytest.raises(raises) as caught:
            process_group.stand_by(tiny_config())
        assert caught.type is raises
    run.join()
    assert released in ([], [1])
    assert bool(released) == (state in ("finished", "preempted"))
