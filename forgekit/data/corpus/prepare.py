"""From documents to what a training run reads: token files and their tokenizer, in one go.

The result appears whole, under its name, or not at all::

    OUT/                 a token file: the training documents
    OUT/heldout/         a token file: every 20th document, never trained on
    OUT/tokenizer.json   trained on the training documents only

Until then it grows in a hidden folder beside ``OUT``. Whoever starts again after a kill goes on
there, and ends with the same bytes as without it. Memory does not depend on the amount of text.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast

import attrs

from forgekit.data.atomic_directory import atomic_directory, sync
from forgekit.data.corpus.encode import encode_texts
from forgekit.data.corpus.held_out import Parts, Place, Progress
from forgekit.data.corpus.journal import JOURNAL, Entry, clear, read_entry, write_entry
from forgekit.data.corpus.number_files import DamagedError
from forgekit.data.corpus.prepared_corpus import (
    HELD_OUT,
    TOKENIZER,
    Prepared,
    find_prepared,
    is_prepared,
    open_prepared,
)
from forgekit.data.corpus.token_files import TokenWriter
from forgekit.data.corpus.tokenizer import (
    END_OF_TEXT,
    check_vocab_size,
    load_tokenizer,
    token_id,
    train_tokenizer,
    vocabulary_size,
)
from forgekit.data.documents.filters import Account, Filters, Kept, describe_filters
from forgekit.data.documents.protocol import Documents
from forgekit.data.documents.text_files import Paths, stdlib_documents, text_documents
from forgekit.inputs import brief, check_integers, path_of
from forgekit.terminal import printable

__all__ = ["Prepared", "Progress", "prepare"]

ASKED = "vocab_size_asked"
"""Key of the metadata: the size that was asked for; None where the tokenizer was given."""

ENTRY_BYTES = 4 << 20
"""Text between two entries in the journal: what a kill costs at most, about a second's work."""

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

    Documents are read twice, one at a time: for the tokenizer and for the tokens. Fewer documents
    than ``held_out_every`` are each cut instead: the end of each, at a line break, is held out.

    Text is kept as it is, line ends included; a mark (BOM) at the start of a file or line is left
    out. What is not UTF-8, and a text file with a NUL byte, is broken. Special tokens in a text are
    read as plain characters.

    Args:
        source: ``"stdlib"`` for the sources of Python's standard library; files and folders as for
            ``text_documents``; or documents, such as ``text_documents`` with options or
            ``huggingface_documents`` returns.
        out: The directory to make. Made from the same documents (of files: names, sizes, times of
            change) with the same settings before, it is left as it is; else it is replaced when the
            new one is complete. What a killed call had done is taken up.
        vocab_size: Number of tokens, the end of text included; of a tokenizer that is trained here.
        held_out_every: One document in so many is held out.
        progress: Called as ``progress(stage, done, total)``, in bytes of the source; a total of 0
            is unknown.
        filters: Functions of a text that return False for what shall be left out, by the name under
            which that is counted. Each is called several times for a text: it must not remember.
        tokenizer: Use this ``tokenizer.json`` instead of training one; without the truncation and
            padding that it may ask for.
        eos_token: The token that closes each document.
        sample_bytes: Text to train the tokenizer on. Of more, documents all over the source are
            taken by chance.
        shard_tokens: Tokens per file.

    Returns:
        ``Prepared(path, train, held_out, is_new)``. Both token files keep ``text_bytes`` in their
        metadata, for losses in bits per byte; closing tokens count no bytes. ``account`` says what
        was left out.

    Raises:
        FileNotFoundError: If a path does not exist or holds nothing to read.
        FileExistsError: If ``out`` holds anything that was not made here, or another process is
            making it.
        ValueError: If a text cannot be read, a number is out of range, or there is too little text.
    """
    check_integers(
        held_out_every=(held_out_every, -(2**63)),
        sample_bytes=(sample_bytes, 1),
        shard_tokens=(shard_tokens, 1),
    )
    if held_out_every < 2:
        raise ValueError(f"held_out_every {held_out_every} must be at least 2, to leave something.")
    if tokenizer is None:
        check_vocab_size(vocab_size)
        if eos_token != END_OF_TEXT:
            raise ValueError(
                f"eos_token is {brief(eos_token)}; a tokenizer that is trained here closes "
                f'documents with "{END_OF_TEXT}" alone. Leave eos_token out, or pass a tokenizer.'
            )
    if not isinstance(filters or {}, Mapping):
        raise TypeError(f"filters is {brief(filters)}; pass functions by name: {{name: keeps}}.")
    out = path_of("out", out)
    if re.search("[\ud800-\udfff]", str(out)):
        raise ValueError(f"out {brief(str(out))} is not UTF-8; choose another name.")
    documents = _documents(source)
    learned = "" if tokenizer is None else load_tokenizer(tokenizer).to_str()
    settings = f"{vocab_size} {held_out_every} {eos_token} {sample_bytes} {shard_tokens} {learned}"
    facts = f"{settings} {describe_filters(filters or {})} {documents.fingerprint}"
    made_from = hashlib.sha256(os.fsencode(facts)).hexdigest()
    parts = Parts(documents, filters or {}, held_out_every, progress or (lambda *_: None))
    found = find_prepared(out, made_from)
    if found is not None and parts.allows(found.account):
        _warn_of_few(found)
        return found
    with atomic_directory(out, is_replaceable=is_prepared, key=made_from[:12]) as folder:
        kept = find_prepared(folder, made_from)  # the last one was killed before it was renamed
        if kept is None or not parts.allows(kept.account):
            learner = _tokenizer(folder, parts, tokenizer, vocab_size, sample_bytes)
            eos_id = token_id(learner, eos_token)
            facts = {"made_from": made_from, ASKED: vocab_size if tokenizer is None else None}
            _write_tokens(folder, parts, learner, eos_id, shard_tokens, facts)
    prepared = open_prepared(out, is_new=True)
    _warn_of_few(prepared)
    return prepared


def _warn_of_few(prepared: Prepared) -> None:
    """Say that a trained tokenizer is smaller than was asked for: a model must fit it."""
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
    folder: Path,
    parts: Parts,
    given: str | os.PathLike[str] | None,
    vocab_size: int,
    sample_bytes: int,
) -> Any:
    """Load the tokenizer that a killed call had made, or make it."""
    file = folder / TOKENIZER
    if not file.is_file():
        if given is None:
            made = train_tokenizer(parts.sample("tokenizer", sample_bytes), vocab_size)
        else:
            made = load_tokenizer(given)
        temporary = file.with_suffix(".new")
        made.save(str(temporary))
        sync(temporary)
        temporary.rename(file)
    return load_tokenizer(file)


def _write_tokens(
    folder: Path,
    parts: Parts,
    tokenizer: Any,
    eos_id: int,
    shard_tokens: int,
    facts: dict[str, Any],
) -> None:
    """Write both token files, from where a killed call stopped if that can be."""
    work = _Work(folder, parts, tokenizer, eos_id, shard_tokens, facts)
    entry = read_entry(folder)
    if entry is not None and parts.allows(entry.place.account):
        try:
            work.write(entry)
        except DamagedError as error:
            log.warning("%s; the tokens are written from the start", error)
        else:
            return
    clear(folder, but=TOKENIZER)
    work.write(Entry())


@attrs.frozen
class _Work:
    """Texts into token files, with a journal."""

    folder: Path
    parts: Parts
    tokenizer: Any
    eos_id: int
    shard_tokens: int
    facts: dict[str, Any]

    def write(self, entry: Entry) -> None:
        kept = self.parts.keep(entry.place.account)
        text_bytes = list(entry.text_bytes)
        with ExitStack() as stack:
            writers = [stack.enter_context(self._writer(part, entry)) for part in (0, 1)]
            before, unsaved = entry.place, 0
            for (place, part, size), ids in encode_texts(self.tokenizer, self._texts(kept, entry)):
                if unsaved >= ENTRY_BYTES and place is not before:
                    positions = [writer.position() for writer in writers]
                    write_entry(self.folder, Entry(before, tuple(text_bytes), positions))
                    unsaved = 0
                writers[part].append(ids)
                text_bytes[part] += size
                before, unsaved = place, unsaved + size
        for problem in kept.account.first_broken:
            log.warning("left out: %s", printable(problem))
        for writer, size in zip(writers, text_bytes, strict=True):
            writer.finish(self._metadata(size, kept.account))
        (self.folder / JOURNAL).unlink(missing_ok=True)

    def _texts(self, kept: Kept, entry: Entry) -> Iterator[tuple[tuple[Place, int, int], str]]:
        for place, is_held_out, text in self.parts.texts("tokens", kept, entry.place):
            yield (place, int(is_held_out), len(text.encode())), text

    def _writer(self, part: int, entry: Entry) -> TokenWriter:
        place = self.folder / HELD_OUT if part else self.folder
        sizes = (vocabulary_size(self.tokenizer), self.eos_id, self.shard_tokens)
        return TokenWriter(place, *sizes, position=entry.writers[part])

    def _metadata(self, text_bytes: int, account: Account) -> dict[str, Any]:
        dropped = {name: account.dropped.get(name, 0) for name in self.parts.filters}
        left_out = attrs.asdict(attrs.evolve(account, dropped=dropped))
        return {"text_bytes": text_bytes, **self.facts, **left_out}
