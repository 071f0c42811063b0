"""data.size_schedule: what changes at a border, and that stops before, at and after it change nothing.

References: timm's and torch's resampling, two runs of one size each, the second from the first one's weights.
"""

import launch

import functools
import itertools
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    CPU_SCRIPTS,
    ON_GPU,
    TINY,
    Job,
    assert_same,
    column,
    error_of,
    make_files,
    read_metrics,
    run_tasks,
    started_once,
    task_of,
    tiny_config,
    weights,
)
from timm.layers import resample_abs_pos_embed

import checkpoint
import schema
import train_ddp
from imagenet_dataset import TrainSampler
from optim import lr_at
from vit import VisionTransformer

# Of 60 images: 4 steps of 24 of 16 px, 4 of 12 of 24 px, 4 of 16 x 24 px; the second begins a schedule of its own.
CHANGES = ["{epoch:1.7,img_size:24,global_batch_size:12,lr:5e-4,num_warmup_epochs:0.4}", "{epoch:2.4,img_size:[16,24]}"]
SCHEDULE = f"data.size_schedule=[{','.join(CHANGES)}]"
TOKENS = ["model.class_token=true", "model.global_pool=token", "model.reg_tokens=1"]
LONG = [SCHEDULE, *TOKENS, "evaluation.every_n_steps=3", "ema.decay=0.9"]
WHOLE = [*LONG, "num_train_steps=null", "num_epochs=3.2"]
STOPS = (3, 4, 6, 12)  # before a border, at it, after it, and over the other one to the end
NAMES = ("train/loss", "train/grad_norm", "train/lr", "train/epoch", "val/loss", "val/ema_loss", "val/images")
# All images in each step, never augmented, and an optimizer without a state: nothing but the weights goes on.
ALL = ["data.source=synthetic", "data.num_synthetic_train=60", "data.num_synthetic_val=23", "global_batch_size=60"]
ALL += ["optimizer.name=sgd", "optimizer.momentum=0.0", "optimizer.betas=null"]
ALL += ["optimizer.eps=null", "lr_scheduler.num_warmup_steps=0"]


def until(step):
    return [*LONG, f"num_train_steps={step}", "lr_scheduler.num_training_steps=12"]


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    """A function: world size -> (outcomes, folder)."""

    @started_once
    def start(nproc):
        folder = tmp_path_factory.mktemp(f"world_{nproc}")
        task = functools.partial(task_of, image_folder, folder)
        tasks = [task(f"straight-{script}", script, *WHOLE, before="pretend_a_peak") for script in CPU_SCRIPTS]
        if nproc == 1:  # begun by two processes, up to the border
            shutil.copytree(start(2)[1] / "until-4", folder / "until-4")
            tasks.append(task("on-from-4", "train_fsdp2", *WHOLE, output="until-4"))
            return run_tasks(tasks, nproc=1, folder=folder), folder
        for (number, stop), kind in itertools.product(enumerate(STOPS), (*CPU_SCRIPTS, "mixed")):
            script = kind if kind in CPU_SCRIPTS else CPU_SCRIPTS[number % 2]
            tasks.append(task(f"{kind}-{stop}", script, *until(stop), output=kind))
        tasks.append(task("until-4", "train_ddp", *until(4)))
        # A stop that breaks off the evaluation at the border, then the rest.
        broken_off = [*WHOLE, "evaluation.every_n_steps=100"]
        before = "sigterm_to_all_in_the_first_evaluation"
        tasks.append(task("stopped", "train_ddp", *broken_off, before=before, look=True))
        tasks.append(task("after-the-stop", "train_ddp", *broken_off, output="stopped", look=True))
        # Two sizes, and the same as two runs.
        sizes = ["data.size_schedule=[{epoch:2,img_size:24,lr:2e-2}]", "optimizer.lr=5e-2", "num_train_steps=5"]
        tasks.append(task("both", "train_ddp", *ALL, *sizes))
        first = ["optimizer.lr=5e-2", "num_train_steps=2"]
        tasks.append(task("first", "train_ddp", *ALL, *first))
        second = ["model.img_size=24", "optimizer.lr=2e-2", "num_train_steps=3"]
        init = f"checkpoint.init_from={folder / 'first/checkpoints'}"
        tasks.append(task("second", "train_ddp", *ALL, *second, init))
        # A model that is not ours, fixed positions, another optimizer, a cut of the blocks: they go on over a border.
        change = "data.size_schedule=[{epoch:0.8,img_size:24}]"
        tasks.append(task("timm", "train_ddp", change, "model.implementation=timm"))
        tasks.append(
            task(
                "muon",
                "train_fsdp2",
                change,
                "optimizer.name=muon",
                "optimizer.momentum=0.9",
                "checkpoint.async_save=true",
            )
        )
        tasks.append(task("sincos", "train_fsdp2", change, "model.pos_embed=sincos"))
        tasks.append(task("tp", "train_fsdp2", change, "model.embed_dim=32", "model.num_heads=4", "distributed.tp=2"))
        resident = ["data.resident=true", "data.num_workers=1", "model.num_classes=6"]
        tasks.append(task_of(_of_one_size(folder), folder, "resident", "train_ddp", change, *resident))
        return run_tasks(tasks, nproc=2, folder=folder), folder

    return start


