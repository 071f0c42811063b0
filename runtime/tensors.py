"""This rank's part of a tensor, sharded or not."""

import torch
from torch.distributed.tensor import DTensor


def local_slice(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of `full` that this rank holds of `like`, a plain tensor or a DTensor of the same global shape.

    Asks the tensor itself for its offsets, by the protocol of torch.distributed.checkpoint: Megatron-FSDP shards
    unevenly, so that DTensor's own arithmetic does not hold for it.
    """
    if not isinstance(like, DTensor):
        return full
    (chunk,) = like.__create_chunk_list__()
    return full[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own storage of a tensor, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
