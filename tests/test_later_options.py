"""Later options of the model, packing, image sizes and teachers under Megatron-FSDP and as recorded passes.

On a CPU: what their starts and their recordings rest on. pytest -m gpu: runs on one GPU; -m multi_gpu: on two.
"""

import launch

import dataclasses
import functools
import itertools
import types

import pytest
import torch
from conftest import ON_GPU, SCRIPTS, TINY, column, error_of, runs_on_gpus, task_of, tiny_config
from test_distillation import TOKENS
from test_packing import GRIDS, images_of, model_of, packed
from test_vit import BLOCKS, ROPES, images, keys, small
from torch import nn
from weight_files import write_teacher

import train_ddp
import trainer
from runtime.cuda_graphs import WARMUP_STEPS
from vit import VisionTransformer

DISTILLED = "distilled=true"
MODELS = ROPES | BLOCKS | {"distilled": DISTILLED}


# What is allowed


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mixed"])
def test_every_script_takes_them_and_records_them(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    sizes = ["model.embed_dim=48", "model.global_pool=token", "model.class_token=true"]
    for script, graphs in itertools.product(SCRIPTS, ("false", "true")):
        options = [*keys(MODELS[name]), f"cuda_graphs={graphs}", "precision=bf16", "model.depth=2"]
        launch.check_script(tiny_config("data.path=unused", *sizes, *options), script, 2)


def test_trained_frequencies_are_not_rounded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cfg = tiny_config("data.path=unused", *keys(ROPES["mixed"]), "precision=bf16", "cuda_graphs=true")
    launch.check_script(cfg, "train_ddp", 2)
    for script, strategy in (("train_fsdp2", "FSDP2"), ("train_mfsdp", "Megatron-FSDP")):
        line = error_of(launch.check_script, cfg, script, 2)
        assert line.startswith(f"model.rope_type=mixed with precision=bf16: {strategy} would round")


@pytest.mark.parametrize(
    "option",
    [
        "data.packing.enabled=true",
        "data.size_schedule=[{epoch:1,img_size:24}]",
        "data.size_schedule=[{epoch:1,img_size:24}] cuda_graphs=true",
        "distillation.kind=hard distillation.teacher=x cuda_graphs=true",
    ],
)
def test_megatron_fsdp_takes_other_options(monkeypatch, option):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    launch.check_script(tiny_config("data.path=unused", "precision=bf16", *option.split()), "train_mfsdp", 2)


# How Megatron-FSDP makes a model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_cast_and_filled_module_by_module_computes_with_fp32_buffers(name):
    """Without storage, in BF16, then given memory where a module has weights, as the library does it."""
    cfg = small(MODELS[name])
    want = VisionTransformer(cfg)
    want.init_weights(0)
    with torch.device("meta"):
        model = VisionTransformer(cfg).to(torch.bfloat16)
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    model.init_weights(0, torch.device("cpu"))
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(want.named_buffers()).keys()
    for key, buffer in want.named_buffers():
        assert buffers[key].dtype == buffer.dtype != torch.bfloat16, key
        assert torch.equal(buffers[key], buffer), key
    for key, parameter in want.named_parameters():
        assert torch.equal(model.get_parameter(key), parameter.bfloat16()), key
    logits = model(images(cfg))
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), want(images(cfg)), rtol=0, atol=5e-2)


def gathered_when_called(model):
    """Weights outside of blocks are NaN until the module that has them is called: the library's hooks gather them."""
    inside = {module for unit in model.shard_units() for module in unit.modules()}
    for module in set(model.modules()) - inside:
        values = [(p, p.detach().clone()) for p in module.parameters(recurse=False)]
        for parameter, _ in values:
            parameter.data.fill_(torch.nan)

        def gather(*_, values=values):
            for parameter, value in values:
                parameter.data.copy_(value)

        module.register_forward_pre_hook(gather)
    return model


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mixed"])
def test_every_weight_outside_of_blocks_is_asked_for_through_its_module(name):
    cfg = small(MODELS[name])
    model = VisionTransformer(cfg).eval()
    model.init_weights(0)
    want = model(images(cfg))
    assert torch.equal(gathered_when_called(model)(images(cfg)), want)


@pytest.mark.parametrize("positions", ["learn", "none"])
def test_rows_ask_for_them_so_too(positions):
    model = model_of(f"model.pos_embed={positions}").eval()
    batch = packed(model, images_of(model, GRIDS))
    want = model(batch)
    assert torch.equal(gathered_when_called(model)(batch), want)


