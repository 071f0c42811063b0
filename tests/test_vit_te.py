"""TransformerEngine's blocks against plain ones: the same weights, the same function, names both ways; FP8. One GPU.

The parts that need no GPU (what happens without TransformerEngine, or with a broken one) run everywhere.
"""

import launch

import fnmatch
import functools
import itertools
import json
import re
import subprocess
import sys

import pytest
import stand_in_te
import torch
import torch.nn.functional as F
from conftest import ON_GPU, ROOT, TINY, column, error_of, run_tasks, task_of

import schema
import train_ddp
import train_fsdp2
import vit_te
from modeling import build_model, prepare_blocks
from runtime.parameter_names import timm_name
from vit import VisionTransformer

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
    ["model.img_size=[128,128]", "model.global_pool=avg", "model.class_token=false"],  # 64 tokens: attention by torch
    ["model.act_layer=relu"],
    ["model.act_layer=silu"],
    ["model.act_layer=quick_gelu"],
]
BASE = [
    *("model.num_classes=16", "model.in_chans=3", "precision=bf16", "model.act_layer=gelu_tanh"),
    *("data.mean=[0.5]", "data.std=[0.5]", "output_dir=unused", "checkpoint.save_final_model=false"),
]
SMALL = ["model=vit_tiny_patch16_224", "model.img_size=96", "model.depth=3", *BASE]
# Sets of the options that came later, `schema.TE_OPTIONS`.
SILU, HALF = "act_layer=silu", "rope_type=dinov3 rope_rotate_half=true pos_embed=none"
LATER = {
    "dinov3": f"{HALF} act_layer=gelu attn_type=eva init_values=0.1 reg_tokens=4 norm_eps=1e-5 dynamic_img_size=true",
    "dinov3_bare": f"{HALF} act_layer=gelu attn_type=eva qkv_bias=false global_pool=avg patch_drop_rate=0.5",
    "eva02": (
        "rope_type=cat ref_feat_shape=16 rope_temperature=10000.0 attn_type=eva qkv_fused=false mlp_layer=swiglu "
        f"{SILU} scale_mlp_norm=true scale_attn_norm=true global_pool=avg mlp_ratio=2.66667"
    ),
    "perception_encoder": (
        "rope_type=cat rope_grid_indexing=xy rope_grid_offset=1.0 act_layer=gelu pre_norm=true global_pool=map "
        "attn_pool_num_heads=4 attn_pool_mlp_ratio=2.0"
    ),
    "mixed": (
        f"rope_type=mixed rope_temperature=10.0 pos_embed=none mlp_layer=swiglu swiglu_align_to=32 {SILU} "
        "mlp_ratio=2.6 patch_drop_rate=0.25 dynamic_img_size=true"
    ),
    "sapiens2": (
        f"{HALF} norm_layer=rmsnorm qk_norm=true qkv_fused=false num_kv_heads=[3,1] mlp_layer=glu {SILU} "
        "init_values=1.0 attn_only_layer_scale=true reg_tokens=8"
    ),
    "grouped_64_tokens": (
        "rope_type=cat act_layer=gelu qkv_fused=false num_heads=6 num_kv_heads=2 class_token=false global_pool=avg "
        "img_size=[128,128] scale_mlp_norm=true"
    ),
    "no_rotation": "attn_type=eva act_layer=gelu qkv_fused=false init_values=0.1 no_embed_class=true final_norm=false",
    "glu": f"mlp_layer=glu {SILU} mlp_ratio=5.33334 init_values=0.1 dynamic_img_size=true",
    "glu_with_norms": f"mlp_layer=glu {SILU} mlp_ratio=5.33334 scale_mlp_norm=true scale_attn_norm=true qk_norm=true",
    "rmsnorm": "norm_layer=rmsnorm qk_norm=true scale_attn_norm=true pos_embed=none global_pool=map",
    "dropout": f"{HALF} act_layer=gelu proj_drop_rate=0.2 attn_drop_rate=0.2 drop_path_rate=0.2",
}
FP8 = {
    "delayed": [],
    "current": ["fp8_config.fp8_recipe=Float8CurrentScaling"],
    "block": ["fp8_config.fp8_recipe=Float8BlockScaling"],
}
CALM = [name for name in LATER if name != "dropout"]
needs_te = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
on_sizes = pytest.mark.parametrize("model", [pytest.param(m, marks=needs_te) for m in ("base_patch16", "huge_patch14")])
on_recipes = pytest.mark.parametrize("recipe", [pytest.param(name, marks=needs_te) for name in FP8])


def later(name):
    """The overrides of one of `LATER`."""
    return ["model.depth=2", *(f"model.{item}" for item in LATER[name].split())]


def build(*overrides, te, seed=0, base=SMALL, device="cuda"):
    cfg = launch.load_config("L0_sanity", [*base, *overrides, f"model.transformer_engine={str(te).lower()}"])
    with torch.device(device):
        model = build_model(cfg.model, cfg.fp8_config)
    model.init_weights(seed)
    return model


