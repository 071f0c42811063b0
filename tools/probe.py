"""What a model's features are worth: nearest neighbours and a linear probe, on frozen features.

    python tools/probe.py runs/demo/checkpoints data/fashion_mnist_demo
    python tools/probe.py timm:vit_small_patch14_dinov2.lvd142m /data/imagenet --methods knn --k 10 20 100 200
    torchrun --standalone --nproc-per-node 8 tools/probe.py MODEL /data/imagenet --l2 1e-6 1e-5 1e-4 --output probe.json

MODEL as for infer.py; FOLDER holds train/ and val/, class folders or tar shards, as data.path does. The classes are the
folder's: those that the model was trained on, and its head, do not matter. Features are the pooled vector before the
head, in evaluation mode, of the pixels of the run's own evaluation, without augmentation.

  knn     as DINO has it (arXiv 2104.14294): the k training images of the largest cosine similarity s vote for their
          classes, each with exp(s / temperature)
  linear  logistic regression by L-BFGS on features that are scaled to mean 0 and deviation 1 over the training images:
          mean cross-entropy + l2 / 2 x the sum of the squared weights. To choose l2 by the validation images is to
          choose with the answers: keep some training images aside for it

Every rank holds all training features, 4 bytes each: 3.9 GB for ImageNet and 768 of them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import Parser, exit_with, number

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

import evaluate
import infer
from imagenet_dataset import EvalSampler, ImageSource
from input_pipeline import tar_shards
from input_pipeline.decode import UnreadableError
from input_pipeline.image_folders import list_folder
from observability.metrics import top_k_hits
from runtime.checkpoint_places import model_path
from schema import ConfigError

ROWS = 4096  # of training features at once in the linear probe's loss
QUERIES = 256  # images at once whose neighbours are looked for


def splits_of(folder: Path) -> tuple[ImageSource, ImageSource]:
    """The training and validation images of a folder, by the training images' classes.

    Raises:
        ConfigError: one of them is not there, or damaged.
    """
    if folder.parts[:1] == ("s3:",):
        raise ConfigError(f"FOLDER=s3://{'/'.join(folder.parts[1:])}: give a folder, download the shards")
    folder = folder.resolve()
    if evaluate.has_shards(folder, "train"):
        train = tar_shards.load(str(folder), "train", "raise")
        return train, tar_shards.load(str(folder), "val", "raise", default_classes=train.classes)
    given = f"FOLDER={folder}"
    if absent := [split for split in ("train", "val") if not (folder / split).is_dir()]:
        is_split = folder.name in ("train", "val") and folder.is_dir()
        fix = f"give {folder.parent}" if is_split else "give one that holds train/ and val/"
        raise ConfigError(f"{given}: there is no folder {folder / absent[0]}: {fix}")
    train = list_folder(folder / "train", given=given)
    return train, list_folder(folder / "val", train.classes, given=given)


@torch.no_grad()
def features_of(
    model: infer.TimmModel, reader: infer.Reader, source: ImageSource, *, device: torch.device, args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (images, D), float32, and labels (images,), in the source's order; all of them on every rank."""
    labels = torch.from_numpy(source.labels).long()
    world_size = dist.get_world_size()
    sampler = EvalSampler(len(source), batch_size=args.batch_size, rank=dist.get_rank(), world_size=world_size)
    images = evaluate.LabelledImages(source, labels[:, None], reader)

    def features(batch: torch.Tensor) -> torch.Tensor:
        tokens = model.forward_features(batch.to(device, non_blocking=True))
        return model.forward_head(tokens, pre_logits=True).float()

    collate = evaluate.gather if reader.keeps_aspect else None
    options = {"collate_fn": collate, "num_workers": args.workers, "pin_memory": device.type == "cuda"}
    batches = []
    for batch, _ in DataLoader(images, batch_sampler=sampler, **options):
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            batches.append(infer.logits_of(features, batch) if reader.keeps_aspect else features(batch))
    mine = torch.stack(batches)  # batches, images of one, D
    parts = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(parts, mine)
    return torch.stack(parts, dim=1).flatten(0, 2)[: len(source)], labels.to(device)


def votes_of(
    similarity: torch.Tensor, classes: torch.Tensor, *, k: Sequence[int], temperature: float, num_classes: int
) -> list[torch.Tensor]:
    """For each k the votes (B, num_classes) of the nearest training images, by cosines and classes (B, largest k).

    Divided by the nearest one's vote, which keeps them finite at any temperature.
    """
    weights = ((similarity - similarity[:, :1]) / temperature).exp()
    nothing = weights.new_zeros(len(weights), num_classes)
    return [nothing.scatter_add(1, classes[:, :each], weights[:, :each]) for each in k]


