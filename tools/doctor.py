"""Look over a machine, or all ranks of a job, before a run: one table, and for each problem what mends it.

    python tools/doctor.py                                                     # for the default config
    torchrun --standalone --nproc-per-node 8 tools/doctor.py --config-name vit_base_patch16_224 data.path=/data/imagenet

The arguments are those of the entrypoints: what a run would need of /dev/shm, disk and data follows from its config.
Under torchrun the ranks are put together by NCCL (gloo without CUDA) as in training, and an all-reduce is timed.
States: ok, note (nothing to do, but good to know), warn (a run may fail or be slow), BROKEN. The exit code is 1 if
something is broken, else 0.
"""

import contextlib
import dataclasses
import importlib.metadata
import io
import math
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SCRIPTS = ("train_ddp", "train_fsdp2", "train_mfsdp")
OK, NOTE, WARN, BROKEN = "ok", "note", "warn", "BROKEN"
TIMEOUT = timedelta(seconds=120)  # of the all-reduce, its connections included


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    state: str
    found: str
    remedy: str = ""


def check_python() -> Iterator[Row]:
    """The version."""
    is_new_enough = sys.version_info >= (3, 10)
    remedy = "" if is_new_enough else "install Python 3.10 or newer"
    yield Row("Python", OK if is_new_enough else BROKEN, f"{platform.python_version()}, {sys.executable}", remedy)


