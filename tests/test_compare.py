"""The loop of timm's own parts: the rates, the loss and the images are the entrypoints', the result is whole.

References: optim.lr_at, trainer.objective, the entrypoints' own teacher and loaders.
"""

import launch

import json
import types

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import TINY, loaders_of, make_images, rate_at
from PIL import Image
from weight_files import write_teacher

import compare
import distillation
import imagenet_dataset
import trainer
import vit
from optim import param_groups

DISTILLED = ["model.global_pool=token", "model.class_token=true", "model.distilled=true"]
HARD = [*DISTILLED, "distillation.kind=hard"]
TEACHER = {"architecture": "vit_tiny_patch16_224", "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
TEACHER["seed"] = 2  # one of those that give several answers
# Of a square image, all of it.
PLAIN = ["data.crop_scale=[1,1]", "data.crop_ratio=[1,1]", "data.hflip=0", "data.decoder=pillow"]


@pytest.fixture
def run(tiny, tmp_path):
    """A function: overrides -> the file that the loop writes."""

    def run(*overrides):
        output = tmp_path / "results" / "timm.json"
        compare.main(["--output", str(output), "--", "--config-name", "L0_sanity", *tiny, *overrides])
        return json.loads(output.read_text())

    return run


@pytest.fixture
def refused(tiny, tmp_path, capsys):
    """A function: overrides -> the one line with which the loop refuses them."""

    def refused(*overrides):
        with pytest.raises(SystemExit) as exit_:
            compare.main(["--output", str(tmp_path / "timm.json"), "--", *tiny, *overrides])
        assert exit_.value.code == 2
        assert not (tmp_path / "timm.json").exists()
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return refused


@pytest.mark.parametrize(
    "overrides",
    [
        ["num_train_steps=50", "num_warmup_steps=0"],
        ["num_train_steps=50", "num_warmup_steps=7", "warmup_start_lr=1e-5", "min_lr=1e-4"],
        ["num_train_steps=50", "num_warmup_steps=10", "num_training_steps=30", "min_lr=1e-4"],  # then min_lr
        ["num_train_steps=50", "num_warmup_steps=49"],
        ["num_train_steps=50", "num_warmup_steps=80"],  # the run ends in the warmup
        ["num_train_steps=2000", "num_warmup_steps=100", "min_lr=1e-6"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("layer_decay", ["null", "0.5"])
def test_rates_are_the_entrypoints(image_folder, overrides, layer_decay):
    length, *schedule = overrides
    schedule = [f"lr_scheduler.{override}" for override in schedule]
    cfg = launch.load_config(
        "L0_sanity", [*TINY, f"data.path={image_folder}", length, *schedule, f"optimizer.layer_decay={layer_decay}"]
    )
    optimizer = compare.build_optimizer(compare.build_model(cfg), cfg)
    scheduler = compare.build_scheduler(optimizer, cfg)
    for step in range(1, cfg.num_train_steps + 1):
        scheduler.step_update(step)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(rate_at(step, cfg) * group.get("lr_scale", 1), rel=1e-6, abs=1e-15)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-7}),
        ("lamb", timm.optim.Lamb, {"betas": (0.8, 0.9), "eps": 1e-7, "max_grad_norm": None}),
        ("muon", timm.optim.Muon, {"betas": (0.8, 0.9), "eps": 1e-7, "momentum": 0.8}),
        ("sgd", torch.optim.SGD, {"momentum": 0.8, "nesterov": False}),
    ],
)
def test_optimizer_is_what_the_config_says(name, kind, options):
    values = {"betas": "null", "eps": "null", "momentum": "null"}
    values |= {key: json.dumps(value) for key, value in options.items() if key in values}
    given = [f"optimizer.{key}={value}" for key, value in values.items()]
    decays = ["optimizer.weight_decay=0.3", "optimizer.layer_decay=0.5", "model.reg_tokens=1"]
    cfg = launch.load_config("L0_sanity", [*TINY, f"optimizer.name={name}", *given, *decays])
    model = compare.build_model(cfg)
    optimizer = compare.build_optimizer(model, cfg)
    assert type(optimizer) is kind
    assert {key: optimizer.defaults[key] for key in options} == options

    def of_each(groups, key):
        values = {id(weight): group[key] for group in groups for weight in group["params"]}
        return {name: values[id(weight)] for name, weight in model.named_parameters()}

    splits_blocks = name == "muon"
    ours = param_groups(model, {"cls_token", "reg_token", "pos_embed"}, 0.3, 0.5, splits_blocks=splits_blocks)
    if splits_blocks:
        by_muon = [{"used": not g["use_fallback"] and g["nesterov"], **g} for g in optimizer.param_groups]
        by_us = [{"used": g["in_blocks"], **g} for g in ours]
        assert of_each(by_muon, "used") == of_each(by_us, "used")
    for key in ("weight_decay", "lr_scale"):
        assert of_each(optimizer.param_groups, key) == pytest.approx(of_each(ours, key))


