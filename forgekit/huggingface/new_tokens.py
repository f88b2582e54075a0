"""New tokens for pretrained weights, in the tokenizer and as rows of the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import attrs

from forgekit.checks import brief
from forgekit.data.chat import load_tokenizer
from forgekit.data.tokenizer import vocabulary_size
from forgekit.environment import require
from forgekit.huggingface.load import huggingface_spec
from forgekit.model.transformer import TransformerSpec

MULTIPLE = 64
"""Multiple of rows if there are new ones: usual numbers of tensor-parallel ranks divide it."""


def read_base(
    directory: str | os.PathLike[str],
    new_tokens: Sequence[str] = (),
    *,
    has_adapters: bool = False,
) -> tuple[Any, TransformerSpec]:
    """Read tokenizer and spec of a base, and add tokens to both.

    A new token is an ordinary one that is never split: it stays when an answer is decoded without
    special tokens. It takes the next id. Where the model has no row for that yet it gets one, which
    ``load_huggingface`` fills with the mean of the others; its rows are padded to a multiple of 64.

    Args:
        directory: A Hugging Face directory with a tokenizer.
        new_tokens: Texts of tokens that its tokenizer has not.
        has_adapters: Whether adapters alone are to be trained.

    Returns:
        The tokenizer, of transformers; without new tokens the directory itself. And the spec.

    Raises:
        ValueError: If a new token is empty or there already, adapters alone are to be trained
            beside new ones, or there is no tokenizer.
        CheckpointError: As ``huggingface_spec``.
    """
    spec = huggingface_spec(directory)
    if not new_tokens:
        return directory, spec
    if has_adapters:
        raise ValueError(
            "adapters do not train the rows of new_tokens. Set lora.rank=0, or train the tokens "
            "first and add adapters to that export."
        )
    added = require("transformers", extra="hf").AddedToken
    tokenizer = load_tokenizer(directory)
    for token in new_tokens:
        if not token or token in tokenizer.get_vocab():
            raise ValueError(
                f"new_tokens has {brief(token)}, which is empty or in the tokenizer of {directory} "
                "already. Leave it out."
            )
        tokenizer.add_tokens([added(token, normalized=False)])
    if (tokens := vocabulary_size(tokenizer)) > spec.tokens:
        rows = -(-max(tokens, spec.vocab_size) // MULTIPLE) * MULTIPLE
        spec = attrs.evolve(spec, vocab_size=rows, unpadded_vocab_size=tokens)
    return tokenizer, spec
