"""A recipe on the cards at hand, before it is started: memory, time, cost, the command, what is no longer the recipe.

    python tools/estimate.py deit3_b16 --card H100 --gpus 8 --price 2.50
    python tools/estimate.py vit_base_patch16_224 --card H200 --gpus 1,8,64,1024 model=vit_10b_patch14_224

CONFIG and the overrides are an entrypoint's. For each strategy the fastest micro batch, recomputation and dp_outer that
fit are printed, but for those that the command line gives; * marks the fastest of all, whose command follows.

The global batch stays where the ranks divide it. If they do not, it becomes the nearest that they do, with the rate by
the batch (optimizer.lr_base_size), by the rule that timm's train.py has, a square root for adaptive optimizers, unless
optimizer.lr_base_scale is given; what the config counts in steps keeps its epochs. Each thing that is then not as in
the config alone gets a line.

The rates are measured ones (`RATES`, `HOST_MS`, `SHOWN`, each with its file under benchmarks/ and its commit), what is
assumed is named in `ASSUMED`. Not in it: reading images, evaluations, saves, FP8 weights. How far off it is from runs
that were measured, row by row: benchmarks/estimate.json, by tools/check_estimate.py.
"""

import contextlib
import dataclasses
import itertools
import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import launch  # noqa: E402  (before torch)

import torch  # noqa: E402

import vit_te  # noqa: E402
from modeling import build_model  # noqa: E402
from schema import (  # noqa: E402
    LATER_OPTIONS,
    REL_POS,
    Config,
    ConfigError,
    RunSizes,
    leaves,
    peak_lr,
    peak_lr_in_words,
    scaled_lr,
    split_batch,
    to_plain,
    typed,
)

GIB = 2**30
IMAGENET = 1281167
SCRIPTS = ("train_ddp", "train_fsdp2", "train_mfsdp")
# Memory that a run can have, of what the card is sold with. The H100's rates are the H200's: the same processor.
CARDS = {"H200": 139.8, "H100": 79.2}
USABLE = 0.93

# A card's memory moves this much a second, read and written: AdamW's kernel, 28 bytes of G/14's 1.84 G parameters in
# 14.9 ms (idle_b16_g14_h200x2.json, of commit bdb1a4e).
MOVED_TBS = 28 * 1.8444e9 / 14.9e-3 / 1e12
# Bytes that move for each parameter, by arithmetic. In an update, beside the optimizer's state: weights and gradients
# read, weights written (12), gradients read for their norm, scaled (12), set to zero (4). In a microbatch under DDP: a
# weight cast to BF16, its gradient to FP32 (6 each). FSDP2's copies into and out of buffers, and Megatron-FSDP's: what
# G/14 on one card took longer than under DDP, 7.4 and 3.3 ms (scaling_h200x2.json, of commit bdb1a4e).
UPDATE_BYTES, PASS_BYTES = 28, {"train_ddp": 12, "train_fsdp2": 26, "train_mfsdp": 18}
DIVIDED_BYTES = 8  # DDP divides the gradients by the number of ranks
BETWEEN_STEPS_MS = 1.8  # a card's idle time in a step (idle_l16_one_and_two_h200x2.json, of commit bdb1a4e)


class Rate(NamedTuple):
    """What one card made: images/s of a model of `gflop` an image's step, in steps of `images`."""

    speed: float
    gflop: float
    images: int
    params: float
    file: str
    commit: str
    bytes_a_parameter: int = UPDATE_BYTES + 16 + PASS_BYTES["train_ddp"]

    def tflops(self) -> float:
        """TFLOP/s of forward and backward passes alone."""
        step = self.images / self.speed - self.params * self.bytes_a_parameter / (MOVED_TBS * 1e12)
        return self.images * self.gflop / 1e3 / (step - BETWEEN_STEPS_MS / 1e3)


