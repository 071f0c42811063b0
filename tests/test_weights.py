"""Weights in and out: what loads, is resampled or refused, and what timm and Hugging Face make of exports."""

import launch

import argparse
import functools
import json
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, run_command
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer as TimmViT
from timm.models.vision_transformer import checkpoint_filter_fn

import schema
from imagenet_dataset import eval_transform
from interop import weights_in, weights_out
from vit import VisionTransformer

SMALL = (
    "img_size=64 patch_size=16 in_chans=3 embed_dim=24 depth=2 num_heads=3 num_classes=7 "
    "global_pool=token class_token=true"
)
CLASSES = [f"class_{letter}" for letter in "abcdefg"]
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TOKENS = {  # options, and the rows of pos_embed that belong to tokens
    "class": ("", 1),
    "class, 4 registers": ("reg_tokens=4", 5),
    "none": ("class_token=false global_pool=avg", 0),
    "class, no_embed_class": ("no_embed_class=true", 0),
    "class, 4 registers, no_embed_class": ("no_embed_class=true reg_tokens=4", 0),
}
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


@functools.cache
def config(*overrides):
    return launch.load_config("L0_sanity", [*overrides, "output_dir=unused", "checkpoint.save_final_model=false"])


def small(overrides=""):
    """The config of a model that takes milliseconds; the later of two values counts."""
    return config(*(f"model.{item}" for item in f"{SMALL} {overrides}".split())).model


def plain(cfg):
    return json.loads(json.dumps({f.name: getattr(cfg, f.name) for f in fields(cfg)}))


@torch.no_grad()
def drawn(module, seed=0):
    """A module with values at which every parameter matters, ready to evaluate."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        if "norm" in name and name.endswith("weight"):
            p.copy_(1 + 0.2 * torch.randn(p.shape, generator=generator))
        else:
            p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if p.ndim != 2 else p.shape[1] ** -0.5))
    return module.eval()


def ours(cfg, seed=0):
    return drawn(VisionTransformer(cfg), seed)


def timms(cfg, seed=0):
    """timm's model of the same arguments."""
    return drawn(TimmViT(**weights_out.timm_arguments(vars(cfg)), num_classes=cfg.num_classes), seed)


def shapes(cfg):
    return {name: p.shape for name, p in VisionTransformer(cfg).named_parameters()}


def images(cfg, seed=1):
    size = schema.pair(cfg.img_size)
    return torch.randn(2, cfg.in_chans, *size, generator=torch.Generator().manual_seed(seed))


def write_step(folder, cfg, *, step=3, classes=CLASSES, seed=0, tensors=None, moments=1, **data):
    """A checkpoint of ours with `tensors`, or drawn ones, and an optimizer's state; its folder and the weights."""
    tensors = tensors or {name: p.detach() for name, p in ours(cfg, seed).named_parameters()}
    kept = {f"moment{k}": 7.0 + k for k in range(moments)}
    optim = {
        name: {key: torch.full_like(p, value) for key, value in kept.items()} | {"step": torch.tensor(3.0)}
        for name, p in tensors.items()
    }
    folder = folder / f"step_{step:08d}"
    dcp.save({"model": tensors, "optim": optim}, checkpoint_id=folder, no_dist=True)
    data = {"mean": MEAN, "std": STD, "interpolation": "bicubic", "crop_pct": 0.875} | data
    data = {"exif_orientation": False, "max_pixels": 10**8} | data
    state = {"step": step, "samples": 24 * step, "best": None, "model": plain(cfg), "classes": classes, "data": data}
    (folder / "state.json").write_text(json.dumps(state))
    return folder, tensors


def write_timm(folder, cfg, model):
    """A timm folder as timm's own hub code writes one."""
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    content = {"architecture": "vit_base_patch16_224", "num_classes": cfg.num_classes, "model_args": plain(cfg)}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def fitted(source, cfg):
    return weights_in.fit(weights_in.read(str(source)), cfg, shapes(cfg))


