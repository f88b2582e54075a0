"""Ranks that meet in the store through which the process groups were made.

A meeting touches neither the device nor a process group, and unlike a collective it can say who is
not there: each rank keeps one line in the store that says where it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import attrs
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

LONGEST_PAUSE_S = 0.05
"""Between two looks at who has come."""


class HangError(RuntimeError):
    """Ranks did not come to a meeting in time, or came to another one."""


def barrier(tag: str, *, timeout_s: float = 600.0) -> None:
    """Wait for all processes, and check that they are at the same barrier.

    For set-up: it costs some round trips to the store and no collective. A single process returns
    at once.

    Args:
        tag: Where this process is, for example "model is built".
        timeout_s: Seconds from the first rank to the last.

    Raises:
        HangError: On every rank that came, if one did not come in time, or with another tag; it
            says which rank is where.
    """
    ranks = RankStore.of(range(dist.get_world_size() if dist.is_initialized() else 1))
    if ranks is not None:
        tags = ranks.gather("barrier", tag, tag, timeout_s)
        if different := differences(tags):
            raise HangError(
                f"ranks are at different barriers: {different}. Every rank must pass the same ones "
                "in the same order; look for a condition that is not the same on all of them."
            )


@attrs.frozen
class RankStore:
    """The store of some ranks, in which each keeps a line that says where it is.

    Attributes:
        store: The store that made the process groups, under a prefix of its own.
        rank: This rank.
        members: All of them.
    """

    store: Any
    rank: int
    members: tuple[int, ...]

    @classmethod
    def of(cls, members: Sequence[int]) -> Self | None:
        """Let these ranks meet; None if there is only one."""
        if len(members) < 2:
            return None
        # Meshes of other ranks have other keys in the one store.
        prefix = f"forgekit/{members[0]}-{members[-1]}-{len(members)}"
        store = dist.PrefixStore(prefix, c10d._get_default_store())
        return cls(store, dist.get_rank(), tuple(members))

    @property
    def is_first(self) -> bool:
        """Whether this rank collects what all have brought."""
        return self.rank == self.members[0]

    def gather(self, kind: str, tag: str, value: Any, timeout_s: float) -> dict[int, Any]:
        """Meet all ranks, and return what each has brought.

        Args:
            kind: Meetings of a kind are counted, and the n-th of one rank is that of all.
            tag: Where this rank is, for those that miss it at the next meeting.
            value: What this rank brings, for JSON.
            timeout_s: Seconds from the first rank to the last.

        Raises:
            HangError: If a rank did not come; says where it was last.
        """
        # Each rank counts its own meetings: nobody has to agree on a number first.
        number = self.store.add(f"{kind}/count/{self.rank}", 1)
        keys = {rank: f"{kind}/{number}/{rank}" for rank in self.members}
        result = f"{kind}/{number}/all"
        self.write(f"was last at {tag!r}")
        self.store.set(keys[self.rank], json.dumps(value))
        # The first rank reads all and writes one: a thousand ranks need some thousand messages.
        problem, values = "", []
        awaited = [*keys.values()] if self.is_first else [result]
        if not self._come(awaited, timeout_s):
            missing = [r for r, key in keys.items() if not self.store.check([key])]
            missing = missing or [self.members[0]]  # all have come, and the first one is gone
            problem = (
                f"{kind} {tag!r}: {name_ranks(missing)} did not come within {timeout_s:g} s; "
                f"{self.describe(missing)}. A rank that failed says why itself; else look for a "
                "condition that keeps it from here, or give a longer timeout_s."
            )
        if problem or self.is_first:
            if not problem:
                values = [json.loads(each) for each in self.store.multi_get(awaited)]
            # Ranks that give up may miss other ones; what was written first counts for all.
            self.store.compare_set(result, "", json.dumps([problem, values]))
        problem, values = json.loads(self.store.get(result))
        if problem:
            raise HangError(problem)
        if self.is_first and number > 1:  # all are here, so they have read the one before
            for name in (*self.members, "all"):
                self.store.delete_key(f"{kind}/{number - 1}/{name}")
        return dict(zip(self.members, values, strict=True))

    def _come(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Look until keys are there, and say whether they are: the store's wait hears no signal."""
        deadline, pause = time.monotonic() + timeout_s, 0.001
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return True

    def write(self, line: str) -> None:
        """Write where this rank is."""
        self.store.set(f"at/{self.rank}", line)

    def describe(self, members: Sequence[int]) -> str:
        """Say where some ranks are, those with equal lines together."""
        lines = dict.fromkeys(members, "was never here")
        for rank in members:
            if self.store.check([f"at/{rank}"]):
                lines[rank] = self.store.get(f"at/{rank}").decode()
        at = {line: [rank for rank in members if lines[rank] == line] for line in lines.values()}
        return "; ".join(f"{name_ranks(ranks)} {line}" for line, ranks in at.items())


def differences(tags: Mapping[int, str]) -> str:
    """Say which ranks are where, if they are not all at the same tag."""
    at = {tag: [rank for rank in tags if tags[rank] == tag] for tag in tags.values()}
    described = [f"{name_ranks(ranks)} at {tag!r}" for tag, ranks in at.items()]
    return ", ".join(described) if len(at) > 1 else ""


def name_ranks(ranks: Sequence[int]) -> str:
    """Write "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def is_lost(error: BaseException | None) -> bool:
    """Whether a collective or a meeting failed; gloo's errors have no class of their own."""
    is_gloo = type(error) is RuntimeError and "gloo" in str(error)
    return is_gloo or isinstance(error, dist.DistError | HangError)