# Blocks -> width -> rate: everything but the host's waits.
B, L, H = 86.6e6, 304.3e6, 632.0e6  # parameters of B/16, L/16 and H/14
LEVERS, STEP_B_L = ("levers_h200x1.log", "306d7a77cc7f"), ("step_h200_b16_l16.json", "429da998660a")
ALONE = ("strategies_h200x2.json", "71274bd")
RATES: dict[str, dict[int, Rate]] = {
    "eager": {768: Rate(2739.7, 105.4, 256, B, "train_b16_blocks_eager_h200x1.json", "429da998660a")},
    "compiled": {
        768: Rate(3984.0, 105.4, 512, B, *LEVERS),
        1024: Rate(1253.8, 369.6, 256, L, *STEP_B_L),
        1280: Rate(438.0, 1004.0, 128, H, "step_h200_h14.json", "429da998660a"),
        # With all that it recomputes; averages in BF16, under FSDP2.
        5120: Rate(26.2, 20868.0, 64, 10.1e9, "train_10b_h200x1.json", "d301d54", UPDATE_BYTES + 8 + 26),
    },
    "te": {
        768: Rate(4081.4, 105.4, 512, B, *ALONE),
        1024: Rate(1329.1, 369.6, 256, L, *ALONE),
        1280: Rate(473.0, 1004.0, 128, H, *LEVERS),
    },
    "fp8": {
        768: Rate(4971.7, 105.4, 512, B, *ALONE),
        1024: Rate(1722.4, 369.6, 256, L, *ALONE),
        1280: Rate(634.0, 1004.0, 128, H, *LEVERS),
    },
}
# Host time of a microbatch of L/16, which has 24 blocks, ms: cuda_graphs_h200x1.log, of commit f5e4c76. Eager blocks
# were not measured so; they get the compiled ones' time, which is a lower bound.
HOST_MS = {
    "compiled": {"train_ddp": 61.0, "train_fsdp2": 146.0, "train_mfsdp": 162.0},
    "te": {"train_ddp": 133.0, "train_fsdp2": 222.0, "train_mfsdp": 246.0},
    "fp8": {"train_ddp": 167.0, "train_fsdp2": 242.0, "train_mfsdp": 214.0},
}
# The same with cuda_graphs: what a microbatch of 8 images took then, in which the host's share is the least.
GRAPHED_MS = {
    "compiled": {"train_ddp": 14.6, "train_fsdp2": 17.5, "train_mfsdp": 23.7},
    "te": {"train_ddp": 14.8, "train_fsdp2": 17.0, "train_mfsdp": 19.4},
    "fp8": {"train_ddp": 18.7, "train_fsdp2": 21.0, "train_mfsdp": 29.5},
}
# What a step on several cards takes longer than on one: this share of computing, whose kernels are slower beside NCCL's
# and which waits for the slowest card, and this share of the collectives' time. Fitted to the runs with CUDA graphs on
# two cards in strategies_h200x2.json and scaling_h200x2.json, of commits 71274bd and bdb1a4e.
SLOWER = 0.03
SHOWN = {"train_ddp": 0.5, "train_fsdp2": 0.35, "train_mfsdp": 0.5}
NVLINK_GBS = 295.1  # of a link in an all-reduce: doctor_h200x2.log, of commit 4164698f9b1c
ASSUMED = {"network GB/s a card": 50.0, "microseconds a hop of a ring": 3.0, "cards a node": 8}

# Tensors of (images, tokens, width) in BF16 that a block keeps for its backward pass beside the two of the MLP's width:
# by arithmetic (tests/test_dry_run.py), less what FP8 saves, more what DDP's autocast casts for eager norms. Outside of
# the blocks, and in the backward pass of one: 11. But for the arithmetic fitted to the peaks in estimate.json.
KEPT = {"eager": 8.0, "compiled": 8.0, "te": 8.0, "fp8": 6.1}
KEPT_BY_CASTS, KEPT_OUTSIDE = 2.0, 11.0
# What activation_checkpointing=selective leaves out of these, by arithmetic: the share of the MLP's own, and tensors of
# the stream's width. TransformerEngine's MLP has the norm in it; FP8's activations and norms have half of BF16's bytes.
# An eager norm under autocast leaves its output in FP32, and that, uncast, is the MLP's input.
LEFT_OUT = {"eager": (1.0, 0.0), "compiled": (1.0, 0.0), "te": (1.0, 1.0), "fp8": (0.75, 0.5)}
KEPT_UNCAST = 1.0
# Of the options that came later, those that memory and FLOPs do not follow from here.
UNKNOWN = ("num_kv_heads", "block_fn", "attn_layer", *REL_POS)
STATE_BYTES = {"adamw": 8, "lamb": 8, "sgd": 4, "muon": 4}  # of the optimizer, a parameter (muon: of the matrices)

