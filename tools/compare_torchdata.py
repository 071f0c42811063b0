"""How a stream of images is resumed: torchdata's StatefulDataLoader beside ours, whose order is a function of the step.

    pip install torchdata                                                  # not one of the requirements
    python tools/compare_torchdata.py --output benchmarks/torchdata_cpu.json

Both read the bundled images with L0_sanity's augmentation and batches. torchdata's loader draws from a
StatefulDistributedSampler and is resumed with its state_dict(); ours is built anew with the step. Measured: the seconds
from nothing to the first batch of a resumed run, the bytes that a checkpoint has to hold, whether the batches after the
resume are the undisturbed stream's, pixel for pixel, at the same and at other numbers of workers and ranks, and images
a second.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import launch

import functools
import importlib
import itertools
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

import benchmark
import imagenet_dataset as data

RESUME_AT, AFTER = (40, 400), 3  # steps; batches that are compared after a resume


class Images(Dataset):
    """Our images by their index alone, as a sampler of torch's or torchdata's asks for them.

    What is drawn for the augmentation then comes from the worker's generator, as in torchvision's data sets; or, where
    only the order is in question, from the index.
    """

    def __init__(self, images: data.ImageDataset, *, draws: bool) -> None:
        self.images, self.draws = images, draws

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int, list[str]]:
        return self.images[int(torch.randint(2**40, ())) if self.draws else index, index]


class Ours:
    """The stream of one world size and number of workers, from any step on."""

    def __init__(self, folder: str, *, ranks: int, workers: int) -> None:
        self.cfg = launch.load_config("L0_sanity", [f"output_dir={folder}", f"data.num_workers={workers}"])
        self.sizes, self.ranks = data.run_sizes(self.cfg, ranks), ranks

    def batches(self, step: int, state: list[dict]) -> list[Iterator]:
        """Of each rank."""
        start = functools.partial(data.build_loaders, self.cfg, self.sizes, start_step=step)
        return [iter(start(rank=rank)[0]) for rank in range(self.ranks)]

    def state(self, step: int) -> list[dict]:
        """What a checkpoint must hold of each rank, beside the step."""
        return []


class Torchdata(Ours):
    """The same by torchdata."""

    draws = True

    def batches(self, step: int, state: list[dict]) -> list[Iterator]:
        """Of each rank; its sampler has to be told the epoch."""
        self.loaders = [self.loader(rank) for rank in range(self.ranks)]
        for loader, its_state in zip(self.loaders, itertools.cycle(state or [{}]), strict=False):
            if its_state:
                loader.load_state_dict(its_state)
        return [forever(loader, step // len(loader)) for loader in self.loaders]

    def loader(self, rank: int) -> Any:
        """One rank's."""
        loaders = importlib.import_module("torchdata.stateful_dataloader")
        samplers = importlib.import_module("torchdata.stateful_dataloader.sampler")
        images = data.ImageDataset(data.list_images(self.cfg.data, "train"), self.cfg, is_train=True)
        images = Images(images, draws=self.draws)
        sampler = samplers.StatefulDistributedSampler(images, num_replicas=self.ranks, rank=rank, seed=self.cfg.seed)
        return loaders.StatefulDataLoader(
            images,
            batch_size=self.sizes.micro_batch_size,
            sampler=sampler,
            num_workers=self.cfg.data.num_workers,
            collate_fn=data._collate,
            generator=torch.Generator().manual_seed(self.cfg.seed),
            drop_last=True,
        )

    def state(self, step: int) -> list[dict]:
        """Of loaders that have come to this step."""
        ranks = self.batches(0, [])
        for batches in ranks:
            for _ in range(step):
                next(batches)
        return [loader.state_dict() for loader in self.loaders]


class TorchdataOrder(Torchdata):
    """The same, to compare the order of the images alone."""

    draws = False


KINDS = {"ours": Ours, "torchdata": Torchdata, "torchdata, order alone": TorchdataOrder}


def forever(loader: Any, first_epoch: int) -> Iterator:
    """One epoch after the other."""
    for epoch in itertools.count(first_epoch):
        loader.sampler.set_epoch(epoch)
        yield from loader


def step_of(batches: list[Iterator]) -> list[bytes]:
    """The images of a step, of all ranks, in an order that does not depend on who read them."""
    return sorted(image.numpy().tobytes() for each in batches for image in next(each)[0])


def is_same(make: Callable[..., Ours], step: int, now: dict[str, int], state: list[dict], want: list) -> bool | str:
    """Whether a stream that is resumed with `now` many ranks and workers goes on as the undisturbed one did."""
    try:
        batches = make(**now).batches(step, state)
        return all(step_of(batches) == images for images in want)
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"refused: {type(error).__name__} {error}".splitlines()[0].strip()


def main() -> None:
    """Parse, measure, write."""
    parser = launch.Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    try:
        version = importlib.import_module("torchdata").__version__
    except ImportError:
        launch.exit_with("torchdata is not installed: pip install torchdata")

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in KINDS.items():
            make = functools.partial(kind, folder)
            usual = {"ranks": 1, "workers": 2}
            for step in RESUME_AT:
                state = make(**usual).state(step)
                straight = make(**usual).batches(0, [])
                want = [step_of(straight) for _ in range(step + AFTER)][step:]
                seconds = []
                for _ in range(args.rounds):
                    started = time.perf_counter()
                    next(make(**usual).batches(step, state)[0])
                    seconds.append(time.perf_counter() - started)
                row = {"loader": name, "resumed_at": step, "first_batch_s": round(statistics.median(seconds), 3)}
                row |= {"rounds_s": [round(each, 3) for each in seconds]}
                row |= {"state_bytes_a_rank": len(pickle.dumps(state[0])) if state else 0, "same_images": {}}
                for ranks, workers in ((1, 2), (1, 1), (1, 0), (2, 2)):
                    now = {"ranks": ranks, "workers": workers}
                    row["same_images"][f"{ranks} ranks, {workers} workers"] = is_same(make, step, now, state, want)
                rows.append(row)
                print(row, flush=True)
        rates: dict[str, list[int]] = {name: [] for name in KINDS}
        for _, (name, kind) in itertools.product(range(args.rounds), KINDS.items()):
            batches = kind(folder, ranks=1, workers=2).batches(0, [])[0]
            next(batches)
            started = time.perf_counter()
            count = sum(len(next(batches)[0]) for _ in range(80))
            rates[name].append(round(count / (time.perf_counter() - started)))
        for name, rounds in rates.items():
            rows.append({"loader": name, "images_per_second": statistics.median(rounds), "rounds": rounds})
            print(rows[-1], flush=True)
    benchmark.write(args.output, {"torchdata": version, "rows": rows})


if __name__ == "__main__":
    main()
