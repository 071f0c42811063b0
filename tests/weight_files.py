"""Small models, and their weights in every kind of file, for tests."""

import launch

import functools
import json
import os
import pickle
from dataclasses import fields

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
