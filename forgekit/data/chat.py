"""Rows of packed conversations and preference pairs, whose labels are the trained tokens only."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import attrs
import numpy as np

from forgekit.checks import brief, check_choice, quoted
from forgekit.data.batch import IGNORED
from forgekit.data.chat_template import (
    ChatEncoder,
    Example,
    TrainOn,
    check_media,
    flag_of,
)
from forgekit.data.packing import Bins, pack
from forgekit.data.rows import InMemory, RowDataset
from forgekit.data.text_files import Paths, files_at, json_objects
from forgekit.data.tokenizer import vocabulary_size
from forgekit.environment import require

log = logging.getLogger("forgekit")

LongExamples = Literal["error", "truncate", "drop"]

LINE_FLAGS = ("weight", "sample_weight", "loss_weight", "mask_prompt")
"""Keys of a line that say something else than is done here if they are 0."""

OTHER_FLAGS = ("train_on_inputs", "train_on_input", "train_on_prompt", "mask_history")
"""Keys of a line that say something else than is done here if they are 1."""

ROLE_KEYS = ("role", "from")

CONTEXT = ("tools", "chat_template_kwargs", "system")
"""Keys of a line that its conversation is rendered with."""

SHOWN_KEYS = 10
"""Keys that nothing reads and that are named in the log."""


@attrs.define
class ChatCounts:
    """What became of the lines of a data set.

    Attributes:
        lines: Lines that were read.
        examples: Documents in the rows.
        tokens: Tokens of all examples.
        trained: Tokens among them that are targets.
        truncated: Examples that were cut at ``seq_len``.
        dropped: Examples left out, because they are longer or have no target left.
        turn_by_turn: Conversations of which an example was made of each turn.
        shared: Trained tokens that also hold characters of the prompt.
    """

    lines: int = 0
    examples: int = 0
    tokens: int = 0
    trained: int = 0
    truncated: int = 0
    dropped: int = 0
    turn_by_turn: int = 0
    shared: int = 0

    def __str__(self) -> str:
        others = ("truncated", "dropped", "turn_by_turn", "shared")
        counts = [f", {getattr(self, key):,} {key}" for key in others if getattr(self, key)]
        return (
            f"{self.examples:,} examples of {self.lines:,} lines, {self.tokens:,} tokens, "
            f"{self.trained / max(1, self.tokens):.1%} of them supervised{''.join(counts)}"
        )


def chat_dataset(
    paths: Paths | Any,
    tokenizer: Any,
    seq_len: int,
    *,
    long: LongExamples = "error",
    turn_by_turn: bool = False,
    train_on: TrainOn = "all",
    template: Mapping[str, Any] | None = None,
    held_out_every: int | None = None,
) -> RowDataset:
    """Read conversations and prompts to fine-tune on; pack them into rows.

    A line of a file is ``{"messages": [{"role", "content"}, ...]}``, with ``"tools"`` if the
    template takes them, or ``{"prompt", "completion"}``, both texts or both lists of messages. Of
    ``messages`` all assistant's turns are trained, up to the token that ends each, unless they have
    a flag such as ``"weight": 0``; of a prompt and a completion the latter and its end. Which
    tokens these are is proved for every conversation: see ``forgekit.data.chat_template``. Examples
    are held in memory, 8 bytes per token. Keys that nothing reads are named in the log.

    Args:
        paths: Files of JSON lines, also compressed, or of one JSON array; ``.parquet`` files; a
            folder of ``save_to_disk``; or a ``Dataset`` of Hugging Face or a list of such lines.
        tokenizer: A fast tokenizer of ``transformers`` with a chat template, or the directory to
            load it from.
        seq_len: Positions in a row. An example is never split over rows.
        long: What becomes of an example of more tokens than ``seq_len``: an error, cut at the end,
            or dropped. Both are counted.
        turn_by_turn: Where a template re-renders earlier turns (some strip the reasoning), make an
            example of each assistant's turn instead of refusing the line.
        train_on: Train all of the assistant's turns, or of each conversation the last.
        template: Options of the chat template for all lines, as ``{"enable_thinking": False}``;
            ``"chat_template_kwargs"`` of a line comes before them.
        held_out_every: One line in so many is held out, for ``dataset.held_out()``.

    Returns:
        A map-style dataset of rows as ``packed_dataset`` makes them. ``print(dataset.counts)`` says
        what became of the lines and which share of tokens is supervised.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a line is broken, has no answer to train or cannot be proved, an example is
            too long with ``long="error"``, or nothing is supervised; if the template has no such
            option.
    """
    check_choice("train_on", train_on, get_args(TrainOn))
    encoder = ChatEncoder(load_tokenizer(tokenizer), turn_by_turn, train_on, template or {})
    encode = partial(_encode_line, encoder)
    return _dataset(paths, encoder, encode, seq_len, long, held_out_every)


def preference_dataset(
    paths: Paths | Any,
    tokenizer: Any,
    seq_len: int,
    *,
    long: Literal["error", "drop"] = "error",
    template: Mapping[str, Any] | None = None,
    held_out_every: int | None = None,
) -> RowDataset:
    """Read pairs of a chosen and a rejected answer; pack pairs into rows.

    A line is ``{"prompt", "chosen", "rejected"}``, all texts or all lists of messages; without a
    prompt ``chosen`` and ``rejected`` are conversations that begin alike. Both answers of a pair
    are documents of one row: the chosen one has an even number in ``doc_ids``, and the rejected
    one the next. Only the answers have labels.

    Args:
        paths: Files, or lines; see ``chat_dataset``.
        tokenizer: A fast tokenizer of ``transformers``, or its directory.
        seq_len: Positions in a row; a pair takes the tokens of both.
        long: Whether a pair of more tokens than ``seq_len`` is an error or dropped.
        template: Options of the chat template; see ``chat_dataset``.
        held_out_every: One line in so many is held out, for ``dataset.held_out()``.

    Returns:
        A map-style dataset of rows; see ``chat_dataset``.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a line is broken, an answer has several turns that the template re-renders,
            a pair is too long with ``long="error"``, or there are no pairs.
    """
    check_choice("long", long, ("error", "drop"))
    encoder = ChatEncoder(load_tokenizer(tokenizer), template=template or {})
    encode = partial(_encode_pair, encoder)
    return _dataset(paths, encoder, encode, seq_len, long, held_out_every)


def load_tokenizer(tokenizer: Any) -> Any:
    """Load the tokenizer of a directory; one that is loaded stays as it is."""
    if not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    transformers = require("transformers", extra="hf")
    try:
        return transformers.AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        message = f"{tokenizer} has no tokenizer that transformers can load: {error}"
        raise ValueError(message) from error


def _encode_line(
    encoder: ChatEncoder, name: str, line: dict[str, Any]
) -> list[tuple[Example, ...]]:
    key = next((key for key in ("messages", "conversations") if line.get(key) is not None), "")
    if key:
        examples = _conversation(encoder, name, line, (), line[key], {key})
    elif "prompt" in line and "completion" in line:
        examples = _answer(encoder, name, line, "completion")
    else:
        raise ValueError(
            f"{name} has the keys {quoted(line)}; a line to train on has "
            '"messages", "conversations", or "prompt" and "completion".'
        )
    return [(example,) for example in examples]


def _encode_pair(
    encoder: ChatEncoder, name: str, line: dict[str, Any]
) -> list[tuple[Example, ...]]:
    if not {"chosen", "rejected"} <= line.keys():
        raise ValueError(
            f'{name} has the keys {quoted(line)}; a preference has "chosen" and "rejected".'
        )
    answers = [line["chosen"], line["rejected"]]
    if "prompt" not in line and all(isinstance(answer, list) for answer in answers):
        pairs = list(zip(*answers, strict=False))[:-1]  # each keeps its last message
        first = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
        parts = {"chosen": answers[0][first:], "rejected": answers[1][first:]}
        line = {**line, "prompt": answers[0][:first], **parts}
    chosen = _answer(encoder, name, line, "chosen", {"rejected"})
    rest = {key: line[key] for key in line.keys() & {"prompt", "rejected", *CONTEXT}}
    return [(chosen[0], _answer(encoder, name, rest, "rejected")[0])]


def _answer(
    encoder: ChatEncoder, name: str, line: dict[str, Any], key: str, other: Set[str] = frozenset()
) -> list[Example]:
    """Encode a prompt and what answers it: two texts, or two lists of messages."""
    prompt, answer, read = line.get("prompt"), line[key], {"prompt", key, *other}
    if isinstance(prompt, list) and isinstance(answer, list):
        return _conversation(encoder, name, line, prompt, answer, read)
    if isinstance(prompt, str) and isinstance(answer, str):
        _check_line(encoder, name, line, read)
        return [encoder.completion(name, prompt, answer)]
    raise ValueError(
        f"{name} has {brief(prompt)} as prompt and {brief(answer)} as {key}; both must be texts, "
        "or lists of messages."
    )


def _conversation(
    encoder: ChatEncoder,
    name: str,
    line: dict[str, Any],
    prompt: Sequence[Any],
    answer: Any,
    read: Set[str],
) -> list[Example]:
    """Encode messages, with what a line says about all of them."""
    _check_line(encoder, name, line, {*read, *CONTEXT})
    if isinstance(answer, list):
        system = line.get("system")
        answer = [*prompt, *answer]
        if system and isinstance(answer[0], dict) and "system" in map(answer[0].get, ROLE_KEYS):
            raise ValueError(f'{name} has "system" and a first message of that role; keep one.')
        if system:
            answer, prompt = [{"role": "system", "content": system}, *answer], ["", *prompt]
    tools, options = line.get("tools"), line.get("chat_template_kwargs")
    return encoder.conversation(name, answer, tools=tools, first=len(prompt), options=options)


def _check_line(encoder: ChatEncoder, name: str, line: dict[str, Any], read: Set[str]) -> None:
    """Refuse what a line says about its loss and is not done; count the keys that nothing reads."""
    check_media(name, line)
    if flag_of(name, line, LINE_FLAGS) is False or any(map(line.get, OTHER_FLAGS)):
        flags = {key: line[key] for key in (*LINE_FLAGS, *OTHER_FLAGS) if key in line}
        raise ValueError(
            f"{name} has {brief(flags)}; the answers of a line are trained with weight 1. Remove "
            'the line or the flag; train_on="last" trains only last turns.'
        )
    unread = line.keys() - {*read, *LINE_FLAGS, *OTHER_FLAGS}
    encoder.unread.update(key for key in unread if line[key] is not None)


def _lines(source: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the content of each line or row."""
    markers = ("state.json", "dataset_dict.json")
    if isinstance(source, str | os.PathLike) and any(Path(source, m).is_file() for m in markers):
        source = require("datasets", extra="data").load_from_disk(os.fspath(source))
    if isinstance(source, dict):
        raise ValueError(f"the dataset has splits {quoted(source)}; pass one of them.")
    if hasattr(source, "with_format"):
        rows = cast(Any, source).with_format(None)
        yield from ((f"row {n}", _without_nulls(row)) for n, row in enumerate(rows))
    elif isinstance(source, list) and source and isinstance(source[0], dict):
        yield from ((f"line {n}", line) for n, line in enumerate(source))
    else:
        for file in files_at(source):
            is_table = file.suffix.lower() == ".parquet"
            for name, line in json_objects(file):
                yield name, _without_nulls(line) if is_table else line


