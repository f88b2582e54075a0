"""The state is frozen, passed on, and gone once it was consumed."""

from __future__ import annotations

import sys

import attrs
import pytest
import torch
from torch import nn

import forgekit as fk


@attrs.frozen(kw_only=True, eq=False)
class Extended(fk.TrainState):
    teacher: nn.Module = attrs.field(metadata={"checkpoint": False}, repr=False)
    temperature: float = 2.0


def create(cls=fk.TrainState, **fields):
    model = nn.Linear(2, 3)
    return cls.create(model, torch.optim.SGD(model.parameters(), lr=0.1), **fields)


FIELDS = [field.name for field in attrs.fields(fk.TrainState) if field.name != "_donated_at"]


def test_a_new_state_is_at_the_start():
    state = create(seed=7, loss_scale=0.25)
    assert (state.step, state.samples, state.seed, state.mesh) == (0, 0, 7, None)
    counters = state.targets, state.skipped, state.loss_scale
    assert [counter.dtype for counter in counters] == [torch.int64, torch.int64, torch.float32]
    assert {counter.shape for counter in counters} == {()}
    assert (state.targets.item(), state.skipped.item(), state.loss_scale.item()) == (0, 0, 0.25)
    assert create().loss_scale.item() == 2.0**-12


def test_a_state_has_the_fields_of_the_contract():
    contract = "model optimizer mesh step samples targets skipped loss_scale seed"
    added = "good_steps recent skips average bad_since layout agreed_names saves gradient_owner"
    assert [*contract.split(), *added.split()] == FIELDS


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.75, float("nan")])
def test_a_loss_scale_that_rounds_is_refused(scale):
    message = rf"^loss_scale {scale} is not a positive power of two; .*for example 2\.0\*\*-12\.$"
    with pytest.raises(ValueError, match=message):
        create(loss_scale=scale)


def test_no_field_of_a_donated_state_can_be_read():
    state = create(seed=3)
    model = state.model
    line = sys._getframe().f_lineno + 1
    new = fk.donate(state, step=5)
    for name in FIELDS:
        with pytest.raises(fk.DonatedStateError) as error:
            getattr(state, name)
        assert str(error.value) == (
            f"read {name!r} of a TrainState that was donated at test_state.py:{line}. "
            "Keep the state the step returned: state, metrics = step(state, batches)."
        )
        getattr(new, name)
    assert (new.step, new.seed, new.model) == (5, 3, model)


def test_a_failed_change_donates_nothing():
    state = create()
    with pytest.raises(TypeError, match="stepp"):
        fk.donate(state, stepp=1)
    assert state.step == 0


def test_a_subclass_keeps_its_fields_and_loses_them_when_donated():
    teacher = nn.Linear(2, 3)
    state = create(Extended, teacher=teacher, temperature=3.0)
    new = fk.donate(state, step=1)
    assert type(new) is Extended
    assert (new.teacher, new.temperature, new.step) == (teacher, 3.0, 1)
    with pytest.raises(fk.DonatedStateError, match="read 'temperature' of a TrainState"):
        _ = state.temperature
    for one in (state, new):
        with pytest.raises(AttributeError, match=r"^'Extended' object has no attribute 'stpe'$"):
            _ = one.stpe
