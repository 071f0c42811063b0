"""Distillation against timm's distilled model and DeiT's loss in a plain loop; the teacher; what is refused."""

import launch

import functools
import json

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import (
    assert_same,
    column,
    error_of,
    loaders_of,
    made_once,
    rate_at,
    run_tasks,
    session_of,
    task_of,
    tiny_config,
    weights,
)
from timm.models.deit import VisionTransformerDistilled
from torch import nn
from weight_files import write_teacher

import checkpoint
import distillation
import schema
import trainer
from input_pipeline.augment import Mixup
from vit import VisionTransformer

STEPS = 5
TOKENS = ["model.global_pool=token", "model.class_token=true", "model.distilled=true"]
MIXED = ["data.mixup=0.8", "data.cutmix=1.0"]
HARD = [*TOKENS, *MIXED, "distillation.kind=hard", "distillation.alpha=0.3", f"num_train_steps={STEPS}"]
SOFT = [*TOKENS, *MIXED, "distillation.kind=soft", "distillation.tau=3", "distillation.alpha=0.8"]
SOFT += [f"num_train_steps={STEPS}"]
# Both of the model's heads, and then the class token's alone, learn from the teacher.
ONE_HEAD = ["model.global_pool=token", "model.class_token=true", "distillation.kind=hard", f"num_train_steps={STEPS}"]
VARIANTS = {"hard": HARD, "soft": SOFT, "one head": ONE_HEAD}
SMALL_VIT = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3}
CLASSES = [f"class_{letter}" for letter in "abcdef"]


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    """The folder of all runs and what each returned: two processes, started once."""

    def start(folder):
        teacher = str(write_teacher(folder / "teacher"))
        vit = write_teacher(folder / "vit", "vit_tiny_patch16_224", names=CLASSES, **SMALL_VIT)
        few = write_teacher(folder / "few", num_classes=5)
        task = functools.partial(task_of, image_folder, folder)

        def taught(name, script, *overrides, by=teacher, **more):
            return task(name, script, f"distillation.teacher={by}", *overrides, **more)

        sharded, by_4 = "distillation.shard_teacher=true", "micro_batch_size=4"
        ema = ["ema.decay=0.9", "model.drop_path_rate=0.2", "model.drop_rate=0.1"]
        tasks = [
            taught("hard", "train_ddp", *HARD),
            taught("hard-sharded", "train_fsdp2", *HARD, sharded),
            taught("hard-by-4", "train_fsdp2", *HARD, by_4),
            taught("soft", "train_fsdp2", *SOFT),
            taught("soft-sharded", "train_ddp", *SOFT, sharded, by_4),
            taught("one head", "train_ddp", *ONE_HEAD),
            taught("straight", "train_ddp", *HARD, *ema, "num_train_steps=6"),
        ]
        for script, stop in (("train_ddp", 2), ("train_fsdp2", 4), ("train_ddp", 6)):
            length = [f"num_train_steps={stop}", "lr_scheduler.num_training_steps=6"]
            tasks.append(taught(f"part-{stop}", script, *HARD, *ema, *length, output="parts"))
        own = folder / "hard/checkpoints"
        tasks += [
            taught("own", "train_fsdp2", *SOFT, "precision=bf16", by=own),
            taught("resized", "train_ddp", *HARD, "distillation.image_size=32", by=vit),
            taught("of another size", "train_fsdp2", *HARD, by=vit, may_fail=True),
            taught("of other classes", "train_ddp", *HARD, by=few, may_fail=True),
            taught("nowhere", "train_ddp", *HARD, by=folder / "nowhere", may_fail=True),
            task("no teacher", "train_ddp", *TOKENS, *MIXED, f"num_train_steps={STEPS}"),
        ]
        return run_tasks(tasks, nproc=2, folder=folder)

    return made_once(tmp_path_factory, "distillation", start)