def _without_nulls(value: Any) -> Any:
    """Leave out what a row of a table has only because other rows do: its keys that are null.

    Examples:
        >>> _without_nulls({"messages": [{"role": "user", "content": None, "name": None}]})
        {'messages': [{'role': 'user', 'content': None}]}
    """
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if v is not None or k == "content"}
        return {key: _without_nulls(inner) for key, inner in kept.items()}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _dataset(
    paths: Paths | Any,
    encoder: ChatEncoder,
    encode: Callable[[str, dict[str, Any]], list[tuple[Example, ...]]],
    seq_len: int,
    long: LongExamples,
    held_out_every: int | None,
) -> RowDataset:
    check_choice("long", long, get_args(LongExamples))
    train, held_out = _Part(seq_len, long), _Part(seq_len, long)
    for number, (name, line) in enumerate(_lines(paths), start=1):
        is_held_out = held_out_every is not None and number % held_out_every == 0
        (held_out if is_held_out else train).add(encode(name, line))
    if encoder.unread:
        most = sorted(encoder.unread.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_KEYS]
        keys = [f'"{key}" ({count:,})' for key, count in most]
        log.warning("Keys that neither forgekit nor the chat template reads: %s.", ", ".join(keys))
    rest = held_out.dataset(encoder.tokenizer) if held_out.kept else None
    return train.dataset(encoder.tokenizer, rest)


