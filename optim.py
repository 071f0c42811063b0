"""Parameter groups, optimizers, the average of the weights, the learning rate, gradient clipping."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from runtime.parameter_names import timm_name
from runtime.tensors import local_slice, local_views, split_local, to_local
from schema import Config, EmaConfig, RunSizes, peak_lr


def param_groups(
    model: nn.Module,
    no_weight_decay: set[str],
    weight_decay: float,
    layer_decay: float | None = None,
    *,
    splits_blocks: bool = False,
) -> list[dict]:
    """The optimizer's groups: matrices (weights of linear layers and convolutions), which decay, and everything else.

    With `layer_decay` two groups a layer, each with the share of the learning rate that it gets, its `lr_scale`: the
    head's is 1, that of each layer below is `layer_decay` times that of the one above. With `splits_blocks` the blocks'
    matrices are groups of their own, marked `in_blocks`. Frozen tensors are in no group.

    Args:
        model: whose parameters they are, wrapped or not.
        no_weight_decay: names of the tensors of two or more dimensions that are no matrices: tokens and positions.
        weight_decay: of the matrices.
        layer_decay: None = one layer.
        splits_blocks: for Muon, which moves the blocks' matrices otherwise than all else.
    """
    named = [(timm_name(name), p) for name, p in model.named_parameters()]
    depth = 1 + max(int(name.split(".")[1]) for name, _ in named if name.startswith("blocks."))
    groups: dict[tuple[float, bool, bool], dict] = {}
    for name, parameter in named:
        scale = 1.0 if layer_decay is None else layer_decay ** (depth + 1 - _layer(name, depth))
        decays = parameter.ndim >= 2 and name not in no_weight_decay
        group = {"params": [], "weight_decay": weight_decay if decays else 0.0, "lr_scale": scale}
        group["in_blocks"] = splits_blocks and decays and name.startswith("blocks.")
        if parameter.requires_grad:
            groups.setdefault((scale, not decays, group["in_blocks"]), group)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def _layer(name: str, depth: int) -> int:
    """0 for what is before the blocks, 1 to depth for the blocks, depth + 1 for the head: timm's count.

    The last norm goes with the last block; what pools, and the norm after it, go with the head. Source: group_matcher
    of timm.models.vision_transformer, param_groups_layer_decay of timm.optim, after BEiT (arXiv 2106.08254).
    """
    first = name.split(".")[0]
    if first == "blocks":
        return int(name.split(".")[1]) + 1
    if first in ("cls_token", "dist_token", "reg_token", "pos_embed", "patch_embed", "norm_pre"):
        return 0
    return depth if first == "norm" else depth + 1


def build_optimizer(model: nn.Module, cfg: Config, *, no_weight_decay: set[str]) -> torch.optim.Optimizer:
    """The optimizer of the config, over the (sharded) parameters of `model` that train; call it after sharding."""
    options, lr = cfg.optimizer, peak_lr(cfg)
    splits_blocks = options.name == "muon"
    groups = param_groups(
        model, no_weight_decay, options.weight_decay, options.layer_decay, splits_blocks=splits_blocks
    )
    on_cuda = groups[0]["params"][0].device.type == "cuda"  # one kernel for many tensors; on a CPU torch's plain loop
    if options.name == "sgd":
        assert options.momentum is not None  # schema.py sees to it, here and for muon
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=options.momentum, foreach=on_cuda)
    else:
        adaptive = {"lr": lr, "betas": options.betas, "eps": options.eps}
        if options.name == "lamb":
            optimizer = Lamb(groups, **adaptive)
        elif options.name == "muon":
            assert options.momentum is not None
            optimizer = Muon(groups, momentum=options.momentum, fused=on_cuda, **adaptive)
        elif options.state_dtype == "bf16":
            optimizer = Bf16AdamW(groups, fused=on_cuda, **adaptive)
        else:
            optimizer = AdamW(groups, fused=on_cuda, **adaptive)
    _create_state(optimizer)
    return optimizer


class AdamW(torch.optim.AdamW):
    """torch's, on this rank's part of each tensor: DTensor's bookkeeping takes longer than the update.

    ViT-L/16 on one H200, torch 2.11: 13 ms of host time for each of two groups (benchmarks/cuda_graphs_h200x1.log).
    """

    def _init_group(self, group: dict, *lists: list[torch.Tensor]) -> bool:
        """Fill `lists` with the group's weights, gradients and states, for torch's `step`."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [to_local(tensor) for tensor in tensors]
        return has_complex


