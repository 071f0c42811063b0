"""modeling.py: how often torch.compile compiles the blocks of a model."""

import functools

import pytest
import torch
from configs import small, with_values
from torch._dynamo.testing import CompileCounter

import modeling


@pytest.fixture
def compilations(monkeypatch):
    """The counter of what torch.compile compiles here, which then runs as it is."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize(
    "values",
    [{}, {"drop_path_rate": 0.2, "init_values": 0.1}, {"qk_norm": True, "proj_drop_rate": 0.1, "fused_attn": False}],
    ids=["plain", "drop_path", "dropout"],
)
def test_equal_blocks_are_compiled_once(compilations, values, recompute):
    """Once to train, once more to evaluate: not once a block, which takes a deep model minutes."""
    cfg = with_values(small(), model={"depth": 10, **values})
    model = modeling.build_model(cfg.model, cfg.fp8_config)
    model.init_weights(0)
    modeling.prepare_blocks(model, activation_checkpointing=recompute, compile=True)
    images = torch.rand(2, cfg.model.in_chans, cfg.model.img_size, cfg.model.img_size)
    for _ in range(2):
        model(images).sum().backward()
    trained = compilations.frame_count
    model.eval()
    with torch.no_grad():
        model(images)
    assert (trained, compilations.frame_count) == (1, 2)
