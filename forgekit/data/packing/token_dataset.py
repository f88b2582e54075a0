"""Rows for training, cut out of a token file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from forgekit.data.corpus.token_files import TokenFile, open_tokens
from forgekit.data.fingerprint import state_facts, tokenizer_of
from forgekit.data.samples import IGNORED
from forgekit.inputs import check_integers

__all__ = ["TokenDataset", "check_vocabulary", "token_dataset"]

LONGEST = 2**31
"""Places in a row, at most: a row is an array in memory."""


def token_dataset(
    path: str | os.PathLike[str] | TokenFile, seq_len: int = 1024, *, doc_ids: bool = False
) -> TokenDataset:
    """Cut a token file into windows of ``seq_len`` that overlap by one token.

    So every token but the very first is a target exactly once, those that open a document included:
    they follow the token that closed the one before. The last window may be short; it is filled
    with the closing token and labels of -100.

    Args:
        path: What ``write_tokens`` wrote, or what ``open_tokens`` returned.
        seq_len: Places in a row.
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
    check_integers(seq_len=(seq_len, 1, LONGEST))
    file = path if isinstance(path, TokenFile) else open_tokens(path)
    if file.tokens < 2:
        raise ValueError(
            f"{file.path} holds {file.tokens} token; a row needs one to read and one to predict."
        )
    return TokenDataset(file, seq_len, doc_ids)


def check_vocabulary(dataset: Any, vocab_size: int) -> None:
    """Refuse a model whose vocabulary is too small for a dataset.

    Args:
        dataset: Has a ``vocab_size``; of a mixture each of its data sets.
        vocab_size: Number of token ids that the model knows.

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
        seq_len: Places in a row.
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
        text_bytes = self.file.metadata.get("text_bytes")
        return None if text_bytes is None else text_bytes / self.file.tokens

    @property
    def fingerprint(self) -> str:
        """Names the rows: the same string means the same row at each index."""
        hashed = hashlib.sha256(f"{self.file.fingerprint} windows {self.seq_len}".encode())
        return state_facts(
            hashed.hexdigest(),
            files=self.file.fingerprint,
            tokenizer=tokenizer_of(self.file.path),
            seq_len=self.seq_len,
            doc_ids=self.doc_ids,
        )

    def held_out(self) -> TokenDataset | None:
        """Open the held-out documents that ``forgekit prepare`` put beside these, if it did.

        Returns:
            Their windows, cut like these; None if the token file has no ``heldout`` folder.
        """
        path = self.file.path / "heldout"
        return attrs.evolve(self, file=open_tokens(path)) if path.is_dir() else None

    def __len__(self) -> int:
        return -(-(self.file.tokens - 1) // self.seq_len)

    def __getitem__(self, row: int) -> TensorDict:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> TensorDict:
        """Build the batch of these rows in one go, ``batch_size=[b]``."""
        tokens = np.full((len(rows), self.seq_len + 1), self.eos_id, dtype=np.int64)
        lengths = [self._length(int(row)) for row in rows]
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            self.file.read_into(tokens[place, : length + 1], int(row) * self.seq_len)
        batch = {"input_ids": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}
        for place, length in enumerate(lengths):
            batch["labels"][place, length:] = IGNORED
        if self.doc_ids:
            batch |= self._documents(rows, lengths)
        tensors = {key: torch.from_numpy(array) for key, array in batch.items()}
        return TensorDict(tensors, batch_size=[len(rows)])

    def _length(self, row: int) -> int:
        """Count the targets of a row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} must lie in range({len(self)}) of {self.file.path}.")
        return min(self.seq_len, self.file.tokens - 1 - row * self.seq_len)

    def _documents(
        self, rows: Sequence[int], lengths: Sequence[int]
    ) -> dict[str, NDArray[np.int64]]:
        doc_ids = np.full((len(rows), self.seq_len), -1, dtype=np.int64)
        position_ids = np.zeros_like(doc_ids)
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            starts = self.file.document_starts(int(row) * self.seq_len, length)
            sizes = np.diff(starts, append=length)
            doc_ids[place, :length] = np.repeat(np.arange(len(starts)), sizes)
            position_ids[place, :length] = np.arange(length) - np.repeat(starts, sizes)
        return {"doc_ids": doc_ids, "position_ids": position_ids}
