"""The order of the rows as a pure function: sample number in, row out.

A shuffled array would have to be stored, rebuilt at each resume and equal on all ranks. A keyed
permutation needs none of this: sample ``i`` of seed ``s`` is the same row on any number of ranks
and workers, and the whole position is one integer. No library's random generator is used, since its
stream may change with the next version.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgekit.data.hashing import U64, as_unsigned, hash_integers, mix_bits

Integers = NDArray[np.int64]

ROUNDS = 8
"""After three or four neighbours correlate; eight are indistinguishable from a shuffled array."""

SMALL = 256
"""Up to this size a table by sorting hashes is cheaper than the network, and more random."""

_POWERS = 2 ** np.arange(63)


def permute(index: ArrayLike, n: ArrayLike, key: ArrayLike) -> Integers:
    """Map each index by the permutation of ``range(n)`` that ``key`` selects.

    A Feistel network permutes the next power of two. A result outside ``range(n)`` is mapped again
    until it falls inside (cycle walking), which is again a permutation. The power of two is below
    ``2 * n``, so this takes less than two passes on average.

    Args:
        index: Integers in ``range(n)``, of any shape.
        n: Sizes of the permuted ranges, integers that broadcast against ``index``.
        key: Integers that broadcast against ``index``; each selects another permutation.

    Returns:
        ``int64`` of the broadcast shape.

    Raises:
        ValueError: If an ``n`` is not positive.
        IndexError: If an index is outside its ``range(n)``.

    References:
        Black and Rogaway, Ciphers with arbitrary finite domains,
        https://doi.org/10.1007/3-540-45760-7_9

    Examples:
        >>> permute(range(5), 5, key=1)
        array([4, 2, 1, 0, 3])
    """
    sizes = _positive(n, "there is no permutation of nothing")
    indices, sizes, keys = np.broadcast_arrays(
        np.asarray(index, dtype=np.int64), sizes, as_unsigned(key)
    )
    outside = (indices < 0) | (indices >= sizes)
    if outside.any():
        raise IndexError(
            f"index {indices[outside][0]} is outside range({sizes[outside][0]}), "
            "which this permutation permutes."
        )
    shape, indices, sizes, keys = indices.shape, indices.ravel(), sizes.ravel(), keys.ravel()
    out = np.empty(indices.shape, dtype=np.int64)
    for size in np.unique(sizes[sizes <= SMALL]).tolist():
        chosen = np.flatnonzero(sizes == size)
        out[chosen] = _permute_table(indices[chosen], size, keys[chosen])
    chosen = np.flatnonzero(sizes > SMALL)
    if chosen.size:
        out[chosen] = _permute_network(indices[chosen], sizes[chosen], keys[chosen])
    return out.reshape(shape)


def sample_rows(
    samples: ArrayLike, n: ArrayLike, seed: ArrayLike, *, shuffle: bool = True
) -> Integers:
    """Find the row of each sample number, epoch after epoch.

    Args:
        samples: Sample numbers since the start of training, 0 and up, of any shape.
        n: Rows in the data; samples ``e * n .. (e + 1) * n - 1`` are epoch ``e``. Integers that
            broadcast against ``samples``, for several datasets at once.
        seed: Selects the order; each epoch has another one. Broadcasts like ``n``.
        shuffle: False keeps the rows in their own order.

    Returns:
        ``int64`` rows in ``range(n)``, of the broadcast shape.

    Raises:
        ValueError: If an ``n`` is not positive or a sample number is negative.

    Examples:
        >>> sample_rows(range(6), 3, seed=0, shuffle=False)
        array([0, 1, 2, 0, 1, 2])
    """
    sizes = _positive(n, "there are no rows to order")
    samples = np.asarray(samples, dtype=np.int64)
    if samples.size and samples.min() < 0:
        raise ValueError(f"sample {samples.min()} is negative; samples are counted from 0.")
    epochs, indices = np.divmod(samples, sizes)
    return permute(indices, sizes, hash_integers(epochs, seed)) if shuffle else indices


def _positive(n: ArrayLike, otherwise: str) -> Integers:
    sizes = np.asarray(n, dtype=np.int64)
    if sizes.size and sizes.min() < 1:
        raise ValueError(f"n {sizes.min()} must be positive: {otherwise}.")
    return sizes


def _permute_table(indices: NDArray[np.int64], n: int, keys: U64) -> NDArray[np.int64]:
    distinct, which = np.unique(keys, return_inverse=True)
    tables = np.argsort(hash_integers(np.arange(n), distinct[:, None]), axis=1, kind="stable")
    return tables[which, indices]


def _permute_network(indices: NDArray[np.int64], n: NDArray[np.int64], keys: U64) -> U64:
    bits = np.searchsorted(_POWERS, n).astype(np.uint64)
    out, sizes = indices.astype(np.uint64), n.astype(np.uint64)
    round_keys = hash_integers(np.arange(ROUNDS)[:, None], keys)
    walking = np.arange(out.size)  # elements whose value is still outside range(n)
    while walking.size:
        out[walking] = _network(out[walking], bits[walking], round_keys[:, walking])
        walking = walking[out[walking] >= sizes[walking]]
    return out


def _network(values: U64, bits: U64, round_keys: U64) -> U64:
    """Permute ``range(2**bits)``: each half in turn is XORed with a hash of the other.

    XOR with a function of the other half is invertible whatever the function, so every round is a
    permutation. The halves differ by a bit if ``bits`` is odd.
    """
    one = np.uint64(1)
    low_bits = bits >> one
    low_mask = (one << low_bits) - one
    high_mask = (one << (bits - low_bits)) - one
    high, low = values >> low_bits, values & low_mask
    for turn in range(0, ROUNDS, 2):
        high = high ^ (mix_bits(low ^ round_keys[turn]) & high_mask)
        low = low ^ (mix_bits(high ^ round_keys[turn + 1]) & low_mask)
    return (high << low_bits) | low
