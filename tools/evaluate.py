"""Top-1 and top-5 of a checkpoint or an exported model on a folder of class folders or of tar shards.

    python tools/evaluate.py runs/demo/checkpoints data/fashion_mnist_demo/val
    torchrun --standalone --nproc-per-node 8 tools/evaluate.py MODEL /data/imagenet/val --per-class --output val.json
    python tools/evaluate.py MODEL /data/imagenet-shards/val
    python tools/evaluate.py MODEL /data/imagenet/val --real-labels
    python tools/evaluate.py MODEL /data/imagenet-a --valid-labels imagenet-a

MODEL as for infer.py. The images' pixels are those of the run's own evaluation, and every image counts once at any
number of processes. Classes go by their names: a folder may have some of the model's only. Where the model's folder
tells no names, classes called 0, 1, 2 ... are those outputs, and others must be as many as the model has. Shards lie
as for data.source=webdataset: give <path>/val, or <path> for the validation shards below or in it; classes.txt in
<path> names their classes, without it their numbers are the model's outputs.

ImageNet's other sets, for models of its 1000 classes. What timm's validate.py scores, by the tables that timm has:
  ReaL     the validation images with --real-labels: an answer is right if it is one of the image's labels of arXiv
           2006.07159; images that have none do not count
  A, R     --valid-labels imagenet-a, or imagenet-r: answers among the 200 classes of that set alone
  V2       folders 0 to 999, the numbers of the sorted wnids; Sketch has wnids: no option is needed
--valid-labels also takes a file of timm's form, one output's number a line.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import Parser, exit_with, number

import dataclasses
import functools
import json
import os
import pkgutil
import re
from collections.abc import Iterable

import torch
import torch.distributed as dist
from timm.data import ImageNetInfo, RealLabelsImagenet
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

WORKERS = min(4, os.cpu_count() or 1)  # torch warns of more than there are cores


class LabelledImages(Dataset):
    """Normalised images with the right answers, by EvalSampler's keys; padding is black and has none.

    `answers` (images, L), int64: the outputs that are right for an image, filled up with PADDING.
    """

    def __init__(self, source: ImageSource, answers: torch.Tensor, reader: infer.Reader) -> None:
        self.source, self.answers, self.reader = source, answers, reader

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        _, index = key
        if index == PADDING:
            return torch.zeros(self.reader.shape), torch.full_like(self.answers[0], PADDING)
        try:
            return self.reader(self.source.read(index)), self.answers[index]
        except (OSError, ImageError) as error:
            raise UnreadableError(f"cannot read {self.source.name(index)}: {error}") from error


def gather(items: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A batch of `LabelledImages` whose images differ in size."""
    images, answers = zip(*items, strict=True)
    return list(images), torch.stack(answers)


def images_of(folder: Path, model: infer.TimmModel) -> tuple[ImageSource, tuple[int, ...]]:
    """The images of a folder of class folders or tar shards, and the model's output of each of its classes.

    Raises:
        ConfigError: it is neither, or damaged; or as `outputs_of` says.
    """
    if folder.parts[:1] == ("s3:",):
        raise ConfigError(f"FOLDER=s3://{'/'.join(folder.parts[1:])}: give a folder, download the shards")
    names = names_of(model)
    folder = folder.resolve()
    if any(folder.glob("*.tar")) or any(folder.glob("val/*.tar")):
        is_split = folder.name in ("train", "val") or not has_shards(folder, "val")
        path, split = (folder.parent, folder.name) if is_split else (folder, "val")
        numbered = tuple(infer.class_names(model))
        source = tar_shards.load(str(path), split, "raise", default_classes=numbered)
        if source.classes == numbered:
            return source, tuple(range(model.num_classes))
    else:
        has_train, has_val = ((folder / split).is_dir() and split not in names for split in ("train", "val"))
        if has_val and (has_train or names):
            raise ConfigError(f"FOLDER={folder} is a whole data set, not its class folders: give {folder / 'val'}")
        known = names if names and not _is_numbered(folder, names) else None
        source = list_folder(folder, known, given=f"FOLDER={folder}")
    return source, outputs_of(source.classes, names, model.num_classes)


def names_of(model: infer.TimmModel) -> tuple[str, ...]:
    """The names of its outputs; empty where it knows none."""
    return tuple(model.pretrained_cfg.get("label_names") or ())


@functools.cache
def wnids() -> tuple[str, ...]:
    """ImageNet-1k's classes, in the order in which most code numbers them."""
    return tuple(ImageNetInfo().label_names())


def _is_numbered(folder: Path, names: tuple[str, ...]) -> bool:
    """Whether ImageNet's classes go by numbers there, as in ImageNet-V2, and not by their names."""
    is_imagenet = {*names} == {*wnids()}
    return is_imagenet and folder.is_dir() and any(e.name.isdecimal() and e.is_dir() for e in os.scandir(folder))


def has_shards(path: Path, split: str) -> bool:
    """Whether shards of a split lie in a folder, in a layout of data.source=webdataset."""
    try:
        return bool(tar_shards.find(str(path), split))
    except ConfigError:
        return False


