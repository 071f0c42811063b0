"""Where a run's checkpoints are: in a folder that all nodes share, or in a bucket.

`Folder` and `InBucket` answer to the same calls, so that checkpoint.py need not know which it has.

In a folder a checkpoint is complete when it has its name (checkpoint.py shows the files). In a bucket, which has no
renaming, it is complete when its manifest is there:

    <prefix>/step_00000100/manifest.json         state.json's content, and size and SHA-256 of every part
    <prefix>/step_00000100/<start>/              the parts: DCP's files, each uploaded by the rank that wrote it
    <prefix>/best.json
    <prefix>/final_model/                        as in a folder, and a manifest.json of its own
    <prefix>/writer.json                         which start writes here: the latest
    <prefix>/torchruns.json                      as in a folder
    <checkpoint.local_dir>/step_00000100-<start>/   on each node: the parts that its ranks wrote or fetched

The manifest is written last, by a request that the service refuses where there is one already, and deleted first.
<start> is drawn anew whenever a run starts, so that parts of two starts never mix. Parts that no manifest names are of
a save that was broken off; the next save's pruning deletes them. A resume looks at manifests alone, then each rank
fetches the parts that it needs and its node lacks.
"""

import argparse
import atexit
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from runtime.bucket import Bucket, BucketError, NoObjectError, is_bucket
from runtime.collectives import from_rank_0, raise_on_all_ranks
from runtime.files import write_json
from runtime.session import Session
from runtime.step_folders import STEP_FOLDER, step_folders
from schema import Config, ConfigError, RunError

