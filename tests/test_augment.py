"""Augmentation, mixup and the losses: the same pixels as timm's and torchvision's from the same random numbers."""

import launch

import dataclasses
import functools
import itertools
import logging
import random
import re

import numpy as np
import pytest
import torch
import yaml
from conftest import TINY, column, loaders_of, run_tasks, task_of
from timm.data import Mixup as TimmMixup
from timm.data.mixup import mixup_target
from timm.data.random_erasing import RandomErasing as TimmErasing
from timm.data.transforms_factory import transforms_imagenet_train
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torchvision import transforms
from torchvision.transforms import functional as F

import schema
import train_ddp
from input_pipeline.augment import Augment, Mixup, RandomErasing
from runtime import seeding
from trainer import loss_of

POLICIES = [
    "rand-m9-mstd0.5-inc1",
    "rand-m10-n2-p1",
    "rand-m15-n2-p1-mmax15",
    "rand-m20-n3-p1-mmax20-inc1",
    "rand-m7-mstd101-tweights",
    "rand-m9-t3a",
    "rand-m9-n3-mstd1-t3aw",
    "original",
    "originalr-mstd0.5",
    "v0",
    "v0r",
    "3a",
    "augmix-m5-w4-d2",
    "augmix-m3-a0.5-b1-mstd1",
]
MIXING = ["data.mixup=0.8", "data.cutmix=1.0", "data.mixup_prob=0.9", "data.mixup_switch_prob=0.4"]
ALL = [
    *("data.auto_augment=rand-m9-mstd0.5-inc1", "data.color_jitter=[0.3,0.3,0.3,0.1]", "data.random_erasing=0.5"),
    *("data.hflip=0.5", "data.vflip=0.5", "data.crop_scale=[0.3,1]", *MIXING),
]
OFF = ["data.hflip=0", "data.mean=[0.485,0.456,0.406]", "data.std=[0.229,0.224,0.225]"]
GREY = ["model.in_chans=1", "data.mean=[0.3]", "data.std=[0.35]"]


@functools.cache
def composed():
    return launch.load_config("L0_sanity", [*TINY, "data.path=unused", *OFF], script="train_ddp")


@functools.cache
def config(*overrides):
    """The composed config with other values: checked as a composed one is, in a hundredth of the time."""
    cfg, sections = composed(), {}
    for key, value in (override.split("=") for override in overrides):
        section, _, name = key.rpartition(".")
        value = yaml.safe_load(value)
        sections.setdefault(section, {})[name] = tuple(value) if isinstance(value, list) else value
    top = sections.pop("", {})
    for section, values in sections.items():
        top[section] = dataclasses.replace(getattr(cfg, section), **values)
    return dataclasses.replace(cfg, **top)


@functools.cache
def make_image(num_channels=3, height=24, width=36):
    """A smooth image of many colours: every operation changes it."""
    values = torch.rand(1, num_channels, 5, 5, generator=torch.Generator().manual_seed(0))
    values = torch.nn.functional.interpolate(values, (height, width), mode="bicubic")[0]
    return (values.clamp(0.05, 0.9) * 255).to(torch.uint8)


def augmented(cfg, number, image):
    """As the loader calls it for sample `number`."""
    augment, before = Augment(cfg.data), image.clone()
    with seeding.sample(cfg.seed, number):
        result = augment(image)
    assert torch.equal(image, before)
    assert (result.shape, result.dtype) == (image.shape, torch.uint8)
    return result


def timms(cfg, number, image):
    """What timm's transforms make of sample `number` after the crop; None where Pillow refuses timm's argument."""
    data = cfg.data
    steps = transforms_imagenet_train(
        img_size=data.image_size,
        hflip=data.hflip,
        vflip=data.vflip,
        color_jitter=data.color_jitter,
        force_color_jitter=True,
        auto_augment=data.auto_augment,
        interpolation=data.interpolation,
        mean=data.mean,
        normalize=False,
        separate=True,
    )
    after_crop = [*steps[0].transforms[1:], *steps[1].transforms, *steps[2].transforms]
    with seeding.sample(cfg.seed, number):
        try:
            return transforms.Compose(after_crop)(F.to_pil_image(image))
        except ValueError as error:
            if "bits must be" not in str(error):
                raise
            return None