def test_fixed_positions_are_the_entrypoints_and_stay():
    cfg = launch.load_config("L0_sanity", [*TINY, "model.pos_embed=sincos", "model.class_token=true"])
    model = compare.build_model(cfg)
    assert torch.equal(model.pos_embed, vit.sincos_positions(cfg.model))
    trained = {id(p) for group in compare.build_optimizer(model, cfg).param_groups for p in group["params"]}
    assert {name for name, p in model.named_parameters() if id(p) not in trained} == {"pos_embed"}


@pytest.mark.parametrize("mix", [[], ["data.mixup=0.8"], ["data.cutmix=1"], ["data.mixup=0.8", "data.cutmix=1"]])
@pytest.mark.parametrize(
    "options",
    [
        ["loss.label_smoothing=0"],
        ["loss.label_smoothing=0.1"],
        ["loss.name=sigmoid", "loss.label_smoothing=0.1"],
        ["loss.name=sigmoid", "loss.label_smoothing=0", "loss.bce_target_thresh=0.0"],
        ["loss.name=sigmoid", "loss.label_smoothing=0.1", "loss.bce_target_thresh=0.3", "loss.bce_sum=true"],
    ],
)
def test_loss_is_the_trainers(mix, options):
    cfg = launch.load_config("L0_sanity", [*TINY, *mix, *options])
    logits, labels, images = torch.randn(24, 6), torch.randint(6, (24,)), torch.rand(24, 3, 16, 16)
    mixup, loss = compare.build_loss(cfg)
    assert bool(mixup) == bool(mix)
    targets = smoothed = labels
    if mixup:
        share = 0.7  # that of the draw
        mixup._params_per_batch = lambda: (share, False)
        _, smoothed = mixup(images, labels)
        one_hot = F.one_hot(labels, 6).float()
        targets = share * one_hot + (1 - share) * one_hot.flip(0)
    expected = trainer.loss_of(logits, targets, cfg.loss)
    assert loss(logits, smoothed).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "teacher"),
    [
        (["distillation.alpha=0.3", "loss.label_smoothing=0.1"], {}),
        (
            ["data.mixup=0.8", "loss.label_smoothing=0", "precision=bf16", "data.mean=[0.5]", "data.std=[0.5]"],
            {"names": [f"class_{letter}" for letter in "fedcba"]},
        ),
        (["loss.name=sigmoid", "distillation.image_size=32", "model.pos_embed=sincos"], {"img_size": 32}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_distillation_is_the_trainers(image_folder, tmp_path, options, teacher):
    """The loss and every gradient, of a teacher with another mean and deviation, order of classes or size of images.

    In BF16 it has the same mean: a last digit of a pixel might be another answer.
    """
    folder = write_teacher(tmp_path / "teacher", **TEACHER | {"img_size": 16} | teacher)
    given = [*HARD, *options, f"data.path={image_folder}", f"distillation.teacher={folder}"]
    cfg, device = launch.load_config("L0_sanity", [*TINY, *given]), torch.device("cpu")
    model = compare.build_model(cfg).train()
    with torch.no_grad():
        for head in (model.head, model.head_dist):  # which timm starts with zeros
            head.weight.normal_()
    mixup, loss = compare.build_loss(cfg)
    task = compare.build_task(model, loss, cfg, device)
    drawn = torch.Generator().manual_seed(0)
    tints = 3 * torch.randn(24, 3, 1, 1, generator=drawn)  # to which the teacher gives several answers
    images, labels = tints + torch.randn(24, 3, 16, 16, generator=drawn), torch.randint(6, (24,), generator=drawn)
    targets = F.one_hot(labels, 6) * 0.7 + F.one_hot(labels.flip(0), 6) * 0.3 if mixup else labels
    with torch.autocast("cpu", torch.bfloat16, enabled=cfg.precision == "bf16"):
        found, logits = task(images, targets)["loss"], torch.stack(model(images))
    answers_model = distillation.read_model(cfg)
    order = distillation.order_of(answers_model, cfg, imagenet_dataset.run_sizes(cfg, 1))
    assert (order is None) != ("names" in teacher)
    answers = distillation.Teacher(answers_model, cfg, order, device)(images)
    assert len(answers.argmax(dim=1).unique()) > 1
    expected = trainer.objective(logits.float(), targets, answers, cfg)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    trained = [p for p in model.parameters() if p.requires_grad]
    of_task, ours = (torch.autograd.grad(each, trained) for each in (found, expected))
    torch.testing.assert_close(of_task, ours, rtol=1e-5, atol=1e-6)
    assert not any(p.requires_grad for p in task.teacher.parameters())
    assert not task.teacher.model.training


def test_two_heads_without_a_teacher_learn_by_their_mean():
    cfg = launch.load_config("L0_sanity", [*TINY, *DISTILLED, "loss.label_smoothing=0.1"])
    model = compare.build_model(cfg).train()
    with torch.no_grad():
        for head in (model.head, model.head_dist):
            head.weight.normal_()
    images, labels = torch.randn(24, 3, 16, 16), torch.randint(6, (24,))
    found = compare.build_task(model, compare.build_loss(cfg)[1], cfg, torch.device("cpu"))(images, labels)["loss"]
    model.set_distilled_training(True)
    expected = trainer.objective(torch.stack(model(images)), labels, None, cfg)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_mixes_as_often_as_the_config_says():
    options = ["data.mixup=0.8", "data.cutmix=0.4", "data.mixup_prob=0.6", "data.mixup_switch_prob=0.25"]
    mixup, _ = compare.build_loss(launch.load_config("L0_sanity", [*TINY, *options]))
    np.random.seed(0)
    draws = [mixup._params_per_batch() for _ in range(4000)]
    mixes = [(share, is_cutmix) for share, is_cutmix in draws if share != 1]
    assert len(mixes) / len(draws) == pytest.approx(0.6, abs=0.03)
    assert sum(is_cutmix for _, is_cutmix in mixes) / len(mixes) == pytest.approx(0.25, abs=0.03)
    for wanted, alpha in ((False, 0.8), (True, 0.4)):
        variance = np.var([share for share, is_cutmix in mixes if is_cutmix == wanted])
        assert variance == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)


def first_model(cfg):
    """Timm's model with the first weights of the run."""
    timm.utils.random_seed(cfg.seed)
    return compare.build_model(cfg)


def test_run_writes_the_result_and_sees_the_entrypoints_images(tmp_path, run, tiny):
    """A step of all 60 images, and the validation set, against our own loaders; the rate leaves the weights alone."""
    root = make_images(tmp_path / "images")
    for file in root.glob("train/*/*"):
        Image.open(file).resize((20, 20)).save(file)
    pixels = ["data.mean=[0.4,0.5,0.6]", "data.std=[0.2,0.3,0.4]", "data.crop_pct=0.8", "precision=fp32", "seed=3"]
    options = [
        *PLAIN,
        *pixels,
        f"data.path={root}",
        "global_batch_size=60",
        "optimizer.lr=1e-12",
        "evaluation.every_n_steps=4",
    ]
    content = run(*options, "logger.frequency=4", "loss.label_smoothing=0.1", "ema.decay=0.9")
    assert set(content["meta"]) == {"command", "card", "versions", "commit", "date"}
    results = content["results"]
    assert list(results["losses"]) == ["1", "4", "6"]
    assert results["images_per_second"] > 0
    assert 0 < results["train_s"] < results["wall_s"]
    assert [row["step"] for row in results["validation"]] == [4, 6]
    assert results["top1"] == results["validation"][-1]["val/top1"]

    cfg = launch.load_config("L0_sanity", [*tiny, *options, "loss.label_smoothing=0.1"])
    train_loader, val_loader = loaders_of(cfg, rank=0, world_size=1, start_step=0)
    normalize, model = trainer.Normalize(cfg, torch.device("cpu")), first_model(cfg)
    with torch.no_grad():
        images, labels = next(iter(train_loader))
        loss = trainer.loss_of(model(normalize(images)), labels, cfg.loss).item()
        images, labels = next(iter(val_loader))
        images, labels = images[labels != imagenet_dataset.PADDING], labels[labels != imagenet_dataset.PADDING]
        logits = model(normalize(images))
    assert len(labels) == 23
    # Pillow crops and resizes there; here that is done by torchvision, to within 2 of 255.
    assert all(value == pytest.approx(loss, abs=1e-4) for value in results["losses"].values())
    hits = logits.argsort(dim=1, descending=True)[:, :5] == labels[:, None]
    for row in results["validation"]:
        assert row["val/images"] == 23
        assert row["val/loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-6)
        assert row["val/top1"] == pytest.approx(hits[:, 0].float().mean().item())
        assert row["val/top5"] == pytest.approx(hits.any(dim=1).float().mean().item())
        assert row["val/ema_loss"] == pytest.approx(row["val/loss"], abs=1e-6)
        assert row["val/ema_top1"] == row["val/top1"]


def test_run_learns_in_every_way_at_once(run):
    """More passes than one, the last batch of each left out; grey images, BF16, mixing, erasing, averages."""
    ways = ["model.in_chans=1", "precision=bf16", "data.mixup=0.8", "data.cutmix=1", "data.random_erasing=0.25"]
    ways += ["data.auto_augment=3a", "data.color_jitter=[0.3,0.3,0]", "model.drop_path_rate=0.1", "data.vflip=0.1"]
    ways += ["model.patch_drop_rate=0.2", "activation_checkpointing=true", "ema.decay=0.5", "max_grad_norm=1"]
    length = ["num_train_steps=12", "evaluation.every_n_steps=6", "optimizer.lr=3e-3"]
    results = run(*ways, *length)["results"]
    assert list(results["losses"]) == [str(step) for step in range(1, 13)]
    first, last = results["validation"]
    assert last["val/loss"] != first["val/loss"]
    assert last["val/ema_loss"] != last["val/loss"]


def test_run_learns_from_a_teacher(tmp_path, image_folder, tiny, run):
    """Mixed images, BF16, averages, recomputation; evaluation answers with the mean of both heads."""
    folder = write_teacher(tmp_path / "teacher")
    options = [*HARD, f"distillation.teacher={folder}", "seed=3", "evaluation.every_n_steps=4", "num_train_steps=8"]
    more = ["ema.decay=0.5", "data.mixup=0.8", "data.cutmix=1", "activation_checkpointing=true"]
    results = run(*options, *more, "precision=bf16", "optimizer.lr=3e-3")["results"]
    first, last = results["validation"]
    assert last["val/loss"] != first["val/loss"]
    assert last["val/ema_loss"] != last["val/loss"]

    (*_, row) = run(*options, "optimizer.lr=1e-12", "precision=fp32")["results"]["validation"]
    cfg = launch.load_config("L0_sanity", [*tiny, *options])
    model = first_model(cfg).train()
    model.set_distilled_training(True)
    _, val_loader = loaders_of(cfg, rank=0, world_size=1, start_step=0)
    images, labels = next(iter(val_loader))
    images, labels = images[labels != imagenet_dataset.PADDING], labels[labels != imagenet_dataset.PADDING]
    with torch.no_grad():
        logits = torch.stack(model(trainer.Normalize(cfg, torch.device("cpu"))(images))).mean(dim=0)
    assert row["val/loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-4)


def test_a_teacher_that_does_not_fit_is_refused_by_name(refused, tmp_path):
    few = write_teacher(tmp_path / "few", num_classes=5)
    assert f"distillation.teacher={few} has 5 classes" in refused(*HARD, f"distillation.teacher={few}")
    large = write_teacher(tmp_path / "large", **TEACHER, img_size=32)
    line = refused(*HARD, f"distillation.teacher={large}")
    assert f"distillation.teacher={large} cannot take images of 16 x 16 pixels, model.img_size=[16, 16]" in line
    assert "set distillation.image_size=" in line  # to the size that the folder says; timm 1.0.29 writes another one


def test_speed_is_that_of_steps_after_the_first(monkeypatch, run):
    """By a clock on which the first step takes 10 s, another 1 s and an evaluation 100 s."""
    now = 0.0

    def take(seconds):
        nonlocal now
        now += seconds

    scores = {"loss": 1.0, "top1": 0.5, "top5": 1.0, "images": 23}
    scheduler = types.SimpleNamespace(step_update=lambda step: take(10 if step == 1 else 1))
    monkeypatch.setattr(compare, "time", types.SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(compare, "build_scheduler", lambda *_: scheduler)
    monkeypatch.setattr(compare, "evaluate", lambda *_: take(100) or scores)
    results = run("num_train_steps=3", "evaluation.every_n_steps=2")["results"]
    assert results["images_per_second"] == 24
    assert results["train_s"] == results["wall_s"] == 212


def test_norms_have_the_configs_epsilon():
    model = compare.build_model(
        launch.load_config("L0_sanity", [*TINY, "model.norm_eps=1e-3", "checkpoint.save_final_model=false"])
    )
    assert {module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)} == {1e-3}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_device_that_lags_behind_sees_every_batch_whole(tiny):
    cfg = launch.load_config("L0_sanity", [*tiny, "global_batch_size=2"], script="compare")
    expected = torch.cat([images for images, _ in compare.build_loader(cfg, "val", torch.device("cpu"))])
    found, device = [], torch.device("cuda")
    for images, _ in compare.batches(compare.build_loader(cfg, "val", device), device):
        torch.cuda._sleep(100_000_000)  # cycles: a twentieth of a second, in which the host reads several batches
        found.append(images.clone())
    torch.testing.assert_close(torch.cat(found).cpu(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_fused", [True, False])
def test_attention_is_fused_if_the_config_says_so(is_fused):
    model = compare.build_model(launch.load_config("L0_sanity", [*TINY, f"model.fused_attn={str(is_fused).lower()}"]))
    assert {module.fused_attn for module in model.modules() if hasattr(module, "fused_attn")} == {is_fused}


def test_evaluation_may_be_off(run):
    results = run("evaluation.every_n_steps=null", "num_train_steps=2")["results"]
    assert results["validation"] == []
    assert results["top1"] is None


def test_weights_are_clipped_and_averaged_as_the_entrypoints_do(monkeypatch, run):
    """The decay of each average, of a model that trains again after each evaluation; the norm to clip to."""
    updates, norms = [], []

    def average(self, model, decay):
        updates.append((decay, model.training))

    monkeypatch.setattr(timm.utils.ModelEmaV3, "apply_update_", average)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda weights, norm: norms.append(norm))
    ema = ["ema.decay=0.5", "ema.use_warmup=true", "ema.warmup_gamma=2", "ema.warmup_power=0.9"]
    run(*ema, "max_grad_norm=0.7", "num_train_steps=4", "evaluation.every_n_steps=1")
    decays = [0, *(min(0.5, 1 - (1 + step / 2) ** -0.9) for step in (1, 2, 3))]
    assert updates == [(decay, True) for decay in decays]
    assert norms == [0.7] * 4
    norms.clear()
    run("max_grad_norm=null", "num_train_steps=2")
    assert not norms


def test_a_class_may_be_missing_in_val(tmp_path, tiny, run):
    """Its labels are those of the training folder."""
    root = make_images(tmp_path / "images")
    for file in (root / "val/class_b").iterdir():
        file.unlink()
    options = [f"data.path={root}", "optimizer.lr=1e-12", "evaluation.every_n_steps=2", "num_train_steps=2"]
    (row,) = run(*options, "global_batch_size=7")["results"]["validation"]
    cfg = launch.load_config("L0_sanity", [*tiny, *options])
    _, val_loader = loaders_of(cfg, rank=0, world_size=1, start_step=0)
    images, labels = next(iter(val_loader))
    images, labels = images[labels != imagenet_dataset.PADDING], labels[labels != imagenet_dataset.PADDING]
    with torch.no_grad():
        logits = first_model(cfg)(trainer.Normalize(cfg, torch.device("cpu"))(images))
    assert row["val/images"] == len(labels) == 19
    assert row["val/loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.implementation=hf"],
        ["activation_checkpointing=selective"],
        ["optimizer.state_dtype=bf16", "optimizer.betas=[0.9,0.95]"],
        ["model.transformer_engine=true", "precision=bf16", "model.act_layer=gelu_tanh"],
        [
            "fp8_config.enabled=true",
            "model.transformer_engine=true",
            "precision=bf16",
            "model.act_layer=gelu_tanh",
            "model.embed_dim=48",
        ],
        ["model.representation_size=8", "checkpoint.save_final_model=false"],
        ["model.drop_path_schedule=constant"],
        ["model.init_head_bias=-6.9"],
        ["model.freeze=backbone"],
        ["model.img_size=[16, 24]"],
        ["model.mlp_layer=glu", "model.act_layer=silu"],
        ["model.norm_layer=rmsnorm"],
        ["model.block_fn=ParallelScalingBlock"],
        ["model.attn_layer=diff", "model.embed_dim=48", "model.num_heads=3"],
        ["model.distilled=false", "distillation.kind=hard", "distillation.teacher=x"],
        ["distillation.kind=soft", "distillation.teacher=x", *DISTILLED],
        ["distillation.shard_teacher=true", *HARD, "distillation.teacher=x"],
        ["data.source=webdataset"],
        ["data.repeated_augmentation=2"],
        ["data.on_error=skip"],
        ["data.packing.enabled=true"],
        ["data.exif_orientation=true"],
        ["data.max_pixels=1000"],
        ["data.color_jitter=[0.3, 0.3, 0.3]", "data.auto_augment=rand-m9"],
        ["micro_batch_size=12"],
        ["lr_scheduler.name=constant", "lr_scheduler.num_cooldown_steps=2"],
        ["lr_scheduler.name=linear"],
        ["checkpoint.init_from=weights.pt"],
        ["wandb.mode=offline"],
        ["tensorboard.enabled=true"],
        ["profiler.trace=true"],
        ["profiler.memory_snapshot=true"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_what_it_cannot_do_is_refused_by_name(refused, overrides):
    key, value = overrides[0].split("=")
    assert refused(*overrides).startswith(f"error: {key}={value}: tools/compare.py")


def test_what_no_single_process_can_do_is_refused_by_name(refused, monkeypatch):
    assert "distributed.dp_outer=2" in refused("distributed.dp_outer=2")
    assert "data.mixup=0.8" in refused("data.mixup=0.8", "global_batch_size=15")  # an odd batch
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE=2" in refused()


def test_what_says_the_same_in_other_words_is_not_refused(run):
    run("micro_batch_size=24", "model.img_size=[16,16]", "model.implementation=timm", "num_train_steps=1")


def test_images_that_timm_does_not_find_are_told(refused, tmp_path):
    root = make_images(tmp_path / "images")
    image = next((root / "train/class_a").iterdir())
    image.rename(image.with_suffix(".webp"))
    assert "59 of the 60 images in train" in refused(f"data.path={root}")
    for file in list(root.glob("val/*/*")):  # a flat folder, which has its labels beside it
        file.rename(root / "val" / f"{file.parent.name}_{file.name}")
        with open(root / "val.txt", "a") as labels:
            labels.write(f"{file.parent.name}_{file.name} {file.parent.name}\n")
    for folder in root.glob("val/*/"):
        folder.rmdir()
    image.with_suffix(".webp").rename(image)
    assert f"data.path={root}" in refused(f"data.path={root}")


def test_a_image_that_cannot_be_read_ends_the_run(tmp_path, run):
    root = make_images(tmp_path / "images")
    next((root / "train/class_a").iterdir()).write_bytes(b"no image")
    with pytest.raises(RuntimeError, match="Failed to load"):
        run(f"data.path={root}")


def test_a_loss_that_is_not_finite_ends_the_run(run, capsys, monkeypatch):
    monkeypatch.setattr(compare, "LabelSmoothingCrossEntropy", lambda _: lambda logits, _: logits.sum() * float("nan"))
    with pytest.raises(SystemExit) as exit_:
        run()
    assert exit_.value.code == 1
    assert capsys.readouterr().err == "error: the loss was not finite at step 1\n"
