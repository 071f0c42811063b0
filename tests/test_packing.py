"""packing.py and the model on rows of images: against the same images one by one, timm's NaFlexVit, and on a GPU."""

import launch

import dataclasses
import functools
import itertools
import json

import pytest
import torch
from conftest import ON_GPU, TINY, column, loaders_of, made_once, run_tasks, task_of, tiny_config, weights
from timm.layers import resample_abs_pos_embed
from timm.models.naflexvit import NaFlexVit, checkpoint_filter_fn
from weight_files import drawn

import evaluate
import infer
import modeling
import packing
import train_ddp
import trainer
from imagenet_dataset import PADDING, list_images
from input_pipeline import aspect
from interop import weights_in
from packing import Packed, Rows
from vit import VisionTransformer

KINDS = {
    "avg": ["model.global_pool=avg", "model.class_token=false"],
    "token": ["model.global_pool=token", "model.class_token=true", "model.reg_tokens=2", "model.qk_norm=true"],
    "no_embed_class": ["model.class_token=true", "model.reg_tokens=1", "model.no_embed_class=true"],
    "norms": ["model.pre_norm=true", "model.scale_attn_norm=true", "model.init_values=0.1", "model.mlp_layer=glu"],
    "sincos": ["model.pos_embed=sincos", "model.class_token=true"],
    "none": ["model.pos_embed=none", "model.patch_size=[4,8]"],
}
KINDS["norms"] += ["model.act_layer=silu", "checkpoint.save_final_model=false"]
# Rows and columns of patches of six images, three a row: the first row is full, the second one not.
GRIDS = [(2, 2), (1, 4), (3, 1), (1, 2), (4, 1), (1, 1)]


def model_of(*overrides):
    """A model whose weights, norms and LayerScale among them, are far from those of the start."""
    cfg = tiny_config("data.packing.enabled=true", "model.dynamic_img_size=true", *overrides).model
    model = VisionTransformer(cfg)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def images_of(model, grids, seed=2):
    generator, (height, width) = torch.Generator().manual_seed(seed), model.patch_embed.patch_size
    return [torch.randn(3, height * rows, width * columns, generator=generator) for rows, columns in grids]


