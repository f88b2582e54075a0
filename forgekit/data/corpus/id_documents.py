"""Documents of token ids: those of a token file, and random ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import attrs
import numpy as np
from numpy.typing import NDArray

from forgekit.data.corpus.token_files import TokenFile, open_tokens
from forgekit.data.documents.protocol import Record
from forgekit.data.hashing import hash_integers
from forgekit.inputs import LARGEST, check_integers


@attrs.frozen
class NumberedDocuments:
    """Documents of token ids that are found by their number, which is also a reader's position.

    Attributes:
        source: Where they come from, for the names of documents.
        fingerprint: Identifies their tokens.
        count: How many there are.
        ids_of: Returns the ids of a number, ``[s]`` int64.
    """

    source: str
    fingerprint: str
    count: int
    ids_of: Callable[[int], NDArray[np.int64]] = attrs.field(repr=False)

    size = None  # only texts have their progress shown

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return map(self.ids_of, range(self.count))

    def read(
        self, position: int | None = None, *, part: int = 0, parts: int = 1
    ) -> Iterator[Record]:
        """Yield this part's documents from a number on; see ``Documents``."""
        for number in range(position or 0, self.count):
            if number % parts == part:
                name = f"{self.source}, document {number}"
                yield Record(name, self.ids_of(number), number + 1)


def token_documents(path: str | os.PathLike[str] | TokenFile) -> NumberedDocuments:
    """Read the documents of a token file, without the ids that close them.

    Args:
        path: What ``write_tokens`` wrote, or what ``open_tokens`` returned.

    Returns:
        A source for ``stream_documents``. Iterating it gives arrays.

    Examples:
        >>> import tempfile
        >>> from forgekit.data.corpus.token_files import write_tokens
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = write_tokens(f"{folder}/a", [[1, 2], [3]], vocab_size=4, eos_id=0)
        ...     [ids.tolist() for ids in token_documents(f"{folder}/a")]
        [[1, 2], [3]]
    """
    file = path if isinstance(path, TokenFile) else open_tokens(path)
    ids_of = partial(_ids_in_file, file)
    return NumberedDocuments(str(file.path), file.fingerprint, file.documents, ids_of)


def _ids_in_file(file: TokenFile, number: int) -> NDArray[np.int64]:
    start, stop = file.offsets[number : number + 2].tolist()
    return file.read(start, stop - 1)


def random_documents(
    vocab_size: int, count: int, *, longest: int = 1024, shortest: int = 1, seed: int = 0
) -> NumberedDocuments:
    """Make documents of random tokens, to try a model or a machine without data.

    Args:
        vocab_size: Ids are uniform over ``range(vocab_size)``.
        count: Number of documents.
        longest: Most tokens in a document.
        shortest: Fewest tokens in a document; lengths are uniform in between.
        seed: Selects the tokens. The same seed gives the same tokens on every machine.

    Returns:
        A source for ``stream_documents``. Iterating it gives arrays, for ``write_tokens``.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        >>> [ids.tolist() for ids in random_documents(100, 2, longest=4)]
        [[38, 26, 65, 59], [14, 28, 98, 53]]
    """
    check_integers(
        vocab_size=(vocab_size, 1),
        count=(count, 1),
        shortest=(shortest, 1),
        longest=(longest, 1),
        seed=(seed, -LARGEST),
    )
    check_integers(longest=(longest, shortest))
    # Checkpoints of streams hold this text: it must not change.
    made_of = f"RandomDocuments({vocab_size=}, {count=}, {shortest=}, {longest=}, {seed=})"
    ids_of = partial(_random_ids, vocab_size, shortest, longest, seed)
    return NumberedDocuments("random tokens", made_of, count, ids_of)


def _random_ids(
    vocab_size: int, shortest: int, longest: int, seed: int, number: int
) -> NDArray[np.int64]:
    key = hash_integers(number, seed)
    length = shortest + int(key) % (longest - shortest + 1)
    return (hash_integers(np.arange(length), key) % np.uint64(vocab_size)).astype(np.int64)
