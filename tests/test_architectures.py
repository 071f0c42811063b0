"""Runs of models with rotary and relative positions and other blocks: DDP is FSDP2; resumed, exported, tuned."""

import launch  # noqa: F401  (before torch)

import functools

import pytest
import timm
import torch
from conftest import assert_same, column, made_once, run_tasks, task_of, weights
from test_vit import BLOCKS, ROPES, keys

pytestmark = pytest.mark.slow
# TINY's heads have 8 channels. All that groups parameters or changes a step is on.
COMMON = ["model.drop_path_rate=0.2", "optimizer.layer_decay=0.8", "ema.decay=0.9", "evaluation.every_n_steps=3"]
KINDS = ("dinov3", "eva02", "sapiens2", "mixed")
# Relative positions alone, which drop units of their own, and differential attention in blocks of one branch.
OTHERS = ("differential_parallel", "relative_shared", "table")
CLASSES = {"table": "VisionTransformerRelPos", "relative_shared": "VisionTransformerRelPos"}
CLASSES |= {"differential_parallel": "VisionTransformer"}


def options_of(kind):
    depth = ["model.num_kv_heads=[3,1]"] if kind == "sapiens2" else []
    sizes = ["model.img_size=16", "model.num_heads=2"] if kind in OTHERS else []
    return [*COMMON, *keys((ROPES | BLOCKS)[kind]), *depth, *sizes]


@pytest.fixture(scope="module")
def folder(image_folder, tmp_path_factory):
    """The folder of all runs: two processes, started once."""

    def make(folder):
        task = functools.partial(task_of, image_folder, folder)
        tasks = []
        for kind in (*KINDS, *OTHERS):
            options = [*options_of(kind), "precision=fp32"]
            tasks += [task(f"{kind}-{script}", script, *options) for script in ("train_ddp", "train_fsdp2")]
            length = ["num_train_steps=3", "lr_scheduler.num_training_steps=6"]
            tasks.append(task(f"{kind}-start", "train_fsdp2", *options, *length, output=f"{kind}-chain"))
            tasks.append(task(f"{kind}-end", "train_ddp", *options, output=f"{kind}-chain"))
        for script in ("train_ddp", "train_fsdp2"):
            for kind in ("dinov3", *OTHERS):
                bf16 = [*options_of(kind), "precision=bf16", "activation_checkpointing=true"]
                tasks.append(task(f"bf16-{kind}-{script}", script, *bf16))
        larger = f"checkpoint.init_from={folder / 'dinov3-train_ddp/checkpoints/final_model'}"
        tasks.append(task("larger", "train_fsdp2", *options_of("dinov3"), larger, "model.img_size=32"))
        run_tasks(tasks, nproc=2, folder=folder, timeout=550)

    return made_once(tmp_path_factory, "architectures", make)[0]


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_fsdp2_is_ddp_and_resumes_its_runs(folder, kind):
    straight = column(folder, f"{kind}-train_ddp", "train/loss")
    assert len(straight) == 6
    for other in ("train_fsdp2", "chain"):
        assert column(folder, f"{kind}-{other}", "train/loss") == pytest.approx(straight, rel=1e-6, abs=0)
        assert_same(weights(folder, f"{kind}-{other}"), weights(folder, f"{kind}-train_ddp"), atol=1e-5)


@pytest.mark.parametrize("kind", ["dinov3", *OTHERS])
def test_bf16_under_fsdp2_is_near_ddps(folder, kind):
    ddp = column(folder, f"bf16-{kind}-train_ddp", "train/loss")
    assert column(folder, f"bf16-{kind}-train_fsdp2", "train/loss") == pytest.approx(ddp, rel=2e-2)


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_timm_builds_the_final_model(folder, kind):
    exported = folder / f"{kind}-train_ddp/checkpoints/final_model"
    model = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()
    assert type(model).__name__ == CLASSES.get(kind, "Eva")
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 6)
    assert_same(model.state_dict(), weights(folder, f"{kind}-train_ddp"))


def test_fine_tuning_at_another_size_starts_from_the_weights(folder):
    assert "loaded" in (folder / "larger/train.log").read_text()
    assert len(column(folder, "larger", "train/loss")) == 6
