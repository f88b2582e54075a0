"""Conversations and prompts as token ids, with a proof of which tokens are trained.

A chat template is a program of its own: it may trim words, close turns with a token or with none,
and re-render earlier turns once later ones follow. So nothing is searched for in the ids. The
conversation is rendered up to each assistant's turn, as at generation, and with the turn; the
second text must begin with the first, and the whole conversation with the second. Then the
difference is what the model will have to write. It is trained up to the token that ends the turn.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from forgekit.checks import brief, parse_json, quoted
from forgekit.data.tokenizer import without_limits

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Message], bool], str]
Span: TypeAlias = "tuple[int, int]"
TrainOn = Literal["all", "last"]

ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
ROLES |= {role: role for role in ("system", "developer", "user", "assistant", "tool")}
"""What ``from`` may say in a turn of ``from`` and ``value``."""

READ = {"role", "content", "tool_calls", "tool_call_id", "name", "id"}
"""Keys of a message that a template may leave unread without a word."""

FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight")
FLAGS += ("loss_scale", "masked")
"""Keys of a message that say whether it is a target: 1, or 0 with ``masked``."""

REASONING = {"reasoning_content", "reasoning", "thinking"}
"""Keys that ``transformers`` takes for one another."""

WORDS_ELSEWHERE = {"value", "text", "parts", "message", "refusal"}
"""Keys under which a message may hold what belongs under ``content``."""

MEDIA = ("image", "images", "video", "videos", "audio", "audios")

PROBES = ("apples and pears", "a very different answer, of two lines.\nThis is the second.")
"""Words that take the place of the assistant's where a template is proved."""

TODAY = datetime(2024, 7, 26)
"""The date for templates that write today's, as Llama 3.2's: rows must not change at midnight."""

WITH_DATE = "".join(f".replace('%{d}', '{TODAY:%{d}}')" for d in "YymdbBaAHMS")
WITH_DATE = "{% macro strftime_now(format) %}{{ format" + WITH_DATE + " }}{% endmacro %}\n"
"""Stands before such a template, in place of the function of ``transformers``."""


@attrs.frozen(eq=False)
class Example:
    """One document to train on.

    Attributes:
        name: Where it was read: a file and a line.
        ids: Token ids, ``[s]`` int32.
        trained: Whether a token is a target, ``[s]`` bool.
        shared: Trained tokens that also hold characters of the prompt, because the tokenizer
            merges across the boundary.
    """

    name: str
    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    shared: int = 0

    def truncated(self, length: int) -> Example:
        """Return the first ``length`` tokens."""
        return attrs.evolve(self, ids=self.ids[:length], trained=self.trained[:length])


