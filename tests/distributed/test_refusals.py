"""What cannot work stops before training, on every rank, with the arithmetic."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest
import torch
from distributed.batches import VOCABULARY
from distributed.matrix import LAYOUTS, Row
from distributed.models import logits_loss, spec_of
from lab import full_tensors, is_kept, lay_out
from pool import run_ranks
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
        second: What every second rank does instead, by field.
    """

    sizes: dict[str, int]
    match: str
    spec: dict[str, Any] = attrs.field(factory=dict)
    options: dict[str, Any] = attrs.field(factory=dict)
    micros: int = 2
    places: int = 16
    second: dict[str, Any] = attrs.field(factory=dict)


LAYING_OUT = {
    "heads by tp": Case(
        {"tp": 2}, r"is 3, which tp 2 must", {"heads": 3, "kv_heads": 3, "dim": 24}
    ),
    "key and value heads by tp": Case({"tp": 2}, r"is 1, which tp 2 must", {"kv_heads": 1}),
    "feed-forward by tp": Case(
        {"tp": 2}, r"49, which tp 2 must divide.*48 and 50", {"ffn_dim": 49}
    ),
    "vocabulary by tp": Case({"tp": 2}, r"41, which tp 2 must divide", {"vocab_size": 41}),
    "tied embeddings": Case({"pp": 2}, r"one tensor.*tied=False.*pp=1", {"tied": True}),
    "other numbers of blocks": Case(
        {"dp_shard": 2},
        "model: .*25 parameters.* on rank 0, .*47 .* on rank 1",
        second={"spec": {"layers": 4}},
    ),
    "other ways to share a sequence": Case(
        {"cp": 2},
        "context_parallel: 'ring' on rank 0, 'ulysses' on",
        second={"options": {"context_parallel": "ulysses"}},
    ),
}
STEPPING = {
    "more places than the model takes, over all ranks": Case(
        {"cp": 2},
        r"28 positions; max_seq_len is 24, over all ranks .*larger max_seq_len",
        places=28,
    ),
    "places by a ring": Case({"cp": 2}, r"14 positions, which 4 = .* 12 and 16", places=14),
    "places by tp": Case({"tp": 2}, r"15 positions, which 2 = tp 2 .* 14 and 16", places=15),
    **{
        f"{micros} micro-batches for {name} on {ranks}": Case(
            {"pp": ranks},
            rf"{micros} micro-batches do not fit the pipeline schedule '{name}' on {ranks} ranks",
            options={"pipeline_schedule": name},
            spec={"layers": LAYOUTS[f"pp{ranks}-{name}"].layers},
            micros=micros,
        )
        for ranks, name, micros in [
            (4, "1f1b", 3),
            (2, "interleaved_1f1b", 5),
            (2, "interleaved_zero_bubble", 5),
            (2, "dualpipev", 3),
        ]
    },
}


def _refused(rank, world, case, steps):
    if rank % 2:
        case = attrs.evolve(case, **case.second)
    model = fk.Transformer(spec_of(Row({}), **case.spec))
    sizes = {"dp_shard": 1, **case.sizes}
    if not steps:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (matched for all ranks together)
            lay_out(model, sizes, **case.options)
        return str(caught.value)
    state = lay_out(model, sizes, **case.options)
    before, step = full_tensors(state.model), fk.make_step(logits_loss, schedule=fk.constant(0.1))
    ids = torch.arange(2 * case.places).reshape(2, case.places) % VOCABULARY
    batches = [TensorDict({"input_ids": ids, "labels": ids}, [2])] * case.micros
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        step(state, batches)
    assert is_kept(state.model, before)
    return str(caught.value)


@pytest.mark.parametrize("name", [*LAYING_OUT, *STEPPING])
def test_what_cannot_be_is_refused_and_changes_nothing(name):
    case = (LAYING_OUT | STEPPING)[name]
    for message in run_ranks(_refused, Row(case.sizes).world, case, name in STEPPING):
        assert re.search(case.match, message), message
