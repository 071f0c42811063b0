"""Small models, and their weights in every kind of file, for tests."""

import launch

import functools
import json
import os
import pickle
from dataclasses import fields

import numpy as np
import timm
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer as TimmViT

import schema
from interop import weights_in, weights_out
from vit import VisionTransformer

SMALL = (
    "img_size=64 patch_size=16 in_chans=3 embed_dim=24 depth=2 num_heads=3 num_classes=7 "
    "global_pool=token class_token=true"
)
CLASSES = [f"class_{letter}" for letter in "abcdefg"]


MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


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
    build = timm.model_entrypoint(schema.timm_architecture(vars(cfg))) if cfg.later_options() else TimmViT
    return drawn(build(**weights_out.timm_arguments(vars(cfg)), num_classes=cfg.num_classes), seed)


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
    arguments = weights_out.timm_arguments(plain(cfg))
    architecture = schema.timm_architecture(vars(cfg))
    content = {"architecture": architecture, "num_classes": cfg.num_classes, "model_args": arguments}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def write_teacher(folder, architecture="test_byobnet", *, num_classes=6, names=None, seed=0, **arguments):
    """A small model of timm's with weights whose answers differ from image to image, as timm writes it; its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = timm.create_model(architecture, num_classes=num_classes, **arguments)
    with torch.no_grad():
        for head in (module for name, module in model.named_modules() if name in ("head", "head.fc")):
            if isinstance(head, torch.nn.Linear):
                head.weight.mul_(20)
    config = {"label_names": list(names)} if names else None
    timm.models.save_for_hf(model, folder, model_config=config, model_args=arguments, safe_serialization=True)
    return folder


def write_jax(file, cfg, *, prefix="", is_stacked=False, extra=None):
    """A model of a config as Google's JAX code writes one: the names and shapes of its modules, drawn numbers."""
    rng = np.random.default_rng(0)
    dim, heads, hidden = cfg.embed_dim, cfg.num_heads, int(cfg.embed_dim * cfg.mlp_ratio)
    is_big_vision = prefix.startswith("params/")
    rows = (cfg.img_size // cfg.patch_size) ** 2 + (cfg.class_token and not cfg.no_embed_class)
    head = cfg.representation_size or dim

    def dense(name, *shape, outputs=1):
        return {f"{name}/kernel": shape, f"{name}/bias": shape[-outputs:]}

    def norm(name):
        return {f"{name}/scale": (dim,), f"{name}/bias": (dim,)}

    def attention(name):
        qkv = {}
        for part in ("query", "key", "value"):
            qkv |= dense(f"{name}/{part}", dim, heads, dim // heads, outputs=2)
        return qkv | dense(f"{name}/out", heads, dim // heads, dim)

    def mlp(name):
        return dense(f"{name}/Dense_0", dim, hidden) | dense(f"{name}/Dense_1", hidden, dim)

    first, second, third = (0, 1, 0) if is_big_vision else (1, 2, 3)  # numbers of a block's modules
    block = norm("LayerNorm_0") | attention(f"MultiHeadDotProductAttention_{first}")
    block |= norm(f"LayerNorm_{second}") | mlp(f"MlpBlock_{third}")
    sizes = dense("embedding", cfg.patch_size, cfg.patch_size, cfg.in_chans, dim) | norm("Transformer/encoder_norm")
    sizes["pos_embedding" if is_big_vision else "Transformer/posembed_input/pos_embedding"] = (1, rows, dim)
    sizes |= {"cls": (1, 1, dim)} if cfg.class_token else {}
    if is_stacked:
        sizes |= {f"Transformer/encoderblock/{name}": (cfg.depth, *shape) for name, shape in block.items()}
    else:
        for i in range(cfg.depth):
            sizes |= {f"Transformer/encoderblock_{i}/{name}": shape for name, shape in block.items()}
    if cfg.global_pool == "map":
        sizes |= {"MAPHead_0/probe": (1, 1, dim)} | norm("MAPHead_0/LayerNorm_0") | mlp("MAPHead_0/MlpBlock_0")
        sizes |= attention("MAPHead_0/MultiHeadDotProductAttention_0")
    if cfg.representation_size:
        sizes |= dense("pre_logits", dim, head)
    sizes |= dense("head", head, cfg.num_classes)
    arrays = {prefix + name: rng.normal(size=shape).astype(np.float32) for name, shape in sizes.items()}
    np.savez(file, **arrays, **({} if prefix in ("", "params/") else {"step": np.zeros(3)}), **(extra or {}))


def fitted(source, cfg):
    return weights_in.fit(weights_in.read(str(source)), cfg, shapes(cfg))


def assert_same_bits(actual, expected):
    """Same names, and the same bits."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == torch.float32
        assert torch.equal(actual[name], value), name


def cut_off(file):
    """Leaves the first twentieth: half a checkpoint's file may hold all weights, and lack optimizer state only."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 20])


# --- exports


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


# --- what nobody should open


class Planted:
    """Runs a command when it is unpickled: it makes the file `proof`."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


def plant(folder, proof):
    """Put a command into the index of a checkpoint, which stays whole: DCP's own reader runs it and goes on."""
    with open(folder / ".metadata", "rb") as file:
        index = pickle.load(file)
    index.planner_data = Planted(proof)
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(index, file)