def _of_one_size(folder):
    names = [f"{split}/{label}/{n}.png" for split in ("train", "val") for label in "abc" for n in range(16)]
    return make_files(folder / "one_size", names, size=(20, 20))


# Exact


@pytest.mark.parametrize("kind", [*CPU_SCRIPTS, "mixed"])
@pytest.mark.slow
def test_stops_before_at_and_after_a_border_change_no_digit(runs, kind):
    _, folder = runs(2)
    straight = read_metrics(folder / f"straight-{kind if kind in CPU_SCRIPTS else 'train_ddp'}")
    got = read_metrics(folder / kind)
    assert sorted(straight) == list(range(1, 13))
    for step, values in straight.items():
        for name in NAMES:
            if name in values:  # a stop makes evaluations of its own
                assert got[step][name] == values[name], (step, name)
    assert {step for step, values in straight.items() if "val/loss" in values} == {
        3,
        4,
        7,
        8,
        11,
        12,
    }  # counted from the last border on


@pytest.mark.slow
def test_both_strategies_are_the_same(runs):
    _, folder = runs(2)
    ddp, fsdp2 = (column(folder, f"straight-{script}", "train/loss") for script in CPU_SCRIPTS)
    assert ddp == fsdp2


@pytest.mark.parametrize("name", [*(f"straight-{script}" for script in CPU_SCRIPTS), "until-4"])
@pytest.mark.slow
def test_another_world_size_is_the_same_to_1e_6(runs, name):
    expected, got = (read_metrics(runs(n)[1] / there) for n, there in ((2, "straight-train_ddp"), (1, name)))
    for step in range(5, 13):
        for key in ("train/loss", "val/loss"):
            if key in expected[step]:
                assert got[step][key] == pytest.approx(expected[step][key], rel=0, abs=1e-6), (step, key)


@pytest.mark.slow
def test_the_evaluation_of_a_border_that_was_broken_off_is_made_up_for_at_the_old_size(runs):
    outcomes, folder = runs(2)
    assert outcomes["stopped"][0]["metrics"]["saved"] == {"4": True}
    after = outcomes["after-the-stop"][0]["metrics"]
    assert after["saved"]["12"] is False
    straight, got = (read_metrics(folder / name) for name in ("straight-train_ddp", "stopped"))
    assert got[4]["val/loss"] == straight[4]["val/loss"]
    assert [got[step]["train/loss"] for step in range(1, 13)] == column(folder, "straight-train_ddp", "train/loss")


@pytest.mark.slow
def test_samples_and_epochs_go_on_where_the_steps_before_ended(runs):
    _, folder = runs(2)
    epochs = column(folder, "straight-train_ddp", "train/epoch")
    samples = [*itertools.accumulate([24] * 4 + [12] * 8)]
    assert epochs == [round(n / 60, 4) for n in samples]
    states = (folder / "straight-train_ddp/checkpoints").glob("step_*/state.json")
    assert {json.loads(path.read_text())["step"]: json.loads(path.read_text())["samples"] for path in states}[12] == 192
    images = column(folder, "straight-train_ddp", "val/images")
    assert images == [23] * 6


