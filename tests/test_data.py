"""The data: folders to batches, in an order and with pixels that follow from (seed, step); the evaluation; the rate.

What is expected comes from elsewhere: torchvision's ImageFolder, timm's transforms, Pillow, torch's schedulers.
"""

import launch

import collections
import contextlib
import dataclasses
import functools
import gzip
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT, TINY, loaders_of, rate_at
from PIL import Image
from timm.data import create_transform
from torch import nn
from torchvision.datasets import ImageFolder

import imagenet_dataset
import schema
import trainer
from imagenet_dataset import PADDING, eval_transform, run_sizes
from input_pipeline.image_folders import scan

STEPS = 8  # 192 images of 60, or 64 of 20: more than three epochs
ARCHIVE = ROOT / "data/fashion_mnist_demo.tar.gz"
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
# Nothing here follows from how the default run is tuned.
BASE = [
    f"num_train_steps={STEPS}",
    "data.path=unused",
    "data.num_workers=0",
    "data.crop_scale=[0.3,1]",
    "data.crop_ratio=[0.75,1.25]",
    "data.hflip=0.5",
    "data.interpolation=bicubic",
    "data.crop_pct=0.875",
    "data.mean=[0.4]",
    "data.std=[0.3]",
    "lr_scheduler.name=cosine",
    "lr_scheduler.min_lr=0",
]
PLAIN = ["data.crop_scale=[1,1]", "data.crop_ratio=[1,1]", "data.hflip=0"]  # of a square image, all of it


@functools.cache
def _composed(*overrides):
    return launch.load_config("L0_sanity", [*TINY, *BASE, *overrides], script="train_ddp")


def config(path, *overrides):
    """L0_sanity on the images at `path`, 16 x 16 pixels, 24 a step unless overridden."""
    cfg = _composed(*overrides)
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, path=str(path)))


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


def rng_state():
    """Of the global generators of this process: torch's, NumPy's, Python's."""
    _, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), (keys.tobytes(), *rest), random.getstate()


@contextlib.contextmanager
def rng_untouched():
    before = rng_state()
    yield
    for name, now, then in zip(("torch", "numpy", "random"), rng_state(), before, strict=True):
        assert now == then, f"the global state of {name} has changed"


def make(root, files, *, size=(4, 4)):
    """Files under `root`: a PNG where the name ends like an image's, text elsewhere, a folder where it ends in /."""
    for name in files:
        path = Path(root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        elif path.suffix.lower() in Image.registered_extensions():
            Image.new("RGB", size, (200, 100, 50)).save(path, format="PNG")
        else:
            path.write_text("no image")
    return str(root)


def error_of(function, *args):
    """The text of the ConfigError that the call raises: one line."""
    with pytest.raises(schema.ConfigError) as caught:
        function(*args)
    assert len(str(caught.value).splitlines()) == 1, str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def coloured(tmp_path_factory):
    """20 training and 11 validation images, each of one colour of its own, in classes 1, 2 and 10."""
    root = tmp_path_factory.mktemp("coloured")
    for split, count in (("train", 20), ("val", 11)):
        order = np.random.default_rng(1).permutation(count)
        for i, colour in enumerate(order):
            folder = root / split / ("1", "2", "10")[i % 3]
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (17 + i, 40 - i), (int(colour) * 10, 7, 9)).save(folder / f"{i}.png")
    return root


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
    return stream(config(image_folder))


# The training stream: order


