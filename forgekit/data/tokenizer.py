"""A byte-level tokenizer, trained on the texts at hand, and texts to token ids in bounded memory.

Byte pairs over all 256 bytes encode any text, so there is no unknown token. The same texts in the
same order give the same file, byte for byte. Many texts are encoded at a time, since the tokenizer
encodes a batch in its own threads; its result takes a hundred bytes per token, so large documents
are encoded in pieces.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from forgekit.checks import brief, check_integers, quoted
from forgekit.environment import require
from forgekit.remote.urls import Location, content_of, location_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")

TOKENIZER = "tokenizer.json"
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
"""What stands beside it in a model's directory; of two that name a token the first counts."""

END_OF_TEXT = "<|endoftext|>"
"""The token that closes each document; its id is 0 in tokenizers trained here."""

SMALLEST_VOCAB = 257
"""One token for each byte and one for the end of a text."""

LARGEST_VOCAB = 2**22
"""The trainer allocates memory for all tokens at once, and aborts the process if there is none."""

RUN = 1024
"""Length of a run of one kind of characters above which a training text is split."""

AT_ONCE = 2**20
"""Characters in one batch."""

PIECE = 2**18
"""Characters of one document in one piece, where it can be split."""

# GPT-2's byte-level pre-tokenizer splits at both, so the pieces have the ids of the whole text.
_BEFORE_LINE_OR_WORD = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")

