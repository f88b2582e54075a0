"""Messages from the rank that reads a stream to the ranks that train on the same rows.

Stages of a pipeline ask for a micro-batch at different times, and a stage that waits for the next
one there waits for no other: so the reader never waits for whom it sends to.
"""

from __future__ import annotations

import io
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from forgekit.mesh import DATA_DIMENSIONS, data_ranks, group_of
from forgekit.rollouts.sources import LOOK_S

POLL_S = 0.002


class Sharing:
    """The ranks that read the same samples; every rank of the mesh makes one.

    Args:
        mesh: What ``build_mesh`` returned; None for a rank that reads for itself.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        _, world = data_ranks(mesh)
        self._group = self._store = None
        if mesh is not None and mesh.size() > world:
            names = mesh.mesh_dim_names or ()
            of_data = [dim for dim, name in enumerate(names) if name in DATA_DIMENSIONS]
            rows = mesh.mesh.movedim(of_data, [*range(len(of_data))]).reshape(world, -1)
            # A group of its own: these messages have no fixed order among a step's collectives.
            self._group = group_of("rollouts", rows.tolist(), alone=True)
            token = [uuid.uuid4().hex]
            dist.broadcast_object_list(token, group=self._group, group_src=0)
            store = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"rollouts/{token[0]}", store)
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def is_first(self) -> bool:
        """Whether this rank reads for the group."""
        return self._group is None or dist.get_rank(self._group) == 0

    def ask_to_stop(self) -> None:
        """Notify the first rank that this one was asked to stop."""
        if self._store is not None:
            self._store.set("stop", "")

    def is_asked_to_stop(self) -> bool:
        """Whether a rank has called ``ask_to_stop``."""
        return self._store is not None and self._store.check(["stop"])

    def send(self, value: Any) -> None:
        """Send a value from the first rank to the others, without waiting."""
        if self._group is None:
            return
        buffer = io.BytesIO()
        torch.save(value, buffer)
        content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        for tensor in (torch.tensor([len(content)]), content):
            self._sent.append((self._broadcast(tensor), tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def receive(self, look: Callable[[], None]) -> Any:
        """Wait for the first rank's next value, and call ``look`` every second."""
        size, looked = torch.zeros(1, dtype=torch.int64), time.monotonic()
        work = self._broadcast(size)
        while not work.is_completed():
            if time.monotonic() - looked > LOOK_S:
                look()
                looked = time.monotonic()
            time.sleep(POLL_S)
        work.wait()  # raises if the receive failed
        content = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(content).wait()
        return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=False)

    def _broadcast(self, tensor: Tensor) -> Any:
        return dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)
