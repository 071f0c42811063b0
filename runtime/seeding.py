"""Every random number of a run: named streams, each a function of the seed and of a place in the run.

So no generator's state is ever saved, and worker count, world size and resumes change nothing. The streams:

    tensor          initial values of one parameter          (seed, its name)
    shuffled        order of the images of an epoch          (seed, epoch)
    permutation     order of the shards of an epoch          (seed, epoch)
    sample          augmentation of one sample               (seed, sample number)
    mixing          mixup and cutmix of a step               (seed, step)
    dropout         dropout and drop path of a microbatch    (seed, step, rank, microbatch)
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import get_worker_info


def tensor(seed: int, name: str) -> int:
    """The seed of a parameter's initial values; `name` is timm's."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1


def shuffled(num_images: int, seed: int, epoch: int) -> torch.Tensor:
    """A permutation of the images, int64 (num_images,)."""
    return torch.randperm(num_images, generator=torch.Generator().manual_seed(_seed_of(seed, epoch)))


def permutation(size: int, *entropy: int) -> np.ndarray:
    """A permutation of range(size) that follows from the numbers; the same in every version of NumPy (its NEP 19)."""
    return np.argsort(np.random.SeedSequence(entropy).generate_state(size, np.uint64), kind="stable")


def mixing(seed: int, step: int) -> np.random.RandomState:
    """The generator of a step's mixup and cutmix."""
    # spawn_key keeps this stream apart from those that have two numbers as well.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, step], spawn_key=(0,))))


def dropout(seed: int, step: int, rank: int, microbatch: int) -> None:
    """Seed torch's global generators for one forward and backward pass."""
    torch.manual_seed(_seed_of(seed, step, rank, microbatch))


def _seed_of(*place: int) -> int:
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)


@contextlib.contextmanager
def sample(seed: int, number: int) -> Iterator[None]:
    """Torch's, NumPy's and Python's generators at a point that follows from (seed, number).

    The caller's come back, except in a loader process, which draws from them nowhere else: that takes 0.1 ms an image.
    """
    state = np.random.SeedSequence([seed, number]).generate_state(3).tolist()
    torch_cpu = torch.default_generator  # not torch.manual_seed: it seeds every accelerator too, 0.5 ms an image
    before = (torch_cpu.get_state(), np.random.get_state(), random.getstate()) if get_worker_info() is None else None
    torch_cpu.manual_seed(state[0])
    np.random.seed(state[1])
    random.seed(state[2])
    try:
        yield
    finally:
        if before is not None:
            torch_cpu.set_state(before[0])
            np.random.set_state(before[1])
            random.setstate(before[2])
