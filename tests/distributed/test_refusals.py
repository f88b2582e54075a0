"""What cannot work stops before training, on every rank, with the arithmetic."""

from __future__ import annotations

import pytest
import torch
from distributed.batches import VOCABULARY
from distributed.matrix import Row
from distributed.models import logits_loss, spec_of
from lab import full_tensors, is_kept, lay_out
from pool import run_ranks
from tensordict import TensorDict

import forgekit as fk

LAYING_OUT = {
    "key and value heads by tp": ({"tp": 2}, r"is 1, which tp 2 must", {"kv_heads": 1}, {}),
    "other numbers of blocks": (
        {"dp_shard": 2},
        "model: .*31 parameters.* on rank 0, .*59 .* on rank 1",
        {"layers": (2, 4)},
        {},
    ),
    "on meta on one rank": (
        {"dp_shard": 2},
        "model: .* 0 on meta .* on rank 0, .* 31 on meta .* on rank 1",
        {},
        {"device": ("cpu", "meta")},
    ),
    "other ways to share a sequence": (
        {"cp": 2},
        "context_parallel: 'ring' on rank 0, 'ulysses' on",
        {},
        {"context_parallel": ("ring", "ulysses")},
    ),
}
"""Sizes of the mesh, the message, changes of the model and options; in pairs by rank."""
STEPPING = {
    "more positions than the model takes, over all ranks": (
        {"cp": 2},
        r"28 positions; max_seq_len is 24, over all ranks .*larger max_seq_len",
        28,
        2,
    ),
    "positions by a ring": ({"cp": 2}, r"14 positions, which 4 = .* 12 and 16", 14, 2),
    "3 micro-batches on 2": (
        {"pp": 2},
        "3 micro-batches do not fit the pipeline schedule 'dualpipev' on 2 ranks",
        16,
        3,
    ),
}
"""Sizes of the mesh, the message, positions and micro-batches."""


def _of(rank, values):
    return {key: v[rank] if isinstance(v, tuple) else v for key, v in values.items()}


def _laid_out(rank, world, name):
    sizes, match, changes, options = LAYING_OUT[name]
    options = _of(rank, options)
    with torch.device(options.pop("device", "cpu")):
        model = fk.Transformer(spec_of(Row({}), **_of(rank, changes)))
    with pytest.raises(ValueError, match=match):
        lay_out(model, {"dp_shard": 1, **sizes}, **options)


def _stepped(rank, world, name):
    sizes, match, positions, micros = STEPPING[name]
    options = {"pipeline_schedule": "dualpipev"} if "pp" in sizes else {}
    state = lay_out(fk.Transformer(spec_of(Row({}), layers=4)), {"dp_shard": 1, **sizes}, **options)
    before, step = full_tensors(state.model), fk.make_step(logits_loss, schedule=fk.constant(0.1))
    ids = torch.arange(2 * positions).reshape(2, positions) % VOCABULARY
    with pytest.raises(ValueError, match=match):
        step(state, [TensorDict({"input_ids": ids, "labels": ids}, [2])] * micros)
    assert is_kept(state.model, before)


@pytest.mark.parametrize("name", [*LAYING_OUT, *STEPPING])
def test_what_cannot_be_is_refused_and_changes_nothing(name):
    run_ranks(_laid_out if name in LAYING_OUT else _stepped, 2, name)
