"""What cannot work stops before training, on every rank, with the arithmetic."""

from __future__ import annotations

import re

import attrs
import pytest
import torch
from distributed.batches import VOCABULARY
from distributed.matrix import LAYOUTS, Row
from distributed.models import BUILDERS, logits_loss, spec_of
from ranks import run_ranks
from tensordict import TensorDict

import forgekit as fk


@attrs.frozen
class Case:
    """A mistake and what the error has to say.

    Attributes:
        sizes: Mesh dimensions.
        match: Pattern of the message.
        spec: Changes of the model's sizes.
        options: Arguments of ``parallelize``.
        micros: Micro-batches of the step.
        places: Places of a micro-batch.
        twice: Whether the loss calls the model twice.
        second: What every second rank does instead.
    """

    sizes: dict[str, int]
    match: str
    spec: dict[str, int] = attrs.field(factory=dict)
    options: dict[str, object] = attrs.field(factory=dict)
    micros: int = 2
    places: int = 16
    twice: bool = False
    second: Case | None = None


def _schedule(name: str, **more: object) -> dict[str, object]:
    return {"pipeline_schedule": name, **more}


def _context(name: str) -> dict[str, object]:
    return {"context_parallel": name}


def _differing(sizes: dict[str, int], match: str, **second: object) -> Case:
    return Case(sizes, match, second=Case(sizes, match, **second))


LAYING_OUT = {
    "heads by tp": Case({"tp": 2}, "is 3, which tp 2 must", {"heads": 3, "kv_heads": 3, "dim": 24}),
    "key and value heads by tp": Case({"tp": 2}, r"is 1, which tp 2 must", {"kv_heads": 1}),
    "feed-forward by tp": Case(
        {"tp": 2}, r"49, which tp 2 must divide.*48 and 50", {"ffn_dim": 49}
    ),
    "vocabulary by tp": Case({"tp": 2}, r"41, which tp 2 must divide", {"vocab_size": 41}),
    "heads by ulysses": Case(
        {"cp": 2},
        r"3 query heads .* divisible by ulysses = 2.* 2 and 4 heads",
        {"heads": 3, "kv_heads": 3, "dim": 24},
        _context("ulysses"),
    ),
    "layers by stages": Case(
        {"pp": 4}, "2 blocks for 4 pipeline stages.* at least 4 blocks", {"layers": 2}
    ),
    "layers by two stages on each rank": Case(
        {"pp": 2}, "3 blocks for 4 pipeline stages.* at most 3", {"layers": 3}, _schedule("zbv")
    ),
    "tied embeddings": Case({"pp": 2}, r"one tensor.*tied=False.*pp=1", {"tied": True}),
    "experts without a plan": Case({"dp_shard": 2, "ep": 2}, "no plan names the experts.*ep to 1"),
    "a plan that matches nothing": Case(
        {"tp": 2},
        r"'blocks\.\*\.up' matches no module",
        options={"plan": {"blocks.*.up": "colwise"}},
    ),
    "a style on the wrong module": Case(
        {"tp": 2}, r"'colwise' is for nn\.Linear; 'norm' is", options={"plan": {"norm": "colwise"}}
    ),
    "other schedules": _differing(
        {"pp": 2},
        "pipeline_schedule: '1f1b' on rank 0, 'gpipe' on rank 1",
        options=_schedule("gpipe"),
    ),
    "other numbers of blocks": _differing(
        {"dp_shard": 2}, "model: .*25 parameters.* on rank 0, .*47 .* on rank 1", spec={"layers": 4}
    ),
    "other widths": _differing(
        {"dp_shard": 2}, "18,112 numbers.* on rank 0, .* 24,560 .* on rank 1", spec={"dim": 40}
    ),
    "other ways to share a sequence": _differing(
        {"cp": 2}, "context_parallel: 'ring' on rank 0, 'ulysses' on", options=_context("ulysses")
    ),
    "an unknown style": Case(
        {"tp": 2}, r"the style 'diagonal'; it is one of", options={"plan": {"norm": "diagonal"}}
    ),
}
STEPPING = {
    "more places than the model takes, over all ranks": Case(
        {"cp": 2},
        r"28 positions; max_seq_len is 24, over all ranks .*larger max_seq_len",
        places=28,
    ),
    "places by a ring": Case({"cp": 2}, r"14 positions, which 4 = .* 12 and 16", places=14),
    "places by ulysses": Case(
        {"cp": 2}, r"15 positions, which 2", options={"context_parallel": "ulysses"}, places=15
    ),
    "places by tp": Case({"tp": 2}, r"15 positions, which 2 = tp 2 .* 14 and 16", places=15),
    "a loss that calls twice": Case(
        {"pp": 2}, "RuntimeError: loss_fn called its model twice.*pp=1", twice=True
    ),
    "other numbers of micro-batches": _differing(
        {"pp": 2}, r"rank 0 has 2 .*rank 1 has 3", micros=3
    ),
    "other shapes": _differing({"pp": 2}, r"\(2, 16\), .*; rank 1 .*\(2, 24\), ", places=24),
    **{
        f"{micros} micro-batches for {name} on {ranks}": Case(
            {"pp": ranks},
            rf"{micros} micro-batches do not fit the pipeline schedule '{name}' on {ranks} ranks",
            options={"pipeline_schedule": name},
            spec={"layers": LAYOUTS[f"pp{ranks}-{name}"].layers},
            micros=micros,
        )
        for ranks, name, micros in [
            (2, "1f1b", 1),
            (2, "interleaved_1f1b", 5),
            (2, "interleaved_zero_bubble", 5),
            (2, "dualpipev", 3),
            (4, "1f1b", 3),
            (4, "interleaved_1f1b", 9),
            (4, "interleaved_zero_bubble", 9),
            (4, "dualpipev", 7),
        ]
    },
}


