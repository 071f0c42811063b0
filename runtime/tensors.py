"""This rank's part of a tensor, sharded or not."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own storage of a tensor, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def chunks_of(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Which parts of the whole this rank holds: where each begins, its sizes; one but for `keep_packed_rows`.

    Asks the tensor itself, by the protocol of torch.distributed.checkpoint: Megatron-FSDP shards unevenly, so that
    DTensor's own arithmetic does not hold for it.
    """
    return tensor.__create_chunk_list__()


def local_views(full: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
    """The parts of `full` that this rank holds of `like`, a plain tensor or a DTensor of the same global shape."""
    if not isinstance(like, DTensor):
        return [full]
    return [full[tuple(slice(o, o + n) for o, n in zip(c.offsets, c.sizes, strict=True))] for c in chunks_of(like)]


def local_slice(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same as one tensor, in the order in which `to_local(like)` has them."""
    views = local_views(full, like)
    return views[0] if len(views) == 1 else torch.cat([full[:0], *views])


def split_local(local: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
    """Views of `local`, which is shaped as `to_local(like)`: one for each of `local_views`."""
    return _pieces(local, chunks_of(like)) if isinstance(like, DTensor) else [local]


def _pieces(local: torch.Tensor, chunks: list[ChunkStorageMetadata]) -> list[torch.Tensor]:
    return [local] if len(chunks) == 1 else list(local.split([chunk.sizes[0] for chunk in chunks]))


def describe(
    holder: torch.Tensor,
    local: Callable[[], torch.Tensor],
    chunks: Callable[[], list[ChunkStorageMetadata]],
    size: torch.Size,
) -> None:
    """Have `holder` tell torch.distributed.checkpoint that it is `chunks` of a whole of `size`, to be found in `local`.

    By the protocol by which a DTensor says so itself; chunks follow each other along the first dimension of `local`.
    """

    def pieces() -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        return list(zip(chunks(), _pieces(local(), chunks()), strict=True))

    def items(fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(piece), size),
            )
            for chunk, piece in pieces()
            if piece.numel()
        ]

    def shard(index: MetadataIndex) -> torch.Tensor:
        (found,) = (piece for chunk, piece in pieces() if chunk.offsets == index.offset)
        return found

    vars(holder).update(__create_write_items__=items, __create_chunk_list__=chunks, __get_tensor_shard__=shard)


def keep_packed_rows(tensors: Mapping[str, Any], *, is_packed: bool = False) -> None:
    """Have the projections to queries, keys and values among `tensors`, nested by name, say which rows they hold.

    Their rows are [q | k | v], as timm packs them, and each rank of a mesh's axis "tp" holds its heads' rows of all
    three: DTensor, which only knows rows that follow each other, takes them for one piece of the whole.
    """
    for name, value in tensors.items():
        is_one = is_packed or name.endswith((".attn.qkv.weight", ".attn.qkv.bias"))
        if isinstance(value, Mapping):
            keep_packed_rows(value, is_packed=is_one)
        elif is_one and isinstance(value, DTensor) and "tp" in (value.device_mesh.mesh_dim_names or ()):
            describe(value, value.to_local, functools.partial(_packed_rows, value), value.size())


def _packed_rows(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """This rank's rows of [q | k | v]: its heads' of each, of which FSDP cuts one piece out."""
    mesh, rest = tensor.device_mesh, tensor.shape[1:]
    names = mesh.mesh_dim_names
    assert names is not None
    tp_size, tp_rank = mesh.size(names.index("tp")), mesh.get_local_rank("tp")
    share = tensor.shape[0] // tp_size
    each = share // 3  # rows of the queries, say, that a tp rank has
    begin, end = 0, share
    for axis, placement in enumerate(tensor.placements):
        if names[axis] != "tp" and not placement.is_replicate():
            length = -(-share // mesh.size(axis))  # as torch.chunk cuts
            begin = min(mesh.get_local_rank(axis) * length, share)
            end = min(begin + length, share)
    chunks = []
    for part in range(3):
        first, last = max(begin, part * each), min(end, (part + 1) * each)
        if first < last:
            row = (part * tp_size + tp_rank) * each + first - part * each
            chunks.append(ChunkStorageMetadata(torch.Size([row, *[0] * len(rest)]), torch.Size([last - first, *rest])))
    return chunks
