"""From documents to what a training run reads: token files and their tokenizer, in one call.

The result appears whole, under its name, or not at all::

    OUT/                 a token file: the training documents
    OUT/heldout/         a token file: every 20th document, never trained on
    OUT/tokenizer.json   trained on the training documents only

Until then it grows in a hidden folder beside ``OUT``, in parts of 64 MB of text. Processes write
several at a time. A part that is finished is kept: a call after a kill goes on with the others, and
ends with the same bytes. Memory does not depend on the amount of text.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from forgekit.checks import check_integers, path_of
from forgekit.data.documents import (
    BROKEN_NAMED,
    Documents,
    as_documents,
    check_document,
    taught_k,
    tokens_of,
)
from forgekit.data.read_ahead import compute_ahead
from forgekit.data.text_files import Paths, stdlib_documents, text_documents
from forgekit.data.token_files import (
    HELD_OUT,
    SHARD_TOKENS,
    TokenFile,
    fill_tokens,
    is_token_file,
    open_tokens,
)
from forgekit.data.tokenizer import (
    END_OF_TEXT,
    LARGEST_VOCAB,
    SMALLEST_VOCAB,
    TOKENIZER,
    beginning_ids,
    encode_texts,
    end_of_text,
    load_tokenizer,
    token_id,
    train_tokenizer,
    vocabulary_size,
)
from forgekit.files import atomic_directory, write_atomic
from forgekit.hashing import digest, hash_integers
from forgekit.terminal import printable

Labelled: TypeAlias = "list[tuple[bool, Any]]"
"""Texts, or token ids, and whether each is held out."""

PARTS = "parts"

PART_BYTES = 2**26
"""Text of one part, at least; what a kill costs at most, for each of the workers.

