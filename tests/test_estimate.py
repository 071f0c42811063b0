"""tools/estimate.py and tools/check_estimate.py, by arithmetic."""

import argparse
import dataclasses
import gc
import json
import re
import shlex
import sys

import pytest
import torch
from conftest import ROOT

import check_estimate
import dry_run
import estimate
import figures
import modeling

P, BLOCK, FLOPS = 86_567_656, 7_087_872, 35.13e9  # of B/16: parameters, those of a block, FLOPs of a forward pass
NETWORK = 50.0
FP8 = ["compile=false", "model.act_layer=gelu_tanh", "model.transformer_engine=true", "fp8_config.enabled=true"]
SGD = ["optimizer.name=sgd", "optimizer.betas=null", "optimizer.eps=null", "optimizer.momentum=0.9"]
NO_GRAPHS = ["vit_base_patch16_224", "cuda_graphs=false"]


def config(*overrides):
    return estimate.config_of("vit_base_patch16_224", ["cuda_graphs=false", *overrides], "train_fsdp2")


def estimated(script, gpus, *overrides):
    cfg = config(*overrides)
    return estimate.estimate(cfg, script, gpus, estimate.Shape.of(cfg), network=NETWORK)


def test_shape():
    shape = estimate.Shape.of(config())
    assert (shape.params, shape.block) == (P, BLOCK)
    assert shape.flops == pytest.approx(FLOPS, rel=1e-3)


def test_memory():
    """A block keeps 16 tensors of (images, tokens, width); 11 more are kept elsewhere; two bytes a number."""
    stream = 2 * 128 * 197 * 768
    ddp = estimated("train_ddp", 8)
    parts = {"weights": 6 * P, "gradients": 4 * P, "optimizer": 8 * P, "activations": stream * (12 * 16 + 11)}
    assert ddp.memory == pytest.approx({name: size / 2**30 for name, size in parts.items()})
    assert ddp.peak == pytest.approx(sum(parts.values()) / 2**30)

    fsdp2 = estimated("train_fsdp2", 8, "micro_batch_size=64")
    gathered = 2 * (P - 12 * BLOCK + 2 * BLOCK) + 6 * BLOCK
    parts = {"weights": 4 * P / 8, "gradients": 4 * P / 8, "optimizer": 8 * P / 8, "gathered": gathered}
    parts |= {"activations": stream / 2 * (12 * 16 + 11), "whole gradients": 4 * P}
    assert fsdp2.memory == pytest.approx({name: size / 2**30 for name, size in parts.items()})
    assert fsdp2.peak == pytest.approx((sum(parts.values()) - 4 * P / 8) / 2**30)

    bf16 = estimated("train_ddp", 8, "optimizer.state_dtype=bf16", "optimizer.betas=[0.9,0.95]")
    assert bf16.memory["optimizer"] == pytest.approx(4 * P / 2**30)

    gathered = estimated("train_fsdp2", 8, "fsdp2.reshard_after_forward=false").memory["gathered"]
    assert gathered == pytest.approx((2 * P + 6 * BLOCK) / 2**30)
    gathered = estimated("train_fsdp2", 8, "fsdp2.gathered_blocks=3").memory["gathered"]
    assert gathered == pytest.approx((2 * (P - 9 * BLOCK) + 6 * BLOCK) / 2**30)
    # Megatron-FSDP keeps BF16 weights and its gradients' buffers; in FP8 two bytes of each whole weight.
    parts = {"weights": 6 * P / 8, "gradients": 4 * P / 8, "optimizer": 8 * P / 8}
    parts |= {"gathered": 2 * (P - 12 * BLOCK + 2 * BLOCK) + 6 * BLOCK}
    parts |= {"activations": stream * (12 * 16 + 11)}
    mfsdp = estimated("train_mfsdp", 8)
    assert mfsdp.peak == pytest.approx(sum(parts.values()) / 2**30)
    fp8 = estimated("train_mfsdp", 8, *FP8)
    assert fp8.memory["FP8 weights"] == pytest.approx(2 * P / 2**30)

    recomputed = estimated("train_fsdp2", 8, "activation_checkpointing=true")
    assert recomputed.memory["activations"] == pytest.approx(stream * (12 + 16 + 11) / 2**30)
    assert recomputed.settings == {"micro_batch_size": 128, "activation_checkpointing": True}  # what is printed
    selective = estimated("train_fsdp2", 8, "activation_checkpointing=selective")
    assert selective.memory["activations"] == pytest.approx(stream * (12 * 8 + 8 + 11) / 2**30)
    assert estimated("train_fsdp2", 8, "distributed.dp_outer=4").memory["weights"] == pytest.approx(4 * P / 2 / 2**30)


