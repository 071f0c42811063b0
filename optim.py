"""Parameter groups, the optimizer, the learning rate as a function of the step, and gradient clipping."""

from schema import Config

import contextlib
import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from distributed import to_local
from imagenet_dataset import num_train_steps
from vit import timm_name


def param_groups(model: nn.Module, no_weight_decay: set[str], weight_decay: float) -> list[dict]:
    """Two groups: matrices (weights of linear layers and convolutions), which decay, and everything else.

    `no_weight_decay` names the tensors of two or more dimensions that are no matrices: tokens and positions.
    """
    named = [(timm_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    decay = [p for name, p in named if p.ndim >= 2 and name not in no_weight_decay]
    rest = [p for name, p in named if p.ndim < 2 or name in no_weight_decay]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, cfg: Config, *, no_weight_decay: set[str]) -> torch.optim.Optimizer:
    """AdamW over the (sharded) parameters of `model`; call it after sharding."""
    groups = param_groups(model, no_weight_decay, cfg.optimizer.weight_decay)
    device_type = groups[0]["params"][0].device.type
    optimizer = torch.optim.AdamW(
        groups,
        lr=cfg.optimizer.lr,
        betas=cfg.optimizer.betas,
        eps=cfg.optimizer.eps,
        fused=device_type == "cuda",  # one kernel for all tensors; on a CPU torch's plain loop
    )
    _create_state(optimizer)
    return optimizer


@contextlib.contextmanager
def inert(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Steps taken inside leave the weights as they are, bit for bit, and do not count: rate 0, counters back."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    yield
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    for state in optimizer.state.values():
        state["step"].zero_()


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state exist, at zero, so that a checkpoint can be loaded into it."""
    with inert(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    optimizer.zero_grad()


def lr_at(step: int, cfg: Config) -> float:
    """Learning rate of update number `step`, 1 being the first: a function of the step and the config alone.

    Linear warmup lr x step / num_warmup_steps, then half a cosine that reaches min_lr at the schedule's last step
    (Loshchilov and Hutter, arXiv 1608.03983, without restarts); past its end, min_lr.
    """
    schedule, peak = cfg.lr_scheduler, cfg.optimizer.lr
    if step <= schedule.num_warmup_steps:
        return peak * step / schedule.num_warmup_steps
    if schedule.name == "constant":
        return peak
    length = schedule.num_training_steps or num_train_steps(cfg)
    progress = min((step - schedule.num_warmup_steps) / max(length - schedule.num_warmup_steps, 1), 1.0)
    return schedule.min_lr + (peak - schedule.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Global gradient norm before clipping, a float32 scalar, the same on every rank; scales the gradients in place.

    Sums squares in float64, so that the norm does not depend on how the tensors are cut over ranks. Every rank takes
    part in the one all-reduce, also a rank whose shards are empty: under Megatron-FSDP their gradients are None, with
    which torch.nn.utils.clip_grad_norm_ skips a collective and hangs (megatron-fsdp 0.6.1, two GPUs).
    A `max_norm` of None only measures.
    """
    parameters = list(parameters)
    present = [p for p in parameters if p.grad is not None]
    shards = [to_local(p.grad) for p in present if isinstance(p, DTensor)]
    whole = [p.grad for p in present if not isinstance(p, DTensor)]
    device = to_local(parameters[0]).device
    total = _sum_of_squares(shards, device)
    for group in _shard_groups(parameters):
        dist.all_reduce(total, group=group)
    total = total + _sum_of_squares(whole, device)
    grads = shards + whole
    norm = total.sqrt().float()
    if max_norm is not None and grads:
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _sum_of_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Float64 scalar; zero for an empty list."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    # The list form of torch.linalg.vector_norm, one kernel for all tensors. torch.nn.utils.get_total_norm calls the
    # same function, without a way to ask for float64.
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float64)).square().sum()


def _shard_groups(parameters: list[nn.Parameter]) -> list[dist.ProcessGroup]:
    """Process groups over which the parameters are sharded; the same list on every rank, whatever it holds itself."""
    meshes = {(p.device_mesh, p.placements) for p in parameters if isinstance(p, DTensor)}
    dims = {
        (mesh, dim) for mesh, placements in meshes for dim, place in enumerate(placements) if isinstance(place, Shard)
    }
    return [mesh.get_group(dim) for mesh, dim in sorted(dims, key=lambda pair: pair[1])]
