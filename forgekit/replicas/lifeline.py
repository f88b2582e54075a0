"""Connections among the ranks of a group, which break when one of them is gone.

A collective among the ranks fails at once then, but a rank may wait for something else that will
never come: the vote of the rank that is gone, in a server that knows nothing of it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from forgekit.parallel.agreement import exchange
from forgekit.terminal import tell

GRACE_S = 10.0
"""How long this process may take to end by itself, as a failed collective ends it."""


class Lifeline:
    """Ends this process when another rank has ended without ``close``.

    Every rank makes one; those of the same process group watch each other through the first.

    Args:
        rank: This rank.
        world: Number of ranks.
        lost: Called at once when a rank is gone, in a thread of its own.
    """

    def __init__(self, rank: int, world: int, lost: Callable[[], None]) -> None:
        self._peers: list[socket.socket] = []
        if world == 1:
            return
        host = socket.gethostname()
        listener = socket.create_server((host, 0)) if rank == 0 else None
        address = exchange(listener and listener.getsockname()[:2], world)[0]
        if listener is None:
            self._peers = [socket.create_connection(address)]
        else:
            self._peers = [listener.accept()[0] for _ in range(world - 1)]
            listener.close()
        for peer in self._peers:
            threading.Thread(target=_watch, args=(peer, lost), daemon=True).start()

    def close(self) -> None:
        """Let this rank end without ending the others."""
        for peer in self._peers:
            with suppress(OSError):  # it has ended before
                peer.sendall(b".")


def _watch(peer: socket.socket, lost: Callable[[], None]) -> None:
    with suppress(OSError):
        if peer.recv(1) == b".":
            return
    lost()
    time.sleep(GRACE_S)
    tell("another rank of this group is gone, and this one still waited for it")
    os._exit(1)
