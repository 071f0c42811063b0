"""Tar shards for tests: made by hand, and by the tools in this process."""

import io
import itertools
import multiprocessing
import sys
import tarfile
from pathlib import Path

import make_shards
from input_pipeline import tar_shards

FORK = multiprocessing.get_context("fork")


def run_tool(tool, *arguments):
    """A tool's exit code, in this process."""
    tar_shards.load.cache_clear()
    make_shards.scan.cache_clear()
    before, sys.argv = sys.argv, [tool.__name__, *map(str, arguments)]
    try:
        tool.main()
    except SystemExit as exit_:
        return exit_.code
    finally:
        sys.argv = before
    return 0


def files_of(folder):
    """Name -> bytes of all files below `folder`, except the locks and the index files, which hold times."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(Path(folder).rglob("*"))
        if file.is_file() and file.suffix not in (".lock", ".npz")
    }


def tar_of(file, entries):
    """A tar of (name, content); returns where each content begins."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, content in entries:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with tarfile.open(file) as tar:
        return [member.offset_data for member in tar]


def sample(key, label, size=700):
    """An image and its label as entries; an image's bytes are those of its key, over and over."""
    return [(f"{key}.jpg", content(key, size)), (f"{key}.cls", str(label).encode())]


def content(key, size=700):
    return (key.encode() * size)[:size]


def simple(root, counts, split="train", classes=3):
    """Shards of so many samples each, every one its own key; sizes differ."""
    for number, count in enumerate(counts):
        entries = (sample(f"{number}_{i}", i % classes, 100 + 97 * i) for i in range(count))
        tar_of(root / split / f"{split}-{number}.tar", itertools.chain.from_iterable(entries))
    return root


def keys(found):
    return [found.name(i).split(": ")[1] for i in range(len(found))]
