"""Weights from elsewhere: what loads, is resampled or refused."""

import argparse
import json
import logging
import shutil

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
import torch.distributed.checkpoint as dcp
from conftest import error_of, rng_untouched, run_command
from safetensors.torch import load_file, save_file
from test_vit import BLOCKS
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table
from timm.models import load_state_dict
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import checkpoint_filter_fn
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from weight_files import (
    CLASSES,
    MEAN,
    STD,
    assert_same_bits,
    config,
    cut_off,
    fitted,
    images,
    ours,
    shapes,
    small,
    timms,
    write_jax,
    write_step,
    write_timm,
)

from interop import weights_in, weights_out
from vit import VisionTransformer

TOKENS = {  # options, and the rows of pos_embed that belong to tokens
    "class": ("", 1),
    "class, 4 registers": ("reg_tokens=4", 5),
    "none": ("class_token=false global_pool=avg", 0),
    "class, no_embed_class": ("no_embed_class=true", 0),
    "class, 4 registers, no_embed_class": ("no_embed_class=true reg_tokens=4", 0),
}

JAX_MODELS = {  # options of the model, what comes before the names of its arrays, whether all layers are in one
    "vision_transformer": ("", "", False),
    "with a hidden layer": ("representation_size=40", "", False),
    "of a whole train state": ("", "opt/target/", False),
    "big_vision, class token": ("no_embed_class=true", "params/", False),
    "big_vision, mean": ("class_token=false global_pool=avg fc_norm=false", "params/", False),
    "SigLIP": ("class_token=false global_pool=map", "params/img/", True),
}


# --- position and patch embeddings


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
        assert_same_bits(fitted(source, cfg)[0], tensors)


def test_a_grid_nobody_tells_is_a_square_or_refused(tmp_path):
    _, square = write_step(tmp_path, small("img_size=96"))
    torch.save(square, tmp_path / "square.pt")
    result, _ = fitted(tmp_path / "square.pt", small("img_size=[32,64]"))
    expected = resample_abs_pos_embed(square["pos_embed"], [2, 4], [6, 6], num_prefix_tokens=1)
    torch.testing.assert_close(result["pos_embed"], expected, atol=1e-6, rtol=0)

    _, rectangle = write_step(tmp_path, small("img_size=[32,64]"), step=4)
    torch.save(rectangle, tmp_path / "rectangle.pt")
    line = error_of(fitted, tmp_path / "rectangle.pt", small())
    assert line.startswith(f"checkpoint.init_from={tmp_path}/rectangle.pt: its pos_embed has 9 rows")
    assert "config.json" in line


@pytest.mark.parametrize("kind", ["a checkpoint", "a file"])
@pytest.mark.parametrize(("was", "now"), [("true", "false"), ("false", "true")])
def test_positions_of_tokens_are_neither_dropped_nor_made_up(was, now, kind, tmp_path):
    source, tensors = write_step(tmp_path, small(f"no_embed_class={was} reg_tokens=4"))
    if kind == "a file":
        source = tmp_path / "weights.pt"
        torch.save(tensors, source)
    line = error_of(fitted, source, small(f"no_embed_class={now} reg_tokens=4"))
    assert line.endswith(f"set model.no_embed_class={was}")


@pytest.mark.parametrize("patch", ["8", "[8,16]"])
def test_another_patch_size_is_resampled_as_in_timm(patch, tmp_path):
    before, after = small(), small(f"patch_size={patch} img_size=96")
    folder, tensors = write_step(tmp_path, before)
    result, _ = fitted(folder, after)
    for name, value in from_timms_filter(after, tensors).items():
        torch.testing.assert_close(result[name], value, atol=1e-6, rtol=0)


def write_naflex(folder, cfg, **options):
    """A folder of timm's with a NaFlexVit, as the hub has it, and the model."""
    folder.mkdir()
    model = NaFlexVit(
        **{key: getattr(cfg, key) for key in ("patch_size", "embed_dim", "depth", "num_heads", "num_classes")},
        **{key: getattr(cfg, key) for key in ("class_token", "global_pool", "in_chans")},
        pos_embed_grid_size=cfg.grid_size(),
        **options,
    )
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return model


