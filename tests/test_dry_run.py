"""tools/dry_run.py: its numbers against arithmetic, its errors against the entrypoints'."""

import math
import re
import resource
import sys

import pytest
import torch
from conftest import ROOT, error_of, run_command, tiny_config

import dry_run
from modeling import build_model

SYNTHETIC = ["data.source=synthetic", "data.path=null", "data.num_synthetic_train=480", "data.num_synthetic_val=8"]


def tried(script, *overrides, ranks=8):
    """The trial of a tiny run, and its parameters' shapes by unit: those of each block, then the rest."""
    cfg = tiny_config(*SYNTHETIC, *overrides)
    with torch.device("meta"):
        model = build_model(cfg.model, cfg.fp8_config)
    blocks = [[p.shape for p in block.parameters()] for block in model.shard_units()]
    rest = [p.shape for name, p in model.named_parameters() if not name.startswith("blocks.")]
    (trial,) = dry_run.dry_run(cfg, script, ranks)
    return trial, [*blocks, rest]


def sharded(shapes, ranks):
    """Numbers of the first rank's part: rows are dealt out in rows of equal height, the last ones lower or empty."""
    return sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes)


def whole(shapes):
    return sum(math.prod(shape) for shape in shapes)


def test_fsdp2_on_eight_ranks():
    trial, units = tried("train_fsdp2")
    flat = [shape for unit in units for shape in unit]
    assert trial.mesh == {"dp_outer": 1, "dp_shard": 8, "tp": 1}
    assert (trial.sizes.micro_batch_size, trial.sizes.accumulation) == (3, 1)
    assert trial.units == [whole(unit) for unit in units]
    part = 4 * sharded(flat, 8)
    trial.memory.pop("activations of a microbatch")
    assert trial.memory == {
        "weights": part,
        "gradients": part,
        "optimizer": 2 * part + 4 * len(flat),  # a step counter for each tensor
        "gathered weights": 4 * whole(flat),  # two blocks, which are all there are, and the rest
        "gradients of a block before they are reduced": (4 + 4) * whole(units[0]),
    }
    padded = 4 * 8 * sharded(flat, 8)
    assert trial.collectives == {
        dry_run.Collective("all-gather", 8): (2 * 3, 2 * padded),  # forward and backward; two blocks and the rest
        dry_run.Collective("reduce-scatter", 8): (3, padded),
        dry_run.Collective("all-reduce", 8): (1, 8),  # the gradient's norm, in float64
    }


@pytest.mark.parametrize("script", ["train_ddp", "train_fsdp2"])
def test_each_size_of_a_schedule_is_tried(script):
    change = "data.size_schedule=[{epoch:0.25,img_size:32}]"
    small, large = dry_run.dry_run(tiny_config(*SYNTHETIC, change), script, 8)
    assert (small.sizes.last_step, large.sizes.first_step, large.sizes.last_step) == (5, 5, 6)
    alone, _ = tried(script, "model.img_size=32")
    assert large.memory == alone.memory
    assert large.memory["activations of a microbatch"] > small.memory["activations of a microbatch"]


def test_rows_of_images_are_refused_by_name():
    assert error_of(tried, "train_ddp", "data.packing.enabled=true").startswith("data.packing.enabled=true: ")


def test_replicas_of_shards_with_accumulation():
    trial, units = tried("train_fsdp2", "distributed.dp_outer=2", "micro_batch_size=1", "precision=bf16")
    flat = [shape for unit in units for shape in unit]
    assert trial.mesh == {"dp_outer": 2, "dp_shard": 4, "tp": 1}
    padded = 4 * sharded(flat, 4)  # numbers
    assert trial.collectives == {
        dry_run.Collective("all-gather", 4): (3 * 2 * 3, 3 * 2 * padded * 2),  # of each microbatch, in BF16
        dry_run.Collective("reduce-scatter", 4): (3, padded * 4),  # of the last one alone, in FP32
        dry_run.Collective("all-reduce", 2): (3, padded),  # of the parts
        dry_run.Collective("all-reduce", 4): (1, 8),
    }
    assert trial.memory["weights"] == 4 * sharded(flat, 4)
    assert trial.memory["whole gradients between microbatches"] == 4 * whole(flat)
    assert trial.memory["gathered weights"] == 2 * whole(flat)