def assert_same(actual, expected):
    """Same names, and the same bits."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == torch.float32
        assert torch.equal(actual[name], value), name


def refusal(call, *arguments):
    """The one line of a ConfigError."""
    with pytest.raises(schema.ConfigError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A small model's config, its checkpoints folder with two steps, of which the second counts, and the weights."""
    folder, cfg = tmp_path_factory.mktemp("checkpoints"), small()
    write_step(folder, cfg, step=3, seed=5)
    _, tensors = write_step(folder, cfg, step=12)
    (folder / "step_00000020").mkdir()  # cut off: no state.json
    return cfg, folder, tensors


# --- position and patch embeddings (M01, M02)


def from_timms_filter(cfg, tensors):
    """What timm makes of weights for a model of this config."""
    return checkpoint_filter_fn(dict(tensors), timms(cfg, seed=9))


@pytest.mark.parametrize("kind", ["a checkpoint", "a file", "a timm folder"])
@pytest.mark.parametrize(("options", "prefix"), TOKENS.values(), ids=TOKENS)
def test_64_pixels_become_96_as_in_timm(options, prefix, kind, tmp_path):
    before, after = small(options), small(f"{options} img_size=96")
    source, tensors = write_step(tmp_path, before)
    if kind == "a file":
        source = tmp_path / "weights.pth"
        torch.save(tensors, source)
    elif kind == "a timm folder":
        source = write_timm(tmp_path, before, ours(before))
    result, fresh = fitted(source, after)
    expected = from_timms_filter(after, tensors)
    assert fresh == []
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, atol=1e-6, rtol=0)
    assert result["pos_embed"].shape == (1, prefix + 36, 24)
    assert torch.equal(result["pos_embed"][:, :prefix], tensors["pos_embed"][:, :prefix])
    assert {name for name in result if not torch.equal(result[name], tensors[name])} == {"pos_embed"}


@pytest.mark.parametrize(("size", "grid"), [("[32,128]", (2, 8)), ("[128,32]", (8, 2))])
def test_equal_numbers_of_patches_are_resampled_by_height_and_width(size, grid, tmp_path):
    before, after = small(f"img_size={size}"), small("img_size=64")
    folder, tensors = write_step(tmp_path, before)
    assert weights_in.read(str(folder)).grid == grid
    result, _ = fitted(folder, after)
    old = tensors["pos_embed"]
    assert result["pos_embed"].shape == old.shape
    assert torch.equal(result["pos_embed"][:, :1], old[:, :1])
    assert not torch.allclose(result["pos_embed"][:, 1:], old[:, 1:], atol=0.1)
    image = old[0, 1:].T.reshape(1, 24, *grid)  # 1 D Y X
    expected = torch.nn.functional.interpolate(image, (4, 4), mode="bicubic", antialias=True).flatten(2).mT
    torch.testing.assert_close(result["pos_embed"][:, 1:], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("grid", ["[32,128]", "64"])
def test_the_same_grid_is_copied(grid, tmp_path):
    cfg = small(f"img_size={grid}")
    folder, tensors = write_step(tmp_path, cfg)
    torch.save(tensors, tmp_path / "weights.pt")  # of an unknown grid: with as many rows, the model's
    for source in (folder, tmp_path / "weights.pt"):
        assert_same(fitted(source, cfg)[0], tensors)


def test_a_grid_nobody_tells_is_a_square_or_refused(tmp_path):
    _, square = write_step(tmp_path, small("img_size=96"))
    torch.save(square, tmp_path / "square.pt")
    result, _ = fitted(tmp_path / "square.pt", small("img_size=[32,64]"))
    expected = resample_abs_pos_embed(square["pos_embed"], [2, 4], [6, 6], num_prefix_tokens=1)
    torch.testing.assert_close(result["pos_embed"], expected, atol=1e-6, rtol=0)

    _, rectangle = write_step(tmp_path, small("img_size=[32,64]"), step=4)
    torch.save(rectangle, tmp_path / "rectangle.pt")
    line = refusal(fitted, tmp_path / "rectangle.pt", small())
    assert line.startswith(f"checkpoint.init_from={tmp_path}/rectangle.pt: its pos_embed has 9 rows")
    assert "config.json" in line


@pytest.mark.parametrize("kind", ["a checkpoint", "a file"])
@pytest.mark.parametrize(("was", "now"), [("true", "false"), ("false", "true")])
def test_positions_of_tokens_are_neither_dropped_nor_made_up(was, now, kind, tmp_path):
    source, tensors = write_step(tmp_path, small(f"no_embed_class={was} reg_tokens=4"))
    if kind == "a file":
        source = tmp_path / "weights.pt"
        torch.save(tensors, source)
    line = refusal(fitted, source, small(f"no_embed_class={now} reg_tokens=4"))
    assert line.endswith(f"set model.no_embed_class={was}")


@pytest.mark.parametrize("patch", ["8", "[8,16]"])
def test_another_patch_size_is_resampled_as_in_timm(patch, tmp_path):
    before, after = small(), small(f"patch_size={patch} img_size=96")
    folder, tensors = write_step(tmp_path, before)
    result, _ = fitted(folder, after)
    for name, value in from_timms_filter(after, tensors).items():
        torch.testing.assert_close(result[name], value, atol=1e-6, rtol=0)


# --- what loads, and what does not (M09, M10)


def wrapped(tensors, prefix):
    return {prefix + name: value for name, value in tensors.items()}


@pytest.mark.parametrize(
    "nest", [(), ("model",), ("state_dict",), ("model_state_dict",), ("module",), ("state_dict", "model")]
)
@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module.model."]
)
def test_prefixes_and_nestings_load(stored, nest, prefix, tmp_path):
    cfg, _, tensors = stored
    content = wrapped(tensors, prefix)
    for key in reversed(nest):
        content = {key: content, "epoch": 3, "args": argparse.Namespace(lr=0.1), "optimizer": {"state": {}}}
    torch.save(content, tmp_path / "weights.pth.tar")
    result, fresh = fitted(tmp_path / "weights.pth.tar", cfg)
    assert_same(result, tensors)
    assert fresh == []


