"""Metrics and the console: what a run says of itself, and where."""

import launch

import io
import json
import logging
import re
import resource
import sys
import time

import pytest
import torch
from conftest import TINY, column, read_metrics, session_of, tiny_config

import schema
from observability import metrics
from runtime import run_folder
from runtime.run_folder import set_status, set_up_logging

# Metrics and the console


def test_metrics_tell_the_epoch_and_its_seconds(observed):
    """60 images in batches of 24: 2.5 steps an epoch."""
    _, folder = observed
    assert column(folder, "stub", "train/epoch") == pytest.approx([step / 2.5 for step in range(1, 9)], abs=1e-4)
    seconds = column(folder, "stub", "train/epoch_seconds")  # resumed at step 4, in mid-epoch, without its start
    assert [value is None for value in seconds] == [True, True, False, False, True, True, True, False]
    assert {row["train/gpu_utilization"] for row in read_metrics(folder / "stub").values()} <= {None, *range(2)}
    for key in ("train/memory_allocated_gib", "train/memory_reserved_gib"):
        assert key in read_metrics(folder / "stub")[1]


def test_an_epochs_seconds_are_those_between_its_first_and_last_step(monkeypatch, tmp_path):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    cfg = launch.load_config("L0_sanity", [*TINY, "data=synthetic", "global_batch_size=10"])
    sizes = schema.RunSizes.of(cfg, world_size=1, num_train_images=40, num_val_images=1)
    speed = metrics.Speed(session_of(tmp_path), cfg, sizes, start_step=0, flops_per_image=1.0)
    seen = []
    for step in range(1, 13):
        now += step
        speed.count(step)
        seen.append(speed.read()["train/epoch_seconds"])
    assert seen == [None, None, None, 10.0, 10.0, 10.0, 10.0, 26.0, 26.0, 26.0, 26.0, 42.0]


CARDS = {  # name as torch.cuda.get_device_name has it -> dense BF16 TFLOP/s of its datasheet
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "NVIDIA A10": 125,
    "NVIDIA A30": 165,
    "NVIDIA A40": 149.7,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
    # Cards of other rates with a name that begins so, a part of a card, and one without BF16.
    "NVIDIA A10G": None,
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 3080 Ti": None,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    "Tesla V100-SXM2-32GB": None,
}


