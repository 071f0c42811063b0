"""The model: timm's by names and numbers, its start, its size, its parameter groups, recomputation and BF16."""

import launch

import copy
import dataclasses
import functools
import itertools
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import assert_same
from timm.layers import calculate_drop_path_rates, lecun_normal_
from timm.models.vision_transformer import VisionTransformer as TimmViT
from timm_names import on_meta
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import optim
import schema
from interop.weights_out import timm_arguments
from modeling import build_model, prepare_blocks
from vit import VisionTransformer

SMALL = (
    "img_size=32 patch_size=16 in_chans=3 embed_dim=48 depth=2 num_heads=3 num_classes=7 "
    "global_pool=token class_token=true"
)
ALL_TOKENS = "global_pool=map reg_tokens=4 qk_norm=true init_values=0.1 pre_norm=true fc_norm=true"
DROPOUT = "drop_rate=0.2 pos_drop_rate=0.2 proj_drop_rate=0.2 attn_drop_rate=0.2 drop_path_rate=0.5"
POOLS = ("token", "avg", "map")
# pool x class token x register tokens; the class token cannot be pooled where there is none
TOKENS = [
    f"global_pool={pool} class_token={class_token} reg_tokens={reg_tokens}"
    for pool, class_token, reg_tokens in itertools.product(POOLS, ("true", "false"), (0, 4))
    if (pool, class_token) != ("token", "false")
]
# Parameters with 1000 classes: Ti and S of DeiT (arXiv 2012.12877), B, L and H of arXiv 2010.11929, g and G of
# 2106.04560, which round to millions; to the last digit as in timm.
PUBLISHED = {
    "vit_tiny_patch16_224": 5_717_416,
    "vit_small_patch16_224": 22_050_664,
    "vit_base_patch16_224": 86_567_656,
    "vit_large_patch16_224": 304_326_632,
    "vit_huge_patch14_224": 632_045_800,
    "vit_giant_patch14_224": 1_012_611_432,
    "vit_gigantic_patch14_224": 1_844_440_680,
    "vit_small_patch16_dinov3": 21_971_944,
    "vit_base_patch16_dinov3": 86_410_216,
    "vit_large_patch16_dinov3": 304_104_424,
    "eva02_base_patch14_224": 86_527_720,
}
# Rotary positions in their three kinds, with what goes with them; blocks, names and first weights are timm's Eva's.
ROPES = {
    "dinov3": (
        "rope_type=dinov3 rope_rotate_half=true pos_embed=none attn_type=eva qkv_bias=false init_values=0.1 "
        "reg_tokens=4 global_pool=avg fc_norm=false dynamic_img_size=true norm_eps=1e-5"
    ),
    "biases for queries and values": "rope_type=dinov3 rope_rotate_half=true attn_type=eva img_size=[32,64]",
    "eva02": (
        "rope_type=cat ref_feat_shape=16 rope_temperature=10000.0 attn_type=eva qkv_fused=false mlp_layer=swiglu "
        "act_layer=silu scale_mlp_norm=true scale_attn_norm=true global_pool=avg"
    ),
    "perception encoder": (
        "rope_type=cat rope_grid_indexing=xy rope_grid_offset=1.0 pre_norm=true global_pool=map attn_pool_num_heads=4 "
        "attn_pool_mlp_ratio=2.0"
    ),
    "mixed": "rope_type=mixed rope_temperature=10.0 rope_grid_indexing=xy pos_embed=none init_values=0.1",
    "sapiens2": (
        "rope_type=dinov3 rope_rotate_half=true norm_layer=rmsnorm qk_norm=true qkv_fused=false num_kv_heads=[3,1] "
        "mlp_layer=glu act_layer=silu init_values=1.0 attn_only_layer_scale=true pos_embed=none reg_tokens=8"
    ),
    "no positions": "attn_type=eva no_embed_class=true final_norm=false",
}

# timm's other blocks, its two kinds of relative positions, and differential attention.
REL_POS = "class_token=false global_pool=avg pos_embed=none img_size=[32,48]"
BLOCKS = {
    "norms_after": "block_fn=ResPostBlock init_values=0.1 scale_attn_norm=true",
    "side_by_side": "block_fn=ParallelThingsBlock init_values=0.1 qk_norm=true",
    "parallel": "block_fn=ParallelScalingBlock qkv_bias=false qk_norm=true norm_layer=rmsnorm no_embed_class=true",
    "parallel_scaled": "block_fn=ParallelScalingBlock init_values=0.1",
    "differential": "attn_layer=diff qk_norm=true scale_attn_norm=true scale_mlp_norm=true",
    "differential_norms_after": "attn_layer=diff block_fn=ResPostBlock",
    "differential_parallel": "block_fn=DiffParallelScalingBlock init_values=0.1 qkv_bias=false qk_norm=true",
    "relative": f"rel_pos_type=mlp init_values=0.1 fc_norm=true qk_norm=true {REL_POS}",
    "relative_shared": f"rel_pos_type=mlp rel_pos_dim=24 shared_rel_pos=true fc_norm=false qkv_bias=false {REL_POS}",
    "relative_norms_after": f"rel_pos_type=mlp block_fn=ResPostBlock init_values=0.1 {REL_POS}",
    "relative_class_token": "rel_pos_type=mlp pos_embed=none",
    "table": "rel_pos_type=bias pos_embed=none img_size=[32,48]",
    "table_shared": f"rel_pos_type=bias shared_rel_pos=true init_values=0.1 {REL_POS}",
    "norms_after_rotary": "rope_type=cat block_fn=ResPostBlock mlp_layer=glu act_layer=silu",
}


