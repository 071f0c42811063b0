"""train_mfsdp.py on a CPU: the real library, with stand_in_cuda.py for what it asks of CUDA, beside train_fsdp2.py.

Both compute with BF16 copies of FP32 weights, so that their losses are alike. What needs a GPU is in test_gpu.py and
test_later_options.py.
"""

import launch  # noqa: F401  (first, as in the entrypoints)

import itertools
import shutil

import pytest
from conftest import TINY, assert_same, column, run_tasks, started_once, task_of, weights
from test_vit import BLOCKS, ROPES, keys

STEPS, HALF = 6, 3
CASES = {  # options, on top of TINY
    "plain": [],
    "accumulated": ["micro_batch_size=4"],
    "recomputed": ["activation_checkpointing=true"],
    "averaged": ["ema.decay=0.9", "optimizer.layer_decay=0.7", "optimizer.lr=1e-2"],
    "muon": ["optimizer.name=muon", "optimizer.momentum=0.95"],
    "dinov3": [*keys(ROPES["dinov3"]), "model.img_size=16"],
    "eva02": keys(ROPES["eva02"]),
    "sapiens2": keys(ROPES["sapiens2"]),
    "differential": [*keys(BLOCKS["differential_parallel"]), "model.num_heads=2"],
    "table_shared": [*keys(BLOCKS["table_shared"]), "model.num_heads=2"],
    "distilled": keys("distilled=true global_pool=token class_token=true"),
    "sizes": ["data.size_schedule=[{epoch:1.2,img_size:24}]"],  # 3 steps of 24 of the 60 images
    "packed": ["data.packing.enabled=true", "data.packing.images_per_row=4"],
    # A border between two ranks would cut a row of the patch embedding, if positions lay before it.
    "odd": keys("img_size=40 class_token=false"),
}
ZERO = ("no_shard", "optim", "optim_grads")  # besides the default
CHAINS = list(itertools.product(("train_ddp", "train_fsdp2", "train_mfsdp"), repeat=2))
CHAINS = [pair for pair in CHAINS if "train_mfsdp" in pair]
RESIZED = [pair for pair in CHAINS if "train_ddp" not in pair]
REPLICATED = (1, 2, 4)  # microbatches of a step of 4 ranks, two times two


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    """A function: number of ranks -> the folder of the runs."""

    @started_once
    def start(nproc):
        folder = tmp_path_factory.mktemp(f"megatron_{nproc}")
        make = of_replicas if nproc == 4 else of_all
        run_tasks(make(lambda *args, **more: task(image_folder, folder, *args, **more)), nproc=nproc, folder=folder)
        return folder

    return start


@pytest.fixture(scope="module")
def resized(runs, image_folder, tmp_path_factory):
    """A function: number of ranks -> the folder of runs that go on with as many, of the other number's first half."""

    @started_once
    def start(nproc):
        folder = tmp_path_factory.mktemp(f"resized_{nproc}")
        tasks = []
        for first, then in RESIZED:
            shutil.copytree(runs(3 - nproc) / f"half-{first}", folder / f"{first}-{then}")
            tasks.append(task(image_folder, folder, f"{first}-{then}", then, *LENGTH))
        run_tasks(tasks, nproc=nproc, folder=folder)
        return folder

    return start


BASE = [*TINY, "precision=bf16", f"num_train_steps={STEPS}", f"evaluation.every_n_steps={HALF}"]
LENGTH = [f"lr_scheduler.num_training_steps={STEPS}"]


def task(image_folder, folder, name, script, *options, **more):
    if script == "train_mfsdp":
        more |= {"call": "megatron_fsdp_on_a_cpu"}
    return task_of(image_folder, folder, name, script, *options, base=BASE, **more)


def of_replicas(task):
    """Two copies of the model, each in two parts."""
    tasks = []
    for script, k in itertools.product(("train_fsdp2", "train_mfsdp"), REPLICATED):
        batch = ["global_batch_size=48", f"micro_batch_size={12 // k}"]
        tasks.append(task(f"replicas-{script}-{k}", script, "distributed.dp_outer=2", *batch))
    return tasks


def of_all(task):
    tasks = []
    for name, options in CASES.items():
        tasks += [task(f"{name}-{script}", script, *options) for script in ("train_fsdp2", "train_mfsdp")]
    tasks += [task(f"zero-{zero}", "train_mfsdp", f"mfsdp.zero_dp_strategy={zero}") for zero in ZERO]
    for first, then in CHAINS:
        for script, stop in ((first, HALF), (then, STEPS)):
            length = [f"num_train_steps={stop}", *LENGTH]
            tasks.append(task(f"{first}-{then}-{stop}", script, *length, output=f"{first}-{then}"))
    tasks += [task(f"half-{script}", script, f"num_train_steps={HALF}", *LENGTH) for script in {s for s, _ in RESIZED}]
    return tasks


over_ranks = pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])


@over_ranks
@pytest.mark.parametrize("name", CASES)
def test_its_runs_are_fsdp2s(runs, nproc, name):
    folder = runs(nproc)
    for key in ("train/loss", "train/grad_norm", "val/loss", *(["val/ema_loss"] if name == "averaged" else [])):
        want = column(folder, f"{name}-train_fsdp2", key)
        assert len(want) == STEPS // (HALF if key.startswith("val") else 1)
        assert column(folder, f"{name}-train_mfsdp", key) == pytest.approx(want, rel=1e-3), key


@over_ranks
@pytest.mark.parametrize("name", CASES)
def test_it_exports_what_fsdp2_does(runs, nproc, name):
    folder = runs(nproc)
    assert_same(weights(folder, f"{name}-train_mfsdp"), weights(folder, f"{name}-train_fsdp2"), atol=2e-3)


@over_ranks
@pytest.mark.parametrize("zero", ZERO)
def test_every_way_to_shard_gives_the_same_losses(runs, nproc, zero):
    folder = runs(nproc)
    want = column(folder, "plain-train_mfsdp", "train/loss")
    assert column(folder, f"zero-{zero}", "train/loss") == pytest.approx(want, rel=1e-3)


@over_ranks
@pytest.mark.parametrize("pair", CHAINS, ids="-".join)
def test_it_goes_on_from_any_checkpoint_and_any_script_from_its(runs, nproc, pair):
    folder = runs(nproc)
    want = column(folder, "plain-train_mfsdp", "train/loss")
    got = column(folder, "-".join(pair), "train/loss")
    assert len(got) == STEPS
    if pair == ("train_mfsdp", "train_mfsdp"):
        assert got == want
    assert got == pytest.approx(want, abs=2e-2 if "train_ddp" in pair else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("pair", RESIZED, ids="-".join)
def test_it_goes_on_with_another_number_of_ranks(runs, resized, nproc, pair):
    want = column(runs(nproc), "plain-train_mfsdp", "train/loss")
    got = column(resized(nproc), "-".join(pair), "train/loss")
    assert len(got) == STEPS
    assert got == pytest.approx(want, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("k", REPLICATED)
def test_replicas_of_parts_are_fsdp2s(runs, k):
    """With 0.6.1, whose replicas of one rank each have twice the gradients (launch.py refuses those)."""
    folder = runs(4)
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        want = column(folder, f"replicas-train_fsdp2-{k}", key)
        assert column(folder, f"replicas-train_mfsdp-{k}", key) == pytest.approx(want, rel=2e-3), key
