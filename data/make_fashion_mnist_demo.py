"""Builds fashion_mnist_demo.tar.gz, the small image data set that comes with this project.

The images are a balanced part of Fashion-MNIST in its official split, read from the IDX files of Debian's package
`dataset-fashion-mnist` and stored as JPEG files in one folder per class:

    fashion_mnist_demo/LICENSE
    fashion_mnist_demo/train/<class>/NNNNN.jpg
    fashion_mnist_demo/val/<class>/NNNNN.jpg

NNNNN is the image's index in its IDX file. The archive holds no times, owners or other traces of the machine, so
the same versions of Python, zlib and Pillow always give the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import math
import sys
import tarfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = "fashion_mnist_demo"
CLASSES = (  # in the order of Fashion-MNIST's labels, 0 to 9
    "t-shirt_top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle_boot",
)
IMAGE_SHAPE = (28, 28)
SPLITS = {"train": "train", "val": "t10k"}  # folder in the archive -> prefix of the IDX files

HERE = Path(__file__).resolve().parent
DEFAULT_SOURCE = Path("/usr/share/datasets/fashion-mnist")
DEFAULT_OUTPUT = HERE / f"{ROOT}.tar.gz"
LICENSE = HERE / "FASHION_MNIST_LICENSE"
INSTALL_HINT = "install it with: apt-get install dataset-fashion-mnist"


class DemoError(Exception):
    """A problem that the user can mend; its text is the one line to show."""


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Reads a gzip-compressed IDX file of unsigned bytes.

    Args:
        path: The file to read.
        ndim: How many dimensions its array must have.

    Returns:
        The array, in the shape that the file's header gives.

    Raises:
        DemoError: The file is missing, damaged, or not such an IDX file.
    """
    try:
        with gzip.open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise DemoError(f"{path}: no such file; {INSTALL_HINT}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DemoError(f"{path}: cannot be read: {error}") from None

    # The header: two zero bytes, the type (8 is uint8), the number of dimensions, then each size as big-endian uint32.
    magic = bytes((0, 0, 8, ndim))
    header_size = 4 + 4 * ndim
    if len(content) < header_size:
        raise DemoError(f"{path}: wrong size: {len(content)} bytes, too short for an IDX header")
    if content[:4] != magic:
        raise DemoError(f"{path}: wrong magic number 0x{content[:4].hex()}, expected 0x{magic.hex()}")
    shape = tuple(int(size) for size in np.frombuffer(content, dtype=">u4", count=ndim, offset=4))
    expected_size = header_size + math.prod(shape)
    if len(content) != expected_size:
        raise DemoError(f"{path}: wrong size: {len(content)} bytes, but its header asks for {expected_size}")
    return np.frombuffer(content, dtype=np.uint8, offset=header_size).reshape(shape)


def read_split(source: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the images of one split with their labels.

    Args:
        source: The folder of the IDX files.
        prefix: The split's name in Fashion-MNIST, "train" or "t10k".

    Returns:
        The images, uint8 of shape (n, 28, 28), and the labels, uint8 of shape (n,).

    Raises:
        DemoError: A file is unfit, or the two do not belong together.
    """
    images_path = source / f"{prefix}-images-idx3-ubyte.gz"
    labels_path = source / f"{prefix}-labels-idx1-ubyte.gz"
    images = read_idx(images_path, ndim=3)
    labels = read_idx(labels_path, ndim=1)
    if images.shape[1:] != IMAGE_SHAPE:
        raise DemoError(f"{images_path}: wrong size: images of {images.shape[1:]}, expected {IMAGE_SHAPE}")
    if len(labels) != len(images):
        raise DemoError(f"{labels_path}: wrong size: {len(labels)} labels for {len(images)} images")
    if labels.size and labels.max() >= len(CLASSES):
        raise DemoError(f"{labels_path}: label {labels.max()}, expected 0 to {len(CLASSES) - 1}")
    return images, labels


def encode_jpeg(image: np.ndarray, quality: int) -> bytes:
    """Encodes one grey image as JPEG.

    Args:
        image: uint8 of shape (height, width).
        quality: The JPEG quality, 1 to 100.

    Returns:
        The bytes of the JPEG file.
    """
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=quality)  # two-dimensional uint8 makes mode "L"
    return buffer.getvalue()


def collect_files(source: Path, per_class: dict[str, int], quality: int) -> dict[str, bytes]:
    """Makes every file that goes into the archive.

    Args:
        source: The folder of the IDX files.
        per_class: For each split, how many images to take of each class.
        quality: The JPEG quality.

    Returns:
        The content of each file by its path in the archive.

    Raises:
        DemoError: A file is unfit, or a class has too few images.
    """
    if not source.is_dir():
        raise DemoError(f"{source}: no such folder; {INSTALL_HINT}")
    try:
        files = {f"{ROOT}/LICENSE": LICENSE.read_bytes()}
    except OSError as error:
        raise DemoError(f"{LICENSE}: cannot be read: {error.strerror}") from None
    for split, prefix in SPLITS.items():
        images, labels = read_split(source, prefix)
        for label, name in enumerate(CLASSES):
            indices = np.flatnonzero(labels == label)
            if len(indices) < per_class[split]:
                raise DemoError(f"{split}/{name}: {per_class[split]} images wanted, {source} has {len(indices)}")
            for index in indices[: per_class[split]]:
                files[f"{ROOT}/{split}/{name}/{index:05d}.jpg"] = encode_jpeg(images[index], quality)
    return files


def pack(files: dict[str, bytes]) -> bytes:
    """Packs files into a tar.gz archive whose bytes depend on nothing but the files.

    Args:
        files: The content of each file by its path in the archive.

    Returns:
        The bytes of the archive.
    """
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name in sorted(files):
            member = tarfile.TarInfo(name)  # its defaults: time 0, user and group 0 without names
            member.size = len(files[name])
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(files[name]))
    return buffer.getvalue()


def write(path: Path, content: bytes) -> None:
    """Writes a file in one step, so that a broken-off run leaves no half of it.

    Args:
        path: The file to write or to replace.
        content: Its new content.

    Raises:
        DemoError: The file cannot be written.
    """
    if path.is_dir():
        raise DemoError(f"{path}: cannot be written: it is a folder")
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise DemoError(f"{path}: cannot be written: {error.strerror}") from None


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        argv: The arguments; None takes those of the process.

    Returns:
        The options.
    """
    parser = argparse.ArgumentParser(
        description="Build the demo data set, a small part of Fashion-MNIST as JPEG files in a tar.gz archive.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--source", type=Path, default=DEFAULT_SOURCE, help="folder of Fashion-MNIST's IDX files")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="archive to write")
    parser.add_argument("--train-per-class", type=int, default=400, help="training images of each class")
    parser.add_argument("--val-per-class", type=int, default=50, help="validation images of each class")
    parser.add_argument("--quality", type=int, default=92, help="JPEG quality, 1 to 100")
    args = parser.parse_args(argv)
    for option in ("train_per_class", "val_per_class"):
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1")
    if not 1 <= args.quality <= 100:
        parser.error("--quality must be between 1 and 100")
    return args


def main(argv: list[str] | None = None) -> int:
    """Builds the archive and prints what it holds.

    Args:
        argv: The arguments; None takes those of the process.

    Returns:
        The exit code: 0, or 2 after a problem told on stderr.
    """
    args = parse_args(argv)
    per_class = {"train": args.train_per_class, "val": args.val_per_class}
    try:
        files = collect_files(args.source, per_class, args.quality)
        archive = pack(files)
        write(args.output, archive)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {len(files)} files ({len(files) - 1} images and the licence)")
    print(f"size    {len(archive)} bytes")
    print(f"sha256  {hashlib.sha256(archive).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
