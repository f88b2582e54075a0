"""Learning rates as pure functions of the step number.

A schedule has no state: the rate at step 1,000 is the same whether the run was stopped before or
not. Steps are optimizer steps and start at 0; the first rate of a warm-up is above 0, because a
step that changes nothing is a step wasted. Past its end a schedule stays at its last rate.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from inspect import signature
from itertools import pairwise
from typing import Any, Literal

import attrs
from torch.optim import Optimizer

from forgekit.checks import check_integers, check_numbers, check_phases

Schedule = Callable[[int], float]
Decay = Literal["linear", "cosine", "sqrt", "rex"]


def constant(peak: float) -> Schedule:
    """The same rate at every step.

    Examples:
        >>> constant(0.1)(7)
        0.1
    """
    check_numbers(peak=(peak, 0))
    return lambda step: peak  # noqa: ARG005


def linear(peak: float, total: int, *, final: float = 0.0) -> Schedule:
    """Fall in a straight line from ``peak`` at step 0 to ``final`` at step ``total``.

    Examples:
        >>> linear(1.0, total=4)(1)
        0.75
    """
    return _decay(peak, final, start=0, total=total, shape="linear")


def cosine(peak: float, total: int, *, final: float = 0.0) -> Schedule:
    """Fall along half a cosine from ``peak`` at step 0 to ``final`` at step ``total``.

    Examples:
        >>> cosine(1.0, total=4)(2)
        0.5

    References:
        SGDR, https://arxiv.org/abs/1608.03983
    """
    return _decay(peak, final, start=0, total=total, shape="cosine")


def wsd(
    peak: float, *, warmup: int, decay: int, total: int, shape: Decay = "sqrt", final: float = 0.0
) -> Schedule:
    """Warm up, stay, decay: the rate stays at ``peak`` until ``decay`` steps before the end.

    Args:
        peak: Highest rate.
        warmup: Steps until it is reached.
        decay: Steps of the decay at the end.
        total: Step at which ``final`` is reached.
        shape: ``"linear"``, ``"cosine"``, ``"sqrt"``: ``1 - sqrt(progress)``, which falls fast
            at first, or ``"rex"``, see ``rex``.
        final: Rate at the end.

    Returns:
        A pure function of the step.

    Raises:
        ValueError: If warm-up and decay do not fit into ``total``.

    Examples:
        >>> schedule = wsd(1.0, warmup=2, decay=4, total=10, shape="linear")
        >>> [schedule(step) for step in (0, 1, 5, 8, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]

    References:
        MiniCPM, https://arxiv.org/abs/2404.06395; the sqrt decay, https://arxiv.org/abs/2405.18392
    """
    check_integers(decay=(decay, 1))
    if warmup + decay > total:
        raise ValueError(
            f"warmup {warmup} + decay {decay} = {warmup + decay} must fit into total {total}."
        )
    return _warmed(_decay(peak, final, start=total - decay, total=total, shape=shape), warmup)


def warmup(schedule: Schedule, steps: int) -> Schedule:
    """Rise in a straight line over the first ``steps`` steps; step 0 has ``1 / steps`` of it.

    Args:
        schedule: Any schedule; its own step 0 falls on the first step after the warm-up.
        steps: Length of the warm-up; 0 returns the schedule as it is.

    Returns:
        A pure function of the step.

    Examples:
        >>> schedule = warmup(constant(1.0), steps=4)
        >>> [schedule(step) for step in (0, 3, 9)]
        [0.25, 1.0, 1.0]
    """
    return _warmed(lambda step: schedule(max(step - steps, 0)), steps)


def warmup_linear(peak: float, *, warmup: int, total: int, final: float = 0.0) -> Schedule:
    """Warm up to ``peak``, then fall in a straight line to ``final`` at step ``total``.

    A run that is shorter than its warm-up ends while the rate still rises.
    """
    return _warmed_decay(peak, warmup, total, final, "linear")


def warmup_cosine(peak: float, *, warmup: int, total: int, final: float = 0.0) -> Schedule:
    """Warm up to ``peak``, then fall along half a cosine to ``final`` at step ``total``.

    A run that is shorter than its warm-up ends while the rate still rises.

    Examples:
        >>> schedule = warmup_cosine(peak=1.0, warmup=2, total=6)
        >>> [round(schedule(step), 3) for step in (0, 1, 2, 4, 6, 9)]
        [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    return _warmed_decay(peak, warmup, total, final, "cosine")


def rex(peak: float, *, warmup: int, total: int, final: float = 0.0) -> Schedule:
    """Warm up to ``peak``, then fall slowly at first and fast at the end.

    With ``p`` the part of the decay that is over, the rate is ``(1 - p) / (1 - p / 2)`` of the way
    from ``final`` to ``peak``: above the straight line at every budget of steps. A run that is
    shorter than its warm-up ends while the rate still rises.

    Examples:
        >>> schedule = rex(peak=1.0, warmup=2, total=6)
        >>> [round(schedule(step), 3) for step in (0, 1, 2, 4, 6, 9)]
        [0.5, 1.0, 1.0, 0.667, 0.0, 0.0]

    References:
        REX: revisiting budgeted training, https://arxiv.org/abs/2107.04197
    """
    return _warmed_decay(peak, warmup, total, final, "rex")


def join_schedules(*schedules: Schedule, at: Sequence[int]) -> Schedule:
    """Follow one schedule after the other; each begins with its own step 0 where it takes over.

    Args:
        *schedules: The schedules.
        at: The step at which the second begins, the third, and so on; increasing.

    Returns:
        A pure function of the step.

    Raises:
        ValueError: If ``at`` is not one step fewer than there are schedules, or does not increase.

    Examples:
        >>> schedule = join_schedules(linear(1.0, 4, final=0.5), constant(0.25), at=(2,))
        >>> [schedule(step) for step in range(4)]
        [1.0, 0.875, 0.25, 0.25]
    """
    starts = (0, *at)
    if len(starts) != len(schedules) or any(later <= sooner for sooner, later in pairwise(starts)):
        raise ValueError(
            f"{len(schedules)} schedules are joined at the steps {tuple(at)}; give one step for "
            "each schedule but the first, increasing and above 0."
        )

    def schedule(step: int) -> float:
        current = bisect_right(starts, step) - 1
        return schedules[current](step - starts[current])

    return schedule


def with_phases(
    schedule: Schedule, phases: Sequence[Any], global_batch_size: Any
) -> PhasedSchedule:
    """Multiply a schedule by the ``lr_scale`` of the current phase.

    A phase starts at a sample; the step that contains this sample is the first with the new scale.
    Scales do not accumulate: a phase without one is back at 1. ``make_step`` passes the samples of
    each step, so the scale follows the data, also after a resume with another global batch size
    and when samples are skipped.

    Args:
        schedule: Any schedule.
        phases: Each with a ``start``, its first sample, and an ``lr_scale``, as ``forgekit.Phase``;
            by increasing start.
        global_batch_size: Samples per step, over all ranks: without ``end``, step ``i`` holds the
            samples from ``i * global_batch_size`` on. Or the ``Sizes`` of
            ``forgekit.data.make_sizes``: if these change, the schedule counts steps of the first
            size, up to the step's last sample. So a step of twice the positions counts
            as two, and the run's length is ``sizes.progress(sizes.samples(steps))``.

    Returns:
        A pure function of the step and, as ``end``, of the samples up to its last one.

    Raises:
        ValueError: If phases do not increase.

    Examples:
        >>> from forgekit import Phase
        >>> schedule = with_phases(constant(1.0), [Phase(start=20, lr_scale=0.5)], 8)
        >>> [schedule(step) for step in (0, 1, 2, 3)]
        [1.0, 1.0, 0.5, 0.5]
        >>> schedule(1, end=21)  # samples up to number 20, of a run that began with larger steps
        0.5
    """
    check_phases(phases)
    starts = tuple(phase.start for phase in phases)
    scales = (1.0, *(phase.lr_scale for phase in phases))
    return PhasedSchedule(schedule, starts, scales, global_batch_size)


@attrs.frozen
class PhasedSchedule:
    """A schedule whose scale changes at samples; ``with_phases`` creates one.

    Attributes:
        schedule: The schedule to scale.
        starts: Samples at which the scale changes.
        scales: The scale before the first of them, and from each on.
        global_batch_size: Samples per step without ``end``; or sizes.
    """

    schedule: Schedule
    starts: tuple[int, ...]
    scales: tuple[float, ...]
    global_batch_size: Any

    def __call__(self, step: int, *, end: int | None = None) -> float:
        """Return the rate of a step.

        Args:
            step: The step.
            end: Number of samples up to the step's last one, including skipped ones.
        """
        sizes, changes = self.global_batch_size, hasattr(self.global_batch_size, "progress")
        last: int = end or (sizes.samples(step + 1) if changes else (step + 1) * sizes)
        if changes and len(sizes.starts) > 1:
            step = sizes.progress(last) - 1
        return self.schedule(step) * self.scales[bisect_left(self.starts, last)]


def check_rates(optimizer: Optimizer, schedule: Schedule, steps: int) -> None:
    """Raise if an optimizer was given a learning rate that the schedule never has.

    A step sets the rate of each group to the schedule's times the group's ``lr_scale``: any other
    rate would be ignored.

    Args:
        optimizer: Before its first step.
        schedule: The schedule that sets the rates.
        steps: Number of steps of the schedule to search.

    Raises:
        ValueError: If a group's rate is neither its optimizer's default nor the schedule's.
    """
    for member in getattr(optimizer, "members", (optimizer,)):
        default = _default_rate(member)
        for group in member.param_groups:
            rate, scale = group.get("lr"), group.get("lr_scale", 1.0)
            if rate is None or rate == default:
                continue
            scheduled = (
                schedule(step) * factor for step in range(steps) for factor in (1.0, scale)
            )
            if not any(math.isclose(rate, each, rel_tol=1e-6) for each in scheduled):
                raise ValueError(
                    f"{type(member).__name__} was given lr={float(rate):g}, a rate that the "
                    f"schedule never has (it begins with {schedule(0):g}); a step sets the rate of "
                    "each group to the schedule's, times the group's lr_scale. Leave lr= out, and "
                    'give a group another rate by group["lr_scale"].'
                )


def _default_rate(optimizer: Optimizer) -> Any:
    """The default learning rate of an optimizer's class; None if it needs arguments."""
    kind: Any = type(optimizer)
    if (usual := getattr(optimizer, "usual_lr", None)) is not None:  # of a chain
        return usual
    if (lr := signature(kind).parameters.get("lr")) is not None:
        return lr.default
    try:
        return kind([optimizer.param_groups[0]["params"][0].detach()]).defaults["lr"]
    except Exception:
        return None


_SHAPES: dict[Decay, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "rex": lambda progress: (1.0 - progress) / (1.0 - 0.5 * progress),
}


def _decay(peak: float, final: float, *, start: int, total: int, shape: Decay) -> Schedule:
    check_numbers(peak=(peak, 0), final=(final, 0))
    check_integers(warmup=(start, 0), total=(total, 1))
    share_left = _SHAPES[shape]

    def schedule(step: int) -> float:
        progress = min(max((step - start) / (total - start), 0.0), 1.0)
        return final + (peak - final) * share_left(progress)

    return schedule


def _warmed_decay(peak: float, warmup: int, total: int, final: float, shape: Decay) -> Schedule:
    decay = _decay(peak, final, start=warmup, total=max(total, warmup + 1), shape=shape)
    return _warmed(decay, warmup)


def _warmed(schedule: Schedule, steps: int) -> Schedule:
    # An integer: a warm-up of 0.1 would silently be none.
    check_integers(warmup=(steps, 0))
    return lambda step: schedule(step) * min((step + 1) / steps, 1.0) if steps else schedule(step)