def randomise(model, seed=1):
    """Values at which nothing hides: norms, biases, LayerScale and tokens away from 0 and 1. By timm's names."""
    for name, parameter in sorted(model.named_parameters(), key=lambda item: timm_name(item[0])):
        generator = torch.Generator(parameter.device).manual_seed(hash_of(timm_name(name), seed))
        noise = torch.randn(parameter.shape, device=parameter.device, generator=generator)
        parameter.data += (0.02 if parameter.ndim > 1 else 0.1) * noise


def hash_of(name, seed):
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31 + seed


def run(model, *, bf16, training=False, images=8, size=None):
    """Logits and gradients by timm's names, of one fixed batch."""
    device = model.head.weight.device
    generator = torch.Generator(device).manual_seed(0)
    size = size or schema.pair(model.cfg.img_size)
    images = torch.randn(images, 3, *size, device=device, generator=generator)
    labels = torch.randint(0, 16, (len(images),), device=device, generator=generator)
    model.train(training)
    torch.manual_seed(0)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        logits = model(images).float()
    F.cross_entropy(logits, labels).backward()
    grads = {timm_name(name): p.grad.float() for name, p in model.named_parameters()}
    model.zero_grad()
    return logits.detach(), grads


def error(got, want):
    return ((got - want).norm() / want.norm()).item()


def whole_norm(tensors):
    return torch.stack([t.norm() for t in tensors]).norm()


def total_error(got, want):
    """Of all gradients as one vector."""
    return (whole_norm([got[name] - want[name] for name in want]) / whole_norm(want.values())).item()


@pytest.fixture(autouse=True)
def free_memory():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@on_sizes
@pytest.mark.parametrize("overrides", OPTIONS, ids=lambda o: ",".join(o) or "plain")
def test_te_blocks_are_as_close_to_float32_as_plain_bf16_ones(model, overrides):
    """QKV order, mask, epsilon, activation, every option. Errors are against the float32 plain model."""
    base = [f"model=vit_{model}_224", *BASE]
    if model == "huge_patch14":
        overrides = [o.replace("[64,96]", "[56,84]").replace("[128,128]", "[112,112]") for o in overrides]
    plain, te = build(*overrides, te=False, base=base), build(*overrides, te=True, base=base)
    for each in (plain, te):
        randomise(each)
    names = {timm_name(name): p for name, p in te.named_parameters()}
    assert names.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        assert torch.equal(names[name], parameter), name
    torch.set_float32_matmul_precision("highest")
    want, want_grads = run(plain, bf16=False)
    bf16, bf16_grads = run(plain, bf16=True)
    got, got_grads = run(te, bf16=True)
    print(
        f"{model} {','.join(overrides) or 'plain'}: logits TE {error(got, want):.1e} plain {error(bf16, want):.1e}, "
        f"gradients TE {total_error(got_grads, want_grads):.1e} plain {total_error(bf16_grads, want_grads):.1e}"
    )
    assert error(got, want) < max(2 * error(bf16, want), 1e-2)
    assert total_error(got_grads, want_grads) < 1.5 * total_error(bf16_grads, want_grads)
    whole = whole_norm(want_grads.values())
    for name, want_grad in want_grads.items():
        assert got_grads[name].isfinite().all()
        allowed = 2 * (bf16_grads[name] - want_grad).norm() + 1e-2 * want_grad.norm() + 1e-3 * whole
        assert (got_grads[name] - want_grad).norm() < allowed, name
        assert got_grads[name].norm() > 0 or want_grad.norm() < 1e-3 * whole, name


@on_sizes
@pytest.mark.parametrize("recipe", FP8)
def test_fp8_is_as_far_from_float32_as_eight_bits_are(model, recipe):
    """The third pass, when delayed scaling knows its scales. Every tensor has a gradient, of the right size."""
    base = [f"model=vit_{model}_224", *BASE]
    plain, fp8 = build(te=False, base=base), build("fp8_config.enabled=true", *FP8[recipe], te=True, base=base)
    for each in (plain, fp8):
        randomise(each)
    torch.set_float32_matmul_precision("highest")
    want, want_grads = run(plain, bf16=False)
    for _ in range(3):
        got, got_grads = run(fp8, bf16=True, training=True)
    errors = error(got, want), total_error(got_grads, want_grads)
    print(f"{model} FP8 {recipe}: logits {errors[0]:.1e}, gradients {errors[1]:.1e}")
    assert 1e-2 < errors[0] < 0.25
    assert errors[1] < 0.35
    whole = whole_norm(want_grads.values())
    for name, want_grad in want_grads.items():
        if want_grad.norm() > 1e-2 * whole:
            assert (got_grads[name].norm() / want_grad.norm()).item() == pytest.approx(1, abs=0.2), name


def sizes_of(model):
    """Sizes of images that it takes."""
    return [None, (64, 112)] if model.cfg.dynamic_img_size else [None]


