"""FP8 under the three strategies on GPUs: it trains, saves, resumes and exports, with any recipe of the card.

pytest -m gpu        one GPU
pytest -m multi_gpu  two GPUs

Two starts of processes for each number of GPUs: the second goes on, from scratch, with what the first has saved.
"""

import launch  # noqa: F401  (before torch)

import functools
import json

import pytest
import timm
import torch
import torch.distributed.checkpoint as dcp
from conftest import ON_GPU, SCRIPTS, TINY, column, read_metrics, run_tasks, started_once, task_of, weights

TE = ["model.act_layer=gelu_tanh", "model.transformer_engine=true"]
DELAYED = [*TE, "fp8_config.enabled=true"]
CURRENT = [*DELAYED, "fp8_config.fp8_recipe=Float8CurrentScaling"]
BLOCK = [*DELAYED, "fp8_config.fp8_recipe=Float8BlockScaling"]
GRID = {"bf16": TE, "delayed": DELAYED, "current": CURRENT, "block": BLOCK}
FP8 = [name for name in GRID if name != "bf16"]
WHOLE = "lr_scheduler.num_training_steps=20"
WEIGHTS = "fp8_config.quantized_model_init=true"
ARGUMENTS = {
    "e4m3": [*DELAYED, "fp8_config.fp8_format=E4M3"],
    "short-history": [*DELAYED, "fp8_config.fp8_recipe_kwargs.amax_history_len=2"],
    "most-recent": [*DELAYED, "fp8_config.fp8_recipe_kwargs.amax_compute_algo=most_recent"],
    "margin": [*DELAYED, "fp8_config.fp8_recipe_kwargs.margin=2"],
    "block-hybrid": [*BLOCK, "fp8_config.fp8_format=HYBRID"],
    "block-dims": [*BLOCK, "fp8_config.fp8_recipe_kwargs.w_block_scaling_dim=1"],
}
# Of 4 blocks: two, and a half of the MLP of the first one, nine linear layers in all.
SOME = [*DELAYED, 'fp8_config.layers=["blocks.[1-2].*","blocks.0.mlp.fc2"]']
VARIED = [("train_ddp", "delayed"), ("train_ddp", "current"), ("train_fsdp2", "delayed"), ("train_mfsdp", "delayed")]
# Images a GPU and pass, of 18 tokens each: rows that are no multiple of 16. 23 validation images come in such batches.
ODD = [
    ("train_ddp", "delayed", 1),
    ("train_ddp", "current", 3),
    ("train_ddp", "block", 7),
    ("train_fsdp2", "current", 1),
    ("train_mfsdp", "delayed", 3),
    ("train_mfsdp", "block", 5),
]


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    """A function: number of GPUs -> (outcomes, folder)."""

    @started_once
    def start(nproc):
        folder = tmp_path_factory.mktemp(f"fp8_{nproc}")
        first, second = _tasks(nproc, image_folder, folder)
        outcomes = run_tasks(first, nproc=nproc, folder=folder, timeout=540, strict=False)
        return outcomes | run_tasks(second, nproc=nproc, folder=folder, timeout=240, strict=False), folder

    return start


