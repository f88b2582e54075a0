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
from forgekit.steps.audit.first_step import audited
from forgekit.steps.clip import Correction, SpikeLimit, check_max_norm, clip, limit_spikes
from forgekit.steps.experts import expert_metrics
from forgekit.steps.totals import Totals, mean_metrics, reduce_totals
from forgekit.steps.update import update

StateT = TypeVar("StateT", bound=TrainState)
GradientHook = Callable[[TrainState, Totals], Mapping[str, Tensor]]
"""What ``make_step`` calls between the reduction and the update; returns metrics."""

SEARCHED_STEPS = 100_000
"""How many steps of a schedule of unknown length to search for the optimizer's initial rate."""


class Vote(Protocol):
    """The interface that ``make_step`` needs from a ``StopSignal`` and a ``DataEnd``."""

    def vote(self) -> float:
        """1.0 if this process wants to stop, or has no more data, else 0.0."""
        ...

    def receive(self, votes: Tensor) -> None:
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

    The step is ``accumulate``, ``reduce_totals`` with the votes of ``stop`` and ``end``,
    ``gradient_hook`` where there is one, ``clip``, ``limit_spikes`` where it is asked for,
    ``update`` and ``step_metrics`` in that order, after ``audit`` before the first step of a
    process, and nothing else; write them out where something has to happen in between.

    Args:
        loss_fn: ``loss_fn(model, batch) -> Loss``.
        schedule: Learning rate as a pure function of the step number, which starts at 0; one
            ``with_phases`` follows the samples.
        max_norm: Upper bound of the gradient's global L2 norm; ``inf`` does not clip.
        sync: See ``accumulate``.
        stop: A ``StopSignal``; its vote travels in the step's one collective.
        end: The same ``DataEnd`` that was passed to ``groups``; its vote is part of the same
            all-reduce.
        spikes: Skip steps whose loss or gradient norm is an outlier against ``state.recent``; the
            metrics then have ``spikes``, 1 for such a step. None skips none.
        audit: Whether ``audit`` runs before the first step of a process, which also compares these
            options over the ranks.
        total: Number of steps of the run, for a ``bias_rate`` of experts that depends on it.
        gradient_hook: Called on every rank with the state and the reduced totals. It may read
            gradients, and what it returns, 0-d tensors, joins the metrics. Whoever changes
            gradients writes the parts out, and does so before ``reduce_totals`` takes their norm.

    Returns:
        A function that consumes the state and returns the next one with the step's metrics, a
        TensorDict of ``[]`` float64 on the device.

    Raises:
        ValueError: If ``max_norm`` is not positive; in a run's first step if the optimizer's rate
            never occurs in the schedule.
    """
    check_max_norm(max_norm)
    voters = {
        name: voter for name, voter in {"stop": stop, "ended": end}.items() if voter is not None
    }

    def step(state: StateT, batches: Iterable[TensorDictBase]) -> tuple[StateT, TensorDict]:
        if audit:
            batches = audited(state, batches, loss_fn)
        totals = accumulate(state, batches, loss_fn, sync=sync)
        # Votes travel among the sums: agreeing to stop needs no collective of its own.
        for name, voter in voters.items():
            totals = totals.plus(**{name: torch.full_like(totals["loss"], voter.vote())})
        if state.step == 0:
            check_rates(state.optimizer, schedule, total or SEARCHED_STEPS)
        lr = _rate(schedule, state, totals.samples)
        options = {"max_norm": max_norm, "sync": sync, "spikes": spikes, "learning rate": lr}
        totals = reduce_totals(totals, state, settings=options if audit else None)
        for name, voter in voters.items():
            voter.receive(totals[name])
        hook_metrics = None if gradient_hook is None else gradient_hook(state, totals)
        correction = clip(totals, max_norm=max_norm)
        kept, recent = correction, state.recent
        if spikes is not None:  # the host does not wait to learn whether this step is one
            kept, recent = limit_spikes(correction, totals, state.recent, spikes)
        state = update(state, kept, lr=lr, totals=totals, total=total)
        metrics = step_metrics(totals, kept, lr=lr)
        if spikes is not None:
            state = donate(state, recent=recent)
            metrics["spikes"] = (correction.finite & ~kept.finite).to(metrics["skipped"].dtype)
        return state, metrics if hook_metrics is None else metrics.update(hook_metrics)

    return step


def _rate(schedule: Callable[[int], float], state: TrainState, samples: int) -> float:
    """Evaluate the schedule; a phased one depends on the sample number, after skips."""
    if not isinstance(schedule, PhasedSchedule):
        return schedule(state.step)
    last = renumber(state.samples + samples - 1, state.skips)
    return schedule(state.step, end=int(last) + 1)


def step_metrics(totals: Totals, correction: Correction, *, lr: float) -> TensorDict:
    """Turn a step's sums into the metrics to log.

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
    sums = dict(totals.sums.items())
    loss, targets = sums["loss"], sums["targets"]
    metrics = {
        "loss": loss / targets,
        "grad_norm": correction.grad_norm,
        "lr": torch.full_like(loss, lr),
        "targets": targets,
        "skipped": torch.logical_not(correction.finite, out=torch.empty_like(loss)),
    }
    return TensorDict(metrics | expert_metrics(sums) | mean_metrics(sums), [])
