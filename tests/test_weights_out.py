"""Exports: what timm and Hugging Face make of them."""

import json
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from conftest import ROOT, error_of
from PIL import Image
from safetensors.torch import load_file, save_file
from test_vit import BLOCKS, ROPES
from weight_files import (
    CLASSES,
    MEAN,
    STD,
    assert_same_bits,
    config,
    drawn,
    fitted,
    images,
    logits,
    ours,
    plain_file,
    shapes,
    small,
    write_step,
)

import schema
from imagenet_dataset import eval_transform
from interop import step_weights, weights_in, weights_out
from vit import VisionTransformer

# An option that Hugging Face's ViT lacks, with what else it needs.
NOT_HUGGING_FACE = {
    "reg_tokens=4": "",
    "init_values=0.1": "",
    "qk_norm=true": "",
    "global_pool=avg": "",
    "global_pool=map": "",
    "class_token=false": "global_pool=avg",
    "pre_norm=true": "",
    "fc_norm=true": "",
    "no_embed_class=true": "",
    "proj_bias=false": "",
    "img_size=[32,64]": "",
    "patch_size=[8,16]": "",
}


@pytest.mark.parametrize(
    "options",
    [
        "",
        "reg_tokens=4 global_pool=avg init_values=0.1 qk_norm=true",
        "global_pool=map class_token=false act_layer=gelu_tanh",
        "no_embed_class=true pre_norm=true fc_norm=true proj_bias=false qkv_bias=false",
        "img_size=[32,64] patch_size=[8,16] in_chans=1 act_layer=silu mlp_ratio=2.6",
        "norm_eps=1e-5 pre_norm=true act_layer=quick_gelu",
        "norm_layer=rmsnorm qk_norm=true pos_embed=none final_norm=false",
        "mlp_layer=glu act_layer=silu mlp_ratio=5.34 scale_mlp_norm=true",
        "rope_type=cat",  # timm's entry point has a ref_feat_shape, and other values in the place of null
        *(options for options in (ROPES | BLOCKS).values() if "num_heads" not in options),
    ],
)
def test_timm_computes_our_logits_from_the_export(options, tmp_path):
    cfg = small(options)
    channels = {"mean": [0.3], "std": [0.2]} if cfg.in_chans == 1 else {}
    folder, tensors = write_step(tmp_path, cfg, **channels)
    weights_out.export_timm(folder, tmp_path / "out")
    assert_same_bits(plain_file(tmp_path / "out"), tensors)
    model = timm.create_model(f"local-dir:{tmp_path}/out", pretrained=True).eval()
    torch.testing.assert_close(logits(model, images(cfg)), logits(ours(cfg), images(cfg)), atol=1e-5, rtol=0)
    height, width = schema.pair(cfg.img_size)
    known = model.pretrained_cfg
    assert known["label_names"] == CLASSES
    assert (known["input_size"], known["crop_pct"], known["interpolation"]) == (
        (cfg.in_chans, height, width),
        0.875,
        "bicubic",
    )
    assert list(known["mean"]) == channels.get("mean", MEAN)
    assert list(known["std"]) == channels.get("std", STD)
    assert_same_bits(fitted(tmp_path / "out", cfg)[0], tensors)  # and back
    weights_out.export_timm(folder, tmp_path / "out")  # again, over the first one
    assert_same_bits(plain_file(tmp_path / "out"), tensors)


def test_timm_refuses_other_norms_by_name(tmp_path):
    folder, _ = write_step(tmp_path, small("norm_eps=1e-3"))
    assert error_of(weights_out.export_timm, folder, tmp_path / "out").startswith(
        "model.norm_eps=0.001 cannot be exported"
    )
    assert not (tmp_path / "out").exists()


def hugging_face(folder):
    """The model that transformers builds from a folder; it misses nothing and has nothing left over."""
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize(
    "options",
    [
        "",
        "qkv_bias=false mlp_ratio=2.6",
        "norm_eps=1e-3 fc_norm=false",
        "in_chans=1 img_size=32 patch_size=8 depth=11",
        *(f"act_layer={name}" for name in ("gelu_tanh", "quick_gelu", "relu", "silu")),
    ],
)
def test_hugging_face_computes_our_logits_from_the_export(options, tmp_path):
    cfg = small(options)
    folder, tensors = write_step(tmp_path, cfg, mean=[0.5], std=[0.25])
    weights_out.export_hugging_face(folder, tmp_path / "out")
    content = plain_file(tmp_path / "out")
    assert "vit.encoder.layer.1.attention.attention.query.weight" in content
    assert not [name for name in content if "pooler" in name]
    model = hugging_face(tmp_path / "out")
    torch.testing.assert_close(logits(model, images(cfg)), logits(ours(cfg), images(cfg)), atol=1e-5, rtol=0)
    assert model.config.id2label == dict(enumerate(CLASSES))
    assert model.config.label2id == {name: i for i, name in enumerate(CLASSES)}
    source = weights_in.read(str(tmp_path / "out"))
    assert source.options == {key: getattr(cfg, key) for key in ("num_heads", "act_layer", "norm_eps")}
    assert_same_bits(weights_in.fit(source, cfg, shapes(cfg))[0], tensors)


