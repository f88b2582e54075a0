"""Progress of a run: a bar on a terminal, else plain lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import IO, Any, cast

from forgekit.checks import counted
from forgekit.terminal import Steady

PAIRS = ("margin", "accuracy")
"""Metrics of ``dpo_loss`` in the training line."""


class Lines:
    """Progress without a terminal: a line per row; nothing without a stream."""

    def __init__(self, stream: Steady | None, total: int | None) -> None:
        self._stream, self._total = stream, total

    def step(self, step: int) -> None:
        """Nothing to do: only rows are shown."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Print a row."""
        of = "" if self._total is None else f"/{self._total}"
        self.message(f"step {row['step']}{of}  {_summary(row)}")

    def message(self, text: str) -> None:
        """Print a line."""
        if self._stream is not None:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def close(self) -> None:
        """Nothing to do."""


class Bar:
    """Progress on a terminal."""

    def __init__(self, stream: Steady, start: int, total: int | None) -> None:
        # Imported here: a tenth of forgekit's import time, for terminals only.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("step {task.completed:.0f}" + ("" if total is None else f"/{total}")),
            BarColumn(),
            TextColumn("{task.fields[summary]}"),
            TimeRemainingColumn(compact=True),
            console=Console(file=cast("IO[str]", stream)),
            # Rich would redirect the recipe's prints to stderr, away from a file or pipe.
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("", total=total, completed=start, summary="")
        self._progress.start()

    def step(self, step: int) -> None:
        """Move on to a step."""
        self._progress.update(self._task, completed=step)

    def row(self, row: Mapping[str, Any]) -> None:
        """Show a row beside the bar."""
        self._progress.update(self._task, summary=_summary(row))

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Restore the terminal."""
        self._progress.stop()


def _summary(row: Mapping[str, Any]) -> str:
    bad = f"  {counted(row['train/skipped'], 'bad step')}" if row["train/skipped"] else ""
    mfu = f"  mfu {row['perf/mfu']:.1%}" if "perf/mfu" in row else ""
    balance = f"  load {row['moe/load_max']:.2f}x" if "moe/load_max" in row else ""
    reward = f"  reward {row['rollout/reward']:.3f}" if "rollout/reward" in row else ""
    pairs = "  ".join(["", *(f"{n} {row[f'dpo/{n}']:.3f}" for n in PAIRS if f"dpo/{n}" in row)])
    return (
        f"loss {row['train/loss_mean']:.4f}  lr {row['train/lr']:.1e}  "
        f"{row['perf/tokens_per_second']:,.0f} tokens/s{balance}{reward}{pairs}{mfu}{bad}"
    )


def short_number(number: Any) -> str:
    """Format a number in few digits."""
    if isinstance(number, float) and not (number.is_integer() and abs(number) >= 1000):
        return f"{number:.4f}"
    return f"{number:,.0f}" if isinstance(number, float) else str(number)
