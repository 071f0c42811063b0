"""modeling.py: how often torch.compile compiles the blocks of a model, and what recomputation does to numbers."""

import functools
import types

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


@pytest.mark.parametrize("recompute", [False, "selective", True])
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


def gradients(cfg, recompute, *, compile=False):
    """Every gradient of a forward and backward pass with that recomputation, the logits, and which layers ran twice."""
    model = modeling.build_model(cfg.model, cfg.fp8_config)
    model.init_weights(0)
    modeling.prepare_blocks(model, activation_checkpointing=recompute, compile=compile)
    calls = {"attn.proj": 0, "mlp.fc1": 0, "mlp.fc2": 0}
    for name, module in model.named_modules():
        layer = name.split(".", 2)[-1]
        if name.startswith("blocks.") and layer in calls and not compile:
            module.register_forward_hook(lambda *_, layer=layer: calls.update({layer: calls[layer] + 1}))
    torch.manual_seed(1)
    images = torch.rand(4, cfg.model.in_chans, cfg.model.img_size, cfg.model.img_size)
    logits = model(images)
    logits.square().sum().backward()
    passes = {layer: number / cfg.model.depth for layer, number in calls.items()}
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters()}, passes


PAPER = {"class_token": True, "global_pool": "token"}  # what Hugging Face's model can be


@pytest.mark.parametrize(
    ("values", "fc2"),
    [
        ({"drop_path_rate": 0.3, "init_values": 0.1}, 1),
        ({"proj_drop_rate": 0.2, "attn_drop_rate": 0.1, "qk_norm": True}, 2),
        ({"implementation": "timm", "drop_path_rate": 0.3}, 1),
        ({"implementation": "hf", **PAPER}, 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_recomputing_the_mlps_changes_no_digit(values, fc2):
    """And leaves attention alone, and the MLP's last product, unless dropout after it wants its mask again."""
    cfg = with_values(small(), model={"depth": 3, **values})
    (want, once), (got, passes) = (gradients(cfg, recompute) for recompute in (False, "selective"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    if values.get("implementation") != "hf":  # which has other names
        assert once == {"attn.proj": 1, "mlp.fc1": 1, "mlp.fc2": 1}
        assert passes == {"attn.proj": 1, "mlp.fc1": 2, "mlp.fc2": fc2}


@pytest.mark.slow
def test_compiled_blocks_recompute_their_mlps():
    cfg = with_values(small(), model={"depth": 2, "drop_path_rate": 0.3, "init_values": 0.1})
    (want, _), (got, _) = (gradients(cfg, recompute, compile=True) for recompute in (False, "selective"))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=name)


class FusedMlp(torch.nn.Module):
    """In the place of TransformerEngine's, which needs a GPU: it has a switch of its own."""

    checkpoint = False


def test_transformer_engines_fused_mlp_recomputes_by_itself(monkeypatch):
    """Its MLP with dropout, and a whole block, go through TransformerEngine's checkpoint, which knows FP8's scales."""

    def recompute(function, *args, use_reentrant):
        return function, args, use_reentrant

    engine = types.SimpleNamespace(LayerNormMLP=FusedMlp, checkpoint=recompute)
    monkeypatch.setattr(modeling.vit_te, "transformer_engine", lambda: engine)

    def block(mlp):
        module = torch.nn.Module()
        module.mlp, module.forward = mlp, "the block's"
        return module

    blocks = [block(FusedMlp()), block(torch.nn.Linear(1, 1))]
    cfg = types.SimpleNamespace(transformer_engine=True)
    model = types.SimpleNamespace(cfg=cfg, shard_units=lambda: blocks)
    forward = blocks[1].mlp.forward
    modeling.prepare_blocks(model, activation_checkpointing="selective", compile=False)
    assert blocks[0].mlp.checkpoint is True
    assert "forward" not in vars(blocks[0].mlp)
    assert blocks[1].mlp.forward("x") == (forward, ("x",), False)
    assert [block.forward for block in blocks] == ["the block's"] * 2