def test_blocks_compiled_one_by_one_load(stored, tmp_path):
    cfg, _, tensors = stored
    torch.save({name.replace("blocks.0.", "blocks.0._orig_mod."): v for name, v in tensors.items()}, tmp_path / "w.pt")
    assert_same(fitted(tmp_path / "w.pt", cfg)[0], tensors)


def test_two_models_in_one_state_dict_are_refused(stored, tmp_path):
    cfg, _, tensors = stored
    torch.save({**tensors, **wrapped(tensors, "module.")}, tmp_path / "w.pt")
    assert "twice" in refusal(fitted, tmp_path / "w.pt", cfg)


def test_a_missing_an_unexpected_and_a_reshaped_tensor_are_named(stored, tmp_path):
    cfg, _, tensors = stored
    file = tmp_path / "w.safetensors"
    bias = "blocks.1.attn.qkv.bias"
    save_file({name: value for name, value in tensors.items() if name != bias}, file)
    line = refusal(fitted, file, cfg)
    assert line.startswith(f"checkpoint.init_from={file}: ")
    assert f"1 missing ({bias})" in line
    assert "1 unexpected" not in line

    save_file({**tensors, "blocks.0.ls1.gamma": torch.ones(24)}, file)
    assert "1 unexpected (blocks.0.ls1.gamma)" in refusal(fitted, file, cfg)
    save_file({**tensors, "norm.weight": torch.ones(25)}, file)
    assert "1 of another shape (norm.weight [25] for [24])" in refusal(fitted, file, cfg)
    save_file({**tensors, "pos_embed": torch.ones(1, 17, 48)}, file)  # its rows may differ, its width may not
    assert "1 of another shape (pos_embed [1, 17, 48] for [1, 17, 24])" in refusal(fitted, file, cfg)
    save_file({**tensors, "patch_embed.proj.weight": torch.ones(24, 1, 16, 16)}, file)
    assert "1 of another shape (patch_embed.proj.weight" in refusal(fitted, file, cfg)
    save_file(wrapped(tensors, "encoder."), file)
    line = refusal(fitted, file, cfg)
    assert (
        f"{len(tensors) - 2} missing (cls_token, pos_embed, patch_embed.proj.weight, ...)" in line
    )  # all but the head
    assert f"{len(tensors)} unexpected (encoder." in line


