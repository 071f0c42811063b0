"""slurm.sh and `srun python train_x.py` under a real Slurm: daemons of the test's own, one machine as two nodes.

    pytest -m slurm tests/test_slurm.py        # Debian: apt-get install slurm-wlm munge

The two nodes have names that the machine answers to, its own and localhost, because ranks find each other by node name.
"""

import launch

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, assert_same, read_metrics, weights

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
NODES = (socket.gethostname().split(".")[0], "localhost")
STEPS = 250
RAN = ("train/loss", "train/grad_norm", "train/lr", "val/loss", "val/top1")

needs_slurm = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(any(shutil.which(p) is None for p in PROGRAMS), reason="needs slurm-wlm and munge"),
]

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=1,sched_min_interval=100000
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
MpiDefault=none
GresTypes=gpu
"""


def wait_for(what, condition, seconds=180):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which sbatch, srun and scontrol talk to a Slurm of two nodes, started here."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(mode=0o755)
    (folder / "munge/key").write_bytes(os.urandom(1024))
    (folder / "munge/key").chmod(0o600)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    conf = SLURM_CONF.format(host=NODES[0], port=port, user=getpass.getuser(), folder=folder)
    for i, node in enumerate(NODES):
        conf += f"NodeName={node} NodeHostname={NODES[0]} NodeAddr=127.0.0.1 Port={port + 1 + i} CPUs=16 Gres=gpu:8\n"
    conf += f"PartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=60 State=UP\n"
    (folder / "slurm.conf").write_text(conf)
    for i in range(8):  # Slurm counts GPUs by their device files; any file will do
        (folder / f"gpu{i}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    env = dict(os.environ, SLURM_CONF=str(folder / "slurm.conf"))
    for name in [name for name in env if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"]:
        del env[name]
    munge = [f"--{option}={folder / 'munge' / option.split('-')[0]}" for option in ("socket", "key-file", "pid-file")]
    munge += [f"--log-file={folder / 'munge/log'}", f"--seed-file={folder / 'munge/seed'}"]
    daemons = []
    try:
        # --force: munged warns, instead of refusing, that a test's folder is one that others cannot reach.
        for command in (
            ["munged", "--foreground", "--force", *munge],
            ["slurmctld", "-D"],
            *(["slurmd", "-D", "-N", node] for node in NODES),
        ):
            with open(folder / f"{command[0]}-{command[-1]}.out".replace("/", "_")[-80:], "w") as log:
                daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            if command[0] == "munged":
                wait_for("munge socket", (folder / "munge/socket").exists, 20)

        def idle():
            found = subprocess.run(["sinfo", "-h", "-N", "-o", "%t"], env=env, capture_output=True, text=True)
            return found.stdout.split() == ["idle", "idle"]

        wait_for("idle nodes", idle, 60)
        yield env
    finally:
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=env)
        for daemon in reversed(daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()


class Job:
    """What sbatch was given, and what became of it."""

    def __init__(self, slurm, folder, *arguments, script=ROOT / "slurm.sh", options=("--nodes=2",), **env):
        self.env = slurm | {"OMP_NUM_THREADS": "1", "NPROC_PER_NODE": "1", "VENV": str(folder / "venv")} | env
        self.env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        (folder / "venv/bin").mkdir(parents=True, exist_ok=True)  # this Python's own programs, as a venv has them
        (folder / "venv/bin/activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
        for name in ("train_ddp.py", "train_fsdp2.py"):
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)
        options = ["--gpus-per-node=1", "--cpus-per-gpu=2", f"--output={folder}/log-%j.txt", "--time=10", *options]
        command = ["sbatch", "--parsable", *options, str(script), *arguments]
        done = subprocess.run(command, cwd=folder, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()
        self.folder = folder
        self.log_file = folder / f"log-{self.id}.txt"

    def field(self, name):
        shown = subprocess.run(["scontrol", "show", "job", self.id], env=self.env, capture_output=True, text=True)
        return re.search(rf"\b{name}=(\S+)", shown.stdout)[1]

    def log(self):
        return self.log_file.read_text() if self.log_file.exists() else ""

    def wait(self, seconds=300):
        """Until it is over; returns Slurm's word for how it ended. Its log is printed, without the steps' lines."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        state = None
        try:
            state = wait_for("end", lambda: (now := self.field("JobState")) in over and now, seconds)
            return state
        finally:
            text = self.log().replace(f"{self.folder}/", "").replace(f"{ROOT}/", "").replace(sys.prefix, "")
            print(f"job {self.id}: {state}, {self.field('Restarts')} restarts, exit code {self.field('ExitCode')}")
            print("\n".join(line[:200] for line in text.splitlines() if "  loss " not in line))


