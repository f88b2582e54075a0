"""Hashes of integers, permutations by them, and fingerprints of data: the same on every machine.

A fingerprint is a string: equal strings mean equal rows. It is JSON, with one fact per key, so that
an error can say which fact has changed.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgekit.remote.urls import Location, content_of

U64 = NDArray[np.uint64]
Integers = NDArray[np.int64]

ROUNDS = 8
"""With three or four, neighbours correlate; eight are indistinguishable from a shuffled array."""

SMALL = 256
"""Up to this size a permutation is a table made by sorting hashes.

It is cheaper than the network, which does not draw the 120 orders of five rows alike.
"""

SAMPLE_ORDER = 2
"""Incremented when the same seed yields different rows."""

_VERSION = "sample order"

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
        IndexError: If an index is outside its ``range(n)``.

    References:
        Black and Rogaway, Ciphers with arbitrary finite domains,
        https://doi.org/10.1007/3-540-45760-7_9

    Examples:
        >>> permute(range(5), 5, key=1)
        array([4, 2, 1, 0, 3])
    """
    indices, sizes, keys = np.broadcast_arrays(
        np.asarray(index, np.int64), np.asarray(n, np.int64), as_unsigned(key)
    )
    outside = (indices < 0) | (indices >= sizes)
    if outside.any():  # it would share the row of another index
        raise IndexError(f"index {indices[outside][0]} is outside range({sizes[outside][0]}).")
    out = np.empty(indices.shape, dtype=np.int64)
    for size in np.unique(sizes[sizes <= SMALL]).tolist():
        chosen = sizes == size
        out[chosen] = _permute_table(indices[chosen], size, keys[chosen])
    chosen = sizes > SMALL
    out[chosen] = _permute_network(indices[chosen], sizes[chosen], keys[chosen])
    return out


def _permute_table(indices: NDArray[np.int64], n: int, keys: U64) -> NDArray[np.int64]:
    distinct, which = np.unique(keys, return_inverse=True)
    tables = np.argsort(hash_integers(np.arange(n), distinct[:, None]), axis=1, kind="stable")
    return tables[which, indices]


def _permute_network(indices: NDArray[np.int64], n: NDArray[np.int64], keys: U64) -> U64:
    bits = np.searchsorted(2 ** np.arange(63), n).astype(np.uint64)
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


def digest(*contents: Any) -> str:
    """Hash JSON values and arrays to a string that is the same on every machine.

    Examples:
        >>> digest("a", np.array([1, 2]))[:8], digest("a", [1, 2])[:8]
        ('34f7b30d', '9702cf8e')
    """
    total = hashlib.sha256()
    for content in contents:
        if isinstance(content, np.ndarray):
            total.update(f" {content.dtype} {content.shape} ".encode())
            total.update(np.ascontiguousarray(content).data)
        else:
            total.update(f" {json.dumps(content)} ".encode())
    return total.hexdigest()


def state_facts(**facts: Any) -> str:
    """Build a fingerprint of facts, which are JSON values; None if one is unknown.

    Examples:
        >>> state_facts(files="a1", seq_len=16)
        '{"files": "a1", "seq_len": 16, "sample order": 2}'
    """
    return json.dumps({**facts, _VERSION: SAMPLE_ORDER})


def facts_of(fingerprint: Any) -> dict[str, Any] | None:
    """Return the facts of a fingerprint; None if it has none."""
    try:
        facts = json.loads(fingerprint) if isinstance(fingerprint, str) else None
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and _VERSION in facts else None


def compare_facts(then: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Name the facts that differ; unknown facts are not compared.

    Examples:
        >>> compare_facts({"files": "a", "seq_len": 16}, {"files": "a", "seq_len": 32})
        ['sequence length (16 then, 32 now)']
    """
    changed = []
    for key in dict.fromkeys([*then, *now]):
        before, after = then.get(key), now.get(key)
        if before == after or before is None or after is None:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            changed += compare_facts(before, after, f"{prefix}{key}: ")
            continue
        values = f" ({before} then, {after} now)" if isinstance(before, bool | int) else ""
        changed.append(prefix + key.replace("seq_len", "sequence length") + values)
    return changed


def tokenizer_of(folder: Location | None) -> str | None:
    """Return a checksum of the tokenizer beside a token file; None if there is none."""
    content = None if folder is None else content_of(folder / "tokenizer.json")
    return None if content is None else hashlib.sha256(content).hexdigest()[:8]
