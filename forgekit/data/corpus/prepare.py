"""From documents to what a training run reads: token files and their tokenizer, in one call.

The result appears whole, under its name, or not at all::

    OUT/                 a token file: the training documents
    OUT/heldout/         a token file: every 20th document, never trained on
    OUT/tokenizer.json   trained on the training documents only

Until then it grows in a hidden folder beside ``OUT``. A call after a kill continues there, and ends
with the same bytes as an undisturbed one. Memory does not depend on the amount of text.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast

import attrs

from forgekit.data.corpus.encode import encode_texts
from forgekit.data.corpus.held_out import HeldOutSplit, Progress
from forgekit.data.corpus.journal import JOURNAL, Entry, clear, read_entry, write_entry
from forgekit.data.corpus.prepared_corpus import (
    TOKENIZER,
    Prepared,
    find_prepared,
    is_prepared,
    open_prepared,
)
from forgekit.data.corpus.token_files import HELD_OUT
from forgekit.data.corpus.token_writer import DamagedError, TokenWriter
from forgekit.data.corpus.tokenizer import (
    END_OF_TEXT,
    LARGEST_VOCAB,
    SMALLEST_VOCAB,
    load_tokenizer,
    token_id,
    train_tokenizer,
    vocabulary_size,
)
from forgekit.data.documents.filters import Filters, describe_filters
from forgekit.data.documents.protocol import Documents
from forgekit.data.documents.text_files import Paths, stdlib_documents, text_documents
from forgekit.files import atomic_directory, sync
from forgekit.inputs import brief, check_integers, path_of, wrong_type
from forgekit.terminal import printable

ASKED = "vocab_size_asked"
"""Key of the metadata: the requested size; None if a tokenizer was given."""

ENTRY_BYTES = 16 << 20
"""Text between two entries in the journal, a few seconds' work: the most that a kill costs."""

log = logging.getLogger("forgekit")


def prepare(
    source: Literal["stdlib"] | Paths | Documents,
    out: str | os.PathLike[str],
    *,
    vocab_size: int = 4096,
    held_out_every: int = 20,
    progress: Progress | None = None,
    filters: Filters | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    eos_token: str = END_OF_TEXT,
    sample_bytes: int = 2**28,
    shard_tokens: int = 2**27,
) -> Prepared:
    """Train a tokenizer on documents and write them as token files.

    Documents are read twice, one at a time: for the tokenizer and for the tokens. If there are
    fewer than ``held_out_every``, the end of each, from a line break on, is held out instead.

    Text is kept unchanged, line ends included; a byte order mark at the start of a file or line is
    removed. Text that is not UTF-8, and a text file with a NUL byte, is broken. Special tokens in a
    text are read as plain characters.

    Args:
        source: ``"stdlib"`` for the sources of Python's standard library; files and folders as for
            ``text_documents``; or documents, such as ``text_documents`` with options or
            ``huggingface_documents`` returns.
        out: The directory to make. If it was made from the same documents (files: names, sizes,
            modification times) with the same settings, it stays unchanged; else it is replaced when
            the new one is complete. A killed call's work is continued.
        vocab_size: Number of tokens, the end of text included, of a tokenizer that is trained here.
        held_out_every: One document in so many is held out.
        progress: Called as ``progress(task, done, total)``, in bytes of the source; a total of 0 is
            unknown. The task is ``"tokenizer"``, then ``"tokens"``.
        filters: Functions of a text that return False for a document to leave out, by the name that
            counts it. Each is called several times for a text, so it must be pure.
        tokenizer: Use this ``tokenizer.json`` instead of training one; its truncation and padding
            are switched off.
        eos_token: The token that closes each document.
        sample_bytes: Text to train the tokenizer on. A larger source is sampled at random over its
            whole length.
        shard_tokens: Tokens per file.

    Returns:
        ``Prepared(path, train, held_out, is_new)``. Both token files keep ``text_bytes`` in their
        metadata, for losses in bits per byte; closing tokens count no bytes. ``account`` counts the
        documents that were left out.

    Raises:
        FileNotFoundError: If a path does not exist or holds nothing to read.
        FileExistsError: If ``out`` holds files that were not made here, or another process is
            making it.
        ValueError: If a text cannot be read, a number is out of range, or there is too little text.
    """
    check_integers(
        held_out_every=(held_out_every, 2),
        sample_bytes=(sample_bytes, 1),
        shard_tokens=(shard_tokens, 1),
    )
    if tokenizer is None:
        _check_training(vocab_size, eos_token)
    if not isinstance(filters or {}, Mapping):
        raise wrong_type("filters", filters, "functions by name: {name: keeps}")
    out = path_of("out", out)
    if re.search("[\ud800-\udfff]", str(out)):
        raise ValueError(f"out {brief(str(out))} is not UTF-8; choose another name.")
    documents = _documents(source)
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    # Names all that the result follows from; changing this text would prepare every corpus again.
    settings = f"{vocab_size} {held_out_every} {eos_token} {sample_bytes} {shard_tokens} "
    settings += "" if given is None else given.to_str()
    facts = f"{settings} {describe_filters(filters or {})} {documents.fingerprint}"
    made_from = hashlib.sha256(os.fsencode(facts)).hexdigest()
    split = HeldOutSplit(documents, filters or {}, held_out_every, progress or (lambda *_: None))
    prepared = find_prepared(out, made_from)
    if prepared is None or not split.allows(prepared.account):
        with atomic_directory(out, is_replaceable=is_prepared, key=made_from[:12]) as folder:
            left = find_prepared(folder, made_from)  # by a call that was killed before its rename
            if left is None or not split.allows(left.account):
                learner = _tokenizer(folder, split, given, vocab_size, sample_bytes)
                asked = vocab_size if given is None else None
                metadata = {"made_from": made_from, ASKED: asked}
                eos_id = token_id(learner, eos_token)
                _Writing(folder, split, learner, eos_id, shard_tokens, metadata).run()
        prepared = open_prepared(out, is_new=True)
    _warn_of_few(prepared)
    return prepared