@functools.cache
def load(*overrides):
    return launch.load_config("L0_sanity", [*overrides, "output_dir=/tmp/unused"], script="train_ddp")


def keys(text):
    """Overrides of the model's section, given without its name; the later of two counts."""
    return [f"model.{item}" for item in text.split()]


def small(overrides=""):
    """The config of a model that takes milliseconds."""
    return load(*keys(f"{SMALL} {overrides}")).model


def timm_twin(cfg, **more):
    """timm's model with the same arguments, by its own entry point where its class alone does not tell all."""
    arguments = {**timm_arguments(vars(cfg)), "num_classes": cfg.num_classes, **more}
    if cfg.later_options():  # not by create_model, which leaves out what is None
        return timm.model_entrypoint(schema.timm_architecture(vars(cfg)))(**arguments)
    return TimmViT(**arguments)


@torch.no_grad()
def randomize(model, seed=0):
    """Values at which every parameter matters: a gain of 1 or a token of 1e-6 would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        p.normal_(generator=generator)
        if p.ndim > 1:
            p.mul_(0.5 if p.ndim == 3 else p[0].numel() ** -0.5)
        else:
            p.mul_(0.2).add_(0.0 if name.endswith("bias") else 1.0)


def pair_with_timm(cfg, **more):
    """Our model and timm's with the same random weights, copied by name."""
    ours, theirs = VisionTransformer(cfg), timm_twin(cfg, **more)
    randomize(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def images(cfg, batch=2, seed=1):
    size = (batch, cfg.in_chans, *schema.pair(cfg.img_size))
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def outputs_and_gradients(model, x, seed=2):
    """Logits, and the gradients of a random projection of them."""
    torch.manual_seed(seed)
    logits = model(x)
    model.zero_grad()
    logits.backward(torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)))
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters()}


def assert_close(actual, expected):
    """To 1e-5 of a tensor's largest value, or of 1: the gradient of the keys' bias is rounding noise."""
    sizes = {name: max(1.0, value.abs().max().item()) for name, value in expected.items()}
    assert_same(
        *({name: value / sizes[name] for name, value in side.items()} for side in (actual, expected)), atol=1e-5
    )


def drawn(cfg, seed=0):
    model = VisionTransformer(cfg)
    model.init_weights(seed)
    return model


# --- timm's numbers


@pytest.mark.parametrize(
    "overrides",
    [
        *TOKENS,
        "no_embed_class=true",
        "no_embed_class=true reg_tokens=4 global_pool=avg",
        "no_embed_class=true reg_tokens=4 global_pool=map class_token=false",
        "fc_norm=true",
        "fc_norm=false global_pool=avg",
        "fc_norm=true global_pool=map",
        "qk_norm=true",
        "init_values=1e-5",
        "pre_norm=true",
        ALL_TOKENS,
        "img_size=[32,64]",
        "img_size=[42,28] patch_size=14 global_pool=avg reg_tokens=4 no_embed_class=true",
        "img_size=28 patch_size=14 global_pool=map",
        "img_size=[16,64] patch_size=[8,16]",
        "in_chans=1 depth=1",
        "act_layer=gelu_tanh global_pool=map",
        "act_layer=quick_gelu",
        "act_layer=relu",
        "act_layer=silu global_pool=map",
        "qkv_bias=false",
        "proj_bias=false init_values=0.1",
        "qkv_bias=false proj_bias=false qk_norm=true global_pool=map",
        "mlp_ratio=2.6 global_pool=map",  # 124.8 hidden channels: timm cuts, not rounds
        "norm_layer=rmsnorm qk_norm=true scale_attn_norm=true scale_mlp_norm=true global_pool=map",
        "mlp_layer=glu act_layer=silu mlp_ratio=5.33334 global_pool=map",
        "pos_embed=none final_norm=false",
        "final_norm=false global_pool=avg",
        *ROPES.values(),
        *BLOCKS.values(),
    ],
)
def test_logits_and_gradients_are_timms(overrides):
    cfg = small(overrides)
    ours, theirs = pair_with_timm(cfg)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_close(outputs_and_gradients(ours, images(cfg)), outputs_and_gradients(theirs, images(cfg)))


