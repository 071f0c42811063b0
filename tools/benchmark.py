"""Measure what the recipe does on a machine, and write it to a file that says how it was measured.

    python tools/benchmark.py train --nproc 2 --output benchmarks/h100x2_b16.json -- \
        --config-name vit_base_patch16_224 data=synthetic num_epochs=null num_train_steps=50

    python tools/benchmark.py start --nproc 8 --output benchmarks/h100x8_start.json -- \
        --config-name vit_base_patch16_224 data=synthetic compile=true
    python tools/benchmark.py compare --output benchmarks/compare_h200.json
    torchrun --standalone --nproc-per-node 2 tools/benchmark.py strategies --output benchmarks/strategies_h200x2.json
    torchrun --standalone --nproc-per-node 2 tools/benchmark.py profile --script train_fsdp2 --output p.json -- \
        --config-name vit_te_large_patch16_224 data=synthetic num_epochs=null num_train_steps=30
    python tools/benchmark.py plot benchmarks/curve_*.json --output benchmarks/curves.png

`train` runs the three entrypoints one after the other, each in processes of its own, with the same overrides, and reads
their metrics.jsonl: the whole loss curve, and the median of speed, MFU and memory over the log lines after the warm-up.
`start` takes the seconds from the launch of each entrypoint to the first line of its log, to its first step and to its
last, twice: with empty caches of torch.compile and Triton, and with those that the first start filled.
`compare` times one GPU's whole step of an entrypoint of ours and of its peers (timm, Hugging Face, torchvision, bare
TransformerEngine, DeepSpeed), each after its gradients were compared with float32 timm's: a table and a picture.
`strategies` times whole steps of the three entrypoints in one start, for each of several models and blocks.
`save` times how long saves hold up the training, synchronous and asynchronous ones, and a resume, as a run's log tells
it.
`loader` measures reading images: images a second and CPU core for each way of decoding, beside torchvision's
ImageFolder with Pillow and NVIDIA's DALI where it is installed; then images a second that arrive on the device.
`profile` says where the time of a step goes under one strategy, by kinds of kernels. `plot` draws the loss curves of
`train`.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
NO_EVALUATION = ("evaluation.every_n_steps=null", "evaluation.every_n_epochs=null")
STOP_S = 60  # for a run to save and end in, after each of two signals
PACKAGES = ("torch", "torchvision", "timm", "megatron-fsdp", "transformer-engine", "hydra-core")
PACKAGES += ("pillow", "nvidia-dali-cuda120")


def provenance() -> dict[str, Any]:
    """Command, card, versions, commit and date: what every result file carries."""
    import torch

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    described = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
    )
    return {
        "command": shlex.join(["python", *sys.argv]),
        "card": f"{len(cards)} x {cards[0]}" if cards else f"CPU, {os.cpu_count()} cores",
        "versions": versions,
        "commit": os.environ.get("COMMIT") or described.stdout.strip() or "unknown",  # COMMIT: for a copy without .git
        "date": time.strftime("%Y-%m-%d"),
    }


def write(output: Path, results: Any, meta: dict[str, Any] | None = None) -> None:
    """The result file, with what it takes to measure again."""
    output.write_text(json.dumps({"meta": meta or provenance(), "results": results}, indent=1) + "\n")


def config_name_and_overrides(arguments: list[str]) -> tuple[str, list[str]]:
    """An entrypoint's arguments apart: the primary config, and what changes it."""
    if "--config-name" not in arguments[:-1]:
        return "L0_sanity", arguments
    at = arguments.index("--config-name")
    return arguments[at + 1], arguments[:at] + arguments[at + 2 :]