Up to three parts per worker are in memory: read, waiting and being encoded.
"""

log = logging.getLogger("forgekit")


@attrs.frozen
class Prepared:
    """The token files that ``prepare`` made or found.

    Attributes:
        path: The token file of the training documents.
        train: The training documents.
        held_out: The held-out documents.
        is_new: False if it existed, made from the same documents with the same settings.
    """

    path: Path
    train: TokenFile = attrs.field(repr=False)
    held_out: TokenFile = attrs.field(repr=False)
    is_new: bool

    @property
    def broken(self) -> int:
        """Documents that were left out because they could not be read."""
        return self.train.metadata["broken"]


def prepare(
    source: Literal["stdlib"] | Paths | Documents | Iterable[tuple[str, str]],
    out: str | os.PathLike[str],
    *,
    vocab_size: int = 4096,
    held_out_every: int = 20,
    progress: Callable[[int], None] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    eos_token: str | None = None,
    sample_bytes: int = 2**28,
    shard_tokens: int = SHARD_TOKENS,
    workers: int = 0,
) -> Prepared:
    """Train a tokenizer on documents and write them as token files.

    Documents are read twice, one at a time: for the tokenizer and for the tokens. If there are
    fewer than ``held_out_every``, the end of each, from a line break on, is held out instead.

    Text is kept unchanged, line ends included; a byte order mark at the start of a file or line is
    removed. Text that is not UTF-8, and a text file with a NUL byte, is broken. Special tokens in a
    text are read as plain characters.

    Args:
        source: ``"stdlib"`` for the sources of Python's standard library; files and folders as for
            ``text_documents``; documents, such as ``text_documents`` with options or
            ``huggingface_documents`` returns; or a list of pairs of a name and a text, such as a
            comprehension over documents that leaves some out. Documents of token ids, such as
            ``text_documents(paths, text_key="input_ids")`` reads, stay as they are, with a
            teacher's rows where they have them; they need their ``tokenizer``.
        out: The directory to make. If it was made from the same documents (files: names, sizes,
            modification times) with the same settings, it stays unchanged; else it is replaced when
            the new one is complete. A killed call's finished parts are used.
        vocab_size: Number of tokens, the end of text included, of a tokenizer that is trained here.
        held_out_every: One document in so many is held out.
        progress: Called with the number of parts that this call has written, each of 64 MB of text.
        tokenizer: Use this ``tokenizer.json``, or that of a model's directory, instead of training
            one; its truncation and padding are switched off.
        eos_token: The token that closes each document; by default the one that the settings beside
            ``tokenizer.json`` name, as ``transformers`` reads them, else ``<|endoftext|>``. A token
            that the tokenizer's own encoding puts before a text, such as ``<s>``, begins each.
        sample_bytes: Text to train the tokenizer on. A larger source is sampled at random over its
            whole length if it is plain files. Of compressed ones, whose text is longer than their
            size, the sample is from the beginning, as it is of a list or a Hugging Face dataset.
        shard_tokens: Most tokens per file.
        workers: Processes that encode and write parts; 0 does so in this one. The result is the
            same. A script that passes any needs its ``if __name__ == "__main__"``.

    Returns:
        ``Prepared(path, train, held_out, is_new)``. Both token files keep ``text_bytes`` in their
        metadata, for losses in bits per byte; closing tokens count no bytes. ``broken`` counts the
        documents that were left out, and the metadata names the first.

    Raises:
        FileNotFoundError: If a path does not exist or holds nothing to read.
        FileExistsError: If ``out`` holds files that were not made here, or another process is
            making it.
        ValueError: If a text cannot be read, a number is out of range, or there is too little text.
    """
    check_integers(held_out_every=(held_out_every, 2), sample_bytes=(sample_bytes, 1))
    check_integers(shard_tokens=(shard_tokens, 1), workers=(workers, 0))
    out, documents = path_of("out", out), _documents(source)
    if tokenizer is None:
        check_integers(vocab_size=(vocab_size, SMALLEST_VOCAB, LARGEST_VOCAB))
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    if eos_token is None:
        eos_token = END_OF_TEXT if tokenizer is None else end_of_text(tokenizer)
    settings = [vocab_size, held_out_every, eos_token, sample_bytes, shard_tokens, PART_BYTES]
    facts = [*settings, given and given.to_str(), documents.fingerprint]
    begin = [] if given is None else beginning_ids(given)
    made_from = digest([*facts, begin] if begin else facts)
    vocabulary = vocab_size if given is None else vocabulary_size(given)
    texts = TextReader(documents, held_out_every, vocabulary)
    prepared = _open_made(out, made_from)
    if prepared is not None and (texts.may_skip or not prepared.broken):
        return prepared
    with atomic_directory(out, is_replaceable=_is_prepared, key=made_from[:12]) as folder:
        learnt = _tokenizer(folder, texts, given, vocab_size, sample_bytes)
        sizes = {"vocab_size": vocabulary_size(learnt), "eos_id": token_id(learnt, eos_token)}
        parts = _write_parts(folder, texts, workers, progress or (lambda _: None))
        end = _Position(**_facts_of(parts[-1])["end"])
        for problem in end.problems:
            log.warning("left out: %s", printable(problem))
        metadata = {"made_from": made_from, "broken": end.broken, "first_broken": end.problems}
        (folder / HELD_OUT).mkdir(exist_ok=True)
        for is_held_out, target in ((True, folder / HELD_OUT), (False, folder)):
            ids = _documents_in(parts, is_held_out, metadata)
            fill_tokens(target, ids, **sizes, metadata=metadata, shard_tokens=shard_tokens)
        shutil.rmtree(folder / PARTS)
    return Prepared(out, open_tokens(out), open_tokens(out / HELD_OUT), is_new=True)


@attrs.frozen
class _Position:
    """Where a part begins: the source's position, and what was read before.

    Attributes:
        after: The position in the source.
        documents: Documents with a text up to there.
        broken: Documents left out up to there.
        problems: The problems of the first ten.
    """

    after: Any = None
    documents: int = 0
    broken: int = 0
    problems: tuple[str, ...] = ()


@attrs.frozen
class TextReader:
    """Texts, and which of them are held out."""

    documents: Documents
    held_out_every: int
    vocab_size: int = 2**31

    @property
    def may_skip(self) -> bool:
        """Whether broken documents may be left out, or are fatal."""
        return getattr(self.documents, "errors", "raise") == "skip"

    def read(self, start: _Position) -> Iterator[tuple[_Position, Labelled]]:
        """Yield the position after each document, and its texts."""
        at = start
        for record in self.documents.read(start.after):
            texts: Labelled = []
            at = attrs.evolve(at, after=record.after)
            if record.problem is not None:
                problems = (*at.problems, record.problem)[:BROKEN_NAMED]
                at = attrs.evolve(at, broken=at.broken + 1, problems=problems)
            else:
                text: Any = record.content
                if not isinstance(text, str):
                    text = check_document(record.name, text, self.vocab_size, k=self._first[0])
                at = attrs.evolve(at, documents=at.documents + 1)
                texts = self._split(text, at.documents)
            yield at, texts

    def sample(self, limit: int) -> Iterator[str]:
        """Yield training texts of ``limit`` characters in all, from all over a larger source."""
        size = self.documents.size or 0
        # Each document is drawn by a hash of its number, with probability limit / size.
        threshold = 2**64 * limit // max(size, limit)
        for position, texts in self.read(_Position()):
            is_drawn = size <= limit or int(hash_integers(position.documents)) < threshold
            for text in (text for is_held_out, text in texts if is_drawn and not is_held_out):
                if not isinstance(text, str):
                    raise ValueError("the documents are token ids; pass tokenizer=, theirs.")
                yield text[:limit]
                limit -= len(text)
                if limit <= 0:
                    return

    def _split(self, text: Any, number: int) -> Labelled:
        if len(self._first) == self.held_out_every:
            return [(number % self.held_out_every == 0, text)]
        # At the last line break that leaves at least this share of the text behind it.
        latest = len(text) - max(1, len(text) // self.held_out_every)
        split = (isinstance(text, str) and text.rfind("\n", 0, latest) + 1) or latest
        parts = (False, text[:split]), (True, text[split:])
        return [part for part in parts if len(part[1])]

    @cached_property
    def _first(self) -> list[int]:
        """A teacher's k in the first ``held_out_every`` documents; fewer if there are few."""
        texts: Any = (r.content for r in self.documents.read() if r.problem is None)
        texts = itertools.islice(texts, self.held_out_every)
        return [0 if isinstance(text, str) else taught_k(text) for text in texts]


