"""Write a model as a file that needs none of this code: torch.export's program, or ONNX.

    python tools/export.py runs/demo/checkpoints --format torch --output demo.pt2 --images data/fashion_mnist_demo/val
    python tools/export.py MODEL --format onnx --output model.onnx --images /data/imagenet/val

MODEL as for infer.py. The file computes in float32: normalised images (B, C, Y, X), any B, to logits (B, classes). How
images become that, and the classes' names, are in it as settings.json: an extra file of the program, a property of the
ONNX model. --images are validation images to check the file with before it has its name: files, folders, or a folder of
tar shards; of more than 256, as many are taken, evenly spread. Of every image the logits must be those of MODEL, within
1e-4 of its largest, and the top-1 the same, in batches of 5 and, for the first 20, alone. If not, there is no file, and
the exit code is 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import Parser, exit_with

import contextlib
import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import timm.data
import torch

import evaluate
import infer
from input_pipeline.decode import ImageError
from runtime.checkpoint_places import model_path
from schema import ConfigError, RunError

Image = tuple[str, Callable[[], bytes]]  # its name, and a way to read it
Logits = Callable[[torch.Tensor], torch.Tensor]
SETTINGS = "settings.json"
TOLERANCE = 1e-4  # of an image's logits, over the largest of them; sums in another order give a few 1e-6
FEWEST, MOST, BATCH, ALONE = 16, 256, 5, 20  # images of a check
ONE_FILE = 1_900_000_000  # bytes of weights that an ONNX file holds itself: protobuf ends at 2 GiB
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@contextlib.contextmanager
def attempt(what: str) -> Iterator[None]:
    """A context in which whatever a library raises becomes one line.

    Raises:
        RunError: it raised; the text begins with `what`.
    """
    try:
        yield
    except OSError:  # its own words are better: a full disk
        raise
    except Exception as error:  # exporters and runtimes raise anything, classes of their own from C++, too
        reason = (str(error).strip().splitlines() or [""])[0]
        raise RunError(f"{what} ({type(error).__name__}: {reason})") from error


def settings_of(model: infer.TimmModel, config: dict[str, Any]) -> str:
    """What turns an image into the model's input, and an output into a name, as JSON."""
    decoding = config.get("decoding") or {}
    data = timm.data.resolve_model_data_config(model)
    return json.dumps({**data, **decoding, "classes": infer.class_names(model)})


def write_torch(model: torch.nn.Module, example: torch.Tensor, file: Path, settings: str) -> None:
    """The program of torch.export, with its weights."""
    program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, file, extra_files={SETTINGS: settings})


def load_torch(file: Path) -> Logits:
    """The program of a file."""
    return torch.export.load(file).module()


def write_onnx(model: torch.nn.Module, example: torch.Tensor, file: Path, settings: str) -> None:
    """An ONNX model; weights that are too many for one file lie beside it, in <file>.data."""
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        input_names=["images"],
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None  # with dynamo=True
    program.model.metadata_props[SETTINGS] = settings
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    program.save(file, external_data=size > ONE_FILE)


def load_onnx(file: Path) -> Logits:
    """The model of a file, on the CPU."""
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


# Name -> the end of its files' names, and how they are written and read.
FORMATS = {"torch": (".pt2", write_torch, load_torch), "onnx": (".onnx", write_onnx, load_onnx)}


def check_arguments(form: str, output: Path) -> None:
    """Refuse what cannot end well, before a model is loaded.

    Raises:
        ConfigError: names the argument.
    """
    if output.suffix != FORMATS[form][0]:
        raise ConfigError(f"--output {output} does not end in {FORMATS[form][0]}, as --format {form} does: rename it")
    for path in (output, output.with_name(f"{output.name}.data")):
        if path.exists():
            raise ConfigError(f"{path} is there already: give a new --output")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: {output.parent} is no folder: make it")
    if form == "onnx" and (absent := [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]):
        raise ConfigError(f"--format onnx needs packages that are not installed: pip install {' '.join(absent)}")


