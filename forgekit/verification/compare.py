"""Relative errors of each parameter between a layout's ranks and one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import attrs
import torch

from forgekit.verification.measure import RankResult, kept
from forgekit.verification.result import VerifyReport, VerifyRow, worst

SMALLEST = 1e-6
"""Fraction of the model's largest gradient that is the smallest scale for a parameter."""
ZERO = 1e-12
"""Fraction of the model's largest gradient below which gradients are rounding (bias of keys)."""


@attrs.frozen
class Comparison:
    """Compares ranks with one process; equal tensors share a digest and are not read.

    Attributes:
        folder: Where the tensors are.
        start: Digests of the parameters that all began with.
        expected: What one process has computed.
    """

    folder: Path
    start: Mapping[str, str]
    expected: RankResult

    def report(
        self, layout: str, ranks: Sequence[RankResult], tolerance: float, notes: Iterable[str] = ()
    ) -> VerifyReport:
        """Compare loss, gradient norm, and every parameter, the worst first."""
        names = dict.fromkeys(n for one in (self.expected, *ranks) for n in one.gradients)
        rows = [self._row(name, ranks) for name in names]
        loss, norm = self.expected.loss, self.expected.norm
        return VerifyReport(
            layout=layout,
            rows=tuple(sorted(rows, key=lambda row: (not math.isnan(row.worst), -row.worst))),
            loss=ranks[0].loss,
            loss_error=worst(_ratio(abs(rank.loss - loss), abs(loss)) for rank in ranks),
            norm=ranks[0].norm,
            norm_error=worst(_ratio(abs(rank.norm - norm), norm) for rank in ranks),
            notes=tuple(notes),
            tolerance=tolerance,
        )

    def merged_error(self, merged: Mapping[str, str]) -> float:
        """Return the worst error of the gradients with micro-batches joined."""
        return worst(
            _ratio(self._difference({merged[name]}, digest), self._scale(name))
            for name, digest in self.expected.gradients.items()
        )

    def _row(self, name: str, ranks: Sequence[RankResult]) -> VerifyRow:
        gradients = {rank.gradients[name] for rank in ranks if name in rank.gradients}
        after = {rank.after[name] for rank in ranks if name in rank.after}
        expected = self.expected.gradients.get(name)
        if expected is None or not gradients:  # missing in one of the two
            return VerifyRow(name=name, error=math.inf, of_model=math.inf, moved=math.inf, norm=0.0)
        difference = self._difference(gradients, expected)
        return VerifyRow(
            name=name,
            error=_ratio(difference, self._scale(name)),
            of_model=_ratio(difference, self._largest),
            moved=_ratio(self._difference(after, self.expected.after[name]), self._longest),
            norm=float(kept(self.folder, expected).norm()),
        )

    @cached_property
    def _sizes(self) -> dict[str, float]:
        """Return the largest element of each gradient."""
        gradients = self.expected.gradients.items()
        return {name: float(kept(self.folder, digest).abs().max()) for name, digest in gradients}

    @cached_property
    def _largest(self) -> float:
        return max(self._sizes.values(), default=0.0)

    @cached_property
    def _longest(self) -> float:
        """Return the largest change of an element over three steps."""
        after = self.expected.after
        moves = (self._difference({after[n]}, self.start[n]) for n in self.expected.gradients)
        return max(moves, default=0.0)

    def _scale(self, name: str) -> float:
        if self._sizes[name] <= ZERO * self._largest:
            return self._largest
        return max(self._sizes[name], SMALLEST * self._largest)

    def _difference(self, digests: set[str], expected: str) -> float:
        tensor = kept(self.folder, expected)
        others = (kept(self.folder, digest) for digest in digests - {expected})
        return worst([0.0, *(_distance(other, tensor) for other in others)])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max()) if a.shape == b.shape else math.inf


def _ratio(difference: float, scale: float) -> float:
    """Compute a relative error; relative to 0 any difference is infinite."""
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale
