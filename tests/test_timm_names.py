"""Every `vit_*` and `eva02_*` name of timm's: equal in names, logits and gradients, or refused for a reason."""

import collections
import re

import pytest
import timm
import timm_names
import torch
from conftest import ROOT
from test_vit import assert_close, outputs_and_gradients, randomize

from interop.timm_models import refusal
from vit import VisionTransformer

NAMES = timm.list_models("vit_*") + timm.list_models("eva02_*")


@pytest.fixture(scope="module")
def refused():
    """Name -> why."""
    return {name: reason for name in NAMES if (reason := refusal(name))}


@pytest.fixture(scope="module")
def expressed(refused):
    return [name for name in NAMES if name not in refused]


def test_every_name_has_timms_tensors(expressed):
    """In timm's widths, two blocks deep."""
    for name in expressed:
        cfg, sizes = timm_names.shallow(timm_names.config_of(name))
        with timm_names.on_meta():
            ours = VisionTransformer(cfg)
            theirs = timm.create_model(name, num_classes=cfg.num_classes, **sizes)
        found, wanted = ({key: value.shape for key, value in m.state_dict().items()} for m in (ours, theirs))
        assert found == wanted, name
        assert list(found) == list(wanted), name


def test_logits_and_gradients_of_each_architecture_are_timms(expressed):
    """Of each set of options, by the first name that has it, in a small size."""
    names = {timm_names.architecture(timm_names.config_of(name)): name for name in reversed(expressed)}
    assert len(names) > 40
    for name in names.values():
        cfg, sizes = timm_names.small(timm_names.config_of(name))
        theirs = timm.create_model(name, **sizes)
        randomize(theirs)
        ours = VisionTransformer(cfg)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        x = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(1))
        actual, expected = (outputs_and_gradients(model.eval(), x) for model in (ours, theirs))
        assert expected["logits"].std() > 1e-2, name
        assert_close(actual, expected)
        if cfg.dynamic_img_size:
            larger = torch.randn(2, 3, 32, 24, generator=torch.Generator().manual_seed(1))
            torch.testing.assert_close(ours(larger), theirs(larger), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(timm.__version__ != "1.0.31", reason="the table counts the names of timm 1.0.31")
def test_table_of_names_in_the_docs(refused, expressed):
    """docs/models.md has a row for each class of names, with their number and an example of each."""
    rows = {}
    for line in (ROOT / "docs/models.md").read_text().splitlines():
        if match := re.fullmatch(r"\| (.+?) \| +(\d+) \| .*\|", line):
            rows[match[1]] = int(match[2])
    vits = [name for name in NAMES if name.startswith("vit_")]
    counts = collections.Counter(reason for name, reason in refused.items() if name in vits)
    counts.update(kind_of(name) for name in expressed)
    assert rows == counts


def kind_of(name):
    """The row of a name that is expressed."""
    cfg = timm_names.config_of(name)
    if name.startswith("eva02_"):
        return "`eva02_*`"
    if cfg.is_eva:
        return "`vit_*`, as `Eva`"
    if cfg.rel_pos_type:
        return "`vit_relpos_*`, `vit_srelpos_*`, as `VisionTransformerRelPos`"
    if cfg.attn_layer == "diff":
        return "`vit_*`, differential attention (`attn_layer`)"
    return "`vit_*`, as `VisionTransformer`" if cfg.block_fn == "Block" else f"`vit_*`, `{cfg.block_fn}`"
