"""tools/compare_torchdata.py: what it compares, without torchdata, which is not among the requirements."""

import sys

import pytest

import compare_torchdata


def test_without_torchdata_it_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torchdata", None)
    monkeypatch.setattr(sys, "argv", ["compare_torchdata.py", "--output", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit) as raised:
        compare_torchdata.main()
    assert raised.value.code == 2
    assert capsys.readouterr().err == "error: torchdata is not installed: pip install torchdata\n"


def test_a_stream_is_the_same_only_at_its_own_step(tmp_path):
    """What is asked of both loaders would find a stream that is one step off."""

    def make(**now):
        return compare_torchdata.Ours(str(tmp_path), **now)

    straight = make(ranks=1, workers=0).batches(5, [])
    want = [compare_torchdata.step_of(straight) for _ in range(2)]
    assert compare_torchdata.is_same(make, 5, {"ranks": 2, "workers": 0}, [], want) is True
    assert compare_torchdata.is_same(make, 6, {"ranks": 1, "workers": 0}, [], want) is False
