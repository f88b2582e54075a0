"""Token-exact evaluation: one sum over all targets of all ranks, divided once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase

from forgekit.run.stop_signal import StopSignal
from forgekit.state import TrainState
from forgekit.steps.forward import LossFn, compute_loss, evaluating, mixing_tensors, take_part
from forgekit.steps.pipelined import evaluate_staged
from forgekit.steps.totals import LossSums, mean_metrics, reduce_losses


@torch.no_grad()
def evaluate(
    state: TrainState,
    batches: Iterable[TensorDictBase],
    loss_fn: LossFn,
    *,
    name: str | None = None,
    bytes_per_token: float | None = None,
    stop: StopSignal | None = None,
) -> TensorDict:
    """Measure the mean loss over every target of a data set, without dropout.

    The mean is over targets, not over batches: how the set is split does not matter. Nothing in
    ``state`` changes, so it is not donated.

    Args:
        state: The state.
        batches: This rank's share; every rank brings the same number of micro-batches, filled up
            with masked ones (``make_loader(..., epochs=1)`` does so).
        loss_fn: ``loss_fn(model, batch) -> Loss``; leave regularisers such as a z-loss out.
        name: Name of the set, to give the results their full metric names: ``eval/<name>/loss``.
        bytes_per_token: Mean bytes of text behind a target, to report bits per byte: comparable
            between tokenizers, as the loss per token is not. By default what the dataset of a
            loader says of itself.
        stop: Vote before each micro-batch, in a collective of one number, and end the evaluation
            where the run is to stop. The stages of a pipeline are never at the same micro-batch:
            there an evaluation is finished first.

    Returns:
        TensorDict of ``[]`` float64, the same on every rank: ``loss`` in nats per target,
        ``targets``, ``bits_per_byte`` if ``bytes_per_token`` is known, and the loss function's
        own metrics. Empty if it was stopped: partial results are not comparable.

    Raises:
        ValueError: If there is no micro-batch.
    """
    layout = state.layout
    if bytes_per_token is None:
        bytes_per_token = getattr(getattr(batches, "dataset", None), "bytes_per_token", None)
    run = _run_whole if layout.stages is None else evaluate_staged
    if stop is not None and layout.stages is None:
        batches = _until_stopped(batches, state, stop)
    with evaluating(state.model, layout), mixing_tensors(layout):
        sums = run(state, batches, loss_fn)
    if stop is not None and stop.requested:
        return TensorDict({}, [])
    if not sums.rows:
        raise ValueError("evaluate got no micro-batch; every rank must bring at least one.")
    totals = reduce_losses(sums.totals(state.loss_scale, samples=0), state)
    loss = totals["loss"] / totals["targets"]
    result = {"loss": loss, "targets": totals["targets"]}
    if bytes_per_token is not None:
        result["bits_per_byte"] = loss / (math.log(2) * bytes_per_token)
    result |= mean_metrics(totals)
    prefix = f"eval/{name}/" if name else ""
    return TensorDict({prefix + metric: value for metric, value in result.items()}, [])


def _until_stopped(
    batches: Iterable[TensorDictBase], state: TrainState, stop: StopSignal
) -> Iterator[TensorDictBase]:
    for batch in batches:
        votes = torch.full_like(state.loss_scale, stop.vote())
        if state.mesh is not None and state.mesh.size() > 1:
            dist.all_reduce(votes)
        stop.hear(votes)
        if stop.requested:
            return
        yield batch


def _run_whole(state: TrainState, batches: Iterable[TensorDictBase], loss_fn: LossFn) -> LossSums:
    device = state.targets.device
    sums = LossSums(device)
    for batch in batches:
        loss = compute_loss(state.model, take_part(batch, state.layout, device), loss_fn)
        sums.add(loss, rows=batch.batch_size[0])
    return sums
