"""What `benchmark.py compare` measures: a whole training step of ours and of its peers, one card, one row a process.

Ours is an entrypoint's own `main`, with its loader, its loop and CUDA graphs, on synthetic images. A peer is its
library's model in the plainest loop: noise that is on the device already, BF16 autocast, cross-entropy, clipping, fused
AdamW with FP32 weights. So what a peer's row leaves out (loading, normalising, logging) is ours to make up for.
"""

import launch

import contextlib
import gc
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import nn

import modeling
import schema
import vit
from runtime.parameter_names import timm_name

HOST_BATCH = 8  # so few that the GPU waits for its host
RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
TE = ("model.transformer_engine=true", "compile=false", "cuda_graphs=true")
FP8 = (*TE, "fp8_config.enabled=true")
OURS = {
    "ours, compiled": ("compile=true", "cuda_graphs=true"),
    "ours, TE, BF16": TE,
    "ours, TE, FP8 delayed": FP8,
    "ours, TE, FP8 current": (*FP8, "fp8_config.fp8_recipe=Float8CurrentScaling"),
    "ours, TE, FP8 block": (*FP8, "fp8_config.fp8_recipe=Float8BlockScaling"),
}
PEERS: dict[str, dict[str, Any]] = {
    "timm, eager": {"kind": "timm"},
    "timm, compiled": {"kind": "timm", "compile": True},
    "Hugging Face, compiled": {"kind": "hf", "compile": True},
    "torchvision, compiled": {"kind": "torchvision", "compile": True},
    "DeepSpeed ZeRO-1, timm compiled": {"kind": "timm", "compile": True, "deepspeed": 1},
    "bare TE, BF16": {"kind": "bare"},
    "bare TE, FP8 delayed": {"kind": "bare", "recipe": "delayed"},
    "bare TE, FP8 current": {"kind": "bare", "recipe": "current"},
}
VARIANTS = (*PEERS, *OURS)
# Beside ours on several GPUs; eager, as DeepSpeed's hooks gather the weights of each layer.
SHARDED_PEER = {"DeepSpeed ZeRO-3, timm eager": {"kind": "timm", "deepspeed": 3}}


def in_own_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """work(*arguments) in a fork of this process, which must not have used CUDA; its result, or its last error line."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def child() -> None:
        # A fork's first call makes torch's pool of threads anew; left to autograd's threads, two at once can find none.
        torch.set_num_threads(torch.get_num_threads())
        try:
            send.send(work(*arguments))
        except BaseException as error:
            traceback.print_exc()
            send.send({"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]})

    process = context.Process(target=child)
    process.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        return {"error": "the process died"}
    finally:
        process.join()


def gemm_rate(gpu: int = 0) -> float:
    """TFLOP/s of an 8192-cubed BF16 matrix product on random data: what this very card can do.

    `gpu` is from then on the one that this process uses.
    """
    torch.cuda.set_device(gpu)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        torch.matmul(a, b)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        torch.matmul(a, b)
    end.record()
    torch.cuda.synchronize()
    return 2 * 8192**3 * 20 / (start.elapsed_time(end) / 1e3) / 1e12


def measure(
    size: str, batch: int, depth: int | None, variant: str, script: str, steps: int, is_first: bool
) -> dict[str, Any]:
    """One row: the step at `batch` images.

    The first of a size has the errors of logits and gradients, too, and the step at HOST_BATCH, which the others, the
    points of a curve, would repeat.
    """
    row: dict[str, Any] = {"model": size, "batch": batch, "variant": variant}
    row |= {} if depth is None else {"depth": depth}
    row |= gradient_errors(size, variant) if is_first else {}
    free_memory()

    def time_step(batch: int) -> dict[str, Any]:
        if variant in OURS:
            with tempfile.TemporaryDirectory() as folder:
                return time_entrypoint(size, batch, depth, variant, script, steps, Path(folder))
        return time_loop(size, batch, depth, PEERS[variant], steps)

    row |= time_step(batch)
    if not is_first:
        return row
    free_memory()
    # FP8's products take rows, images x tokens, by 16, which bare layers do not fill up.
    few = 16 if PEERS.get(variant, {}).get("recipe") else HOST_BATCH
    row["host_ms"] = round(1e3 * time_step(few)["step_time_s"], 1)
    return row


def config(size: str, depth: int | None, *overrides: str, script: str = "train_ddp") -> schema.Config:
    """The recipe's own ViT-B/16 config with another model, and nothing to write but metrics."""
    workers = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 4)
    base = [f"model=vit_{size}_224", "model.act_layer=gelu_tanh", "data=synthetic", "num_epochs=null"]
    base += ["num_train_steps=1", "lr_scheduler.num_warmup_epochs=null", "lr_scheduler.num_warmup_steps=5"]
    base += [f"evaluation.every_n_{unit}=null" for unit in ("steps", "epochs")]
    base += [f"checkpoint.save_every_n_{unit}=null" for unit in ("steps", "epochs")]
    base += ["checkpoint.ckpt_dir=null", f"data.num_workers={workers}"]
    base += [] if depth is None else [f"model.depth={depth}"]
    return launch.load_config("vit_base_patch16_224", [*base, *overrides], script=script)