def saved_by_a_block(cfg):
    """Bytes that autograd keeps of a block for an image: what a block more adds for two images more, halved."""

    def saved(depth, images):
        deeper = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, depth=depth))
        model = modeling.build_model(deeper.model, deeper.fp8_config)
        model.init_weights(0)
        modeling.prepare_blocks(model, activation_checkpointing=cfg.activation_checkpointing, compile=False)
        model = model.bfloat16()  # FSDP2's copies
        kept, batch = dry_run.Saved(list(model.shard_units())), torch.rand(images, 3, 64, 64)
        with torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor):
            logits = model(batch)
        assert logits.requires_grad
        return kept.close()

    return (saved(3, 4) - saved(2, 4) - saved(3, 2) + saved(2, 2)) / 2


SHORT = ["model.embed_dim=384", "model.num_heads=4", "model.depth=2", "model.img_size=64", "compile=false"]
ROPE, SILU = "model.rope_type=dinov3", "model.act_layer=silu"
# Options of the model, and tensors that a CPU keeps beyond a GPU: attention's output there has the queries' layout, and
# is copied once more where they were made apart.
MODELS = {
    "plain": ([], 0),
    "layer_scale": (["model.init_values=1e-5"], 0),
    "qk_norm": (["model.qk_norm=true"], 1),
    "rope": ([ROPE], 1),
    "rope_qk_norm": ([ROPE, "model.qk_norm=true"], 1),
    "three_matrices": ([ROPE, "model.qkv_fused=false"], 1),
    "glu": (["model.mlp_layer=glu", SILU], 0),
    "glu_with_norms": (["model.mlp_layer=glu", SILU, "model.scale_mlp_norm=true", "model.scale_attn_norm=true"], 0),
    "eva02": ([ROPE, "model.mlp_layer=swiglu", SILU, "model.scale_mlp_norm=true", "model.mlp_ratio=2.5"], 1),
    "sapiens2": ([ROPE, "model.mlp_layer=glu", SILU, "model.init_values=1e-4", "model.attn_only_layer_scale=true"], 1),
}


@pytest.mark.parametrize("recompute", ["false", "selective", "true"])
@pytest.mark.parametrize("model", MODELS)
def test_what_a_block_keeps_is_what_autograd_saves(model, recompute):
    """In BF16, to a tenth of one of the tensors: the statistics of norms and attention are not counted."""
    options, on_a_cpu = MODELS[model]
    cfg = config(*SHORT, *options, f"activation_checkpointing={recompute}")
    kept, _ = estimate.activations(cfg, "train_fsdp2")
    kept += on_a_cpu if recompute != "true" else 0
    assert saved_by_a_block(cfg) / (2 * cfg.model.num_tokens() * 384) == pytest.approx(kept, abs=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["false", "selective", "true"])
