"""A model as lm-eval (the language model evaluation harness) asks for one.

Tasks, prompts and metrics are lm-eval's; here are the three questions that they come down to: how
likely a continuation is, how likely a text is, and what follows a prompt. Every rank asks the same
questions in the same order and gets the same answers, in any layout without pipeline stages.

References:
    https://github.com/EleutherAI/lm-evaluation-harness/blob/main/docs/model_guide.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgekit.data.optional_packages import require
from forgekit.data.tokenizer import END_OF_TEXT
from forgekit.evaluation.generate import generate
from forgekit.inputs import check_integers, quoted
from forgekit.parallel.context.context_parallel import with_sockets
from forgekit.parallel.layout import full
from forgekit.state import layout_of
from forgekit.steps.forward import evaluating

Pair: TypeAlias = "tuple[list[int], list[int]]"
"""Ids of a context, at least one, and of what follows it."""

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks have for the number of new tokens, the first that is there counts."""


def lm_eval_model(model: nn.Module, tokenizer: Any, **options: Any) -> Any:
    """Give lm-eval a model, in any layout without pipeline stages.

    Args:
        model: Maps ids ``[b s]`` to logits ``[b s v]``; a ``Transformer`` or a foreign model.
        tokenizer: Of ``tokenizers`` or ``transformers``.
        **options: As for ``HarnessModel``.

    Returns:
        An ``lm_eval.api.model.TemplateLM``.

    Raises:
        ImportError: If lm-eval is not installed.
        ValueError: As ``HarnessModel``.

    Examples:
        On every rank::

            lm = lm_eval_model(state.model, load_tokenizer("data/stdlib"))
            lm_eval.simple_evaluate(model=lm, tasks=["lambada_openai"])
    """
    base = require("lm_eval.api.model", extra="eval").TemplateLM
    kind: Any = type("ForgekitLM", (HarnessModel, base), {})
    return kind(model, tokenizer, **options)