def test_heads_go_by_the_names_of_classes(stored):
    """D03: another order is put right, other names of the same number are other classes."""
    cfg, folder, tensors = stored
    source = weights_in.read(str(folder))
    assert source.classes == tuple(CLASSES)
    swapped = (CLASSES[6], *CLASSES[1:6], CLASSES[0])
    result, fresh = weights_in.fit(source, cfg, shapes(cfg), swapped)
    assert fresh == []
    for name in ("head.weight", "head.bias"):
        assert torch.equal(result[name], tensors[name][[6, 1, 2, 3, 4, 5, 0]])
    assert weights_in.fit(source, cfg, shapes(cfg), ("another", *CLASSES[1:]))[1] == ["head.weight", "head.bias"]
    assert_same(weights_in.fit(source, cfg, shapes(cfg), tuple(CLASSES))[0], tensors)


@pytest.mark.parametrize("num_classes", [3, 7])
def test_the_head_alone_may_stay_fresh_for_other_classes(stored, num_classes):
    _, folder, tensors = stored
    result, fresh = fitted(folder, small(f"num_classes={num_classes}"))
    assert fresh == ([] if num_classes == 7 else ["head.weight", "head.bias"])
    assert_same(result, {name: value for name, value in tensors.items() if name not in fresh})


def test_a_source_without_a_head_leaves_it_fresh_half_a_head_does_not(stored, tmp_path):
    cfg, _, tensors = stored
    body = {name: value for name, value in tensors.items() if not name.startswith("head.")}
    torch.save(body, tmp_path / "w.pt")
    result, fresh = fitted(tmp_path / "w.pt", cfg)
    assert fresh == ["head.weight", "head.bias"]
    assert_same(result, body)
    for half, other in (("head.weight", "head.bias"), ("head.bias", "head.weight")):
        torch.save({**body, half: tensors[half]}, tmp_path / "w.pt")
        assert f"1 missing ({other})" in refusal(fitted, tmp_path / "w.pt", cfg)


def test_half_precision_becomes_float32(stored, tmp_path):
    cfg, _, tensors = stored
    halves = {name: value.bfloat16() for name, value in tensors.items()}
    save_file(halves, tmp_path / "w.safetensors")
    assert_same(fitted(tmp_path / "w.safetensors", cfg)[0], {name: value.float() for name, value in halves.items()})


def test_another_number_of_heads_is_refused_another_activation_is_said(stored, caplog):
    _, folder, _ = stored
    assert refusal(fitted, folder, small("num_heads=4")).endswith("set model.num_heads=3")
    fitted(folder, small("act_layer=gelu_tanh"))
    assert "model.act_layer=gelu, this run has gelu_tanh" in caplog.text


# --- kinds of sources


def test_a_checkpoint_loads_from_its_folder_or_the_one_above(stored):
    cfg, folder, tensors = stored
    for source in (folder / "step_00000012", folder):
        read = weights_in.read(str(source))
        assert_same(read.weights, tensors)  # and nothing of the optimizer's
        assert read.grid == (4, 4)
        assert str(source) in read.description
        assert "step_00000012" in read.description
        assert_same(fitted(source, cfg)[0], tensors)


def test_a_checkpoint_becomes_a_torch_file_by_torchs_own_tool(stored, tmp_path):
    cfg, folder, tensors = stored
    command = ["-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", folder / "step_00000012"]
    done = run_command([*command, tmp_path / "w.pt"])
    assert done.returncode == 0, done.stderr
    assert_same(torch.load(tmp_path / "w.pt", weights_only=True)["model"], tensors)
    assert_same(fitted(tmp_path / "w.pt", cfg)[0], tensors)