def layers_by_timms_names(model, kinds, split):
    """Those of TransformerEngine's `kinds`; its MLP in one, `split`, by the names of both its linear layers."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    return {
        full: module
        for name, module in found.items()
        for full in ((f"{name}.fc1", f"{name}.fc2") if isinstance(module, split) else (name,))
    }


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_te) for name in CALM])
def test_later_options_on_a_gpu(name):
    """As close to float32 as plain BF16 blocks, patches dropped alike and images of another size among it."""
    plain, te = build(*later(name), te=False), build(*later(name), te=True)
    names = {timm_name(given): p for given, p in te.named_parameters()}
    assert names.keys() == dict(plain.named_parameters()).keys()
    for given, parameter in plain.named_parameters():
        assert torch.equal(names[given], parameter), given
    for each in (plain, te):
        randomise(each)
    torch.set_float32_matmul_precision("highest")
    for size in sizes_of(plain):
        want, want_grads = run(plain, bf16=False, training=True, size=size)
        bf16, bf16_grads = run(plain, bf16=True, training=True, size=size)
        got, got_grads = run(te, bf16=True, training=True, size=size)
        errors = {"TE": (error(got, want), total_error(got_grads, want_grads))}
        errors["plain"] = error(bf16, want), total_error(bf16_grads, want_grads)
        print(f"{name} {size}: logits and gradients {errors}")
        assert errors["TE"][0] < max(2 * errors["plain"][0], 1e-2), errors
        assert errors["TE"][1] < max(2 * errors["plain"][1], 1e-2), errors
        whole = whole_norm(want_grads.values())
        for given, want_grad in want_grads.items():
            allowed = 3 * (bf16_grads[given] - want_grad).norm() + 2e-2 * want_grad.norm() + 1e-3 * whole
            assert (got_grads[given] - want_grad).norm() < allowed, given
            assert got_grads[given].norm() > 0 or want_grad.norm() < 1e-3 * whole, given


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_later_options_with_dropout_on_a_gpu():
    """Each kind drops in training alone, and all gradients are finite."""
    plain, te = build(*later("dropout"), te=False), build(*later("dropout"), te=True)
    (want, _), (got, grads) = run(plain, bf16=True), run(te, bf16=True)
    assert error(got, want) < 2e-2
    assert error(run(te, bf16=True, training=True)[0], want) > 2e-2
    assert all(g.isfinite().all() for g in grads.values())


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_te) for name in CALM])
def test_later_options_in_fp8(name, recipe):
    """As far from float32 as eight bits are; each layer is in FP8, with scales of its own; the loss falls."""
    plain = build(*later(name), te=False)
    fp8 = build(*later(name), "fp8_config.enabled=true", *FP8[recipe], te=True)
    for each in (plain, fp8):
        randomise(each)
    torch.set_float32_matmul_precision("highest")
    want, want_grads = run(plain, bf16=False, training=True)
    for _ in range(4):  # delayed scaling gets to know its scales
        got, got_grads = run(fp8, bf16=True, training=True)
    bf16, _ = run(plain, bf16=True, training=True)
    errors = error(got, want), total_error(got_grads, want_grads)
    print(f"{name} FP8 {recipe}: logits {errors[0]:.1e} (BF16 {error(bf16, want):.1e}), gradients {errors[1]:.1e}")
    assert errors[0] < 0.25
    assert errors[1] < 0.35
    assert error(got, bf16) > 1e-3
    engine = vit_te.transformer_engine()
    kinds = engine.LayerNormLinear | engine.Linear | engine.LayerNormMLP
    layers = layers_by_timms_names(fp8, kinds, engine.LayerNormMLP)
    assert layers.keys() == linear_layers(plain)
    assert all(layer.fp8 for layer in layers.values())
    states = {given.rpartition(".")[0] for given in fp8.scaling}
    assert states == ({n for n, m in fp8.named_modules() if isinstance(m, kinds)} if recipe == "delayed" else set())
    for given in states:
        assert (fp8.scaling[f"{given}.scale_fwd"] != 1).sum() >= 2, given  # input and weight
        assert (fp8.scaling[f"{given}.scale_bwd"] != 1).any(), given
        assert all((fp8.scaling[f"{given}.amax_history_{way}"] > 0).any() for way in ("fwd", "bwd")), given
    for size in sizes_of(plain)[1:]:  # rows that are filled up
        assert error(run(fp8, bf16=True, images=3, size=size)[0], run(plain, bf16=False, images=3, size=size)[0]) < 0.25
    optimizer = torch.optim.AdamW(fp8.parameters(), lr=1e-3)
    images, labels = torch.randn(8, 3, *schema.pair(fp8.cfg.img_size), device="cuda"), torch.arange(8, device="cuda")
    losses = []
    for _ in range(10):
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(fp8.train()(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1, losses


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_parts_of_later_layers_in_fp8_on_a_gpu():
    """One of three projections, one of a gate's two matrices: they alone are in FP8, recomputed or not."""
    patterns = 'fp8_config.layers=["*.k_proj","blocks.1.mlp.fc1_g"]'
    results = []
    for recomputes in (False, True, "selective"):
        model = build(*later("eva02"), "fp8_config.enabled=true", patterns, te=True)
        randomise(model)
        prepare_blocks(model, activation_checkpointing=recomputes, compile=False)
        for _ in range(3):
            results.append(run(model, bf16=True, training=True))
        in_fp8 = {name for name, module in model.named_modules() if getattr(module, "fp8", False)}
        in_fp8 = {name for name in in_fp8 if name.startswith("blocks") and "core" not in name}
        assert in_fp8 == {"blocks.0.attn.k_proj", "blocks.1.attn.k_proj", "blocks.1.mlp.fc1_g"}
        assert {name.rpartition(".")[0] for name in model.scaling} == in_fp8
    for logits, grads in (results[5], results[8]):
        assert error(logits, results[2][0]) < 1e-2
        assert total_error(grads, results[2][1]) < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_later_options_train_and_resume_on_a_gpu(image_folder, tmp_path):
    """In BF16 and FP8, under DDP and FSDP2, the losses are near plain ones; each goes on from another."""
    task = functools.partial(task_of, image_folder, tmp_path, base=[*TINY, *ON_GPU])
    te = ["model.transformer_engine=true"]
    stages = {"plain": [], "te": te, "fp8": [*te, "fp8_config.enabled=true"]}
    tasks, whole = [], ["lr_scheduler.num_training_steps=8"]
    for name in ("eva02", "sapiens2"):
        options = [item for item in later(name) if "pool" not in item] + ["checkpoint.save_final_model=false"]
        for script, (stage, more) in itertools.product(("train_ddp", "train_fsdp2"), stages.items()):
            length = ["num_train_steps=8", "checkpoint.ckpt_dir=null", *whole]
            tasks.append(task(f"{name}-{script}-{stage}", script, *options, *length, *more))
        chain = (("train_ddp", "plain"), ("train_fsdp2", "fp8"), ("train_ddp", "te"), ("train_fsdp2", "plain"))
        for steps, (script, stage) in zip((2, 4, 6, 8), chain, strict=True):
            length = [f"num_train_steps={steps}", *whole]
            given = f"{name}-chain"
            tasks.append(task(f"{given}-{steps}", script, *options, *length, *stages[stage], output=given))
    outcomes = run_tasks(tasks, nproc=1, folder=tmp_path, timeout=300, strict=False)
    assert not {name: ranks[0]["error"] for name, ranks in outcomes.items() if "error" in ranks[0]}
    for name in ("eva02", "sapiens2"):
        want = column(tmp_path, f"{name}-train_ddp-plain", "train/loss")
        for script, stage in itertools.product(("train_ddp", "train_fsdp2"), stages):
            got = column(tmp_path, f"{name}-{script}-{stage}", "train/loss")
            assert got == pytest.approx(want, abs=0.1 if stage == "fp8" else 0.05), (script, stage)
        assert column(tmp_path, f"{name}-chain", "train/loss") == pytest.approx(want, abs=0.1)