# How a recipe is run, not what it is: another value leaves its numbers as they are, but for rounding. And keys whose
# difference is told by another line.
HOW = ("output_dir", "micro_batch_size", "compile", "cuda_graphs", "activation_checkpointing", "distributed", "ddp")
HOW += ("fsdp2", "mfsdp", "logger", "wandb", "tensorboard", "profiler", "evaluation", "checkpoint", "data.path")
HOW += ("data.num_workers", "data.worker_timeout_s", "data.shard_streams", "data.cache_dir", "data.cache_gb")
TOLD = ("data.image_size", "global_batch_size", "optimizer.lr", "optimizer.lr_base_size", "optimizer.lr_base_scale")
IN_STEPS = ("num_train_steps", "lr_scheduler.num_warmup_steps", "lr_scheduler.num_training_steps")
IN_STEPS += ("lr_scheduler.num_cooldown_steps", "lr_scheduler.rsqrt_timescale")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One way to run, and what it takes.

    Attributes:
        script: the entrypoint.
        settings: overrides that make it so.
        memory: of a card, GiB by part.
        peak: the most at one time, GiB.
        compute: seconds of a step that the card computes.
        weights: seconds that it casts, copies and updates weights, whatever the number of images.
        host: seconds that the host launches.
        network: seconds of collectives, hidden or not.
        step: seconds of a step.
    """

    script: str
    settings: dict[str, Any]
    memory: dict[str, float]
    peak: float
    compute: float
    weights: float
    host: float
    network: float
    step: float


@dataclasses.dataclass(frozen=True)
class Shape:
    """What of a model counts: built without storage, on plain blocks, which have the same parameters."""

    params: int
    block: int
    flops: float

    @classmethod
    def of(cls, cfg: Config) -> "Shape":
        """The config's."""
        plain = dataclasses.replace(cfg.model, transformer_engine=False)
        with torch.device("meta"):
            model = build_model(plain, cfg.fp8_config)
        block = max(sum(p.numel() for p in unit.parameters()) for unit in model.shard_units())
        return cls(sum(p.numel() for p in model.parameters()), block, model.flops_per_image())


def check(cfg: Config, script: str) -> None:
    """Refuse by name what the estimate does not know.

    Raises:
        ConfigError: naming the key, its value and what it must be.
    """
    needed: list[tuple[str, Any, Any]] = [("precision", cfg.precision, "bf16")]
    needed += [("model.freeze", cfg.model.freeze, None), ("model.implementation", cfg.model.implementation, "ours")]
    needed += [(f"model.{key}", getattr(cfg.model, key), LATER_OPTIONS[key]) for key in UNKNOWN]
    if cfg.model.rope_type == "mixed":
        needed.append(("model.rope_type", "mixed", "cat"))  # its frequencies are trained, for which more is kept
    needed += [("distributed.tp", cfg.distributed.tp or 1, 1), ("distillation.kind", cfg.distillation.kind, "none")]
    needed.append(("data.packing.enabled", cfg.data.packing.enabled, False))
    if script == "train_fsdp2":
        needed.append(("fsdp2.cpu_offload", cfg.fsdp2.cpu_offload, False))
    if script == "train_mfsdp":
        needed.append(("mfsdp.zero_dp_strategy", cfg.mfsdp.zero_dp_strategy, "optim_grads_params"))
    for key, value, wanted in needed:
        if value != wanted:
            raise ConfigError(f"{key}={typed(value)} is not in the estimate: set {key}={typed(wanted)}")


def blocks_of(cfg: Config) -> str:
    """The kind of the config's blocks."""
    if cfg.model.transformer_engine:
        return "fp8" if cfg.fp8_config.enabled else "te"
    return "compiled" if cfg.compile else "eager"