def test_torchs_old_format_loads(stored, tmp_path):
    cfg, _, tensors = stored
    torch.save({"model": tensors}, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert_same(fitted(tmp_path / "w.pth", cfg)[0], tensors)


def test_safetensors_take_their_grid_from_the_config_beside_them(tmp_path):
    cfg = small("img_size=[32,128]")
    model = timms(cfg)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert weights_in.read(str(tmp_path / "model.safetensors")).grid is None
    write_timm(tmp_path, cfg, model)
    for source in (tmp_path, tmp_path / "model.safetensors", f"local-dir:{tmp_path}"):
        assert weights_in.read(str(source)).grid == (2, 8)
    # A release of timm's gives no model_args.
    (tmp_path / "config.json").write_text('{"architecture": "vit", "pretrained_cfg": {"input_size": [3, 32, 128]}}')
    assert weights_in.read(str(tmp_path)).grid == (2, 8)
    (tmp_path / "config.json").write_text('{"architecture": "vit", "pretrained_cfg": {"input_size": [3, 32, 32]}}')
    assert "config.json" in refusal(fitted, tmp_path, cfg)  # of other weights


@pytest.mark.parametrize("options", ["", "reg_tokens=4 global_pool=map init_values=0.1 qk_norm=true", "fc_norm=true"])
def test_timms_weights_come_in_and_go_out_bit_for_bit(options, tmp_path):
    cfg = small(options)
    model = timms(cfg)
    result, fresh = fitted(write_timm(tmp_path, cfg, model), cfg)
    assert fresh == []
    assert_same(result, model.state_dict())
    mine = VisionTransformer(cfg).eval()
    mine.load_state_dict(result)
    with torch.inference_mode():
        torch.testing.assert_close(mine(images(cfg)), model(images(cfg)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k"])
def test_a_timm_model_is_read_by_its_name(name, monkeypatch, tmp_path):
    """The download stands in for timm's: its cache is asked for a file that we put there."""
    cfg = small("img_size=224 patch_size=16 embed_dim=192 depth=12 num_classes=1000")
    model = timms(cfg)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    create = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda *a, **k: create(*a, **k, pretrained_cfg_overlay={"file": str(tmp_path / "w.pth")})
    )
    torch.manual_seed(0)
    before = torch.get_rng_state()
    source = weights_in.read(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert source.grid == (14, 14)
    # Of that model's, and not ImageNet's usual ones.
    augreg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "crop_pct": 0.9, "interpolation": "bicubic"}
    assert source.data == augreg
    result, fresh = weights_in.fit(source, cfg, shapes(cfg))
    assert fresh == []
    assert_same(result, model.state_dict())


def test_what_weights_were_evaluated_with_is_told_if_this_run_does_otherwise(tmp_path):
    """V01: of our checkpoints and exports, timm's folders, and Hugging Face's with their processor."""
    cfg = small()
    step, _ = write_step(tmp_path, cfg, crop_pct=0.9)
    weights_out.export_timm(step, tmp_path / "timm")
    weights_out.export_hugging_face(step, tmp_path / "hf")
    kept = ["model.in_chans=3", f"data.std={STD}", "data.crop_pct=0.9", "data.max_pixels=100000000"]
    same = config(f"data.mean={MEAN}", "data.interpolation=bicubic", *kept).data
    other = config("data.mean=[0.5]", "data.interpolation=bilinear", *kept).data
    for source, found in (
        (step, [f"data.mean={MEAN}", "data.interpolation=bicubic"]),
        (tmp_path / "timm", [f"data.mean={MEAN}", "data.interpolation=bicubic"]),
        (tmp_path / "hf", [f"data.mean={MEAN}"]),
    ):
        assert weights_in.other_settings(weights_in.read(str(source)), same) == []
        assert sorted(weights_in.other_settings(weights_in.read(str(source)), other)) == sorted(found)


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("nowhere/at.pt", "there is no such file or folder"),
        ("vit_bse_patch16_224", "did you mean timm:vit_base_patch16_224"),
        ("timm:vit_bse_patch16_224", "did you mean vit_base_patch16_224"),
        ("timm:vit_tiny_patch16_224.nonsense", "use one of vit_tiny_patch16_224.augreg_in21k"),
    ],
)
def test_a_source_that_is_not_there_is_refused(source, fix):
    line = refusal(weights_in.read, source)
    assert line.startswith(f"checkpoint.init_from={source}: ")
    assert fix in line