def test_tensor_parallelism():
    """Each block sums two outputs in the forward pass, and two gradients of its inputs in the backward pass."""
    wide = ["model.embed_dim=48", "model.num_heads=4", "global_batch_size=24"]
    trial, units = tried("train_fsdp2", "distributed.tp=2", *wide)
    assert trial.mesh == {"dp_outer": 1, "dp_shard": 4, "tp": 2}
    assert trial.sizes.micro_batch_size == 24 // 4
    stream = 6 * 4 * 48 * 4  # images x tokens x width x 4 bytes
    count, size = trial.collectives[dry_run.Collective("all-reduce", 2)]
    # Two blocks; and the gradient's norm, of matrices cut by rows and of those cut by columns.
    assert (count - 2, size - 2 * 8) == (4 * 2, 4 * 2 * stream)
    norms_and_biases = 6 * 48
    assert trial.units[0] == (whole(units[0]) - norms_and_biases) // 2 + norms_and_biases
    alone, _ = tried("train_fsdp2", *wide)
    # A little more: over four ranks, not eight, goes what tp does not cut.
    assert 1 < trial.memory["weights"] / alone.memory["weights"] < 1.2


def test_weights_that_stay_gathered_are_gathered_once():
    trial, units = tried("train_fsdp2", "fsdp2.reshard_after_forward=false", "model.depth=3")
    flat = [shape for unit in units for shape in unit]
    assert trial.collectives[dry_run.Collective("all-gather", 8)] == (4, 4 * 8 * sharded(flat, 8))
    assert trial.memory["gathered weights"] == 4 * whole(flat)


def test_the_last_blocks_stay_gathered():
    """A gather less for each, their weights in memory; one alone takes none, as two are gathered at a time."""
    every, units = tried("train_fsdp2", "model.depth=4")
    for number in (1, 3):
        trial, _ = tried("train_fsdp2", "model.depth=4", f"fsdp2.gathered_blocks={number}")
        gather = dry_run.Collective("all-gather", 8)
        (count, size), (all_count, all_size) = trial.collectives[gather], every.collectives[gather]
        assert all_count - count == number
        assert all_size - size == number * 4 * 8 * sharded(units[0], 8)
        more = 4 * (max(number, 2) - 2) * whole(units[0])
        assert trial.memory["gathered weights"] == every.memory["gathered weights"] + more


def test_ddp():
    trial, units = tried("train_ddp", "micro_batch_size=1", "ema.decay=0.9")
    flat = [shape for unit in units for shape in unit]
    bucket = dry_run.Collective("all-reduce", 8)
    assert trial.collectives == {bucket: (1, 4 * whole(flat))}  # once a step: the last microbatch's
    assert bucket.sent(800) == 2 * 7 / 8 * 800
    memory = {name: trial.memory[name] for name in ("weights", "gradients", "averages")}
    assert set(memory.values()) == {4 * whole(flat)}
    assert "gathered weights" not in trial.memory


def test_buckets_are_those_of_the_second_pass():
    """DDP's first pass has one bucket for all."""
    wide = ["model.embed_dim=480", "ddp.bucket_cap_mb=1"]
    trial, units = tried("train_ddp", *wide)
    (count, size) = trial.collectives[dry_run.Collective("all-reduce", 8)]
    assert size == 4 * sum(map(whole, units))
    assert count >= 2 * 3  # each of a block's three largest matrices fills one


