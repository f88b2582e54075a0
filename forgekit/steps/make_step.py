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
    ``gradient_hook`` if given, ``clip``, ``limit_spikes`` if ``spikes`` is given, ``update`` and
    ``step_metrics``, in that order, preceded by ``audit`` on the first step of a process. To do
    something in between, call the parts yourself.

    Args:
        loss_fn: ``loss_fn(model, batch) -> Loss``.
        schedule: Learning rate as a pure function of the step number, which starts at 0; a schedule
            made by ``with_phases`` depends on the number of samples instead.
        max_norm: Upper bound of the gradient's global L2 norm; ``inf`` disables clipping.
        sync: See ``accumulate``.
        stop: A ``StopSignal``; its vote travels in the step's one collective.
        end: The same ``DataEnd`` that was passed to ``groups``; its vote is part of the same
            all-reduce.
        spikes: Skip steps whose loss or gradient norm is an outlier against ``state.recent``; the
            metrics then have ``spikes``, 1 for such a step. None disables this.
        audit: Whether ``audit`` runs before the first step of a process, and that step compares
            these options over the ranks.
        total: Number of steps of the run, for a ``bias_rate`` of experts that depends on it.
        gradient_hook: Called on every rank with the state and the reduced totals. It may read
            gradients, and returns further metrics as 0-d tensors. To modify gradients, call the
            parts yourself and change them before ``reduce_totals``, which takes their norm.

    Returns:
        A function that consumes the state and returns the next one with the step's metrics, a
        TensorDict of ``[]`` float64 on the device.

    Raises:
        ValueError: If ``max_norm`` is not positive; at ``state.step`` 0, if the optimizer's rate
            never occurs in the schedule.
    """
    check_max_norm(max_norm)
    voters = {
        name: voter for name, voter in {"stop": stop, "ended": end}.items() if voter is not None
    }

    def step(state: StateT, batches: Iterable[TensorDictBase]) -> tuple[StateT, TensorDict]:
        if state.step == 0:
            check_rates(state.optimizer, schedule, total or SEARCHED_STEPS)
        # On the first step of a process: pulls a micro-batch, audits it, and yields it again.
        if audit:
            batches = audited(state, batches, loss_fn)
        totals = accumulate(state, batches, loss_fn, sync=sync)
        # Votes travel among the sums: agreeing to stop needs no collective of its own.
        for name, voter in voters.items():
            totals = totals.plus(**{name: torch.full_like(totals["loss"], voter.vote())})
        lr = _rate(schedule, state, totals.samples)
        # The first reduction of a process compares them over the ranks.
        options = {"max_norm": max_norm, "sync": sync, "spikes": spikes, "learning rate": lr}
        totals = reduce_totals(totals, state, settings=options if audit else None)
        for name, voter in voters.items():
            voter.receive(totals[name])
        hook_metrics = None if gradient_hook is None else gradient_hook(state, totals)
        correction = clip(totals, max_norm=max_norm)
        applied, recent = correction, state.recent
        if spikes is not None:  # computed on the device, so the host need not wait
            applied, recent = limit_spikes(correction, totals, state.recent, spikes)
        state = update(state, applied, lr=lr, totals=totals, total=total)
        metrics = step_metrics(totals, applied, lr=lr)
        if spikes is not None:
            state = donate(state, recent=recent)
            metrics["spikes"] = (correction.finite & ~applied.finite).to(metrics["skipped"].dtype)
        if hook_metrics is not None:
            metrics.update(hook_metrics)
        return state, metrics

    return step


def _rate(schedule: Callable[[int], float], state: TrainState, samples: int) -> float:
    """Evaluate the schedule; a phased one depends on the sample number, after skips."""
    if not isinstance(schedule, PhasedSchedule):
        return schedule(state.step)
    last_sample = renumber(state.samples + samples - 1, state.skips)
    return schedule(state.step, end=int(last_sample) + 1)


def step_metrics(totals: Totals, correction: Correction, *, lr: float) -> TensorDict:
    """Turn a step's sums into the metrics to log.

    Args:
        totals: Reduced totals.
        correction: What ``clip`` returned.
        lr: Learning rate of the step.

    Returns:
        TensorDict of ``[]`` float64 on the device: ``loss`` (mean over the targets; NaN without
        any), ``grad_norm``, ``lr``, ``targets``, ``skipped`` (1 if the step changed nothing), and
        each of the loss function's own metrics, its sum over its count. For a metric named
        ``<name>/loss``, its count is also reported, as ``<name>/targets``; for a model with
        experts also ``moe/...``, see ``expert_metrics``.
    """
    sums = dict(totals.sums.items())
    loss, targets = sums["loss"], sums["targets"]
    metrics = {
        "loss": loss / targets,
        "grad_norm": correction.grad_norm,
        "lr": torch.full_like(loss, lr),
        "targets": targets,
        "skipped": (~correction.finite).to(loss.dtype),
    }
    return TensorDict(metrics | expert_metrics(sums) | mean_metrics(sums), [])