def cut(file):
    """Leaves the first twentieth: half a checkpoint's file may hold all weights, and lack optimizer state only."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 20])


@pytest.mark.parametrize(
    "name", ["w.pt", "old.pt", "w.safetensors", "folder", "folder/config.json", "checkpoint", "metadata", "state"]
)
def test_a_damaged_source_is_refused_in_one_line(name, tmp_path):
    cfg = small()
    checkpoint, tensors = write_step(tmp_path, cfg)
    torch.save(tensors, tmp_path / "w.pt")
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(tensors, tmp_path / "w.safetensors")
    (tmp_path / "folder").mkdir()
    write_timm(tmp_path / "folder", cfg, timms(cfg))
    damaged = {
        "folder": tmp_path / "folder/model.safetensors",
        "checkpoint": next(checkpoint.glob("*.distcp")),
        "metadata": checkpoint / ".metadata",
        "state": checkpoint / "state.json",
    }
    source = {
        "checkpoint": checkpoint,
        "metadata": checkpoint,
        "state": checkpoint,
        "folder/config.json": tmp_path / "folder",
    }
    source = source.get(name, tmp_path / name)
    weights_in.read(str(source))
    cut(damaged.get(name, tmp_path / name))
    line = refusal(weights_in.read, str(source))
    assert line.startswith(f"checkpoint.init_from={source}: ")
    assert "cannot be read" in line


class Code:
    """Something that torch.save stores with the weights, and that only running code could bring back."""


def test_what_is_no_weights_is_refused(stored, tmp_path):
    _, _, tensors = stored
    (tmp_path / "w.txt").write_text("weights")
    assert "rename it" in refusal(weights_in.read, str(tmp_path / "w.txt"))
    (tmp_path / "empty").mkdir()
    assert "neither a complete step_XXXXXXXX nor" in refusal(weights_in.read, str(tmp_path / "empty"))
    torch.save({"model": tensors, "what": Code()}, tmp_path / "w.pt")
    assert "Code, which is more than weights" in refusal(weights_in.read, str(tmp_path / "w.pt"))
    for content in (list(tensors.values()), {}, {"epoch": 3}, {"model": 3}, {**tensors, "norm.weight": 3}):
        torch.save(content, tmp_path / "w.pt")
        assert "torch.save the model's state_dict()" in refusal(weights_in.read, str(tmp_path / "w.pt"))
    (tmp_path / "w.pt").write_bytes(b"no torch file")
    assert "cannot be read" in refusal(weights_in.read, str(tmp_path / "w.pt"))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "deit"}')
    assert "model_type=deit" in refusal(weights_in.read, str(tmp_path))
    state = json.loads((stored[1] / "step_00000012/state.json").read_text())
    del state["data"]
    folder, _ = write_step(tmp_path, small())
    (folder / "state.json").write_text(json.dumps(state))
    assert "no 'data'" in refusal(weights_out.export_timm, folder, tmp_path / "out")


# --- exports (E01 to E03)


@torch.inference_mode()
def logits(model, x):
    result = model(x)
    return getattr(result, "logits", result)


def plain_file(folder):
    """The tensors of an export, as plain safetensors read them."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert not [
        name for name in tensors if "module" in name or "_orig_mod" in name or name.startswith(("model.", "optim."))
    ]
    assert {p.name for p in folder.parent.iterdir()} >= {folder.name}
    assert not list(folder.parent.glob("*.tmp"))
    return tensors


