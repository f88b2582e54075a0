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

STEPPING = {
    "more positions than the model takes, over all ranks": (
        {"cp": 2},
        r"28 positions, more than max_seq_len, which is 24",
        28,
        2,
    ),
    "positions by a ring": ({"cp": 2}, r"length 14 must be a multiple of 4 .* 12 and 16", 14, 2),
    "3 micro-batches on 2": (
        {"pp": 2},
        "3 micro-batches do not fit the pipeline schedule 'dualpipev' on 2 ranks",
        16,
        3,
    ),
}
"""Sizes of the mesh, the message, positions and micro-batches."""


def _refused(rank, world):
    narrow = fk.Transformer(spec_of(Row({}), kv_heads=1))
    with pytest.raises(ValueError, match="is 1, not a multiple of tp 2"):
        lay_out(narrow, {"dp_shard": 1, "tp": 2})
    with torch.device(("cpu", "meta")[rank]):
        model = fk.Transformer(spec_of(Row({})))
    message = r"model: .* 0 on meta .* on rank 0, .* 31 on meta .* on rank 1"
    with pytest.raises(ValueError, match=message):
        lay_out(model)
    for sizes, match, positions, micros in STEPPING.values():
        options = {"pipeline_schedule": "dualpipev"} if "pp" in sizes else {}
        model = fk.Transformer(spec_of(Row({}), layers=4))
        state = lay_out(model, {"dp_shard": 1, **sizes}, **options)
        before, step = full_tensors(model), fk.make_step(logits_loss, schedule=fk.constant(0.1))
        ids = torch.arange(2 * positions).reshape(2, positions) % VOCABULARY
        with pytest.raises(ValueError, match=match):
            step(state, [TensorDict({"input_ids": ids, "labels": ids}, [2])] * micros)
        assert is_kept(model, before)


def test_what_cannot_be_is_refused_and_changes_nothing():
    run_ranks(_refused, 2)
