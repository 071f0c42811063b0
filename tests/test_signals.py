"""Ctrl-C and a closed terminal stop a run as SIGTERM does: it saves, and says `preempted`."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, read_metrics

from runtime.step_folders import step_folders


@pytest.mark.parametrize(
    ("number", "script", "nproc"),
    [
        (signal.SIGINT, "train_ddp", None),
        pytest.param(signal.SIGHUP, "train_fsdp2", None, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "train_fsdp2", 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "train_ddp", 2, marks=pytest.mark.slow),
    ],
)
def test_the_whole_process_group_is_signalled_and_nothing_is_lost(number, script, nproc, tiny, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc else []
    command = [sys.executable, *torchrun, f"{script}.py", *tiny, "num_train_steps=100000", "data.num_workers=1"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    run = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "run/metrics.jsonl").exists() or len(read_metrics(tmp_path / "run")) < 3:
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(0.1)
        os.killpg(run.pid, number)  # as the terminal does: torchrun, ranks and loader workers
        _, errors = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert nproc or run.returncode == 0, errors
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["state"] == "preempted"
    assert list(step_folders(tmp_path / "run/checkpoints")) == [status["step"]] == [max(read_metrics(tmp_path / "run"))]
    assert f"a rank received {number.name}" in errors
    assert nproc or "Traceback" not in errors


def ended(code, **environment):
    """How a process ends that listens, without torch."""
    start = "import os, signal, time\nfrom runtime import preemption\npreemption.listen()\n"
    interrupt = "os.kill(os.getpid(), signal.SIGINT)\n"
    code = start + code.replace("INTERRUPT", interrupt)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ, **environment)).returncode


def test_a_second_ctrl_c_ends_at_once():
    assert ended("INTERRUPT") == 0
    assert ended("INTERRUPTINTERRUPT") == -signal.SIGINT


def test_the_ctrl_c_that_torchrun_hands_on_is_no_second_one():
    assert ended("INTERRUPTINTERRUPT", TORCHELASTIC_RUN_ID="none") == 0
    late = "INTERRUPTpreemption.HANDED_ON_S = 0.1\ntime.sleep(0.2)\nINTERRUPT"
    assert ended(late, TORCHELASTIC_RUN_ID="none") == -signal.SIGINT


def test_nohup_is_honoured():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGHUP); print(preemption._received)"
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\nfrom runtime import preemption\n"
    ignored += f"preemption.listen()\n{code}"
    done = subprocess.run([sys.executable, "-c", ignored], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n")
