"""Images/s of shards in a bucket on a slow line, beside the same shards in a folder.

    pip install "moto[server]"                                             # one of the requirements of the tests
    python tools/compare_bucket.py IMAGES --output benchmarks/bucket_data_cpu.json

IMAGES holds JPEGs, in folders of any depth; each is taken --repeat times. They are made into shards in a folder and in
a bucket of moto's S3 server on this machine, which answers after --latency seconds and sends --megabytes a second in
all. In turn, --rounds times, the training loader of a config reads from the folder and from the bucket, with nothing
kept: images/s once the first batch is there, seconds until then, and CPU seconds for 1,000 images, of the loader's
processes and of the server's; of the bucket also how many bytes the server sent for each byte of the shards.

The server is a Python program and slow. Where there are cores enough, keep it away from the loader's:

    python tools/compare_bucket.py IMAGES --loader-cpus 0-7 --server-cpus 8-15 --workers 2 --batches 40 --output FILE
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import launch

import argparse
import importlib
import itertools
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from typing import Any

import benchmark
import imagenet_dataset as data
from interrupted_runs import ROOT
from runtime.bucket import Bucket

TARGET = "s3://bucket/shards"


def cores(text: str) -> set[int]:
    """Numbers of cores, as taskset takes them: 0-7,16."""
    parts = [part.partition("-") for part in text.split(",")]
    found = {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}
    if not found or not found <= os.sched_getaffinity(0):
        raise argparse.ArgumentTypeError(f"{text}: this process may use {sorted(os.sched_getaffinity(0))}")
    return found


def cpu_seconds(*processes: int) -> float:
    """That these have taken so far, all threads, user and system."""
    stats = [Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in processes]
    return sum(int(ticks) for stat in stats for ticks in stat[11:13]) / os.sysconf("SC_CLK_TCK")


def measure(path: str, cache: Path, server: int, args: Any) -> dict[str, float]:
    """One round: a fresh loader over one place."""
    config = ["data.source=webdataset", f"data.path={path}", "output_dir=unused", "num_epochs=1"]
    config += [f"global_batch_size={args.batch}", f"data.num_workers={args.workers}"]
    config += [f"data.shard_streams={args.streams}"]
    config += [f"data.cache_dir={cache}"] if path == TARGET else []
    cfg = launch.load_config("vit_base_patch16_224", config)
    sizes = data.run_sizes(cfg, 1)
    started = time.perf_counter()
    batches = iter(data.build_loaders(cfg, sizes, rank=0, start_step=0)[0])
    next(batches)
    first = time.perf_counter() - started
    for _ in range(args.workers):  # what was read ahead is not counted
        next(batches)
    loader = [os.getpid(), *(process.pid for process in multiprocessing.active_children() if process.pid)]
    begun, loader_s, server_s = time.perf_counter(), cpu_seconds(*loader), cpu_seconds(server)
    count = sum(len(images) for images, _ in itertools.islice(batches, args.batches))
    return {
        "images_per_second": count / (time.perf_counter() - begun),
        "first_batch_s": first,
        "loader_cpu_s_per_1000_images": 1000 * (cpu_seconds(*loader) - loader_s) / count,
        "server_cpu_s_per_1000_images": 1000 * (cpu_seconds(server) - server_s) / count,
    }


def make_shards(images: Path, folder: Path, args: Any, environment: dict[str, str]) -> None:
    """The same shards in a folder and in the bucket."""
    files = sorted(path.resolve() for path in images.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg"))
    for i, (file, k) in enumerate(itertools.product(files, range(args.repeat))):
        for split in ("train", "val") if k == 0 else ("train",):
            link = folder / "images" / split / f"class{i % 10}" / f"{k:04d}_{file.name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    for target in (folder / "shards", TARGET):
        command = [sys.executable, ROOT / "tools/make_shards.py", folder / "images", target]
        options = ["--samples-per-shard", str(args.samples_per_shard)]
        subprocess.run([*command, *options], check=True, env=os.environ | environment)


def main() -> None:
    """Parse, measure, write."""
    parser = launch.Parser(__doc__)
    parser.add_argument("images", type=Path, metavar="IMAGES")
    parser.add_argument("--repeat", type=int, default=64)
    parser.add_argument("--samples-per-shard", type=int, default=100)
    parser.add_argument("--streams", type=int, default=8, help="data.shard_streams")
    parser.add_argument("--workers", type=int, default=2, help="data.num_workers")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=12, help="that are timed in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency", type=float, default=0.05, metavar="SECONDS")
    parser.add_argument("--megabytes", type=float, default=100.0, help="a second, of 10^6 bytes")
    parser.add_argument("--loader-cpus", type=cores, metavar="LIST", help="0-7,16; default: all")
    parser.add_argument("--server-cpus", type=cores, metavar="LIST")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))  # the server is the tests' own
    serving = importlib.import_module("bucket_server").serving

    rounds: dict[str, list[dict[str, float]]] = {"folder": [], "bucket": []}
    with tempfile.TemporaryDirectory() as name:
        folder, all_cores = Path(name), os.sched_getaffinity(0)
        os.sched_setaffinity(0, args.server_cpus or all_cores)  # what is started inherits it
        with serving(folder) as server:
            os.sched_setaffinity(0, args.loader_cpus or all_cores)
            make_shards(args.images, folder, args, server.environment)
            os.environ |= server.environment
            num_bytes = sum(stored.size for stored in Bucket.of(TARGET).list("train/").values())
            for _ in range(args.rounds):
                rounds["folder"].append(measure(str(folder / "shards"), folder, server.process, args))
                server.set(latency_s=args.latency, bytes_per_s=args.megabytes * 1e6)
                found = measure(TARGET, folder / "cache", server.process, args)
                rounds["bucket"].append(found | {"bytes_sent_a_byte": server.counts()["bytes_out"] / num_bytes})
                shutil.rmtree(folder / "cache")
                print({where: each[-1] for where, each in rounds.items()}, flush=True)
    results: dict[str, Any] = {"shards_mb": round(num_bytes / 1e6, 1), "load_average": os.getloadavg()[0]}
    results["cores"] = {who: sorted(vars(args)[f"{who}_cpus"] or all_cores) for who in ("loader", "server")}
    for where, each in rounds.items():
        results[where] = {key: round(statistics.median(row[key] for row in each), 3) for key in each[0]}
        results[where]["rounds"] = [{key: round(value, 3) for key, value in row.items()} for row in each]
    for name, key in (("bucket_over_folder", "images_per_second"), ("cpu_over_folder", "loader_cpu_s_per_1000_images")):
        pairs = zip(rounds["bucket"], rounds["folder"], strict=True)
        ratios = [bucket[key] / folder[key] for bucket, folder in pairs]
        results[name] = round(statistics.median(ratios), 3)
        results[f"{name}_rounds"] = [round(ratio, 3) for ratio in ratios]
    print(results, flush=True)
    benchmark.write(args.output, results)


if __name__ == "__main__":
    main()
