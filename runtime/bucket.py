"""The objects below a prefix of an S3 bucket, `s3://bucket/prefix`, where there is no folder that all nodes share.

boto3 is Amazon's own client. What it finds in the environment counts: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a
profile, AWS_REGION, and AWS_ENDPOINT_URL for other services that speak S3.
"""

import contextlib
import dataclasses
import functools
import os
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from schema import ConfigError

SCHEME = "s3://"
ATTEMPTS = 10  # of each request and, apart from that, of reading each answer, whose rest is asked for again
PART = 4 * 2**20  # bytes of an answer that are read at once; what is smaller is not copied again
DELETED_AT_ONCE = 1000  # S3's own limit
# Of an answer that is cut short the client knows no more than the status.
CODES = {"404": "NoSuchKey", "409": "ConditionalRequestConflict", "412": "PreconditionFailed", "416": "InvalidRange"}


class Stored(NamedTuple):
    """An object as a listing shows it."""

    size: int  # bytes
    etag: str  # another one once the object was replaced


class BucketError(OSError):
    """A request that failed in spite of all attempts; one line that names the object and the reason.

    Attributes:
        code: S3's word for the reason, where it gave one: "AccessDenied", "PreconditionFailed".
    """

    code = ""


class NoObjectError(BucketError, FileNotFoundError):
    """There is no such object."""


