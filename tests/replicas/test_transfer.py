"""A state that goes from one replica group to another: all of it, or none of it."""

from __future__ import annotations

import re

import attrs
import pytest
import replica_rank
import saved
import torch
from covering import first_of
from pool import run_again

import forgekit as fk
from forgekit.replicas.transfer import find_other, parts_of, take_parts

STEPS = 3
ROWS = {"data": "rows", "settings": {"seed": "0"}}
EVEN = attrs.evolve(replica_rank.SPEC, kv_heads=2, vocab_size=38)  # for two ranks to share it


def trained(layout=None):
    """A state in which nothing is at its first value."""
    state = replica_rank.build(layout, model=EVEN)
    state = replica_rank.train(state, replica_rank.load(state), fk.OneGroup(), steps=STEPS)
    numbers = {"loss_scale": state.loss_scale * 4, "good_steps": state.good_steps + 7}
    recent = torch.ones(4, 2, dtype=torch.float64)
    return fk.donate(state, skips=((4, 2),), recent=recent, **numbers)


def everything(state):
    """All that a checkpoint holds."""
    tensors = {name: getattr(state, name) for name in ("recent", "bad_since")}
    tensors |= {"count": state.average.count, "skips": torch.tensor([state.seed, *state.skips[0]])}
    return saved.everything(state) | {name: tensor.clone() for name, tensor in tensors.items()}


def _move(rank, world, layout):
    state = trained(layout)
    tensors = everything(state)
    sent = parts_of(state, ROWS)
    fresh = replica_rank.build(layout, model=EVEN)
    assert find_other(fresh, ROWS, sent) is None
    healed = take_parts(fresh, sent)
    saved.assert_same(everything(healed), tensors)
    # Both go on alike: nothing that a step needs has stayed behind.
    expected, again = (
        replica_rank.train(s, replica_rank.load(s), fk.OneGroup(), steps=STEPS + 2)
        for s in (state, healed)
    )
    saved.assert_same(everything(again), everything(expected))


LAYOUTS = [(1, None), (2, {"dp_shard": 2}), (2, {"tp": 2})]


@pytest.mark.parametrize(("world", "layout"), first_of(LAYOUTS[:2], LAYOUTS))
def test_a_state_arrives_bit_by_bit_and_goes_on_alike(world, layout):
    run_again(_move, world, layout)


@pytest.fixture(scope="module")
def sent():
    return parts_of(trained(), ROWS)


OTHERS = {
    "is of another model: .*feed_forward": ({"model": attrs.evolve(EVEN, ffn_dim=32)}, {}),
    "is of another optimizer: .*AdamW": ({"optimizer": fk.lion}, {}),
    "train on other data: 'rows' there, 'other' here. Give this one their": ({}, {"data": "other"}),
    "the groups have seed 0, this one 5. Give it theirs": ({}, {"settings": {"seed": "5"}}),
    "the groups have lr None, this one 0.1": ({}, {"settings": {"seed": "0", "lr": "0.1"}}),
    "the groups have seed 0, this one None": ({}, {"settings": {}}),
}


@pytest.mark.parametrize("message", OTHERS)
def test_a_group_that_does_not_fit_is_told_why(message, sent):
    options, facts = OTHERS[message]
    found = find_other(replica_rank.build(**{"model": EVEN, **options}), ROWS | facts, sent)
    assert re.search(message, found or ""), found


def _other_layout(rank, world):
    there = parts_of(replica_rank.build({"dp_shard": 2}, model=EVEN), ROWS)
    return find_other(replica_rank.build({"tp": 2}, model=EVEN), ROWS, there)


def test_another_layout_is_told():
    for found in run_again(_other_layout, 2):
        assert found.startswith("the groups hold other shards: ")