# The image


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_timms_pixel_for_pixel(policy, channels):
    cfg = config(f"data.auto_augment={policy}", *(GREY if channels == 1 else []))
    image = make_image(channels)
    pairs = [(augmented(cfg, n, image), timms(cfg, n, image)) for n in range(30)]
    assert sum(theirs is None for _, theirs in pairs) < 10
    assert all(theirs is None or torch.equal(ours, theirs) for ours, theirs in pairs)
    assert any(not torch.equal(ours, image) for ours, _ in pairs)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_follow_from_seed_and_sample(policy):
    cfg, image = config(f"data.auto_augment={policy}"), make_image()
    first = [augmented(cfg, n, image) for n in range(24)]
    torch.rand(3), np.random.rand(3), random.random()
    assert all(torch.equal(augmented(cfg, n, image), first[n]) for n in range(24))
    assert len(torch.stack(first).unique(dim=0)) >= (3 if policy == "3a" else 5)
    other = config(f"data.auto_augment={policy}", "seed=1")
    assert any(not torch.equal(augmented(other, n, image), first[n]) for n in range(24))


@pytest.mark.parametrize("overrides", [["data.hflip=0.5", "data.vflip=0.3"], [*ALL[:2], *ALL[3:5]]])
def test_order_is_timms(overrides):
    cfg, image = config(*overrides), make_image()
    pairs = [(augmented(cfg, n, image), timms(cfg, n, image)) for n in range(40)]
    assert all(theirs is None or torch.equal(ours, theirs) for ours, theirs in pairs)
    assert len({ours.numpy().tobytes() for ours, _ in pairs}) >= 4


@pytest.mark.parametrize("strength", ["[0.4,0.4,0.4]", "[0.3,0.2,0.1,0.1]", "[0.9,0,0]"])
def test_colour_jitter_is_torchvisions(strength):
    cfg, image = config(f"data.color_jitter={strength}"), make_image()
    jitter = transforms.ColorJitter(*cfg.data.color_jitter)
    for n in range(10):
        with seeding.sample(cfg.seed, n):
            expected = F.pil_to_tensor(jitter(F.to_pil_image(image)))
        assert torch.equal(augmented(cfg, n, image), expected)
        assert not torch.equal(expected, image)


def test_posterizing_to_no_bits_is_black():
    """The strongest level of timm's PosterizeIncreasing, which Pillow 13 refuses."""
    cfg, image = config("data.auto_augment=rand-m10-n1-p1-inc1"), make_image()
    assert any(augmented(cfg, n, image).max() == 0 for n in range(80))


def test_one_mean_serves_coloured_images_too():
    one, three = (["data.auto_augment=rand-m9-n3-p1", f"data.mean={mean}"] for mean in ("[0.5]", "[0.5,0.5,0.5]"))
    for n in range(20):
        assert torch.equal(augmented(config(*one), n, make_image()), augmented(config(*three), n, make_image()))


def test_nothing_on_changes_nothing():
    image = make_image()
    before = torch.get_rng_state(), random.getstate()
    assert Augment(config().data)(image) is image
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("size", [(32, 32), (17, 40), (6, 6)])
@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_erased_boxes_and_their_noise_are_timms(size, probability):
    cfg = config(f"data.random_erasing={probability}")
    ours = RandomErasing(cfg.data)
    timms = TimmErasing(probability, mode="pixel", device="cpu")
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (cfg.data.mean, cfg.data.std))
    image, erased = torch.full((3, *size), 7, dtype=torch.uint8), 0
    for seed in range(80):
        random.seed(seed), torch.manual_seed(seed)
        reference = timms(torch.full((3, *size), torch.nan))
        random.seed(seed), torch.manual_seed(seed)
        result = ours(image)
        is_box = ~reference.isnan()
        assert torch.equal(result[~is_box], image[~is_box])
        black, white = (0 - mean) / std, (1 - mean) / std
        clipped = torch.minimum(torch.maximum(reference, black), white)
        difference = ((result / 255 - mean) / std - clipped).abs() * 255 * std
        assert (difference[is_box] < 0.5 + 1e-3).all()
        erased += is_box.any().item()
    assert image.eq(7).all()
    assert abs(erased - 80 * probability) <= 6 * (80 * probability * (1 - probability)) ** 0.5 + 2


