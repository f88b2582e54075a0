"""Meetings of ranks over the process groups' store.

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
"""Longest interval between two polls of the store."""


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
        ranks.gather("barrier", tag, None, timeout_s)


@attrs.frozen
class RankStore:
    """A store of some ranks, in which each writes where it is.

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
        """Make the store of these ranks; None for a single rank."""
        if len(members) < 2:
            return None
        # Keys by ranks: several meshes share one store.
        prefix = f"forgekit/{members[0]}-{members[-1]}-{len(members)}"
        store = dist.PrefixStore(prefix, c10d._get_default_store())
        return cls(store, dist.get_rank(), tuple(members))

    @property
    def is_first(self) -> bool:
        """Whether this rank collects all values."""
        return self.rank == self.members[0]

    def gather(self, kind: str, tag: str, value: Any, timeout_s: float) -> dict[int, Any]:
        """Meet all ranks and return each one's value.

        Args:
            kind: Meetings of a kind are counted, and the n-th of one rank is that of all.
            tag: Where this rank is; all must be at the same.
            value: What this rank brings, for JSON.
            timeout_s: Seconds from the first rank to the last.

        Raises:
            HangError: On every rank that came, if one did not, or is elsewhere.
        """
        # Each rank counts its own meetings, so no number has to be agreed on.
        number = self.store.add(f"{kind}/count/{self.rank}", 1)
        keys = {rank: f"{kind}/{number}/{rank}" for rank in self.members}
        result = f"{kind}/{number}/all"
        self.write(f"was last at {tag!r}")
        self.store.set(keys[self.rank], json.dumps([tag, value]))
        # The first rank reads all values and writes one: messages are linear in ranks.
        problem, values = "", []
        awaited = [*keys.values()] if self.is_first else [result]
        if not self._come(awaited, timeout_s):
            missing = [r for r, key in keys.items() if not self.store.check([key])]
            missing = missing or [self.members[0]]  # all have come, but the first rank is gone
            problem = (
                f"{kind} {tag!r}: {name_ranks(missing)} did not come within {timeout_s:g} s; "
                f"{self.describe(missing)}. A rank that failed says why itself; else look for a "
                "condition that keeps it from here, or give a longer timeout_s."
            )
        if problem or self.is_first:
            if not problem:
                brought = [json.loads(each) for each in self.store.multi_get(awaited)]
                values = [value for _, value in brought]
                lines = {r: f"at {at!r}" for r, (at, _) in zip(keys, brought, strict=True)}
                if len({*lines.values()}) > 1:
                    problem = (
                        f"ranks are at different {kind}s: {_by_line(lines)}. Look for a condition "
                        "that is not the same on every rank."
                    )
            # Ranks that give up may miss different ones; the first text counts for all.
            self.store.compare_set(result, "", json.dumps([problem, values]))
        problem, values = json.loads(self.store.get(result))
        if problem:
            raise HangError(problem)
        if self.is_first and number > 1:  # all are here, so all have read the previous one
            for name in (*self.members, "all"):
                self.store.delete_key(f"{kind}/{number - 1}/{name}")
        return dict(zip(self.members, values, strict=True))

    def _come(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Poll until keys are set; whether they are. The store's own wait would block signals."""
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
        """Describe where some ranks are, ranks with equal lines together."""
        lines = dict.fromkeys(members, "was never here")
        for rank in members:
            if self.store.check([f"at/{rank}"]):
                lines[rank] = self.store.get(f"at/{rank}").decode()
        return _by_line(lines)


def _by_line(lines: Mapping[int, str]) -> str:
    at = {line: [rank for rank in lines if lines[rank] == line] for line in lines.values()}
    return "; ".join(f"{name_ranks(ranks)} {line}" for line, ranks in at.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """Format "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def is_lost(error: BaseException | None) -> bool:
    """Whether an error is a failed collective or meeting; gloo's errors have no own class."""
    is_gloo = type(error) is RuntimeError and "gloo" in str(error)
    return is_gloo or isinstance(error, dist.DistError | HangError)
