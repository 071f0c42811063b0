"""tools/export.py: the file computes what the model does, or is not there."""

import launch  # noqa: F401  (before torch)

import importlib.util
import json
import shutil

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from weight_files import drawn

import export
import infer


@pytest.fixture(scope="module")
def model(trained_run, tmp_path_factory):
    """A folder of timm's with weights at which every parameter matters: a run of six steps has a head near zero."""
    folder = shutil.copytree(trained_run / "checkpoints/final_model", tmp_path_factory.mktemp("model") / "final_model")
    built, _ = infer.load_model(folder)
    save_file(drawn(built).state_dict(), folder / "model.safetensors")
    return folder


def run(capsys, *arguments):
    """Exit code, what was printed, and the one line of a complaint."""
    try:
        export.main([*map(str, arguments)])
        code = 0
    except SystemExit as exit_:
        code = exit_.code
    printed, errors = capsys.readouterr()
    if code:
        (line,) = errors.splitlines()
        assert line.startswith("error: ")
        return code, line
    return code, printed


def pixels(number):
    return torch.randn(number, 3, 16, 16, generator=torch.Generator().manual_seed(number))


def settings_are_the_evaluations(text, model):
    found = json.loads(text)
    assert found["classes"] == [f"class_{letter}" for letter in "abcdef"]
    data = json.loads((model / "config.json").read_text())["pretrained_cfg"]
    for key in ("input_size", "mean", "std", "interpolation", "crop_pct"):
        assert found[key] == data[key]
    assert found["exif_orientation"] is False