@pytest.mark.parametrize("batch_size", [8, 7, 20, 1])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_epoch_has_every_image_once_in_an_order_of_its_own(coloured, batch_size, num_workers):
    steps = -(-60 // batch_size)
    cfg = config(
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
    cfg = config(coloured, "global_batch_size=20", "num_train_steps=1000")
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
    assert_same(stream(config(image_folder, *overrides), world_size=world_size), straight)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("start_step", [1, 3, 5, STEPS - 1])
def test_resumed_stream_is_the_tail_of_the_straight_one(image_folder, straight, start_step, num_workers):
    tail = [part[start_step * 24 :] for part in straight]
    cfg = config(image_folder, f"data.num_workers={num_workers}")
    assert_same(stream(cfg, start_step=start_step), tail)
    assert_same(stream(cfg, start_step=start_step, world_size=2), tail)


def test_nothing_is_left_to_read_after_the_last_step(image_folder):
    loader, _ = loaders_of(config(image_folder), rank=0, world_size=1, start_step=STEPS)
    assert len(loader) == len(list(loader)) == 0


@pytest.mark.parametrize("num_workers", [0, 2])  # 2: persistent ones, which have fetched batches ahead of the stop
@pytest.mark.parametrize("stops", [(1, 2), (3, 4), (1, 3, 4, 7)])  # an epoch is two and a half steps
def test_stream_may_be_stopped_and_resumed_twice_in_one_epoch(image_folder, straight, stops, num_workers):
    cfg = config(image_folder, f"data.num_workers={num_workers}")
    edges = [0, *stops, STEPS]
    parts = [stream(cfg, start_step=start, num_steps=end - start) for start, end in itertools.pairwise(edges)]
    assert_same([torch.cat(part) for part in zip(*parts, strict=True)], straight)


@pytest.mark.parametrize("world_size", [1, 2])
def test_number_of_batches_is_announced(image_folder, world_size):
    cfg = config(image_folder, "micro_batch_size=4")
    loader, _ = loaders_of(cfg, rank=0, world_size=world_size, start_step=2)
    assert len(loader) == len(list(loader)) == (STEPS - 2) * 24 // 4 // world_size


# The training stream: pixels


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_two_augmentations_are_alike(repeated, world_size, num_workers):
    cfg = config(repeated, "global_batch_size=6", "num_train_steps=6", f"data.num_workers={num_workers}")
    images, _ = stream(cfg, world_size=world_size)  # three epochs of one image
    assert len(images) == 36
    assert len(images.unique(dim=0)) == 36


def test_one_seed_gives_one_stream_and_another_seed_another(repeated, image_folder, straight):
    assert_same(stream(config(image_folder, "data.num_workers=2")), straight)
    other = stream(config(image_folder, "seed=1"))
    assert not torch.equal(other[1], straight[1])
    assert not (other[0] == straight[0]).flatten(1).all(dim=1).any()
    # Of one image only the augmentation can differ.
    overrides = ["global_batch_size=6", "num_train_steps=6"]
    seeds = [stream(config(repeated, *overrides, f"seed={seed}"))[0] for seed in (0, 1, 2)]
    assert len(torch.cat(seeds).unique(dim=0)) == 3 * 36


def test_stream_does_not_depend_on_the_global_generators(image_folder, straight):
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    assert_same(stream(config(image_folder)), straight)
    assert_same(stream(config(image_folder, "data.num_workers=1")), straight)


@pytest.mark.parametrize("hflip", [0, 1])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_without_augmentation_a_image_is_resized_and_flipped_as_pillow_does(repeated, hflip, interpolation):
    cfg = config(repeated, *PLAIN[:2], f"data.hflip={hflip}", f"data.interpolation={interpolation}")
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
        images, _ = stream(config(tmp_path, *sizes, *overrides))
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
    loader = loaders_of(config(image_folder), rank=0, world_size=1, start_step=0)[split]
    keys = list(loader.batch_sampler)
    with rng_untouched():
        for key in keys[0]:
            loader.dataset[key]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("split", [0, 1], ids=["train", "val"])
def test_loading_leaves_the_global_generators_alone(image_folder, split, num_workers):
    cfg = config(image_folder, f"data.num_workers={num_workers}")
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
    cfg = config(coloured, *batch, f"data.num_workers={num_workers}")
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


@pytest.mark.parametrize("seed", [0, 1])
def test_validation_does_not_depend_on_the_seed_or_the_start(image_folder, seed):
    val = [
        list(loaders_of(config(image_folder, f"seed={s}"), rank=0, world_size=1, start_step=k)[1])
        for s, k in ((0, 0), (seed, 5))
    ]
    for found, expected in zip(*val, strict=True):
        assert_same(found, expected)


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_model(num_classes):
    """Linear, with a dropout that only evaluation switches off."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 16 * 16, num_classes))
    return model.train()


def plain_scores(model, cfg):
    """One image at a time, from ImageFolder through timm's transform."""
    data = cfg.data
    transform = create_transform(
        (3, 16, 16), interpolation=data.interpolation, crop_pct=data.crop_pct, mean=data.mean * 3, std=data.std * 3
    )
    class_to_idx = ImageFolder(f"{data.path}/train").class_to_idx
    folder = ImageFolder(f"{data.path}/val", transform=transform, allow_empty=True)
    rows = []
    model = model.eval()
    for image, own_label in folder:
        label = class_to_idx[folder.classes[own_label]]
        logits = model(image[None]).detach()
        ranking = logits[0].argsort(descending=True).tolist()
        loss = F.cross_entropy(logits, torch.tensor([label])).item()
        rows.append((loss, ranking[0] == label, label in ranking[:5]))
    model.train()
    loss, top1, top5 = np.mean(rows, axis=0)
    return {"val/loss": loss, "val/top1": top1, "val/top5": top5, "val/images": len(rows)}


def evaluate(model, cfg, *, rank=0, world_size=1):
    _, loader = loaders_of(cfg, rank=rank, world_size=world_size, start_step=0)
    device = torch.device("cpu")
    return trainer.evaluate(model, loader, trainer.Normalize(cfg, device), device=device)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 1), (1, 7), (1, 23), (1, 64), (2, 5), (3, 3)])
