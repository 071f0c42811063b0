"""Optimizers, layer-wise decay, averages and frozen weights: against timm, torch and formulas. On CPU.

What needs several processes runs in one set of two; a loop of torch's own in this process is what it must equal.
"""

import copy
import functools
import json

import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import (
    CPU_SCRIPTS,
    assert_same,
    column,
    loaders_of,
    rate_at,
    read_metrics,
    run_tasks,
    started_once,
    task_of,
    tiny_config,
    weights,
)
from safetensors.torch import load_file
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer as TimmViT
from timm.optim import Lamb as TimmLamb
from timm.optim import Muon as TimmMuon
from timm.optim import param_groups_layer_decay
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load

import optim
import schema
from interop.weights_in import read
from interop.weights_out import export_hugging_face, export_timm
from modeling import build_model
from optim import Bf16AdamW, Ema, Lamb, Muon, param_groups
from vit import VisionTransformer

SGD = ["optimizer.name=sgd", "optimizer.betas=null", "optimizer.eps=null", "optimizer.momentum=0.9"]


OPTIMIZERS = {
    "adamw": ["optimizer.layer_decay=0.5"],
    "sgd": [*SGD, "optimizer.lr=0.05", "optimizer.weight_decay=0.01"],
    "lamb": ["optimizer.name=lamb", "optimizer.lr=0.02", "optimizer.weight_decay=0.1"],
    "muon": ["optimizer.name=muon", "optimizer.momentum=0.95", "optimizer.layer_decay=0.5"],
}
EMA = ["ema.decay=0.8", "ema.use_warmup=true", "evaluation.every_n_steps=2", "evaluation.best_metric=val/ema_loss"]


FP32_STATE = ["optimizer.betas=[0.9,0.95]"]
BF16_STATE = [*FP32_STATE, "optimizer.state_dtype=bf16"]


HALF = ["num_train_steps=3", "lr_scheduler.num_training_steps=6", "checkpoint.save_final_model=false"]


# In this process


def test_lamb_is_timms():
    """Twenty steps: matrices that decay, one of them at zero first, and a bias that does not."""
    torch.manual_seed(0)
    starts = [torch.randn(5, 3), torch.zeros(2, 2), torch.randn(4)]
    sides = []
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6}
    for build in (lambda g: TimmLamb(g, max_grad_norm=None, **options), lambda g: Lamb(g, **options)):
        parameters = [nn.Parameter(start.clone()) for start in starts]
        groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]
        sides.append((parameters, build(groups)))
    for _ in range(20):
        gradients = [torch.randn_like(start) for start in starts]
        for parameters, optimizer in sides:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    for ours, theirs, start in zip(sides[1][0], sides[0][0], starts, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        assert (ours - start).abs().max() > 1e-2


def test_muon_is_torchs():
    """Twenty steps of tall, wide and square matrices, two of one shape and one never moved; and AdamW beside it."""
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape in ((24, 8), (24, 8), (8, 8), (8, 16), (16, 8), (5, 8), (8,))]
    ours, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    adamw = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6}
    groups = [
        {"params": ours[:5], "in_blocks": True, "weight_decay": 0.1},
        {"params": ours[5:], "in_blocks": False, "weight_decay": 0.0},
    ]
    optimizers = [Muon(groups, momentum=0.9, **adamw)]
    muon = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    optimizers += [torch.optim.Muon(theirs[:5], **muon), torch.optim.AdamW(theirs[5:], weight_decay=0.0, **adamw)]
    for _ in range(20):
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            mine.grad, other.grad = (torch.randn_like(mine) if i else torch.zeros_like(mine)), None
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other, start in zip(ours, theirs, starts, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        assert (mine - start).abs().max() > 1e-2


BF16 = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def moved(build, steps, dtype=torch.float32):
    """Starts, weights after some steps of random gradients whose sizes differ by a hundred, and the optimizer."""
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape in ((24, 8), (5,), (3, 4, 5), (0, 8))]
    parameters = [nn.Parameter(start.to(dtype, copy=True)) for start in starts]
    groups = [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:], "weight_decay": 0.0}]
    optimizer = build(groups)
    for step in range(steps):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape) * 10 ** (step % 3 - 2) + 1e-3
            parameter.grad = gradient.to(dtype)
        optimizer.step()
    return starts, parameters, optimizer


def with_bf16_state(groups):
    return Bf16AdamW(groups, **BF16)


