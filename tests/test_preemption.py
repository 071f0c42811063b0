"""A run that is asked to stop: real signals to real ranks. Signal x target x phase: tools/preemption_matrix.py."""

import launch

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import (
    ON_GPU,
    ROOT,
    SCRIPTS,
    TINY,
    assert_same,
    column,
    read_metrics,
    run_command,
    run_tasks,
    started_once,
    weights,
)

from runtime import preemption
from runtime.process_group import dist_session

RAN = ("train/loss", "train/grad_norm", "train/lr", "val/loss", "val/top1", "val/top5")
# A life: hook of the start, and how it must end: state, step, checkpoints -> whether the score is missing.
LIFE = [
    ("sigterm_to_rank_1_before_the_first_step", "preempted", 0, {}),
    ("sigusr1_to_rank_1_in_the_first_step", "preempted", 2, {"2": False}),  # asked about at 2, answered at 3
    ("sigterm_to_all_in_the_first_evaluation", "preempted", 3, {"2": False, "3": True}),
    (None, "finished", 4, {"3": False, "4": False}),  # cut short by the config
    ("two_signals_to_rank_0_in_the_first_save", "preempted", 6, {"4": False, "6": False}),
    (None, "finished", 9, {"6": False, "9": False}),
]


def _live(scripts, image_folder, folder, *overrides):
    """Of all scripts, in one set of two processes: a run straight, and one that is stopped again and again."""
    tasks = []
    for script in scripts:
        base = [*TINY, f"data.path={image_folder}", "evaluation.every_n_steps=3", "checkpoint.save_every_n_steps=6"]
        base += ["lr_scheduler.num_training_steps=9", "evaluation.best_metric=val/loss", "optimizer.lr=1e-4"]
        base += ["micro_batch_size=3", *overrides]
        straight = [*base, "num_train_steps=9", f"output_dir={folder / script}-straight"]
        tasks.append({"name": f"{script}-straight", "script": script, "overrides": straight})
        for number, (hook, _, step, _) in enumerate(LIFE):
            length = 4 if step == 4 else 9
            life = [*base, f"num_train_steps={length}", f"output_dir={folder / script}-life"]
            task = {"name": f"{script}-{number}", "script": script, "overrides": life, "look": True}
            tasks.append(task | ({"before": hook} if hook else {}))
    return run_tasks(tasks, nproc=2, folder=folder, timeout=400), folder


@pytest.fixture(scope="module")
def lives(image_folder, tmp_path_factory):
    """A function: (on the CPU or on two GPUs, script) -> (outcomes, folder); on GPUs all scripts start together."""

    @started_once
    def start(scripts):
        folder = tmp_path_factory.mktemp("lives")
        if len(scripts) == 1:
            return _live(scripts, image_folder, folder)
        small = [item for item in ON_GPU if not item.startswith(("global_batch_size", "evaluation"))]
        return _live(scripts, image_folder, folder, *small, "data.num_workers=2")

    return lambda place, script: start((script,) if place == "cpu" else SCRIPTS)


GPUS = [pytest.mark.multi_gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]
PLACES = [("cpu", "train_ddp")]
PLACES += [pytest.param("cpu", script, marks=pytest.mark.slow) for script in ("train_fsdp2", "train_mfsdp")]
PLACES += [pytest.param("gpu", script, marks=GPUS) for script in SCRIPTS]


@pytest.mark.parametrize(("place", "script"), PLACES)
@pytest.mark.parametrize("number", range(len(LIFE)))
def test_all_ranks_stop_at_one_step_and_save_it(lives, place, script, number):
    """In the start, in a step, in an evaluation (whose score the next start adds) and in a save."""
    _, state, step, saved = LIFE[number]
    outcomes, _ = lives(place, script)
    left = outcomes[f"{script}-{number}"][0]["metrics"]  # as rank 0, who writes it, found it when it was done
    assert (left["status"]["state"], left["status"]["step"]) == (state, step)
    assert {key: left["saved"][key] for key in left["saved"] if key in saved} == saved
    assert max(map(int, left["saved"]), default=0) == step
    for key, scores in left["scores"].items():
        assert (scores is not None) == (int(key) in (3, 4, 6, 9) and not left["saved"][key])