def outputs_of(classes: tuple[str, ...], names: tuple[str, ...], num_outputs: int) -> tuple[int, ...]:
    """The model's output of each class, by `names`, its own, or, where it has none, by ImageNet's or by numbers.

    Raises:
        ConfigError: a class is none of the model's, or nothing tells which one it is.
    """
    numbers = [int(name) for name in classes if re.fullmatch("[0-9]{1,9}", name)]
    are_numbers = len(numbers) == len(set(numbers)) == len(classes) and max(numbers) < num_outputs
    if are_numbers and {*names} == {*wnids()}:
        classes = tuple(wnids()[number] for number in numbers)
    elif not names and num_outputs == len(wnids()) and {*classes} <= {*wnids()}:
        names = wnids()
    if names:
        if unknown := next((name for name in classes if name not in names), None):
            raise ConfigError(f"{unknown} is no class of the model's {len(names)}, {first_few(names)}")
        return tuple(names.index(name) for name in classes)
    if are_numbers:
        return tuple(numbers)
    if len(classes) == num_outputs and (not numbers or numbers == sorted(numbers)):
        return tuple(range(num_outputs))  # in the order of the sorted names, as most code numbers them
    raise ConfigError(
        f"the folder's {len(classes)} classes, {first_few(classes)}, cannot be told among the model's {num_outputs} "
        "outputs, which have no names: list them as pretrained_cfg.label_names in the model's config.json"
    )


def imagenet_outputs(model: infer.TimmModel, option: str) -> tuple[int, ...]:
    """The model's output of each of ImageNet-1k's classes, in their own order.

    Raises:
        ConfigError: it has others.
    """
    names = names_of(model) or (wnids() if model.num_classes == len(wnids()) else ())
    if {*names} != {*wnids()}:
        raise ConfigError(f"{option} is for models of ImageNet's 1000 classes, this one has {model.num_classes} others")
    return tuple(names.index(name) for name in wnids())


def real_answers(source: ImageSource, model: infer.TimmModel) -> torch.Tensor:
    """What is right by the labels of "Are we done with ImageNet?" (arXiv 2006.07159), which timm has: (images, L).

    Raises:
        ConfigError: the model has other classes, or an image is none of ImageNet's validation set, by its name.
    """
    outputs = imagenet_outputs(model, "--real-labels")
    of_file = RealLabelsImagenet([""] * 50_000).real_labels  # it wants as many names as there are labels
    rows = []
    for index in range(len(source)):
        name = source.name(index)
        match = re.search(r"ILSVRC2012_val_\d{8}", name)
        if match is None or f"{match[0]}.JPEG" not in of_file:
            raise ConfigError(f"--real-labels: {name} is no ILSVRC2012_val_<number>.JPEG of ImageNet's validation set")
        rows.append([outputs[label] for label in of_file[f"{match[0]}.JPEG"]])
    answers = torch.full((len(rows), max(1, *map(len, rows))), PADDING)
    for row, labels in zip(answers, rows, strict=True):
        row[: len(labels)] = torch.tensor(labels)
    return answers


def valid_outputs(given: str, model: infer.TimmModel) -> tuple[int, ...]:
    """The outputs that --valid-labels allows: by timm's list of a set's classes, or by a file of numbers.

    Raises:
        ConfigError: it is neither, or the model has no such outputs.
    """
    option = f"--valid-labels {given}"
    if given in ("imagenet-a", "imagenet-r"):
        outputs = imagenet_outputs(model, option)
        content = pkgutil.get_data("timm.data", f"_info/{given.replace('-', '_')}_synsets.txt")
        assert content is not None  # a file of the package
        return tuple(outputs[wnids().index(name)] for name in content.decode().split())
    try:
        lines = Path(given).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{option} is no list that can be read ({error}): give imagenet-a, imagenet-r or a file"
        ) from error
    wrong = [line for line in lines if not re.fullmatch("[0-9]{1,9}", line) or int(line) >= model.num_classes]
    if wrong or not lines:
        found = f"holds {first_few(wrong)}, which is none" if wrong else "holds none"
        raise ConfigError(
            f"{option} {found} of the model's {model.num_classes} outputs: give their numbers, one a line"
        )
    return tuple(map(int, lines))


@dataclasses.dataclass(frozen=True)
class Task:
    """What is asked of the model."""

    source: ImageSource
    answers: torch.Tensor
    """(images, L), as `LabelledImages` has them."""
    valid: tuple[int, ...] | None
    """The only outputs that count; None = all."""
    words: str
    """What to add to the result."""


def task_of(folder: Path, model: infer.TimmModel, *, is_real: bool, valid_labels: str | None) -> Task:
    """The images of a folder and what is right for them.

    Raises:
        ConfigError: as `images_of`, `real_answers` and `valid_outputs`; or a class is none of the valid ones.
    """
    source, outputs = images_of(folder, model)
    if is_real:
        return Task(source, real_answers(source, model), None, " by ReaL's labels")
    answers = torch.tensor(outputs)[torch.from_numpy(source.labels).long()][:, None]
    if valid_labels is None:
        return Task(source, answers, None, "")
    valid = valid_outputs(valid_labels, model)
    if strangers := sorted({*answers[:, 0].tolist()} - {*valid}):
        names = infer.class_names(model)
        raise ConfigError(f"--valid-labels {valid_labels} lacks {first_few(names[i] for i in strangers)} of {folder}")
    return Task(source, answers, valid, f" among {len(valid)} classes")


