"""Weights of sources and the phases that change them, validated."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence

import attrs

from forgekit.inputs import check_integers, check_numbers, quoted


def _copied(weights: Mapping[str, float]) -> dict[str, float]:
    return dict(weights)


@attrs.frozen
class Phase:
    """Other weights and another scale of the learning rate from a sample number on.

    A phase lasts until the next one starts and inherits nothing from the one before: whatever it
    does not set has its original value.

    Attributes:
        start: Its first sample, counted over all ranks since the start of training.
        weights: Weights by source; a source that is not named keeps its original weight.
        lr_scale: Factor of the learning rate; see ``forgekit.with_phases``.

    Raises:
        ValueError: If ``start`` is negative, or ``lr_scale`` is negative or not finite.

    Examples:
        >>> Phase(start=50_000, weights={"code": 0.1}, lr_scale=0.5)
        Phase(start=50000, weights={'code': 0.1}, lr_scale=0.5)
    """

    start: int
    weights: dict[str, float] = attrs.field(factory=dict, converter=_copied)
    lr_scale: float = 1.0

    def __attrs_post_init__(self) -> None:
        check_integers(start=(self.start, 0))
        check_numbers(lr_scale=(self.lr_scale, 0))
        # Not a converter: type checkers would treat the attribute as a descriptor.
        object.__setattr__(self, "start", operator.index(self.start))


def check_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the rows of each source as integers.

    Raises:
        TypeError: If a number of rows is no integer.
        ValueError: If there is no source, or one has no rows.
    """
    if not sizes:
        raise ValueError('sizes are empty; name each source and its rows: {"code": 1000}.')
    check_integers(**{f"sizes[{name!r}]": (size, 1) for name, size in sizes.items()})
    return {name: operator.index(size) for name, size in sizes.items()}


def mixed_weights(
    sizes: Mapping[str, int],
    weights: Mapping[str, float] | None,
    temperature: float,
    phases: Sequence[Phase],
) -> Iterator[tuple[int, list[float]]]:
    """Yield the start and the weights of each phase, also of the time before the first.

    Args:
        sizes: Rows of each source.
        weights: Original weights of all sources; None is each source's part of all rows.
        temperature: Weights are raised to the power ``1 / temperature``.
        phases: By increasing start.

    Yields:
        The first sample, and one weight per source, the largest of them 1.

    Raises:
        ValueError: As ``make_order`` says.

    Examples:
        >>> later = Phase(start=10, weights={"a": 12})
        >>> list(mixed_weights({"a": 5, "b": 5}, {"a": 1, "b": 3}, 1.0, [later]))
        [(0, [0.3333333333333333, 1.0]), (10, [1.0, 0.25])]
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature {temperature} must be above 0; 1.0 leaves the weights as they are."
        )
    _check_increasing(phases)
    if weights is None:
        weights = {name: size / sum(sizes.values()) for name, size in sizes.items()}
    _check_weights(weights, sizes, "weights")
    if missing := [name for name in sizes if name not in weights]:
        raise ValueError(
            f"weights lack {quoted(missing)}; give each source a weight. 0 leaves one out."
        )
    starts_at_once = bool(phases) and phases[0].start == 0
    for phase in phases if starts_at_once else (Phase(start=0), *phases):
        what = f"the phase at sample {phase.start}: weights" if phase.weights else "weights"
        _check_weights(phase.weights, sizes, what)
        mixed = {**weights, **phase.weights}
        if not any(mixed.values()):
            raise ValueError(
                f"{what} leave every source at 0: {mixed}; at least one must be above 0."
            )
        yield phase.start, _tempered([mixed[name] for name in sizes], temperature)


def _tempered(weights: list[float], temperature: float) -> list[float]:
    # Divided by the largest first: no power overflows. A positive weight stays positive.
    largest = max(weights)
    least = math.ulp(0.0)
    return [
        max((weight / largest) ** (1 / temperature), least) if weight else 0.0 for weight in weights
    ]


def _check_weights(weights: Mapping[str, float], sizes: Mapping[str, int], what: str) -> None:
    if unknown := [name for name in weights if name not in sizes]:
        raise ValueError(f"{what} name {quoted(unknown)}; the sources are {quoted(sizes)}.")
    check_numbers(**{f"{what}[{name!r}]": (weight, 0) for name, weight in weights.items()})


def _check_increasing(phases: Sequence[Phase]) -> None:
    for before, after in itertools.pairwise(phases):
        if after.start <= before.start:
            raise ValueError(
                f"a phase at sample {after.start} follows one at sample {before.start}; "
                "put phases in increasing order, one per sample."
            )
