"""distributed.tp: blocks cut over ranks by heads and hidden units, on four gloo processes against DDP, in float32."""

import launch

import functools
import itertools

import pytest
import torch
from configs import small, with_values
from conftest import ON_GPU, TINY, assert_same, column, error_of, made_once, run_tasks, task_of, weights

import schema

MESHES = {"shard": (2, 1, 2), "outer": (2, 2, 1), "all": (4, 1, 1)}  # tp x dp_outer x dp_shard
KINDS = {  # name -> options that change what is cut, or what is done with it
    "plain": [],
    "bare": ["model.qkv_bias=false", "model.proj_bias=false"],
    "qk_norm": ["model.qk_norm=true", "model.init_values=0.1", "ema.decay=0.5"],
    "lamb": ["optimizer.name=lamb"],
    "muon": ["optimizer.name=muon", "optimizer.momentum=0.9"],
}
RANDOM = ["model.drop_path_rate=0.3", "model.pos_drop_rate=0.2", "model.drop_rate=0.1", "data.mixup=0.8"]
CHAIN = {"shard": 3, "all": 5, "train_ddp": 7, "outer": 10}  # who trains until which step


def mesh_of(name):
    if name not in MESHES:
        return []
    return [f"distributed.{axis}={n}" for axis, n in zip(("tp", "dp_outer", "dp_shard"), MESHES[name], strict=True)]


@pytest.fixture(scope="module")
def folder(image_folder, tmp_path_factory):
    """The folder of all runs: four processes, started once, and then two."""

    def make(folder):
        task = functools.partial(task_of, image_folder, folder)
        # Wider than TINY, so that four ranks have a head each, and two shards cut a tp rank's keys in the middle.
        model = ["model.embed_dim=48", "model.num_heads=4", "model.global_pool=token", "model.class_token=true"]
        common = [*model, "precision=fp32", "global_batch_size=48", "num_train_steps=10"]
        tasks = []
        for kind, options in KINDS.items():
            for name in ("train_ddp", *MESHES):
                script = name if name == "train_ddp" else "train_fsdp2"
                run = [*common, *options, *mesh_of(name), "evaluation.every_n_steps=10"]
                tasks.append(task(f"{kind}-{name}", script, *run, before="keep_first_gradients"))
        microbatches = [*common, *mesh_of("shard"), "micro_batch_size=8"]
        tasks.append(task("microbatches", "train_fsdp2", *microbatches, before="keep_first_gradients"))
        tasks.append(task("recompute", "train_fsdp2", *common, *mesh_of("all"), "activation_checkpointing=true"))
        tasks.append(task("compiled", "train_fsdp2", *common, *mesh_of("shard"), "compile=true", "num_train_steps=3"))
        for name, stop in CHAIN.items():
            script = name if name == "train_ddp" else "train_fsdp2"
            length = [f"num_train_steps={stop}", "lr_scheduler.num_training_steps=10", "ema.decay=0.9"]
            saving = [f"checkpoint.async_save={str(name == 'all').lower()}"]
            tasks.append(task(f"chain-{stop}", script, *common, *length, *saving, *mesh_of(name), output="chain"))
        averaged = [*common, "ema.decay=0.9", "lr_scheduler.num_training_steps=10"]
        tasks.append(task("straight", "train_ddp", *averaged))
        tasks.append(task("random", "train_fsdp2", *common, *RANDOM, *mesh_of("shard")))
        run_tasks(tasks, nproc=4, folder=folder, timeout=500)
        run_tasks([task("random-2", "train_fsdp2", *common, *RANDOM)], nproc=2, folder=folder)

    return made_once(tmp_path_factory, "tensor_parallel", make)[0]


slow = pytest.mark.slow
on_meshes = pytest.mark.parametrize("mesh", MESHES)
on_kinds = pytest.mark.parametrize("kind", KINDS)


@slow
@on_kinds
@on_meshes
def test_first_gradients_are_ddps(folder, mesh, kind):
    """Of every tensor, whole and in timm's order of rows, before clipping."""
    got, want = (torch.load(folder / f"{kind}-{name}/gradients.pt") for name in (mesh, "train_ddp"))
    largest = max(gradient.abs().max().item() for gradient in want)
    assert len(got) == len(want) > 20
    for ours, ddps in zip(got, want, strict=True):
        torch.testing.assert_close(ours, ddps, rtol=1e-4, atol=1e-6 * largest)