logger = logging.getLogger(__name__)
MANIFEST = "manifest.json"
START = re.compile(r"[0-9a-f]{12}")
MOVED = "checkpoint.resume_from_checkpoint=false: moved the earlier run's checkpoints"
LOCAL_STEP = re.compile(r"step_\d{8,}-[0-9a-f]{12}")


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint that is complete, as far as its list of files tells."""

    name: str  # for messages
    step: int
    state: dict[str, Any]
    sizes: dict[str, int]  # of the files, in bytes
    start: str = ""  # of the run that wrote the parts
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)


class Folder:
    """A folder that all nodes share, of which `dist_session` holds the lock.

    Unless it says otherwise, a method is for rank 0 alone.
    """

    is_shared = True  # `folder`, by all nodes
    advice = "give a whole copy"  # where a checkpoint cannot be read
    allowance_s = 0.0  # beyond the time that writing takes

    def __init__(self, path: Path, rank: int) -> None:
        self.folder, self.rank, self.key = path, rank, f"checkpoint.ckpt_dir={path}"

    def __str__(self) -> str:
        return str(self.folder)

    def check(self, num_bytes: int, session: Session) -> None:
        """Refuse, on all ranks alike, a place that could not take a checkpoint of `num_bytes`.

        Raises:
            ConfigError: naming the key, the reason and the fix.
        """
        folder, key = self.folder, self.key
        name = f".preflight-{from_rank_0(uuid.uuid4().hex)}"

        def write() -> None:
            if not session.is_main:
                return
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for left in folder.glob(".preflight-*"):  # by a run that was killed right here
                    left.unlink()
                (folder / name).touch()
            except OSError as error:
                raise ConfigError(f"{key} cannot be written to ({error.strerror}): give another folder") from None
            free = shutil.disk_usage(folder).free
            if free < num_bytes:
                (folder / name).unlink()
                raise ConfigError(
                    f"{key} has {gib(free)} free, a checkpoint takes {gib(num_bytes)}: make room or give another folder"
                )

        def read() -> None:
            deadline = time.monotonic() + 10  # a network file system may show a new file late
            while not (folder / name).exists():
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                raise ConfigError(
                    f"{key} is not the same folder on every node: rank {session.rank} does not see rank 0's file; "
                    "give a folder on a shared file system"
                )

        raise_on_all_ranks(write, error=ConfigError)
        try:
            raise_on_all_ranks(read, error=ConfigError)
        finally:
            if session.is_main:
                (folder / name).unlink()

    def claim(self) -> None:
        """From here on this start writes here; on all ranks, before the first `begin`."""

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, ascending."""
        return list(step_folders(self.folder))

    def incomplete(self) -> list[str]:
        """Names of what is no complete checkpoint and looks like one."""
        complete = step_folders(self.folder).values()
        return [str(folder) for folder in sorted(self.folder.glob("step_*")) if folder not in complete]

    def find(self, step: int) -> Found | str:
        """A complete checkpoint, or what is wrong with it."""
        folder = step_folders(self.folder)[step]
        try:
            state = json.loads((folder / "state.json").read_text())
            return Found(str(folder), step, state, {file.name: file.stat().st_size for file in folder.iterdir()})
        except (OSError, ValueError) as error:
            return f"its state.json cannot be read ({type(error).__name__}: {error})"

    def opened(self, found: Found) -> Path:
        """A folder with its index and its state.json; on any rank."""
        return Path(found.name)

    def fetch(self, found: Found, names: Iterable[str]) -> None:
        """See to it that the folder that `opened` gave has these files, too; on any rank."""

    def begin(self, step: int) -> Path:
        """The folder for DCP to write to; on each rank, which then wait for each other."""
        folder = self.folder / f"{_key(step)}.tmp"
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        return folder

    def collect(self, folder: Path, group: dist.ProcessGroup | None) -> dict[str, Any]:
        """What rank 0 needs to know of what was written; on all ranks together.

        Raises:
            RunError: on all ranks alike.
        """
        return {}

    def commit(self, step: int, folder: Path, state: dict[str, Any], parts: dict[str, Any]) -> None:
        """Make a complete checkpoint of what was written and collected.

        Raises:
            RunError: another run has written one.
        """
        final = folder.with_suffix("")
        write_json(folder / "state.json", state)
        if final.exists():  # and was skipped at the start, so it is damaged
            final.rename(final.with_suffix(f".damaged-{uuid.uuid4().hex[:6]}"))
        os.replace(folder, final)

    def tidy(self, folder: Path) -> None:
        """Delete what this process needs no more, now that `folder` is committed or loaded; on each rank."""

    def prune(self, doomed: list[int]) -> None:
        """Delete these complete checkpoints, and what was given up; what cannot be deleted is a warning."""
        complete = step_folders(self.folder)
        # Renamed first: half a deletion must not look like a checkpoint. An earlier one's end is deleted here, too.
        for folder in [*(complete[step] for step in doomed), *self.folder.glob("step_*.tmp")]:
            if not STEP_FOLDER.fullmatch(folder.stem):
                continue
            try:
                shutil.rmtree(folder.replace(folder.with_suffix(".tmp")))
            except OSError as error:
                logger.warning("could not delete %s: %s", folder, error)

    def update(self, step: int, changes: dict[str, Any]) -> None:
        """Change the state.json of a complete checkpoint."""
        file = self.folder / _key(step) / "state.json"
        write_json(file, json.loads(file.read_text()) | changes)

    def write_best(self, best: dict[str, Any] | None) -> None:
        """best.json, {"step", "metric", "value"}, as the newest checkpoint knows it."""
        if best is None:
            (self.folder / "best.json").unlink(missing_ok=True)
        else:
            write_json(self.folder / "best.json", best)

    def exchange(self, name: str, content: Any) -> Any:
        """Write a JSON file of this name beside the checkpoints; what it held before, None = there was none."""
        file = self.folder / name
        before = json.loads(file.read_text()) if file.exists() else None
        write_json(file, content)
        return before

    def set_aside(self, files: Iterable[Path] = ()) -> None:
        """A fresh start in a used place: move the earlier run's checkpoints out of the way, lose none.

        With them go those of `files` that are there: what else the earlier run wrote of its steps.
        """
        earlier = [*step_folders(self.folder).values(), *(p for p in [self.folder / "best.json"] if p.exists())]
        if (self.folder / "final_model").exists():
            earlier.append(self.folder / "final_model")
        if not earlier:
            return
        aside = self.folder / _next_aside(path.name for path in self.folder.glob("earlier_*"))
        aside.mkdir()
        for path in earlier:
            path.rename(aside / path.name)
        for path in files:
            if path.exists():
                shutil.move(path, aside / path.name)  # it may be on another disk
        logger.warning("%s to %s", MOVED, aside)

    def has_final_model(self) -> bool:
        """Whether there is a whole one."""
        return (self.folder / "final_model").is_dir()

    def publish_final_model(self) -> None:
        """<folder>/final_model was written."""


