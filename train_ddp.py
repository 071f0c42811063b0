"""Train a Vision Transformer with DistributedDataParallel: every GPU holds the whole model, gradients are averaged.

    python train_ddp.py                                                            # one process, the bundled data
    torchrun --standalone --nproc-per-node 8 train_ddp.py --config-name vit_base_patch16_224 data.path=/data/imagenet

The simplest strategy, for models whose weights, gradients and optimizer (16 bytes a parameter) fit on one GPU.
"""

from launch import launch

import contextlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from distillation import build_teacher
from imagenet_dataset import noise
from modeling import build_model, prepare_blocks
from optim import build_optimizer
from runtime.process_group import dist_session
from runtime.session import Session
from schema import Config, RunSizes
from trainer import Run, train


def main(cfg: Config) -> dict[str, float]:
    """One training run; returns the last value of every metric."""
    with dist_session(cfg) as session:
        return train(build, cfg, session)


def build(cfg: Config, session: Session, sizes: RunSizes) -> Run:
    """All that the strategy decides; with data.size_schedule made anew for each image size."""
    # Mesh: one axis, over which batches differ and weights do not.
    device = session.device
    mesh = init_device_mesh(device.type, (session.world_size,), mesh_dim_names=("dp",))

    # Model: FP32 weights on the device, BF16 by autocast in the forward pass. Recompute and compile come before
    # the wrapper, so that its hooks stay outside.
    with device:
        module = build_model(cfg.model, cfg.fp8_config)
    module.init_weights(cfg.seed)
    prepare_blocks(module, activation_checkpointing=cfg.activation_checkpointing, compile=cfg.compile)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=cfg.precision == "bf16")
    module.forward = autocast(module.forward)
    model = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=mesh.get_group("dp"),
        bucket_cap_mb=cfg.ddp.bucket_cap_mb,
        gradient_as_bucket_view=True,
    )
    model.broadcast_buffers = False  # they are constants; not the argument, which torch 2.14 has another name for

    # Optimizer: the whole of it on every rank.
    optimizer = build_optimizer(model, cfg, no_weight_decay=module.no_weight_decay())

    # Gradients: averaged over ranks in the last microbatch's backward pass, summed locally before it.
    def grad_sync(is_last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if is_last else model.no_sync()

    # DDP puts its buckets in the order of the first backward pass, which changes the order of sums over three and
    # more ranks. Let it, on noise, before the first real step: a resumed run then sums as the straight one does.
    settle_buckets(model, cfg, sizes, device)

    # What `train` restores before it goes on from there.
    state = checkpoint.TrainState(model, optimizer, module.scaling, cfg.ema)
    teacher = build_teacher(cfg, sizes, device, mesh)
    return Run(model, optimizer, grad_sync, mesh, state, module.flops_per_image(cfg.patches_per_image()), teacher)


def settle_buckets(model: DistributedDataParallel, cfg: Config, sizes: RunSizes, device: torch.device) -> None:
    """One forward and backward pass; leaves no gradient and no FP8 scale behind."""
    model(noise(cfg, sizes, device)).sum().backward()
    model.zero_grad()
    model.module.reset_scaling()


if __name__ == "__main__":
    launch(main)
