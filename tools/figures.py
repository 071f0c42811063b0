"""Where the figures of the README and of docs/ come from, and whether the code that they measured has changed since.

    python tools/figures.py            # a line for each file of benchmarks/ that a page cites
    python tools/figures.py --stale    # those alone whose code has changed

A figure whose code has changed is not wrong: it says what that commit did. The page then names the commit beside it,
or the figure is measured again; tests/test_figures.py holds the pages to that.
"""

import argparse
import collections
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"
KEYS = ("command", "card", "versions", "commit", "date")
INDEX = "## Index of benchmarks"  # the section of docs/results.md that names every file, with its commit
# A name with benchmarks/ before it, or as the tables have it; other .json and .log files are a run's own.
CITED = re.compile(r"benchmarks/([\w*]+\.(?:json|log|png))|`(\w+_(?:cpu|h[12]00\w*)\.(?:json|log))`")

TRAINING = ("trainer.py", "optim.py", "vit.py", "modeling.py", "imagenet_dataset.py", "train_ddp.py")
READING = ("imagenet_dataset.py", "input_pipeline/decode.py", "input_pipeline/augment.py")
SAVING = ("checkpoint.py", "runtime/checkpoint_places.py")
STOPPING = ("runtime/preemption.py", "runtime/process_group.py", *SAVING, "trainer.py", "launch.py")
STRATEGIES = (*TRAINING, "train_fsdp2.py", "train_mfsdp.py", "vit_te.py")
# How a file's name begins, the longest that fits -> the code that it measured; () where that is not ours.
MEASURED: dict[str, tuple[str, ...]] = {
    "any_to_any": ("checkpoint.py", "train_ddp.py", "train_fsdp2.py", "trainer.py", "optim.py"),
    "attention": ("vit.py",),
    "attention_nan": (),
    "attention_repeat": (),
    "bucket_campaign": (*SAVING, "runtime/bucket.py", "tools/bucket_campaign.py"),
    "bucket_data": (*READING, "input_pipeline/block_cache.py", "input_pipeline/tar_shards.py", "runtime/bucket.py"),
    "cifar10": (*TRAINING, "input_pipeline/device_cache.py", "config/cifar10_vit.yaml", "config/cifar10_vit_48.yaml"),
    "compare": (*TRAINING, "tools/compare.py", "config/cifar10_vit.yaml"),
    "cuda_graphs": ("runtime/cuda_graphs.py", "trainer.py", "optim.py"),
    "curve": (*TRAINING, "vit_te.py"),
    "demo": (*TRAINING, "train_fsdp2.py", "config/L0_sanity.yaml"),
    "distillation": (*TRAINING, "distillation.py", "tools/compare.py"),
    "doctor": ("tools/doctor.py",),
    "dry_run": ("tools/dry_run.py", "train_fsdp2.py", "trainer.py"),
    "elastic_campaign": (*STOPPING, "runtime/session.py", "tools/elastic_campaign.py"),
    "estimate": ("tools/estimate.py", "tools/check_estimate.py"),
    "feed": (*TRAINING, *READING),
    "fused_attn": ("vit.py", "modeling.py", "trainer.py"),
    "hang_campaign": ("runtime/watch.py", "runtime/phases.py", "tools/hang_campaign.py"),
    "idle": (*STRATEGIES, "runtime/cuda_graphs.py"),
    "image_build": ("Dockerfile", "requirements.txt", "requirements-gpu.txt"),
    "install_size": ("requirements.txt",),
    "kill_campaign": (*STOPPING, "tools/kill_campaign.py"),
    "large": STRATEGIES,
    "launchers": ("launchers/ray_train.py", "launchers/jobset.yaml", "slurm.sh", "launch.py", "checkpoint.py"),
    "levers": ("vit.py", "vit_te.py", "optim.py"),
    "loader": READING,
    "memory": STRATEGIES,
    "odd_files": ("input_pipeline/decode.py",),
    "options": ("schema.py", "launch.py"),
    "packing": ("packing.py", "vit.py", "imagenet_dataset.py"),
    "peers": (*STRATEGIES, "runtime/cuda_graphs.py", "tools/peers.py"),
    "preemption": (*STOPPING, "tools/preemption_matrix.py"),
    "profile": STRATEGIES,
    "resident": ("input_pipeline/device_cache.py",),
    "same_numbers": (),
    "save": ("checkpoint.py",),
    "scaling": (*STRATEGIES, "runtime/cuda_graphs.py", "tools/scaling.py"),
    "start": ("launch.py", "train_ddp.py", "runtime/process_group.py", "modeling.py"),
    "strategies": (*STRATEGIES, "runtime/cuda_graphs.py", "tools/peers.py"),
    "start_memory": ("train_fsdp2.py", "vit.py", "optim.py", "checkpoint.py", "interop/weights_out.py"),
    "slurm": ("slurm.sh", "launch.py"),
    "step": ("vit.py", "vit_te.py", "modeling.py", "optim.py"),
    "tests": (*STRATEGIES, "checkpoint.py"),
    "tests_preemption": STOPPING,
    "torchdata": ("imagenet_dataset.py", "tools/compare_torchdata.py"),
    "train": STRATEGIES,
}


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def pages() -> list[Path]:
    """The README and docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> list[str]:
    """A page's paragraphs and rows of tables, without the index of all files."""
    found = []
    for paragraph in text.split(INDEX)[0].split("\n\n"):
        is_table = paragraph.lstrip().startswith("|")
        found += [line for line in paragraph.splitlines() if line.strip()] if is_table else [paragraph]
    return found


