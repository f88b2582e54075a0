"""Batched sampling, for samples, evaluations and rollouts."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import field
from attrs.validators import ge, gt, le, lt, optional
from torch import Tensor, nn

from forgekit.checks import brief, check_integers, is_integer, wrong_type
from forgekit.files import write_atomic
from forgekit.mesh import process_rank
from forgekit.model.batch_invariant import linear_by_tile, log_probs_of
from forgekit.model.initial import seed_of
from forgekit.model.key_value_cache import NewPositions, cache_sockets, is_batch_invariant
from forgekit.model.vocabulary import tokens_of
from forgekit.parallel.agreement import exchange, raise_together
from forgekit.parallel.context.context_parallel import with_sockets
from forgekit.state import Layout, TrainState, layout_of, was_parallelized
from forgekit.steps.log_probs import LEAST_TEMPERATURE
from forgekit.steps.micro_batch import evaluating
from forgekit.tensors import full

log = logging.getLogger("forgekit")


class Generated(NamedTuple):
    """Sampled tokens and their log-probabilities.

    Attributes:
        ids: What ``generate`` returns without ``log_probs``.
        log_probs: float32 natural logarithm of the probability of each new token, ``[b n]`` or, for
            a list of prompts, a list of ``[n]``: under the whole softmax at the temperature (at 1
            for temperature 0). 0 behind the end of a row.
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
    samples: Sequence[int] | None = None,
    log_probs: bool = False,
) -> Any:
    """Continue prompts by sampling.

    A row's text depends on its prompt, on ``(seed, sample number)`` and on the weights, and not on
    the rows beside it: each sample number has random numbers of its own, and a token is the first
    one at which the sum of the probabilities, in float64, exceeds the next of them. (Logits of
    other batches differ in their last bits, which moves that sum; they do not in a model that is
    ``batch_invariant``, where log-probabilities are bit for bit those of the training forward.)

    Keys and values of a ``Transformer`` are kept, so a new token costs one position's work, until
    a row is longer than ``max_seq_len``: from there on, and with any other model, the last
    ``max_seq_len`` tokens run through the model for each new one. A warning says so: what stands
    before them is no longer seen. Rows that are short enough see all of theirs.

    On several ranks of a model that ``parallelize`` returned every rank calls it, each with as many
    prompts as it likes, or none; ranks go on until the last one is done. Ranks that share a
    sequence in training (tp, cp) each run all of it here: they pass the same arguments and get
    the same tokens. The global random state is left alone.

    Args:
        model: Maps ids ``[b s]`` to logits ``[b s v]``, each from the ids up to its own, or to an
            object with them as ``logits``, as models of transformers do.
        prompts: ``[b s]`` int, or a list of 1-D tensors (or lists) of any lengths, at least 1.
        max_new_tokens: Tokens to add to each row at most.
        temperature: Divides the logits; 0 takes the most likely token, of several the first, and
            so does what is below 1e-30, whose limit that is.
        top_k: Sample from the ``top_k`` most likely tokens only, of equal ones from the first.
        top_p: Sample from the fewest most likely tokens that together have this probability.
        stop: Sequences of token ids; a row ends with the first of them that it has produced.
        eos_id: The id that ends a row.
        seed: Seed of the samples.
        samples: The sample number of each row, an integer, ``0 .. b-1`` if None. Ranks with prompts
            of their own pass different ones.
        log_probs: Return ``Generated``, with the log-probability of each token.

    Returns:
        ``[b s+n]`` prompts and what follows, ``n <= max_new_tokens``; rows that ended earlier are
        filled up with ``eos_id``, or their last token without one. Of a list of prompts a list of
        1-D tensors, each up to its end.

    Raises:
        TypeError: If ``max_new_tokens`` or a sample number is not an integer.
        ValueError: If a prompt or a sequence of ``stop`` is empty, ``temperature``, ``top_k`` or
            ``top_p`` is out of range, ``samples`` are not one for each row, ``log_probs`` are
            asked for with ``top_k`` or ``top_p``, or where rows may grow beyond ``max_seq_len``,
            the model is split into pipeline stages, or logits are NaN; on all ranks if on one.
    """
    layout = layout_of(model)
    if layout.stages is not None:
        raise ValueError(
            "this model is split into pipeline stages, and a rank can run only its own. To "
            "generate, load its checkpoint into a layout with pp=1."
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks = _Ranks(layout, world > 1 and was_parallelized(model))
    with ranks.raising_together():
        check_integers(max_new_tokens=(max_new_tokens, 0))
        draw = _Draw(temperature, top_k, top_p, eos_id, log_probs)
        rows = _rows(prompts, may_be_empty=ranks.are_several)
        if ranks.are_several:  # where an embedding's error would leave the others waiting
            _check_ids(model, rows)
        device = rows[0].device if rows else next(model.parameters()).device
        ending_ids = [*stop] if eos_id is None else [*stop, [eos_id]]
        endings = [_ending(ids, device) for ids in ending_ids]
        uniforms = _uniforms(seed, samples, len(rows), max_new_tokens)
        text = _Text(rows, uniforms, device)
        _check_longest(_window(layout), text, log_probs)
    ranks.check_alike(text, [draw, stop])
    with (
        evaluating(model, layout),
        with_sockets(model, layout.sockets),
        torch.compiler.set_stance("force_eager"),  # lengths change with every token
        ExitStack() as caches,
    ):
        _continue(_Reader(model, layout, text, caches), draw, endings, ranks)
    with ranks.raising_together():
        if bad := text.is_bad.nonzero().flatten().tolist():
            raise ValueError(
                f"the model's logits are NaN or infinite in {len(bad)} of {len(text.ids)} rows "
                f"(first: {bad[0]}). Check its weights: a step may have corrupted them."
            )
    ids, likely = text.result(is_list=not isinstance(prompts, Tensor))
    return Generated(ids, likely) if log_probs else ids


def write_sample(
    state: TrainState, out: str | os.PathLike[str], tokenizer: Any, prompt: str, **options: Any
) -> str:
    """Continue a text and write it to ``samples/step_00000100.txt`` in the run directory.

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


class _Text:
    """The growing rows.

    Attributes:
        ids: ``[b s+n]``, each row from its first position on.
        lengths: ``[b]`` tokens of each prompt.
        longest: The largest of them, as a number.
        made: New tokens so far.
        uniforms: ``[b n]`` float64, what each token is drawn with.
        log_probs: ``[b n]`` of the new tokens.
        ends: ``[b]`` new tokens up to the end of a row; n for a row that has not ended.
        is_bad: ``[b]`` bool, rows whose logits were not finite.
    """

    def __init__(self, rows: list[Tensor], uniforms: Tensor, device: torch.device) -> None:
        sizes, room = [len(row) for row in rows], uniforms.shape[1]
        self.longest, self.made = max(sizes, default=0), 0
        self.lengths = torch.tensor(sizes, dtype=torch.int64, device=device)
        padded = [F.pad(row, (0, self.longest - len(row) + room)) for row in rows]
        self.ids = torch.stack(padded) if padded else self.lengths.new_zeros(0, room)
        self.uniforms, self.log_probs = uniforms.to(device), torch.zeros(uniforms.shape).to(device)
        self.ends = torch.full_like(self.lengths, room)
        self.is_bad = torch.zeros_like(self.lengths, dtype=torch.bool)

    def last(self, count: int = 1) -> Tensor:
        """Return the last tokens of each row, ``[b count]``."""
        first = self.lengths[:, None] + (self.made - count)
        return self.ids.gather(1, first + torch.arange(count, device=self.ids.device))

    def append(self, chosen: Tensor) -> None:
        """Append a token to each row, ``[b]``."""
        self.ids.scatter_(1, self.lengths[:, None] + self.made, chosen[:, None])
        self.made += 1

    def result(self, *, is_list: bool) -> tuple[Any, Any]:
        """Return tokens and log-probabilities in the order of the prompts."""
        if not is_list:
            return self.ids[:, : self.longest + self.made], self.log_probs[:, : self.made]
        made = self.ends.clamp(max=self.made).tolist()
        sizes = (self.lengths.cpu() + torch.tensor(made)).tolist()
        ids = [row[:size] for row, size in zip(self.ids, sizes, strict=True)]
        return ids, [row[:size] for row, size in zip(self.log_probs, made, strict=True)]


@attrs.frozen
class _Draw:
    """Sampling of a token from logits."""

    temperature: float = field(validator=(ge(0), lt(math.inf)))
    top_k: int | None = field(validator=optional(ge(1)))
    top_p: float | None = field(validator=optional((gt(0), le(1))))
    eos_id: int | None
    log_probs: bool

    def __attrs_post_init__(self) -> None:
        if self.log_probs and not (self.top_k is None and self.top_p is None):
            raise ValueError(
                f"log_probs=True with top_k {self.top_k} and top_p {self.top_p}: tokens would not "
                "be drawn from the distribution that the log-probabilities describe, which biases "
                "ratios of policies. Leave them out."
            )

    def __call__(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor | None]:
        """Draw a token per row, ``[b v]`` -> ``[b]``, with its log-probability if requested."""
        temperature = self.temperature if self.temperature >= LEAST_TEMPERATURE else 0.0
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            scaled = logits.double() / temperature  # no float32 overflows it
            if self.top_k is not None and self.top_k < logits.shape[-1]:
                scaled = _keep_top(scaled, self.top_k)
            if self.top_p is not None:
                scaled = _keep_likely(scaled, self.top_p)
            sums = scaled.softmax(-1).cumsum(-1)
            # The first cumulative sum above it, which a token of probability 0 never has.
            chosen = (sums <= uniforms[:, None] * sums[:, -1:]).sum(-1, keepdim=True)
        if not self.log_probs:
            return chosen[:, 0], None
        return chosen[:, 0], log_probs_of(logits, temperature or 1.0).gather(1, chosen)[:, 0]


def _keep_top(logits: Tensor, count: int) -> Tensor:
    """Mask all but the top-k logits; of equal ones the first stay."""
    least = logits.topk(count).values[:, -1:]
    above, is_least = logits > least, logits == least
    is_in = is_least.cumsum(-1) <= count - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | is_least & is_in), float("-inf"))


def _keep_likely(logits: Tensor, share: float) -> Tensor:
    """Mask all but the fewest tokens that reach a probability mass (top-p)."""
    probabilities, order = logits.softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities  # the most likely token always stays
    is_out = (before >= share).scatter(1, order, before >= share)
    return logits.masked_fill(is_out, float("-inf"))


def _window(layout: Layout) -> int:
    """Return the maximum number of positions per forward."""
    return (layout.longest or 2**31) // layout.sequence * layout.sequence


class _Reader:
    """Runs a model over the text, with caches over new tokens only."""

    def __init__(self, model: nn.Module, layout: Layout, text: _Text, caches: ExitStack) -> None:
        self.model, self.layout, self.text, self._caches = model, layout, text, caches
        self._window = _window(layout)
        new = NewPositions(min(self._window, text.ids.shape[1]))
        sockets = cache_sockets(model, new)
        self._new = new if sockets else None
        caches.enter_context(with_sockets(model, sockets))

    def __call__(self) -> Tensor:
        """Compute the next token's logits of each row, ``[b v]`` float32 or wider."""
        text, end = self.text, self.text.longest + self.text.made
        if end > self._window and (text.made == 0 or end == self._window + 1):
            log.warning(
                "generate: prompts of up to %d, with new tokens, are longer than max_seq_len %d; "
                "each further token sees the last %d tokens alone. Shorten the prompts, ask for "
                "fewer new tokens, or build the model with a larger max_seq_len.",
                *(text.longest, self._window, self._window),
            )
        if self._new is not None and end > self._new.room:
            self._caches.close()  # further ones as in a model without caches
            self._new = None
        if (new := self._new) is None:
            # The last tokens that fit; padding after them has no influence.
            ends, width = text.lengths + text.made, min(end, self._window)
            firsts = (ends - width).clamp(min=0)
            columns = firsts[:, None] + torch.arange(width, device=firsts.device)
            return self._logits(text.ids.gather(1, columns), ends - firsts - 1)
        if text.made == 0:
            new.count, new.at, new.mask = text.longest, None, None
            return self._logits(text.ids[:, : text.longest], text.lengths - 1, has_head=True)
        new.end, new.at = end, text.lengths + (text.made - 1)
        at = new.at[:, None]
        new.mask = (torch.arange(end, device=at.device) <= at)[:, None, None]
        positions = at.expand(-1, self._padded(1))
        return self._logits(text.last(), torch.zeros_like(new.at), position_ids=positions)

    def stand_in(self) -> None:
        """Run the model once for ranks that still sample: ranks that share weights run together."""
        self._caches.close()
        self.model(torch.zeros(1, self._padded(1), dtype=torch.int64, device=self.text.ids.device))

    def _padded(self, positions: int) -> int:
        return -(-positions // self.layout.sequence) * self.layout.sequence

    def _logits(
        self, ids: Tensor, last: Tensor, *, has_head: bool = False, **options: Any
    ) -> Tensor:
        """Compute logits at one position per row, ``[b]``."""
        each = torch.arange(len(ids), device=ids.device)
        if has_head and self.layout.tensor == 1:  # logits of all positions may not fit into memory
            linear = linear_by_tile if is_batch_invariant(self.model) else F.linear
            options["head"] = lambda hidden, weight: linear(hidden[each, last], weight)
        ids = F.pad(ids, (0, self._padded(ids.shape[1]) - ids.shape[1]))
        output = self.model(ids, **options)
        logits = output if isinstance(output, Tensor) else output.logits
        if "head" not in options:
            logits = full(logits)[each, last]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


@attrs.frozen
class _Ranks:
    """The ranks that share a model's weights, which must run it equally often."""

    layout: Layout
    are_several: bool

    @contextmanager
    def raising_together(self) -> Iterator[None]:
        """Raise an error of the block on all ranks; else they would wait forever."""
        if not self.are_several:
            yield
            return
        problem = None
        try:
            yield
        except (TypeError, ValueError) as error:
            problem = str(error)
        raise_together(problem)

    def check_alike(self, text: _Text, asked: list[Any]) -> None:
        """Raise if ranks that share a sequence got different prompts."""
        size = self.layout.context * self.layout.tensor
        if not self.are_several or size == 1:
            return
        given = [text.ids.tolist(), text.uniforms.tolist(), *map(repr, asked)]
        digests = exchange(hashlib.blake2b(repr(given).encode(), digest_size=8).hexdigest())
        for first in range(0, len(digests), size):  # tp and cp are the last dimensions of a mesh
            if len(set(digests[first : first + size])) > 1:
                raise ValueError(
                    f"ranks {first} to {first + size - 1} share their sequences (tp "
                    f"{self.layout.tensor}, cp {self.layout.context}) and were given different "
                    "prompts or options. Give them the same ones: choose prompts by data rank."
                )

    def any(self, goes_on: bool, device: torch.device) -> bool:
        """Whether the value is true on any rank; a collective."""
        if not self.are_several:
            return goes_on
        flag = torch.tensor(int(goes_on), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)


def _continue(read: _Reader, draw: _Draw, endings: list[Tensor], ranks: _Ranks) -> None:
    """Append tokens until all rows of all ranks have ended or are full."""
    text = read.text
    rows, room = text.uniforms.shape
    ended = torch.zeros_like(text.is_bad)
    goes_on = rows > 0 and room > 0
    while ranks.any(goes_on, text.ids.device):
        if not goes_on:
            read.stand_in()
            continue
        logits, number = read(), text.made
        text.is_bad |= ~logits.amax(-1).isfinite()
        chosen, likely = draw(logits, text.uniforms[:, number])
        fill = text.last()[:, 0] if draw.eos_id is None else draw.eos_id
        chosen = torch.where(ended, fill, chosen)
        text.append(chosen)
        if likely is not None:
            text.log_probs[:, number] = likely.masked_fill(ended, 0.0)
        is_end = torch.zeros_like(ended)
        for ids in endings:
            if len(ids) <= text.made:  # prompts do not end rows
                is_end |= (text.last(len(ids)) == ids).all(1)
        text.ends = torch.where(is_end & ~ended, number + 1, text.ends)
        ended = ended | is_end
        # Reading `ended` makes the host wait, so only if rows can end early.
        goes_on = text.made < room and not (endings and bool(ended.all()))


def _rows(prompts: Any, *, may_be_empty: bool) -> list[Tensor]:
    """Convert prompts to 1-D tensors of ids."""
    rows = [torch.as_tensor(row) for row in prompts]
    if not (rows or may_be_empty) or any(row.ndim != 1 or not len(row) for row in rows):
        shapes = brief([tuple(row.shape) for row in rows])
        raise ValueError(
            f"prompts have shapes {shapes}; they must be [b s] or a list of [s], s >= 1."
        )
    return rows


def _check_ids(model: Any, rows: list[Tensor]) -> None:
    """Raise if a prompt has an id outside the model's vocabulary, if that is known."""
    vocab_size = tokens_of(getattr(model, "spec", None))
    if rows and vocab_size is not None:
        smallest, largest = (int(end) for end in torch.cat(rows).aminmax())
        if smallest < 0 or largest >= vocab_size:
            raise ValueError(
                f"prompts have ids from {smallest} to {largest}; vocab_size is {vocab_size}. "
                "Encode them with the tokenizer that the model was trained with."
            )


def _uniforms(seed: int, samples: Sequence[int] | None, rows: int, count: int) -> Tensor:
    """Draw the uniforms for each row's tokens, ``[b n]`` float64 on the host."""
    numbers = range(rows) if samples is None else [*samples]
    for row, number in enumerate(numbers):
        if not is_integer(number):
            raise wrong_type(f"samples[{row}]", number, "an integer")
    if len(numbers) != rows:
        raise ValueError(f"there are {len(numbers)} samples for {rows} prompts; pass one for each.")
    uniforms, generator = torch.empty(rows, count, dtype=torch.float64), torch.Generator()
    for row, number in zip(uniforms, numbers, strict=True):
        row.uniform_(generator=generator.manual_seed(seed_of(seed, f"sample {int(number)}")))
    return uniforms


def _check_longest(window: int, text: _Text, log_probs: bool) -> None:
    """Raise if requested log-probabilities exceed what a training forward computes."""
    new = text.uniforms.shape[1]
    if log_probs and new and (longest := text.longest + new - 1) > window:
        raise ValueError(
            f"log_probs need all tokens but the last within max_seq_len {window}, but there may be "
            f"{longest}: a training forward takes no more. Ask for fewer new tokens, or shorten "
            "the prompts."
        )


def _ending(ids: Sequence[int], device: torch.device) -> Tensor:
    """Return a token sequence that ends a row."""
    ending = torch.as_tensor(ids, device=device)
    if ending.ndim != 1 or not len(ending):
        raise ValueError(
            f"stop contains {brief(ids)}; it must contain sequences of at least one token id, such "
            "as [[13, 13]]. Encode a text with the tokenizer first."
        )
    return ending
