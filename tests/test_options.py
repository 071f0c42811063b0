"""No option is passed over: every key, with every script, is read by the run or refused by name.

What a run reads is recorded, not listed: the classes of schema.py note each field that is asked for. For Megatron-FSDP
stand_in_cuda.py has what it asks of a GPU; what TransformerEngine reads is in tests/test_fp8.py.
"""

import launch

import contextlib
import dataclasses
import importlib
import json
import logging
import sys
import types
from unittest import mock

import pytest
import stand_in_cuda
import torch
from configs import schema_leaves, sections
from conftest import SCRIPTS, error_of, make_images, tiny_config
from pydantic import TypeAdapter
from weight_files import write_teacher

import schema
from runtime import preemption

# What is tried

# Key -> another value than the tiny config's; those that follow from the type are left out.
VALUES = {
    "num_epochs": 2.0,
    "global_batch_size": 12,
    "micro_batch_size": 12,
    "precision": "bf16",
    "output_dir": "elsewhere",
    "model.img_size": 24,
    "model.patch_size": 4,
    "model.in_chans": 1,
    "model.embed_dim": 48,
    "model.num_heads": 4,
    "model.global_pool": "map",
    "model.init_values": 0.1,
    "model.fc_norm": False,
    "model.drop_path_schedule": "constant",
    "model.pos_embed": "sincos",
    "model.representation_size": 9,
    "model.freeze": "backbone",
    "model.act_layer": "relu",
    "model.norm_eps": 1e-5,
    "model.norm_layer": "rmsnorm",
    "model.block_fn": "ResPostBlock",
    "model.attn_layer": "diff",
    "model.rel_pos_type": "mlp",
    "model.rel_pos_dim": 16,
    "model.mlp_layer": "glu",
    "model.attn_type": "eva",
    "model.num_kv_heads": 1,
    "model.rope_type": "cat",
    "model.rope_grid_indexing": "xy",
    "model.ref_feat_shape": 3,
    "model.attn_pool_num_heads": 1,
    "model.attn_pool_mlp_ratio": 2.0,
    "model.implementation": "timm",
    "data.source": "webdataset",
    "data.path": "/other",
    "data.image_size": 24,
    "data.size_schedule": [{"epoch": 1.0, "img_size": 24}],
    "data.decoder": "pillow",
    "data.on_error": "skip",
    "data.repeated_augmentation": 2,
    "data.packing.patches_per_image": 9,
    "data.packing.images_per_row": 4,
    "data.crop_scale": [0.5, 1.0],
    "data.crop_ratio": [0.5, 1.0],
    "data.auto_augment": "rand-m9",
    "data.color_jitter": [0.1, 0.1, 0.1],
    "data.interpolation": "bilinear",
    "data.mean": [0.5],
    "data.std": [0.5],
    "data.num_synthetic_train": 48,
    "data.num_synthetic_val": 24,
    "optimizer.name": "lamb",
    "optimizer.lr_base_size": 12,
    "optimizer.lr_base_scale": "sqrt",
    "optimizer.betas": [0.8, 0.9],
    "optimizer.momentum": 0.9,
    "optimizer.layer_decay": 0.5,
    "lr_scheduler.name": "linear",
    "lr_scheduler.num_warmup_epochs": 1.0,
    "lr_scheduler.warmup_start_lr": 1e-4,
    "lr_scheduler.num_training_steps": 9,
    "lr_scheduler.rsqrt_timescale": 5,
    "lr_scheduler.min_lr": 1e-4,
    "ema.decay": 0.9,
    "loss.name": "sigmoid",
    "loss.bce_target_thresh": 0.2,
    "evaluation.every_n_steps": 3,
    "evaluation.every_n_epochs": 1.0,
    "evaluation.best_metric": "val/loss",
    "checkpoint.ckpt_dir": "elsewhere",
    "checkpoint.local_dir": "elsewhere",
    "data.cache_dir": "elsewhere",
    "checkpoint.save_every_n_steps": 3,
    "checkpoint.save_every_n_epochs": 1.0,
    "checkpoint.init_from": "timm:none",
    "logger.peak_tflops": 100.0,
    "wandb.mode": "offline",
    "wandb.init_args": {"project": "vit"},
    "profiler.ranks": [0, 1],
    "optimizer.state_dtype": "bf16",
    "distillation.kind": "hard",
    "distillation.teacher": "/a/teacher",
    "distillation.image_size": 24,
    "distributed.dp_outer": 2,
    "distributed.hang_timeout_s": 300.0,
    "distributed.slow_rank_factor": 2.0,
    "distributed.dp_shard": 2,
    "distributed.tp": 2,
    "mfsdp.zero_dp_strategy": "optim",
    "mfsdp.outer_dp_sharding_strategy": "optim",
    "fp8_config.fp8_recipe": "Float8BlockScaling",
    "fp8_config.fp8_format": "E4M3",
    "fp8_config.layers": ["*.mlp.*"],
    "fp8_config.log_statistics_every_n_steps": 2,
    "fp8_config.fp8_recipe_kwargs.margin": 1,
    "fp8_config.fp8_recipe_kwargs.amax_history_len": 4,
    "fp8_config.fp8_recipe_kwargs.amax_compute_algo": "max",
    "fp8_config.fp8_recipe_kwargs.x_block_scaling_dim": 1,
    "fp8_config.fp8_recipe_kwargs.w_block_scaling_dim": 1,
    "fp8_config.fp8_recipe_kwargs.grad_block_scaling_dim": 1,
}
CONFIG = TypeAdapter(schema.Config)
OTHER_LENGTH = {one: other for pair in launch.LENGTHS for one, other in (pair, pair[::-1])}
# Turned on together, and what each puts to work; the folder has an image that cannot be read.
ON = {
    "averaged and mixed": {
        "ema.decay": 0.9, "ema.use_warmup": True, "data.mixup": 0.5, "data.cutmix": 0.5, "model.drop_path_rate": 0.1,
        "model.class_token": True, "data.on_error": "skip", "evaluation.every_n_steps": 3, "wandb.mode": "offline",
        "profiler.trace": True, "profiler.first_step": 2, "profiler.num_steps": 1, "data.num_workers": 1,
        "data.path": "BROKEN", "optimizer.lr_base_size": 12,
    },
    "in rows": {"data.packing.enabled": True},
    "shards": {"data.source": "webdataset", "data.path": "SHARDS"},
    "noise": {
        "data.source": "synthetic", "data.path": None, "data.num_synthetic_train": 48, "data.num_synthetic_val": 24
    },
    "rsqrt": {
        "lr_scheduler.name": "rsqrt", "lr_scheduler.rsqrt_timescale": 3, "lr_scheduler.num_cooldown_steps": 2,
        "optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.betas": None, "optimizer.eps": None,
        "loss.name": "sigmoid", "loss.bce_target_thresh": 0.1,
    },
    "faster averages": {"optimizer.betas": [0.9, 0.95]},
    "taught": {
        "distillation.kind": "soft", "distillation.teacher": "TEACHER", "model.global_pool": "token",
        "model.class_token": True,
    },
    "rotary positions": {
        "model.rope_type": "cat", "model.qkv_fused": False, "model.init_values": 0.1, "model.global_pool": "map",
        "model.mlp_layer": "swiglu", "model.swiglu_align_to": 8, "model.act_layer": "silu",
    },
    "relative positions": {"model.rel_pos_type": "mlp", "model.pos_embed": "none"},
    "a gated MLP": {"model.act_layer": "silu"},
    "not exported": {"checkpoint.save_final_model": False},
}  # fmt: skip
# Refused on a machine without a GPU whatever else is set, or read by TransformerEngine only: tests/test_fp8.py.
OF_A_GPU = {"compile", "data.decoder", "profiler.memory_snapshot", "model.transformer_engine", "cuda_graphs"}
OF_A_GPU |= {"fsdp2.cpu_offload"} | {key for key in schema_leaves() if key.startswith("fp8_config.")}
OF_A_GPU |= {"mfsdp.outer_dp_sharding_strategy"}
OF_A_BUCKET = {"checkpoint.local_dir", "data.cache_dir", "data.cache_gb"}  # tests/test_bucket_checkpoint.py, _data.py
NEVER = {"data.image_size", "distributed.tp", "distributed.dp_outer", "distributed.dp_shard"}  # but as derived, alone
NOT_WITH_MEGATRON_FSDP = {"model.freeze", "model.implementation", "model.pos_embed", "precision"}
NOT_WITH_MEGATRON_FSDP |= {"distillation.shard_teacher"}


