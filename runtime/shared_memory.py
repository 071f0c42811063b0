"""Room in /dev/shm, where loader processes hand over their batches; Docker gives a container 64 MiB by default."""

import logging
import math
import os
import shutil
from pathlib import Path

from runtime.session import Session
from schema import Config, pair, split_batch

logger = logging.getLogger(__name__)
FOLDER = Path("/dev/shm")
AHEAD = 2  # batches that a loader process makes ahead: torch.utils.data.DataLoader's own prefetch_factor
LOADERS = 2  # training batches lie there while validation ones are made


def needed(cfg: Config, *, world_size: int, ranks_here: int) -> int:
    """Bytes that the loader processes of one node, which has `ranks_here` of the ranks, fill at most."""
    micro = split_batch(cfg, world_size).micro_batch_size
    pixels = math.prod(pair(cfg.data.image_size))
    if cfg.data.packing.enabled:
        pixels = cfg.tokens_per_row() // cfg.data.packing.images_per_row * math.prod(pair(cfg.model.patch_size))
    batch = micro * cfg.model.in_chans * pixels  # uint8
    return ranks_here * LOADERS * cfg.data.num_workers * AHEAD * batch


def warn_if_small(cfg: Config, session: Session) -> None:
    """A line from each node with too little: its loader processes would die of a bus error in the middle of the run."""
    if session.local_rank != 0 or not FOLDER.is_dir():
        return
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    room, free = needed(cfg, world_size=session.world_size, ranks_here=ranks_here), shutil.disk_usage(FOLDER).free
    if free < room:
        logger.warning(
            "%s has %.0f MiB free, the loader processes here can fill %.0f MiB and would die of a bus error: "
            "give the container more (docker run --shm-size=16G, or --ipc=host), or lower data.num_workers=%d",
            *(FOLDER, free / 2**20, room / 2**20, cfg.data.num_workers),
        )