@attrs.define
class ChatEncoder:
    """Encodes conversations with the chat template of a tokenizer.

    Attributes:
        tokenizer: A fast tokenizer of ``transformers``; ``tokenizer.json`` and a template are what
            a model's directory holds.
        turn_by_turn: Where a template re-renders earlier turns, make an example of each
            assistant's turn, as it is generated, instead of refusing the conversation.
        train_on: Train all of the assistant's turns, or the last one.
        template: Options of the template, for all conversations.
        unread: How many messages or lines have a key that nothing reads, by its name.
    """

    tokenizer: Any
    turn_by_turn: bool = False
    train_on: TrainOn = "all"
    template: Mapping[str, Any] = attrs.field(factory=dict)
    unread: Counter[str] = attrs.field(factory=Counter, init=False)
    _proved: set[Any] = attrs.field(factory=set, init=False)
    _special: set[int] = attrs.field(factory=set, init=False)
    _words: set[str] = attrs.field(factory=set, init=False, repr=False)
    _backend: Any = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        # Some tokenizers trim white space off the offsets; tokens of it would not be trained.
        text = self.tokenizer.backend_tokenizer.to_str()
        text = text.replace('"trim_offsets":true', '"trim_offsets":false')
        whole = type(self.tokenizer.backend_tokenizer).from_str(text)
        whole.encode_special_tokens = self.tokenizer.split_special_tokens
        self._backend = without_limits(whole)
        added = self.tokenizer.added_tokens_decoder.items()
        self._special = {id for id, token in added if token.special}
        self._special |= {*self.tokenizer.all_special_ids}
        source = self.tokenizer.chat_template or ""
        source = " ".join(source.values()) if isinstance(source, dict) else source
        self._words = set(re.findall(r"\w+", source))
        if unknown := [key for key in self.template if key not in self._words]:
            raise ValueError(f"the chat template does not read {quoted(unknown)} of template=.")

    def conversation(
        self, name: str, messages: Any, *, tools: Any = None, first: int = 0, options: Any = None
    ) -> list[Example]:
        """Encode a conversation; its assistant's turns are trained.

        Args:
            name: Where it was read, for messages.
            messages: ``[{"role": ..., "content": ...}, ...]``, or with ``from`` and ``value``. A
                content is a text, null, or a list of parts of ``"type": "text"``.
            tools: Descriptions of tools, for the template; also as JSON.
            first: Turns before this message are not trained.
            options: Of the template, for this conversation.

        Returns:
            One example with the ids of ``tokenizer.apply_chat_template``, on ``TODAY``, or one per
            turn.

        Raises:
            ValueError: If there is no assistant's turn to train, or the template refuses the
                messages, ends turns with no token of its own, or does not continue what it has
                rendered before; if a message is broken, holds media, or has a flag that cannot be
                obeyed.
        """
        messages, numbers = self._read(name, messages, first)
        tools = [decoded(name, "a tool", tool) for tool in decoded(name, "tools", tools) or ()]
        options = decoded(name, "chat_template_kwargs", options) or {}
        render = partial(self._render, name, tools or None, options)
        if any(m.get("tool_calls") for m in messages) and _takes_texts(messages, render):
            messages = _with_arguments(messages, _as_text)
        words = ((m["role"], bool(m.get("content")), *sorted(m)) for m in messages)
        shape = (*numbers, bool(tools), json.dumps(options, sort_keys=True, default=repr), *words)
        if shape not in self._proved:
            self._prove(name, messages, numbers, render)
            self._proved.add(shape)
        text = render(messages, False)
        self.unread.update(key for key in options if key not in self._words)
        turns = {turn: self._turn(name, messages, turn, render) for turn in numbers}
        changed = [turn for turn, (upto, _) in turns.items() if not text.startswith(upto)]
        if not changed:
            return [self._example(name, text, [span for _, span in turns.values()])]
        if not self.turn_by_turn:
            raise ValueError(
                f"{name}: the chat template re-renders message {changed[0]} once others follow. "
                "Pass turn_by_turn=True to make an example of each turn, or fix the template."
            )
        return [self._example(name, upto, [span]) for upto, span in turns.values()]

    def completion(self, name: str, prompt: str, completion: str) -> Example:
        """Encode a prompt and what follows it; the completion and its end are trained.

        A beginning-of-text token is there if the tokenizer adds one, and once.

        Raises:
            ValueError: If the tokenizer has no token that ends a text.
        """
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ValueError(
                f"{name}: the tokenizer has no eos_token, so a model never learns to stop. Set one."
            )
        example = self._example(name, prompt + completion, [(len(prompt), 2**62)], special=True)
        ids, trained = example.ids, example.trained
        start = self.tokenizer.bos_token_id
        if start is not None and ids[:2].tolist() == [start, start]:  # one is in the prompt's text
            ids, trained = ids[1:], trained[1:]
        if len(ids) and ids[-1] == end and not trained[-1]:  # the tokenizer has added it
            ids, trained = ids[:-1], trained[:-1]
        if not len(ids) or ids[-1] != end:  # else the completion's text ends with it
            ids, trained = np.append(ids, np.int32(end)), np.append(trained, True)
        return attrs.evolve(example, ids=ids, trained=trained)

    def _read(self, name: str, messages: Any, first: int) -> tuple[list[Message], list[int]]:
        """Bring messages into the form that templates read; find the turns to train."""
        clean: list[Message] = []
        targets: list[bool] = []
        known = READ | self._words | (REASONING if REASONING & self._words else set())
        for n, message in enumerate(messages if isinstance(messages, list) else [messages]):
            clean.append(_message(name, message))
            role = clean[n]["role"]
            targets.append(_is_target(f"{name}: message {n}", message, role, self._words))
            unread = clean[n].keys() - known
            if clean[n].get("content") is None and (elsewhere := unread & WORDS_ELSEWHERE):
                raise ValueError(
                    f"{name}: message {n} has no content, but {quoted(elsewhere)}, which nothing "
                    'reads. Rename it to "content".'
                )
            self.unread.update(key for key in unread if clean[n][key] is not None)
        turns = [n for n, m in enumerate(clean) if n >= first and m["role"] == "assistant"]
        turns = turns[-1:] if self.train_on == "last" else turns
        if not (numbers := [n for n in turns if targets[n]]):
            roles = quoted(message["role"] for message in clean[first:])
            flagged = ", and flags mask them all" if turns else ""
            raise ValueError(
                f"{name} has no assistant turn to train; its roles are {roles}{flagged}."
            )
        return clean, numbers

    def _render(
        self, name: str, tools: Any, options: Any, messages: Sequence[Message], is_prompt: bool
    ) -> str:
        try:
            template = self.tokenizer.get_chat_template(tools=tools)
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=WITH_DATE + template if "strftime_now" in template else template,
                tokenize=False,
                add_generation_prompt=is_prompt,
                **{**self.template, **options},
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"{name}: the messages cannot be rendered: {error}. Change them or the template."
            ) from error

    def _turn(
        self, name: str, messages: Sequence[Message], turn: int, render: Render
    ) -> tuple[str, Span]:
        """Render a conversation to the end of a turn; find what the model writes of it."""
        before, upto = render(messages[:turn], True), render(messages[: turn + 1], False)
        if not upto.startswith(before):
            raise ValueError(
                f"{name}: at generation the chat template ends message {turn - 1} with "
                f"{brief(before[-40:])}, and message {turn} does not continue that text. Fix its "
                "add_generation_prompt."
            )
        end = self._end_of_turn(name, messages[turn], upto, len(before), turn)
        written, calls = upto[len(before) : end], messages[turn].get("tool_calls") or ()
        called = [call.get("function") or call for call in calls if isinstance(call, dict)]
        if lost := [call["name"] for call in called if (call.get("name") or "") not in written]:
            raise ValueError(
                f"{name}: the chat template omits the call of {quoted(lost)} in message {turn}, so "
                "a model would learn to say nothing. Fix the template."
            )
        return upto[:end], (len(before), end)

    def _end_of_turn(self, name: str, message: Message, upto: str, start: int, turn: int) -> int:
        """The position in the text behind the last special token of a turn."""
        content = (message.get("content") or "").strip()
        words = upto.find(content, start)  # which may hold a special token themselves
        ids, offsets = self._encode(upto[start:], special=False)
        ends = [stop for id, (_, stop) in zip(ids, offsets, strict=True) if id in self._special]
        if not ends or start + ends[-1] < words + len(content):
            raise ValueError(
                f"{name}: the chat template ends message {turn} with {brief(upto[-20:])}, which "
                "has no special token, so a model never learns to stop. End turns with one."
            )
        return start + ends[-1]

    def _prove(
        self, name: str, messages: Sequence[Message], turns: Sequence[int], render: Render
    ) -> None:
        """Raise if words of the assistant change the text outside of its own turn."""
        for turn in turns:
            content, calls = (messages[turn].get(key) for key in ("content", "tool_calls"))
            if content is None or (calls and not content):
                continue
            seen = set()
            for words in PROBES:
                probed = [*messages[:turn], {**messages[turn], "content": words}]
                upto, (start, end) = self._turn(name, probed, turn, render)
                text = render([*probed, *messages[turn + 1 :]], False)
                text = text if text.startswith(upto) else upto
                seen.add((text[:start], text[end:], words in text[start:end]))
            if len(seen) > 1 or not seen.pop()[2]:
                raise ValueError(
                    f"{name}: other words in message {turn} also change the text outside that "
                    "turn, or do not appear in it, so no mask covers them. Fix the chat template."
                )

    def _example(
        self, name: str, text: str, spans: Sequence[Span], special: bool = False
    ) -> Example:
        """Encode a text; a token is trained if one of its characters lies in a span."""
        ids, offsets = self._encode(text, special)
        starts, stops = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
        trained = np.zeros(len(ids), dtype=bool)
        shared = 0
        for first, last in spans:
            inside = (starts < last) & (stops > first) & (stops > starts)
            shared += int((inside & (starts < first)).sum())
            trained |= inside
        return Example(name, np.asarray(ids, dtype=np.int32), trained, shared)

    def _encode(self, text: str, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._backend.encode(text, add_special_tokens=special)
        return encoded.ids, encoded.offsets


def decoded(name: str, key: str, value: Any) -> Any:
    """Return an object or a list, which may be given as its JSON text; nothing as None.

    Raises:
        ValueError: If it is a text that is neither.

    Examples:
        >>> decoded("a.jsonl:1", "tools", '[{"name": "add"}]'), decoded("a.jsonl:1", "tools", "")
        ([{'name': 'add'}], None)
    """
    if not isinstance(value, str):
        return value
    try:
        read = parse_json(value) if value.strip() else None
    except ValueError:
        read = value
    if not isinstance(read, dict | list | None):
        raise ValueError(
            f"{name} has {brief(value)} as {key}; a text there must be a JSON object or list."
        )
    return read


def flag_of(name: str, holder: Mapping[str, Any], keys: Iterable[str] = FLAGS) -> bool | None:
    """Read what flags say about training a message or a line; None if there are none.

    Raises:
        ValueError: If one is neither 0 nor 1.
    """
    given = {key: holder[key] for key in keys if holder.get(key) is not None}
    for key, value in given.items():
        if value not in (0, 1):
            raise ValueError(
                f'{name} has {brief(value)} as "{key}"; it must be 0 or 1, false or true.'
            )
    return all(bool(value) != (key == "masked") for key, value in given.items()) if given else None


def _is_target(name: str, message: Mapping[str, Any], role: str, words: Set[str]) -> bool:
    unread = (k for k, v in message.items() if v is not None and k not in {*words, *FLAGS})
    if unknown := [key for key in unread if re.search("(^|_)(mask|loss|weight|train)", key)]:
        raise ValueError(
            f"{name} has {quoted(unknown)}, which may select what is trained but is unknown. Use "
            f"one of {quoted(FLAGS)}, or remove the key."
        )
    flag = flag_of(name, message)
    if flag and role != "assistant":
        raise ValueError(
            f'{name} has a flag to train the role "{role}"; only the assistant is trained.'
        )
    return flag is not False


def _message(name: str, message: Any) -> dict[str, Any]:
    """Check a message; return it without flags, its content a text and its calls decoded."""
    given = message if isinstance(message, dict) else {}
    kept: dict[str, Any] = {key: given[key] for key in given if key not in FLAGS}
    if "from" in kept and "role" not in kept:
        kept["role"] = ROLES.get(str(kept.pop("from")))
        kept["content"] = kept.pop("value", None)
    role, content = kept.get("role"), kept.get("content")
    check_media(name, kept)
    if isinstance(content, list):
        kept["content"] = content = "".join(_text(name, part) for part in content)
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise ValueError(
            f"{name}: messages contain {brief(message)}; each must have a text under "
            f'"role" and a text, or null, under "content". "from" may be {quoted(ROLES)}.'
        )
    if calls := decoded(name, "tool_calls", kept.get("tool_calls")):
        calls = calls if isinstance(calls, list) else [calls]
        kept["tool_calls"] = [_call(call, partial(_arguments, name)) for call in calls]
    return kept


def _text(name: str, part: Any) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, part)
    if kind in (None, "text") and isinstance(text, str):
        return text
    raise ValueError(f"{name}: messages contain {brief(part)}; only parts of text can be trained.")


def check_media(name: str, holder: Mapping[str, Any]) -> None:
    """Refuse a message or a line with pictures, sounds or films, which no row can hold."""
    if media := [key for key in MEDIA if holder.get(key)]:
        raise ValueError(f"{name} has {quoted(media)}; only text can be trained. Leave it out.")


def _call(call: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tool call with other arguments."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _with_arguments(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    changed = [[_call(call, change) for call in m.get("tool_calls") or ()] for m in messages]
    pairs = zip(messages, changed, strict=True)
    return [{**message, "tool_calls": calls} if calls else message for message, calls in pairs]


def _takes_texts(messages: Sequence[Message], render: Render) -> bool:
    """Whether a template writes arguments as they stand, so that an object would be Python's."""
    probe = {PROBES[0]: None}
    try:
        return str(probe) in render(_with_arguments(messages, lambda _: probe), False)
    except ValueError:
        return True


def _arguments(name: str, value: Any) -> Any:
    """Return arguments as the object that a text writes, as ``transformers`` and ``vLLM`` do."""
    if isinstance(value, str) and value.strip()[:1] not in ("", "{", "["):  # plain words
        return value
    read = decoded(name, "arguments of a tool call", value)
    return {} if read is None else read


def _as_text(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