class HarnessModel:
    """Answers the requests of lm-eval, in their order; ``lm_eval_model`` makes one of its classes.

    What a tokenizer adds to a text by itself, such as a BOS token, is never there twice: not where
    a text begins with it, and not before a text that is scored from its first token on, which
    ``prefix_id`` precedes already.

    Args:
        model: Maps ids ``[b s]`` to logits ``[b s v]``.
        tokenizer: Of ``tokenizers`` or ``transformers``.
        batch_size: Requests per call of the model.
        eos_id: The id that ends a text; by default the tokenizer's.
        prefix_id: What a text without a context is conditioned on; by default the tokenizer's
            beginning of a sequence, or ``eos_id``, which closes the document before.
        add_special_tokens: Whether the tokenizer adds its special tokens to prompts; None leaves
            it to the tokenizer.
        max_length: Positions of one call; by default what the model takes.
        max_new_tokens: New tokens where a task does not say how many.

    Raises:
        ValueError: If there is no ``eos_id``, ``max_length`` is unknown or longer than the model
            takes, or the model is split into pipeline stages.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        batch_size: int = 8,
        eos_id: int | None = None,
        prefix_id: int | None = None,
        add_special_tokens: bool | None = None,
        max_length: int | None = None,
        max_new_tokens: int = 256,
    ) -> None:
        super().__init__()
        check_integers(batch_size=(batch_size, 1), max_new_tokens=(max_new_tokens, 1))
        self.model, self.tokenizer, self.layout = model, tokenizer, layout_of(model)
        if self.layout.stages is not None:
            raise ValueError(
                "this model is split into pipeline stages, and a rank can run only its own. To "
                "evaluate it with lm-eval, load its checkpoint into a layout with pp=1."
            )
        self.batch_size, self.max_gen_toks = batch_size, max_new_tokens
        self.max_length = _length(self.layout.longest, max_length, self.layout.sequence)
        self._end = _end_of_text(tokenizer) if eos_id is None else eos_id
        bos = getattr(tokenizer, "bos_token_id", None)
        self._prefix = next(id for id in (prefix_id, bos, self._end) if id is not None)
        self._adds = add_special_tokens

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self._end

    @property
    def prefix_token_id(self) -> int:
        """The id that stands before a text without a context."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's caches of requests."""
        return str(getattr(self.tokenizer, "name_or_path", type(self.tokenizer).__name__))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Ids of a text, with the tokenizer's special tokens unless it begins with them.

        Args:
            string: The text.
            add_special_tokens: Whether the tokenizer adds its own; None decides by the text.
        """
        adds = self._adds if add_special_tokens is None else add_special_tokens
        prefix = self._text([self.prefix_token_id])
        if add_special_tokens is None and prefix and string.startswith(prefix):
            adds = False
        encoded = self.tokenizer.encode(
            string, **({} if adds is None else {"add_special_tokens": adds})
        )
        return list(getattr(encoded, "ids", encoded))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the template of a tokenizer of ``transformers``."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(self, requests: Sequence[Any], **_options: Any) -> list[tuple[float, bool]]:
        """How likely each continuation is after its context, and whether greedy decoding gives it.

        Args:
            requests: Have ``args = (context, continuation)``.

        Returns:
            ``(log-probability, is greedy)`` for each, in nats.
        """
        pairs = [(request.args, *self._pair(*request.args)) for request in requests]
        return self._loglikelihood_tokens(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_options: Any) -> list[float]:
        """How likely each text is from its first token on, each token scored once.

        A text that is longer than the model takes is scored in windows; the last one begins
        earlier, so that its tokens have as much context as there is room for.

        Args:
            requests: Have ``args = (text,)``.

        Returns:
            The log-probability of each, in nats.
        """
        windows = [self._windows(request.args[0]) for request in requests]
        scores = iter(self._score([pair for each in windows for pair in each]))
        totals = [sum(next(scores)[0] for _ in each) for each in windows]
        for request, total in zip(requests, totals, strict=True):
            self._note("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], **_options: Any) -> list[str]:
        """What follows each prompt, up to a stop text, which is left out.

        Args:
            requests: Have ``args = (context, options)``; of the options ``until``, the number of
                new tokens, ``do_sample``, ``temperature``, ``top_k`` and ``top_p`` count.

        Returns:
            The new text of each.

        Raises:
            ValueError: If an option asks for what ``forgekit.generate`` does not do.
        """
        found: dict[int, str] = {}
        kinds: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        for numbers in kinds.values():
            asked = _Asked.of(requests[numbers[0]].args[1], self.max_gen_toks)
            prompts = {n: self._prompt(requests[n].args[0], asked.length) for n in numbers}
            order = sorted(numbers, key=lambda n: -len(prompts[n]))
            for some in _batches(order, self.batch_size):
                texts = self._continue([prompts[n] for n in some], asked)
                found |= zip(some, texts, strict=True)
        for number, request in enumerate(requests):
            self._note("generate_until", request.args, found[number])
        return [found[number] for number in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_options: Any
    ) -> list[tuple[float, bool]]:
        results = self._score([(context, ids) for _, context, ids in requests])
        for (args, _, _), result in zip(requests, results, strict=True):
            self._note("loglikelihood", args, result)
        return results

    def _pair(self, context: str, continuation: str) -> Pair:
        """Encode both together, since a tokenizer may merge across the boundary."""
        if not context:
            ids = self.tok_encode(continuation, add_special_tokens=False)
            begins = ids[:1] == [self.prefix_token_id]
            return (ids[:1], ids[1:]) if begins else ([self.prefix_token_id], ids)
        spaces = len(context) - len(context.rstrip())  # they belong to the next word's token
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        ids = self.tok_encode(context) if context else [self.prefix_token_id]
        whole = self.tok_encode(context + continuation, None if context else False)
        return ids, whole[len(ids) if context else 0 :]

    def _windows(self, text: str) -> list[Pair]:
        """Divide a text into windows of the model's length, each token a target once."""
        ids, most = self.tok_encode(text, add_special_tokens=False), self.max_length
        ids = ids[1:] if ids[:1] == [self.prefix_token_id] else ids
        row, pairs = [self.prefix_token_id, *ids], []
        for start in range(1, len(row), most):
            end = min(start + most, len(row))
            first = max(end - most - 1, 0)
            pairs.append((row[first:start], row[start:end]))
        return pairs

    @torch.no_grad()
    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Log-probability of each pair's second part, and whether it is the most likely one."""
        order = sorted(range(len(pairs)), key=lambda n: -sum(map(len, pairs[n])))
        found: dict[int, tuple[float, bool]] = {}
        with (
            evaluating(self.model, self.layout),
            with_sockets(self.model, self.layout.sockets),
            torch.compiler.set_stance("force_eager"),  # every length is new
        ):
            for some in _batches(order, self.batch_size):
                found |= zip(some, self._score_batch([pairs[n] for n in some]), strict=True)
        return [found[number] for number in range(len(pairs))]

    def _score_batch(self, pairs: Sequence[Pair]) -> Iterator[tuple[float, bool]]:
        """Padding stands behind the rows, where a causal model does not see it."""
        if (longest := max(len(target) for _, target in pairs)) > self.max_length:
            raise ValueError(
                f"a continuation has {longest} tokens and the model takes {self.max_length} at "
                "once. Score it as a text (loglikelihood_rolling), or use a longer max_length."
            )
        device = next(self.model.parameters()).device
        rows = [torch.tensor((a + b)[-self.max_length - 1 :], device=device) for a, b in pairs]
        multiple = self.layout.sequence
        width = -(-(max(map(len, rows)) - 1) // multiple) * multiple
        ids = torch.stack([F.pad(row[:-1], (0, width - len(row) + 1)) for row in rows])
        output = self.model(ids)
        logits = full(getattr(output, "logits", output))
        for row, (_, target), scores in zip(rows, pairs, logits, strict=True):
            first = len(row) - len(target)
            yield _likelihood(scores[first - 1 : len(row) - 1], row[first:])

    def _prompt(self, text: str, length: int) -> list[int]:
        """The last ids of a prompt that leave room for so many new ones."""
        room = self.max_length - length
        if room < 1:
            raise ValueError(
                f"{length} new tokens leave no room for a prompt in the {self.max_length} "
                "positions of the model. Set max_gen_toks in the task's generation_kwargs, or "
                "max_new_tokens where the task does not say."
            )
        return (self.tok_encode(text) or [self.prefix_token_id])[-room:]

    def _continue(self, prompts: list[list[int]], asked: _Asked) -> list[str]:
        device = next(self.model.parameters()).device
        # Ids that read as a stop text end a row early; other spellings of it are found in the text.
        stops = [self.tok_encode(text, add_special_tokens=False) for text in asked.until]
        same = [
            ids for ids, text in zip(stops, asked.until, strict=True) if self._text(ids) == text
        ]
        rows = generate(
            self.model,
            [torch.tensor(ids, device=device) for ids in prompts],
            max_new_tokens=asked.length,
            stop=same,
            eos_id=self.eot_token_id,
            **asked.sampling,
        )
        new = [row[len(ids) :].tolist() for row, ids in zip(rows, prompts, strict=True)]
        return [_until(self._decode(ids), asked.until) for ids in new]

    def _decode(self, ids: list[int]) -> str:
        end = ids.index(self.eot_token_id) if self.eot_token_id in ids else None
        return self.tokenizer.decode(ids[:end], skip_special_tokens=True)

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _note(self, what: str, args: Any, result: Any) -> None:
        """Give a result to lm-eval's cache, if there is one."""
        if (hook := getattr(self, "cache_hook", None)) is not None:
            hook.add_partial(what, args, result)


@attrs.frozen
class _Asked:
    """What a task asks of new text."""

    until: tuple[str, ...]
    length: int
    sampling: dict[str, Any]

    @classmethod
    def of(cls, options: Mapping[str, Any], length: int) -> Self:
        until = options.get("until") or ()
        lengths = [options[name] for name in LENGTHS if options.get(name) is not None]
        temperature = float(options.get("temperature") or 0.0)
        if not options.get("do_sample", temperature > 0):
            temperature = 0.0
        sampling = {name: options[name] for name in ("top_k", "top_p") if options.get(name)}
        known = {"until", "do_sample", "temperature", *sampling, *LENGTHS}
        neutral = (None, False, 0, 1)
        unknown = {k: v for k, v in options.items() if k not in known and v not in neutral}
        if unknown:
            raise ValueError(
                f"a task asks for {unknown}, which forgekit.generate does not do. It does "
                f"{quoted(sorted({*known, 'top_k', 'top_p'}))}; change generation_kwargs."
            )
        texts = (until,) if isinstance(until, str) else tuple(until)
        sampling["temperature"] = temperature
        return cls(tuple(filter(None, texts)), (lengths or [length])[0], sampling)


def _likelihood(logits: Tensor, target: Tensor) -> tuple[float, bool]:
    """Sum of log-probabilities of ids ``[s]`` under logits ``[s v]``, and whether each is first."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    likely = wide.gather(1, target[:, None]).sum(dtype=torch.float64)
    return likely.item(), bool((logits.argmax(-1) == target).all())


def _batches(order: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (order[start : start + size] for start in range(0, len(order), size))


def _until(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop texts."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=None)]


def _length(longest: int | None, asked: int | None, multiple: int) -> int:
    if asked is None and longest is None:
        raise ValueError(
            "the model does not say how many positions it takes (spec.max_seq_len); pass "
            "max_length."
        )
    if asked is not None:
        check_integers(max_length=(asked, 1))
        if longest is not None and asked > longest:
            raise ValueError(f"max_length {asked} is above max_seq_len {longest} of the model.")
    return (asked or longest or multiple) // multiple * multiple


def _end_of_text(tokenizer: Any) -> int:
    found = getattr(tokenizer, "eos_token_id", None)
    if found is None and hasattr(tokenizer, "token_to_id"):
        found = tokenizer.token_to_id(END_OF_TEXT)
    if found is None:
        raise ValueError(
            f"the tokenizer has no eos_token_id and no token {END_OF_TEXT!r}; pass eos_id, the id "
            "that ends a text."
        )
    return found