def activations(cfg: Config, script: str) -> tuple[float, float]:
    """Tensors of (images, tokens, width) in BF16 that a block keeps from forward to backward, and that it comes to.

    The second is what it has by the time of its own backward pass, when it has recomputed.
    """
    kind, model = blocks_of(cfg), cfg.model
    is_cast = script == "train_ddp" and kind == "eager"
    of_mlp, whole = kept_of_mlp(cfg), KEPT[kind] + (KEPT_BY_CASTS if is_cast else 0)
    # Queries and keys as attention takes them, beside those of the projection, whose matrix the values keep.
    whole += 2 if model.qk_norm or (model.rope_type and model.qkv_fused) else 0
    whole += 1 if model.scale_attn_norm else 0
    if model.init_values is not None:  # LayerScale keeps what it multiplies
        whole += 1 if model.attn_only_layer_scale else 2
    whole += of_mlp
    if not cfg.activation_checkpointing:
        return whole, whole
    if cfg.activation_checkpointing is True:
        return 1.0, 1.0 + whole
    share, of_stream = LEFT_OUT[kind]
    left_out = share * of_mlp + of_stream
    kept = whole - left_out + (KEPT_UNCAST if is_cast else 0)
    return kept, kept + left_out


def kept_of_mlp(cfg: Config) -> float:
    """Those of them that the MLP makes: products and activations (an eager gate's are apart), and its norm's output."""
    of_gate = 0 if cfg.model.mlp_layer == "mlp" else 1 + (blocks_of(cfg) == "eager")
    return cfg.model.mlp_hidden() / cfg.model.embed_dim * (2 + of_gate + cfg.model.scale_mlp_norm)


def recomputed(cfg: Config, flops: float) -> float:
    """Time of a step's computing over that without recomputation, of a model of `flops` an image's forward pass."""
    if not cfg.activation_checkpointing:
        return 1.0
    if cfg.activation_checkpointing is True:
        return 4 / 3
    model = cfg.model
    # The MLP's first products; its last one, too, where dropout after it wants its own mask again.
    products = (1 if model.mlp_layer == "mlp" else 2) + bool(model.proj_drop_rate)
    again = products * 2 * model.depth * model.num_tokens() * model.embed_dim * model.mlp_hidden()
    return 1 + again / (3 * flops)


def tflops(kind: str, width: int) -> float:
    """TFLOP/s of passes, from the widest model measured that is not wider, or else the narrowest."""
    known = RATES[kind]
    return known[max((w for w in known if w <= width), default=min(known))].tflops()


def moved(cfg: Config, script: str, gpus: int, params: float, parts: int, passes: int) -> float:
    """Bytes of weights, gradients and the optimizer's state that a card's memory moves in a step of `passes`."""
    update = UPDATE_BYTES + 2 * state_bytes(cfg) + (12 if cfg.ema.decay else 0)
    divided = DIVIDED_BYTES if script == "train_ddp" and gpus > 1 else 0
    return params * (update / parts + divided + passes * PASS_BYTES[script])


def state_bytes(cfg: Config) -> float:
    """Of the optimizer, a parameter."""
    return STATE_BYTES[cfg.optimizer.name] / (2 if cfg.optimizer.state_dtype == "bf16" else 1)


def ring_s(num_bytes: float, ranks: int, in_a_node: int, count: int, *, network: float) -> float:
    """Seconds of `count` all-gathers or reduce-scatters of together `num_bytes`; an all-reduce is one of each.

    A group that has `in_a_node` of its ranks in each node sends through as many network cards at once.
    """
    if ranks == 1:
        return 0.0
    rate = NVLINK_GBS if ranks <= in_a_node else min(NVLINK_GBS, in_a_node * network)
    hops = count * (ranks - 1) * ASSUMED["microseconds a hop of a ring"] / 1e6
    return num_bytes * (ranks - 1) / ranks / (rate * 1e9) + hops


