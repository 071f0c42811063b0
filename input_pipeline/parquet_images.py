"""Images of a Parquet data set in Hugging Face's layout, to be read in any order.

    <source>/<split>*.parquet    <source>/data/<split>*.parquet    <source>/<split>/*.parquet

A row has an image, {bytes, path}, and a label; the features in the schema's metadata under `huggingface` say which
columns these are, and the classes' names. Parquet is read a row group at a time and has no way to one image. So the
images are first written one after another to a plain file for each Parquet file, with a list of where each lies;
memory holds `ROWS` of them and, at most, one row group.
"""

import dataclasses
import functools
import io
import itertools
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from input_pipeline import listing_cache
from input_pipeline.image_folders import IMAGE_EXTENSIONS
from runtime.files import written_whole
from schema import ConfigError

ROWS = 64  # in memory at a time
FOLDERS = ("", "data/", "*/")  # below the source
NAMES_SHOWN = 3  # of damaged rows
# The words that Hugging Face's file names have: the first that there are files of.
SPLITS = {"train": ("train(ing)?",), "val": ("val(id(ation)?)?|dev", "test")}


@dataclasses.dataclass(frozen=True)
class Columns:
    """What the features say."""

    image: str
    label: str
    classes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Unpacked:
    """The images of one Parquet file.

    Attributes:
        file: they lie in, one after another.
        names: <class>/<file name> of each, in the order of the rows.
        labels: of each.
        offsets: (N + 1), where each begins in `file` and the last one ends.
    """

    file: Path
    names: list[str]
    labels: np.ndarray
    offsets: np.ndarray


class ParquetImages:
    """The images of one split, in the order of the files' names and their rows.

    Args:
        source: the data set's folder.
        split: train or val.
        scratch: folder on this machine for the unpacked images; what is there already is used.
        columns: names of the columns of the image and of the label; None where the features leave no choice.

    Raises:
        ConfigError: there are no such files; they are no Parquet, have no such columns or no names of classes; or rows
            are damaged, named by file and row.
    """

    def __init__(self, source: str, split: str, scratch: Path, columns: tuple[str, str] | None = None) -> None:
        files = find(source, split)
        found = {file: columns_of(file, columns) for file in files}
        first = found[files[0]]
        if others := [file for file in files if found[file] != first]:
            raise ConfigError(f"{others[0]} has other columns or classes than {files[0]}: give one data set as SOURCE")
        scratch.mkdir(parents=True, exist_ok=True)
        bar = tqdm(files, f"unpacking {split}", unit="file", disable=None)
        parts = [_unpacked(file, first, scratch / f"{split}-{number:05d}") for number, file in enumerate(bar)]
        self.classes = first.classes
        self.names = list(itertools.chain.from_iterable(part.names for part in parts))
        self.labels = np.concatenate([part.labels for part in parts])
        self.sizes = np.concatenate([np.diff(part.offsets) for part in parts])
        self._files = [part.file for part in parts]
        self._part = np.repeat(np.arange(len(parts)), [len(part.names) for part in parts])
        self._offsets = np.concatenate([part.offsets[:-1] for part in parts])
        self._open = functools.lru_cache(len(parts))(lambda part: os.open(self._files[part], os.O_RDONLY))

    def read(self, index: int) -> bytes:
        """An image's file."""
        return os.pread(self._open(self._part[index]), self.sizes[index], self._offsets[index])


def is_parquet(source: str) -> bool:
    """Whether a folder holds a Parquet data set."""
    return any(any(Path(source).glob(f"{folder}*.parquet")) for folder in FOLDERS)


def find(source: str, split: str) -> list[Path]:
    """The files of one split, in the order of their names.

    Raises:
        ConfigError: there are none, or of more than one data set.
    """
    every = sorted({file for folder in FOLDERS for file in Path(source).glob(f"{folder}*.parquet")})
    for words in SPLITS[split]:
        word = re.compile(rf"(?<![a-z])({words})(?![a-z])")
        if files := [file for file in every if word.search(str(file.relative_to(source)).lower())]:
            break
    else:
        raise ConfigError(f"{source}: of its {len(every)} Parquet files none has the word {split} in its name")
    if len(folders := sorted({str(file.parent) for file in files})) > 1:
        raise ConfigError(f"{source}: {split} lies in more than one folder, {', '.join(folders)}: give one as SOURCE")
    return files


