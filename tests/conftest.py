"""What the tests share: a tiny data set of real JPEGs, ways to start real processes, and to compare what they left.

README.md of this folder says what is here for what.
"""

import launch

import contextlib
import fcntl
import functools
import gc
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import quick_hydra
import torch
from bucket_server import serving
from PIL import Image
from safetensors.torch import load_file

import checkpoint
import schema
from imagenet_dataset import build_loaders, list_images, run_sizes
from optim import build_optimizer, lr_at
from runtime import bucket, preemption
from runtime.process_group import dist_session
from runtime.session import Session
from vit import VisionTransformer

SCRIPTS = ("train_ddp", "train_fsdp2", "train_mfsdp")
CPU_SCRIPTS = SCRIPTS[:2]  # Megatron-FSDP's runs on a CPU, by a stand-in: test_megatron_fsdp.py
ROOT = Path(__file__).resolve().parent.parent
quick_hydra.install()
torch.set_num_threads(1)  # as torchrun does: the same sums in every process
# A fork's first call makes torch's pool of threads anew, and two at once may find none there: "Invalid thread pool!".
# Left alone, the first call is made by the threads of autograd, all at the same time.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
for number in (signal.SIGINT, signal.SIGHUP):  # a shell's background and nohup ignore them; tests send them to runs
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# A model and a schedule that take milliseconds. Overrides of L0_sanity.
TINY = [
    "model.img_size=16",
    "model.patch_size=8",
    "model.embed_dim=24",
    "model.depth=2",
    "model.num_heads=3",
    "model.num_classes=6",
    "model.in_chans=3",
    "global_batch_size=24",
    "num_train_steps=6",
    "lr_scheduler.num_warmup_steps=2",
    "logger.frequency=1",
    "evaluation.every_n_steps=null",
    "checkpoint.save_every_n_steps=null",
    "optimizer.lr=1e-3",
]


# On top of TINY, for GPUs: 18 tokens of width 192, every kind of parameter.
ON_GPU = [
    "model.img_size=32",
    "model.patch_size=8",
    "model.embed_dim=192",
    "model.depth=4",
    "model.num_heads=3",
    "model.global_pool=token",
    "model.class_token=true",
    "model.reg_tokens=1",
    "model.init_values=0.1",
    "global_batch_size=48",
    "precision=bf16",
    "evaluation.every_n_steps=10",
]


