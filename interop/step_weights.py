"""The weights in a checkpoint of ours, in one process, without the optimizer's state."""

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from interop.dcp_reader import Reader
from schema import LATER_OPTIONS, ConfigError

# Keys of the config's data section that a model is evaluated with.
DATA_SETTINGS = ("mean", "std", "interpolation", "crop_pct", "exif_orientation", "max_pixels")


@contextlib.contextmanager
def reading(what: str | Path, *, advice: str = "give a whole copy") -> Iterator[None]:
    """A context in which whatever a reader raises becomes one line.

    Raises:
        ConfigError: the reader raised; names `what`.
    """
    try:
        yield
    except ConfigError:
        raise
    # The reader of a damaged file, or a download, may raise anything; what the user needs is its name.
    except (Exception, CheckpointException) as error:
        if isinstance(error, CheckpointException):  # a BaseException, around the one that says what happened
            error = next(iter(error.failures.values()))[0]
            if isinstance(error, ConfigError):
                raise error from None
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else "it ends too early"
        raise ConfigError(f"{what} cannot be read ({type(error).__name__}: {reason}): {advice}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ConfigError: it cannot be read, or holds something else; names the file.
    """
    with reading(path):
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is not a JSON object: give a whole copy")
        return content


def read_state(folder: Path, *keys: str) -> dict[str, Any]:
    """A step folder's state.json, which must have `keys`.

    Raises:
        ConfigError: it cannot be read, or a key is missing; names the file.
    """
    state = read_json(folder / "state.json")
    for key in keys:
        if key not in state:
            raise ConfigError(f"{folder}/state.json has no {key!r}: it is not of this recipe, or of an older one")
    if isinstance(state.get("model"), dict):
        state["model"] = LATER_OPTIONS | state["model"]
    return state


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shapes and types of a step folder's tensors by key, from DCP's index alone."""
    entries = Reader(folder).read_metadata().state_dict_metadata
    return {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


@dataclasses.dataclass(frozen=True)
class StepWeights:
    """The weights of a step folder, read in one process, whole or a block at a time; the optimizer's state is not read.

    Attributes:
        folder: of ours.
        part: "ema", the moving average, or "model", the weights themselves.
        stored: name -> what the index says of it.
    """

    folder: Path
    part: str
    stored: dict[str, TensorStorageMetadata]

    @classmethod
    def of(cls, folder: Path, *, raw: bool = False) -> "StepWeights":
        """The moving average, if the run had one, unless `raw` asks for the weights themselves.

        Raises:
            ConfigError: the folder cannot be read.
        """
        with reading(folder):
            entries = stored_tensors(folder)
        part = "ema" if not raw and any(key.startswith("ema.") for key in entries) else "model"
        of_part = {key.split(".", 1)[1]: entry for key, entry in entries.items() if key.startswith(f"{part}.")}
        return cls(folder, part, of_part)

    @property
    def kind(self) -> str:
        """What they are: "weights" or "EMA weights"."""
        return {"ema": "EMA weights", "model": "weights"}[self.part]

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Those of the names in the index, or all; under timm's names.

        Raises:
            ConfigError: the folder cannot be read.
        """
        tensors = self._empty(self.stored if names is None else names, "cpu")
        with reading(self.folder):
            load_tensors(self.folder, {self.part: tensors})
        return joined(tensors)

    def blocks(self) -> list[list[str]]:
        """The names in the index, those of one block together, and what is outside of the blocks."""
        groups: dict[str, list[str]] = {}
        for name in self.stored:
            groups.setdefault(".".join(name.split(".")[:2]) if name.startswith("blocks.") else "", []).append(name)
        return list(groups.values())

    def on_meta(self) -> dict[str, Tensor]:
        """Tensors without storage under timm's names."""
        return joined(self._empty(self.stored, "meta"))

    def _empty(self, names: Iterable[str], device: str) -> dict[str, Tensor]:
        stored = {name: self.stored[name] for name in names}
        return {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device=device) for name, entry in stored.items()
        }


def read_step_weights(folder: Path, *, raw: bool = False) -> tuple[dict[str, Tensor], str]:
    """The weights of a step folder, whole, and what they are; see `StepWeights`.

    Raises:
        ConfigError: the folder cannot be read.
    """
    weights = StepWeights.of(folder, raw=raw)
    return weights.read(), weights.kind


def load_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """Fill `tensors` from a folder of DCP, in this process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is: this is one process's work
        dcp.load(tensors, storage_reader=Reader(folder), no_dist=True)


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with attn.q, attn.k and attn.v of a layer as timm's attn.qkv."""
    joined = dict(tensors)
    for name in [name for name in joined if ".attn.q." in name]:
        thirds = [name.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
        if all(third in joined for third in thirds):
            joined[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat([joined.pop(third) for third in thirds])
    return joined


def first_few(names: Iterable[str], count: int = 3) -> str:
    """The first few names."""
    names = list(names)
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