def _tasks(nproc, image_folder, folder):
    task = functools.partial(task_of, image_folder, folder, base=[*TINY, *ON_GPU])

    first, second = [], []
    unsaved = "checkpoint.ckpt_dir=null"
    combinations = [(script, name, GRID[name]) for script in SCRIPTS for name in GRID]
    combinations += [("train_mfsdp", f"{name}-weights", [*GRID[name], WEIGHTS]) for name in FP8]
    for script, name, overrides in combinations:
        first.append(task(f"{script}-{name}", script, "num_train_steps=20", unsaved, *overrides))
        resumed = {"output": f"{script}-{name}-resumed"}
        half = ["num_train_steps=10", WHOLE, "checkpoint.save_final_model=false"]
        first.append(task(f"{script}-{name}-half", script, *half, *overrides, **resumed))
        second.append(task(f"{script}-{name}-resumed", script, "num_train_steps=20", WHOLE, *overrides, **resumed))

    five = ["num_train_steps=5", WHOLE, "evaluation.every_n_steps=null", unsaved]
    for script, name in VARIED:
        quarter = f"micro_batch_size={48 // nproc // 4}"
        count = {"before": "count_weight_casts"}
        first.append(task(f"{script}-{name}-accumulated", script, quarter, *five, *GRID[name], **count))
        for value in ("true", "selective"):
            recompute = f"activation_checkpointing={value}"
            first.append(task(f"{script}-{name}-recompute-{value}", script, recompute, *five, *GRID[name]))
        # FP8's weights of an earlier microbatch, and the MLP with dropout in it.
        selective = ["activation_checkpointing=selective", *five, *GRID[name]]
        first.append(task(f"{script}-{name}-selective-accumulated", script, quarter, *selective))
        dropout = "model.proj_drop_rate=0.1"
        first.append(task(f"{script}-{name}-dropout", script, dropout, *five, *GRID[name]))
        first.append(task(f"{script}-{name}-selective-dropout", script, dropout, *selective))
    for script in SCRIPTS:
        quarter = [f"micro_batch_size={48 // nproc // 4}", *five, *SOME]
        first.append(task(f"{script}-layers", script, *quarter, before="count_weight_casts"))
        saved = ["num_train_steps=5", WHOLE, "checkpoint.save_final_model=false", *SOME]
        first.append(task(f"{script}-layers-saved", script, *saved))
    first.append(task("train_fsdp2-layers-recompute", "train_fsdp2", "activation_checkpointing=true", *five, *SOME))
    first.append(task("train_mfsdp-layers-weights", "train_mfsdp", *five, *SOME, WEIGHTS))
    every = "fp8_config.log_statistics_every_n_steps=2"
    for name in ("current", "block"):
        first.append(task(f"train_ddp-{name}-statistics", "train_ddp", every, *five, *GRID[name]))
    for script in SCRIPTS:
        first.append(task(f"{script}-quarter", script, f"micro_batch_size={48 // nproc // 4}", *five, *DELAYED))
        quarter = [f"micro_batch_size={48 // nproc // 4}", every, *five, *DELAYED]
        first.append(task(f"{script}-quarter-statistics", script, *quarter))
        recompute = ["activation_checkpointing=true", every, *five]
        first.append(task(f"{script}-delayed-recompute-statistics", script, *recompute, *DELAYED))
        saved = ["num_train_steps=4", WHOLE, "checkpoint.save_final_model=false", every, *DELAYED]
        first.append(task(f"{script}-statistics-saved", script, *saved))
    first.append(task("train_mfsdp-delayed-weights-statistics", "train_mfsdp", every, *five, *DELAYED, WEIGHTS))
    for script, name, images in ODD:
        odd = ["num_train_steps=3", f"global_batch_size={images * nproc}", unsaved]
        first.append(task(f"{script}-{name}-odd", script, *odd, *GRID[name]))
    for name, overrides in ARGUMENTS.items():
        first.append(task(f"arguments-{name}", "train_ddp", *five, *overrides))
    for classes in (3, 10, 1000):
        noise = ["data.source=synthetic", "data.num_synthetic_train=96", "data.num_synthetic_val=9"]
        noise += [f"model.num_classes={classes}", "num_train_steps=2", "data.path=null", unsaved]
        first.append(task(f"classes-{classes}", "train_ddp", *noise, *DELAYED))
    evaluated = ["num_train_steps=8", WHOLE, "evaluation.every_n_steps=2", unsaved]
    first.append(task("evaluated", "train_ddp", *evaluated, *DELAYED))
    # Over strategies and precisions: FP8 all the way, and BF16 with TransformerEngine -> FP8 -> plain BF16.
    plain = ["model.act_layer=gelu_tanh"]
    for chain, stages in {
        "fp8": (("train_mfsdp", DELAYED), ("train_ddp", DELAYED), ("train_fsdp2", DELAYED)),
        "mixed": (("train_ddp", TE), ("train_fsdp2", DELAYED), ("train_mfsdp", plain)),
    }.items():
        for (script, overrides), stop in zip(stages, (8, 14, 20), strict=True):
            length = [f"num_train_steps={stop}", WHOLE]
            first.append(task(f"chain-{chain}-{stop}", script, *length, *overrides, output=f"chain-{chain}"))
    return first, second


def losses(folder, name):
    return column(folder, name, "train/loss")


def test_every_run_ends_well(runs, nproc):
    outcomes, _ = runs(nproc)
    assert not {name: ranks[0]["error"] for name, ranks in outcomes.items() if "error" in ranks[0]}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("recipe", GRID)
