"""What ``verify`` found, and its text: a table, the worst first, a line for each run, a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import MappingProxyType

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

SPLIT = "micro-batches"
_SHOWN = 10
_HINTS = MappingProxyType(
    {
        SPLIT: "the gradient depends on how a batch is split into micro-batches. Return "
        "fk.Loss(sum, count) with nothing divided in loss_fn; layers that mix rows (BatchNorm) "
        "cannot be split. If it is meant (an auxiliary loss per micro-batch), --keep-split "
        "(split=False) allows it.",
        "one process": "the step itself differs from a plain backward pass: loss_fn or the model "
        "keeps something from one call to the next, or draws random numbers.",
        "dp_replicate": "gradients are not summed over the data-parallel ranks. Does the state "
        "have its mesh, does loss_fn divide by a count of its own, does it use weights outside of "
        "forward?",
        "dp_shard": "gradients of sharded parameters are not reduced, or not by sums. Does the "
        "state have its mesh, does loss_fn divide by a count of its own, use weights outside of "
        "forward, or does a module return what FSDP cannot look into (an object that is no "
        "dataclass)?",
        "cp": "each rank holds a slice of every sequence. Take positions from the batch or from "
        "model.locate, never from arange; mix positions in attend alone; divide nothing in "
        "loss_fn.",
        "tp": "each rank holds a part of each matrix. Name every module with parameters between a "
        "colwise and a rowwise one in the plan; split nothing by sizes of the whole matrix.",
        "pp": "each rank holds some blocks, and only what blocks pass on travels. Skips around "
        "blocks, sums over blocks and terms over model.parameters() in loss_fn do not.",
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
    """One run that was compared with one process.

    Attributes:
        name: Such as ``"tp=2 pp=2"``, ``"one process"`` or ``"micro-batches"``.
        dimensions: Names of the mesh dimensions above 1.
        ranks: Number of ranks.
        seconds: How long it took.
        error: The worst relative error; NaN if it failed.
        failure: What a rank raised or where it hangs, or None.
    """

    name: str
    dimensions: tuple[str, ...]
    ranks: int
    seconds: float
    error: float
    failure: str | None = None


@attrs.frozen(kw_only=True)
class VerifyReport:
    """What ``verify`` found; ``str`` is the table with its verdict.

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
        """The worst relative error of the layout; NaN if there is one, or nothing to compare."""
        errors = [row.worst for row in self.rows]
        return worst([*errors, self.loss_error, self.norm_error])

    @property
    def equal(self) -> bool:
        """Whether everything agrees."""
        checks = [check.error <= self.tolerance for check in self.checks]
        return self.failure is None and all(checks) and self.error <= self.tolerance

    def __str__(self) -> str:
        """The table, worst first, the lines of each run, and the verdict."""
        console = Console(width=100, color_system=None)
        with console.capture() as text:
            show_report(self, console)
        return text.get().rstrip()


def worst(errors: Iterable[float]) -> float:
    """Return the largest error; NaN if there is one, or none at all: max() would pass over it."""
    found = [*errors]
    return max(found) if found and not any(map(math.isnan, found)) else math.nan


def show_report(report: VerifyReport, console: Console) -> None:
    """Print a report."""
    if report.rows:
        console.print(_table(report), highlight=False)
    if report.checks:
        console.print(_runs(report), highlight=False)
    notes = [f"note: {escape(note)}" for note in report.notes]
    for line in (*notes, *_verdict(report)):
        console.print(line, highlight=False, soft_wrap=True)


def _table(report: VerifyReport) -> Table:
    """List the errors of the worst parameters, and those of the loss and the norm."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("parameter", overflow="fold")
    for name in ("gradient", "of model", "3 steps", "norm"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.rows[:_SHOWN]:
        errors = (_number(error) for error in (row.error, row.of_model, row.moved))
        table.add_row(escape(row.name), *errors, f"{row.norm:.3g}")
    if rest := report.rows[_SHOWN:]:
        table.add_row(f"{len(rest)} more, at most", _number(rest[0].worst), "", "", "")
    table.add_row("loss", _number(report.loss_error), "", "", f"{report.loss:.6g}")
    table.add_row("norm", _number(report.norm_error), "", "", f"{report.norm:.6g}")
    return table


def _runs(report: VerifyReport) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
    for check in report.checks:
        ranks = "1 rank" if check.ranks == 1 else f"{check.ranks} ranks"
        is_equal = check.error <= report.tolerance
        verdict = "[green]equal[/]" if is_equal else "[red]different[/]"
        error = "failed" if check.failure else _number(check.error)
        table.add_row(verdict, check.name, ranks, f"{check.seconds:.1f} s", error)
    return table


def _verdict(report: VerifyReport) -> Iterator[str]:
    if report.failure is not None:
        yield f"[red]failed[/]: {escape(report.layout)}: {escape(report.failure)}"
        return
    largest = f"{_number(report.error)} ({escape(_where(report))})"
    if report.equal:
        yield f"[green]equal[/]: {report.layout} learns what one process does, worst {largest}"
        return
    broken = " and ".join(report.broken)
    verb = "breaks" if len(report.broken) == 1 and broken != SPLIT else "break"
    agrees = report.error <= report.tolerance
    whole = f"{report.layout} itself agrees" if agrees else f"{report.layout} is off by {largest}"
    yield f"[red]different[/]: {broken} {verb}; {whole}"
    yield from (f"  {escape(_HINTS[name])}" for name in report.broken)
    failures = {check.name: check.failure for check in report.checks if check.failure}
    yield from (f"  {name} failed: {escape(str(text))}" for name, text in failures.items())
    if report.tolerance < report.error < 1e-4:
        yield (
            "  Errors of this size come from float32: look for .float(), a dtype=torch.float32 or "
            "a constant in the model. --tolerance 1e-5 accepts them."
        )


def _where(report: VerifyReport) -> str:
    """Return the parameter with the largest error, or "loss" or "norm"; NaN counts as largest."""
    errors = {row.name: row.worst for row in report.rows}
    errors |= {"loss": report.loss_error, "norm": report.norm_error}
    return max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))


def _number(error: float) -> str:
    return "0" if error == 0 else f"{error:.1e}"
