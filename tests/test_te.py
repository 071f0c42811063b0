"""TransformerEngine's blocks against plain ones: the same weights, the same function, names both ways. One GPU.

The parts that need no GPU (what happens without TransformerEngine, or with a broken one) run everywhere.
"""

import schema

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

import vit
from vit import VisionTransformer, timm_name

OPTIONS = [
    [],
    ["model.global_pool=avg", "model.class_token=false"],
    ["model.global_pool=map", "model.reg_tokens=4"],
    ["model.reg_tokens=4", "model.no_embed_class=true", "model.pre_norm=true"],
    ["model.qk_norm=true"],
    ["model.init_values=0.1"],
    ["model.qkv_bias=false", "model.proj_bias=false"],
    ["model.mlp_ratio=3.0", "model.norm_eps=1e-4"],
    ["model.img_size=[64,96]"],
    ["model.act_layer=relu"],
    ["model.act_layer=silu"],
    ["model.act_layer=quick_gelu"],
]
BASE = [
    *("model=vit_tiny_patch16_224", "model.img_size=96", "model.depth=3", "model.num_classes=16"),
    *("model.act_layer=gelu_tanh", "data.mean=[0.5]", "data.std=[0.5]", "output_dir=unused", "precision=bf16"),
    "checkpoint.save_final_model=false",
]
needs_te = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def build(*overrides, te, seed=0):
    cfg = schema.load_config("L0_sanity", [*BASE, *overrides, f"model.transformer_engine={str(te).lower()}"]).model
    with torch.device("cuda"):
        model = VisionTransformer(cfg)
    model.init_weights(seed)
    return model


def randomise(model, seed=1):
    """Values at which nothing hides: norms, biases, LayerScale and tokens away from 0 and 1. By timm's names."""
    for name, parameter in sorted(model.named_parameters(), key=lambda item: timm_name(item[0])):
        generator = torch.Generator("cuda").manual_seed(hash_of(timm_name(name), seed))
        noise = torch.randn(parameter.shape, device="cuda", generator=generator)
        parameter.data += (0.02 if parameter.ndim > 1 else 0.1) * noise


def hash_of(name, seed):
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31 + seed


def run(model, *, bf16, training=False):
    """Logits and gradients by timm's names, of one fixed batch."""
    generator = torch.Generator("cuda").manual_seed(0)
    size = schema.pair(model.cfg.img_size)
    images = torch.randn(8, 3, *size, device="cuda", generator=generator)
    labels = torch.randint(0, 16, (8,), device="cuda", generator=generator)
    model.train(training)
    torch.manual_seed(0)
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        logits = model(images).float()
    F.cross_entropy(logits, labels).backward()
    grads = {timm_name(name): p.grad.float() for name, p in model.named_parameters()}
    model.zero_grad()
    return logits.detach(), grads