@pytest.mark.parametrize("kind", ["plain", "autocast", "te", "fp8"])
def test_what_a_block_keeps_on_a_gpu(kind, recompute):
    """By the allocator, which counts what TransformerEngine keeps aside, too; an eager norm leaves FP32 there."""
    options = {"te": ["model.transformer_engine=true", "model.act_layer=gelu_tanh"]}
    options["fp8"] = [*options["te"], "fp8_config.enabled=true", "fp8_config.fp8_recipe=Float8CurrentScaling"]
    large = ["model.embed_dim=1024", "model.num_heads=16", "model.depth=2", "compile=false"]
    cfg = config(*large, f"activation_checkpointing={recompute}", *options.get(kind, []))

    def kept(depth, images):
        deeper = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, depth=depth))
        with torch.device("cuda"):
            model = modeling.build_model(deeper.model, deeper.fp8_config)
        model.init_weights(0)
        modeling.prepare_blocks(model, activation_checkpointing=cfg.activation_checkpointing, compile=False)
        model = model if kind == "autocast" else model.bfloat16()
        batch = torch.rand(images, 3, 224, 224, device="cuda")
        for _ in range(2):  # the second has no first use in it
            model.zero_grad()
            gc.collect()  # what earlier tests left in cycles
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
                loss = model(batch).float().sum()
            bytes_kept = torch.cuda.memory_allocated() - before
            loss.backward()
        return bytes_kept

    a_tensor = 2 * 197 * 1024
    got = (kept(4, 32) - kept(2, 32) - kept(4, 16) + kept(2, 16)) / (2 * 16 * a_tensor)
    want, _ = estimate.activations(cfg, "train_ddp" if kind == "autocast" else "train_fsdp2")
    print(f"{kind} {recompute}: {got:.2f} tensors, {want:.2f} by the estimate")
    assert got == pytest.approx(want, abs=0.5 + 0.1 * want if kind == "fp8" else 0.5)


def test_time():
    """The rate is of a step with weights' traffic (56 bytes a parameter) and 1.8 ms between steps, which are apart."""
    moves = 28 * 1.8444e9 / 14.9e-3  # bytes a second
    passes = 512 / 3984.0 - 56 * 86.6e6 / moves - 1.8e-3
    compute = 128 * 3 * FLOPS / (512 * 105.4e9) * passes
    host = 61.0 / 2e3  # B/16 has half of L/16's blocks
    ring = 2 * (4 * P * 7 / 8 / 295.1e9 + 14 * 7 * 3e-6)  # an all-reduce of 14 buckets of 25 MiB
    got = estimated("train_ddp", 8)
    assert got.compute == pytest.approx(compute, rel=1e-3)
    assert (got.host, got.network) == (host, pytest.approx(ring))
    weights = (56 + 8) * P / moves + 1.8e-3  # gradients are divided by the ranks
    assert got.weights == pytest.approx(weights)
    assert got.step == pytest.approx(compute * 1.03 + weights + ring / 2, rel=1e-3)
    alone = estimated("train_ddp", 1, "micro_batch_size=512", "global_batch_size=512", "cuda_graphs=true")
    assert 512 / alone.step == pytest.approx(3984.0, rel=1e-3)

    assert estimated("train_ddp", 8, "micro_batch_size=32").host == pytest.approx(4 * host)
    assert estimated("train_ddp", 1).network == 0
    assert estimated("train_ddp", 8, "activation_checkpointing=true").compute == pytest.approx(4 / 3 * got.compute)
    # Of a block's 12 D^2 products a token and 2 N D of attention, selective does the 4 D^2 of fc1 again.
    again = 12 * 2 * 197 * 4 * 768**2 / (3 * FLOPS)
    assert 0.1 < again < 0.12
    selective = estimated("train_ddp", 8, "activation_checkpointing=selective")
    assert selective.compute == pytest.approx((1 + again) * got.compute, rel=1e-3)
    dropout = estimated("train_ddp", 8, "activation_checkpointing=selective", "model.proj_drop_rate=0.1")
    assert dropout.compute == pytest.approx((1 + 2 * again) * got.compute, rel=1e-3)
    graphed = estimated("train_ddp", 8, "cuda_graphs=true", "micro_batch_size=64")
    assert graphed.host == pytest.approx(2 * 14.6 / 2e3)


