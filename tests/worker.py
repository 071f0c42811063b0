"""Run a list of training runs in one set of processes: starting a process costs ten times what a tiny run does.

    torchrun --nproc-per-node N tests/worker.py TASKS.json RESULTS_FOLDER

`conftest.run_tasks` starts it, on a CPU by forking `as_rank` instead.

Each task is {"name", "script", "overrides"} and optionally "config_name", "call" (a function of this file to run in
place of the script's main) and "before" (a function of this file to run first). Rank r writes <name>.<r>.json.
"""

import launch

import contextlib
import faulthandler
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from unittest import mock

import quick_hydra
import stand_in_cuda
import torch
import torch.distributed as dist

quick_hydra.install()
launch.put_timm_off()  # as for the entrypoints

import checkpoint  # noqa: E402
from observability import metrics  # noqa: E402
from runtime import process_group, seeding  # noqa: E402
from runtime import session as session_module  # noqa: E402


def poison_new_memory(cfg):
    """Fill what `to_empty` hands out with NaN, so that a tensor that nobody initialised shows."""

    def to_empty(self, *, device, recurse=True):
        return self._apply(lambda t: torch.full_like(t, torch.nan, device=device), recurse=recurse)

    torch.nn.Module.to_empty = to_empty


def clip_with_absent_gradients(cfg):
    """Gradient clipping where rank 1 has no gradients at all, against torch on the whole tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from optim import clip_grad_norm_

    with process_group.dist_session(cfg) as session:
        mesh = init_device_mesh("cpu", (session.world_size,))
        torch.manual_seed(0)
        whole = torch.randn(5, 3)
        whole[3:] = 0  # what rank 1 would hold
        parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)]))
        gradient = distribute_tensor(whole, mesh, [Shard(0)])
        parameter.grad = gradient if session.rank == 0 else None
        replicated = torch.nn.Parameter(torch.zeros(4))
        replicated.grad = torch.full((4,), 2.0)
        norm = clip_grad_norm_([parameter, replicated], 0.1)
        reference = torch.cat([whole.flatten(), torch.full((4,), 2.0)]).norm()
        clipped = gradient.full_tensor().square().sum() + replicated.grad.square().sum()
        return {"norm": norm.item(), "reference": reference.item(), "clipped": clipped.sqrt().item()}


def dropout_masks(cfg):
    """The masks of this rank for two steps and two microbatches, before and after other draws."""
    masks = {}
    with process_group.dist_session(cfg) as session:
        for step, microbatch in ((1, 0), (1, 1), (2, 0), (1, 0)):
            seeding.dropout(cfg.seed, step, session.rank, microbatch)
            mask = torch.nn.functional.dropout(torch.ones(64), 0.5).bool().int().tolist()
            key = f"{step}.{microbatch}"
            assert masks.setdefault(key, mask) == mask
            torch.rand(step)
    return masks


def pretend_a_peak(cfg):
    """A device of 1 MFLOP/s, so that there is an MFU."""
    metrics.peak_flops = lambda device: 1e6


def share_a_gpu(cfg):
    """Have several ranks on one GPU, which NCCL refuses: gloo takes tensors in its memory, too. Keeps gradients."""
    init = dist.init_process_group
    dist.init_process_group = lambda backend, **options: init("gloo", **options)
    keep_first_gradients(cfg)


def keep_first_gradients(cfg):
    """Write every parameter's whole gradient of the first step, before clipping, to <output_dir>/gradients.pt."""
    import trainer
    from optim import clip_grad_norm_

    def clip(parameters, max_norm):
        trainer.clip_grad_norm_ = clip_grad_norm_
        parameters = list(parameters)
        whole = [gathered(p.grad, like=p) for p in parameters]
        if dist.get_rank() == 0:
            torch.save(whole, Path(cfg.output_dir) / "gradients.pt")
            (Path(cfg.output_dir) / "names.json").write_text(json.dumps(NAMES))
        return clip_grad_norm_(parameters, max_norm)

    class TrainState(checkpoint.TrainState):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            NAMES[:] = self.weights
            checkpoint.TrainState = TrainState.__base__

    checkpoint.TrainState = TrainState
    trainer.clip_grad_norm_ = clip


NAMES = []  # of the parameters, in the order in which the loop hands them to clip_grad_norm_


def make_last_rank_infinite_at_step_3(cfg):
    """One rank's third batch normalises to infinity."""
    import trainer

    normalize, calls = trainer.Normalize.__call__, []

    def poisoned(self, images):
        calls.append(1)
        is_third = len(calls) == 3
        if is_third:
            trainer.Normalize.__call__ = normalize
        bad = is_third and dist.get_rank() == dist.get_world_size() - 1
        return normalize(self, images) / (0 if bad else 1)

    trainer.Normalize.__call__ = poisoned