@pytest.mark.parametrize(("folder", "num_classes"), [("image_folder", 6), ("image_folder", 9), ("coloured", 3)])
def test_scores_are_those_of_a_plain_loop_over_all_images(request, folder, num_classes, world_size, batch_size):
    path = request.getfixturevalue(folder)
    batch = [f"global_batch_size={world_size * batch_size}", f"model.num_classes={num_classes}"]
    cfg = config(path, *batch)
    model = small_model(num_classes)
    expected = plain_scores(model, cfg)
    assert 0 < expected["val/top1"] < 1
    assert expected["val/top5"] == 1 if num_classes <= 5 else expected["val/top1"] < expected["val/top5"] < 1

    # Each rank's share by itself, in this one process: its means times its count are its sums.
    shares = [evaluate(model, cfg, rank=rank, world_size=world_size) for rank in range(world_size)]
    counts = [share["val/images"] for share in shares]
    assert sum(counts) == expected["val/images"]
    for key in ("val/loss", "val/top1", "val/top5"):
        mean = sum(share[key] * count for share, count in zip(shares, counts, strict=True)) / sum(counts)
        assert mean == pytest.approx(expected[key], abs=1e-6)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("num_classes", [1, 2])
def test_fewer_classes_than_five_can_be_scored(tmp_path, num_classes):
    files = [f"{split}/{name}/{i}.png" for split in ("train", "val") for name in "ab"[:num_classes] for i in range(3)]
    cfg = config(make(tmp_path, files), f"model.num_classes={num_classes}", "global_batch_size=4")
    model = small_model(num_classes)
    found, expected = evaluate(model, cfg), plain_scores(model, cfg)
    assert found == pytest.approx(expected, abs=1e-6)
    assert found["val/top5"] == 1


@pytest.mark.usefixtures("process_group")
def test_evaluation_leaves_mode_weights_and_gradients_alone(image_folder):
    model = small_model(6)
    model.append(nn.BatchNorm1d(6))  # whose statistics move in training mode
    model(torch.rand(4, 3, 16, 16)).sum().backward()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    evaluate(model, config(image_folder))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert torch.is_grad_enabled()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_evaluation_leaves_the_global_generators_alone(image_folder, num_workers):
    with rng_untouched():
        evaluate(small_model(6), config(image_folder, f"data.num_workers={num_workers}"))


def test_evaluation_in_between_does_not_change_the_training_stream(image_folder, straight):
    train, val = loaders_of(config(image_folder, "data.num_workers=1"), rank=0, world_size=1, start_step=0)
    batches = []
    for step, batch in enumerate(train):
        batches.append(batch)
        if step % 2:
            assert len(list(val)) == 1
    assert_same([torch.cat(part) for part in zip(*batches, strict=True)], straight)


# Folders

CLEAN = ["10/b.jpg", "10/a.png", "2/X.JPEG", "2/c.webp", "2/B.jpg", "1/z.PNG", "1/1.jpg", "1/10.jpg", "1/2.jpg"]
STRAY = {
    "hidden": ["1/._1.jpg", "1/.DS_Store", "10/._b.JPEG", "2/.hidden.png"],
    "*.txt": ["1/notes.txt", "2/NOTES.TXT"],
    "*.npy": ["10/x.npy"],
    "*.jpg_old": ["10/b.jpg_old"],
    "no extension": ["2/README"],
    "dangling link or folder": ["1/folder.jpg/"],
}
STRAY_BESIDE = [".ipynb_checkpoints/1.png", ".git/x.jpg", "labels.txt", "stray.jpg", "._1"]


