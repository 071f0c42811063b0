"""observability/fp8_statistics.py: its numbers against a plain model's operands, on a CPU by stand_in_te.py."""

import launch

import json
import math

import pytest
import stand_in_te
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import column, error_of, run_tasks, session_of, task_of

import train_ddp
from modeling import build_model, prepare_blocks
from observability import fp8_statistics
from schema import fp8_layers

MODEL = ["model.img_size=32", "model.patch_size=8", "model.embed_dim=48", "model.depth=2", "model.num_heads=3"]
MODEL += ["model.num_classes=16", "model.in_chans=3", "data.mean=[0.5]", "data.std=[0.5]", "precision=bf16"]
FP8 = ["model.act_layer=gelu_tanh", "model.transformer_engine=true", "fp8_config.enabled=true"]
EVERY = "fp8_config.log_statistics_every_n_steps"
LAYERS = [f"blocks.{i}.{layer}" for i in (0, 1) for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
OPERANDS = ("input", "weight", "gradient")
LARGEST = {"input": 448.0, "weight": 448.0, "gradient": 57344.0}  # of E4M3 and E5M2
SMALLEST = {"input": 2.0**-9, "weight": 2.0**-9, "gradient": 2.0**-16}  # half of it, and less, becomes zero


def lines(folder):
    return [json.loads(line) for line in (folder / fp8_statistics.NAME).read_text().splitlines()]


def by_operand(rows, step):
    found = {(row["layer"], row["operand"]): row for row in rows if row["step"] == step}
    assert len(found) == sum(row["step"] == step for row in rows)
    return found


@pytest.fixture
def on_cpu(monkeypatch):
    stand_in_te.install(monkeypatch)


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def both_models(overrides):
    """The model on TransformerEngine's layers, whose products are exact here, and a plain one of the same weights."""
    cfg = launch.load_config("L0_sanity", ["output_dir=unused", *MODEL, *FP8, f"{EVERY}=2", *overrides])
    off = [
        "activation_checkpointing=false",
        f"{EVERY}=null",
        "fp8_config.enabled=false",
        "model.transformer_engine=false",
    ]
    other = launch.load_config("L0_sanity", ["output_dir=unused", *MODEL, *FP8, *overrides, *off])
    models = []
    for each in (cfg, other):
        model = build_model(each.model, each.fp8_config)
        model.init_weights(0)
        prepare_blocks(model, activation_checkpointing=each.activation_checkpointing, compile=False)
        with torch.no_grad():  # nothing hides: norms away from 0 and 1, weights large enough for gradients
            generator = torch.Generator().manual_seed(1)
            for _, parameter in sorted(model.named_parameters(), key=lambda item: timm_name(item[0])):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        models.append(model)
    return cfg, *models


def timm_name(name):
    from runtime.parameter_names import timm_name

    return timm_name(name)


def set_scale(scaling, layer, operand, value):
    """Of delayed scaling: input, weight and output of each product forward, gradients of output and input backward."""
    way, place = ("bwd", 0) if operand == "gradient" else ("fwd", OPERANDS.index(operand))
    if f"{layer}.scale_fwd" not in scaling:  # a fused MLP, which has those of both
        layer, _, half = layer.rpartition(".")
        place += (half == "fc2") * (2 if way == "bwd" else 3)
    if f"{layer}.scale_fwd" in scaling:  # a layer in BF16 has none
        scaling[f"{layer}.scale_{way}"][place] = value


def loss_of(model, images, labels):
    """Of softened logits: where one is nearly sure, a gradient is rounding."""
    return F.cross_entropy(0.1 * model(images), labels)


def operands_of(model, batches):
    """(layer, operand) -> all values that a plain model multiplies there."""
    found = {}

    def keep(name, operand, values):
        if operand != "weight" or (name, operand) not in found:
            found.setdefault((name, operand), []).append(values.detach().flatten())

    def after(name):
        def hook(layer, args, output):
            keep(name, "input", args[0])
            keep(name, "weight", layer.weight)
            output.register_hook(lambda gradient: keep(name, "gradient", gradient))

        return hook

    for name in fp8_layers(model.cfg, None):
        model.get_submodule(name).register_forward_hook(after(name))
    for images, labels in batches:
        loss_of(model, images, labels).backward()
    return {key: torch.cat(values) for key, values in found.items()}


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.act_layer=quick_gelu"],
        ["model.proj_bias=false", "model.qkv_bias=false", "model.act_layer=relu"],
        ["model.act_layer=silu", 'fp8_config.layers=["blocks.1.*","blocks.0.mlp.fc1"]'],
        ["activation_checkpointing=true"],
        ["activation_checkpointing=selective"],
        ["activation_checkpointing=true", "model.init_values=0.5"],
        ["fp8_config.fp8_recipe=Float8CurrentScaling"],
        ["model.norm_layer=rmsnorm", "model.mlp_layer=glu", "model.act_layer=silu"],
        [
            *("model.rope_type=dinov3", "model.attn_type=eva", "model.qkv_fused=false", "model.mlp_layer=swiglu"),
            *("model.scale_mlp_norm=true", "model.act_layer=silu", "activation_checkpointing=true"),
        ],
    ],
    ids=lambda overrides: ",".join(overrides) or "plain",
)
def test_numbers_are_those_of_the_operands(on_cpu, alone, monkeypatch, tmp_path, overrides):
    """Of two microbatches, at scales by which values vanish and are cut off."""

    def exact(self, x, weight, bias, gemm):
        return F.linear(x, weight, bias)

    monkeypatch.setattr(stand_in_te.Layer, "product", exact)
    cfg, model, plain = both_models(overrides)
    generator = torch.Generator().manual_seed(2)
    batches = [
        (torch.randn(16, 3, 32, 32, generator=generator), torch.arange(16).roll(shift)) for shift in (0, 5)
    ]  # 256 rows: none are filled up
    want = operands_of(plain, batches)
    chosen = fp8_layers(cfg.model, cfg.fp8_config.layers)
    delayed = cfg.fp8_config.fp8_recipe == "DelayedScaling"
    scales = {}
    for layer, operand in want if delayed else ():  # in block 0 the largest are cut off, in block 1 the small vanish
        amax = want[layer, operand].abs().max().item()
        cut, gone = LARGEST[operand] / (0.5 * amax), SMALLEST[operand] / 2 / (0.1 * amax)
        scales[layer, operand] = cut if layer.startswith("blocks.0") else gone
        set_scale(model.scaling, layer, operand, scales[layer, operand])
    statistics = fp8_statistics.Fp8Statistics(model, cfg, session_of(tmp_path))
    for step in (1, 2):
        with statistics.of(step):
            for images, labels in batches:
                loss = loss_of(model, images, labels)
                # Recomputed blocks keep nothing between their two passes.
                assert bool(statistics.inputs) == (step == 2 and cfg.activation_checkpointing is not True)
                loss.backward()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    rows = lines(tmp_path)
    assert {row["step"] for row in rows} == {2}
    found = by_operand(rows, 2)
    assert found.keys() == {(layer, operand) for layer in chosen for operand in OPERANDS}
    for (layer, operand), row in found.items():
        values = want[layer, operand]
        assert row["amax"] == pytest.approx(values.abs().max().item(), rel=1e-4), (layer, operand)
        under, over = [], []
        for part in [values] if delayed else values.chunk(1 if operand == "weight" else 2):
            by = scales.get((layer, operand)) or LARGEST[operand] / part.abs().max()
            size = part.abs() * by
            under.append(((size <= SMALLEST[operand] / 2) & (part != 0)).float().mean())
            over.append((size > LARGEST[operand]).float().mean() if delayed else torch.zeros(()))
        for share, expected in (("underflow", under), ("overflow", over)):
            expected = torch.stack(expected).mean().item()
            assert row[share] == pytest.approx(expected, abs=2 / len(values) + 1e-3 * expected), (layer, operand, share)
            assert expected > 0 or (share == "overflow") != layer.startswith("blocks.0") or not delayed
    for name, tensor in model.scaling.items():
        if "amax_history" in name:
            assert not tensor.any()  # nobody quantizes in this test but the statistics, which leave no trace