@pytest.mark.parametrize(
    "overrides",
    [
        "drop_rate=0.5",
        "pos_drop_rate=0.5",
        "patch_drop_rate=0.5 reg_tokens=4 global_pool=avg",
        "patch_drop_rate=0.9 global_pool=map class_token=false",
        "proj_drop_rate=0.5",
        "attn_drop_rate=0.5 qk_norm=true",
        f"{DROPOUT} {ALL_TOKENS} patch_drop_rate=0.25 depth=3",
        f"{ROPES['dinov3']} {DROPOUT} img_size=64 patch_drop_rate=0.5",
        f"{ROPES['mixed']} img_size=64 patch_drop_rate=0.5",
        *(f"{o} drop_rate=0.2 proj_drop_rate=0.2 attn_drop_rate=0.2 drop_path_rate=0.5" for o in BLOCKS.values()),
    ],
)
def test_random_numbers_of_training_are_timms(monkeypatch, overrides):
    cfg = small(overrides)
    ours, theirs = pair_with_timm(cfg)
    x = images(cfg, batch=8)
    # timm draws drop path block by block with bernoulli_ where its rate is not 0, ours at once: one draw for both
    keep = ours.drop_path(len(x), x.device)
    ours.drop_path = lambda *_: keep
    stays = iter(keep[1:].flatten(0, 1) > 0)
    monkeypatch.setattr(torch.Tensor, "bernoulli_", lambda t, _: t.copy_(next(stays)))
    trained = outputs_and_gradients(ours, x)
    assert_close(trained, outputs_and_gradients(theirs, x))
    calm = ours.eval()(x)
    assert (calm - trained["logits"]).abs().max() > 1e-3
    torch.testing.assert_close(calm, theirs.eval()(x), atol=1e-5, rtol=0)


def test_two_heads_are_timms():
    """Apart in training, with timm's masks of dropout; their mean in evaluation."""
    cfg = small("distilled=true drop_rate=0.5 init_values=0.1 qk_norm=true")
    ours, theirs = pair_with_timm(cfg)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    theirs.set_distilled_training()
    forward, x = theirs.forward, images(cfg, batch=4)
    theirs.forward = lambda x: torch.stack(forward(x))
    got, want = outputs_and_gradients(ours, x), outputs_and_gradients(theirs, x)
    assert got["logits"].shape == (2, 4, 7)
    assert_close(got, want)
    theirs.forward = forward
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), atol=1e-5, rtol=0)
    assert ours.no_weight_decay() == theirs.no_weight_decay() - {"reg_token"}  # which neither has


def test_two_heads_start_as_timms():
    cfg = small("distilled=true embed_dim=192 num_classes=50 init_head_bias=-4")
    start = drawn(cfg).state_dict()
    assert start["dist_token"].std() == pytest.approx(0.02, rel=0.2)  # timm's; a class token has 1e-6
    assert start["head_dist.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert start["head_dist.bias"].abs().max() == 0
    assert not torch.equal(start["head_dist.weight"], start["head.weight"])


@pytest.mark.parametrize(
    ("implementation", "overrides", "calls"),
    [
        ("ours", "", 2),
        ("ours", ALL_TOKENS, 3),  # one a block and the pool's
        ("timm", "", 2),
        ("timm", ALL_TOKENS, 3),
        ("hf", "", 2),
    ],
)
def test_attention_is_fused_or_not_and_the_same(monkeypatch, implementation, overrides, calls):
    called, results = [], {}
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **more: called.append(1) or fused(*args, **more)
    )
    for is_fused in ("true", "false"):
        cfg = small(f"{overrides} implementation={implementation} fused_attn={is_fused}")
        model = build_model(cfg, load().fp8_config)
        randomize(model)
        called.clear()
        results[is_fused] = outputs_and_gradients(model, images(cfg))
        assert len(called) == (calls if is_fused == "true" else 0)
    assert_close(results["false"], results["true"])


@pytest.mark.parametrize(("schedule", "rates"), [("linear", (0.0, 0.3, 0.6)), ("constant", (0.6, 0.6, 0.6))])
def test_drop_path_takes_images_more_with_depth(schedule, rates):
    """timm's line from 0, or DeiT III's one rate for all; what stays is scaled up."""
    model = VisionTransformer(small(f"depth=3 drop_path_rate=0.6 drop_path_schedule={schedule}"))
    batch = 400
    torch.manual_seed(0)
    keep = model.drop_path(batch, torch.device("cpu"))
    assert keep.shape == (3, 2, batch, 1, 1)
    assert calculate_drop_path_rates(0.6, 3) == pytest.approx((0.0, 0.3, 0.6))
    for factors, rate in zip(keep.flatten(2), rates, strict=True):
        for branch in factors:
            survivors = branch != 0
            torch.testing.assert_close(branch[survivors], torch.full((int(survivors.sum()),), 1 / (1 - rate)))
            assert abs(1 - survivors.float().mean() - rate) <= 5 * (rate * (1 - rate) / batch) ** 0.5
    assert not torch.equal(keep[2, 0], keep[2, 1])


def test_drop_path_scales_the_branches_of_an_image():
    cfg = small("depth=1 init_values=0.3 drop_path_rate=0.6")
    model = VisionTransformer(cfg)
    randomize(model)
    block, x = model.blocks[0], torch.randn(5, 4, cfg.embed_dim)
    keep = torch.rand(2, 5, 1, 1)
    middle = x + keep[0] * block.ls1(block.attn(block.norm1(x)))
    torch.testing.assert_close(block(x, keep), middle + keep[1] * block.ls2(block.mlp(block.norm2(middle))))


def test_drop_path_is_of_training_alone():
    cfg = small("depth=2 drop_path_rate=0.6")
    model, batch = VisionTransformer(cfg), images(cfg, 3)
    randomize(model)
    model.drop_path = lambda size, device: torch.zeros(2, 2, size, 1, 1)  # of every image every branch
    bare = copy.deepcopy(model)
    bare.blocks = torch.nn.Sequential()
    bare.cfg = dataclasses.replace(cfg, drop_path_rate=0.0)
    torch.testing.assert_close(model(batch), bare(batch))
    assert (model.eval()(batch) - bare(batch)).abs().max() > 1e-3