@pytest.mark.parametrize(("world_size", "num_workers", "micro"), [(1, 2, 24), (2, 0, 4), (3, 1, 8)])
def test_augmented_stream_does_not_depend_on_who_reads_it(image_folder, world_size, num_workers, micro):

    def stream(world_size, num_workers, micro):
        cfg = config(*ALL, f"data.num_workers={num_workers}", f"micro_batch_size={micro}")
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, path=str(image_folder)))
        ranks = []
        for rank in range(world_size):
            loader, _ = loaders_of(cfg, rank=rank, world_size=world_size, start_step=0)
            images = torch.cat([images for images, _ in itertools.islice(loader, 3 * 24 // micro // world_size)])
            ranks.append(images.unflatten(0, (3, -1)))
        return torch.cat(ranks, dim=1).flatten(0, 1)

    straight = stream(1, 0, 24)
    assert len(straight.unique(dim=0)) == 72
    assert torch.equal(stream(world_size, num_workers, micro), straight)


# Mixup


def batch(size=24, side=(16, 16)):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, *side, generator=generator), torch.randint(0, 6, (size,), generator=generator)


def timm_state(seed, step):
    rng = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, step], spawn_key=(0,))))
    np.random.set_state(rng.get_state())


@pytest.mark.parametrize(
    ("mixup", "cutmix", "probability", "switch"),
    [(0.8, 1.0, 1.0, 0.5), (0.2, 0, 1.0, 0.5), (0, 1.0, 0.5, 0.9), (0.4, 0.3, 0.7, 0.2), (0, 0.05, 1.0, 1.0)],
)
def test_lambda_box_and_targets_are_timms(mixup, cutmix, probability, switch):
    """A batch of one pair is reversed by timm as ours is; numpy's global generator is set to our step's state."""
    values = {"mixup": mixup, "cutmix": cutmix, "mixup_prob": probability, "mixup_switch_prob": switch}
    cfg = config(
        "seed=3",
        "model.img_size=[16,24]",
        "data.image_size=[16,24]",
        *(f"data.{key}={value}" for key, value in values.items()),
    )
    ours, kept = Mixup(cfg), np.random.get_state()
    arguments = {"mixup_alpha": mixup, "cutmix_alpha": cutmix, "prob": probability, "switch_prob": switch}
    timms = TimmMixup(**arguments, label_smoothing=0.0, num_classes=6)
    images, labels = batch(2, side=(16, 24))
    shares = []
    for step in range(1, 201):
        timm_state(3, step)
        expected, soft = timms(images.clone(), labels)
        mixed, targets = ours(images, labels, step)
        torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(targets, soft, rtol=0, atol=1e-6)
        shares.append(ours.draw(step)[0])
    np.random.set_state(kept)
    # Unmixed: when the dice said so, or where cutmix's box is smaller than a pixel.
    assert len(set(shares)) > 50 * probability
    assert abs(np.mean([share < 1 for share in shares]) - probability) < 0.15 or cutmix == 0.05


def test_lambda_is_drawn_anew_each_step_from_its_distribution():
    mixup = Mixup(config("data.mixup=0.8", "data.cutmix=1.0", "data.mixup_prob=0.5", "data.mixup_switch_prob=0.25"))
    draws = [mixup.draw(step) for step in range(2000)]
    assert draws == [mixup.draw(step) for step in range(2000)]
    mixups = np.array([share for share, box in draws if box is None and share < 1])
    assert abs(len(mixups) / 2000 - 0.375) < 6 * (0.375 * 0.625 / 2000) ** 0.5
    assert abs(sum(box is not None for _, box in draws) / 2000 - 0.125) < 6 * (0.125 * 0.875 / 2000) ** 0.5
    variance = 1 / (4 * (2 * 0.8 + 1))  # of Beta(0.8, 0.8)
    assert abs(mixups.mean() - 0.5) < 6 * (variance / len(mixups)) ** 0.5
    assert mixups.var() == pytest.approx(variance, rel=0.1)
    assert abs(np.corrcoef(mixups[:-1], mixups[1:])[0, 1]) < 6 / len(mixups) ** 0.5