def is_bucket(path: str | Path | None) -> bool:
    """Whether a config's path names a bucket."""
    return str(path).startswith(SCHEME)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The objects whose keys begin with `prefix`; the keys of all methods go on from there.

    Holds no connection, so that it can be pickled and used on both sides of a fork, and by several threads.
    All methods raise a BucketError; those that read an object a NoObjectError where there is none.
    """

    name: str
    prefix: str  # "" or with a "/" at its end

    @classmethod
    def of(cls, url: str) -> "Bucket":
        """The bucket that `s3://bucket/prefix` names.

        Raises:
            ConfigError: it names none, or boto3 is not installed.
        """
        name, _, prefix = url.removeprefix(SCHEME).partition("/")
        if not url.startswith(SCHEME) or not name:
            raise ConfigError(f"{url} names no bucket: write s3://bucket/prefix")
        try:
            import boto3  # noqa: F401
        except ImportError:
            raise ConfigError(f"{url} needs boto3, which is not installed: pip install boto3") from None
        return cls(name, f"{prefix.strip('/')}/" if prefix.strip("/") else "")

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}/{self.prefix}".removesuffix("/")

    def connect(self) -> None:
        """Make this process's client, 0.2 s of work: threads that come at the same time would each make one."""
        with self._named(""):
            self._client  # noqa: B018

    def url(self, key: str) -> str:
        """For messages, and for `Bucket.of`."""
        return f"{SCHEME}{self.name}/{self.prefix}{key}"

    def get(self, key: str, start: int = 0, size: int | None = None, *, etag: str | None = None) -> bytes:
        """The object's bytes, or `size` of them from `start` on; fewer where it ends before that.

        With `etag` only of that version of the object; for another the error's code is "PreconditionFailed".
        """
        if size == 0:
            return b""
        parts: list[bytes] = []
        for attempt in range(ATTEMPTS):
            first = start + sum(map(len, parts))
            last = "" if size is None else start + size - 1
            only = {"Range": f"bytes={first}-{last}"} if first or size is not None else {}
            only |= {} if etag is None else {"IfMatch": f'"{etag}"'}
            try:
                with self._named(key):
                    answer = self._client.get_object(Bucket=self.name, Key=self.prefix + key, **only)
            except BucketError as error:
                if error.code == "InvalidRange":  # it ends at `first` or before
                    return b"".join(parts)
                raise
            etag = answer["ETag"].strip('"')  # the rest must be of the same version
            with contextlib.closing(answer["Body"]) as body:
                try:
                    for part in body.iter_chunks(PART):
                        parts.append(part)
                    return b"".join(parts)
                except _errors() as error:  # boto3 repeats a request that fails, not one whose answer is cut short
                    reason = _one_line(error)
            time.sleep(min(0.1 * 2**attempt, 5.0))
        raise BucketError(f"{self.url(key)}: {reason}")

    def put(self, key: str, data: bytes) -> None:
        """Write an object, in place of one that is there; it is there whole or not at all."""
        with self._named(key):
            self._client.put_object(Bucket=self.name, Key=self.prefix + key, Body=data)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object where there is none. False: there is one of other bytes, which stays.

        One of the same bytes may be ours: written by a request whose answer was lost.
        """
        return self._put_if(key, data, IfNoneMatch="*")

    def replace(self, key: str, data: bytes, etag: str) -> bool:
        """Write an object in place of that version of it. False: there is another one by now, or none; that stays."""
        return self._put_if(key, data, IfMatch=f'"{etag}"')

    def _put_if(self, key: str, data: bytes, **condition: str) -> bool:
        try:
            with self._named(key):
                self._client.put_object(Bucket=self.name, Key=self.prefix + key, Body=data, **condition)
        except NoObjectError:
            return False
        except BucketError as error:
            # The second: there were two such requests at once.
            if error.code not in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise
            return self.get(key) == data
        return True

    def upload(self, file: Path, key: str) -> None:
        """Write an object from a file, in parts where it is large; it is there whole or not at all."""
        with self._named(key):
            self._client.upload_file(str(file), self.name, self.prefix + key)

    def download(self, key: str, file: Path) -> None:
        """Write a file from an object; it has its name when it is whole."""
        with self._named(key):
            self._client.download_file(self.name, self.prefix + key, str(file))

    def copy(self, key: str, target: str) -> None:
        """Write an object from another one, within the service; it is there whole or not at all."""
        with self._named(key):
            source = {"Bucket": self.name, "Key": self.prefix + key}
            self._client.copy(source, self.name, self.prefix + target)

    def list(self, prefix: str = "") -> dict[str, Stored]:
        """The objects whose keys begin with `prefix`, in the order of their keys."""
        found = {}
        with self._named(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.name, Prefix=self.prefix + prefix
            )
            for page in pages:
                for entry in page.get("Contents", []):
                    key = entry["Key"].removeprefix(self.prefix)
                    found[key] = Stored(entry["Size"], entry["ETag"].strip('"'))
        return found

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is not there is none to delete."""
        keys = list(keys)
        for start in range(0, len(keys), DELETED_AT_ONCE):
            some = keys[start : start + DELETED_AT_ONCE]
            with self._named(some[0]):
                asked = {"Objects": [{"Key": self.prefix + key} for key in some], "Quiet": True}
                answer = self._client.delete_objects(Bucket=self.name, Delete=asked)
            for failed in answer.get("Errors", []):
                raise BucketError(f"{SCHEME}{self.name}/{failed['Key']}: {failed['Code']}")

    @property
    def _client(self) -> Any:
        return _client(os.getpid())  # one that was made before a fork shares its connections with the parent

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[None]:
        """The client's errors as ours, in one line."""
        from boto3.exceptions import Boto3Error

        try:
            yield
        except (*_errors(), Boto3Error) as error:
            cause = error.__context__ if isinstance(error, Boto3Error) and error.__context__ else error
            code = str((getattr(cause, "response", None) or {}).get("Error", {}).get("Code", ""))
            code = CODES.get(code, code)
            kind = NoObjectError if code == "NoSuchKey" else BucketError
            named = kind(f"{self.url(key)}: {code or _one_line(cause)}")
            named.code = code
            raise named from error


@functools.lru_cache(maxsize=1)
def _client(_process: int) -> Any:
    from boto3.session import Session
    from botocore.config import Config

    _draw_from_another_generator()
    retries = {"total_max_attempts": ATTEMPTS, "mode": "standard"}
    config = Config(retries=retries, connect_timeout=10, read_timeout=60, max_pool_connections=64)
    return Session().client("s3", config=config)


@functools.lru_cache
def _draw_from_another_generator() -> None:
    """Keep boto3 away from Python's global generator.

    It draws its pauses and names from there, in any thread and at any time; what images are augmented with comes from
    there, too, and has to follow from the sample's number alone. There is no setting for it.
    """
    import botocore.utils
    import s3transfer.utils
    from botocore.retries.standard import ExponentialBackoff

    own = random.Random()
    for module in (botocore.utils, s3transfer.utils):
        module.random = own  # pyright: ignore[reportAttributeAccessIssue]  (as the module that it replaces, it can draw)
    init: Any = functools.partialmethod(ExponentialBackoff.__init__, random=own.random)
    ExponentialBackoff.__init__ = init


def _errors() -> tuple[type[Exception], ...]:
    """What the client raises, and what it lets through from below while an answer is read."""
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    return BotoCoreError, ClientError, HTTPError, ConnectionError, TimeoutError


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