def relative(samples, root):
    return [(os.path.relpath(file, root), label) for file, label in samples]


@pytest.mark.parametrize("split", ["train", "val"])
def test_classes_and_files_are_image_folders(tmp_path, split):
    path = make(tmp_path, [f"{s}/{file}" for s in ("train", "val") for file in CLEAN])
    found, expected = scan(path, split), ImageFolder(f"{path}/{split}")
    assert found.classes == tuple(expected.classes) == ("1", "10", "2")  # sorted as text
    assert found.samples == expected.samples
    assert found.skipped == {}


@pytest.mark.parametrize("letters", ["ab", "bA", "éez", "Zz_", "a-b"])
def test_class_order_is_image_folders_for_any_names(tmp_path, letters):
    names = [*letters, letters, letters + "1"]
    path = make(tmp_path, [f"{s}/{name}/0.png" for s in ("train", "val") for name in names])
    assert list(scan(path, "val").classes) == ImageFolder(f"{path}/train").classes


@pytest.mark.parametrize("split", ["train", "val"])
def test_stray_entries_are_left_out_and_counted(tmp_path, split):
    clean = ImageFolder(make(tmp_path / "clean", CLEAN))
    stray = [file for files in STRAY.values() for file in files]
    files = [f"{s}/{file}" for s in ("train", "val") for file in [*CLEAN, *stray, *STRAY_BESIDE]]
    path = make(tmp_path / "messy", files)
    for s in ("train", "val"):
        (Path(path) / s / "1/dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
        (Path(path) / s / "dangling").symlink_to(tmp_path / "nowhere")

    found = scan(path, split)
    assert found.classes == ("1", "10", "2")
    assert relative(found.samples, f"{path}/{split}") == relative(clean.samples, tmp_path / "clean")
    expected = {why: len(files) for why, files in STRAY.items()}
    expected["dangling link or folder"] += 1
    assert found.skipped == expected


def test_links_to_images_and_to_class_folders_are_followed(tmp_path):
    path = make(tmp_path / "data", ["train/a/0.png", "val/a/0.png"])
    make(tmp_path / "elsewhere", ["1.png", "2.png"])
    (tmp_path / "data/train/a/link.png").symlink_to(tmp_path / "elsewhere/1.png")
    (tmp_path / "data/train/b").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert scan(path, "train").samples == ImageFolder(f"{path}/train").samples
    assert len(scan(path, "train").samples) == 4


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_class_without_validation_images_does_not_shift_labels(tmp_path, how):
    train = [f"train/{name}/{i}.png" for name in "abcd" for i in range(2)]
    val = ["val/a/0.png", "val/c/0.png", "val/c/1.png", "val/d/0.png", *(["val/b/"] if how == "empty" else [])]
    path = make(tmp_path, train + val)
    class_to_idx = ImageFolder(f"{path}/train").class_to_idx
    found = scan(path, "val")
    assert found.classes == tuple("abcd")
    expected = [(file.removeprefix("val/"), class_to_idx[file[4]]) for file in val if file.endswith(".png")]
    assert relative(found.samples, f"{path}/val") == expected
    cfg = config(path, "global_batch_size=8")
    imagenet_dataset.run_sizes(cfg, 1)
    labels = torch.cat([batch[1] for batch in loaders_of(cfg, rank=0, world_size=1, start_step=0)[1]])
    assert labels[labels != PADDING].tolist() == [0, 2, 2, 3]


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
    path = make(tmp_path / "data", files) if files else str(tmp_path / "data")
    text = error_of(imagenet_dataset.run_sizes, config(path, "global_batch_size=1"), 1)
    assert f"{path}/{named}" in text
    assert text.startswith(f"data.path={path}")


@pytest.mark.parametrize("path", ["", "/"])
def test_path_without_a_name_is_refused_like_any_other(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    assert "train" in error_of(scan, path, "train")


def test_data_in_the_working_folder_can_be_used(tmp_path, monkeypatch):
    make(tmp_path, ["train/a/0.png", "val/a/0.png"])
    monkeypatch.chdir(tmp_path)
    assert [Path(file).name for file, _ in scan(".", "train").samples] == ["0.png"]


def test_more_classes_than_the_model_has_are_refused(image_folder):
    text = error_of(imagenet_dataset.run_sizes, config(image_folder, "model.num_classes=5"), 1)
    assert "6 classes" in text
    assert "model.num_classes=5" in text
    assert "model.num_classes=6" in text  # the fix
    imagenet_dataset.run_sizes(config(image_folder, "model.num_classes=6"), 1)
    imagenet_dataset.run_sizes(config(image_folder, "model.num_classes=100"), 1)


def test_data_set_smaller_than_a_batch_is_refused_with_both_sizes(image_folder):
    text = error_of(imagenet_dataset.run_sizes, config(image_folder, "global_batch_size=61"), 1)
    assert "global_batch_size=61" in text
    assert "60" in text.replace(str(image_folder), "")
    assert str(image_folder) in text
    imagenet_dataset.run_sizes(config(image_folder, "global_batch_size=60"), 1)


def test_run_of_less_than_one_step_is_refused(image_folder):
    epochs = ["num_train_steps=null", "num_epochs=0.3"]
    assert "num_epochs=0.3" in error_of(imagenet_dataset.run_sizes, config(image_folder, *epochs), 1)
    imagenet_dataset.run_sizes(config(image_folder, *epochs, "global_batch_size=18"), 1)


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
    cfg = config(tmp_path, "global_batch_size=3", "num_train_steps=1", f"data.num_workers={num_workers}")
    with pytest.raises(OSError, match=str(bad)):
        list(loaders_of(cfg, rank=0, world_size=1, start_step=0)[split])


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
    cfg = config(tmp_path, f"model.in_chans={in_chans}", "global_batch_size=1")
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
    """V01."""
    model = [f"model.img_size={size}", f"model.patch_size={size}"]
    cfg = config(image_folder, *model, f"data.crop_pct={crop_pct}", f"data.interpolation={interpolation}")
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
    transform = eval_transform(config(image_folder, *model, f"data.crop_pct={crop_pct}").data)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (101, 77, 3), dtype=np.uint8))
    scaled_height, scaled_width = int(height / crop_pct), int(width / crop_pct)
    scaled = np.asarray(image.resize((scaled_width, scaled_height), Image.Resampling.BICUBIC))
    top, left = round((scaled_height - height) / 2), round((scaled_width - width) / 2)
    expected = torch.tensor(scaled[top : top + height, left : left + width]).permute(2, 0, 1)
    assert torch.equal(transform(image), expected)