@pytest.mark.parametrize("name", CARDS)
def test_the_rates_of_cards_are_their_datasheets(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    rate = metrics.peak_flops(torch.device("cuda", 0))
    assert rate == (CARDS[name] and pytest.approx(1e12 * CARDS[name]))
    assert metrics.peak_flops(torch.device("cpu")) is None


def test_the_rate_of_an_unknown_card_is_asked_for_and_can_be_given(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X1")

    def speed(*overrides):
        caplog.clear()
        cfg = tiny_config("data.path=unused", *overrides)
        sizes = schema.RunSizes.of(cfg, world_size=2, num_train_images=60, num_val_images=1)
        session = session_of(tmp_path, device=torch.device("cuda", 0), world_size=2)
        return metrics.Speed(session, cfg, sizes, start_step=0, flops_per_image=3e9).mfu_per_image_rate

    assert speed() is None
    assert "train/mfu stays null: the rate of NVIDIA X1 is not known here; give logger.peak_tflops" in caplog.text
    assert speed("logger.peak_tflops=60") == pytest.approx(3e9 / (60e12 * 2))
    assert caplog.text == ""


def test_utilization_is_a_share_or_null(monkeypatch):
    card = torch.device("cuda", 0)
    assert metrics.utilization(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 97)
    assert metrics.utilization(card) == 0.97

    def absent(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", absent)
    assert metrics.utilization(card) is None


def test_the_end_of_a_run_is_summed_up(observed):
    _, folder = observed
    log = (folder / "stub/train.log").read_text()
    rates = re.findall(r"done: steps (\d) to (\d) in \d+ s, ([\d,]+) images/s", log)
    assert [(first, last) for first, last, _ in rates] == [("1", "4"), ("5", "8")]
    best = json.loads((folder / "stub/checkpoints/best.json").read_text())
    where = folder / f"stub/checkpoints/step_{best['step']:08d}"
    assert f"best: top1 {best['value']:.4f} at step {best['step']}, in {where}\n" in log
    assert where.is_dir()
    assert log.count("24 = 12 images x 2 ranks x 1 microbatches; steps 5 to 8, 3.2 epochs of 60 images") == 1


def test_output_in_files_has_no_carriage_return(observed):
    """With real wandb, warnings and all."""
    _, folder = observed
    output = (folder / "output.txt").read_bytes()
    assert b"\r" not in output
    assert len(re.findall(rb"step 8/8  loss", output)) == 3  # offline, board, stub: rank 0 alone


def test_the_bar_on_a_terminal_has_an_eta(monkeypatch, tmp_path):
    class Terminal(io.StringIO):
        isatty = staticmethod(lambda: True)

    cfg = launch.load_config("L0_sanity", [*TINY, "data.path=unused", f"output_dir={tmp_path}"])
    shown = {}
    for kind in (Terminal, io.StringIO):
        monkeypatch.setattr(sys, "stderr", kind())
        logger = metrics.MetricLogger(cfg, session_of(tmp_path), start_step=2, total_steps=6, run_id="x")
        logger.show_bar(2, 6)
        logger.bar.mininterval = 0
        logger.count(24)
        logger.write(3, {"train/loss": 0.5})
        time.sleep(0.01)
        logger.count(24)
        logger.close(4, None)
        shown[kind] = sys.stderr.getvalue()
    assert re.search(r"\r.* 4/6 \[\d\d:\d\d<\d\d:\d\d, .*loss=0\.5000", shown[Terminal])
    assert shown[io.StringIO] == ""


def test_a_full_disk_ends_no_run(tmp_path, caplog):
    """Told once a file; what is there stays JSON, line by line, and goes on when there is room."""
    cfg = launch.load_config("L0_sanity", [*TINY, "data.path=unused", f"output_dir={tmp_path}"])
    session, file = session_of(tmp_path), tmp_path / "metrics.jsonl"
    logger = metrics.MetricLogger(cfg, session, start_step=0, total_steps=6, run_id="x")
    logger.write(1, {"train/loss": 0.5})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file can be longer than this: the next write ends in the middle, as on a disk that is full by then.
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, limits[1]))
    try:
        for step in (2, 3):
            logger.write(step, {"train/loss": 0.5})
            set_status(session, "running", step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logger.write(4, {"train/loss": 0.5})
    set_status(session, "running", 4)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 4]
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 4
    for name in ("metrics.jsonl", "status.json"):
        assert caplog.text.count(f"{name} cannot be written (") == 1
    assert caplog.text.count("the run goes on without") == 2
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_log_that_takes_no_more_lines_is_told_once(tmp_path, capsys):
    (tmp_path / "train.log").symlink_to("/dev/full")
    root, before = logging.getLogger(), list(logging.getLogger().handlers)
    set_up_logging(session_of(tmp_path))
    try:
        for step in range(3):
            logging.getLogger("x").info("step %d", step)
    finally:
        for handler in [handler for handler in root.handlers if handler not in before]:
            root.removeHandler(handler)
    console = capsys.readouterr().err
    assert console.count("train.log cannot be written: the run goes on without") == 1
    assert "Traceback" not in console
    assert "step 2" in console


def test_a_line_that_is_wrong_in_itself_is_not_told_as_a_full_disk(tmp_path, capsys, caplog):
    handler = run_folder._LogFileHandler(tmp_path / "train.log")
    handler.handle(logging.LogRecord("x", logging.INFO, __file__, 1, "step %d", ("five",), None))
    handler.close()
    assert "TypeError" in capsys.readouterr().err
    assert "cannot be written" not in caplog.text


def test_a_broken_status_holds_up_no_run(tmp_path, caplog):
    (tmp_path / "status.json").write_text("")
    set_status(session_of(tmp_path), "running", 3)
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 3
    assert "status.json is not JSON: passed over" in caplog.text
