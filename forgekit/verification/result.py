"""The result of ``verify`` and its text: a table, a line per run, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import MappingProxyType

import attrs

SPLIT = "micro-batches"
SHOWN = 10
"""Maximum number of parameters in the table."""
_HINTS = MappingProxyType(
    {
        SPLIT: "the gradient depends on the split into micro-batches. Return fk.Loss(sum, count) "
        "with nothing divided in loss_fn; layers that mix rows (BatchNorm) cannot be split. "
        "--keep-split (split=False) allows a loss that is meant to depend on it.",
        "one process": "the step differs from a plain backward pass: loss_fn or the model keeps "
        "state between calls, or draws random numbers.",
        "dp_replicate": "gradients are not summed over data-parallel ranks. Does the state have "
        "its mesh? Does loss_fn divide by its own count, or use weights outside of forward?",
        "dp_shard": "gradients of sharded parameters are not summed. Does the state have its mesh? "
        "Does loss_fn divide by its own count, or use weights outside of forward? FSDP looks into "
        "tensors, containers and dataclasses that a module returns, and into nothing else.",
        "cp": "each rank holds a slice of every sequence. Take positions from the batch or "
        "model.locate, never from arange; mix positions in attend only; divide nothing in loss_fn.",
        "tp": "each rank holds a part of each matrix. Name every module with parameters between a "
        "colwise and a rowwise one in the plan; split nothing by sizes of the whole matrix.",
        "pp": "each rank holds some blocks and sees only what blocks pass on: no skips around "
        "blocks, no sums over blocks, no terms over model.parameters() in loss_fn.",
        "ep": "each rank holds some experts. Compute router terms from all tokens of the batch.",
    }
)


@attrs.frozen(kw_only=True)
class VerifyRow:
    """One parameter.

    Attributes:
        name: Its name.
        error: Largest difference of its gradient over its largest gradient (over a millionth of
            the model's, if that is more).
        of_model: The same difference over the model's largest gradient.
        moved: Largest difference after three SGD steps over what they moved the model at most.
        norm: L2 norm of its gradient in one process.
    """

    name: str
    error: float
    of_model: float
    moved: float
    norm: float

    @property
    def worst(self) -> float:
        """The larger of ``error`` and ``moved``; NaN if one is."""
        return worst([self.error, self.moved])


@attrs.frozen(kw_only=True)
class VerifyCheck:
    """A run compared with one process.

    Attributes:
        name: Such as ``"tp=2 pp=2"``, ``"one process"`` or ``"micro-batches"``.
        ranks: Number of ranks.
        seconds: How long it took.
        error: The worst relative error; NaN if it failed.
        failure: What a rank raised or where it hangs, or None.
    """

    name: str
    ranks: int
    seconds: float
    error: float = math.nan
    failure: str | None = None


@attrs.frozen(kw_only=True)
class VerifyReport:
    """The result of ``verify``; ``str`` is the table with its verdict.

    Attributes:
        layout: Such as ``"tp=2 pp=2"``.
        rows: Every parameter of the layout, the worst first; empty if it failed.
        loss: Token-mean loss of the first step in the layout.
        loss_error: Its relative error.
        norm: Norm of its gradient.
        norm_error: Its relative error.
        checks: Every run, in order.
        broken: The dimensions that break, ``("micro-batches",)``, ``("one process",)``, or none.
        failure: What a rank of the layout raised or where it hangs, or None.
        notes: What else was seen.
        tolerance: The largest error that counts as equal.
    """

    layout: str
    rows: tuple[VerifyRow, ...] = ()
    loss: float = math.nan
    loss_error: float = math.nan
    norm: float = math.nan
    norm_error: float = math.nan
    checks: tuple[VerifyCheck, ...] = ()
    broken: tuple[str, ...] = ()
    failure: str | None = None
    notes: tuple[str, ...] = ()
    tolerance: float

    @property
    def error(self) -> float:
        """Largest relative error of the layout; NaN if one is, or there is nothing to compare."""
        errors = [row.worst for row in self.rows]
        return worst([*errors, self.loss_error, self.norm_error])

    @property
    def equal(self) -> bool:
        """Whether all checks agree."""
        checks = [check.error <= self.tolerance for check in self.checks]
        return self.failure is None and all(checks) and self.error <= self.tolerance

    def __str__(self) -> str:
        """The table, worst first, the lines of each run, and the verdict."""
        notes = (f"note: {note}" for note in self.notes)
        return "\n".join([*self._table(), *self._runs(), *notes, *self._verdict()])

    def _table(self) -> Iterator[str]:
        """List the errors of the worst parameters, and those of the loss and the norm."""
        if not self.rows:
            return
        lines = [("parameter", "gradient", "of model", "3 steps", "norm")]
        for row in self.rows[:SHOWN]:
            errors = _number(row.error), _number(row.of_model), _number(row.moved)
            lines.append((row.name, *errors, f"{row.norm:.3g}"))
        if rest := self.rows[SHOWN:]:
            lines.append((f"{len(rest)} more, at most", _number(rest[0].worst), "", "", ""))
        lines.append(("loss", _number(self.loss_error), "", "", f"{self.loss:.6g}"))
        lines.append(("norm", _number(self.norm_error), "", "", f"{self.norm:.6g}"))
        width = max(len(name) for name, *_ in lines)
        for name, *numbers in lines:
            yield f"{name:<{width}}{''.join(f'{number:>10}' for number in numbers)}".rstrip()

    def _runs(self) -> Iterator[str]:
        width = max((len(check.name) for check in self.checks), default=0)
        for check in self.checks:
            verdict = "equal" if check.error <= self.tolerance else "different"
            ranks = f"{check.ranks} rank{'s' * (check.ranks > 1)}"
            error = "failed" if check.failure else _number(check.error)
            seconds = f"{check.seconds:.1f} s"
            yield f"{verdict:<10} {check.name:<{width}}  {ranks:<8}{seconds:>9}  {error}"

    def _verdict(self) -> Iterator[str]:
        if self.failure is not None:
            yield f"failed: {self.layout}: {self.failure}"
            return
        errors = {row.name: row.worst for row in self.rows}
        errors |= {"loss": self.loss_error, "norm": self.norm_error}
        where = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
        largest = f"{_number(self.error)} ({where})"
        if self.equal:
            yield f"equal: {self.layout} learns what one process does, worst {largest}"
            return
        verb = "breaks" if len(self.broken) == 1 and self.broken != (SPLIT,) else "break"
        agrees = self.error <= self.tolerance
        whole = f"{self.layout} itself agrees" if agrees else f"{self.layout} is off by {largest}"
        yield f"different: {' and '.join(self.broken)} {verb}; {whole}"
        yield from (f"  {_HINTS[name]}" for name in self.broken)
        yield from (f"  {one.name} failed: {one.failure}" for one in self.checks if one.failure)
        if self.tolerance < self.error < 1e-4:
            yield (
                "  Errors of this size come from float32: look for .float(), a dtype=torch.float32 "
                "or a constant in the model. --tolerance 1e-5 accepts them."
            )


def worst(errors: Iterable[float]) -> float:
    """Return the largest error; NaN if one is NaN, which max() may miss, or there is none."""
    numbers = [*errors]
    return max(numbers) if numbers and not any(map(math.isnan, numbers)) else math.nan


def _number(error: float) -> str:
    return "0" if error == 0 else f"{error:.1e}"