@on_recipes
@pytest.mark.parametrize("images", [1, 3, 7])
def test_padding_does_not_change_logits(recipe, images):
    """37 tokens, so `images` need filling to rows of 16. The same images in a batch that needs none."""
    model = build("fp8_config.enabled=true", *FP8[recipe], te=True)
    randomise(model)
    for _ in range(3):
        run(model, bf16=True, training=True)  # delayed scaling gets to know its scales
    model.eval()
    few = torch.randn(images, 3, 96, 96, device="cuda")
    many = torch.cat([few, few[-1:].expand(16 - images, -1, -1, -1)])  # no other values, hence the same scales
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        got, want = model(few), model(many)[:images]
    assert error(got, want) < 2e-3


@on_recipes
def test_padding_does_not_change_gradients(recipe):
    """7 images of 37 tokens are filled by 13 rows, which add nothing: the error stays that of 16 images."""
    plain, fp8 = build(te=False), build("fp8_config.enabled=true", *FP8[recipe], te=True)
    for model in (plain, fp8):
        randomise(model)
    errors = []
    for images in (7, 16):
        _, want = run(plain, bf16=False, images=images)
        for _ in range(3):
            _, got = run(fp8, bf16=True, training=True, images=images)
        errors.append(total_error(got, want))
    assert errors[0] < 1.3 * errors[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_a_hundred_times_as_large_stay_finite():
    """In delayed scaling, whose scales are those of the small weights."""
    model = build("fp8_config.enabled=true", te=True)
    for _ in range(3):
        run(model, bf16=True, training=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and name.startswith("blocks"):
                parameter *= 100
    logits, grads = run(model, bf16=True, training=True)
    assert logits.isfinite().all()
    assert all(g.isfinite().all() for g in grads.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", ["MXFP8BlockScaling", "NVFP4BlockScaling"])
def test_what_the_card_cannot_do_is_refused_by_its_compute_capability(recipe):
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU can")
    overrides = [*SMALL, "model.transformer_engine=true", "fp8_config.enabled=true", f"fp8_config.fp8_recipe={recipe}"]
    with pytest.raises(schema.ConfigError, match=rf"fp8_recipe={recipe} .*9\.0.*10\.0 or higher") as caught:
        launch.check_script(launch.load_config("L0_sanity", overrides), "train_ddp", 1)
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("script", "more", "match"),
    [
        ("train_ddp", [], "quantized_model_init=true: train_ddp.py's optimizer"),
        ("train_fsdp2", [], "quantized_model_init=true: train_fsdp2.py's optimizer"),
        ("train_mfsdp", ["mfsdp.zero_dp_strategy=optim"], "mfsdp.zero_dp_strategy=optim with"),
    ],
)
def test_fp8_weights_are_refused_where_there_are_no_float32_ones(script, more, match):
    fp8 = ["fp8_config.enabled=true", "fp8_config.quantized_model_init=true", "model.transformer_engine=true"]
    with pytest.raises(schema.ConfigError, match=match):
        launch.check_script(launch.load_config("L0_sanity", [*SMALL, *fp8, *more]), script, 1)


@pytest.mark.parametrize("size", [pytest.param(224, marks=needs_te), pytest.param(384, marks=needs_te)])
def test_every_patch_reaches_the_class_token(size):
    """Full attention, not causal: the last patch changes the class token's logits."""
    model = build(f"model.img_size={size}", "model.global_pool=token", te=True).eval()
    images = torch.randn(2, 3, size, size, device="cuda")
    changed = images.clone()
    changed[:, :, -16:, -16:] += 3
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert (model(images) - model(changed)).abs().max() > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [64, 197, 576])
def test_attention_has_gradients_where_all_logits_are_far_below_zero(tokens):
    """cuDNN's has none at 64 and 576 tokens (vit_te.TEAttention)."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as process_group.set_kernels does
    attend = build(te=True).blocks[0].attn.attend
    query, key, value = (0.1 * torch.randn(64, tokens, 3, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    query[..., 0], key[..., 0] = 1.0, -120 * 8
    tensors = [t.requires_grad_() for t in (query, key, value)]
    attend(*tensors).square().sum().backward()
    assert all(t.grad.isfinite().all() for t in tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_drop_path_drops_whole_images_on_both_branches():
    model = build("model.drop_path_rate=0.9", te=True)
    block, keep = model.blocks[-1], model.drop_path(64, torch.device("cuda"))[-1]
    x = torch.randn(64, 37, 192, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        y = block(x, keep)
        assert torch.equal(block(x), block(x, torch.ones_like(keep)))
    untouched = (y == x).flatten(1).all(dim=1)
    partly = (y == x).flatten(1).any(dim=1) & ~untouched & ((y == x).flatten(1).float().mean(dim=1) > 0.5)
    assert 0.6 < untouched.float().mean() < 0.97  # both branches dropped: 0.9 ** 2
    assert not partly.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rate", ["proj_drop_rate", "attn_drop_rate"])
@pytest.mark.parametrize("size", [96, 128])  # 36 and 64 tokens: attention by TransformerEngine and by torch
def test_dropouts_work_in_training_and_vanish_in_evaluation(size, rate):
    model = [f"model.img_size={size}", "model.global_pool=avg", "model.class_token=false"]
    plain, te = build(*model, te=True), build(*model, f"model.{rate}=0.3", te=True)
    (want, _), (got, grads) = run(plain, bf16=True), run(te, bf16=True)
    assert error(got, want) < 2e-2
    assert error(run(te, bf16=True, training=True)[0], want) > 2e-2
    assert all(g.isfinite().all() for g in grads.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_trained_te_model_equals_timms_and_hugging_faces():
    """20 steps on TransformerEngine's blocks; the logits of 8 images in timm's and Hugging Face's models.

    The weights go by name, strictly; activation (tanh GELU) and epsilon are told to both.
    """
    from timm.models.vision_transformer import VisionTransformer as TimmViT
    from transformers import ViTConfig, ViTForImageClassification

    model = build(te=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(8, 3, 96, 96, device="cuda")
    labels = torch.arange(8, device="cuda")
    for _ in range(20):
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 1.0
    saved = {timm_name(name): p.detach() for name, p in model.named_parameters()}
    timms = TimmViT(img_size=96, embed_dim=192, depth=3, num_heads=3, num_classes=16, act_layer="gelu_tanh")
    timms.load_state_dict(saved, strict=True)
    settings = ViTConfig(
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=96,
        num_labels=16,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
    )
    hugging_face = ViTForImageClassification(settings)
    hugging_face.load_state_dict(hugging_face_names(saved), strict=True)
    torch.set_float32_matmul_precision("highest")
    model.eval()
    with torch.no_grad():
        with torch.autocast("cuda", torch.bfloat16):
            got = model(images).float()
        for want in (timms.cuda().eval()(images), hugging_face.cuda().eval()(images).logits):
            assert error(got, want) < 2e-2
            assert torch.equal(got.argmax(1), want.argmax(1))
    for name, parameter in model.named_parameters():  # and back, bit for bit
        assert torch.equal(timms.get_parameter(timm_name(name)), parameter)


def hugging_face_names(saved):
    """Weights by timm's names -> by those of ViTForImageClassification in transformers 5."""
    names = {
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "norm": "vit.layernorm",
        "head": "classifier",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.o_proj",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    }
    result = {}
    for name, tensor in saved.items():
        module, _, leaf = name.rpartition(".")
        if not module:
            result[names[leaf]] = tensor
        elif not module.startswith("blocks."):
            result[f"{names[module]}.{leaf}"] = tensor
        else:
            _, index, part = module.split(".", 2)
            thirds = zip("qkv", tensor.chunk(3), strict=True) if part == "attn.qkv" else ()
            result |= {f"vit.layers.{index}.attention.{letter}_proj.{leaf}": third for letter, third in thirds}
            if part != "attn.qkv":
                result[f"vit.layers.{index}.{names[part]}.{leaf}"] = tensor
    return result


def test_names_map_one_to_one():
    """TransformerEngine's names, written down from version 2.20, cover timm's block exactly."""
    plain = VisionTransformer(launch.load_config("L0_sanity", ["output_dir=unused"]).model)
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
        pytest.param(
            "raise OSError('libcudnn.so.9: wrong version\\nmore')",
            "its import fails: libcudnn.so.9: wrong version",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import a_module_that_is_not_there",
            "its import fails: No module named 'a_module_that_is_not_there'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_without_a_working_te_asking_for_it_is_one_line(tmp_path, stub, expected):
    """Everything imports, the plain paths work, and the message is the import's own first line."""
    if stub:
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine/__init__.py").write_text(stub)
    code = (
        f"import sys, vit_te\n{'' if stub else 'sys.modules[`transformer_engine`] = None'}\n".replace("`", "'")
        + "try: vit_te.transformer_engine()\nexcept ValueError as error: print(error)"
    )
    path = f"{tmp_path}:{ROOT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert expected in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1


# FP8 in some layers, on a CPU by stand_in_te.py

EIGHT = [*SMALL, "model.img_size=32", "model.embed_dim=48", "model.depth=2", "model.transformer_engine=true"]
EIGHT += ["fp8_config.enabled=true"]
BLOCKS = [f"blocks.{i}.{layer}" for i in (0, 1) for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]


@pytest.fixture
def on_cpu(monkeypatch):
    stand_in_te.install(monkeypatch)


def chosen_layers(*patterns, more=()):
    text = ",".join(f'"{pattern}"' for pattern in patterns)
    return [*EIGHT, *([f"fp8_config.layers=[{text}]"] if patterns else []), *more]


def built(overrides):
    cfg = launch.load_config("L0_sanity", overrides)
    model = build_model(cfg.model, cfg.fp8_config)
    model.init_weights(0)
    return model


def te_layers(model):
    return layers_by_timms_names(model, stand_in_te.Layer, stand_in_te.LayerNormMLP)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], BLOCKS),
        (["*"], BLOCKS),
        (["blocks.1.*"], BLOCKS[4:]),
        (["*.attn.proj", "*.mlp.*"], [name for name in BLOCKS if "qkv" not in name]),
        (["blocks.[0-1].mlp.fc1"], ["blocks.0.mlp.fc1", "blocks.1.mlp.fc1"]),  # two layers for one
        (["blocks.0.mlp.fc2", "blocks.1.attn.qkv"], ["blocks.0.mlp.fc2", "blocks.1.attn.qkv"]),
    ],
)
@pytest.mark.parametrize(("more", "recomputes"), [([], False), (["fp8_config.quantized_model_init=true"], True)])
def test_layers_that_are_not_chosen_are_never_in_fp8(on_cpu, patterns, expected, more, recomputes):
    """In no pass, in no weight, in no state; the names of what is saved stay."""
    model = built(chosen_layers(*patterns, more=more))
    prepare_blocks(model, activation_checkpointing=recomputes, compile=False)
    for is_first in (None, True, False):
        model(torch.randn(2, 3, 32, 32), is_first_microbatch=is_first).sum().backward()
    with torch.no_grad():
        model.eval()(torch.randn(2, 3, 32, 32))
    assert stand_in_te.State.depth == 0
    layers = te_layers(model)
    assert layers.keys() == set(BLOCKS)
    for name, layer in layers.items():
        assert set(layer.passes) == {name in expected}, name
        assert layer.primary_weights_in_fp8 == (bool(more) and name in expected), name
    states = {name.rpartition(".")[0] for name in model.scaling}
    split = any((f"blocks.{i}.mlp.fc1" in expected) != (f"blocks.{i}.mlp.fc2" in expected) for i in (0, 1))
    assert states == (set(expected) if split else {re.sub(r"mlp.fc\d", "mlp", name) for name in expected})
    plain = built([*EIGHT, "fp8_config.enabled=false", "model.transformer_engine=false"])
    names = [timm_name(name) for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in plain.named_parameters())