def test_fp8_weights_have_a_largest_value_only(on_cpu, alone, monkeypatch, tmp_path):
    cfg, model, _ = both_models([])
    monkeypatch.setattr(fp8_statistics, "_is_quantized", lambda tensor: tensor.shape == (192, 48))  # mlp.fc1's
    monkeypatch.setattr(torch.Tensor, "dequantize", lambda self: self)
    with fp8_statistics.Fp8Statistics(model, cfg, session_of(tmp_path)).of(2):
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    for (layer, operand), row in by_operand(lines(tmp_path), 2).items():
        assert row["amax"] > 0
        has_none = layer.endswith("fc1") and operand == "weight"
        assert (row["underflow"] is None) == (row["overflow"] is None) == has_none


def test_nothing_is_written_of_what_is_not_a_number(on_cpu, alone, tmp_path):
    cfg, model, _ = both_models([])
    with fp8_statistics.Fp8Statistics(model, cfg, session_of(tmp_path)).of(2):
        model(torch.full((2, 3, 32, 32), math.nan)).sum().backward()
    assert by_operand(lines(tmp_path), 2)["blocks.0.attn.qkv", "input"]["amax"] is None


def test_a_run_is_the_same_with_and_without(on_cpu, tiny, tmp_path):
    """Losses and gradient norms in every digit, over accumulation and a resume."""
    options = [*tiny, *FP8, "model.embed_dim=48", "precision=bf16", "micro_batch_size=12", "model.init_values=0.1"]
    for folder, every, steps in (("off", "null", 6), ("on", 2, 3), ("on", 2, 6)):
        more = [f"{EVERY}={every}", f"num_train_steps={steps}", "lr_scheduler.num_training_steps=6"]
        more += [f"output_dir={tmp_path / folder}"]
        train_ddp.main(launch.load_config("L0_sanity", [*options, *more], script="train_ddp"))
    for key in ("train/loss", "train/grad_norm"):
        assert column(tmp_path, "on", key) == column(tmp_path, "off", key)
        assert len(column(tmp_path, "on", key)) == 6
    assert [row["step"] for row in lines(tmp_path / "on")[::24]] == [2, 4, 6]
    assert not (tmp_path / "off" / fp8_statistics.NAME).exists()


