"""Images kept in the device's memory, against the loader's own path: the same draws, pixels alike up to rounding."""

import launch

import functools
import multiprocessing
import shutil

import pytest
import torch
from conftest import TINY, column, loaders_of
from PIL import Image
from timm.data.auto_augment import LEVEL_TO_ARG, NAME_TO_OP
from torchvision.transforms import functional as F

import train_ddp
from input_pipeline.device_cache import KINDS, AugmentationPlans, DecodedImages, DeviceAugment, _recorded

BASE = ["num_epochs=null", "num_train_steps=3", "global_batch_size=32", "compile=false", "data.num_workers=0"]
BASE += ["data.crop_scale=[0.3,1.0]", "output_dir=unused"]
OFF = ["data.auto_augment=null", "data.random_erasing=0", "data.hflip=0"]
POLICIES = ["rand-m9-mstd0.5-inc1", "rand-m9-n3-p1", "rand-m9-t3a", "rand-m9-t3aw", "original", "originalr-mstd0.5"]
POLICIES += ["v0", "v0r", "3a"]


def smooth(n, height=30, width=36, channels=3):
    """An image of many colours, uint8 (C, Y, X)."""
    values = torch.rand(1, channels, 6, 5, generator=torch.Generator().manual_seed(n))
    values = torch.nn.functional.interpolate(values, (height, width), mode="bicubic")[0].clamp(0.05, 0.9)
    return (values * 255).to(torch.uint8)


ALONE = {"rank": 0, "world_size": 1, "start_step": 0}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """40 images of 36 x 30 pixels, in four classes, without loss."""
    root = tmp_path_factory.mktemp("small")
    for n in range(40):
        for split in ("train", "val"):
            folder = root / split / f"class{n % 4}"
            folder.mkdir(parents=True, exist_ok=True)
            F.to_pil_image(smooth(n)).save(folder / f"{n:02d}.png")
    return root


@functools.cache
def config(path, *overrides):
    return launch.load_config("cifar10_vit", [*BASE, f"data.path={path}", *overrides])


def batches(path, *overrides, **place):
    """All images and labels of a rank, one way and the other."""
    both = []
    for way in ("true", "false"):
        cfg = config(path, f"data.resident={way}", *overrides)
        loader, _ = loaders_of(cfg, **ALONE | place)
        images, labels = zip(*loader, strict=True)
        both.append((torch.cat(images).cpu(), torch.cat(labels)))
    return both


def assert_close(ours, theirs, *, most, mean):
    """The same labels; pixels within `most` of 255 and `mean` on average."""
    assert torch.equal(ours[1], theirs[1])
    difference = (ours[0].int() - theirs[0].int()).abs()
    assert difference.max() <= most
    assert difference.float().mean() < mean


@pytest.mark.parametrize(
    "overrides",
    [
        OFF,
        [*OFF, "data.interpolation=bilinear"],
        [*OFF, "model.img_size=20"],
        [*OFF[:2], "data.hflip=0.5", "data.vflip=0.3", "data.num_workers=2"],
    ],
    ids=["bicubic", "bilinear", "smaller", "flips"],
)
def test_crops_are_the_loaders(small, overrides):
    ours, theirs = batches(small, *overrides)
    assert_close(ours, theirs, most=2, mean=0.05)
    assert len(ours[0].unique(dim=0)) == 96


@pytest.fixture(scope="module")
def plain(small):
    return batches(small, *OFF)[0][0]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_the_loaders(small, plain, policy):
    """What one level of rounding becomes under Equalize and Posterize is seldom, and small on average."""
    ours, theirs = batches(small, *OFF[1:], f"data.auto_augment={policy}", "data.color_jitter=[0.4,0.3,0.2]")
    assert_close(ours, theirs, most=255, mean=1.0)
    is_near = ((ours[0].int() - theirs[0].int()).abs() <= 2).flatten(1).float().mean(1)
    assert is_near.quantile(0.1) > 0.97
    assert (plain != ours[0]).flatten(1).any(1).float().mean() > 0.5