def test_trains(runs, nproc, script, recipe):
    """Near BF16's losses; and FP8 is at work: its losses are not BF16's."""
    _, folder = runs(nproc)
    want, got = losses(folder, f"{script}-bf16"), losses(folder, f"{script}-{recipe}")
    assert len(got) == 20
    assert got == pytest.approx(want, abs=0.1)
    assert (got == want) == (recipe == "bf16")
    norms = [column(folder, f"{script}-{name}", "train/grad_norm")[-1] for name in (recipe, "bf16")]
    assert norms[0] == pytest.approx(norms[1], rel=0.3)
    print(f"{nproc} GPUs {script} {recipe}: last loss {got[-1]:.4f}, BF16 {want[-1]:.4f}")


@pytest.mark.parametrize(
    ("script", "recipe"),
    [(s, r) for s in SCRIPTS for r in GRID] + [("train_mfsdp", f"{r}-weights") for r in FP8],
)
def test_a_fresh_process_goes_on_as_the_straight_run(runs, nproc, script, recipe):
    """Scales and their history come with the checkpoint, and exist before a first forward pass."""
    _, folder = runs(nproc)
    want, got = (losses(folder, f"{script}-{recipe}{end}") for end in ("", "-resumed"))
    assert got == pytest.approx(want, abs=1e-3)
    difference = max(abs(a - b) for a, b in zip(got, want, strict=True))
    print(f"{nproc} GPUs {script} {recipe}: largest difference {difference:.1e}")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("recipe", [*GRID, *(f"{name}-weights" for name in FP8)])
def test_export_is_timms(runs, nproc, script, recipe):
    """timm's names, all of them and no other, no _extra_state; timm loads them strictly."""
    if recipe.endswith("-weights") and script != "train_mfsdp":
        pytest.skip("FP8 weights are Megatron-FSDP's")
    _, folder = runs(nproc)
    name = f"{script}-{recipe}-resumed"
    model = timm.create_model(f"local-dir:{folder / name}/checkpoints/final_model", pretrained=True)
    saved = weights(folder, name)
    assert saved.keys() == model.state_dict().keys()
    assert all(tensor.isfinite().all() and tensor.dtype == torch.float32 for tensor in saved.values())


def test_checkpoint_keeps_its_size_and_holds_no_extra_state(runs, nproc):
    """Scales are tensors with names of their own; step 10's checkpoint is as large as step 20's."""
    _, folder = runs(nproc)
    for script in SCRIPTS:
        root = folder / f"{script}-delayed-resumed/checkpoints"
        steps = [root / f"step_{step:08d}" for step in (10, 20)]
        entries = [dcp.FileSystemReader(step).read_metadata().state_dict_metadata for step in steps]
        sizes = [{key: tuple(entry.size) for key, entry in metadata.items()} for metadata in entries]
        assert sizes[0] == sizes[1]
        assert not any("_extra_state" in key for key in sizes[0])
        assert sum(key.startswith("fp8.") for key in sizes[0]) == 4 * 3 * 4  # blocks x layers x tensors


def test_every_strategy_goes_on_with_every_others_fp8(runs, nproc):
    _, folder = runs(nproc)
    assert losses(folder, "chain-fp8") == pytest.approx(losses(folder, "train_ddp-delayed"), abs=0.1)
    log = (folder / "chain-fp8/train.log").read_text()
    assert "found anew" not in log


def test_bf16_and_fp8_runs_resume_each_other(runs, nproc):
    """BF16 -> FP8 finds its scales anew, and says so; FP8 -> BF16 leaves them aside."""
    _, folder = runs(nproc)
    assert losses(folder, "chain-mixed") == pytest.approx(losses(folder, "train_ddp-bf16"), abs=0.1)
    assert (folder / "chain-mixed/train.log").read_text().count("found anew") == 1


@pytest.mark.parametrize(("script", "recipe"), VARIED)
def test_weights_are_quantized_once_a_step(runs, nproc, script, recipe):
    """Of 4 microbatches, 5 steps and 4 blocks of 4 weights. DDP adds the pass that settles its buckets.

    FSDP2 frees a block's weights after each pass, and TransformerEngine keeps no FP8 copy there.
    """
    outcomes, folder = runs(nproc)
    expected = {"train_ddp": 16 * 6, "train_fsdp2": 16 * 5 * 4, "train_mfsdp": 16 * 5}[script]
    name = f"{script}-{recipe}-accumulated"
    assert {rank["metrics"]["casts"] for rank in outcomes[name]} == {expected}
    assert losses(folder, name) == pytest.approx(losses(folder, f"{script}-{recipe}")[:5], abs=0.05)


