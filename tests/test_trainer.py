"""The three entrypoints' promises, on CPU with DDP and FSDP2: real processes, real files.

One set of processes a world size runs all its tasks (see worker.py); the tests then look at what came out.
"""

import launch

import functools
import itertools
import json
import types

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import (
    CPU_SCRIPTS,
    TINY,
    assert_same,
    column,
    loaders_of,
    read_metrics,
    run_tasks,
    task_of,
    tiny_config,
    weights,
)
from torch.distributed.checkpoint import FileSystemReader

import schema
import train_ddp
import trainer
from optim import Ema
from vit import VisionTransformer

WORLD_SIZES = (1, 2, pytest.param(3, marks=pytest.mark.slow))
STEPS = 10


def accumulation(k, nproc):
    return f"micro_batch_size={24 // nproc // k}"


@pytest.fixture(scope="module", params=WORLD_SIZES)
def nproc(request):
    return request.param


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    """A function: world size -> (outcomes of all tasks, folder); each world size is started once."""

    @functools.cache
    def start(nproc):
        folder = tmp_path_factory.mktemp(f"world_{nproc}")
        return run_tasks(_tasks(nproc, image_folder, folder), nproc=nproc, folder=folder), folder

    return start


def _tasks(nproc, image_folder, folder):
    task = functools.partial(task_of, image_folder, folder)

    regular = ["model.drop_path_rate=0.0"]
    dropout = ["model.drop_path_rate=0.3", "model.pos_drop_rate=0.1", "model.proj_drop_rate=0.1"]
    tasks = []
    # The same run under every strategy, world size and accumulation.
    for script, k in itertools.product(CPU_SCRIPTS, (1, 4)):
        if k == 1 or 24 // nproc % k == 0:
            long = [f"num_train_steps={STEPS}", "evaluation.every_n_steps=5", accumulation(k, nproc), *regular]
            tasks.append(task(f"{script}-{k}", script, *long))
    # Initial weights: one update too small to see.
    for script in CPU_SCRIPTS:
        frozen = ["num_train_steps=1", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]
        tasks.append(task(f"init-{script}", script, *frozen, before="poison_new_memory"))
    # Six steps straight, and with stops after three, in mid-epoch, and after five, at the epoch's edge.
    for variant in (["data.num_workers=0"], ["data.num_workers=2", accumulation(2, nproc), *dropout])[
        : 2 if nproc == 2 else 1
    ]:
        tag = variant[0][-1]
        tasks.append(task(f"straight-{tag}", "train_ddp", *variant))
        for script, stop in (("train_ddp", 3), ("train_fsdp2", 5), ("train_ddp", 6)):
            length = [f"num_train_steps={stop}", "lr_scheduler.num_training_steps=6", *variant]
            tasks.append(task(f"stopped-{tag}-{stop}", script, *length, output=f"stopped-{tag}"))
    unsaved = "checkpoint.ckpt_dir=null"
    if nproc == 1:
        tasks.append(task("finished", "train_fsdp2", output="stopped-0"))
        tasks.append(task("no-eval", "train_ddp", f"num_train_steps={STEPS}", unsaved))
        tasks.append(task("clipped", "train_ddp", "num_train_steps=2", "max_grad_norm=0.1", unsaved))
    if nproc == 2:
        tasks.append(task("clip", "train_ddp", call="clip_with_absent_gradients"))
        tasks.append(task("masks", "train_ddp", call="dropout_masks"))
        diverges = ["optimizer.lr=1e30", "logger.frequency=4", "evaluation.every_n_steps=2"]
        tasks += [task(f"diverges-{s}", s, *diverges, may_fail=True) for s in CPU_SCRIPTS]
        tasks.append(task("other-model", "train_ddp", "model.depth=3", output="stopped-0", may_fail=True))
        tasks.append(task("first", "train_fsdp2", "num_train_steps=1", output="afresh"))
        tasks.append(task("afresh", "train_ddp", "checkpoint.resume_from_checkpoint=false"))
        bf16 = ["precision=bf16", "num_train_steps=3", "checkpoint.save_final_model=false"]
        tasks += [task(f"bf16-{script}", script, *bf16) for script in CPU_SCRIPTS]
    return tasks


