"""The data: folders to batches, in an order and with pixels that follow from (seed, step); synthetic data.

What is expected comes from elsewhere: torchvision's ImageFolder, timm's transforms, Pillow.
"""

import functools
import gc
import itertools
import math
import multiprocessing
import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from configs import STEPS, composed_data_config, data_config
from conftest import error_of, loaders_of, make_files, rng_untouched
from PIL import Image
from timm.data import create_transform
from torchvision.datasets import ImageFolder

import imagenet_dataset
import schema
from imagenet_dataset import PADDING, EvalSampler, TrainSampler, eval_transform, run_sizes
from runtime import seeding

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


PLAIN = ["data.crop_scale=[1,1]", "data.crop_ratio=[1,1]", "data.hflip=0"]  # of a square image, all of it


def stream(cfg, *, world_size=1, start_step=0, num_steps=None):
    """Images and labels of `num_steps` training steps: every rank's, put in the order of their positions."""
    per_rank = cfg.global_batch_size // world_size
    micro = cfg.micro_batch_size or per_rank
    ranks = []
    for rank in range(world_size):
        loader, _ = loaders_of(cfg, rank=rank, world_size=world_size, start_step=start_step)
        batches = list(itertools.islice(loader, None if num_steps is None else num_steps * per_rank // micro))
        assert {(len(images), len(labels)) for images, labels in batches} <= {(micro, micro)}
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        ranks.append((images.unflatten(0, (-1, per_rank)), labels.unflatten(0, (-1, per_rank))))
    images, labels = (torch.cat(parts, dim=1).flatten(0, 1) for parts in zip(*ranks, strict=True))
    return images, labels


def assert_same(found, expected):
    for part, reference in zip(found, expected, strict=True):
        assert torch.equal(part, reference)


def colours(images):
    """Which image of `coloured` each image shows: a crop of one colour has that colour."""
    red = images[:, 0].flatten(1).float()
    assert (red.amax(dim=1) - red.amin(dim=1)).max() <= 2
    return (red.mean(dim=1) / 10).round().int().tolist()


def coloured_reference(root, split):
    """Colours and labels in ImageFolder's order."""
    folder = ImageFolder(str(Path(root) / split))
    return [round(Image.open(file).getpixel((0, 0))[0] / 10) for file, _ in folder.samples], folder.targets


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    """Twelve times the same image of noise."""
    root = tmp_path_factory.mktemp("repeated")
    pixels = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for split, i in itertools.product(("train", "val"), range(12)):
        folder = root / split / f"class_{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def straight(image_folder):
    """The whole stream, as one process without workers reads it."""
    return stream(data_config(image_folder))


# The training stream: order


@pytest.mark.parametrize("batch_size", [8, 7, 20, 1])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_epoch_has_every_image_once_in_an_order_of_its_own(coloured, batch_size, num_workers):
    steps = -(-60 // batch_size)
    cfg = data_config(
        coloured, f"global_batch_size={batch_size}", f"num_train_steps={steps}", f"data.num_workers={num_workers}"
    )
    images, labels = stream(cfg)
    reference, targets = coloured_reference(coloured, "train")
    label_of = dict(zip(reference, targets, strict=True))

    seen = colours(images)
    assert len(seen) == steps * batch_size
    epochs = [seen[start : start + 20] for start in (0, 20, 40)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(reference)] * 3
    assert len({tuple(epoch) for epoch in epochs} | {tuple(reference)}) == 4  # and none is the folder's order
    assert labels.tolist() == [label_of[colour] for colour in seen]


def test_order_is_a_permutation_that_is_drawn_evenly(coloured):
    cfg = data_config(coloured, "global_batch_size=20", "num_train_steps=1000")
    sampler = loaders_of(cfg, rank=0, world_size=1, start_step=0)[0].batch_sampler
    orders = torch.tensor([[index for _, index in batch] for batch in sampler])  # one epoch a step
    counts = torch.stack([orders[:, place].bincount(minlength=20) for place in range(20)])
    # 400 cells of 1000 / 20 = 50 each; chi-square with 361 degrees of freedom: 361 +- 27
    assert 361 - 6 * 27 < ((counts - 50) ** 2 / 50).sum() < 361 + 6 * 27


@pytest.mark.parametrize(
    ("world_size", "num_workers", "micro"),
    [
        *((1, 1, None), (1, 3, None), (2, 0, None), (2, 1, None), (2, 3, None), (3, 0, None), (3, 1, None)),
        *((1, 0, 1), (1, 0, 6), (1, 0, 24), (2, 0, 3), (2, 0, 4), (3, 0, 1), (3, 0, 4), (3, 3, 2)),
    ],
)
def test_stream_does_not_depend_on_who_reads_it(image_folder, straight, world_size, num_workers, micro):
    overrides = [f"data.num_workers={num_workers}", f"micro_batch_size={micro or 'null'}"]
    assert_same(stream(data_config(image_folder, *overrides), world_size=world_size), straight)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("start_step", [1, 3, 5, STEPS - 1])
def test_resumed_stream_is_the_tail_of_the_straight_one(image_folder, straight, start_step, num_workers):
    tail = [part[start_step * 24 :] for part in straight]
    cfg = data_config(image_folder, f"data.num_workers={num_workers}")
    assert_same(stream(cfg, start_step=start_step), tail)
    assert_same(stream(cfg, start_step=start_step, world_size=2), tail)


class Garbage:
    """In a circle with itself; notes in which process it is destroyed."""

    def __init__(self, file):
        self.itself, self.file = self, file

    def __del__(self):
        with open(self.file, "a") as file:
            file.write(f"{os.getpid()}\n")


def test_garbage_is_destroyed_before_workers_are_forked(image_folder, tmp_path, monkeypatch):
    """They would destroy it a second time, and its threads are not theirs: one was seen to die of that."""
    load = imagenet_dataset.ImageDataset.__getitems__

    def collecting(self, keys):
        gc.collect()
        return load(self, keys)

    monkeypatch.setattr(imagenet_dataset.ImageDataset, "__getitems__", collecting)
    gc.disable()  # nor does chance destroy it here
    try:
        Garbage(tmp_path / "destroyed")
        stream(data_config(image_folder, "data.num_workers=1"), num_steps=1)
    finally:
        gc.enable()
    assert (tmp_path / "destroyed").read_text() == f"{os.getpid()}\n"


def test_nothing_is_left_to_read_after_the_last_step(image_folder):
    loader, _ = loaders_of(data_config(image_folder), rank=0, world_size=1, start_step=STEPS)
    assert len(loader) == len(list(loader)) == 0


@pytest.mark.parametrize("num_workers", [0, 2])  # 2: persistent ones, which have fetched batches ahead of the stop
@pytest.mark.parametrize("stops", [(1, 2), (3, 4), (1, 3, 4, 7)])  # an epoch is two and a half steps
def test_stream_may_be_stopped_and_resumed_twice_in_one_epoch(image_folder, straight, stops, num_workers):
    cfg = data_config(image_folder, f"data.num_workers={num_workers}")
    edges = [0, *stops, STEPS]
    parts = [stream(cfg, start_step=start, num_steps=end - start) for start, end in itertools.pairwise(edges)]
    assert_same([torch.cat(part) for part in zip(*parts, strict=True)], straight)


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_batch_names_the_images_that_follow_on_it(image_folder, repeats):
    """On all ranks, over the end of an epoch, and none after the run's last."""
    cfg = data_config(image_folder, "micro_batch_size=4", f"data.repeated_augmentation={repeats}")
    sizes = run_sizes(cfg, 2)

    def keys(rank, ahead):
        return list(
            TrainSampler(
                cfg, sizes, functools.partial(seeding.shuffled, 60, cfg.seed), rank=rank, start_step=1, ahead=ahead
            )
        )

    in_order = sorted(key for rank in (0, 1) for batch in keys(rank, 0) for key in batch)
    for batch in keys(1, 40):
        at = in_order.index(batch[0])
        assert batch == in_order[at : at + 4]
        assert batch.later == [index for _, index in in_order[at + 4 : at + 40]]
    val = list(EvalSampler(23, batch_size=4, rank=1, world_size=2, ahead=10))
    assert [list(batch.later) for batch in val] == [[*range(8, 14)], [*range(16, 22)], []]


@pytest.mark.parametrize("world_size", [1, 2])
def test_number_of_batches_is_announced(image_folder, world_size):
    cfg = data_config(image_folder, "micro_batch_size=4")
    loader, _ = loaders_of(cfg, rank=0, world_size=world_size, start_step=2)
    assert len(loader) == len(list(loader)) == (STEPS - 2) * 24 // 4 // world_size


# The training stream: pixels


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_two_augmentations_are_alike(repeated, world_size, num_workers):
    cfg = data_config(repeated, "global_batch_size=6", "num_train_steps=6", f"data.num_workers={num_workers}")
    images, _ = stream(cfg, world_size=world_size)  # three epochs of one image
    assert len(images) == 36
    assert len(images.unique(dim=0)) == 36


def test_one_seed_gives_one_stream_and_another_seed_another(repeated, image_folder, straight):
    assert_same(stream(data_config(image_folder, "data.num_workers=2")), straight)
    other = stream(data_config(image_folder, "seed=1"))
    assert not torch.equal(other[1], straight[1])
    assert not (other[0] == straight[0]).flatten(1).all(dim=1).any()
    # Of one image only the augmentation can differ.
    overrides = ["global_batch_size=6", "num_train_steps=6"]
    seeds = [stream(data_config(repeated, *overrides, f"seed={seed}"))[0] for seed in (0, 1, 2)]
    assert len(torch.cat(seeds).unique(dim=0)) == 3 * 36


def test_stream_does_not_depend_on_the_global_generators(image_folder, straight):
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    assert_same(stream(data_config(image_folder)), straight)
    assert_same(stream(data_config(image_folder, "data.num_workers=1")), straight)


@pytest.mark.parametrize("hflip", [0, 1])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_without_augmentation_a_image_is_resized_and_flipped_as_pillow_does(repeated, hflip, interpolation):
    cfg = data_config(repeated, *PLAIN[:2], f"data.hflip={hflip}", f"data.interpolation={interpolation}")
    images, _ = stream(cfg, num_steps=1)
    image = Image.open(repeated / "train/class_0/0.png")
    expected = np.asarray(image.resize((16, 16), Image.Resampling[interpolation.upper()]))
    expected = torch.tensor((expected[:, ::-1] if hflip else expected).copy()).permute(2, 0, 1)
    assert images.dtype == torch.uint8
    assert all(torch.equal(image, expected) for image in images)


def test_flips_and_crops_are_drawn_as_configured(tmp_path):
    ramp = np.tile(np.linspace(0, 255, 64).round().astype(np.uint8), (64, 1))  # left dark, right bright
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(ramp).save(tmp_path / split / "a/0.png")
        Image.fromarray(ramp).save(tmp_path / split / "a/1.png")

    def spread_and_sign(*overrides):
        sizes = ["global_batch_size=2", "num_train_steps=150"]
        images, _ = stream(data_config(tmp_path, *sizes, *overrides))
        rows = images[:, 0, 0].float()
        return (rows[:, -1] - rows[:, 0]).abs() / 255, rows[:, -1] > rows[:, 0]

    _, bright_right = spread_and_sign(*PLAIN[:2], "data.hflip=0.5")
    assert abs(bright_right.float().mean() - 0.5) < 6 * 0.5 / math.sqrt(300)
    width, bright_right = spread_and_sign("data.crop_scale=[0.25,0.25]", "data.crop_ratio=[1,1]", "data.hflip=0")
    assert bright_right.all()
    assert (width - 0.5).abs().max() < 0.06  # a quarter of the area is half of the width
    width, _ = spread_and_sign("data.crop_scale=[0.04,1]", "data.crop_ratio=[1,1]", "data.hflip=0")
    assert width.min() < 0.3
    assert width.max() > 0.9


@pytest.mark.parametrize("split", [0, 1], ids=["train", "val"])
def test_reading_a_sample_leaves_the_global_generators_alone(image_folder, split):
    loader = loaders_of(data_config(image_folder), rank=0, world_size=1, start_step=0)[split]
    keys = list(loader.batch_sampler)
    with rng_untouched():
        for key in keys[0]:
            loader.dataset[key]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("split", [0, 1], ids=["train", "val"])
def test_loading_leaves_the_global_generators_alone(image_folder, split, num_workers):
    cfg = data_config(image_folder, f"data.num_workers={num_workers}")
    with rng_untouched():
        assert len(list(loaders_of(cfg, rank=0, world_size=1, start_step=0)[split])) > 0


# Validation


@pytest.mark.parametrize(
    ("world_size", "batch_size", "num_workers"),
    [
        *((1, size, 0) for size in (1, 3, 5, 11, 24)),
        *((2, size, 0) for size in (1, 3, 7, 16)),
        *((3, size, 0) for size in (1, 2, 5, 16)),
        *((1, 3, 2), (2, 5, 1), (3, 1, 2)),
    ],
)
def test_validation_has_every_image_once_in_the_folders_order(coloured, world_size, batch_size, num_workers):
    batch = [f"global_batch_size={world_size * batch_size * 2}", f"micro_batch_size={batch_size}"]
    cfg = data_config(coloured, *batch, f"data.num_workers={num_workers}")
    reference = list(zip(*coloured_reference(coloured, "val"), strict=True))
    loaders = [loaders_of(cfg, rank=r, world_size=world_size, start_step=0)[1] for r in range(world_size)]
    for _ in range(2):  # persistent workers: the second evaluation is as the first
        ranks = [list(loader) for loader in loaders]
        assert {len(batches) for batches in ranks} == {len(loaders[0])} == {-(-11 // (world_size * batch_size))}
        assert {len(images) for batches in ranks for images, _ in batches} == {batch_size}
        images, labels = zip(*(batch for step in zip(*ranks, strict=True) for batch in step), strict=True)
        seen = list(zip(colours(torch.cat(images)), torch.cat(labels).tolist(), strict=True))
        assert seen[:11] == reference
        assert {label for _, label in seen[11:]} <= {PADDING}
    assert PADDING == -1


def test_a_killed_loader_process_is_our_error_wherever_the_loop_is(image_folder):
    train, _ = loaders_of(data_config(image_folder, "data.num_workers=1"))
    before = set(multiprocessing.active_children())  # other tests'
    batches = iter(train)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before

    def kill_and_do_something_else():
        os.kill(worker.pid, signal.SIGKILL)
        time.sleep(10)

    said = r"no batch came from the loader processes: DataLoader worker .* is killed by signal"
    with pytest.raises(schema.RankError, match=said):
        kill_and_do_something_else()


@pytest.mark.parametrize("seed", [0, 1])
def test_validation_does_not_depend_on_the_seed_or_the_start(image_folder, seed):
    val = [
        list(loaders_of(data_config(image_folder, f"seed={s}"), rank=0, world_size=1, start_step=k)[1])
        for s, k in ((0, 0), (seed, 5))
    ]
    for found, expected in zip(*val, strict=True):
        assert_same(found, expected)


def test_evaluation_in_between_does_not_change_the_training_stream(image_folder, straight):
    train, val = loaders_of(data_config(image_folder, "data.num_workers=1"), rank=0, world_size=1, start_step=0)
    batches = []
    for step, batch in enumerate(train):
        batches.append(batch)
        if step % 2:
            assert len(list(val)) == 1
    assert_same([torch.cat(part) for part in zip(*batches, strict=True)], straight)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ([], "train"),
        (["val/a/0.png"], "train"),
        (["train/a/0.png"], "val"),
        (["train/", "val/a/0.png"], "train"),
        (["train/a/0.png", "val/"], "val"),
        (["train/0.png", "val/a/0.png"], "train"),
        (["train/a/0.png", "val/0.png", "val/1.png"], "val"),
        (["train/a/", "val/a/0.png"], "train"),
        (["train/a/notes.txt", "val/a/0.png"], "train"),
        (["train/a/._0.png", "val/a/0.png"], "train"),
        (["train/.a/0.png", "val/a/0.png"], "train"),
        (["train/a/0.png", "val/a/"], "val"),
        (["train/a/0.png", "val/a/0.npy"], "val"),
        (["train/a/0.png", "val/a/0.png", "val/zebra/0.png"], "val/zebra"),
    ],
)
def test_folder_that_cannot_be_used_is_refused_by_name(tmp_path, files, named):
    path = make_files(tmp_path / "data", files) if files else str(tmp_path / "data")
    text = error_of(imagenet_dataset.run_sizes, data_config(path, "global_batch_size=1"), 1)
    assert f"{path}/{named}" in text
    assert text.startswith(f"data.path={path}")


def test_more_classes_than_the_model_has_are_refused(image_folder):
    text = error_of(imagenet_dataset.run_sizes, data_config(image_folder, "model.num_classes=5"), 1)
    assert "6 classes" in text
    assert "model.num_classes=5" in text
    assert "model.num_classes=6" in text  # the fix
    imagenet_dataset.run_sizes(data_config(image_folder, "model.num_classes=6"), 1)
    imagenet_dataset.run_sizes(data_config(image_folder, "model.num_classes=100"), 1)


def test_data_set_smaller_than_a_batch_is_refused_with_both_sizes(image_folder):
    text = error_of(imagenet_dataset.run_sizes, data_config(image_folder, "global_batch_size=61"), 1)
    assert "global_batch_size=61" in text
    assert "60" in text.replace(str(image_folder), "")
    assert str(image_folder) in text
    imagenet_dataset.run_sizes(data_config(image_folder, "global_batch_size=60"), 1)


def test_run_of_less_than_one_step_is_refused(image_folder):
    epochs = ["num_train_steps=null", "num_epochs=0.3"]
    assert "num_epochs=0.3" in error_of(imagenet_dataset.run_sizes, data_config(image_folder, *epochs), 1)
    imagenet_dataset.run_sizes(data_config(image_folder, *epochs, "global_batch_size=18"), 1)


# Images


@pytest.mark.parametrize(
    ("split", "damage", "num_workers"),
    [*itertools.product((0, 1), ("empty", "cut", "text"), (0,)), (0, "cut", 1)],
)
def test_unreadable_image_is_named(tmp_path, split, damage, num_workers):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for name, i in itertools.product(("train", "val"), range(3)):
        (tmp_path / name / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / name / f"a/{i}.jpg")
    bad = tmp_path / ("train", "val")[split] / "a/1.jpg"
    whole = bad.read_bytes()
    bad.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "text": b"<html>404</html>"}[damage])
    cfg = data_config(tmp_path, "global_batch_size=3", "num_train_steps=1", f"data.num_workers={num_workers}")
    with pytest.raises(schema.RankError) as caught:
        list(loaders_of(cfg, rank=0, world_size=1, start_step=0)[split])
    line = rf"cannot read {bad}: [^\n]+; mend it, or set data.on_error=skip"
    assert re.fullmatch(line, str(caught.value)), str(caught.value)  # from a loader process, too


def _one_colour(mode):
    """An image of a mode and the RGB that it shows; what is transparent keeps its colour."""
    size = (20, 18)
    if mode == "P with transparency":
        image = Image.new("P", size, 1)
        image.putpalette([0, 0, 0, 200, 100, 50])
        image.info["transparency"] = 0
        return image, (200, 100, 50)
    values = {
        "1": (1, (255, 255, 255)),
        "L": (90, (90, 90, 90)),
        "LA": ((90, 255), (90, 90, 90)),
        "RGB": ((200, 100, 50), (200, 100, 50)),
        "RGBA": ((200, 100, 50, 255), (200, 100, 50)),
        "CMYK": ((0, 255, 255, 0), (255, 0, 0)),
    }
    if mode == "P":
        return Image.new("RGB", size, (200, 100, 50)).convert("P", palette=Image.Palette.ADAPTIVE), (200, 100, 50)
    return Image.new(mode, size, values[mode][0]), values[mode][1]


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *((mode, "x.png") for mode in ("1", "L", "LA", "P", "P with transparency", "RGB", "RGBA")),
        *((mode, "x.jpg") for mode in ("L", "RGB", "CMYK")),
        ("L", "x.pgm"),
        ("P", "x.gif"),
        ("RGB", "x.tif"),
        ("RGB", "x.bmp"),
        ("RGBA", "png_bytes.JPEG"),
    ],
)
def test_every_kind_of_image_comes_out_with_the_models_channels(tmp_path, mode, name, in_chans):
    image, rgb = _one_colour(mode)
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        image.save(tmp_path / split / "a" / name, format="PNG" if "png" in name else None)
    cfg = data_config(tmp_path, f"model.in_chans={in_chans}", "global_batch_size=1")
    grey = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]
    expected = torch.tensor([grey] if in_chans == 1 else rgb)
    for loader in loaders_of(cfg, rank=0, world_size=1, start_step=0):
        images, _ = next(iter(loader))
        assert images.dtype == torch.uint8
        assert images.shape == (1, in_chans, 16, 16)
        assert (images[0].float() - expected.view(-1, 1, 1)).abs().max() <= 3