@pytest.mark.parametrize("micro", [2, 4, 6, 12])
def test_mixup_does_not_depend_on_how_the_batch_is_split(micro):
    mixup, (images, labels) = Mixup(config(*MIXING)), batch()
    for step in range(1, 20):
        whole = mixup(images, labels, step)
        parts = [mixup(*part, step) for part in zip(images.split(micro), labels.split(micro), strict=True)]
        for one, other in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(one, torch.cat(other))


def test_targets_are_the_shares_of_a_pair():
    mixup, (images, labels) = Mixup(config(*MIXING)), batch()
    kept = images.clone(), labels.clone(), torch.get_rng_state(), np.random.get_state()[1].tobytes()
    kinds = set()
    for step in range(1, 40):
        mixed, targets = mixup(images, labels, step)
        share, box = mixup.draw(step)
        kinds.add((box is not None, share < 1))
        torch.testing.assert_close(targets.sum(dim=1), torch.ones(24), rtol=0, atol=1e-6)
        for p in range(24):
            expected = torch.zeros(6)
            expected[labels[p]] += share
            expected[labels[p ^ 1]] += 1 - share
            torch.testing.assert_close(targets[p], expected, rtol=0, atol=1e-6)
        if box is not None:
            own = (mixed == images).all(dim=1).float().mean(dim=(1, 2))
            torch.testing.assert_close(own, torch.full((24,), share), rtol=0, atol=1e-6)
    assert kinds == {(False, True), (True, True), (False, False)}
    assert torch.equal(images, kept[0])
    assert torch.equal(labels, kept[1])
    assert torch.equal(torch.get_rng_state(), kept[2])
    assert np.random.get_state()[1].tobytes() == kept[3]


def test_mixup_off_hands_back_its_arguments():
    images, labels = batch(3)
    mixed, targets = Mixup(config("data.mixup=0", "data.cutmix=0"))(images, labels, 1)
    assert mixed is images
    assert targets is labels