class InBucket(Folder):
    """A bucket, and a folder of its own at each node.

    A bucket has no locks. The latest start has its name in writer.json, and one that finds another's name there stops
    before it commits or deletes anything; and no manifest replaces a later start's.
    """

    is_shared = False
    advice = "see that the bucket can be reached, and start again"
    allowance_s = 600.0  # ten attempts of a request, each given up after a minute

    def __init__(self, url: str, folder: Path, rank: int) -> None:
        self.bucket, self.folder, self.rank = Bucket.of(url), folder, rank
        self.key = f"checkpoint.ckpt_dir={url}"
        self.start = ""
        self.starts: dict[int, str] = {}  # step -> of the start whose parts its manifest names

    def __str__(self) -> str:
        return str(self.bucket)

    @override
    def check(self, num_bytes: int, session: Session) -> None:
        probe = f".preflight-{from_rank_0(uuid.uuid4().hex)}"
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", session.world_size))

        def write() -> None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / f"{probe}-{session.rank}").touch()
                (self.folder / f"{probe}-{session.rank}").unlink()
            except OSError as error:
                raise ConfigError(
                    f"checkpoint.local_dir={self.folder} cannot be written to ({error.strerror}): give another folder"
                ) from None
            # The newest one and the one that is being written: this node's parts of them.
            needed, free = 2 * num_bytes * ranks_here // session.world_size, shutil.disk_usage(self.folder).free
            if free < needed:
                raise ConfigError(
                    f"checkpoint.local_dir={self.folder} has {gib(free)} free, a node's parts of two checkpoints take "
                    f"{gib(needed)}: make room or give another folder"
                )
            if session.is_main:
                with self._reached():
                    self.bucket.delete(self.bucket.list(".preflight-"))  # by a run that was killed right here
                    self.bucket.create(probe, b"first")
                    if self.bucket.create(probe, b"second"):
                        raise ConfigError(
                            f"{self.key}: this service overwrites an object where it was asked not to (If-None-Match), "
                            "so that two runs could ruin each other's checkpoints: use one that has conditional writes"
                        )

        def read() -> None:
            with self._reached():
                self.bucket.get(probe)

        raise_on_all_ranks(write, error=ConfigError)
        try:
            raise_on_all_ranks(read, error=ConfigError)
        finally:
            if session.is_main:
                with contextlib.suppress(BucketError):  # the next start deletes it
                    self.bucket.delete([probe])

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except BucketError as error:
            raise ConfigError(
                f"{self.key} cannot be used ({error}): create the bucket, and see that credentials and "
                "AWS_ENDPOINT_URL are those of an account that may list, read, write and delete there"
            ) from None

    @override
    def claim(self) -> None:
        self.start = from_rank_0(uuid.uuid4().hex[:12])
        who = {"start": self.start, "process": os.getpid(), "host": platform.node()}
        data = json.dumps(who | {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}).encode()
        raise_on_all_ranks(lambda: self.bucket.put("writer.json", data) if self.rank == 0 else None)

    @override
    def steps(self) -> list[int]:
        return sorted(step for step, names in self._listed().items() if MANIFEST in names)

    @override
    def incomplete(self) -> list[str]:
        return [self.bucket.url(_key(step)) for step, names in self._listed().items() if MANIFEST not in names]

    def _listed(self) -> dict[int, dict[str, int]]:
        """Step -> its objects, "<start>/<file>" and the manifest -> size."""
        found: dict[int, dict[str, int]] = {}
        for key, stored in self.bucket.list("step_").items():
            folder, _, name = key.partition("/")
            if (match := STEP_FOLDER.fullmatch(folder)) and (name == MANIFEST or START.fullmatch(name.split("/")[0])):
                found.setdefault(int(match[1]), {})[name] = stored.size
        return found

    @override
    def find(self, step: int) -> Found | str:
        name, key = self.bucket.url(_key(step)), f"{_key(step)}/{MANIFEST}"
        try:
            found = _read_manifest(self.bucket.get(key), name, step)
        except NoObjectError:
            return "its manifest is gone"
        except ValueError as error:
            return f"its manifest cannot be read ({error})"
        if problem := self._difference(step, found.start, found.sizes):
            return problem
        self.starts[step] = found.start
        return found

    def _difference(self, step: int, start: str, sizes: dict[str, int]) -> str | None:
        """How the parts in the bucket differ from what there should be."""
        there = self.bucket.list(f"{_key(step)}/{start}/")
        for name, size in sizes.items():
            stored = there.get(f"{_key(step)}/{start}/{name}")
            if stored is None:
                return f"{name} is missing"
            if stored.size != size:
                return f"{name} has {stored.size} bytes, not {size}"
        return None

    @override
    def opened(self, found: Found) -> Path:
        folder = self.folder / f"{_key(found.step)}-{found.start}"
        folder.mkdir(parents=True, exist_ok=True)
        self.fetch(found, [".metadata"])
        write_json(folder / "state.json", found.state)
        return folder

    @override
    def fetch(self, found: Found, names: Iterable[str]) -> None:
        folder, key = self.folder / f"{_key(found.step)}-{found.start}", f"{_key(found.step)}/{found.start}"
        for name in sorted(names):
            fetch_file(self.bucket, f"{key}/{name}", folder / name, found.sizes[name], found.sha256[name])

    @override
    def begin(self, step: int) -> Path:
        folder = self.folder / f"{_key(step)}-{self.start}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @override
    def collect(self, folder: Path, group: dist.ProcessGroup | None) -> dict[str, Any]:
        key = folder.name.replace("-", "/")

        def upload() -> dict[str, Any]:
            written = {}
            for file in [*folder.glob(f"__{self.rank}_*"), *([folder / ".metadata"] if self.rank == 0 else [])]:
                written[file.name] = {"size": file.stat().st_size, "sha256": sha256(file)}
                self.bucket.upload(file, f"{key}/{file.name}")
            return written

        mine = raise_on_all_ranks(upload, group=group)
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, mine, group=group)
        return {name: facts for part in parts for name, facts in part.items()}

    @override
    def commit(self, step: int, folder: Path, state: dict[str, Any], parts: dict[str, Any]) -> None:
        self._check_writer()
        sizes = {name: facts["size"] for name, facts in parts.items()}
        if problem := self._difference(step, self.start, sizes):
            raise RunError(f"after the upload {problem}")
        key = f"{_key(step)}/{MANIFEST}"
        manifest = _manifest(self.start, parts, state)
        if not self.bucket.create(key, manifest):
            # An earlier start's: damaged, and so not resumed from, or it came after this start had looked, as the last
            # request of a process that was killed may. A later start's is not, and it has said that it is there.
            there = self.bucket.list(key).get(key)
            self._check_writer()
            if there is None or not self.bucket.replace(key, manifest, there.etag):
                raise RunError(f"another run writes {self.bucket.url(key)}: give each run its own checkpoint.ckpt_dir")
        self.starts[step] = self.start

    def _check_writer(self) -> None:
        writer = json.loads(self.bucket.get("writer.json"))
        if writer["start"] != self.start:
            raise RunError(
                f"another run has started there (process {writer['process']} on {writer['host']}, {writer['time']}): "
                "give each run its own checkpoint.ckpt_dir"
            )

    @override
    def tidy(self, folder: Path) -> None:
        for other in self.folder.iterdir():
            if other.name != folder.name and LOCAL_STEP.fullmatch(other.name):
                shutil.rmtree(other, ignore_errors=True)  # the node's other ranks delete it, too

    @override
    def prune(self, doomed: list[int]) -> None:
        try:
            self.bucket.delete(f"{_key(step)}/{MANIFEST}" for step in doomed)
            dead = []
            for step, names in self._listed().items():
                if MANIFEST in names and step not in self.starts and isinstance(self.find(step), str):
                    continue  # damaged: it was skipped with a warning, and stays for its owner to look at
                live = self.starts[step] if MANIFEST in names else None
                dead += [f"{_key(step)}/{n}" for n in names if n != MANIFEST and n.split("/")[0] != live]
            self.bucket.delete(dead)
        except BucketError as error:
            logger.warning("could not delete earlier checkpoints: %s", error)

    @override
    def update(self, step: int, changes: dict[str, Any]) -> None:
        key = f"{_key(step)}/{MANIFEST}"
        manifest = json.loads(self.bucket.get(key))
        self.bucket.put(key, _manifest(manifest["start"], manifest["files"], manifest["state"] | changes))

    @override
    def write_best(self, best: dict[str, Any] | None) -> None:
        if best is None:
            self.bucket.delete(["best.json"])
        else:
            self.bucket.put("best.json", json.dumps(best).encode())

    @override
    def exchange(self, name: str, content: Any) -> Any:
        try:
            before = json.loads(self.bucket.get(name))
        except NoObjectError:
            before = None
        self.bucket.put(name, json.dumps(content).encode())
        return before

    @override
    def set_aside(self, files: Iterable[Path] = ()) -> None:
        # A bucket has no renaming: copied first, then deleted, both within the service.
        complete = [_key(step) for step, names in self._listed().items() if MANIFEST in names]
        keys = [*self.bucket.list("best.json"), *self.bucket.list("final_model/")]
        keys += [key for folder in complete for key in self.bucket.list(f"{folder}/")]
        if not keys:
            return
        aside = _next_aside(key.split("/")[0] for key in self.bucket.list("earlier_"))
        keys.sort(key=lambda key: key.endswith(MANIFEST))  # written last
        for key in keys:
            self.bucket.copy(key, f"{aside}/{key}")
        for path in files:
            if path.exists():
                self.bucket.upload(path, f"{aside}/{path.name}")
                path.unlink()
        self.bucket.delete(key for key in keys if key.endswith(MANIFEST))
        self.bucket.delete(key for key in keys if not key.endswith(MANIFEST))
        logger.warning("%s to %s", MOVED, self.bucket.url(aside))

    @override
    def has_final_model(self) -> bool:
        return f"final_model/{MANIFEST}" in self.bucket.list("final_model/")

    @override
    def publish_final_model(self) -> None:
        files = sorted((self.folder / "final_model").iterdir())
        facts = {file.name: {"size": file.stat().st_size, "sha256": sha256(file)} for file in files}
        self.bucket.delete([f"final_model/{MANIFEST}"])
        for file in files:
            self.bucket.upload(file, f"final_model/{file.name}")
        self.bucket.put(f"final_model/{MANIFEST}", _manifest("", facts, {}))