def allow_few_recompiles(cfg):
    """torch.compile raises where it would recompile a function more than four times; two are expected of each block."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 4
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def count_weight_casts(cfg):
    """Count into EXTRA how often TransformerEngine quantizes a weight."""
    from transformer_engine.pytorch import QuantizedTensor
    from transformer_engine.pytorch.module import base, layernorm_linear, layernorm_mlp, linear

    def counting(*, tensor=None, workspace=None, update_workspace=True, **kwargs):
        is_cast = (workspace is None or update_workspace) and not isinstance(tensor, QuantizedTensor)
        EXTRA["casts"] = EXTRA.get("casts", 0) + is_cast
        return base.quantize_weight(tensor=tensor, workspace=workspace, update_workspace=update_workspace, **kwargs)

    for module in (linear, layernorm_linear, layernorm_mlp):
        module.quantize_weight = counting


def stand_in_for_te(cfg):
    """FP8 on a CPU."""
    import pytest
    import stand_in_te

    stand_in_te.install(pytest.MonkeyPatch())


def count_replays(cfg):
    """Count into EXTRA how often a CUDA graph is replayed."""
    EXTRA["replays"] = 0
    if not hasattr(torch.cuda.CUDAGraph, "counted"):
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph):
            EXTRA["replays"] += 1
            replay(graph)

        torch.cuda.CUDAGraph.replay, torch.cuda.CUDAGraph.counted = counted, True


def count_symbolic_sizes(cfg):
    """Count into EXTRA the sizes that torch.compile takes for unknown numbers; with them a graph is for any size."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    EXTRA["symbolic"] = 0
    torch._dynamo.reset()
    create = ShapeEnv.create_symbol

    def counting(self, val, source, dynamic_dim=DimDynamic.DUCK, *args, **kwargs):
        EXTRA["symbolic"] += dynamic_dim is not DimDynamic.STATIC
        return create(self, val, source, dynamic_dim, *args, **kwargs)

    ShapeEnv.create_symbol = counting


def count_replays_of_fresh_code(cfg):
    """`count_replays`, of a run that compiles as the first one of its process does."""
    torch._dynamo.reset()
    count_replays(cfg)


def measure_borders(cfg):
    """`count_replays`; and into EXTRA how many bytes of GPU memory a stage of data.size_schedule leaves in use."""
    import trainer

    count_replays_of_fresh_code(cfg)
    gc.collect()
    before, at_border = torch.cuda.memory_allocated(), trainer._at_border

    def measured(stage, session):
        trainer._at_border = at_border
        config = at_border(stage, session)
        EXTRA["left"] = torch.cuda.memory_allocated() - before
        return config

    trainer._at_border = measured