@pytest.mark.parametrize(
    ("size", "crop_pct", "interpolation"),
    [
        (224, 0.9, "bicubic"),
        (224, 0.875, "bilinear"),
        (384, 1.0, "bicubic"),
        (28, 1.0, "bilinear"),
        (16, 0.875, "bicubic"),
        (33, 0.95, "bicubic"),
        (97, 0.33, "bilinear"),
    ],
)
def test_validation_images_are_timms_pixel_for_pixel(image_folder, size, crop_pct, interpolation):
    model = [f"model.img_size={size}", f"model.patch_size={size}"]
    cfg = data_config(image_folder, *model, f"data.crop_pct={crop_pct}", f"data.interpolation={interpolation}")
    ours = eval_transform(cfg.data)
    timms = create_transform(
        (3, size, size), interpolation=interpolation, crop_pct=crop_pct, mean=(0, 0, 0), std=(1, 1, 1)
    )
    rng = np.random.default_rng(size)
    for height, width in ((37, 53), (53, 37), (301, 257), (375, 500), (225, 224), (size, size), (8, 91)):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        found = ours(image)
        assert found.shape == (3, size, size)
        assert torch.equal(found, (timms(image) * 255).round().to(torch.uint8))


@pytest.mark.parametrize(("height", "width", "crop_pct"), [(48, 32, 0.875), (32, 56, 0.9), (24, 40, 1.0)])
def test_rectangle_is_the_centre_of_the_image_scaled_to_its_proportions(image_folder, height, width, crop_pct):
    model = [f"model.img_size=[{height},{width}]", "model.patch_size=8"]
    transform = eval_transform(data_config(image_folder, *model, f"data.crop_pct={crop_pct}").data)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (101, 77, 3), dtype=np.uint8))
    scaled_height, scaled_width = int(height / crop_pct), int(width / crop_pct)
    scaled = np.asarray(image.resize((scaled_width, scaled_height), Image.Resampling.BICUBIC))
    top, left = round((scaled_height - height) / 2), round((scaled_width - width) / 2)
    expected = torch.tensor(scaled[top : top + height, left : left + width]).permute(2, 0, 1)
    assert torch.equal(transform(image), expected)