@pytest.mark.parametrize("overrides", ["", "no_embed_class=true", "reg_tokens=2", "class_token=false global_pool=avg"])
def test_sincos_positions_are_big_visions(overrides):
    """posemb_sincos_2d of models/vit.py, entry by entry: [sin x, cos x, sin y, cos y], frequencies 1 to 1 / 10000."""
    cfg = small(f"img_size=[32,48] {overrides}")
    model = drawn(cfg)
    fixed = drawn(small(f"img_size=[32,48] pos_embed=sincos {overrides}"))
    assert not fixed.pos_embed.requires_grad
    assert {name for name, p in fixed.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if name != "pos_embed"
    }
    tokens = 0 if cfg.no_embed_class else cfg.class_token + cfg.reg_tokens
    assert fixed.pos_embed.shape == (1, tokens + 6, 48)
    assert (fixed.pos_embed[:, :tokens] == 0).all()
    for patch, (y, x) in enumerate(itertools.product(range(2), range(3))):
        row = fixed.pos_embed[0, tokens + patch]
        for k in range(12):
            omega = 1 / 10000 ** (k / 11)
            expected = [math.sin(x * omega), math.cos(x * omega), math.sin(y * omega), math.cos(y * omega)]
            assert row[k::12].tolist() == pytest.approx(expected, abs=1e-6)
    logits, twin = fixed.eval()(images(cfg)), timm_twin(cfg)
    twin.load_state_dict(fixed.state_dict())
    torch.testing.assert_close(twin.eval()(images(cfg)), logits, atol=1e-5, rtol=0)


def test_two_layer_head_is_the_papers():
    """Linear, tanh, linear after the pooling (arXiv 2010.11929); the first starts at LeCun's normal distribution."""
    cfg = load(*keys(f"{SMALL} representation_size=400 num_classes=5"), "checkpoint.ckpt_dir=null").model
    model = drawn(cfg)
    features = []
    model.fc_norm.register_forward_hook(lambda *args: features.append(args[-1]))
    logits = model(images(cfg))
    hidden = torch.tanh(features[0] @ model.pre_logits.fc.weight.T + model.pre_logits.fc.bias)
    torch.testing.assert_close(logits, hidden @ model.head.weight.T + model.head.bias)
    weight, reference = model.pre_logits.fc.weight, torch.empty(400, 48)
    torch.manual_seed(0)
    lecun_normal_(reference)
    assert weight.std().item() == pytest.approx(48**-0.5, rel=0.03)
    assert weight.std().item() == pytest.approx(reference.std().item(), rel=0.03)
    assert weight.abs().max() <= 2 * 48**-0.5 / 0.87
    assert {"pre_logits.fc.weight", "pre_logits.fc.bias"} <= set(model.state_dict())


def test_head_bias_starts_as_timms():
    """timm's mode "nlhb": minus the logarithm of the number of classes, -6.9 for a thousand."""
    cfg = small("num_classes=1000 init_head_bias=-6.907755278982137")
    theirs = timm_twin(cfg, weight_init="jax_nlhb")
    torch.testing.assert_close(drawn(cfg).head.bias, theirs.head.bias)
    assert (drawn(small()).head.bias == 0).all()


@pytest.mark.parametrize("overrides", ["", "global_pool=avg", ALL_TOKENS])
def test_norm_eps_reaches_every_norm(overrides):
    text = f"{SMALL} {overrides} norm_eps=0.1"
    cfg = load(*keys(text), "checkpoint.save_final_model=false").model  # timm could not read such an export
    ours, theirs = pair_with_timm(cfg, norm_layer=functools.partial(nn.LayerNorm, eps=0.1))
    actual = outputs_and_gradients(ours, images(cfg))
    assert_close(actual, outputs_and_gradients(theirs, images(cfg)))
    assert {m.eps for m in ours.modules() if isinstance(m, nn.LayerNorm)} == {0.1}
    _, usual = pair_with_timm(cfg)
    assert (usual(images(cfg)) - actual["logits"]).abs().max() > 1e-3


def test_norm_eps_is_timms_unless_given():
    model = VisionTransformer(small(ALL_TOKENS))
    assert {m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)} == {1e-6}


# --- the start


INIT = f"{ALL_TOKENS} embed_dim=192 mlp_ratio=2 init_values=0.01 num_classes=100"


@pytest.fixture(scope="module")
def starts():
    return starts_of(INIT)


def starts_of(overrides, count=20):
    """Name -> our values and timm's, each of `count` starts in one row."""
    cfg = small(overrides)
    torch.manual_seed(0)
    sides = [
        [f(seed).state_dict() for seed in range(count)] for f in (lambda s: drawn(cfg, s), lambda _: timm_twin(cfg))
    ]
    return {name: [torch.stack([s[name] for s in side]).flatten(1) for side in sides] for name in sides[0][0]}


def test_starts_are_distributed_as_timms(starts):
    assert_same_distributions(starts)