@torch.no_grad()
def test_a_program_of_torch_computes_the_models_logits(model, trained_run, image_folder, tmp_path, capsys):
    """For any batch; from an exported folder and from a checkpoint; on images of a folder of classes."""
    output = tmp_path / "model.pt2"
    code, printed = run(capsys, model, "--format", "torch", "--output", output, "--images", image_folder / "val")
    assert code == 0
    assert printed.startswith(f"wrote {output} (torch, ")
    assert "on 23 images its top-1 is the model's" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    settings = {export.SETTINGS: ""}
    program = torch.export.load(output, extra_files=settings).module()
    want, _ = infer.load_model(model)
    for number in (1, 2, 7):
        torch.testing.assert_close(program(pixels(number)), want(pixels(number)), rtol=0, atol=1e-5)
    settings_are_the_evaluations(settings[export.SETTINGS], model)

    options = ["--format", "torch", "--output", tmp_path / "again.pt2", "--images", image_folder / "val"]
    assert run(capsys, trained_run / "checkpoints", *options)[0] == 0
    want, _ = infer.load_model(trained_run / "checkpoints")
    found = torch.export.load(tmp_path / "again.pt2").module()
    torch.testing.assert_close(found(pixels(3)), want(pixels(3)), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("largest", [export.ONE_FILE, 0])
@torch.no_grad()
def test_an_onnx_file_computes_the_models_logits(model, image_folder, tmp_path, monkeypatch, capsys, largest):
    """Also with its weights in a file beside it, where they are too many for one."""
    for name in export.ONNX_PACKAGES:
        pytest.importorskip(name)
    import onnx
    import onnxruntime

    monkeypatch.setattr(export, "ONE_FILE", largest)
    output = tmp_path / "model.onnx"
    code, printed = run(capsys, model, "--format", "onnx", "--output", output, "--images", image_folder / "val")
    assert code == 0, printed
    files = ["model.onnx"] if largest else ["model.onnx", "model.onnx.data"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    onnx.checker.check_model(str(output), full_check=True)
    session = onnxruntime.InferenceSession(output, providers=["CPUExecutionProvider"])
    assert [(each.name, each.shape) for each in session.get_inputs()] == [("images", ["batch", 3, 16, 16])]
    assert [(each.name, each.shape) for each in session.get_outputs()] == [("logits", ["batch", 6])]
    want, _ = infer.load_model(model)
    for number in (1, 2, 7):
        (found,) = session.run(None, {"images": pixels(number).numpy()})
        torch.testing.assert_close(torch.from_numpy(found), want(pixels(number)), rtol=0, atol=1e-5)
    settings_are_the_evaluations(session.get_modelmeta().custom_metadata_map[export.SETTINGS], model)


class Altered(torch.nn.Module):
    """Another answer for images that are white."""

    def __init__(self, model, change):
        super().__init__()
        self.model, self.change = model, change

    def forward(self, images):
        is_white = (images.amin(dim=(1, 2, 3)) > 0.5)[:, None]
        return torch.where(is_white, self.change(self.model(images)), self.model(images))


@pytest.mark.parametrize("change", [lambda logits: logits * (1 + 2e-4), lambda logits: logits * torch.nan])
def test_what_computes_otherwise_is_refused_and_not_there(model, tmp_path, monkeypatch, capsys, change):
    """By the name of the first image that differs."""
    folder, output = tmp_path / "images", tmp_path / "out/model.pt2"
    folder.mkdir()
    output.parent.mkdir()
    for i in range(20):
        Image.new("RGB", (20, 20), (255, 255, 255) if i in (7, 9) else (i, 50, 60)).save(folder / f"{i:02d}.png")

    def write(model, *arguments):
        export.write_torch(Altered(model, change), *arguments)

    monkeypatch.setitem(export.FORMATS, "torch", (".pt2", write, export.load_torch))
    code, line = run(capsys, model, "--format", "torch", "--output", output, "--images", folder)
    assert code == 1
    assert "07.png: the exported file's logits differ by " in line
    assert "at most 0.0001 is allowed" in line
    assert list(output.parent.iterdir()) == []


def test_images_are_checked_in_batches_and_alone(model, image_folder):
    built, config = infer.load_model(model)
    images, reader = export.images_of([image_folder / "val"], built), infer.Reader(built, config)
    sizes = []

    def exported(pixels, wrong_for):
        sizes.append(len(pixels))
        return built(pixels) + (len(pixels) == wrong_for)

    assert export.compare(built, lambda pixels: exported(pixels, None), images, reader) < 1e-5
    assert sizes == [5, 1, 1, 1, 1, 1] * 4 + [3]
    for number, image in ((1, 0), (3, 20), (5, 0)):
        with pytest.raises(export.RunError, match=f"in a batch of {number}; at most") as caught:
            export.compare(built, lambda pixels, number=number: exported(pixels, number), images, reader)
        assert str(caught.value).startswith(f"{images[image][0]}: the exported file's logits differ by ")


def test_the_top_1_must_be_the_same():
    """Where the logits differ by less than is allowed, too."""
    images = [("a", bytes), ("b", bytes)]
    want = torch.tensor([[1.0, 0.5], [1.0, 1.00001]])
    assert export._difference(images, want, want.clone(), "a batch of 2") == 0
    with pytest.raises(export.RunError, match="b: the exported file's top-1 is output 0, not 1, in a batch of 2"):
        export._difference(images, want, torch.tensor([[1.0, 0.5], [1.00001, 1.0]]), "a batch of 2")
    assert export._difference(images, torch.zeros(2, 2), torch.zeros(2, 2), "a head that is new") == 0


def test_a_batch_that_the_file_cannot_take_is_one_line(model, image_folder, tmp_path, monkeypatch, capsys):
    def write(model, example, file, settings):
        program = torch.export.export(model, (torch.zeros(5, *example.shape[1:]),))
        torch.export.save(program, file)

    monkeypatch.setitem(export.FORMATS, "torch", (".pt2", write, export.load_torch))
    options = ["--format", "torch", "--output", tmp_path / "model.pt2", "--images", image_folder / "val"]
    code, line = run(capsys, model, *options)
    assert code == 1
    assert "the exported file cannot take 1 image (" in line

    def fail(*_):
        raise NotImplementedError("no such\noperator")

    monkeypatch.setitem(export.FORMATS, "torch", (".pt2", fail, export.load_torch))
    code, line = run(capsys, model, *options)
    assert code == 1
    assert "the model cannot be exported as torch (NotImplementedError: no such)" in line
    assert list(tmp_path.iterdir()) == []


def test_images_are_files_folders_or_shards_and_spread_evenly(model, made_shards, image_folder, monkeypatch):
    built, _ = infer.load_model(model)
    files = sorted((image_folder / "val").rglob("*.jpg"))
    for paths in ([image_folder / "val"], files, [*files[:3], image_folder / "val/class_a"] * 4):
        assert {name for name, _ in export.images_of(paths, built)} <= {str(file) for file in files}
    shards = export.images_of([made_shards / "val"], built)
    assert len(shards) == 23
    assert {read() for _, read in shards} == {file.read_bytes() for file in files}
    monkeypatch.setattr(export, "MOST", 17)
    spread = [name for name, _ in export.images_of([image_folder / "val"], built)]
    assert spread == [str(files[i * 23 // 17]) for i in range(17)]


@pytest.mark.parametrize(
    ("change", "code", "complaint"),
    [
        ({"--images": None}, 2, "--images"),
        ({"--images": "few"}, 2, "--images are 15, too few to check an export with: give 16 or more"),
        ({"--images": "none"}, 2, "none is not there"),
        ({"--images": "bad"}, 1, "cannot read bad/99.png: not an image of a known format"),
        ({"--format": "onnx"}, 2, "--output out/model.pt2 does not end in .onnx, as --format onnx does: rename it"),
        ({"--format": "onnx", "--output": "out/model.onnx"}, 2, "pip install onnx onnxscript onnxruntime"),
        ({"--format": "tflite"}, 2, "invalid choice: 'tflite'"),
        ({"--output": "there.pt2"}, 2, "there.pt2 is there already: give a new --output"),
        ({"--output": "gone/model.pt2"}, 2, "gone is no folder"),
        ({"MODEL": "few"}, 2, "few is no model of ours or timm's"),
        ({"MODEL": "timm:vit_tny_patch16_224"}, 2, "timm has no such model: did you mean vit_tiny_patch16_224?"),
    ],
)
def test_mistakes_are_one_line(change, code, complaint, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, number in (("few", 15), ("enough", 16), ("bad", 16)):
        (tmp_path / name).mkdir()
        for i in range(number):
            Image.new("RGB", (20, 20), (i, 2, 3)).save(tmp_path / name / f"{i:02d}.png")
    (tmp_path / "bad/99.png").write_text("no image")
    (tmp_path / "there.pt2").write_text("mine")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    options = {"MODEL": model, "--format": "torch", "--output": "out/model.pt2", "--images": "enough"} | change
    source = options.pop("MODEL")
    given = [part for pair in options.items() if pair[1] is not None for part in pair]
    found, line = run(capsys, source, *given)
    assert found == code
    assert complaint in line
    assert list((tmp_path / "out").iterdir()) == []
    assert (tmp_path / "there.pt2").read_text() == "mine"


@torch.no_grad()
def test_a_model_of_timms_by_its_name(image_folder, tmp_path, monkeypatch, capsys):
    """The download stands in for timm's."""
    weights = drawn(timm.create_model("vit_tiny_patch16_224", depth=1)).state_dict()
    torch.save(weights, tmp_path / "w.pth")
    create, more = timm.create_model, {"depth": 1, "pretrained_cfg_overlay": {"file": str(tmp_path / "w.pth")}}
    monkeypatch.setattr(timm, "create_model", lambda *a, **k: create(*a, **k, **more))
    output = tmp_path / "model.pt2"
    options = ["--format", "torch", "--output", output, "--images", image_folder / "val"]
    code, printed = run(capsys, "timm:vit_tiny_patch16_224", *options)
    assert code == 0, printed
    settings = {export.SETTINGS: ""}
    torch.export.load(output, extra_files=settings)
    found = json.loads(settings[export.SETTINGS])
    assert found["mean"] == [0.5, 0.5, 0.5]
    assert found["input_size"] == [3, 224, 224]
    assert len(found["classes"]) == 1000
