"""input_pipeline/aspect.py and the rows of imagenet_dataset.py: images in their own aspect ratio, what they fill."""

import launch

import itertools
import math
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import loaders_of, tiny_config
from PIL import Image

from imagenet_dataset import PADDING, PackedRows
from input_pipeline import aspect
from packing import Packed
from schema import pair

# Width and height of 64 images of ImageNet, the smallest, the largest and the longest of a thousand among them.
IMAGENET = """
500x375 335x500 580x435 128x160 500x188 368x500 75x56 400x300 500x334 200x200 2400x1600 500x297 500x330 500x375
480x360 500x375 375x500 500x334 500x332 86x108 375x500 333x500 413x580 700x467 350x156 500x333 500x333 320x221
95x95 375x500 750x499 500x375 392x294 500x314 500x331 500x375 500x371 613x511 360x360 400x241 500x354 334x500
500x353 500x375 333x500 1200x477 500x333 183x280 1836x1377 68x121 500x421 240x161 334x500 375x500 500x375
411x120 500x333 800x286 750x485 400x300 375x500 578x534 500x418 332x500
"""
IMAGENET = [tuple(map(int, size.split("x"))) for size in IMAGENET.split()]


def log_normal(number):
    """Sizes whose aspect ratio is log-normal about 5 : 4, as photographs' are, a third of them upright."""
    rng = np.random.default_rng(0)
    ratios = np.exp(rng.normal(0.22, 0.3, number)) ** rng.choice([1, 1, -1], number)
    return [(500, max(8, round(500 / ratio))) for ratio in ratios]


class Sizes:
    """In the place of an `ImageDataset`: images of these sizes, cropped at random in training."""

    def __init__(self, sizes, cfg, *, is_train):
        self.sizes, self.cfg, self.patch, self.is_train = sizes, cfg.data, pair(cfg.model.patch_size), is_train
        self.images = SimpleNamespace(expect=lambda _: None)

    def expect(self, keys):
        pass

    def item(self, key, patches):
        number, index = key
        random.seed(number)
        width, height = self.sizes[index]
        if self.is_train:
            image = aspect.random_crop(torch.zeros(3, height, width, dtype=torch.uint8), self.cfg, self.patch, patches)
        else:
            image = aspect.whole(Image.new("RGB", (width, height)), "bilinear", self.patch, patches)
        return image, index, []