def time_entrypoint(
    size: str, batch: int, depth: int | None, variant: str, script: str, steps: int, folder: Path, ranks: int = 1
) -> dict[str, Any]:
    """Run `script`'s main, with `batch` images a rank, and read its metrics: the better of its last two log lines.

    `folder` is the run's; of several ranks the first has something to tell, the others return nothing.
    """
    main, began, first_step_s = importlib.import_module(script).main, time.perf_counter(), []

    class FirstStep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not first_step_s and record.getMessage().startswith("step 1/"):
                first_step_s.append(time.perf_counter() - began)

    handler = FirstStep()
    torch._dynamo.reset()  # or the tenth model of a process would no longer be compiled
    torch.cuda.reset_peak_memory_stats()
    length = [f"global_batch_size={batch * ranks}", f"num_train_steps={3 * steps}", f"logger.frequency={steps}"]
    cfg = config(size, depth, *OURS[variant], *length, f"output_dir={folder}", script=script)
    launch.check_script(cfg, script, ranks)
    logging.getLogger().addHandler(handler)
    main(cfg)
    logging.getLogger().removeHandler(handler)
    if os.environ.get("RANK", "0") != "0":
        return {}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [row for row in rows if "train/step_time_s" in row]
    if not lines or lines[-1]["step"] != 3 * steps:
        raise RuntimeError(f"{script} was stopped before step {3 * steps}")
    seconds = min(line["train/step_time_s"] for line in lines[-2:])
    return {
        "step_time_s": round(seconds, 5),
        "images_per_second": round(ranks * batch / seconds, 1),
        "peak_gib": round(lines[-1]["train/memory_peak_gib"], 2),
        "first_step_s": round(first_step_s[0], 1) if first_step_s else None,
    }


def time_loop(size: str, batch: int, depth: int | None, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """The median step of a peer's model in a plain loop."""
    torch._dynamo.reset()
    began = time.perf_counter()
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    labels = torch.randint(0, 1000, (batch,), device="cuda")
    options = dict(options)
    zero_stage = options.pop("deepspeed", None)
    model, forward = build(size, depth, **options)
    if zero_stage:
        step = deepspeed_step(model, images, labels, zero_stage)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            F.cross_entropy(forward(images).float(), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    step()
    torch.cuda.synchronize()
    first_step_s = time.perf_counter() - began
    for _ in range(5):
        step()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    seconds = statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))
    return {
        "step_time_s": round(seconds, 5),
        "images_per_second": round(batch / seconds, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_step_s": round(first_step_s, 1),
    }


def deepspeed_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, stage: int) -> Callable[[], None]:
    """A step of DeepSpeed's engine: BF16 weights, FP32 ones in its optimizer, ZeRO over the cards there are."""
    deepspeed = importlib.import_module("deepspeed")
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    os.environ.update({key: os.environ.get(key, value) for key, value in place.items()})
    options = {
        "train_micro_batch_size_per_gpu": len(images),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options)
    images = images.bfloat16()

    def step() -> None:
        engine.backward(F.cross_entropy(engine(images).float(), labels))
        engine.step()

    return step