def with_keys(cfg, changes):
    """The config with other values, by dotted keys, checked as any."""
    plain = schema.to_plain(cfg)
    for key, value in changes.items():
        *path, name = key.split(".")
        section = plain
        for part in path:
            section = section[part]
        section[name] = value
        if value is not None and OTHER_LENGTH.get(key) not in (None, *changes):
            *path, name = OTHER_LENGTH[key].split(".")
            (plain[path[0]] if path else plain)[name] = None
    if "model.img_size" in changes:
        plain["data"]["image_size"] = plain["model"]["img_size"]
    try:
        return CONFIG.validate_json(json.dumps(plain))
    except ValueError as error:
        raise schema.ConfigError(launch._one_line(error)) from error


def value_of(cfg, key):
    for name in key.split("."):
        cfg = getattr(cfg, name)
    return cfg


def another_value(cfg, key):
    """A value that the key does not have, and may have."""
    if key in VALUES:
        return VALUES[key]
    value = value_of(cfg, key)
    if isinstance(value, bool):
        return not value
    assert isinstance(value, int | float), f"{key}={value}: say in VALUES what to try"
    return value + 1 if isinstance(value, int) else value / 2 or 0.25


def accepted(cfg, changes, script):
    """The config with the changes, or the refusal's text."""
    with mock.patch.object(torch.cuda, "is_available", return_value=script == "train_mfsdp"):  # which has no other path
        try:
            changed = with_keys(cfg, changes)
            launch.check_script(changed, script, 1)
            launch.check_options(changed, script, list(changes))
        except schema.ConfigError as error:
            return str(error)
    return changed