def _batches(case: Case, rank: int) -> list[TensorDict]:
    ids = torch.arange(2 * case.places).reshape(2, case.places) % VOCABULARY
    return [TensorDict({"input_ids": ids, "labels": ids}, [2]) for _ in range(case.micros)]


def _calls_twice(model, batch):
    return logits_loss(model, batch) + logits_loss(model, batch)


def _lay_out(case: Case, device: str = "cpu"):
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **case.sizes}), device="cpu")
    with torch.device(device):
        model = fk.Transformer(spec_of(Row({}), **case.spec))
    return mesh, fk.parallelize(model, mesh, **case.options)


def _message(what, *args):
    try:
        what(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _lay_out_message(rank, world, case):
    case = case.second if case.second and rank % 2 else case
    return _message(_lay_out, case)


def _step_message(rank, world, case):
    case = case.second if case.second and rank % 2 else case
    mesh, model = _lay_out(case)
    state = fk.TrainState.create(model, BUILDERS["adamw"](model), mesh=mesh)
    before = [p.detach().clone() for p in model.parameters()]
    step = fk.make_step(_calls_twice if case.twice else logits_loss, schedule=fk.constant(0.1))
    message = _message(step, state, _batches(case, rank))
    after = [p.detach() for p in model.parameters()]
    assert all(map(torch.equal, [p.to_local() for p in after], [p.to_local() for p in before]))
    return message


def _check(messages, case):
    for message in messages:
        assert re.search(case.match, message), message
        assert message.startswith("RuntimeError" if case.twice else "ValueError"), message


@pytest.mark.parametrize("case", LAYING_OUT.values(), ids=list(LAYING_OUT))
def test_a_layout_that_cannot_be_is_refused(case):
    _check(run_ranks(_lay_out_message, Row(case.sizes).world, case), case)


@pytest.mark.parametrize("case", STEPPING.values(), ids=list(STEPPING))
def test_a_step_that_cannot_be_is_refused_and_changes_nothing(case):
    _check(run_ranks(_step_message, Row(case.sizes).world, case), case)
