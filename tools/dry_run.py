"""A launch of N ranks, tried in this one process without a GPU: what each rank would hold and send, before the queue.

    python tools/dry_run.py train_fsdp2 --ranks 1024 --config-name vit_base_patch16_224 data=synthetic \
        model=vit_10b_patch14_224 distributed.dp_outer=128

The arguments after --ranks are those of the entrypoint, whose own checks and whose own `main` run, as rank 0 of N: a
batch that does not divide or a data path that is not there is the same line as in the launch. Tensors have shapes but
no storage (FakeTensorMode), collectives go nowhere (torch's process group "fake"), one step is taken, and nothing is
written. The blocks run uncompiled, and a config's cuda_graphs=true is passed over. It uses no GPU, so it refuses what
needs one (model.transformer_engine: set it to false) and Megatron-FSDP.
"""

import collections
import contextlib
import dataclasses
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import launch  # noqa: E402  (before torch)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import trainer  # noqa: E402
import vit  # noqa: E402
from imagenet_dataset import stage_sizes  # noqa: E402
from input_pipeline.augment import Mixup  # noqa: E402
from runtime.session import Session  # noqa: E402
from runtime.tensors import to_local  # noqa: E402
from schema import Config, ConfigError, RunSizes, pair  # noqa: E402

SCRIPTS = ("train_ddp", "train_fsdp2")
KINDS = {"allgather": "all-gather", "reducescatter": "reduce-scatter", "allreduce": "all-reduce"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective over groups of one size."""

    kind: str
    ranks: int

    def sent(self, num_bytes: int) -> float:
        """What a rank sends for a whole tensor of `num_bytes` on a ring."""
        return num_bytes * (self.ranks - 1) / self.ranks * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True)
class Trial:
    """What the step showed; all bytes are of one rank.

    Attributes:
        sizes: the run's.
        mesh: axis -> ranks along it.
        units: parameters of each part that is gathered (FSDP2) by itself, the last being what is outside of the blocks;
            under tensor parallelism a rank's.
        memory: what for -> bytes.
        collectives: -> their number and the bytes of their whole tensors, in one step.
    """

    sizes: RunSizes
    mesh: dict[str, int]
    units: list[int]
    memory: dict[str, int]
    collectives: dict[Collective, tuple[int, int]]


class CountCollectives(TorchDispatchMode):
    """Counts what passes through torch.distributed, also from C++; torch's CommDebugMode has no bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Collective, list[int]] = collections.defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            name = func.__name__.replace("_", "")
            kind = next((shown for part, shown in KINDS.items() if part in name), func.__name__)
            # Before or after it: of an all-gather and of a reduce-scatter the larger side is the whole tensor.
            whole = max(num_bytes(tensors) for tensors in args if isinstance(tensors, torch.Tensor | list))
            count = self.counts[Collective(kind, _group(args).size())]
            count[0] += 1
            count[1] += whole
        return func(*args, **(kwargs or {}))


def _group(args: tuple) -> dist.ProcessGroup:
    """The process group among a collective's arguments: an object, or (as DTensor passes it) its name, the last one."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    return distributed_c10d._resolve_process_group(args[-1])


def _numbers(module: nn.Module) -> int:
    """Parameters of a module when it is gathered: under tensor parallelism a rank's part of the matrices."""
    number = 0
    for parameter in module.parameters():
        number += parameter.numel()
        if isinstance(parameter, DTensor) and "tp" in (names := parameter.device_mesh.mesh_dim_names or ()):
            axis = names.index("tp")
            if not parameter.placements[axis].is_replicate():
                number -= parameter.numel() - parameter.numel() // parameter.device_mesh.size(axis)
    return number


def num_bytes(tensors: Any) -> int:
    """Of this rank's parts of a tensor, or of nested lists and dicts of them."""
    if isinstance(tensors, torch.Tensor):
        local = to_local(tensors)
        return local.numel() * local.element_size()
    parts = tensors.values() if isinstance(tensors, dict) else tensors
    return sum(num_bytes(part) for part in parts if isinstance(part, torch.Tensor | list | tuple | dict))


class Saved:
    """The bytes that one forward pass keeps for its backward pass, without the weights: each storage once."""

    def __init__(self, units: list[nn.Module]) -> None:
        self.bytes: dict[int, int] = {}
        # A recomputed block keeps its input alone, and not through autograd's list of saved tensors.
        self.hooks = [unit.register_forward_pre_hook(self.note_input) for unit in units]

    def note_input(self, unit: nn.Module, args: tuple) -> None:
        """Count a block's input."""
        self.note(args[0])

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor; returns it."""
        owner = tensor if tensor._base is None else tensor._base
        if not isinstance(owner, nn.Parameter):
            storage = tensor.untyped_storage()
            self.bytes[storage._cdata] = storage.nbytes()
        return tensor

    def close(self) -> int:
        """The bytes; counts no more."""
        for hook in self.hooks:
            hook.remove()
        return sum(self.bytes.values())


class WithoutRanks(contextlib.ExitStack):
    """Replaces what an entrypoint's `main` and `build` call and what cannot be without ranks, data or storage."""

    def __init__(self, entrypoint: Any, ranks: int, train: Callable[..., dict[str, float]]) -> None:
        super().__init__()
        self.enter_context(torch.compiler.set_stance("force_eager"))
        self.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        self.put(entrypoint, "dist_session", lambda cfg: fake_session(cfg, ranks))
        self.put(entrypoint, "train", train)
        self.put(vit.TrainableModel, "init_weights", lambda *args: None)
        # A mesh is made of ranks, and a shard's place follows from them: values.
        named = [(entrypoint, "init_device_mesh"), (DTensor, "__create_chunk_list__")]
        named += [(DeviceMesh, name) for name in ("__init__", "__getitem__")]  # FSDP2 makes one of its own and tp's
        for owner, name in named:
            self.put(owner, name, with_values(getattr(owner, name)))
        if hasattr(entrypoint, "settle_buckets"):
            self.put(entrypoint, "DistributedDataParallel", fake_ddp)
            self.put(entrypoint, "settle_buckets", settled(entrypoint.settle_buckets))

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Until the end, `owner.name` is `value`."""
        self.enter_context(mock.patch.object(owner, name, value))


@contextlib.contextmanager
def fake_session(cfg: Config, ranks: int) -> Iterator[Session]:
    """Rank 0 of a process group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield Session(0, 0, ranks, torch.device("cpu"), Path(cfg.output_dir))
    finally:
        dist.destroy_process_group()


def with_values(function: Callable) -> Callable:
    """The function on real tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def fake_ddp(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """DDP that compares no values between ranks, and whose own all-reduce, which returns none here, is a plain one."""
    model = DistributedDataParallel(module, **options, init_sync=False)

    def all_reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, all_reduce)
    return model


def settled(settle_buckets: Callable) -> Callable:
    """The entrypoint's `settle_buckets`, and the new buckets, which DDP makes at its next pass and not of fakes.

    Nobody writes to their memory, so that they take none.
    """

    def settle(model: DistributedDataParallel, *args: Any) -> None:
        settle_buckets(model, *args)
        with_values(model.reducer._rebuild_buckets)()

    return settle


def trial_of(run: trainer.Run, cfg: Config, session: Session, sizes: RunSizes) -> Trial:
    """One step of the run, measured."""
    module = run.model.module if isinstance(run.model, DistributedDataParallel) else run.model
    assert isinstance(module, vit.TrainableModel)
    blocks = list(module.shard_units())
    memory = {"weights": num_bytes(run.state.weights)}
    saved = Saved(blocks)

    def forward_backward(microbatch: int, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if microbatch:
            return one_pass(microbatch, images, targets)
        with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
            loss = one_pass(microbatch, images, targets)
        memory["activations of a microbatch"] = saved.close()
        return loss

    def before_update(*_: Any) -> None:
        memory["gradients"] = num_bytes([p.grad for p in run.state.trained])

    one_pass, shape = trainer.pass_of(run, cfg, sizes), (cfg.model.in_chans, *pair(cfg.data.image_size))
    batch = torch.zeros(sizes.micro_batch_size, *shape, dtype=torch.uint8), torch.zeros(sizes.micro_batch_size).long()
    run.optimizer.register_step_pre_hook(before_update)
    run.model.train()
    with CountCollectives() as counter:
        trainer.train_step(
            run,
            forward_backward,
            iter([batch] * sizes.accumulation),
            cfg,
            sizes,
            step=1,
            rank=0,
            normalize=trainer.Normalize(cfg, session.device),
            mixup=Mixup(cfg),
        )
    memory["optimizer"] = num_bytes([list(state.values()) for state in run.optimizer.state.values()])
    if run.state.ema:
        memory["averages"] = num_bytes(run.state.ema.averages)

    in_blocks = [_numbers(block) for block in blocks]
    whole = _numbers(module)
    units = [*in_blocks, whole - sum(in_blocks)]
    if run.model is module:
        width = 2 if cfg.precision == "bf16" else 4
        # Forward and backward have two blocks at a time, the one at work and the next, and what is outside of the
        # blocks; between them are those that stay gathered. A gradient is in the compute's precision, then once more in
        # FP32 to be reduced.
        blocks_held = max(cfg.fsdp2.gathered_blocks, 2) if cfg.fsdp2.reshard_after_forward else len(in_blocks)
        held = units[-1] + sum(sorted(in_blocks)[-blocks_held:])
        memory["gathered weights"] = held * width
        memory["gradients of a block before they are reduced"] = max(in_blocks) * (width + 4)
        if sizes.accumulation > 1:
            memory["whole gradients between microbatches"] = whole * 4
    assert run.mesh.mesh_dim_names is not None
    mesh = dict(zip(run.mesh.mesh_dim_names, run.mesh.shape, strict=True))
    return Trial(sizes, mesh, units, memory, {kind: (n, size) for kind, (n, size) in counter.counts.items()})


def dry_run(cfg: Config, script: str, ranks: int) -> list[Trial]:
    """The trial of an entrypoint's main; with data.size_schedule one of each image size.

    Raises:
        ConfigError: the run has a teacher, or packs images.
    """
    if cfg.data.packing.enabled:
        raise ConfigError(
            "data.packing.enabled=true: where an image ends in its row is a number, and a dry run has none; set false"
        )
    if cfg.distillation.kind != "none":
        raise ConfigError(
            f"distillation.kind={cfg.distillation.kind}: a dry run reads no weights, a teacher's neither; set none"
        )
    found: list[Trial] = []

    def train(build: Callable[..., trainer.Run], cfg: Config, session: Session) -> dict[str, float]:
        for stage, sizes in zip(cfg.stages(), stage_sizes(cfg, session.world_size), strict=False):
            found.append(trial_of(build(stage, session, sizes), stage, session, sizes))
        return {}

    entrypoint = importlib.import_module(script)
    with WithoutRanks(entrypoint, ranks, train):
        entrypoint.main(cfg)
    return found


def show(trial: Trial) -> None:
    """Print it."""
    sizes, gib = trial.sizes, 2**30
    print(f"mesh: {' x '.join(f'{name}={size}' for name, size in trial.mesh.items())}")
    print(f"batch: {sizes.micro_batch_size} images x {sizes.dp_size} ranks x {sizes.accumulation} microbatches a step")
    stage = (
        ""
        if sizes.last_step - sizes.first_step == sizes.num_train_steps
        else (f", these are {sizes.first_step + 1:,} to {sizes.last_step:,}")
    )
    print(f"steps: {sizes.num_train_steps:,}{stage}")
    what = "parameters of one of the tp ranks" if trial.mesh.get("tp", 1) > 1 else "parameters"
    print(f"{what}: {sum(trial.units):,}")
    alike = collections.Counter(trial.units[:-1])
    for size, count in alike.items():
        print(f"  {count:>4} blocks of {size:,}")
    print(f"     the rest: {trial.units[-1]:,}")
    print("memory of a rank, GiB (kernels' workspaces, CUDA itself and fragments come on top):")
    for name, size in trial.memory.items():
        print(f"  {size / gib:10.3f}  {name}")
    print(f"  {sum(trial.memory.values()) / gib:10.3f}  all of them, which are not all there at the same time")
    print("collectives of a step, GiB: whole tensors, and what a rank sends on a ring:")
    for kind, (count, size) in trial.collectives.items():
        what = f"{count:>5} x {kind.kind:<14} over {kind.ranks:>4} ranks"
        print(f"  {what} {size / gib:10.3f} {kind.sent(size) / gib:10.3f}")


def main() -> None:
    """Parse, try, print."""
    parser = launch.Parser(__doc__)
    parser.allow_abbrev = False
    parser.add_argument("script", help="train_ddp or train_fsdp2")
    parser.add_argument("--ranks", type=int, required=True, help="processes of the launch")
    args, arguments = parser.parse_known_args()
    script = Path(args.script).stem
    if script == "train_mfsdp":
        parser.error(
            "train_mfsdp: Megatron-FSDP needs a GPU, so it has no dry run; train_fsdp2's numbers are near its own"
        )
    if script not in SCRIPTS:
        parser.error(f"{args.script} is none of {', '.join(SCRIPTS)}")
    if args.ranks < 1:
        parser.error(f"--ranks={args.ranks}: give at least 1")
    # The launch's, of its first rank; no card, so that the answer is the same on every machine.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(args.ranks), "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    without_graphs = [] if any(word.startswith("cuda_graphs=") for word in arguments) else ["cuda_graphs=false"]
    sys.argv = [f"{script}.py", *arguments, *without_graphs]

    def try_out(cfg: Config) -> dict[str, float]:
        for trial in dry_run(cfg, script, args.ranks):
            show(trial)
        return {}

    launch.launch(try_out)


if __name__ == "__main__":
    main()
