"""Servers of files: HTTP with ranges, and S3 (moto's)."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fsspec.config import conf

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class FileServer(ThreadingHTTPServer):
    """What is below `root`. `failing`: so many requests from now on are answered by 503; `ranges`: whether they are
    served; `requests`: the number of those answered so far; `delay_s`: what each waits for its answer; `gate`: nobody
    gets any while it is closed (an event that is not set)."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        self.failing, self.ranges, self.requests, self.delay_s = 0, True, 0, 0.0
        self.gate = threading.Event()
        self.gate.set()
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(root)))
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        pass  # a client that has gone


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def do_GET(self) -> None:
        if self._fails():
            return
        path = Path(self.translate_path(self.path))
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        if not wanted or not path.is_file() or not self.server.ranges:
            super().do_GET()
            return
        first, _, last = wanted.partition("-")
        with path.open("rb") as file:
            file.seek(int(first))
            data = file.read(int(last) - int(first) + 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{path.stat().st_size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_HEAD(self) -> None:
        if not self._fails():
            super().do_HEAD()

    def _fails(self) -> bool:
        self.server.requests += 1
        time.sleep(self.server.delay_s)
        self.server.gate.wait()
        if self.server.failing > 0:
            self.server.failing -= 1
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return True
        return False

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def http_files(root: Path) -> Iterator[FileServer]:
    server = FileServer(root)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class S3Server:
    """What it stores stays where it is stopped and started again, at the same address."""

    def __init__(self) -> None:
        self._port = 0
        self.start()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()
        host, self._port = self._server.get_host_and_port()
        self.url = f"http://{host}:{self._port}"

    def stop(self) -> None:
        self._server.stop()


@contextlib.contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """fsspec here, and in whatever is started here, uses it for s3://."""
    server = S3Server()
    for name, value in {**KEYS, "FSSPEC_S3_ENDPOINT_URL": server.url}.items():
        patch.setenv(name, value)
    patch.setitem(conf, "s3", {"endpoint_url": server.url})
    try:
        yield server
    finally:
        server.stop()


def s3_bucket(root: Path | None = None) -> str:
    """The URL of a new bucket, with what is below `root` in it."""
    from s3fs import S3FileSystem

    system, name = S3FileSystem(), f"bucket-{uuid.uuid4().hex[:8]}"
    system.mkdir(name)
    for path in root.rglob("*") if root else ():
        if path.is_file():
            system.pipe_file(f"{name}/{path.relative_to(root)}", path.read_bytes())
    return f"s3://{name}"