def status(folder):
    return json.loads((folder / "status.json").read_text())


def overrides(image_folder, output_dir):
    more = [f"num_train_steps={STEPS}", "evaluation.every_n_steps=50", "data.num_workers=1"]
    return [*TINY, *more, f"data.path={image_folder}", f"output_dir={output_dir}"]


@pytest.fixture(scope="module")
def straight(slurm, image_folder, tmp_path_factory):
    """A run of FSDP2 over two nodes that nobody disturbs."""
    folder = tmp_path_factory.mktemp("straight")
    job = Job(slurm, folder, "train_fsdp2.py", *overrides(image_folder, "run"))
    return job, job.wait()


class TestSlurm:
    pytestmark = needs_slurm

    def test_two_nodes_train_one_run_to_its_end(self, straight):
        job, end = straight
        assert end == "COMPLETED", job.log()
        assert status(job.folder / "run")["state"] == "finished"
        assert job.field("NumNodes") == "2"
        assert len(re.findall(r"2 processes on", job.log())) == 1
        assert sorted(read_metrics(job.folder / "run")) == list(range(1, STEPS + 1))

    def test_signalled_requeued_and_resumed_leaves_no_trace(self, slurm, straight, image_folder, tmp_path):
        """What Slurm does before the time limit, by scancel; the default folder is the job's name."""
        arguments = [a for a in overrides(image_folder, "") if not a.startswith("output_dir")]
        job = Job(slurm, tmp_path, "train_fsdp2.py", *arguments, options=["--nodes=2", "--job-name=large"])
        run = tmp_path / "runs/large"
        wait_for("first steps", lambda: (run / "metrics.jsonl").exists() and len(read_metrics(run)) > 5)
        subprocess.run(["scancel", "--signal=USR1", "--batch", job.id], env=job.env, check=True)
        wait_for("stop", lambda: status(run)["state"] == "preempted")
        step = status(run)["step"]
        assert 5 < step < STEPS
        saved = json.loads((run / f"checkpoints/step_{step:08d}/state.json").read_text())
        assert job.wait() == "COMPLETED", job.log()
        assert job.field("Restarts") == "1"
        log = job.log()
        assert len(re.findall(rf"stopped after step {step}: a rank received SIGUSR1", log)) == 1
        assert len(re.findall(rf"resumed from \S+ \(step {step}\)", log)) == 1
        assert "start 1" in log
        newest = json.loads((run / f"checkpoints/step_{STEPS:08d}/state.json").read_text())
        assert newest["run_id"] == saved["run_id"]  # wandb's id
        got, want = read_metrics(run), read_metrics(straight[0].folder / "run")
        assert {k: [v.get(key) for key in RAN] for k, v in got.items()} == {
            k: [v.get(key) for key in RAN] for k, v in want.items()
        }
        assert_same(weights(run.parent, run.name), weights(straight[0].folder, "run"))

    def test_time_limit_ends_in_a_requeue(self, slurm, image_folder, tmp_path):
        """--signal before a real time limit of one minute; the second start ends by itself."""
        arguments = [*overrides(image_folder, "run"), "num_train_steps=100000", "logger.frequency=50"]
        options = ["--nodes=1", "--time=1", "--signal=B:USR1@15"]
        job = Job(slurm, tmp_path, "train_ddp.py", *arguments, options=options)
        wait_for("stop", lambda: "start 0" in job.log(), 150)
        assert status(tmp_path / "run")["state"] == "preempted"
        step = status(tmp_path / "run")["step"]
        assert step > 0
        wait_for("second start", lambda: f"(step {step})" in job.log(), 150)
        subprocess.run(["scancel", job.id], env=job.env, check=True)
        assert job.wait() == "CANCELLED"
        assert job.field("Restarts") == "1"

    def test_a_failing_job_says_why_first_and_fails(self, slurm, image_folder, tmp_path):
        """One rank meets a file that is no image; what the other then complains about comes after that."""
        data = shutil.copytree(image_folder, tmp_path / "images")
        min((data / "train/class_a").iterdir()).write_bytes(b"no image")
        started = time.monotonic()
        job = Job(slurm, tmp_path, "train_ddp.py", *overrides(data, "run"))
        assert job.wait() == "FAILED"
        assert time.monotonic() - started < 120
        assert job.field("ExitCode").startswith("1:")
        assert status(tmp_path / "run")["state"] == "failed"
        log = job.log()
        others = re.search(r"Connection (closed|reset)|[Gg]loo", log)
        assert 0 < log.find("cannot read") < (others.start() if others else len(log)), log
        assert job.field("Restarts") == "0"

    def test_a_mistake_is_not_requeued(self, slurm, tmp_path):
        """Not even where an earlier start left `preempted` behind."""
        (tmp_path / "run").mkdir()
        (tmp_path / "run/status.json").write_text('{"state": "preempted", "step": 3, "time": ""}\n')
        job = Job(slurm, tmp_path, "train_ddp.py", "optimzer.lr=1", "output_dir=run", options=["--nodes=1"])
        assert job.wait() == "FAILED"
        assert job.field("Restarts") == "0"
        assert len(re.findall("^error: unknown key optimzer.lr", job.log(), re.MULTILINE)) == 1

    def test_srun_without_torchrun_is_one_run_of_all_tasks(self, slurm, straight, image_folder, tmp_path):
        """Bit for bit the run under torchrun: DDP and FSDP2 agree at two processes."""
        command = ["srun", "--nodes=2", "--ntasks=2", "--time=10", sys.executable, ROOT / "train_ddp.py"]
        env = slurm | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*map(str, command), *overrides(image_folder, tmp_path / "run")], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert len(re.findall("2 processes on", done.stderr)) == 1
        assert_same(weights(tmp_path, "run"), weights(straight[0].folder, "run"))

    def test_a_batch_script_without_srun_is_one_process(self, slurm, image_folder, tmp_path):
        script = tmp_path / "script.sh"
        script.write_text(f'#!/bin/bash\n{sys.executable} {ROOT / "train_ddp.py"} "$@"\n')
        arguments = [*overrides(image_folder, "run"), "num_train_steps=2"]
        job = Job(slurm, tmp_path, *arguments, script=script, options=["--nodes=1", "--ntasks=2"])
        assert job.wait() == "COMPLETED", job.log()
        assert len(re.findall("1 processes on", job.log())) == 1


