"""Sampling of many prompts at once, for looking at a model, for evaluations and for rollouts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgekit.checks import brief, check_integers
from forgekit.files import write_atomic
from forgekit.mesh import process_rank
from forgekit.model.key_value_cache import CachedAttend, NewPositions, attentions
from forgekit.parallel.context.context_parallel import with_sockets
from forgekit.parallel.layout import full
from forgekit.state import Layout, TrainState, layout_of
from forgekit.steps.micro_batch import evaluating


class Generated(NamedTuple):
    """Tokens and how likely they were.

    Attributes:
        ids: What ``generate`` returns without ``log_probs``.
        log_probs: float32 natural logarithm of the probability of each new token, ``[b n]`` or, for
            a list of prompts, a list of ``[n]``: under the whole softmax at the temperature (at 1
            for temperature 0), before ``top_k`` and ``top_p``. 0 behind the end of a row.
    """

    ids: Any
    log_probs: Any


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Tensor | Sequence[Any],
    *,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[Sequence[int]] = (),
    eos_id: int | None = None,
    seed: int = 0,
    log_probs: bool = False,
) -> Any:
    """Continue prompts, token by token.

    Keys and values of a ``Transformer`` are kept, so a new token costs one position's work, until
    a row is longer than ``max_seq_len``: from there on, and with any other model, the last
    ``max_seq_len`` tokens run through the model for each new one.

    On several ranks every rank calls it with the same arguments and gets the same tokens; ranks
    that share a sequence in training each run all of it here. The global random state is left
    alone.

    Args:
        model: Maps ids ``[b s]`` to logits ``[b s v]``, each from the ids up to its own, or to an
            object with them as ``logits``, as models of transformers do.
        prompts: ``[b s]`` int, or a list of 1-D tensors (or lists) of any lengths, at least 1.
        max_new_tokens: Tokens to add to each row at most.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample from the ``top_k`` most likely tokens only.
        top_p: Sample from the most likely tokens that together have this probability.
        stop: Sequences of token ids; a row ends with the first of them that it has produced.
        eos_id: The id that ends a row.
        seed: Seed of the samples.
        log_probs: Return ``Generated``, with the log-probability of each token.

    Returns:
        ``[b s+n]`` prompts and what follows, ``n <= max_new_tokens``; rows that ended earlier are
        filled up with ``eos_id``, or their last token without one. Of a list of prompts a list of
        1-D tensors, each up to its end.

    Raises:
        TypeError: If ``max_new_tokens`` is no integer.
        ValueError: If a prompt or a sequence of ``stop`` is empty, ``temperature``, ``top_k`` or
            ``top_p`` is out of range, or the model is split into pipeline stages.
    """
    check_integers(max_new_tokens=(max_new_tokens, 0))
    draw = _Draw(temperature, top_k, top_p, eos_id, log_probs)
    rows = _rows(prompts)
    endings = [_ending(ids, rows[0].device) for ids in stop]
    layout = layout_of(model)
    if layout.stages is not None:
        raise ValueError(
            "this model is split into pipeline stages, and a rank can run only its own. To "
            "generate, load its checkpoint into a layout with pp=1."
        )
    text = _Text.of(rows, max_new_tokens)
    if max_new_tokens:
        with (
            evaluating(model, layout),
            with_sockets(model, layout.sockets),
            torch.compiler.set_stance("force_eager"),  # every length is new
            ExitStack() as caches,
        ):
            _continue(_Reader.of(model, layout, text, caches), draw, endings, seed)
    ids, likely = text.result(is_list=not isinstance(prompts, Tensor))
    return Generated(ids, likely) if log_probs else ids


def write_sample(
    state: TrainState, out: str | os.PathLike[str], tokenizer: Any, prompt: str, **options: Any
) -> str:
    """Continue a text and keep it as ``samples/step_00000100.txt`` in the run directory.

    Every rank calls it; the first one writes.

    Args:
        state: The state.
        out: The run directory.
        tokenizer: Has ``encode(text).ids`` and ``decode(ids)``, as those of ``tokenizers``.
        prompt: The text to continue.
        **options: As for ``generate``.

    Returns:
        The prompt and what the model made of it.
    """
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=state.targets.device)
    text = tokenizer.decode(generate(state.model, ids, **options)[0].tolist())
    if process_rank() == 0:
        path = Path(out) / "samples" / f"step_{state.step:08d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    return text


@attrs.define(eq=False)
class _Text:
    """The rows as they grow, and what is known of each.

    Attributes:
        ids: ``[b s+n]``, each row from its first position on.
        lengths: ``[b]`` tokens of each prompt.
        longest: The largest of them, as a number.
        log_probs: ``[b n]`` of the new tokens.
        ends: ``[b]`` new tokens up to the end of a row; n for a row that has not ended.
        made: New tokens so far.
    """

    ids: Tensor
    lengths: Tensor
    longest: int
    log_probs: Tensor
    ends: Tensor
    made: int = 0

    @classmethod
    def of(cls, rows: list[Tensor], room: int) -> _Text:
        sizes, device = [len(row) for row in rows], rows[0].device
        longest, lengths = max(sizes), torch.tensor(sizes, device=device)
        ids = torch.stack([F.pad(row, (0, longest - len(row) + room)) for row in rows])
        likely = torch.zeros(len(rows), room, device=device)
        return cls(ids, lengths, longest, likely, torch.full_like(lengths, room))

    def last(self, count: int = 1) -> Tensor:
        """The last tokens of each row, ``[b count]``."""
        first = self.lengths[:, None] + (self.made - count)
        return self.ids.gather(1, first + torch.arange(count, device=self.ids.device))

    def append(self, chosen: Tensor) -> None:
        """Add one token, ``[b]``, to each row."""
        self.ids.scatter_(1, self.lengths[:, None] + self.made, chosen[:, None])
        self.made += 1

    def result(self, *, is_list: bool) -> tuple[Any, Any]:
        """The tokens and their log-probabilities, as the prompts came."""
        if not is_list:
            return self.ids[:, : self.longest + self.made], self.log_probs[:, : self.made]
        made = self.ends.clamp(max=self.made).tolist()
        sizes = (self.lengths.cpu() + torch.tensor(made)).tolist()
        ids = [row[:size] for row, size in zip(self.ids, sizes, strict=True)]
        return ids, [row[:size] for row, size in zip(self.log_probs, made, strict=True)]


@attrs.frozen
class _Draw:
    """How a token is drawn from logits."""

    temperature: float
    top_k: int | None
    top_p: float | None
    eos_id: int | None
    log_probs: bool

    def __attrs_post_init__(self) -> None:
        if not self.temperature >= 0 or (self.top_k is not None and self.top_k < 1):
            raise ValueError(
                f"temperature {self.temperature} must not be negative and top_k {self.top_k} at "
                "least 1."
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be above 0 and at most 1.")

    def __call__(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Draw a token of each row, ``[b v]`` -> ``[b]``, and its log-probability if asked for."""
        scaled = logits / self.temperature if self.temperature else logits
        likely = scaled.log_softmax(-1) if self.log_probs else None
        if self.temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            if self.top_k is not None and self.top_k < logits.shape[-1]:
                threshold = scaled.topk(self.top_k).values[:, -1:]
                scaled = scaled.masked_fill(scaled < threshold, float("-inf"))
            if self.top_p is not None:
                scaled = _keep_likely(scaled, self.top_p)
            chosen = torch.multinomial(scaled.softmax(-1), 1, generator=generator)
        return chosen[:, 0], None if likely is None else likely.gather(1, chosen)[:, 0]