@pytest.mark.parametrize("sizes", ["img_size=[32,64]", "patch_size=8 img_size=32 in_chans=1"])
def test_naflexvits_positions_and_patches_are_told_by_their_shapes(sizes, tmp_path):
    cfg = small(f"{sizes} no_embed_class=true")
    theirs = write_naflex(tmp_path / "naflex", cfg)
    # Of its own images: larger than the grid of its positions.
    about = {"architecture": "naflexvit_base_patch16_gap", "pretrained_cfg": {"input_size": [3, 384, 384]}}
    (tmp_path / "naflex/config.json").write_text(json.dumps(about))
    result, fresh = fitted(tmp_path / "naflex", cfg)
    assert fresh == []
    assert_same_bits(result, weights_in.from_naflex(theirs.state_dict()))
    rows, columns = cfg.grid_size()
    table = theirs.embeds.pos_embed.detach()
    assert torch.equal(result["pos_embed"], table.view(1, rows * columns, -1))
    model = VisionTransformer(cfg).eval()
    model.load_state_dict(result)
    x = images(cfg)
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs.eval()(x), rtol=0, atol=1e-5)
    line = error_of(fitted, tmp_path / "naflex", small(sizes))
    assert line.endswith("set model.no_embed_class=true")


def test_naflexvits_other_positions_are_refused(tmp_path):
    """No tensor shows how they are resampled."""
    cfg = small("no_embed_class=true")
    write_naflex(tmp_path / "naflex", cfg, pos_embed_ar_preserving=True)
    (tmp_path / "naflex/config.json").write_text(json.dumps({"architecture": "naflexvit_base_patch16_par_gap"}))
    line = error_of(fitted, tmp_path / "naflex", cfg)
    assert "its pos_embed_ar_preserving is True, vit.py resamples positions with False: give other weights" in line


# --- what loads, and what does not


def wrapped(tensors, prefix):
    return {prefix + name: value for name, value in tensors.items()}


@pytest.mark.parametrize(
    "nest", [(), ("model",), ("state_dict",), ("model_state_dict",), ("module",), ("state_dict", "model")]
)
@pytest.mark.parametrize(
    "prefix",
    ["", "module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module.model.", "_fsdp_wrapped_module."],
)
def test_prefixes_and_nestings_load(stored_weights, nest, prefix, tmp_path):
    cfg, _, tensors = stored_weights
    content = wrapped(tensors, prefix)
    for key in reversed(nest):
        content = {key: content, "epoch": 3, "args": argparse.Namespace(lr=0.1), "optimizer": {"state": {}}}
    torch.save(content, tmp_path / "weights.pth.tar")
    result, fresh = fitted(tmp_path / "weights.pth.tar", cfg)
    assert_same_bits(result, tensors)
    assert fresh == []


@pytest.mark.parametrize(
    "wrapper",
    [
        "_orig_mod",
        "_checkpoint_wrapped_module",
        "_fsdp_wrapped_module",
        "_fsdp_wrapped_module._checkpoint_wrapped_module",
    ],
)
def test_blocks_wrapped_one_by_one_load(stored_weights, wrapper, tmp_path):
    cfg, _, tensors = stored_weights
    torch.save({name.replace("blocks.0.", f"blocks.0.{wrapper}."): v for name, v in tensors.items()}, tmp_path / "w.pt")
    assert_same_bits(fitted(tmp_path / "w.pt", cfg)[0], tensors)


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema", "ema_state_dict", "model_ema_state_dict", "ema"])
@pytest.mark.parametrize("raw", ["state_dict", "model", None])
def test_averages_are_taken_where_a_file_has_them_and_that_is_said(stored_weights, key, raw, tmp_path):
    """As from our own checkpoints; timm's loader, of the keys that it knows, does the same."""
    cfg, _, tensors = stored_weights
    averages = {name: value + 1 for name, value in tensors.items()}
    file = tmp_path / "w.pth"
    torch.save({"epoch": 5, "ema_decay": 0.99, raw or "args": tensors if raw else {}, key: averages}, file)
    assert_same_bits(fitted(file, cfg)[0], averages)
    assert weights_in.read(str(file)).description == f"{file} (EMA weights, {key})"
    if key in ("state_dict_ema", "model_ema"):
        assert_same_bits(load_state_dict(file), averages)
    torch.save({"epoch": 5, raw or "model": tensors, key: None, "ema_model": {}}, file)  # averaging was off
    assert_same_bits(fitted(file, cfg)[0], tensors)
    assert weights_in.read(str(file)).description == str(file)


