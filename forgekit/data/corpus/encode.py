"""Texts to token ids, many at a time, in bounded memory.

The tokenizer encodes a batch in its own threads, so small documents are encoded together. Its
result takes a hundred bytes per token, so large documents are encoded in pieces.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from forgekit.data.corpus.tokenizer import without_limits

T = TypeVar("T")

AT_ONCE = 2**20
"""Characters in one batch."""

PIECE = 2**18
"""Characters of one document in one piece, where it can be split."""

# GPT-2's byte-level pre-tokenizer splits at both, so the pieces have the ids of the whole text.
_BEFORE_LINE = re.compile(r"(?<=\S\n)(?=\S)")
_BEFORE_WORD = re.compile(r"(?<=\S)(?= \S)")


def encode_texts(
    tokenizer: Any, texts: Iterable[tuple[T, str]]
) -> Iterator[tuple[T, NDArray[np.int32]]]:
    """Encode texts in order, reading about a million characters ahead.

    The ids are those of the whole text. A byte-level tokenizer, such as those trained here, gets a
    text of more than 2**18 characters in pieces, split before a line or a word, where it splits
    too. Any other one gets it whole: Metaspace, for one, begins each piece with a marker.

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
    piece = PIECE if _splits_at_words(tokenizer) else sys.maxsize
    for batch in _batches(_pieces(texts, piece)):
        encoded = tokenizer.encode_batch_fast(
            [text for _, text, _ in batch], add_special_tokens=False
        )
        for (label, _, is_last), encoding in zip(batch, encoded, strict=True):
            ids.append(np.asarray(encoding.ids, dtype=np.int32))
            if is_last:
                yield label, ids[0] if len(ids) == 1 else np.concatenate(ids)
                ids = []


def _splits_at_words(tokenizer: Any) -> bool:
    """Whether the tokenizer splits every text before words and lines, as GPT-2's does."""
    facts = json.loads(tokenizer.to_str())
    splits = facts["pre_tokenizer"] or {}
    is_byte_level = splits.get("type") == "ByteLevel" and splits.get("use_regex", True)
    # A marker before each text, or a word with a space in it, would tell pieces from the whole.
    is_plain = not splits.get("add_prefix_space") and facts["normalizer"] is None
    return is_byte_level and is_plain and all(token["special"] for token in facts["added_tokens"])


def _pieces(texts: Iterable[tuple[T, str]], longest: int) -> Iterator[tuple[T, str, bool]]:
    for label, text in texts:
        start = 0
        while len(text) - start > longest:
            stop = _split_point(text, start + longest // 2, start + longest)
            if stop is None:
                break
            yield label, text[start:stop], False
            start = stop
        yield label, text[start:] if start else text, True


def _split_point(text: str, earliest: int, latest: int) -> int | None:
    """Find where the tokenizer splits as well, behind ``latest`` if there is none before."""
    for pattern, *end in ((_BEFORE_LINE, latest), (_BEFORE_WORD, latest), (_BEFORE_WORD,)):
        if found := pattern.search(text, earliest, *end):
            return found.start()
    return None


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
