"""Hashes of integers: 64 well-mixed bits, the same on every machine and version."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

U64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


def hash_integers(values: ArrayLike, key: ArrayLike = 0) -> U64:
    """Hash integers under a key, element by element, to 64 well-mixed bits.

    Args:
        values: Integers, of any shape.
        key: Integers that broadcast against ``values``.

    Returns:
        ``uint64`` of the broadcast shape, the same on every machine and version.

    References:
        The mixing function of SplitMix64, https://doi.org/10.1145/2714064.2660195

    Examples:
        >>> hash_integers([0, 1], key=7)
        array([ 1593918348581160074, 16886114407743784434], dtype=uint64)
    """
    values, key = as_unsigned(values), as_unsigned(key)
    shape = np.broadcast_shapes(values.shape, key.shape)
    # At least one dimension: numpy warns when a scalar overflows, and here overflow is intended.
    values, key = np.atleast_1d(values), np.atleast_1d(key)
    return mix_bits(values * _GOLDEN + mix_bits(key * _GOLDEN + _GOLDEN)).reshape(shape)


def mix_bits(values: U64) -> U64:
    """Mix the bits of ``uint64``; overflow is intended."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLY_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLY_2
    return values ^ (values >> np.uint64(31))


def as_unsigned(values: ArrayLike) -> U64:
    """Read integers modulo 2**64; negative ones too."""
    if isinstance(values, int):
        return np.array(values % 2**64, dtype=np.uint64)
    return np.asarray(values).astype(np.int64, copy=False).view(np.uint64)
