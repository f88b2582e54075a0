"""A step with a number that is not finite, on whatever rank, changes nothing anywhere."""

from __future__ import annotations

import pytest
import torch
from chaos.scene import in_short
from chaos.survival import Outcome
from runs import rows_of, status_of, tensors_of

BAD = 7
FAULTS = {
    "the gradient of one rank is NaN": {"nan_gradient": BAD},
    "the loss of one micro-batch is infinite": {"infinite_loss": (BAD, 1)},
}
EACH = {"steps": 10, "save_every": 1, "keep": 10, "bad_steps": "warn"}


@pytest.mark.parametrize("name", in_short(FAULTS, "the gradient of one rank is NaN"))
def test_a_bad_step_changes_nothing_on_any_rank(scene, survived, name):
    life = scene.live(faults={1: FAULTS[name]}, **EACH)
    assert life.end() == [0, 0], life.output
    skipped = {row["step"]: row["train/skipped"] for row in rows_of(scene.out)}
    assert skipped == {step: int(step == BAD) for step in range(1, EACH["steps"] + 1)}
    before, after, later = (_trained(scene.out, step) for step in (BAD - 1, BAD, BAD + 1))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        torch.testing.assert_close(after[key], tensor, rtol=0, atol=0, msg=key)
    assert any(not torch.equal(later[key], tensor) for key, tensor in after.items())
    status = status_of(scene.out)["status"]
    after = "nothing changed in that step"
    survived(name, Outcome(ended="exit 0", status=status, lost=0, after=after))


def _trained(out, step):
    """Weights, moments and what counts the targets, as a checkpoint has them."""
    tensors = tensors_of(out, step)
    trained = {key: tensor for key, tensor in tensors.items() if not key.startswith("state.")}
    return trained | {"targets": tensors["state.targets"]}
