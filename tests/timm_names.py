"""timm's names as configs of ours, small and shallow ones."""

import launch

import contextlib
import functools
from dataclasses import replace
from unittest import mock

import torch

from interop.timm_models import arguments_of

SIZES = {"img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_kv_heads"}
SMALL = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 7}


@functools.cache
def base():
    overrides = ["model=vit_base_patch16_224", "output_dir=/tmp/unused", "checkpoint.save_final_model=false"]
    return launch.load_config("L0_sanity", overrides, script="train_ddp").model


@functools.cache
def config_of(name):
    """Our config of a name that we can express."""
    return replace(base(), **arguments_of(name))


def small(cfg):
    """The same architecture in a size of milliseconds, and timm's arguments for that."""
    sizes = dict(SMALL)
    if isinstance(cfg.num_kv_heads, tuple):
        sizes["num_kv_heads"] = (4, 2)
    return replace(cfg, **sizes), sizes


def shallow(cfg):
    """The same widths with two blocks, and timm's arguments for that."""
    sizes = {"depth": 2, "img_size": cfg.img_size}  # else timm takes that of its weights
    if isinstance(cfg.num_kv_heads, tuple):
        sizes["num_kv_heads"] = cfg.num_kv_heads[-2:]
    return replace(cfg, **sizes), sizes


# What a start is drawn with: on the meta device each takes milliseconds of Python, for nothing.
DRAWS = ("uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_")


@contextlib.contextmanager
def on_meta():
    """Models that are built inside have shapes alone."""
    nothing = dict.fromkeys(DRAWS, lambda tensor, *args, **options: tensor)
    with torch.device("meta"), mock.patch.multiple(torch.Tensor, **nothing):
        yield


def architecture(cfg):
    """A config without its sizes: names that have the same one differ in them alone."""
    return tuple((key, value) for key, value in vars(cfg).items() if key not in SIZES)
