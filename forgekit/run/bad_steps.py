"""Policies for bad steps: stop, warn, go on, or roll back and skip the samples behind them.

A bad step has changed nothing, on any rank, so the decision can wait for the next row of metrics.
Rows hold the same numbers on every rank, so all ranks decide alike.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

from forgekit.checkpoints.directory import committed, describe, discard_after, storage_of
from forgekit.checkpoints.load import checkpoint_load
from forgekit.checkpoints.save import ranks_of, wait_for_saves
from forgekit.checkpoints.state_dict import is_per_rank, saved_fields
from forgekit.checks import check_choice, check_integers, counted
from forgekit.ranks import CheckpointError
from forgekit.state import TrainState, donate

BadSteps = Literal["raise", "warn", "skip", "roll_back"]
StateT = TypeVar("StateT", bound=TrainState)

_log = logging.getLogger("forgekit")


class BadStepError(RuntimeError):
    """There were more bad steps or rollbacks than a run tolerates."""


def bad_step_policy(
    policy: str = "raise", *, patience: int = 1
) -> Callable[[Mapping[str, Any] | None], bool]:
    """Build a check of logged rows that applies a policy for bad steps.

    A step is bad if its loss or gradient is not finite, if it has no targets, or if it is a spike
    (see ``SpikeLimit``). It has changed nothing. So going on is safe; whether it is wise depends
    on why, and that is this policy.

    Args:
        policy: "raise" stops the run, "warn" logs a warning, "skip" goes on silently,
            "roll_back" asks for ``roll_back``.
        patience: For "raise": bad steps to reach. They are counted over rows; a row without bad
            steps starts the count again. For "roll_back": bad steps one after another, up to the
            row.

    Returns:
        ``check(row)`` for the rows of ``MetricsLog``; None means that no row was due. It returns
        whether to call ``roll_back``.

    Raises:
        TypeError: If ``patience`` is not an integer.
        ValueError: If the policy is not known or ``patience`` is less than 1.

    Examples:
        >>> check = bad_step_policy("raise", patience=3)
        >>> check(None)
        False
        >>> check({"step": 10, "train/skipped": 2})
        False
        >>> check({"step": 20, "train/skipped": 1})
        Traceback (most recent call last):
        forgekit.run.bad_steps.BadStepError: 3 bad steps (loss or gradient not finite, or a spike)
        up to step 20, 1 of them since the last row; patience is 3. A bad step changes nothing, so
        the state is good: lower the learning rate, look at the data of these steps, or use policy
        "roll_back" or "warn".
    """
    check_choice("policy", policy, get_args(BadSteps))
    check_integers(patience=(patience, 1))
    streak = 0

    def check(row: Mapping[str, Any] | None) -> bool:
        nonlocal streak
        if row is None:
            return False
        bad = row["train/skipped"]
        streak = streak + bad if bad else 0
        if policy == "warn" and bad:
            many = counted(bad, "bad step")
            _log.warning("%s since the last row, at step %d", many, row["step"])
        if policy == "raise" and streak >= patience:
            raise BadStepError(
                f"{counted(streak, 'bad step')} (loss or gradient not finite, or a spike) up to "
                f"step {row['step']}, {bad} of them since the last row; patience is {patience}. "
                "A bad step changes nothing, so the state is good: lower the learning rate, look "
                'at the data of these steps, or use policy "roll_back" or "warn".'
            )
        return policy == "roll_back" and row["train/skipped_in_a_row"] >= patience

    return check


def roll_back(
    state: StateT,
    directory: str | os.PathLike[str],
    *,
    times: int = 3,
) -> StateT:
    """Load the last checkpoint before the bad steps, and skip their samples.

    The samples between that checkpoint and the first bad step are read again, those of the bad
    steps never: ``state.skips`` names them. Checkpoints saved in between are deleted, because a
    resumed run would start from them. Every rank calls it. A recipe then moves the data and the
    log back too, and saves, so that a resumed run leaves out the same samples::

        if check(log(state, metrics)):
            state = fk.run.roll_back(state, run.checkpoints)
            loader.seek(state.samples, skip=state.skips)
            log.rewind(state)
            fk.checkpoint_save(state, run.checkpoints)

    Args:
        state: A state whose last steps were bad; consumed.
        directory: What ``checkpoint_save`` was given.
        times: How often a run may be rolled back, from its start on.

    Returns:
        The state of the checkpoint, with one more entry in ``skips``.

    Raises:
        ValueError: If the last step was not bad, or ``times`` is less than 1; if the state has a
            stream, of which no samples can be left out by number. Nothing is deleted then.
        BadStepError: If there is no good checkpoint from before the bad steps, or the run was
            rolled back ``times`` times already. The state is unchanged.

    References:
        PaLM, section 5.1, https://arxiv.org/abs/2204.02311
    """
    check_integers(times=(times, 1))
    bad, step, samples, skips = int(state.skipped), state.step, state.samples, state.skips
    if bad == 0:
        raise ValueError(f"step {step} was good, so there is nothing to roll back.")
    which = f"the {counted(bad, 'bad step')} up to step {step}"
    for name, field in saved_fields(state).items():
        if is_per_rank(state, field) and hasattr(getattr(state, name), "__iter__"):
            raise ValueError(
                f"rows of the stream {name!r} have no numbers, so they cannot be skipped and would "
                "be bad again. "
                'Use bad_step_policy("skip"), or train on a dataset of numbered rows.'
            )
    since = int(state.bad_since)
    if len(skips) >= times:
        raise BadStepError(
            f"{which} would roll this run back again, after {len(skips)} times; {times} are "
            "allowed. Lower the learning rate, look at bad_steps.jsonl, or allow more."
        )
    wait_for_saves(state)
    state = _load_before(state, directory, step - bad, which)
    skip = since, samples - since
    _log.warning(
        "rolled back from step %d to step %d; samples %d to %d are left out (%d of %d times)",
        *(step, state.step, skip[0], samples - 1, len(skips) + 1, times),
    )
    # The current skips: the checkpoint may be older than the last rollback.
    return donate(state, skips=(*skips, skip))


def _load_before(
    state: StateT,
    directory: str | os.PathLike[str],
    step: int,
    which: str,
) -> StateT:
    """Load the newest good checkpoint up to a step and delete those after it."""
    ranks, storage = ranks_of(state), storage_of(directory)
    saved = committed(storage)  # only the first rank reads directories
    earlier = (candidate for candidate, _ in saved if candidate <= step)
    damaged = []
    while (candidate := ranks.first(lambda: next(earlier, None))) is not None:
        try:
            state = checkpoint_load(state, directory, step=candidate)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        ranks.first(lambda: discard_after(storage, candidate))
        return state
    there = ranks.first(lambda: describe(storage))
    raise BadStepError(
        f"{which} cannot be rolled back: {directory} has no good checkpoint of step {step} or "
        f"before; it has {there}. {' '.join(damaged)} Save more often, or save step 0."
    )
