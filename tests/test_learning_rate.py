"""The learning rate of every step: torch's, timm's and Big Vision's schedules."""

import launch

import dataclasses
import math

import pytest
import torch
from configs import data_config
from conftest import rate_at, tiny_config
from timm.scheduler import CosineLRScheduler, PolyLRScheduler
from torch import nn

import schema
from imagenet_dataset import run_sizes
from optim import build_optimizer

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


# The learning rate


def torch_rates(cfg, length, steps):
    """Of torch's own schedulers; update number 1 is their epoch 0."""
    schedule, peak = cfg.lr_scheduler, cfg.optimizer.lr
    warmup = schedule.num_warmup_steps
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=peak)
    lr_scheduler = torch.optim.lr_scheduler
    ahead = 0
    if schedule.name == "constant":
        decay = lr_scheduler.ConstantLR(optimizer, factor=1.0)
    else:
        decay = lr_scheduler.CosineAnnealingLR(optimizer, max(length - warmup, 1), eta_min=schedule.min_lr)
    if warmup < 2:
        ahead = 1 - warmup  # no warmup: the first update is one step down the cosine
        scheduler = decay
    else:
        for group in optimizer.param_groups:
            group["lr"] = peak
        warm = lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
        scheduler = lr_scheduler.SequentialLR(optimizer, [warm, decay], milestones=[warmup - 1])
    rates = []
    for _ in range(steps + ahead):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates[ahead:]


@pytest.mark.parametrize("min_lr", [0.0, 1e-5])
@pytest.mark.parametrize(
    ("steps", "warmup", "length"),
    [(100, 10, None), (100, 0, None), (100, 1, None), (100, 2, None), (7, 3, None), (100, 99, None), (100, 100, None),
     (100, 250, None), (40, 10, 100), (40, 0, 1000), (40, 60, 100), (1, 0, None), (1, 5, None)],
)  # fmt: skip
def test_rate_is_torchs_warmup_and_cosine(image_folder, steps, warmup, length, min_lr):
    schedule = [f"lr_scheduler.num_warmup_steps={warmup}", f"lr_scheduler.num_training_steps={length or 'null'}"]
    cfg = data_config(image_folder, f"num_train_steps={steps}", f"lr_scheduler.min_lr={min_lr}", *schedule)
    rates = [rate_at(step, cfg) for step in range(1, steps + 1)]
    assert rates == pytest.approx(torch_rates(cfg, length or steps, steps), rel=1e-9, abs=1e-15)
    assert max(rates) <= 1e-3 * (1 + 1e-12)
    if warmup > steps:
        assert rates == pytest.approx([1e-3 * step / warmup for step in range(1, steps + 1)], rel=1e-12)
    elif warmup < steps and length is None:
        assert rates[-1] == min_lr


@pytest.mark.parametrize("warmup", [0, 1, 2, 10, 30])
def test_constant_rate_stays_at_the_peak_after_its_warmup(image_folder, warmup):
    schedule = ["lr_scheduler.name=constant", f"lr_scheduler.num_warmup_steps={warmup}"]
    cfg = data_config(image_folder, "num_train_steps=20", *schedule)
    rates = [rate_at(step, cfg) for step in range(1, 21)]
    assert rates == pytest.approx(torch_rates(cfg, 20, 20), rel=1e-9)
    assert rates == pytest.approx([1e-3 * min(1, step / max(warmup, 1)) for step in range(1, 21)], rel=1e-12)


def test_rate_stays_at_its_minimum_past_the_end_of_the_schedule(image_folder):
    schedule = ["lr_scheduler.num_training_steps=20", "lr_scheduler.min_lr=1e-5"]
    cfg = data_config(image_folder, "num_train_steps=30", *schedule)
    assert [rate_at(step, cfg) for step in range(20, 31)] == [1e-5] * 11
    assert rate_at(19, cfg) > 1e-5


def test_run_cut_short_keeps_the_whole_runs_schedule(image_folder):
    whole = data_config(image_folder, "num_train_steps=100")
    part = data_config(image_folder, "num_train_steps=30", "lr_scheduler.num_training_steps=100")
    assert [rate_at(step, part) for step in range(1, 31)] == [rate_at(step, whole) for step in range(1, 31)]


def test_length_of_the_schedule_follows_from_the_epochs(image_folder):
    cfg = data_config(image_folder, "num_train_steps=null", "num_epochs=4", "lr_scheduler.min_lr=1e-6")
    assert run_sizes(cfg, 1).num_train_steps == 10  # 4 x 60 / 24
    as_steps = dataclasses.replace(cfg, num_train_steps=10, num_epochs=None)
    assert [rate_at(step, cfg) for step in range(1, 11)] == [rate_at(step, as_steps) for step in range(1, 11)]
    assert rate_at(10, cfg) == 1e-6