def _next_aside(names: Iterable[str]) -> str:
    """earlier_NNN, above all that there are: of those before it some may have been deleted."""
    numbers = [int(found[1]) for name in names if (found := re.fullmatch(r"earlier_(\d+)", name))]
    return f"earlier_{max(numbers, default=0) + 1:03d}"


def local_dir(cfg: Config) -> Path:
    """The folder on each node for what is in a bucket."""
    return Path(cfg.checkpoint.local_dir or Path(cfg.output_dir) / "checkpoints")


def place_of(cfg: Config, rank: int = 0) -> Folder:
    """The place that checkpoint.ckpt_dir names, which is not null.

    Raises:
        ConfigError: it names no bucket, or boto3 is not installed.
    """
    where = cfg.checkpoint.ckpt_dir
    assert where is not None
    return InBucket(where, local_dir(cfg), rank) if is_bucket(where) else Folder(Path(where), rank)


def fetched(url: str, folder: Path) -> Path:
    """A folder below `folder` with what a bucket has at `url`: a checkpoint, the newest of a run's, or a final_model.

    Several processes may ask at once; what is there already and right is not read again.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    bucket = Bucket.of(url)
    try:
        if MANIFEST not in bucket.list(MANIFEST):
            steps = [key.split("/")[0] for key in bucket.list("step_") if key.endswith(f"/{MANIFEST}")]
            steps = [name for name in steps if STEP_FOLDER.fullmatch(name)]
            if not steps:
                raise ConfigError(f"{bucket} holds no complete checkpoint and no final_model: give one that does")
            bucket = Bucket.of(bucket.url(max(steps, key=lambda name: int(name.removeprefix("step_")))))
        found = _read_manifest(bucket.get(MANIFEST), str(bucket), 0)
        target = folder / hashlib.sha256(f"{bucket} {found.start}".encode()).hexdigest()[:12]
        target.mkdir(parents=True, exist_ok=True)
        for name, size in found.sizes.items():
            fetch_file(bucket, f"{found.start}/{name}".lstrip("/"), target / name, size, found.sha256[name])
        if found.state:
            write_json(target / "state.json", found.state)
    except ConfigError:
        raise
    except BucketError as error:
        raise ConfigError(f"{url} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{bucket.url(MANIFEST)} cannot be read ({error}): give a whole copy") from None
    return target


def model_path(text: str) -> Path:
    """For a tool's command line: a path as it is, or a folder with what a bucket has there, gone when the tool ends.

    Raises:
        ArgumentTypeError: the bucket has no model there.
    """
    if not is_bucket(text):
        return Path(text)
    folder = tempfile.mkdtemp(prefix="from-bucket-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        return fetched(text, Path(folder))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _manifest(start: str, files: dict[str, Any], state: dict[str, Any]) -> bytes:
    return json.dumps({"start": start, "files": files, "state": state}).encode()


def _read_manifest(data: bytes, name: str, step: int) -> Found:
    """What `_manifest` wrote.

    Raises:
        ValueError: it holds something else.
    """
    try:
        manifest = json.loads(data)
        start, files, state = manifest["start"], manifest["files"], manifest["state"]
        sizes = {file: int(facts["size"]) for file, facts in files.items()}
        digests = {file: str(facts["sha256"]) for file, facts in files.items()}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    # The names become paths here, and whoever wrote them shall not choose where.
    for file in files:
        if file != Path(file).name or not (start == "" or START.fullmatch(start)):
            raise ValueError(f"{start}/{file} is no name of a part")
    return Found(name, step, state, sizes, start, digests)


def fetch_file(bucket: Bucket, key: str, file: Path, size: int, digest: str) -> None:
    """Download an object to a file, unless that is there and right.

    Raises:
        ConfigError: the object is not what it should be.
        BucketError: it cannot be read.
    """

    def is_right() -> bool:
        return file.is_file() and file.stat().st_size == size and sha256(file) == digest

    with _turn_of_one_process(file):
        if is_right():
            return
        bucket.download(key, file)
        if not is_right():
            file.unlink()
            raise ConfigError(
                f"{bucket.url(key)} does not have the SHA-256 that its manifest says, so it is damaged: delete that "
                f"{MANIFEST} to go on from the checkpoint before"
            )


@contextlib.contextmanager
def _turn_of_one_process(file: Path) -> Iterator[None]:
    """The ranks of a node that want the same file fetch it once."""
    with open(file.with_name(f".{file.name}.lock"), "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: fetched twice, then
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sha256(file: Path) -> str:
    """In hexadecimal digits."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while part := stream.read(2**22):
            digest.update(part)
    return digest.hexdigest()


def gib(num_bytes: float) -> str:
    """In GiB, with the unit."""
    return f"{num_bytes / 2**30:.3g} GiB"


def _key(step: int) -> str:
    return f"step_{step:08d}"