# Without Slurm: what the script and the entrypoints make of their surroundings


@pytest.fixture
def slurm_sh(tmp_path):
    """A function: arguments, variables -> what slurm.sh did, with programs in place of Slurm's.

    srun notes its arguments, runs what composes the config (or does INSTEAD), and leaves a run's status
    behind: STATE in RUN.
    """
    (tmp_path / "bin").mkdir()
    for name, text in {
        "srun": """echo "srun $*" >> srun.txt
while [[ $1 == -* ]]; do shift; done
[[ $1 == apptainer ]] && shift 4
case $1 in
  python) [[ $INSTEAD ]] && eval "$INSTEAD" || exec "$@" ;;
  *) mkdir -p "$RUN"; echo "{\\"state\\": \\"$STATE\\", \\"step\\": 1}" > "$RUN/status.json" ;;
esac""",
        "scontrol": "[ $1 = show ] && printf 'n7\\nn8\\n' || echo requeued",
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin/activate").touch()
    (tmp_path / "train_ddp.py").symlink_to(ROOT / "train_ddp.py")

    def start(*arguments, **env):
        env = {
            "PATH": os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": str(tmp_path / "home"),
            "VENV": str(tmp_path),
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "n[7-8]",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NAME": "vit",
            "SLURM_RESTART_COUNT": "1",
            "INSTEAD": "",
            "RUN": "run",
            "STATE": "finished",
        } | env
        (tmp_path / "srun.txt").unlink(missing_ok=True)
        command = ["bash", "-c", 'SLURM_SH=$$ exec "$0" "$@"', ROOT / "slurm.sh", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    return start


@pytest.mark.parametrize(
    ("container", "step", "inside"),
    [
        ("", "srun --kill-on-bad-exit=0 ", ""),
        ("vit.sif", "srun --kill-on-bad-exit=0 ", "apptainer exec --nv vit.sif "),
        (
            "registry#vit:1",
            "srun --kill-on-bad-exit=0 --container-image=registry#vit:1 --container-workdir={home} "
            "--container-mounts={home}:{home},/data:/data ",
            "",
        ),
    ],
)
def test_where_slurm_sh_runs_torchrun(slurm_sh, tmp_path, container, step, inside):
    env = {"CONTAINER": container, "CONTAINER_MOUNTS": "/data:/data", "INSTEAD": "echo run"}
    done = slurm_sh("train_ddp.py", "seed=1", "output_dir=run", **env)
    assert done.returncode == 0, done.stderr
    step = step.format(home=tmp_path)
    arguments = "train_ddp.py output_dir='runs/vit' seed=1 output_dir=run checkpoint.resume_from_checkpoint=true"
    asked, said = (tmp_path / "srun.txt").read_text().splitlines()
    assert asked.startswith(f"{step}--nodes=1 --ntasks=1 {inside}python {arguments} --cfg job")
    assert said.startswith(f"{step}{inside}torchrun --nnodes 2 ")
    assert "--nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint n7:23456 --rdzv-id 123456.1 train_ddp.py" in said
    assert said.endswith(arguments)


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (("output_dir=a", "seed=1", "++output_dir=b", "--config-name", "cifar10_vit"), "b"),
        pytest.param((), "runs/lr=1e-3", marks=pytest.mark.slow),  # the job's name
        pytest.param(("output_dir='runs/lr=1'", "seed=1"), "runs/lr=1", marks=pytest.mark.slow),
        pytest.param(("output_dir='~/c'",), "home/c", marks=pytest.mark.slow),
        pytest.param(("output_dir=d/${seed}", "seed=7"), "d/7", marks=pytest.mark.slow),
    ],
)
def test_slurm_sh_looks_where_the_run_writes(slurm_sh, arguments, folder):
    """A preempted run goes back into the queue, however its folder was given."""
    done = slurm_sh("train_ddp.py", *arguments, RUN=folder, STATE="preempted", SLURM_JOB_NAME="lr=1e-3")
    first, last = done.stdout.splitlines()
    assert first.endswith(f"{folder}: preempted, exit code 0, start 1"), done.stderr
    assert last == "requeued"


