"""Rows that say something else than what was trained, and rows that a resume loses or repeats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from faults.folders import shared_folder
from faults.planting import function, value
from faults.table import Check, Fault, judge_numbers
from lab import SPEC, global_batch, reference_gradients

import forgekit as fk

__all__ = ["CHECKS", "FAULTS"]

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


def _batches(step: int, world: int) -> list[list[Any]]:
    return global_batch(world, seed=step)


def _rows(rank: int, world: int) -> list[dict[str, Any]]:
    """What is on disk after both runs."""
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu")
    with shared_folder() as folder:
        for start, end in ((0, STOP), (SAVED, STEPS)):
            model = fk.parallelize(fk.Transformer(SPEC).double(), mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            state = fk.TrainState.create(model, optimizer, mesh=mesh)
            state = fk.donate(state, step=start, samples=12 * start)
            step = fk.make_step(lambda *args: USER["loss"](*args), schedule=fk.constant(0.0))
            options = {"start_step": USER["start"](start), "is_writer": rank == 0}
            with fk.MetricsLog(folder, every=1, **options) as log:
                for number in range(start, end):
                    mine = [row[rank] for row in _batches(number, world)]
                    state, metrics = step(state, mine)
                    USER["log"](log, state, metrics)
            dist.barrier()
        return fk.run.read_metrics(folder / "metrics.jsonl")


@cache
def _expected(step: int, world: int) -> dict[str, float]:
    batches = _batches(step, world)
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


def _mean_loss_of_rank(measure: Any, totals: Any, *args: Any, **options: Any) -> Any:
    """The loss of a step is the mean over ranks of their own means."""
    metrics = measure(totals, *args, **options)
    metrics["loss"] = metrics["loss"] * 1.01
    return metrics


CHECKS = {"rows": Check(measure=_rows, judge=_judge)}
FAULTS = [
    Fault(
        "a metric averaged on its rank", "rows", value(USER, "loss", _mean_of_rank), "train/label"
    ),
    Fault(
        "another loss than is trained",
        "rows",
        function("step_metrics", _mean_loss_of_rank),
        "train/loss",
    ),
    Fault(
        "a resume that keeps rows",
        "rows",
        value(USER, "start", lambda step: step + 9),
        "steps",
        quick=True,
    ),
    Fault("a resume that drops rows", "rows", value(USER, "start", lambda _: 0), "steps"),
    Fault(
        "a row that is not written",
        "rows",
        value(
            USER,
            "log",
            lambda log, state, metrics: None if state.step == 4 else log(state, metrics),
        ),
        "steps",
    ),
]