def test_what_weights_take():
    """Of the update a shard's bytes, of each microbatch's casts and copies the whole model's."""
    moves = 28 * 1.8444e9 / 14.9e-3

    def moved(script, gpus, *overrides):
        return (estimated(script, gpus, *overrides).weights - 1.8e-3) * moves / P

    assert moved("train_ddp", 1, "micro_batch_size=256") == pytest.approx(44 + 4 * 12)
    assert moved("train_fsdp2", 8, "micro_batch_size=64") == pytest.approx(44 / 8 + 2 * 26)
    assert moved("train_mfsdp", 8) == pytest.approx(44 / 8 + 18)
    assert moved("train_fsdp2", 8, "ema.decay=0.99") == pytest.approx((44 + 12) / 8 + 26)
    assert moved("train_fsdp2", 1, *SGD) == pytest.approx(36 + 26)


def test_collectives():
    """FSDP2 gathers BF16 twice a microbatch, reduces FP32 once a step; HSDP then adds up the parts over nodes."""
    hop = 3e-6
    sharded = 2 * 2 * P * 7 / 8 / 295.1e9 + 26 * 7 * hop + 4 * P * 7 / 8 / 295.1e9 + 13 * 7 * hop
    assert estimated("train_fsdp2", 8).network == pytest.approx(sharded)
    replicas = 2 * (4 * P / 8 * 3 / 4 / 50e9 + 13 * 3 * hop)  # 4 nodes, one card of each in a group
    assert estimated("train_fsdp2", 32, "distributed.dp_outer=4").network == pytest.approx(sharded + replicas)
    once = estimated("train_fsdp2", 8, "fsdp2.reshard_after_forward=false").network
    assert once == pytest.approx(sharded - 2 * P * 7 / 8 / 295.1e9 - 13 * 7 * hop)
    last = estimated("train_fsdp2", 8, "fsdp2.gathered_blocks=3").network
    assert last == pytest.approx(sharded - 2 * 3 * BLOCK * 7 / 8 / 295.1e9 - 3 * 7 * hop)
    assert estimated("train_mfsdp", 8, "fsdp2.gathered_blocks=3") == estimated("train_mfsdp", 8)
    twice = estimated("train_fsdp2", 8, "micro_batch_size=64").network
    assert twice == pytest.approx(sharded + 2 * 2 * P * 7 / 8 / 295.1e9 + 26 * 7 * hop)


def test_sizes_by_epoch_are_a_mean_of_their_steps_and_the_memory_of_the_largest(capsys):
    change = ["num_epochs=4", "data.size_schedule=[{epoch:3,img_size:384,global_batch_size:512}]"]
    small, large = (estimated("train_ddp", 8, *size) for size in ([], ["model.img_size=384", "global_batch_size=512"]))
    both = estimated("train_ddp", 8, *change)
    first = 3 * 1281167 // 1024
    rest = (4 * 1281167 - first * 1024) // 512
    for name in ("step", "compute"):
        times = getattr(small, name) * first + getattr(large, name) * rest
        assert getattr(both, name) == pytest.approx(times / (first + rest))
    assert both.peak == max(small.peak, large.peak)
    arguments = argparse.Namespace(
        config="vit_base_patch16_224", overrides=change, card="H200", network=50.0, price=None
    )
    estimate.show(arguments, 8)
    assert f"{first + rest:,} steps of 1024 and 512 images" in capsys.readouterr().out
    torn = config(*change, "micro_batch_size=128")
    typed = frozenset(["micro_batch_size"])
    found = estimate.ways(torn, 8, 130.0, estimate.Shape.of(torn), network=NETWORK, typed=typed)
    assert "global_batch_size=512 is not micro_batch_size=128 x 8 ranks" in found["train_ddp"]