def test_slurm_sh_is_requeued_if_signalled_before_the_run_starts(slurm_sh):
    """While the config is composed there is nothing to stop; a signal must not lose the job."""
    done = slurm_sh("train_ddp.py", INSTEAD="kill -USR1 $SLURM_SH")
    assert done.stdout == "requeued\n"


@pytest.mark.slow
def test_a_mistake_ends_slurm_sh_before_torchrun(slurm_sh, tmp_path):
    done = slurm_sh("train_ddp.py", "optimzer.lr=1")
    assert (done.returncode, done.stderr) == (2, "error: unknown key optimzer.lr: did you mean optimizer.lr?\n")
    assert "torchrun" not in (tmp_path / "srun.txt").read_text()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n[07-09,12],m1", "n07"), ("gpu-3", "gpu-3"), ("rack[2-3]n[10,12]-ib", "rack2n10-ib"), ("a,b[1-2]", "a")],
)
def test_sruns_variables_become_torchruns(monkeypatch, nodes, first):
    values = {"STEP_NUM_TASKS": 4, "PROCID": 3, "LOCALID": 1, "STEP_NODELIST": nodes, "JOB_ID": 77, "STEP_ID": 2}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    launch.use_srun()
    found = [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    assert found == ["3", "1", "4", first, "20772"]


def test_torchrun_goes_before_srun(monkeypatch):
    """Under srun, torchrun's processes see Slurm's variables, too."""
    for name, value in {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "WORLD_SIZE": "8", "RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    launch.use_srun()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("5", "8")


def test_signals_are_two():
    """slurm.sh sends what the ranks listen to, and tells torchrun to pass it on."""
    from runtime import preemption

    text = (ROOT / "slurm.sh").read_text()
    assert signal.SIGUSR1 in preemption.SIGNALS
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+", text, re.MULTILINE)
    assert re.search(r"PET_SIGNALS_TO_HANDLE=\S*SIGTERM\S*SIGUSR1", text)
