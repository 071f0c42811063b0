"""trainer.evaluate: the scores of a plain loop over all images, and no trace in what trains on."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from configs import data_config
from conftest import loaders_of, make_files, rng_untouched
from timm.data import create_transform
from torch import nn
from torchvision.datasets import ImageFolder

import schema
import trainer

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_model(num_classes):
    """Linear, with a dropout that only evaluation switches off."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 16 * 16, num_classes))
    return model.train()


def plain_scores(model, cfg):
    """One image at a time, from ImageFolder through timm's transform."""
    data = cfg.data
    transform = create_transform(
        (3, 16, 16), interpolation=data.interpolation, crop_pct=data.crop_pct, mean=data.mean * 3, std=data.std * 3
    )
    class_to_idx = ImageFolder(f"{data.path}/train").class_to_idx
    folder = ImageFolder(f"{data.path}/val", transform=transform, allow_empty=True)
    rows = []
    model = model.eval()
    for image, own_label in folder:
        label = class_to_idx[folder.classes[own_label]]
        logits = model(image[None]).detach()
        ranking = logits[0].argsort(descending=True).tolist()
        loss = F.cross_entropy(logits, torch.tensor([label])).item()
        rows.append((loss, ranking[0] == label, label in ranking[:5]))
    model.train()
    loss, top1, top5 = np.mean(rows, axis=0)
    return {"val/loss": loss, "val/top1": top1, "val/top5": top5, "val/images": len(rows)}


def evaluate(model, cfg, *, rank=0, world_size=1):
    _, loader = loaders_of(cfg, rank=rank, world_size=world_size, start_step=0)
    device = torch.device("cpu")
    return trainer.evaluate(model, loader, trainer.Normalize(cfg, device), device=device)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 1), (1, 7), (1, 23), (1, 64), (2, 5), (3, 3)])
@pytest.mark.parametrize(("folder", "num_classes"), [("image_folder", 6), ("image_folder", 9), ("coloured", 3)])
def test_scores_are_those_of_a_plain_loop_over_all_images(request, folder, num_classes, world_size, batch_size):
    path = request.getfixturevalue(folder)
    batch = [f"global_batch_size={world_size * batch_size}", f"model.num_classes={num_classes}"]
    cfg = data_config(path, *batch)
    model = small_model(num_classes)
    expected = plain_scores(model, cfg)
    assert 0 < expected["val/top1"] < 1
    assert expected["val/top5"] == 1 if num_classes <= 5 else expected["val/top1"] < expected["val/top5"] < 1

    # Each rank's share by itself, in this one process: its means times its count are its sums.
    shares = [evaluate(model, cfg, rank=rank, world_size=world_size) for rank in range(world_size)]
    counts = [share["val/images"] for share in shares]
    assert sum(counts) == expected["val/images"]
    for key in ("val/loss", "val/top1", "val/top5"):
        mean = sum(share[key] * count for share, count in zip(shares, counts, strict=True)) / sum(counts)
        assert mean == pytest.approx(expected[key], abs=1e-6)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("num_classes", [1, 2])
def test_fewer_classes_than_five_can_be_scored(tmp_path, num_classes):
    files = [f"{split}/{name}/{i}.png" for split in ("train", "val") for name in "ab"[:num_classes] for i in range(3)]
    cfg = data_config(make_files(tmp_path, files), f"model.num_classes={num_classes}", "global_batch_size=4")
    model = small_model(num_classes)
    found, expected = evaluate(model, cfg), plain_scores(model, cfg)
    assert found == pytest.approx(expected, abs=1e-6)
    assert found["val/top5"] == 1


@pytest.mark.usefixtures("process_group")
def test_evaluation_leaves_mode_weights_and_gradients_alone(image_folder):
    model = small_model(6)
    model.append(nn.BatchNorm1d(6))  # whose statistics move in training mode
    model(torch.rand(4, 3, 16, 16)).sum().backward()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    evaluate(model, data_config(image_folder))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert torch.is_grad_enabled()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_evaluation_leaves_the_global_generators_alone(image_folder, num_workers):
    with rng_untouched():
        evaluate(small_model(6), data_config(image_folder, f"data.num_workers={num_workers}"))


@pytest.mark.usefixtures("process_group")
def test_a_set_that_cannot_be_read_at_all_has_no_scores():
    """All images skipped (data.on_error=skip): a line, not a division by zero."""
    batch = torch.zeros(4, 3, 16, 16), torch.full((4,), trainer.PADDING)
    with pytest.raises(schema.RunError, match="none of the validation images could be read"):
        trainer.evaluate(small_model(6), [batch], lambda images: images, device=torch.device("cpu"))
