"""Samples that training skips: the remaining ones are numbered as if these had never existed.

So ``state.samples`` remains the only position in the data, and any number of ranks or workers skips
the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Skips = Sequence[tuple[int, int]]
"""Pairs of the first sample and the number of rows, in the numbering before this skip."""


def positions(samples: ArrayLike, skips: Skips) -> NDArray[np.int64]:
    """Renumber samples as in a stream without skips.

    Args:
        samples: Sample numbers of any shape.
        skips: What is skipped, in the order in which it was added.

    Returns:
        int64 of the shape of ``samples``.

    Examples:
        >>> positions([0, 1, 2, 3], skips=[(1, 10), (2, 5)])
        array([ 0, 11, 17, 18])
    """
    found = np.array(samples, dtype=np.int64)
    for first, rows in reversed(skips):  # undo the last renumbering first
        found[found >= first] += rows
    return found


def check_skips(skips: Skips) -> tuple[tuple[int, int], ...]:
    """Return pairs of integers.

    Raises:
        ValueError: If one is no pair, or a number is negative.
    """
    for skip in skips:
        if len(skip) != 2 or min(skip) < 0:
            raise ValueError(
                f"skip has {tuple(skip)!r}; each entry is (first sample, rows), neither negative, "
                "as in state.skips."
            )
    return tuple((int(first), int(rows)) for first, rows in skips)