@slow
@on_kinds
@on_meshes
def test_losses_and_scores_are_ddps(folder, mesh, kind):
    """Muon multiplies in BF16, where a sum in another order is seen."""
    tolerance = 1e-4 if kind == "muon" else 1e-6
    for key, scale in (("train/loss", 1), ("train/grad_norm", 10), ("val/loss", 1), ("val/top1", 0)):
        want = column(folder, f"{kind}-train_ddp", key)
        assert len(want) == (10 if key.startswith("train") else 1)
        assert column(folder, f"{kind}-{mesh}", key) == pytest.approx(want, rel=tolerance * scale, abs=0), key
    assert column(folder, f"{kind}-{mesh}", "val/images") == column(folder, f"{kind}-train_ddp", "val/images")


@slow
@pytest.mark.parametrize("name", ["microbatches", "recompute", "compiled"])
def test_other_ways_of_the_pass(folder, name):
    got, want = column(folder, name, "train/loss"), column(folder, "plain-train_ddp", "train/loss")
    assert len(got) == (3 if name == "compiled" else 10)
    assert got == pytest.approx(want[: len(got)], rel=1e-6, abs=0)


@slow
def test_ranks_of_a_group_draw_the_same(folder):
    """Drop path, dropout and mixup: as with two ranks that are not split."""
    want = column(folder, "random-2", "train/loss")
    assert column(folder, "random", "train/loss") == pytest.approx(want, rel=1e-6, abs=0)
    assert want != pytest.approx(column(folder, "plain-train_ddp", "train/loss"), rel=1e-3)


@slow
def test_a_checkpoint_moves_over_meshes(folder):
    """tp=2 with two shards, tp=4 (saved asynchronously), DDP, tp=2 with two copies: the ten steps of one run."""
    straight = column(folder, "straight", "train/loss")
    assert column(folder, "chain", "train/loss") == pytest.approx(straight, rel=1e-6, abs=0)
    assert_same(weights(folder, "chain"), weights(folder, "straight"), atol=1e-5)


def with_axes(world_size=2, script="train_fsdp2", **changes):
    cfg = with_values(small(), distributed={"tp": 2}, **changes)
    launch.check_script(cfg, script, world_size)
    return cfg