# Synthetic data


def synthetic(*overrides):
    sizes = ["data.num_synthetic_train=300", "data.num_synthetic_val=23"]
    return _composed("data.path=null", "data.source=synthetic", *sizes, *overrides)


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


# The bundled data


def _scan_at_once(barrier, path, answer):
    """In a process of its own: wait for the others, then ask for the data."""
    barrier.wait(timeout=300)
    counts = {
        split: dict(collections.Counter(Path(file).parent.name for file, _ in scan(path, split).samples))
        for split in ("train", "val")
    }
    Path(answer).write_text(json.dumps(counts))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The data set after four processes asked for it at once; what each saw; every name that was ever beside it."""
    folder, answers = tmp_path_factory.mktemp("bundled"), tmp_path_factory.mktemp("answers")
    shutil.copy(ARCHIVE, folder)
    context = multiprocessing.get_context("forkserver")  # not spawn: torch is imported once, not four times
    context.set_forkserver_preload(["torchvision.transforms.v2", "timm", "torch.distributed.checkpoint"])
    barrier = context.Barrier(4)
    arguments = [(barrier, str(folder / "fashion_mnist_demo"), str(answers / f"{i}.json")) for i in range(4)]
    processes = [context.Process(target=_scan_at_once, args=each) for each in arguments]
    names = set()
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        names |= set(os.listdir(folder))
        time.sleep(0.005)
    assert [process.exitcode for process in processes] == [0] * 4
    return folder, [json.loads(Path(answer).read_text()) for _, _, answer in arguments], names


def test_bundled_data_have_ten_even_classes_for_each_process(unpacked):
    _, answers, _ = unpacked
    with tarfile.open(ARCHIVE) as tar:
        names = sorted({Path(name).parent.name for name in tar.getnames() if name.endswith(".jpg")})
    assert len(names) == 10
    expected = {"train": dict.fromkeys(names, 400), "val": dict.fromkeys(names, 50)}
    assert answers == [expected] * 4


def test_bundled_data_are_unpacked_whole(unpacked):
    folder, _, _ = unpacked
    with tarfile.open(ARCHIVE) as tar:
        expected = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
    found = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*/**/*")
        if file.is_file() and ".index" not in file.parts
    }
    assert found == expected
    assert len(expected) > 4500


def test_bundled_data_are_unpacked_once_and_leave_nothing_beside_them(unpacked):
    folder, _, names = unpacked
    kept = {"fashion_mnist_demo", "fashion_mnist_demo.lock", ARCHIVE.name}
    assert set(os.listdir(folder)) == kept
    assert len(names - kept) <= 1, names  # the one temporary folder of the one that unpacked


@pytest.fixture(scope="module")
def small_archive(tmp_path_factory):
    """Bytes of an archive as the bundled one, of twenty images."""
    folder = tmp_path_factory.mktemp("archive")
    rng = np.random.default_rng(0)
    for split, i in itertools.product(("train", "val"), range(10)):
        (folder / f"small/{split}/a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"small/{split}/a/{i}.png")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add(folder / "small", "small", filter=lambda member: member.replace(mtime=0, deep=False))
    return gzip.compress(content.getvalue(), mtime=0)


def test_archive_beside_the_folder_is_unpacked(tmp_path, small_archive):
    (tmp_path / "small.tar.gz").write_bytes(small_archive)
    path = str(tmp_path / "small")
    assert [len(scan(path, split).samples) for split in ("train", "val")] == [10, 10]
    assert scan(path, "train").samples == ImageFolder(f"{path}/train").samples


@pytest.mark.parametrize(
    "damage", ["no archive", "empty", "cut", "cut at the end", "zeros within", "one bit", "checksum", "another name"]
)
def test_broken_archive_is_refused_by_name_and_leaves_nothing(tmp_path, small_archive, damage):
    whole = small_archive
    middle = len(whole) // 2
    content = {
        "no archive": b"<html>not found</html>" * 100,
        "empty": b"",
        "cut": whole[:middle],
        "cut at the end": whole[:-20],
        "zeros within": whole[:middle] + bytes(64) + whole[middle + 64 :],
        "one bit": whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :],
        "checksum": whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:],
        "another name": whole,
    }[damage]
    name = "other" if damage == "another name" else "small"
    archive = tmp_path / f"{name}.tar.gz"
    archive.write_bytes(content)
    text = error_of(scan, str(tmp_path / name), "train")
    assert str(archive) in text
    assert set(os.listdir(tmp_path)) <= {archive.name, f"{name}.lock"}


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
    cfg = config(image_folder, f"num_train_steps={steps}", f"lr_scheduler.min_lr={min_lr}", *schedule)
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
    cfg = config(image_folder, "num_train_steps=20", *schedule)
    rates = [rate_at(step, cfg) for step in range(1, 21)]
    assert rates == pytest.approx(torch_rates(cfg, 20, 20), rel=1e-9)
    assert rates == pytest.approx([1e-3 * min(1, step / max(warmup, 1)) for step in range(1, 21)], rel=1e-12)


def test_rate_stays_at_its_minimum_past_the_end_of_the_schedule(image_folder):
    schedule = ["lr_scheduler.num_training_steps=20", "lr_scheduler.min_lr=1e-5"]
    cfg = config(image_folder, "num_train_steps=30", *schedule)
    assert [rate_at(step, cfg) for step in range(20, 31)] == [1e-5] * 11
    assert rate_at(19, cfg) > 1e-5


def test_run_cut_short_keeps_the_whole_runs_schedule(image_folder):
    whole = config(image_folder, "num_train_steps=100")
    part = config(image_folder, "num_train_steps=30", "lr_scheduler.num_training_steps=100")
    assert [rate_at(step, part) for step in range(1, 31)] == [rate_at(step, whole) for step in range(1, 31)]


def test_length_of_the_schedule_follows_from_the_epochs(image_folder):
    cfg = config(image_folder, "num_train_steps=null", "num_epochs=4", "lr_scheduler.min_lr=1e-6")
    assert run_sizes(cfg, 1).num_train_steps == 10  # 4 x 60 / 24
    as_steps = dataclasses.replace(cfg, num_train_steps=10, num_epochs=None)
    assert [rate_at(step, cfg) for step in range(1, 11)] == [rate_at(step, as_steps) for step in range(1, 11)]
    assert rate_at(10, cfg) == 1e-6