@pytest.mark.parametrize("kind", ["a checkpoint", "a file", "a timm folder"])
def test_rotary_positions_follow_the_size_and_their_options_must_be_the_same(kind, tmp_path):
    """Nothing in the weights tells them."""
    rope = "rope_type=dinov3 rope_rotate_half=true pos_embed=none attn_type=eva init_values=0.1 reg_tokens=4"
    before, after = small(rope), small(f"{rope} img_size=96")
    source, tensors = write_step(tmp_path, before)
    if kind == "a file":
        source = tmp_path / "weights.pth"
        torch.save(tensors, source)
    elif kind == "a timm folder":
        source = write_timm(tmp_path, before, ours(before))
    result, fresh = fitted(source, after)
    assert fresh == []
    assert_same_bits(result, tensors)
    others = {"rope_type": "cat", "rope_rotate_half": "false", "rope_temperature": "10.0", "rope_grid_indexing": "xy"}
    theirs = {
        "rope_type": "dinov3",
        "rope_rotate_half": "true",
        "rope_temperature": "100.0",
        "rope_grid_indexing": "ij",
    }
    for key, value in others.items():
        if kind != "a file":
            line = error_of(fitted, source, small(f"{rope} {key}={value}"))
            assert line.endswith(f"set model.{key}={theirs[key]}")


def test_timms_own_eva_tells_its_rotary_positions():
    theirs = timm.create_model("eva02_tiny_patch14_224", depth=1)
    assert weights_in._source_of(theirs, "it").options == {
        "num_heads": 3,
        "block_fn": "Block",
        "rope_type": "cat",
        "rope_grid_offset": 0.0,
        "rope_grid_indexing": "ij",
        "rope_temperature": 10000.0,
        "rope_rotate_half": False,
        "ref_feat_shape": (16, 16),
    }