def test_hugging_face_and_back_bit_for_bit(tmp_path):
    """In every form in which transformers has the names."""
    transformers = pytest.importorskip("transformers")
    cfg = small()
    configuration = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=96,
        image_size=64,
        patch_size=16,
        layer_norm_eps=1e-6,
        num_labels=7,
    )
    theirs = drawn(transformers.ViTForImageClassification(configuration))
    theirs.save_pretrained(tmp_path / "classifier")
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    (tmp_path / "bin").mkdir()
    torch.save(load_file(tmp_path / "classifier/model.safetensors"), tmp_path / "bin/pytorch_model.bin")
    (tmp_path / "bin/config.json").write_text((tmp_path / "classifier/config.json").read_text())
    names = [*load_file(tmp_path / "classifier/model.safetensors"), *theirs.state_dict()]
    assert "vit.encoder.layer.0.attention.attention.query.weight" in names
    assert "vit.layers.0.attention.q_proj.weight" in names
    for step, source in enumerate(("classifier", "w.pth", "bin")):
        result, fresh = fitted(tmp_path / source, cfg)
        assert fresh == []
        mine = VisionTransformer(cfg).eval()
        mine.load_state_dict(result)
        torch.testing.assert_close(logits(mine, images(cfg)), logits(theirs, images(cfg)), atol=1e-5, rtol=0)
        folder, _ = write_step(tmp_path, cfg, step=step, tensors=result)
        weights_out.export_hugging_face(folder, tmp_path / "out")
        assert_same_bits(hugging_face(tmp_path / "out").state_dict(), theirs.state_dict())

    body = theirs.vit  # its names have no vit. before them; a pooler is left out
    with_pooler = transformers.ViTModel(configuration)
    with_pooler.load_state_dict({**with_pooler.state_dict(), **body.state_dict()})
    with_pooler.save_pretrained(tmp_path / "body")
    torch.save(with_pooler.state_dict(), tmp_path / "body.pth")
    for source in ("body", "body.pth"):
        bare, fresh = fitted(tmp_path / source, cfg)
        assert fresh == ["head.weight", "head.bias"]
        assert_same_bits(bare, {name: value for name, value in result.items() if name not in fresh})

    tensors = load_file(tmp_path / "body/model.safetensors")
    del tensors["encoder.layer.1.attention.attention.key.bias"]
    save_file(tensors, tmp_path / "body/model.safetensors")
    line = error_of(fitted, tmp_path / "body", cfg)
    assert "1 missing (blocks.1.attn.qkv.bias), 2 unexpected" in line.replace("; ", ", ")


@pytest.mark.parametrize("option", NOT_HUGGING_FACE)
def test_what_hugging_face_lacks_is_refused_by_name(option, tmp_path):
    folder, _ = write_step(tmp_path, small(f"{option} {NOT_HUGGING_FACE[option]}"))
    line = error_of(weights_out.export_hugging_face, folder, tmp_path / "out")
    assert line.startswith(f"model.{option} cannot be exported".replace(",", ", "))
    assert not (tmp_path / "out").exists()


def test_outputs_without_a_class_get_a_label(tmp_path):
    folder, _ = write_step(tmp_path, small(), classes=CLASSES[:5])
    weights_out.export_hugging_face(folder, tmp_path / "out")
    labels = hugging_face(tmp_path / "out").config.id2label
    assert [labels[i] for i in range(7)] == [*CLASSES[:5], "LABEL_5", "LABEL_6"]


def make_pil_images(in_chans, *sizes):
    rng = np.random.default_rng(0)
    for height, width in sizes:
        noise = Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
        yield noise.convert("L" if in_chans == 1 else "RGB")