@pytest.mark.gpu
def test_mixup_does_not_wait_for_the_gpu():
    mixup, (images, labels) = Mixup(config(*MIXING)), batch()
    on_gpu = images.cuda(), labels.cuda()
    results = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 20):
            results.append(mixup(*on_gpu, step))
            loss_of(torch.zeros(24, 6, device="cuda"), results[-1][1], config("loss.name=sigmoid").loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step, (mixed, targets) in enumerate(results, start=1):
        expected = mixup(images, labels, step)
        torch.testing.assert_close(mixed.cpu(), expected[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(targets.cpu(), expected[1], rtol=0, atol=1e-6)


# Losses


def loss_config(**values):
    base = {"name": "softmax", "label_smoothing": 0.0, "bce_sum": False, "bce_target_thresh": None}
    return schema.LossConfig(**base | values)


@pytest.fixture(scope="module")
def scored():
    generator = torch.Generator().manual_seed(2)
    logits = 4 * torch.randn(10, 6, generator=generator)
    return logits, torch.randint(0, 6, (10,), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_softmax_loss_is_timms(scored, smoothing):
    logits, labels = scored
    cfg = loss_config(label_smoothing=smoothing)
    torch.testing.assert_close(loss_of(logits, labels, cfg), LabelSmoothingCrossEntropy(smoothing)(logits, labels))
    soft = soft_targets(labels, smoothing)
    mixed = mixed_targets(labels)
    torch.testing.assert_close(loss_of(logits, mixed, cfg), SoftTargetCrossEntropy()(logits, soft))


def mixed_targets(labels, share=0.3):
    """Unsmoothed, as Mixup hands them over: reversed like timm's."""
    one_hot = torch.nn.functional.one_hot(labels, 6).float()
    return share * one_hot + (1 - share) * one_hot.flip(0)


def soft_targets(labels, smoothing, share=0.3):
    """timm's own, smoothed."""
    return mixup_target(labels, 6, share, smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bce_sum", [False, True])
@pytest.mark.parametrize("threshold", [None, 0.0, 0.5])
def test_sigmoid_loss_is_timms(scored, smoothing, bce_sum, threshold):
    logits, labels = scored
    cfg = loss_config(name="sigmoid", label_smoothing=smoothing, bce_sum=bce_sum, bce_target_thresh=threshold)
    timms = BinaryCrossEntropy(smoothing, target_threshold=threshold, sum_classes=bce_sum)
    torch.testing.assert_close(loss_of(logits, labels, cfg), timms(logits, labels))
    torch.testing.assert_close(
        loss_of(logits, mixed_targets(labels), cfg), timms(logits, soft_targets(labels, smoothing))
    )


def test_sigmoid_loss_by_its_formula(scored):
    """Mean of -log p for what is there and -log(1 - p) for what is not; DeiT III counts both of a pair in full."""
    logits, labels = scored
    cfg = loss_config(name="sigmoid", bce_sum=True, bce_target_thresh=0.0)
    expected = 0.0
    for p, row in enumerate(logits.double()):
        present = {labels[p].item(), labels[9 - p].item()}
        for k, logit in enumerate(row):
            probability = 1 / (1 + (-logit).exp())
            expected -= (probability if k in present else 1 - probability).log()
    assert loss_of(logits, mixed_targets(labels), cfg).item() == pytest.approx(expected.item() / 10, rel=1e-5)


# What is refused


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["data.auto_augment=randaugment"], ["data.auto_augment=randaugment", "rand", "3a", "null"]),
        (["data.auto_augment=rand-mfoo"], ["data.auto_augment=rand-mfoo", "rand-m9"]),
        (["data.auto_augment=rand-m9-tfoo"], ["rand-m9-tfoo", "tweights"]),
        (["data.auto_augment=rand-m9-"], ["data.auto_augment=rand-m9-:", "rand-m9"]),
        (["data.auto_augment=rand-m9-m8"], ["rand-m9-m8", "m is given twice"]),
        (["data.auto_augment=rand-m15-n2"], ["rand-m15-n2:", "rand-m10-n2", "rand-m15-n2-mmax15"]),
        (["data.auto_augment=original-m5"], ["original-m5", "original-mstd0.5"]),
        (["data.auto_augment=augmix-m11"], ["augmix-m11", "augmix-m10"]),
        (["data.color_jitter=0.4"], ["data.color_jitter=0.4"]),
        (["data.color_jitter=[0.4,0.4]"], ["data.color_jitter=[0.4, 0.4]", "3"]),
        (["data.color_jitter=[0.4,0.4,0.4,0.6]"], ["data.color_jitter=", "hue", "0.5"]),
        (["data.color_jitter=[0.4,0.4,0.4]", *GREY], ["data.color_jitter=[0.4, 0.4, 0.4]", "model.in_chans=1", "to 0"]),
        (["data.random_erasing=1.5"], ["data.random_erasing=1.5"]),
        (["data.mixup=-0.1"], ["data.mixup=-0.1"]),
        (["data.mixup_prob=2"], ["data.mixup_prob=2"]),
        (["loss.name=focal"], ["loss.name='focal'", "'sigmoid'"]),
        (["loss.bce_sum=true"], ["loss.bce_sum=true", "loss.name=softmax"]),
        (["loss.bce_target_thresh=0.0"], ["loss.bce_target_thresh=0.0", "loss.name=softmax"]),
        (
            ["loss.name=sigmoid", "loss.bce_target_thresh=0.0", "loss.label_smoothing=0.1"],
            ["loss.label_smoothing=0.1", "loss.bce_target_thresh=0.0", "loss.label_smoothing=0"],
        ),
    ],
)
def test_mistake_is_one_line(overrides, fragments):
    with pytest.raises(schema.ConfigError) as caught:
        launch.load_config("L0_sanity", [*TINY, *OFF, *overrides], script="train_ddp")
    assert len(str(caught.value).splitlines()) == 1
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


@pytest.mark.parametrize("wrong", ["rand-q1", "rand-n2-m99", "rand-m30-mmax20", "augmix-q1", "augmix-m99", "v0-n1"])
def test_every_policy_that_a_message_proposes_works(wrong):
    with pytest.raises(ValueError, match=wrong) as caught:
        config(f"data.auto_augment={wrong}")
    text = str(caught.value).splitlines()[1] if "\n" in str(caught.value) else str(caught.value)
    proposed = re.findall(rf"{wrong.split('-')[0]}-[\w.-]+\w", text.split(wrong, 1)[1])
    assert proposed
    for policy in proposed:
        Augment(config(f"data.auto_augment={policy}").data)(make_image())


@pytest.mark.parametrize(
    ("mixing", "key"), [("data.mixup=0.2", "data.mixup=0.2"), ("data.cutmix=1.0", "data.cutmix=1")]
)
def test_odd_micro_batch_is_refused_before_the_start(mixing, key):
    for world_size, micro in ((8, "null"), (1, "3"), (2, "1")):
        cfg = config(mixing, f"micro_batch_size={micro}")
        with pytest.raises(schema.ConfigError) as caught:
            launch.check_script(cfg, "train_ddp", world_size)
        text = str(caught.value)
        assert len(text.splitlines()) == 1
        assert key in text
        assert f"micro_batch_size={3 if micro == 'null' else micro} " in text
        launch.check_script(config(f"micro_batch_size={micro}"), "train_ddp", world_size)
    launch.check_script(config(mixing, "micro_batch_size=6"), "train_ddp", 2)


# Whole runs


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    """Six steps with everything on, by one process and by two."""
    folder = tmp_path_factory.mktemp("augment")

    base = [*TINY, *OFF, *ALL, "checkpoint.ckpt_dir=null"]
    task = functools.partial(task_of, image_folder, folder, base=base)

    deit3 = ["loss.name=sigmoid", "loss.label_smoothing=0", "loss.bce_target_thresh=0.0"]
    bce_sum = ["loss.name=sigmoid", "loss.bce_sum=true"]
    losses = {"softmax": [], "deit3": deit3, "bce_sum": bce_sum}
    one = [task(f"one-{name}", "train_ddp", *overrides) for name, overrides in losses.items()]
    one.append(task("one-evaluated", "train_ddp", "evaluation.every_n_steps=2"))
    two = [task(f"two-{name}", "train_ddp", *overrides) for name, overrides in losses.items()]
    two.append(task("two-accumulated", "train_fsdp2", "micro_batch_size=4", "data.num_workers=2"))
    root, before = logging.getLogger(), (logging.getLogger().level, list(logging.getLogger().handlers))
    for alone in one:
        train_ddp.main(launch.load_config("L0_sanity", alone["overrides"], script="train_ddp"))
    root.level, root.handlers[:] = before
    run_tasks(two, nproc=2, folder=folder)
    return folder


@pytest.mark.parametrize(
    ("name", "reference"),
    [("softmax", "softmax"), ("deit3", "deit3"), ("bce_sum", "bce_sum"), ("accumulated", "softmax")],
)
def test_two_processes_train_as_one(runs, name, reference):
    for key in ("train/loss", "train/grad_norm"):
        one, two = column(runs, f"one-{reference}", key), column(runs, f"two-{name}", key)
        assert len(one) == 6
        assert two == pytest.approx(one, abs=1e-5)


def test_losses_are_of_their_size(runs):
    """Of six classes before anything is learned: log 6; log 2 a class, as a mean and as a sum."""
    for name, expected in (("softmax", 1.79), ("deit3", 0.69), ("bce_sum", 6 * 0.69)):
        assert column(runs, f"one-{name}", "train/loss")[0] == pytest.approx(expected, rel=0.1)


def test_evaluation_leaves_training_alone(runs):
    assert column(runs, "one-evaluated", "train/loss") == column(runs, "one-softmax", "train/loss")
    assert len(column(runs, "one-evaluated", "val/loss")) == 3
