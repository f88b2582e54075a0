"""Documents: one protocol for all sources, and those in memory, random, and of Hugging Face.

A source is a value: it holds what to read and no position. ``read(position)`` yields records, and
each record holds the position after it, in plain JSON values. Reading resumes exactly from any
record's ``after``. The same source can be read twice, or by several readers that share the
documents: reader ``part`` of ``parts`` gets every ``parts``-th.

A Hugging Face dataset resumes by its own ``state_dict``. That is exact with one exception:
a shuffle buffer is refilled instead of restored, so documents are lost. Such a dataset is refused.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast, get_args

import attrs
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from forgekit.checks import check_choice, path_of, quoted
from forgekit.data.batch import IGNORED, TEACHER
from forgekit.environment import require
from forgekit.hashing import digest, hash_integers

Content: TypeAlias = "str | NDArray[Any]"
Errors: TypeAlias = Literal["raise", "skip"]

HASHED = 1000
"""Documents that stand for a collection of unknown length."""

BROKEN_NAMED = 10
"""Broken documents that are named in the log; the others are counted."""

ROWS_AT_ONCE = 256
"""Rows of a dataset in memory."""


@attrs.frozen
class Record:
    """One document as it was read.

    Attributes:
        name: Where it was found, for error messages: a file, a line, a row.
        content: Its text, or its token ids, ``[s]`` int64 or as ``check_document`` returns them
            with a teacher's rows; None if it is broken.
        after: The position after it; a JSON value that only its source interprets.
        problem: Why it could not be read. Only sources with ``errors="skip"`` yield such records.
    """

    name: str
    content: Content | None
    after: Any
    problem: str | None = None


class Documents(Protocol):
    """What ``prepare`` and ``stream_documents`` read: any class with these three members."""

    @property
    def fingerprint(self) -> str:
        """Names the content: files, sizes, settings. Other documents, another fingerprint."""
        ...

    @property
    def size(self) -> int | None:
        """Bytes to read in all, of which a tokenizer reads a sample; None if unknown."""
        ...

    def read(self, position: Any = None, *, part: int = 0, parts: int = 1) -> Iterator[Record]:
        """Read from a position, the ``after`` of an earlier record; None is the start.

        Args:
            position: Of a record that the same ``part`` of the same ``parts`` has read.
            part: This reader's number.
            parts: Number of readers that share the documents.
        """
        ...


def as_documents(documents: Documents | Iterable[Any]) -> Documents:
    """Make a source of any collection that can be iterated again: texts, arrays, or pairs.

    Args:
        documents: A source, which is returned unchanged, or a collection of texts, 1-D arrays of
            token ids, or pairs of a name and one of these. A position in a collection is a count,
            so resuming iterates over everything before it.

    Raises:
        TypeError: If it is an iterator, which can be read only once, or no collection at all.

    Examples:
        >>> [(record.name, record.after) for record in as_documents(["a", "b", "c"]).read(1)]
        [('document 1', 2), ('document 2', 3)]
    """
    if hasattr(documents, "read") and hasattr(documents, "fingerprint"):
        return cast(Documents, documents)
    is_text = isinstance(documents, str)
    if is_text or not isinstance(documents, Iterable) or iter(documents) is documents:
        raise TypeError(
            f"documents is a {type(documents).__name__}; pass a list, or a source such as "
            "text_documents(paths): an iterator can be read only once."
        )
    return _Collection(documents)


@attrs.frozen
class _Collection:
    """Documents in any object that can be iterated repeatedly."""

    items: Iterable[Any]

    size = None

    @property
    def fingerprint(self) -> str:
        """Hash of the contents; of a collection without a length, of the first ones."""
        most = None if isinstance(self.items, Sized) else HASHED
        return digest(*(record.content for record in itertools.islice(self.read(), most)))

    def read(
        self, position: int | None = None, *, part: int = 0, parts: int = 1
    ) -> Iterator[Record]:
        for number, item in enumerate(self.items):
            if number >= (position or 0) and number % parts == part:
                pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
                name, content = item if pair else (f"document {number}", item)
                ids = content if isinstance(content, str) else np.asarray(content)
                yield Record(name, ids, number + 1)


def random_documents(
    vocab_size: int, count: int, *, longest: int = 1024, shortest: int = 1, seed: int = 0
) -> list[NDArray[np.int64]]:
    """Make documents of random tokens, to try a model or a machine without data.

    Args:
        vocab_size: Ids are uniform over ``range(vocab_size)``.
        count: Number of documents.
        longest: Most tokens in a document.
        shortest: Fewest tokens in a document; lengths are uniform in between.
        seed: Selects the tokens. The same seed gives the same tokens on every machine.

    Returns:
        ``[s]`` token ids of each, in memory, for ``stream_documents`` and ``write_tokens``.

    Examples:
        >>> [ids.tolist() for ids in random_documents(100, 2, longest=4)]
        [[38, 26, 65, 59], [14, 28, 98, 53]]
    """
    documents = []
    for number in range(count):
        key = hash_integers(number, seed)
        positions = np.arange(shortest + int(key) % (longest - shortest + 1))
        ids = hash_integers(positions, key) % np.uint64(vocab_size)
        documents.append(ids.astype(np.int64))
    return documents


def huggingface_documents(
    dataset: Any,
    *,
    config: str | None = None,
    split: str = "train",
    streaming: bool = True,
    text_key: str = "text",
    errors: Errors = "raise",
) -> HuggingFaceDocuments:
    """Read documents out of a Hugging Face dataset.

    Args:
        dataset: A ``Dataset``, an ``IterableDataset``, a folder that ``save_to_disk`` wrote, or an
            argument of ``load_dataset``: a name on the hub or a folder of files. Folders need no
            network.
        config: The configuration of a named dataset that has several.
        split: The split, if there are several.
        streaming: Read a named dataset during its download instead of after it.
        text_key: The column of the text.
        errors: Whether rows without a text raise or are skipped; see ``text_documents``.

    Returns:
        The documents, for ``prepare`` and ``stream_documents``.

    Raises:
        ImportError: If ``datasets`` is not installed.
        ValueError: If there is no such column or split, or the dataset has a shuffle buffer.

    Examples:
        >>> import datasets
        >>> rows = datasets.Dataset.from_dict({"text": ["once", "upon"]})
        >>> list(huggingface_documents(rows))
        [('row 0', 'once'), ('row 1', 'upon')]
    """
    datasets = require("datasets", extra="data")
    check_choice("errors", errors, get_args(Errors))
    identity = ""
    if isinstance(dataset, str | os.PathLike):
        identity = f"{dataset} {config} {split}"
        folder = path_of("the dataset's name", dataset)
        if any(Path(folder, file).is_file() for file in ("state.json", "dataset_dict.json")):
            dataset = datasets.load_from_disk(folder)
        else:
            dataset = datasets.load_dataset(str(dataset), config, split=split, streaming=streaming)
    if isinstance(dataset, dict):
        if split not in dataset:
            raise ValueError(f'the dataset has no split "{split}"; it has {quoted(dataset)}.')
        dataset = dataset[split]
    dataset = dataset.with_format(None)
    if dataset.column_names is not None:  # else they are known only on reading
        check_column("the dataset", text_key, dataset.column_names)
        dataset = dataset.select_columns([text_key])  # the others are never decoded
    is_whole = isinstance(dataset, datasets.Dataset)
    name = dataset._fingerprint if is_whole else dataset.info.dataset_name
    fingerprint = f"{name} {dataset.info.version} {dataset.split} {text_key} {identity}"
    dataset = dataset.to_iterable_dataset() if is_whole else dataset
    _check_stream(dataset)
    return HuggingFaceDocuments(dataset, text_key, errors, fingerprint)


@attrs.frozen
class HuggingFaceDocuments:
    """Documents in a Hugging Face dataset; ``huggingface_documents`` makes one.

    A position is ``[row, state, read]``: the row; the dataset's own state, None at its start; and
    the rows read since.

    Attributes:
        dataset: The dataset, to be read in its order.
        text_key: The column of the text.
        errors: Whether rows without a text raise or are skipped.
        fingerprint: Identifies the dataset: by its own fingerprint or, if streamed, by its name.
    """

    dataset: Any = attrs.field(repr=False)
    text_key: str
    errors: Errors
    fingerprint: str

    size = None  # bytes are unknown before the dataset is read

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((r.name, r.content) for r in self.read() if isinstance(r.content, str))

    def read(self, position: Any = None, *, part: int = 0, parts: int = 1) -> Iterator[Record]:
        """Yield this part's documents from a position on; see ``Documents``.

        The dataset is divided by its files where their number allows it, else by rows: also where
        files alone would have other first rows than the whole, after ``take`` or ``skip``.
        """
        return read_texts(self._rows(position, part, parts), self.errors)

    def _rows(self, position: Any, part: int, parts: int) -> Iterator[Located]:
        from datasets.distributed import split_dataset_by_node

        by_rows = not set(_chain(self.dataset._ex_iterable)) <= set(_BY_FILES)
        suffix = f" of part {part} of {parts}" if parts > 1 and not by_rows else ""
        rows = split_dataset_by_node(self.dataset, *((0, 1) if by_rows else (part, parts)))
        row, state, read = position or (0, None, 0)
        if state is not None:
            rows.load_state_dict(state)
        row, since = row - read, 0
        # Not iter(rows): in a worker of torch's DataLoader it would divide the files again.
        for batch in rows.iter(ROWS_AT_ONCE):
            check_column("the dataset", self.text_key, batch)
            for text in batch[self.text_key]:
                row, since = row + 1, since + 1
                if since > read and not (by_rows and (row - 1) % parts != part):
                    name = f"row {row - 1}{suffix}"
                    load = partial(check_cell, name, self.text_key, text)
                    yield name, load, [row, state, since]
            read, since, state = max(0, read - since), 0, rows.state_dict()


def _check_stream(dataset: Any) -> None:
    if dataset._distributed:
        raise ValueError(
            "the dataset was divided by split_dataset_by_node; pass it whole: stream_documents "
            "divides it by rank and world."
        )
    if "BufferShuffledExamplesIterable" in _chain(dataset._ex_iterable):
        raise ValueError(
            "the dataset has a shuffle buffer, whose documents a resumed stream would lose. Stream "
            "it unshuffled, or prepare token files."
        )


_BY_FILES = (
    *("ExamplesIterable", "ArrowExamplesIterable", "RebatchedArrowExamplesIterable"),
    *("SelectColumnsIterable", "FormattedExamplesIterable"),
    *("MappedExamplesIterable", "FilteredExamplesIterable"),
)
"""What ``datasets`` applies to the files of each part as to all; others are divided by rows."""


def _chain(examples: Any) -> Iterator[str]:
    """Yield the names of a dataset's chain of iterables, for which it has no public attribute."""
    yield type(examples).__name__
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    for each in inner:
        if each is not None:
            yield from _chain(each)