@pytest.mark.parametrize(
    "overrides",
    [
        f"{ROPES['dinov3']} embed_dim=96 num_classes=100 depth=3",
        f"{ROPES['mixed']} embed_dim=96 num_classes=100",
        f"{ROPES['biases for queries and values']} global_pool=map",
        "mlp_layer=glu act_layer=silu embed_dim=96 mlp_ratio=5.34",
        *BLOCKS.values(),
    ],
)
def test_other_architectures_start_as_timms(overrides):
    starts = starts_of(overrides, 8)
    if "rel_pos_type" in overrides:  # of which timm draws the head's biases, too; ours are init_head_bias
        assert (starts.pop("head.bias")[0] == 0).all()
    assert_same_distributions(starts)


def assert_same_distributions(starts):
    for name, (ours, theirs) in starts.items():
        if (theirs == theirs[:1]).all():  # norms, biases, layer scale
            assert torch.equal(ours, theirs), name
            continue
        # One value in twenty million of timm's trunc_normal_ is -2, a hundred deviations out (vit._initialize).
        theirs = theirs[theirs.abs() < 1]
        n, std = ours.numel(), theirs.std()
        assert ours.abs().max() < 8 * std, name
        assert abs(ours.mean() - theirs.mean()) <= 5 * std * (2 / n) ** 0.5, name
        assert abs(ours.std() / std - 1) <= 5 * n**-0.5, name
        # Kolmogorov and Smirnov's distance of two samples, at a probability of 1e-6
        a, b = (side.flatten()[:50_000].sort().values for side in (ours, theirs))
        at = torch.cat([a, b])
        distance = (torch.searchsorted(a, at, right=True) - torch.searchsorted(b, at, right=True)).abs().max() / len(a)
        assert distance <= 2.7 * (2 / len(a)) ** 0.5, name


@pytest.mark.parametrize(
    ("name", "std", "bound"),
    [
        ("pos_embed", 0.02, None),
        ("cls_token", 1e-6, None),
        ("reg_token", 1e-6, None),
        ("patch_embed.proj.weight", (3 * 16 * 16 * 3) ** -0.5, (3 * 16 * 16) ** -0.5),  # uniform: bound / sqrt(3)
        ("attn_pool.latent", 0.8796 * 192**-0.5, 2 * 192**-0.5),  # a normal cut at two deviations keeps 0.8796 of one
        ("attn_pool.kv.weight", 0.02, None),
        ("blocks.1.attn.qkv.weight", 0.02, None),
        ("blocks.0.mlp.fc2.weight", 0.02, None),
        ("head.weight", 0.02, None),
    ],
)
def test_spread_of_a_start(starts, name, std, bound):
    ours, _ = starts[name]
    assert abs(ours.mean()) <= 5 * std * ours.numel() ** -0.5
    assert abs(ours.std() / std - 1) <= 5 * (2 * ours.numel()) ** -0.5 + 1e-4
    if bound is not None:
        assert 0.99 * bound <= ours.abs().max() <= bound


@pytest.mark.parametrize(
    ("suffix", "value"),
    [
        ("norm1.weight", 1.0),
        ("norm2.bias", 0.0),
        ("q_norm.weight", 1.0),
        ("norm_pre.weight", 1.0),
        ("ls1.gamma", 0.01),
        ("ls2.gamma", 0.01),
        ("qkv.bias", 0.0),
        ("fc1.bias", 0.0),
        ("head.bias", 0.0),
    ],
)
def test_constants_of_a_start(starts, suffix, value):
    matches = [ours for name, (ours, _) in starts.items() if name.endswith(suffix)]
    assert matches
    assert all((ours == value).all() for ours in matches)


def test_tensors_of_a_start_are_independent(starts):
    random = {name: ours[:, :192] for name, (ours, _) in starts.items() if ours.min() != ours.max()}
    assert {"blocks.0.mlp.fc1.weight", "blocks.1.mlp.fc1.weight", "cls_token", "attn_pool.latent"} <= random.keys()
    # 20 starts of each tensor: any two that share their random numbers correlate
    correlation = torch.corrcoef(torch.cat(list(random.values())))
    assert (correlation - torch.eye(len(correlation))).abs().max() < 0.5


def test_start_follows_from_the_seed_alone():
    cfg = small(ALL_TOKENS)
    torch.manual_seed(1)
    model = drawn(cfg, seed=4)
    model.init_weights(5)  # what was there before does not matter
    torch.manual_seed(2)
    again = drawn(cfg, seed=5).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    before = torch.get_rng_state()
    model.init_weights(6)
    assert torch.equal(torch.get_rng_state(), before)
    random = [name for name, value in again.items() if value.min() != value.max()]
    assert not any(torch.equal(model.state_dict()[name], again[name]) for name in random)


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "global_pool=avg class_token=false",
        INIT,
        "qkv_bias=false proj_bias=false",
        *ROPES.values(),
        *BLOCKS.values(),
    ],
)
def test_meta_build_starts_as_an_eager_one(overrides):
    cfg = small(overrides)
    with torch.device("meta"):
        model = VisionTransformer(cfg)
    assert all(t.is_meta for t in itertools.chain(model.parameters(), model.buffers()))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    model.init_weights(3)
    eager = drawn(cfg, seed=3)
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(eager, kind)())
        actual = dict(getattr(model, kind)())
        assert actual.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in actual.items())
    assert all(p.isfinite().all() for p in model.parameters())


