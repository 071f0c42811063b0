"""tools/start_memory.py: a small deep model on two ranks, which is never whole on one."""

import pytest
from conftest import run_tasks, task_of

# 24 blocks of 12.6 MB in FP32: the model is 302 MB whole, and 907 MB with AdamW's averages.
DEEP = ["model.embed_dim=512", "model.num_heads=8", "model.depth=24", "model.mlp_ratio=4", "global_batch_size=4"]
DEEP += ["data.source=synthetic", "data.path=null", "data.num_synthetic_train=8", "data.num_synthetic_val=8"]
BF16_STATE = ["optimizer.state_dtype=bf16", "optimizer.betas=[0.9,0.95]"]
CONSTANT = 64 * 2**20  # what imports, DCP's index and buffers take: not more for larger models


@pytest.mark.slow
def test_no_part_of_a_start_holds_more_than_the_shard_and_a_block(image_folder, tmp_path):
    tasks = [
        task_of(image_folder, tmp_path, name, "train_fsdp2", *DEEP, *options, "num_train_steps=1", call="start_memory")
        for name, options in (("first", []), ("fp32", []), ("bf16", BF16_STATE))
    ]
    outcomes = run_tasks(tasks, nproc=2, folder=tmp_path / "tasks")
    for name in ("fp32", "bf16"):  # the first one's imports are behind
        for rank in outcomes[name]:
            found = rank["metrics"]
            assert found["parts"].keys() == {"init", "optimizer", "save", "resume", "final_model"}
            shard = 4 * found["parameters"] / 2
            state = (2 if name == "bf16" else 4) * 2 * found["parameters"] / 2
            assert found["block"] < shard / 10
            for part, held in (("init", shard), ("optimizer", 2 * shard + state), ("save", shard + state)):
                assert found["parts"][part]["held"] == pytest.approx(held, rel=1e-2)
            for part, measured in found["parts"].items():
                assert measured["more"] <= found["block"] + CONSTANT, part
