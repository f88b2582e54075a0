"""The step that a plan measures: a run's second one, which all later ones are like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from tensordict import TensorDictBase

from forgekit.data.batch import IGNORED
from forgekit.data.groups import groups
from forgekit.model.routing import Router
from forgekit.plan.collectives import Call
from forgekit.plan.watch import StepWatch, Work
from forgekit.state import Agreement, TrainState, donate
from forgekit.steps.accumulate import accumulate
from forgekit.steps.clip import clip
from forgekit.steps.totals import reduce_totals
from forgekit.steps.update import update


@attrs.frozen(kw_only=True)
class Measured:
    """What one rank's step does.

    Attributes:
        state: The state after it.
        memory: See ``StepWatch.memory``.
        calls: Collectives, and how many of each.
        work: Computation.
        targets: Positions with a label in this rank's micro-batches.
    """

    state: TrainState
    memory: dict[str, int]
    calls: Counter[Call]
    work: Work
    targets: int


@contextmanager
def entered(built: Any) -> Iterator[None]:
    """Let a recipe's loader work, and give back threads and signals when the block ends."""
    with ExitStack() as stack:
        parts: list[Any] = [built.loader, getattr(built, "stop", None)]
        for part in parts:
            if hasattr(part, "__exit__"):
                stack.enter_context(part)
        yield


def measure_step(
    built: Any, watch: StepWatch, micro_batches: int, agreed: Agreement | None = None
) -> Measured:
    """Take two steps of a recipe and measure the second one.

    The first is taken in its parts, without what a run proves once. Of many micro-batches two are
    run, as those between the first and the last are like the first; in a pipeline all of them,
    since its schedule depends on their number. Experts take turns.

    Args:
        built: What a recipe's ``setup`` returned, within ``watch``.
        watch: Watches since before the setup.
        micro_batches: Of a step.
        agreed: What the ranks add up, from the plan of a rank that knows; None to find out.

    Returns:
        What the step does.
    """
    state = built.state
    watch.label("parameters", [*state.model.parameters(), *state.model.buffers()])
    _balance(state)
    is_staged = state.layout.stages is not None
    run = micro_batches if is_staged else min(micro_batches, 2)
    batches = groups(built.loader, run)
    if agreed is not None:
        state = donate(state, agreed=agreed)
    first = next(batches)
    state = _first_step(built, state, first if is_staged else [next(iter(first))])
    watch.label("gradients", _gradients(state))
    watch.end_step()
    watch.begin()
    counted = _Counted(next(batches), watch)
    state, _ = built.step(state, counted)
    watch.label("gradients", _gradients(state))
    watch.end_step()
    calls, work = Counter(watch.calls), watch.work
    for _ in range(micro_batches - run):
        calls.update(counted.calls)
    return Measured(
        state=state,
        memory=watch.memory(),
        calls=calls,
        work=work.plus(counted.work, micro_batches - run),
        targets=counted.targets * micro_batches // run,
    )


class _Counted:
    """A group of micro-batches that notes what the first of them costs, and their targets."""

    def __init__(self, group: Any, watch: StepWatch) -> None:
        self._group, self._watch = group, watch
        self.samples = getattr(group, "samples", None)
        self.calls: Counter[Call] = Counter()
        self.work = Work()
        self.targets = 0

    def __len__(self) -> int:
        return len(self._group)

    def __iter__(self) -> Iterator[TensorDictBase]:
        watch, calls, work = self._watch, Counter[Call](), Work()
        for index, batch in enumerate(self._group):
            if index == 0:
                calls, work = Counter(watch.calls), Work().plus(watch.work, 1)
            if index == 1:
                self.calls, self.work = watch.calls - calls, watch.work.plus(work, -1)
            labels = batch.get("labels", batch.get("input_ids", torch.empty(0)))
            self.targets += int((labels != IGNORED).sum())
            yield batch


def _balance(state: TrainState) -> None:
    """Let experts take turns, in place: what tokens would choose is not known."""
    for module in state.model.modules():
        if isinstance(module, Router):
            module.spec = attrs.evolve(module.spec, force_balance=True, bias_rate=None)


def _first_step(built: Any, state: TrainState, batches: Iterable[Any]) -> TrainState:
    totals = accumulate(state, batches, built.loss_fn, audit=False)
    for name, voter in (("stop", "stop"), ("ended", "end")):
        if getattr(built, voter, None) is not None:
            totals = totals.plus(**{name: torch.zeros_like(totals["loss"])})
    totals = reduce_totals(totals, state, audit=False)
    return update(state, clip(totals, max_norm=1.0), lr=0.0, totals=totals)


def _gradients(state: TrainState) -> list[Any]:
    return [p.grad for p in state.model.parameters() if p.grad is not None]
