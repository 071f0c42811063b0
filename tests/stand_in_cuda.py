"""A stand-in for what megatron_fsdp asks of CUDA and NCCL: on a CPU streams do nothing, and collectives are gloo's.

The library itself is the real one (0.6.1): its shards, hooks, buffers and main weights.
"""

import contextlib
import functools
from unittest import mock

import torch
import torch.distributed as dist


class Done:
    """A stream, an event or a collective: whatever it is asked for has happened."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return Done

    def wait(self, *_):
        pass


@contextlib.contextmanager
def coalescing(*_, **__):
    yield Done()


def at_once(collective):
    @functools.wraps(collective)
    def call(*args, async_op=False, **kwargs):
        collective(*args, **kwargs)
        return Done() if async_op else None

    return call


def scaled(gradient, factor, _):
    """The library's way without NCCL's product before the sum; with replicas of one rank each not NCCL's result."""
    if factor is not None:
        gradient.mul_(factor)
    return dist.ReduceOp.SUM


@contextlib.contextmanager
def installed():
    """Inside, Megatron-FSDP shards models in host memory."""
    from megatron_fsdp import param_and_grad_buffer as library

    cuda = {"Stream": Done, "Event": Done, "current_stream": Done, "stream": lambda _: contextlib.nullcontext()}
    cuda |= {"current_device": lambda: 0, "synchronize": lambda: None}
    collectives = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
        mock.patch.multiple(library, _coalescing_manager=coalescing, gradient_reduce_preprocessing=scaled),
        mock.patch.multiple(dist, **{name: at_once(getattr(dist, name)) for name in collectives}),
    ):
        yield