def test_norms_after_the_branches_are_told_by_nothing_in_the_weights(tmp_path):
    """But by our checkpoints, by timm's names and its models."""
    before, after = small(), small("block_fn=ResPostBlock")
    for one, other in ((before, after), (after, before)):
        folder, _ = write_step(tmp_path / one.block_fn, one)
        (tmp_path / one.block_fn / "timm").mkdir()
        for source in (folder, write_timm(tmp_path / one.block_fn / "timm", one, ours(one))):
            fitted(source, one)
            assert error_of(fitted, source, other).endswith(f"set model.block_fn={one.block_fn}")
        assert weights_in._source_of(timms(one), "it").options["block_fn"] == one.block_fn
    for name, kind in (("eva02_enormous_patch14_clip_224", "ResPostBlock"), ("vit_base_patch16_224", "Block")):
        write_timm(tmp_path, before, ours(before))  # timm's own releases name the architecture alone
        (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
        assert weights_in.read(str(tmp_path)).options["block_fn"] == kind


@pytest.mark.parametrize("token", ["true", "false"])
def test_a_table_of_relative_positions_is_resampled_as_in_timm(token, tmp_path):
    text = f"rel_pos_type=bias pos_embed=none class_token={token} global_pool=avg"
    before, after = small(text), small(f"{text} img_size=[96,64]")
    source, tensors = write_step(tmp_path, before)
    result, fresh = fitted(source, after)
    assert fresh == []
    rows = 11 * 7 + 3 * (token == "true")
    name = "blocks.1.attn.rel_pos.relative_position_bias_table"
    assert result[name].shape == (rows, 3)
    torch.testing.assert_close(result[name], resize_rel_pos_bias_table(tensors[name], (6, 4), (rows, 3)))
    assert_same_bits(fitted(source, before)[0], tensors)
    source, _ = write_step(tmp_path / "other", after)
    assert "are for no square of patches" in error_of(fitted, source, before)
    assert "are for no square of patches" in error_of(fitted, source, small(f"{text} img_size=[64,96]"))


def test_torchs_averaged_model_loads(stored_weights, tmp_path):
    """Beside the weights under a name of their own, as torchvision's scripts save it, and alone."""
    cfg, _, tensors = stored_weights
    state = torch.optim.swa_utils.AveragedModel(ours(cfg)).state_dict()
    assert "n_averaged" in state
    other = {name: value + 1 for name, value in tensors.items()}
    for content in (state, {"model": other, "model_ema": state}):
        torch.save(content, tmp_path / "w.pth")
        assert_same_bits(fitted(tmp_path / "w.pth", cfg)[0], tensors)


def test_a_file_of_several_models_is_refused_by_their_names(stored_weights, tmp_path):
    cfg, _, tensors = stored_weights
    for keys in (("state_dict_ema", "model_ema"), ("model", "state_dict")):
        torch.save(dict.fromkeys(keys, tensors) | {"module": 3}, tmp_path / "w.pt")
        line = error_of(fitted, tmp_path / "w.pt", cfg)
        assert line.endswith(f": it holds {keys[0]} and {keys[1]}: torch.save the one that you mean alone")
    torch.save({"model": tensors, "ema": {"decay": 0.9, "shadow": tensors}}, tmp_path / "w.pt")
    assert "it holds the keys decay, shadow, not tensors by name" in error_of(fitted, tmp_path / "w.pt", cfg)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_number_that_is_none_is_named(stored_weights, number, tmp_path):
    cfg, _, tensors = stored_weights
    broken = tensors["blocks.1.mlp.fc1.weight"].clone()
    broken[3, 4:6] = float(number)
    file = tmp_path / "w.safetensors"
    save_file(tensors | {"blocks.1.mlp.fc1.weight": broken}, file)
    line = error_of(fitted, file, cfg)
    assert line.startswith(f"checkpoint.init_from={file}: 2 of the 2304 numbers in blocks.1.mlp.fc1.weight are NaN or")
    head = tensors["head.weight"] * float(number)  # of other classes, which this run does not take
    save_file(tensors | {"head.weight": head}, file)
    assert fitted(file, small("num_classes=5"))[1] == ["head.weight", "head.bias"]


def test_two_models_in_one_state_dict_are_refused(stored_weights, tmp_path):
    cfg, _, tensors = stored_weights
    torch.save({**tensors, **wrapped(tensors, "module.")}, tmp_path / "w.pt")
    assert "twice" in error_of(fitted, tmp_path / "w.pt", cfg)


def test_a_missing_an_unexpected_and_a_reshaped_tensor_are_named(stored_weights, tmp_path):
    cfg, _, tensors = stored_weights
    file = tmp_path / "w.safetensors"
    bias = "blocks.1.attn.qkv.bias"
    save_file({name: value for name, value in tensors.items() if name != bias}, file)
    line = error_of(fitted, file, cfg)
    assert line.startswith(f"checkpoint.init_from={file}: ")
    assert f"1 missing ({bias})" in line
    assert "1 unexpected" not in line

    save_file({**tensors, "blocks.0.ls1.gamma": torch.ones(24)}, file)
    assert "1 unexpected (blocks.0.ls1.gamma)" in error_of(fitted, file, cfg)
    save_file({**tensors, "norm.weight": torch.ones(25)}, file)
    assert "1 of another shape (norm.weight [25] for [24])" in error_of(fitted, file, cfg)
    save_file({**tensors, "pos_embed": torch.ones(1, 17, 48)}, file)  # its rows may differ, its width may not
    assert "1 of another shape (pos_embed [1, 17, 48] for [1, 17, 24])" in error_of(fitted, file, cfg)
    save_file({**tensors, "patch_embed.proj.weight": torch.ones(24, 1, 16, 16)}, file)
    assert "1 of another shape (patch_embed.proj.weight" in error_of(fitted, file, cfg)
    save_file(wrapped(tensors, "encoder."), file)
    line = error_of(fitted, file, cfg)
    assert (
        f"{len(tensors) - 2} missing (cls_token, pos_embed, patch_embed.proj.weight, ...)" in line
    )  # all but the head
    assert f"{len(tensors)} unexpected (encoder." in line


def test_heads_go_by_the_names_of_classes(stored_weights):
    """Another order is put right, other names of the same number are other classes."""
    cfg, folder, tensors = stored_weights
    source = weights_in.read(str(folder))
    assert source.classes == tuple(CLASSES)
    swapped = (CLASSES[6], *CLASSES[1:6], CLASSES[0])
    result, fresh = weights_in.fit(source, cfg, shapes(cfg), swapped)
    assert fresh == []
    for name in ("head.weight", "head.bias"):
        assert torch.equal(result[name], tensors[name][[6, 1, 2, 3, 4, 5, 0]])
    assert weights_in.fit(source, cfg, shapes(cfg), ("another", *CLASSES[1:]))[1] == ["head.weight", "head.bias"]
    assert_same_bits(weights_in.fit(source, cfg, shapes(cfg), tuple(CLASSES))[0], tensors)


def test_both_heads_of_a_distilled_model_go_and_stay_together(tmp_path):
    """Through a checkpoint and timm's folder of it, to other classes and another image size."""
    cfg = small("distilled=true")
    folder, tensors = write_step(tmp_path / "own", cfg)
    weights_out.export_timm(folder, tmp_path / "timms")
    assert timm.create_model(f"local-dir:{tmp_path / 'timms'}", pretrained=True).head_dist.out_features == 7
    heads = ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]
    for source in (folder, tmp_path / "timms"):
        result, fresh = fitted(source, cfg)
        assert fresh == []
        assert_same_bits(result, tensors)
        result, fresh = fitted(source, small("distilled=true num_classes=5 img_size=96"))
        assert fresh == heads
        assert not set(heads) & set(result)
        assert result["pos_embed"].shape[1] == 2 + 36
        torch.testing.assert_close(result["pos_embed"][:, :2], tensors["pos_embed"][:, :2], rtol=0, atol=0)
        swapped = (CLASSES[1], CLASSES[0], *CLASSES[2:])
        result, _ = weights_in.fit(weights_in.read(str(source)), cfg, shapes(cfg), swapped)
        for name in heads:
            assert torch.equal(result[name][0], tensors[name][1]), name
    assert "dist_token" in error_of(fitted, folder, small())