def test_bf16_moments_stay_near_the_exact_ones():
    """A hundred steps, against torch's AdamW in float64."""
    starts, got, ours = moved(with_bf16_state, 100)
    _, want, theirs = moved(lambda g: torch.optim.AdamW(g, foreach=False, **BF16), 100, torch.float64)
    for start, mine, exact in list(zip(starts, got, want, strict=True))[:3]:  # the fourth is empty
        assert 0 < (mine - exact).norm() <= 0.01 * (exact - start).norm()
        for key in ("exp_avg", "exp_avg_sq"):
            moment, exact_moment = ours.state[mine][key], theirs.state[exact][key]
            assert moment.dtype == torch.bfloat16
            assert (moment - exact_moment).norm() <= 0.02 * exact_moment.norm()
        assert ours.state[mine]["step"] == 100


def test_bf16_moments_are_moved_piece_by_piece(monkeypatch):
    """To the same digits, and never more than a piece of them is there in float32."""
    _, want, _ = moved(with_bf16_state, 5)
    sizes, move = [], optim.adamw

    def noting(weights, *args, **kwargs):
        sizes.append(sum(weight.numel() for weight in weights))
        return move(weights, *args, **kwargs)

    monkeypatch.setattr(optim, "adamw", noting)
    monkeypatch.setattr(Bf16AdamW, "PIECE", 50)
    _, got, _ = moved(with_bf16_state, 5)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert max(sizes) <= 50
    assert sum(sizes) == 5 * (24 * 8 + 5 + 60)


@pytest.mark.parametrize(("beta", "decays"), [(0.95, True), (1 - 2**-7, True), (0.999, False)])
def test_which_averages_decay_in_bf16(beta, decays):
    """Of all 128 BF16 numbers from 1 to 2, and so of any: the limit that schema.py has."""
    numbers = 1 + torch.arange(128) / 128
    after = (numbers.double() * beta).bfloat16()
    assert torch.equal(after < numbers, torch.full((128,), decays))


def test_muon_moves_the_blocks_matrices():
    cfg = tiny_config("model.reg_tokens=1", "model.init_values=0.1", "model.qk_norm=true")
    model = VisionTransformer(cfg.model)
    groups = param_groups(model, model.no_weight_decay(), 0.1, 0.5, splits_blocks=True)
    moved = {id(p) for group in groups if group["in_blocks"] for p in group["params"]}
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert {name for name, p in model.named_parameters() if id(p) in moved} == {
        f"blocks.{block}.{layer}.weight" for block in range(cfg.model.depth) for layer in layers
    }
    assert all(group["weight_decay"] == 0.1 for group in groups if group["in_blocks"])


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_layers_have_timms_scales(pool):
    cfg = tiny_config(
        *("model.depth=3", f"model.global_pool={pool}", "model.class_token=true", "model.reg_tokens=2"),
        *("model.init_values=0.1", "model.pre_norm=true", "model.qk_norm=true"),
    )
    ours = VisionTransformer(cfg.model)
    theirs = TimmViT(
        *(16, 8, 3, 6, pool, 24, 3, 3),
        **{"reg_tokens": 2, "init_values": 0.1, "pre_norm": True, "qk_norm": True, "weight_init": "skip"},
    )
    groups = param_groups_layer_decay(theirs, 0.05, {*theirs.no_weight_decay(), "attn_pool.latent"}, layer_decay=0.75)
    wanted = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    wanted = {name: wanted[id(p)] for name, p in theirs.named_parameters()}
    groups = param_groups(ours, ours.no_weight_decay(), 0.05, 0.75)
    found = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    found = {name: found[id(p)] for name, p in ours.named_parameters()}
    assert found.keys() == wanted.keys()
    stem = theirs.group_matcher()["stem"]
    for name, values in wanted.items():
        # timm 1.0.29 counts these two with the last layers, 1.0.31 with what is before the blocks.
        if name.startswith(("norm_pre", "reg_token")) and name.split(".")[0] not in stem:
            values = (wanted["patch_embed.proj.weight"][0], values[1])
        assert found[name] == pytest.approx(values), name
    assert len({scale for scale, _ in found.values()}) == 5  # before the blocks, three blocks, the head