def test_layers_change_the_function_only_where_they_are_chosen(on_cpu):
    """Without FP8 in it, an MLP in two layers is the MLP in one; and the numbers are FP8's where FP8 is."""
    images = torch.randn(2, 3, 32, 32)

    def logits(overrides):
        model = built(overrides)
        with torch.no_grad():
            model.blocks[1].ls2 = torch.nn.Identity()
            return model.eval()(images)

    off = [*EIGHT, "fp8_config.enabled=false"]
    plain = logits([*off, "model.transformer_engine=false"])
    assert torch.allclose(logits(off), plain, atol=1e-5)
    dropout = logits([*off, "model.proj_drop_rate=0.1"])
    assert torch.allclose(dropout, plain, atol=1e-5)
    whole = logits(EIGHT)
    assert torch.equal(logits(chosen_layers("*")), whole)
    parts = [logits(chosen_layers(pattern)) for pattern in ("blocks.1.mlp.*", "blocks.1.mlp.fc1", "blocks.1.mlp.fc2")]
    assert len({tuple(part.flatten().tolist()) for part in (plain, whole, *parts)}) == 5
    assert all(error(part, plain) < error(whole, plain) for part in parts)


@pytest.mark.parametrize(
    ("layers", "fragments"),
    [
        ("[]", ["fp8_config.layers=[] chooses no layer", "fp8_config.enabled=false"]),
        ('["blocks.0.*","blocks.2.*"]', ["'blocks.2.*' chooses no layer", "blocks."]),
        ('["blocks.0.attn.qvk"]', ["'blocks.0.attn.qvk' chooses no layer", "nearest names are blocks.0.attn.qkv,"]),
        ('["head"]', ["'head' chooses no layer"]),
    ],
)
def test_layers_that_there_are_not_are_refused(layers, fragments):
    text = error_of(launch.load_config, "L0_sanity", [*EIGHT, f"fp8_config.layers={layers}"])
    for fragment in fragments:
        assert fragment in text


