"""The config: what composes, what is refused and in which words, and the sizes that follow from it."""

import ast
import dataclasses
import math
import re
import shlex
import types
from fractions import Fraction

import pytest
import yaml
from configs import CONFIG, MODELS, PRIMARY, load, schema_leaves, sections, small, with_values, yaml_leaves
from conftest import ROOT, error_of

import schema
from imagenet_dataset import run_sizes


def keys_of(file):
    content = yaml.safe_load(file.read_text()) or {}
    if file.parent == CONFIG:
        return list(yaml_leaves(content))
    return list(
        yaml_leaves({key: value for key, value in content.items() if key != "defaults"}, f"{file.parent.name}.")
    )


# What there is


@pytest.mark.parametrize(
    ("primary", "model"),
    [
        *((primary, None) for primary in PRIMARY),
        *(
            pytest.param(primary, model, marks=pytest.mark.slow)
            for primary in PRIMARY
            for model in ("vit_tiny_patch16_224", "vit_10b_patch14_224")
        ),
        *(("vit_base_patch16_224", model) for model in MODELS if model.startswith("vit")),
    ],
)
def test_every_primary_config_composes(primary, model):
    overrides = ["data.path=/data/imagenet", *([f"model={model}", "data.size_schedule=null"] if model else [])]
    cfg = load(*overrides, name=primary)
    assert isinstance(cfg, schema.Config)
    assert cfg.data.path == "/data/imagenet"
    if model:
        content = yaml.safe_load((CONFIG / f"model/{model}.yaml").read_text())
        shape = {key: content[key] for key in ("patch_size", "embed_dim", "depth", "num_heads") if key in content}
        assert {key: getattr(cfg.model, key) for key in shape} == shape


@pytest.mark.parametrize(
    ("data", "overrides"),
    [("imagenet", ["data.path=/data"]), ("synthetic", []), ("fashion_mnist_demo", ["data.path=/data"])],
)
def test_every_data_group_composes(data, overrides):
    cfg = load("model=vit_tiny_patch16_224", f"data={data}", *overrides)
    assert cfg.data.image_size == cfg.model.img_size == 224


def test_there_is_a_case_for_every_group_option():
    assert {file.stem for file in (CONFIG / "data").glob("*.yaml")} == {"imagenet", "synthetic", "fashion_mnist_demo"}
    own = {"micro", "cifar10", "cifar10_48"}  # of one config each
    assert {name for name in MODELS if not name.startswith(("vit", "eva02"))} == own


@pytest.mark.parametrize("primary", PRIMARY)
def test_primary_config_says_how_it_is_used(primary):
    header = [line for line in (CONFIG / f"{primary}.yaml").read_text().splitlines() if line.startswith("#")]
    for topic in ("command", "hardware", "time", "expected", "source"):
        assert any(re.match(rf"#\s+{topic}\s+\S", line) for line in header), topic


@pytest.mark.parametrize("file", sorted(CONFIG.rglob("*.yaml")), ids=lambda file: str(file.relative_to(CONFIG)))
def test_every_yaml_key_is_in_the_schema(file):
    keys = keys_of(file)
    assert keys or "override" in file.read_text()
    assert set(keys) <= schema_leaves()


def test_every_schema_key_has_its_value_in_one_base_file():
    files = ("defaults.yaml", "model/vit_base_patch16_224.yaml", "data/imagenet.yaml")
    keys = [key for file in files for key in keys_of(CONFIG / file)]
    assert len(keys) == len(set(keys))
    assert set(keys) == schema_leaves()


def test_no_key_is_dead():
    read = set()
    folders = (".", "input_pipeline", "interop", "observability", "runtime")
    files = [file for folder in folders for file in (ROOT / folder).glob("*.py") if file.name != "schema.py"]
    # Of schema.py only what makes a run's sizes: its rules read keys without honouring them.
    sizes = [node for node in ast.walk(ast.parse((ROOT / "schema.py").read_text())) if getattr(node, "name", "") in
             ("split_batch", "peak_lr", "RunSizes", "kv_heads")]  # fmt: skip
    assert len(sizes) == 4
    for tree in [*(ast.parse(file.read_text()) for file in files), *sizes]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)
    handed_over_whole = "fp8_config.fp8_recipe_kwargs."  # to TransformerEngine, by their names
    keys = {key for key in schema_leaves() if not key.startswith(handed_over_whole)}
    assert {key for key in keys if key.split(".")[-1] not in read} == set()


