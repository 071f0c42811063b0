"""Images in, class names out, from an exported model.

    python infer.py runs/demo/checkpoints/final_model image.jpg folder/of/images
    python infer.py MODEL folder/ --json answers.json --sheet answers.png

MODEL is a final_model folder, or a step_XXXXXXXX folder, or a folder that holds some, or timm:<model name>, or
hf-hub:<owner>/<name>. Images are read as in evaluation: any mode and depth, EXIF as the run had it; one that cannot be
read is named, the others go on, and the exit code is then 1.
"""

from launch import Parser, exit_with, number

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import timm.data
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torchvision import transforms

from input_pipeline import aspect
from input_pipeline.decode import Decoder, ImageError, crop_extreme_aspect
from input_pipeline.image_folders import IMAGE_EXTENSIONS
from interop.models import TimmModel, load_model
from runtime.checkpoint_places import model_path
from schema import ConfigError


def check_target(option: str, path: Path | None) -> None:
    """Exit with one line where a file cannot be written: before the work whose result it is for, not after it.

    Of several processes the first one writes, and looks; a file that is there already stays as it is.
    """
    if path is None or int(os.environ.get("RANK", "0")):
        return
    target = Path(os.path.realpath(path))
    is_new = not target.exists()
    if not is_new and not target.is_file() and not target.is_dir():
        return  # a pipe or a terminal: opened twice, it may end after the first time
    try:
        target.open("ab").close()  # rights alone do not tell: of a full disk, a name that is too long, root on NFS
        if is_new:
            target.unlink()
    except OSError as error:
        exit_with(
            f"{option} {path} cannot be written ({error.strerror}): give a file in a folder that can be written to"
        )


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """A context in which a file is written: what goes wrong is one line, and what was found stands above it."""
    try:
        yield
    except (OSError, ValueError) as error:  # a disk that has become full; an image that the format has no room for
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        exit_with(f"{option} {path} could not be written ({reason}): what it is for is printed above", code=1)


def check_sheet(path: Path | None) -> None:
    """Exit with one line where Pillow cannot write an image under such a name."""
    if path is None:
        return
    check_target("--sheet", path)
    form = Image.registered_extensions().get(path.suffix.lower())
    try:
        Image.new("RGB", (8, 8)).save(io.BytesIO(), form or "none")
    except (OSError, KeyError, ValueError):  # an unknown end, or one of formats that are only read, or have no colours
        exit_with(f"--sheet {path}: Pillow writes no {path.suffix or 'file without an extension'}: give a .png")


def class_names(model: TimmModel) -> list[str]:
    """Names of the model's outputs; their numbers where it knows none."""
    names = model.pretrained_cfg.get("label_names") or ()
    return [*names, *(str(i) for i in range(len(names), model.num_classes))]


class Reader:
    """An image's bytes to what the model takes, (C, Y, X), normalised: the pixels of the run's evaluation.

    Of a run with data.packing images have sizes of their own: `logits_of` takes them.
    """

    def __init__(self, model: TimmModel, config: dict[str, Any]) -> None:
        settings = timm.data.resolve_model_data_config(model)
        self.shape = settings["input_size"]
        self.keeps_aspect = bool(config.get("packing"))
        transform = timm.data.create_transform(**settings, is_training=False)
        if packing := config.get("packing"):
            patch, patches = model.patch_embed.patch_size, packing["patches_per_image"]
            whole = functools.partial(
                aspect.whole, interpolation=settings["interpolation"], patch=patch, patches=patches
            )
            normalize = transforms.Normalize(settings["mean"], settings["std"])
            transform = transforms.Compose([whole, transforms.ConvertImageDtype(torch.float32), normalize])
        self.transform = cast(Callable[[Image.Image], torch.Tensor], transform)
        decoding = config.get("decoding") or {"exif_orientation": False, "max_pixels": 2**28}  # timm's own folders
        self.decoder = Decoder(settings["input_size"][0], decoder="pillow", **decoding)

    def __call__(self, data: bytes) -> torch.Tensor:
        """Raises ImageError if it is none."""
        return self.transform(crop_extreme_aspect(self.decoder.pillow(data)))


def logits_of(model: Callable[[torch.Tensor], torch.Tensor], images: Sequence[torch.Tensor]) -> torch.Tensor:
    """(images, classes), or what else `model` gives, of normalised images (C, Y, X), those of one size together."""
    by_size: dict[torch.Size, list[int]] = {}
    for place, image in enumerate(images):
        by_size.setdefault(image.shape, []).append(place)
    parts = [model(torch.stack([images[place] for place in places])) for places in by_size.values()]
    order = torch.tensor([place for places in by_size.values() for place in places], device=parts[0].device)
    return torch.cat(parts)[order.argsort()]


