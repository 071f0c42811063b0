"""/dev/shm: what the loaders need of it, and the warning where it is less."""

import launch

import logging
import shutil
import types

import pytest
from conftest import loaders_of, session_of

import doctor
from runtime import shared_memory

# /dev/shm


@pytest.mark.parametrize(("free", "warns"), [(64 * 2**20, True), (16 * 2**30, False)])
def test_small_shared_memory_is_warned_of(monkeypatch, caplog, tmp_path, free, warns):
    """Docker's 64 MiB, 8 loader processes, 384 px."""
    sizes = ["model.img_size=384", "model.patch_size=16", "model.in_chans=3", "data=synthetic", "data.num_workers=8"]
    cfg = launch.load_config("L0_sanity", [*sizes, "global_batch_size=64", "num_train_steps=2", "micro_batch_size=16"])
    # 2 ranks, 2 loaders of 8 processes that each work 2 batches ahead, 16 images of 3 bytes a pixel.
    needed = 2 * 2 * 8 * 2 * 16 * 3 * 384 * 384
    assert shared_memory.needed(cfg, world_size=2, ranks_here=2) == needed
    packed = launch.load_config(
        "L0_sanity",
        [*sizes, "global_batch_size=64", "num_train_steps=2", "micro_batch_size=16", "data.packing.enabled=true"],
    )
    rows, _ = next(iter(loaders_of(packed, rank=0, world_size=2)[0]))
    assert shared_memory.needed(packed, world_size=2, ranks_here=2) == 2 * 2 * 8 * 2 * rows.patches.numel()
    loaders = loaders_of(cfg, rank=0, world_size=2, start_step=0)
    assert len(loaders) == shared_memory.LOADERS
    assert {loader.prefetch_factor for loader in loaders} == {shared_memory.AHEAD}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free, total=free, used=0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with caplog.at_level(logging.WARNING):
        shared_memory.warn_if_small(cfg, session_of(tmp_path, world_size=2))
        shared_memory.warn_if_small(cfg, session_of(tmp_path, rank=1, local_rank=1))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == warns
    if warns:
        for fragment in ("/dev/shm has 64 MiB free", f"{needed / 2**20:.0f} MiB", "--shm-size", "data.num_workers=8"):
            assert fragment in texts[0]
    rows = list(doctor.check_shared_memory(cfg, 2, 2))
    assert [row.state for row in rows] == ["warn" if warns else "ok"]
    assert ("--shm-size" in rows[0].remedy) == warns