_ONE_RUN = re.compile(r"[^\W\d_]+|\d+|(?:[^\w\s]|_)+|\s+")
"""What the pre-tokenizer treats as one word: letters, digits, other signs, or white space."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-pair tokenizer; ``.save("tokenizer.json")`` keeps it.

    Training on one word takes time quadratic in its length. Words of more than about two thousand
    characters, such as encoded pictures, are therefore split.

    Args:
        texts: The training texts; consumed once.
        vocab_size: Number of tokens, the end of text included. Texts with few repetitions give
            fewer; see ``get_vocab_size()``.

    Returns:
        A tokenizer that encodes a literal ``<|endoftext|>`` in a text as plain characters, since
        only the writer of a token file may end a document.

    Raises:
        TypeError: If ``texts`` is one text, which would be read letter by letter.
        ValueError: If ``vocab_size`` is too small for all bytes, or above 2**22.

    Examples:
        >>> tokenizer = train_tokenizer(["to be or not to be"] * 2, vocab_size=264)
        >>> tokenizer.decode(tokenizer.encode("to be").ids)
        'to be'
    """
    if isinstance(texts, str):
        raise TypeError("texts is a str, whose items are characters, not texts; pass [text].")
    check_integers(vocab_size=(vocab_size, SMALLEST_VOCAB, LARGEST_VOCAB))
    tokenizers = require("tokenizers", extra="text")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    given = {"special_tokens": [END_OF_TEXT], "initial_alphabet": alphabet}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **given)
    tokenizer.train_from_iterator(split_long_words(texts), trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def split_long_words(texts: Iterable[str]) -> Iterator[str]:
    """Split texts inside words that are far longer than those of any language."""
    for text in texts:
        start = 0
        for end in range(RUN, len(text), RUN):
            if _ONE_RUN.fullmatch(text, end - RUN // 2, end + RUN // 2):
                yield text[start:end]
                start = end
        yield text[start:] if start else text


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load ``tokenizer.json``, or the one in a folder.

    Args:
        path: The file, or a folder such as ``forgekit prepare`` makes; or the URL of one of them.

    Returns:
        A tokenizer that encodes a literal ``<|endoftext|>`` as plain characters, like every special
        token, and neither truncates nor pads, whatever the file says: a limit for prompts would
        drop training text.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If the file is not a tokenizer.
    """
    file = _file_at(path)
    if (content := content_of(file)) is None:
        raise FileNotFoundError(f"{file} does not exist; `forgekit prepare` writes one.")
    tokenizers = require("tokenizers", extra="text")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{file} is not a tokenizer of the tokenizers package: {error}.") from None
    tokenizer.encode_special_tokens = True
    return without_limits(tokenizer)


def end_of_text(path: str | os.PathLike[str]) -> str:
    """Name the token that closes documents: a model's directory says it beside the tokenizer.

    Args:
        path: The file or folder; see ``load_tokenizer``.

    Returns:
        ``eos_token`` as ``transformers`` reads it from ``special_tokens_map.json`` and
        ``tokenizer_config.json``; ``<|endoftext|>`` if they name none.

    Raises:
        ValueError: If one of them is no JSON object.
    """
    file = _file_at(path)
    for beside in (file.parent / name for name in SETTINGS if file.name == TOKENIZER):
        try:
            end = json.loads(content_of(beside) or b"{}").get("eos_token")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{beside} is not a JSON object: {error}. Pass eos_token.") from None
        if end := end.get("content") if isinstance(end, dict) else end:
            return end
    return END_OF_TEXT


def _file_at(path: str | os.PathLike[str]) -> Location:
    file = location_of("the tokenizer's path", path)
    is_folder = file.is_dir() if isinstance(file, Path) else not file.endswith(".json")
    return file / TOKENIZER if is_folder else file


def without_limits(tokenizer: Any) -> Any:
    """Return a tokenizer that neither truncates nor pads; the argument stays unchanged.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``.
    """
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    copy = type(tokenizer).from_str(tokenizer.to_str())
    copy.encode_special_tokens = tokenizer.encode_special_tokens
    copy.no_truncation()
    copy.no_padding()
    return copy


def vocabulary_size(tokenizer: Any) -> int:
    """Return one more than the highest id of a tokenizer; some skip ids."""
    return max(tokenizer.get_vocab().values(), default=0) + 1


def beginning_ids(tokenizer: Any) -> list[int]:
    """List the tokens that a tokenizer's own encoding puts before each text; most have none."""
    encoding = without_limits(tokenizer).encode("a")
    added = itertools.takewhile(
        lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    )
    return [id for id, _ in added]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Look up the id of a special token.

    Raises:
        ValueError: If the tokenizer has no such special token; lists those that it has. An ordinary
            token would end documents in their middle.
    """
    added = {entry.content: id for id, entry in tokenizer.get_added_tokens_decoder().items()}
    if token in added:
        return added[token]
    raise ValueError(
        f"the tokenizer has no token {brief(token)}; its special tokens are {quoted(added)}. Pass "
        "one as eos_token."
    )


def encode_texts(
    tokenizer: Any, texts: Iterable[tuple[T, str]]
) -> Iterator[tuple[T, NDArray[np.int32]]]:
    """Encode texts in order, reading about a million characters ahead.

    The ids are those of the whole text, behind those of ``beginning_ids``. A byte-level tokenizer,
    such as those trained here, gets a text of more than 2**18 characters in pieces, split before a
    line or a word, where it splits too. Any other one gets it whole: Metaspace, for one, begins
    each piece with a marker.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``. Its truncation and padding are ignored.
        texts: Pairs of any label and a text.

    Yields:
        The label, and the ids of its text, ``[s]`` int32.

    Examples:
        >>> tokenizer = train_tokenizer(["to be"], vocab_size=257)
        >>> [(name, ids.tolist()) for name, ids in encode_texts(tokenizer, [("a", "be")])]
        [('a', [66, 69])]
    """
    tokenizer = without_limits(tokenizer)
    begin = np.asarray(beginning_ids(tokenizer), dtype=np.int32)
    ids: list[NDArray[np.int32]] = []
    piece = PIECE if _splits_at_words(tokenizer) else sys.maxsize
    for batch in _batches(_pieces(texts, piece)):
        encoded = tokenizer.encode_batch_fast([t for _, t, _ in batch], add_special_tokens=False)
        for (label, _, is_last), encoding in zip(batch, encoded, strict=True):
            ids.append(np.asarray(encoding.ids, dtype=np.int32))
            if is_last:
                whole = ids[0] if len(ids) == 1 else np.concatenate(ids)
                yield label, np.concatenate([begin, whole]) if len(begin) and len(whole) else whole
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
    """Split long texts where the tokenizer splits as well; say which piece is the last."""
    for label, text in texts:
        start = 0
        while len(text) - start > longest:
            split = _BEFORE_LINE_OR_WORD.search(text, start + longest // 2)
            if split is None:
                break
            yield label, text[start : split.start()], False
            start = split.start()
        yield label, text[start:] if start else text, True


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
