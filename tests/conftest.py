"""What the tests share: a tiny data set of real JPEGs, and ways to start real processes."""

import launch  # noqa: F401  (before torch)

import functools
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import schema
from imagenet_dataset import build_loaders, list_images, run_sizes
from optim import lr_at

SCRIPTS = ("train_ddp", "train_fsdp2", "train_mfsdp")
ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)  # as torchrun does: the same sums in every process

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
    """A run in the test's own process sets up logging; the next test shall not hear of it."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
    root.setLevel(level)


def mark_phase(file, phase, owner, name, seconds=0.0):
    """From here on a call of owner.name writes `phase` to the open file as it begins, waits, and "step" as it ends."""
    original = getattr(owner, name)

    def marked(*args, **kwargs):
        os.pwrite(file, phase.ljust(10).encode(), 0)
        time.sleep(seconds)
        try:
            return original(*args, **kwargs)
        finally:
            os.pwrite(file, b"step".ljust(10), 0)

    setattr(owner, name, marked)


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


@pytest.fixture
def tiny(image_folder, tmp_path):
    """Overrides for a tiny run on `images` in a folder of its own."""
    return [*TINY, f"data.path={image_folder}", f"output_dir={tmp_path / 'run'}"]


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


def run_tasks(tasks, *, nproc, folder, timeout=300, strict=True):
    """Run `tasks` (see worker.py) in one set of processes; returns name -> outcome of each rank.

    Without `strict`, a task that fails is left to the tests that look at it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tasks.json").write_text(json.dumps(tasks))
    done = run_command([ROOT / "tests/worker.py", folder / "tasks.json", folder], nproc=nproc, timeout=timeout)
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr[-20000:].split("elastic/multiprocessing/api")[0]
    outcomes = {
        task["name"]: [json.loads((folder / f"{task['name']}.{rank}.json").read_text()) for rank in range(nproc)]
        for task in tasks
    }
    for task in tasks:
        errors = [rank["error"] for rank in outcomes[task["name"]] if "error" in rank]
        assert task.get("may_fail") or not errors or not strict, f"{task['name']}: {errors}"
    return outcomes


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
    """The learning rate of an update in a run of one process."""
    return lr_at(step, cfg, run_sizes(cfg, 1))


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
