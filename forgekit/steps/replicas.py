"""A step among replica groups that come and go: sums over the groups, and a vote on the step.

Each group holds the whole model in the same layout and computes a part of the step's micro-batches.
What they add up is what the ranks of one group add up: gradients times the loss scale, and totals,
never averages. So one factor at the end is right for any number of groups with any parts, and a
step that broke off changes nothing: its micro-batches come again, in other parts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import attrs
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from forgekit.parallel.agreement import exchange
from forgekit.parallel.layout import world_of
from forgekit.ranges import ranged
from forgekit.state import TrainState
from forgekit.steps.totals import Totals, find_problem, names_of, parameters_of, with_sums
from forgekit.tensors import local, wide

BUCKET_BYTES = 2**24
"""Gradients up to this size together are copied beside each other, for one collective."""

StateT = TypeVar("StateT", bound=TrainState)


class Part(NamedTuple):
    """Which part of a step is this group's: ``loader.share(state.samples, micro_batches, *part)``.

    Attributes:
        index: This group among the participants of the step.
        participants: Their number.
    """

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    participants: int


class Replicas(Protocol):
    """What a step asks of whoever keeps track of the groups; ``join_replicas`` returns one."""

    def begin(self, state: StateT) -> tuple[StateT, Part]:
        """Take in who joins; return the state of the groups, and this group's part of the step.

        The state is ``state`` itself, or one that has replaced it.
        """
        ...

    def sum(self, tensors: Sequence[Tensor]) -> bool:
        """Add each tensor to those of the same rank in the other groups, in place.

        Returns:
            False if that failed; the tensors then hold anything, and the step cannot be committed.
        """
        ...

    def commit(self, good: bool) -> bool:
        """Whether the step counts: the same on all ranks of a group, and False if one says so."""
        ...


class OneGroup:
    """Replicas of one group alone, without any other process to ask."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing."""

    def begin(self, state: StateT) -> tuple[StateT, Part]:
        """Return the state as it is, and all of the step."""
        return state, Part(0, 1)

    def sum(self, tensors: Sequence[Tensor]) -> bool:  # noqa: ARG002
        """Leave the tensors as they are."""
        return True

    def commit(self, good: bool) -> bool:
        """Return what was given."""
        return good


class _Header(NamedTuple):
    """Integers that the groups add up first, to learn whether they may add up the rest."""

    groups: int
    samples: int
    problems: int
    newcomers: int
    digests: int
    squares: int

    @classmethod
    def of(cls, samples: int, facts: str, *, has_problem: bool, is_new: bool) -> Self:
        """Describe one group; ``facts`` have to be equal in all of them."""
        digest = zlib.crc32(facts.encode()) >> 12  # twenty bits: a million squares fit into int64
        return cls(1, samples, has_problem, is_new, digest, digest**2)

    @property
    def is_alike(self) -> bool:
        """Whether all groups have the same digest: by sums alone, and exactly."""
        return self.groups * self.squares == self.digests**2


@ranged
def sum_replicas(totals: Totals, state: TrainState, replicas: Replicas) -> Totals | None:
    """Add gradients, in place, and totals over the replica groups, and vote on the step.

    Between ``accumulate`` and ``reduce_totals``, on every rank; votes such as ``stop`` are added to
    the totals before it. Gradients are added as shards, each to those of the same rank in the other
    groups. On an accelerator the host waits here for the step.

    Args:
        totals: What ``accumulate`` returned for this group's part. A group whose part has no
            ``samples`` adds nothing but votes.
        state: The state whose gradients were accumulated; not changed.
        replicas: What ``join_replicas`` returned.

    Returns:
        Totals over the groups, ``samples`` included; or None where the step does not count. The
        next step then begins with the same state, and clears the gradients.

    Raises:
        ValueError: On all ranks of a group, if one of them has a loss that cannot be trained on,
            gradients that were never reduced, or names of sums that have changed, or if a group
            that has just joined reports other sums or sizes than the others. Those go on without
            it. Also if the totals have been summed before.
    """
    if (shares := totals.checked.shares) is None:
        raise ValueError("totals were summed before; call sum_replicas only once per step.")
    problem = find_problem(totals, state)
    if problem is None and len({samples == 0 for samples, _ in shares}) > 1:
        problem = UNEVEN
    sums, gradients = _part_of(totals, state)
    vector = torch.cat([value.reshape(-1) for value in sums.values()])
    sizes = [whole for _, whole in shares]
    shards = [(shard.dtype, shard.numel()) for shard in gradients]
    facts = repr(([*sums], len(vector), shards, state.step, state.samples, sizes))
    is_new = state.agreed_names is None
    header = _Header.of(totals.samples, facts, has_problem=problem is not None, is_new=is_new)
    numbers = torch.tensor(header, dtype=torch.int64, device=state.targets.device)
    good = replicas.sum([numbers])
    header = _Header(*numbers.tolist())
    if good and not (header.is_alike or header.problems) and (is_new or not header.newcomers):
        problem = OTHER_SUMS.format(sums=", ".join(map(str, sums)), sizes=sizes)
    good = good and header.is_alike and not header.problems
    if good and header.groups > 1:
        good = _sum(replicas, [vector, *gradients])
    if not replicas.commit(good):
        reports = exchange(problem and str(problem), world_of(state.mesh))
        if text := next(filter(None, reports), None):
            raise ValueError(text)
        return None
    parts = vector.split([value.numel() for value in sums.values()])
    pairs = zip(sums.items(), parts, strict=True)
    totals = with_sums(totals, {key: part.view(value.shape) for (key, value), part in pairs})
    checked = attrs.evolve(totals.checked, shares=None)
    return attrs.evolve(totals, samples=header.samples, checked=checked)


UNEVEN = (
    "this group has rows of one share of the step but none of another, whose micro-batch would be "
    "counted twice. Use the same number of micro-batches for every share."
)
OTHER_SUMS = (
    "this group's sums or step sizes differ from the other groups': {sums}, sizes {sizes} "
    "(micro-batches, rows of each). Start it with the loss and the batch sizes of the others."
)


def _part_of(totals: Totals, state: TrainState) -> tuple[dict[Any, Tensor], list[Tensor]]:
    """Sums by name and shards of gradients; all but votes are zero for a surplus group."""
    gradients = [local(p.grad) for p in parameters_of(state.optimizer) if p.grad is not None]
    sums = {key: totals[key] for key in names_of(totals.sums)}
    if totals.samples == 0:  # what it has computed is another group's; its votes are its own
        for value in gradients:
            value.zero_()
        sums |= {key: torch.zeros_like(sums[key]) for key in sums if not _is_vote(key)}
    return sums, gradients


def _is_vote(key: str | tuple[str, ...]) -> bool:
    return isinstance(key, str) and key not in ("targets", "loss")


def _sum(replicas: Replicas, tensors: Sequence[Tensor]) -> bool:
    """Add tensors over the groups in place, small ones beside each other in one copy."""
    for bucket in _take_tensors(tensors, BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)  # of a single contiguous tensor not a copy
        together = flat.to(wide(flat.dtype))
        if not replicas.sum([together]):
            return False
        for tensor, total in zip(bucket, _unflatten_dense_tensors(together, bucket), strict=True):
            tensor.copy_(total)
    return True
