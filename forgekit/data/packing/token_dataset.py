"""Rows for training: windows over a token file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import TensorDict

from forgekit.data.corpus.token_files import TokenFile, open_tokens
from forgekit.data.fingerprint import state_facts, tokenizer_of
from forgekit.data.samples import IGNORED, MOST_ROWS, PADDING
from forgekit.inputs import check_integers


def token_dataset(
    path: str | os.PathLike[str] | TokenFile, seq_len: int = 1024, *, doc_ids: bool = False
) -> TokenDataset:
    """Divide a token file into windows of ``seq_len`` targets that overlap by one token.

    So every token but the very first is a target exactly once. The first token of a document is the
    target of the token that closes the document before. The last window may be short; it is padded
    with the closing token and labels of -100.

    Args:
        path: What ``write_tokens`` wrote, or what ``open_tokens`` returned.
        seq_len: Positions in a row.
        doc_ids: Add ``doc_ids``, the number of the document within its row (-1 on padding), and
            ``position_ids``, which restart where a document starts and at the start of the row.

    Returns:
        A map-style dataset: ``[i]`` is a TensorDict of ``[s]`` int64 tensors ``input_ids`` and
        ``labels``; ``labels[t]`` is the token after ``input_ids[t]``.

    Raises:
        ValueError: If ``seq_len`` is not positive or the file holds fewer than two tokens.

    Examples:
        >>> import tempfile
        >>> from forgekit.data.corpus.token_files import write_tokens
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = write_tokens(f"{folder}/a", [[1, 2], [3]], vocab_size=4, eos_id=0)
        ...     rows = token_dataset(file, seq_len=3)
        ...     [(row["input_ids"].tolist(), row["labels"].tolist()) for row in rows]
        [([1, 2, 0], [2, 0, 3]), ([3, 0, 0], [0, -100, -100])]
    """
    check_integers(seq_len=(seq_len, 1, MOST_ROWS))
    file = path if isinstance(path, TokenFile) else open_tokens(path)
    if file.tokens < 2:
        raise ValueError(
            f"{file.path} holds {file.tokens} token; a row needs one to read and one to predict."
        )
    return TokenDataset(file, seq_len, doc_ids)


def check_vocabulary(dataset: Any, vocab_size: int) -> None:
    """Refuse a model whose vocabulary is too small for a dataset.

    Args:
        dataset: Has a ``vocab_size``, or as a mixture several ``datasets`` that do.
        vocab_size: The model's number of token ids.

    Raises:
        ValueError: If the dataset may hold larger ids: an embedding would fail on the first one.
    """
    check_integers(vocab_size=(vocab_size, 1))
    for part in getattr(dataset, "datasets", (dataset,)):
        if vocab_size < part.vocab_size:
            file = getattr(part, "file", None)
            raise ValueError(
                f"vocab_size {vocab_size} of the model is below the {part.vocab_size} of "
                f"{'its documents' if file is None else file.path}; set "
                f"model.vocab_size={part.vocab_size} or more."
            )


@attrs.frozen(eq=False)
class TokenDataset:
    """Windows over a token file; ``token_dataset`` makes one.

    Attributes:
        file: The token file.
        seq_len: Positions in a row.
        doc_ids: Whether rows carry ``doc_ids`` and ``position_ids``.
    """

    file: TokenFile
    seq_len: int
    doc_ids: bool = False

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        return self.file.vocab_size

    @property
    def eos_id(self) -> int:
        """The id that closes each document."""
        return self.file.eos_id

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, from the metadata's ``text_bytes``; None if it has none."""
        return self.file.bytes_per_token

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the rows: equal strings mean the same row at each index."""
        hashed = hashlib.sha256(f"{self.file.fingerprint} windows {self.seq_len}".encode())
        return state_facts(
            hashed.hexdigest(),
            files=self.file.fingerprint,
            tokenizer=tokenizer_of(self.file.path),
            seq_len=self.seq_len,
            doc_ids=self.doc_ids,
        )

    def held_out(self) -> TokenDataset | None:
        """Open the held-out documents that ``forgekit prepare`` wrote beside these.

        Returns:
            Their windows, of the same length; None if the token file has no ``heldout`` folder.
        """
        file = self.file.held_out()
        return None if file is None else attrs.evolve(self, file=file)

    def __len__(self) -> int:
        return -(-(self.file.tokens - 1) // self.seq_len)

    def __getitem__(self, row: int) -> TensorDict:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> TensorDict:
        """Build the batch of these rows in one go, ``batch_size=[b]``."""
        tokens = np.full((len(rows), self.seq_len + 1), self.eos_id, dtype=np.int64)
        lengths = [self._targets(int(row)) for row in rows]
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            self.file.read_into(tokens[i, : length + 1], int(row) * self.seq_len)
        batch = {"input_ids": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}
        for i, length in enumerate(lengths):
            batch["labels"][i, length:] = IGNORED
        if self.doc_ids:
            doc_ids = batch["doc_ids"] = np.full_like(batch["labels"], PADDING)
            position_ids = batch["position_ids"] = np.zeros_like(doc_ids)
            for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                starts = self.file.document_starts(int(row) * self.seq_len, length)
                sizes = np.diff(starts, append=length)
                doc_ids[i, :length] = np.repeat(np.arange(len(starts)), sizes)
                position_ids[i, :length] = np.arange(length) - np.repeat(starts, sizes)
        tensors = {key: torch.from_numpy(array) for key, array in batch.items()}
        return TensorDict(tensors, batch_size=[len(rows)])

    def _targets(self, row: int) -> int:
        """Count the targets of a row: ``seq_len``, or fewer in the last one."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} must lie in range({len(self)}) of {self.file.path}.")
        return min(self.seq_len, self.file.tokens - 1 - row * self.seq_len)