def test_what_fits():
    cfg = config("model=vit_10b_patch14_224")
    shape = estimate.Shape.of(cfg)
    found = estimate.ways(cfg, 8, 130.0, shape, network=NETWORK)
    assert found["train_ddp"] == "does not fit 130 GiB"  # 18 bytes of 10 billion parameters
    for script in ("train_fsdp2", "train_mfsdp"):
        way = found[script]
        assert isinstance(way, estimate.Estimate)
        assert way.peak <= 130
        again = dataclasses.replace(cfg, micro_batch_size=way.settings["micro_batch_size"])
        assert estimate.estimate(again, script, 8, shape, network=NETWORK).step == way.step
    assert set(estimate.ways(cfg, 1, 130.0, shape, network=NETWORK).values()) == {"does not fit 130 GiB"}


def test_graphs_that_were_typed_refuse_recomputation_that_was():
    cfg, both = config("cuda_graphs=true"), config("cuda_graphs=true", "activation_checkpointing=true")
    typed = frozenset(["cuda_graphs", "activation_checkpointing"])
    found = estimate.ways(both, 8, 130.0, estimate.Shape.of(both), network=NETWORK, typed=typed)
    assert all("cuda_graphs=true records no activation_checkpointing=true" in why for why in found.values())
    free = estimate.ways(cfg, 8, 130.0, estimate.Shape.of(cfg), network=NETWORK, typed=frozenset(["cuda_graphs"]))
    assert all(way.settings["activation_checkpointing"] is False for way in free.values())


def test_what_the_command_line_gives_stays():
    typed = ["micro_batch_size=16", "activation_checkpointing=true", "distributed.dp_outer=2"]
    cfg = config(*typed)
    keys = frozenset(override.split("=")[0] for override in typed)
    found = estimate.ways(cfg, 8, 130.0, estimate.Shape.of(cfg), network=NETWORK, typed=keys)
    assert found["train_ddp"] == "distributed.dp_outer=2: DDP does not shard; set it to null or use train_fsdp2.py"
    for script in ("train_fsdp2", "train_mfsdp"):
        expected = {"micro_batch_size": 16, "activation_checkpointing": True, "distributed.dp_outer": 2}
        assert found[script].settings == expected


def test_a_strategy_that_would_refuse_is_not_advised():
    """Megatron-FSDP: positions that are not trained; all: pairs of images in odd microbatches."""
    cfg = config("model.pos_embed=sincos", "data.mixup=0.2", "global_batch_size=24")
    found = estimate.ways(cfg, 4, 130.0, estimate.Shape.of(cfg), network=NETWORK)
    assert "model.pos_embed=sincos: Megatron-FSDP" in found["train_mfsdp"]
    assert found["train_ddp"].settings["micro_batch_size"] in (2, 6)


# A recipe on other cards


def translated(gpus, *overrides, name="vit_base_patch16_224"):
    cfg = estimate.config_of(name, list(overrides), "train_fsdp2")
    keys = frozenset(override.split("=")[0] for override in overrides)
    return estimate.translation(cfg, gpus, keys)


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (8, [], []),
        (1024, [], []),
        (12, [], "global_batch_size=1020 optimizer.lr_base_size=1024 optimizer.lr_base_scale=sqrt"),
        (2000, [], "global_batch_size=2000 optimizer.lr_base_size=1024 optimizer.lr_base_scale=sqrt"),
        (12, SGD, "global_batch_size=1020 optimizer.lr_base_size=1024 optimizer.lr_base_scale=linear"),
        (12, ["optimizer.lr_base_scale=linear"], "global_batch_size=1020 optimizer.lr_base_size=1024 "
         "optimizer.lr_base_scale=linear"),
        (12, ["optimizer.lr_base_size=256"], "global_batch_size=1020"),  # its own rule
        (1024, ["data.mixup=0.2"], "global_batch_size=2048 optimizer.lr_base_size=1024 optimizer.lr_base_scale=sqrt"),
        (8, ["global_batch_size=30", "data.repeated_augmentation=3"], "global_batch_size=24 optimizer.lr_base_size=30 "
         "optimizer.lr_base_scale=sqrt"),
        (8, ["micro_batch_size=100"], "global_batch_size=800 optimizer.lr_base_size=1024 optimizer.lr_base_scale=sqrt"),
    ],
)  # fmt: skip
def test_the_batch_is_the_nearest_that_the_ranks_divide(gpus, overrides, expected):
    at_once = translated(gpus, *overrides, "lr_scheduler.num_warmup_steps=null", "lr_scheduler.num_warmup_epochs=5")
    assert at_once == (expected.split() if expected else [])