@pytest.mark.parametrize("num_classes", [3, 7])
def test_the_head_alone_may_stay_fresh_for_other_classes(stored_weights, num_classes):
    _, folder, tensors = stored_weights
    result, fresh = fitted(folder, small(f"num_classes={num_classes}"))
    assert fresh == ([] if num_classes == 7 else ["head.weight", "head.bias"])
    assert_same_bits(result, {name: value for name, value in tensors.items() if name not in fresh})


def test_a_source_without_a_head_leaves_it_fresh_half_a_head_does_not(stored_weights, tmp_path):
    cfg, _, tensors = stored_weights
    body = {name: value for name, value in tensors.items() if not name.startswith("head.")}
    torch.save(body, tmp_path / "w.pt")
    result, fresh = fitted(tmp_path / "w.pt", cfg)
    assert fresh == ["head.weight", "head.bias"]
    assert_same_bits(result, body)
    for half, other in (("head.weight", "head.bias"), ("head.bias", "head.weight")):
        torch.save({**body, half: tensors[half]}, tmp_path / "w.pt")
        assert f"1 missing ({other})" in error_of(fitted, tmp_path / "w.pt", cfg)


def test_half_precision_becomes_float32(stored_weights, tmp_path):
    cfg, _, tensors = stored_weights
    halves = {name: value.bfloat16() for name, value in tensors.items()}
    save_file(halves, tmp_path / "w.safetensors")
    assert_same_bits(
        fitted(tmp_path / "w.safetensors", cfg)[0], {name: value.float() for name, value in halves.items()}
    )