def timms_own(cfg, start):
    """timm's model of a tiny config, with our first weights."""
    model = timm.create_model(
        "deit_tiny_distilled_patch16_224" if cfg.model.distilled else "deit_tiny_patch16_224",
        **{"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 6},
    )
    model.load_state_dict(start)
    if cfg.model.distilled:
        model.set_distilled_training(cfg.distillation.kind != "none")
    return model.train()


def by_hand(cfg, teacher, pixels, outputs, targets):
    """DeiT's loss, from its losses.py and its paper, of float pixels in 0..1."""
    of_labels, of_answers = outputs if isinstance(outputs, tuple) else (outputs, outputs)
    loss = F.cross_entropy(of_labels, targets, label_smoothing=cfg.loss.label_smoothing)
    if teacher is None:
        return loss
    mean, std = (torch.tensor(teacher.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        answers = teacher((pixels - mean) / std)
    alpha, tau = cfg.distillation.alpha, cfg.distillation.tau
    if cfg.distillation.kind == "hard":
        distilled = F.cross_entropy(of_answers, answers.argmax(dim=1))
    else:
        p, log_q = (answers / tau).softmax(dim=1), (of_answers / tau).log_softmax(dim=1)
        distilled = (p * (p.log() - log_q)).sum() * tau * tau / of_answers.numel()
    return (1 - alpha) * loss + alpha * distilled


@pytest.fixture(scope="module")
def reference(image_folder, runs):
    """A function: variant -> losses and gradient norms of timm's model in a plain loop, its weights, the teacher's
    answers."""

    @functools.cache
    def train(variant):
        folder, _ = runs
        overrides = [f"data.path={image_folder}", *VARIANTS.get(variant, [*TOKENS, *MIXED, f"num_train_steps={STEPS}"])]
        has_teacher = variant in VARIANTS
        cfg = tiny_config(*overrides, *([f"distillation.teacher={folder / 'teacher'}"] if has_teacher else []))
        ours = VisionTransformer(cfg.model)
        ours.init_weights(cfg.seed)
        model = timms_own(cfg, ours.state_dict())
        teacher = timm.create_model(f"local-dir:{folder / 'teacher'}", pretrained=True).eval() if has_teacher else None
        kept = {"pos_embed", "cls_token", "dist_token"}
        decays = {name: p.ndim > 1 and name not in kept for name, p in model.named_parameters()}
        groups = [
            {"params": [p for name, p in model.named_parameters() if decays[name] == is_on], "weight_decay": value}
            for is_on, value in ((True, cfg.optimizer.weight_decay), (False, 0.0))
        ]
        optimizer = torch.optim.AdamW(groups, lr=cfg.optimizer.lr)
        mean, std, mixup = cfg.data.mean[0], cfg.data.std[0], Mixup(cfg)
        losses, norms = [], []
        for step, (images, labels) in enumerate(loaders_of(cfg)[0], start=1):
            x, targets = mixup((images / 255 - mean) / std, labels, step)
            loss = by_hand(cfg, teacher, x * std + mean, model(x), targets)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm).item())
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, cfg)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, norms, model

    return train


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("hard", "hard"),
        ("hard-sharded", "hard"),
        ("hard-by-4", "hard"),
        ("soft", "soft"),
        ("soft-sharded", "soft"),
        ("one head", "one head"),
        ("no teacher", "no teacher"),  # two heads that learn the labels by their mean
    ],
)
def test_equals_timms_model_in_a_plain_loop(runs, reference, name, variant):
    """The teacher's own mean and deviation, mixed images, shards of the teacher and microbatches among it."""
    folder, _ = runs
    losses, norms, model = reference(variant)
    assert column(folder, name, "train/loss") == pytest.approx(losses, abs=1e-6)
    assert column(folder, name, "train/grad_norm") == pytest.approx(norms, abs=1e-5)
    assert_same(weights(folder, name), model.state_dict(), atol=1e-5)


def test_the_variants_are_not_one(reference):
    losses = [reference(variant)[0][0] for variant in ("hard", "soft", "one head", "no teacher")]
    assert len({round(loss, 3) for loss in losses}) == 4


def test_stops_and_resumes_leave_no_trace(runs):
    """6 steps = 2 + 2 + 2, over a change of strategy, with dropout and an average, bit for bit."""
    folder, _ = runs
    assert_same(weights(folder, "parts"), weights(folder, "straight"))
    for key in ("train/loss", "train/grad_norm", "train/lr"):
        assert column(folder, "parts", key) == column(folder, "straight", key)


def test_an_export_is_timms_distilled_model(runs, reference):
    folder, _ = runs
    exported = folder / "hard/checkpoints/final_model"
    model = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()
    assert isinstance(model, VisionTransformerDistilled)
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(model(x), reference("hard")[2].eval()(x), rtol=0, atol=1e-5)
    content = json.loads((exported / "config.json").read_text())
    assert content["pretrained_cfg"]["classifier"] == ["head", "head_dist"]
    card = (exported / "README.md").read_text()
    assert '`kind="hard"`, `alpha=0.3`' in card
    assert str(folder) not in card
    assert "VisionTransformerDistilled" in card