def test_activations_of_a_block():
    """Its input, two norms' outputs, q, k, v, attention's output, their sum with the input, 4 + 4 of the MLP.

    Also two numbers a token of each norm, and one a token and head of attention; a recomputed block has its input only,
    one with a recomputed MLP all but the MLP's 4 + 4.
    """
    bytes_of_stream = 4 * 3 * 4 * 24  # 3 images' 4 tokens of width 24

    def a_block(*overrides):
        kept = [tried("train_fsdp2", f"model.depth={depth}", *overrides)[0].memory for depth in (1, 2)]
        return (kept[1]["activations of a microbatch"] - kept[0]["activations of a microbatch"]) / bytes_of_stream

    assert a_block() == pytest.approx(16 + (2 + 2 + 3) / 24)
    assert a_block("activation_checkpointing=selective") == pytest.approx(8 + (2 + 2 + 3) / 24)
    assert a_block("activation_checkpointing=true") == 1


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["optimizer.name=lamb"], marks=pytest.mark.slow),
        pytest.param(["optimizer.state_dtype=bf16", "optimizer.betas=[0.9,0.95]"], marks=pytest.mark.slow),
        ["optimizer.name=muon", "optimizer.momentum=0.95"],
        ["data.mixup=0.8", "data.cutmix=1.0", "micro_batch_size=2", "global_batch_size=32", "model.drop_path_rate=0.1"],
        pytest.param(["compile=true"], marks=pytest.mark.slow),
    ],
    ids=lambda overrides: overrides[0],
)
def test_any_recipe(overrides):
    for script in dry_run.SCRIPTS:
        trial, _ = tried(script, *overrides)
        assert trial.memory["optimizer"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["train_fsdp2", "--ranks", "1000", "--config-name", "vit_base_patch16_224", "data=synthetic"],
            "global_batch_size=1024 is not micro_batch_size=1 x 1000 ranks x a whole number",
        ),
        (
            ["train_fsdp2", "--ranks", "1024", "distributed.dp_outer=3", "global_batch_size=1024"],
            "distributed.dp_outer=3 x distributed.dp_shard=null is not the world size of 1024",
        ),
        (["train_ddp", "--ranks", "8", "data.path=/nowhere", "global_batch_size=64"], "data.path=/nowhere"),
        (["train_ddp", "--ranks", "8", "global_batch_size=64", "optimzer.lr=1"], "unknown key optimzer.lr"),
        (["train_ddp", "--ranks", "8", "cuda_graphs=true", "global_batch_size=64"], "cuda_graphs=true needs a CUDA"),
        (["train_mfsdp", "--ranks", "8"], "Megatron-FSDP needs a GPU"),
        (["train", "--ranks", "8"], "train is none of train_ddp, train_fsdp2"),
        (["train_ddp", "--ranks", "0"], "--ranks=0: give at least 1"),
    ],
)
def test_errors_are_the_entrypoints(monkeypatch, capsys, arguments, complaint):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # put back afterwards
    monkeypatch.setattr(sys, "argv", ["tools/dry_run.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        dry_run.main()
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert complaint in said[0]


@pytest.mark.slow
def test_a_thousand_ranks_take_less_than_a_minute(tmp_path):
    """Of this CPU's time, whoever else uses it."""
    large = ["--config-name", "vit_base_patch16_224", "data=synthetic", "model=vit_10b_patch14_224"]
    options = ["distributed.dp_outer=128", f"output_dir={tmp_path / 'run'}", "compile=false"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_command([ROOT / "tools/dry_run.py", "train_fsdp2.py", "--ranks", "1024", *large, *options])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    assert "mesh: dp_outer=128 x dp_shard=8" in done.stdout
    assert "32 blocks of 314,639,360" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("size", "ranks", "block"), [("22b", 64, 453_046_784), ("60b", 256, 1_258_394_112)])
def test_the_largest_models_are_built_wrapped_and_take_a_step(tmp_path, size, ranks, block):
    large = ["--config-name", "vit_10b_patch14_224", "data=synthetic", f"model=vit_{size}_patch14_224"]
    options = ["global_batch_size=1024", f"output_dir={tmp_path / 'run'}", "compile=false"]
    command = [ROOT / "tools/dry_run.py", "train_fsdp2.py", "--ranks", ranks, *large, *options]
    done = run_command(command, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"48 blocks of {block:,}" in done.stdout
    assert re.search(r"\n +96 x all-gather", done.stdout)  # twice 48 blocks and the rest, less the two that stay
    weights, state = (float(re.search(rf"([\d.]+)  {part}\n", done.stdout)[1]) for part in ("weights", "optimizer"))
    assert state == pytest.approx(weights, rel=0.01)  # two averages in BF16
