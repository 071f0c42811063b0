"""Images/s of shards in a bucket on a slow line, beside the same shards in a folder.

    pip install "moto[server]"                                             # one of the requirements of the tests
    python tools/compare_bucket.py IMAGES --output benchmarks/bucket_data_cpu.json

IMAGES holds JPEGs, in folders of any depth; each is taken --repeat times. They are made into shards in a folder and in
a bucket of moto's S3 server on this machine, which answers after --latency seconds and sends --megabytes a second in
all. In turn, --rounds times, the training loader of a config reads from the folder and from the bucket, with nothing
kept: images/s once the first batch is there, seconds until then, and how many bytes the server sent for each byte of
the shards. The server takes the same cores as the loader.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import launch

import importlib
import itertools
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


def measure(path: str, cache: Path, args: Any) -> dict[str, float]:
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
    begun = time.perf_counter()
    count = sum(len(images) for images, _ in itertools.islice(batches, args.batches))
    return {"images_per_second": count / (time.perf_counter() - begun), "first_batch_s": first}


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
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))  # the server is the tests' own
    serving = importlib.import_module("bucket_server").serving

    rounds: dict[str, list[dict[str, float]]] = {"folder": [], "bucket": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(folder) as server:
            make_shards(args.images, folder, args, server.environment)
            os.environ |= server.environment
            num_bytes = sum(stored.size for stored in Bucket.of(TARGET).list("train/").values())
            for _ in range(args.rounds):
                rounds["folder"].append(measure(str(folder / "shards"), folder, args))
                server.set(latency_s=args.latency, bytes_per_s=args.megabytes * 1e6)
                found = measure(TARGET, folder / "cache", args)
                rounds["bucket"].append(found | {"bytes_sent_a_byte": server.counts()["bytes_out"] / num_bytes})
                shutil.rmtree(folder / "cache")
                print({where: each[-1] for where, each in rounds.items()}, flush=True)
    results: dict[str, Any] = {"shards_mb": round(num_bytes / 1e6, 1), "load_average": os.getloadavg()[0]}
    for where, each in rounds.items():
        results[where] = {key: round(statistics.median(row[key] for row in each), 3) for key in each[0]}
        results[where]["rounds"] = [{key: round(value, 3) for key, value in row.items()} for row in each]
    pairs = zip(rounds["bucket"], rounds["folder"], strict=True)
    ratios = [bucket["images_per_second"] / folder["images_per_second"] for bucket, folder in pairs]
    results["bucket_over_folder"] = round(statistics.median(ratios), 3)
    results["bucket_over_folder_rounds"] = [round(ratio, 3) for ratio in ratios]
    print(results, flush=True)
    benchmark.write(args.output, results)


if __name__ == "__main__":
    main()
