"""What all ranks agree on: a failure of one, and values that only one knows."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from schema import RunError

T = TypeVar("T")


def raise_on_all_ranks(
    work: Callable[[], T], *, group: dist.ProcessGroup | None = None, error: type[Exception] = RunError
) -> T:
    """work() on every rank of the group, and its result; where it fails on one, all raise, with that one's reason.

    Raises:
        error: a rank's work raised OSError or `error`; the text is the lowest such rank's.
    """
    result: T | None = None
    reason: str | None = None
    try:
        result = work()
    except (OSError, error) as caught:
        reason = str(caught)
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    if first := next(filter(None, reasons), None):
        raise error(first)
    return cast(T, result)  # where it is None, that is what work() gave


def from_rank_0(value: T) -> T:
    """Rank 0's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]