def pytest_xdist_auto_num_workers(config):
    """Processes of a test run: one for GPUs and Slurm, of which there is one set, and for a file or two.

    For slow tests two: they start processes of their own, with deadlines. Else three, as some wait more than they
    compute. On many cores more.
    """
    asked_for = re.sub(r"not \w+", "", config.option.markexpr)
    named = [argument.split("::")[0] for argument in config.args]
    if re.search("gpu|slurm", asked_for) or (len(set(named)) < 3 and all(name.endswith(".py") for name in named)):
        return 0
    return max(2 if "slow" in asked_for else 3, min(8, (os.cpu_count() or 1) // 2))


def pytest_collection_finish():
    """All that was imported stays: no collection of garbage, as before each fork of loader processes, looks at it."""
    gc.collect()
    gc.freeze()


WANDB_KEY = "5f0c" * 10  # what a wandb key looks like
WANDB_FAILURES = ("import raises", "init raises", "log raises", "summary raises", "finish raises", "init hangs")


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multi_gpu)]
)
def nproc(request):
    """Number of GPUs of a test's run; skips where there are fewer."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return request.param


@pytest.fixture(autouse=True)
def handlers_of_one_test():
    """A run in the test's own process sets up logging and signals; the next test shall not hear of it."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    signals = {number: signal.getsignal(number) for number in preemption.SIGNALS}
    yield
    for number, handler in signals.items():  # a tool ends deaf to them, and processes started later would begin so
        signal.signal(number, handler)
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An S3 server for this file; its address and keys are in the environment of all that the tests start."""
    with serving(tmp_path_factory.mktemp("server")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        bucket._client.cache_clear()  # another file's server may have been asked before
        yield server
    bucket._client.cache_clear()


class Job:
    """A run of one rank in this process: config, session, live state, and ways to save and to restore.

    It is among those in `opened` until it is closed.
    """

    def __init__(self, overrides, opened):
        self.cfg = launch.load_config("L0_sanity", overrides, script="train_ddp")
        self.context, self.opened = dist_session(self.cfg), opened
        self.session = self.context.__enter__()
        opened.append(self)
        self.model = VisionTransformer(self.cfg.model)
        self.model.init_weights(self.cfg.seed)
        optimizer = build_optimizer(self.model, self.cfg, no_weight_decay=self.model.no_weight_decay())
        self.state = checkpoint.TrainState(self.model, optimizer, {}, self.cfg.ema)
        self.saver = None

    def restore(self):
        resumed = checkpoint.restore(self.state, self.cfg, self.session, run_sizes(self.cfg, 1))
        self.saver = checkpoint.Saver(self.state, self.cfg, self.session, run_sizes(self.cfg, 1), resumed=resumed)
        return resumed

    def save(self, *steps, best=None):
        for step in steps:
            with torch.no_grad():
                self.model.head.bias.fill_(float(step))
            self.saver.save(step, best)
        self.saver.wait()

    def close(self):
        self.context.__exit__(None, None, None)
        self.opened.remove(self)


def started_once(start):
    """A function: argument -> start(argument), run once; a failure is kept too, so that it is not started again."""

    @functools.cache
    def outcome(argument):
        try:
            return start(argument), None
        except Exception as error:
            return None, error

    def get(argument):
        result, error = outcome(argument)
        if error is not None:
            pytest.fail(f"the runs failed: {str(error)[-3000:]}", pytrace=False)
        return result

    return get


def made_once(tmp_path_factory, name, make):
    """The folder `name` and what `make(folder)` returned, which is called by the first of pytest's processes that asks.

    The others (pytest-xdist's) wait for it and read its answer, which must be JSON. A failure is kept too.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    folder, answer = base / name, base / f"{name}.json"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answer.exists():
            folder.mkdir()
            content = {}
            try:
                content["answer"] = make(folder)
            except (Exception, AssertionError) as error:
                content["error"] = str(error)
            answer.write_text(json.dumps(content))
    content = json.loads(answer.read_text())
    if "error" in content:
        pytest.fail(f"the runs failed: {content['error'][-3000:]}", pytrace=False)
    return folder, content["answer"]


def make_images(root):
    """60 training and 23 validation JPEGs of noise in six classes; sizes differ, counts are no multiples of a batch."""
    rng = np.random.default_rng(0)
    names = [f"class_{letter}" for letter in "fbdace"]
    for split, count in (("train", 60), ("val", 23)):
        for i in range(count):
            folder = root / split / names[i % 6]
            folder.mkdir(parents=True, exist_ok=True)
            height, width = rng.integers(18, 40, 2)
            base = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)  # big patches, so that JPEG keeps them apart
            Image.fromarray(base).resize((int(width), int(height)), Image.NEAREST).save(folder / f"{i:03d}.jpg")
    return root


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """The folder of `make_images`, made once."""
    return make_images(tmp_path_factory.mktemp("images"))


def tiny_config(*overrides):
    """The config of a tiny run, for what needs no folder."""
    return launch.load_config("L0_sanity", [*TINY, "output_dir=unused", *overrides], script="train_ddp")


@pytest.fixture
def tiny(image_folder, tmp_path):
    """Overrides for a tiny run on `images` in a folder of its own."""
    return [*TINY, f"data.path={image_folder}", f"output_dir={tmp_path / 'run'}"]


def task_of(image_folder, folder, name, script, *overrides, base=TINY, output=None, **more):
    """A task of `run_tasks`: a tiny run of `script` on the images, in the folder `output`, or `name`, of `folder`."""
    places = [f"data.path={image_folder}", f"output_dir={folder / (output or name)}"]
    return {"name": name, "script": script, "overrides": [*base, *places, *overrides], **more}


def runs_on_gpus(tasks, image_folder, tmp_path_factory):
    """A function: number of GPUs -> (outcomes, folder) of tasks(number, image_folder, folder), which may fail."""

    @started_once
    def start(nproc):
        folder = tmp_path_factory.mktemp(f"gpus_{nproc}")
        made = tasks(nproc, image_folder, folder)
        return run_tasks(made, nproc=nproc, folder=folder, timeout=500, strict=False), folder

    return start


def run_command(command, *, nproc=None, timeout=240, cwd=ROOT, env=None):
    """Run an entrypoint as a user does, through torchrun if `nproc` is given; returns the finished process."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*(torchrun if nproc else [sys.executable]), *map(str, command)],
        cwd=cwd,
        env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=paths) | (env or {}),
        capture_output=True,
        timeout=timeout,
    )
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()  # text=True would make "\r" a "\n"
    return done


@functools.cache
def fork_context():
    """For processes that are forked from one which has imported preload.py: they start at once, not in six seconds."""
    import multiprocessing.forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preload"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'tests'}:{ROOT}:{ROOT / 'tools'}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.forkserver.ensure_running()
    return context


def fork_ranks(arguments, *, nproc, output, timeout):
    """What torchrun does with worker.py, by forks: the same variables, a store of the parent's, one file of output."""
    import worker

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    job = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "localhost", "MASTER_PORT": store.port}
    job |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=paths) | {k: str(v) for k, v in job.items()}
    ranks = []
    for rank in range(nproc):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started = (environment | place, str(output), *map(str, arguments))
        ranks.append(fork_context().Process(target=worker.as_rank, args=started))
    try:
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout
        for process in ranks:
            process.join(max(0, deadline - time.monotonic()))
        assert [process.exitcode for process in ranks] == [0] * nproc, output.read_text()[-20000:]
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()


