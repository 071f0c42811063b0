"""tools/preemption_matrix.py: what it sends, and what it would call wrong. The matrix itself takes half an hour."""

import json

import pytest

import preemption_matrix as matrix


def test_every_signal_meets_every_phase_and_every_target():
    cells = [cell for cell in matrix.cells(matrix.PHASES) if cell.console == "file"]
    assert len(set(cells)) == len(cells)
    for key, values in (("phase", matrix.PHASES), ("target", ("one rank", "all ranks", "torchrun"))):
        met = {(getattr(cell, key), cell.signal) for cell in cells}
        assert met >= {(value, name) for value in values for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")}, key
    assert {(cell.phase, cell.target) for cell in cells} == {(p, t) for p in matrix.PHASES for t in matrix.TARGETS}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, None),
        ({"seconds": 61.0}, "61 s until all ranks had ended"),
        ({"state": "running"}, "state running"),
        ({"code": 1}, "code 1"),
        ({"target": "torchrun"}, "code 0"),
        ({"log": "stopped after step 6: ...\n"}, "not stopped once, at the step of status.json"),
        ({"log": 2 * "stopped after step 7: ...\n"}, "not stopped once, at the step of status.json"),
        ({"log": "stopped after step 7\n" + 2 * "step 7: saved in 0.1 s\n"}, "step 7 was saved more than once"),
        ({"saved": 6}, "stopped at 7, newest checkpoint"),
        ({"console": f'  File "{matrix.ROOT}/runtime/files.py", line 3, in x\n'}, "a rank ended with a traceback"),
    ],
)
def test_what_is_wrong_with_a_stop(tmp_path, change, wrong):
    found = {"state": "preempted", "saved": 7, "log": "stopped after step 7: ...\n", "console": ""} | change
    (tmp_path / f"run/checkpoints/step_{found['saved']:08d}").mkdir(parents=True)
    (tmp_path / "run/status.json").write_text(json.dumps({"state": found["state"], "step": 7}))
    (tmp_path / "log.txt").write_text(found["console"])
    code, target, seconds = found.get("code", 0), found.get("target", "one rank"), found.get("seconds", 1.0)
    got = matrix.check(tmp_path, code, target, seconds, found["log"])
    assert got == wrong if wrong is None else got.startswith(wrong)