def test_lengths_in_steps_keep_their_epochs_and_other_rates_stay_below_the_peak():
    steps = ["num_epochs=null", "num_train_steps=1000", "lr_scheduler.num_training_steps=900"]
    got = translated(64, *steps, "global_batch_size=96", "lr_scheduler.num_warmup_steps=3", "lr_scheduler.min_lr=1e-3")
    assert got[0] == "global_batch_size=128"
    assert got[3:] == [
        *("num_train_steps=750", "lr_scheduler.num_warmup_steps=2", "lr_scheduler.num_training_steps=675"),
    ]
    got = translated(64, "global_batch_size=160", "lr_scheduler.min_lr=1e-3")
    assert got[0] == "global_batch_size=128"
    assert got[3] == f"lr_scheduler.min_lr={1e-3 * (128 / 160) ** 0.5!r}"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, "python train_ddp.py"),
        (6, "torchrun --standalone --nproc-per-node 6 train_ddp.py"),
        (32, "sbatch --nodes=4 slurm.sh train_ddp.py"),
        (12, "sbatch --nodes=2 --gpus-per-node=6 slurm.sh train_ddp.py"),
    ],
)
def test_command(gpus, expected):
    got = estimate.command("train_ddp", "deit_b16", ["data.path=/my data"], gpus)
    assert got == f"{expected} --config-name deit_b16 'data.path=/my data'"


def told(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["tools/estimate.py", *arguments])
    code = 0
    try:
        estimate.main()
    except SystemExit as ended:
        code = ended.code
    return code, capsys.readouterr()


def test_program(monkeypatch, capsys):
    code, said = told(
        monkeypatch, capsys, "vit_base_patch16_224", "--gpus", "8,64", "optimizer.lr=2e-3", "cuda_graphs=false"
    )
    assert code == 0
    assert "86,567,656 parameters" in said.out
    assert "8 x H200: 375,341 steps of 1024 images, compiled blocks, 4.05e+19 FLOP" in said.out
    assert said.out.count("* train_") == 2  # what it recommends
    assert said.out.count("the host sets the pace") == 5  # all at 64 cards, and at 8 the two that shard
    assert said.out.count("\n    peak learning rate 0.002 (optimizer.lr=0.002), recipe: 0.001\n") == 2


def command_in(text):
    """The command that the tool printed, from its script on, and the lines on what is no longer the recipe."""
    lines = text.splitlines()
    (starts,) = (i for i, line in enumerate(lines) if "--config-name" in line)
    words = shlex.split(lines[starts])
    first = next(i for i, word in enumerate(words) if word.startswith("train_"))
    assert lines[starts + 1].startswith("  no longer the recipe of config/")
    return words[first:], [line.strip() for line in lines[starts + 2 :]]