def run_tasks(tasks, *, nproc, folder, timeout=300, strict=True):
    """Run `tasks` (see worker.py) in one set of processes; returns name -> outcome of each rank.

    Without `strict`, a task that fails is left to the tests that look at it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tasks.json").write_text(json.dumps(tasks))
    arguments = [folder / "tasks.json", folder]
    if torch.cuda.is_available():
        done = run_command([ROOT / "tests/worker.py", *arguments], nproc=nproc, timeout=timeout)
        (folder / "output.txt").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, done.stderr[-20000:].split("elastic/multiprocessing/api")[0]
    else:
        fork_ranks(arguments, nproc=nproc, output=folder / "output.txt", timeout=timeout)
    outcomes = {
        task["name"]: [json.loads((folder / f"{task['name']}.{rank}.json").read_text()) for rank in range(nproc)]
        for task in tasks
    }
    for task in tasks:
        errors = [rank["error"] for rank in outcomes[task["name"]] if "error" in rank]
        assert task.get("may_fail") or not errors or not strict, f"{task['name']}: {errors}"
    return outcomes


def batches(cfg, *, world_size=1, start_step=0):
    """Images and labels of all training steps from `start_step` on, every rank's in the order of positions."""
    loaders = [
        loaders_of(cfg, rank=rank, world_size=world_size, start_step=start_step)[0] for rank in range(world_size)
    ]
    for parts in zip(*loaders, strict=True):
        images, labels = zip(*parts, strict=True)
        yield torch.cat(images), torch.cat(labels)


def loaders_of(cfg, *, rank=0, world_size=1, start_step=0):
    """What an entrypoint would read: the training and the validation loader of one rank.

    Also where the batch is larger than the training set, which an entrypoint refuses: for tests of the validation set.
    """
    if cfg.data.source == "synthetic":
        sizes = run_sizes(cfg, world_size)
    else:
        train, val = (list_images(cfg.data, split) for split in ("train", "val"))
        counts = {"num_train_images": len(train), "num_val_images": len(val), "classes": train.classes}
        sizes = schema.RunSizes.of(cfg, world_size=world_size, **counts)
    return build_loaders(cfg, sizes, rank=rank, start_step=start_step)


def rate_at(step, cfg):
    """The learning rate of an update in a run of one process on the images of `make_images`."""
    return lr_at(step, cfg, schema.RunSizes.of(cfg, world_size=1, num_train_images=60, num_val_images=23))


def read_metrics(output_dir):
    """Step -> all metrics of that step, of a run's metrics.jsonl; a later line counts."""
    steps = {}
    for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        steps.setdefault(values["step"], {}).update(values)
    return steps


def column(folder, name, key):
    """One metric of the run <folder>/<name>, step by step."""
    steps = read_metrics(folder / name)
    return [steps[step][key] for step in sorted(steps) if key in steps[step]]


def weights(folder, name):
    """The final model's tensors of the run <folder>/<name>, under timm's names."""
    return load_file(folder / name / "checkpoints/final_model/model.safetensors")


def assert_same(got, want, atol=0.0):
    """Two dicts of tensors: the same names, and values that differ by at most `atol`."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def error_of(function, *args, **kwargs):
    """The text of the ConfigError that the call raises: one line."""
    with pytest.raises(schema.ConfigError) as caught:
        function(*args, **kwargs)
    assert len(str(caught.value).splitlines()) == 1, str(caught.value)
    return str(caught.value)


def session_of(folder, **changes):
    """What a lone process on the CPU is in its job; `changes` say otherwise."""
    values = {"rank": 0, "local_rank": 0, "world_size": 1, "device": torch.device("cpu"), "output_dir": folder}
    return Session(**(values | changes))


def rng_state():
    """Of the global generators of this process: torch's, NumPy's, Python's."""
    _, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), (keys.tobytes(), *rest), random.getstate()


@contextlib.contextmanager
def rng_untouched():
    """What happens inside leaves the global generators alone."""
    before = rng_state()
    yield
    for name, now, then in zip(("torch", "numpy", "random"), rng_state(), before, strict=True):
        assert now == then, f"the global state of {name} has changed"


