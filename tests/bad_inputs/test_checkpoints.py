"""Checkpoints that are foreign, damaged, changed or asked for wrongly; the state stays as it is."""

from __future__ import annotations

import pytest
import torch
from manifests import rewrite
from torch import nn

import forgekit as fk

pytestmark = pytest.mark.bad_input


def build(width=3, step=0):
    torch.manual_seed(step)
    model = nn.Linear(4, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fk.donate(fk.TrainState.create(model, optimizer), step=step)


def content(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def manifest(**changes):
    return lambda folder: rewrite(folder, lambda manifest: manifest.update(changes))


def nothing(folder):
    """What is asked for is wrong, not what is there."""


SHARD = "rank_00000.safetensors"
CASES = {
    "an empty shard": (content(SHARD, b""), {}, r"safetensors has 0 bytes instead of \d+"),
    "a foreign shard": (
        content(SHARD, b"PK" * 99),
        {},
        r"safetensors has 198 bytes instead of \d+",
    ),
    "a newer format": (
        manifest(format=99),
        {},
        r"has format 99, from a newer version, .* reads format 2\. Upgrade forgekit to load it",
    ),
    "a step that was not saved": (nothing, {"step": 2}, r"has no committed step 2; it has 1\."),
    "a negative step": (nothing, {"step": -1}, r"has no committed step -1; it has 1\."),
}


@pytest.mark.parametrize(("damage", "options", "message"), CASES.values(), ids=CASES)
def test_checkpoints_that_cannot_be_loaded_are_refused(tmp_path, damage, options, message):
    fk.checkpoint_save(build(step=1), tmp_path, blocking=True)
    damage(tmp_path / "step_00000001")
    state = build(step=9)
    before = state.model.weight.clone()
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(state, tmp_path, **options)
    assert state.step == 9
    assert state.model.weight.equal(before)


A_PART = r"must be some of \['model', 'optimizer', 'fields'\], the model included"
ASKED = {
    "the optimizer alone": ({"parts": ("optimizer",)}, A_PART),
    "no part": ({"parts": ()}, A_PART),
    "a text for parts": ({"parts": "model"}, A_PART),
    "an unknown part": ({"parts": ("model", "ema")}, A_PART),
}


@pytest.mark.parametrize(("options", "message"), ASKED.values(), ids=ASKED)
def test_options_that_load_nothing_are_refused(tmp_path, options, message):
    fk.checkpoint_save(build(step=1), tmp_path, blocking=True)
    with pytest.raises(ValueError, match=message):
        fk.checkpoint_load(build(step=9), tmp_path, **options)


SAVED = {
    "nothing kept": ({"keep": 0}, "^keep 0 must be at least 1: .* Pass None to keep all"),
    "less than nothing kept": ({"keep": -2}, "^keep -2 must be at least 1: .* Pass None to keep"),
}


@pytest.mark.parametrize(("options", "message"), SAVED.values(), ids=SAVED)
def test_saves_that_cannot_be_are_refused_and_leave_nothing(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        fk.checkpoint_save(build(), tmp_path / "checkpoints", **options)
    assert not (tmp_path / "checkpoints").exists()


TAKEN_FOR_NEW = {
    "a file": (lambda folder: folder / "step_00000001" / SHARD, "is a file; name the directory th"),
    "a checkpoint": (
        lambda folder: folder / "step_00000001",
        r"is a checkpoint itself; name the directory that holds it, .*, and choose it with step=",
    ),
    **{
        f"only a manifest of {content!r}": (
            lambda folder, content=content: (
                (folder / "step_00000001" / "manifest.json").write_bytes(content) and folder
            ),
            r"no whole checkpoint to load: .*manifest\.json is damaged\. Restore it, or delete",
        )
        for content in (b" ", b"[]", b"\xff\x00", b'{"step": 1')
    },
}


@pytest.mark.parametrize(("place", "message"), TAKEN_FOR_NEW.values(), ids=TAKEN_FOR_NEW)
def test_what_is_no_new_run_does_not_start_one(tmp_path, place, message):
    fk.checkpoint_save(build(step=1), tmp_path, blocking=True)
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(build(step=9), place(tmp_path))


@pytest.mark.parametrize("keep", [1.5, "3"])
def test_what_is_no_rule_of_retention_is_refused_before_anything_is_written(tmp_path, keep):
    message = rf"^keep is {keep!r}; pass an integer, a forgekit\.Keep, or None to keep all"
    with pytest.raises(TypeError, match=message):
        fk.checkpoint_save(build(), tmp_path / "checkpoints", keep=keep)
    assert not (tmp_path / "checkpoints").exists()
