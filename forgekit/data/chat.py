"""Rows of packed conversations and preference pairs, whose labels are the trained tokens only."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import attrs
import numpy as np

from forgekit.checks import brief, check_choice, quoted
from forgekit.data.batch import IGNORED
from forgekit.data.chat_template import ChatEncoder, Example, common_messages
from forgekit.data.packing import Bins, pack
from forgekit.data.rows import InMemory, RowDataset
from forgekit.data.text_files import Paths, files_at, json_objects
from forgekit.data.tokenizer import vocabulary_size
from forgekit.environment import require

LongExamples = Literal["error", "truncate", "drop"]


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
    paths: Paths,
    tokenizer: Any,
    seq_len: int,
    *,
    long: LongExamples = "error",
    turn_by_turn: bool = False,
    held_out_every: int | None = None,
) -> RowDataset:
    """Read conversations and prompts to fine-tune on; pack them into rows.

    A line of a file is ``{"messages": [{"role", "content"}, ...]}``, with ``"tools"`` if the
    template takes them, or ``{"prompt", "completion"}``, both texts or both lists of messages. Of
    ``messages`` all assistant's turns are trained, up to the token that ends each; of a prompt and
    a completion the latter and its end. Which tokens these are is proved for every conversation:
    see ``forgekit.data.chat_template``. Examples are held in memory, 8 bytes per token.

    Args:
        paths: ``.jsonl`` files.
        tokenizer: A fast tokenizer of ``transformers`` with a chat template, or the directory to
            load it from.
        seq_len: Positions in a row. An example is never split over rows.
        long: What becomes of an example of more tokens than ``seq_len``: an error, cut at the end,
            or dropped. Both are counted.
        turn_by_turn: Where a template re-renders earlier turns (some strip the reasoning), make an
            example of each assistant's turn instead of refusing the line.
        held_out_every: One line in so many is held out, for ``dataset.held_out()``.

    Returns:
        A map-style dataset of rows as ``packed_dataset`` makes them. ``print(dataset.counts)`` says
        what became of the lines and which share of tokens is supervised.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a line is broken, has no answer to train or cannot be proved, an example is
            too long with ``long="error"``, or nothing is supervised.
    """
    encoder = ChatEncoder(_tokenizer(tokenizer), turn_by_turn)
    encode = partial(_encode_line, encoder)
    return _dataset(paths, encoder, encode, seq_len, long, held_out_every)


def preference_dataset(
    paths: Paths,
    tokenizer: Any,
    seq_len: int,
    *,
    long: Literal["error", "drop"] = "error",
    held_out_every: int | None = None,
) -> RowDataset:
    """Read pairs of a chosen and a rejected answer; pack pairs into rows.

    A line is ``{"prompt", "chosen", "rejected"}``, all texts or all lists of messages; without a
    prompt ``chosen`` and ``rejected`` are conversations that begin alike. Both answers of a pair
    are documents of one row: the chosen one has an even number in ``doc_ids``, and the rejected
    one the next. Only the answers have labels.

    Args:
        paths: ``.jsonl`` files.
        tokenizer: A fast tokenizer of ``transformers``, or its directory.
        seq_len: Positions in a row; a pair takes the tokens of both.
        long: Whether a pair of more tokens than ``seq_len`` is an error or dropped.
        held_out_every: One line in so many is held out, for ``dataset.held_out()``.

    Returns:
        A map-style dataset of rows; see ``chat_dataset``.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a line is broken, an answer has several turns that the template re-renders,
            a pair is too long with ``long="error"``, or there are no pairs.
    """
    check_choice("long", long, ("error", "drop"))
    encoder = ChatEncoder(_tokenizer(tokenizer))
    encode = partial(_encode_pair, encoder)
    return _dataset(paths, encoder, encode, seq_len, long, held_out_every)


def _tokenizer(tokenizer: Any) -> Any:
    if not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    transformers = require("transformers", extra="hf")
    try:
        return transformers.AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except Exception as error:  # transformers has many of its own
        why = " ".join(str(error).split())
        raise ValueError(
            f"{tokenizer} has no tokenizer that transformers can load: {why} Name a directory with "
            "a tokenizer.json, or pass a tokenizer."
        ) from error


def _encode_line(
    encoder: ChatEncoder, name: str, line: dict[str, Any]
) -> list[tuple[Example, ...]]:
    if "messages" in line:
        examples = encoder.conversation(name, line["messages"], tools=line.get("tools"))
    elif "prompt" in line and "completion" in line:
        examples = _answer(encoder, name, line, "completion")
    else:
        raise ValueError(
            f"{name} has the keys {quoted(line)}; a line to train on has "
            '"messages", or "prompt" and "completion".'
        )
    return [(example,) for example in examples]


def _encode_pair(
    encoder: ChatEncoder, name: str, line: dict[str, Any]
) -> list[tuple[Example, ...]]:
    if not {"chosen", "rejected"} <= line.keys():
        raise ValueError(
            f'{name} has the keys {quoted(line)}; a preference has "chosen" and "rejected", and '
            'a "prompt" unless both hold it.'
        )
    if "prompt" not in line and all(isinstance(line[key], list) for key in ("chosen", "rejected")):
        first = common_messages(line["chosen"], line["rejected"])
        line = {**line, "prompt": line["chosen"][:first]}
        line.update({key: line[key][first:] for key in ("chosen", "rejected")})
    return [tuple(_answer(encoder, name, line, key)[0] for key in ("chosen", "rejected"))]


def _answer(encoder: ChatEncoder, name: str, line: dict[str, Any], key: str) -> list[Example]:
    """Encode a prompt and what answers it: two texts, or two lists of messages."""
    prompt, answer = line.get("prompt"), line[key]
    if isinstance(prompt, list) and isinstance(answer, list):
        tools, first = line.get("tools"), len(prompt)
        return encoder.conversation(name, prompt + answer, tools=tools, first=first)
    if isinstance(prompt, str) and isinstance(answer, str):
        return [encoder.completion(name, prompt, answer)]
    raise ValueError(
        f"{name} has {brief(prompt)} as prompt and {brief(answer)} as {key}; both must be "
        "texts, or both lists of messages."
    )


def _dataset(
    paths: Paths,
    encoder: ChatEncoder,
    encode: Callable[[str, dict[str, Any]], list[tuple[Example, ...]]],
    seq_len: int,
    long: LongExamples,
    held_out_every: int | None,
) -> RowDataset:
    check_choice("long", long, get_args(LongExamples))
    lines = itertools.chain.from_iterable(map(json_objects, files_at(paths)))
    train, held_out = _Part(seq_len, long), _Part(seq_len, long)
    for number, (name, line) in enumerate(lines, start=1):
        is_held_out = held_out_every is not None and number % held_out_every == 0
        (held_out if is_held_out else train).add(encode(name, line))
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
            # The first token of a document is no target.
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
            raise ValueError(
                f"nothing is supervised: {self.counts}. Pass a larger seq_len, or look at the "
                "lines."
            )
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