def cited(text: str) -> list[str]:
    """The files of benchmarks/ that a text names; a pattern stands for all that it fits."""
    names = [first or second for first, second in CITED.findall(text)]
    return [n for name in names for n in (sorted(path.name for path in FOLDER.glob(name)) if "*" in name else [name])]


@functools.cache
def provenance(name: str) -> dict[str, list[str]]:
    """Command, card, versions, commit and date of a file: each one's values, of one record or of many."""
    text, found = (FOLDER / name).read_text(), collections.defaultdict(list)
    if name.endswith(".log"):
        for key, value in re.findall(rf"^(?:# )?({'|'.join(KEYS)}): (.+)$", text, re.MULTILINE):
            found[key].append(value)
        return found
    content: Any = json.loads(text)
    for record in content if isinstance(content, list) else [content]:
        for key in KEYS:
            found[key] += [str(part[key]) for part in (record, record.get("meta", {})) if part.get(key)]
    return found


def commits(name: str) -> list[str]:
    """The commits whose code was measured."""
    return sorted({found for value in provenance(name)["commit"] for found in re.findall(r"\b[0-9a-f]{7,40}\b", value)})


def measured(name: str) -> tuple[str, ...]:
    """The code that a file measured."""
    return MEASURED[max((start for start in MEASURED if name.startswith(start)), key=len)]


@functools.cache
def lines_changed(commit: str) -> dict[str, int]:
    """File of today -> lines that were added or removed since that commit, moved or not."""
    fields = git("diff", "--numstat", "-M", "-z", commit, "HEAD").split("\0")
    found, at = {}, 0
    while at < len(fields) - 1:
        added, removed, path = fields[at].split("\t")
        at += 1
        if not path:  # moved: the old and the new name follow
            path, at = fields[at + 1], at + 2
        found[path] = 0 if added == "-" else int(added) + int(removed)
    return found


def changed_since(name: str) -> dict[str, int]:
    """Which of the code that a file measured has changed since its oldest commit, and how many lines of it."""
    if not measured(name):
        return {}
    oldest = min(commits(name), key=lambda commit: int(git("rev-list", "--count", commit)))
    return {path: lines_changed(oldest)[path] for path in measured(name) if lines_changed(oldest).get(path)}


def main() -> None:
    """Parse, list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stale", action="store_true", help="only files whose code has changed since")
    args = parser.parse_args()
    where = collections.defaultdict(list)
    for page in pages():
        for name in dict.fromkeys(n for block in blocks(page.read_text()) for n in cited(block)):
            where[name].append(str(page.relative_to(ROOT)))
    for name in sorted(where):
        if not (FOLDER / name).exists():
            sys.exit(f"error: {', '.join(where[name])} cites benchmarks/{name}, which is not there")
        changed = {} if name.endswith(".png") else changed_since(name)
        if changed or not args.stale:
            since = ", ".join(f"{path} {count}" for path, count in changed.items()) or "nothing"
            of = "" if name.endswith(".png") else f" ({', '.join(commits(name))}; lines changed since: {since})"
            print(f"{name}{of}: {', '.join(where[name])}")


if __name__ == "__main__":
    main()
