"""Images as people have them: every kind of file ends in the right pixels, or in an error that names it.

What is expected is known when the file is made, or comes from Pillow.
"""

import launch

import dataclasses
import functools
import io
import itertools
import json
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, loaders_of, make_images, read_metrics, run_command, run_tasks, task_of
from PIL import Image, ImageOps

import imagenet_dataset
import schema
from imagenet_dataset import PADDING
from input_pipeline import decode
from runtime import seeding

DECODERS = ("pillow", "torchvision")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@functools.cache
def composed(*overrides):
    base = [*TINY, "data.path=unused", "data.num_workers=0", "data.crop_scale=[0.3,1]", "data.crop_ratio=[0.75,1.25]"]
    return launch.load_config("L0_sanity", [*base, *overrides], script="train_ddp")


def config(path, *overrides):
    """L0_sanity on the images at `path`, 16 x 16 pixels."""
    cfg = composed(*overrides)
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, path=str(path)))


def decoder(name="torchvision", *overrides, in_chans=3):
    return decode.Decoder.of(config("unused", f"data.decoder={name}", *overrides).data, in_chans)


def file_of(image, kind="PNG", **options):
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def photo(width=120, height=90, seed=0):
    """Smooth colours with some noise, as a photograph has."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    noise = rng.normal(0, 4, (height, width, 3))
    pixels = np.asarray(small.resize((width, height), Image.BICUBIC)) + noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def png(width, height, *, depth, colour, rows):
    """A PNG file of raw rows, for what Pillow cannot write."""

    def chunk(name, content):
        checked = name + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    packed = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


@functools.cache
def odd_images():
    """Name -> (file, the one RGB colour that it shows)."""
    size, orange, over_white = (20, 18), (200, 100, 50), (227, 177, 152)  # half of it, half of white
    palette = Image.new("P", size, 1)
    palette.putpalette([0, 0, 0, *orange])
    clear = Image.new("P", size, 0)
    clear.putpalette([9, 9, 9, *orange])
    frames = [Image.new("RGB", size, colour) for colour in (orange, (0, 0, 255))]
    cmyk = Image.new("CMYK", size, (0, 255, 255, 0))
    return {
        "palette": (file_of(palette), orange),
        "palette, other colour clear": (file_of(palette, transparency=0), orange),
        "palette, this colour clear": (file_of(clear, transparency=0), (255, 255, 255)),
        "palette, table of alphas": (file_of(palette, transparency=bytes([255, 128])), over_white),
        "RGB, colour key": (file_of(Image.new("RGB", size, orange), transparency=orange), (255, 255, 255)),
        "grey and half alpha": (file_of(Image.new("LA", size, (90, 128))), (172, 172, 172)),
        "RGBA, half": (file_of(Image.new("RGBA", size, (*orange, 128))), over_white),
        "RGBA, opaque": (file_of(Image.new("RGBA", size, (*orange, 255))), orange),
        "16 bits grey": (file_of(Image.fromarray(np.full((18, 20), 90 * 257, np.uint16))), (90, 90, 90)),
        "16 bits grey, TIFF": (file_of(Image.fromarray(np.full((18, 20), 90 * 257, np.uint16)), "TIFF"), (90, 90, 90)),
        "16 bits RGB": (
            png(20, 18, depth=16, colour=2, rows=[struct.pack(">3H", *(v * 257 for v in orange)) * 20] * 18),
            orange,
        ),
        "bilevel": (file_of(Image.new("1", size, 1)), (255, 255, 255)),
        "CMYK, JPEG": (file_of(cmyk, "JPEG"), (255, 0, 0)),
        "CMYK, TIFF": (file_of(cmyk, "TIFF"), (255, 0, 0)),
        "YCbCr, TIFF": (file_of(Image.new("RGB", size, orange).convert("YCbCr"), "TIFF"), orange),
        "animation, GIF": (file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]), orange),
        "animation, WebP": (
            file_of(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True),
            orange,
        ),
        "progressive": (file_of(Image.new("RGB", size, orange), "JPEG", progressive=True), orange),
        "grey JPEG": (file_of(Image.new("L", size, 90), "JPEG"), (90, 90, 90)),
    }


@pytest.mark.parametrize("name", odd_images())
@pytest.mark.parametrize("in_chans", [1, 3])
def test_every_kind_of_image_shows_its_colour(name, in_chans):
    data, rgb = odd_images()[name]
    grey = round(0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2])
    for way in DECODERS:
        image = decoder(way, in_chans=in_chans).tensor(data)
        assert (image.dtype, tuple(image.shape)) == (torch.uint8, (in_chans, 18, 20))
        expected = torch.tensor([grey] if in_chans == 1 else rgb)[:, None, None]
        assert (image.int() - expected).abs().max() <= 3, way


def test_grey_of_16_bits_keeps_all_its_values():
    """Pillow's own conversion would make nearly all of them white."""
    ramp = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    image = decoder().tensor(file_of(Image.fromarray(ramp)))
    assert torch.equal(image[0], torch.from_numpy(np.round(ramp / 257).astype(np.uint8)))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_values_of_no_known_range_are_refused(mode):
    image = Image.fromarray(np.full((4, 4), 7e6, dtype=np.int32 if mode == "I" else np.float32))
    with pytest.raises(decode.ImageError, match=r"16 bits|no known range"):
        decoder().tensor(file_of(image, "TIFF"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_by_a_switch_that_all_share(tmp_path, orientation):
    """Four corners of an upright image, stored turned as the tag says."""
    upright = Image.new("RGB", (40, 24))
    for i, colour in enumerate([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]):
        upright.paste(colour, (20 * (i % 2), 12 * (i // 2), 20 * (i % 2) + 20, 12 * (i // 2) + 12))
    turned = Image.Transpose
    undo = [None, turned.FLIP_LEFT_RIGHT, turned.ROTATE_180, turned.FLIP_TOP_BOTTOM]
    undo += [turned.TRANSPOSE, turned.ROTATE_90, turned.TRANSVERSE, turned.ROTATE_270]  # stored = upright, then this
    stored = upright if undo[orientation - 1] is None else upright.transpose(undo[orientation - 1])
    exif = Image.Exif()
    exif[decode.ORIENTATION] = orientation
    data = file_of(stored, "JPEG", quality=95, subsampling=0, exif=exif)
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a/x.jpg").write_bytes(data)
    for way, (switch, shown) in itertools.product(DECODERS, (("true", upright), ("false", stored))):
        options = [f"data.decoder={way}", f"data.exif_orientation={switch}"]
        image = decoder(*options[0].split("=")[1:], options[1]).tensor(data)
        assert image.shape[1:] == (shown.height, shown.width)
        difference = image.permute(1, 2, 0).int() - torch.from_numpy(np.array(shown)).int()
        assert difference.abs().float().mean() < 4
        ratio = shown.width / shown.height
        whole = ["data.crop_scale=[1,1]", f"data.crop_ratio=[{ratio},{ratio}]", "data.hflip=0", "data.crop_pct=1.0"]
        whole += ["global_batch_size=1", "num_train_steps=1", "model.in_chans=3"]
        for loader in loaders_of(config(tmp_path, *options, *whole), rank=0, world_size=1, start_step=0):
            (corner,) = next(iter(loader))[0][:, :, 1, 1]
            assert (corner.int() - torch.tensor(shown.getpixel((2, 2)))).abs().max() <= 12


@pytest.mark.parametrize("exif", [b"Exif\0\0MM\0*\0\0\0\x08\0\x09", b"Exif\0\0nonsense", b"Exif\0\0"])
def test_damaged_exif_loses_no_image(exif):
    image = photo()
    data = file_of(image, "JPEG", exif=exif)
    for way, switch in itertools.product(DECODERS, ("true", "false")):
        found = decoder(way, f"data.exif_orientation={switch}").tensor(data)
        assert torch.equal(found, decoder("pillow").tensor(file_of(image, "JPEG")))


@functools.cache
def damaged():
    """Name -> (file, what the error says)."""
    jpeg, whole = file_of(photo(), "JPEG"), file_of(photo())
    middle = len(whole) // 2
    return {
        "nothing": (b"", "not an image"),
        "a page": (b"<html>404</html>", "not an image"),
        "half a JPEG": (jpeg[: len(jpeg) // 2], "truncated"),
        "a JPEG without its end": (jpeg[:-2], "truncated"),
        "100 bytes of a JPEG": (jpeg[:100], "Truncated|not an image"),
        "half a PNG": (whole[:middle], "truncated|broken"),
        "a damaged PNG": (whole[:middle] + b"\0" * 50 + whole[middle + 50 :], "broken|unrecognized|checksum|CRC"),
        "a bomb": (file_of(Image.new("1", (20000, 10000))), "20000 x 10000 pixels are more than data.max_pixels"),
    }


@pytest.mark.parametrize("name", damaged())
def test_damage_is_an_error_whatever_decodes(name):
    """Also where EXIF is asked for, which meets a PNG's damage first."""
    data, text = damaged()[name]
    for way, switch in itertools.product(DECODERS, ("true", "false")):
        with pytest.raises(decode.ImageError, match=text):
            decoder(way, f"data.exif_orientation={switch}").tensor(data)


def test_bound_on_pixels_is_the_configs():
    data = file_of(Image.new("RGB", (100, 50)))
    assert decoder("pillow", "data.max_pixels=5000").tensor(data).shape == (3, 50, 100)
    with pytest.raises(decode.ImageError, match=r"100 x 50 pixels are more than data.max_pixels=4999"):
        decoder("pillow", "data.max_pixels=4999").tensor(data)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_torchvision_decodes_to_pillows_pixels(subsampling, progressive):
    data = file_of(photo(333, 250), "JPEG", quality=90, subsampling=subsampling, progressive=progressive)
    assert torch.equal(decoder("torchvision").tensor(data), decoder("pillow").tensor(data))
    for mode in ("L", "CMYK"):
        other = file_of(photo(333, 250).convert(mode), "JPEG")
        assert torch.equal(decoder("torchvision").tensor(other), decoder("pillow").tensor(other))
    ways = [decoder(way, in_chans=1).tensor(data) for way in DECODERS]
    assert torch.equal(*ways)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_training_pixels_are_pillows_to_within_two(tmp_path, interpolation):
    """The crop's resize on tensors against Pillow's own, with the boxes that the sample numbers give."""
    for i, split in itertools.product(range(6), ("train", "val")):
        (tmp_path / split / "a").mkdir(parents=True, exist_ok=True)
        photo(90 + 50 * i, 220, seed=i).save(tmp_path / split / f"a/{i}.jpg", quality=95)
    options = [f"data.interpolation={interpolation}", "data.hflip=0", "model.in_chans=3", "model.img_size=64"]
    cfg = config(tmp_path, *options)
    dataset = imagenet_dataset.ImageDataset(imagenet_dataset.list_images(cfg.data, "train"), cfg, is_train=True)
    for number, index in itertools.product(range(4), range(6)):
        found, _, _ = dataset[number, index]
        image = Image.open(dataset.images.name(index))
        with seeding.sample(cfg.seed, number):
            top, left, height, width = imagenet_dataset.crop_box(image, cfg.data)
        cut = image.crop((left, top, left + width, top + height))
        want = cut.resize((64, 64), Image.Resampling[interpolation.upper()])
        difference = found.permute(1, 2, 0).int() - torch.from_numpy(np.array(want)).int()
        assert difference.abs().max() <= 2
        assert difference.abs().float().mean() < 0.3


@pytest.mark.parametrize("size", [(1, 1), (1, 400), (2000, 3), (5, 12000)])
def test_absurd_shapes_have_pixels_too(tmp_path, size):
    """Resizing the short side of 5 x 12000 to 256 would make 157 million pixels."""
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.new("RGB", size, (200, 100, 50)).save(tmp_path / split / "a/x.png")
    cfg = config(tmp_path, "global_batch_size=1", "num_train_steps=1", "model.in_chans=3")
    for loader in loaders_of(cfg, rank=0, world_size=1, start_step=0):
        (image,) = next(iter(loader))[0]
        assert (image.int() - torch.tensor([200, 100, 50])[:, None, None]).abs().max() <= 2
    bounded = decode.crop_extreme_aspect(Image.new("RGB", size))
    assert max(bounded.size) <= 8 * min(bounded.size)


def test_evaluation_of_a_long_image_shows_its_middle():
    """Cut to 8 : 1 before the resize: the same as without the cut, up to the resize's phase."""
    transform = imagenet_dataset.eval_transform(config("unused").data)
    image = photo(2000, 40)
    difference = transform(decode.crop_extreme_aspect(image)).int() - transform(image).int()
    assert difference.abs().float().mean() < 3
    assert decode.crop_extreme_aspect(photo(320, 40)).size == (320, 40)


# What cannot be read


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """The folder of `make_images` with two training images and one validation image that cannot be read."""
    folder = make_images(tmp_path_factory.mktemp("spoilt"))
    trains, vals = (sorted((folder / split).rglob("*.*")) for split in ("train", "val"))
    bad = [trains[3], trains[40], vals[5]]
    for path in bad:
        path.write_bytes(path.read_bytes()[:40])
    return folder, bad


def batches(cfg, split, *, rank=0, world_size=1):
    """All images and labels of a loader."""
    loader = loaders_of(cfg, rank=rank, world_size=world_size, start_step=0)[split]
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def test_skipping_replaces_by_the_next_image_whatever_reads(spoilt):
    """The other samples stay what they were, and the number of batches too."""
    folder, bad = spoilt
    cfg = config(folder, "data.on_error=skip", "num_train_steps=8", "data.hflip=0")
    images, labels = batches(cfg, 0)
    for workers in (1, 3):
        again = batches(
            config(folder, "data.on_error=skip", "num_train_steps=8", "data.hflip=0", f"data.num_workers={workers}"), 0
        )
        assert torch.equal(images, again[0])
        assert torch.equal(labels, again[1])
    found = imagenet_dataset.scan(str(folder), "train")
    loader = loaders_of(cfg, rank=0, world_size=1, start_step=0)[0]
    keys = [key for batch in loader.batch_sampler for key in batch]
    assert len(keys) == len(images) == 8 * cfg.global_batch_size
    names = [found.name(i) for i in range(len(found))]
    unreadable = {names.index(str(path)) for path in bad[:2]}
    hits = [place for place, (_, index) in enumerate(keys) if index in unreadable]
    assert len(hits) >= 4  # each at least twice in three passes
    for place, (_, index) in enumerate(keys):
        assert labels[place] == found.labels[(index + 1) % len(found) if index in unreadable else index]


def test_skipping_in_validation_counts_for_nothing(spoilt):
    folder, bad = spoilt
    found = imagenet_dataset.scan(str(folder), "val")
    labels = batches(config(folder, "data.on_error=skip"), 1)[1]
    left = [int(label) for i, label in enumerate(found.labels) if found.name(i) != str(bad[2])]
    assert labels[labels != PADDING].tolist() == left


def test_skipping_gives_up_past_its_cap(spoilt, caplog):
    folder, bad = spoilt
    batches(config(folder, "data.on_error=skip", "data.max_errors=2", "num_train_steps=8"), 0)
    lines = [record.getMessage() for record in caplog.records if "cannot read" in record.getMessage()]
    assert len(lines) == 2  # once each, though each was met several times
    assert all(any(str(path) in line for line in lines) for path in bad[:2])
    with pytest.raises(OSError, match=r"more than data.max_errors=1 images cannot be read"):
        batches(config(folder, "data.on_error=skip", "data.max_errors=1", "num_train_steps=8"), 0)


def test_a_folder_of_nothing_readable_ends(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for i in range(3):
            (tmp_path / split / f"a/{i}.jpg").write_bytes(b"no")
    cfg = config(tmp_path, "data.on_error=skip", "global_batch_size=3", "num_train_steps=1")
    with pytest.raises(OSError, match="nor any other image"):
        batches(cfg, 0)


def test_skipping_under_two_processes(spoilt, tmp_path):
    """It trains to the end with equal steps."""
    folder, bad = spoilt
    options = ["evaluation.every_n_steps=6", "data.num_workers=1", "data.on_error=skip"]
    run_tasks([task_of(folder, tmp_path, "skip", "train_ddp", *options)], nproc=2, folder=tmp_path / "tasks")
    assert read_metrics(tmp_path / "skip")[6]["val/images"] == 22
    output = (tmp_path / "tasks/output.txt").read_text()
    assert all(str(path) in output for path in bad)


@pytest.mark.slow
def test_an_image_that_cannot_be_read_ends_both_processes(spoilt, tmp_path):
    """With the file's name."""
    folder, bad = spoilt
    overrides = [*TINY, f"data.path={folder}", "evaluation.every_n_steps=6", "data.num_workers=1"]
    done = run_command([ROOT / "train_ddp.py", *overrides, f"output_dir={tmp_path}/raise"], nproc=2, timeout=100)
    assert done.returncode != 0
    ours = done.stderr.split("torch/distributed/elastic")[0]  # what comes then is torchrun's report
    said = re.findall(r"^error: rank \d: cannot read (\S+): .*; mend it, or set data.on_error=skip$", ours, re.M)
    assert said
    assert set(said) <= {str(path) for path in bad}
    assert "UnreadableError" not in ours  # no traceback of it; the other rank may miss this one in a collective
    assert json.loads((tmp_path / "raise/status.json").read_text())["state"] in ("failed", "running")


def test_repeated_augmentation_repeats_within_the_batch(image_folder):
    """Each image three times, a third of a batch apart, differently cut; over three epochs each image three times."""
    cfg = config(image_folder, "data.repeated_augmentation=3", "num_train_steps=null", "num_epochs=6")
    keys = list(loaders_of(cfg, rank=0, world_size=1, start_step=0)[0].batch_sampler)
    assert len(keys) == 6 * 60 // 24
    for batch in keys:
        indices = [index for _, index in batch]
        assert indices[:8] == indices[8:16] == indices[16:]
    stream = [index for batch in keys for _, index in batch[:8]]
    assert sorted(stream[:60]) == sorted(stream[60:120]) == list(range(60))
    images, _ = next(iter(loaders_of(cfg, rank=0, world_size=1, start_step=0)[0]))
    assert not torch.equal(images[:8], images[8:16])
    halves = [list(loaders_of(cfg, rank=rank, world_size=2, start_step=0)[0].batch_sampler) for rank in (0, 1)]
    assert [a + b for a, b in zip(*halves, strict=True)] == keys
    with pytest.raises(schema.ConfigError, match=r"global_batch_size=24 .* data.repeated_augmentation=5"):
        config(image_folder, "data.repeated_augmentation=5")


def test_nvjpeg_is_refused_where_it_cannot_be():
    cfg = config("unused", "data.decoder=nvjpeg")
    if not torch.cuda.is_available():
        with pytest.raises(schema.ConfigError, match=r"data.decoder=nvjpeg needs a CUDA GPU"):
            launch.check_script(cfg, "train_ddp", 1)
    with pytest.raises(schema.ConfigError, match=r"data.on_error=skip with data.decoder=nvjpeg"):
        config("unused", "data.decoder=nvjpeg", "data.on_error=skip")
    for augmentation in ("vflip=0.5", "auto_augment=3a", "color_jitter=[0.3,0.3,0.3]", "random_erasing=0.25"):
        with pytest.raises(schema.ConfigError, match=f"data.{augmentation.split('=')[0]}=.* with data.decoder=nvjpeg"):
            config("unused", "data.decoder=nvjpeg", f"data.{augmentation}", "model.in_chans=3")


def test_evaluation_is_pillows_whatever_decodes(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        photo(300, 200).save(tmp_path / split / "a/x.jpg")
    images = [
        batches(config(tmp_path, f"data.decoder={way}", "global_batch_size=1", "num_train_steps=1"), 1)[0]
        for way in DECODERS
    ]
    assert torch.equal(*images)


def test_upright_images_are_pillows():
    """Against Pillow's own exif_transpose, on a photograph."""
    exif = Image.Exif()
    exif[decode.ORIENTATION] = 6
    data = file_of(photo(), "JPEG", exif=exif)
    want = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    found = decoder("torchvision", "data.exif_orientation=true").tensor(data)
    assert np.array_equal(found.permute(1, 2, 0).numpy(), want)