def packed(model, images, images_per_row=3, spare=0):
    """The images in rows as long as the longest row needs, and `spare` tokens more."""
    patch, prefix = model.patch_embed.patch_size, model.num_prefix_tokens
    flat = [torch.cat([torch.zeros(prefix, p.shape[1]), p]) for p in (aspect.patches_of(i, patch) for i in images)]
    rows = [torch.cat(flat[i : i + images_per_row]) for i in range(0, len(flat), images_per_row)]
    length = max(map(len, rows)) + spare
    rows = [torch.nn.functional.pad(row, (0, 0, 0, length - len(row)), value=9.0) for row in rows]
    grids = [(image.shape[1] // patch[0], image.shape[2] // patch[1]) for image in images]
    longest = packing.longest_image(length, images_per_row)
    assert max(rows * columns for rows, columns in grids) + prefix <= longest
    return Packed(torch.stack(rows), torch.tensor(grids), longest)


def gradients(model, logits):
    """Of a sum of all logits with weights that differ; the model's are cleared."""
    generator = torch.Generator().manual_seed(3)
    (logits.cpu().float() * torch.randn(logits.shape, generator=generator)).sum().backward()
    found = {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad()
    return found


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_the_images_one_by_one(kind, spare):
    model = model_of(*KINDS[kind])
    images = images_of(model, GRIDS)
    alone = torch.cat([model(image[None]) for image in images])
    want = gradients(model, alone)
    together = model(packed(model, images, spare=spare))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    got = gradients(model, together)
    assert got.keys() == want.keys()
    largest = max(gradient.abs().max() for gradient in want.values())
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-6 * largest, msg=name)


@pytest.mark.parametrize("spare", [0, 2, 60])
def test_kernel_for_several_lengths_gets_each_image_by_itself(spare, monkeypatch):
    """The kernel's place taken by one attention an image; rows may be full, or nearly empty."""
    model = model_of(*KINDS["token"])
    batch = packed(model, images_of(model, GRIDS), spare=spare)
    want = model(batch)
    want_gradients = gradients(model, want)
    calls = []

    def each_by_itself(query, key, value, boundaries, same, longest, same_too):
        assert (boundaries is same, longest == same_too, boundaries.dtype) == (True, True, torch.int32)
        starts = boundaries.tolist()
        assert starts[-1] == len(query) == batch.patches.shape[:2].numel()
        calls.append(longest)
        found = []
        for start, end in itertools.pairwise(starts):
            q, k, v = (each[start:end].transpose(0, 1)[None] for each in (query, key, value))
            found.append(torch.nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
            assert end - start <= longest
        return torch.cat(found)

    rows = Rows.of(batch, model.num_prefix_tokens, torch.float32)
    monkeypatch.setattr(packing, "varlen_attn", each_by_itself)
    monkeypatch.setattr(Rows, "of", lambda *_: dataclasses.replace(rows, mask=None))
    got = model(batch)
    assert len(calls) == model.cfg.depth
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    for name, gradient in gradients(model, got).items():
        torch.testing.assert_close(gradient, want_gradients[name], rtol=0, atol=1e-5, msg=name)


def test_another_image_in_the_row_changes_nothing():
    model = model_of(*KINDS["token"])
    images = images_of(model, GRIDS)
    others = [*images[:2], *images_of(model, [(1, 3)], seed=7), *images[3:]]
    one, other = (model(packed(model, each, spare=1)) for each in (images, others))
    assert torch.equal(one[3:], other[3:])  # of another row
    torch.testing.assert_close(one[:2], other[:2], rtol=0, atol=1e-6)
    assert (one[2] - other[2]).abs().max() > 1e-2


def test_dropped_paths_are_of_images_and_those_of_a_batch_of_squares():
    model = model_of("model.drop_path_rate=0.5", "model.depth=3", *KINDS["token"])
    images = images_of(model, [(2, 2)] * 6)
    assert model.training
    torch.manual_seed(5)
    squares = model(torch.stack(images))
    torch.manual_seed(5)
    rows = model(packed(model, images, spare=1))
    torch.testing.assert_close(rows, squares, rtol=0, atol=1e-5)
    assert (rows - model.eval()(torch.stack(images))).abs().max() > 1e-2


@pytest.mark.parametrize("new", [(14, 14), (9, 20), (1, 30), (22, 8), (15, 13)])
def test_positions_are_resampled_as_timm_does(new):
    old = (14, 12)
    table = torch.randn(1, 14 * 12, 5)
    of_rows, of_columns = (packing.resampling(side, 30, torch.device("cpu")) for side in old)
    grid = table.view(*old, 5)
    got = torch.einsum("yi,xj,ijd->yxd", of_rows[new[0], : new[0]], of_columns[new[1], : new[1]], grid).flatten(0, 1)
    want = resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=0)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def naflex_of(cfg):
    """timm's NaFlexVit of a config, with random weights."""
    return NaFlexVit(
        patch_size=cfg.patch_size,
        embed_dim=cfg.embed_dim,
        depth=cfg.depth,
        num_heads=cfg.num_heads,
        num_classes=cfg.num_classes,
        init_values=cfg.init_values,
        qk_norm=cfg.qk_norm,
        global_pool=cfg.global_pool,
        class_token=cfg.class_token,
        reg_tokens=cfg.reg_tokens,
        pos_embed_grid_size=cfg.grid_size(),
        fc_norm=cfg.norms_after_pooling(),
    )


@pytest.mark.parametrize("kind", ["token", "no_embed_class", "avg"])
@pytest.mark.parametrize("way", ["theirs", "ours"])
def test_timms_naflexvit_gives_the_same_logits(kind, way, tmp_path):
    """On the same patches in timm's layout, an image a row, padded.

    Our weights by timm's conversion of them, and timm's by init_from, from a file in timm's names.
    """
    more = ["model.class_token=true", "model.reg_tokens=4", "model.init_values=0.1", "model.no_embed_class=true"]
    model = model_of(*KINDS[kind], *more, "model.img_size=40")
    theirs = naflex_of(model.cfg).eval()
    if way == "theirs":
        theirs.load_state_dict(checkpoint_filter_fn(dict(model.state_dict()), theirs))
    else:
        drawn(theirs)
        torch.save({"module." + name: tensor for name, tensor in theirs.state_dict().items()}, tmp_path / "naflex.pt")
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        tensors, fresh = weights_in.fit(weights_in.read(str(tmp_path / "naflex.pt")), model.cfg, shapes)
        assert not fresh
        model.load_state_dict(tensors)
    images, patch = images_of(model, GRIDS), model.patch_embed.patch_size
    longest = max(rows * columns for rows, columns in GRIDS)
    batch = {"patches": torch.zeros(len(images), longest, 3 * patch[0] * patch[1])}
    batch |= {"patch_coord": torch.zeros(len(images), longest, 2, dtype=torch.long)}
    batch |= {"patch_valid": torch.zeros(len(images), longest, dtype=torch.bool)}
    from timm.data.naflex_transforms import patchify_image

    for number, image in enumerate(images):
        for part, values in zip(batch.values(), patchify_image(image, patch), strict=True):
            part[number, : len(values)] = values
    with torch.no_grad():
        want = theirs(batch)
        got = model.eval()(packed(model, images, spare=1))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert (got[0] - got[3]).abs().max() > 1e-2


def test_blocks_compile_once_whatever_the_grids():
    model, plain = (model_of(*KINDS["token"], "model.depth=3") for _ in range(2))
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    for grids in (GRIDS, GRIDS[::-1], [(2, 2)] * 5 + [(1, 4)]):
        batch = packed(model, images_of(model, grids), spare=12 - max(sum(r * c for r, c in grids[:3]), 8))
        torch.testing.assert_close(model(batch), plain(batch), rtol=0, atol=1e-5)
    assert len(graphs) <= 2  # torch asks once more where a number is not what it was


def test_evaluations_of_several_lengths_leave_training_its_own_graph():
    model, graphs = model_of(*KINDS["token"], "model.depth=3"), []

    def backend(graph, _):
        graphs.append([each for each in graph.graph.nodes if each.op == "placeholder" and each.type is torch.SymInt])
        return graph

    torch.compiler.reset()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    batches = [packed(model, images_of(model, GRIDS), spare=spare) for spare in range(5)]
    batches = [dataclasses.replace(batch, longest=batches[-1].longest) for batch in batches]

    def evaluate():
        model.eval()
        with torch.no_grad():
            for batch in batches[:-1]:
                model(batch)
        model.train()

    model(batches[-1])
    evaluate()
    assert len(graphs) == 2  # of which the second is for any length
    assert (bool(graphs[0]), bool(graphs[1])) == (False, True)
    for _ in range(2):
        model(batches[-1])
        evaluate()
    assert len(graphs) == 2


@pytest.mark.parametrize("images_per_row", [1, 3, 4, 12])
def test_even_rows_have_each_image_once_and_about_one_length(images_per_row):
    lengths = [17, 4, 11, 11, 9, 16, 2, 14, 13, 17, 8, 12]
    rows = packing.even_rows(lengths, images_per_row)
    assert sorted(itertools.chain(*rows)) == list(range(12))
    assert {len(row) for row in rows} == {images_per_row}
    sums = [sum(lengths[place] for place in row) for row in rows]
    assert max(sums) - min(sums) <= {1: 15, 3: 6, 4: 4, 12: 0}[images_per_row]


def test_a_run_that_begins_with_an_evaluation_compiles_its_training_anew(tiny, tmp_path, monkeypatch):
    """Else torch would compile it for rows of any length, as the evaluation's."""
    calls = []

    def noted(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: calls.append(name) or original(*args, **options))

    def run(steps):
        length = [f"num_train_steps={steps}", "lr_scheduler.num_training_steps=2", "lr_scheduler.num_warmup_steps=0"]
        train_ddp.main(launch.load_config("L0_sanity", [*tiny, *PACKED, *length], script="train_ddp"))

    run(1)
    state = tmp_path / "run/checkpoints/step_00000001/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"is_unscored": True}))
    for owner, name in ((trainer, "evaluate"), (torch.compiler, "reset"), (trainer, "train_step")):
        noted(owner, name)
    run(2)
    assert calls[:3] == ["evaluate", "reset", "train_step"]


# Runs

PACKED = ["data.packing.enabled=true", "data.packing.images_per_row=4", "model.class_token=true", "model.reg_tokens=1"]
PACKED += ["model.img_size=32", "evaluation.every_n_steps=3", "model.drop_path_rate=0.0"]
SCRIPTS = ("train_ddp", "train_fsdp2")


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    """The folder of runs of one process and of two."""

    def make(folder):
        for nproc in (1, 2):
            task = functools.partial(task_of, image_folder, folder, base=[*TINY, *PACKED])
            tasks = [task(f"{script}-{nproc}", script) for script in SCRIPTS]
            tasks.append(task(f"micro-{nproc}", SCRIPTS[nproc - 1], "micro_batch_size=4"))
            random = ["model.drop_path_rate=0.3", "model.proj_drop_rate=0.1", "data.num_workers=1", "ema.decay=0.5"]
            tasks.append(task(f"straight-{nproc}", "train_fsdp2", *random))
            for stop in (3, 6):
                length = [f"num_train_steps={stop}", "lr_scheduler.num_training_steps=6"]
                tasks.append(task(f"stop-{nproc}-{stop}", "train_fsdp2", *random, *length, output=f"stopped-{nproc}"))
            recompute = "activation_checkpointing=" + ("true" if nproc == 1 else "selective")
            tasks.append(task(f"recompute-{nproc}", "train_ddp", recompute))
            run_tasks(tasks, nproc=nproc, folder=folder / f"tasks-{nproc}")

    return made_once(tmp_path_factory, "packing", make)[0]


KEYS = ("train/loss", "train/grad_norm", "train/padding_fraction", "val/loss", "val/top1", "val/images")


@pytest.mark.parametrize("name", ["train_fsdp2-1", "train_ddp-2", "train_fsdp2-2", "micro-1", "micro-2"])
@pytest.mark.slow
def test_runs_are_that_of_one_process(runs, name):
    for key in KEYS:
        want = column(runs, "train_ddp-1", key)
        assert len(want) == (6 if key.startswith("train") else 2), key
        assert column(runs, name, key) == pytest.approx(want, rel=1e-5, abs=1e-6), key
    assert column(runs, name, "val/images") == [23, 23]
    assert all(0 < share < 0.1 for share in column(runs, name, "train/padding_fraction"))  # of rows of four small ones


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_last_digit(runs, nproc):
    for key in (*KEYS, "val/ema_loss"):
        assert column(runs, f"stopped-{nproc}", key) == column(runs, f"straight-{nproc}", key)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.slow
def test_recomputation_changes_nothing(runs, nproc):
    assert column(runs, f"recompute-{nproc}", "train/loss") == column(runs, f"train_ddp-{nproc}", "train/loss")


@pytest.mark.parametrize("model", ["checkpoints", "checkpoints/final_model"])
@pytest.mark.slow
def test_the_exports_evaluation_is_the_runs(runs, image_folder, model, tmp_path):
    """Images in their own aspect ratio, by timm's model, one size after the other."""
    output = tmp_path / "scores.json"
    arguments = [runs / "train_ddp-1" / model, image_folder / "val", "--batch-size", 5, "--workers", 0]
    evaluate.main([*map(str, arguments), "--output", str(output)])
    found = json.loads(output.read_text())
    for key in ("images", "top1", "top5"):
        assert found[key] == pytest.approx(column(runs, "train_ddp-1", f"val/{key}")[-1])


@pytest.mark.slow
def test_the_exports_logits_are_those_of_rows(runs, image_folder):
    timms, config = infer.load_model(runs / "train_ddp-1/checkpoints/final_model")
    cfg = tiny_config(*PACKED, f"data.path={image_folder}")
    model = VisionTransformer(cfg.model).eval()
    model.load_state_dict(weights(runs, "train_ddp-1"))
    batch, labels = next(iter(loaders_of(cfg)[1]))
    files = list_images(cfg.data, "val")
    reader = infer.Reader(timms, config)
    images = [reader(files.read(index)) for index in range(len(files))]
    assert len({image.shape for image in images}) > 2
    with torch.no_grad():
        got = infer.logits_of(timms, images)
        want = model(trainer.Normalize(cfg, torch.device("cpu"))(batch))
    # A row's images are in an order of their own.
    assert sorted(labels[labels != PADDING].tolist()) == sorted(files.labels.tolist())
    distances = torch.cdist(got, want[labels != PADDING])
    assert distances.min(dim=1).values.max() < 1e-5
    assert len(set(distances.argmin(dim=1).tolist())) == len(files)
    assert torch.equal(labels[labels != PADDING][distances.argmin(dim=1)], torch.as_tensor(files.labels).long())


# On a GPU: pytest -m gpu tests/test_packing.py

WIDE = [*ON_GPU[2:6], "model.img_size=32", "model.init_values=0.1", "model.reg_tokens=1", "model.qk_norm=true"]
# Full rows, which leave the kernel an image of no token at their end, and others.
WIDE_GRIDS = [(4, 4), (2, 8), (5, 3), (1, 7), (5, 4), (3, 3), (4, 4), (6, 2), (2, 2), (4, 4), (8, 2), (3, 5)]


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_gpu_kernel_in_bf16_is_the_reference_of_the_cpu(compiles):
    reference = model_of(*WIDE, "model.global_pool=token", "model.class_token=true")
    images = images_of(reference, WIDE_GRIDS)
    batch = packed(reference, images, spare=80 if compiles else 0)  # more padding than an image may be long, or none
    want = reference(batch)
    want_gradients = gradients(reference, want)
    model = model_of(*WIDE, "model.global_pool=token", "model.class_token=true").cuda()
    modeling.prepare_blocks(model, activation_checkpointing=False, compile=compiles)
    with torch.autocast("cuda", torch.bfloat16):
        on_gpu = batch.to("cuda")
        assert Rows.of(on_gpu, model.num_prefix_tokens, torch.bfloat16).mask is None  # the kernel, not the mask
        got = model(on_gpu)
        alone = torch.cat([model(image[None].cuda()) for image in images]) if not compiles else got
    got_gradients = gradients(model, got)
    # As far from float32 as BF16 is without packing, and no farther.
    error = (got.detach().cpu().float() - want).norm() / want.norm()
    print(
        f"relative error of the logits: {error:.2e}, one by one {(alone.cpu().float() - want).norm() / want.norm():.2e}"
    )
    assert error < 3e-2
    for name, gradient in want_gradients.items():
        if not name.endswith(("attn.qkv.bias", "attn.k_norm.bias")):  # a bias of all keys has a gradient of noise
            error = (got_gradients[name] - gradient).norm() / gradient.norm()
            assert error < 6e-2, (name, error)


@pytest.mark.gpu
def test_gpu_compiles_once_for_training_and_once_for_evaluations_of_any_length():
    compiles_once_for_each("cuda")


def compiles_once_for_each(device):
    """A training step, evaluations of four lengths of rows, and both again: as the reference says, from two graphs."""
    torch.compiler.reset()
    reference = model_of(*WIDE, "model.global_pool=token", "model.class_token=true")
    model = model_of(*WIDE, "model.global_pool=token", "model.class_token=true").to(device)
    modeling.prepare_blocks(model, activation_checkpointing=False, compile=True)
    images = images_of(reference, WIDE_GRIDS)
    batches = [packed(reference, images, spare=spare) for spare in (0, 3, 8, 21, 80)]
    batches = [dataclasses.replace(batch, longest=batches[-1].longest) for batch in batches]
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    for _ in range(2):
        for is_training, some in ((True, batches[-1:]), (False, batches[:-1])):
            model.train(is_training)
            with torch.set_grad_enabled(is_training), torch.autocast(device, torch.bfloat16):
                for batch in some:
                    got = model(batch.to(device)).detach().cpu().float()
                    assert (got - reference(batch)).norm() / got.norm() < 3e-2
    assert graphs["unique_graphs"] == 2


@pytest.mark.gpu
def test_gpu_in_float32_has_the_mask():
    model = model_of(*WIDE, "model.global_pool=avg")
    batch = packed(model, images_of(model, WIDE_GRIDS))
    want = model(batch)
    torch.testing.assert_close(model.cuda()(batch.to("cuda")).cpu(), want, rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def gpu_runs(image_folder, tmp_path_factory):
    """The folder of runs on one GPU."""

    def make(folder):
        task = functools.partial(task_of, image_folder, folder, base=[*TINY, *ON_GPU])
        common = ["data.packing.enabled=true", "num_train_steps=10", "evaluation.every_n_steps=10"]
        tasks = [task(script, script, *common) for script in ("train_ddp", "train_fsdp2")]
        more = ["compile=true", "activation_checkpointing=true", "model.drop_path_rate=0.1"]
        tasks += [task(f"{script}-more", script, *common, *more) for script in ("train_ddp", "train_fsdp2")]
        tasks.append(task("fp32", "train_ddp", *common, "precision=fp32"))
        run_tasks(tasks, nproc=1, folder=folder, timeout=400)

    return made_once(tmp_path_factory, "packing_gpu", make)[0]


@pytest.mark.gpu
def test_gpu_runs_agree(gpu_runs):
    want = column(gpu_runs, "fp32", "train/loss")
    assert len(want) == 10
    for script in ("train_ddp", "train_fsdp2"):
        assert column(gpu_runs, script, "train/loss") == pytest.approx(want, abs=3e-2)
        assert column(gpu_runs, script, "val/loss") == pytest.approx(column(gpu_runs, "fp32", "val/loss"), abs=5e-2)
        assert max(column(gpu_runs, script, "train/padding_fraction")) < 0.1  # of rows of few tokens
    one, other = (column(gpu_runs, f"{script}-more", "train/loss") for script in ("train_ddp", "train_fsdp2"))
    assert one == pytest.approx(other, abs=3e-2)