def processes_of(folder: Path) -> list[int]:
    """The processes of a run, by its output_dir on their command lines: torchrun, ranks, loader workers."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if f"output_dir={folder}".encode() in each.read_bytes().split(b"\0"):
                found.append(int(each.parent.name))
    return found


def ended(torchrun: subprocess.Popen, folder: Path) -> bool:
    """Wait for all processes of a run that is ending; whether it took no SIGKILL.

    torchrun leaves a rank behind if it is signalled while it starts it: SignalException comes out of Popen, before the
    process is anybody's (seen with torch 2.14.1). So those that are still there are signalled themselves.
    """
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            for pid in processes_of(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline = time.monotonic() + STOP_S
        while torchrun.poll() is None or processes_of(folder):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            return number is not signal.SIGKILL
    return False


def run(
    script: str, folder: Path, args: argparse.Namespace, *overrides: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One run of an entrypoint under torchrun with `folder` as its output_dir; its metrics.jsonl and status.json.

    Past --timeout it is stopped as a preempted run is: it saves, and what it measured counts.
    """
    folder = folder.absolute()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc}"]
    command += [ROOT / f"{script}.py", *args.overrides, f"output_dir={folder}", *overrides]
    with tempfile.TemporaryFile("w+") as log:  # no pipe: a rank that outlives torchrun would keep it open
        process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=log)
        started = time.monotonic()
        while process.poll() is None and time.monotonic() - started < args.timeout:
            time.sleep(0.05)
        was_stopped = process.poll() is None
        if was_stopped:
            process.terminate()
        has_ended = ended(process, folder)
        log.seek(0)
        errors = log.read()
    if not has_ended:
        sys.exit(f"{script} had not ended {STOP_S} s after it was stopped at --timeout={args.timeout:g}")
    status = json.loads((folder / "status.json").read_text()) if (folder / "status.json").exists() else {}
    # One that is stopped while it ends has finished, too.
    if process.returncode and not (was_stopped and status.get("state") in ("preempted", "finished")):
        sys.exit(f"{script} failed with {process.returncode}:\n{errors[-4000:]}")
    written = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    if not lines:
        sys.exit(f"{script} was stopped at --timeout={args.timeout:g} before its first step: give it longer")
    return lines, status


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run the entrypoints and gather their metrics; with --keep their folders stay there, checkpoints too."""
    results = {}
    for script in args.scripts:
        with contextlib.nullcontext(args.keep / script) if args.keep else tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            lines, status = run(script, Path(folder), args, *([] if args.keep else ["checkpoint.ckpt_dir=null"]))
            seconds = time.perf_counter() - started
        rows = [line for line in lines if "train/loss" in line]
        steady = [row for row in rows if row["step"] > args.warmup] or rows[-1:]

        def median(key: str, steady: list[dict] = steady) -> float | None:
            values = [row[key] for row in steady if row[key] is not None]
            return round(statistics.median(values), 4) if values else None

        results[script] = {
            "images_per_second": median("train/images_per_second"),
            "step_time_s": median("train/step_time_s"),
            "mfu": median("train/mfu"),
            "data_wait_fraction": median("train/data_wait_fraction"),
            "memory_peak_gib": median("train/memory_peak_gib"),
            "wall_s": round(seconds, 1),  # from the launch to its end
            "ended": {key: status[key] for key in ("state", "step")},  # preempted: by --timeout
            "losses": {row["step"]: round(row["train/loss"], 6) for row in rows},
            "validation": [line for line in lines if "val/top1" in line],
        }
        print(json.dumps({"script": script} | {k: v for k, v in results[script].items() if k != "losses"}), flush=True)
    return results


def save(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds that saves hold up a run, without its first one, seconds to resume, and the run's step time.

    The asynchronous saves are those of a second start, which goes on from the synchronous ones. An asynchronous save
    also waits for the one before, which is rare where saves are minutes apart; here they are not: `waits_s` has that.
    """
    results = {}
    for script in args.scripts:
        with tempfile.TemporaryDirectory() as name:
            folder, last, told = Path(name), 0, 0
            for way in ("false", "true"):
                first, last = last, last + 3 * args.every
                saves = [f"checkpoint.async_save={way}", f"checkpoint.save_every_n_steps={args.every}"]
                saves += ["checkpoint.save_every_n_epochs=null"]
                saves += ["checkpoint.save_final_model=false", "checkpoint.max_checkpoints=1"]
                length = [
                    "num_epochs=null",
                    f"num_train_steps={last}",
                    f"lr_scheduler.num_training_steps={6 * args.every}",
                ]
                lines, status = run(script, folder, args, *saves, *length, *NO_EVALUATION, "logger.frequency=1")
                if status["state"] != "finished":
                    sys.exit(f"{script} was stopped at --timeout={args.timeout:g} before its last save: give it longer")
                whole_log = (folder / "train.log").read_text()
                log, told = whole_log[told:], len(whole_log)
                size = sum(file.stat().st_size for file in folder.glob(f"checkpoints/step_{last:08d}/*"))
                found = re.findall(
                    r"step \d+: (?:saved|copied, to be written) in ([\d.]+) s(?:, after ([\d.]+) s)?", log
                )
                stalls, waits = ([float(seconds or 0) for seconds in column] for column in zip(*found, strict=True))
                steps = [line for line in lines if "train/loss" in line and line["step"] > first + 4]
                step_time = statistics.median(line["train/step_time_s"] for line in steps)
                row = {"script": script, "async_save": way == "true", "checkpoint_gib": round(size / 2**30, 3)}
                row |= {"stalls_s": stalls, "waits_s": waits, "step_time_s": step_time, "stall_s": max(stalls[1:])}
                row["stall_in_steps"] = round(row["stall_s"] / step_time, 2)
                if resumed := re.search(r"resumed from .* in ([\d.]+) s", log):
                    row["resume_s"] = float(resumed[1])
                results[f"{script}, async_save={way}"] = row
                print(json.dumps(row), flush=True)
    return results


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the launch of each entrypoint to what a user waits for, without and with the caches of a compiler.

    Whether the machine still had the packages' files in memory at the first start is not known.
    """
    results = {}
    length = ["num_epochs=null", f"num_train_steps={args.steps}", "logger.frequency=1", *NO_EVALUATION]
    for script in args.scripts:
        results[script] = {}
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            for which in ("first", "second"):
                output = [f"output_dir={folder}/{which}", "checkpoint.ckpt_dir=null"]
                row = seconds_to_steps(script, [*args.overrides, *length, *output], args, environment=caches)
                results[script][which] = row
                print(json.dumps({"script": script, "start": which} | row), flush=True)
    return results


def seconds_to_steps(
    script: str, overrides: list[str], args: argparse.Namespace, *, environment: dict[str, str]
) -> dict[str, float]:
    """When a run of an entrypoint wrote its first line, its first step and its last, in seconds since its launch."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc}"] if args.nproc else []
    command = [sys.executable, *torchrun, str(ROOT / f"{script}.py"), *overrides]
    time_of_day = r"\d\d:\d\d:\d\d "
    lines = {"log_s": time_of_day} | {f"step_{n}_s": f"{time_of_day}step {n}/" for n in (1, args.steps)}
    found: dict[str, float] = {}
    written = ""
    launched = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        timer = threading.Timer(args.timeout, process.terminate)
        timer.start()
        for line in cast(Any, process.stderr):
            seconds = round(time.perf_counter() - launched, 2)
            written += line
            for name in [name for name, pattern in lines.items() if name not in found and re.match(pattern, line)]:
                found[name] = seconds
        timer.cancel()
    if process.returncode or len(found) < len(lines):
        sys.exit(
            f"{script} ended with {process.returncode} before step {args.steps}, --timeout={args.timeout:g}:\n"
            f"{written[-4000:]}"
        )
    return found