@pytest.mark.parametrize("name", ["own", "resized"])
def test_other_teachers_teach(runs, reference, name):
    """A checkpoint of a run, in BF16, and a model of another image size whose classes are named."""
    folder, _ = runs
    losses = column(folder, name, "train/loss")
    assert len(losses) == STEPS
    assert losses != pytest.approx(reference("soft" if name == "own" else "hard")[0], abs=1e-3)
    assert all(torch.isfinite(torch.tensor(losses)))


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("of another size", ["vit cannot take images of 16 x 16 pixels", "set distillation.image_size=32"]),
        ("of other classes", ["few has 5 classes, model.num_classes=6"]),
        ("nowhere", ["distillation.teacher=", "nowhere is no model of ours or timm's"]),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_on_all_ranks(runs, name, fragments):
    _, outcomes = runs
    errors = {rank["error"] for rank in outcomes[name]}
    assert len(errors) == 1
    text = errors.pop()
    assert len(text.splitlines()) == 1, text
    for fragment in fragments:
        assert fragment in text


# The teacher, in this process


def taught_by(folder, *overrides, classes=()):
    """A teacher and the model within, of a run on the CPU."""
    cfg = tiny_config("data.path=unused", "distillation.kind=hard", f"distillation.teacher={folder}", *overrides)
    sizes = schema.RunSizes.of(cfg, world_size=1, num_train_images=60, num_val_images=23, classes=tuple(classes))
    model = distillation.read_model(cfg)
    order = distillation.order_of(model, cfg, sizes)
    return distillation.Teacher(model, cfg, order, session_of(folder).device), model


def pictures(size=16):
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_a_student_of_fewer_classes_has_each_of_the_teachers_outputs_once(tmp_path):
    write_teacher(tmp_path, names=CLASSES)
    few = [CLASSES[2], CLASSES[0]]
    teacher, _ = taught_by(tmp_path, classes=few)
    assert teacher.order[:2] == [2, 0]
    assert sorted(teacher.order) == list(range(6))


def test_an_equal_mean_leaves_the_images_alone(tmp_path):
    x, seen = pictures(), []
    write_teacher(tmp_path)
    same = ["data.mean=[0.485,0.456,0.406]", "data.std=[0.229,0.224,0.225]"]
    for overrides, is_same in ((same, True), (["data.mean=[0.5]", "data.std=[0.5]"], False)):
        teacher, model = taught_by(tmp_path, *overrides)
        model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        answers = teacher(x)
        assert answers.dtype == torch.float32
        assert not answers.requires_grad
        assert torch.equal(seen[-1], x) == is_same
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(seen[-1], (x * 0.5 + 0.5 - mean) / std, rtol=0, atol=1e-6)


def test_it_computes_in_the_runs_precision(tmp_path):
    write_teacher(tmp_path, "test_vit", img_size=16, patch_size=8)
    exact, half = (taught_by(tmp_path, f"precision={name}") for name in ("fp32", "bf16"))
    dtypes = []
    for _, model in (exact, half):
        model.head.register_forward_hook(lambda _, inputs, output: dtypes.append(output.dtype))
    torch.testing.assert_close(half[0](pictures()), exact[0](pictures()), rtol=0, atol=0.2)
    assert dtypes == [torch.bfloat16, torch.float32]
    assert {p.dtype for p in half[1].parameters()} == {torch.float32}


def test_outputs_go_by_the_names_of_classes(tmp_path):
    write_teacher(tmp_path / "plain")
    write_teacher(tmp_path / "named", names=reversed(CLASSES))
    plain, _ = taught_by(tmp_path / "plain", classes=CLASSES)
    named, _ = taught_by(tmp_path / "named", classes=CLASSES)
    torch.testing.assert_close(named(pictures()), plain(pictures()).flip(1), rtol=0, atol=0)
    line = error_of(taught_by, tmp_path / "named", classes=[*CLASSES[:5], "dog"])
    assert "does not know dog, of data.path=unused" in line


def test_channels_must_be_as_many(tmp_path):
    write_teacher(tmp_path)
    line = error_of(taught_by, tmp_path, "model.in_chans=1")
    assert f"distillation.teacher={tmp_path} has 3 channels, model.in_chans=1" in line


def test_a_timm_name_that_there_is_not_is_refused(tmp_path):
    line = error_of(taught_by, "timm:regnety_161")
    assert line.startswith(
        "distillation.teacher=timm:regnety_161: timm:regnety_161: timm has no such model: did you mean"
    )


def test_a_large_teacher_is_gathered_in_parts(monkeypatch):
    """Every parameter is in one part at most; parts are called, and no larger than the bound where they can be cut."""
    for name in ("regnety_002", "test_vit", "swin_tiny_patch4_window7_224"):
        with torch.device("meta"):
            model = timm.create_model(name)
        monkeypatch.setattr(distillation, "MOST_GATHERED", 2**20)
        parts = list(distillation._units(model))
        assert len(parts) > 3
        inside = [id(p) for part in parts for p in part.parameters()]
        assert len(inside) == len(set(inside))
        assert not any(isinstance(part, nn.ModuleList | nn.ModuleDict) for part in parts)
        sizes = [sum(p.numel() for p in part.parameters()) for part in parts if any(part.children())]
        assert max(sizes, default=0) <= 2**20


