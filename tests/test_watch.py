"""Who is named when a rank hangs, and what is not taken for a hang. tools/hang_campaign.py does it with real runs."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import ROOT, read_metrics, session_of

from runtime import watch
from runtime.watch import Beat, Watch, blamed, slow


def beat(**changes):
    values = {"number": 1, "host": "a", "pid": 7, "phase": "training", "step": 5, "count": 20, "where": "trainer.py:1"}
    values |= {"still_s": 0.0, "waits": False, "is_stuck": False, "busy": {}, "looks": 0}
    return Beat(**(values | changes))


WAITING = {"waits": True, "is_stuck": True}


@pytest.mark.parametrize(
    ("beats", "silent_s", "named"),
    [
        ([{}, {}, {}], [1, 1, 1], []),
        ([WAITING, {}, WAITING], [1, 99, 1], [1]),  # stopped, and the others wait for it
        ([WAITING, {}, {}], [1, 99, 98], [1, 2]),
        ([WAITING, WAITING, {"is_stuck": True}], [1, 1, 1], [2]),  # its loader is
        ([WAITING, {}, WAITING], [1, 1, 1], []),  # it computes: others may wait for it
        ([{"is_stuck": True, "count": 30}, {"is_stuck": True}], [1, 1], [1]),  # the one that has come less far
        ([WAITING, WAITING], [1, 1], [0, 1]),  # nobody else is to blame
        ([WAITING, {"is_over": True}], [1, 99], []),  # it is done: the error that ended it has been told
    ],
)
def test_who_is_blamed(beats, silent_s, named):
    assert blamed([beat(**changes) for changes in beats], silent_s, 20) == named


def test_a_slow_rank_is_the_one_that_others_wait_for():
    def works(training, waiting=0):
        return beat(busy={"training": training, "waiting": waiting}, looks=watch.WINDOW)

    assert slow([works(60), works(62), works(55)], 1.5) == {}
    assert slow([works(60), works(30), works(30)], 1.5) == {0: (2.0, "training")}
    assert slow([works(30), works(20, 70), works(30)], 1.5) == {1: (3.0, "waiting")}
    assert slow([works(13), works(8), works(8)], 1.5) == {}  # nobody waits for long
    assert slow([works(60), beat(looks=3)], 1.5) == {}  # not long enough to tell
    assert slow([works(60)], 1.5) == {}


def frame_of(work):
    """The frame of a thread in the middle of `work`, which must not return by itself."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.3)
    return sys._current_frames()[thread.ident]


def test_who_waits_for_others_and_where():
    release = threading.Event()
    frame = frame_of(release.wait)
    assert not watch.waits_for_others(frame)
    assert re.fullmatch(r"python[\d.]+/threading\.py:\d+ \(wait\)", watch.line_of(frame))
    here = frame_of(lambda: time.sleep(3))
    assert re.fullmatch(r"tests/test_watch\.py:\d+ \(<lambda>\)", watch.line_of(here))
    collective = compile("def f():\n release.wait()\nf()", f"{watch.TORCH_DIR}/distributed/distributed_c10d.py", "exec")
    caller = frame_of(lambda: exec(collective, {"release": release})).f_back
    while not caller.f_code.co_filename.endswith("distributed_c10d.py"):
        caller = caller.f_back
    assert watch.waits_for_others(caller)
    assert ", in distributed/distributed_c10d.py:2 (f)" in watch.line_of(caller)
    release.set()


@pytest.fixture
def quick(monkeypatch):
    """A watch that does not wait long, and whose end is noted, not done."""
    ended = []
    for name, value in (("SAMPLE_S", 0.02), ("BEAT_S", 0.05), ("CONFIRM_S", 0.1)):
        monkeypatch.setattr(watch, name, value)

    def leave(code):
        ended.append(code)
        raise RuntimeError("the watch's thread ends here")

    monkeypatch.setattr(watch.os, "_exit", leave)
    monkeypatch.setattr(watch.multiprocessing, "active_children", list)  # they are other tests'
    return ended