def test_rows_without_positions_compute_in_bf16():
    model = model_of("model.pos_embed=none").to(torch.bfloat16)
    batch = packed(model, images_of(model, GRIDS))
    assert model(batch).dtype == torch.bfloat16


# Constants


def test_ddp_sends_no_buffers(monkeypatch, tiny):
    """Tables of positions, that is: each forward pass would broadcast them."""

    def sync(*_):
        raise AssertionError("a forward pass broadcasts buffers")

    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_sync_buffers", sync)
    options = ["model.rope_type=cat", "num_train_steps=1", "checkpoint.ckpt_dir=null", "data.num_workers=0"]
    train_ddp.main(launch.load_config("L0_sanity", [*tiny, *options], script="train_ddp"))


# A teacher beside a recorded pass


class Replayed:
    """In the place of a CUDA graph: remembers the call that was made while it recorded, and makes it again."""

    def replay(self):
        self.loss.copy_(self.call())


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_teacher_is_asked_outside_of_a_recorded_pass(monkeypatch, accumulation):
    """Once a microbatch, and the pass gets this microbatch's answers in the memory that it was recorded with."""
    cfg = tiny_config("data.path=unused", *TOKENS, "distillation.kind=soft", "distillation.teacher=x")
    cfg = dataclasses.replace(cfg, cuda_graphs=True)
    recording, asked, given = [], [], []

    class Recorded:
        def __init__(self, graph, **_):
            self.graph = graph

        def __enter__(self):
            recording.append(self.graph)

        def __exit__(self, *_):
            recording.clear()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "graph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)

    def objective(logits, targets, answers, _):
        def compute():
            given.append((answers.data_ptr(), answers[0, 0].item(), targets[0].item()))
            return torch.zeros(())

        loss = (logits.sum() * 0 + compute()).requires_grad_()
        if recording:
            recording[0].loss, recording[0].call = loss.detach(), compute
            given.pop()  # a recording computes nothing
        return loss

    def teacher(pictures):
        assert not recording
        asked.append(pictures[0, 0, 0, 0].item())
        return torch.full((2, 6), asked[-1])

    class Student(nn.Linear):
        def forward(self, pictures, is_first_microbatch=None):
            return super().forward(pictures.flatten(1))

    monkeypatch.setattr(trainer, "objective", objective)
    model = Student(3 * 4 * 4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = types.SimpleNamespace(model=model, optimizer=optimizer, teacher=teacher)
    run.grad_sync = lambda _: torch.enable_grad()
    one_pass = trainer.pass_of(run, cfg, types.SimpleNamespace(accumulation=accumulation))
    numbers = [float(n) for n in range((WARMUP_STEPS + 3) * accumulation)]
    for n in numbers:
        one_pass(int(n) % accumulation, torch.full((2, 3, 4, 4), n), torch.full((2,), n))
    assert asked == numbers
    assert [(answer, target) for _, answer, target in given] == [(n, n) for n in numbers]
    replayed = given[WARMUP_STEPS * accumulation :]
    assert len({address for address, *_ in replayed}) == min(accumulation, 3)


# Runs on GPUs

STEPS, HALF = 16, 8
KINDS = {  # name -> options of the model, on top of ON_GPU
    "dinov3": ROPES["dinov3"],
    "eva02": ROPES["eva02"],
    "sapiens2": f"{ROPES['sapiens2']} num_kv_heads=[3,1,3,1]",  # RMSNorm, a gated MLP
    "differential": f"{BLOCKS['differential_parallel']}",
    "relative": f"{BLOCKS['relative_class_token']} reg_tokens=0",
    "table_shared": f"{BLOCKS['table_shared']} reg_tokens=0",
    "distilled": f"{DISTILLED} reg_tokens=0",
}
TE = "transformer_engine=true"
KINDS |= {f"te_{name}": f"{KINDS[name]} {TE}" for name in ("dinov3", "eva02", "sapiens2")}
KINDS["te_biases"] = f"{ROPES['biases for queries and values']} init_values=0.1 {TE}"
IN_FP8 = [*keys(KINDS["te_eva02"]), "fp8_config.enabled=true"]
MIXED = f"{ROPES['mixed']} reg_tokens=0"  # DDP alone
CHAINED = ("dinov3", "differential", "table_shared")
COMPILED = ("dinov3", "table_shared")  # no random numbers inside of a block, of which compiled ones draw others
# Rows of the patch embedding that a border between two ranks would cut, if positions lay before them.
ODD = "img_size=56 embed_dim=24"
ROWS = ["data.packing.enabled=true", "data.packing.images_per_row=4"]
TAUGHT = [*TOKENS, "model.reg_tokens=0", "data.mixup=0.8", "distillation.kind=hard", "distillation.alpha=0.3"]
LENGTHS = (14, 20, 28)  # of the run over two sizes: to the border, to the recording behind it, to the end
SIZES = ["data.size_schedule=[{epoch:11.2,img_size:48}]", "ema.decay=0.8"]  # 14 steps of 48 of 60 images


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    return runs_on_gpus(_tasks, image_folder, tmp_path_factory)


def _tasks(nproc, image_folder, folder):
    """One GPU: everything; two: Megatron-FSDP beside DDP."""
    base = [*TINY, *ON_GPU, f"num_train_steps={STEPS}", f"evaluation.every_n_steps={HALF}"]
    base += ["checkpoint.save_final_model=false", "model.drop_path_rate=0.1", "optimizer.lr=2e-4"]
    task = functools.partial(task_of, image_folder, folder, base=base, before="count_replays")
    teacher = f"distillation.teacher={write_teacher(folder / 'teacher')}"
    groups = {name: keys(options) for name, options in KINDS.items()}
    groups |= {"packed": [*ROWS, "model.drop_path_rate=0"], "taught": [*TAUGHT, teacher], "fp8": IN_FP8}
    groups |= {"odd": keys(ODD)} if nproc == 2 else {}
    tasks = []
    for name, options in groups.items():
        for script, graphs in _ways(nproc, name):
            tasks.append(task(f"{name}-{script}-{graphs}", script, *options, f"cuda_graphs={graphs}"))
    for name in (*CHAINED, "packed"):
        graphs = f"cuda_graphs={'false' if name == 'packed' else 'true'}"
        for first in ("train_ddp", "train_mfsdp"):
            for script, stop in ((first, HALF), ("train_mfsdp", STEPS)):
                length = [f"num_train_steps={stop}", f"lr_scheduler.num_training_steps={STEPS}", graphs]
                chain = f"{name}-after-{first}"
                tasks.append(task(f"{chain}-{stop}", script, *groups[name], *length, output=chain))
    if nproc == 2:
        return tasks
    for graphs in ("false", "true"):
        tasks.append(task(f"mixed-train_ddp-{graphs}", "train_ddp", *keys(MIXED), f"cuda_graphs={graphs}"))
    for name in COMPILED:
        options = [*groups[name], "compile=true", "cuda_graphs=true"]
        tasks.append(task(f"{name}-compiled", "train_mfsdp", *options, before="count_replays_of_fresh_code"))
    end = LENGTHS[-1]
    for script, graphs in (("train_ddp", "false"), ("train_mfsdp", "false"), ("train_mfsdp", "true")):
        options = [*SIZES, f"num_train_steps={end}", f"cuda_graphs={graphs}"]
        tasks.append(task(f"sizes-{script}-{graphs}", script, *options, before="measure_borders"))
    for stop in LENGTHS:
        length = [f"num_train_steps={stop}", f"lr_scheduler.num_training_steps={end}", "cuda_graphs=true"]
        tasks.append(task(f"sizes-stops-{stop}", "train_mfsdp", *SIZES, *length, output="sizes-stops"))
    return tasks


def _ways(nproc, name):
    """(script, cuda_graphs) of the runs of this name."""
    both = [("train_ddp", "false"), ("train_mfsdp", "false")]
    if name == "packed":
        return both
    if nproc == 2:
        return [*both, ("train_mfsdp", "true")]
    return list(itertools.product(SCRIPTS, ("false", "true")))


def test_gpu_runs_end_well(runs, nproc):
    outcomes, folder = runs(nproc)
    errors = {name: ranks[0]["error"] for name, ranks in outcomes.items() if "error" in ranks[0]}
    assert not errors, f"{len(errors)} of {len(outcomes)} runs, see {folder}/output.txt: {errors}"


@pytest.mark.parametrize("name", [*KINDS, "taught", "mixed", "fp8"])
def test_a_recorded_pass_changes_no_digit(runs, nproc, name):
    """Losses, gradient norms, scores; a teacher's answers are fed to the recording."""
    outcomes, folder = runs(nproc)
    scripts = [script for script in SCRIPTS if f"{name}-{script}-true" in outcomes]
    if not scripts:
        pytest.skip("on one GPU")
    for script in scripts:
        replays = outcomes[f"{name}-{script}-true"][0].get("metrics", {}).get("replays")
        assert replays == STEPS - WARMUP_STEPS, (script, outcomes[f"{name}-{script}-true"][0])
        for key in ("train/loss", "train/grad_norm", "val/loss"):
            want = column(folder, f"{name}-{script}-false", key)
            assert column(folder, f"{name}-{script}-true", key) == want, (script, key)


@pytest.mark.parametrize("name", [*KINDS, "taught", "packed", "odd"])
def test_megatron_fsdp_is_ddp(runs, nproc, name):
    """As near as BF16 copies of the weights are to autocast; FSDP2, which has such copies, is nearer."""
    outcomes, folder = runs(nproc)
    if f"{name}-train_ddp-false" not in outcomes:
        pytest.skip("on two GPUs")
    want = column(folder, f"{name}-train_ddp-false", "train/loss")
    assert len(want) == STEPS
    got = column(folder, f"{name}-train_mfsdp-false", "train/loss")
    assert got == pytest.approx(want, abs=2e-2)
    for key, steps, tolerance in (("train/grad_norm", 4, {"rel": 5e-2}), ("val/loss", STEPS, {"abs": 3e-2})):
        of_ddp, found = (column(folder, f"{name}-{script}-false", key) for script in ("train_ddp", "train_mfsdp"))
        assert found[:steps] == pytest.approx(of_ddp[:steps], **tolerance), key
    if f"{name}-train_fsdp2-false" in outcomes:
        assert got == pytest.approx(column(folder, f"{name}-train_fsdp2-false", "train/loss"), abs=5e-3)


@pytest.mark.parametrize("name", [*CHAINED, "packed"])
def test_megatron_fsdp_goes_on_from_its_own_checkpoints_and_ddps(runs, nproc, name):
    _, folder = runs(nproc)
    own = column(folder, f"{name}-train_mfsdp-{'false' if name == 'packed' else 'true'}", "train/loss")
    assert column(folder, f"{name}-after-train_mfsdp", "train/loss") == pytest.approx(own, abs=1e-3)
    of_ddp = column(folder, f"{name}-train_ddp-false", "train/loss")
    assert column(folder, f"{name}-after-train_ddp", "train/loss") == pytest.approx(of_ddp, abs=2e-2)


one_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("name", [pytest.param(name, marks=one_gpu) for name in COMPILED])
def test_gpu_compiled_blocks_are_the_same(runs, name):
    """A hook of Megatron-FSDP's, or a method that it puts on a parameter, is none of torch.compile's."""
    outcomes, folder = runs(1)
    found = outcomes[f"{name}-compiled"][0]
    assert found.get("metrics", {}).get("replays") == STEPS - WARMUP_STEPS, found
    want = column(folder, f"{name}-train_mfsdp-true", "train/loss")
    assert column(folder, f"{name}-compiled", "train/loss") == pytest.approx(want, abs=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_sizes_change_under_megatron_fsdp(runs):
    """As under DDP, recorded anew for each size, wherever it stops; and the model of the size before is gone."""
    outcomes, folder = runs(1)
    recorded = outcomes["sizes-train_mfsdp-true"][0]
    assert recorded.get("metrics", {}).get("replays") == 2 * (LENGTHS[0] - WARMUP_STEPS), recorded
    own = column(folder, "sizes-train_mfsdp-false", "train/loss")
    assert len(own) == LENGTHS[-1]
    for name in ("sizes-train_mfsdp-true", "sizes-stops"):
        assert column(folder, name, "train/loss") == own, name
    assert own == pytest.approx(column(folder, "sizes-train_ddp-false", "train/loss"), abs=2e-2)
    # Of runs on one stream: cuBLAS keeps memory for each.
    left = {script: outcomes[f"sizes-{script}-false"][0]["metrics"]["left"] for script in ("train_ddp", "train_mfsdp")}
    assert left["train_mfsdp"] < left["train_ddp"] + 2**22, f"bytes of GPU memory that the first size leaves: {left}"
