"""A state that goes from one replica group to another: all of it, or none of it."""

from __future__ import annotations

import re

import attrs
import pytest
import replica_rank
import torch
from lab import full
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
    return fk.donate(
        state,
        skips=((4, 2),),
        recent=torch.ones(4, 2, dtype=torch.float64),
        loss_scale=state.loss_scale * 4,
        good_steps=state.good_steps + 7,
    )


def everything(state):
    """All that a checkpoint holds."""
    parameters = dict(state.model.named_parameters())
    entries = {
        f"{name} {key}": full(value)
        for name, p in parameters.items()
        for key, value in state.optimizer.state[p].items()
    }
    named = {name: full(p).detach() for name, p in parameters.items()}
    averages = {f"average {name}": full(v) for name, v in state.average.values.items()}
    kept = ("targets", "skipped", "loss_scale", "good_steps", "recent", "bad_since")
    fields = {name: getattr(state, name) for name in kept}
    numbers = {name: getattr(state, name) for name in ("step", "samples", "seed", "skips")}
    count = {"count": state.average.count}
    tensors = {**named, **entries, **averages, **fields, **count}
    return {name: tensor.clone() for name, tensor in tensors.items()}, numbers


def _move(rank, world, layout):
    state = trained(layout)
    tensors, numbers = everything(state)
    sent = parts_of(state, ROWS)
    fresh = replica_rank.build(layout, model=EVEN)
    assert find_other(fresh, ROWS, sent) is None
    healed = take_parts(fresh, sent)
    found, counted = everything(healed)
    assert counted == numbers
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)
    # Both go on alike: nothing that a step needs has stayed behind.
    states = [
        replica_rank.train(s, replica_rank.load(s), fk.OneGroup(), steps=STEPS + 2)
        for s in (state, healed)
    ]
    (expected, _), (again, _) = map(everything, states)
    for name, tensor in expected.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("layout", [None, {"dp_shard": 2}, {"tp": 2}], ids=str)
def test_a_state_arrives_bit_by_bit_and_goes_on_alike(layout):
    if layout is None:
        _move(0, 1, None)
    else:
        run_again(_move, 2, layout)


@pytest.fixture(scope="module")
def sent():
    return parts_of(trained(), ROWS)


OTHERS = {
    "another model": (
        {"model": attrs.evolve(EVEN, ffn_dim=32)},
        "rows",
        "is of another model: .*feed_forward",
    ),
    "another optimizer": (
        {"model": EVEN, "optimizer": fk.lion},
        "rows",
        "is of another optimizer: .*AdamW",
    ),
    "other data": (
        {"model": EVEN},
        "other rows",
        "the groups train on other data: 'rows' there, 'other rows' here. Give this one their",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_group_that_does_not_fit_is_told_why(name, sent):
    options, fingerprint, message = OTHERS[name]
    state = replica_rank.build(**options)
    found = find_other(state, ROWS | {"data": fingerprint}, sent)
    assert found is not None
    assert re.search(message, found), found


@pytest.mark.parametrize("here", [{"seed": "5"}, {"seed": "0", "lr": "0.1"}, {}], ids=str)
def test_other_settings_are_told(sent, here):
    state = replica_rank.build(model=EVEN)
    name = "lr" if "lr" in here else "seed"
    assert find_other(state, ROWS | {"settings": here}, sent) == (
        f"the groups have {name} {ROWS['settings'].get(name)}, this one {here.get(name)}. "
        "Give it theirs"
    )


def _other_layout(rank, world):
    there = parts_of(replica_rank.build({"dp_shard": 2}, model=EVEN), ROWS)
    here = replica_rank.build({"tp": 2}, model=EVEN)
    found = find_other(here, ROWS, there)
    assert found is not None
    assert "the groups hold other shards: " in found
    assert found.endswith("All groups have one layout")


def test_another_layout_is_told():
    run_again(_other_layout, 2)