def _write_parts(
    folder: Path, texts: TextReader, workers: int, progress: Callable[[int], None]
) -> list[Path]:
    """Write all parts that are not there yet, several at a time; return the files of all."""
    (folder / PARTS).mkdir(exist_ok=True)
    write, unwritten = _PartWriter(folder / TOKENIZER), _unwritten(folder / PARTS, texts)
    written = compute_ahead(write, unwritten, workers=workers, processes=workers > 0)
    for number, _ in enumerate(written, start=1):
        progress(number)
    return sorted(folder.glob(f"{PARTS}/*.npz"))


@attrs.frozen
class _Part:
    """Texts that are encoded at once; the position behind them, and whether they are the last."""

    file: Path
    texts: Labelled
    end: _Position
    is_last: bool


def _unwritten(folder: Path, texts: TextReader) -> Iterator[_Part]:
    """Read the parts that are not finished."""
    position, is_last, reader, numbers = _Position(), False, None, itertools.count()
    while not is_last:
        file = folder / f"{next(numbers):06d}.npz"
        if (facts := _facts_of(file)) and (texts.may_skip or not facts["end"]["broken"]):
            position, is_last = _Position(**facts["end"]), facts["is_last"]
            reader = None  # the next one begins behind this part
            continue
        reader = reader or texts.read(position)
        content: Labelled = []
        size, is_last = 0, True
        for position, of_document in reader:  # noqa: B007
            content += of_document
            size += sum(len(t) if isinstance(t, str) else t.nbytes for _, t in of_document)
            if size >= PART_BYTES:
                is_last = False
                break
        yield _Part(file, content, position, is_last)