def test_another_number_of_heads_is_refused_another_activation_is_said(stored_weights, caplog):
    _, folder, _ = stored_weights
    assert error_of(fitted, folder, small("num_heads=4")).endswith("set model.num_heads=3")
    fitted(folder, small("act_layer=gelu_tanh"))
    assert "model.act_layer=gelu, this run has gelu_tanh" in caplog.text


# --- kinds of sources


def test_a_checkpoint_loads_from_its_folder_or_the_one_above(stored_weights):
    cfg, folder, tensors = stored_weights
    for source in (folder / "step_00000012", folder):
        read = weights_in.read(str(source))
        assert_same_bits(read.weights, tensors)  # and nothing of the optimizer's
        assert read.grid == (4, 4)
        assert str(source) in read.description
        assert "step_00000012" in read.description
        assert_same_bits(fitted(source, cfg)[0], tensors)


@pytest.mark.slow
def test_a_checkpoint_becomes_a_torch_file_by_torchs_own_tool(stored_weights, tmp_path):
    cfg, folder, tensors = stored_weights
    command = ["-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", folder / "step_00000012"]
    done = run_command([*command, tmp_path / "w.pt"])
    assert done.returncode == 0, done.stderr
    assert_same_bits(torch.load(tmp_path / "w.pt", weights_only=True)["model"], tensors)
    assert_same_bits(fitted(tmp_path / "w.pt", cfg)[0], tensors)


@pytest.mark.parametrize("nest", [None, "model", "state_dict"])
@pytest.mark.parametrize("way", ["torch_save_to_dcp", "dcp.save"])
def test_a_folder_of_dcp_that_is_none_of_ours_loads(stored_weights, way, nest, tmp_path, caplog):
    """By torch's converter and by its own call: tensors alone, or nested among objects and an optimizer's state."""
    cfg, _, tensors = stored_weights
    content = wrapped(tensors, "_orig_mod.")
    if nest:
        content = {
            nest: content,
            "epoch": 3,
            "args": argparse.Namespace(lr=0.1),
            "optimizer": {"exp_avg": [*tensors.values()]},
        }
    if way == "dcp.save":
        dcp.save(content, checkpoint_id=tmp_path / "w", no_dist=True)
    else:
        torch.save(content, tmp_path / "w.pt")
        with torch.serialization.safe_globals([argparse.Namespace]):
            torch_save_to_dcp(tmp_path / "w.pt", tmp_path / "w")
    result, fresh = fitted(tmp_path / "w", cfg)
    assert_same_bits(result, tensors)
    assert fresh == []
    assert fitted(tmp_path / "w", small("img_size=96"))[0]["pos_embed"].shape == (1, 37, 24)


def test_averages_in_a_folder_of_dcp_go_first_and_others_are_refused(stored_weights, tmp_path):
    cfg, _, tensors = stored_weights
    averages = {name: value + 1 for name, value in tensors.items()}
    dcp.save({"model": tensors, "ema": averages, "epoch": 3}, checkpoint_id=tmp_path / "w", no_dist=True)
    assert_same_bits(fitted(tmp_path / "w", cfg)[0], averages)
    assert weights_in.read(str(tmp_path / "w")).description == f"{tmp_path}/w (EMA weights, ema)"
    dcp.save({"net": tensors, "epoch": 3}, checkpoint_id=tmp_path / "other", no_dist=True)
    assert "it holds the keys net, not tensors by name" in error_of(weights_in.read, str(tmp_path / "other"))
    dcp.save({"epoch": 3}, checkpoint_id=tmp_path / "none", no_dist=True)
    assert "not tensors by name" in error_of(weights_in.read, str(tmp_path / "none"))
    next((tmp_path / "w").glob("*.distcp")).unlink()
    assert f"{tmp_path}/w cannot be read" in error_of(weights_in.read, str(tmp_path / "w"))