def test_without_fp8_there_is_nothing_to_watch(alone, tmp_path):
    """In a config whose FP8 is turned off on the command line: TransformerEngine is not even imported."""
    cfg = launch.load_config("L0_sanity", ["output_dir=unused", *MODEL, f"{EVERY}=1"])
    with fp8_statistics.Fp8Statistics(torch.nn.Linear(1, 1), cfg, session_of(tmp_path)).of(1):
        pass
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.slow
def test_ranks_are_one_batch(image_folder, tmp_path_factory):
    """Two processes, one with two microbatches: the first step's operands are the same.

    But for gradients: the loop divides the loss by the microbatches before, DDP their sum by the ranks after.
    """
    folder = tmp_path_factory.mktemp("ranks")
    options = [*FP8, "model.embed_dim=48", "precision=bf16", f"{EVERY}=1", "num_train_steps=1", "micro_batch_size=12"]
    for nproc in (1, 2):
        task = task_of(image_folder, folder, f"{nproc}", "train_ddp", *options, before="stand_in_for_te")
        run_tasks([task], nproc=nproc, folder=folder)
    one, two = (by_operand(lines(folder / f"{nproc}"), 1) for nproc in (1, 2))
    assert one.keys() == two.keys()
    assert len(one) == 24
    for key, row in one.items():
        factor = 2 if key[1] == "gradient" else 1
        assert two[key]["amax"] == pytest.approx(factor * row["amax"], rel=2e-2), key
        assert factor == 2 or two[key]["underflow"] == pytest.approx(row["underflow"], abs=1e-2), key


def test_with_graphs_it_is_refused():
    overrides = ["output_dir=unused", *MODEL, *FP8, f"{EVERY}=5", "cuda_graphs=true"]
    text = error_of(launch.load_config, "L0_sanity", overrides)
    assert text.startswith(f"{EVERY}=5 with cuda_graphs=true")