@pytest.mark.parametrize(("warmup", "start"), [(0, 0.0), (10, 0.0), (10, 1e-5), (40, 1e-6)])
@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_rate_is_timms(name, warmup, start):
    """DeiT's schedule among them: a warmup from 1e-6, then down to min_lr. Update n has timm's rate at t = n."""
    cfg = tiny_config(
        *("num_train_steps=100", f"lr_scheduler.name={name}", f"lr_scheduler.num_warmup_steps={warmup}"),
        *(f"lr_scheduler.warmup_start_lr={start}", "lr_scheduler.min_lr=1e-5"),
    )
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1e-3)
    options = {"warmup_t": warmup, "warmup_lr_init": start, "warmup_prefix": True, "t_in_epochs": True}
    kind = CosineLRScheduler if name == "cosine" else PolyLRScheduler
    more = {} if name == "cosine" else {"power": 1.0}
    scheduler = kind(optimizer, t_initial=100 - warmup, lr_min=1e-5, **options, **more)
    for step in range(1, 101):
        scheduler.step(step)
        assert rate_at(step, cfg) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), step
    assert rate_at(100, cfg) == pytest.approx(1e-5)


@pytest.mark.parametrize("warmup", [0, 20])
def test_rsqrt_and_its_cooldown_are_big_visions(warmup):
    cfg = tiny_config(
        *("num_train_steps=200", "lr_scheduler.name=rsqrt", "lr_scheduler.rsqrt_timescale=30"),
        *(f"lr_scheduler.num_warmup_steps={warmup}", "lr_scheduler.num_cooldown_steps=50"),
    )
    for step in range(1, 201):
        expected = 1e-3 * (min(1, step / warmup) if warmup else 1)
        if step >= warmup:
            expected /= math.sqrt(1 + (step - warmup) / 30)
        expected *= min(1, (200 - step) / 50)
        assert rate_at(step, cfg) == pytest.approx(expected, rel=1e-12)
    assert rate_at(200, cfg) == rate_at(300, cfg) == 0


def test_constant_cools_down_to_its_minimum():
    cfg = tiny_config(
        *("num_train_steps=20", "lr_scheduler.name=constant", "lr_scheduler.num_warmup_steps=0"),
        *("lr_scheduler.num_cooldown_steps=10", "lr_scheduler.min_lr=1e-4"),
    )
    assert [rate_at(step, cfg) for step in (1, 10)] == [1e-3, 1e-3]
    assert [rate_at(step, cfg) for step in (15, 20)] == pytest.approx([5.5e-4, 1e-4])


# The peak by the batch


@pytest.mark.parametrize(("batch", "base"), [(24, 24), (24, 8), (24, 256), (12, 7)])
@pytest.mark.parametrize("scale", ["linear", "sqrt"])
def test_peak_by_the_batch_is_timms(batch, base, scale):
    """The lines of timm's train.py (1.0): batch_ratio, its root with lr_base_scale sqrt, lr = lr_base * batch_ratio."""
    ratio = batch / base
    if scale == "sqrt":
        ratio = ratio**0.5
    by_batch = [f"global_batch_size={batch}", f"optimizer.lr_base_size={base}", f"optimizer.lr_base_scale={scale}"]
    cfg = tiny_config("optimizer.lr=2e-4", *by_batch)
    as_number = tiny_config(f"global_batch_size={batch}", f"optimizer.lr={2e-4 * ratio!r}")
    assert schema.peak_lr(cfg) == schema.peak_lr(as_number) == 2e-4 * ratio
    assert [rate_at(step, cfg) for step in range(1, 7)] == [rate_at(step, as_number) for step in range(1, 7)]
    assert build_optimizer(a_block(), cfg, no_weight_decay=set()).param_groups[0]["lr"] == 2e-4 * ratio


def a_block():
    return nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)])})


def test_other_rates_stay_whatever_the_batch():
    rates = ["num_train_steps=20", "lr_scheduler.warmup_start_lr=1e-5", "lr_scheduler.min_lr=2e-5"]
    cfg = tiny_config(*rates, "lr_scheduler.num_warmup_steps=10", "optimizer.lr_base_size=12")
    assert schema.peak_lr(cfg) == 2e-3
    assert [rate_at(step, cfg) for step in (0, 10, 20)] == pytest.approx([1e-5, 2e-3, 2e-5], rel=1e-12)


def test_rates_of_the_recipes_whose_papers_give_them_by_the_batch():
    cfg = launch.load_config("mae_scratch_b16", ["data.path=unused"])
    assert schema.peak_lr(cfg) == 1.6e-3  # to the last digit
    assert schema.peak_lr(launch.load_config("mae_scratch_b16", ["data.path=unused", "global_batch_size=1024"])) == 4e-4