@torch.inference_mode()
def evaluate(
    model: torch.nn.Module,
    loader: Iterable[tuple[torch.Tensor | list[torch.Tensor], torch.Tensor]],
    *,
    num_classes: int,
    device: torch.device,
    precision: str,
    valid: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """(num_classes, 3), float64, summed over all ranks: images, top-1 hits and top-5 hits of each class.

    `loader` gives images, a tensor or, where they differ in size, a list, and their right answers, as `LabelledImages`;
    an image counts for the class of its first one.
    """
    sums = torch.zeros(num_classes, 3, dtype=torch.float64, device=device)
    is_invalid = torch.zeros(num_classes, dtype=torch.bool, device=device)
    if valid is not None:
        is_invalid[:] = True
        is_invalid[list(valid)] = False
    for images, answers in loader:
        answers = answers.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            if isinstance(images, torch.Tensor):
                logits = model(images.to(device, non_blocking=True))
            else:
                logits = infer.logits_of(model, [image.to(device, non_blocking=True) for image in images])
        is_image = answers[:, 0] != PADDING
        answers = answers[is_image]
        logits = logits[is_image].float().masked_fill(is_invalid, -torch.inf)
        hits = torch.stack([top_k_hits(logits, each) for each in answers.unbind(1)]).any(dim=0)  # B 2
        counts = torch.cat([torch.ones_like(answers[:, :1]), hits], dim=1).double()
        sums.index_add_(0, answers[:, 0], counts)
    dist.all_reduce(sums)
    return sums


def join(precision: str) -> torch.device:
    """Start the process group, of torchrun's processes or of this one alone; this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    store = {} if "WORLD_SIZE" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if cuda else "gloo", **store)
    return device


def main(argv: list[str] | None = None) -> None:
    """Parse, load, count, answer from rank 0."""
    parser = Parser(__doc__)
    parser.add_argument("model", type=model_path, metavar="MODEL")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--batch-size", type=number(int, 1), default=64, help="images a process and batch")
    parser.add_argument("--workers", type=number(int, 0), default=WORKERS, help="loader processes a process")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--per-class", action="store_true", help="a table of all classes, worst first")
    parser.add_argument("--real-labels", action="store_true", help="ImageNet's reassessed labels, by timm's table")
    parser.add_argument("--valid-labels", metavar="LIST", help="imagenet-a, imagenet-r or a file: answers among these")
    parser.add_argument("--output", type=Path, help="write the result there, as JSON")
    args = parser.parse_args(argv)
    for other, is_given in (("--per-class", args.per_class), ("--valid-labels", args.valid_labels is not None)):
        if args.real_labels and is_given:
            parser.error(f"--real-labels with {other}: an image has several of ReaL's labels; leave one of them out")
    infer.check_target("--output", args.output)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        model, config = infer.load_model(args.model)
        task = task_of(args.folder, model, is_real=args.real_labels, valid_labels=args.valid_labels)
    except (ConfigError, OSError) as error:
        exit_with(str(error))

    device = join(args.precision)
    sampler = EvalSampler(len(task.source), batch_size=args.batch_size, rank=rank, world_size=world_size)
    reader = infer.Reader(model, config)
    dataset = LabelledImages(task.source, task.answers, reader)
    options = {"collate_fn": gather if reader.keeps_aspect else None, "num_workers": args.workers}
    loader = DataLoader(dataset, batch_sampler=sampler, pin_memory=device.type == "cuda", **options)
    # Reading fails on one rank only: its error ends the others through torchrun.
    options = {"num_classes": model.num_classes, "device": device, "precision": args.precision, "valid": task.valid}
    try:
        sums = evaluate(model.to(device), loader, **options).cpu()
    except UnreadableError as error:
        exit_with(str(error.as_raised()), rank_variable=None, code=1)
    dist.destroy_process_group()
    if rank:
        return
    images, top1, top5 = sums.sum(dim=0).tolist()
    if not images:
        exit_with(f"{args.folder}: none of its {len(task.source)} images has a label{task.words}", code=1)
    result = {"images": int(images), "top1": top1 / images, "top5": top5 / images}
    print(f"{args.folder}: {int(images)} images, top-1 {top1 / images:.4f}, top-5 {top5 / images:.4f}{task.words}")
    if args.per_class:
        rows = sorted(
            (hits / count, name, int(count))
            for name, (count, hits, _) in zip(infer.class_names(model), sums.tolist(), strict=True)
            if count
        )
        result["classes"] = {name: {"top1": rate, "images": count} for rate, name, count in rows}
        print("\n".join(f"{rate:.4f}  {count:6d}  {name}" for rate, name, count in rows))
    if args.output:
        with infer.writing("--output", args.output):
            args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