def test_every_module_resets_its_own_parameters():
    with torch.device("meta"):
        model = VisionTransformer(small(ALL_TOKENS))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            module.reset_parameters()
        assert all(p.isfinite().all() for p in own), type(module)
    assert all(p.isfinite().all() for p in model.parameters())
    assert 0 < model.cls_token.std() < 1e-5
    assert model.attn_pool.latent.std() > 0.05


# --- size


MODEL_CONFIGS = sorted(path.stem for path in (launch.PROJECT_DIR / "config/model").glob("*.yaml"))


def count(build):
    with on_meta():
        return sum(p.numel() for p in build().parameters())


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_parameter_count_is_the_published_one(name):
    cfg = load(f"model={name}").model
    found = count(lambda: VisionTransformer(cfg))
    if name in PUBLISHED:
        assert found == PUBLISHED[name] == count(lambda: timm.create_model(name, num_classes=1000))
        return
    assert found == count(lambda: timm_twin(cfg))
    if "10b" in name:
        assert found == pytest.approx(10.08e9, rel=1e-3)
        d, hidden, patches = 5120, 4 * 5120, (224 // 14) ** 2
        block = (3 * d * d + 3 * d) + (d * d + d) + (2 * d * hidden + hidden + d) + 4 * d
        outside = (3 * 14 * 14 * d + d) + d + (patches + 1) * d + 2 * d + (1000 * d + 1000)
        assert found == 32 * block + outside


@pytest.mark.parametrize(
    ("name", "millions", "pool"),
    [("vit_22b_patch14_224", 21_743, 453), ("vit_60b_patch14_224", 60_398, 1_258)],
)
def test_blocks_of_the_largest_models(name, millions, pool):
    """21,743 M is the figure of arXiv 2302.05442 (table 1), which counts the blocks; 60 B is none of a paper."""
    cfg = load(f"model={name}").model
    with torch.device("meta"):
        model = VisionTransformer(cfg)
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    assert round(matrices / 1e6) == millions
    assert round(sum(p.numel() for p in model.attn_pool.parameters() if p.ndim == 2) / 1e6) == pool
    assert cfg.embed_dim // cfg.num_heads == 128


def test_every_published_size_has_a_config():
    assert PUBLISHED.keys() <= set(MODEL_CONFIGS)


@pytest.mark.parametrize(
    "overrides",
    [
        *(f"global_pool={pool}" for pool in POOLS),
        "global_pool=avg class_token=false reg_tokens=16",
        "global_pool=map img_size=[224,448] mlp_ratio=2.5 in_chans=1",
        "patch_drop_rate=0.5 global_pool=avg",
        "representation_size=3000",
        "distilled=true num_classes=9000",
    ],
)
def test_flops_are_those_that_torch_counts(overrides):
    cfg = load("model=vit_tiny_patch16_224", "checkpoint.ckpt_dir=null", *keys(overrides)).model
    with torch.device("meta"):  # where attention is spelled out: torch does not count the CPU's fused kernel
        model, x = VisionTransformer(cfg), torch.empty(2, cfg.in_chans, *schema.pair(cfg.img_size))
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert model.flops_per_image() == pytest.approx(counter.get_total_flops() / 2, rel=0.01)


@pytest.mark.parametrize(
    "options", [*ROPES.values(), *BLOCKS.values(), "mlp_layer=glu act_layer=silu mlp_ratio=5.33334"]
)
def test_flops_of_other_architectures_are_those_that_torch_counts(options):
    sizes = "img_size=64 patch_size=8 embed_dim=192 depth=2 num_heads=3"
    cfg = load("checkpoint.ckpt_dir=null", *keys(f"{options} {sizes} fused_attn=false")).model
    model, x = VisionTransformer(cfg), images(cfg)
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert model.flops_per_image() == pytest.approx(counter.get_total_flops() / 2, rel=0.03)


# --- parameter groups and gradients


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(
    "overrides",
    ["", ALL_TOKENS, "global_pool=avg class_token=false reg_tokens=4", *ROPES.values(), *BLOCKS.values()],
)
def test_matrices_decay_and_nothing_else(overrides, prefix):
    model = VisionTransformer(small(overrides))
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    holder = model
    if prefix:  # as DDP and Megatron-FSDP name their parameters
        holder = nn.Module()
        holder.module = model
    decay, rest = optim.param_groups(holder, model.no_weight_decay(), 0.1)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    grouped = [id(p) for group in (decay, rest) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())  # each once
    assert {id(p) for p in decay["params"]} == matrices


@pytest.mark.parametrize("extra", ["", "qk_norm=true init_values=0.1 pre_norm=true fc_norm=true no_embed_class=true"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_parameter_gets_a_gradient(tokens, extra):
    cfg = small(f"{tokens} {extra}")
    model = drawn(cfg)
    nn.functional.cross_entropy(model(images(cfg)), torch.tensor([1, 2])).backward()
    for name, p in model.named_parameters():
        assert p.requires_grad
        assert p.grad is not None, name
        # adding a constant to all keys changes no attention weight
        assert p.grad.abs().max() > 1e-12 or name.endswith("k_norm.bias"), name


def test_weights_gradients_and_moments_are_float32():
    """BF16 weights would not move at all: 1 - 1e-4 is 1 in BF16."""
    cfg = load("optimizer.lr=1e-4", *keys(SMALL))
    model = drawn(cfg.model)
    optimizer = optim.build_optimizer(model, cfg, no_weight_decay=model.no_weight_decay())
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(images(cfg.model)).float().logsumexp(-1).sum()
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    for _ in range(100):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {state[k].dtype for state in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    weight = model.blocks[0].norm1.weight
    torch.testing.assert_close(weight, torch.full_like(weight, 0.99), atol=1e-5, rtol=0)


# --- sizes of images


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        ("img_size=100 patch_size=16", ["model.img_size=100", "model.patch_size=16", "96", "112"]),
        ("img_size=[32,40] patch_size=16", ["model.img_size=[32, 40]", "model.patch_size=16"]),
        ("img_size=32 patch_size=[16,12]", ["model.img_size=32", "model.patch_size=[16, 12]"]),
        ("img_size=8 patch_size=16", ["model.img_size=8", "16"]),
    ],
)
def test_size_that_patches_do_not_fill_is_refused(overrides, texts):
    with pytest.raises(schema.ConfigError) as error:
        load(*keys(overrides))
    assert all(text in str(error.value) for text in texts)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ("qkv_fused=false", "model.qkv_fused=false is of timm's Eva: give model.rope_type, or set model.qkv_fused"),
        ("mlp_layer=glu", "model.act_layer=gelu with model.mlp_layer=glu: set model.act_layer=silu"),
        ("mlp_layer=swiglu act_layer=silu", "model.mlp_layer=swiglu without model.rope_type: set model.mlp_layer=glu"),
        ("final_norm=false fc_norm=true", "model.fc_norm=true with model.final_norm=false: set model.fc_norm=null"),
        ("rope_type=cat proj_bias=false", "model.proj_bias=false in timm's Eva"),
        ("rope_type=cat num_heads=24", "model.rope_type=cat with heads of 2 channels"),
        ("rope_type=mixed rope_rotate_half=true", "model.rope_rotate_half=true with mixed"),
        ("rope_type=cat qkv_fused=false num_kv_heads=2", "each a divisor of model.num_heads=3"),
        ("rope_type=cat qkv_fused=false num_kv_heads=[3]", "give one number or model.depth=2 of them"),
        ("rope_type=cat attn_layer=diff", "model.attn_layer=diff in timm's Eva: set model.attn_layer=attn"),
        ("rope_type=cat block_fn=ParallelThingsBlock", "model.block_fn=ParallelThingsBlock in timm's Eva"),
        (
            "rope_type=cat block_fn=ResPostBlock init_values=0.1",
            "model.init_values=0.1 with model.block_fn=ResPostBlock",
        ),
        (
            "rope_type=cat block_fn=ResPostBlock mlp_layer=swiglu act_layer=silu swiglu_align_to=8",
            "model.swiglu_align_to=8 with model.block_fn=ResPostBlock: set model.swiglu_align_to=0",
        ),
        ("attn_layer=diff num_heads=16", "model.num_heads=16 gives heads of 3 channels with model.attn_layer=diff"),
        (
            "block_fn=ParallelScalingBlock attn_layer=diff",
            "model.attn_layer=diff with model.block_fn=ParallelScalingBl",
        ),
        ("block_fn=ParallelScalingBlock scale_mlp_norm=true", "model.scale_mlp_norm=true with model.block_fn=Parallel"),
        ("block_fn=ResPostBlock distilled=true", "model.distilled=true with model.block_fn=ResPostBlock"),
        (
            "attn_layer=diff mlp_layer=glu act_layer=silu",
            "model.mlp_layer=glu with model.attn_layer=diff: set model.mlp",
        ),
        ("block_fn=ResPostBlock transformer_engine=true act_layer=gelu_tanh", "model.block_fn=ResPostBlock"),
        ("rel_pos_type=mlp", "model.pos_embed=learn with model.rel_pos_type=mlp: set model.pos_embed=none"),
        ("rel_pos_type=mlp pos_embed=none reg_tokens=2", "model.reg_tokens=2 with model.rel_pos_type=mlp"),
        (
            "rel_pos_type=bias pos_embed=none patch_drop_rate=0.5",
            "model.patch_drop_rate=0.5 with model.rel_pos_type=bias",
        ),
        ("rel_pos_type=mlp pos_embed=none global_pool=map", "model.global_pool=map with model.rel_pos_type=mlp: set"),
        ("rel_pos_type=mlp pos_embed=none block_fn=ParallelThingsBlock", "set model.block_fn=Block or ResPostBlock"),
        ("block_fn=ResPostBlock norm_eps=1e-5", "model.norm_eps=1e-05 cannot be exported"),
        ("rel_pos_type=mlp pos_embed=none norm_layer=rmsnorm", "model.norm_layer=rmsnorm cannot be exported"),
        ("rope_type=cat implementation=timm", "model.rope_type=cat with model.implementation=timm"),
        ("attn_layer=diff transformer_engine=true act_layer=gelu_tanh", "model.attn_layer=diff"),
        (
            "rope_type=mixed qkv_fused=false num_kv_heads=1",
            "model.num_kv_heads=1 with mixed, which has frequencies for",
        ),
        ("rope_type=cat norm_layer=rmsnorm norm_eps=1e-5", "model.norm_eps=1e-05 cannot be exported"),
    ],
)
def test_what_contradicts_is_refused_by_name(overrides, text):
    with pytest.raises(schema.ConfigError) as error:
        small(overrides)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_one_key_sets_the_size_of_model_and_images():
    assert load(*keys("img_size=[32,64] patch_size=16")).data.image_size == (32, 64)
    with pytest.raises(schema.ConfigError, match=r"data\.image_size=32"):
        load("data.image_size=32", *keys("img_size=64 patch_size=16"))