# What a run reads


@contextlib.contextmanager
def recorded():
    """The set of dotted keys that are asked for inside, but for those of a whole config that is copied or written."""
    read, copying = set(), []

    def noting(cls, prefix):
        names = {field.name for field in dataclasses.fields(cls) if not dataclasses.is_dataclass(field.type)}

        def get(self, name):
            if name in names and not copying:
                read.add(prefix + name)
            return object.__getattribute__(self, name)

        return get

    def aside(function):
        def call(*args, **kwargs):
            copying.append(function)
            try:
                return function(*args, **kwargs)
            finally:
                copying.pop()

        return call

    with contextlib.ExitStack() as stack:
        for function in ("asdict", "replace"):
            stack.enter_context(mock.patch.object(dataclasses, function, aside(getattr(dataclasses, function))))
        for cls, prefix in sections():
            stack.enter_context(mock.patch.object(cls, "__getattribute__", noting(cls, prefix), create=True))
        yield read


def keys_read(cfg, script, folder):
    """What a run of the script asks the config for."""
    cfg = with_keys(cfg, {"output_dir": str(folder), "checkpoint.ckpt_dir": str(folder / "checkpoints")})
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    with pytest.MonkeyPatch.context() as patch, recorded() as read, contextlib.ExitStack() as stack:
        patch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: mock.MagicMock()))
        launch.ranks_to_use(cfg, script, 1)  # as the way in does
        if script == "train_mfsdp":
            stack.enter_context(stand_in_cuda.installed())
        importlib.import_module(script).main(cfg)
    root.level, root.handlers[:] = before
    preemption._received.clear()
    return read


@pytest.fixture(scope="module")
def folders(made_shards, tmp_path_factory):
    """Names in ON -> the folders."""
    broken = make_images(tmp_path_factory.mktemp("broken"))
    (broken / "train/class_a/003.jpg").write_text("no image")
    teacher = write_teacher(tmp_path_factory.mktemp("teacher"))
    return {"SHARDS": str(made_shards), "BROKEN": str(broken), "TEACHER": str(teacher)}


@pytest.fixture(scope="module")
def read_by(image_folder, folders, tmp_path_factory):
    """A function: script, changes -> the keys that its run reads."""
    known = {}

    def keys(script, changes):
        name = (script, json.dumps(changes))
        if name not in known:
            cfg = with_keys(plain(image_folder, script), placed(changes, folders))
            known[name] = keys_read(cfg, script, tmp_path_factory.mktemp("run"))
        return known[name]

    return keys


def plain(image_folder, script="train_ddp"):
    """The tiny config, with nothing turned on."""
    precision = "bf16" if script == "train_mfsdp" else "fp32"  # which it has alone
    return with_keys(tiny_config(f"data.path={image_folder}"), {"precision": precision})


