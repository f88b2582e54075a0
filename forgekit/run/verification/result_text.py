"""The text of a ``VerifyReport``: a table, the worst first, a line for each run, the verdict."""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forgekit.run.verification.verify import SPLIT, VerifyCheck, VerifyReport

__all__ = ["show_report"]

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


def show_report(report: VerifyReport, console: Console | None = None) -> str:
    """Write a report.

    Args:
        report: What ``verify`` returned.
        console: Where to print it; None returns it as plain text.

    Returns:
        The text; empty if it was printed.
    """
    there = console or Console(file=io.StringIO(), width=100, color_system=None)
    for part in _parts(report):
        there.print(part, highlight=False, soft_wrap=isinstance(part, str))
    return there.file.getvalue().rstrip() if isinstance(there.file, io.StringIO) else ""


def _parts(report: VerifyReport) -> Iterator[Any]:
    if report.rows:
        yield _table(report)
    if report.checks:
        yield _runs(report)
    yield from (f"note: {escape(note)}" for note in report.notes)
    yield from _verdict(report)


def _table(report: VerifyReport) -> Table:
    """Each parameter's errors; what all agree on is left out below the worst."""
    table = _columns("parameter", "gradient", "of model", "3 steps", "norm")
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
        color, verdict = _outcome(check, report.tolerance)
        error = "failed" if check.failure else _number(check.error)
        seconds = f"{check.seconds:.1f} s"
        table.add_row(f"[{color}]{verdict}[/]", check.name, ranks, seconds, error)
    return table


def _outcome(check: VerifyCheck, tolerance: float) -> tuple[str, str]:
    return ("green", "equal") if check.error <= tolerance else ("red", "different")


def _columns(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _verdict(report: VerifyReport) -> Iterator[str]:
    if report.failure is not None:
        yield f"[red]failed[/]: {escape(report.layout)}: {escape(report.failure)}"
        return
    worst = f"{_number(report.error)} ({escape(_where(report))})"
    if report.equal:
        yield f"[green]equal[/]: {report.layout} learns what one process does, worst {worst}"
        return
    broken = " and ".join(report.broken)
    verb = "breaks" if len(report.broken) == 1 and broken != SPLIT else "break"
    agrees = report.error <= report.tolerance
    whole = f"{report.layout} itself agrees" if agrees else f"{report.layout} is off by {worst}"
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
    """The parameter, or the number, with the largest error."""
    errors = {"loss": report.loss_error, "norm": report.norm_error}
    for row in reversed(report.rows):
        errors[row.name] = row.worst
    return max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))


def _number(error: float) -> str:
    return "0" if error == 0 else f"{error:.1e}"