class Bf16AdamW(AdamW):
    """AdamW whose two moments are BF16 between the steps: 4 bytes a parameter for 8.

    A step takes a few million numbers at a time to FP32, has torch's function move them, and rounds the moments to the
    nearest BF16: nothing is drawn, so that sharding and resumes change no digit. schema.py refuses betas that such
    numbers cannot follow. TransformerEngine's FusedAdam has BF16 moments, too, but on GPUs alone, and counts the steps
    of a group, where our checkpoints have a tensor's.
    """

    PIECE = 2**22  # numbers in FP32 at a time, 16 MiB a moment

    def _init_group(self, group: dict, *lists: list[torch.Tensor]) -> bool:
        """Make the state where there is none, in torch's form, then as AdamW."""
        for parameter in group["params"]:
            if parameter.grad is not None and not self.state[parameter]:
                moments = {key: torch.zeros_like(parameter, dtype=torch.bfloat16) for key in ("exp_avg", "exp_avg_sq")}
                step = torch.tensor(0.0, device=parameter.device if group["fused"] else "cpu")
                self.state[parameter] = {"step": step, **moments}
        return super()._init_group(group, *lists)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update."""
        for group in self.param_groups:
            tensors, unused, steps = ([], [], [], []), [], []  # weights, gradients, moments; amsgrad's; counters
            self._init_group(group, *tensors, unused, steps)
            for pieces in _pieces(tensors, steps, self.PIECE):
                self._move(group, *pieces)
            if steps:
                torch._foreach_add_(steps, 1)

    def _move(self, group: dict, weights: list, grads: list, averages: list, squares: list, steps: list) -> None:
        """Update flat pieces of tensors."""
        in_fp32 = [[moment.float() for moment in moments] for moments in (averages, squares)]
        options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused", "foreach")}
        options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        counted = [step.clone() for step in steps]  # it counts; a tensor of several pieces takes one step all the same
        adamw(weights, grads, in_fp32[0], in_fp32[1], [], counted, **options)
        for moments, exact in zip((averages, squares), in_fp32, strict=True):
            torch._foreach_copy_(moments, exact)


def _pieces(tensors: Sequence[list[torch.Tensor]], steps: list[torch.Tensor], size: int) -> Iterator[list[list]]:
    """Lists of equally long tensors, cut flat into batches of at most about `size` numbers each, and their counters."""
    batch, room = [], size
    for *parts, step in zip(*tensors, steps, strict=True):
        for cut in zip(*(part.view(-1).split(size) for part in parts), strict=True):
            if batch and len(cut[0]) > room:
                yield [list(column) for column in zip(*batch, strict=True)]
                batch, room = [], size
            batch.append((*cut, step))
            room -= len(cut[0])
    if batch:
        yield [list(column) for column in zip(*batch, strict=True)]


class Lamb(torch.optim.Optimizer):
    """LAMB (arXiv 1904.00962), to the numbers of timm.optim.Lamb without its gradient clipping, which is the loop's.

    A tensor's update is scaled to the norm of the whole tensor, over all ranks that hold a part of it. timm's asks each
    DTensor for that, one collective a norm: a rank with an empty shard, whose gradient Megatron-FSDP leaves at None,
    would skip it and hang the others. Here all norms travel in one all-reduce, in which every rank takes part. Tensors
    without weight decay are not scaled, as in timm's and in NVIDIA's FusedLAMB.
    """

    def __init__(self, groups: list[dict], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update."""
        scaled: list[tuple[nn.Parameter, torch.Tensor | None, float]] = []  # parameter, update, learning rate
        for group in self.param_groups:
            for parameter in group["params"]:
                if not (state := self.state[parameter]):
                    state |= {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                    state["step"] = torch.tensor(0.0)  # not zeros(()): a fake one (tools/dry_run.py) has its value
                state["step"] += 1  # on the host; an empty shard counts, too
            present = [p for p in group["params"] if p.grad is not None]
            updates = dict(zip(present, self._updates(present, group), strict=True))
            if group["weight_decay"]:
                scaled += [(p, updates.get(p), group["lr"]) for p in group["params"]]
            elif present:
                torch._foreach_add_([to_local(p) for p in present], list(updates.values()), alpha=-group["lr"])
        ratios = self._trust_ratios([p for p, *_ in scaled], [update for _, update, _ in scaled])
        for (parameter, update, lr), ratio in zip(scaled, ratios, strict=True):
            if update is not None:
                to_local(parameter).sub_(update.mul_(ratio), alpha=lr)

    def _updates(self, parameters: list[nn.Parameter], group: dict) -> Sequence[torch.Tensor]:
        """This rank's part of what AdamW would subtract, weight decay included, before the learning rate."""
        if not parameters:
            return []
        weights, grads = [to_local(p) for p in parameters], [_grad(p) for p in parameters]
        averages, squares = ([to_local(self.state[p][k]) for p in parameters] for k in ("exp_avg", "exp_avg_sq"))
        (beta1, beta2), step = group["betas"], self.state[parameters[0]]["step"].item()
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, math.sqrt(1 - beta2**step))
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(averages, 1 - beta1**step)
        torch._foreach_div_(updates, roots)
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        return updates

    def _trust_ratios(
        self, parameters: list[nn.Parameter], updates: list[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """Norm of each weight over the norm of its update, 1 where one of them is 0; float32 scalars."""
        if not parameters:
            return []
        weights = [to_local(p) for p in parameters]
        moves = [w.new_zeros(0) if update is None else update for w, update in zip(weights, updates, strict=True)]
        squares = torch.stack(torch._foreach_norm(weights + moves, 2, torch.float64)).square().view(2, -1)
        total = torch.zeros_like(squares)
        for members, groups in _by_layout(parameters):
            here = {id(p) for p in members}
            part = squares * torch.tensor([id(p) in here for p in parameters], device=squares.device)
            for group in groups:
                dist.all_reduce(part, group=group)
            total += part
        norms = total.sqrt()
        return (norms[0] / norms[1]).where((norms > 0).all(dim=0), 1.0).float().unbind()


class Muon(AdamW):
    """Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) for the blocks' matrices, AdamW for all else.

    A matrix moves by its Nesterov momentum made orthogonal, at 0.2 sqrt(its longer side) times the learning rate, with
    which an update is about as large as AdamW's (Liu et al., arXiv 2502.16982). To the numbers of torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw", which takes matrix by matrix and cannot take a part of one: here those of one shape
    go together, gathered whole in one all-reduce, in which every rank takes part, also one whose shards are empty.

    Args:
        groups: of `param_groups`, with splits_blocks.
        momentum: of the blocks' matrices; `options` are AdamW's, the learning rate and weight decay those of both.
    """

    def __init__(self, groups: list[dict], *, momentum: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update."""
        with self._without_blocks():
            super().step()
        for group in self.param_groups:
            shapes = {parameter.shape for parameter in group["params"]} if group["in_blocks"] else ()
            for shape in sorted(shapes):
                for members, groups in _by_layout([p for p in group["params"] if p.shape == shape]):
                    self._move(members, groups, group)

    @contextlib.contextmanager
    def _without_blocks(self) -> Iterator[None]:
        """Inside, `param_groups` lacks the blocks' matrices, so that AdamW's step, which takes all groups, skips them.

        An AdamW object for the other groups would need no such thing, but run torch's step hooks twice an update.
        """
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["in_blocks"]]
        try:
            yield
        finally:
            self.param_groups = groups

    def _move(self, parameters: list[nn.Parameter], shard_groups: list[dist.ProcessGroup], group: dict) -> None:
        """Update matrices of one shape, cut over `shard_groups`."""
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["momentum_buffer"] = torch.zeros_like(parameter)
        present = [p for p in parameters if p.grad is not None]
        weights, grads = [to_local(p) for p in present], [_grad(p) for p in present]
        averages = [to_local(self.state[p]["momentum_buffer"]) for p in present]
        rows, columns = parameters[0].shape
        device = to_local(parameters[0]).device
        whole = torch.zeros(len(parameters), rows, columns, dtype=torch.bfloat16, device=device)
        if present:
            torch._foreach_lerp_(averages, grads, 1 - self.momentum)
            moves = zip(present, torch._foreach_lerp(grads, averages, self.momentum), strict=True)
            places = [
                v for m, p in zip(whole, parameters, strict=True) if p.grad is not None for v in local_views(m, p)
            ]
            torch._foreach_copy_(places, [piece for p, move in moves for piece in split_local(move, p)])
        for shard_group in shard_groups:
            dist.all_reduce(whole, group=shard_group)  # exact: a place is zero on all ranks but the one that holds it
        whole = orthogonal_together(whole).to(torch.float32, memory_format=torch.contiguous_format)
        if present:
            updates = [local_slice(m, p) for m, p in zip(whole, parameters, strict=True) if p.grad is not None]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"] * 0.2 * math.sqrt(max(rows, columns)))


def orthogonal_together(matrices: torch.Tensor) -> torch.Tensor:
    """`orthogonal` of matrices that all ranks have, each rank doing its share of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return orthogonal(matrices)
    ranks, number = dist.get_world_size(), len(matrices)
    share = -(-number // ranks)
    mine = matrices[dist.get_rank() * share :][:share]
    done = matrices.new_zeros(share, *matrices.shape[1:])
    done[: len(mine)] = orthogonal(mine)
    everyones = matrices.new_empty(ranks * share, *matrices.shape[1:])
    dist.all_gather_into_tensor(everyones, done)
    return everyones[:number]


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (K, A, B), bfloat16, with their singular values taken to about 1: between 0.7 and 1.2.

    Five steps of a Newton-Schulz iteration with Jordan's coefficients, which are chosen to grow small ones fast.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


@contextlib.contextmanager
def no_op_steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Steps taken inside, of zero gradients, leave the weights and the state as they are, bit for bit."""
    kept = [{key: group[key] for key in ("lr", "weight_decay")} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}  # SGD's momentum and LAMB's update take up the decay
    yield
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group |= values
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state exist, at zero, so that a checkpoint can be loaded into it."""
    with no_op_steps(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    optimizer.zero_grad()


class Ema:
    """average = decay x average + (1 - decay) x weight, once an update."""

    def __init__(self, weights: Mapping[str, torch.Tensor], cfg: EmaConfig) -> None:
        """Starts at the weights as they are; both stay the same objects from here on.

        Args:
            weights: name -> parameter, sharded or not.
            cfg: whose decay is not None.
        """
        assert cfg.decay is not None
        self.cfg, self.final_decay = cfg, cfg.decay
        self.weights = weights
        self.averages = {name: weight.detach().clone() for name, weight in weights.items()}

    def decay(self, step: int) -> float:
        """Decay of update number `step`, 1 being the first, whose average is the weights themselves.

        Source: timm.utils.ModelEmaV3, whose names the options have; with use_warmup
        1 - (1 + (step - 1) / warmup_gamma) ^ -warmup_power until that reaches `decay`.
        """
        if step <= 1:
            return 0.0
        if not self.cfg.use_warmup:
            return self.final_decay
        return min(1 - (1 + (step - 1) / self.cfg.warmup_gamma) ** -self.cfg.warmup_power, self.final_decay)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take up the weights after update number `step`."""
        torch._foreach_lerp_(*self._local(), 1 - self.decay(step))

    @torch.no_grad()
    def restart(self) -> None:
        """Start again at the weights as they are now."""
        torch._foreach_copy_(*self._local())

    @contextlib.contextmanager
    def in_model(self, exchanged: Callable[[], None]) -> Iterator[None]:
        """Inside, the model's weights are the averages; afterwards its own, bit for bit.

        Args:
            exchanged: called after each exchange, for strategies that compute with copies of the weights.
        """
        self._exchange()
        exchanged()
        try:
            yield
        finally:
            self._exchange()
            exchanged()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Tensor by tensor, so that one tensor's room is enough."""
        for average, weight in zip(*self._local(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _local(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's parts of the averages and of the weights."""
        return [to_local(t) for t in self.averages.values()], [to_local(t) for t in self.weights.values()]


def lr_at(step: int, cfg: Config, sizes: RunSizes) -> float:
    """Learning rate of update number `step`, 1 being the first: a function of the step, the config and the run's sizes.

    Linear warmup from warmup_start_lr at step 0 to the peak, lr below, at step num_warmup_steps; then, until the
    schedule's last step:

    - cosine: half a cosine down to min_lr (arXiv 1608.03983, without restarts)
    - linear: a straight line down to min_lr
    - rsqrt: lr / sqrt(1 + steps since the warmup / rsqrt_timescale) (arXiv 2106.04560; big_vision's utils.py)
    - constant: lr

    The last two fall in a straight line over the last num_cooldown_steps steps, what is above min_lr to 0. Past the
    schedule's end all stay where they are; without a cooldown rsqrt and constant have no end. An entry of
    data.size_schedule may begin a schedule of its own, whose steps count from there.
    """
    schedule, peak = cfg.lr_scheduler, peak_lr(cfg)
    step -= sizes.schedule_start
    length, warmup = sizes.schedule_steps, sizes.num_warmup_steps
    since_warmup = step - warmup
    if since_warmup <= 0:
        start = schedule.warmup_start_lr
        lr = start + (peak - start) * step / warmup if since_warmup else peak
    elif schedule.name == "rsqrt":
        assert schedule.rsqrt_timescale is not None  # schema.py sees to it
        lr = peak / math.sqrt(1 + since_warmup / schedule.rsqrt_timescale)
    elif schedule.name == "constant":
        lr = peak
    else:
        progress = min(since_warmup / max(length - warmup, 1), 1.0)
        left = 1 - progress if schedule.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return schedule.min_lr + (peak - schedule.min_lr) * left
    if schedule.num_cooldown_steps:
        left = min(max(length - step, 0) / schedule.num_cooldown_steps, 1.0)
        lr = schedule.min_lr + (lr - schedule.min_lr) * left
    return lr


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Global gradient norm before clipping, a float32 scalar, the same on every rank; scales the gradients in place.

    Sums squares in float64, so that the norm does not depend on how the tensors are sharded. Every rank takes part in
    the one all-reduce, also a rank whose shards are empty: under Megatron-FSDP their gradients are None, with which
    torch.nn.utils.clip_grad_norm_ skips a collective and hangs (megatron-fsdp 0.6.1, two GPUs). A `max_norm` of None
    only measures.
    """
    parameters = list(parameters)
    device = to_local(parameters[0]).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for members, groups in _by_layout(parameters):
        part = _sum_of_squares([_grad(p) for p in members if p.grad is not None], device)
        for group in groups:
            dist.all_reduce(part, group=group)
        total += part
    grads = [_grad(p) for p in parameters if p.grad is not None]
    norm = total.sqrt().float()
    if max_norm is not None and grads:
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of the gradient, which must be there."""
    assert parameter.grad is not None
    return to_local(parameter.grad)


def _sum_of_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Float64 scalar; zero for an empty list."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    # The list form of torch.linalg.vector_norm, one kernel for all tensors. torch.nn.utils.get_total_norm calls the
    # same function, without a way to ask for float64.
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float64)).square().sum()


def _by_layout(parameters: list[nn.Parameter]) -> list[tuple[list[nn.Parameter], list[dist.ProcessGroup]]]:
    """The parameters that are cut alike, and over which process groups: the same list on every rank.

    One entry under FSDP; with tensor parallelism some tensors are cut over its axis, too, and some are not.
    """
    layouts: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        layouts.setdefault(layout, []).append(parameter)
    return [
        (members, [layout[0].get_group(axis) for axis, place in enumerate(layout[1]) if not place.is_replicate()])
        if layout
        else (members, [])
        for layout, members in layouts.items()
    ]