def both_preprocessings(folder, in_chans=3, **data):
    """Functions of an image: our evaluation's pixels, and the exported processor's by the name of its backend."""
    transformers = pytest.importorskip("transformers")
    step_folder, _ = write_step(folder, small(f"in_chans={in_chans}"), **data)
    weights_out.export_hugging_face(step_folder, folder / "out")
    overrides = [f"model.{item}" for item in f"img_size=64 patch_size=16 in_chans={in_chans}".split()]
    cfg = config(*overrides, *(f"data.{key}={value}" for key, value in data.items())).data
    mean, std = (torch.tensor(data[key])[:, None, None] for key in ("mean", "std"))

    def theirs(image, backend):
        processor = transformers.AutoImageProcessor.from_pretrained(folder / "out", backend=backend)
        return processor(image, return_tensors="pt").pixel_values[0]

    return lambda image: (eval_transform(cfg)(image) / 255 - mean) / std, theirs


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop_pct", [0.8, 0.87, 1.0])
@pytest.mark.parametrize("in_chans", [3, 1])
def test_the_image_processor_is_our_evaluation(interpolation, crop_pct, in_chans, tmp_path):
    mean, std = (MEAN, STD) if in_chans == 3 else ([0.3], [0.2])
    mine, theirs = both_preprocessings(
        tmp_path, in_chans, mean=mean, std=std, interpolation=interpolation, crop_pct=crop_pct
    )
    for image in make_pil_images(in_chans, (91, 91), (113, 151), (137, 211), (300, 133), (40, 57)):
        short, width, height = int(64 / crop_pct), *image.size
        if (int(short * max(width, height) / min(width, height)) - 64) % 4 == 3:
            continue  # see the next test
        torch.testing.assert_close(theirs(image, "pil"), mine(image), atol=1e-5, rtol=0)
        # Its other arithmetic is up to two grey levels off.
        torch.testing.assert_close(theirs(image, "torchvision"), mine(image), atol=2.1 / 255 / min(std), rtol=0)


def test_half_a_pixel_is_cut_off_on_the_other_side(tmp_path):
    mine, theirs = both_preprocessings(tmp_path, mean=MEAN, std=STD, interpolation="bicubic", crop_pct=0.9)
    (image,) = make_pil_images(3, (90, 90))  # 71 after resizing, 7 more than the crop
    torch.testing.assert_close(theirs(image, "pil")[:, 1:, 1:], mine(image)[:, :-1, :-1], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_export_takes_the_memory_of_the_weights_alone(tmp_path):
    """No optimizer state is read, and weights are not copied once more. 50 MiB of weights, five times in all."""
    cfg = small("embed_dim=512 depth=4 num_heads=8")
    folder, tensors = write_step(tmp_path, cfg, moments=4)
    size = sum(p.numel() * 4 for p in tensors.values()) / 2**20
    code = """
import resource, sys
import launch
from interop import weights_out
from pathlib import Path
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
weights_out.export_timm(Path(sys.argv[1]), Path(sys.argv[2]))
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, folder, tmp_path / "out"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert size > 45
    assert float(done.stdout) < 2 * size + 50  # the weights, and the file as safetensors builds it


def test_exports_of_imagenet_have_names_for_people(tmp_path):
    """timm's own descriptions of the wnids, where all classes are such."""
    cfg = small("num_classes=3")
    wnids = ["n01440764", "n01443537", "n02105855"]
    weights_out.export_timm(write_step(tmp_path, cfg, classes=wnids)[0], tmp_path / "out")
    about = json.loads((tmp_path / "out/config.json").read_text())["pretrained_cfg"]
    assert about["label_names"] == wnids
    assert about["label_descriptions"]["n01440764"] == "tench, Tinca tinca"
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert model.pretrained_cfg["label_descriptions"].keys() == set(wnids)
    weights_out.export_timm(write_step(tmp_path, cfg, step=4, classes=["n01440764", "a", "b"])[0], tmp_path / "other")
    about = json.loads((tmp_path / "other/config.json").read_text())["pretrained_cfg"]
    assert "label_descriptions" not in about


@pytest.mark.parametrize("form", ["timm", "hugging_face"])
def test_the_file_is_what_the_library_writes(stored_weights, tmp_path, form):
    """Byte for byte, so that its own reader and any other take it."""
    _, folder, _ = stored_weights
    getattr(weights_out, f"export_{form}")(folder / "step_00000012", tmp_path / "out")
    file = tmp_path / "out/model.safetensors"
    save_file(load_file(file), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert file.read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_a_block_at_a_time_is_read(stored_weights, tmp_path, monkeypatch):
    cfg, folder, tensors = stored_weights
    sizes, read = [], step_weights.load_tensors

    def noting(folder, nested):
        (part,) = nested.values()
        sizes.append(sum(tensor.numel() for tensor in part.values()))
        read(folder, nested)

    monkeypatch.setattr(step_weights, "load_tensors", noting)
    weights_out.export_timm(folder / "step_00000012", tmp_path / "out")
    names = [[name for name in tensors if name.startswith(f"blocks.{number}.")] for number in range(cfg.depth)]
    names.append([name for name in tensors if not name.startswith("blocks.")])
    assert sorted(sizes) == sorted(sum(tensors[name].numel() for name in group) for group in names)
