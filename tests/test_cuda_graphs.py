"""runtime/cuda_graphs.py: runs with recorded passes against runs without, on GPUs; the same in every digit."""

import launch  # noqa: F401  (before torch)

import functools
import itertools

import pytest
from conftest import ON_GPU, SCRIPTS, TINY, column, run_tasks, started_once, task_of

from runtime.cuda_graphs import WARMUP_STEPS

TE = ["model.act_layer=gelu_tanh", "model.transformer_engine=true"]
FP8 = [*TE, "fp8_config.enabled=true"]
BLOCKS = {
    "plain": [],
    "compiled": ["compile=true"],
    "te": [*TE, "model.proj_drop_rate=0.1"],
    "fp8": FP8,
    "fp8_current": [*FP8, "fp8_config.fp8_recipe=Float8CurrentScaling"],
}
STEPS = 24
RANDOM = ["model.drop_path_rate=0.2", "model.pos_drop_rate=0.1", "ema.decay=0.8"]
# What is done for one block only: name -> (script, options). Evaluations come before and after the recording.
MORE = {
    "gathered": ("train_fsdp2", ["fsdp2.reshard_after_forward=false", f"evaluation.every_n_steps={WARMUP_STEPS}"]),
    "fp8_weights": ("train_mfsdp", [*FP8, "fp8_config.quantized_model_init=true"]),
    "mixed": ("train_ddp", ["compile=true", "data.mixup=0.8", "data.cutmix=1.0", "model.patch_drop_rate=0.25"]),
    "muon": ("train_fsdp2", ["optimizer.name=muon", "optimizer.momentum=0.95"]),
    "optim": ("train_mfsdp", ["mfsdp.zero_dp_strategy=optim"]),
}


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    """A function: number of GPUs -> (outcomes, folder)."""

    @started_once
    def start(nproc):
        folder = tmp_path_factory.mktemp("runs")
        base = [*TINY, *ON_GPU, *RANDOM, f"num_train_steps={STEPS}", "lr_scheduler.num_training_steps=40"]
        task = functools.partial(task_of, image_folder, folder, base=base, before="count_replays")
        tasks = []
        for graphs in ("false", "true"):
            for (script, options), k, name in _kinds():
                batch = f"micro_batch_size={48 // nproc // k}"
                tasks.append(task(f"{name}-{graphs}", script, *options, batch, f"cuda_graphs={graphs}"))
        for script, stop in itertools.product(SCRIPTS, (16, STEPS)):
            length = [f"num_train_steps={stop}", "cuda_graphs=true", *FP8]
            tasks.append(task(f"resumed-{script}-{stop}", script, *length, output=f"resumed-{script}"))
        return run_tasks(tasks, nproc=nproc, folder=folder, timeout=500, strict=False), folder

    return start


def _kinds():
    for script, (block, options), k in itertools.product(SCRIPTS, BLOCKS.items(), (1, 3)):
        if k == 1 or block in ("compiled", "fp8"):
            yield (script, options), k, f"{script}-{block}-{k}"
    for name, kind in MORE.items():
        yield kind, 1, name


@pytest.mark.parametrize("name", [name for *_, name in _kinds()])
def test_recorded_passes_change_no_digit(runs, nproc, name):
    """Losses, gradient norms, scores of the weights and of their averages."""
    outcomes, folder = runs(nproc)
    for graphs in ("false", "true"):
        assert "error" not in outcomes[f"{name}-{graphs}"][0], outcomes[f"{name}-{graphs}"][0]["error"]
    microbatches = 3 if name.endswith("-3") else 1
    assert outcomes[f"{name}-true"][0]["metrics"]["replays"] == (STEPS - WARMUP_STEPS) * microbatches
    assert outcomes[f"{name}-false"][0]["metrics"]["replays"] == 0
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/ema_loss"):
        assert column(folder, f"{name}-true", key) == column(folder, f"{name}-false", key), key


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_resumed_run_records_anew_and_goes_on_as_the_straight_one(runs, nproc, script):
    outcomes, folder = runs(nproc)
    assert "error" not in outcomes[f"resumed-{script}-{STEPS}"][0]
    for key in ("train/loss", "train/grad_norm"):
        assert column(folder, f"resumed-{script}", key) == column(folder, f"{script}-fp8-1-true", key)
