"""Replica groups that join and leave a run, tracked by torchft.

torchft's lighthouse knows which groups are alive. Before each step it names those that take part
(a *quorum*); one that is behind gets the state of one that is not. A group whose rank is lost is
lost as a whole, and the groups that are left do the step again without it.

A collective among the ranks of a group fails at once when one of them is gone, but a rank may wait
for something else that will never come: the vote of that rank, in a server that knows nothing of
it. So the ranks of a group hold a connection, the ``Lifeline``, which breaks with any of them.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from forgekit.environment import require
from forgekit.mesh import process_rank
from forgekit.parallel.agreement import exchange
from forgekit.parallel.layout import world_of
from forgekit.replicas.transfer import find_other, parts_of, take_parts
from forgekit.state import TrainState
from forgekit.steps.replicas import OneGroup, Part
from forgekit.terminal import tell

GRACE_S = 10.0
"""Grace period in which a process of a lost group may end through a failed collective."""

MEETINGS = 2**30
"""More than the number of quorums in a run; see ``_rank_of``."""

StateT = TypeVar("StateT", bound=TrainState)


def join_replicas(
    state: TrainState,
    name: str,
    *,
    lighthouse: str | None = None,
    fingerprint: Any = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    also: Mapping[str, Any] = MappingProxyType({}),
    least: int = 1,
    timeout_s: float = 60.0,
    quorum_timeout_s: float = 600.0,
    retries: int | None = 100,
) -> ReplicaGroup | OneGroup:
    """Join this group of ranks to a run of several such groups.

    Every rank of the group calls it, after a checkpoint was loaded. The groups have the same model,
    layout, optimizer and data, each its own launcher and its own run directory.

    Args:
        state: The state of this group, for its mesh.
        name: Of this group, another one than those of the others.
        lighthouse: Address of torchft's lighthouse, ``http://host:29510``; by default that of the
            environment variable TORCHFT_LIGHTHOUSE. Without any this group is alone.
        fingerprint: What identifies the data, as for ``checkpoint_save``.
        settings: Options by name that have to be the same in all groups; compared as text.
        also: What else a group that joins takes over, objects with ``state_dict`` and
            ``load_state_dict`` by name: the ``StopSignal``, so that all stop after the same step.
        least: Groups without which no step is committed.
        timeout_s: How long a group waits for the others in a collective or a vote. More than the
            groups' steps differ by, the first step included.
        quorum_timeout_s: How long a group waits for the others to begin a step.
        retries: Attempts at one step before the group gives up; None for any number.

    Returns:
        What ``sum_replicas`` needs, to be used in ``with``.

    Raises:
        ImportError: If torchft is not installed.
    """
    lighthouse = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
    if not lighthouse:
        return OneGroup()
    os.environ.setdefault("RUST_LOG", "warn")  # or torchft writes some eight lines per step
    torchft = require("torchft", extra="ft")
    settings = {key: repr(value) for key, value in {"seed": state.seed, **settings}.items()}
    group = ReplicaGroup(state, {"data": fingerprint, "settings": settings}, also)
    rank, world = process_rank(), world_of(state.mesh)
    # torchft's manager waits forever without a store. The start's number is the same on all ranks.
    host = socket.gethostname()
    if rank == 0:
        group._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    mine = (host, group._store.port, secrets.randbelow(MEETINGS)) if rank == 0 else None
    host, port, group._origin = exchange(mine, world)[0]
    transport = require("torchft.checkpointing.http_transport", extra="ft").HTTPTransport
    timeout = timedelta(seconds=timeout_s)
    is_cpu = state.targets.device.type == "cpu"
    kind = torchft.ProcessGroupGloo if is_cpu else torchft.ProcessGroupNCCL
    group._groups = kind(timeout=timeout)
    group._manager = torchft.Manager(
        pg=group._groups,
        min_replica_size=least,
        state_dict=group._send,
        load_state_dict=group._receive,
        replica_id=name,
        rank=rank,
        world_size=world,
        store_addr=host,
        store_port=port,
        lighthouse_addr=lighthouse,
        timeout=timeout,
        quorum_timeout=timedelta(seconds=quorum_timeout_s),
        connect_timeout=timeout,
        checkpoint_transport=transport(timeout=timeout, num_chunks=0),
        use_async_quorum=False,  # a group's rows must be known before its first one
        init_sync=False,
        max_retries=retries,
    )
    group._lifeline = Lifeline(rank, world, group._leave)
    return group


class ReplicaGroup:
    """This group among those that torchft tracks; made by ``join_replicas``."""

    def __init__(
        self, state: TrainState, facts: Mapping[str, Any], also: Mapping[str, Any]
    ) -> None:
        self._world = world_of(state.mesh)
        self._device = state.targets.device
        self._facts = facts
        self._also = also
        self._store: Any = None
        self._groups: Any = None
        self._manager: Any = None
        self._lifeline: Any = None
        self._origin = 0  # origin of the state's bits; see `_rank_of`
        self._due = state.step  # the furthest step of all groups
        self._state: TrainState | None = None  # to be sent
        self._sent: dict[str, Any] | None = None  # by another group

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # else the group's other ranks end too, whatever they wait for
            self._lifeline.close()
        self._leave()

    def _leave(self) -> None:
        """Leave the run, which continues without this group."""
        self._groups.abort()
        self._manager.shutdown(wait=False)

    def begin(self, state: StateT) -> tuple[StateT, Part]:
        """Wait for the next step's groups; copy their state if this group is behind.

        Args:
            state: The state of this group; consumed if it is behind.

        Raises:
            ValueError: If the groups have another model, optimizer, layout, other settings or other
                data, on all ranks of this group; they go on without it. Also after a step without
                ``sum_replicas``.
        """
        if state.step > self._due:
            raise ValueError(
                f"step {state.step} begins, but the groups are at step {self._due}: this one went "
                "on alone. Call sum_replicas(totals, state, replicas) in each step, between "
                "accumulate and reduce_totals, and update only where it returns totals."
            )
        while True:
            self._most(0)  # fails if a rank is gone; the manager would wait for it
            self._manager.load_state_dict({"step": self._rank_of(state), "batches_committed": 0})
            self._state, self._sent = state, None
            self._manager.start_quorum()
            self._state = None
            is_behind = self._sent is not None
            problem = self._sent and find_other(state, self._facts, self._sent["state"])
            has_failed = self._manager.errored() is not None
            some_fail, some_behind, some_ahead, has_problem = self._most(
                has_failed, is_behind, not is_behind, problem is not None
            )
            if has_problem:
                text = next(filter(None, exchange(problem, self._world)))
                self._leave()
                raise ValueError(f"this group cannot join: {text}.")
            if some_fail or (some_behind and some_ahead):
                self.commit(False)
                continue
            if self._sent is not None:
                state = take_parts(state, self._sent["state"])
                for name, value in self._also.items():
                    value.load_state_dict(self._sent["also"][name])
                self._origin, self._sent = self._sent["origin"], None
            self._due = state.step
            part = Part(self._manager.participating_rank(), self._manager.num_participants())
            return state, part

    def sum(self, tensors: Sequence[Tensor]) -> bool:
        """Sum tensors over the groups, all in one call."""
        if self._manager.num_participants() > 1:
            # The default is the average.
            total = dist.ReduceOp.SUM
            for work in [self._manager.allreduce(t, reduce_op=total) for t in tensors]:
                work.wait()
                if self._manager.errored() is not None:
                    return False
        return self._manager.errored() is None

    def commit(self, good: bool) -> bool:
        """Vote on the step with the other ranks of this group."""
        if not good:
            self._manager.report_error(RuntimeError("the step cannot be committed"))
            # Else groups would wait for this one until their collective times out.
            self._groups.abort()
        self._most(0)  # as in `begin`
        is_committed = self._manager.should_commit()
        if is_committed:
            self._due += 1
            self._origin = MEETINGS + self._manager._quorum_id
        return is_committed

    def _rank_of(self, state: TrainState) -> int:
        """Compute the rank among groups: the highest one sends its state to the others.

        Groups that committed a step in the same quorum, or received it from one that did, have
        bitwise the same state. A quorum that redid the step summed in another order; the later
        one counts. If all have just started, any does.
        """
        return 2 * MEETINGS * state.step + self._origin

    def _send(self) -> dict[str, Any]:
        assert self._state is not None
        also = {name: value.state_dict() for name, value in self._also.items()}
        sent = parts_of(self._state, self._facts)
        return {"state": sent, "also": also, "origin": self._origin}

    def _receive(self, sent: dict[str, Any]) -> None:
        self._sent = sent  # `begin` checks it first, together with the other ranks

    def _most(self, *numbers: int) -> list[int]:
        """Reduce numbers to their maximum over the ranks of this group."""
        if self._world == 1:
            return [*numbers]
        largest = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()


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
            with suppress(OSError):  # ended before
                peer.sendall(b".")


def _watch(peer: socket.socket, lost: Callable[[], None]) -> None:
    with suppress(OSError):
        if peer.recv(1) == b".":
            return
    lost()
    time.sleep(GRACE_S)
    tell("another rank of this group is gone, and this one still waited for it")
    os._exit(1)