def test_a_resume_with_other_layers_finds_their_scales_anew(on_cpu, tiny, caplog):
    """The others' go on from the checkpoint."""

    def train(steps, *patterns):
        caplog.clear()
        eight = ["model.embed_dim=48", "model.transformer_engine=true", "model.act_layer=gelu_tanh", "precision=bf16"]
        eight += ["fp8_config.enabled=true", "evaluation.every_n_steps=null", f"num_train_steps={steps}"]
        eight += ["lr_scheduler.num_training_steps=9", chosen_layers(*patterns)[-1]]
        train_ddp.main(launch.load_config("L0_sanity", [*tiny, *eight], script="train_ddp"))
        return [line for line in caplog.messages if "found anew" in line]

    assert train(2, "blocks.0.*") == []
    assert train(3, "blocks.0.*") == []
    (line,) = train(4, "*")
    assert "step_00000003 has no scales of this FP8 recipe for 3 layers (blocks.1.attn.proj, ...)" in line
    assert train(5, "blocks.1.*") == []
    assert len(train(6, "blocks.1.*", "blocks.0.mlp.fc1")) == 1


# Options that came later, on a CPU by stand_in_te.py


def on_a_cpu(name, *overrides, te):
    size = ["model.embed_dim=48", "model.img_size=64"]  # before what `name` says of it
    return build(*size, *later(name), *overrides, te=te, device="cpu")