@pytest.mark.parametrize(("place", "script"), PLACES)
def test_stopped_and_resumed_is_straight(lives, place, script):
    """Every loss, score and weight, on the CPU bit for bit; each step was saved once."""
    _, folder = lives(place, script)
    straight, life = read_metrics(folder / f"{script}-straight"), read_metrics(folder / f"{script}-life")
    del life[4]["val/loss"], life[4]["val/top1"], life[4]["val/top5"]  # the last step of the run that was cut short
    for key in RAN:
        was, is_now = ({step: lines[step].get(key) for step in lines} for lines in (straight, life))
        if place == "cpu":
            assert is_now == was
        elif "top" not in key:
            assert is_now == pytest.approx(was, rel=1e-2)
    if place == "cpu":
        assert_same(weights(folder, f"{script}-life"), weights(folder, f"{script}-straight"))
    state = json.loads((folder / f"{script}-life/checkpoints/step_00000009/state.json").read_text())
    assert state["scores"] == {key: life[9][key] for key in (*RAN[3:], "val/images")}
    log = (folder / f"{script}-life/train.log").read_text()
    for step in (2, 3, 4, 6, 9):
        assert log.count(f"step {step}: saved in") == 1, log
    assert log.count("stopped after step") == 4


def test_handlers_are_put_back_and_nothing_is_noted(tiny, tmp_path):
    """A process that trains and goes on (a notebook, a test) gets its own handlers back."""
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    cfg = launch.load_config("L0_sanity", tiny)
    for state in ("preempted", "finished"):
        with dist_session(cfg) as session:
            assert not session.stop.agreed()
            if state == "preempted":
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGTERM)
            assert session.stop.agreed() == (state == "preempted")
        assert json.loads((tmp_path / "run/status.json").read_text())["state"] == state
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == before


def _work(connection):
    preemption.shield(0, rank=os.getppid())
    connection.send("ready")
    time.sleep(60)


def test_a_worker_ends_by_its_rank_and_by_nobody_else():
    """What torchrun and Slurm send passes a worker by; multiprocessing's SIGTERM, when its rank fails, ends it."""
    ours, its = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=_work, args=(its,), daemon=True)
    worker.start()
    assert ours.recv() == "ready"
    for name in ("TERM", "USR1", "TERM"):
        subprocess.run(["sh", "-c", f"kill -{name} {worker.pid}"], check=True)
    worker.join(0.3)
    assert worker.is_alive()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0


def test_signals_from_the_first_line_on(image_folder, tmp_path):
    """Plain python: before torch is imported, to the process and its children; nothing is lost, the code is 0."""
    overrides = [*TINY, f"data.path={image_folder}", f"output_dir={tmp_path / 'run'}", "data.num_workers=1"]
    process = subprocess.Popen([sys.executable, "train_ddp.py", *overrides], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    # Bit 9 of the caught signals is SIGUSR1: launch.py listens.
    while not int(Path(f"/proc/{process.pid}/status").read_text().split("SigCgt:")[1].split()[0], 16) >> 9 & 1:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "preempted"
    assert "stopped after step 0: a rank received SIGUSR1" in err.decode()


def test_other_programs_that_import_launch_keep_their_signals():
    """A test or a tool ends by SIGTERM as ever."""
    code = "import launch, signal; assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_alone_no_group_is_needed(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with preemption.listening():
        stop = preemption.Stop(timedelta(seconds=1))
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed()
        assert stop.signal is signal.SIGTERM
        stop.close()


@pytest.mark.parametrize(
    ("nodes", "restarts", "asked", "left"),
    [(2, (0, 3), False, True), (2, (3, 3), False, False), (2, (0, 0), False, False), (1, (0, 3), False, False),
     (2, (0, 3), True, False)],
)  # fmt: skip
def test_another_node_left_where_torchrun_would_go_on_without_it(monkeypatch, nodes, restarts, asked, left):
    """Not where this rank was asked, too: a moment later, as when a node joins and each torchrun sees it for itself."""
    monkeypatch.setattr(preemption, "ALL_TOLD_S", 60.0 if asked else 0.2)
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
    for name, value in zip(("RESTART_COUNT", "MAX_RESTARTS"), restarts, strict=True):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", str(value))
    with preemption.listening():
        if asked:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        assert preemption.another_node_left() == left


# Minutes: torchrun's own restarts, and two nodes


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# When one of two torchruns has ended, the other waits for it, for 300 seconds that none of its options changes.
IMPATIENT = """
from torch.distributed import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

defaults = LocalElasticAgent.__init__.__defaults__
assert defaults.count(300) == 1
LocalElasticAgent.__init__.__defaults__ = tuple(20 if value == 300 else value for value in defaults)
run.main()
"""


@pytest.fixture(scope="module")
def straight(image_folder, tmp_path_factory):
    """A function: script -> the folder of a run of two processes that nobody disturbs."""

    def start(script):
        folder = tmp_path_factory.mktemp(script)
        done = run_command([f"{script}.py", *long_run(image_folder, folder)], nproc=2)
        assert done.returncode == 0, done.stderr
        return folder

    return started_once(start)


def long_run(image_folder, folder):
    more = ["num_train_steps=300", "checkpoint.save_every_n_steps=20", "data.num_workers=1"]
    return [*TINY, f"data.path={image_folder}", f"output_dir={folder / 'run'}", *more]


def environment(**more):
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=paths, **more)