@attrs.define
class _Part:
    """Examples as they are read: those of a line are kept in one row."""

    seq_len: int
    long: LongExamples
    kept: list[tuple[Example, ...]] = attrs.field(factory=list)
    counts: ChatCounts = attrs.field(factory=ChatCounts)

    def add(self, groups: list[tuple[Example, ...]]) -> None:
        counts = self.counts
        counts.lines += 1
        counts.turn_by_turn += len(groups) > 1
        for group in groups:
            size = sum(len(example.ids) for example in group)
            is_long = size > self.seq_len
            if is_long and self.long == "error":
                raise ValueError(
                    f"{group[0].name} has {size} tokens; a row has {self.seq_len} positions. Pass "
                    'long="truncate" or long="drop", or a larger seq_len.'
                )
            if is_long and self.long == "truncate":
                group = tuple(example.truncated(self.seq_len) for example in group)
                counts.truncated += 1
            # The first token of a document is not a target.
            trained = sum(int(example.trained[1:].sum()) for example in group)
            if not trained or (is_long and self.long == "drop"):
                counts.dropped += 1
                continue
            counts.examples += len(group)
            counts.tokens += sum(len(example.ids) for example in group)
            counts.trained += trained
            counts.shared += sum(example.shared for example in group)
            self.kept.append(group)

    def dataset(self, tokenizer: Any, rest: RowDataset | None = None) -> RowDataset:
        if not self.kept:
            raise ValueError(f"nothing is supervised: {self.counts}. Is seq_len too small?")
        examples = list(itertools.chain(*self.kept))
        ids = np.concatenate([example.ids for example in examples])
        trained = np.concatenate([example.trained for example in examples])
        offsets = np.cumsum([0, *(len(example.ids) for example in examples)])
        sizes = {"vocab_size": vocabulary_size(tokenizer), "eos_id": tokenizer.eos_token_id or 0}
        labels = np.where(trained, ids, np.int32(IGNORED))
        documents = InMemory(ids, offsets, labels, **sizes)
        bins = _bins(self.kept, self.seq_len)
        return RowDataset(documents, self.seq_len, bins, counts=self.counts, rest=rest)


def _bins(groups: Sequence[tuple[Example, ...]], capacity: int) -> Bins:
    """Pack groups of examples; those of a group become consecutive pieces of one row."""
    each = len(groups[0])
    lengths = np.array([[len(example.ids) for example in group] for group in groups])
    bins = pack(lengths.sum(1), capacity)
    documents = bins.documents[:, None] * each + np.arange(each)
    starts, lengths = np.zeros(documents.size, dtype=np.int64), lengths[bins.documents].ravel()
    return Bins(bins.offsets * each, documents.ravel(), starts, lengths, capacity=capacity)