def test_schema_holds_no_values():
    for cls, prefix in sections():
        for field in dataclasses.fields(cls):
            has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
            assert not has_default, prefix + field.name


def test_known_keys_are_the_schemas():
    section_names = {prefix[:-1] for _, prefix in sections() if prefix}
    assert set(schema.known_keys()) == schema_leaves() | section_names


def test_config_is_frozen_everywhere():
    def freeze_test(section):
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(section, field.name, value)
            if dataclasses.is_dataclass(value):
                freeze_test(value)

    freeze_test(load())


def test_config_holds_plain_values_only():
    def check(value, key):
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                check(getattr(value, field.name), f"{key}.{field.name}")
        elif type(value) in (tuple, list):
            for item in value:
                check(item, key)
        elif type(value) is dict:
            for name, item in value.items():
                assert type(name) is str, key
                check(item, f"{key}.{name}")
        else:
            assert type(value) in (int, float, str, bool, types.NoneType), (key, type(value))

    check(load("+wandb.init_args={notes: p, tags: [a, b], nested: {x: 1}}", "model.img_size=[28,56]"), "config")


def test_values_arrive_as_they_were_given():
    cfg = load(
        "optimizer.lr=1", "model.img_size=[28,56]", "wandb.init_args={tags: [a, b]}", "data.mean=[0.5]", "seed=7"
    )
    assert cfg.optimizer.lr == 1.0
    assert cfg.model.img_size == cfg.data.image_size == (28, 56)
    assert cfg.wandb.init_args["tags"] == ["a", "b"]
    assert cfg.data.mean == (0.5,)
    assert cfg.seed == 7
    assert cfg.output_dir == "runs/L0_sanity-train_ddp"
    assert cfg.checkpoint.ckpt_dir == "runs/L0_sanity-train_ddp/checkpoints"
    assert load("output_dir=here").checkpoint.ckpt_dir == "here/checkpoints"


# What is refused: overrides, what the message must contain