def build(
    size: str,
    depth: int | None = None,
    *,
    kind: str,
    overrides: tuple[str, ...] = (),
    recipe: str | None = None,
    compile: bool = False,
) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """(module, forward): a model on the GPU with FP32 weights, and forward(images) -> logits under BF16 autocast."""
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    cfg = config(size, depth, *overrides)
    model: Any
    if kind in ("ours", "hf"):
        implementation = ("model.implementation=hf",) if kind == "hf" else ()
        cfg = config(size, depth, *overrides, *implementation)
        with torch.device("cuda"):
            model = modeling.build_model(cfg.model, cfg.fp8_config)
        model.init_weights(0)
        compile = cfg.compile if kind == "ours" else compile
        modeling.prepare_blocks(model, activation_checkpointing=False, compile=compile)
    elif kind == "torchvision":
        model = torchvision_model(cfg.model).cuda()
        blocks = model.encoder.layers
    else:
        block: dict[str, Any] = {"block_fn": bare_block()} if kind == "bare" else {}
        model = timm.create_model(
            f"vit_{size}_224", num_classes=1000, act_layer="gelu_tanh", depth=cfg.model.depth, **block
        ).cuda()
        blocks = model.blocks
        if kind == "bare":
            add_positions = model._pos_embed
            model._pos_embed = lambda x: add_positions(x).bfloat16()  # timm's FP32 positions would promote the stream
        if recipe:
            made = getattr(importlib.import_module("transformer_engine.common.recipe"), RECIPES[recipe])()
            engine = importlib.import_module("transformer_engine.pytorch")
            context = lambda: engine.autocast(recipe=made)  # noqa: E731
    if compile and kind in ("timm", "torchvision"):
        for each in blocks:
            each.compile()

    def forward(images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16), context():
            return model(images)

    return model.train(), forward


