"""train_mfsdp.py on a CPU: the real library, with stand_in_cuda.py for what it asks of CUDA, beside train_fsdp2.py.

Both compute with BF16 copies of FP32 weights, so that their losses are alike. What needs a GPU is in test_gpu.py and
test_later_options.py.
"""

import launch  # noqa: F401  (first, as in the entrypoints)

import functools
import itertools
import shutil

import pytest
from conftest import TINY, assert_same, column, run_tasks, started_once, task_of, weights
from test_gpu import OPTIMIZERS, ZERO_STRATEGIES
from test_vit import BLOCKS, ROPES, keys

STEPS, HALF = 6, 3
BASE = [*TINY, "precision=bf16", f"num_train_steps={STEPS}", f"evaluation.every_n_steps={HALF}"]
LENGTH = [f"lr_scheduler.num_training_steps={STEPS}"]
CASES = {  # options, on top of TINY
    "plain": [],
    "averaged": ["ema.decay=0.9", "optimizer.layer_decay=0.7", "optimizer.lr=1e-2"],
    "eva02": keys(ROPES["eva02"]),
    # A border between two ranks would cut a row of the patch embedding, if positions lay before it.
    "odd": keys("img_size=40 class_token=false"),
}
MORE = OPTIMIZERS | {
    "accumulated": ["micro_batch_size=4"],
    "recomputed": ["activation_checkpointing=true"],
    "dinov3": [*keys(ROPES["dinov3"]), "model.img_size=16"],
    "sapiens2": keys(ROPES["sapiens2"]),
    "differential": [*keys(BLOCKS["differential_parallel"]), "model.num_heads=2"],
    "table_shared": [*keys(BLOCKS["table_shared"]), "model.num_heads=2"],
    "distilled": keys("distilled=true global_pool=token class_token=true"),
    "sizes": ["data.size_schedule=[{epoch:1.2,img_size:24}]"],  # 3 steps of 24 of the 60 images
    "packed": ["data.packing.enabled=true", "data.packing.images_per_row=4"],
}
CHAINS = list(itertools.product(("train_ddp", "train_fsdp2", "train_mfsdp"), repeat=2))
CHAINS = [pair for pair in CHAINS if "train_mfsdp" in pair]
RESIZED = [pair for pair in CHAINS if "train_ddp" not in pair]
REPLICATED = (1, 2, 4)  # microbatches of a step of 4 ranks, two times two


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    """A function: number of ranks, of_cases, of_more or of_replicas -> the folder of the runs."""

    @started_once
    def start(key):
        nproc, tasks = key
        folder = tmp_path_factory.mktemp(f"megatron_{nproc}")
        task = functools.partial(task_of, image_folder, folder, base=BASE)
        run_tasks(tasks(task), nproc=nproc, folder=folder)
        return folder

    return lambda nproc, tasks: start((nproc, tasks))


@pytest.fixture(scope="module")
def resized(runs, image_folder, tmp_path_factory):
    """A function: number of ranks -> the folder of runs that go on with as many, of the other number's first half."""

    @started_once
    def start(nproc):
        folder = tmp_path_factory.mktemp(f"resized_{nproc}")
        tasks = []
        for first, then in RESIZED:
            shutil.copytree(runs(3 - nproc, of_cases) / f"half-{first}", folder / f"{first}-{then}")
            tasks.append(task_of(image_folder, folder, f"{first}-{then}", then, *LENGTH, base=BASE))
        run_tasks(tasks, nproc=nproc, folder=folder)
        return folder

    return start


def of_replicas(task):
    """Two copies of the model, each in two parts."""
    tasks = []
    for script, k in itertools.product(("train_fsdp2", "train_mfsdp"), REPLICATED):
        batch = ["global_batch_size=48", f"micro_batch_size={12 // k}"]
        tasks.append(task(f"replicas-{script}-{k}", script, "distributed.dp_outer=2", *batch))
    return tasks


def of_more(task, cases=MORE):
    two = ("train_fsdp2", "train_mfsdp")
    return [task(f"{name}-{script}", script, *options) for name, options in cases.items() for script in two]


def of_cases(task):
    tasks = of_more(task, CASES)
    tasks += [task(f"zero-{zero}", "train_mfsdp", f"mfsdp.zero_dp_strategy={zero}") for zero in ZERO_STRATEGIES]
    tasks.append(task("poisoned", "train_mfsdp", before="poison_new_memory"))
    for first, then in CHAINS:
        for script, stop in ((first, HALF), (then, STEPS)):
            length = [f"num_train_steps={stop}", *LENGTH]
            tasks.append(task(f"{first}-{then}-{stop}", script, *length, output=f"{first}-{then}"))
    tasks += [task(f"half-{script}", script, f"num_train_steps={HALF}", *LENGTH) for script in {s for s, _ in RESIZED}]
    return tasks


over_ranks = pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
of_all = pytest.mark.parametrize(
    ("tasks", "name"),
    [
        *((of_cases, name) for name in CASES),
        *(pytest.param(of_more, name, marks=pytest.mark.slow) for name in MORE),
    ],
)


@over_ranks
@of_all
def test_its_runs_are_fsdp2s(runs, nproc, tasks, name):
    folder = runs(nproc, tasks)
    for key in ("train/loss", "train/grad_norm", "val/loss", *(["val/ema_loss"] if name == "averaged" else [])):
        want = column(folder, f"{name}-train_fsdp2", key)
        assert len(want) == STEPS // (HALF if key.startswith("val") else 1)
        assert column(folder, f"{name}-train_mfsdp", key) == pytest.approx(want, rel=1e-3), key


@over_ranks
@of_all
def test_it_exports_what_fsdp2_does(runs, nproc, tasks, name):
    folder = runs(nproc, tasks)
    assert_same(weights(folder, f"{name}-train_mfsdp"), weights(folder, f"{name}-train_fsdp2"), atol=2e-3)


@over_ranks
@pytest.mark.parametrize("zero", ZERO_STRATEGIES)
def test_every_way_to_shard_gives_the_same_losses(runs, nproc, zero):
    folder = runs(nproc, of_cases)
    want = column(folder, "plain-train_mfsdp", "train/loss")
    assert column(folder, f"zero-{zero}", "train/loss") == pytest.approx(want, rel=1e-3)


@over_ranks
def test_every_weight_gets_its_first_value(runs, nproc):
    folder = runs(nproc, of_cases)
    for key in ("train/loss", "val/loss"):
        assert column(folder, "poisoned", key) == column(folder, "plain-train_mfsdp", key)


@over_ranks
@pytest.mark.parametrize("pair", CHAINS, ids="-".join)
def test_it_goes_on_from_any_checkpoint_and_any_script_from_its(runs, nproc, pair):
    folder = runs(nproc, of_cases)
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
    want = column(runs(nproc, of_cases), "plain-train_mfsdp", "train/loss")
    got = column(resized(nproc), "-".join(pair), "train/loss")
    assert len(got) == STEPS
    assert got == pytest.approx(want, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("k", REPLICATED)
def test_replicas_of_parts_are_fsdp2s(runs, k):
    """With 0.6.1, whose replicas of one rank each have twice the gradients (launch.py refuses those)."""
    folder = runs(4, of_replicas)
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        want = column(folder, f"replicas-train_fsdp2-{k}", key)
        assert column(folder, f"replicas-train_mfsdp-{k}", key) == pytest.approx(want, rel=2e-3), key
