"""launchers/: what each file says, the environment that its platform gives, and one run that goes through all of them.

    pytest -m "slow or slurm" tests/test_launchers.py      # starts Ray and Slurm of its own, where they are installed

No test talks to a cluster: Kubernetes and SkyPilot are their published models and the variables that they set.
"""

import launch

import ast
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, TINY, assert_same, read_metrics, run_command, weights
from test_slurm import Job, needs_slurm, slurm, wait_for  # noqa: F401  (slurm: a fixture)

FOLDER = ROOT / "launchers"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
STEPS = 600  # more than pass until a signal has stopped the run, in each of four starts


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def jobset_spec(name):
    """The JobSet's part of jobset.yaml, or of the runtime in trainjob.yaml."""
    spec = documents(name)[-1]["spec"]
    return spec["template"]["spec"] if name == "trainjob.yaml" else spec


def job_spec(name):
    (job,) = jobset_spec(name)["replicatedJobs"]
    assert job["name"] == "node"
    return job["template"]["spec"]


def container(name):
    (found,) = job_spec(name)["template"]["spec"]["containers"]
    return found


def literal_variables(name):
    """What the file itself sets; not what Kubernetes knows only then."""
    return {each["name"]: each["value"] for each in container(name)["env"] if "value" in each}


POD_FILES = ("jobset.yaml", "trainjob.yaml")
SKYPILOT = documents("skypilot.yaml")[0]


# What the files say


def test_each_is_short_and_free_of_syntax_errors():
    files = sorted(FOLDER.iterdir())
    names = [file.name for file in files if file.is_file()]
    assert names == ["jobset.yaml", "ray_train.py", "skypilot.yaml", "trainjob.yaml"]
    for name in names:
        text = (FOLDER / name).read_text()
        assert len(text.splitlines()) <= 60, name
        assert max(map(len, text.splitlines())) <= 120, name
        if name.endswith(".py"):
            ast.parse(text)
        else:
            assert documents(name)
    scripts = [container(name)["command"][2] for name in POD_FILES] + [SKYPILOT["setup"], SKYPILOT["run"]]
    for script in scripts:
        done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), script


def example(name):
    """The arguments that a launcher shows."""
    if name == "jobset.yaml":
        return container(name)["args"]
    if name == "trainjob.yaml":
        return documents(name)[0]["spec"]["trainer"]["args"]
    if name == "skypilot.yaml":
        return shlex.split(SKYPILOT["envs"]["TRAIN"])
    (line,) = re.findall(r"ray_train.py \d+ (train_.*)", (FOLDER / name).read_text())[:1]
    return shlex.split(line)


@pytest.mark.parametrize("name", [*POD_FILES, "skypilot.yaml", "ray_train.py"])
def test_the_example_is_a_run(name, monkeypatch):
    script, *arguments = example(name)
    assert (ROOT / script).is_file()
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    cfg, typed = launch.compose(Path(script).stem, arguments)
    assert cfg.data.path == ("/data/imagenet" if name == "ray_train.py" else "/data")
    assert "output_dir" in typed or name == "ray_train.py"


def test_both_kubernetes_files_start_the_same_pods():
    """But for what Kubeflow adds itself: torchrun's options, the number of nodes, arguments and resources."""
    one, other = (job_spec(name) for name in POD_FILES)
    for spec, name in ((one, "jobset.yaml"), (other, "trainjob.yaml")):
        for key in ("completions", "parallelism", "completionMode"):
            assert (spec.pop(key, None) is None) == (name == "trainjob.yaml"), key
        (pod,) = spec["template"]["spec"]["containers"]
        pod.pop("args", None), pod.pop("resources", None)
        pod["env"] = [each for each in pod["env"] if not each["name"].startswith("PET_")]
    assert one == other
    policies = [jobset_spec(name)["failurePolicy"] for name in POD_FILES]
    assert policies[0] == policies[1]