def watched(session, store=None, timeout_s=0.5):
    one = Watch(session, store, hang_timeout_s=timeout_s, slow_rank_factor=None)
    one.start()
    return one


def test_a_loop_that_stands_still_ends_the_run_and_says_where(tmp_path, quick, capsys):
    session = session_of(tmp_path)
    session.phases.place(0, None)
    session.phases.begin("waiting")
    session.phases.step = 7
    one = watched(session)
    one.threads[0].join(5)
    assert quick == [1]
    line = capsys.readouterr().err.strip()
    assert re.fullmatch(
        r"error: rank 0 \(\S+, process \d+\) hangs for \d+ s in waiting, step 7, at tests/test_watch\.py:\d+ "
        r"\(test_a_loop_that_\w+\), in python[\d.]+/threading\.py:\d+ \(\w+\); stacks of all ranks in \S+/stacks; "
        r"the key is distributed\.hang_timeout_s=0\.5",
        line,
    )
    assert line in (tmp_path / "train.log").read_text()
    assert "test_watch.py" in (tmp_path / "stacks/rank_0000.txt").read_text()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


def compute(end):
    while time.monotonic() < end:
        pass


def write(end, path):
    with open(path, "wb", buffering=0) as file:
        while time.monotonic() < end:
            file.write(bytes(50_000))
            time.sleep(0.05)


@pytest.mark.parametrize(
    "sign", ["progress", "computes", "writes", "a loader computes", "allowance", "starting", "null"]
)
def test_what_is_no_hang(sign, tmp_path, quick):
    session = session_of(tmp_path)
    if sign != "starting":
        session.phases.begin("training")
    one = watched(session, timeout_s=None if sign == "null" else 0.5)
    end = time.monotonic() + 1.5
    if sign == "progress":
        while time.monotonic() < end:
            time.sleep(0.1)
            session.phases.tick()
    elif sign == "computes":
        compute(end)
    elif sign == "writes":
        write(end, tmp_path / "file")
    elif sign == "a loader computes":
        code = "import time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"
        subprocess.run([sys.executable, "-c", code])
    elif sign == "allowance":
        with session.phases.during("saving", 2.0):
            time.sleep(1.5)
    else:
        time.sleep(1.5)
    one.close()
    assert quick == []


def test_a_rank_that_tells_nothing_is_named_by_the_others(tmp_path, quick, capsys):
    """Rank 0 is silent after one beat: the last rank decides. Rank 1, which does not, hears of it."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store.set("watch/0", json.dumps(vars(beat(phase="saving", step=3))))
    sessions = [session_of(tmp_path, rank=rank, world_size=3) for rank in (1, 2)]
    for session in sessions:
        session.phases.begin("training")
    ended = [watched(session, store) for session in sessions]
    for _ in range(100):
        for session in sessions:
            session.phases.tick()
        if len(quick) == 2:
            break
        time.sleep(0.05)
    for one in ended:
        one.over.set()
    assert quick == [1, 1]
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(
        "error: rank 0 (a, process 7) tells nothing for 1 s, last in saving, step 3, at trainer.py:1;"
    )
    assert {path.name for path in (tmp_path / "stacks").iterdir()} == {"rank_0001.txt", "rank_0002.txt"}


@pytest.mark.slow
def test_a_stopped_rank_under_torchrun(tiny, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train_fsdp2.py"]
    command += [*tiny, "num_train_steps=100000", "distributed.hang_timeout_s=5"]
    environment = dict(os.environ, OMP_NUM_THREADS="1", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "run/metrics.jsonl").exists() or len(read_metrics(tmp_path / "run")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ranks = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout.split()
        environments = {int(pid): Path(f"/proc/{pid}/environ").read_text() for pid in ranks}
        of = {int(text.split("\0RANK=")[1].split("\0")[0]): pid for pid, text in environments.items()}
        os.kill(of[0], signal.SIGSTOP)
        _, errors = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            run.kill()
    assert run.returncode == 1
    (line,) = re.findall("^error: .*", errors, re.MULTILINE)
    assert f"rank 0 ({os.uname().nodename}, process {of[0]}) tells nothing for" in line
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "failed"