def test_a_distillation_token_and_its_head_have_timms_scales():
    cfg = tiny_config("model.global_pool=token", "model.class_token=true", "model.distilled=true")
    ours, theirs = (
        VisionTransformer(cfg.model),
        VisionTransformerDistilled(16, 8, 3, 6, "token", 24, 2, 3, weight_init="skip"),
    )
    groups = param_groups_layer_decay(theirs, 0.05, theirs.no_weight_decay(), layer_decay=0.75)
    wanted = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    groups = param_groups(ours, ours.no_weight_decay(), 0.05, 0.75)
    found = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    for name, p in theirs.named_parameters():
        assert found[id(ours.get_parameter(name))] == pytest.approx(wanted[id(p)]), name


def test_without_layer_decay_all_scales_are_one():
    cfg = tiny_config()
    model = VisionTransformer(cfg.model)
    assert {group["lr_scale"] for group in param_groups(model, set(), 0.1)} == {1.0}


@pytest.mark.parametrize("frozen", ["backbone", "patch_embed"])
def test_frozen_parameters_are_in_no_group(frozen):
    model = VisionTransformer(tiny_config(f"model.freeze={frozen}").model)
    grouped = {id(p) for group in param_groups(model, set(), 0.1) for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in grouped}
    if frozen == "backbone":
        assert names == {"head.weight", "head.bias"}
    else:
        assert {name for name, _ in model.named_parameters()} - names == {
            "patch_embed.proj.weight",
            "patch_embed.proj.bias",
        }


@pytest.mark.parametrize("use_warmup", [False, True])
def test_average_is_timms(use_warmup):
    cfg = tiny_config("ema.decay=0.9", f"ema.use_warmup={str(use_warmup).lower()}", "ema.warmup_gamma=3.0")
    model = nn.Linear(3, 2)
    theirs = ModelEmaV3(model, 0.9, use_warmup=use_warmup, warmup_gamma=3.0, warmup_power=2 / 3)
    ours = Ema(dict(model.named_parameters()), cfg.ema)
    for step in range(1, 60):
        for parameter in model.parameters():
            parameter.data.normal_()
        ours.update(step)
        theirs.update(model, step)
        assert ours.decay(step) == pytest.approx(theirs.get_decay(step), rel=1e-12)
        assert_same(ours.averages, {name: p.data for name, p in theirs.module.named_parameters()}, 1e-6)


# Two processes


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    """A function: one that makes tasks -> (outcomes, folder)."""

    @started_once
    def start(tasks_of):
        folder = tmp_path_factory.mktemp("optim")
        return run_tasks(tasks_of(image_folder, folder), nproc=2, folder=folder), folder

    return start


def _tasks(image_folder, folder):
    task, no_model = functools.partial(task_of, image_folder, folder), "checkpoint.save_final_model=false"

    tasks = []
    for name, options in OPTIMIZERS.items():
        for script in CPU_SCRIPTS:
            tasks.append(task(f"{name}-{script}", script, *options))
        if name != "adamw":  # tests/test_checkpoint.py has it
            tasks.append(task(f"{name}-half", "train_ddp", *options, *HALF, output=f"{name}-chain"))
            tasks.append(task(f"{name}-chain", "train_fsdp2", *options, output=f"{name}-chain"))
    tasks.append(task("bf16-train_ddp", "train_ddp", *BF16_STATE))
    tasks.append(task("bf16-half", "train_ddp", *BF16_STATE, *HALF, output="bf16-chain"))
    tasks.append(task("bf16-chain", "train_fsdp2", *BF16_STATE, "checkpoint.async_save=true", output="bf16-chain"))
    for name, first, second in (("to", FP32_STATE, BF16_STATE), ("from", BF16_STATE, FP32_STATE)):
        tasks.append(task(f"{name}-bf16-half", "train_ddp", *first, *HALF, output=f"{name}-bf16"))
        tasks.append(task(f"{name}-bf16", "train_fsdp2", *second, no_model, output=f"{name}-bf16"))
    tasks.append(task("sgd-accumulated", "train_ddp", *OPTIMIZERS["sgd"], "micro_batch_size=3"))
    tasks.append(task("sgd-resumes-adamw", "train_ddp", *OPTIMIZERS["sgd"], output="adamw-train_ddp", may_fail=True))
    for script in CPU_SCRIPTS:
        tasks.append(task(f"ema-{script}", script, *EMA))
    tasks.append(task("ema-half", "train_fsdp2", *EMA, *HALF, output="ema-chain"))
    tasks.append(task("ema-chain", "train_ddp", *EMA, no_model, output="ema-chain"))
    tasks.append(task("ema-zero2", "train_fsdp2", *EMA, "fsdp2.reshard_after_forward=false"))
    tasks.append(task("ema-gathered", "train_fsdp2", *EMA, "fsdp2.gathered_blocks=1"))
    tasks.append(task("without", "train_fsdp2", "evaluation.every_n_steps=2"))
    tasks.append(task("ema-later-half", "train_fsdp2", *HALF, output="ema-later"))
    tasks.append(task("ema-later", "train_ddp", *EMA, output="ema-later"))
    tasks.append(task("ema-off", "train_fsdp2", *HALF[1:2], "num_train_steps=8", output="ema-later"))
    fixed = ["model.pos_embed=sincos", "model.class_token=true", "model.representation_size=16"]
    for script in CPU_SCRIPTS:
        probe = ["model.freeze=backbone", "ema.decay=0.5", no_model]
        tasks.append(task(f"probe-{script}", script, *probe, before="pretend_a_peak"))
        options = [*fixed, no_model, "activation_checkpointing=true"]
        tasks.append(task(f"fixed-{script}", script, *options, before="pretend_a_peak"))
    hidden = ["model.representation_size=16", "checkpoint.save_final_model=false", "num_train_steps=1"]
    hidden += ["model.class_token=true", "model.global_pool=token"]
    tasks.append(task("hidden", "train_ddp", *hidden))
    # The paper's second part: another head, higher resolution, SGD.
    tune = [*OPTIMIZERS["sgd"], "model.img_size=24", "model.class_token=true"]
    tune += [f"checkpoint.init_from={folder}/fixed-train_ddp/checkpoints", "num_train_steps=1", "optimizer.lr=1e-30"]
    tasks.append(task("tuned", "train_fsdp2", *tune))
    return tasks


