"""Which checkpoints stay: a rule over their steps, apart from how they are written."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from forgekit.inputs import check_integers


@attrs.frozen(kw_only=True)
class Keep:
    """Which checkpoints ``checkpoint_save`` keeps: each that at least one of these rules names.

    The one that was just saved, which ``latest`` names, and one that is being loaded always stay.
    Only committed checkpoints count.

    Attributes:
        last: How many of the newest, at least 1.
        every: Keep steps that are multiples of this number; None for none.
        milestones: Keep step 0 and powers of two.
        best: How many with the smallest metric, as given to ``checkpoint_save``; 0 for none.
        largest: Count the largest metrics as the best.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        >>> sorted(Keep(last=1, every=300, milestones=True).of(dict.fromkeys(range(0, 1000, 100))))
        [0, 300, 600, 900]
        >>> sorted(Keep(last=1, best=1).of({100: 3.5, 200: 3.1, 300: None, 400: 3.3}))
        [200, 400]
    """

    last: int = 3
    every: int | None = None
    milestones: bool = False
    best: int = 0
    largest: bool = False

    def __attrs_post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(
                f"keep {self.last} must be at least 1: retention never deletes the newest "
                "checkpoint. Pass None to keep all."
            )
        every = 1 if self.every is None else self.every
        check_integers(every=(every, 1), best=(self.best, 0))

    def of(self, metrics: Mapping[int, float | None]) -> set[int]:
        """Choose among checkpoints.

        Args:
            metrics: The metric of each committed step; None or NaN where there is none.

        Returns:
            The steps that stay.
        """
        steps = sorted(metrics)
        kept = set(steps[-self.last :])
        if self.every is not None:
            kept |= {step for step in steps if step and step % self.every == 0}
        if self.milestones:
            kept |= {step for step in steps if step & (step - 1) == 0}
        known = {s: m for s, m in metrics.items() if m is not None and not math.isnan(m)}
        # Of equally good ones the newest.
        ranked = sorted(known, key=lambda s: (-known[s] if self.largest else known[s], -s))
        return kept | set(ranked[: self.best])
