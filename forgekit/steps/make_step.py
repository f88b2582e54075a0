"""The parts of a step in one function, for recipes that need nothing in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from forgekit.data.order import renumber
from forgekit.optim.lr_schedules import PhasedSchedule, check_rates
from forgekit.state import TrainState, donate
from forgekit.steps.accumulate import LossFn, Sync, accumulate
from forgekit.steps.clip import Correction, SpikeLimit, check_max_norm, clip, limit_spikes
from forgekit.steps.experts import expert_metrics
from forgekit.steps.totals import Totals, mean_metrics, reduce_totals
from forgekit.steps.update import update

StateT = TypeVar("StateT", bound=TrainState)
GradientHook = Callable[[TrainState, Totals], Mapping[str, Tensor]]
"""What ``make_step`` calls between the reduction and the update; returns metrics."""

SEARCHED_STEPS = 100_000
"""How far a schedule without a ``total`` is searched for the rate that an optimizer was given."""


class Vote(Protocol):
    """What ``make_step`` asks of a stop signal and of the end of data."""

    def vote(self) -> float:
        """1.0 if this process wants to stop, or has no more data, else 0.0."""
        ...

    def hear(self, votes: Tensor) -> None:
        """Take the sum of all ranks' votes, ``[]`` float64 on the device."""
        ...


def make_step(
    loss_fn: LossFn,
    *,
    schedule: Callable[[int], float],
    max_norm: float = 1.0,
    sync: Sync = "last",
    stop: Vote | None = None,
    end: Vote | None = None,
    spikes: SpikeLimit | None = None,
    audit: bool = True,
    total: int | None = None,
    gradient_hook: GradientHook | None = None,
) -> Callable[[StateT, Iterable[TensorDictBase]], tuple[StateT, TensorDict]]:
    """Build ``step(state, batches) -> (state, metrics)``.

    The step is ``accumulate``, ``reduce_totals``, ``gradient_hook`` where there is one, ``clip``,
    ``limit_spikes`` where it is asked for, ``update`` and ``step_metrics`` in that order and
    nothing else; write them out where something has to happen in between.

    Args:
        loss_fn: ``loss_fn(model, batch) -> Loss``.
        schedule: Learning rate as a pure function of the step number, which starts at 0.
        max_norm: Upper bound of the gradient's global L2 norm; ``inf`` does not clip.
        sync: See ``accumulate``.
        stop: A ``StopSignal``; its vote travels in the step's one collective.
        end: A ``DataEnd``, the one that ``groups`` has; its vote travels there too.
        spikes: Leave out steps whose loss or norm stands out from ``state.recent``; the metrics
            then have ``spikes``, 1 for such a step. None leaves out none.
        audit: Whether the first step compares replicas and options over the ranks, and proves the
            tensor-parallel plan and positions under context parallelism.
        total: Number of steps of the run, for a ``bias_rate`` of experts that depends on it.
        gradient_hook: Called on every rank with the state and the reduced totals. It may read
            gradients, and what it returns, 0-d tensors, joins the metrics. Whoever changes
            gradients writes the parts out, and does so before ``reduce_totals`` takes their norm.

    Returns:
        A function that consumes the state and returns the next one with the step's metrics, a
        TensorDict of ``[]`` float64 on the device.

    Raises:
        ValueError: If ``max_norm`` is not positive; by the first step of a run if the optimizer
            was given a learning rate that the schedule never has.
    """
    check_max_norm(max_norm)
    voters = {
        name: voter for name, voter in {"stop": stop, "ended": end}.items() if voter is not None
    }

    def step(state: StateT, batches: Iterable[TensorDictBase]) -> tuple[StateT, TensorDict]:
        totals = accumulate(state, batches, loss_fn, sync=sync, audit=audit)
        # Votes travel among the sums: agreeing to stop needs no collective of its own.
        for name, voter in voters.items():
            totals = totals.plus(**{name: torch.full_like(totals["loss"], voter.vote())})
        if state.step == 0:
            check_rates(state.optimizer, schedule, total or SEARCHED_STEPS)
        lr = _rate(schedule, state, totals.samples)
        options = {"max_norm": max_norm, "sync": sync, "spikes": spikes, "learning rate": lr}
        totals = reduce_totals(totals, state, settings=options)
        for name, voter in voters.items():
            voter.hear(totals[name])
        looked = {} if gradient_hook is None else gradient_hook(state, totals)
        correction = clip(totals, max_norm=max_norm)
        if spikes is None:
            state = update(state, correction, lr=lr, totals=totals, total=total)
            return state, step_metrics(totals, correction, lr=lr).update(looked)
        # Without asking the host: a spike is a bad step that only the device knows of.
        kept, recent = limit_spikes(correction, totals, state.recent, spikes)
        state = donate(update(state, kept, lr=lr, totals=totals, total=total), recent=recent)
        metrics = step_metrics(totals, kept, lr=lr).update(looked)
        metrics["spikes"] = (correction.finite & ~kept.finite).to(metrics["skipped"].dtype)
        return state, metrics

    return step


def _rate(schedule: Callable[[int], float], state: TrainState, samples: int) -> float:
    """Ask a schedule for a step's rate; one with phases follows the data, and what they skip."""
    if not isinstance(schedule, PhasedSchedule):
        return schedule(state.step)
    last = renumber(state.samples + samples - 1, state.skips)
    return schedule(state.step, end=int(last) + 1)


def step_metrics(totals: Totals, correction: Correction, *, lr: float) -> TensorDict:
    """Divide a step's sums into the numbers that one reports.

    Args:
        totals: Reduced totals.
        correction: What ``clip`` returned.
        lr: Learning rate of the step.

    Returns:
        TensorDict of ``[]`` float64 on the device: ``loss`` (mean over the targets; NaN without
        any), ``grad_norm``, ``lr``, ``targets``, ``skipped`` (1 if the step changed nothing), and
        each of the loss function's own metrics, its sum over its count; of one that is named
        ``<what>/loss`` also the count, as ``<what>/targets``. Of a model with experts also
        ``moe/...``, see ``expert_metrics``.
    """
    loss = totals["loss"]
    metrics = {
        "loss": loss / totals["targets"],
        "grad_norm": correction.grad_norm,
        "lr": torch.full_like(loss, lr),
        "targets": totals["targets"],
        "skipped": torch.logical_not(correction.finite, out=torch.empty_like(loss)),
    }
    return TensorDict(metrics | expert_metrics(totals.flat) | mean_metrics(totals), [])
