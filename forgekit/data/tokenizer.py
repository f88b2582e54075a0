"""A byte-level tokenizer, trained here from the texts at hand.

Byte pairs over all 256 bytes can write any text, so there is no unknown token. The same texts in
the same order give the same file, byte for byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from forgekit.data.optional import require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["END_OF_TEXT", "load_tokenizer", "token_id", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
"""The token that closes each document; its id is 0 in tokenizers trained here."""

SMALLEST = 257
"""One token for each byte and one for the end of a text."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-pair tokenizer; ``.save("tokenizer.json")`` keeps it.

    Args:
        texts: The training texts; consumed once.
        vocab_size: Number of tokens, the end of text included. Texts with few repetitions give
            fewer: read ``get_vocab_size()``.

    Returns:
        A tokenizer that reads a literal ``<|endoftext|>`` inside a text as plain characters, since
        only the writer of a token file may end a document.

    Raises:
        ValueError: If ``vocab_size`` has no room for all bytes.

    Examples:
        >>> tokenizer = train_tokenizer(["to be or not to be"] * 2, vocab_size=264)
        >>> tokenizer.decode(tokenizer.encode("to be").ids)
        'to be'
    """
    if isinstance(texts, str):
        raise TypeError(
            "texts is one str, read letter by letter; pass an iterable of texts: [text]."
        )
    if vocab_size < SMALLEST:
        raise ValueError(
            f"vocab_size {vocab_size} must be at least {SMALLEST}: 256 bytes and {END_OF_TEXT}."
        )
    tokenizers = require("tokenizers", extra="text")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load ``tokenizer.json``, or the one in a folder.

    Args:
        path: The file, or a folder such as ``forgekit prepare`` makes.

    Returns:
        A tokenizer that reads a literal ``<|endoftext|>`` as plain characters.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If the file is not a tokenizer.
    """
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist. `forgekit prepare` writes one beside the tokens."
        )
    try:
        tokenizer = require("tokenizers", extra="text").Tokenizer.from_file(str(file))
    except ImportError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(
            f"{file} is not a tokenizer: {error}. Expected what the tokenizers package saves."
        ) from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Look up the id of a special token.

    Raises:
        ValueError: If the tokenizer has no such token; names those that it has.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        special = [f'"{entry.content}"' for entry in tokenizer.get_added_tokens_decoder().values()]
        raise ValueError(
            f'the tokenizer has no token "{token}"; its special tokens are '
            f"{', '.join(special) or 'none'}. Name the one that closes a document: eos_token."
        )
    return found
