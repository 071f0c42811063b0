"""How the processes of a job find each other."""

import itertools

import pytest
import torch.distributed as dist

from runtime import process_group


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
