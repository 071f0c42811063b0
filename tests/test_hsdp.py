"""FSDP2 over two axes on four processes, where weights are cut and copied: against DDP, in float32.

Two processes have 2 x 1 only, where nothing is cut.
"""

import functools
import itertools

import pytest
import torch
from conftest import assert_same, column, made_once, run_tasks, task_of, weights

MESHES = {"2x2": (2, 2), "1x4": (1, 4), "4x1": (4, 1)}  # dp_outer x dp_shard
ACCUMULATIONS = (1, 2, 4)
CHAIN = {"train_fsdp2-2x2": 4, "train_fsdp2-1x4": 7, "train_ddp": 10}  # who trains until which step
pytestmark = pytest.mark.slow


def mesh_of(name):
    outer, shard = MESHES[name]
    return [f"distributed.dp_outer={outer}", f"distributed.dp_shard={shard}"]


@pytest.fixture(scope="module")
def folder(image_folder, tmp_path_factory):
    """The folder of all runs: four processes, started once."""

    def make(folder):
        task = functools.partial(task_of, image_folder, folder)
        # Wider than TINY, so that each of four ranks has a part of every matrix; cls_token has one row, of one rank.
        model = ["model.embed_dim=48", "model.global_pool=token", "model.class_token=true", "precision=fp32"]
        common = [*model, "global_batch_size=48", "num_train_steps=10"]
        tasks = []
        for k in ACCUMULATIONS:
            options = [*common, f"micro_batch_size={48 // 4 // k}"]
            tasks.append(task(f"train_ddp-{k}", "train_ddp", *options, before="keep_first_gradients"))
            for name in MESHES:
                run = (f"{name}-{k}", "train_fsdp2", *options, *mesh_of(name))
                tasks.append(task(*run, before="keep_first_gradients"))
        for who, stop in CHAIN.items():
            script, _, name = who.partition("-")
            length = [f"num_train_steps={stop}", "lr_scheduler.num_training_steps=10"]
            options = [*common, *length, *(mesh_of(name) if name else [])]
            tasks.append(task(f"chain-{stop}", script, *options, output="chain"))
        run_tasks(tasks, nproc=4, folder=folder, timeout=500)

    return made_once(tmp_path_factory, "hsdp", make)[0]


CASES = list(itertools.product(MESHES, ACCUMULATIONS))


@pytest.mark.parametrize(("mesh", "k"), CASES)
def test_first_gradients_are_ddps(folder, mesh, k):
    """Of every tensor, whole, before clipping: neither doubled nor halved by an axis or by accumulation."""
    got, want = (torch.load(folder / f"{name}/gradients.pt") for name in (f"{mesh}-{k}", "train_ddp-1"))
    largest = max(gradient.abs().max().item() for gradient in want)
    assert len(got) == len(want) > 20
    for ours, ddps in zip(got, want, strict=True):
        torch.testing.assert_close(ours, ddps, rtol=1e-4, atol=1e-6 * largest)


@pytest.mark.parametrize(("mesh", "k"), CASES)
def test_losses_are_ddps(folder, mesh, k):
    want = column(folder, "train_ddp-1", "train/loss")
    assert len(want) == 10
    for key, tolerance in (("train/loss", 1e-6), ("train/grad_norm", 1e-5)):
        expected = column(folder, "train_ddp-1", key)
        assert column(folder, f"{mesh}-{k}", key) == pytest.approx(expected, rel=tolerance, abs=0), key


def test_a_checkpoint_moves_over_meshes(folder):
    """2 x 2, then 1 x 4, then DDP: the ten steps of one run."""
    straight = column(folder, "train_ddp-1", "train/loss")
    assert column(folder, "chain", "train/loss") == pytest.approx(straight, rel=1e-6, abs=0)
    assert_same(weights(folder, "chain"), weights(folder, "train_ddp-1"), atol=1e-5)