def make_files(root, files, *, size=(4, 4)):
    """Files under `root`: a PNG where the name ends like an image's, text elsewhere, a folder where it ends in /."""
    for name in files:
        path = Path(root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        elif path.suffix.lower() in Image.registered_extensions():
            Image.new("RGB", size, (200, 100, 50)).save(path, format="PNG")
        else:
            path.write_text("no image")
    return str(root)


@pytest.fixture(scope="session")
def coloured(tmp_path_factory):
    """20 training and 11 validation images, each of one colour of its own, in classes 1, 2 and 10."""
    root = tmp_path_factory.mktemp("coloured")
    for split, count in (("train", 20), ("val", 11)):
        order = np.random.default_rng(1).permutation(count)
        for i, colour in enumerate(order):
            folder = root / split / ("1", "2", "10")[i % 3]
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (17 + i, 40 - i), (int(colour) * 10, 7, 9)).save(folder / f"{i}.png")
    return root


@pytest.fixture
def no_listing_kept():
    """Shards and folders are listed anew, as by a new process."""
    import make_shards
    from input_pipeline import tar_shards

    tar_shards.load.cache_clear()
    make_shards.scan.cache_clear()


@pytest.fixture(scope="session")
def made_shards(image_folder, tmp_path_factory):
    """The shards of `image_folder`, 7 samples each."""
    from shard_files import run_tool

    import make_shards

    target = tmp_path_factory.mktemp("made")
    assert run_tool(make_shards, image_folder, target, "--samples-per-shard", 7) == 0
    return target


@pytest.fixture(scope="session")
def stored_weights(tmp_path_factory):
    """A small model's config, its checkpoints folder with two steps, of which the second counts, and the weights."""
    from weight_files import small, write_step

    folder, cfg = tmp_path_factory.mktemp("checkpoints"), small()
    write_step(folder, cfg, step=3, seed=5)
    _, tensors = write_step(folder, cfg, step=12)
    (folder / "step_00000020").mkdir()  # cut off: no state.json
    return cfg, folder, tensors


@pytest.fixture(scope="session")
def trained_run(image_folder, tmp_path_factory):
    """The folder of a run of six steps on `image_folder`."""

    def start(folder):
        tasks = [task_of(image_folder, folder, "run", "train_ddp", "evaluation.every_n_steps=6")]
        run_tasks(tasks, nproc=1, folder=folder / "tasks")

    return made_once(tmp_path_factory, "trained_run", start)[0] / "run"


@pytest.fixture(scope="session")
def observed(image_folder, tmp_path_factory):
    """(outcomes, folder) of runs of two processes with trackers, profiles and the doctor: what one sees of a run."""

    def start(folder):
        task = functools.partial(task_of, image_folder, folder)
        often = ["evaluation.every_n_steps=2", "checkpoint.save_every_n_steps=2", "checkpoint.max_checkpoints=null"]
        half, whole = ([f"num_train_steps={n}", "lr_scheduler.num_training_steps=8", *often] for n in (4, 8))
        offline, board, stub = "wandb.mode=offline", "tensorboard.enabled=true", ["wandb.mode=online"]
        stub += ["wandb.init_args.project=vit"]
        tasks = [
            task("quiet", "train_ddp", "num_train_steps=2", call="train_and_tell"),
            task("offline-4", "train_ddp", *half, offline, output="offline", before="wait_a_second"),
            task("offline-8", "train_ddp", *whole, offline, output="offline", before="wait_a_second"),
            task("board-first", "train_ddp", *half, board, output="board"),
            task("board-again", "train_ddp", *whole, board, output="board", before="lose_newest_checkpoint"),
            task("stub-a", "train_ddp", *half, *stub, output="stub", before="stub_wandb"),
            task("stub-b", "train_ddp", *whole, *stub, output="stub", before="stub_wandb"),
            task("stub-c", "train_ddp", *whole, *stub, output="stub", before="stub_wandb"),
        ]
        unsaved = "checkpoint.ckpt_dir=null"
        for failure in WANDB_FAILURES:
            online = ["num_train_steps=3", "wandb.mode=online", f"wandb.init_args.name={failure}", unsaved]
            tasks.append(task(failure, "train_ddp", *online, before="stub_wandb", call="train_and_tell"))
        window = ["profiler.trace=true", "profiler.first_step=3", "profiler.num_steps=2"]
        tasks.append(task("traced", "train_fsdp2", *window, "profiler.ranks=[1]"))
        tasks.append(
            task("untraced", "train_ddp", *window, "num_train_steps=7", "profiler.ranks=null", output="traced")
        )
        tasks.append(task("doctor", "train_ddp", call="doctor"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WANDB_API_KEY", WANDB_KEY)
            return run_tasks(tasks, nproc=2, folder=folder)

    folder, outcomes = made_once(tmp_path_factory, "observed", start)
    return outcomes, folder
