"""DCP's folders, read so that opening one cannot run code. All of ours that reads a checkpoint reads through here.

DCP has two doors. A folder's index, `.metadata`, is a pickle, and its own reader builds whatever that names; and what
the index calls an object, not a tensor, is unpickled without limits when it is loaded. Here the index may name only
what an index is made of, and its objects are left out: the checkpoints of this recipe hold tensors alone.
"""

import enum
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from schema import ConfigError

# Module -> what an index names of it, the same in torch 2.11 to 2.14.
INDEX_NAMES = {
    "collections": {"OrderedDict"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
PATHS = {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}  # where the checkpoint was written to


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that finds what an index is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in PATHS:  # the second one is Python 3.13's
            return getattr(pathlib, f"Pure{name.removeprefix('Pure')}")  # readable on any system
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name in INDEX_NAMES.get(module, ()):  # a name with a dot in it, "os.system" of metadata, is not there
            return super().find_class(module, name)
        raise ConfigError(f"it names {module}.{name}, which is not a class of a checkpoint")


def _member(enumeration: Any, name: str) -> Any:
    """A member of an enumeration, for which some Pythons (3.11.2 is one, 3.11.7 not) put the function getattr."""
    if not (isinstance(enumeration, type) and issubclass(enumeration, enum.Enum)):
        raise ConfigError("it names builtins.getattr of no enumeration, which is not a class of a checkpoint")
    return enumeration[name]


class Reader(FileSystemReader):
    """DCP's reader of a folder, for folders that nobody vouches for.

    Args:
        folder: with the index.
        fetch: puts files of these names into it, which are then read.
    """

    def __init__(self, folder: pathlib.Path, fetch: Callable[[set[str]], None] | None = None) -> None:
        super().__init__(folder)
        self.fetch = fetch

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """What this rank loads."""
        if self.fetch is not None:
            self.fetch({self.storage_data[item.storage_index].relative_path for item in plan.items})
        return super().read_data(plan, planner)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, of tensors alone.

        Raises:
            ConfigError: it names what no index holds; names the file and that class.
            Exception: whatever else, of a damaged file.
        """
        file = pathlib.Path(self.path) / ".metadata"
        with file.open("rb") as stream:
            try:
                metadata = _IndexUnpickler(stream).load()
            except ConfigError as error:
                raise ConfigError(
                    f"{file} is refused: {error}, and reading it could run code; get the folder anew from its author"
                ) from None
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        entries = metadata.state_dict_metadata
        metadata.state_dict_metadata = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # as DCP's own does
        return metadata