def assert_same_function(te, plain, **options):
    (want, want_grads), (got, got_grads) = (run(model, bf16=False, **options) for model in (plain, te))
    assert got_grads.keys() == want_grads.keys()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    whole = whole_norm(want_grads.values())
    for name, want_grad in want_grads.items():
        assert (got_grads[name] - want_grad).norm() <= 1e-4 * want_grad.norm() + 1e-6 * whole, name


@pytest.mark.parametrize("name", LATER)
def test_later_options_are_the_plain_models_function(on_cpu, name):
    """Names, first values, logits and every gradient, in training too: the same random numbers drop the same."""
    plain, te = on_a_cpu(name, te=False), on_a_cpu(name, te=True)
    assert {type(block).__name__ for block in te.blocks} == {"TEBlock"}
    ours = {timm_name(given): p for given, p in te.named_parameters()}
    assert sorted(ours) == sorted(given for given, _ in plain.named_parameters())
    for given, parameter in plain.named_parameters():
        assert torch.equal(ours[given], parameter), given
    assert te.no_weight_decay() == plain.no_weight_decay()
    for each in (plain, te):
        randomise(each)
    for size in sizes_of(plain):
        assert_same_function(te, plain, size=size)
        if name in CALM:
            assert_same_function(te, plain, size=size, training=True)
    logits, _ = run(te, bf16=False, training=True)
    assert (error(logits, run(te, bf16=False)[0]) > 1e-2) == (name == "dropout" or "patch_drop" in LATER[name])


@pytest.mark.parametrize("recomputes", [True, "selective"])
@pytest.mark.parametrize("name", ["eva02", "mixed", "sapiens2"])
def test_later_options_are_the_same_recomputed(on_cpu, name, recomputes):
    plain, te = on_a_cpu(name, te=False), on_a_cpu(name, te=True)
    for each in (plain, te):
        randomise(each)
    prepare_blocks(te, activation_checkpointing=recomputes, compile=False)
    assert_same_function(te, plain, training=True)


def linear_layers(plain):
    """Names of the blocks' linear layers."""
    return {name for name, m in plain.named_modules() if isinstance(m, torch.nn.Linear) and name.startswith("blocks")}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("which", ["all", "attention", "parts"])
