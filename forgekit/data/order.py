"""The order of the data as a pure function: sample number in, row out.

A shuffled array would have to be kept, rebuilt at each resume and agreed on by all ranks. A keyed
permutation needs none of this: sample ``i`` of seed ``s`` is the same row on any number of ranks
and workers, and the whole position is one integer. Nothing here leans on a library's generator,
whose stream may change with its next version.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["hash_integers", "permute", "sample_rows"]

U64 = NDArray[np.uint64]

ROUNDS = 8
"""Three or four leave neighbours related; eight cannot be told from a shuffled array."""

SMALL = 256
"""Up to here an exact table by sorting is cheaper than the network, and less regular."""

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
    values, key = _unsigned(values), _unsigned(key)
    shape = np.broadcast_shapes(values.shape, key.shape)
    # At least one dimension: numpy warns when a scalar wraps around, and wrapping is the point.
    values, key = np.atleast_1d(values), np.atleast_1d(key)
    return _mix(values * _GOLDEN + _mix(key * _GOLDEN + _GOLDEN)).reshape(shape)


def permute(index: ArrayLike, n: int, key: ArrayLike) -> NDArray[np.int64]:
    """Send each index to its place under the permutation of ``range(n)`` that ``key`` names.

    A Feistel network permutes the next power of two; an image outside ``range(n)`` is sent on until
    it falls inside, which is again a permutation and takes less than two rounds on average.

    Args:
        index: Integers in ``range(n)``, of any shape.
        n: Size of the permuted range.
        key: Integers that broadcast against ``index``; each names its own permutation.

    Returns:
        ``int64`` of the broadcast shape.

    Raises:
        ValueError: If ``n`` is not positive.
        IndexError: If an index is outside ``range(n)``.

    References:
        Black and Rogaway, Ciphers with arbitrary finite domains,
        https://doi.org/10.1007/3-540-45760-7_9

    Examples:
        >>> permute(range(5), 5, key=1)
        array([4, 2, 1, 0, 3])
    """
    if n < 1:
        raise ValueError(f"n {n} must be positive: there is no permutation of nothing.")
    places, keys = np.broadcast_arrays(np.asarray(index, dtype=np.int64), _unsigned(key))
    if places.size and not 0 <= places.min() <= places.max() < n:
        raise IndexError(f"index {places.min()}..{places.max()} must lie in range({n}).")
    shape, places, keys = places.shape, places.ravel(), keys.ravel()
    permuted = _permute_table if n <= SMALL else _permute_network
    return permuted(places, n, keys).astype(np.int64).reshape(shape)


def sample_rows(
    samples: ArrayLike, n: int, seed: int, *, shuffle: bool = True
) -> NDArray[np.int64]:
    """Find the row of each sample number, epoch after epoch.

    Args:
        samples: Sample numbers since the start of training, 0 and up, of any shape.
        n: Rows in the data; samples ``e * n .. (e + 1) * n - 1`` are epoch ``e``.
        seed: Names the order; each epoch has another one.
        shuffle: False keeps the rows in their own order.

    Returns:
        ``int64`` rows in ``range(n)``, of the shape of ``samples``.

    Raises:
        ValueError: If ``n`` is not positive or a sample number is negative.

    Examples:
        >>> sample_rows(range(6), 3, seed=0, shuffle=False)
        array([0, 1, 2, 0, 1, 2])
    """
    if n < 1:
        raise ValueError(f"n {n} must be positive: there are no rows to order.")
    samples = np.asarray(samples, dtype=np.int64)
    if samples.size and samples.min() < 0:
        raise ValueError(f"sample {samples.min()} is negative; samples are counted from 0.")
    epochs, places = np.divmod(samples, n)
    return permute(places, n, hash_integers(epochs, seed)) if shuffle else places


def _permute_table(places: NDArray[np.int64], n: int, keys: U64) -> NDArray[np.int64]:
    distinct, which = np.unique(keys, return_inverse=True)
    tables = np.argsort(hash_integers(np.arange(n), distinct[:, None]), axis=1, kind="stable")
    return tables[which, places]


def _permute_network(places: NDArray[np.int64], n: int, keys: U64) -> U64:
    bits = (n - 1).bit_length()
    out = places.astype(np.uint64)
    round_keys = hash_integers(np.arange(ROUNDS)[:, None], keys)
    walking = np.arange(out.size)
    while walking.size:
        out[walking] = _network(out[walking], bits, round_keys[:, walking])
        walking = walking[out[walking] >= n]
    return out


def _network(values: U64, bits: int, round_keys: U64) -> U64:
    """Permute ``range(2**bits)``: by turns each half is changed by a hash of the other."""
    low_bits = np.uint64(bits // 2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << np.uint64(bits - bits // 2)) - np.uint64(1)
    high, low = values >> low_bits, values & low_mask
    for turn in range(0, ROUNDS, 2):
        high = high ^ (_mix(low ^ round_keys[turn]) & high_mask)
        low = low ^ (_mix(high ^ round_keys[turn + 1]) & low_mask)
    return (high << low_bits) | low


def _mix(values: U64) -> U64:
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLY_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLY_2
    return values ^ (values >> np.uint64(31))


def _unsigned(values: ArrayLike) -> U64:
    """Read integers modulo 2**64; negative ones too."""
    if isinstance(values, int):
        return np.array(values % 2**64, dtype=np.uint64)
    return np.asarray(values).astype(np.int64, copy=False).view(np.uint64)
