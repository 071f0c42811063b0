"""tools/peers.py: the peers of `benchmark.py compare`, as far as they can be seen without a GPU."""

import launch  # noqa: F401  (before torch)

import os

import pytest
import timm

import modeling
import peers


@pytest.mark.parametrize("kind", ["timm", "hf", "torchvision"])
def test_every_parameter_has_its_counterpart_in_timms_model(kind):
    """By name and number of values; Hugging Face's queries, keys and values are thirds of timm's one."""
    cfg = peers.config("base_patch16", 2, "compile=false", f"model.implementation={'hf' if kind == 'hf' else 'timm'}")
    model = (
        peers.torchvision_model(cfg.model) if kind == "torchvision" else modeling.build_model(cfg.model, cfg.fp8_config)
    )
    wanted = dict(timm.create_model("vit_base_patch16_224", depth=2).named_parameters())
    seen = 0
    for name, parameter in model.named_parameters():
        part = peers._part(wanted, peers.common_name(name))
        assert part.numel() == parameter.numel(), name
        seen += part.numel()
    assert seen == sum(p.numel() for p in wanted.values())


def test_a_row_has_a_process_of_its_own():
    assert peers.in_own_process(os.getpid) != os.getpid()
    assert peers.in_own_process(lambda x: x + 1, 1) == 2
    assert peers.in_own_process(lambda: 1 // 0) == {"error": "ZeroDivisionError: integer division or modulo by zero"}
    assert peers.in_own_process(lambda: os._exit(3)) == {"error": "the process died"}


def test_a_table_and_a_picture(tmp_path):
    """Bars where a model was measured once, curves over the batch size; a row that failed says why."""
    once = {"images_per_second": 10.0, "share_of_gemm": 0.5}
    rows = [{"model": "a", "batch": 8, "variant": variant} | once for variant in ("x", "y")]
    rows += [{"model": "b", "batch": batch, "variant": "x"} | once for batch in (8, 16)]
    rows += [{"model": "a", "batch": 8, "variant": "z", "error": "OutOfMemoryError: no"}]
    peers.draw(rows, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert "OutOfMemoryError" in peers.table(rows).splitlines()[-1]


def test_flops_of_a_step_are_three_forward_passes():
    """ViT-B/16: 17.58 G multiply-adds an image (timm's results table: 17.58)."""
    assert peers.flops_per_step("base_patch16", 1, None) / 3 / 2e9 == pytest.approx(17.58, rel=2e-3)