@pytest.mark.parametrize("size", [(32, 32), (64, 32), (32, 48), (32, 72)])
def test_image_of_another_size_is_refused(size):
    model = drawn(small("img_size=[32,64]"))
    with pytest.raises(AssertionError, match=r"Input (height|width)"):
        model(torch.zeros(1, 3, *size))


# --- recomputation, compilation, BF16


@pytest.mark.parametrize(
    "overrides",
    [
        ALL_TOKENS,
        f"{DROPOUT} {ALL_TOKENS} depth=3",
        *(f"{o} {DROPOUT}" for o in ROPES.values()),
        *(f"{o} drop_rate=0.2 proj_drop_rate=0.2 attn_drop_rate=0.2 drop_path_rate=0.5" for o in BLOCKS.values()),
    ],
)
def test_recomputing_changes_no_number(overrides):
    cfg = small(overrides)
    plain, recomputed = VisionTransformer(cfg), VisionTransformer(cfg)
    randomize(plain)
    recomputed.load_state_dict(plain.state_dict())
    prepare_blocks(recomputed, activation_checkpointing=True, compile=False)
    assert [n for n, _ in recomputed.named_parameters()] == [n for n, _ in plain.named_parameters()]
    calls = []
    for block in recomputed.shard_units():
        first = next(module for module in block.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm))
        first.register_forward_hook(lambda *_: calls.append(1))
    x = images(cfg, batch=8)
    assert_same(outputs_and_gradients(recomputed, x), outputs_and_gradients(plain, x))
    assert len(calls) == 2 * cfg.depth