@torch.no_grad()
def knn_hits(
    train: torch.Tensor,
    labels: torch.Tensor,
    val: torch.Tensor,
    val_labels: torch.Tensor,
    *,
    k: Sequence[int],
    temperature: float,
    num_classes: int,
) -> torch.Tensor:
    """(len(k), 2): top-1 and top-5 hits of this rank's share of the validation features, summed over all ranks."""
    train, val = F.normalize(train, dim=1), F.normalize(val, dim=1)
    sums = torch.zeros(len(k), 2, dtype=torch.float64, device=val.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    val, val_labels = val[rank::world_size], val_labels[rank::world_size]
    for queries, answers in zip(val.split(QUERIES), val_labels.split(QUERIES), strict=True):
        similarity, nearest = (queries @ train.T).topk(max(k), dim=1)
        votes = votes_of(similarity, labels[nearest], k=k, temperature=temperature, num_classes=num_classes)
        for row, each in zip(sums, votes, strict=True):
            has_votes = each.gather(1, answers[:, None]) > 0  # else it may be among five for want of others
            row += (top_k_hits(each, answers) & has_votes).sum(dim=0)
    dist.all_reduce(sums)
    return sums


def fit_linear(
    features: torch.Tensor, labels: torch.Tensor, *, num_classes: int, l2: float, iterations: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Weights (classes, D) and biases (classes,) of logistic regression, and the iterations that it took.

    Every rank has all `features` (N, D), and sums the loss over its share of them.
    """
    weight = features.new_zeros(num_classes, features.shape[1], requires_grad=True)
    bias = features.new_zeros(num_classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=iterations,
        max_eval=2 * iterations,
        tolerance_grad=1e-6,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine, answers = features[rank::world_size], labels[rank::world_size]

    def loss_of_all() -> torch.Tensor:
        optimizer.zero_grad()
        total = l2 / 2 / world_size * weight.square().sum()
        total.backward()
        total = total.detach()
        for rows, classes in zip(mine.split(ROWS), answers.split(ROWS), strict=True):
            loss = F.cross_entropy(F.linear(rows, weight, bias), classes, reduction="sum") / len(features)
            loss.backward()
            total += loss.detach()
        for tensor in (total, weight.grad, bias.grad):
            assert tensor is not None
            dist.all_reduce(tensor)
        return total

    optimizer.step(loss_of_all)  # pyright: ignore[reportArgumentType]  (torch annotates a float)
    return weight.detach(), bias.detach(), optimizer.state[weight]["n_iter"]


def main(argv: list[str] | None = None) -> None:
    """Parse, read features, score, answer from rank 0."""
    parser, count = Parser(__doc__), number(int, 1)
    parser.add_argument("model", type=model_path, metavar="MODEL")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--methods", choices=("knn", "linear"), nargs="+", default=["knn", "linear"])
    parser.add_argument("--k", type=count, nargs="+", default=[20], help="knn: neighbours, one number or several")
    parser.add_argument("--temperature", type=number(float, 0), default=0.07, help="knn: of the votes")
    parser.add_argument("--l2", type=number(float, 0), nargs="+", default=[1e-4], help="linear: one number or several")
    parser.add_argument("--iterations", type=count, default=1000, help="linear: of L-BFGS, at most")
    parser.add_argument("--batch-size", type=count, default=64, help="images a process and batch")
    parser.add_argument("--workers", type=number(int, 0), default=evaluate.WORKERS, help="loader processes a process")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the model; the rest is fp32")
    parser.add_argument("--output", type=Path, help="write the result there, as JSON")
    args = parser.parse_args(argv)
    if not args.temperature:
        parser.error(f"--temperature {args.temperature}: give more than 0")
    infer.check_target("--output", args.output)
    try:
        model, config = infer.load_model(args.model)
        train, val = splits_of(args.folder)
        if "knn" in args.methods and max(args.k) > len(train):
            raise ConfigError(f"--k {max(args.k)} of {len(train)} training images: give at most as many")
    except (ConfigError, OSError) as error:
        exit_with(str(error))

    device = evaluate.join(args.precision)
    model, reader = model.to(device), infer.Reader(model, config)
    try:
        (of_train, labels), (of_val, answers) = (
            features_of(model, reader, source, device=device, args=args) for source in (train, val)
        )
    except UnreadableError as error:  # on one rank only: its error ends the others through torchrun
        exit_with(str(error.as_raised()), rank_variable=None, code=1)
    result: dict[str, Any] = {"images": len(val), "train_images": len(train), "features": of_train.shape[1]}
    lines = [f"{args.folder}: {len(val)} images by {len(train)} training images, {of_train.shape[1]} features"]

    def note(method: str, key: str, value: float, hits: torch.Tensor, more: str = "") -> None:
        top1, top5 = (hits / len(val)).tolist()
        result.setdefault(method, {})[str(value)] = {"top1": top1, "top5": top5}
        lines.append(f"{method}, {key}={value}: top-1 {top1:.4f}, top-5 {top5:.4f}{more}")

    if "knn" in args.methods:
        options = {"k": args.k, "temperature": args.temperature, "num_classes": len(train.classes)}
        found = knn_hits(of_train, labels, of_val, answers, **options)
        for k, hits in zip(args.k, found, strict=True):
            note("knn", "k", k, hits)
    if "linear" in args.methods:
        std, mean = torch.std_mean(of_train, dim=0, correction=0)
        of_train, of_val = ((each - mean) / std.clamp(min=1e-6) for each in (of_train, of_val))
        for l2 in args.l2:
            options = {"num_classes": len(train.classes), "l2": l2, "iterations": args.iterations}
            weight, bias, taken = fit_linear(of_train, labels, **options)
            hits = top_k_hits(F.linear(of_val, weight, bias), answers).sum(dim=0)
            end = "all, a higher --iterations may score otherwise" if taken >= args.iterations else "to the end"
            note("linear", "l2", l2, hits, f", {taken} iterations, {end}")
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank:
        return
    print("\n".join(lines))
    if args.output:
        with infer.writing("--output", args.output):
            args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