@pytest.mark.parametrize("name", POD_FILES)
def test_a_pod_has_time_to_save_and_room_for_its_loaders(name):
    job, pod = job_spec(name), job_spec(name)["template"]["spec"]
    to_save = int(literal_variables(name)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert 60 <= to_save < pod["terminationGracePeriodSeconds"]
    assert (pod["restartPolicy"], job["backoffLimit"]) == ("Never", 0)  # the set starts again as a whole
    assert jobset_spec(name)["failurePolicy"]["maxRestarts"] > 0
    mounts = {mount["mountPath"]: mount["name"] for mount in container(name)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    image = (ROOT / "Dockerfile").read_text()
    assert f"{re.search(r'^WORKDIR (.*)', image, re.MULTILINE)[1]}/runs" in mounts  # where output_dir=runs/... is
    user = int(re.search(r"^ARG UID=(\d+)", image, re.MULTILINE)[1])
    assert pod["securityContext"] == {"runAsUser": user, "fsGroup": user}


def test_the_jobsets_numbers_and_names_agree():
    (document,) = documents("jobset.yaml")
    given, job = literal_variables("jobset.yaml"), job_spec("jobset.yaml")
    assert int(given["PET_NNODES"]) == job["completions"] == job["parallelism"]
    name = document["metadata"]["name"]
    assert given["PET_MASTER_ADDR"] == f"{name}-node-0-0.{name}"  # <JobSet>-<replicated job>-<job>-<pod>.<subdomain>
    runtime = documents("trainjob.yaml")[1]["metadata"]["name"]
    assert documents("trainjob.yaml")[0]["spec"]["runtimeRef"]["name"] == runtime


def with_stand_in(folder):
    """A PATH on which torchrun says its arguments, each on a line."""
    (folder / "bin").mkdir()
    (folder / "bin/torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (folder / "bin/torchrun").chmod(0o755)
    return os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])


def test_a_pod_starts_afresh_once(tmp_path):
    arguments = ["train_ddp.py", "output_dir='a b'", "checkpoint.resume_from_checkpoint=false"]
    command, path = [*container("trainjob.yaml")["command"], *arguments], with_stand_in(tmp_path)
    for restart, more in (("0", []), ("1", ["checkpoint.resume_from_checkpoint=true"])):
        done = subprocess.run(command, env={"PATH": path, "RESTART": restart}, capture_output=True, text=True)
        assert done.stdout.splitlines() == [*arguments, *more], done.stderr


def test_skypilots_variables_become_torchruns_options(tmp_path):
    path = with_stand_in(tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    env = {"PATH": path, "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    env |= {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9", "TRAIN": "train_ddp.py output_dir=\"'a b'\" seed=1"}
    done = subprocess.run(["bash", "-c", SKYPILOT["run"]], cwd=tmp_path, env=env, capture_output=True, text=True)
    said = done.stdout.splitlines()
    options, arguments = said[: said.index("train_ddp.py")], said[said.index("train_ddp.py") :]
    wanted = ["--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "8", "--master-addr", "10.0.0.7"]
    assert options == [*wanted, "--master-port", "29400"], done.stderr
    assert arguments == ["train_ddp.py", "output_dir='a b'", "seed=1"]


# The platforms' own models


@pytest.mark.slow
@pytest.mark.parametrize("name", POD_FILES)
def test_kubernetes_knows_each_field(name):
    """A model leaves out what it does not know, and refuses a value of another type."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    classes = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}
    classes["TrainingRuntime"] = models.TrainerV1alpha1TrainingRuntime
    for document in documents(name):
        assert classes[document["kind"]].from_dict(document).to_dict() == document


@pytest.mark.slow
def test_skypilot_takes_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(FOLDER / "skypilot.yaml"))
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators, resources.use_spot) == (2, {"H100": 8}, True)
    assert resources.job_recovery["max_restarts_on_errors"] == 3
    assert task.volumes.keys() == {"/data", "/runs"}


# Real runs


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def ranks_of(run):
    """Rank -> (its parent, itself) of the processes that train in the folder `run`."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if f"output_dir={run}".encode() not in (process / "cmdline").read_bytes().split(b"\0"):
                continue
            rank = re.search(rb"\0RANK=(\d+)\0", (process / "environ").read_bytes())
            parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if rank:  # a launcher has none
                found[int(rank[1])] = int(parent), int(process.name)
    return found


def status(run):
    return json.loads((run / "status.json").read_text())


class Started:
    """Commands that train in the folder `run`, each in its environment; its end prints how it began and stopped."""

    def __init__(self, name, run, *commands, envs=({},), cwd=ROOT):
        self.name, self.run = name, run
        self.before, self.said_before = self.steps(), 0
        self.said_before = len(self.train_log())
        self.log = run.parent / f"{name}.log"
        base = {key: value for key, value in os.environ.items() if not key.startswith(("PET_", "SKYPILOT_", "RAY_"))}
        base |= {"OMP_NUM_THREADS": "1", "PATH": PATH}
        with open(self.log, "w") as log:
            start = functools.partial(subprocess.Popen, cwd=cwd, stdout=log, stderr=log, start_new_session=True)
            pairs = zip(commands, envs, strict=True)
            self.processes = [start([*map(str, command)], env=base | env) for command, env in pairs]

    def steps(self):
        return max(read_metrics(self.run), default=0) if (self.run / "metrics.jsonl").exists() else 0

    def text(self):
        return self.log.read_text()

    def train_log(self):
        """What rank 0 has logged since this start."""
        text = (self.run / "train.log").read_text() if (self.run / "train.log").exists() else ""
        return text[self.said_before :]

    def resumed_at(self):
        """The steps from which its starts went on."""
        return [int(step) for step in re.findall(r"resumed from .*\(step (\d+)\)", self.train_log())]

    def wait_for_steps(self, count, seconds=240):
        def there():
            codes = [process.poll() for process in self.processes]
            assert any(code is None for code in codes), f"{self.name} ended: {codes}\n{self.text()[-3000:]}"
            return self.steps() >= self.before + count

        wait_for(f"step of {self.name}", there, seconds)

    def wait(self, seconds=180):
        """The processes' exit codes."""
        try:
            deadline = time.monotonic() + seconds
            codes = [process.wait(max(1, deadline - time.monotonic())) for process in self.processes]
            wait_for(f"end of {self.name}'s ranks", lambda: not ranks_of(self.run), 60)
            said = re.findall(r".*(?:resumed from|stopped after|done:|processes on).*", self.train_log())
            print(f"{self.name}: exit codes {codes}, {status(self.run)['state']} at step {status(self.run)['step']}")
            print("\n".join("  " + line.replace(f"{self.run.parent}/", "") for line in said))
            return codes
        finally:
            self.kill()

    def kill(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for _, rank in ranks_of(self.run).values():
            os.kill(rank, signal.SIGKILL)


@pytest.fixture
def ray_home():
    """Variables with which Ray leaves nothing behind; a short path, because its sockets are there."""
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield {"RAY_TMPDIR": folder, "HOME": folder}


def ray(run, arguments, env):
    return Started("ray", run, [sys.executable, FOLDER / "ray_train.py", 2, *arguments], envs=[env])


def kubernetes(run, arguments):
    """Two pods of jobset.yaml on this machine: its command, its variables, and those that Kubernetes fills in."""
    given = literal_variables("jobset.yaml") | {"PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "localhost"}
    given |= {"PET_MASTER_PORT": free_port(), "RESTART": "1"}
    assert {each["name"] for each in container("jobset.yaml")["env"]} == given.keys() | {"PET_NODE_RANK"}
    envs = [given | {"PET_NODE_RANK": str(node)} for node in range(2)]
    return Started("kubernetes", run, *[[*container("jobset.yaml")["command"], *arguments]] * 2, envs=envs)


def arguments_of(image_folder, run, *more):
    lengths = [f"num_train_steps={STEPS}", "checkpoint.save_every_n_steps=25", "data.num_workers=0"]
    return ["train_ddp.py", *TINY, *lengths, f"data.path={image_folder}", f"output_dir={run}", *more]


def start_under_slurm(slurm_env, run, arguments):
    """Signalled as before a time limit, and taken out of the queue after its save."""
    job = Job(slurm_env, run.parent, *arguments)
    wait_for("step under slurm", lambda: (run / "metrics.jsonl").exists() and len(read_metrics(run)) > 20, 240)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job.id], env=job.env, check=True)
    wait_for("stop under slurm", lambda: status(run)["state"] == "preempted" and "slurm.sh: " in job.log())
    subprocess.run(["scancel", job.id], env=job.env, check=True)
    job.wait()


def go_on_under_ray(run, arguments, env):
    """A worker and its rank are killed as by the loss of a machine; SIGTERM to the launcher stops the second start."""
    started = ray(run, arguments, env)
    try:
        started.wait_for_steps(60)
        at, first = started.steps(), ranks_of(run)
        for process in first[1]:
            os.kill(process, signal.SIGKILL)
        wait_for("new ranks", lambda: (now := ranks_of(run)).keys() == {0, 1} and now[1] != first[1])
        starts = 2 if started.before else 1
        steps = wait_for("resumed run", lambda: len(found := started.resumed_at()) == starts and found)
        newest = steps[-1]
        assert started.before < newest
        print(f"ray: killed worker and rank 1 at step {at} or later; went on from step {newest}")
        started.before = newest
        started.wait_for_steps(20)
        os.kill(started.processes[0].pid, signal.SIGTERM)
        (code,) = started.wait()
    finally:
        started.kill()
    assert code not in (0, 2)


def go_on_under_kubernetes(run, arguments):
    """A pod is evicted: SIGTERM to its first process. It must fail, or its job could count as complete.

    The other's torchrun waits for it, up to 300 s and deaf to signals; JobSet deletes that pod, as it starts all pods
    again, and the end of its grace period kills it.
    """
    started = kubernetes(run, arguments)
    staying, evicted = started.processes
    try:
        started.wait_for_steps(20)
        evicted.terminate()
        assert evicted.wait(120) != 0
        assert status(run)["state"] == "preempted"
        staying.kill()
        started.wait()
    finally:
        started.kill()


def finish_under_torchrun(run, arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *arguments]
    assert Started("torchrun", run, command).wait(400) == [0]


@pytest.fixture(scope="module")
def straight(image_folder, tmp_path_factory):
    """A run of two processes that nobody disturbs."""
    folder = tmp_path_factory.mktemp("straight")
    done = run_command(arguments_of(image_folder, folder / "run"), nproc=2, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_skypilots_nodes_train_one_run(image_folder, tmp_path):
    """Its `run` text twice on this machine, as on two nodes of one GPU."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text(f'PATH="{PATH}"\n')
    (tmp_path / "train_ddp.py").symlink_to(ROOT / "train_ddp.py")
    run = tmp_path / "run"
    given = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    given |= {"TRAIN": shlex.join(arguments_of(image_folder, run, "num_train_steps=6")), "PYTHONPATH": str(ROOT)}
    envs = [given | {"SKYPILOT_NODE_RANK": str(node)} for node in range(2)]
    text = SKYPILOT["run"].replace("29400", free_port())
    started = Started("skypilot", run, *[["bash", "-c", text]] * 2, envs=envs, cwd=tmp_path)
    assert started.wait() == [0, 0], started.text()
    assert len(re.findall("2 processes on", started.text())) == 1
    assert sorted(read_metrics(run)) == list(range(1, 7))


@pytest.mark.slow
def test_a_mistake_under_ray_is_one_line_and_starts_nothing_again(tmp_path, ray_home):
    command = [FOLDER / "ray_train.py", 2, "train_ddp.py", "optimzer.lr=1", f"output_dir={tmp_path / 'run'}"]
    done = run_command(command, timeout=400, env=ray_home)
    assert done.returncode == 2, done.stderr
    assert (done.stdout + done.stderr).count("error: unknown key optimzer.lr: did you mean optimizer.lr?") == 1
    done = run_command([FOLDER / "ray_train.py", "train_ddp.py"], env=ray_home)
    assert done.returncode == 2
    assert done.stderr.startswith("error: give ranks and a script")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "first", [pytest.param("slurm", marks=needs_slurm), pytest.param("ray", marks=pytest.mark.slow)]
)
def test_one_run_goes_from_launcher_to_launcher(first, straight, image_folder, tmp_path, request):
    run = tmp_path / "run"
    arguments = arguments_of(image_folder, run)
    ends = []

    def stopped():
        assert status(run)["state"] == "preempted"
        ends.append(status(run)["step"])
        assert (run / f"checkpoints/step_{ends[-1]:08d}/state.json").exists()

    if first == "slurm":
        start_under_slurm(request.getfixturevalue("slurm"), run, arguments)
        stopped()
    if importlib.util.find_spec("ray"):
        go_on_under_ray(run, arguments, request.getfixturevalue("ray_home"))
        stopped()
    go_on_under_kubernetes(run, arguments)
    stopped()
    finish_under_torchrun(run, arguments)
    assert status(run)["state"] == "finished"
    assert all(a < b for a, b in itertools.pairwise([0, *ends, STEPS]))
    got, want = (read_metrics(folder / "run") for folder in (tmp_path, straight))
    assert len(want) == STEPS
    for step, values in want.items():
        for key in ("train/loss", "train/grad_norm", "train/lr"):
            assert got[step][key] == values[key], (step, key)
    assert_same(weights(tmp_path, "run"), weights(straight, "run"))
    print(f"stops after steps {ends}; {STEPS} losses and gradient norms and the weights equal the straight run's")
