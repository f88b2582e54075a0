"""A rendezvous of ranks in the store through which the process groups were made.

A meeting touches neither the device nor a process group, and unlike a collective it can say who is
not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import attrs
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


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
    meeting = Meeting.of(range(dist.get_world_size() if dist.is_initialized() else 1))
    if meeting is None:
        return
    verdict = meeting.hold("barrier", tag, tag, timeout_s, judge=find_difference)
    if verdict.missing:
        raise HangError(
            f"barrier {tag!r}: {describe_missing(verdict, timeout_s)} A rank that failed says why "
            "itself; else look for a condition that keeps it from here, or give a longer timeout_s."
        )
    if verdict.result:
        raise HangError(
            f"ranks are at different barriers: {verdict.result}. Every rank must pass the same "
            "ones in the same order; look for a condition that is not the same on all of them."
        )


@attrs.frozen
class Verdict:
    """The result of a meeting, the same for every rank that came.

    Attributes:
        missing: Ranks that did not come in time.
        known: Of each of them where it was at its last meeting of this kind, and where it is now as
            far as its watchdog has said.
        result: Of ``judge``, if all came.
    """

    missing: list[int] = attrs.field(factory=list)
    known: list[str] = attrs.field(factory=list)
    result: Any = None


@attrs.frozen
class Meeting:
    """Ranks that meet in a store.

    Each rank leaves a note. The first rank reads all of them and writes the verdict, which the
    others read, so that a meeting of a thousand ranks is some thousand messages. If the first rank
    does not come, whoever notices writes the verdict; the store keeps the first one.
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
        """Whether this rank reads the notes."""
        return self.rank == self.members[0]

    def hold(
        self,
        kind: str,
        tag: str,
        note: Any,
        timeout_s: float,
        judge: Callable[[dict[int, Any]], Any],
    ) -> Verdict:
        """Meet all ranks; return the verdict on their notes, or on those that did not come.

        Args:
            kind: Meetings of a kind are counted, and the n-th of one rank is that of all.
            tag: Where this rank is, for those that miss it at the next meeting.
            note: What ``judge`` gets of this rank, for JSON.
            timeout_s: Seconds from the first rank to the last.
            judge: Makes the result of all notes; called on the first rank.

        Raises:
            HangError: If the store cannot be reached.
        """
        with _reachable():
            # Each rank counts its own meetings: nobody has to agree on a number first.
            number = self.store.add(f"{kind}/count/{self.rank}", 1)
            here, verdict = f"{kind}/{number}/", f"{kind}/{number}/verdict"
            self.store.set(f"{kind}/last/{self.rank}", json.dumps(tag))
            self.store.set(f"{here}{self.rank}", json.dumps(note))
            notes = [f"{here}{rank}" for rank in self.members]
            came = self._wait(notes if self.is_first else [verdict], timeout_s)
            gone = [] if came else [key for key in notes if not self.store.check([key])]
            missing = [rank for rank in self.members if f"{here}{rank}" in gone]
            if missing:
                self._decide(verdict, self._without(kind, missing))
            elif self.is_first:
                found = map(json.loads, self.store.multi_get(notes))
                result = judge(dict(zip(self.members, found, strict=True)))
                self._decide(verdict, Verdict(result=result))
            elif not came and not self._wait([verdict], timeout_s):
                # All had come when this rank gave up, but the first one never judged them.
                self._decide(verdict, self._without(kind, [self.members[0]]))
            answer = Verdict(**json.loads(self.store.get(verdict)))
            if self.is_first and number > 1:  # all are here, so they have read the one before
                for name in [*self.members, "verdict"]:
                    self.store.delete_key(f"{kind}/{number - 1}/{name}")
            return answer

    def _decide(self, key: str, verdict: Verdict) -> None:
        # Ranks that give up may find other ones missing; the first verdict counts for all.
        self.store.compare_set(key, "", json.dumps(attrs.asdict(verdict)))

    def _without(self, kind: str, missing: list[int]) -> Verdict:
        return Verdict(missing, [self._last_seen(kind, rank) for rank in missing])

    def _last_seen(self, kind: str, rank: int) -> str:
        last = self.read(f"{kind}/last/{rank}")
        word = self.read(f"said/{rank}") if kind == "probe" else None
        seen = f"was last here at {last!r}" if last else "was never here"
        return f"rank {rank} {seen}" + (f" and {word['text']}" if word else "")

    def read(self, key: str) -> Any:
        """Read a note; None if there is none."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _wait(self, keys: list[str], timeout_s: float) -> bool:
        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:
            return False
        return True


def find_difference(tags: Mapping[int, str]) -> str | None:
    """Say which ranks are where, if they are not all at the same tag."""
    at = {tag: [rank for rank in tags if tags[rank] == tag] for tag in tags.values()}
    if len(at) == 1:
        return None
    return ", ".join(f"{name_ranks(ranks)} at {tag!r}" for tag, ranks in at.items())


def describe_missing(verdict: Verdict, timeout_s: float) -> str:
    """Say who did not come, and what is known of them."""
    known = ", ".join(verdict.known)
    return f"{name_ranks(verdict.missing)} did not come within {timeout_s:g} s; {known}."


def name_ranks(ranks: Sequence[int]) -> str:
    """Write "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@contextmanager
def _reachable() -> Iterator[None]:
    """Say what it means that the store does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise HangError(
            f"the store in which ranks meet does not answer ({error}). The process that holds it, "
            "rank 0 or the launcher, has ended; what it wrote last says why."
        ) from error
