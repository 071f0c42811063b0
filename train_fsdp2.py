"""Train a Vision Transformer with FSDP2: weights, gradients and optimizer are sharded, a block is gathered when used.

    python train_fsdp2.py                                                          # one process, the bundled data
    torchrun --standalone --nproc-per-node 8 train_fsdp2.py --config-name vit_base_patch16_224 data.path=/data/imagenet

For models that do not fit on one GPU. distributed.dp_outer=2 keeps two sharded copies (HSDP): less traffic between
nodes. distributed.tp=2 cuts each block's matrices over two ranks, too.
"""

from launch import launch

import contextlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import checkpoint
from distillation import build_teacher
from modeling import build_model, prepare_blocks
from optim import build_optimizer
from runtime.process_group import dist_session
from runtime.session import Session
from runtime.tensors import keep_packed_rows
from schema import Config, RunSizes
from trainer import Run, train


def main(cfg: Config) -> dict[str, float]:
    """One training run; returns the last value of every metric."""
    with dist_session(cfg) as session:
        return train(build, cfg, session)


def build(cfg: Config, session: Session, sizes: RunSizes) -> Run:
    """All that the strategy decides; with data.size_schedule made anew for each image size."""
    # Mesh: ranks along dp_shard share one copy of the weights, ranks along dp_outer hold replicas of it. Those
    # along tp have the same images, and a part of each block's matrices.
    device = session.device
    outer, tp = cfg.distributed.dp_outer or 1, cfg.distributed.tp or 1
    shape = (outer, session.world_size // outer // tp, tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp_outer", "dp_shard", "tp"))

    # Model: built without storage, sharded block by block and then the rest, and only then given storage and
    # weights: no rank ever holds the whole. Recompute and compile come first, so that FSDP's hooks stay outside.
    with torch.device("meta"):
        model = build_model(cfg.model, cfg.fp8_config, mesh["tp"])
    prepare_blocks(model, activation_checkpointing=cfg.activation_checkpointing, compile=cfg.compile)
    options = {
        "mesh": mesh["dp_outer", "dp_shard"] if outer > 1 else mesh["dp_shard"],
        "reshard_after_forward": cfg.fsdp2.reshard_after_forward,
        # Compute in BF16, average in FP32. What a block gets stays as it is: the model sees to the images, and
        # rotary positions are FP32.
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        if cfg.precision == "bf16"
        else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if cfg.fsdp2.cpu_offload else OffloadPolicy(),
    }
    units = [fully_shard(unit, **options) for unit in model.shard_units()]
    root = fully_shard(model, **options)  # `model` itself, now with FSDP's methods, as the units are
    for unit in units[len(units) - cfg.fsdp2.gathered_blocks :]:  # whose weights backward asks for first
        unit.set_reshard_after_forward(False)
    model.to_empty(device="cpu" if cfg.fsdp2.cpu_offload else device)
    keep_packed_rows(dict(model.named_parameters()))  # under tp
    model.init_weights(cfg.seed, device)

    # Optimizer: after sharding, so that it holds this rank's shards only.
    optimizer = build_optimizer(model, cfg, no_weight_decay=model.no_weight_decay())

    # Gradients: reduced and scattered in the last microbatch's backward pass, summed unsharded before it.
    def grad_sync(is_last: bool) -> contextlib.AbstractContextManager:
        root.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    # Weights that stayed gathered (reshard_after_forward=false, after an evaluation) are stale once others are
    # written into the shards.
    def reshard() -> None:
        for unit in (*units, root):
            unit.reshard()

    # What `train` restores before it goes on from there.
    state = checkpoint.TrainState(model, optimizer, model.scaling, cfg.ema, after_exchange=reshard)
    keep_packed_rows(state.tensors())  # moments and averages, too
    teacher = build_teacher(cfg, sizes, device, mesh["dp_shard"])
    return Run(model, optimizer, grad_sync, mesh, state, model.flops_per_image(cfg.patches_per_image()), teacher)


if __name__ == "__main__":
    launch(main)