Located: TypeAlias = "tuple[str, Callable[[], Content], Any]"
"""A document's name, what reads its text, and the position after it."""


def read_texts(located: Iterable[Located], errors: Errors) -> Iterator[Record]:
    """Read what a source has located; leave out white space and, if asked to, what is broken.

    Args:
        located: The documents. Only a ValueError of what reads a text makes a document broken.
        errors: See ``text_documents``.
    """
    for name, read, after in located:
        try:
            text, problem = read(), None
        except ValueError as error:
            if errors == "raise":
                raise
            text, problem = None, str(error)
        if problem or not isinstance(text, str) or (text and not text.isspace()):
            yield Record(name, text, after, problem)


def check_cell(name: str, key: str, value: Any) -> str:
    """Return what a row of a table has in a column; refuse it if it is not a text."""
    if isinstance(value, str):
        return value
    raise ValueError(
        f'{name} has {type(value).__name__} in column "{key}", not a string; errors="skip" drops '
        "such rows."
    )


def check_ids(name: str, document: ArrayLike, vocab_size: int = 2**32) -> NDArray[Any]:
    """Return a document as an array of token ids.

    Args:
        name: Names the document in errors.
        document: A 1-D array (or list, or CPU tensor) of integers.
        vocab_size: Every id must be below it.

    Raises:
        ValueError: If it is something else, or an id is out of range.
    """
    ids = np.asarray(document)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} is {ids.dtype} of shape {ids.shape}; a document is a 1-D array of token ids."
        )
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(
            f"{name} has token ids from {ids.min()} to {ids.max()}; they must lie in "
            f"range(vocab_size={vocab_size})."
        )
    return ids