@pytest.mark.slow
def test_mfu_knows_the_size_and_goodput_counts_a_border_once(runs):
    _, folder = runs(2)
    for step, cfg in zip((3, 7, 11), tiny_config(*WHOLE).stages(), strict=True):
        values = read_metrics(folder / "straight-train_fsdp2")[step]
        flops = VisionTransformer(cfg.model).flops_per_image()
        expected = values["train/images_per_second"] * 3 * flops / (1e6 * 2)
        assert values["train/mfu"] == pytest.approx(expected, rel=1e-3), step
    status = folder / "straight-train_ddp/status.json"
    goodput = json.loads(status.read_text())["goodput"]
    assert goodput["until"] == pytest.approx(goodput["began"] + sum(goodput["seconds"].values()), abs=0.1)
    assert goodput["until"] <= status.stat().st_mtime + 0.1
    assert goodput["seconds"]["lost"] == goodput["seconds"]["stopped"] == 0


@pytest.mark.slow
def test_the_final_model_has_the_last_size(runs):
    _, folder = runs(2)
    assert weights(folder, "straight-train_ddp")["pos_embed"].shape == (1, 2 + 2 * 3, 24)
    config = json.loads((folder / "straight-train_ddp/checkpoints/final_model/config.json").read_text())
    assert config["model_args"]["img_size"] == [16, 24]
    assert "size_schedule:\n  - epoch: 1.7" in (folder / "straight-train_ddp/config.yaml").read_text()
    card = (folder / "straight-train_ddp/checkpoints/final_model/README.md").read_text()
    assert '"epoch": 2.4, "img_size": [16, 24]' in card


# Against something else


@pytest.mark.slow
def test_two_sizes_are_two_runs_of_which_the_second_starts_from_the_weights_of_the_first(runs):
    _, folder = runs(2)
    both = column(folder, "both", "train/loss")
    assert both[:2] == column(folder, "first", "train/loss")
    assert both[2:] == pytest.approx(column(folder, "second", "train/loss"), rel=0, abs=2e-6)
    assert column(folder, "both", "train/lr")[2:] == column(folder, "second", "train/lr")
    assert len(set(both)) == 5
    assert_same(weights(folder, "both"), weights(folder, "second"), atol=2e-6)


@pytest.mark.parametrize("name", ["timm", "muon", "sincos", "tp", "resident"])
@pytest.mark.slow
def test_these_go_on_over_a_border(runs, name):
    _, folder = runs(2)
    assert len(column(folder, name, "train/loss")) == 6
    assert weights(folder, name)["pos_embed"].shape[1] == 9


@pytest.fixture
def job(image_folder, tmp_path):
    """A function: overrides -> a `Job` of its own processes' folder."""
    opened = []
    yield lambda *overrides: Job(
        [*TINY, f"data.path={image_folder}", f"output_dir={tmp_path / 'run'}", *overrides], opened
    )
    for one in list(opened):
        one.close()


def test_each_stage_looks_for_checkpoints_once(tiny, monkeypatch):
    looks, find = [], checkpoint._find
    monkeypatch.setattr(checkpoint, "_find", lambda *args: looks.append(1) or find(*args))
    options = ["data.size_schedule=[{epoch:0.4,img_size:24}]", "num_train_steps=2", "lr_scheduler.num_warmup_steps=0"]
    cfg = launch.load_config("L0_sanity", [*tiny, *options], script="train_ddp")
    train_ddp.main(cfg)
    assert len(looks) == 2
    train_ddp.main(cfg)  # finished: what is there is the last stage's
    assert len(looks) == 3


