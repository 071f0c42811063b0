"""tools/elastic_campaign.py: what it would call wrong, and a few events. The campaign itself takes half an hour."""

import json
import random

import pytest
from conftest import fork_context

import elastic_campaign as campaign

BATCH = 4
ORDER = [5, 3, 0, 7, 2, 6, 1, 4]  # of an epoch's images


def samples(step, rank, ranks):
    """Of one rank in a step: (number in the stream, image)."""
    first, each = (step - 1) * BATCH + rank * BATCH // ranks, BATCH // ranks
    return [[n, ORDER[n % 8]] for n in range(first, first + each)]


def start(time, steps, ranks):
    return {
        "time": float(time),
        "ranks": ranks,
        "steps": {step: {rank: samples(step, rank, ranks) for rank in range(ranks)} for step in steps},
    }


STRAIGHT = {step: samples(step, 0, 1) for step in range(1, 41)}


def test_what_the_ranks_noted_becomes_starts_without_steps_that_were_not_whole(tmp_path):
    for pid, rank, lines in ((11, 0, (1, 2, 3)), (12, 1, (1, 2))):
        place = {"start": "29001", "ranks": 2, "rank": rank}
        text = [json.dumps(place | {"step": n, "time": n, "samples": samples(n, rank, 2)}) for n in lines]
        (tmp_path / f"steps.{pid}.jsonl").write_text("\n".join([*text, text[0][:20]]))  # killed in a line
    later = {"start": "29002", "ranks": 1, "rank": 0, "step": 3, "time": 9, "samples": samples(3, 0, 1)}
    (tmp_path / "steps.13.jsonl").write_text(json.dumps(later) + "\n")
    assert campaign.steps_of(tmp_path) == [start(1, (1, 2), 2), start(9, (3,), 1)]


def test_the_stream_is_whole_over_any_number_of_ranks():
    starts = [start(0, range(1, 15), 1), start(10, range(11, 20), 2), start(20, range(20, 30), 4)]
    assert campaign.check_samples(starts, BATCH, STRAIGHT) == []
    assert campaign.pieces_of(starts) == [(0, 10), (10, 19), (19, 29)]


@pytest.mark.parametrize(
    ("harm", "wrong"),
    [
        (lambda starts: starts[1]["steps"].pop(17), ["step 17 is missing"]),
        (lambda starts: starts[1]["steps"][17][1].pop(), ["step 17 took samples [64, 65, 66]"]),
        (
            lambda starts: starts[1]["steps"][17].update({0: samples(17, 1, 2)}),
            ["step 17 took samples [66, 67, 66, 67]"],
        ),
        (lambda starts: starts[1]["steps"][17][0].__setitem__(0, [64, 1]), ["step 17 took other images than a lone"]),
    ],
)
def test_what_is_wrong_with_the_samples(harm, wrong):
    starts = [start(0, range(1, 15), 1), start(10, range(11, 20), 2)]
    harm(starts)
    found = campaign.check_samples(starts, BATCH, STRAIGHT)
    assert [text[: len(wanted)] for text, wanted in zip(found, wrong, strict=True)] == wrong


@pytest.mark.parametrize(
    ("kinds", "first", "again", "is_wrong"),
    [
        (["join"], 15, 0, False),
        (["join"], 14, 1, True),  # a step that was not saved
        (["leave", "join"], 16, -1, True),  # a step is left out
        (["leave", "kill rank"], 11, 4, False),
        (["kill node"], 4, 11, True),  # more than the steps between two saves
        ([], 14, 1, True),
    ],
)
def test_steps_may_be_taken_again_after_a_kill_alone(kinds, first, again, is_wrong):
    events = [{"kind": "kill node", "time": 30.0}]  # later: no excuse
    events += [{"kind": kind, "time": 5.0} for kind in kinds]
    starts = [start(0, range(1, 15), 1), start(10, range(first, 20), 2)]
    repeats, wrong = campaign.check_repeats(starts, events)
    assert (repeats, bool(wrong)) == ([again], is_wrong)


def test_a_join_while_a_kill_is_made_up_for_repeats_nothing():
    starts = [start(0, range(1, 6), 1), start(10, range(1, 5), 1), start(20, range(5, 9), 2)]
    events = [{"kind": "kill rank", "time": 9.0}, {"kind": "join", "time": 9.5}]
    assert campaign.check_repeats(starts, events) == ([5, 0], [])


def test_the_last_node_stays_and_there_is_no_fifth(tmp_path):
    life = campaign.Life(tmp_path / "life", "train_ddp", [], random.Random(0))
    for nodes, kinds in ((1, {"join", "kill rank"}), (2, set(campaign.WEIGHTS)), (4, set(campaign.WEIGHTS) - {"join"})):
        life.nodes = [None] * nodes
        assert {life.draw() for _ in range(200)} == kinds


def some_events(folder, image_folder, name):
    """A life of three nodes, then two, then one, which is killed; its verdict as a file."""
    script, overrides = campaign.LIVES[name]
    life = campaign.life_of(folder / "life", script, overrides, image_folder, random.Random(0))
    with life.meeting_place():
        for kind in ("join", "join", "join", "leave", "kill node"):
            life.happen(kind)
            life.go_on(3, 200)
        last = life.end()
    (folder / "verdict.json").write_text(json.dumps(campaign.verdict(life, last)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2, micro batches of 2", "ddp, one of three stands by"])
def test_nodes_join_leave_and_die(image_folder, tmp_path, name):
    """From a process that has not computed a gradient, as a tool's is: its forks could compute none."""
    process = fork_context().Process(target=some_events, args=(tmp_path, image_folder, name))
    process.start()
    process.join()
    assert process.exitcode == 0
    found = json.loads((tmp_path / "verdict.json").read_text())
    assert found["wrong"] == []
    stands_by = "stands by" in name
    assert found["starts_by_ranks"].keys() == ({"1", "2"} if stands_by else {"1", "2", "3"})
    assert ("ranks 2 to 2 stand by" in (tmp_path / "life/log.txt").read_text()) == stands_by