def error(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("overrides", [pytest.param(o, marks=needs_te, id=",".join(o) or "plain") for o in OPTIONS])
def test_te_blocks_are_as_close_to_float32_as_plain_bf16_ones(overrides):
    """M04, M05: QKV order, mask, epsilon, activation, every option. Errors are against the float32 plain model."""
    plain, te = build(*overrides, te=False), build(*overrides, te=True)
    for model in (plain, te):
        randomise(model)
    names = {timm_name(name): p for name, p in te.named_parameters()}
    assert names.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        assert torch.equal(names[name], parameter), name
    torch.set_float32_matmul_precision("highest")
    want, want_grads = run(plain, bf16=False)
    bf16, bf16_grads = run(plain, bf16=True)
    got, got_grads = run(te, bf16=True)
    assert error(got, want) < max(2 * error(bf16, want), 1e-2)
    whole = torch.cat([g.flatten() for g in want_grads.values()]).norm()
    for name, want_grad in want_grads.items():
        assert got_grads[name].isfinite().all()
        allowed = 2 * (bf16_grads[name] - want_grad).norm() + 1e-2 * want_grad.norm() + 1e-3 * whole
        assert (got_grads[name] - want_grad).norm() < allowed, name
        assert got_grads[name].norm() > 0 or want_grad.norm() < 1e-3 * whole, name
    print(f"{overrides}: logits TE {error(got, want):.1e}, plain BF16 {error(bf16, want):.1e}")


@pytest.mark.parametrize("size", [pytest.param(224, marks=needs_te), pytest.param(384, marks=needs_te)])
def test_every_patch_reaches_the_class_token(size):
    """M05: full attention, not causal: the last patch changes the class token's logits."""
    model = build(f"model.img_size={size}", "model.global_pool=token", te=True).eval()
    images = torch.randn(2, 3, size, size, device="cuda")
    changed = images.clone()
    changed[:, :, -16:, -16:] += 3
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert (model(images) - model(changed)).abs().max() > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_drop_path_drops_whole_images_on_both_branches():
    """M07."""
    block = build("model.drop_path_rate=0.9", te=True).blocks[-1].train()
    x = torch.randn(64, 37, 192, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        y = block(x)
        assert torch.equal(block.eval()(x), block(x))
    untouched = (y == x).flatten(1).all(dim=1)
    partly = (y == x).flatten(1).any(dim=1) & ~untouched & ((y == x).flatten(1).float().mean(dim=1) > 0.5)
    assert 0.6 < untouched.float().mean() < 0.97  # both branches dropped: 0.9 ** 2
    assert not partly.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rate", ["proj_drop_rate", "attn_drop_rate"])
def test_dropouts_work_in_training_and_vanish_in_evaluation(rate):
    plain, te = build(te=True), build(f"model.{rate}=0.3", te=True)
    (want, _), (got, grads) = run(plain, bf16=True), run(te, bf16=True)
    assert error(got, want) < 2e-2
    assert error(run(te, bf16=True, training=True)[0], want) > 2e-2
    assert all(g.isfinite().all() for g in grads.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_te_model_equals_timms():
    """The whole way round: our TransformerEngine model's weights, strictly, into timm's model; BF16 logits agree."""
    from timm.models.vision_transformer import VisionTransformer as TimmViT

    model = build(te=True)
    randomise(model)
    timm_model = TimmViT(img_size=96, embed_dim=192, depth=3, num_heads=3, num_classes=16, act_layer="gelu_tanh")
    timm_model.load_state_dict({timm_name(name): p for name, p in model.named_parameters()}, strict=True)
    want, _ = run_timm(timm_model.cuda(), model.cfg)
    assert error(run(model, bf16=True)[0], want) < 2e-2


def run_timm(model, cfg):
    model.cfg = cfg
    return run(model, bf16=False)


def test_names_map_one_to_one():
    """M04: TransformerEngine's names, written down from version 2.20, cover timm's block exactly."""
    plain = VisionTransformer(schema.load_config("L0_sanity", ["output_dir=unused"]).model)
    block = {name.split(".", 2)[2] for name, _ in plain.named_parameters() if name.startswith("blocks.0.")}
    fused = ["attn.qkv.layer_norm_weight", "attn.qkv.layer_norm_bias", "attn.qkv.weight", "attn.qkv.bias"]
    fused += ["attn.proj.weight", "attn.proj.bias", "mlp.layer_norm_weight", "mlp.layer_norm_bias"]
    fused += ["mlp.fc1_weight", "mlp.fc1_bias", "mlp.fc2_weight", "mlp.fc2_bias"]
    mapped = [timm_name(f"module.blocks.3.{name}") for name in fused]
    assert len(set(mapped)) == len(fused)
    assert set(mapped) == {f"blocks.3.{name}" for name in block}


@pytest.mark.parametrize(
    ("stub", "expected"),
    [
        (None, "TransformerEngine is not installed: pip install"),
        ("raise OSError('libcudnn.so.9: wrong version\\nmore')", "its import fails: libcudnn.so.9: wrong version"),
        ("import a_module_that_is_not_there", "its import fails: No module named 'a_module_that_is_not_there'"),
    ],
)
def test_without_a_working_te_asking_for_it_is_one_line(tmp_path, stub, expected):
    """F05: everything imports, the plain paths work, and the message is the import's own first line."""
    if stub:
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine/__init__.py").write_text(stub)
    code = (
        f"import sys, vit\n{'' if stub else 'sys.modules[`transformer_engine`] = None'}\n".replace("`", "'")
        + "try: vit.transformer_engine()\nexcept ValueError as error: print(error)"
    )
    path = f"{tmp_path}:{ROOT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert expected in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1


def test_te_is_refused_by_name(monkeypatch):
    """X06: without CUDA; and F05: with an activation, a precision or a compiler that it does not go with."""
    te = ["output_dir=unused", "model.transformer_engine=true", "precision=bf16"]
    good = [*te, "model.act_layer=gelu_tanh"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(schema.ConfigError, match="needs a CUDA GPU"):
        schema.check_script(schema.load_config("L0_sanity", good), "train_ddp", 1)
    for overrides, match in (
        (te, "model.act_layer=gelu with"),
        ([*good, "precision=fp32"], "precision=fp32 with"),
        ([*good, "compile=true"], "compile=true with"),
    ):
        with pytest.raises(schema.ConfigError, match=match):
            schema.load_config("L0_sanity", overrides)
    assert vit.TE_ACTIVATIONS.keys() == {"gelu_tanh", "quick_gelu", "relu", "silu"}