def test_torchs_old_format_loads(stored_weights, tmp_path):
    cfg, _, tensors = stored_weights
    torch.save({"model": tensors}, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert_same_bits(fitted(tmp_path / "w.pth", cfg)[0], tensors)


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
    assert "config.json" in error_of(fitted, tmp_path, cfg)  # of other weights


@pytest.mark.parametrize(
    "options", ["", "reg_tokens=4 global_pool=map init_values=0.1 qk_norm=true", "fc_norm=true", *BLOCKS.values()]
)
def test_timms_weights_come_in_and_go_out_bit_for_bit(options, tmp_path):
    cfg = small(options)
    model = timms(cfg)
    result, fresh = fitted(write_timm(tmp_path, cfg, model), cfg)
    assert fresh == []
    assert_same_bits(result, model.state_dict())
    mine = VisionTransformer(cfg).eval()
    mine.load_state_dict(result)
    with torch.inference_mode():
        torch.testing.assert_close(mine(images(cfg)), model(images(cfg)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("options", "prefix", "is_stacked"), JAX_MODELS.values(), ids=JAX_MODELS)
def test_weights_of_googles_jax_code_are_those_that_timm_reads(options, prefix, is_stacked, tmp_path):
    """timm's loader into timm's model of these options, which the file's own arrays have to tell."""
    cfg = small(options)
    write_jax(tmp_path / "B_16.npz", cfg, prefix=prefix, is_stacked=is_stacked)
    want = timms(cfg)
    want.head = torch.nn.Linear(cfg.representation_size or cfg.embed_dim, cfg.num_classes)
    want.load_pretrained(str(tmp_path / "B_16.npz"))
    with rng_untouched():
        source = weights_in.read(str(tmp_path / "B_16.npz"))
    assert source.grid == (4, 4)
    assert source.options == {"num_heads": 3, "block_fn": "Block"}
    result, fresh = weights_in.fit(source, cfg, shapes(cfg))
    assert fresh == []
    if cfg.representation_size:  # which timm's loader leaves alone
        with np.load(tmp_path / "B_16.npz") as arrays:
            assert np.array_equal(result.pop("pre_logits.fc.weight"), arrays["pre_logits/kernel"].T)
            assert np.array_equal(result.pop("pre_logits.fc.bias"), arrays["pre_logits/bias"])
    assert_same_bits(result, want.state_dict())
    larger = small(f"{options} img_size=96 num_classes=5")
    assert fitted(tmp_path / "B_16.npz", larger)[0]["pos_embed"].shape == shapes(larger)["pos_embed"]


def test_another_npz_file_is_refused_by_what_it_holds(tmp_path):
    file = tmp_path / "B_16.npz"
    np.savez(file, cls=np.zeros((1, 1, 24)), names=np.array("no weights"))
    line = error_of(weights_in.read, str(file))
    assert line.startswith(f"checkpoint.init_from={file}: it holds the arrays cls, names, and no embedding/kernel")
    np.savez(file, **{"embedding/kernel": np.array(Code())})  # a pickle within
    assert "Object arrays cannot be loaded" in error_of(weights_in.read, str(file))
    write_jax(file, small(), extra={"conv_root/kernel": np.zeros((7, 7, 3, 64))})
    assert "a plain ViT of its sizes" in error_of(weights_in.read, str(file))
    cut_off(file)
    assert f"{file} cannot be read" in error_of(weights_in.read, str(file))


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
    assert_same_bits(result, model.state_dict())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function that puts a folder into the cache of the Hugging Face hub, which is all that its library may read."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def put(folder, name):
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        shutil.copytree(folder, repository / "snapshots/0123")
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text("0123")

    return put


def test_a_model_of_the_hub_is_read_by_its_name(hub, tmp_path):
    """Hugging Face's, with its classes and its processor; one in a pickle; timm's, as a folder and through timm."""
    cfg = small()
    step, tensors = write_step(tmp_path, cfg)
    weights_out.export_hugging_face(step, tmp_path / "hf")
    weights_out.export_timm(step, tmp_path / "timm")
    hub(tmp_path / "hf", "google/vit-small.patch16")
    source = weights_in.read("google/vit-small.patch16")
    assert source.classes == tuple(CLASSES)
    assert source.data == {"mean": MEAN, "std": STD}
    assert source.options == {"num_heads": 3, "act_layer": "gelu", "norm_eps": 1e-6}
    assert_same_bits(fitted("google/vit-small.patch16", cfg)[0], tensors)

    torch.save(load_file(tmp_path / "hf/model.safetensors"), tmp_path / "hf/pytorch_model.bin")
    for name in ("model.safetensors", "preprocessor_config.json"):
        (tmp_path / "hf" / name).unlink()
    hub(tmp_path / "hf", "owner/pickled")
    assert_same_bits(fitted("owner/pickled", cfg)[0], tensors)

    hub(tmp_path / "timm", "timm/vit_small")
    for name in ("timm/vit_small", "hf-hub:timm/vit_small"):
        with rng_untouched():
            assert weights_in.read(name).classes == tuple(CLASSES)
        assert_same_bits(fitted(name, cfg)[0], tensors)


def test_a_hub_out_of_reach_is_one_line(hub, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    library, download = logging.getLogger("huggingface_hub"), huggingface_hub.hf_hub_download

    def try_again(*arguments):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 8s")
        return download(*arguments)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", try_again)
    monkeypatch.setattr(library, "handlers", [caplog.handler])
    before = library.level
    line = error_of(weights_in.read, "google/vit-base-patch16-224")
    start = (
        "checkpoint.init_from=google/vit-base-patch16-224: there is no such file or folder, and of the Hugging Face hub"
    )
    assert line.startswith(f"{start} it cannot be read (LocalEntryNotFoundError: ")
    assert line.endswith(": get it on a network, or give a file or a folder")
    line = error_of(weights_in.read, "hf-hub:timm/vit_tiny_patch16_224.augreg_in21k")
    assert line.startswith(
        "checkpoint.init_from=hf-hub:timm/vit_tiny_patch16_224.augreg_in21k: it cannot be read (Local"
    )
    assert caplog.messages == []
    assert library.level == before
    (tmp_path / "runs").mkdir()  # so this is meant for a path
    assert "there is no such file or folder, and timm has" in error_of(weights_in.read, "runs/large")


def test_what_weights_were_evaluated_with_is_told_if_this_run_does_otherwise(tmp_path):
    """Of our checkpoints and exports, timm's folders, and Hugging Face's with their processor."""
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
    line = error_of(weights_in.read, source)
    assert line.startswith(f"checkpoint.init_from={source}: ")
    assert fix in line


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
    cut_off(damaged.get(name, tmp_path / name))
    line = error_of(weights_in.read, str(source))
    assert line.startswith(f"checkpoint.init_from={source}: ")
    assert "cannot be read" in line


class Code:
    """Something that torch.save stores with the weights, and that only running code could bring back."""


def test_what_is_no_weights_is_refused(stored_weights, tmp_path):
    _, _, tensors = stored_weights
    (tmp_path / "w.txt").write_text("weights")
    assert "rename it" in error_of(weights_in.read, str(tmp_path / "w.txt"))
    (tmp_path / "empty").mkdir()
    assert "neither a complete step_XXXXXXXX nor" in error_of(weights_in.read, str(tmp_path / "empty"))
    torch.save({"model": tensors, "what": Code()}, tmp_path / "w.pt")
    assert "Code, which is more than weights" in error_of(weights_in.read, str(tmp_path / "w.pt"))
    for content in (list(tensors.values()), {}, {"epoch": 3}, {"model": 3}, {**tensors, "norm.weight": 3}):
        torch.save(content, tmp_path / "w.pt")
        assert "torch.save the model's state_dict()" in error_of(weights_in.read, str(tmp_path / "w.pt"))
    (tmp_path / "w.pt").write_bytes(b"no torch file")
    assert "cannot be read" in error_of(weights_in.read, str(tmp_path / "w.pt"))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "deit"}')
    assert "model_type=deit" in error_of(weights_in.read, str(tmp_path))
    state = json.loads((stored_weights[1] / "step_00000012/state.json").read_text())
    del state["data"]
    folder, _ = write_step(tmp_path, small())
    (folder / "state.json").write_text(json.dumps(state))
    assert "no 'data'" in error_of(weights_out.export_timm, folder, tmp_path / "out")