def find(paths: list[Path]) -> Iterator[Path]:
    """The files given, and the images in the folders given, by the ends of their names.

    Raises:
        ConfigError: a path is not there, or a folder holds no image.
    """
    for path in paths:
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_EXTENSIONS and p.is_file())
            if not (files := [p for p in files if not p.name.startswith(".")]):
                raise ConfigError(f"{path} holds no images: give another folder, or files")
            yield from files
        elif path.is_file():
            yield path
        else:
            raise ConfigError(f"{path} is not there: give files or folders of images")


def sheet(answers: list[dict[str, Any]], reader: Reader, target: Path, *, columns: int = 4, size: int = 224) -> None:
    """A contact sheet: each image as it is, and its classes below it."""
    lines, height, font = 3, size + 3 * 18 + 8, ImageFont.load_default(size=14)
    rows = -(-len(answers) // columns)
    page = Image.new("RGB", (columns * (size + 8), rows * height), "white")
    draw = ImageDraw.Draw(page)
    for i, answer in enumerate(answers):
        left, top = (i % columns) * (size + 8) + 4, (i // columns) * height + 4
        image = crop_extreme_aspect(reader.decoder.pillow(Path(answer["file"]).read_bytes())).convert("RGB")
        image = ImageOps.contain(image, (size, size))  # small ones grow
        page.paste(image, (left + (size - image.width) // 2, top + (size - image.height) // 2))
        for line, found in enumerate(answer["top"][:lines]):
            text = f"{found['probability']:4.0%}  {found['description'].split(',')[0]}"
            draw.text((left, top + size + 2 + 18 * line), text[:32], fill="black", font=font)
    page.save(target)


def main(argv: list[str] | None = None) -> None:
    """Parse, read, classify in batches, answer."""
    parser = Parser(__doc__)
    parser.add_argument("model", type=model_path, metavar="MODEL")
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE")
    parser.add_argument("--top", type=number(int, 1), default=5, help="classes an image")
    parser.add_argument("--batch-size", type=number(int, 1), default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the answers there")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet there, a PNG")
    args = parser.parse_args(argv)
    try:
        torch.ones(1, device=args.device).cpu()  # "meta" has no values to give back
    except (RuntimeError, AssertionError) as error:  # torch's words for: no such name, no such device, not built for it
        reason = str(error).strip().splitlines()[0].rstrip(".")
        exit_with(f"--device {args.device} cannot be used here ({reason}): use --device cpu")
    check_target("--json", args.json)
    check_sheet(args.sheet)
    try:
        model, config = load_model(args.model)
        files = list(find(args.images))
    except ConfigError as error:
        exit_with(str(error))
    model, reader, names = model.to(args.device), Reader(model, config), class_names(model)
    descriptions = model.pretrained_cfg.get("label_descriptions") or {}

    answers, unreadable = [], 0
    for start in range(0, len(files), args.batch_size):
        readable, images = [], []
        for file in files[start : start + args.batch_size]:
            try:
                images.append(reader(file.read_bytes()))
                readable.append(file)
            except (OSError, ImageError) as error:
                print(f"error: cannot read {file}: {error}", file=sys.stderr)
                unreadable += 1
        if not images:
            continue
        with torch.inference_mode():
            logits = logits_of(model, [image.to(args.device) for image in images])
            probabilities = logits.float().softmax(dim=1).cpu()
        values, indices = probabilities.topk(min(args.top, len(names)), dim=1)
        for file, row, found in zip(readable, values.tolist(), indices.tolist(), strict=True):
            top = [
                {"class": names[i], "description": descriptions.get(names[i], names[i]), "probability": p}
                for p, i in zip(row, found, strict=True)
            ]
            answers.append({"file": str(file), "top": top})
            print(f"{file}: " + ", ".join(f"{each['description']} {each['probability']:.3f}" for each in top))
    if args.json:
        with writing("--json", args.json):
            args.json.write_text(json.dumps(answers, indent=1) + "\n")
    if args.sheet and answers:
        with writing("--sheet", args.sheet):
            sheet(answers, reader, args.sheet)
    sys.exit(1 if unreadable else 0)


if __name__ == "__main__":
    main()