def _check_training(vocab_size: int, eos_token: str) -> None:
    check_integers(vocab_size=(vocab_size, SMALLEST_VOCAB, LARGEST_VOCAB))
    if eos_token != END_OF_TEXT:
        raise ValueError(
            f"eos_token is {brief(eos_token)}; a tokenizer that is trained here closes "
            f'documents with "{END_OF_TEXT}" alone. Leave eos_token out, or pass a tokenizer.'
        )


def _warn_of_few(prepared: Prepared) -> None:
    """Warn that a trained tokenizer is smaller than requested: the model must fit it."""
    file = prepared.train
    if file.vocab_size < (file.metadata.get(ASKED) or 0):
        log.warning(
            "the tokenizer has %s tokens instead of %s: the %s bytes of training text hold no more "
            "pairs of tokens to join. Prepare more text, or ask for a vocabulary of %s",
            *map("{:,}".format, (file.vocab_size, file.metadata[ASKED])),
            *map("{:,}".format, (file.metadata["text_bytes"], file.vocab_size)),
        )


def _documents(source: Literal["stdlib"] | Paths | Documents) -> Documents:
    if isinstance(source, str) and source == "stdlib":
        return stdlib_documents()
    if hasattr(source, "fingerprint"):
        return cast(Documents, source)
    return text_documents(cast(Paths, source))


def _tokenizer(
    folder: Path, split: HeldOutSplit, given: Any, vocab_size: int, sample_bytes: int
) -> Any:
    """Load the tokenizer that a killed call had saved, or save one."""
    file = folder / TOKENIZER
    if not file.is_file():
        made = given
        if given is None:
            made = train_tokenizer(split.sample("tokenizer", sample_bytes), vocab_size)
        temporary = file.with_suffix(".new")
        made.save(str(temporary))
        sync(temporary)
        temporary.rename(file)
    return load_tokenizer(file)


@attrs.frozen
class _Writing:
    """Texts into both token files, with a journal."""

    folder: Path
    split: HeldOutSplit
    tokenizer: Any
    eos_id: int
    shard_tokens: int
    metadata: dict[str, Any]

    def run(self) -> None:
        """Write both files; continue where a killed call stopped, if its files are intact."""
        entry = read_entry(self.folder)
        if entry is not None and self.split.allows(entry.position.account):
            try:
                return self._write(entry)
            except DamagedError as error:
                log.warning("%s; the tokens are written from the start", error)
        clear(self.folder, but=TOKENIZER)
        return self._write(Entry())

    def _write(self, entry: Entry) -> None:
        text_bytes = list(entry.text_bytes)
        with ExitStack() as stack:
            writers = [stack.enter_context(self._writer(number, entry)) for number in (0, 1)]
            # `last` is the position after the last document that is written or left out. A document
            # may give two texts, and an entry is written only between two documents.
            last, unsaved = entry.position, 0
            texts = self.split.texts("tokens", entry.position)
            labelled = ((each, each[-1] or "") for each in texts)
            for (position, is_held_out, text), ids in encode_texts(self.tokenizer, labelled):
                if unsaved >= ENTRY_BYTES and position is not last:
                    positions = [writer.position() for writer in writers]
                    write_entry(self.folder, Entry(last, tuple(text_bytes), positions))
                    unsaved = 0
                if text is not None:
                    size = len(text.encode())
                    writers[is_held_out].append(ids)
                    text_bytes[is_held_out] += size
                    unsaved += size
                last = position
        account = last.account
        for problem in account.first_broken:
            log.warning("left out: %s", printable(problem))
        for writer, size in zip(writers, text_bytes, strict=True):
            dropped = {name: account.dropped.get(name, 0) for name in self.split.filters}
            left_out = attrs.asdict(attrs.evolve(account, dropped=dropped))
            writer.finish({"text_bytes": size, **self.metadata, **left_out})
        (self.folder / JOURNAL).unlink(missing_ok=True)

    def _writer(self, number: int, entry: Entry) -> TokenWriter:
        folder = self.folder / HELD_OUT if number else self.folder
        sizes = (vocabulary_size(self.tokenizer), self.eos_id, self.shard_tokens)
        return TokenWriter(folder, *sizes, position=entry.writers[number])
