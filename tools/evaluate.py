"""Top-1 and top-5 of a checkpoint or an exported model on a folder of class folders or of tar shards.

    python tools/evaluate.py runs/demo/checkpoints data/fashion_mnist_demo/val
    torchrun --standalone --nproc-per-node 8 tools/evaluate.py MODEL /data/imagenet/val --per-class --output val.json
    python tools/evaluate.py MODEL /data/imagenet-shards/val

MODEL as for infer.py. The images' pixels are those of the run's own evaluation, and every image counts once at any
number of processes. Classes go by their names: a folder may have some of the model's only. Where the model's folder
tells no names, classes called 0, 1, 2 ... are those outputs, and others must be as many as the model has. Shards lie
as for data.source=webdataset: give <path>/val, or <path> for the validation shards below or in it; classes.txt in
<path> names their classes, without it their numbers are the model's outputs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import Parser, exit_with

import json
import os
import re

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import infer
from imagenet_dataset import PADDING, EvalSampler, ImageSource
from input_pipeline import tar_shards
from input_pipeline.decode import ImageError, UnreadableError
from input_pipeline.image_folders import list_folder
from interop.step_weights import first_few
from observability.metrics import top_k_hits
from runtime.checkpoint_places import model_path
from schema import ConfigError


class LabelledImages(Dataset):
    """Normalised images with their labels, by EvalSampler's keys; padding is black and carries no label."""

    def __init__(self, source: ImageSource, outputs: tuple[int, ...], reader: infer.Reader) -> None:
        self.source, self.outputs, self.reader = source, outputs, reader

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        _, index = key
        if index == PADDING:
            return torch.zeros(self.reader.shape), PADDING
        try:
            return self.reader(self.source.read(index)), self.outputs[self.source.labels[index]]
        except (OSError, ImageError) as error:
            raise UnreadableError(f"cannot read {self.source.name(index)}: {error}") from error


def images_of(folder: Path, model: infer.TimmModel) -> tuple[ImageSource, tuple[int, ...]]:
    """The images of a folder of class folders or tar shards, and the model's output of each of its classes.

    Raises:
        ConfigError: it is neither, or damaged; or as `outputs_of` says.
    """
    if folder.parts[0] == "s3:":
        raise ConfigError(f"FOLDER={folder.parts[0]}//{'/'.join(folder.parts[1:])}: give a folder, download the shards")
    names = tuple(model.pretrained_cfg.get("label_names") or ())
    folder = folder.resolve()
    if any(folder.glob("*.tar")) or any(folder.glob("val/*.tar")):
        is_split = folder.name in ("train", "val") or not _has_shards(folder, "val")
        path, split = (folder.parent, folder.name) if is_split else (folder, "val")
        numbered = tuple(infer.class_names(model))
        source = tar_shards.load(str(path), split, "raise", default_classes=numbered)
        if source.classes == numbered:
            return source, tuple(range(model.num_classes))
    else:
        source = list_folder(folder, names or None)
    return source, outputs_of(source.classes, names, model.num_classes)


def _has_shards(path: Path, split: str) -> bool:
    try:
        return bool(tar_shards.find(str(path), split))
    except ConfigError:
        return False


def outputs_of(classes: tuple[str, ...], names: tuple[str, ...], num_outputs: int) -> tuple[int, ...]:
    """The model's output of each class, by `names`, its own, or, where it has none, by numbers.

    Raises:
        ConfigError: a class is none of the model's, or nothing tells which one it is.
    """
    if names:
        if unknown := next((name for name in classes if name not in names), None):
            raise ConfigError(f"{unknown} is no class of the model's {len(names)}, {first_few(names)}")
        return tuple(names.index(name) for name in classes)
    numbers = [int(name) for name in classes if re.fullmatch("[0-9]{1,9}", name)]
    if len(numbers) == len(set(numbers)) == len(classes) and max(numbers) < num_outputs:
        return tuple(numbers)
    if len(classes) == num_outputs and (not numbers or numbers == sorted(numbers)):
        return tuple(range(num_outputs))  # in the order of the sorted names, as most code numbers them
    raise ConfigError(
        f"the folder's {len(classes)} classes, {first_few(classes)}, cannot be told among the model's {num_outputs} "
        "outputs, which have no names: list them as pretrained_cfg.label_names in the model's config.json"
    )


@torch.inference_mode()
def evaluate(
    model: torch.nn.Module, loader: DataLoader, *, num_classes: int, device: torch.device, precision: str
) -> torch.Tensor:
    """(num_classes, 3), float64, summed over all ranks: images, top-1 hits and top-5 hits of each class."""
    sums = torch.zeros(num_classes, 3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(images)
        is_image = labels != PADDING
        labels = labels[is_image]
        hits = top_k_hits(logits[is_image].float(), labels)  # B 2
        counts = torch.cat([torch.ones_like(labels)[:, None], hits], dim=1).double()
        sums.index_add_(0, labels, counts)
    dist.all_reduce(sums)
    return sums


def main(argv: list[str] | None = None) -> None:
    """Parse, load, count, answer from rank 0."""
    parser = Parser(__doc__)
    parser.add_argument("model", type=model_path, metavar="MODEL")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--batch-size", type=int, default=64, help="images a process and batch")
    parser.add_argument("--workers", type=int, default=4, help="loader processes a process")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--per-class", action="store_true", help="a table of all classes, worst first")
    parser.add_argument("--output", type=Path, help="write the result there, as JSON")
    args = parser.parse_args(argv)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        model, config = infer.load_model(args.model)
        source, outputs = images_of(args.folder, model)
    except (ConfigError, OSError) as error:
        exit_with(str(error))

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("highest" if args.precision == "fp32" else "high")
    store = {} if "WORLD_SIZE" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if cuda else "gloo", **store)
    sampler = EvalSampler(len(source), batch_size=args.batch_size, rank=rank, world_size=world_size)
    dataset = LabelledImages(source, outputs, infer.Reader(model, config))
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=args.workers, pin_memory=cuda)
    # Reading fails on one rank only: its error ends the others through torchrun.
    options = {"num_classes": model.num_classes, "device": device, "precision": args.precision}
    try:
        sums = evaluate(model.to(device), loader, **options).cpu()
    except UnreadableError as error:
        exit_with(str(error.as_raised()), rank_variable=None, code=1)
    dist.destroy_process_group()
    if rank:
        return
    images, top1, top5 = sums.sum(dim=0).tolist()
    result = {"images": int(images), "top1": top1 / images, "top5": top5 / images}
    print(f"{args.folder}: {int(images)} images, top-1 {top1 / images:.4f}, top-5 {top5 / images:.4f}")
    if args.per_class:
        rows = sorted(
            (hits / count, name, int(count))
            for name, (count, hits, _) in zip(infer.class_names(model), sums.tolist(), strict=True)
            if count
        )
        result["classes"] = {name: {"top1": rate, "images": count} for rate, name, count in rows}
        print("\n".join(f"{rate:.4f}  {count:6d}  {name}" for rate, name, count in rows))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
