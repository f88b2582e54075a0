"""A bucket of moto's S3 server, behind a proxy that does to requests what networks do.

s3fs, botocore and the server are the real ones; the proxy passes bytes on, or does not.
"""

from __future__ import annotations

import http.client
import logging
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import s3fs

FAULTS = ("drop", "unheard", "late", "500", "503", "throttled", "torn")
"""Cut before the request was read, cut instead of an answer, answered after the client's patience,
three answers that mean "again", and cut with half of the upload delivered."""
LATE_S = 2.0
IMPATIENT = MappingProxyType({"retries": 1, "read_timeout": LATE_S / 2})
"""Attributes of s3fs: what is late is a time-out, and forgekit's own patience is tested."""
_ANSWERS = MappingProxyType(
    {"500": "InternalError", "503": "SlowDown", "throttled": "ThrottlingException"}
)


class Bucket:
    """The bucket ``s3://bucket`` of a fresh server.

    Attributes:
        fault: Given method and path of a request, names what goes wrong with it; None for nothing.
        done: How often each fault came about.
        requests: How many were seen.
        variables: Environment with which a process reaches it.
    """

    def __init__(self, server: tuple[str, int]) -> None:
        self.heal()
        self.requests = 0
        self.server = server
        self.variables: Mapping[str, str] = {}

    @property
    def fs(self) -> s3fs.S3FileSystem:
        """Its file system, past the proxy."""
        url = "http://{}:{}".format(*self.server)
        fresh = {"use_listings_cache": False, "skip_instance_cache": True}
        return s3fs.S3FileSystem(key="x", secret="y", endpoint_url=url, **fresh)

    def heal(self) -> None:
        """Let nothing go wrong any more, and forget what did."""
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.done: Counter[str] = Counter()

    def upload(self, folder: Path, name: str) -> str:
        """Put a folder into the bucket, past the proxy; its URL."""
        self.fs.put(f"{folder}/", f"bucket/{name}/", recursive=True)
        return f"s3://bucket/{name}"

    def copy(self, url: str, folder: Path) -> Path:
        """Copy a run directory to a local folder, as one that never was behind a URL."""
        shutil.rmtree(folder, ignore_errors=True)
        fs, root = self.fs, url.removeprefix("s3://")
        for name in fs.find(root):
            # A save without a rename keeps its files in a folder of that name.
            target = folder / re.sub("/data-[^/]*/", "/", name.removeprefix(f"{root}/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # deleted meanwhile by a run that goes on
                target.write_bytes(fs.cat_file(name))
        return folder


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.bucket.requests += 1
        fault = self.bucket.fault(self.command, self.path)
        if fault == "torn" and not body:
            fault = "drop"
        if fault is not None:
            self.bucket.done[fault] += 1
        if fault in _ANSWERS:
            status = 400 if fault == "throttled" else int(fault)
            self._answer(status, [], f"<Error><Code>{_ANSWERS[fault]}</Code></Error>".encode())
        elif fault == "drop":
            self.close_connection = True
        else:
            self._forward(body, fault)

    def _forward(self, body: bytes, fault: str | None) -> None:
        # Closed whatever happens: the bucket may end while a killed client's request is under way.
        with closing(http.client.HTTPConnection(*self.bucket.server)) as line:
            line.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    line.putheader(name, value)
            line.endheaders()
            if fault == "torn":
                with suppress(OSError):
                    line.send(body[: len(body) // 2])
                self.close_connection = True
                return
            if body:
                line.send(body)
            response = line.getresponse()
            content = response.read()
        if fault == "unheard":
            self.close_connection = True
            return
        if fault == "late":
            time.sleep(LATE_S)
        self._answer(response.status, response.getheaders(), content)

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        is_head = self.command == "HEAD"
        ours = ("transfer-encoding", "connection", *(() if is_head else ("content-length",)))
        headers = [(name, value) for name, value in headers if name.lower() not in ours]
        if not (is_head and headers):
            headers.append(("Content-Length", "0" if is_head else str(len(content))))
        with suppress(OSError):  # the client was killed
            self.send_response_only(status)
            for header in headers:
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(b"" if is_head else content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass


@contextmanager
def open_bucket() -> Iterator[Bucket]:
    """Serve a fresh bucket; meanwhile this process reaches it by the usual variables, too."""
    from moto.server import ThreadedMotoServer  # which no rank that reaches the bucket needs

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    bucket = Bucket(moto.get_host_and_port())
    line = http.client.HTTPConnection(*bucket.server)
    line.request("POST", "/moto-api/reset")  # all servers of a process have the same buckets
    assert line.getresponse().status == 200
    line.close()
    handler = type("Handler", (_Proxy,), {"bucket": bucket})
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    proxy.daemon_threads = True
    proxy.handle_error = lambda *_: None  # clients are killed here
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    bucket.variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        bucket.fs.mkdir("bucket")
        with (
            mock.patch.dict(os.environ, bucket.variables),
            mock.patch.multiple(s3fs.S3FileSystem, **IMPATIENT),
        ):
            s3fs.S3FileSystem.clear_instance_cache()
            yield bucket
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        proxy.shutdown()
        proxy.server_close()
        moto.stop()