def _tasks_of_libraries(image_folder, folder):
    task = functools.partial(task_of, image_folder, folder)
    more = ["model.class_token=true", "model.reg_tokens=1", "model.init_values=0.1", "model.qk_norm=true"]
    paper = ["model.class_token=true", "model.global_pool=token"]
    tasks = [task("ours", "train_ddp", *more), task("ours-paper", "train_ddp", *paper)]
    for script in CPU_SCRIPTS:
        tasks.append(task(f"timm-{script}", script, *more, "model.implementation=timm"))
        tasks.append(task(f"hf-{script}", script, *paper, "model.implementation=hf"))
    tasks.append(task("timm-half", "train_fsdp2", *more, *HALF, "model.implementation=timm", output="timm-chain"))
    tasks.append(task("timm-chain", "train_ddp", *more, output="timm-chain"))
    return tasks


def torch_loop(image_folder, name, *, ema=False):
    """Losses, final weights, averages and validation losses of six steps by torch's own optimizer, or by timm's."""
    cfg = tiny_config(f"data.path={image_folder}", *OPTIMIZERS.get(name, ()), *(EMA if ema else ()))
    model = VisionTransformer(cfg.model)
    model.init_weights(cfg.seed)
    options = cfg.optimizer
    if name in ("adamw", "muon", "plain"):
        theirs = TimmViT(16, 8, 3, 6, "avg", 24, 2, 3, class_token=False, weight_init="skip")
        theirs.load_state_dict(model.state_dict())
        model = theirs
        groups = param_groups_layer_decay(
            model, options.weight_decay, model.no_weight_decay(), layer_decay=options.layer_decay or 1.0
        )
        if name == "muon":
            in_blocks = {id(p) for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2}
            for group in groups:  # of one layer each
                of_blocks = id(group["params"][0]) in in_blocks
                group |= {"use_fallback": not of_blocks, "nesterov": of_blocks}
            optimizer = TimmMuon(groups, lr=options.lr, betas=(0.9, 0.999), eps=1e-8, ns_coefficients="original")
        else:
            optimizer = torch.optim.AdamW(groups, lr=options.lr)
    else:
        decay = [p for n, p in model.named_parameters() if p.ndim > 1 and n != "pos_embed"]
        rest = [p for n, p in model.named_parameters() if p.ndim < 2 or n == "pos_embed"]
        groups = [{"params": decay, "weight_decay": options.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        if name == "sgd":
            optimizer = torch.optim.SGD(groups, momentum=0.9, lr=options.lr)
        else:
            optimizer = TimmLamb(groups, lr=options.lr, betas=(0.9, 0.999), eps=1e-8, max_grad_norm=None)
    average = ModelEmaV3(model, 0.8, use_warmup=True, warmup_power=2 / 3)
    train, val = loaders_of(cfg, rank=0, world_size=1, start_step=0)

    def loss_of(model, images, labels, smoothing=0.0):
        return F.cross_entropy(model((images / 255 - 0.286) / 0.353), labels, label_smoothing=smoothing)

    losses, validation = [], []
    for step, (images, labels) in enumerate(train, 1):
        loss = loss_of(model, images, labels, 0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, cfg) * group.get("lr_scale", 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model, step)
        losses.append(loss.item())
        if step % 2 == 0:
            with torch.no_grad():
                images, labels = next(iter(val))
                counted = labels >= 0
                averaged = copy.deepcopy(average.module).eval()
                validation.append(loss_of(averaged, images[counted], labels[counted]).item())
    return losses, model.state_dict(), average.module.state_dict(), validation


@pytest.mark.parametrize("script", CPU_SCRIPTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_their_reference(runs, image_folder, name, script):
    """Two ranks, weights whole and cut in two: LAMB's norms and Muon's matrices are whole, the gradient is the mean."""
    _, folder = runs(_tasks)
    losses, final, _, _ = torch_loop(image_folder, name)
    assert column(folder, f"{name}-{script}", "train/loss") == pytest.approx(losses, abs=1e-5)
    # Muon rounds its updates to bfloat16, and where sums differ in their last bits some of them to the next value.
    assert_same(weights(folder, f"{name}-{script}"), final, 1e-4 if name == "muon" else 2e-5)


@pytest.mark.parametrize("name", ["sgd", "lamb", "muon"])
def test_optimizers_resume_bit_for_bit(runs, name):
    """Three steps under DDP and three under FSDP2 are six."""
    _, folder = runs(_tasks)
    assert_same(weights(folder, f"{name}-chain"), weights(folder, f"{name}-train_fsdp2"))
    for key in ("train/loss", "train/lr", "train/grad_norm"):
        assert column(folder, f"{name}-chain", key) == column(folder, f"{name}-train_ddp", key)


def test_accumulated_gradients_are_the_mean(runs):
    """SGD's step, unlike AdamW's, grows with the gradient: four microbatches are one batch."""
    _, folder = runs(_tasks)
    assert_same(weights(folder, "sgd-accumulated"), weights(folder, "sgd-train_ddp"), 1e-6)


def test_another_optimizers_checkpoint_is_refused(runs):
    outcomes, _ = runs(_tasks)
    for rank in outcomes["sgd-resumes-adamw"]:
        assert "optimizer.name=adamw, not sgd" in rank["error"]


def stored(folder, name, step, part):
    """Tensors of a checkpoint whose names begin with `part`."""
    at = folder / name / f"checkpoints/step_{step:08d}"
    entries = FileSystemReader(at).read_metadata().state_dict_metadata
    tensors = {key: torch.empty(entry.size) for key, entry in entries.items() if key.startswith(f"{part}.")}
    load(tensors, checkpoint_id=at, no_dist=True)
    return {key.removeprefix(f"{part}."): tensor for key, tensor in tensors.items()}


def state_types(folder, name, step=6):
    """Types of the moments in a run's checkpoint."""
    at = folder / name / f"checkpoints/step_{step:08d}"
    entries = FileSystemReader(at).read_metadata().state_dict_metadata
    return {entry.properties.dtype for key, entry in entries.items() if "exp_avg" in key}


def test_a_resume_with_bf16_moments_goes_on_in_the_same_digits(runs):
    """From DDP to FSDP2, which has the same digits."""
    _, folder = runs(_tasks)
    assert column(folder, "bf16-chain", "train/loss") == column(folder, "bf16-train_ddp", "train/loss")
    assert_same(weights(folder, "bf16-chain"), weights(folder, "bf16-train_ddp"))
    assert state_types(folder, "bf16-chain") == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "into"), [("to-bf16", torch.bfloat16), ("from-bf16", torch.float32)], ids=["to", "from"]
)
def test_moments_are_converted_at_a_resume(runs, name, into):
    _, folder = runs(_tasks)
    other = {torch.bfloat16: torch.float32, torch.float32: torch.bfloat16}[into]
    assert state_types(folder, name, 3) == {other}
    assert state_types(folder, name) == {into}
    assert (folder / name / "train.log").read_text().count(f"in {other}, which this run keeps in {into}") == 1
    want = column(folder, "bf16-train_ddp", "train/loss")
    assert column(folder, name, "train/loss") == pytest.approx(want, abs=2e-3)


@pytest.mark.parametrize("name", ["ema-train_ddp", "ema-train_fsdp2", "ema-zero2", "ema-gathered"])
def test_averages_equal_timms(runs, image_folder, name):
    """Saved, evaluated beside the weights, which are untouched by it, and exported."""
    _, folder = runs(_tasks)
    _, _, average, validation = torch_loop(image_folder, "plain", ema=True)
    assert_same(stored(folder, name, 6, "ema"), average, 2e-5)
    assert column(folder, name, "val/ema_loss") == pytest.approx(validation, abs=1e-5)
    assert all(value is not None for value in column(folder, name, "val/ema_top1"))
    assert_same(weights(folder, name), stored(folder, name, 6, "ema"))
    raw = stored(folder, name, 6, "model")
    assert_same(raw, weights(folder, "without"))
    assert column(folder, name, "val/loss") == column(folder, "without", "val/loss")
    assert (raw["head.weight"] - average["head.weight"]).abs().max() > 1e-5


def test_what_is_made_of_a_checkpoint_is_made_of_its_average(runs, tmp_path):
    """Fine-tuning and exports; the weights themselves where they are asked for."""
    _, folder = runs(_tasks)
    at = folder / "ema-train_ddp/checkpoints/step_00000006"
    average, raw = (stored(folder, "ema-train_ddp", 6, part) for part in ("ema", "model"))
    source = read(str(at.parent))
    assert_same(source.weights, average)
    assert source.description.endswith("(step_00000006, EMA weights)")
    assert export_timm(at, tmp_path / "average") == "EMA weights"
    assert export_timm(at, tmp_path / "raw", raw=True) == "weights"
    for name, wanted in (("average", average), ("raw", raw)):
        assert_same(load_file(tmp_path / name / "model.safetensors"), wanted)
    with pytest.raises(schema.ConfigError, match=r"model.representation_size=16 cannot be exported: timm"):
        export_timm(folder / "fixed-train_ddp/checkpoints/step_00000006", tmp_path / "hidden")
    with pytest.raises(schema.ConfigError, match=r"model.representation_size=16 cannot be exported to Hugging Face"):
        export_hugging_face(folder / "hidden/checkpoints/step_00000001", tmp_path / "hidden")


def test_averages_resume_bit_for_bit(runs):
    _, folder = runs(_tasks)
    for part in ("ema", "model", "optim"):
        assert_same(stored(folder, "ema-chain", 6, part), stored(folder, "ema-train_ddp", 6, part))
    for key in ("val/ema_loss", "val/loss", "train/loss"):
        assert column(folder, "ema-chain", key)[-2:] == column(folder, "ema-train_ddp", key)[-2:]


def test_averaging_may_begin_and_end_with_a_resume(runs):
    _, folder = runs(_tasks)
    assert "has no moving average: it starts at the weights of step 3" in (folder / "ema-later/train.log").read_text()
    assert_same(stored(folder, "ema-later", 6, "model"), weights(folder, "without"))
    assert "val/ema_loss" not in read_metrics(folder / "ema-later")[3]
    assert "val/ema_loss" in read_metrics(folder / "ema-later")[6]
    assert "which ema.decay=null ignores" in (folder / "ema-later/train.log").read_text()
    assert stored(folder, "ema-later", 8, "ema") == {}
    assert_same(weights(folder, "ema-later"), stored(folder, "ema-later", 8, "model"))


@pytest.mark.parametrize("script", CPU_SCRIPTS)
def test_mfu_counts_no_backward_pass_that_a_probe_has_not(runs, script):
    _, folder = runs(_tasks)
    for name, passes in (("probe", 1), ("fixed", 3)):
        options = yaml.safe_load((folder / f"{name}-{script}/config.yaml").read_text())["model"]
        given = [f"model.{key}={json.dumps(value)}" for key, value in options.items()]
        model = VisionTransformer(tiny_config(*given, "checkpoint.save_final_model=false").model)
        row = read_metrics(folder / f"{name}-{script}")[4]
        peak = 2 * 1e6  # of two devices
        assert row["train/mfu"] == pytest.approx(
            passes * model.flops_per_image() * row["train/images_per_second"] / peak, rel=0.02
        )


@pytest.mark.parametrize("script", CPU_SCRIPTS)
def test_a_linear_probe_trains_its_head_alone(runs, script):
    """And saves the rest all the same, as it was drawn."""
    _, folder = runs(_tasks)
    cfg = tiny_config()
    start = VisionTransformer(cfg.model)
    start.init_weights(cfg.seed)
    raw = stored(folder, f"probe-{script}", 6, "model")
    assert_same({n: t for n, t in raw.items() if "head" not in n}, {
        n: t for n, t in start.state_dict().items() if "head" not in n
    })  # fmt: skip
    assert (raw["head.weight"] - start.head.weight).abs().max() > 1e-4
    optim = stored(folder, f"probe-{script}", 6, "optim")
    assert {key.rsplit(".", 1)[0] for key in optim} == {"head.weight", "head.bias"}
    assert_same(raw, stored(folder, "probe-train_ddp", 6, "model"))


@pytest.mark.parametrize("script", CPU_SCRIPTS)
def test_sincos_positions_stay_and_are_saved(runs, script):
    _, folder = runs(_tasks)
    cfg = tiny_config("model.pos_embed=sincos", "model.class_token=true")
    start = VisionTransformer(cfg.model)
    start.init_weights(cfg.seed)
    raw = stored(folder, f"fixed-{script}", 6, "model")
    assert torch.equal(raw["pos_embed"], start.pos_embed)
    assert not any(key.startswith("pos_embed") for key in stored(folder, f"fixed-{script}", 6, "optim"))
    assert raw["pre_logits.fc.weight"].shape == (16, 24)
    assert_same(raw, stored(folder, "fixed-train_ddp", 6, "model"))


def test_fine_tuning_leaves_the_hidden_layer_of_the_head_behind(runs):
    """And draws the head anew, also for the same number of classes: it stood on other features."""
    _, folder = runs(_tasks)
    assert "drawn anew: head.weight, head.bias" in (folder / "tuned/train.log").read_text()
    tuned, raw = weights(folder, "tuned"), stored(folder, "fixed-train_ddp", 6, "model")
    assert tuned["head.weight"].shape == (6, 24)
    assert tuned["pos_embed"].shape == (1, 10, 24)
    torch.testing.assert_close(tuned["blocks.0.attn.qkv.weight"], raw["blocks.0.attn.qkv.weight"], rtol=0, atol=1e-20)


@pytest.mark.slow
@pytest.mark.parametrize("script", CPU_SCRIPTS)
def test_hugging_faces_model_trains_as_ours(runs, script):
    """Hugging Face's own from the same start: the same curve, and an export under timm's names."""
    from transformers import ViTForImageClassification  # two seconds

    _, folder = runs(_tasks_of_libraries)
    for key in ("train/loss", "train/grad_norm"):
        ours, theirs = (column(folder, name, key) for name in ("ours-paper", f"hf-{script}"))
        assert theirs == pytest.approx(ours, abs=1e-5)
    assert_same(weights(folder, f"hf-{script}"), weights(folder, "ours-paper"), 1e-5)
    assert "blocks.1.attn.k.weight" in stored(folder, f"hf-{script}", 6, "model")
    cfg = tiny_config("model.class_token=true", "model.global_pool=token", "model.implementation=hf").model
    model = build_model(cfg, None)
    assert isinstance(model.hugging_face, ViTForImageClassification)
    assert len(model.shard_units()) == 2
    assert model.flops_per_image() == VisionTransformer(cfg).flops_per_image()


@pytest.mark.slow
@pytest.mark.parametrize("script", CPU_SCRIPTS)
def test_timms_model_trains_as_ours(runs, script):
    """timm's own model from the same start: the same curve, checkpoint and export, which ours goes on with."""
    _, folder = runs(_tasks_of_libraries)
    for key in ("train/loss", "train/grad_norm"):
        ours, theirs = (column(folder, name, key) for name in ("ours", f"timm-{script}"))
        assert theirs == pytest.approx(ours, abs=1e-5)
    ours = weights(folder, "ours")
    assert_same(weights(folder, f"timm-{script}"), ours, 1e-5)
    assert_same(weights(folder, "timm-chain"), ours, 1e-5)
    cfg = tiny_config("model.implementation=timm")
    assert isinstance(build_model(cfg.model, cfg.fp8_config), TimmViT)
