"""tools/doctor.py: what it finds broken, and what it says to do."""

import re

import numpy as np
import pytest
import torch

import doctor
import vit_te

# tools/doctor.py


def test_the_doctor_of_two_ranks(observed):
    """The table once, by rank 0; every check is there; a wrong setting is a warning with its remedy."""
    outcomes, _ = observed
    first, second = (rank["metrics"] for rank in outcomes["doctor"])
    assert (first["code"], second["code"], second["shown"]) == (0, 0, ""), first["shown"]
    assert first["times"]["shown"] > second["times"]["left"]  # when the other ranks have nothing more to say
    table = first["shown"]
    for check in ("Python", "packages", "train_ddp.py", "train_fsdp2.py", "train_mfsdp.py", "data", "output_dir"):
        assert len(re.findall(rf"^{check} ", table, re.MULTILINE)) == 1, check
    assert re.search(r"^all-reduce +ok +gloo, 2 ranks: 16 MiB in [\d.]+ ms, [\d.]+ GB/s a link$", table, re.MULTILINE)
    assert re.search(r"60 training and 23 validation images, 6 classes; one process", table)
    assert re.search(r"^CPU +warn .*\n +.*-> lower data.num_workers to", table, re.MULTILINE)
    assert table.endswith("0 broken, 1 warnings\n") or "/dev/shm" in table


def test_the_doctor_alone_exits_with_1_if_something_is_broken(monkeypatch, capsys, tmp_path):
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.main([f"data.path={tmp_path}", f"output_dir={tmp_path}"]) == 1
    shown = capsys.readouterr().out
    problem = rf"^data +BROKEN +data.path={tmp_path}: there is no folder .*\n( +.*\n)? +-> "
    assert re.search(problem, shown, re.MULTILINE)
    assert re.search(r"^all-reduce +ok +\w+ starts, alone", shown, re.MULTILINE)
    assert shown.endswith("1 broken, 0 warnings\n")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("flags", [["--config-dir", "{}", "--config-name", "mine"], ["-cd={}", "-cn=mine"]])
def test_the_doctor_takes_the_entrypoints_flags(flags, monkeypatch, capsys, tmp_path):
    """And says what each script would to them: a key of one script's is for that one."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("sys.argv", ["doctor.py"])
    (tmp_path / "mine.yaml").write_text(
        "defaults: [L0_sanity, _self_]\nddp: {bucket_cap_mb: 9}\nglobal_batch_size: 7\n"
    )
    places = [f"data.path={tmp_path}", f"output_dir={tmp_path}"]
    doctor.main([*places, "fsdp2.reshard_after_forward=false", *(flag.format(tmp_path) for flag in flags)])
    shown = capsys.readouterr().out
    assert re.search(r"^train_ddp.py +note +would refuse: fsdp2.reshard_after_forward=false does nothing", shown, re.M)
    said = r"7 images x 1 ranks.*; without effect in this run: ddp.bucket_cap_mb=9 in train_fsdp2.py"
    assert re.search(rf"^train_fsdp2.py +ok +{said}", shown, re.M)


def test_the_doctor_compares_versions(tmp_path):
    (tmp_path / "requirements.txt").write_text("torch>=99\nnumpy>=1\nno-such-thing>=1\nabsent>=2  # optional: why\n")
    (tmp_path / "requirements-gpu.txt").write_text("-r requirements.txt\ntransformer-nothing>=2\n")
    rows = {row.check: row for row in doctor.check_packages(tmp_path)}
    assert rows["torch"].state == "BROKEN"
    assert rows["torch"].found.endswith(" is installed")
    assert rows["torch"].remedy == "pip install 'torch>=99'"
    states = [rows[name].state for name in ("no-such-thing", "absent", "transformer-nothing")]
    assert states == ["BROKEN", "note", "note"]
    assert rows["packages"].found == f"numpy {np.__version__}"


def test_the_doctor_finds_two_cudnns(tmp_path):
    for folder in ("system", "torch/lib", "home/lib64"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libcudnn.so.9").write_text(folder)
    (tmp_path / "link").symlink_to(tmp_path / "torch/lib")  # the same one by another name
    environment = {"LD_LIBRARY_PATH": f"{tmp_path / 'link'}:{tmp_path / 'nowhere'}", "CUDNN_HOME": f"{tmp_path}/home"}
    ldconfig = f"\tlibcudnn.so.9 (libc6,x86-64) => {tmp_path}/system/libcudnn.so.9\n\tlibc.so.6 => /lib/libc.so.6\n"
    found = doctor.find_cudnn(environment, ldconfig, [tmp_path / "torch/lib"])
    assert [file.parent.relative_to(tmp_path).as_posix() for file in found] == ["torch/lib", "home/lib64", "system"]
    versions = {"torch/lib": "9.19.0", "system": "9.14.0", "home/lib64": "9.19.0"}
    (row,) = doctor.check_cudnn(found, lambda file: versions[file.read_text()])
    assert row.state == "warn"
    assert "9.14.0 in" in row.found
    assert "LD_LIBRARY_PATH=" in row.remedy
    (row,) = doctor.check_cudnn(found[:2], lambda file: versions[file.read_text()])
    assert row.state == "ok"


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU")
def test_the_doctor_has_transformer_engine_imported_without_a_gpu(monkeypatch):
    """In the image on a machine without one: its questions to the card would raise."""

    monkeypatch.setattr(doctor, "_installed", lambda: {"transformer_engine": "2.20.2"})
    monkeypatch.setattr(vit_te, "transformer_engine", object)
    (row,) = doctor.check_transformer_engine()
    assert "without a GPU" in row.found


def test_the_doctor_tells_nodes_apart(monkeypatch):
    same, there = doctor.Row("Python", "ok", "3.12"), doctor.Row("GPU 0", "BROKEN", "off the bus", "dmesg")
    versions = [doctor.Row("packages", "ok", text) for text in ("torch 2.11", "torch 2.14")]
    everyone = [("a", [same, versions[0]]), ("a", [same]), ("b", [same, there, versions[1]])]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda out, mine: out.__setitem__(slice(None), everyone)
    )
    rows = {row.check: row.state for row in doctor.together([])}
    assert rows == {
        "Python": "ok", "packages (a)": "ok", "packages (b)": "ok", "GPU 0 (b)": "BROKEN", "nodes": "BROKEN"
    }  # fmt: skip