def estimate(cfg: Config, script: str, gpus: int, shape: Shape, *, network: float) -> Estimate:
    """What a run of `script` with this config takes.

    With data.size_schedule memory is that of the size that needs most, and times are means over all steps.

    Raises:
        ConfigError: the batch does not divide, or an option is not in the estimate.
    """
    check(cfg, script)
    if cfg.data.size_schedule is not None:
        return _over_stages(cfg, script, gpus, network=network)
    kind, model = blocks_of(cfg), cfg.model
    sizes = RunSizes.of(cfg, world_size=gpus, num_train_images=IMAGENET, num_val_images=50000)
    micro, accumulation = sizes.micro_batch_size, sizes.accumulation
    outer = cfg.distributed.dp_outer or 1
    shard, is_ddp, node = gpus // outer, script == "train_ddp", int(ASSUMED["cards a node"])
    parts = 1 if is_ddp else shard

    # Memory. Megatron-FSDP shards its BF16 weights, too; autocast casts each weight of DDP's once.
    weights = 6 if is_ddp or script == "train_mfsdp" else 4
    memory = {"weights": weights * shape.params / parts, "gradients": 4 * shape.params / parts}
    memory["optimizer"] = state_bytes(cfg) * shape.params / parts
    memory["averages"] = 4 * shape.params / parts if cfg.ema.decay else 0
    stream = 2 * micro * model.num_tokens() * model.embed_dim
    kept, at_work = activations(cfg, script)
    memory["activations"] = stream * (model.depth * kept + at_work - kept + KEPT_OUTSIDE)
    outside = shape.params - model.depth * shape.block
    stays = script == "train_fsdp2" and not cfg.fsdp2.reshard_after_forward
    # Blocks that are gathered once a microbatch, and those that are gathered at one time.
    once = model.depth if stays else cfg.fsdp2.gathered_blocks if script == "train_fsdp2" else 0
    held = outside + max(once, 2) * shape.block
    memory["gathered"] = 0 if is_ddp else 2 * held + 6 * shape.block
    if script == "train_fsdp2" and accumulation > 1:
        memory["whole gradients"] = 4 * shape.params
    if script == "train_mfsdp" and kind == "fp8":
        memory["FP8 weights"] = 2 * shape.params  # and their transposes, of all blocks
    memory["graphs"] = 0.3 * GIB if cfg.cuda_graphs else 0
    # FSDP2's gradients are not there yet when the activations are most; the others have buffers for them.
    late = 0 if script != "train_fsdp2" else min(memory["gradients"], memory["activations"])
    peak = sum(memory.values()) - late

    # Time.
    compute = accumulation * micro * 3 * shape.flops / (tflops(kind, model.embed_dim) * 1e12)
    compute *= recomputed(cfg, shape.flops)
    weights_s = moved(cfg, script, gpus, shape.params, parts, accumulation) / (MOVED_TBS * 1e12)
    weights_s += BETWEEN_STEPS_MS / 1e3
    floor = GRAPHED_MS if cfg.cuda_graphs else HOST_MS
    host = accumulation * floor[kind if kind in floor else "compiled"][script] / 24 * model.depth / 1e3
    here = min(node, shard)
    if is_ddp:
        buckets = math.ceil(4 * shape.params / (cfg.ddp.bucket_cap_mb * 2**20))
        collectives = 2 * ring_s(4 * shape.params, gpus, min(node, gpus), buckets, network=network)
    else:
        reduces = accumulation if script == "train_mfsdp" else 1
        units = model.depth + 1
        fewer, less = (units, shape.params) if stays else (once, once * shape.block)
        gathers, gathered = accumulation * (2 * units - fewer), accumulation * (2 * shape.params - less)
        collectives = ring_s(2 * gathered, shard, here, gathers, network=network)
        collectives += ring_s(reduces * 4 * shape.params, shard, here, reduces * units, network=network)
        beside = max(node // shard, 1) if gpus > node else outer
        collectives += 2 * ring_s(4 * shape.params / shard, outer, beside, units, network=network)
    shown = max(SHOWN[script] * collectives, collectives - compute) + (SLOWER * compute if gpus > 1 else 0)
    settings: dict[str, Any] = {"micro_batch_size": micro, "activation_checkpointing": cfg.activation_checkpointing}
    settings |= {"distributed.dp_outer": outer} if outer > 1 else {}
    in_gib = {name: size / GIB for name, size in memory.items() if size}
    step = max(compute + weights_s, host) + shown
    return Estimate(script, settings, in_gib, peak / GIB, compute, weights_s, host, collectives, step)


def _over_stages(cfg: Config, script: str, gpus: int, *, network: float) -> Estimate:
    found, lengths = [], []
    for stage, sizes in stages_of(cfg, gpus):
        found.append(estimate(stage, script, gpus, Shape.of(stage), network=network))
        lengths.append(sizes.last_step - sizes.first_step)
    times = {
        name: sum(getattr(way, name) * length for way, length in zip(found, lengths, strict=True)) / sum(lengths)
        for name in ("compute", "weights", "host", "network", "step")
    }
    return dataclasses.replace(max(found, key=lambda way: way.peak), **times)


def stages_of(cfg: Config, gpus: int) -> list[tuple[Config, RunSizes]]:
    """The parts of the run with images of one size, on ImageNet."""
    sizes = RunSizes.stages(cfg, world_size=gpus, num_train_images=IMAGENET, num_val_images=50000)
    return list(zip(cfg.stages(), sizes, strict=False))


def ways(
    cfg: Config, gpus: int, room: float, shape: Shape, *, network: float, typed: frozenset[str] = frozenset()
) -> dict[str, Estimate | str]:
    """Strategy -> the fastest of its settings whose peak is at most `room` GiB, or why there are none.

    Args:
        cfg: the run's, whose global batch the ranks divide.
        gpus: number of cards.
        room: what a run can have of a card's memory.
        shape: the model's.
        network: GB/s of a card's.
        typed: keys that the command line gives: their values stay.
    """
    share = cfg.global_batch_size // gpus
    micros = [n for n in range(1, share + 1) if share % n == 0 and not (mixes(cfg) and n % 2)]
    if "micro_batch_size" in typed:
        micros = [split_batch(cfg, gpus).micro_batch_size]
    recomputations = (
        (cfg.activation_checkpointing,) if "activation_checkpointing" in typed else (False, "selective", True)
    )
    node = int(ASSUMED["cards a node"])
    best: dict[str, Estimate | str] = {}
    for script in SCRIPTS:
        outers = [None] if script == "train_ddp" or gpus <= node or gpus % node else [None, gpus // node]
        if typed & {"distributed.dp_outer", "distributed.dp_shard"}:
            outers = [cfg.distributed.dp_outer]
        found, refused = [], ""
        shard = cfg.distributed.dp_shard if "distributed.dp_shard" in typed else None
        for micro, recomputes, outer in itertools.product(micros, recomputations, outers):
            # Graphs record no recomputation: those of the config give way, those that were typed refuse it.
            without_graphs = bool(recomputes) and cfg.cuda_graphs and "cuda_graphs" not in typed
            tried = dataclasses.replace(
                cfg,
                cuda_graphs=cfg.cuda_graphs and not without_graphs,
                micro_batch_size=micro,
                activation_checkpointing=recomputes,
                distributed=dataclasses.replace(cfg.distributed, dp_outer=outer, dp_shard=shard),
            )
            if why := refusal(tried, script, gpus, typed):
                refused = why
            else:
                way = estimate(tried, script, gpus, shape, network=network)
                if without_graphs:
                    way.settings["cuda_graphs"] = False
                found.append(way)
        fitting = [way for way in found if way.peak <= room]
        why_not = f"does not fit {room:.0f} GiB" if found else refused
        best[script] = min(fitting, key=_seconds) if fitting else why_not
    return best


def _seconds(way: Estimate) -> float:
    """Of a step; recomputation that would gain less than this is no gain: it hides collectives by work."""
    return way.step * (1.05 if way.settings["activation_checkpointing"] else 1)


def mixes(cfg: Config) -> bool:
    """Whether images are mixed in pairs, which microbatches must not tear."""
    return bool(cfg.data.mixup or cfg.data.cutmix)


def refusal(cfg: Config, script: str, gpus: int, typed: frozenset[str]) -> str:
    """The line with which the entrypoint would refuse to start on these cards; empty if it would start."""
    with cards_are_here():
        try:
            launch.check_script(cfg, script, gpus)
            launch.check_options(cfg, script, list(typed))
            for stage in cfg.stages():
                split_batch(stage, gpus)
        except ConfigError as error:
            return str(error)
    return ""


@contextlib.contextmanager
def cards_are_here() -> Iterator[None]:
    """Inside, this machine has what launch.check_script asks a machine for: a card, TransformerEngine, a compiler."""
    asked = ((torch.cuda, "is_available"), (vit_te, "transformer_engine"), (vit_te, "recipe"))
    with contextlib.ExitStack() as stack:
        for owner, name in (*asked, (launch, "_check_compiler")):
            stack.enter_context(mock.patch.object(owner, name))
        yield


def config_of(name: str, overrides: list[str], script: str) -> Config:
    """The config, whose images need not be there."""
    return launch.load_config(name, with_images(overrides, "unused"), script=script)


def with_images(overrides: list[str], path: str) -> list[str]:
    """The overrides, with a path to the images if they do not say where those are."""
    given = any(override.startswith(("data=", "data.path=")) for override in overrides)
    return [*overrides, *([] if given else [f"data.path={path}"])]


def value_of(cfg: Config, key: str) -> Any:
    """The config's value of a dotted key."""
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value


def translation(cfg: Config, gpus: int, typed: frozenset[str]) -> list[str]:
    """Overrides that make the global batch one that `gpus` ranks divide, and what follows from it; often none."""
    batch = cfg.global_batch_size
    micro = cfg.micro_batch_size if "micro_batch_size" in typed else None
    unit = math.lcm(gpus * (micro or (2 if mixes(cfg) else 1)), cfg.data.repeated_augmentation)
    nearest = max(round(batch / unit), 1) * unit
    if nearest == batch:
        return []
    options, schedule = cfg.optimizer, cfg.lr_scheduler
    overrides, base, scale = [f"global_batch_size={nearest}"], options.lr_base_size, options.lr_base_scale
    if base is None:
        if "optimizer.lr_base_scale" not in typed:
            scale = "linear" if options.name == "sgd" else "sqrt"
        base = batch
        overrides += [f"optimizer.lr_base_size={base}", f"optimizer.lr_base_scale={scale}"]
    peak = scaled_lr(options.lr, nearest, base, scale)
    lowered = [key for key in ("min_lr", "warmup_start_lr") if getattr(schedule, key) > peak]
    overrides += [f"lr_scheduler.{key}={peak!r}" for key in lowered]
    in_steps = {key: value for key in IN_STEPS if (value := value_of(cfg, key))}
    return overrides + [f"{key}={max(round(steps * batch / nearest), 1)}" for key, steps in in_steps.items()]


def differences(recipe: Config, cfg: Config) -> Iterator[str]:
    """A line for each thing that makes a run of `cfg` another than the recipe's."""
    then, now = peak_lr(recipe), peak_lr(cfg)
    if recipe.global_batch_size != cfg.global_batch_size:
        averages = f"; ema.decay={cfg.ema.decay} then averages over other images" if cfg.ema.decay else ""
        yield f"global_batch_size={cfg.global_batch_size}, recipe: {recipe.global_batch_size}{averages}"
    if then != now:
        yield f"peak learning rate {now:.4g} ({peak_lr_in_words(cfg)}), recipe: {then:.4g}"
    before = leaves(to_plain(recipe))
    for key, value in leaves(to_plain(cfg)).items():
        is_how = any(f"{key}.".startswith(f"{how}.") for how in HOW) and key != "checkpoint.init_from"
        if value != before.get(key) and not is_how and key not in TOLD:
            yield f"{key}={typed(value)}, recipe: {typed(before.get(key))}"


def command(script: str, name: str, overrides: list[str], gpus: int) -> str:
    """What starts the run: on one node as it is, on more by slurm.sh."""
    node = max(n for n in range(1, int(ASSUMED["cards a node"]) + 1) if gpus % n == 0)
    starter = "python" if gpus == 1 else f"torchrun --standalone --nproc-per-node {gpus}"
    if gpus > ASSUMED["cards a node"]:
        per_node = "" if node == ASSUMED["cards a node"] else f" --gpus-per-node={node}"
        starter = f"sbatch --nodes={gpus // node}{per_node} slurm.sh"
    return shlex.join([*starter.split(), f"{script}.py", "--config-name", name, *overrides])


def show(args: Any, gpus: int) -> None:
    """Print the table for one number of cards, then the command, and what is not as published."""
    typed = frozenset(launch.typed_values(args.overrides))
    cfg = config_of(args.config, args.overrides, "train_fsdp2")
    if changed := translation(cfg, gpus, typed):
        cfg = config_of(args.config, [*args.overrides, *changed], "train_fsdp2")
    shape, room = Shape.of(cfg), CARDS[args.card] * USABLE
    found = ways(cfg, gpus, room, shape, network=args.network, typed=typed)
    stages = stages_of(cfg, gpus)
    last = stages[-1][1]
    steps, images = last.num_train_steps, last.samples_at(last.num_train_steps)
    total = sum(
        3.0 * Shape.of(stage).flops * (sizes.last_step - sizes.first_step) * sizes.global_batch_size
        for stage, sizes in stages
    )
    batches = " and ".join(dict.fromkeys(str(sizes.global_batch_size) for _, sizes in stages))
    print(f"{gpus} x {args.card}: {steps:,} steps of {batches} images, {blocks_of(cfg)} blocks, {total:.3g} FLOP")
    fitting = [way for way in found.values() if isinstance(way, Estimate)]
    fastest = min(fitting, key=lambda way: way.step, default=None)
    for script, way in found.items():
        if isinstance(way, str):
            print(f"  {script:<12} {way}")
            continue
        speed, hours = images / steps / way.step, steps * way.step / 3600
        mark, times = "*" if way is fastest else " ", f"{speed:10,.0f} images/s {hours:9.1f} h {way.peak:6.1f} GiB"
        print(f"{mark} {script:<12} {way.step * 1e3:9.1f} ms {times}")
        seconds = {"compute": way.compute, "weights": way.weights, "host": way.host, "collectives": way.network}
        parts = ", ".join(f"{name} {value * 1e3:.0f}" for name, value in seconds.items())
        waits = way.host > way.compute + way.weights and not cfg.cuda_graphs
        hint = ": the host sets the pace, try cuda_graphs=true" if waits else ""
        print(f"      ms: {parts}{hint}")
        print(f"      GiB: {', '.join(f'{name} {size:.1f}' for name, size in way.memory.items())}")
        print(f"      {' '.join(settings_of(way, cfg)) or 'as the config has it'}")
    if fastest is None:
        is_too_large = any("does not fit" in str(way) for way in found.values())
        print(
            "  nothing fits: more cards, or the next smaller model" if is_too_large else "  none of these would start"
        )
        return
    micro, hours = fastest.settings["micro_batch_size"], steps * fastest.step / 3600
    accumulation = cfg.global_batch_size // (micro * gpus)
    cost = f", {hours * gpus * args.price:,.0f} at {args.price:g} each" if args.price else ""
    print(f"  {cfg.global_batch_size} = {micro} images x {gpus} ranks x {accumulation} microbatches")
    print(f"  {hours:,.1f} hours, {hours * gpus:,.0f} card-hours{cost}")
    given = with_images(args.overrides, "/data/imagenet")
    print(f"  {command(fastest.script, args.config, [*given, *changed, *settings_of(fastest, cfg)], gpus)}")
    others = list(differences(config_of(args.config, [], "train_fsdp2"), cfg))
    print(f"  no longer the recipe of config/{args.config}.yaml, whose head says how that differs from its source:")
    for line in others or ["nothing: all of it is as there"]:
        print(f"    {line}")


def settings_of(way: Estimate, cfg: Config) -> list[str]:
    """The overrides that make a run of `cfg` go this way."""
    standard = {"distributed.dp_outer": cfg.distributed.dp_outer or 1}
    return [
        f"{key}={typed(value)}" for key, value in way.settings.items() if value != standard.get(key, value_of(cfg, key))
    ]


def main() -> None:
    """Parse, then estimate."""
    parser = launch.Parser(__doc__)
    parser.add_argument("config", help="a primary config, as for --config-name")
    parser.add_argument("overrides", nargs="*", help="as for an entrypoint")
    parser.add_argument("--card", choices=CARDS, default="H200")
    parser.add_argument("--gpus", default="8", help="numbers of cards, as 8 or 1,8,64")
    parser.add_argument("--price", type=float, help="of a card for an hour, in any currency")
    parser.add_argument(
        "--network", type=float, default=ASSUMED["network GB/s a card"], help="GB/s of a card's network"
    )
    args = parser.parse_intermixed_args()
    numbers = args.gpus.split(",")
    if not all(number.isdecimal() and int(number) for number in numbers):
        parser.error(f"--gpus={args.gpus}: give numbers above 0, as 8 or 1,8,64")
    if args.price is not None and not 0 <= args.price < math.inf:
        parser.error(f"--price={args.price:g}: give what an hour of a card costs, 0 or more")
    if not 0 < args.network < math.inf:
        parser.error(f"--network={args.network:g}: give GB/s above 0")
    try:
        shape = Shape.of(config_of(args.config, args.overrides, "train_fsdp2"))
        print(f"{args.config}: {shape.params:,} parameters, {shape.flops / 1e9:,.1f} GFLOP an image's forward pass")
        for number in numbers:
            show(args, int(number))
    except ConfigError as error:
        launch.exit_with(str(error))


if __name__ == "__main__":
    main()
