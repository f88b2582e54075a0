"""Conversations and prompts as token ids, with a proof of which tokens are trained.

A chat template is a program of its own: it may trim words, close turns with a token or with none,
and re-render earlier turns once later ones follow. So nothing is searched for in the ids. The
conversation is rendered up to each assistant's turn, as at generation, and with the turn; the
second text must begin with the first, and the whole conversation with the second. Then the
difference is what the model will have to write. It is trained up to the token that ends the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from forgekit.checks import brief, quoted
from forgekit.data.tokenizer import without_limits

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Message], bool], str]
Span: TypeAlias = "tuple[int, int]"

PROBES = ("apples and pears", "a very different answer, of two lines.\nThis is the second.")
"""Words that take the place of the assistant's where a template is proved."""

TODAY = datetime(2024, 7, 26)
"""The date for templates that write today's, as Llama 3.2's: rows must not change at midnight."""

DIRECTIVES = ("%Y", "%y", "%m", "%d", "%b", "%B", "%a", "%A", "%H", "%M", "%S")
WITH_DATE = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f".replace('{directive}', '{TODAY:{directive}}')" for directive in DIRECTIVES)
    + " }}{% endmacro %}\n"
)
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
    """

    tokenizer: Any
    turn_by_turn: bool = False
    _proved: set[Any] = attrs.field(factory=set, init=False)
    _special: set[int] = attrs.field(factory=set, init=False)
    _backend: Any = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        # Some tokenizers trim white space off the offsets; tokens of it would not be trained.
        text = self.tokenizer.backend_tokenizer.to_str()
        text = text.replace('"trim_offsets":true', '"trim_offsets":false')
        whole = type(self.tokenizer.backend_tokenizer).from_str(text)
        whole.encode_special_tokens = self.tokenizer.split_special_tokens
        self._backend = without_limits(whole)
        added = self.tokenizer.added_tokens_decoder
        special = (id for id in added if added[id].special)
        self._special = {*self.tokenizer.all_special_ids, *special}

    def conversation(
        self, name: str, messages: Any, *, tools: Any = None, first: int = 0
    ) -> list[Example]:
        """Encode a conversation; its assistant's turns are trained.

        Args:
            name: Where it was read, for messages.
            messages: ``[{"role": ..., "content": ...}, ...]``.
            tools: Descriptions of tools, for the template.
            first: Turns before this message are not trained.

        Returns:
            One example with the ids of ``tokenizer.apply_chat_template``, on ``TODAY``, or one per
            turn.

        Raises:
            ValueError: If there is no assistant's turn to train, or the template refuses the
                messages, ends turns with no token of its own, or does not continue what it has
                rendered before.
        """
        _check_messages(name, messages)
        numbers = [n for n, m in enumerate(messages) if n >= first and m["role"] == "assistant"]
        if not numbers:
            roles = quoted(message["role"] for message in messages[first:])
            raise ValueError(f"{name} has no assistant's turn to train; its roles are {roles}.")

        def render(some: Sequence[Message], is_prompt: bool) -> str:
            return self._render(name, some, tools, is_prompt)

        words = ((m["role"], bool(m.get("content")), *sorted(m)) for m in messages)
        shape = (first, bool(tools), *words)
        if shape not in self._proved:
            self._prove(name, messages, numbers, render)
            self._proved.add(shape)
        text = render(messages, False)
        turns = {turn: self._turn(name, messages, turn, render) for turn in numbers}
        changed = [turn for turn, (upto, _) in turns.items() if not text.startswith(upto)]
        if not changed:
            return [self._example(name, text, [span for _, span in turns.values()])]
        if not self.turn_by_turn:
            raise ValueError(
                f"{name}: the chat template re-renders message {changed[0]} once others follow. "
                "Pass turn_by_turn=True to make an example of each turn, or mend the template."
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
        ids, trained = np.append(ids, np.int32(end)), np.append(trained, True)
        return attrs.evolve(example, ids=ids, trained=trained)

    def _render(self, name: str, messages: Sequence[Message], tools: Any, is_prompt: bool) -> str:
        try:
            template = self.tokenizer.get_chat_template(tools=tools)
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=WITH_DATE + template if "strftime_now" in template else template,
                tokenize=False,
                add_generation_prompt=is_prompt,
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
                f"{brief(before[-40:])}, and message {turn} does not go on from there. Mend "
                "add_generation_prompt in the template."
            )
        end = self._end_of_turn(name, messages[turn], upto, len(before), turn)
        written, calls = upto[len(before) : end], messages[turn].get("tool_calls") or ()
        called = [call.get("function") or call for call in calls if isinstance(call, dict)]
        if lost := [call["name"] for call in called if (call.get("name") or "") not in written]:
            raise ValueError(
                f"{name}: the chat template leaves out the call of {quoted(lost)} in message "
                f"{turn}, so a model learns to say nothing there. Mend the template."
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
                "holds no special token, so a model never learns to stop. Close turns with one."
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
                    f"{name}: other words in message {turn} also change the text outside of that "
                    "turn, or do not appear in it, so no mask covers them. Mend the chat template."
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


def common_messages(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Count the messages that two conversations begin with alike.

    Examples:
        >>> common_messages(["question", "good"], ["question", "bad"])
        1
    """
    alike = (a == b for a, b in zip(one, other, strict=False))
    return next((n for n, same in enumerate(alike) if not same), min(len(one), len(other)))


def _check_messages(name: str, messages: Any) -> None:
    for message in messages if isinstance(messages, list) and messages else [messages]:
        role, content = None, None
        if isinstance(message, dict):
            role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str | None):
            raise ValueError(
                f"{name}: messages hold {brief(message)}; they must be a list of objects with a "
                'text under "role" and a text, or null, under "content".'
            )
