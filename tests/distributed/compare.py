"""How far a cell is from the reference, in units of what is allowed."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest
import torch
from distributed.cells import DTYPES, Found
from distributed.experts import group_of
from distributed.matrix import Cell
from distributed.reference import Expected, Training, expect
from lab import relative_error
from torch import Tensor

__all__ = ["BOUNDS", "Bounds", "check", "errors"]


@attrs.frozen
class Bounds:
    """Largest allowed errors.

    AdamW divides by the root of the second moment and so magnifies rounding: what it moved, and
    the numbers after its first step, have bounds of their own.

    Attributes:
        gradients: Relative to the largest gradient.
        parameters: After some steps, relative to the largest parameter.
        numbers: Of losses and gradient norms, each relative to its own.
        moved: Of what the steps moved, relative to the largest move.
        adamw_numbers: As ``numbers``.
        adamw_moved: As ``moved``.
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
    assert found["counts"] == expected.counts
    reported = found[cell.optimizers[-1]]["numbers"][0]
    assert {n: reported[n] for n in expected.metrics} == pytest.approx(expected.metrics, rel=1e-9)
    far = {what: ratio for what, ratio in errors(cell, found).items() if not ratio < 1}
    assert not far, f"errors in units of what is allowed: {far}"


def errors(cell: Cell, found: Found) -> dict[str, float]:
    """Each error over its bound."""
    bounds, expected = BOUNDS[cell.dtype], expect(cell)
    ratios = {
        "gradients": relative_error(found["gradients"], expected.gradients) / bounds.gradients
    }
    if cell.row.routed:
        ratios |= _apart(found["gradients"], expected.gradients, bounds.gradients)
        counts, wanted = torch.tensor(found["counts"]), torch.tensor(expected.counts)
        ratios["counts"] = float((counts - wanted).abs().max() / wanted.max()) / bounds.gradients
        moves = [_far(found[n]["balance"], expected.training[n].balance) for n in cell.optimizers]
        ratios["balance"] = max(moves) / bounds.gradients
    for name in cell.optimizers:
        training = expected.training[name]
        parameters = found[name]["parameters"]
        moved = _difference(parameters, expected), _difference(training.parameters, expected)
        ratios |= {
            f"{name} parameters": relative_error(parameters, training.parameters)
            / bounds.parameters,
            f"{name} moved": relative_error(*moved)
            / (bounds.adamw_moved if name == "adamw" else bounds.moved),
            **_numbers(name, found[name], training, bounds),
        }
    return ratios


def _far(found: Mapping[str, list[float]], expected: Mapping[str, list[float]]) -> float:
    values = ((found[name], expected[name]) for name in expected)
    return max(abs(a - b) for pair in values for a, b in zip(*pair, strict=True))


def _apart(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float
) -> dict[str, float]:
    """Routers, shared experts, experts and the others, each against its own largest gradient."""
    groups: dict[str, list[str]] = {}
    for name in expected:
        groups.setdefault(group_of(name), []).append(name)
    return {
        f"gradients of {group}": relative_error(
            {name: found[name] for name in names}, {name: expected[name] for name in names}
        )
        / bound
        for group, names in groups.items()
    }


def _difference(parameters: Mapping[str, Tensor], expected: Expected) -> dict[str, Tensor]:
    return {name: parameters[name].double() - expected.start[name] for name in expected.start}


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