# One GPU's step. Batches as in the project's first measurements.
SIZES = {"base_patch16": 512, "large_patch16": 256, "huge_patch14": 128}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Rows of ours and of its peers, each measured in a process of its own; a table and a picture beside the file."""
    import peers

    variants = [name for name in peers.VARIANTS if re.search(args.variants, name)]
    # In processes of their own, too: this one must not use CUDA, or its forks could not.
    meta, rates, rows = peers.in_own_process(provenance), [peers.in_own_process(peers.gemm_rate)], []
    for size in args.sizes:
        name, _, rest = size.partition(":")
        batch, _, depth = rest.partition(":")
        batch, depth = int(batch or SIZES[name]), int(depth) if depth else None
        flops = peers.flops_per_step(name, batch, depth)
        is_first = name not in [row["model"] for row in rows]
        for variant in variants:
            row = peers.in_own_process(peers.measure, name, batch, depth, variant, args.script, args.steps, is_first)
            if "error" in row:
                row = {"model": name, "batch": batch, "variant": variant} | row
            else:
                row["share_of_gemm"] = round(flops / row["step_time_s"] / 1e12 / rates[0], 3)
            rows.append(row)
            print(json.dumps(row), flush=True)
            # What there is so far, should the next one fail.
            write(args.output, {"gemm_tflops": rates, "rows": rows}, meta)
            args.output.with_suffix(".md").write_text(peers.table(rows) + "\n")
            peers.draw(rows, str(args.output.with_suffix(".png")))
    rates.append(peers.in_own_process(peers.gemm_rate))  # a card that warmed up is slower
    return {"gemm_tflops": [round(rate, 1) for rate in rates], "rows": rows}


def strategies(args: argparse.Namespace) -> dict[str, Any]:
    """Rows of ours by model, block and entrypoint, one after the other in the processes that torchrun started."""
    import peers

    meta, rate, rows = provenance(), peers.gemm_rate(int(os.environ.get("LOCAL_RANK", "0"))), []
    ranks, is_main = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    variants, folder = [name for name in peers.OURS if re.search(args.variants, name)], args.output.with_suffix(".run")
    work = [*itertools.product(args.sizes, variants, args.scripts)]
    # Last, because DeepSpeed keeps the process group that it makes.
    work += itertools.product(args.sizes, [name for name in peers.SHARDED_PEER if re.search(args.variants, name)], [""])
    for size, variant, script in work:
        name, _, batch = size.partition(":")
        images = int(batch or SIZES[name])
        row: dict[str, Any] = {"model": name, "images_a_gpu": images, "gpus": ranks, "variant": variant}
        if script:
            row |= {"script": script}
            row |= peers.time_entrypoint(name, images, None, variant, script, args.steps, folder, ranks)
        else:
            row |= peers.time_loop(name, images, None, peers.SHARDED_PEER[variant], args.steps)
            row["images_per_second"] *= ranks
        rows.append(row)
        peers.free_memory()
        if is_main:
            flops = peers.flops_per_step(name, images, None)
            row["share_of_gemm"] = round(flops / row["step_time_s"] / 1e12 / rate, 3)
            print(json.dumps(row), flush=True)
            # What there is so far, should the next one fail.
            write(args.output, {"gemm_tflops": round(rate, 1), "rows": rows}, meta)
            shutil.rmtree(folder, ignore_errors=True)
    return {"gemm_tflops": round(rate, 1), "rows": rows}


class Clocked:
    """A data set whose items tell how much CPU time their process has used."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, key: Any) -> tuple[Any, float]:
        return self.dataset[key], time.process_time()