@pytest.mark.parametrize("script", SCRIPTS)
def test_some_layers_in_fp8(runs, nproc, script):
    """Their weights alone are quantized, once a step (FSDP2: a microbatch); their state alone is saved.

    The losses are near BF16's, neither its nor those of FP8 throughout, and the same with recomputation.
    """
    outcomes, folder = runs(nproc)
    casts = {"train_ddp": 9 * 6, "train_fsdp2": 9 * 5 * 4, "train_mfsdp": 9 * 5}[script]
    assert {rank["metrics"]["casts"] for rank in outcomes[f"{script}-layers"]} == {casts}
    got, bf16 = losses(folder, f"{script}-layers"), losses(folder, f"{script}-bf16")[:5]
    assert got == pytest.approx(bf16, abs=0.1)
    assert got not in (bf16, losses(folder, f"{script}-delayed")[:5])
    if script == "train_fsdp2":
        assert losses(folder, f"{script}-layers-recompute") == pytest.approx(got, abs=2e-2)
    checkpoint = dcp.FileSystemReader(folder / f"{script}-layers-saved/checkpoints/step_00000005")
    stored = {key.rpartition(".")[0] for key in checkpoint.read_metadata().state_dict_metadata if key[:4] == "fp8."}
    whole = {f"fp8.blocks.{i}.{layer}" for i in (1, 2) for layer in ("attn.qkv", "attn.proj", "mlp")}
    assert stored == whole | {"fp8.blocks.0.mlp.fc2"}


def test_some_layers_hold_fp8_weights(runs, nproc):
    _, folder = runs(nproc)
    assert losses(folder, "train_mfsdp-layers-weights") == pytest.approx(
        losses(folder, "train_mfsdp-bf16")[:5], abs=0.1
    )


def statistics(folder, name):
    """(step, layer, operand) -> the line of it."""
    rows = [json.loads(line) for line in (folder / name / "fp8_statistics.jsonl").read_text().splitlines()]
    return {(row["step"], row["layer"], row["operand"]): row for row in rows}


