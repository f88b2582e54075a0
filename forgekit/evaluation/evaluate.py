"""Token-exact evaluation: sums over the targets of all ranks, divided once.

The loss of a token depends on what the tokenizer makes a token. So ids of another tokenizer are
refused by name, and bits per byte are reported beside the loss where the bytes are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.optim import SGD

from forgekit.data.token_files import HELD_OUT
from forgekit.hashing import tokenizer_of
from forgekit.model.vocabulary import tokens_of
from forgekit.parallel.layout import world_of
from forgekit.state import TrainState
from forgekit.steps.audit.positions import check_positions
from forgekit.steps.make_step import Vote
from forgekit.steps.micro_batch import (
    LossFn,
    compute_loss,
    evaluating,
    explaining,
    mixing_tensors,
    take_part,
)
from forgekit.steps.pipelined import FirstLook, evaluate_staged
from forgekit.steps.totals import LossSums, mean_metrics, reduce_losses


class Stop(Vote, Protocol):
    """The interface that an evaluation needs from a ``StopSignal``."""

    @property
    def requested(self) -> bool:
        """Whether the ranks agreed to stop."""
        ...


FOLD = 64
"""Micro-batches whose losses are kept before they are summed; a set may have a million."""
PREPARE = "forgekit prepare PATH --out DIR --tokenizer TOKENIZER.JSON"


class Results(TensorDict):
    """Metrics of an evaluation; unlike a TensorDict it prints values."""

    def __repr__(self) -> str:
        numbers: dict[str, Any] = self.to_dict()
        return ", ".join(f"{name} {float(number):.6g}" for name, number in numbers.items())


@torch.no_grad()
def evaluate(
    state: TrainState | nn.Module,
    batches: Iterable[TensorDictBase] | Mapping[str, Iterable[TensorDictBase]],
    loss_fn: LossFn,
    *,
    name: str | None = None,
    bytes_per_token: float | Mapping[str, float] | None = None,
    stop: Stop | None = None,
    trained_on: Any = None,
    audit: bool = True,
) -> TensorDict:
    """Compute the mean loss over all targets of one or several data sets, without dropout.

    The mean is over targets, not over batches: how a set is split does not matter. Nothing in
    ``state`` changes, so it is not donated.

    Args:
        state: The state, or in one process a model alone, as ``load_run`` returns.
        batches: This rank's share; every rank brings the same number of micro-batches, filled up
            with masked ones (``make_loader(..., epochs=1)`` does so). Of several sets a dict by
            name, the same names in the same order on every rank.
        loss_fn: ``loss_fn(model, batch) -> Loss``; leave regularisers such as a z-loss out.
        name: Name of the one set, to give the results their full metric names:
            ``eval/<name>/loss``. Those of a dict always have them.
        bytes_per_token: Mean bytes of text behind a target, to report bits per byte: comparable
            between tokenizers, as the loss per token is not. Of several sets a dict by name. By
            default what the dataset of a loader says of itself, of a loss that is a likelihood.
        stop: Vote before each micro-batch, in a collective of one number, and end the evaluation
            where the run is to stop. The stages of a pipeline are never at the same micro-batch:
            there an evaluation is finished first.
        trained_on: The dataset that the model is trained on, or its token file, whose tokenizer
            the sets must share.
        audit: Whether context parallelism proves with the first micro-batch of each set that the
            loss is a sum over positions, as the first step of a training does.

    Returns:
        TensorDict of ``[]`` float64, the same on every rank, which prints its numbers: ``loss`` per
        target, ``targets``, ``perplexity`` of a loss that is a likelihood (``Loss.is_nll``),
        ``bits_per_byte`` if ``bytes_per_token`` is known, and the loss function's own metrics.
        Empty if it was stopped: partial results are not comparable.

    Raises:
        ValueError: If a set has no micro-batch, it holds ids that the model does not have, the
            sets were tokenized with different tokenizers, or the loss is not a sum over positions
            under context parallelism.

    Examples:
        Two sets, as ``eval/code/loss`` and ``eval/prose/loss``::

            sets = {name: fk.held_out_loader(state, data, 8) for name, data in datasets.items()}
            log.event(state, fk.evaluate(state, sets, loss_fn, stop=stop))
    """
    if isinstance(state, nn.Module):
        state = TrainState.create(state, SGD(state.parameters(), lr=0.0))
    is_many = isinstance(batches, Mapping) and not isinstance(batches, TensorDictBase)
    sets: dict[str, Any] = {**batches} if is_many else {name or "": batches}
    if is_many and (name is not None or not sets):
        raise ValueError(
            f"name is {name!r}, but batches is a dict of the sets {sorted(sets)}, whose keys (at "
            "least one) are the names. Leave name out."
        )
    _check_tokenizers(state, sets, trained_on)
    results = {}
    for key, each in sets.items():
        size = bytes_per_token.get(key) if isinstance(bytes_per_token, Mapping) else bytes_per_token
        result = _evaluate_one(state, each, loss_fn, size, stop, key, audit=audit)
        if not result:
            return Results({}, [])
        results |= {f"eval/{key}/{metric}" if key else metric: v for metric, v in result.items()}
    return Results(results, [])


def _evaluate_one(
    state: TrainState,
    batches: Iterable[TensorDictBase],
    loss_fn: LossFn,
    bytes_per_token: float | None,
    stop: Stop | None,
    name: str,
    *,
    audit: bool,
) -> dict[str, torch.Tensor]:
    """Evaluate one set; return its metrics, empty if the evaluation was stopped."""
    layout = state.layout
    known_bytes = getattr(getattr(batches, "dataset", None), "bytes_per_token", None)
    if stop is not None and layout.stages is None:
        batches = _until_stopped(batches, state, stop)
    look = None
    if audit and layout.context > 1:
        look = lambda batch: check_positions(state, batch, loss_fn)  # noqa: E731
    with evaluating(state.model, layout), mixing_tensors(layout), explaining():
        if layout.stages is None:
            sums = _run_whole(state, batches, loss_fn, look)
        else:
            sums = evaluate_staged(state, batches, loss_fn, first=look)
    if stop is not None and stop.requested:
        return {}
    if not sums.rows:
        of = f" of set {name!r}" if name else ""
        raise ValueError(f"evaluate got no micro-batch{of}; every rank must provide at least one.")
    totals = sums.totals(state.loss_scale, samples=0)
    if sums.is_nll:  # a name among the sums, which stages without a loss receive from the last one
        totals = totals.plus(nll=torch.zeros_like(totals["loss"]))
    totals = reduce_losses(totals, state)
    loss = totals["loss"] / totals["targets"]
    result = {"loss": loss}
    if totals.sums.get("nll", None) is not None:
        result["perplexity"] = loss.exp()
        bytes_per_token = known_bytes if bytes_per_token is None else bytes_per_token
    result["targets"] = totals["targets"]
    if bytes_per_token is not None:
        result["bits_per_byte"] = loss / (math.log(2) * bytes_per_token)
    return result | mean_metrics(totals.sums)


def _check_tokenizers(state: TrainState, sets: Mapping[str, Any], trained_on: Any) -> None:
    """Raise if a set's recorded tokenizer is not the model's."""
    # forgekit's models and those of transformers record it; others may not.
    sizes = getattr(state.model, "spec", None) or getattr(state.model, "config", None)
    vocabulary = tokens_of(sizes)
    used: dict[str, str] = {}  # checksum of each tokenizer -> its user
    datasets = {f"set {name!r}" if name else "the set": one for name, one in sets.items()}
    for where, one in {"the training data": trained_on, **datasets}.items():
        dataset = getattr(one, "dataset", one)
        path = getattr(getattr(dataset, "file", dataset), "path", None)
        size = getattr(dataset, "vocab_size", None)
        where = where if path is None else f"{where} ({path})"
        if vocabulary is not None and size is not None and size > vocabulary:
            raise ValueError(
                f"{where} has a vocabulary of {size}, the model one of {vocabulary}: it was "
                f"tokenized with another tokenizer. Tokenize its text with the model's: {PREPARE}."
            )
        folder = path.parent if path is not None and path.name == HELD_OUT else path
        if folder is not None and (tokenizer := tokenizer_of(folder)) is not None:
            used.setdefault(tokenizer, where)
    if len(used) > 1:
        (first, one), (second, other) = [*used.items()][:2]
        raise ValueError(
            f"{one} and {other} were tokenized with different tokenizers (checksums {first} and "
            f"{second}), but a model reads the ids of one. Use the same tokenizer: {PREPARE}."
        )


def _until_stopped(
    batches: Iterable[TensorDictBase], state: TrainState, stop: Stop
) -> Iterator[TensorDictBase]:
    for batch in batches:
        votes = torch.full_like(state.loss_scale, stop.vote())
        if world_of(state.mesh) > 1:
            dist.all_reduce(votes)
        stop.receive(votes)
        if stop.requested:
            return
        yield batch


def _run_whole(
    state: TrainState,
    batches: Iterable[TensorDictBase],
    loss_fn: LossFn,
    look: FirstLook,
) -> LossSums:
    device = state.targets.device
    sums = LossSums(device)
    for batch in batches:
        if look is not None and not sums.rows:
            look(batch)
        loss = compute_loss(state.model, take_part(batch, state.layout, device), loss_fn)
        sums.add(loss, rows=batch.batch_size[0])
        if len(sums.losses) >= FOLD:
            sums.fold()
    return sums
