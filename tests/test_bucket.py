"""runtime/bucket.py on a real S3 server that fails, cuts and delays."""

import os
import random
import re
from unittest import mock

import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto")

import boto3
from botocore.stub import Stubber

from runtime import bucket as module
from runtime.bucket import Bucket, BucketError, NoObjectError
from schema import ConfigError


@pytest.fixture
def bucket(server, request):
    server.set()
    return Bucket.of(f"s3://bucket/{request.node.name}/")


def test_objects_are_as_files_below_the_prefix(bucket, tmp_path):
    bucket.put("a/one", b"0123456789")
    (tmp_path / "file").write_bytes(b"x" * 20_000_000)  # large enough for parts
    bucket.upload(tmp_path / "file", "a/two")
    Bucket.of(f"{bucket}-not").put("three", b"")
    assert bucket.get("a/one") == b"0123456789"
    assert bucket.get("a/one", 2, 3) == b"234"
    assert bucket.get("a/one", 8, 9) == b"89"
    assert bucket.get("a/one", 10, 5) == bucket.get("a/one", 0, 0) == b""
    assert {key: stored.size for key, stored in bucket.list("a").items()} == {"a/one": 10, "a/two": 20_000_000}
    assert list(bucket.list()) == ["a/one", "a/two"]
    bucket.download("a/two", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "file").read_bytes()
    etag = bucket.list()["a/one"].etag
    assert bucket.get("a/one", 1, 1, etag=etag) == b"1"
    bucket.put("a/one", b"new")
    with pytest.raises(BucketError) as caught:
        bucket.get("a/one", 1, 1, etag=etag)
    assert caught.value.code == "PreconditionFailed"
    bucket.copy("a/two", "b")
    assert bucket.list("b") == {"b": bucket.list("a/two")["a/two"]}
    assert bucket.get("b", 19_999_999) == b"x"
    bucket.delete([*bucket.list(), "not there"])
    assert bucket.list() == {}


def test_what_is_there_is_not_created_again_and_another_version_not_replaced(bucket):
    assert bucket.create("manifest", b"ours")
    assert bucket.create("manifest", b"ours")  # as after an answer that was lost
    assert not bucket.create("manifest", b"theirs")
    assert bucket.get("manifest") == b"ours"
    version = bucket.list()["manifest"].etag
    assert bucket.replace("manifest", b"new", version)
    assert bucket.replace("manifest", b"new", version)  # as after an answer that was lost
    assert not bucket.replace("manifest", b"other", version)
    assert not bucket.replace("nothing", b"other", version)
    assert bucket.get("manifest") == b"new"


def test_a_refusal_that_is_cut_short_is_one_all_the_same(bucket, monkeypatch):
    """The client then knows no more than the status."""
    stub = Stubber(client := boto3.client("s3"))
    monkeypatch.setattr(module, "_client", lambda process: client)
    stub.add_client_error("put_object", "412", http_status_code=412)
    stub.add_client_error("get_object", "416", http_status_code=416)
    with stub:
        with mock.patch.object(Bucket, "get", return_value=b"theirs"):
            assert not bucket.create("manifest", b"ours")
        assert bucket.get("manifest", 10, 5) == b""


def test_a_fork_makes_its_own_connections(bucket):
    bucket.put("one", b"1")
    if (child := os.fork()) == 0:
        os._exit(0 if bucket.get("one") == b"1" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bucket.get("one") == b"1"


def test_faults_change_nothing(bucket, server, tmp_path):
    """A third of the requests goes wrong: every byte is right all the same, and nothing is reported."""
    server.set(fail=0.12, cut=0.12, delay=0.12, delay_s=0.05)
    content = random.Random(0).randbytes(3_000_000)
    (tmp_path / "file").write_bytes(content * 4)
    bucket.upload(tmp_path / "file", "large")
    for number in range(20):
        bucket.put(f"{number}", content[number:1000])
        assert bucket.get(f"{number}") == content[number:1000]
        assert bucket.create(f"c{number}", content[number:1000])
        assert bucket.get("large", number * 1000, 2_000_000) == (content * 4)[number * 1000 :][:2_000_000]
    bucket.download("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content * 4
    assert len(bucket.list()) == 41
    bucket.delete(bucket.list())
    assert not bucket.list()
    counts = server.counts()
    assert min(counts["faults"].values()) > 5, counts


def test_errors_are_one_line_with_the_object(bucket, monkeypatch):
    with pytest.raises(NoObjectError) as caught:
        bucket.get("nothing")
    assert str(caught.value) == f"{bucket}/nothing: NoSuchKey"
    with pytest.raises(BucketError, match=r"^s3://other/x/: NoSuchBucket$"):
        Bucket.of("s3://other/x").list()
    for url in ("s3://", "s3:///x", "bucket/x"):
        with pytest.raises(ConfigError, match="names no bucket: write s3://bucket/prefix"):
            Bucket.of(url)


@pytest.mark.parametrize("faults", [{"fail": 1.0}, {"cut": 1.0}])
def test_what_goes_wrong_each_time_is_said_in_one_line(faults, bucket, server, monkeypatch, tmp_path):
    bucket.put("one", b"0123456789")
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    module._client.cache_clear()
    server.set(**faults)
    reads = [lambda: bucket.get("one"), lambda: bucket.download("one", tmp_path / "back"), lambda: bucket.list()]
    writes = [
        lambda: bucket.put("one", b"2"),
        lambda: bucket.create("two", b"2"),
        lambda: bucket.upload(tmp_path / "file", "one"),
        lambda: bucket.delete(["one"]),
    ]
    for call in reads + (writes if "fail" in faults else []):  # an answer that is cut may have had no more to say
        with pytest.raises(BucketError, match=rf"^{re.escape(str(bucket))}.*: .+") as caught:
            call()
        assert "\n" not in str(caught.value)
    monkeypatch.undo()
    module._client.cache_clear()


def test_python_s_own_generator_is_left_alone(bucket, server, tmp_path):
    """Images are augmented from it, while threads fetch others: pauses before another attempt must not come from it."""
    bucket.put("one", b"1")
    server.set(fail=0.5, seed=1)
    random.seed(3)
    before = random.getstate()
    for _ in range(3):
        bucket.get("one")
    server.set()
    bucket.download("one", tmp_path / "one")
    assert random.getstate() == before
