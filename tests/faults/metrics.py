"""Rows that say something else than what was trained, and rows that a resume loses or repeats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from faults.folders import shared_folder
from faults.planting import result, value
from faults.table import Check, Fault, judge_numbers
from lab import SPEC, global_batch, lay_out, reference_gradients

import forgekit as fk

STEPS, STOP, SAVED, BOUND = 5, 4, 2, 1e-9
"""A run of five steps is killed after four and goes on from a checkpoint after two."""


def _loss(model: Any, batch: Any) -> fk.Loss:
    """A cross-entropy with the mean label of its targets as a metric."""
    loss = fk.cross_entropy(model(batch["input_ids"]), batch["labels"])
    labels = batch["labels"][batch["labels"] != -100]
    return dataclasses.replace(loss, metrics={"label": (labels.sum().double(), labels.numel())})


def _mean_of_rank(model: Any, batch: Any) -> fk.Loss:
    """A metric that is averaged where it is computed: ranks with few targets weigh as much."""
    loss = _loss(model, batch)
    total, count = loss.metrics["label"]
    return dataclasses.replace(loss, metrics={"label": (total / max(count, 1), 1)})


USER: dict[str, Any] = {
    "loss": _loss,
    "start": lambda step: step,
    "log": lambda log, state, metrics: log(state, metrics),
}


def _rows(rank: int, world: int) -> list[dict[str, Any]]:
    """What is on disk after both runs."""
    with shared_folder() as folder:
        for start, end in ((0, STOP), (SAVED, STEPS)):
            state = lay_out(fk.Transformer(SPEC).double())
            state = fk.donate(state, step=start, samples=12 * start)
            step = fk.make_step(lambda *args: USER["loss"](*args), schedule=fk.constant(0.0))
            options = {"start_step": USER["start"](start), "is_writer": rank == 0}
            with fk.MetricsLog(folder, every=1, **options) as log:
                for number in range(start, end):
                    mine = [row[rank] for row in global_batch(world, seed=number)]
                    state, metrics = step(state, mine)
                    USER["log"](log, state, metrics)
            dist.barrier()
        return fk.metrics.read_metrics(folder / "metrics.jsonl")


@cache
def _expected(step: int, world: int) -> dict[str, float]:
    batches = global_batch(world, seed=step)
    _, loss = reference_gradients(fk.Transformer(SPEC), batches)
    labels = torch.cat([b["labels"][b["labels"] != -100] for row in batches for b in row]).double()
    return {"train/loss": float(loss), "train/label": float(labels.mean())}


def _judge(by_rank: Sequence[Any]) -> Any:
    if isinstance(by_rank[0], str):
        return judge_numbers(by_rank)
    rows, world = by_rank[0], len(by_rank)
    steps = [row["step"] for row in rows]
    errors = dict.fromkeys(("train/loss", "train/label"), 0.0)
    for row in rows:
        for name, number in _expected(row["step"] - 1, world).items():
            errors[name] = max(errors[name], abs(row[name] / number - 1) / BOUND)
        errors["samples"] = abs(row["samples"] - 12 * row["step"]) / BOUND
    return errors | {"steps": float(steps != [*range(1, STEPS + 1)]) / BOUND}


def _larger_loss(metrics: Any) -> Any:
    metrics["loss"] = metrics["loss"] * 1.01
    return metrics


def _all_but_one(log: Any, state: fk.TrainState, metrics: Any) -> None:
    if state.step != 4:
        log(state, metrics)


CHECKS = {"rows": Check(measure=_rows, judge=_judge)}
LATE, FROM_ZERO = value(USER, "start", lambda step: step + 9), value(USER, "start", lambda _: 0)
LARGER, LEFT_OUT = result("step_metrics", _larger_loss), value(USER, "log", _all_but_one)
OF_RANK = value(USER, "loss", _mean_of_rank)
FAULTS = [
    Fault("a metric averaged on its rank", "rows", OF_RANK, "train/label"),
    Fault("another loss than is trained", "rows", LARGER, "train/loss"),
    Fault("a resume that keeps rows", "rows", LATE, "steps"),
    Fault("a resume that drops rows", "rows", FROM_ZERO, "steps"),
    Fault("a row that is not written", "rows", LEFT_OUT, "steps"),
]