@pytest.mark.parametrize("to", [24, 8, [8, 32]])
def test_weights_and_averages_are_resampled_as_timm_does_it_and_moments_linearly(job, to):
    schedule = f"data.size_schedule=[{{epoch:1.7,img_size:{to}}}]".replace(" ", "")
    options = [*TOKENS, "ema.decay=0.9", "num_train_steps=9"]
    first = job(schedule, *options)
    stages, data = first.cfg.stages(), {"world_size": 1, "num_train_images": 60, "num_val_images": 23}
    data["classes"] = tuple(f"class_{letter}" for letter in "abcdef")
    before, after = schema.RunSizes.stages(first.cfg, **data)
    resumed = checkpoint.restore(first.state, stages[0], first.session, before)
    generator = torch.Generator().manual_seed(0)
    position = first.state.weights["pos_embed"]
    state = first.state.optimizer.state[position]
    for tensor in (position.data, first.state.ema.averages["pos_embed"], state["exp_avg"], state["exp_avg_sq"]):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    state["exp_avg_sq"].square_()
    state["exp_avg"].mul_(state["exp_avg_sq"].sqrt())
    state["step"].fill_(4)
    saver = checkpoint.Saver(first.state, stages[0], first.session, before, resumed=resumed)
    saver.save(4, None)
    saver.wait()
    kept = [position.detach().clone(), first.state.ema.averages["pos_embed"].clone(), state["exp_avg"].clone()]
    kept.append(state["exp_avg_sq"].clone())
    first.close()

    size = f"model.img_size={to}".replace(" ", "")
    second = job(size, *options)
    beginning = checkpoint.beginning_of(second.cfg, second.session)
    assert (beginning.step, beginning.is_unscored) == (4, False)
    assert checkpoint.restore(second.state, second.cfg, second.session, after, beginning).step == 4
    position = second.state.weights["pos_embed"]
    state = second.state.optimizer.state[position]
    height, width = schema.pair(to if isinstance(to, int) else tuple(to))
    grid = [height // 8, width // 8]
    for was, got in zip(kept[:2], (position, second.state.ema.averages["pos_embed"]), strict=True):
        assert torch.equal(got, resample_abs_pos_embed(was, grid, [2, 2], num_prefix_tokens=2))
    for was, key in zip(kept[2:], ("exp_avg", "exp_avg_sq"), strict=True):
        tokens, patches = was[:, :2], was[:, 2:].reshape(1, 2, 2, 24).permute(0, 3, 1, 2)
        patches = F.interpolate(patches, size=grid, mode="bilinear", antialias=True).flatten(2).transpose(1, 2)
        assert torch.equal(state[key], torch.cat([tokens, patches], dim=1))
    assert state["exp_avg_sq"].min() > 0
    assert (
        state["exp_avg"].abs() <= state["exp_avg_sq"].sqrt() * kept[2].abs().div(kept[3].sqrt()).max() * 1.0001
    ).all()
    assert state["step"] == 4


def test_a_checkpoint_of_another_size_is_taken_at_its_border_only(job):
    first = job()
    resumed = first.restore()
    first.save(4, 5)
    first.close()
    assert resumed.step == 0
    schedule = "data.size_schedule=[{epoch:1.7,img_size:24}]"
    later = job("model.img_size=24")
    sizes = schema.RunSizes.stages(
        tiny_config(schedule), world_size=1, num_train_images=60, num_val_images=23, classes=_classes(later)
    )[1]
    text = error_of(checkpoint.restore, later.state, later.cfg, later.session, sizes)
    assert "step_00000005 was written with model.img_size=16, not 24" in text


def _classes(job):
    (state,) = (job.session.output_dir / "checkpoints").glob("step_00000005/state.json")
    return tuple(json.loads(state.read_text())["classes"])


# Arithmetic


def stages_of(*overrides, images=60, world_size=1):
    cfg = tiny_config(*overrides)
    sizes = schema.RunSizes.stages(cfg, world_size=world_size, num_train_images=images, num_val_images=23)
    return list(zip(cfg.stages(), sizes, strict=False))


def test_the_stages_of_a_run():
    (one, a), (two, b), (three, c) = stages_of(*WHOLE, "evaluation.every_n_steps=null", "evaluation.every_n_epochs=0.5")
    assert [(s.first_step, s.last_step, s.first_sample) for s in (a, b, c)] == [(0, 4, 0), (4, 8, 96), (8, 12, 144)]
    assert {s.num_train_steps for s in (a, b, c)} == {12}
    assert [cfg.model.img_size for cfg in (one, two, three)] == [16, 24, (16, 24)]
    assert [cfg.data.image_size for cfg in (one, two, three)] == [16, 24, (16, 24)]
    assert [s.size_before for s in (a, b, c)] == [None, 16, 24]
    assert [(s.schedule_start, s.schedule_steps, s.num_warmup_steps) for s in (a, b, c)] == [
        (0, 4, 2), (4, 8, 2), (4, 8, 2)
    ]  # fmt: skip
    assert [s.evaluate_every for s in (a, b, c)] == [1, 2, 2]  # half an epoch
    assert [s.samples_at(s.last_step) for s in (a, b, c)] == [96, 144, 192]
    assert {cfg.data.size_schedule for cfg in (one, two, three)} == {None}


def test_a_run_that_is_cut_short_leaves_stages_out_and_keeps_the_schedule():
    cut = [*LONG, "num_train_steps=6"]
    (_, a), (_, b) = stages_of(*cut)
    assert (a.last_step, b.first_step, b.last_step) == (4, 4, 6)
    assert a.schedule_steps == 4
    assert stages_of(*LONG, "num_train_steps=4")[0][1].schedule_steps == 4
    assert len(stages_of(*LONG, "num_train_steps=4")) == 1


def test_without_a_schedule_there_is_one_stage_which_is_the_config():
    cfg = tiny_config()
    assert cfg.stages() == (cfg,)
    assert cfg.stages()[0] is cfg


def test_the_rate_begins_anew_where_an_entry_has_one_and_follows_the_batch_where_it_is_given_by_it():
    stages = stages_of(*WHOLE)
    rates = [
        lr_at(step, cfg, sizes) for cfg, sizes in stages for step in range(sizes.first_step + 1, sizes.last_step + 1)
    ]
    alone = tiny_config("optimizer.lr=5e-4", "num_train_steps=8")
    expected = schema.RunSizes.of(alone, world_size=1, num_train_images=60, num_val_images=23)
    assert rates[4:] == [lr_at(step, alone, expected) for step in range(1, 9)]
    assert rates[3] == pytest.approx(0, abs=1e-12)
    change = "data.size_schedule=[{epoch:1.7,img_size:24,global_batch_size:12}]"
    (before, first), (after, second) = stages_of(change, "optimizer.lr_base_size=24", "num_train_steps=12")
    assert (first.schedule_steps, second.schedule_steps, second.schedule_start) == (12, 12, 0)
    assert lr_at(8, after, second) == pytest.approx(lr_at(8, before, first) / 2)


def test_an_entry_without_a_warmup_has_none_wherever_the_first_one_starts():
    started = ["lr_scheduler.warmup_start_lr=1e-6", "data.size_schedule=[{epoch:2,img_size:24,lr:1e-4}]"]
    (_, first), (cfg, second) = stages_of(*started, "num_train_steps=12")
    assert lr_at(second.first_step + 1, cfg, second) == pytest.approx(1e-4, rel=0.1)
    assert first.num_warmup_steps > 0


@pytest.mark.parametrize("repeats", [1, 2])
def test_every_sample_is_drawn_once_in_the_order_of_the_stream(repeats):
    numbers, images = [], []
    for cfg, sizes in stages_of(*WHOLE, f"data.repeated_augmentation={repeats}"):
        sampler = TrainSampler(cfg, sizes, lambda epoch: list(range(60)), rank=0, start_step=sizes.first_step)
        for batch in sampler:
            numbers += [number for number, _ in batch]
            images += [index for _, index in batch]
    assert numbers == list(range(192))
    ordered = images if repeats == 1 else [*images[:12], *images[24:36], *images[48:60], *images[72:84]]
    assert ordered == [n % 60 for n in range(len(ordered))]
    if repeats == 2:
        assert images[:12] == images[12:24]
        assert images[96:102] == images[102:108] == list(range(48, 54))


# Refused

REFUSED = {  # overrides -> what the one line says
    "no entry": ("data.size_schedule=[]", "data.size_schedule=[] changes nothing"),
    "order": ("data.size_schedule=[{epoch:2,img_size:24},{epoch:1,img_size:8}]", "the epochs [2.0, 1.0]: put"),
    "twice": ("data.size_schedule=[{epoch:2,img_size:24},{epoch:2,img_size:8}]", "the epochs [2.0, 2.0]: put"),
    "patch": ("data.size_schedule=[{epoch:2,img_size:20}]", "data.size_schedule: model.img_size=20 is not a multiple"),
    "late": (f"{SCHEDULE} num_train_steps=null num_epochs=2.4", "epoch 2.4, num_epochs=2.4 ends before it"),
    "warmup": ("data.size_schedule=[{epoch:2,img_size:24,num_warmup_epochs:1}]", "num_warmup_epochs=1 without lr"),
    "rate": ("data.size_schedule=[{epoch:2,img_size:24,lr:1e-5}] lr_scheduler.min_lr=1e-4", "min_lr=0.0001 is above"),
    "typo": ("data.size_schedule=[{epoch:2,image_size:24}]", "image_size"),
    "no folder": (f"{SCHEDULE} checkpoint.ckpt_dir=null", "checkpoint.ckpt_dir=null with data.size_schedule: give it"),
    "teacher": (f"{SCHEDULE} distillation.kind=hard distillation.teacher=timm:x", "distillation.kind=hard with"),
    "engine": (
        f"{SCHEDULE} model.transformer_engine=true model.act_layer=gelu_tanh precision=bf16",
        "model.transformer_engine=true with data.size_schedule: set it to false; not seen to work",
    ),
    "relative positions": (
        f"{SCHEDULE} model.rel_pos_type=bias model.pos_embed=none",
        "model.rel_pos_type=bias with data.size_schedule: set null; not seen to work",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name):
    overrides, text = REFUSED[name]
    assert text in error_of(tiny_config, *overrides.split())


def test_refused_by_the_sizes_or_the_script():
    early = ["data.size_schedule=[{epoch:2,img_size:24,lr:1e-5}]", "lr_scheduler.num_training_steps=5"]
    assert "num_training_steps=5 is not after step 5, where an lr of" in error_of(
        stages_of, *early, "num_train_steps=12"
    )
    assert "epoch 0.1: less than a step of 24 images" in error_of(
        stages_of, "data.size_schedule=[{epoch:0.1,img_size:24}]"
    )
    change = "data.size_schedule=[{epoch:2,img_size:24,global_batch_size:9}]"
    assert "global_batch_size=9 is not micro_batch_size=4 x 2 ranks" in error_of(stages_of, change, world_size=2)
    mixed = tiny_config(change, "data.mixup=0.5")
    assert "micro_batch_size=9 (on 1 ranks) is odd" in error_of(launch.check_script, mixed, "train_ddp", 1)


# Compiled and recorded


@pytest.mark.slow
def test_each_size_is_compiled_for_itself(image_folder, tmp_path):
    change = ["data.size_schedule=[{epoch:0.8,img_size:24}]", "compile=true", "evaluation.every_n_steps=2"]
    task = task_of(image_folder, tmp_path, "compiled", "train_ddp", *change, before="count_symbolic_sizes")
    outcomes = run_tasks([task], nproc=1, folder=tmp_path, timeout=500)
    assert outcomes["compiled"][0]["metrics"]["symbolic"] == 0


@pytest.mark.gpu
def test_graphs_are_recorded_anew_after_a_border(tmp_path):
    """With the images resident and the model compiled, as config/cifar10_vit_sizes.yaml has it."""
    names = [f"{split}/{label}/{n:02d}.png" for split in ("train", "val") for label in "abcdef" for n in range(20)]
    images = make_files(tmp_path / "images", names, size=(32, 32))
    steps = "data.size_schedule=[{epoch:6.4,img_size:48}]"  # 16 steps of 48 of the 120 images, then 16 more
    options = [steps, "compile=true", "data.resident=true", "data.num_workers=2", "data.hflip=0.5", "ema.decay=0.9"]
    options += ["model.drop_path_rate=0.2", "optimizer.name=muon", "optimizer.momentum=0.9"]
    tasks = []
    for script, graphs in itertools.product(CPU_SCRIPTS, ("false", "true")):
        options_here = [*options, f"cuda_graphs={graphs}", "lr_scheduler.num_training_steps=32"]
        task = functools.partial(task_of, images, tmp_path, base=[*TINY, *ON_GPU], before="count_replays_of_fresh_code")
        tasks.append(task(f"{script}-{graphs}", script, *options_here, "num_train_steps=32"))
        for stop in (16, 20, 32) if graphs == "true" else ():
            tasks.append(
                task(f"{script}-{stop}", script, *options_here, f"num_train_steps={stop}", output=f"{script}-stops")
            )
    outcomes = run_tasks(tasks, nproc=1, folder=tmp_path, timeout=550)
    for script in CPU_SCRIPTS:
        assert outcomes[f"{script}-true"][0]["metrics"]["replays"] == 2 * (16 - 11)
        recorded = column(tmp_path, f"{script}-true", "train/loss")
        assert recorded == column(tmp_path, f"{script}-false", "train/loss")
        assert recorded == column(tmp_path, f"{script}-stops", "train/loss")