def padding_of(sizes, *overrides, is_train=True):
    """The share of the tokens of all rows that no image has, and each image's patches."""
    cfg = launch.load_config(
        "vit_base_patch16_224",
        [
            "data.path=unused",
            "output_dir=unused",
            "data.packing.enabled=true",
            "data.interpolation=bilinear",
            "cuda_graphs=false",
            "micro_batch_size=8",
            "global_batch_size=8",
            *overrides,
        ],
    )
    rows = PackedRows(Sizes(sizes, cfg, is_train=is_train), cfg, is_train=is_train)
    batch = cfg.micro_batch_size
    batches = [
        rows.__getitems__([(i, i) for i in range(start, start + batch)])
        for start in range(0, len(sizes) // batch * batch, batch)
    ]
    patches = [math.prod(grid) for rows in batches for _, grids, *_ in rows for grid in grids]
    used = sum(patches) + len(patches) * rows.prefix
    assert all(len({len(row) for row, *_ in rows}) == 1 for rows in batches)  # of a batch they have one length
    tokens = [len(row) for rows in batches for row, *_ in rows]
    assert max(tokens) <= rows.tokens_per_row
    return 1 - used / sum(tokens), patches


@pytest.mark.parametrize("sizes", [IMAGENET, log_normal(64)], ids=["imagenet", "log-normal"])
@pytest.mark.parametrize("patches", [16, 64, 196, 256])
@pytest.mark.parametrize(("images_per_row", "batch"), [(4, 64), (8, 24), (16, 64)])
def test_padding_is_at_most_three_percent(sizes, patches, images_per_row, batch):
    shapes = [f"data.packing.patches_per_image={patches}", f"data.packing.images_per_row={images_per_row}"]
    shapes += [f"micro_batch_size={batch}", f"global_batch_size={batch}"]
    if patches >= 64 and images_per_row >= 8:
        padding, found = padding_of(sizes, *shapes)
        print(f"padding {padding:.2%}, patches {min(found)} to {max(found)}")
        assert 0 <= padding < 0.01
        assert max(found) + 1 <= (patches + 1) * 3 // 2
    padding, found = padding_of(sizes, *shapes, is_train=False)
    print(f"padding {padding:.2%} in evaluation")
    assert 0 <= padding < (0.015 if patches >= 64 else 0.03)
    assert max(found) <= patches


def test_a_strip_is_a_row_of_patches():
    padding, found = padding_of([(4000, 10), (10, 4000)] * 4)
    assert min(found) > 100
    assert padding < 0.03


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (75, 56), (800, 100), (31, 31), (3, 2)])
def test_aspect_ratio_stays_to_within_a_patch(width, height):
    rows, columns = (side // 16 for side in aspect.size_of((height, width), (16, 16), 196))
    assert rows * columns <= 196
    assert (rows - 1) / columns < height / width < rows / (columns - 1 or 0.5)


def test_crop_ratio_is_over_the_images_own():
    cfg = tiny_config("data.crop_scale=[0.2,0.9]", "data.crop_ratio=[0.9,1.1]").data
    image = torch.zeros(3, 300, 600, dtype=torch.uint8)
    for seed in range(20):
        random.seed(seed)
        _, height, width = aspect.random_crop(image, cfg, (2, 2), 2000).shape
        assert 1.7 < width / height < 2.3


def test_patches_are_what_the_models_embedding_takes():
    image = torch.arange(3 * 4 * 6, dtype=torch.uint8).view(3, 4, 6)
    patches = aspect.patches_of(image, (2, 3))
    assert torch.equal(patches[1], image[:, :2, 3:].flatten())
    assert torch.equal(patches[2], image[:, 2:, :3].flatten())


# Rows of real files


def packed_config(image_folder, *overrides):
    few = ["data.packing.images_per_row=3", "data.packing.enabled=true", "model.img_size=32", "model.class_token=true"]
    return tiny_config(f"data.path={image_folder}", "data.num_workers=0", *few, *overrides)


def images_in(batch, prefix, patch):
    """The images of a batch, (C, Y, X) each, put together from their patches."""
    found, per_row = [], len(batch) // len(batch.patches)
    for number, (rows, columns) in enumerate(batch.grids.tolist()):
        if number % per_row == 0:
            row, end = batch.patches[number // per_row], 0
        start, end = end + prefix, end + prefix + rows * columns
        assert not row[start - prefix : start].any()
        grid = row[start:end].view(rows, columns, 3, patch, patch)
        found.append(grid.permute(2, 0, 3, 1, 4).reshape(3, rows * patch, columns * patch))
        if number % per_row == per_row - 1:
            assert not row[end:].any()
    return found


def training(cfg, world_size=1, start_step=0):
    """Images and labels of all steps, every rank's in the order of positions."""
    loaders = [loaders_of(cfg, rank=r, world_size=world_size, start_step=start_step)[0] for r in range(world_size)]
    per_rank = cfg.global_batch_size // world_size
    microbatches = per_rank // (cfg.micro_batch_size or per_rank)
    batches = [iter(loader) for loader in loaders]
    for _ in range(start_step, cfg.num_train_steps):
        found = [[next(batch) for _ in range(microbatches)] for batch in batches]
        parts = [part for rank in found for part in rank]
        patches, grids = (torch.cat([getattr(images, name) for images, _ in parts]) for name in ("patches", "grids"))
        yield Packed(patches, grids, parts[0][0].longest), torch.cat([labels for _, labels in parts])


def same(one, other):
    return all(
        torch.equal(a.patches, b.patches) and torch.equal(a.grids, b.grids) and torch.equal(c, d)
        for (a, c), (b, d) in zip(one, other, strict=True)
    )


def test_rows_do_not_depend_on_ranks_microbatches_workers_and_resumes(image_folder):
    want = list(training(packed_config(image_folder)))
    assert len(want) == 6
    assert len({tuple(grid) for images, _ in want for grid in images.grids.tolist()}) > 3
    assert same(training(packed_config(image_folder, "micro_batch_size=6")), want)
    assert same(training(packed_config(image_folder), world_size=2), want)
    assert same(training(packed_config(image_folder), start_step=4), want[4:])
    assert same(training(packed_config(image_folder, "data.num_workers=2")), want)
    assert not same(training(packed_config(image_folder, "seed=1")), want)


def test_labels_and_images_are_those_without_packing(image_folder):
    still = ["data.crop_scale=[1,1]", "data.crop_ratio=[1,1]", "data.hflip=0"]
    packed = list(training(packed_config(image_folder, *still)))
    plain = [labels for _, labels in loaders_of(packed_config(image_folder, *still, "data.packing.enabled=false"))[0]]
    for (images, labels), want in zip(packed, plain, strict=True):
        assert torch.equal(labels, want)
        assert len(images) == 24
        for image in images_in(images, 1, 8):
            rows, columns = (side // 8 for side in image.shape[1:])
            assert 10 <= rows * columns <= (16 + 1) * 3 // 2


@pytest.fixture(scope="module")
def folder_like_imagenet(image_folder, tmp_path_factory):
    """Training images of `image_folder`; for validation those of ImageNet's sizes, each of one colour of its own."""
    root = tmp_path_factory.mktemp("aspect")
    (root / "train").symlink_to(image_folder / "train")
    for number, size in enumerate(IMAGENET):
        folder = root / "val" / f"class_{'abcdef'[number % 6]}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (4 * number, 7, 9)).save(folder / f"{number}.png", compress_level=1)
    return root


def test_evaluation_has_each_image_once_whole_and_alone(folder_like_imagenet):
    """Its pixels depend on no other image: in other batches they share rows with others, in an order of their own."""
    found = []
    for batch_size, world_size, workers in ((48, 1, 0), (8, 1, 0), (24, 2, 1)):
        shapes = ["data.packing.images_per_row=8", "model.img_size=64", f"micro_batch_size={batch_size}"]
        cfg = packed_config(folder_like_imagenet, *shapes, "global_batch_size=48", f"data.num_workers={workers}")
        loaders = [loaders_of(cfg, rank=rank, world_size=world_size)[1] for rank in range(world_size)]
        per_rank = [list(loader) for loader in loaders]
        assert len({len(batches) for batches in per_rank}) == 1
        images, labels = [], []
        for batch, of_batch in itertools.chain(*per_rank):
            images += images_in(batch, 1, 8)
            labels += of_batch.tolist()
            assert 0 <= batch.padding_fraction(1) < 0.03 or PADDING in of_batch  # what fills up a batch is small
        pairs = zip(images, labels, strict=True)
        found.append(
            sorted((label, image.shape, image.numpy().tobytes()) for image, label in pairs if label != PADDING)
        )
    assert len(set(found[0])) == len(found[0]) == len(IMAGENET)
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_noise_has_rows_too():
    cfg = tiny_config(
        "data=synthetic", "data.num_synthetic_train=48", "data.num_synthetic_val=26", "data.num_workers=0"
    )
    assert cfg.data.packing.enabled is False
    cfg = tiny_config(
        *("data=synthetic", "data.num_synthetic_train=48", "data.num_synthetic_val=26", "data.num_workers=0"),
        *("data.packing.enabled=true", "model.img_size=64"),
    )
    train, val = loaders_of(cfg)
    batch, labels = next(iter(train))
    assert batch.patches.shape == (3, 8 * 64, 3 * 64)
    assert len(batch) == len(labels) == 24
    assert 0 <= batch.padding_fraction(0) < 0.03
    assert sum((labels != PADDING).sum() for _, labels in val) == 26


def test_unreadable_images_are_left_out(image_folder, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(image_folder, folder)
    broken = sorted((folder / "val").rglob("*.jpg"))[5]
    broken.write_bytes(b"no image")
    cfg = packed_config(folder, "data.on_error=skip")
    labels = torch.cat([labels for _, labels in loaders_of(cfg)[1]])
    assert (labels != PADDING).sum() == 22