def _keep_likely(logits: Tensor, share: float) -> Tensor:
    """Leave the most likely tokens that together have a share of the probability."""
    probabilities, order = logits.softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities  # the most likely one always stays
    is_out = (before >= share).scatter(1, order, before >= share)
    return logits.masked_fill(is_out, float("-inf"))


@attrs.define(eq=False)
class _Reader:
    """Runs a model over the text: all of it, or with caches what is new."""

    model: nn.Module
    layout: Layout
    text: _Text
    caches: ExitStack
    new: NewPositions | None
    window: int

    @classmethod
    def of(cls, model: nn.Module, layout: Layout, text: _Text, caches: ExitStack) -> _Reader:
        window = (layout.longest or 2**31) // layout.sequence * layout.sequence
        layers = attentions(model) if text.longest <= window else {}
        new = NewPositions(min(window, text.ids.shape[1])) if layers else None
        if new is not None:
            sockets = {n: {"attend": CachedAttend(one.attend, new)} for n, one in layers.items()}
            caches.enter_context(with_sockets(model, sockets))
        return cls(model, layout, text, caches, new, window)

    def __call__(self) -> Tensor:
        """Logits of the token that comes next in each row, ``[b v]`` float32 or wider."""
        if self.new is not None and self.text.longest + self.text.made > self.new.room:
            self.caches.close()  # and the rest as a model without caches
            self.new = None
        if self.new is None:
            return self._all()
        return self._one(self.new) if self.text.made else self._prompts(self.new)

    def _all(self) -> Tensor:
        """Run the last tokens that fit; padding behind them changes nothing before it."""
        text = self.text
        ends = text.lengths + text.made
        width = min(text.longest + text.made, self.window)
        firsts = (ends - width).clamp(min=0)
        columns = firsts[:, None] + torch.arange(width, device=firsts.device)
        return self._logits(text.ids.gather(1, columns), ends - firsts - 1)

    def _prompts(self, new: NewPositions) -> Tensor:
        text = self.text
        new.count, new.at = text.longest, None
        return self._logits(text.ids[:, : text.longest], text.lengths - 1, has_head=True)

    def _one(self, new: NewPositions) -> Tensor:
        text = self.text
        new.end = text.longest + text.made
        new.at = text.lengths + (text.made - 1)
        at = new.at[:, None]
        new.mask = (torch.arange(new.end, device=at.device) <= at)[:, None, None]
        positions = at.expand(-1, self._padded(1))
        return self._logits(text.last(), torch.zeros_like(new.at), position_ids=positions)

    def _padded(self, positions: int) -> int:
        return -(-positions // self.layout.sequence) * self.layout.sequence

    def _logits(
        self, ids: Tensor, last: Tensor, *, has_head: bool = False, **options: Any
    ) -> Tensor:
        """Logits at one position of each row, ``[b]``."""
        each = torch.arange(len(ids), device=ids.device)
        if has_head and self.layout.tensor == 1:  # logits of all positions may not fit
            options["head"] = lambda hidden, weight: F.linear(hidden[each, last], weight)
        ids = F.pad(ids, (0, self._padded(ids.shape[1]) - ids.shape[1]))
        output = self.model(ids, **options)
        logits = output if isinstance(output, Tensor) else output.logits
        if "head" not in options:
            logits = full(logits)[each, last]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _continue(read: _Reader, draw: _Draw, endings: list[Tensor], seed: int) -> None:
    """Add tokens to a text until all rows have ended or it is full."""
    text = read.text
    generator = torch.Generator(text.ids.device).manual_seed(seed)
    ended = torch.zeros_like(text.lengths, dtype=torch.bool)
    can_end = draw.eos_id is not None or bool(endings)
    for number in range(text.log_probs.shape[1]):
        chosen, likely = draw(read(), generator)
        if can_end:
            fill = text.last()[:, 0] if draw.eos_id is None else draw.eos_id
            chosen = torch.where(ended, fill, chosen)
        text.append(chosen)
        if likely is not None:
            text.log_probs[:, number] = likely.masked_fill(ended, 0.0) if can_end else likely
        if can_end:
            is_end = _is_end(text, chosen, draw.eos_id, endings)
            text.ends = torch.where(is_end & ~ended, number + 1, text.ends)
            ended = ended | is_end
            if bool(ended.all()):
                return


def _is_end(text: _Text, chosen: Tensor, eos_id: int | None, endings: list[Tensor]) -> Tensor:
    is_end = chosen == eos_id if eos_id is not None else torch.zeros_like(chosen, dtype=torch.bool)
    for ids in endings:
        if len(ids) <= text.made:  # a prompt's tokens end no row
            is_end = is_end | (text.last(len(ids)) == ids).all(1)
    return is_end


def _rows(prompts: Any) -> list[Tensor]:
    """The prompts as 1-D tensors of ids."""
    rows = [torch.as_tensor(row) for row in prompts]
    if not rows or any(row.ndim != 1 or not len(row) for row in rows):
        shapes = brief([tuple(row.shape) for row in rows])
        raise ValueError(
            f"prompts have shapes {shapes}; they must be [b s] or a list of [s], s >= 1."
        )
    return rows


def _ending(ids: Sequence[int], device: torch.device) -> Tensor:
    """A sequence that ends a row."""
    ending = torch.as_tensor(ids, device=device)
    if ending.ndim != 1 or not len(ending):
        raise ValueError(
            f"stop holds {brief(ids)}; it must hold sequences of at least one token id, such as "
            "[[13, 13]]. Encode a text with the tokenizer first."
        )
    return ending