SOME_BLOCKS = [
    f"{BLOCKS[name]} drop_path_rate=0.1" for name in ("differential_norms_after", "relative_shared", "table")
]


TO_COMPILE = ["", "drop_path_rate=0.1 init_values=0.1", ROPES["dinov3"], ROPES["eva02"], *SOME_BLOCKS]


@pytest.mark.parametrize(
    ("overrides", "activation_checkpointing"),
    [
        pytest.param(overrides, way, marks=[pytest.mark.slow] if overrides and way else [])
        for overrides, way in itertools.product(TO_COMPILE, (False, "selective", True))
    ],
)
def test_compiling_reaches_every_block(monkeypatch, overrides, activation_checkpointing):
    """What differs from block to block makes torch compile anew, until it runs the ninth and later ones uncompiled."""
    cfg, ran, graphs = small(f"depth=10 {overrides}"), [], []

    def backend(graph, _):
        graphs.append(graph)
        return lambda *args: (ran.append(1), graph(*args))[1]

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()
    model = drawn(cfg)
    names = list(model.state_dict())
    prepare_blocks(model, activation_checkpointing=activation_checkpointing, compile=True)
    assert list(model.state_dict()) == names
    model(images(cfg))
    assert len(ran) == cfg.depth
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["side_by_side", "parallel", "differential_parallel"])
def test_compiling_reaches_every_block_without_an_mlp(monkeypatch, name):
    test_compiling_reaches_every_block(monkeypatch, f"{BLOCKS[name]} drop_path_rate=0.1", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "activation_checkpointing"),
    [
        ("", False),
        (ALL_TOKENS, True),
        (ROPES["dinov3"], False),
        (ROPES["eva02"], True),
        (BLOCKS["differential_parallel"], False),
        (BLOCKS["table"], True),
    ],
)
def test_compiling_changes_no_number(overrides, activation_checkpointing):
    cfg = small(overrides)
    plain, compiled = VisionTransformer(cfg), VisionTransformer(cfg)
    randomize(plain)
    compiled.load_state_dict(plain.state_dict())
    prepare_blocks(compiled, activation_checkpointing=activation_checkpointing, compile=True)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert_close(outputs_and_gradients(compiled, images(cfg)), outputs_and_gradients(plain, images(cfg)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "init_values=0.1",
        "init_values=0.1 reg_tokens=4 no_embed_class=true",
        DROPOUT,
        *ROPES.values(),
        *BLOCKS.values(),
    ],
)
def test_residual_stream_is_bf16_under_autocast(overrides, device):
    """On a GPU norms are in FP32 then, on a CPU they are not."""
    cfg = small(overrides)
    model = drawn(cfg).to(device)
    dtypes = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
        block.register_forward_hook(lambda _, args, output: dtypes.append(output.dtype))
    with torch.autocast(device, torch.bfloat16):
        model(images(cfg).to(device))
    assert dtypes == [torch.bfloat16] * 2 * cfg.depth


@pytest.mark.parametrize("overrides", [ALL_TOKENS, *BLOCKS.values()])
def test_weights_in_bf16_compute_in_bf16(overrides):
    """As FSDP2 has them: parameters are cast, buffers are not."""
    cfg = small(overrides)
    model = drawn(cfg)
    for p in model.parameters():
        p.data = p.data.bfloat16()
    assert model(images(cfg)).dtype == torch.bfloat16