# The loss


def test_alpha_is_the_teachers_share():
    drawn = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits, answers = drawn[:2], drawn[2]
    labels = torch.tensor([0, 1, 2, 5])

    def loss(kind, alpha, *more):
        given = [*TOKENS, f"distillation.kind={kind}", f"distillation.alpha={alpha}", "distillation.teacher=x", *more]
        return trainer.objective(
            logits, labels, answers, tiny_config("data.path=unused", "loss.label_smoothing=0", *given)
        )

    torch.testing.assert_close(loss("hard", 1), F.cross_entropy(logits[1], answers.argmax(1)))
    both = 0.9 * F.cross_entropy(logits[0], labels) + 0.1 * F.cross_entropy(logits[1], answers.argmax(1))
    torch.testing.assert_close(loss("hard", 0.1), both)
    hot = loss("soft", 1, "distillation.tau=1e3")  # where tau^2 KL is half the variance of the logits' difference
    difference = logits[1] - answers
    torch.testing.assert_close(hot, difference.var(dim=1, unbiased=False).mean() / 12, rtol=1e-2, atol=0)


# What is refused before the run


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["distillation.kind=hard"], ["distillation.kind=hard with distillation.teacher=null", "timm:regnety_160"]),
        (
            ["distillation.kind=hard", "distillation.teacher=x", "model.transformer_engine=true"],
            ["model.transformer_engine=true with distillation.kind=hard: not seen to work"],
        ),
        (["distillation.alpha=0"], ["distillation.alpha=0"]),
        (["distillation.kind=firm"], ["distillation.kind='firm'"]),
        (["model.distilled=true"], ["model.global_pool=avg with model.distilled=true", "set model.global_pool=token"]),
        ([*TOKENS, "model.reg_tokens=2"], ["model.reg_tokens=2 with model.distilled=true", "model.reg_tokens=0"]),
        ([*TOKENS, "model.no_embed_class=true"], ["model.no_embed_class=true with model.distilled=true"]),
        ([*TOKENS, "model.fc_norm=true"], ["model.fc_norm=true with", "set model.fc_norm=null"]),
        ([*TOKENS, "model.representation_size=9"], ["model.representation_size=9 with model.distilled=true"]),
        (
            [*TOKENS, "model.transformer_engine=true", "model.act_layer=gelu_tanh"],
            ["model.distilled=true (not seen to"],
        ),
        ([*TOKENS, "model.implementation=timm"], ["model.distilled=true with model.implementation=timm"]),
    ],
)
def test_what_contradicts_is_refused_by_name(overrides, fragments):
    line = error_of(tiny_config, "data.path=unused", *overrides)
    for fragment in fragments:
        assert fragment in line


@pytest.mark.parametrize(
    ("script", "overrides", "fragment"),
    [
        ("train_fsdp2", ["distillation.kind=hard", "distributed.tp=3"], "distillation.kind=hard with distributed.tp=3"),
        (
            "train_fsdp2",
            [*TOKENS, "distributed.tp=3"],
            "model.distilled=true with distributed.tp=3, which does not cut such blocks: set distributed.tp=null",
        ),
        (
            "train_mfsdp",
            ["distillation.kind=hard", "distillation.shard_teacher=true"],
            "distillation.shard_teacher=true: tr",
        ),
    ],
)
def test_what_a_script_cannot_do_is_refused_by_name(script, overrides, fragment):
    cfg = tiny_config("data.path=unused", "distillation.teacher=x", *overrides)
    assert fragment in error_of(launch.check_script, cfg, script, 3)


def test_a_checkpoint_from_before_has_no_distillation_token():
    """Its state.json does not know the option: a run without one goes on from it, one with it is refused."""
    cfg, other = tiny_config("data.path=unused"), tiny_config("data.path=unused", *TOKENS)
    sizes = schema.RunSizes.of(cfg, world_size=1, num_train_images=60, num_val_images=23)
    for run, before in ((cfg, cfg), (other, other)):
        model = schema.to_plain(before)["model"]
        del model["distilled"]
        saved = {"model": model, "classes": [], "optimizer": "adamw"}
        check = functools.partial(checkpoint._check_same, saved, {}, {}, "step_00000003", run, sizes, 16)
        if run is cfg:
            check()
        else:
            assert "step_00000003 was written with model.distilled=False, not True" in error_of(check)
