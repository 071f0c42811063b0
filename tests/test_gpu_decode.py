"""nvJPEG's pixels beside the CPU's, and training from them.

pytest -m gpu
"""

import launch

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from conftest import ON_GPU, TINY, column, loaders_of, run_tasks
from PIL import Image

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images as photographs have them, of several kinds: JPEGs of all subsamplings, grey ones, CMYK, PNG, WebP."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, i in itertools.product(("train", "val"), range(36)):
        width, height = rng.integers(180, 600, 2).tolist()
        colours = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
        pixels = np.asarray(colours.resize((width, height), Image.BICUBIC)) + rng.normal(0, 4, (height, width, 3))
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        file = root / split / f"class{i % 6}/{i:02d}"
        file.parent.mkdir(parents=True, exist_ok=True)
        if i % 9 == 7:
            image.convert(("CMYK", "RGBA", "P", "RGB")[i // 9]).save(
                f"{file}.jpg", ("JPEG", "PNG", "GIF", "WEBP")[i // 9]
            )
        elif i % 9 == 8:
            image.convert("L").save(f"{file}.jpg", quality=90)
        else:
            image.save(f"{file}.jpg", quality=90, subsampling=i % 3, progressive=i % 5 == 0)
    return root


def batches(root, *overrides):
    base = [*TINY, *ON_GPU, "data.path=unused", "data.num_workers=2", "global_batch_size=36", "model.img_size=224"]
    base += ["num_train_steps=4", "model.patch_size=16", "data.interpolation=bicubic", *overrides]
    cfg = launch.load_config("L0_sanity", base, script="train_ddp")
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, path=str(root)))
    images, labels = zip(*loaders_of(cfg, rank=0, world_size=1, start_step=0)[0], strict=True)
    return torch.cat([i.cpu() for i in images]), torch.cat([label.cpu() for label in labels])


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_nvjpegs_pixels_are_the_cpus(photos, in_chans, interpolation):
    """The same boxes and flips; what differs is rounding, and how halved colour channels are spread at edges."""
    ways = [
        batches(photos, f"data.decoder={way}", f"model.in_chans={in_chans}", f"data.interpolation={interpolation}")
        for way in ("torchvision", "nvjpeg")
    ]
    (want, labels), (found, found_labels) = ways
    assert torch.equal(labels, found_labels)
    assert (found.dtype, found.shape) == (torch.uint8, want.shape)
    difference = (found.int() - want.int()).abs().float()
    print(f"in_chans={in_chans} {interpolation}: mean {difference.mean():.3f}, worst image", end=" ")
    print(f"{difference.mean(dim=(1, 2, 3)).max():.3f}, worst value {difference.max():.0f}")
    assert difference.mean() < 1
    assert difference.mean(dim=(1, 2, 3)).max() < 2.5


def test_a_jpeg_that_cannot_be_decoded_is_named(photos, tmp_path):
    """Its header and end are there, what is between is not."""
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for i, path in enumerate(sorted((photos / split).rglob("*00.jpg")) * 3):
            (tmp_path / split / f"a/{i}.jpg").write_bytes(path.read_bytes())
    bad = tmp_path / "train/a/1.jpg"
    data = bad.read_bytes()
    scan = data.index(b"\xff\xda")
    bad.write_bytes(data[:scan] + b"\xff\xd9")
    with pytest.raises(OSError, match=f"cannot read {bad}"):
        batches(tmp_path, "data.decoder=nvjpeg", "global_batch_size=3")


def test_training_from_the_gpus_decoder(photos, tmp_path):
    """Losses near those from the CPU's pixels, under a second stream; the evaluation is the same."""
    base = [*TINY, *ON_GPU, f"data.path={photos}", "global_batch_size=24", "num_train_steps=10", "data.num_workers=2"]
    run_tasks(
        [
            {
                "name": way,
                "script": "train_ddp",
                "overrides": [*base, f"data.decoder={way}", f"output_dir={tmp_path / way}"],
            }
            for way in ("torchvision", "nvjpeg")
        ],
        nproc=1,
        folder=tmp_path / "tasks",
    )
    want, found = (column(tmp_path, way, "train/loss") for way in ("torchvision", "nvjpeg"))
    assert found == pytest.approx(want, abs=5e-2)
    assert len(found) == 10
