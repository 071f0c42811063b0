"""model=timm:<name>: the config that it stands for builds timm's model, with its weights."""

import launch

import json

import pytest
import timm
import torch
from conftest import error_of
from weight_files import drawn

import vit
from interop import timm_models, weights_in
from schema import pair

# Every part that differs among timm's plain ViTs: pools, tokens, norms, scales, activations, patches.
NAMES = [
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "deit_tiny_distilled_patch16_224.fb_in1k",
    "deit3_small_patch16_384.fb_in1k",
    "vit_base_patch16_clip_224.openai",
    "vit_small_patch14_reg4_dinov2.lvd142m",
    "vit_base_patch16_siglip_224.webli",
    "vit_little_patch16_reg4_gap_256.sbb_in1k",
    "vit_giant_patch14_dinov2.lvd142m",
    "vit_base_patch16_dinov3.lvd1689m",
    "eva02_small_patch14_336.mim_in22k_ft_in1k",
    "vit_relpos_medium_patch16_cls_224.sw_in1k",
    "vit_base_patch16_rpn_224.sw_in1k",
]


def composed(name, *overrides, base="finetune_any"):
    given = [*overrides[:1], f"model=timm:{name}", *overrides[1:]]
    return launch.load_config(base, ["data.path=unused", "output_dir=unused", *given], script="train_ddp")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stands_for_timms_model(name):
    cfg = composed(name, "model.num_classes=5", "checkpoint.save_final_model=false")
    assert cfg.checkpoint.init_from == f"timm:{name}"
    with torch.device("meta"):
        theirs, ours = timm.create_model(name, num_classes=5), vit.VisionTransformer(cfg.model)
    wanted = {key: tensor.shape for key, tensor in theirs.state_dict().items()}
    assert {key: tensor.shape for key, tensor in ours.state_dict().items()} == wanted
    settings = theirs.pretrained_cfg
    assert pair(cfg.model.img_size) == settings["input_size"][1:]
    for key in ("mean", "std"):
        assert getattr(cfg.data, key) == pytest.approx(settings[key])
    assert (cfg.data.crop_pct, cfg.data.interpolation) == (settings["crop_pct"], settings["interpolation"])
    if theirs.embed_dim == 192:  # and its logits
        theirs, ours = (drawn(each.to_empty(device="cpu")) for each in (theirs, ours))
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(1, 3, *pair(cfg.model.img_size), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-3)


def test_a_name_of_naflexvit_stands_for_rows_of_images():
    """Positions are a grid of 16 x 16, images have as many patches as one of 384 x 384."""
    name = "naflexvit_base_patch16_gap.e300_s576_in1k"
    cfg = composed(name, "model.num_classes=5")
    with torch.device("meta"):
        theirs, ours = timm.create_model(name, num_classes=5), vit.VisionTransformer(cfg.model)
    found = weights_in.from_naflex(theirs.state_dict())
    assert {key: tensor.shape for key, tensor in ours.state_dict().items()} == {k: t.shape for k, t in found.items()}
    assert cfg.checkpoint.init_from == f"timm:{name}"
    assert (cfg.model.img_size, cfg.model.norm_eps, cfg.data.mean) == ((256, 256), 1e-6, (0.5, 0.5, 0.5))
    assert (cfg.data.packing.enabled, cfg.patches_per_image()) == (True, 576)


def test_what_is_typed_beside_it_goes_first():
    name = NAMES[0]
    for base in ("finetune_any", "L0_sanity"):  # whose model and images are others
        cfg = composed(name, "model.img_size=384", "checkpoint.init_from=null", "data.crop_pct=1.0", base=base)
        assert (cfg.model.img_size, cfg.checkpoint.init_from, cfg.data.crop_pct) == (384, None, 1.0)
        assert (cfg.model.embed_dim, cfg.model.in_chans, cfg.model.patch_size) == (192, 3, (16, 16))


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("vit_tny_patch16_224", "timm has no such model: did you mean vit_tiny_patch16_224"),
        ("resnet50.a1_in1k", "it is a ResNet, no VisionTransformer or Eva"),
        ("vit_base_patch16_224.nothing", "timm has no such weights: use one of vit_base_patch16_224."),
        ("vit_tiny_r_s16_p8_224.augreg_in21k", "a convolutional network before the blocks (embed_layer), which vit.py"),
        (
            "naflexvit_base_patch16_par_gap.e300_s576_in1k",
            "other positions, blocks or layers (pos_embed_ar_preserving=True), which vit.py has not",
        ),
    ],
)
def test_a_model_that_is_none_of_ours_is_refused_by_name(name, fragment):
    line = error_of(composed, name)
    assert line.startswith(f"model=timm:{name}: ")
    assert fragment in line


def test_the_command_line_composes_it(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train_ddp.py"])
    arguments = [f"model=timm:{NAMES[0]}", "data.path=/x", "--config-name", "finetune_any"]
    cfg, typed = launch.compose("train_ddp", arguments)
    assert (cfg.model.embed_dim, cfg.data.mean, typed) == (192, (0.5, 0.5, 0.5), ["data.path"])
    assert json.loads(timm_models.overrides_of(NAMES[0])[1].split("=")[1]) == [224, 224]
