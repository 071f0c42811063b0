"""Each primary config, shrunk, takes two steps, evaluates, saves and exports: one set of processes for all."""

import launch

import math

import pytest
import timm
import torch
from conftest import ROOT, TINY, read_metrics, run_tasks, started_once

import schema

SECOND = {  # configs that begin with what another one left
    "cifar10_vit_48": "cifar10_vit",
    "deit3_b16_224": "deit3_b16",
    "deit3_l16_224": "deit3_l16",
    "deit3_h14_224": "deit3_h14",
    "vit_b16_finetune_384": "vit_b16_pretrain",
}
NAMES = sorted(
    (file.stem for file in (ROOT / "config").glob("*.yaml") if file.stem != "defaults"), key=lambda n: (n in SECOND, n)
)
SHRUNK = [
    *(override for override in TINY if override.startswith("model.")),
    "model.transformer_engine=false",  # which needs CUDA
    "global_batch_size=24",
    "num_train_steps=2",
    "num_epochs=null",
    "data.num_workers=0",
    "data.resident=false",  # for pictures of one size
    "compile=false",
    "ddp.cuda_graphs=false",  # which needs a GPU
    "logger.frequency=1",
]


@pytest.fixture(scope="module")
def runs(pictures, tmp_path_factory):
    """A function without a use for its argument -> (outcomes, folder)."""

    @started_once
    def start(_):
        folder = tmp_path_factory.mktemp("recipes")
        tasks = []
        for i, name in enumerate(NAMES):
            overrides = [*SHRUNK, f"data.path={pictures}", f"output_dir={folder / name}"]
            if name in SECOND:
                overrides.append(f"checkpoint.init_from={folder / SECOND[name]}/checkpoints")
                overrides.append("model.img_size=24")
            script = ("train_ddp", "train_fsdp2")[i % 2]
            tasks.append({"name": name, "script": script, "overrides": overrides, "config_name": name})
        return run_tasks(tasks, nproc=1, folder=folder, strict=False), folder

    return start


@pytest.mark.parametrize("name", NAMES)
def test_two_steps(runs, name):
    outcomes, folder = runs(0)
    for rank in outcomes[name]:
        assert "error" not in rank, rank["error"]
        assert rank["metrics"]["train/loss"] > 0
    steps = read_metrics(folder / name)
    cfg = launch.load_config(name, [*SHRUNK, "data.path=unused", f"output_dir={folder / name}"])
    assert sorted(steps) == [1, 2]
    assert all(math.isfinite(steps[step]["train/loss"]) for step in steps)
    assert steps[2]["val/images"] == 23
    assert ("val/ema_top1" in steps[2]) == (cfg.ema.decay is not None)
    start, warmup = cfg.lr_scheduler.warmup_start_lr, cfg.lr_scheduler.num_warmup_steps
    if warmup:
        assert steps[1]["train/lr"] == pytest.approx(start + (cfg.optimizer.lr - start) / warmup)
    log = (folder / name / "train.log").read_text()
    assert ("loaded " in log) == (name in SECOND)
    exported = folder / name / "checkpoints/final_model"
    assert exported.exists() == cfg.checkpoint.save_final_model
    if exported.exists():
        model = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()
        size = schema.pair(cfg.model.img_size if name not in SECOND else 24)
        assert model(torch.zeros(1, 3, *size)).isfinite().all()
