"""``bad_steps.jsonl``: which samples a bad step had, so that it can be looked at and replayed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import attrs
import torch
from tensordict import TensorDictBase
from torch import Tensor

from forgekit.files import append_lines, read_regular
from forgekit.inputs import parse_json
from forgekit.metrics.strict_json import finite
from forgekit.state import TrainState

KEPT = ("loss", "grad_norm", "skipped", "spikes")


@attrs.frozen
class _Step:
    step: int
    first: int | None
    stop: int
    skips: tuple[tuple[int, int], ...]
    metrics: dict[str, Tensor]


class BadStepRecords:
    """Remember the steps since the last row; write down those that turn out to have been bad.

    Nothing is read from the device unless a step was bad.

    Args:
        path: The file to append to; None writes nothing.
        samples: Rows consumed before the first step; None if nobody knows.
        loader: Its ``locate(first, stop)``, if it has one, gives the source, None if there is only
            one, and the row of each sample.
    """

    def __init__(self, path: Path | None, samples: int | None, loader: Any = None) -> None:
        self._path, self._samples = path, samples
        self._loader = loader if hasattr(loader, "locate") else None
        self._steps: list[_Step] = []

    def add(self, state: TrainState, metrics: TensorDictBase) -> None:
        """Take a step's metrics and the state after it."""
        if self._path is not None:
            kept = {name: metrics[name] for name in metrics.keys() if name in KEPT}  # noqa: SIM118
            step = _Step(state.step, self._samples, state.samples, state.skips, kept)
            self._steps.append(step)
        self._samples = state.samples

    def end_row(self, skipped: int) -> None:
        """Write down the bad steps among those since the last row, and forget them all."""
        steps, self._steps = self._steps, []
        if self._path is None or not skipped:
            return
        numbers = torch.stack([torch.stack(list(step.metrics.values())) for step in steps])
        rows = zip(steps, numbers.tolist(), strict=True)
        named = [(step, dict(zip(step.metrics, values, strict=True))) for step, values in rows]
        lines = [self._line(step, values) for step, values in named if values["skipped"]]
        append_lines(self._path, lines)

    def restart(self, samples: int) -> None:
        """Forget the steps since the last row; the next one begins after these samples."""
        self._steps, self._samples = [], samples

    def _line(self, step: _Step, numbers: dict[str, float]) -> str:
        record = {
            "step": step.step,
            "samples": [step.first, step.stop],
            "skips": step.skips,
            "spike": bool(numbers.get("spikes", 0.0)),
            **{name: finite(numbers[name]) for name in ("loss", "grad_norm")},
            **self._located(step),
            "script": getattr(sys.modules.get("__main__"), "__file__", None),
        }
        return json.dumps(record, allow_nan=False)

    def _located(self, step: _Step) -> dict[str, Any]:
        if self._loader is None or step.first is None:
            return {}
        found = self._loader.locate(step.first, step.stop)
        rows = [row for _, row in found]
        sources = [name for name, _ in found]
        return {"rows": rows} if None in sources else {"sources": sources, "rows": rows}


def read_bad_steps(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the bad steps of a run, in the order in which they happened.

    Args:
        run: The run directory.

    Returns:
        Of each bad step ``step`` (as in ``metrics.jsonl``), ``samples`` (the first and the one
        after the last), ``skips`` (those of the state), ``spike``, ``loss`` and ``grad_norm`` (None
        if not finite), ``script``, and where the loader knows them ``rows`` and ``sources``.
    """
    path = Path(run) / "bad_steps.jsonl"
    if not path.exists():
        return []
    found = []
    for line in read_regular(path).splitlines():
        try:
            found.append(parse_json(line))
        except ValueError:
            continue  # cut short by a crash
    return found
