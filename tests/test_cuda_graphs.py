"""runtime/cuda_graphs.py: runs with recorded passes against runs without, on GPUs; the same in every digit."""

import launch  # noqa: F401  (before torch)

import functools
import itertools

import pytest
from conftest import ON_GPU, SCRIPTS, TINY, column, run_tasks, started_once, task_of

from runtime.cuda_graphs import WARMUP_STEPS

TE = ["model.act_layer=gelu_tanh", "model.transformer_engine=true"]
FP8 = [*TE, "fp8_config.enabled=true"]
BLOCKS = {  # name -> (microbatches, options)
    "plain": (3, []),
    "te": (1, [*TE, "model.proj_drop_rate=0.1"]),
    "fp8": (1, FP8),
    "fp8_microbatches": (3, [*FP8, "fp8_config.fp8_recipe=Float8CurrentScaling"]),
}
STEPS = 24
RANDOM = ["model.drop_path_rate=0.2", "model.pos_drop_rate=0.1", "ema.decay=0.8"]
# What is done for one block only: name -> (script, options). Evaluations come before and after the recording.
MORE = {
    "gathered": ("train_fsdp2", ["fsdp2.reshard_after_forward=false", f"evaluation.every_n_steps={WARMUP_STEPS}"]),
    "fp8_weights": ("train_mfsdp", [*FP8, "fp8_config.quantized_model_init=true"]),
    "fp8_layers": ("train_ddp", [*FP8, 'fp8_config.layers=["blocks.[1-2].*","blocks.0.mlp.fc2"]']),
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
            for name, script, options, k in _kinds():
                batch = f"micro_batch_size={48 // nproc // k}"
                tasks.append(task(f"{name}-{graphs}", script, *options, batch, f"cuda_graphs={graphs}"))
        for script, stop in itertools.product(SCRIPTS, (16, STEPS)):
            length = [f"num_train_steps={stop}", "cuda_graphs=true", *FP8]
            tasks.append(task(f"resumed-{script}-{stop}", script, *length, output=f"resumed-{script}"))
        return run_tasks(tasks, nproc=nproc, folder=folder, timeout=500, strict=False), folder

    return start


def _kinds():
    """(name, script, options, microbatches a step)."""
    for script, (block, (k, options)) in itertools.product(SCRIPTS, BLOCKS.items()):
        yield f"{script}-{block}", script, options, k
    for name, (script, options) in MORE.items():
        yield name, script, options, 1


@pytest.mark.parametrize(("name", "k"), [(name, k) for name, _, _, k in _kinds()])
def test_recorded_passes_change_no_digit(runs, nproc, name, k):
    """Losses, gradient norms, scores of the weights and of their averages."""
    outcomes, folder = runs(nproc)
    for graphs in ("false", "true"):
        assert "error" not in outcomes[f"{name}-{graphs}"][0], outcomes[f"{name}-{graphs}"][0]["error"]
    assert outcomes[f"{name}-true"][0]["metrics"]["replays"] == (STEPS - WARMUP_STEPS) * k
    assert outcomes[f"{name}-false"][0]["metrics"]["replays"] == 0
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/ema_loss"):
        assert column(folder, f"{name}-true", key) == column(folder, f"{name}-false", key), key


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_resumed_run_records_anew_and_goes_on_as_the_straight_one(runs, nproc, script):
    outcomes, folder = runs(nproc)
    assert "error" not in outcomes[f"resumed-{script}-{STEPS}"][0]
    for key in ("train/loss", "train/grad_norm"):
        assert column(folder, f"resumed-{script}", key) == column(folder, f"{script}-fp8-true", key)