OF_MEMORY = {
    "recompute-train_ddp": ["activation_checkpointing=true"],
    "recompute-train_fsdp2": ["activation_checkpointing=true"],
    "selective-train_ddp": ["activation_checkpointing=selective"],
    "selective-train_fsdp2": ["activation_checkpointing=selective"],
    "hsdp-train_fsdp2": ["distributed.dp_outer=2"],
    "gathered-train_fsdp2": ["fsdp2.gathered_blocks=1"],
    "zero2-train_fsdp2": ["fsdp2.reshard_after_forward=false"],
}


@pytest.fixture(scope="module")
def of_memory(image_folder, tmp_path_factory):
    """The folder of runs of two processes, one for each name in OF_MEMORY and one without such options."""
    folder = tmp_path_factory.mktemp("of_memory")
    names = {"straight-train_ddp": [], **OF_MEMORY}
    tasks = [task_of(image_folder, folder, name, name.split("-")[1], *options) for name, options in names.items()]
    run_tasks(tasks, nproc=2, folder=folder)
    return folder


@pytest.fixture(scope="module")
def reference(image_folder):
    """The run of ten steps by timm's model and torch's own AdamW, scheduler and clipping, in one process."""
    cfg = launch.load_config("L0_sanity", [*TINY, f"data.path={image_folder}", f"num_train_steps={STEPS}"])
    ours = VisionTransformer(cfg.model)
    ours.init_weights(cfg.seed)
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=16,
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=3,
        num_classes=6,
        class_token=False,
        global_pool="avg",
    )
    model.load_state_dict(ours.state_dict())
    model.train()
    decay = [p for p in model.parameters() if p.ndim in (2, 4)]
    rest = [p for p in model.parameters() if p.ndim not in (2, 4)]
    groups = [{"params": decay, "weight_decay": cfg.optimizer.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=cfg.optimizer.lr)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 2)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[1])
    rows = {"train/loss": [], "train/grad_norm": [], "train/lr": []}
    loader, _ = loaders_of(cfg, rank=0, world_size=1, start_step=0)
    for images, labels in loader:
        images = (images / 255 - cfg.data.mean[0]) / cfg.data.std[0]
        loss = F.cross_entropy(model(images), labels, label_smoothing=cfg.loss.label_smoothing)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        rows["train/lr"].append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rows["train/loss"].append(loss.item())
        rows["train/grad_norm"].append(norm.item())
    return rows, model.state_dict()


@pytest.mark.parametrize("script", CPU_SCRIPTS)
@pytest.mark.parametrize("k", [1, 4])
def test_equals_timm_and_torch(runs, reference, nproc, script, k):
    """Losses, gradient norms, rates and weights, whatever the world size and the accumulation."""
    if 24 // nproc % k:
        pytest.skip("the batch does not divide")
    _, folder = runs(nproc)
    rows, final = reference
    for key, expected in rows.items():
        torch.testing.assert_close(column(folder, f"{script}-{k}", key), expected, rtol=0, atol=1e-5)
    assert_same(weights(folder, f"{script}-{k}"), final, atol=1e-5)