def columns_of(file: Path, chosen: tuple[str, str] | None) -> Columns:
    """The columns of image and label and the classes' names.

    Raises:
        ConfigError: the file cannot be read, or its schema does not say.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"pyarrow is not installed, which reads {file}: pip install pyarrow") from None
    try:
        schema = parquet.read_schema(file)
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        kinds = {name: about.get("_type") for name, about in features.items() if isinstance(about, dict)}
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{file} is no Parquet file that can be read: {_one_line(error)}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{file}: its schema has no features under `huggingface`, which name the classes: write it with "
            "to_parquet() of the library `datasets`, features Image and ClassLabel"
        ) from error
    names = [
        _column(file, kinds, kind, usual, wanted)
        for kind, usual, wanted in zip(("Image", "ClassLabel"), ("image", "label"), chosen or (None, None), strict=True)
    ]
    storage = schema.field(names[0]).type
    if not pyarrow.types.is_struct(storage) or storage.get_field_index("bytes") < 0:
        raise ConfigError(f"{file}: column {names[0]} is {storage}, not a struct with `bytes`: embed the images")
    if not (classes := features[names[1]].get("names")):
        raise ConfigError(f"{file}: the feature of column {names[1]} has no names of classes: give it some")
    return Columns(names[0], names[1], tuple(classes))


def _column(file: Path, kinds: dict[str, Any], kind: str, usual: str, wanted: str | None) -> str:
    """The column of one kind: the one wanted, the one of the usual name, or the only one."""
    candidates = [name for name, its in kinds.items() if its == kind]
    if wanted is None and (usual in candidates or len(candidates) == 1):
        return usual if usual in candidates else candidates[0]
    if wanted in candidates:
        return wanted
    asked = f"column {wanted} is no {kind}" if wanted else f"{len(candidates)} columns are {kind}, none is {usual}"
    raise ConfigError(f"{file}: {asked}; it has {candidates or kinds}: name two with --columns IMAGE LABEL")


def _unpacked(file: Path, columns: Columns, target: Path) -> Unpacked:
    """Write a Parquet file's images to <target>.images, or see that they are there."""
    stat = os.stat(file)
    note = [str(file.resolve()), stat.st_size, stat.st_mtime_ns, columns.image, columns.label, *columns.classes]
    images, listing = target.with_suffix(".images"), target.with_suffix(".npz")
    kept = listing_cache.read(listing)
    if kept is None or kept[0]["of"] != note or not images.exists():
        names, labels, sizes, damaged = [], [], [], []
        with written_whole(images, "wb") as out:
            for row, label, data, path in _rows(file, columns):
                ending = _ending(data)
                if not data:
                    only = f", only the path {path}" if path else ""
                    damaged.append(f"row {row} has no bytes in {columns.image}{only}")
                elif ending is None:
                    damaged.append(f"row {row} holds no image in {columns.image}")
                elif label is None or not 0 <= label < len(columns.classes):
                    there = f"there are {len(columns.classes)} classes"
                    damaged.append(f"row {row} has {columns.label}={label}, {there}")
                else:
                    sizes.append(out.write(data))
                    labels.append(label)
                    names.append(_name(columns.classes[label], row, path, ending))
            if damaged:
                more = f" and {len(damaged) - NAMES_SHOWN} rows more" if len(damaged) > NAMES_SHOWN else ""
                shown = ", ".join(damaged[:NAMES_SHOWN])
                raise ConfigError(f"{file}: {shown}{more}: mend these rows or leave them out of the data set")
        offsets = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))])
        arrays = {"labels": np.array(labels, np.int64), "offsets": offsets}
        listing_cache.write(listing, {"of": note, "names": names}, arrays)
        kept = {"of": note, "names": names}, arrays
    return Unpacked(images, kept[0]["names"], kept[1]["labels"], kept[1]["offsets"])


def _rows(file: Path, columns: Columns) -> Iterator[tuple[int, int | None, bytes, str | None]]:
    """Number, label, image and its path of each row; no image is b''."""
    import pyarrow
    from pyarrow import parquet

    row, group = 0, 0
    try:
        with parquet.ParquetFile(file, memory_map=True) as opened:
            for group in range(opened.num_row_groups):
                wanted = [columns.image, columns.label]
                for batch in opened.iter_batches(ROWS, row_groups=[group], columns=wanted):
                    images = batch.column(columns.image)
                    fields = dict(zip((field.name for field in images.type), images.flatten(), strict=True))
                    paths = fields.get("path", itertools.repeat(None))
                    for label, data, path in zip(batch.column(columns.label), fields["bytes"], paths, strict=False):
                        yield row, label.as_py(), data.as_py() or b"", path and path.as_py()
                        row += 1
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{file}: row group {group}, from row {row} on, cannot be read: {_one_line(error)}"
        ) from error


def _ending(data: bytes) -> str | None:
    """The usual ending of a file with this content; None if it is no image."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # data.max_pixels is the run's matter
        try:
            with Image.open(io.BytesIO(data)) as image:
                kind = image.format
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None
    endings = [ending for ending, its in Image.registered_extensions().items() if its == kind]
    usual = f".{kind}".lower().replace(".jpeg", ".jpg")
    return usual if usual in endings else next((ending for ending in endings if ending in IMAGE_EXTENSIONS), None)


def _name(folder: str, row: int, path: str | None, ending: str | None) -> str:
    """<class>/<file name>; an image without a name is called by its row."""
    stem, given = os.path.splitext((path or "").replace("\\", "/").rpartition("/")[2])
    if not stem or given.lower() not in IMAGE_EXTENSIONS:
        stem, given = stem or f"{row:08d}", ending
    return f"{folder.replace('/', '_')}/{stem}{given}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
