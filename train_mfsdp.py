"""Train a Vision Transformer with Megatron-FSDP: NVIDIA's sharding, BF16 weights for compute beside FP32 main weights.

    python train_mfsdp.py --config-name vit_base_patch16_224 data.path=/data/imagenet        # one GPU
    torchrun --standalone --nproc-per-node 8 train_mfsdp.py --config-name vit_base_patch16_224 data.path=/data/imagenet

Needs CUDA. mfsdp.zero_dp_strategy chooses what is sharded; distributed.dp_outer=2 keeps two sharded copies (HSDP).
"""

from launch import launch

import contextlib
from typing import Any, cast

import torch
from torch.distributed.device_mesh import init_device_mesh

import checkpoint
from distillation import build_teacher
from modeling import build_model, prepare_blocks
from optim import build_optimizer, no_op_steps
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
    # Imported here: it warns about missing libraries even where this script only says that it needs CUDA.
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
    from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    # Mesh: ranks along dp_shard share one copy of the weights, ranks along dp_outer hold replicas of it. The
    # library wants a tp axis, of size 1 too.
    device = session.device
    outer = cfg.distributed.dp_outer or 1
    shape = (outer, session.world_size // outer, 1)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp_outer", "dp_shard", "tp"))
    hybrid_group = mesh["dp_outer", "dp_shard"]._flatten("dp").get_group() if outer > 1 else None

    # Model: built without storage, in BF16; the library shards it unit by unit as it gives it storage, and keeps
    # FP32 main weights. It copies those from the BF16 ones, so that `init_weights` gives them their FP32 values.
    # Buffers get theirs there, too: blocks compute with them in FP32. Recompute and compile come first, so that the
    # library's hooks stay outside.
    sharded_weights = cfg.mfsdp.zero_dp_strategy != "no_shard"
    with torch.device("meta" if sharded_weights else device):
        module = build_model(cfg.model, cfg.fp8_config).to(torch.bfloat16)
    prepare_blocks(module, activation_checkpointing=cfg.activation_checkpointing, compile=cfg.compile)
    # By this attribute of Megatron-LM's a weight gets a buffer of its own. Behind positions, whose one row is as long
    # as the table, a border between ranks could fall inside a row of the patch embedding, where none can be (0.6.1).
    cast(Any, module).patch_embed.proj.weight.shared_embedding = True
    model = fully_shard_model(
        module,
        device_mesh=mesh,
        dp_shard_dim="dp_shard",
        dp_outer_dim="dp_outer" if outer > 1 else None,
        hybrid_fsdp_group=hybrid_group,
        tp_dim="tp",
        fsdp_unit_modules=list({type(unit) for unit in module.shard_units()}),
        zero_dp_strategy=cfg.mfsdp.zero_dp_strategy,
        outer_dp_sharding_strategy=cfg.mfsdp.outer_dp_sharding_strategy,
        device=device,
        init_model_with_meta_device=sharded_weights,
        cuda_graph_mode=cfg.cuda_graphs,  # zero_grad leaves the gradients where a replay writes them
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32),
    )
    preprocess_state_dict_for_uneven_dtensor(dict(module.named_parameters()))  # shards learn where they lie
    module.init_weights(cfg.seed, device)
    module.reset_scaling()  # the library drew weights of its own, and FP8 ones were measured
    model.install_optimized_model_weights()  # main weights -> BF16 (or FP8) weights

    # Optimizer: after sharding. fully_shard_optimizer takes a step of its own, which must neither decay nor count.
    optimizer = build_optimizer(model, cfg, no_weight_decay=module.no_weight_decay())
    with no_op_steps(optimizer):
        fully_shard_optimizer(optimizer)

    # Gradients: reduced into FP32 shards in every backward pass; waited for, and handed to the optimizer, in the
    # last microbatch's only.
    def grad_sync(is_last: bool) -> contextlib.AbstractContextManager:
        model.set_model_auto_sync(is_last)
        return contextlib.nullcontext()

    # What `train` restores before it goes on from there.
    install = model.install_optimized_model_weights
    # What lies outside the units stays gathered from one forward pass to the next, until this marks it stale.
    gather_again = model.synchronize_param_gather
    state = checkpoint.TrainState(
        model, optimizer, module.scaling, cfg.ema, after_load=install, after_exchange=gather_again
    )
    # Moments and averages learn where they lie, too.
    preprocess_state_dict_for_uneven_dtensor({**state.tensors(), "model": {}})
    teacher = build_teacher(cfg, sizes, device, mesh["dp_shard"])
    flops = module.flops_per_image(cfg.patches_per_image())

    # What the library puts on parameters, hooks and methods, refers to the whole model, and Python's garbage collector
    # does not see it: the model of an image size would stay in memory after its part of the run.
    def release() -> None:
        for hook in model.grad_acc_hooks.values():
            hook.remove()
        for parameter in model.raw_param.values():
            vars(parameter).clear()

    return Run(model, optimizer, grad_sync, mesh, state, flops, teacher, release)


if __name__ == "__main__":
    launch(main)