def reached(folder, step, processes):
    """Wait until the run has logged that step."""
    deadline = time.monotonic() + 200
    while not ((folder / "run/metrics.jsonl").exists() and f'"step": {step},' in _text(folder / "run/metrics.jsonl")):
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)


def _text(path):
    return path.read_text()


def ranks_of(torchrun):
    """Rank -> process id, of torchrun's children."""
    found = {}
    for child in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split():
        with contextlib.suppress(OSError, StopIteration):
            values = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found[int(next(v for v in values if v.startswith(b"RANK="))[5:])] = int(child)
    return found


def assert_identical(folder, other):
    for key in ("train/loss", "train/grad_norm", "train/lr"):
        assert column(folder, "run", key) == column(other, "run", key)
    assert_same(weights(folder, "run"), weights(other, "run"))


@pytest.mark.slow
@pytest.mark.parametrize(("script", "rank"), [("train_ddp", 0), ("train_fsdp2", 1)])
def test_a_killed_rank_restarts_the_job(straight, image_folder, tmp_path, script, rank):
    """torchrun --max-restarts 1; the second attempt goes on from the last checkpoint."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", f"{script}.py"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [*command, *long_run(image_folder, tmp_path)], cwd=ROOT, env=environment(), stdout=log, stderr=log
        )
    reached(tmp_path, 50, [process])
    os.kill(ranks_of(process)[rank], signal.SIGKILL)
    assert process.wait(300) == 0, _text(tmp_path / "log")[-6000:]
    assert "resumed from" in _text(tmp_path / "log")
    assert json.loads(_text(tmp_path / "run/status.json"))["state"] == "finished"
    assert_identical(tmp_path, straight(script))


@pytest.mark.slow
@pytest.mark.parametrize(("script", "signalled"), [("train_ddp", 1), ("train_fsdp2", 0)])
def test_two_nodes_on_one_machine(straight, image_folder, tmp_path, script, signalled):
    """Two torchruns, a rank each: one torchrun gets SIGTERM, all stop; the same two commands then go to the end."""

    def start(port):
        processes = []
        for node in (0, 1):
            rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", str(port)]
            command = [sys.executable, "-c", IMPATIENT, *rendezvous, "--nnodes", "2", "--nproc-per-node", "1"]
            with open(tmp_path / f"log-{node}-{port}", "w") as log:
                arguments = [*command, f"{script}.py", *long_run(image_folder, tmp_path)]
                processes.append(subprocess.Popen(arguments, cwd=ROOT, env=environment(), stdout=log, stderr=log))
        return processes

    ports = [29500 + os.getpid() % 1000 + 2 * i for i in (0, 1)]
    processes = start(ports[0])
    reached(tmp_path, 50, processes)
    processes[signalled].send_signal(signal.SIGTERM)
    codes = [process.wait(400) for process in processes]
    assert codes[signalled] == 1
    assert json.loads(_text(tmp_path / "run/status.json"))["state"] == "preempted"
    processes = start(ports[1])
    codes = [process.wait(400) for process in processes]
    assert codes == [0, 0], _text(tmp_path / f"log-0-{ports[1]}")[-4000:]
    assert_identical(tmp_path, straight(script))