# Synthetic data


def synthetic(*overrides):
    sizes = ["data.num_synthetic_train=300", "data.num_synthetic_val=23"]
    return composed_data_config("data.path=null", "data.source=synthetic", *sizes, *overrides)


@pytest.mark.parametrize("model", [[], ["model.in_chans=1"], ["model.img_size=[24,16]"], ["model.num_classes=100"]])
def test_synthetic_images_are_noise_with_labels_in_range(model):
    cfg = synthetic(*model)
    imagenet_dataset.run_sizes(cfg, 1)
    height, width = schema.pair(cfg.model.img_size)
    for loader, labelled in zip(loaders_of(cfg, rank=0, world_size=1, start_step=0), (8 * 24, 23), strict=True):
        images, labels = (torch.cat(part) for part in zip(*loader, strict=True))
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (cfg.model.in_chans, height, width)
        values = images[labels != PADDING].flatten(1).float()
        assert len(values) == labelled
        assert (values.std(dim=1) > 50).all()  # of even noise: 74
        assert abs(values.mean() - 127.5) < 3
        kept = labels[labels != PADDING]
        assert 0 <= kept.min() <= kept.max() < cfg.model.num_classes
        assert len(kept.unique()) > 1


@pytest.mark.parametrize(("world_size", "num_workers", "start_step"), [(1, 0, 0), (2, 1, 0), (3, 0, 2)])
def test_synthetic_stream_is_deterministic(world_size, num_workers, start_step):
    straight = stream(synthetic())
    found = stream(synthetic(f"data.num_workers={num_workers}"), world_size=world_size, start_step=start_step)
    assert_same(found, [part[start_step * 24 :] for part in straight])
    assert not torch.equal(stream(synthetic("seed=1"))[0], straight[0])


def test_synthetic_data_smaller_than_a_batch_are_refused():
    text = error_of(imagenet_dataset.run_sizes, synthetic("global_batch_size=301"), 1)
    assert "300" in text
    assert "global_batch_size=301" in text
    assert "num_synthetic_train" in text