def fill_the_disk_of_rank_1(cfg):
    """From its second save on, rank 1 can write no file beyond a few bytes: the kernel's own limit."""
    import resource

    write, calls = checkpoint.Saver._write, []

    def limited(self, *args):
        calls.append(1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if len(calls) == 2 and dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            write(self, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            if len(calls) == 2:
                checkpoint.Saver._write = write

    checkpoint.Saver._write = limited


def sleep_at_each_step(cfg):
    """Steps slow enough for a test to act between them."""
    import trainer
    from optim import clip_grad_norm_

    def clip(parameters, max_norm):
        time.sleep(0.1)
        return clip_grad_norm_(parameters, max_norm)

    trainer.clip_grad_norm_ = clip


def stub_wandb(cfg):
    """A wandb that notes its calls in <output_dir>/calls.jsonl, and fails where wandb.init_args.name says so."""
    import types

    where = cfg.wandb.init_args["name"] or ""
    Path(cfg.output_dir).mkdir(parents=True, exist_ok=True)

    def note(call, **values):
        if where == f"{call} raises" and values.get("data", {}).get("step", 2) == 2:
            raise OSError(f"no route to {call}\nand more")
        with open(Path(cfg.output_dir) / "calls.jsonl", "a") as file:
            file.write(json.dumps({"call": call, "rank": int(os.environ["RANK"]), **values}) + "\n")

    def init(**kwargs):
        if where == "init hangs":
            time.sleep(60)
        note("init", kwargs=kwargs)
        return types.SimpleNamespace(
            define_metric=lambda name, step_metric=None: note("define_metric", name=name, axis=step_metric),
            log=lambda data, **kwargs: note("log", data=data, kwargs=kwargs),
            summary=types.SimpleNamespace(update=lambda data: note("summary", data=data)),
            finish=lambda: note("finish"),
        )

    sys.modules["wandb"] = None if where == "import raises" else types.SimpleNamespace(init=init)


def wait_a_second(cfg):
    """Real wandb names the folder of an offline run after the second in which it starts."""
    time.sleep(1.1)


def lose_newest_checkpoint(cfg):
    """As a crash between two saves would."""
    if int(os.environ["RANK"]) == 0:
        import shutil

        from runtime.step_folders import step_folders

        shutil.rmtree(max(step_folders(Path(cfg.checkpoint.ckpt_dir)).values()))


def train_and_tell(cfg):
    """A run of DDP; its seconds in this process, and which libraries are loaded after it."""
    import train_ddp
    from observability import trackers

    start = time.monotonic()
    with mock.patch.object(trackers, "PATIENCE", 0.5):  # for this run alone: real wandb may take longer
        train_ddp.main(cfg)
    loaded = [name for name in ("wandb", "tensorboard", "torch.utils.tensorboard") if name in sys.modules]
    return {"seconds": time.monotonic() - start, "loaded": loaded}


def doctor(cfg):
    """tools/doctor.py on these ranks: its exit code and what it prints."""
    import io

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
    import doctor

    arguments = [f"data.path={cfg.data.path}", f"output_dir={cfg.output_dir}", f"data.num_workers={10**6}"]
    os.environ["COLUMNS"] = "200"  # one line a row, whatever terminal the tests run in
    times = {}
    leave, show = dist.destroy_process_group, doctor.show

    def leaving():
        leave()
        time.sleep(int(os.environ["RANK"]))
        times["left"] = time.monotonic()  # one clock for all processes

    def showing(*args):
        times["shown"] = time.monotonic()
        return show(*args)

    dist.destroy_process_group, doctor.show = leaving, showing
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = doctor.main(arguments)
    dist.destroy_process_group, doctor.show = leave, show
    return {"code": code, "shown": shown.getvalue(), "times": times}


def start_memory(cfg):
    """tools/start_memory.py on this rank."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
    import start_memory

    return start_memory.measure(cfg)


def _signal_once(owner, name, *, call, ranks, numbers):
    """The ranks send themselves the signals at the given call of a function."""
    original, calls = getattr(owner, name), []

    def signalling(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            setattr(owner, name, original)
            for number in numbers if dist.get_rank() in ranks else ():
                os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, signalling)


def sigterm_to_rank_1_before_the_first_step(cfg):
    _signal_once(checkpoint, "restore", call=1, ranks=[1], numbers=[signal.SIGTERM])


def sigusr1_to_rank_1_in_the_first_step(cfg):
    import trainer

    _signal_once(trainer, "clip_grad_norm_", call=1, ranks=[1], numbers=[signal.SIGUSR1])


def sigterm_to_all_in_the_first_evaluation(cfg):
    import trainer

    _signal_once(trainer, "evaluate", call=1, ranks=[0, 1], numbers=[signal.SIGTERM])


def two_signals_to_rank_0_in_the_first_save(cfg):
    _signal_once(checkpoint.Saver, "_commit", call=1, ranks=[0], numbers=[signal.SIGUSR1, signal.SIGTERM])


def look(cfg):
    """What a run left: its status, and of each checkpoint, by step, whether its score is missing, and the scores."""
    output_dir = Path(cfg.output_dir)
    if not (output_dir / "status.json").exists():
        return {}
    saved = [json.loads(path.read_text()) for path in output_dir.glob("checkpoints/step_????????/state.json")]
    return {
        "status": json.loads((output_dir / "status.json").read_text()),
        "saved": {state["step"]: state["is_unscored"] for state in saved},
        "scores": {state["step"]: state["scores"] for state in saved},
    }


EXTRA = {}  # what a hook adds to a task's metrics


def gathered(tensor, *, like):
    """The whole of a tensor that is cut over ranks as `like` is, evenly or not; None stands for an empty part."""
    from runtime.tensors import chunks_of, split_local, to_local

    if not isinstance(like, torch.distributed.tensor.DTensor):
        return tensor.detach().float().cpu()
    values = [] if tensor is None else split_local(to_local(tensor).detach().float().cpu(), like)
    places = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks_of(like)]
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, list(zip(places, values, strict=False)))
    whole = torch.full(like.shape, torch.nan)
    for (offsets, sizes), piece in itertools.chain(*parts):
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = piece.view(sizes)
    return whole


def run(task):
    os.environ.pop("TORCHELASTIC_ERROR_FILE", None)
    cfg = launch.load_config(task.get("config_name", "L0_sanity"), task["overrides"], script=task["script"])
    if task.get("before"):
        globals()[task["before"]](cfg)
    if task.get("call"):
        return globals()[task["call"]](cfg)
    on_a_cpu = task["script"] == "train_mfsdp" and not torch.cuda.is_available()
    with stand_in_cuda.installed() if on_a_cpu else contextlib.nullcontext():
        metrics = importlib.import_module(task["script"]).main(cfg) | EXTRA
    return metrics | (look(cfg) if task.get("look") else {})


def main(tasks_file, folder):
    process_group.TIMEOUT = session_module.TIMEOUT = timedelta(seconds=60)
    tasks, results = json.loads(Path(tasks_file).read_text()), Path(folder)
    for task in tasks:
        faulthandler.dump_traceback_later(80)  # a hang shows where
        outcome = {}
        EXTRA.clear()
        try:
            outcome["metrics"] = run(task)
        except Exception as error:  # the tests look at it
            traceback.print_exc()
            outcome["error"] = f"{type(error).__name__}: {error}"
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        (results / f"{task['name']}.{os.environ.get('RANK', 0)}.json").write_text(json.dumps(outcome))


def as_rank(environment, output, tasks_file, folder):
    """A rank that was forked from a process which has imported this file: `environment` and `output` are torchrun's."""
    multiprocessing.set_start_method(None, force=True)  # its loaders' workers start as any process's
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    main(tasks_file, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