REFUSED = {
    # Typos, with the nearest key.
    "section": ("optimzer.lr=1", "optimzer.lr", "did you mean optimizer.lr?"),
    "leaf": ("optimizer.lrr=1", "optimizer.lrr", "did you mean optimizer.lr?"),
    "model key": ("model.dpeth=3", "model.dpeth", "did you mean model.depth?"),
    "top level": ("global_batchsize=8", "global_batchsize", "did you mean global_batch_size?"),
    "added key": ("+model.num_head=3", "model.num_head=3", "did you mean model.num_heads?"),
    "added section": ("+averages.decay=0.9", "averages", "no such key"),
    "no neighbour": ("zzz=1", "zzz", "no such key"),
    "deleted key": ("~model.depth", "model.depth", "missing", "command line"),
    "deleted path": ("~data.path data.path=/x", "data.path is missing: ~data.path", "give data.path=... instead"),
    "deleted section": ("~ema", "ema is missing: ~ema", "give ema=... instead"),
    "deleted size": ("~model.img_size", "model.img_size is missing: ~model.img_size"),
    "group option": ("model=vit_smal", "model/vit_smal", "vit_small_patch16_224"),
    "no group option": ("model=null", "model=null: give a file of config/model/", "vit_base_patch16_224"),
    "number for a group option": ("data=3", "data=3: give a file of config/data/", "synthetic"),
    "data option": ("data=cifar", "data/cifar", "synthetic"),
    # Wrong types and values out of range.
    "text for a number": ("optimizer.lr=fast", "optimizer.lr='fast'", "valid number"),
    "negative lr": ("optimizer.lr=-1e-3", "optimizer.lr=-0.001", "greater than 0"),
    "zero lr": ("optimizer.lr=0", "optimizer.lr=0", "greater than 0"),
    "nan": ("optimizer.lr=nan", "optimizer.lr=nan", "finite"),
    "inf": ("max_grad_norm=inf", "max_grad_norm=inf", "finite"),
    "null": ("seed=null", "seed=null: ", "valid integer"),
    "fraction for an integer": ("seed=1.5", "seed=1.5", "valid integer"),
    "float for an integer": ("num_train_steps=1e3", "num_train_steps=1000.0", "valid integer"),
    "number as text": ("'model.depth=\"4\"'", "model.depth='4'", "valid integer"),
    "bool for an integer": ("model.depth=true", "model.depth=true", "valid integer"),
    "integer for a bool": ("compile=1", "compile=1", "valid boolean"),
    "negative seed": ("seed=-1", "seed=-1", "greater than or equal to 0"),
    "zero steps": ("num_train_steps=0", "num_train_steps=0", "greater than 0"),
    "zero batch": ("global_batch_size=0", "global_batch_size=0", "greater than 0"),
    "zero micro batch": ("micro_batch_size=0", "micro_batch_size=0", "greater than 0"),
    "choice": ("precision=fp16", "precision='fp16'", "'bf16' or 'fp32'"),
    "activation": ("model.act_layer=tanh", "model.act_layer='tanh'", "'gelu'"),
    "channels": ("model.in_chans=4", "model.in_chans=4", "1 or 3"),
    "rate of one": ("model.drop_rate=1.0", "model.drop_rate=1.0", "less than 1"),
    "flip": ("data.hflip=1.5", "data.hflip=1.5", "less than or equal to 1"),
    "crop_pct": ("data.crop_pct=0", "data.crop_pct=0", "greater than 0"),
    "workers": ("data.num_workers=-1", "data.num_workers=-1", "greater than or equal to 0"),
    "source": ("data.source=lmdb", "data.source='lmdb'", "'folder', 'webdataset' or 'synthetic'"),
    "beta of one": ("optimizer.betas=[0.9,1.0]", "optimizer.betas", "1.0", "less than 1"),
    "three betas": ("optimizer.betas=[0.9,0.95,0.999]", "optimizer.betas", "0.95", "at most 2"),
    "three sides": ("model.img_size=[28,28,28]", "model.img_size=[28, 28, 28]", "at most 2"),
    "metric": ("evaluation.best_metric=val/acc", "evaluation.best_metric='val/acc'", "'val/top1'"),
    "wandb mode": ("wandb.mode=on", "wandb.mode='on'", "'offline'"),
    "scalar for a section": ("optimizer=adam", "optimizer='adam'"),
    "tensor parallelism": ("distributed.tp=0", "distributed.tp=0", "greater than 0"),
    "dp_shard": ("distributed.dp_shard=0", "distributed.dp_shard=0", "greater than 0"),
    # Contradictions.
    "heads": ("model.num_heads=5", "model.num_heads=5", "model.embed_dim=96", "3"),
    "image and patch": ("model.img_size=30", "model.img_size=30", "model.patch_size=4", "28 or 32"),
    "one side and patch": ("model.img_size=[28,30]", "model.img_size=[28, 30]", "model.patch_size=4"),
    "patch": ("model.patch_size=5", "model.img_size=28", "model.patch_size=5", "25 or 30"),
    "two image sizes": ("data.image_size=32", "data.image_size=32", "model.img_size=28", "set model.img_size only"),
    "both lengths": ("num_epochs=3", "num_epochs=3", "num_train_steps=666", "exactly one", "null"),
    "no length": ("num_train_steps=null", "num_train_steps=null num_epochs=null: give exactly one"),
    "attention that is always fused": (
        "model.transformer_engine=true model.act_layer=gelu_tanh precision=bf16 model.fused_attn=false",
        "model.fused_attn=false",
        "model.transformer_engine=true",
        "set model.fused_attn=true",
    ),
    "pool without its token": ("model.global_pool=token", "model.global_pool=token", "model.class_token=true"),
    "means": ("data.mean=[0.1,0.2]", "data.mean=[0.1, 0.2]", "2 values", "model.in_chans=1", "one value"),
    "deviations": ("data.std=[1,1,1]", "data.std=", "3 values", "model.in_chans=1"),
    "means of bytes": ("data.mean=[72.9]", "data.mean=[72.9]", "0..1", "0..255", "data.mean=[0.2859]"),
    "deviations of bytes": ("data.std=[90]", "data.std=[90.0]", "0..1", "0..255", "data.std=[0.3529]"),
    "negative mean": ("data.mean=[-0.5]", "data.mean=[-0.5]", "0..1", "mend them"),
    "no means": ("data.mean=[]", "data.mean=[]", "at least 1"),
    "zero deviation": ("data.std=[0]", "data.std=0: input should be greater than 0\n"),
    "null among means": ("data.mean=[null]", "data.mean=null: input should be a valid number\n"),
    "two jitters": ("data.color_jitter=[1,2]", "list should have at least 3 items, not 2\n"),
    "size without pixels": ("data.size_schedule=[{epoch:1}]", "data.size_schedule={epoch: 1}: img_size is missing"),
    "typo in an entry": (
        "data.size_schedule=[{epoch:1,img_size:24,rate:1}]",
        "data.size_schedule: an entry has no rate; it has epoch, img_size, global_batch_size, lr, num_warmup_epochs",
    ),
    "wandb's argument": (
        "wandb.mode=offline wandb.init_args.notes=x",
        "wandb.init_args.notes=x: the config has no such argument yet",
        "+wandb.init_args.notes=x",
    ),
    "no path": ("data=imagenet data.mean=[0] data.std=[1]", "data.path", "missing", "data.path=..."),
    "null path": ("data.path=null", "data.path=null", "train/ and val/"),
    "empty output folder": ("output_dir=", "output_dir= is empty", "give a folder"),
    **{
        f"empty {key}": (f"{key}=", f"{key}= is empty", "give a value, or null")
        for key in (
            *("data.path", "data.cache_dir", "distillation.teacher"),
            *("checkpoint.ckpt_dir", "checkpoint.local_dir", "checkpoint.init_from"),
        )
    },
    "min_lr": ("lr_scheduler.min_lr=1", "lr_scheduler.min_lr=1", "optimizer.lr=0.002", "lower"),
    "min_lr of a constant": (
        "lr_scheduler.name=constant lr_scheduler.min_lr=1e-5",
        "lr_scheduler.min_lr=1e-05",
        "lr_scheduler.name=constant",
        "set 0",
    ),
    "norm_eps that cannot be exported": (
        "model.norm_eps=1e-3",
        "model.norm_eps=0.001",
        "1e-6",
        "checkpoint.save_final_model=false",
    ),
    "synthetic without sizes": ("data.source=synthetic", "data.source=synthetic", "data.num_synthetic_train"),
    "descending scale": ("data.crop_scale=[0.9,0.1]", "data.crop_scale=[0.9, 0.1]", "ascending"),
    "scale above one": ("data.crop_scale=[0.5,2]", "data.crop_scale=[0.5, 2.0]", "0..1"),
    "descending ratio": ("data.crop_ratio=[2,1]", "data.crop_ratio=[2.0, 1.0]", "ascending"),
    "no width": ("model.mlp_ratio=0.001", "model.mlp_ratio=0.001", "larger"),
    "outer sharding": (
        "mfsdp.outer_dp_sharding_strategy=optim mfsdp.zero_dp_strategy=optim",
        "mfsdp.outer_dp_sharding_strategy=optim",
        "mfsdp.zero_dp_strategy=optim_grads_params",
    ),
    "recomputation": ("activation_checkpointing=full", "activation_checkpointing='full'", "boolean", "'selective'"),
    "recomputation of what is frozen": (
        "activation_checkpointing=selective model.freeze=backbone",
        "activation_checkpointing=selective",
        "model.freeze=backbone",
        "activation_checkpointing=false",
    ),
    "recomputation of an MLP that is none": (
        "activation_checkpointing=selective model.block_fn=ParallelScalingBlock",
        "activation_checkpointing=selective",
        "model.block_fn=ParallelScalingBlock",
        "set true or false",
    ),
    "gathered blocks with ZeRO-2": (
        "fsdp2.gathered_blocks=1 fsdp2.reshard_after_forward=false",
        "fsdp2.gathered_blocks=1",
        "fsdp2.reshard_after_forward=false",
    ),
    "more gathered blocks than blocks": (
        "fsdp2.gathered_blocks=7 model.depth=6",
        "fsdp2.gathered_blocks=7",
        "model.depth=6",
    ),
    "FP8 without TransformerEngine": (
        "fp8_config.enabled=true",
        "fp8_config.enabled=true",
        "model.transformer_engine=true",
    ),
    "FP8 recipe": ("fp8_config.fp8_recipe=Delayed", "fp8_config.fp8_recipe='Delayed'", "'DelayedScaling'"),
    "FP8 format": ("fp8_config.fp8_format=E5M2", "fp8_config.fp8_format='E5M2'", "'HYBRID' or 'E4M3'"),
    "FP8 argument": ("fp8_config.fp8_recipe_kwargs.margin=-1", "kwargs.margin=-1", "greater than or equal to 0"),
    "another recipe's argument": (
        "fp8_config.fp8_recipe=Float8CurrentScaling fp8_config.fp8_recipe_kwargs.margin=1",
        "fp8_config.fp8_recipe_kwargs.margin=1",
        "Float8CurrentScaling takes none of them",
        "null",
    ),
    "FP8 attention": ("fp8_config.fp8_recipe_kwargs.fp8_dpa=true", "fp8_recipe_kwargs.fp8_dpa", "unknown"),
    "FP8 weights without FP8": (
        "fp8_config.quantized_model_init=true",
        "fp8_config.quantized_model_init=true",
        "fp8_config.enabled=true",
    ),
    "width in FP8": (
        "fp8_config.enabled=true model.transformer_engine=true model.act_layer=gelu_tanh precision=bf16 "
        "model.embed_dim=200 model.num_heads=4",
        "model.embed_dim=200",
        "192 or 208",
    ),
    "hidden width in FP8": (
        "fp8_config.enabled=true model.transformer_engine=true model.act_layer=gelu_tanh precision=bf16 "
        "model.embed_dim=96 model.num_heads=4 model.mlp_ratio=3.3",
        "model.embed_dim x model.mlp_ratio=316",
        "304 or 320",
    ),
    # Optimizers, schedules, averages and heads.
    "optimizer": ("optimizer.name=adam", "optimizer.name='adam'", "'adamw', 'sgd', 'lamb' or 'muon'"),
    "betas of SGD": (
        "optimizer.name=sgd optimizer.momentum=0.9",
        "optimizer.betas=[0.9, 0.999]",
        "optimizer.name=sgd takes momentum",
        "null",
    ),
    "averages too slow for BF16": (
        "optimizer.state_dtype=bf16",
        "optimizer.betas=[0.9, 0.999]",
        "optimizer.state_dtype=bf16",
        "0.992",
    ),
    "BF16 state of LAMB": (
        "optimizer.state_dtype=bf16 optimizer.name=lamb",
        "optimizer.state_dtype=bf16",
        "optimizer.name=lamb",
        "set fp32",
    ),
    "momentum of AdamW": ("optimizer.momentum=0.9", "optimizer.momentum=0.9", "betas and eps", "null"),
    "no momentum": (
        "optimizer.name=sgd optimizer.betas=null optimizer.eps=null",
        "optimizer.momentum=null",
        "optimizer.name=sgd needs a value",
    ),
    "no momentum of Muon": ("optimizer.name=muon", "optimizer.momentum=null", "optimizer.name=muon needs a value"),
    "no betas": ("optimizer.name=lamb optimizer.betas=null", "optimizer.betas=null", "needs a value"),
    "layer decay": ("optimizer.layer_decay=1.5", "optimizer.layer_decay=1.5", "less than or equal to 1"),
    "schedule": ("lr_scheduler.name=step", "lr_scheduler.name='step'", "'rsqrt'"),
    "cooldown of a cosine": ("lr_scheduler.num_cooldown_steps=5", "num_cooldown_steps=5", "cosine", "set 0"),
    "no timescale": ("lr_scheduler.name=rsqrt", "lr_scheduler.rsqrt_timescale=null", "10000"),
    "timescale of a line": (
        "lr_scheduler.name=linear lr_scheduler.rsqrt_timescale=9",
        "lr_scheduler.rsqrt_timescale=9",
        "lr_scheduler.name=linear",
        "null",
    ),
    "min_lr of rsqrt": (
        "lr_scheduler.name=rsqrt lr_scheduler.rsqrt_timescale=9 lr_scheduler.min_lr=1e-5",
        "lr_scheduler.min_lr=1e-05",
        "lr_scheduler.num_cooldown_steps",
    ),
    "start without warmup": (
        "lr_scheduler.warmup_start_lr=1e-6 lr_scheduler.num_warmup_steps=0",
        "lr_scheduler.warmup_start_lr=1e-06",
        "set 0",
    ),
    "start above the peak": ("lr_scheduler.warmup_start_lr=1", "lr_scheduler.warmup_start_lr=1", "optimizer.lr=0.002"),
    "start above the batch's peak": (
        "lr_scheduler.warmup_start_lr=1e-3 optimizer.lr_base_size=384",
        "lr_scheduler.warmup_start_lr=0.001 is above optimizer.lr=0.002 x 96 / 384 = 0.0005",
    ),
    "rate of no batch": ("optimizer.lr_base_size=0", "optimizer.lr_base_size=0", "greater than 0"),
    "scale of the rate": ("optimizer.lr_base_scale=square", "optimizer.lr_base_scale='square'", "'linear' or 'sqrt'"),
    "EMA's decay": ("ema.decay=1", "ema.decay=1", "less than 1"),
    "EMA's metric without EMA": ("evaluation.best_metric=val/ema_top1", "best_metric=val/ema_top1", "ema.decay=null"),
    "sincos width": ("model.pos_embed=sincos model.embed_dim=30", "model.embed_dim=30", "multiple of 4"),
    "hidden layer that cannot be exported": (
        "model.representation_size=96",
        "model.representation_size=96",
        "checkpoint.save_final_model=false",
    ),
    "implementation": ("model.implementation=torch", "model.implementation='torch'", "'ours', 'timm' or 'hf'"),
    "TransformerEngine in timm": (
        "model.implementation=timm model.transformer_engine=true",
        "model.transformer_engine=true",
        "model.implementation=timm",
        "model.implementation=ours",
    ),
    "hidden layer in timm": ("model.implementation=timm model.representation_size=9", "representation_size=9", "ours"),
    "constant drop path in timm": (
        "model.implementation=timm model.drop_path_schedule=constant",
        "model.drop_path_schedule=",
        "constant",
        "ours",
    ),
    "resident noise": (
        "data=synthetic data.num_synthetic_train=99 data.num_synthetic_val=9 data.resident=true",
        "data.source=synthetic with data.resident=true",
        "data.resident=false",
    ),
    "resident and nvJPEG": (
        "data.resident=true data.decoder=nvjpeg",
        "data.decoder=nvjpeg with data.resident=true",
        "torchvision",
    ),
    "resident and skip": (
        "data.resident=true data.on_error=skip",
        "data.on_error=skip with data.resident=true",
        "use raise",
    ),
    "resident augmix": (
        "data.resident=true data.auto_augment=augmix-m3-w3",
        "data.auto_augment=augmix-m3-w3",
        "data.resident=false",
    ),
    "resident hue": (
        "data.resident=true data.color_jitter=[0.1,0.1,0.1,0.1]",
        "data.color_jitter=[0.1, 0.1, 0.1, 0.1]",
        "hue",
    ),
    **{
        f"packing and {name}": (
            f"data.packing.enabled=true {override}",
            f"{override} with data.packing.enabled=true",
            f"set {override.split('=')[0]}={fix}, or data.packing.enabled=false",
        )
        for name, override, fix in (
            ("timm's model", "model.implementation=timm", "ours"),
            ("map", "model.global_pool=map", "avg"),
            ("two products", "model.fused_attn=false", "true"),
            ("dropped patches", "model.patch_drop_rate=0.5", "0"),
            ("dropped weights", "model.attn_drop_rate=0.1", "0"),
            ("mixup", "data.mixup=0.8", "0"),
            ("cutmix", "data.cutmix=1.0", "0"),
            ("resident", "data.resident=true", "false"),
            ("nvjpeg", "data.decoder=nvjpeg", "torchvision"),
            ("tp", "distributed.tp=2", "null"),
            ("graphs", "cuda_graphs=true", "false"),
        )
    },
    "packing and TransformerEngine": (
        "data.packing.enabled=true model.transformer_engine=true model.act_layer=gelu_tanh precision=bf16",
        "model.transformer_engine=true with data.packing.enabled=true",
    ),
    "packing and rotary positions": (
        "data.packing.enabled=true model.rope_type=cat",
        "model.rope_type=cat with data.packing.enabled=true",
    ),
    "packing and other blocks": (
        "data.packing.enabled=true model.block_fn=ParallelThingsBlock",
        "model.block_fn=ParallelThingsBlock with data.packing.enabled=true",
        "set model.block_fn=Block",
    ),
    "packing and differential attention": (
        "data.packing.enabled=true model.attn_layer=diff model.num_heads=2",
        "model.attn_layer=diff with data.packing.enabled=true",
        "set model.attn_layer=attn",
    ),
    "packing and relative positions": (
        "data.packing.enabled=true model.rel_pos_type=bias model.pos_embed=none",
        "model.rel_pos_type=bias with data.packing.enabled=true",
        "set model.rel_pos_type=null",
    ),
    "packing and several sizes": (
        "data.packing.enabled=true data.size_schedule=[{epoch:1,img_size:24}]",
        "data.size_schedule=[{epoch:1.0,img_size:24}] with data.packing.enabled=true",
        "set data.size_schedule=null",
    ),
    "packing and two heads": (
        "data.packing.enabled=true model.distilled=true model.class_token=true model.global_pool=token",
        "model.distilled=true with data.packing.enabled=true",
    ),
    "packing and a teacher": (
        "data.packing.enabled=true distillation.kind=hard distillation.teacher=timm:resnet18",
        "distillation.kind=hard with data.packing.enabled=true",
    ),
    "packing and narrow heads": (
        "data.packing.enabled=true model.num_heads=24",
        "model.num_heads=24 makes heads of 4 channels",
        "multiple of 8",
    ),
    "freeze": ("model.freeze=blocks", "model.freeze='blocks'", "'backbone' or 'patch_embed'"),
    # Text that is no override.
    "no equals sign": ("optimizer.lr", "optimizer.lr"),
    "unknown interpolation": ("data.path=${nothing}", "data.path", "nothing"),
    "unfinished value": ("data.mean=[0.5", "data.mean"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistake_is_one_line_with_key_value_and_fix(case):
    overrides, *fragments = REFUSED[case]
    text = error_of(small, *shlex.split(overrides))
    for fragment in fragments:
        assert fragment in f"{text}\n"  # which a fragment may end with
    assert not re.search(r"\b(None|True|False)\b", text)  # but null, true and false, as they are typed
    assert "pydantic" not in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("override", "value"), [("optimizer.betas=[0.9]", "0.9"), ("data.crop_scale=[0.5]", "0.5"), ("data.std=[]", "[]")]
)
def test_list_that_is_too_short_is_shown_and_not_called_missing(override, value):
    text = error_of(small, override)
    assert override.split("=")[0] in text
    assert value in text
    assert "missing" not in text


def test_primary_config_that_does_not_exist_is_named():
    assert "vit_bas" in error_of(load, name="vit_bas")


@pytest.mark.parametrize(
    ("override", "key"),
    [("model.img_size=30", "model.img_size"), ("model.patch_size=5", "model.img_size"),
     ("model.img_size=2", "model.img_size"), ("model.num_heads=5", "model.num_heads"),
     ("model.embed_dim=95", "model.num_heads")],
)  # fmt: skip
def test_every_value_that_a_message_proposes_works(override, key):
    proposed = re.findall(r"\d+", error_of(small, override).split("use ")[-1])
    assert proposed
    for value in {proposed[0], proposed[len(proposed) // 2], proposed[-1]}:
        assert getattr(small(override, f"{key}={value}").model, key.removeprefix("model.")) == int(value)


@pytest.mark.parametrize("override", ["wandb.init_args.project=vit", "wandb.init_args={project: vit}"])
def test_arguments_for_wandb_can_be_given_on_the_command_line(override):
    assert load(override).wandb.init_args["project"] == "vit"
    assert load(override, "+wandb.init_args.notes=x").wandb.init_args["notes"] == "x"


@pytest.mark.parametrize(
    "override",
    ["checkpoint.save_final_model=false", "checkpoint.ckpt_dir=null"],
)
def test_other_norm_eps_is_allowed_where_nothing_is_exported(override):
    assert load("model.norm_eps=1e-3", override).model.norm_eps == 1e-3


@pytest.mark.parametrize(
    "override",
    ["lr_scheduler.num_warmup_steps=100000", "lr_scheduler.min_lr=2e-3", "max_grad_norm=null", "data.hflip=1",
     "data.crop_scale=[1,1]", "model.init_values=1e-5", "micro_batch_size=7", "data.mean=[0]", "data.std=[1]",
     "evaluation.every_n_steps=null", "checkpoint.max_checkpoints=null", "lr_scheduler.num_training_steps=10"],
)  # fmt: skip
def test_unusual_values_are_allowed(override):
    assert isinstance(small(override), schema.Config)


# Batch arithmetic


def batch_config(global_batch_size, micro_batch_size):
    return with_values(small(), global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "world_size", "expected"),
    [
        *((96, None, n, (96 // n, 1)) for n in (1, 2, 3, 4)),
        (96, 96, 1, (96, 1)),
        (96, 12, 1, (12, 8)),
        (96, 12, 2, (12, 4)),
        (96, 16, 3, (16, 2)),
        (1024, 32, 8, (32, 4)),
        (7, 1, 7, (1, 1)),
        (1, None, 1, (1, 1)),
    ],
)
def test_accumulation_follows_from_the_batch_sizes(global_batch_size, micro_batch_size, world_size, expected):
    split = schema.split_batch(batch_config(global_batch_size, micro_batch_size), world_size)
    assert (split.micro_batch_size, split.accumulation) == expected


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "world_size"),
    [(96, 36, 1), (96, 36, 2), (97, None, 2), (96, None, 5), (96, 128, 1), (96, 96, 2), (5, None, 7), (100, 7, 3),
     (1, 1, 2)],
)  # fmt: skip
def test_batch_that_does_not_divide_is_refused_with_the_arithmetic(global_batch_size, micro_batch_size, world_size):
    cfg = batch_config(global_batch_size, micro_batch_size)
    text = error_of(schema.split_batch, cfg, world_size)
    assert f"global_batch_size={global_batch_size}" in text
    assert f"micro_batch_size={micro_batch_size or max(global_batch_size // world_size, 1)}" in text
    assert f"{world_size} ranks" in text
    proposed = int(re.search(r"use global_batch_size=(\d+)", text)[1])
    split = schema.split_batch(batch_config(proposed, micro_batch_size), world_size)
    assert split.micro_batch_size * split.accumulation * world_size == proposed
    if global_batch_size % (micro_batch_size or 1) == 0:  # then other numbers of ranks would do; the nearest are named
        named = [int(n) for n in re.search(r"or (\d+)(?: or (\d+))? ranks;", text).groups() if n]
        wanted = [n for n in range(1, global_batch_size + 1) if global_batch_size % (n * (micro_batch_size or 1)) == 0]
        below, above = ([n for n in wanted if is_side(n)] for is_side in (world_size.__gt__, world_size.__lt__))
        assert named == [*below[-1:], *above[:1]]
        assert f"with distributed.stand_by=true {below[-1]} of the {world_size} would train" in text
    else:
        assert "stand_by" not in text


def test_rows_that_do_not_divide_the_micro_batch_are_refused():
    packed = small("data.packing.enabled=true", "global_batch_size=96", "data.packing.images_per_row=10")
    text = error_of(schema.split_batch, packed, 4)
    assert text.startswith("data.packing.images_per_row=10 does not divide micro_batch_size=24: use 2,")
    assert schema.split_batch(small("data.packing.enabled=true"), 4).micro_batch_size == 24


@pytest.mark.parametrize("primary", PRIMARY)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_primary_configs_divide_by_the_usual_numbers_of_ranks(primary, world_size):
    cfg = load("data.path=/data", name=primary)
    split = schema.split_batch(cfg, world_size)
    micro, accumulation = split.micro_batch_size, split.accumulation
    assert micro * accumulation * world_size == cfg.global_batch_size


# The length of a run


@pytest.mark.parametrize(
    ("num_epochs", "images", "batch_size"),
    [("1", 60, 24), ("2", 60, 24), ("3", 60, 24), ("0.5", 60, 24), ("2.5", 60, 24), ("300", 1281167, 1024),
     ("90", 1281167, 4096), ("16", 4000, 96), ("1", 60, 60), ("10", 61, 60), ("4.1", 60, 2), ("0.1", 1281170, 10)],
)  # fmt: skip
def test_number_of_steps_is_the_epochs_rounded_down(num_epochs, images, batch_size):
    data = {"source": "synthetic", "path": None, "num_synthetic_train": images, "num_synthetic_val": 1}
    length = {"num_train_steps": None, "num_epochs": float(num_epochs), "global_batch_size": batch_size}
    cfg = dataclasses.replace(with_values(small(), data=data), **length)
    assert run_sizes(cfg, 1).num_train_steps == math.floor(Fraction(num_epochs) * images / batch_size)


def test_number_of_steps_is_as_given():
    assert run_sizes(with_values(small(), num_train_steps=123), 1).num_train_steps == 123