def cpu_seconds(dataset: Any, keys: list[Any], collate: Callable, batch: int) -> float:
    """CPU seconds an image that one loader process needs, putting batches together included."""
    from torch.utils.data import DataLoader, Dataset

    def gather(items: list[tuple[Any, float]]) -> tuple[Any, float]:
        collate([item for item, _ in items])
        return items[-1][1], time.process_time()

    batches = [keys[i : i + batch] for i in range(0, len(keys) - batch + 1, batch)]
    clocked = cast(Dataset, Clocked(dataset))  # in all but its base, for which this file would need torch at its top
    loader = DataLoader(clocked, batch_sampler=batches, num_workers=1, collate_fn=gather)
    clocks = [after for _, after in loader]
    return (clocks[-1] - clocks[0]) / (len(batches) - 1) / batch  # the first batch warms up


def parts_of_a_image(dataset: Any, keys: list[Any]) -> dict[str, float]:
    """CPU milliseconds an image, the best of ten rounds: all of it, and each part alone with what it needs at hand."""
    import torch

    import imagenet_dataset as data
    from runtime import seeding

    read, decoder, cfg = dataset.images.read, dataset.decoder, dataset.cfg
    files = [read(index) for _, index in keys]
    headers = [decoder.open(file) for file in files]
    images = [decoder.tensor(file) for file in files]
    interpolation = data.InterpolationMode(cfg.interpolation)

    def cut(image: Any) -> Any:
        box = data.crop_box(image, cfg)
        return data.F.resized_crop(image, *box, [cfg.image_size] * 2, interpolation=interpolation, antialias=True)

    cuts = [cut(image) for image in images]

    def seed(key: tuple[int, int]) -> None:
        with seeding.sample(dataset.seed, key[0]):
            pass

    decode = functools.partial(map, decoder.tensor, files, headers)
    work: dict[str, Callable[[], Any]] = {
        "all": lambda: map(dataset.__getitem__, keys),
        "decode": decode,
        "crop and resize": lambda: map(cut, images),
        "read the file": lambda: map(read, (index for _, index in keys)),
        "read the header": lambda: map(decoder.open, files),
        "flip": lambda: map(dataset.augment, cuts),
        "seed the generators": lambda: map(seed, keys),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a loader process
    best = dict.fromkeys(work, float("inf"))
    for _, (name, make) in itertools.product(range(10), work.items()):
        start = time.process_time()
        collections.deque(make(), maxlen=0)
        best[name] = min(best[name], (time.process_time() - start) / len(keys))
    torch.set_num_threads(threads)
    return {name: round(1e3 * seconds, 3) for name, seconds in best.items()}


def dali(files: list[str], size: int, interpolation: str, batch: int) -> Callable[[], float] | None:
    """A function that measures DALI's CPU seconds an image (decodes the crop, antialiased); None without DALI."""
    try:
        from nvidia.dali import fn, pipeline_def, types  # pyright: ignore[reportMissingImports]  (installed by hand)
    except ImportError:
        return None

    @pipeline_def(batch_size=batch, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def pipeline() -> Any:
        data, labels = fn.readers.file(files=files, dont_use_mmap=True)
        crop = {"random_area": [0.08, 1.0], "random_aspect_ratio": [3 / 4, 4 / 3]}
        images = fn.decoders.image_random_crop(data, device="cpu", output_type=types.RGB, **crop)
        kinds = {"bicubic": types.INTERP_CUBIC, "bilinear": types.INTERP_LINEAR}
        images = fn.resize(images, size=[size, size], interp_type=kinds[interpolation], antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    built = pipeline()
    built.build()
    built.run()

    def measure() -> float:
        start = time.process_time()  # of all threads
        for _ in range(len(files) // batch):
            built.run()
        return (time.process_time() - start) / (len(files) // batch) / batch

    return measure


def loader(args: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds an image in turn for each way, several rounds; then what reaches the device."""
    import launch

    import torch
    from torch.utils.data import default_collate
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    import imagenet_dataset as data

    originals = sorted(path.resolve() for path in args.files.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg"))
    results: dict[str, Any] = {"files": len(originals), "per_core": {}, "parts_ms": {}, "to_device": []}
    with tempfile.TemporaryDirectory() as folder:
        for split, repeats in (("train", args.repeat), ("val", 1)):  # links: the page cache holds the files once
            for i, (path, k) in enumerate(itertools.product(originals, range(repeats))):
                link = Path(folder) / split / f"class{i % 10}" / f"{k:04d}_{path.name}"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path)

        def config(*overrides: str) -> Any:
            base = [f"data.path={folder}", "output_dir=unused", "num_epochs=1", "global_batch_size=64"]
            return launch.load_config("vit_base_patch16_224", [*base, *overrides, *args.overrides])

        ways: dict[str, Callable[[], float]] = {}
        for interpolation in ("bilinear", "bicubic"):
            chosen = f"data.interpolation={interpolation}"
            size, num = config(chosen).data.image_size, len(originals) * 4
            crop = transforms.RandomResizedCrop(size, interpolation=transforms.InterpolationMode(interpolation))
            flip = transforms.RandomHorizontalFlip()
            to_float = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
            reference = ImageFolder(f"{folder}/train", transforms.Compose([crop, flip, *to_float]))
            generator = torch.Generator().manual_seed(0)
            picked = torch.randperm(len(reference), generator=generator)[:num].tolist()
            ways[f"ImageFolder, Pillow, {interpolation}"] = functools.partial(
                cpu_seconds, reference, picked, default_collate, 64
            )
            for decoder in ("pillow", "torchvision"):
                cfg = config(chosen, f"data.decoder={decoder}")
                ours = data.ImageDataset(data.list_images(cfg.data, "train"), cfg, is_train=True)
                keys = list(enumerate(picked))
                ways[f"ours, {decoder}, {interpolation}"] = functools.partial(
                    cpu_seconds, ours, keys, data._collate, 64
                )
            files = [reference.samples[i][0] for i in picked]
            if measure := dali(files, size, interpolation, 64):
                ways[f"DALI on the CPU, {interpolation}"] = measure
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _, (name, measure) in itertools.product(range(args.rounds), ways.items()):
            seconds[name].append(measure())
        for name, measured in seconds.items() if args.rounds else ():
            rate = round(1 / statistics.median(measured), 1)
            row = {"images_per_core_second": rate, "rounds": [round(1 / s, 1) for s in measured]}
            results["per_core"][name] = row
            print(json.dumps({"way": name} | row), flush=True)

        if args.rounds:
            cfg = config("data.decoder=torchvision")
            each_once = data.ImageDataset(data.list_images(cfg.data, "val"), cfg, is_train=True)
            results["parts_ms"] = parts_of_a_image(each_once, [(i, i) for i in range(len(originals))])
            print(json.dumps(results["parts_ms"]), flush=True)

        for decoder in ("torchvision", "nvjpeg") if torch.cuda.is_available() else ("torchvision",):
            workers = f"data.num_workers={args.workers}"
            cfg = config(f"data.decoder={decoder}", workers, f"global_batch_size={args.batch}", "num_epochs=3")
            started = time.perf_counter()
            batches = iter(data.build_loaders(cfg, data.run_sizes(cfg, 1), rank=0, start_step=0)[0])
            device = "cuda" if torch.cuda.is_available() else "cpu"
            next(batches)
            first = time.perf_counter() - started
            for _ in range(args.workers):  # what was read ahead is not counted
                next(batches)[0].to(device)
            if device == "cuda":
                torch.cuda.synchronize()
            begun, count = time.perf_counter(), 0
            for images, _ in itertools.islice(batches, args.batches):
                images.to(device, non_blocking=True)
                count += len(images)
            if device == "cuda":
                torch.cuda.synchronize()
            rate = count / (time.perf_counter() - begun)
            row = {"decoder": decoder, "workers": args.workers, "images_per_second": round(rate, 1)}
            row |= {"batch": args.batch, "batches": args.batches, "first_batch_s": round(first, 3)}
            results["to_device"].append(row)
            print(json.dumps(row), flush=True)
            del batches
    return results


KERNELS = {  # first match counts
    "communication": "nccl",
    "attention": "flash|fmha|sdpa|cudnn.*attn|softmax",
    "matrix products": "gemm|nvjet|cutlass|xmma|cublas|splitK",
    "layer norm": "layer_?norm|ln_|rmsnorm|norm_bwd|norm_fwd|Norm",
    "FP8 casts and scales": "quantize|amax|cast|transpose|fp8|scale",
    "optimizer": "adam|multi_tensor_apply",
    "copies": "Memcpy|Memset|copy|Cat|cat_|split_with_sizes|chunk_cat",
}


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Run one entrypoint under torch.profiler in this process and add up the kernels of its last steps."""
    import launch

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.profiler import ProfilerActivity, schedule

    config_name, overrides = config_name_and_overrides(args.overrides)
    # One folder for all ranks; what a run writes there is of no interest.
    folder = Path(tempfile.gettempdir()) / f"profile-{os.environ.get('MASTER_PORT', os.getpid())}"
    output = [f"output_dir={folder}", "checkpoint.ckpt_dir=null", *NO_EVALUATION]
    cfg = launch.load_config(config_name, [*overrides, *output, "logger.frequency=1000"], script=args.script)
    # The optimizer takes a step or two before the first of the run; the last ones are not needed. What comes between
    # the warm-up and the profile is timed without it.
    wait = cfg.num_train_steps - args.steps - 2
    # What the host launched before the profile would run in it, and be counted: the host of a recorded step is ahead.
    marks: dict[int, float] = {args.warmup: 0.0, wait: 0.0, wait + 1: 0.0}
    count = itertools.count(1)
    found: list[dict[str, Any]] = []

    def after_step(*_: Any) -> None:
        if (number := next(count)) in marks:
            torch.cuda.synchronize()
            marks[number] = time.perf_counter()
        profiler.step()

    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=wait, warmup=1, active=args.steps, repeat=1),
        on_trace_ready=lambda profiler: found.append(summarise(profiler.events(), args.steps)),
    ) as profiler:
        register_optimizer_step_post_hook(after_step)
        importlib.import_module(args.script).main(cfg)
    if int(os.environ.get("RANK", "0")) == 0:  # whose folder it is: it may still write there when others are done
        shutil.rmtree(folder, ignore_errors=True)
    step_time = (marks[wait] - marks[args.warmup]) / (wait - args.warmup)
    timed = {"step_time_s": round(step_time, 5), "images_per_second": round(cfg.global_batch_size / step_time, 1)}
    return {"script": args.script, "timed": timed, "profiled": found[0]}


def summarise(events: Any, steps: int) -> dict[str, Any]:
    """Milliseconds a step: by kind of kernel, communication that nothing else hides, and an idle GPU."""
    from torch.autograd import DeviceType

    # Ranges that the host has named (a step, DDP's forward, an optimizer's step) are on the GPU's timeline, too.
    ranges = {e.name for e in events if e.device_type == DeviceType.CPU}
    kernels = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in events
        if e.device_type == DeviceType.CUDA and e.name not in ranges
    )
    kinds: dict[str, float] = dict.fromkeys([*KERNELS, "pointwise and other"], 0.0)
    names: dict[str, float] = collections.defaultdict(float)
    compute, everything = [], []
    for start, end, name in kernels:
        names[name[:120]] += end - start
        kind = next((k for k, pattern in KERNELS.items() if re.search(pattern, name)), "pointwise and other")
        kinds[kind] += end - start
        everything.append((start, end))
        if kind != "communication":
            compute.append((start, end))
    window = kernels[-1][1] - kernels[0][0]
    busy, computing = covered(everything), covered(compute)
    per_step = {kind: round(time / 1e3 / steps, 2) for kind, time in kinds.items()}
    longest = sorted(names, key=names.__getitem__)[:-16:-1]
    return {
        "step_ms": round(window / 1e3 / steps, 2),
        "kernels_ms": per_step,
        "communication_not_hidden_ms": round((busy - computing) / 1e3 / steps, 2),
        "gpu_idle_ms": round((window - busy) / 1e3 / steps, 2),
        "kernels_a_step": len(kernels) // steps,
        "longest_ms": {name: round(names[name] / 1e3 / steps, 2) for name in longest},
    }


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of sorted intervals."""
    total, until = 0.0, float("-inf")
    for start, end in intervals:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def plot(args: argparse.Namespace) -> None:
    """Loss over steps, a line for each entrypoint of each result file of `train`; below, minus the first one's."""
    import matplotlib.pyplot as plt

    curves = {}
    # Character by character, as this function does it, is what file names of one measurement share.
    prefix = os.path.commonprefix([path.stem for path in args.files])  # noqa: RUF071
    for path in args.files:
        results = json.loads(path.read_text())["results"]
        for script, result in results.items():
            name = path.stem.removeprefix(prefix) or path.stem
            losses = {int(number): loss for number, loss in result["losses"].items()}
            curves[name if len(results) == 1 else f"{name} {script}"] = losses
    figure, (top, bottom) = plt.subplots(2, figsize=(8, 7), sharex=True, height_ratios=(3, 2))
    first_name, first = next(iter(curves.items()))
    for name, losses in curves.items():
        last = statistics.mean(list(losses.values())[-20:])
        top.plot(losses.keys(), losses.values(), label=f"{name}: {last:.4f} over the last 20", linewidth=1)
        bottom.plot(losses.keys(), [losses[number] - first[number] for number in losses], linewidth=1)
    top.set(ylabel="train/loss")
    bottom.set(xlabel="step", ylabel=f"minus that of {first_name}")
    top.legend()
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(args.output, dpi=100)


def check(args: argparse.Namespace) -> None:
    """Refuse, in one line, what cannot be measured here or at all."""
    from launch import exit_with

    import torch

    if args.what == "save" and args.every < 2:
        exit_with(f"--every={args.every}: give 2 or more, since the first four steps of a start do not count")

    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # another way to look would keep CUDA from this process's forks
    if torch.cuda.is_available():
        return
    if args.what in ("compare", "strategies", "profile"):
        exit_with(f"{args.what} needs a CUDA GPU, and torch sees none: run it on a machine with one")
    if "train_mfsdp" in getattr(args, "scripts", ()):
        exit_with("--scripts train_mfsdp needs a CUDA GPU, and torch sees none: give --scripts train_ddp train_fsdp2")


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    sub = commands.add_parser("train", help="images/s, MFU, memory and loss curves of the entrypoints")
    sub.add_argument("--scripts", nargs="+", default=["train_ddp", "train_fsdp2", "train_mfsdp"])
    sub.add_argument("--nproc", type=int, default=1)
    sub.add_argument("--keep", type=Path, help="folder for the runs; otherwise they leave nothing")
    sub.add_argument("--warmup", type=int, default=10, help="steps that do not count")
    sub.add_argument("--timeout", type=float, default=300, help="seconds a script, which then saves and ends")
    sub.add_argument("--output", type=Path, required=True)
    sub.add_argument("overrides", nargs="*", help="after --: the entrypoints' own arguments")
    sub = commands.add_parser("save", help="how long saves hold up a run")
    sub.add_argument("--scripts", nargs="+", default=["train_ddp", "train_fsdp2", "train_mfsdp"])
    sub.add_argument("--nproc", type=int, default=1)
    sub.add_argument("--every", type=int, default=4, help="steps between saves; a run has three")
    sub.add_argument("--timeout", type=float, default=300, help="seconds a run")
    sub.add_argument("--output", type=Path, required=True)
    sub.add_argument("overrides", nargs="*", help="after --: the entrypoints' own arguments")
    sub = commands.add_parser("start", help="seconds from the launch to the first log line, step and a later step")
    sub.add_argument("--scripts", nargs="+", default=["train_ddp", "train_fsdp2", "train_mfsdp"])
    sub.add_argument("--nproc", type=int, default=0, help="processes of torchrun; 0 = one process without torchrun")
    sub.add_argument("--steps", type=int, default=12, help="of a run; CUDA graphs are recorded in step 12")
    sub.add_argument("--timeout", type=float, default=300, help="seconds a run")
    sub.add_argument("--output", type=Path, required=True)
    sub.add_argument("overrides", nargs="*", help="after --: the entrypoints' own arguments")
    sub = commands.add_parser("compare", help="one GPU's step: ours beside timm, Hugging Face, torchvision, DeepSpeed")
    sub.add_argument("--sizes", nargs="+", default=list(SIZES), help="MODEL[:BATCH[:DEPTH]], several to draw a curve")
    sub.add_argument("--variants", default=".", help="a regular expression over the variants' names (tools/peers.py)")
    sub.add_argument("--script", default="train_ddp", help="the entrypoint that ours runs")
    sub.add_argument("--steps", type=int, default=15, help="that count, a row")
    sub.add_argument("--output", type=Path, required=True)
    sub = commands.add_parser("strategies", help="ours by model, block and entrypoint, on the GPUs torchrun gives it")
    sub.add_argument("--sizes", nargs="+", default=list(SIZES), help="MODEL[:BATCH], of each GPU")
    sub.add_argument("--variants", default=".", help="a regular expression over the names of ours (tools/peers.py)")
    sub.add_argument("--scripts", nargs="+", default=["train_ddp", "train_fsdp2", "train_mfsdp"])
    sub.add_argument("--steps", type=int, default=15, help="that count, a row")
    sub.add_argument("--output", type=Path, required=True)
    sub = commands.add_parser("loader", help="how fast images are read")
    sub.add_argument("--files", type=Path, required=True, help="a folder of JPEGs")
    sub.add_argument("--repeat", type=int, default=100, help="times that each file stands in the training set")
    sub.add_argument("--rounds", type=int, default=5, help="of the measurement per core; 0 = without it")
    sub.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    sub.add_argument("--batch", type=int, default=256)
    sub.add_argument("--batches", type=int, default=40)
    sub.add_argument("--output", type=Path, required=True)
    sub.add_argument("overrides", nargs="*", help="after --: values of the config")
    sub = commands.add_parser("profile", help="where a step's time goes; under torchrun for more than one GPU")
    sub.add_argument("--script", required=True)
    sub.add_argument("--warmup", type=int, default=14, help="steps that do not count; step 12 records a CUDA graph")
    sub.add_argument("--steps", type=int, default=4, help="profiled ones, near the end of the run")
    sub.add_argument("--output", type=Path, required=True)
    sub.add_argument("overrides", nargs="*", help="after --: the entrypoint's own arguments; num_train_steps above 22")
    sub = commands.add_parser("plot", help="loss curves of result files of `train`")
    sub.add_argument("files", nargs="+", type=Path)
    sub.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    check(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if args.what == "plot":
        plot(args)
        return
    measures = {"train": train, "save": save, "start": start, "compare": compare, "strategies": strategies}
    measures |= {"loader": loader, "profile": profile}
    results = measures[args.what](args)
    if int(os.environ.get("RANK", "0")) == 0:
        write(args.output, results)
        if args.what == "profile":
            print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
