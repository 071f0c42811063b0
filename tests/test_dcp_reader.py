"""Checkpoints that nobody vouches for: nothing that is planted in one runs, whatever opens it."""

import launch  # noqa: F401  (before torch)

import enum
import os
import pathlib
import pickle
import re
import runpy
import shutil
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, error_of
from test_layers import modules
from weight_files import Planted, plant

import evaluate
import infer
from interop import weights_in
from interop.dcp_reader import Reader
from interop.step_weights import read_step_weights, stored_tensors


def convert(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["convert_checkpoint.py", *arguments])
        runpy.run_path(str(ROOT / "tools/convert_checkpoint.py"), run_name="__main__")


@pytest.fixture
def planted(stored_weights, tmp_path):
    """A whole checkpoint with a command in its index, and the file that the command makes if it runs."""
    folder, proof = tmp_path / "step_00000012", tmp_path / "it-ran"
    shutil.copytree(stored_weights[1] / folder.name, folder)
    plant(folder, proof)
    return folder, proof


def test_torchs_own_reader_runs_what_is_planted(planted):
    """So that the tests below can fail."""
    folder, proof = planted
    dcp.FileSystemReader(folder).read_metadata()
    assert proof.exists()


@pytest.mark.parametrize("above", [False, True], ids=["the folder", "the folder above"])
def test_no_program_runs_what_is_planted(planted, above, tmp_path, capsys):
    folder, proof = planted
    model = str(folder.parent if above else folder)
    complaint = (
        f"{folder}/.metadata is refused: it names {os.system.__module__}.system, which is not a class of a check"
    )
    for program in (
        lambda: infer.main([model, str(tmp_path)]),
        lambda: evaluate.main([model, str(tmp_path)]),
        lambda: convert(model, str(tmp_path / "out"), "--format", "timm"),
        lambda: convert(model, str(tmp_path / "out"), "--format", "hugging-face", "--raw"),
    ):
        with pytest.raises(SystemExit) as caught:
            program()
        assert caught.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {complaint}")
    assert error_of(weights_in.read, model).startswith(f"checkpoint.init_from={model}: {complaint}")
    assert not proof.exists()


def named(module, name):
    """A pickle that names it, by the two lengths of opcodes."""
    short = pickle.PROTO + b"\x04" + b"".join(b"\x8c" + bytes([len(s)]) + s.encode() for s in (module, name))
    return [short + pickle.STACK_GLOBAL + pickle.STOP, f"c{module}\n{name}\n.".encode()]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.serialization", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
        ("pathlib", "os.system"),
        ("pathlib", "Path"),
    ],
)
def test_an_index_names_classes_of_an_index_only(module, name, tmp_path):
    """Also not what those modules import, which a name with a dot reaches."""
    for content in named(module, name):
        (tmp_path / ".metadata").write_bytes(content)
        assert f"it names {module}.{name}, which is not a class" in error_of(Reader(tmp_path).read_metadata)


def test_an_object_in_place_of_a_tensor_is_not_loaded(tmp_path):
    """DCP unpickles what the index calls an object, without limits, when it is asked for that key."""
    proof, folder = tmp_path / "it-ran", tmp_path / "step_00000001"
    dcp.save({"model": {"a": Planted(proof), "b": torch.ones(2)}}, checkpoint_id=folder, no_dist=True)
    assert list(stored_tensors(folder)) == ["model.b"]
    assert read_step_weights(folder)[0].keys() == {"b"}
    wanted = {"model": {"a": torch.zeros(2)}}
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key .*: model\.a"):
        dcp.load(wanted, storage_reader=Reader(folder), no_dist=True)
    assert not proof.exists()
    dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    assert proof.exists()


def test_an_index_reads_as_torch_reads_it(stored_weights, tmp_path):
    """Types of numbers, objects and paths; one written by Python 3.13 names pathlib._local."""
    types = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)
    tensors = {str(dtype): torch.empty(2, 1, dtype=dtype) for dtype in types}
    dcp.save({"all": tensors}, checkpoint_id=tmp_path, no_dist=True)
    for folder in (tmp_path, stored_weights[1] / "step_00000012"):
        want, got = dcp.FileSystemReader(folder).read_metadata(), Reader(folder).read_metadata()
        assert got.state_dict_metadata == want.state_dict_metadata
        assert got.storage_data == want.storage_data
        assert got.planner_data == want.planner_data
        assert str(got.storage_meta.checkpoint_id) == str(want.storage_meta.checkpoint_id) == str(folder)
    content = pickle.dumps(want, protocol=2).replace(b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath")
    (tmp_path / ".metadata").write_bytes(content)
    assert b"pathlib._local" in content
    assert Reader(tmp_path).read_metadata().storage_meta.checkpoint_id == pathlib.PurePosixPath(folder)


class OtherPython(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.2 does, and 3.11.7 does not."""

    def reducer_override(self, thing):
        return (getattr, (type(thing), thing.name)) if isinstance(thing, enum.Enum) else NotImplemented


def test_an_index_of_a_python_that_writes_getattr_is_read_and_getattr_gets_nothing_else(stored_weights, tmp_path):
    want = Reader(stored_weights[1] / "step_00000012").read_metadata()
    file = tmp_path / ".metadata"
    with file.open("wb") as stream:
        OtherPython(stream).dump(want)
    assert b"getattr" in file.read_bytes()
    assert Reader(tmp_path).read_metadata().state_dict_metadata == want.state_dict_metadata
    file.write_bytes(b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nV__init__\ntR.")
    assert "it names builtins.getattr of no enumeration" in error_of(Reader(tmp_path).read_metadata)


def test_nothing_of_ours_reads_a_checkpoint_otherwise():
    files = [*modules(ROOT).values(), *(ROOT / "tools").glob("*.py")]
    assert len(files) > 40
    for file in files:
        text = file.read_text()
        if file.name != "dcp_reader.py":
            assert not re.search(r"FileSystemReader|pickle\.loads?\(|Unpickler\b|dcp_to_torch_save", text), file
        for call in re.findall(r"dcp\.load\(.*", text):
            assert "storage_reader=Reader(" in call, f"{file}: {call}"