@pytest.mark.parametrize(
    "options",
    [
        "",
        "reg_tokens=4 global_pool=avg init_values=0.1 qk_norm=true",
        "global_pool=map class_token=false act_layer=gelu_tanh",
        "no_embed_class=true pre_norm=true fc_norm=true proj_bias=false qkv_bias=false",
        "img_size=[32,64] patch_size=[8,16] in_chans=1 act_layer=silu mlp_ratio=2.6",
    ],
)
def test_timm_computes_our_logits_from_the_export(options, tmp_path):
    cfg = small(options)
    channels = {"mean": [0.3], "std": [0.2]} if cfg.in_chans == 1 else {}
    folder, tensors = write_step(tmp_path, cfg, **channels)
    weights_out.export_timm(folder, tmp_path / "out")
    assert_same(plain_file(tmp_path / "out"), tensors)
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
    assert_same(fitted(tmp_path / "out", cfg)[0], tensors)  # and back
    weights_out.export_timm(folder, tmp_path / "out")  # again, over the first one
    assert_same(plain_file(tmp_path / "out"), tensors)


def test_timm_refuses_other_norms_by_name(tmp_path):
    folder, _ = write_step(tmp_path, small("norm_eps=1e-5"))
    assert refusal(weights_out.export_timm, folder, tmp_path / "out").startswith(
        "model.norm_eps=1e-05 cannot be exported"
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
    assert_same(weights_in.fit(source, cfg, shapes(cfg))[0], tensors)


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
        assert_same(hugging_face(tmp_path / "out").state_dict(), theirs.state_dict())

    body = theirs.vit  # its names have no vit. before them; a pooler is left out
    with_pooler = transformers.ViTModel(configuration)
    with_pooler.load_state_dict({**with_pooler.state_dict(), **body.state_dict()})
    with_pooler.save_pretrained(tmp_path / "body")
    torch.save(with_pooler.state_dict(), tmp_path / "body.pth")
    for source in ("body", "body.pth"):
        bare, fresh = fitted(tmp_path / source, cfg)
        assert fresh == ["head.weight", "head.bias"]
        assert_same(bare, {name: value for name, value in result.items() if name not in fresh})

    tensors = load_file(tmp_path / "body/model.safetensors")
    del tensors["encoder.layer.1.attention.attention.key.bias"]
    save_file(tensors, tmp_path / "body/model.safetensors")
    line = refusal(fitted, tmp_path / "body", cfg)
    assert "1 missing (blocks.1.attn.qkv.bias), 2 unexpected" in line.replace("; ", ", ")


@pytest.mark.parametrize("option", NOT_HUGGING_FACE)
def test_what_hugging_face_lacks_is_refused_by_name(option, tmp_path):
    folder, _ = write_step(tmp_path, small(f"{option} {NOT_HUGGING_FACE[option]}"))
    line = refusal(weights_out.export_hugging_face, folder, tmp_path / "out")
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


# --- the tool


def test_the_tool_says_what_it_wrote(stored, tmp_path):
    _, folder, tensors = stored
    done = run_command([ROOT / "tools/convert_checkpoint.py", folder, tmp_path / "out", "--format", "timm"])
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"wrote {tmp_path}/out (timm, ")
    assert line.endswith(f"from {folder}/step_00000012")
    assert_same(plain_file(tmp_path / "out"), tensors)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("checkpoints there --format hugging-face", "there is there already"),
        ("there new --format timm", "there is no complete step_XXXXXXXX folder"),
        ("registers new --format hugging-face", "model.reg_tokens=4"),
        ("damaged new --format timm", "cannot be read"),
        ("checkpoints new --format onnx", "invalid choice: 'onnx'"),
        ("checkpoints new", "--format"),
    ],
)
def test_the_tool_complains_in_one_line(arguments, complaint, stored, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("checkpoints").symlink_to(stored[1])
    write_step(Path("registers"), small("reg_tokens=4"))
    damaged, _ = write_step(Path("damaged"), small())
    cut(damaged / ".metadata")
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *arguments.split()])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / "tools/convert_checkpoint.py"), run_name="__main__")
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert complaint in line
    assert not list(Path("there").iterdir())
    assert not Path("new").exists()


def test_export_takes_the_memory_of_the_weights_alone(tmp_path):
    """X11: no optimizer state is read, and weights are not copied once more. 50 MiB of weights, five times in all."""
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
