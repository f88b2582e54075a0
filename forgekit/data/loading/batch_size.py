"""How many micro-batches of all ranks make a global batch."""

from __future__ import annotations

import math

from forgekit.inputs import LARGEST, check_integers, nearest_multiples


def count_micro_batches(global_batch_size: int, batch_size: int, world: int) -> int:
    """Count the micro-batches per optimizer step that make a global batch.

    Args:
        global_batch_size: Rows per optimizer step, over all ranks.
        batch_size: Rows per rank and micro-batch.
        world: Number of data-parallel ranks.

    Returns:
        ``global_batch_size / (batch_size * world)``.

    Raises:
        ValueError: If that is not a whole number of at least 1.

    Examples:
        >>> count_micro_batches(64, batch_size=8, world=4)
        2
    """
    check_integers(global_batch_size=(global_batch_size, -LARGEST))
    rows = batch_size * world
    if global_batch_size < 1 or global_batch_size % rows:
        nearest = nearest_multiples(global_batch_size, rows)
        share, rest = divmod(global_batch_size, world)
        smaller = f", or batch_size {math.gcd(share, batch_size)}" if share > 0 and not rest else ""
        raise ValueError(
            f"global_batch_size {global_batch_size} must be divisible by batch_size {batch_size} * "
            f"{world} data-parallel ranks = {rows}; {nearest}{smaller}."
        )
    return global_batch_size // rows