@attrs.frozen
class _PartWriter:
    """Encodes and writes parts; in a process it loads the tokenizer when the first one arrives."""

    file: Path

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.file)

    def __call__(self, part: _Part) -> None:
        labelled = (((is_held_out, len(text.encode())), text) for is_held_out, text in part.texts)
        encoded, ids, documents = encode_texts(self.tokenizer, labelled), [], []
        if not all(isinstance(text, str) for _, text in part.texts):
            encoded = (((is_held_out, self._bytes(ids)), ids) for is_held_out, ids in part.texts)
        for (is_held_out, size), of_text in encoded:
            ids.append(of_text)
            documents.append((is_held_out, size, len(of_text)))
        columns = np.array(documents, np.int64).reshape(-1, 3).T
        facts = json.dumps({"end": attrs.asdict(part.end), "is_last": part.is_last})
        content = io.BytesIO()
        np.savez(content, ids=np.concatenate(ids or [np.zeros(0)]), columns=columns, facts=facts)
        write_atomic(part.file, content.getvalue())

    def _bytes(self, ids: NDArray[Any]) -> int:
        return len(self.tokenizer.decode(tokens_of(ids).tolist()).encode())


def _facts_of(part: Path) -> dict[str, Any]:
    """Read the facts of a finished part; nothing if it is not finished."""
    if not part.is_file():
        return {}
    with np.load(part) as stored:
        return json.loads(str(stored["facts"]))


def _documents_in(
    parts: Iterable[Path], is_held_out: bool, metadata: dict[str, Any]
) -> Iterator[NDArray[np.int32]]:
    """Yield the ids of documents in finished parts; add up their ``text_bytes``."""
    metadata["text_bytes"] = 0
    for part in parts:
        with np.load(part) as stored:
            ids, (kinds, sizes, lengths) = stored["ids"], stored["columns"]
        metadata["text_bytes"] += int(sizes[kinds == is_held_out].sum())
        stops = np.cumsum(lengths)
        for kind, start, stop in np.stack([kinds, stops - lengths, stops], 1).tolist():
            if kind == is_held_out:
                yield ids[start:stop]


def _tokenizer(
    folder: Path, texts: TextReader, given: Any, vocab_size: int, sample_bytes: int
) -> Any:
    """Load the tokenizer that a killed call had saved, or save one."""
    file = folder / TOKENIZER
    if not file.is_file():
        made = train_tokenizer(texts.sample(sample_bytes), vocab_size) if given is None else given
        write_atomic(file, made.to_str(pretty=True).encode())
    return load_tokenizer(file)


def _open_made(out: Path, made_from: str) -> Prepared | None:
    """Open an existing folder if it is complete and was made from exactly this, else None."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        prepared = Prepared(out, open_tokens(out), open_tokens(out / HELD_OUT), is_new=False)
        if _is_prepared(out) and prepared.train.metadata["made_from"] == made_from:
            return prepared
    return None


def _is_prepared(out: Path) -> bool:
    """Whether a directory is what ``prepare`` makes and holds nothing else."""
    return (
        (out / TOKENIZER).is_file()
        and is_token_file(out / HELD_OUT)
        and is_token_file(out, besides={HELD_OUT, TOKENIZER})
    )


def _documents(source: Any) -> Documents:
    if isinstance(source, str) and source == "stdlib":
        return stdlib_documents()
    is_pairs = isinstance(source, list) and source and isinstance(source[0], tuple)
    return as_documents(source) if is_pairs or hasattr(source, "read") else text_documents(source)
