"""Texts to token ids, many at a time, in bounded memory.

The tokenizer encodes a batch in its own threads, so small documents are encoded together. Its
result takes a hundred bytes per token, so large documents are encoded in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from forgekit.data.corpus.tokenizer import without_limits

T = TypeVar("T")

AT_ONCE = 2**20
"""Characters in one batch."""

PIECE = 2**18
"""Most characters of one document in one piece."""

# A byte-level pre-tokenizer splits at both, so the pieces have the ids of the whole text.
_BEFORE_LINE = re.compile(r"(?<=\S\n)(?=\S)")
_BEFORE_WORD = re.compile(r"(?<=\S)(?= \S)")


def encode_texts(
    tokenizer: Any, texts: Iterable[tuple[T, str]]
) -> Iterator[tuple[T, NDArray[np.int32]]]:
    """Encode texts in order, reading about a million characters ahead.

    A text longer than 2**18 characters is split before a line, else before a word. A byte-level
    tokenizer splits there too, so the ids are those of the whole text.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``. Its truncation and padding are ignored.
        texts: Pairs of any label and a text.

    Yields:
        The label, and the ids of its text, ``[s]`` int32.

    Examples:
        >>> from forgekit.data.corpus.tokenizer import train_tokenizer
        >>> tokenizer = train_tokenizer(["to be"], vocab_size=257)
        >>> [(name, ids.tolist()) for name, ids in encode_texts(tokenizer, [("a", "be")])]
        [('a', [66, 69])]
    """
    tokenizer = without_limits(tokenizer)
    ids: list[NDArray[np.int32]] = []
    for batch in _batches(_pieces(texts)):
        encoded = tokenizer.encode_batch_fast(
            [text for _, text, _ in batch], add_special_tokens=False
        )
        for (label, _, is_last), encoding in zip(batch, encoded, strict=True):
            ids.append(np.asarray(encoding.ids, dtype=np.int32))
            if is_last:
                yield label, ids[0] if len(ids) == 1 else np.concatenate(ids)
                ids = []


def _pieces(texts: Iterable[tuple[T, str]]) -> Iterator[tuple[T, str, bool]]:
    for label, text in texts:
        start = 0
        while len(text) - start > PIECE:
            stop = _split_point(text, start + PIECE // 2, start + PIECE)
            yield label, text[start:stop], False
            start = stop
        yield label, text[start:] if start else text, True


def _split_point(text: str, earliest: int, latest: int) -> int:
    """Find where the tokenizer would split as well; ``latest`` if there is no such position."""
    for pattern in (_BEFORE_LINE, _BEFORE_WORD):
        if found := pattern.search(text, earliest, latest):
            return found.start()
    return latest


def _batches(pieces: Iterable[tuple[T, str, bool]]) -> Iterator[list[tuple[T, str, bool]]]:
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[1])
        if characters >= AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