def test_later_layers_are_in_fp8_where_they_are_chosen(on_cpu, name, which):
    """And nowhere else; rows of FP8 products are a multiple of 16, which the stand-in asks for."""
    plain = on_a_cpu(name, te=False)
    parts = ["*.k_proj" if "qkv_fused=false" in LATER[name] else "*.qkv"]
    parts += ["blocks.1.mlp.fc1_x" if "swiglu" in LATER[name] else "blocks.1.mlp.fc1"]
    patterns = {"all": ["*"], "attention": ["*.attn.*"], "parts": parts}[which]
    layers = f"fp8_config.layers={json.dumps(patterns, separators=(',', ':'))}"
    te = on_a_cpu(name, "fp8_config.enabled=true", layers, te=True)
    for size in sizes_of(te):
        run(te, bf16=False, training=True, images=3, size=size)
    of_all = linear_layers(plain)
    expected = {given for given in of_all for each in patterns if fnmatch.fnmatch(given, each)}
    assert 0 < len(expected) <= len(of_all)
    found = te_layers(te)
    assert found.keys() == of_all
    assert {given for given, layer in found.items() if set(layer.passes) == {True}} == expected
    assert {given for given, layer in found.items() if set(layer.passes) == {False}} == of_all - expected
    modules = {timms: given for given, m in te.named_modules() for timms, layer in found.items() if layer is m}
    assert {given.rpartition(".")[0] for given in te.scaling} == {modules[given] for given in expected}


@pytest.mark.parametrize("name", ["eva02", "mixed", "sapiens2"])
def test_later_options_resume_each_other(on_cpu, tiny, tmp_path, name):
    """Plain under DDP -> FP8 under FSDP2 -> TransformerEngine in BF16 -> plain: the losses are those of one run."""
    te = ["model.transformer_engine=true"]
    scripts = {"train_ddp": train_ddp, "train_fsdp2": train_ddp if name == "mixed" else train_fsdp2}
    stages = [("train_ddp", []), ("train_fsdp2", [*te, "fp8_config.enabled=true"]), ("train_ddp", te)]
    stages += [("train_fsdp2", [])]
    options = [*tiny, "model.embed_dim=48", *later(name), "precision=bf16", "evaluation.every_n_steps=null"]
    options += ["lr_scheduler.num_training_steps=8", "checkpoint.save_final_model=false", "optimizer.lr=3e-3"]
    for folder, steps in (("one", (8,)), ("four", (2, 4, 6, 8))):
        for (script, more), stop in zip(stages, steps, strict=False):
            more = [*more, f"output_dir={tmp_path / folder}", f"num_train_steps={stop}"]
            scripts[script].main(launch.load_config("L0_sanity", [*options, *more], script="train_ddp"))
    want, got = (column(tmp_path, folder, "train/loss") for folder in ("one", "four"))
    assert len(got) == 8
    assert got == pytest.approx(want, abs=2e-3)


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        ("block_fn=ResPostBlock", ["model.block_fn=ResPostBlock", "set model.block_fn=Block"]),
        ("rope_type=cat block_fn=ResPostBlock act_layer=gelu", ["model.block_fn=ResPostBlock"]),
        ("attn_layer=diff", ["model.attn_layer=diff", "set model.attn_layer=attn"]),
        (
            "rel_pos_type=mlp pos_embed=none class_token=false global_pool=avg act_layer=gelu",
            ["model.rel_pos_type=mlp", "set model.act_layer=gelu_tanh model.rel_pos_type=null"],
        ),
        ("distilled=true global_pool=token", ["model.transformer_engine=true with model.distilled=true"]),
        ("mlp_layer=glu act_layer=silu rope_type=cat block_fn=ResPostBlock", ["model.block_fn=ResPostBlock"]),
    ],
)
def test_what_the_blocks_lack_is_refused(overrides, fragments):
    model = [f"model.{item}" for item in overrides.split()]
    text = error_of(launch.load_config, "L0_sanity", [*SMALL, *model, "model.transformer_engine=true"])
    for fragment in fragments:
        assert fragment in text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("mlp_layer=glu act_layer=silu mlp_ratio=5.2", "embed_dim x model.mlp_ratio / 2=499"),
        (
            "rope_type=cat mlp_layer=swiglu swiglu_align_to=8 act_layer=silu mlp_ratio=2.6",
            "embed_dim x model.mlp_ratio=504",
        ),
        (
            "rope_type=cat act_layer=gelu qkv_fused=false num_kv_heads=1 num_heads=8",
            "embed_dim / model.num_heads x model.num_kv_heads=24",
        ),
    ],
)
def test_widths_that_fp8_cannot_take_are_refused(overrides, expected):
    model = [f"model.{item}" for item in overrides.split()]
    given = [*SMALL, *model, "model.transformer_engine=true", "fp8_config.enabled=true"]
    text = error_of(launch.load_config, "L0_sanity", given)
    assert f"model.{expected} with fp8_config.enabled=true" in text


def test_te_is_refused_by_name(monkeypatch):
    """Without CUDA; and with an activation, a precision or a compiler that it does not go with."""
    te = ["output_dir=unused", "model.transformer_engine=true", "precision=bf16"]
    good = [*te, "model.act_layer=gelu_tanh"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(schema.ConfigError, match="needs a CUDA GPU"):
        launch.check_script(launch.load_config("L0_sanity", good), "train_ddp", 1)
    for overrides, match in (
        (te, "with model.act_layer=gelu "),
        ([*good, "precision=fp32"], "with precision=fp32 "),
        ([*good, "compile=true"], "compile=true"),
    ):
        with pytest.raises(schema.ConfigError, match=match):
            launch.load_config("L0_sanity", overrides)
    assert vit_te.TE_ACTIVATIONS.keys() == {"gelu_tanh", "quick_gelu", "relu", "silu"}