# Arguments at which an operation does something, as timm's level functions give them.
ARGUMENTS = {
    name: [LEVEL_TO_ARG[name](level, {"translate_pct": 0.45})[0] for level in (3, 5, 9)] if LEVEL_TO_ARG[name] else []
    for name in NAME_TO_OP
    if name not in ("TranslateX", "TranslateY", "GaussianBlurRand")  # by pixels: no policy has them; or random
}


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_operations_are_pillows(small, name, channels, interpolation):
    grey = ["model.in_chans=1", "data.mean=[0.4]", "data.std=[0.2]"] if channels == 1 else []
    cfg = config(small, "data.resident=true", f"data.interpolation={interpolation}", "model.img_size=[28,40]", *grey)
    plans = AugmentationPlans(FakePixels(channels), cfg)
    kind, arguments = _recorded(name, (28, 40))
    plans.kinds = [kind]
    device = DeviceAugment(plans, cfg, torch.device("cpu"))
    images = torch.stack([smooth(n, 28, 40, channels) for n in range(6)])
    images[1] //= 3  # dark: Equalize and AutoContrast have more to do
    images[2] = 77  # of one colour
    fill = tuple(round(255 * value) for value in cfg.data.mean)
    resample = {"bilinear": Image.BILINEAR, "bicubic": Image.BICUBIC}[interpolation]
    for given in [[value] for value in ARGUMENTS[name]] or [[]]:
        op = torch.tensor([[KINDS.index(kind), *arguments(*given), *[0.0] * 6][:7]]).repeat(len(images), 1)
        op[5, 0] = 0  # another operation, or none
        ours = device.layer(images.float(), op.float())
        for n, image in enumerate(images[:5]):
            theirs = NAME_TO_OP[name](F.to_pil_image(image), *given, fillcolor=fill, resample=resample)
            difference = (ours[n] - F.pil_to_tensor(theirs)).abs()
            assert difference.max() <= (3 if kind == "blur" else 1), given
            assert difference.mean() < (0.7 if kind == "blur" else 0.1), given
        assert torch.equal(ours[5], images[5].float())


class FakePixels:
    """The shape alone."""

    def __init__(self, channels):
        self.shape = torch.Size((channels, 28, 40))


def test_erased_boxes_are_the_loaders_filled_with_like_noise(small):
    erasing = ["data.auto_augment=null", "data.hflip=0", "data.random_erasing=0.7", "global_batch_size=40"]
    (ours, _), (theirs, _) = batches(small, *erasing)
    (plain, _), _ = batches(small, *OFF, "global_batch_size=40")
    boxes = [((images.int() - plain.int()).abs() > 3).any(1) for images in (ours, theirs)]  # B Y X, some noise is alike
    assert 0.5 < boxes[0].flatten(1).any(1).float().mean() < 0.85
    for one, other in ((boxes[0], boxes[1]), (boxes[1], boxes[0])):
        for mask, within in zip(one, other, strict=True):
            rows, columns = (within.any(d).nonzero() for d in (1, 0))
            outside = mask.clone()
            if len(rows):
                outside[max(rows.min() - 1, 0) : rows.max() + 2, max(columns.min() - 1, 0) : columns.max() + 2] = False
            assert not outside.any()
    noise = [images.movedim(1, -1)[boxes[0] & boxes[1]].float() for images in (ours, theirs)]
    for of in (torch.mean, torch.std):
        torch.testing.assert_close(of(noise[0], dim=0), of(noise[1], dim=0), rtol=0.05, atol=0)
    assert not torch.equal(*noise)


