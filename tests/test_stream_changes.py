"""What a resumed run says of its stream of samples when the config has changed, and how it counts samples."""

import launch

import dataclasses

import pytest
from conftest import TINY

import checkpoint
import schema


def config(*overrides):
    return launch.load_config("L0_sanity", [*TINY, "data=synthetic", *SYNTHETIC, *overrides])


SYNTHETIC = ["data.num_synthetic_train=60", "data.num_synthetic_val=4", "data.num_workers=0"]


def sizes(cfg):
    return schema.RunSizes.of(cfg, world_size=1, num_train_images=cfg.data.num_synthetic_train, num_val_images=4)


def lines(before, after):
    saved = {"step": 10, "stream": checkpoint._stream(before, sizes(before))}
    return checkpoint._stream_changes(saved, after, sizes(after))


def test_the_same_config_says_nothing():
    assert lines(config(), config("optimizer.lr=1e-4", "num_train_steps=9")) == []
    assert checkpoint._stream_changes({"step": 3}, config(), sizes(config())) == []  # an older checkpoint


@pytest.mark.parametrize(("batch", "what"), [(12, "120 samples are seen again"), (48, "240 samples are left out")])
def test_another_batch_says_what_is_left_out_or_seen_again(batch, what):
    (line,) = lines(config("global_batch_size=24"), config(f"global_batch_size={batch}"))
    assert f"global_batch_size was 24, is {batch}" in line
    assert f"step 11 begins at sample {10 * batch} of the stream, not at 240" in line
    assert what in line


@pytest.mark.parametrize(
    ("override", "text"),
    [("seed=1", "seed was 0, is 1"), ("data.num_synthetic_train=61", "num_train_images was 60, is 61")],
)
def test_another_seed_or_data_set_says_that_the_order_changes(override, text):
    (line,) = lines(config(), config(override))
    assert text in line
    assert "another order" in line


def test_samples_are_counted_over_changes_of_the_batch():
    resumed = checkpoint.Resumed(10, "id", None, samples=240)
    saver = object.__new__(checkpoint.Saver)
    saver.resumed, saver.step, saver.cfg = resumed, 15, dataclasses.replace(config(), global_batch_size=12)
    assert saver.num_samples() == 240 + 5 * 12
