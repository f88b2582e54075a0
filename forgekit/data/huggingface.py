"""Documents from Hugging Face ``datasets``: whole, streamed, and on this disk.

A streamed dataset resumes by its own ``state_dict``, which is exact with one exception: a shuffle
buffer is refilled instead of restored, so documents are lost. Such a dataset is refused unless
resuming may read it again from its start, which is exact and slow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from forgekit.data.documents import Errors, Record, check_column, check_reading
from forgekit.data.optional_packages import require
from forgekit.inputs import path_of, quoted, wrong_type

ROWS_AT_ONCE = 256


def huggingface_documents(
    dataset: Any,
    *,
    config: str | None = None,
    split: str = "train",
    streaming: bool = True,
    text_key: str = "text",
    errors: Errors = "raise",
    reread: bool = False,
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
        reread: Resume by reading again from the start up to the position. Exact also with a shuffle
            buffer, if its seed is fixed.

    Returns:
        The documents, for ``prepare`` and ``stream_documents``.

    Raises:
        ImportError: If ``datasets`` is not installed.
        ValueError: If there is no such column or split, or the dataset has a shuffle buffer and
            ``reread`` is False.

    Examples:
        >>> import datasets
        >>> rows = datasets.Dataset.from_dict({"text": ["once", "upon"]})
        >>> list(huggingface_documents(rows))
        [('row 0', 'once'), ('row 1', 'upon')]
    """
    require("datasets", extra="hf")
    check_reading(text_key, errors)
    if not isinstance(split, str):
        raise wrong_type("split", split, "text")
    identity = ""
    if isinstance(dataset, str | os.PathLike):
        path_of("the dataset's name", dataset)
        identity = f"{dataset} {config} {split}"
        dataset = _load(os.fspath(dataset), config, split, streaming=streaming)
    elif not isinstance(dataset, dict) and not hasattr(dataset, "column_names"):
        wanted = "a Dataset, an IterableDataset, a folder or a name"
        raise wrong_type("dataset", dataset, wanted)
    dataset = _column_of(_split_of(dataset, split), text_key)
    is_streamed = not hasattr(dataset, "__len__")
    if is_streamed:
        _check_stream(dataset, reread=reread)
    return HuggingFaceDocuments(dataset, text_key, errors, reread, is_streamed, identity)


@attrs.frozen
class HuggingFaceDocuments:
    """Documents in a Hugging Face dataset; ``huggingface_documents`` makes one.

    A position is ``[row]`` in a whole dataset, and ``[row, state, read]`` in a streamed one: the
    dataset's own state, None at its start, and the rows read since.

    Attributes:
        dataset: The dataset.
        text_key: The column of the text.
        errors: Whether rows without a text raise or are skipped.
        reread: Whether to resume by reading again from the start.
        is_streamed: Whether rows can be read in order only.
        identity: Name, configuration and split of a dataset that was loaded by name.
    """

    dataset: Any = attrs.field(repr=False)
    text_key: str
    errors: Errors
    reread: bool
    is_streamed: bool
    identity: str

    @property
    def fingerprint(self) -> str:
        """Identifies the dataset: by its own fingerprint or, if streamed, by its name."""
        own = "" if self.is_streamed else self.dataset._fingerprint
        name, version = self.dataset.info.dataset_name, self.dataset.info.version
        return f"{own or name} {version} {self.dataset.split} {self.text_key} {self.identity}"

    size = None  # bytes are unknown before the dataset is read

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((r.name, r.content) for r in self.read() if isinstance(r.content, str))

    def read(self, position: Any = None, *, part: int = 0, parts: int = 1) -> Iterator[Record]:
        """Yield this part's documents from a position on; see ``Documents``.

        A streamed dataset is divided by its files where their number allows it, else by rows.
        """
        read = self._streamed if self.is_streamed else self._whole
        for name, text, after in read(position, part, parts):
            if isinstance(text, str):
                if text and not text.isspace():
                    yield Record(name, text, after)
                continue
            problem = (
                f'{name} has {type(text).__name__} in column "{self.text_key}", not a string. '
                'Name another column with text_key, or leave such rows out with errors="skip".'
            )
            if self.errors == "raise":
                raise ValueError(problem)
            yield Record(name, None, after, problem=problem)

    def _whole(self, position: Any, part: int, parts: int) -> Iterator[tuple[str, Any, Any]]:
        (start,) = position or (0,)
        for first in range(start, len(self.dataset), ROWS_AT_ONCE):
            texts = self.dataset[first : first + ROWS_AT_ONCE][self.text_key]
            for row, text in enumerate(texts, start=first):
                if row % parts == part:
                    yield f"row {row}", text, [row + 1]

    def _streamed(self, position: Any, part: int, parts: int) -> Iterator[tuple[str, Any, Any]]:
        from datasets.distributed import split_dataset_by_node

        whose = f" of part {part} of {parts}" if parts > 1 else ""
        own = split_dataset_by_node(self.dataset, part, parts)
        row, state, read = position or (0, None, 0)
        if state is not None:
            own.load_state_dict(state)
        row, since = row - read, 0
        # Not iter(own): in a worker of torch's DataLoader it would divide the files again.
        for batch in own.iter(ROWS_AT_ONCE):
            check_column("the dataset", self.text_key, batch)
            for text in batch[self.text_key]:
                row, since = row + 1, since + 1
                if since > read:
                    yield f"row {row - 1}{whose}", text, [row, state, since]
            if not self.reread:
                read, since, state = max(0, read - since), 0, own.state_dict()


def _load(name: str, config: str | None, split: str, *, streaming: bool) -> Any:
    datasets = require("datasets", extra="hf")
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1  # the hub has OWNER/NAME
    if is_path and not os.path.isdir(name):
        raise ValueError(
            f"{name} is no folder. Name a folder of data files, or a dataset of the hub as "
            "OWNER/NAME; files are read without hf:."
        )
    is_saved = any(Path(name, file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        if is_saved:
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:  # a damaged file can raise anything
        what = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{name} cannot be loaded as a Hugging Face dataset ({what}). Save it again with "
            "save_to_disk, or name a folder of data files or a dataset of the hub."
        ) from None


def _split_of(dataset: Any, split: str) -> Any:
    if not isinstance(dataset, dict):
        return dataset
    if split not in dataset:
        raise ValueError(f'the dataset has no split "{split}"; it has {quoted(dataset)}.')
    return dataset[split]


def _column_of(dataset: Any, text_key: str) -> Any:
    """Drop the other columns, so that they are never decoded."""
    if dataset.column_names is None:  # known only on reading
        return dataset.with_format(None)
    check_column("the dataset", text_key, dataset.column_names)
    return dataset.with_format(None).select_columns([text_key])


def _check_stream(dataset: Any, *, reread: bool) -> None:
    if getattr(dataset, "_distributed", None):
        raise ValueError(
            "this dataset was divided by split_dataset_by_node before, and would be divided "
            "again. Pass it whole: rank and world of stream_documents divide it."
        )
    if not reread and _has_buffer(getattr(dataset, "_ex_iterable", None)):
        raise ValueError(
            "this dataset has a shuffle buffer, and a resumed stream would lose the documents in "
            "it. Stream it unshuffled, or prepare token files, whose rows are shuffled by number, "
            "or pass reread=True to resume by reading again from the start."
        )


def _has_buffer(examples: Any) -> bool:
    # datasets has no public attribute for it; its chain of iterables shows it.
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return any(_has_buffer(each) for each in inner if each is not None)