@pytest.mark.parametrize("script", CPU_SCRIPTS)
def test_validation_counts_every_image_once(runs, nproc, script):
    """23 images over 1, 2 and 3 ranks in batches of 24, 12 and 8."""
    _, folder = runs(nproc)
    assert column(folder, f"{script}-1", "val/images") == [23] * 2
    for key in ("val/loss", "val/top1", "val/top5"):
        alone = column(runs(1)[1], f"{script}-1", key)
        torch.testing.assert_close(column(folder, f"{script}-1", key), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("script", CPU_SCRIPTS)
def test_initial_weights_are_the_same_everywhere(runs, nproc, script):
    """Under every strategy and world size, with storage that starts as NaN."""
    _, folder = runs(nproc)
    cfg = launch.load_config("L0_sanity", TINY)
    whole = VisionTransformer(cfg.model)
    whole.init_weights(cfg.seed)
    assert_same(weights(folder, f"init-{script}"), whole.state_dict(), atol=1e-25)


@pytest.mark.parametrize("workers", [0, 2])
def test_stops_and_resumes_leave_no_trace(runs, nproc, workers):
    """6 steps = 3 + 2 + 1, from DDP to FSDP2 and back, bit for bit; at 3 ranks to 1e-6.

    With one strategy, and with other numbers of ranks: tests/test_checkpoint.py.
    """
    if workers and nproc != 2:
        pytest.skip("workers, dropout and accumulation are tried with two processes")
    _, folder = runs(nproc)
    straight, stopped = f"straight-{workers}", f"stopped-{workers}"
    assert_same(weights(folder, stopped), weights(folder, straight), atol=0 if nproc < 3 else 1e-6)
    for key in ("train/loss", "train/grad_norm", "train/lr"):
        got, want = column(folder, stopped, key), column(folder, straight, key)
        assert got == want if nproc < 3 else got == pytest.approx(want, abs=1e-6)
    assert sorted(read_metrics(folder / stopped)) == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_does_nothing(runs):
    """Not a line more, and the final model is not written anew."""
    outcomes, folder = runs(1)
    model = folder / "stopped-0/checkpoints/final_model/model.safetensors"
    assert model.stat().st_mtime_ns < (folder / "stopped-0-6.0.json").stat().st_mtime_ns  # when its run ended
    assert outcomes["finished"][0]["metrics"] == {}
    assert sorted(read_metrics(folder / "stopped-0")) == [1, 2, 3, 4, 5, 6]
    assert json.loads((folder / "stopped-0/status.json").read_text())["step"] == 6


def test_evaluation_leaves_training_alone(runs):
    _, folder = runs(1)
    assert column(folder, "train_ddp-1", "train/loss") == column(folder, "no-eval", "train/loss")


def test_clipping_bounds_the_update_and_logs_the_norm_before(runs, reference):
    _, folder = runs(1)
    norms = column(folder, "clipped", "train/grad_norm")
    assert norms[0] == pytest.approx(reference[0]["train/grad_norm"][0], abs=1e-5)
    assert norms[0] > 0.1


def test_clipping_with_absent_gradients(runs):
    """A rank without gradients takes part; the norm is the true global one on every rank."""
    for rank in runs(2)[0]["clip"]:
        assert rank["metrics"]["norm"] == pytest.approx(rank["metrics"]["reference"], rel=1e-6)
        assert rank["metrics"]["clipped"] == pytest.approx(0.1, rel=1e-5)


def test_dropout_masks_differ_between_ranks_steps_and_microbatches(runs):
    outcomes, _ = runs(2)
    masks = [tuple(mask) for rank in outcomes["masks"] for mask in rank["metrics"].values()]
    assert len(set(masks)) == len(masks) == 6


@pytest.mark.parametrize("script", CPU_SCRIPTS)
def test_a_non_finite_loss_stops_all_ranks_at_one_step(runs, script):
    outcomes, folder = runs(2)
    errors = {rank["error"] for rank in outcomes[f"diverges-{script}"]}
    assert len(errors) == 1
    assert "not finite at step 2:" in errors.pop()
    assert json.loads((folder / f"diverges-{script}/status.json").read_text())["state"] == "failed"
    assert not list((folder / f"diverges-{script}").glob("checkpoints/step_*"))
    # Not even evaluated: metrics.jsonl would not be JSON.
    assert "NaN" not in (folder / f"diverges-{script}/metrics.jsonl").read_text()
    assert column(folder, f"diverges-{script}", "val/loss") == []


def test_another_models_checkpoint_is_refused_by_name(runs):
    outcomes, _ = runs(2)
    for rank in outcomes["other-model"]:
        assert "model.depth=2, not 3" in rank["error"]
        assert "\n" not in rank["error"]


def test_a_fresh_start_sets_the_earlier_run_aside(runs):
    _, folder = runs(2)
    checkpoints = folder / "afresh/checkpoints"
    assert {p.name for p in checkpoints.glob("earlier_001/*")} >= {"step_00000001", "final_model"}
    assert_same(weights(folder, "afresh"), weights(folder, "straight-0"), atol=0)
    # Its metrics went with it: they are of other steps of the same numbers.
    earlier = (checkpoints / "earlier_001/metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in earlier} == {1}
    assert (folder / "afresh/metrics.jsonl").read_text().count('"step": 1,') == 1


@pytest.mark.parametrize("script", CPU_SCRIPTS)
def test_bf16_keeps_weights_and_moments_in_float32(runs, script):
    _, folder = runs(2)
    metadata = FileSystemReader(folder / f"bf16-{script}/checkpoints/step_00000003").read_metadata()
    entries = metadata.state_dict_metadata
    assert {key.split(".")[0] for key in entries} == {"model", "optim"}
    assert {entry.properties.dtype for entry in entries.values()} == {torch.float32}
    losses, exact = column(folder, f"bf16-{script}", "train/loss"), column(folder, f"{script}-1", "train/loss")[:3]
    assert losses == pytest.approx(exact, abs=2e-2)
    assert losses != exact


@pytest.mark.slow
@pytest.mark.parametrize("variant", OF_MEMORY)
def test_options_of_memory_change_no_number(of_memory, variant):
    """Recomputation, replicas and resharding: the same six steps."""
    assert_same(weights(of_memory, variant), weights(of_memory, "straight-train_ddp"), atol=1e-6)


# What is seldom meant


def odd_lengths(*overrides):
    cfg = tiny_config("data.path=unused", "num_train_steps=60", *overrides)
    sizes = schema.RunSizes.of(cfg, world_size=1, num_train_images=60, num_val_images=23)
    ema = None if cfg.ema.decay is None else Ema({"weight": torch.ones(1)}, cfg.ema)
    run = types.SimpleNamespace(state=types.SimpleNamespace(ema=ema))
    return list(trainer._odd_lengths(run, cfg, sizes)), ema


def test_a_warmup_that_is_longer_than_the_run_is_said_with_its_numbers():
    (line,), _ = odd_lengths("lr_scheduler.num_warmup_steps=10000")
    assert "the warmup of 10000 steps is longer than the run of 60" in line
    assert "ends at 6e-06, 0.6% of optimizer.lr=0.001" in line  # 1e-3 x 60 / 10000
    (line,), _ = odd_lengths("lr_scheduler.num_warmup_epochs=100", "lr_scheduler.num_warmup_steps=null")  # of 2.5 steps
    assert "the warmup of 250 steps" in line
    assert odd_lengths("lr_scheduler.num_warmup_steps=60")[0] == []


def test_a_rate_by_the_batch_is_that_of_the_run_and_said_at_its_start(tiny, caplog, tmp_path):
    caplog.set_level("INFO")
    by_batch = ["optimizer.lr=4e-3", "optimizer.lr_base_size=384", "optimizer.lr_base_scale=sqrt"]
    overrides = [*tiny, "checkpoint.ckpt_dir=null", "num_train_steps=2", *by_batch]
    train_ddp.main(launch.load_config("L0_sanity", overrides, script="train_ddp"))
    assert "peak learning rate: optimizer.lr=0.004 x sqrt(24 / 384) = 0.001" in caplog.messages
    assert column(tmp_path, "run", "train/lr") == [5e-4, 1e-3]  # a warmup of two steps
    (line,), _ = odd_lengths("lr_scheduler.num_warmup_steps=600", *by_batch)
    assert "ends at 0.0001, 10.0% of optimizer.lr=0.004 x sqrt(24 / 384) = 0.001;" in line


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        (["ema.decay=0.9999"], 0.9999**59),
        (["ema.decay=0.97"], 0.97**59),
        (["ema.decay=0.95"], None),  # 5 %
        (["ema.decay=0.9999", "ema.use_warmup=true"], None),
        (["ema.decay=0.9999", "ema.use_warmup=true", "ema.warmup_gamma=1e-9"], 0.9999**59),
    ],
)
def test_an_average_that_is_longer_than_the_run_is_said_with_its_numbers(overrides, share):
    lines, ema = odd_lengths(*overrides)
    assert len(lines) == (share is not None)
    weight, average = ema.weights["weight"], ema.averages["weight"]
    for step in range(1, 61):  # 1 at the first step, 0 from then on: what is left is the first step's share
        weight.fill_(float(step == 1))
        ema.update(step)
    assert (average.item() > 0.1) == bool(lines)
    if lines:
        assert f": {share:.0%} of the average" in lines[0]
        assert average.item() == pytest.approx(share, rel=1e-3)
        advised = float(lines[0].split("ema.decay=")[-1])
        assert odd_lengths("ema.use_warmup=false", f"ema.decay={advised}")[0] == []
        assert ("ema.use_warmup=true or" in lines[0]) == (len(overrides) == 1)


def test_a_run_says_what_is_seldom_meant_once(tiny, caplog):
    def warnings(*overrides):
        caplog.clear()
        overrides = [*tiny, "checkpoint.ckpt_dir=null", "num_train_steps=2", *overrides]
        train_ddp.main(launch.load_config("L0_sanity", overrides, script="train_ddp"))
        return [record.message for record in caplog.records if record.levelname == "WARNING"]

    assert warnings() == []
    assert len(warnings("lr_scheduler.num_warmup_steps=9", "ema.decay=0.9999")) == 2