def placed(changes, folders):
    return {key: folders.get(value, value) if isinstance(value, str) else value for key, value in changes.items()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_key_is_read_or_refused_by_name(script, image_folder, read_by):
    cfg = plain(image_folder, script)
    passed_over = {}
    for key in sorted(schema_leaves()):
        changes = {key: another_value(cfg, key)}
        outcome = accepted(cfg, changes, script)
        if isinstance(outcome, str):
            if f"{key}=" not in outcome and f"{key}.project=" not in outcome:
                passed_over[key] = f"refused as {outcome}"
        elif key not in read_by(script, {}) and key not in read_by(script, changes):
            passed_over[key] = "not read"
    assert passed_over == {}


@pytest.mark.parametrize("script", ["train_ddp", *(pytest.param(s, marks=pytest.mark.slow) for s in SCRIPTS[1:])])
def test_what_is_refused_alone_has_a_use(script, image_folder, folders, read_by):
    """No option is refused wherever it is given: something puts it to work, and the run then reads it."""
    cfg = plain(image_folder, script)
    others = tuple(f"{name.removeprefix('train_')}." for name in SCRIPTS if name != script)
    useless = []
    never = NEVER | OF_A_GPU | OF_A_BUCKET | (NOT_WITH_MEGATRON_FSDP if script == "train_mfsdp" else set())
    for key in sorted(schema_leaves() - never):
        value = another_value(cfg, key)
        if key.startswith(others) or not isinstance(accepted(cfg, {key: value}, script), str):
            continue
        for changes in ON.values():
            together = placed(changes, folders) | {key: value}
            if not isinstance(accepted(cfg, together, script), str) and key in read_by(script, changes):
                break
        else:
            useless.append(key)
    assert useless == []


# What the command line gives, and what a file


def options(script, typed, **changes):
    """What check_options says of the tiny config with these changes."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return launch.check_options(with_keys(tiny_config("data.path=unused"), changes), script, typed)


@pytest.mark.parametrize(
    ("typed", "key", "value", "fragments"),
    [
        ("ddp.bucket_cap_mb", "ddp__bucket_cap_mb", 50, ["=50 does nothing in train_fsdp2.py", "use train_ddp.py"]),
        ("mfsdp", "mfsdp__zero_dp_strategy", "optim", ["mfsdp.zero_dp_strategy=optim", "use train_mfsdp.py"]),
        ("ema.use_warmup", "ema__use_warmup", True, ["with ema.decay=null", "set ema.decay="]),
        ("data.mixup_prob", "data__mixup_prob", 0.5, ["data.mixup_prob=0.5", "data.mixup=0 and data.cutmix=0"]),
        ("optimizer", "optimizer__lr_base_scale", "sqrt", ["=sqrt does nothing with optimizer.lr_base_size=null"]),
        ("wandb.init_args.x", "wandb__init_args", {"x": 1}, ["wandb.init_args.x=1", "with wandb.mode=disabled"]),
        ("wandb.init_args", "wandb__init_args", {"x": 1}, ["wandb.init_args.x=1", "set wandb.mode=offline"]),
    ],
)
def test_what_is_typed_must_do_something_and_what_a_file_holds_is_said(typed, key, value, fragments):
    text = error_of(options, "train_fsdp2", [typed], **{key: value})
    note = options("train_fsdp2", ["optimizer.lr"], **{key: value})
    assert note.startswith("without effect in this run: ")
    for fragment in fragments:
        assert fragment in text
    assert text.split(" does nothing")[0] in note
    assert len(note.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoint__save_every_n_steps", None),  # with nothing saved, nothing is asked for
        ("checkpoint__resume_from_checkpoint", False),
        ("data__mixup_prob", 1.0),  # as it is anyway
        ("fsdp2__cpu_offload", False),
    ],
)
def test_what_asks_for_nothing_may_be_typed(key, value):
    assert options("train_ddp", [key.replace("__", ".")], checkpoint__ckpt_dir=None, **{key: value}) is None


def test_what_is_not_on_in_another_strategy_is_said_too():
    """False asks for something there: fsdp2.reshard_after_forward=false is ZeRO-2."""
    text = error_of(options, "train_ddp", ["fsdp2.reshard_after_forward"], fsdp2__reshard_after_forward=False)
    assert text.startswith("fsdp2.reshard_after_forward=false does nothing in train_ddp.py")
