"""A server that speaks Redis's protocol."""

from __future__ import annotations

import socket
import threading

import fakeredis
import pytest
from redis import Redis


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def redis_url():
    """Its URL; it runs in a thread."""
    port = free_port()
    server = fakeredis.TcpFakeServer(("127.0.0.1", port), server_type="redis")
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"redis://127.0.0.1:{port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def redis(redis_url):
    """A client of it, closed at the end: no later test meets its socket as garbage."""
    with Redis.from_url(redis_url) as client:
        yield client
