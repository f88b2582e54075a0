"""How far the ranks of a layout are from one process: errors of each parameter, relative."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import attrs
import torch

from forgekit.verification.measure import Found, Tensors
from forgekit.verification.result import VerifyRow, worst

SMALLEST = 1e-6
"""Of the model's largest gradient: a parameter with smaller ones is compared with this much."""
ZERO = 1e-12
"""Of the model's largest gradient: what is below is rounding, as of the bias of keys."""


@attrs.frozen
class Comparison:
    """Differences from what one process has found.

    Attributes:
        kept: The tensors by digest; equal tensors have one digest and are never read.
        start: Digests of the parameters that all began with.
        expected: What one process has found.
    """

    kept: Tensors
    start: Mapping[str, str]
    expected: Found

    @cached_property
    def sizes(self) -> dict[str, float]:
        """The largest element of each gradient that one process has found."""
        gradients = self.expected.gradients.items()
        return {name: float(self.kept.load(digest).abs().max()) for name, digest in gradients}

    def error(self, ranks: list[Found]) -> float:
        """Return the worst error of all ranks."""
        numbers = (self.error_of(name, ranks) for name in ("loss", "norm"))
        return worst([*numbers, *(row.worst for row in self.rows(ranks))])

    def error_of(self, name: str, ranks: list[Found]) -> float:
        """Return the worst relative error of the ``"loss"``, or of the gradient's ``"norm"``."""
        expected = getattr(self.expected, name)
        return worst(_ratio(abs(getattr(r, name) - expected), abs(expected)) for r in ranks)

    def rows(self, ranks: Sequence[Found]) -> tuple[VerifyRow, ...]:
        """Return every parameter's errors over all ranks, the worst first."""
        longest = max(map(self._move, self.expected.gradients), default=0.0)
        names = dict.fromkeys(n for found in (self.expected, *ranks) for n in found.gradients)
        rows = [self._row(name, ranks, longest) for name in names]
        return tuple(sorted(rows, key=lambda row: (not math.isnan(row.worst), -row.worst)))

    def merged_error(self, merged: Mapping[str, str]) -> float:
        """Return the worst error of the gradients with micro-batches joined."""
        gradients = self.expected.gradients
        return worst(
            _ratio(self._difference({merged[name]}, digest), self._scale(name))
            for name, digest in gradients.items()
        )

    def _row(self, name: str, ranks: Sequence[Found], longest: float) -> VerifyRow:
        gradients = {rank.gradients[name] for rank in ranks if name in rank.gradients}
        after = {rank.after[name] for rank in ranks if name in rank.after}
        expected = self.expected.gradients.get(name)
        if expected is None or not gradients:  # one of the two does not have it
            return VerifyRow(name=name, error=math.inf, of_model=math.inf, moved=math.inf, norm=0.0)
        difference = self._difference(gradients, expected)
        return VerifyRow(
            name=name,
            error=_ratio(difference, self._scale(name)),
            of_model=_ratio(difference, self._largest),
            moved=_ratio(self._difference(after, self.expected.after[name]), longest),
            norm=float(self.kept.load(expected).norm()),
        )

    @property
    def _largest(self) -> float:
        return max(self.sizes.values(), default=0.0)

    def _scale(self, name: str) -> float:
        if self.sizes[name] <= ZERO * self._largest:
            return self._largest
        return max(self.sizes[name], SMALLEST * self._largest)

    def _move(self, name: str) -> float:
        return self._difference({self.expected.after[name]}, self.start[name])

    def _difference(self, found: set[str], expected: str) -> float:
        tensor = self.kept.load(expected)
        others = [digest for digest in found if digest != expected]
        return worst([0.0, *(_distance(self.kept.load(digest), tensor) for digest in others)])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max()) if a.shape == b.shape else math.inf


def _ratio(difference: float, scale: float) -> float:
    """A relative error; where there is nothing to compare with, any difference is infinite."""
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale
