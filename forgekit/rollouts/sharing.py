"""What one rank reads for those that share its data: sent at once, received when it is due.

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
            # Not a group that steps use: what is sent here is received in no order with theirs.
            self._group = group_of("rollouts", rows.tolist(), alone=True)
            token = [uuid.uuid4().hex]
            dist.broadcast_object_list(token, group=self._group, group_src=0)
            store = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"rollouts/{token[0]}", store)
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def is_first(self) -> bool:
        """Whether this rank reads for all."""
        return self._group is None or dist.get_rank(self._group) == 0

    def ask_to_stop(self) -> None:
        """Tell the first rank that another one was asked to stop."""
        if self._store is not None:
            self._store.set("stop", "")

    def is_asked_to_stop(self) -> bool:
        """Whether a rank has called ``ask_to_stop``."""
        return self._store is not None and self._store.check(["stop"])

    def send(self, value: Any) -> None:
        """Send a value from the first rank to the others, and wait for none of them."""
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
        """Wait for what the first rank sends next, and call ``look`` every second."""
        size, looked = torch.zeros(1, dtype=torch.int64), time.monotonic()
        work = self._broadcast(size)
        while not work.is_completed():
            if time.monotonic() - looked > LOOK_S:
                look()
                looked = time.monotonic()
            time.sleep(POLL_S)
        work.wait()  # raises what has failed
        content = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(content).wait()
        return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=False)

    def _broadcast(self, tensor: Tensor) -> Any:
        return dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)
