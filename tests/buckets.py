"""A bucket to test with: moto speaks the S3 protocol in this process, at a port of its own."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

BUCKET = "s3://bucket"


@contextmanager
def bucket() -> Iterator[str]:
    """Start a server with an empty bucket, to which this process and its children are led."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    with mock.patch.dict(os.environ, variables):
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        try:
            yield BUCKET
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.stop()


def upload(folder: Path, url: str) -> str:
    """Put a folder into the bucket; return its URL."""
    import s3fs

    s3fs.S3FileSystem().put(f"{folder}/", f"{url}/", recursive=True)
    return url


class Proxy:
    """Stands between a client and a store; does to requests what networks and stores do.

    Attributes:
        fault: None passes everything on; ``"drop"`` ends connections, ``"503"`` throttles.
        requests: How many were seen.
    """

    def __init__(self, url: str) -> None:
        self.fault: str | None = None
        self.requests = 0
        host, port = url.removeprefix("http://").split(":")
        self._store = host, int(port)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(self._store) as store:
            threading.Thread(target=self._forward, args=[store, client], daemon=True).start()
            while (request := client.recv(2**16)) and self.fault != "drop":
                self.requests += 1
                if self.fault == "503":
                    client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")
                else:
                    store.sendall(request)
            client.shutdown(socket.SHUT_RDWR)
            store.shutdown(socket.SHUT_RDWR)

    def _forward(self, store: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while answer := store.recv(2**16):
                client.sendall(answer)
            client.shutdown(socket.SHUT_RDWR)