LAYERS = [f"blocks.{i}.{layer}" for i in range(4) for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
WATCHED = [("train_ddp", f"{name}-statistics", name) for name in ("current", "block")]
WATCHED += [(script, "quarter-statistics", "quarter") for script in SCRIPTS]
WATCHED += [(script, "delayed-recompute-statistics", "delayed-recompute-true") for script in SCRIPTS]
WATCHED += [("train_mfsdp", "delayed-weights-statistics", "delayed-weights")]


@pytest.mark.parametrize(("script", "watched", "plain"), WATCHED)
def test_statistics_change_no_digit(runs, nproc, script, watched, plain):
    """A line for each layer and operand, of steps 2 and 4; the losses and norms are those of the run without."""
    _, folder = runs(nproc)
    for key in ("train/loss", "train/grad_norm"):
        assert column(folder, f"{script}-{watched}", key) == column(folder, f"{script}-{plain}", key)[:5]
    rows = statistics(folder, f"{script}-{watched}")
    operands = ("input", "weight", "gradient")
    assert rows.keys() == {(step, layer, operand) for step in (2, 4) for layer in LAYERS for operand in operands}
    for (_, _, operand), row in rows.items():
        assert row["amax"] > 0
        if operand == "weight" and "weights" in watched:
            assert row["underflow"] is row["overflow"] is None
        else:
            assert 0 <= row["underflow"] < 1
            assert 0 <= row["overflow"] < 1
            assert row["overflow"] == 0 or "current" not in watched
    print({key: row for key, row in rows.items() if key[0] == 4 and key[1].startswith("blocks.3")})


@pytest.mark.parametrize("script", SCRIPTS)
def test_largest_values_are_those_that_transformer_engine_saw(runs, nproc, script):
    """The newest row of delayed scaling's history: input, weight and output of each product; its two gradients."""
    _, folder = runs(nproc)
    rows = statistics(folder, f"{script}-statistics-saved")
    reader = dcp.FileSystemReader(folder / f"{script}-statistics-saved/checkpoints/step_00000004")
    sizes = {key: entry.size for key, entry in reader.read_metadata().state_dict_metadata.items() if "amax_h" in key}
    history = {key: torch.zeros(size) for key, size in sizes.items()}
    dcp.load(history, storage_reader=reader, no_dist=True)
    for layer in LAYERS:
        whole, _, half = layer.rpartition(".") if ".mlp." in layer else (layer, "", "")
        forward, backward = (history[f"fp8.{whole}.amax_history_{way}"][-1] for way in ("fwd", "bwd"))
        place = half == "fc2"
        for operand, seen in (
            ("input", forward[3 * place]), ("weight", forward[3 * place + 1]), ("gradient", backward[2 * place])
        ):  # fmt: skip
            got = rows[4, layer, operand]["amax"]
            # What is inside of an MLP comes here from BF16 products, there from FP8 ones.
            rel = 0.5 if (layer[-3:], operand) in {("fc2", "input"), ("fc1", "gradient")} else 0.02
            assert got == pytest.approx(seen.item(), rel=rel), (layer, operand)


@pytest.mark.parametrize("value", ["true", "selective"])
@pytest.mark.parametrize(("script", "recipe"), VARIED)
def test_recompute_changes_nothing(runs, nproc, script, recipe, value):
    _, folder = runs(nproc)
    want = losses(folder, f"{script}-{recipe}")[:5]
    assert losses(folder, f"{script}-{recipe}-recompute-{value}") == pytest.approx(want, abs=1e-2)


@pytest.mark.parametrize("kind", ["accumulated", "dropout"])
@pytest.mark.parametrize(("script", "recipe"), VARIED)
def test_recomputed_mlps_change_nothing(runs, nproc, script, recipe, kind):
    _, folder = runs(nproc)
    want = losses(folder, f"{script}-{recipe}-{kind}")
    assert losses(folder, f"{script}-{recipe}-selective-{kind}") == pytest.approx(want, abs=1e-2)


@pytest.mark.parametrize(("script", "recipe", "images"), ODD)
def test_any_batch_size_works(runs, nproc, script, recipe, images):
    """In training, and in validation, whose last batch is short."""
    _, folder = runs(nproc)
    metrics = read_metrics(folder / f"{script}-{recipe}-odd")
    assert metrics[3]["val/images"] == 23
    assert all(0 < metrics[step]["train/loss"] < 5 for step in (1, 2, 3))


@pytest.mark.parametrize("classes", [3, 10, 1000])
def test_any_number_of_classes_works(runs, nproc, classes):
    """The head is not quantized."""
    _, folder = runs(nproc)
    assert len(losses(folder, f"classes-{classes}")) == 2


@pytest.mark.parametrize("name", ARGUMENTS)
def test_recipe_arguments_do_something(runs, nproc, name):
    _, folder = runs(nproc)
    base = "block" if name.startswith("block") else "delayed"
    want, got = losses(folder, f"train_ddp-{base}")[:5], losses(folder, f"arguments-{name}")
    # E4M3's gradients vanish in delayed scaling's first step, whose scales are 1: half a unit of loss in step 2.
    assert got == pytest.approx(want, abs=0.6 if name == "e4m3" else 0.1)
    assert got != want


def test_evaluation_leaves_the_scales_alone(runs, nproc):
    """With an evaluation every two steps, or none before step 10, the same losses bit for bit."""
    _, folder = runs(nproc)
    assert losses(folder, "evaluated") == losses(folder, "train_ddp-delayed")[:8]


def test_fp8_weights_start_from_the_float32_ones(runs, nproc):
    """Main weights are the drawn ones: the first loss differs from that of BF16 weights by the quantization only."""
    _, folder = runs(nproc)
    for recipe in FP8:
        got, want = (losses(folder, f"train_mfsdp-{recipe}{end}") for end in ("-weights", ""))
        assert got == pytest.approx(want, abs=0.1)


def test_attention_backend_is_logged_once(runs, nproc):
    """Which attention TransformerEngine chose stands in the log of the process's first such run."""
    _, folder = runs(nproc)
    log = (folder / "train_ddp-bf16/train.log").read_text()
    lines = [line for line in log.splitlines() if "Running with" in line]
    assert len(lines) == len({line.split(" ", 1)[1] for line in lines}) >= 1
    assert "FusedAttention" in lines[0] or "FlashAttention" in lines[0]
    assert json.loads((folder / "train_ddp-bf16/status.json").read_text())["state"] == "finished"
