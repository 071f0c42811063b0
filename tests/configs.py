"""Configs for tests: any, a small one, one on images; and the keys that a config has."""

import launch

import dataclasses
import functools

from conftest import ROOT, TINY

import schema

CONFIG = ROOT / "config"
PRIMARY = sorted(file.stem for file in CONFIG.glob("*.yaml") if file.stem != "defaults")


MODELS = sorted(file.stem for file in (CONFIG / "model").glob("*.yaml"))


BASE = [
    "model.img_size=28",
    "model.patch_size=4",
    "model.in_chans=1",
    "model.embed_dim=96",
    "model.num_heads=3",
    "num_train_steps=666",
    "global_batch_size=96",
    "optimizer.lr=2e-3",
]


@functools.cache
def load(*overrides, name="L0_sanity"):
    return launch.load_config(name, list(overrides), script="train_ddp")


def small(*overrides):
    """A config whose values do not follow from how the default run is tuned."""
    return load(*BASE, *overrides)


def with_values(cfg, **values):
    """The config with other values of a section, given as section=dict(...), or at its top."""
    for key, value in values.items():
        if isinstance(value, dict):
            value = dataclasses.replace(getattr(cfg, key), **value)
        cfg = dataclasses.replace(cfg, **{key: value})
    return cfg


def sections(cls=schema.Config, prefix=""):
    """Every dataclass of the config with the prefix of its keys."""
    yield cls, prefix
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            yield from sections(field.type, f"{prefix}{field.name}.")


def schema_leaves():
    return {
        prefix + field.name
        for cls, prefix in sections()
        for field in dataclasses.fields(cls)
        if not dataclasses.is_dataclass(field.type)
    }


def yaml_leaves(content, prefix=""):
    """Dotted keys of a YAML file, without what Hydra reads itself; wandb.init_args is a mapping of anything."""
    for key, value in content.items():
        if prefix or key not in ("defaults", "hydra"):
            if isinstance(value, dict) and value and prefix + key != "wandb.init_args":
                yield from yaml_leaves(value, f"{prefix}{key}.")
            else:
                yield prefix + key


STEPS = 8  # 192 images of 60, or 64 of 20: more than three epochs


# Nothing here follows from how the default run is tuned.
DATA_BASE = [
    f"num_train_steps={STEPS}",
    "data.path=unused",
    "data.num_workers=0",
    "data.crop_scale=[0.3,1]",
    "data.crop_ratio=[0.75,1.25]",
    "data.hflip=0.5",
    "data.interpolation=bicubic",
    "data.crop_pct=0.875",
    "data.mean=[0.4]",
    "data.std=[0.3]",
    "lr_scheduler.name=cosine",
    "lr_scheduler.min_lr=0",
]


@functools.cache
def composed_data_config(*overrides):
    return launch.load_config("L0_sanity", [*TINY, *DATA_BASE, *overrides], script="train_ddp")


def data_config(path, *overrides):
    """L0_sanity on the images at `path`, 16 x 16 pixels, 24 a step unless overridden."""
    cfg = composed_data_config(*overrides)
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, path=str(path)))