def test_what_can_be_cut_is_accepted():
    cfg = with_axes(model={"num_heads": 2, "qk_norm": True, "drop_path_rate": 0.1}, global_batch_size=8)
    sizes = schema.RunSizes.of(cfg, world_size=2, num_train_images=60, num_val_images=23)
    assert (sizes.dp_size, sizes.micro_batch_size, sizes.dp_rank(0), sizes.dp_rank(1)) == (1, 8, 0, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"script": "train_ddp"}, ["distributed.tp=2", "train_ddp.py", "use train_fsdp2.py"]),
        ({"script": "train_mfsdp"}, ["distributed.tp=2", "train_mfsdp.py", "use train_fsdp2.py"]),
        ({"world_size": 3}, ["distributed.tp=2", "world size of 3"]),
        ({"model": {"num_heads": 3, "embed_dim": 24}}, ["distributed.tp=2", "model.num_heads=3", "use 3"]),
        ({"model": {"num_heads": 1}}, ["model.num_heads=1", "use none"]),
        ({"model": {"attn_drop_rate": 0.1}}, ["model.attn_drop_rate=0.1", "distributed.tp=2", "set it to 0"]),
        ({"model": {"proj_drop_rate": 0.1}}, ["model.proj_drop_rate=0.1", "distributed.tp=2"]),
        ({"model": {"implementation": "timm"}}, ["model.implementation=timm", "use ours"]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_cut_is_refused_by_name(changes, words):
    model = {"num_heads": 2, "embed_dim": 16} | changes.get("model", {})
    text = error_of(with_axes, **(changes | {"model": model}))
    for word in words:
        assert word in text


def test_rows_of_packed_projections_are_each_there_once():
    """Over every rank of a 3 x 2 mesh of shards and tp, from the arithmetic alone."""
    from types import SimpleNamespace

    from torch.distributed.tensor import Replicate, Shard

    from runtime.tensors import _packed_rows

    seen, wholes = [], torch.arange(3 * 20)
    for shard, tp in itertools.product(range(3), range(2)):
        mesh = SimpleNamespace(
            mesh_dim_names=("dp_outer", "dp_shard", "tp"),
            size=lambda axis: (2, 3, 2)[axis],
            get_local_rank=lambda axis, here=(0, shard, tp): here[-1] if axis == "tp" else here[axis],
        )
        tensor = SimpleNamespace(device_mesh=mesh, shape=torch.Size([60]), placements=(Replicate(), Shard(0), Shard(0)))
        chunks = _packed_rows(tensor)
        rows = torch.cat([wholes[c.offsets[0] : c.offsets[0] + c.sizes[0]] for c in chunks]).tolist()
        assert all(row % 20 // 10 == tp for row in rows)  # the heads of this rank, of q, k and v
        assert len(rows) == 10
        seen += rows
    assert sorted(seen) == wholes.tolist()


TE = ["model.act_layer=gelu_tanh", "model.transformer_engine=true"]
FP8 = [*TE, "fp8_config.enabled=true"]
BLOCKS = {  # name -> (options, bound of the relative error of the first gradients)
    "plain": ([], 0.02),
    "te": (TE, 0.02),
    "te_qk_norm": ([*TE, "model.qk_norm=true", "model.qkv_bias=false"], 0.02),
    "delayed": (FP8, 0.3),
    "current": ([*FP8, "fp8_config.fp8_recipe=Float8CurrentScaling"], 0.3),
}


@pytest.fixture(scope="module")
def gpu_folder(image_folder, tmp_path_factory):
    """The folder of runs of two processes, and of one; two on one GPU, if there is no other, sum by gloo."""
    folder = tmp_path_factory.mktemp("tp_gpu")
    before = "share_a_gpu" if torch.cuda.device_count() < 2 else "keep_first_gradients"
    task = functools.partial(task_of, image_folder, folder, base=[*TINY, *ON_GPU, "model.num_heads=6"])
    for name, ranks in (("one", 1), ("two", 2)):
        cut = ["distributed.tp=2"] if ranks == 2 else []
        tasks = [
            task(f"{block}-{name}", "train_fsdp2", *options, *cut, "num_train_steps=10", before=before)
            for block, (options, _) in BLOCKS.items()
        ]
        run_tasks(tasks, nproc=ranks, folder=folder, timeout=250, strict=False)
    for ranks, stop in ((2, 4), (1, 7), (2, 10)):
        cut = ["distributed.tp=2"] if ranks == 2 else []
        length = [f"num_train_steps={stop}", "lr_scheduler.num_training_steps=10"]
        run = task(f"chain-{stop}", "train_fsdp2", *TE, *cut, *length, output="chain", before=before)
        run_tasks([run], nproc=ranks, folder=folder, timeout=120)
    return folder


on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("block", [pytest.param(name, marks=on_a_gpu) for name in BLOCKS])
def test_two_halves_are_the_whole_on_a_gpu(gpu_folder, block):
    """Gradients of the first step and ten losses; FP8's scales are one for both halves."""
    got, want = (torch.load(gpu_folder / f"{block}-{name}/gradients.pt") for name in ("two", "one"))
    error = torch.stack([(a - b).norm() for a, b in zip(got, want, strict=True)]).norm()
    assert error / torch.stack([gradient.norm() for gradient in want]).norm() < BLOCKS[block][1]
    losses = [column(gpu_folder, f"{block}-{name}", "train/loss") for name in ("two", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=5e-2 if BLOCKS[block][1] > 0.1 else 1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_checkpoint_of_halves_goes_on_as_a_whole(gpu_folder):
    straight = column(gpu_folder, "te-one", "train/loss")
    assert column(gpu_folder, "chain", "train/loss") == pytest.approx(straight, rel=1e-2)