def check_packages(root: Path = ROOT) -> Iterator[Row]:
    """Installed versions against the requirements files, from the packages' metadata; nothing is imported."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Row("packages", BROKEN, "packaging is not installed", "pip install -r requirements.txt")
        return
    good = []
    for name in ("requirements.txt", "requirements-gpu.txt"):
        for line in (root / name).read_text().splitlines():
            text, _, comment = line.partition("#")
            if not text.strip() or text.startswith("-r"):
                continue
            requirement = Requirement(text.strip())
            is_optional = name == "requirements-gpu.txt" or comment.strip().startswith("optional")
            try:
                found = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                state, what = (NOTE, "not installed, optional") if is_optional else (BROKEN, "not installed")
                isolation = "--no-build-isolation " if requirement.name == "transformer-engine" else ""
                yield Row(requirement.name, state, what, f"pip install {isolation}'{text.strip()}'")
                continue
            if requirement.specifier.contains(found, prereleases=True):
                good.append(f"{requirement.name} {found}")
            else:
                state = WARN if is_optional else BROKEN
                yield Row(requirement.name, state, f"{found} is installed", f"pip install '{text.strip()}'")
    yield Row("packages", OK, ", ".join(good))
    pair = [re.findall(r"^\d+\.(\d+)", text.split()[1]) for text in good if text.startswith(("torch ", "torchvision "))]
    if len(pair) == 2 and int(pair[0][0]) + 15 != int(pair[1][0]):  # 2.11 and 0.26, 2.14 and 0.29
        yield Row(
            "torch and torchvision",
            BROKEN,
            "are not of the same release",
            f"pip install 'torchvision==0.{int(pair[0][0]) + 15}.*' from where torch was installed from",
        )


def check_cards() -> Iterator[Row]:
    """Each visible GPU: whether it computes, and whether it is free."""
    import torch
    import torch.cuda.nccl

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") and torch.version.cuda:
            text = f"there is a driver, but torch {torch.__version__} cannot use it"
            yield Row("GPU", BROKEN, text, "compare CUDA in `nvidia-smi` with torch's; docker run --gpus=all")
        elif shutil.which("nvidia-smi"):
            text = f"torch {torch.__version__} is built without CUDA"
            yield Row("GPU", WARN, text, "install torch from https://pytorch.org for your CUDA version")
        else:
            yield Row("GPU", NOTE, "none: train_ddp.py and train_fsdp2.py run on the CPU, with gloo")
        return
    for index in range(torch.cuda.device_count()):
        name, device = f"GPU {index}", torch.device("cuda", index)
        try:
            free, total = torch.cuda.mem_get_info(device)
            major, minor = torch.cuda.get_device_capability(device)
            ones = torch.ones(64, 64, device=device)
            is_right = bool(((ones @ ones) == 64).all())
        except RuntimeError as error:
            yield Row(name, BROKEN, first_line(error), "see `nvidia-smi` and `dmesg`; install a torch for this card")
            continue
        found = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, {gib(free)} of "
        found += f"{gib(total)} free"
        if not is_right:
            yield Row(name, BROKEN, f"{found}; a matrix product is wrong", "take this card out of use")
        elif free < 0.9 * total:
            yield Row(name, WARN, found, "other processes hold its memory: see `nvidia-smi`, end them or choose cards")
        elif major < 8:
            yield Row(name, WARN, f"{found}; no fast BF16", "precision=fp32 with train_ddp.py or train_fsdp2.py")
        else:
            yield Row(name, OK, found)
    driver = "CUDA {}, cuDNN {}, NCCL {}".format(
        torch.version.cuda, torch.backends.cudnn.version(), ".".join(map(str, torch.cuda.nccl.version()))
    )
    yield Row("CUDA libraries", OK, driver)


def find_cudnn(environment: dict[str, str], ldconfig: str, folders: Iterable[Path]) -> list[Path]:
    """Every cuDNN that the loader or TransformerEngine could come by, each once, in the order of the search."""
    places = [Path(p) for p in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if p]
    for variable in ("CUDNN_PATH", "CUDNN_HOME"):
        if variable in environment:
            places += [Path(environment[variable]) / sub for sub in ("lib", "lib64")]
    files = [file for place in [*places, *folders] for file in sorted(place.glob("libcudnn.so*"))]
    files += [Path(path) for path in re.findall(r"=> (\S*/libcudnn\.so\S*)", ldconfig)]
    return list(dict.fromkeys(file.resolve() for file in files if file.exists()))


def cudnn_version(file: Path) -> str:
    """What the library says of itself, asked in a process of its own: two must not be loaded into one."""
    code = f"import ctypes; print(ctypes.CDLL({str(file)!r}).cudnnGetVersion())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    number = int(done.stdout) if done.stdout.strip().isdigit() else 0
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else "unknown"


def check_cudnn(libraries: list[Path], version_of: Any = cudnn_version) -> Iterator[Row]:
    """More than one version on the paths: torch loads its own, TransformerEngine the first one."""
    versions = {file: version_of(file) for file in libraries}
    listed = ", ".join(f"{version} in {file.parent}" for file, version in versions.items())
    if len(set(versions.values())) <= 1:
        yield Row("cuDNN", OK, listed)
        return
    yield Row(
        "cuDNN",
        WARN,
        f"several on the search paths: {listed}",
        "TransformerEngine's import fails if it meets another one than torch's. Put torch's first: export "
        "CUDNN_PATH=$(python -c 'import nvidia.cudnn as c; print(list(c.__path__)[0])') CUDNN_HOME=$CUDNN_PATH "
        "LD_LIBRARY_PATH=$CUDNN_PATH/lib:$LD_LIBRARY_PATH",
    )


def check_transformer_engine() -> Iterator[Row]:
    """Its import, which fails where its libraries do not fit, and the FP8 recipes of this card."""
    import torch

    import vit_te
    from schema import ConfigError

    if not any(name.startswith("transformer_engine") for name in _installed()):
        return  # the packages' rows say so
    try:
        engine = vit_te.transformer_engine()
    except ConfigError as error:
        text = str(error).removeprefix("model.transformer_engine=true, but ")
        yield Row("TransformerEngine", BROKEN, text, "see the row of cuDNN; else build it again for this torch")
        return
    if not torch.cuda.is_available():
        yield Row("TransformerEngine", NOTE, "imports; without a GPU it cannot say which FP8 recipes there are")
        return
    can, cannot = [], []
    for name in ("is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available"):
        possible, reason = getattr(engine, name)(return_reason=True)
        label = name.removeprefix("is_").removesuffix("_available").replace("_", " ")
        (can if possible else cannot).append(label if possible else f"{label} ({reason.rstrip('.')})")
    found = f"can do {', '.join(can) or 'BF16 only'}" + (f"; not {', '.join(cannot)}" if cannot else "")
    yield Row("TransformerEngine", OK if can else NOTE, found)


def check_host(cfg: Any, ranks_here: int) -> Iterator[Row]:
    """Cores and open files for the loader processes of the ranks on this node."""
    workers = ranks_here * cfg.data.num_workers
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} cores for {ranks_here} ranks with {cfg.data.num_workers} loader processes each"
    if cores < workers:
        yield Row("CPU", WARN, found, f"lower data.num_workers to {cores // ranks_here}, or give the job more cores")
    else:
        yield Row("CPU", OK, found)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < 4096 and cfg.data.num_workers:
        yield Row("open files", WARN, f"at most {limit}", "ulimit -n 65536; loader processes hold batches as files")


def check_shared_memory(cfg: Any, world_size: int, ranks_here: int) -> Iterator[Row]:
    """Room for the loader processes' batches."""
    from runtime import shared_memory

    if not shared_memory.FOLDER.is_dir():
        return
    needed = shared_memory.needed(cfg, world_size=world_size, ranks_here=ranks_here)
    free = shutil.disk_usage(shared_memory.FOLDER).free
    found = f"{gib(free)} free, the loader processes can fill {gib(needed)}"
    if free < needed:
        yield Row("/dev/shm", WARN, found, "docker run --shm-size=16G (or --ipc=host), or lower data.num_workers")
    else:
        yield Row("/dev/shm", OK, found)


