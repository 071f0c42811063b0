"""interop/model_card.py: the card says what the run did, and nothing that the checkpoint does not know."""

import launch  # noqa: F401  (before torch)

import json
from pathlib import Path

import pytest
import timm
from conftest import read_metrics
from huggingface_hub import ModelCard
from weight_files import small, write_step

from interop import weights_out
from interop.model_card import model_card
from interop.step_weights import StepWeights


def rows_of(card):
    """The tables' rows: name -> value."""
    rows = [line.strip("| ").split(" | ") for line in card.content.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_the_card_of_a_run_says_what_the_run_did(trained_run):
    folder = trained_run / "checkpoints/final_model"
    card = ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm"],
        "metrics": ["accuracy"],
    }
    rows = rows_of(card)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert rows["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    assert rows["width, depth, heads"] == "24, 2, 3"
    assert rows["size"] == "16 x 16 pixels, channels: 3"
    assert rows["weights"] == "weights at step 6, float32"
    assert rows["images"] == "144 in all, 2.4 epochs of 60"
    assert rows["global batch"] == "24"
    assert rows["started from"] == "random weights"
    assert rows["optimizer"].startswith('`name="adamw"`, `lr=0.001`, ')
    assert "`num_warmup_steps=2`" in rows["lr_scheduler"]
    assert rows["precision"] == '`"fp32"`'
    found = read_metrics(trained_run)[6]
    values = ", ".join(
        f"{name} {found[f'val/{key}']:.4f}"
        for name, key in (("top-1", "top1"), ("top-5", "top5"), ("cross-entropy", "loss"))
    )
    assert f"\n{values} on 23 validation images, by the run's own evaluation at step 6.\n" in card.content
    for text in (str(trained_run), "license", "data.path"):  # neither this machine's paths nor what nobody said
        assert text not in card.content


def test_the_card_of_an_older_checkpoint_says_less(tmp_path):
    folder, _ = write_step(tmp_path, small())
    weights_out.export_timm(folder, tmp_path / "out")
    card = ModelCard.load(tmp_path / "out/README.md")
    assert "metrics" not in card.data.to_dict()
    rows = rows_of(card)
    assert rows["steps"] == "3"
    assert "optimizer" not in rows
    assert "## Accuracy\n\nNot known of these weights.\n" in card.content


SCORES = {"val/loss": 1.5, "val/top1": 0.5, "val/top5": 0.75, "val/images": 1000}
AVERAGED = {"val/ema_loss": 1.25, "val/ema_top1": 0.625}


def best(step, metric="val/top1"):
    return {"step": step, "metric": metric, "value": 0.25}


@pytest.mark.parametrize(
    ("part", "known", "sentence"),
    [
        ("model", {"scores": SCORES}, "top-1 0.5000, top-5 0.7500, cross-entropy 1.5000 on 1,000 validation images"),
        ("model", {"scores": SCORES | AVERAGED, "best": best(3)}, "top-1 0.5000, top-5"),
        ("ema", {"scores": SCORES | AVERAGED}, "top-1 0.6250, cross-entropy 1.2500 on 1,000 validation images, by"),
        ("ema", {"scores": SCORES}, "Not known of these weights."),
        ("model", {"scores": None, "best": best(2)}, "Not known of these weights."),  # another step's
        ("model", {"best": best(3)}, "top-1 0.2500 in validation, by the run's own evaluation at step 3."),
        ("ema", {"best": best(3)}, "Not known of these weights."),
    ],
)
def test_accuracy_is_that_of_the_weights(part, known, sentence, stored_weights):
    state = json.loads((stored_weights[1] / "step_00000003/state.json").read_text()) | known
    card = ModelCard(model_card(state, weights_out._timm_config(state), StepWeights(Path("unused"), part, {})))
    assert f"## Accuracy\n\n{sentence}" in card.content
    assert ("metrics" in card.data.to_dict()) == ("top-1" in sentence)
    assert ("moving average" in rows_of(card)["weights"]) == (part == "ema")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("timm:vit_tiny_patch16_224", "`timm:vit_tiny_patch16_224`"),
        ("/home/somebody/model.pt", "other weights (`checkpoint.init_from`)"),
    ],
)
def test_the_start_is_named_without_a_path(given, said, stored_weights):
    state = json.loads((stored_weights[1] / "step_00000003/state.json").read_text())
    state["recipe"] = {"checkpoint.init_from": given, "loss": {"name": "softmax", "bce_target_thresh": None}}
    rows = rows_of(ModelCard(model_card(state, weights_out._timm_config(state), StepWeights(Path("x"), "model", {}))))
    assert rows["started from"] == said
    assert rows["loss"] == '`name="softmax"`'
