"""An S3 server, moto's, in a process of its own, which can be told to answer badly.

    with serving(folder) as server:         # environment variables for boto3, and a bucket called "bucket"
        os.environ.update(server.environment)
        server.set(fail=0.05)               # of the requests; see Faults
        server.counts()                     # {"requests", "bytes_out", "faults": {"fail": 3, ...}}

By hand: `python tests/bucket_server.py` prints its address and serves until it is killed.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

CONTROL = "/.faults"


@dataclasses.dataclass
class Faults:
    """What share of the requests goes wrong and how; and how fast the line is."""

    fail: float = 0.0  # answered with 503, not carried out
    cut: float = 0.0  # the connection ends: before the request is carried out, after it, or within the answer
    delay: float = 0.0  # answered after delay_s
    delay_s: float = 2.0
    latency_s: float = 0.0  # of every answer
    bytes_per_s: float = 0.0  # of all answers together; 0 = as fast as it goes
    seed: int = 0


class BadServer:
    """A WSGI application that hands requests on to another, or does not."""

    def __init__(self, application: Callable) -> None:
        self.application = application
        self.lock = threading.Lock()
        self.counted: collections.Counter = collections.Counter()
        self.set(Faults())

    def set(self, faults: Faults) -> None:
        self.faults, self.random = faults, random.Random(faults.seed)
        self.line_is_free_at = 0.0

    def __call__(self, environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
        if environ["PATH_INFO"] == CONTROL:
            return self.control(environ, start_response)
        with self.lock:
            kind = self.random.choices(
                ["fail", "cut", "delay", ""],
                [f := self.faults.fail, c := self.faults.cut, d := self.faults.delay, 1 - f - c - d],
            )[0]
            place = self.random.choice(["before", "after", "within"])
            self.counted.update(["requests", *([kind] if kind else [])])
        time.sleep(self.faults.latency_s + (self.faults.delay_s if kind == "delay" else 0.0))
        connection = environ["werkzeug.socket"]
        if kind == "fail":
            start_response("503 Slow Down", [("Content-Length", "0"), ("Connection", "close")])
            return [b""]
        if kind == "cut" and place == "before":
            return end(connection)
        body = b"".join(self.application(environ, start_response))
        if kind == "cut" and place == "after":
            return end(connection)
        return self.sent(body, connection, is_cut=kind == "cut")

    def sent(self, body: bytes, connection: socket.socket, *, is_cut: bool) -> Iterator[bytes]:
        """The answer at the line's speed, or half of it."""
        body = body[: len(body) // 2] if is_cut else body
        for start in range(0, len(body), 2**18):
            part = body[start : start + 2**18]
            with self.lock:
                self.counted["bytes_out"] += len(part)
                now = time.monotonic()
                seconds = len(part) / self.faults.bytes_per_s if self.faults.bytes_per_s else 0.0
                self.line_is_free_at = max(now, self.line_is_free_at) + seconds
                wait = self.line_is_free_at - now
            time.sleep(wait)
            yield part
        if is_cut:
            end(connection)

    def control(self, environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "POST":
            content = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            with self.lock:
                self.counted.clear()
                self.set(Faults(**json.loads(content)))
        faults = {kind: self.counted[kind] for kind in ("fail", "cut", "delay")}
        counts = {"requests": self.counted["requests"], "bytes_out": self.counted["bytes_out"], "faults": faults}
        answer = json.dumps(counts).encode()
        start_response("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]


def end(connection: socket.socket) -> list[bytes]:
    with contextlib.suppress(OSError):  # the client was quicker
        connection.shutdown(socket.SHUT_RDWR)
    return []


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that runs, in a process of this number."""

    address: str
    process: int

    @property
    def environment(self) -> dict[str, str]:
        """What boto3 finds it by."""
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        return keys | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.address}

    def set(self, **faults: float) -> None:
        """From now on, with these and no other faults; counts begin anew."""
        request = urllib.request.Request(self.address + CONTROL, json.dumps(faults).encode(), method="POST")
        urllib.request.urlopen(request, timeout=60).close()

    def counts(self) -> dict[str, Any]:
        """Of the requests since the last `set`."""
        with urllib.request.urlopen(self.address + CONTROL, timeout=60) as answer:
            return json.load(answer)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server with an empty bucket called "bucket"; its log goes to bucket_server.log in `folder`."""
    with open(folder / "bucket_server.log", "w") as log:
        command = [sys.executable, __file__]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        yield Server(process.stdout.readline().strip(), process.pid)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Serve until killed."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0 = one that is free")
    WSGIRequestHandler.protocol_version = "HTTP/1.1"  # connections that last, as S3's do
    application = BadServer(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", parser.parse_args().port, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
    print(address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