def images_of(paths: list[Path], model: infer.TimmModel) -> list[Image]:
    """The images of files, folders and folders of tar shards; of more than MOST as many, evenly spread.

    Raises:
        ConfigError: a path is not there or holds none, or there are too few.
    """
    images: list[Image] = []
    for path in paths:
        if any(path.glob("*.tar")) or any(path.glob("val/*.tar")):
            source, _ = evaluate.images_of(path, model)
            images += [(source.name(i), lambda source=source, i=i: source.read(i)) for i in range(len(source))]
        else:
            images += [(str(file), file.read_bytes) for file in infer.find([path])]
    if len(images) < FEWEST:
        raise ConfigError(f"--images are {len(images)}, too few to check an export with: give {FEWEST} or more")
    count = min(len(images), MOST)
    return [images[i * len(images) // count] for i in range(count)]


@torch.no_grad()
def compare(model: Logits, exported: Logits, images: list[Image], reader: infer.Reader) -> float:
    """The largest difference of an image's logits, over the largest of them.

    Raises:
        RunError: an image's logits differ by more than TOLERANCE, or its top-1 does; or an image cannot be read.
    """
    worst = 0.0
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        pixels = torch.stack([_read(image, reader) for image in batch])
        wanted = model(pixels)
        with attempt(f"the exported file cannot take {len(batch)} images"):
            found = exported(pixels)
        worst = max(worst, _difference(batch, wanted, found, f"a batch of {len(batch)}"))
        for i in range(len(batch) if start < ALONE else 0):
            with attempt("the exported file cannot take 1 image"):
                found = exported(pixels[i : i + 1])
            worst = max(worst, _difference(batch[i : i + 1], wanted[i : i + 1], found, "a batch of 1"))
    return worst


def _read(image: Image, reader: infer.Reader) -> torch.Tensor:
    name, read = image
    try:
        return reader(read())
    except (OSError, ImageError) as error:
        raise RunError(f"cannot read {name}: {error}") from error


def _difference(images: list[Image], wanted: torch.Tensor, found: torch.Tensor, where: str) -> float:
    if found.shape != wanted.shape:
        raise RunError(f"the exported file gives logits {tuple(found.shape)} for {tuple(wanted.shape)}, in {where}")
    worst = 0.0
    for (name, _), want, got in zip(images, wanted, found, strict=True):
        difference, largest = (got - want).abs().max().item(), want.abs().max().item()
        share = difference / largest if difference else 0.0  # of a head of zeros, too
        if not share <= TOLERANCE:  # nor if it is NaN
            raise RunError(
                f"{name}: the exported file's logits differ by {difference:.3g}, {share:.2g} of the largest, "
                f"in {where}; at most {TOLERANCE:g} is allowed: nothing was written"
            )
        if (top1 := got.argmax().item()) != (want_top1 := want.argmax().item()):
            raise RunError(
                f"{name}: the exported file's top-1 is output {top1}, not {want_top1}, in {where}; "
                f"logits differ by {difference:.3g}: nothing was written"
            )
        worst = max(worst, share)
    return worst


def export(model: infer.TimmModel, config: dict[str, Any], form: str, output: Path, images: list[Image]) -> float:
    """Write `output`, which is whole and checked or not there; what `compare` found.

    Raises:
        RunError: it cannot be exported, or does not compute what the model does.
    """
    _, write, load = FORMATS[form]
    # A file has one size: of a model of images in their own aspect ratio (data.packing), that of squares.
    reader = infer.Reader(model, {key: value for key, value in config.items() if key != "packing"})
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        temporary = Path(folder) / output.name
        example = torch.zeros(2, *reader.shape)  # of a batch of 1 an exporter would think that it is always 1
        with attempt(f"the model cannot be exported as {form}"), torch.no_grad():
            write(model, example, temporary, settings_of(model, config))
            exported = load(temporary)
        worst = compare(model, exported, images, reader)
        for file in sorted(Path(folder).iterdir(), reverse=True):  # <output>.data first: what it belongs to comes last
            with file.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(file, output.with_name(file.name))
    return worst


def main(argv: list[str] | None = None) -> None:
    """Parse, load, export, check, say what was written."""
    parser = Parser(__doc__)
    parser.add_argument("model", type=model_path, metavar="MODEL")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--images", type=Path, nargs="+", required=True, help="to check the file with, 16 or more")
    args = parser.parse_args(argv)
    try:
        check_arguments(args.format, args.output)
        model, config = infer.load_model(args.model)
        images = images_of(args.images, model)
    except (ConfigError, OSError) as error:
        exit_with(str(error))
    try:
        worst = export(model, config, args.format, args.output, images)
    except (RunError, OSError) as error:
        exit_with(str(error), code=1)
    print(
        f"wrote {args.output} ({args.format}, {args.output.stat().st_size / 2**20:.1f} MiB): on {len(images)} images "
        f"its top-1 is the model's, its logits are within {worst:.1g} of the largest"
    )


if __name__ == "__main__":
    main()