def check_document(
    name: str, document: Any, vocab_size: int = 2**31, *, k: int | None = None
) -> NDArray[Any]:
    """Return a document's token ids and, where it has them, a teacher's rows.

    Args:
        name: Names the document in errors.
        document: As for ``check_ids``; or a mapping, or what this function returned, of
            ``input_ids`` ``[s]`` and the teacher's rows of the token after each, ``teacher_ids``
            and ``teacher_log_probs`` ``[s k]``: natural logarithms, as for ``sparse_kl``.
        vocab_size: Every id must be below it.
        k: Tokens of a row, which must be as many; 0: there must be no rows.

    Returns:
        ``[s]`` integers, or ``[s]`` of ``taught_type``.

    Raises:
        ValueError: If it is something else, an id is out of range or twice in a row, or the
            probabilities of a row sum above 1.
    """
    rows = cast(Any, document if isinstance(document, Mapping) else np.asarray(document))
    names = rows if isinstance(document, Mapping) else rows.dtype.names or ()
    ids = check_ids(name, rows["input_ids"] if names else rows, vocab_size)
    if not names and not k:
        return ids
    try:
        tokens, log_probs = (np.asarray(rows[key]) for key in TEACHER if key in names)
        shape = len(ids), tokens.shape[1] if k is None else k
        if not (tokens.dtype.kind in "iu" and tokens.shape == log_probs.shape == shape and k != 0):
            raise ValueError(f"they are {tokens.dtype} {tokens.shape} and {log_probs.shape}")
    except (IndexError, ValueError) as error:  # one is missing, or its rows differ in length
        shape = [len(ids), "k" if k is None else k]
        raise ValueError(f"{name}: {' and '.join(TEACHER)} must be {shape}: {error}.") from None
    ranked = np.sort(tokens)
    total = np.exp(log_probs.astype(np.float64)).sum(-1, keepdims=True)
    checks = {
        f"ids outside the vocabulary of {vocab_size}": (tokens >= 0) & (tokens < vocab_size),
        "a token twice": ranked[:, 1:] != ranked[:, :-1],
        "probabilities that sum above 1": total <= 1 + 1e-4,
    }
    for problem, is_right in checks.items():
        if (is_wrong := ~is_right.all(-1) & (tokens[:, 0] != IGNORED)).any():
            raise ValueError(f"{name} has {problem} in the teacher's row {is_wrong.argmax()}.")
    taught = np.empty(len(ids), taught_type(shape[1]))
    taught["input_ids"], taught[TEACHER[0]], taught[TEACHER[1]] = ids, tokens, log_probs
    return taught


def taught_type(k: int, ids: DTypeLike = "<u4") -> np.dtype[Any]:
    """Type of a token id with a teacher's row of k tokens."""
    return np.dtype([("input_ids", ids), (TEACHER[0], "<i4", (k,)), (TEACHER[1], "<f4", (k,))])


def taught_k(rows: NDArray[Any]) -> int:
    """Number of a teacher's tokens at each position of a document; 0 without its rows."""
    return rows.dtype[TEACHER[0]].shape[0] if rows.dtype.names else 0


def tokens_of(rows: NDArray[Any]) -> NDArray[Any]:
    """Token ids ``[s]``, without a teacher's rows."""
    return rows["input_ids"] if rows.dtype.names else rows


def check_column(data: str, key: str, names: Iterable[str]) -> None:
    """Refuse a column that a table does not have."""
    if key not in names:
        raise ValueError(
            f'{data} has no column "{key}"; it has {quoted(names)}. Name one with text_key.'
        )