def test_neither_ranks_nor_workers_nor_a_resume_change_an_image(small):
    whole, _ = batches(small, "data.random_erasing=0.7")
    first, _ = batches(small, "data.random_erasing=0.7", "data.num_workers=2", rank=0, world_size=2)
    second, _ = batches(small, "data.random_erasing=0.7", rank=1, world_size=2)
    later, _ = batches(small, "data.random_erasing=0.7", start_step=2)
    steps = [torch.cat(parts) for parts in zip(first[0].split(16), second[0].split(16), strict=True)]
    assert torch.equal(whole[0], torch.cat(steps))
    assert torch.equal(whole[0][64:], later[0])


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "3a"])
def test_every_layer_of_operations_meets_the_same_layout(small, policy):
    """Crops and results of operations have one: compiled, that is one graph."""
    loader, _ = loaders_of(config(small, "data.resident=true", f"data.auto_augment={policy}"), **ALONE)
    layouts = []
    layer = loader.augment.layer
    loader.augment.layer = lambda images, op: layouts.append(images.stride()) or layer(images, op)
    next(iter(loader))
    assert len(layouts) >= 2
    assert len(set(layouts)) == 1


def test_processes_that_read_the_images_end_with_it(small):
    loader, _ = loaders_of(config(small, "data.resident=true", "data.num_workers=2"), **ALONE)
    batches = iter(loader)
    next(batches)
    assert len(multiprocessing.active_children()) == 2  # those that draw


def test_validation_reads_once_and_gives_what_the_loader_gives(small):
    _, plain = loaders_of(config(small), **ALONE)
    _, kept = loaders_of(config(small, "data.resident=true", "data.num_workers=2"), **ALONE)
    partly = iter(kept)
    next(partly)  # broken off
    del partly
    want, first, second = list(plain), list(kept), list(kept)
    assert not multiprocessing.active_children()
    assert len(want) > 1
    for got in (first, second):
        for batch, other in zip(got, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_images_are_decoded_once_for_all_sizes_of_a_schedule(small, tmp_path, monkeypatch):
    """And those of the second size are what a run that begins there decodes for itself."""
    decoded, load = [], DecodedImages.__getitem__
    monkeypatch.setattr(DecodedImages, "__getitem__", lambda self, index: decoded.append(index) or load(self, index))
    schedule = ["data.resident=true", "data.size_schedule=[{epoch:1.2,img_size:24}]", "num_train_steps=4"]

    def run(*overrides):
        places = [f"data.path={small}", f"output_dir={tmp_path / 'run'}", "checkpoint.max_checkpoints=null"]
        train_ddp.main(launch.load_config("L0_sanity", [*TINY, *places, *schedule, *overrides], script="train_ddp"))
        return column(tmp_path, "run", "train/loss")

    losses = run()
    assert sorted(decoded) == list(range(40))
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000004")
    assert run() == losses
    assert len(decoded) == 2 * 40


def test_images_of_two_sizes_are_refused_by_name(small, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for folder in (small / split).iterdir():
            (tmp_path / split / folder.name).symlink_to(folder)
    (tmp_path / "train" / "odd").mkdir()
    F.to_pil_image(smooth(0, 30, 31)).save(tmp_path / "train" / "odd" / "one.png")
    with pytest.raises(OSError, match=r"odd/one.png is 30 x 31 pixels and .*/00.png 30 x 36: data.resident=true keeps"):
        batches(tmp_path, *OFF)


def test_damaged_images_are_named(small, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "class0").mkdir(parents=True)
        for n in range(40):
            F.to_pil_image(smooth(n)).save(tmp_path / split / "class0" / f"{n:02d}.png")
    damaged = tmp_path / "train" / "class0" / "07.png"
    damaged.write_bytes(damaged.read_bytes()[:300])
    with pytest.raises(OSError, match=r"cannot read .*07.png: "):
        batches(tmp_path, *OFF)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_gpu_does_as_the_loader(small, compiled):
    for policy in ("rand-m9-mstd0.5-inc1", "3a"):
        overrides = [*OFF[1:], f"data.auto_augment={policy}", f"compile={compiled}", "data.num_workers=2"]
        ours, theirs = batches(small, *overrides)
        assert_close(ours, theirs, most=255, mean=1.0)
        is_near = ((ours[0].int() - theirs[0].int()).abs() <= 2).flatten(1).float().mean(1)
        assert is_near.quantile(0.1) > 0.97