def test_what_it_prints_starts(monkeypatch, capsys):
    """The printed command, tried on as many ranks as are meant."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # put back afterwards
    of_noise = ["data=synthetic", "model=vit_tiny_patch16_224", "model.depth=2"]
    code, said = told(monkeypatch, capsys, "deit_b16", "--gpus", "20", "--price", "2", *of_noise)
    assert code == 0, said.err
    assert "20 x H200: 413,710 steps of 960 images" in said.out
    hours, card_hours, cost = re.search(r"([\d,.]+) hours, ([\d,]+) card-hours, ([\d,]+) at 2 each", said.out).groups()
    assert float(card_hours) == pytest.approx(20 * float(hours), abs=1.5)
    assert float(cost) == pytest.approx(2 * float(card_hours), abs=1.5)
    (script, *arguments), lines = command_in(said.out)
    peak = 1e-3 * (960 / 1008) ** 0.5
    assert lines[:2] == [
        "global_batch_size=960, recipe: 1008; ema.decay=0.99996 then averages over other images",
        f"peak learning rate {peak:.4g} (optimizer.lr=0.001 x sqrt(960 / 1008) = {peak:g}), recipe: 0.001",
    ]
    assert {"model.embed_dim=192, recipe: 768", "lr_scheduler.num_training_steps=400364, recipe: 381299"} < set(lines)
    assert "data.source=synthetic, recipe: folder" in lines
    monkeypatch.setattr(sys, "argv", ["tools/dry_run.py", script, "--ranks", "20", *arguments])
    dry_run.main()
    assert "batch: 48 images x 20 ranks x 1 microbatches" in capsys.readouterr().out


def test_a_recipe_on_its_own_cards_stays_the_recipe(monkeypatch, capsys):
    _, said = told(monkeypatch, capsys, "deit3_b16", "--card", "H100", "--gpus", "8")
    words, lines = command_in(said.out)
    assert words[:4] == ["train_ddp.py", "--config-name", "deit3_b16", "data.path=/data/imagenet"]
    assert lines == ["nothing: all of it is as there"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["vit_base_patch16_224", "precision=fp32"], "precision=fp32 is not in the estimate: set precision=bf16"),
        (
            ["vit_base_patch16_224", "model.freeze=backbone"],
            "model.freeze=backbone is not in the estimate",
        ),
        (["vit_base_patch16_224", "mfsdp.zero_dp_strategy=optim"], "mfsdp.zero_dp_strategy=optim is not in"),
        ([*NO_GRAPHS, "fsdp2.cpu_offload=true"], "fsdp2.cpu_offload=true is not in the estimate"),
        ([*NO_GRAPHS, "data.packing.enabled=true"], "data.packing.enabled=true is not in the estimate"),
        ([*NO_GRAPHS, "distributed.tp=2"], "distributed.tp=2 is not in the estimate: set distributed.tp=1"),
        (
            ["vit_base_patch16_224", "model.block_fn=ResPostBlock"],
            "model.block_fn=ResPostBlock is not in the estimate: set model.block_fn=Block",
        ),
        (["vit_base_patch16_224", "model.rope_type=mixed"], "model.rope_type=mixed is not in the estimate"),
        (["vit_base_patch16_224", "--gpus", "eight"], "--gpus=eight: give numbers above 0"),
        (["vit_base_patch16_224", "--price", "-3"], "--price=-3: give what an hour of a card costs, 0 or more"),
        (["vit_base_patch16_224", "--network", "0"], "--network=0: give GB/s above 0"),
        (["vit_base_patch16_224", "optimzer.lr=1"], "unknown key optimzer.lr"),
        (["vit_base_patch16_224", "--card", "A100"], "invalid choice: 'A100'"),
    ],
)
def test_errors(monkeypatch, capsys, arguments, complaint):
    code, said = told(monkeypatch, capsys, *arguments)
    assert code == 2
    assert len(said.err.strip().splitlines()) == 1
    assert complaint in said.err


def test_rates_are_in_their_files():
    for known in estimate.RATES.values():
        for rate in known.values():
            assert rate.commit in figures.commits(rate.file)
            rows = [row for row in check_estimate.measured_runs() if row["file"] == rate.file]
            assert any(round(row["images_per_second"], 1) == rate.speed for row in rows), rate


@pytest.mark.slow
def test_the_comparison_is_of_this_tool(tmp_path):
    check_estimate.compare(tmp_path / "estimate.json")
    now, kept = (
        json.loads(path.read_text())["results"]
        for path in (tmp_path / "estimate.json", ROOT / "benchmarks/estimate.json")
    )
    assert now == kept
    assert len(now["rows"]) > 30