def torchvision_model(cfg: schema.ModelConfig) -> nn.Module:
    """Torchvision's ViT of the same shape; its GELU is the erf form, for which it has no option."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=schema.pair(cfg.img_size)[0],
        patch_size=schema.pair(cfg.patch_size)[0],
        num_layers=cfg.depth,
        num_heads=cfg.num_heads,
        hidden_dim=cfg.embed_dim,
        mlp_dim=int(cfg.embed_dim * cfg.mlp_ratio),
        num_classes=cfg.num_classes,
    )


def bare_block() -> type:
    """A block of TransformerEngine's layers without any option: what ours must not be slower than."""
    engine = importlib.import_module("transformer_engine.pytorch")
    split = importlib.import_module("transformer_engine.pytorch.utils").SplitAlongDim

    class BareBlock(nn.Module):
        def __init__(self, dim: int, num_heads: int, **_: Any) -> None:
            super().__init__()
            self.num_heads = num_heads
            self.qkv = engine.LayerNormLinear(dim, 3 * dim, eps=1e-6)
            self.core = engine.DotProductAttention(
                num_heads, dim // num_heads, attention_dropout=0.0, qkv_format="bshd", attn_mask_type="no_mask"
            )
            self.proj = engine.Linear(dim, dim)
            self.mlp = engine.LayerNormMLP(dim, 4 * dim, eps=1e-6, activation="gelu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.num_heads
            q, k, v = split.apply(self.qkv(x).unflatten(-1, (3 * heads, -1)), 2, [heads] * 3)
            x = x + self.proj(self.core(q, k, v))
            return x + self.mlp(x)

    return BareBlock


# Names of torchvision's parameters and of a bare block's -> timm's.
NAMES = (
    (r"^class_token$", "cls_token"),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.head\.", "head."),
    (r"^(blocks\.\d+\.)(qkv|proj)\.", r"\1attn.\2."),
)


def common_name(name: str) -> str:
    """The name in timm's model of a parameter of any of the variants."""
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return timm_name(name)


def gradient_errors(size: str, variant: str) -> dict[str, Any]:
    """Relative error against float32 timm, same weights, 16 images: of the logits, and of all gradients as one."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    images, labels = torch.randn(16, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (16,), device="cuda")
    options: dict[str, Any] = {"kind": "ours", "overrides": OURS[variant]} if variant in OURS else dict(PEERS[variant])
    options.pop("deepspeed", None)  # whose model is timm's
    activation = "gelu" if options["kind"] == "torchvision" else "gelu_tanh"
    reference = timm.create_model(f"vit_{size}_224", num_classes=1000, act_layer=activation).cuda().train()
    want = reference(images)
    F.cross_entropy(want, labels).backward()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True

    model, forward = build(size, **options)
    parameters = {common_name(name): p for name, p in model.named_parameters()}
    for name, parameter in parameters.items():
        parameter.data.copy_(_part(dict(reference.named_parameters()), name).data.view_as(parameter))
    for _ in range(3 if "FP8" in variant else 1):  # delayed scaling needs to see a pass
        model.zero_grad()
        logits = forward(images).float()
        F.cross_entropy(logits, labels).backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in parameters.values()), variant
    differences = [
        (p.grad - _part(wanted, name).view_as(p)).norm() for name, p in parameters.items() if p.grad is not None
    ]
    whole = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    return {
        "logits_error": round(((logits - want).norm() / want.norm()).item(), 5),
        "gradient_error": round((torch.stack(differences).norm() / whole).item(), 5),
    }


def _part(tensors: dict[str, Any], name: str) -> torch.Tensor:
    """The tensor of that name in timm's model, or the third of one that Hugging Face has by itself."""
    if name in tensors:
        return tensors[name]
    (letter,) = re.findall(r"\.attn\.([qkv])\.", name)
    return tensors[name.replace(f".attn.{letter}.", ".attn.qkv.")].chunk(3)["qkv".index(letter)]


def flops_per_step(size: str, batch: int, depth: int | None) -> float:
    """Floating-point operations of a step: three forward passes' worth of matrix products and attention."""
    with torch.device("meta"):
        return 3 * batch * vit.VisionTransformer(config(size, depth, "compile=false").model).flops_per_image()


def free_memory() -> None:
    """Give back what went out of scope, before the next model."""
    gc.collect()
    torch.cuda.empty_cache()


def draw(rows: list[dict[str, Any]], output: str) -> None:
    """Images/s of every variant: bars for a model that was measured at one batch size and depth, curves for others."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "error" not in row]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, grid = plt.subplots(len(models), figsize=(9, 3.6 * len(models)), squeeze=False)
    for (axes,), model in zip(grid, models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        variants = list(dict.fromkeys(row["variant"] for row in mine))
        key = "depth" if len({row.get("depth") for row in mine}) > 1 else "batch"
        if len({row.get(key) for row in mine}) > 1:
            for variant in variants:
                points = sorted((row[key], row["images_per_second"]) for row in mine if row["variant"] == variant)
                axes.plot(*zip(*points, strict=True), marker="o", label=variant)
            axes.set(xlabel=f"{key}", ylabel="images/s", title=model)
            axes.legend(fontsize=7)
        else:
            bars = axes.barh(variants, [row["images_per_second"] for row in mine])
            axes.bar_label(bars, [f"{row['images_per_second']:,.0f} ({row['share_of_gemm']:.2f})" for row in mine])
            axes.invert_yaxis()
            axes.margins(x=0.2)
            axes.set(xlabel="images/s (share of the GEMM rate)", title=f"{model}, {mine[0]['batch']} images a step")
    figure.tight_layout()
    figure.savefig(output, dpi=100)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    keys = ("model", "batch", "depth", "variant", "images_per_second", "share_of_gemm", "peak_gib", "host_ms")
    keys += ("first_step_s", "gradient_error")
    keys = tuple(key for key in keys if any(key in row for row in rows))
    lines = ["| " + " | ".join(keys) + " |", "|" + " --- |" * len(keys)]
    for row in rows:
        cells = row | ({"images_per_second": row["error"]} if "error" in row else {})
        lines.append("| " + " | ".join(str(cells.get(key, "")) for key in keys) + " |")
    return "\n".join(lines)
