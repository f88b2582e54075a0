"""How far a cell is from the reference, in units of what is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch
from distributed.cells import DTYPES, Found
from distributed.matrix import Cell
from distributed.reference import Training, expect
from lab import relative_error
from torch import Tensor


class Bounds(NamedTuple):
    """Largest allowed errors: of numbers relative to their own size, else to the largest entry.

    AdamW divides by the root of the second moment and so magnifies rounding: what it moved, and
    the losses and norms after its first step, have bounds of their own.
    """

    gradients: float
    parameters: float
    numbers: float
    moved: float
    adamw_numbers: float
    adamw_moved: float


BOUNDS = {
    "fp32": Bounds(5e-7, 1e-6, 1e-6, 3e-5, 3e-5, 3e-5),
    "fp64": Bounds(1e-10, 1e-12, 1e-11, 1e-11, 1e-10, 1e-11),
    # Measured: 0.015, 0.005, 0.002, 0.01, 0.1 and 0.14. A lost rank or a factor of two is 0.3 and
    # more in gradients and norms.
    "bf16": Bounds(0.04, 0.01, 0.005, 0.03, 0.3, 0.3),
}


def check(cell: Cell, found: Found) -> None:
    """Raise unless everything that a cell found is what one process finds."""
    expected = expect(cell)
    first = expected.training["sgd"]
    assert found["start"].keys() == expected.start.keys()
    for name, tensor in found["start"].items():
        assert torch.equal(tensor, expected.start[name].to(DTYPES[cell.dtype])), name
    for name in cell.optimizers:
        assert found[name]["step"] == len(expected.rows)
        assert found[name]["samples"] == sum(expected.rows)
        assert found[name]["targets"] == sum(expected.targets)
        assert [n["targets"] for n in found[name]["numbers"]] == expected.targets
        assert found[name]["balance"] == expected.training[name].balance
        assert not any(n["skipped"] for n in found[name]["numbers"])
    assert found["counts"] == first.counts
    reported = found[cell.optimizers[-1]]["numbers"][0]
    assert {n: reported[n] for n in first.metrics} == pytest.approx(first.metrics, rel=1e-9)
    far = {what: ratio for what, ratio in errors(cell, found).items() if not ratio < 1}
    assert not far, f"errors in units of what is allowed: {far}"


def errors(cell: Cell, found: Found) -> dict[str, float]:
    """Each error over its bound."""
    bounds, expected = BOUNDS[cell.dtype], expect(cell)
    first = expected.training["sgd"]
    far = {"gradients": relative_error(found["gradients"], first.gradients)}
    if cell.row.routed:
        far |= _by_kind(found["gradients"], first.gradients)
        counts = torch.tensor([found["counts"], first.counts])
        far["counts"] = float(counts.diff(dim=0).abs().max() / counts[1].max())
        pairs = ((found[n]["balance"], expected.training[n].balance) for n in cell.optimizers)
        both = [torch.tensor([one[n], other[n]]) for one, other in pairs for n in other]
        far["balance"] = max(float(values.diff(dim=0).abs().max()) for values in both)
    ratios = {name: error / bounds.gradients for name, error in far.items()}
    for name in cell.optimizers:
        training, parameters = expected.training[name], found[name]["parameters"]
        moved = (
            {n: tensors[n].double() - start for n, start in expected.start.items()}
            for tensors in (parameters, training.parameters)
        )
        bound = bounds.adamw_moved if name == "adamw" else bounds.moved
        error = relative_error(parameters, training.parameters)
        ratios[f"{name} parameters"] = error / bounds.parameters
        ratios[f"{name} moved"] = relative_error(*moved) / bound
        ratios |= _numbers(name, found[name], training, bounds)
    return ratios


def _by_kind(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Routers, shared experts, experts and the others, each against its own largest gradient."""
    kinds: dict[str, list[str]] = {}
    for name in expected:
        kind = re.search(r"\.feed_forward\.(router|shared|experts)\.", name)
        kinds.setdefault(kind[1] if kind else "dense", []).append(name)
    return {
        f"gradients of {kind}": relative_error(
            *({n: t[n] for n in names} for t in (found, expected))
        )
        for kind, names in kinds.items()
    }


def _numbers(name: str, found: Found, training: Training, bounds: Bounds) -> dict[str, float]:
    """The largest error of the losses and of the norms over its bound."""
    later = bounds.adamw_numbers if name == "adamw" else bounds.numbers
    allowed = [bounds.numbers, *[later] * (len(training.losses) - 1)]
    ratios = {}
    for what, wanted in (("loss", training.losses), ("grad_norm", training.norms)):
        values = torch.tensor([numbers[what] for numbers in found["numbers"]], dtype=torch.float64)
        expected = torch.tensor(wanted, dtype=torch.float64)
        errors = (values - expected).abs() / expected / torch.tensor(allowed, dtype=torch.float64)
        ratios[f"{name} {what}"] = float(errors.max())  # NaN if there is one
    return ratios
