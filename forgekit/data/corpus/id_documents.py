"""Documents of token ids: those of a token file, and random ones."""

from __future__ import annotations

import os
from collections.abc import Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from forgekit.data.corpus.token_files import TokenFile, open_tokens
from forgekit.data.documents.protocol import Record
from forgekit.data.hashing import hash_integers
from forgekit.inputs import LARGEST, check_integers

__all__ = ["RandomDocuments", "TokenDocuments", "random_documents", "token_documents"]


def token_documents(path: str | os.PathLike[str] | TokenFile) -> TokenDocuments:
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
    return TokenDocuments(path if isinstance(path, TokenFile) else open_tokens(path))


@attrs.frozen
class TokenDocuments:
    """The documents of a token file; ``token_documents`` makes one."""

    file: TokenFile

    @property
    def fingerprint(self) -> str:
        """The token file's."""
        return self.file.fingerprint

    @property
    def size(self) -> int | None:
        """Bytes of tokens."""
        return sum(shard.nbytes for shard in self.file.shards)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self._ids(number) for number in range(self.file.documents))

    def read(
        self, position: int | None = None, *, part: int = 0, parts: int = 1
    ) -> Iterator[Record]:
        """Yield this part's documents from a number on; see ``Documents``."""
        width = self.file.shards[0].itemsize
        for number in range(position or 0, self.file.documents):
            if number % parts == part:
                done = int(self.file.offsets[number + 1]) * width
                name = f"document {number} of {self.file.path}"
                yield Record(name, self._ids(number), number + 1, done)

    def _ids(self, number: int) -> NDArray[np.int64]:
        start, stop = self.file.offsets[number : number + 2].tolist()
        return self.file.read(start, stop - 1)


def random_documents(
    vocab_size: int, count: int, *, longest: int = 1024, shortest: int = 1, seed: int = 0
) -> RandomDocuments:
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
    return RandomDocuments(vocab_size, count, shortest, longest, seed)


@attrs.frozen
class RandomDocuments:
    """Documents of random tokens; ``random_documents`` makes them."""

    vocab_size: int
    count: int
    shortest: int
    longest: int
    seed: int

    @property
    def fingerprint(self) -> str:
        """Identifies the tokens."""
        return str(self)

    @property
    def size(self) -> int | None:
        """Unknown: nothing is read."""
        return None

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self[number] for number in range(self.count))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        if not 0 <= number < self.count:
            raise IndexError(f"document {number} must lie in range({self.count}).")
        key = hash_integers(number, self.seed)
        length = self.shortest + int(key) % (self.longest - self.shortest + 1)
        return (hash_integers(np.arange(length), key) % np.uint64(self.vocab_size)).astype(np.int64)

    def read(
        self, position: int | None = None, *, part: int = 0, parts: int = 1
    ) -> Iterator[Record]:
        """Yield this part's documents from a number on; see ``Documents``."""
        for number in range(position or 0, self.count):
            if number % parts == part:
                yield Record(f"random document {number}", self[number], number + 1)