def check_data(cfg: Any) -> Iterator[Row]:
    """The folder as training would read it, and the speed of one process with a microbatch."""
    import imagenet_dataset
    from schema import ConfigError

    try:
        sizes = imagenet_dataset.run_sizes(cfg, 1)
        batch = min(cfg.global_batch_size, 64)
        if cfg.data.packing.enabled:  # whole rows
            batch = max(batch // cfg.data.packing.images_per_row, 1) * cfg.data.packing.images_per_row
        data = dataclasses.replace(cfg.data, num_workers=0, size_schedule=None)
        alone = dataclasses.replace(cfg, global_batch_size=batch, micro_batch_size=batch, data=data)
        loader, _ = imagenet_dataset.build_loaders(alone, imagenet_dataset.run_sizes(alone, 1), rank=0, start_step=0)
        start = time.perf_counter()
        next(iter(loader))
        rate = batch / (time.perf_counter() - start)
    except ConfigError as error:
        yield Row("data", BROKEN, str(error), "see the message; data.path=FOLDER names the data set")
    except OSError as error:
        yield Row("data", BROKEN, first_line(error), "replace the file, or take it out")
    else:
        found = f"{sizes.num_train_images:,} training and {sizes.num_val_images:,} validation images, "
        found += f"{len(sizes.classes) or cfg.model.num_classes} classes; "
        yield Row("data", OK, f"{found}one process reads {rate:,.0f} images/s")


def check_disk(cfg: Any) -> Iterator[Row]:
    """Whether output_dir takes files, and room for the checkpoints that the config keeps."""
    import torch

    from runtime.bucket import is_bucket
    from runtime.checkpoint_places import local_dir
    from vit import VisionTransformer

    folders = {"output_dir": cfg.output_dir, "checkpoint.ckpt_dir": cfg.checkpoint.ckpt_dir}
    if is_bucket(folders["checkpoint.ckpt_dir"]):  # which a run tries itself, before its first step
        folders = {"output_dir": cfg.output_dir, "checkpoint.local_dir": str(local_dir(cfg))}
    for key, path in folders.items():
        if path is None:
            continue
        folder = Path(path).absolute()
        while not folder.exists():
            folder = folder.parent
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
            free = shutil.disk_usage(folder).free
        except OSError as error:
            text = f"{path} cannot be written to ({error.strerror})"
            yield Row(key, BROKEN, text, f"give another folder: {key}=FOLDER")
            continue
        if key == "output_dir":
            yield Row(key, OK, f"{path}, {gib(free)} free")
            continue
        with torch.device("meta"):
            plain = dataclasses.replace(cfg.model, transformer_engine=False)
            parameters = sum(p.numel() for p in VisionTransformer(plain).parameters())
        kept = (cfg.checkpoint.max_checkpoints or 1) + 2  # the best, and the one that is being written
        if is_bucket(cfg.checkpoint.ckpt_dir):
            kept = 2  # and the bucket keeps the others
        needed = 12 * parameters * kept  # FP32 weights and AdamW's two moments
        found = f"{gib(free)} free; {kept} checkpoints of {parameters / 1e6:,.1f} M parameters take {gib(needed)}"
        if free < needed:
            yield Row(key, WARN, found, f"make room, or lower checkpoint.max_checkpoints, or {key}=FOLDER")
        else:
            yield Row(key, OK, found)


def check_scripts(cfg: Any, typed: list[str], world_size: int) -> Iterator[Row]:
    """What each entrypoint would say to this command line on this machine."""
    from launch import check_options, check_script, ranks_to_use

    from schema import ConfigError, split_batch

    for script in SCRIPTS:
        ranks = ranks_to_use(cfg, script, world_size)
        try:
            check_script(cfg, script, ranks)
            note = check_options(cfg, script, typed)
            split = split_batch(cfg, ranks)
        except ConfigError as error:
            yield Row(f"{script}.py", NOTE, f"would refuse: {error}")
        else:
            found = f"{split.micro_batch_size} images x {ranks} ranks x {split.accumulation} microbatches a step"
            yield Row(f"{script}.py", OK, f"{found}; {note}" if note else found)


def time_all_reduce() -> Row:
    """An all-reduce over all ranks: whether the sum is right, and how fast the busiest link was."""
    import torch
    import torch.distributed as dist

    world_size, is_cuda = dist.get_world_size(), torch.cuda.is_available()
    backend, name = ("nccl", "NCCL") if is_cuda else ("gloo", "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    numbers, repeats = (2**26, 20) if is_cuda else (2**22, 3)  # float32: 256 MiB, 16 MiB
    tensor = torch.full((numbers,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(tensor)
    is_right = bool((tensor == world_size * (world_size + 1) / 2).all())
    tensor.zero_()
    for is_timed in (False, True):
        start = time.perf_counter()
        for _ in range(repeats if is_timed else 3):
            dist.all_reduce(tensor)
        if is_cuda:
            torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / repeats
    num_bytes = 4 * numbers
    # The rate of a ring's links, 2 (n - 1) / n of the data each, as nccl-tests' PERFORMANCE.md defines it.
    rate = 2 * (world_size - 1) / world_size * num_bytes / seconds / 1e9
    found = f"{name}, {world_size} ranks: {num_bytes / 2**20:.0f} MiB in {1e3 * seconds:.2f} ms"
    if not is_right:
        return Row("all-reduce", BROKEN, f"{found}, and the sum is wrong", "NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 to try")
    if world_size == 1:
        hint = "; start it under torchrun to test the links" if not is_cuda or torch.cuda.device_count() > 1 else ""
        return Row("all-reduce", OK, f"{backend} starts, alone{hint}")
    found += f", {rate:.1f} GB/s a link"
    if is_cuda and rate < 5:
        return Row("all-reduce", WARN, found, "NCCL_DEBUG=INFO names the transport; see `nvidia-smi topo -m`")
    return Row("all-reduce", OK, found)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """The job's ranks, or this process alone; rank 0 leaves last, and can speak when the others have."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, rank, world_size = dist.HashStore(), 0, 1
    if "WORLD_SIZE" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=world_size)
    yield
    dist.destroy_process_group()
    store.add("doctors_done", 1)
    deadline = time.monotonic() + 10
    while rank == 0 and store.add("doctors_done", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)


def look(arguments: list[str]) -> list[Row]:
    """All that one process can see by itself; the first of a node looks at everything, the others at the packages."""
    rows = [*check_python(), *check_packages()]
    if BROKEN in {row.state for row in rows} or int(os.environ.get("LOCAL_RANK", "0")) > 0:
        return rows
    try:
        with contextlib.redirect_stderr(io.StringIO()) as complaint:
            import launch

            import torch  # noqa: F401

            import schema
    except (ImportError, OSError, SystemExit) as error:
        text = complaint.getvalue().strip() or first_line(error)
        return [*rows, Row("import of torch", BROKEN, text, "install torch and torchvision again, from one place")]
    rows += check_cards()
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    if torch_cudnn := _torch_cudnn():
        known = ""
        if Path(ldconfig).exists():
            known = subprocess.run([ldconfig, "-p"], capture_output=True, text=True).stdout
        rows += check_cudnn(find_cudnn(dict(os.environ), known, torch_cudnn))
    rows += check_transformer_engine()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        cfg, typed = launch.compose(SCRIPTS[0], arguments)
        ranks = launch.ranks_to_use(cfg, SCRIPTS[0], world_size)
        schema.split_batch(cfg, ranks)
    except schema.ConfigError as error:
        return [*rows, Row("config", BROKEN, str(error), "see the message; the arguments are the entrypoints'")]
    rows += check_scripts(cfg, typed, world_size)
    rows += check_host(cfg, ranks_here)
    rows += check_shared_memory(cfg, ranks, ranks_here)
    return [*rows, *check_data(cfg), *check_disk(cfg)]


def _torch_cudnn() -> list[Path]:
    """The folders where torch's own cuDNN lies; none if it was built without."""
    import torch

    if torch.backends.cudnn.version() is None:
        return []
    places = [Path(torch.__file__).parent / "lib"]
    with contextlib.suppress(ImportError):
        import nvidia.cudnn

        places += [Path(place) / "lib" for place in nvidia.cudnn.__path__]
    return places


def _installed() -> set[str]:
    return {(dist.name or "").replace("-", "_") for dist in importlib.metadata.distributions()}


def together(rows: list[Row]) -> list[Row]:
    """Every rank's rows in one table: each said once, with the machine's name where machines differ."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (platform.node(), rows))
    nodes: dict[str, list[Row]] = {}
    for node, theirs in everyone:
        known = nodes.setdefault(node, [])
        known += [row for row in theirs if row not in known]
    if len(nodes) == 1:
        return next(iter(nodes.values()))
    first, *others = nodes.values()
    common = [row for row in first if all(row in other for other in others)]
    rest = {node: [row for row in rows if row not in common] for node, rows in nodes.items()}
    packages = {row.found for rows in nodes.values() for row in rows if row.check == "packages"}
    merged = common + [
        dataclasses.replace(row, check=f"{row.check} ({node})") for node, rows in rest.items() for row in rows
    ]
    if len(packages) > 1:
        merged.append(Row("nodes", BROKEN, "have different versions of packages", "install the same on all of them"))
    return merged


def show(rows: list[Row], width: int) -> str:
    """The table as text, remedies beneath their problems."""
    left = max(len(row.check) for row in rows)
    lines = []
    for row in sorted(rows, key=lambda row: [OK, NOTE, WARN, BROKEN].index(row.state)):
        text = textwrap.wrap(row.found, max(width - left - 10, 40), break_long_words=False) or [""]
        lines.append(f"{row.check:<{left}}  {row.state:<6}  {text[0]}")
        text = text[1:]
        if row.remedy:
            text += textwrap.wrap(f"-> {row.remedy}", max(width - left - 10, 40), break_long_words=False)
        lines += [" " * (left + 10) + line for line in text]
    counts = {state: sum(row.state == state for row in rows) for state in (BROKEN, WARN)}
    lines.append(f"\n{counts[BROKEN]} broken, {counts[WARN]} warnings")
    return "\n".join(lines)


def gib(num_bytes: float) -> str:
    """A size as people read it."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{math.ceil(num_bytes / 2**20)} MiB"


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its name."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def main(argv: list[str] | None = None) -> int:
    """Look, meet, print; 1 if something is broken."""
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    rows = look(arguments)
    speaks = int(os.environ.get("LOCAL_RANK", "0")) == 0  # a node that does not meet the others speaks for itself
    if not {row.check for row in rows if row.state == BROKEN} & {"Python", "import of torch", "torch", "packages"}:
        try:
            with process_group():
                speaks = int(os.environ.get("RANK", "0")) == 0
                timed = time_all_reduce()  # each rank has its own times: one says them
                rows = together([*rows, *([timed] if speaks or timed.state == BROKEN else [])])
        except (RuntimeError, ValueError) as error:
            remedy = "NCCL_DEBUG=INFO shows more; firewalls, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME; one rank a card"
            rows.append(Row("all-reduce", BROKEN, first_line(error), remedy))
    if not speaks:  # nor does it exit with 1: torchrun would end the rank that speaks
        return 0
    print(show(rows, shutil.get_terminal_size((120, 24)).columns), flush=True)
    return int(any(row.state == BROKEN for row in rows))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # no library's last words after the table
