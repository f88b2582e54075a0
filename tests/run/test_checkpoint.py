"""Saving and loading in one process: exactness, damage, refusals, faults and leftovers."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from lab import train
from saved import adamw, assert_same, everything, flip, momentum, rewrite, save, truncate
from torch import nn

import forgekit as fk
from forgekit.checkpoints.state_dict import model_tensors
from forgekit.files import locked


class Net(nn.Module):
    """Tied weights, a parameter that is never used, and buffers of both kinds."""

    def __init__(self, dim=6):
        super().__init__()
        self.first = nn.Linear(6, dim, bias=False)
        self.second = nn.Linear(dim, 6, bias=False)
        if dim == 6:
            self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, rows):
        self.seen += len(rows)
        return self.second(self.first(rows).tanh())


OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), True),
    "momentum": (momentum, False),
    "fused adamw": (adamw, True),
    "amsgrad": (lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), False),
    "adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.1), True),
}


def build(seed=0, optimizer=adamw, cls=fk.TrainState, dim=6, **fields):
    torch.manual_seed(seed)
    model = Net(dim)
    return cls.create(model, optimizer(model.parameters()), seed=seed, **fields)


def saved(directory, *steps, **options):
    return save(directory, *steps, state=build(), **options)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(("optimizer", "blocking"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_resumed_training_is_bitwise_the_same(tmp_path, optimizer, blocking):
    straight = train(build(optimizer=optimizer), 5)
    state = train(build(optimizer=optimizer), 3)
    pending = fk.checkpoint_save(state, tmp_path, blocking=blocking)
    assert pending.done or not blocking
    assert pending.wait() == tmp_path / "step_00000003"
    assert_same(everything(train(state, 2)), everything(straight))  # saving consumes nothing
    fresh = build(seed=1, optimizer=optimizer)
    resumed = train(fk.checkpoint_load(fresh, tmp_path), 2)
    assert_same(everything(resumed), everything(straight))
    assert resumed.seed == 0
    assert resumed.model.second.weight is resumed.model.first.weight
    with pytest.raises(fk.DonatedStateError, match=r"donated at test_checkpoint\.py"):
        _ = fresh.step


def test_tied_weights_are_saved_once_and_a_cache_is_not(tmp_path):
    saved(tmp_path, 1)
    manifest = json.loads((tmp_path / "step_00000001" / "manifest.json").read_text())
    model = {key for key in manifest["tensors"] if key.startswith("model.")}
    assert model == {"model.first.weight", "model.unused", "model.seen"}


def test_loading_a_checkpoint_without_moments_clears_those_that_are_there(tmp_path):
    fk.checkpoint_save(build(), tmp_path, blocking=True)
    state = fk.checkpoint_load(train(build(), 2), tmp_path)
    assert not state.optimizer.state
    assert_same(everything(train(state, 2)), everything(train(build(), 2)))


def test_optimizer_state_finds_its_parameter_after_reordering(tmp_path):
    state = saved(tmp_path, 2)
    model = deepcopy(state.model)
    groups = [{"params": [p], "lr": 0.1} for p in reversed(list(model.parameters()))]
    fresh = fk.TrainState.create(model, torch.optim.AdamW(groups, fused=True))
    assert_same(everything(fk.checkpoint_load(fresh, tmp_path)), everything(state))


# Fields


class Stream:
    """A stateful stream whose position holds everything that JSON would change."""

    def __init__(self, position=None):
        self.position = position

    def state_dict(self):
        return self.position

    def load_state_dict(self, position):
        self.position = position


@attrs.frozen(kw_only=True, slots=True, eq=False)
class RichState(fk.TrainState):
    """One field of each kind."""

    ema: nn.Module
    stream: Stream
    baseline: torch.Tensor
    name: str = ""
    best: float = 0.0
    note: str | None = None
    frozen: object = attrs.field(default=None, metadata={"checkpoint": False})


def rich(stream=None, seed=5, **fields):
    torch.manual_seed(seed)
    fields = {"ema": Net(), "stream": Stream(stream), "baseline": torch.zeros(2)} | fields
    return build(cls=RichState, **fields)


def test_every_kind_of_field_comes_back_exactly(tmp_path, caplog):
    position = {
        0: [1, (2.5, None)],
        "a": {"b": torch.arange(3)},
        "a.b": torch.ones(2, dtype=torch.bfloat16),
        "rng": [torch.tensor([7, 8], dtype=torch.uint8)],
        "inf": float("inf"),
        True: OrderedDict(x=2**70),
    }
    baseline, mine = torch.tensor([0.1, 0.2]), object()
    state = rich(position, baseline=baseline, name="run", best=1 / 3, frozen=object())
    state = fk.donate(state, skipped=state.skipped + 2, loss_scale=state.loss_scale / 4, seed=2**63)
    fk.checkpoint_save(state, tmp_path, blocking=True)
    new = fk.checkpoint_load(rich(seed=6, note="x", frozen=mine), tmp_path)
    assert (new.name, new.best, new.note, new.frozen) == ("run", 1 / 3, None, mine)
    assert (new.skipped.item(), new.loss_scale.item(), new.seed) == (2, 2.0**-14, 2**63)
    assert new.baseline.equal(baseline)
    assert_same(model_tensors(new.ema), model_tensors(state.ema))
    loaded = new.stream.position
    assert (loaded[0], loaded["inf"]) == ([1, (2.5, None)], float("inf"))
    assert loaded[True] == {"x": 2**70}
    assert loaded["a"]["b"].equal(torch.arange(3))
    assert loaded["a.b"].equal(torch.ones(2, dtype=torch.bfloat16))
    assert loaded["rng"][0].equal(torch.tensor([7, 8], dtype=torch.uint8))
    fk.checkpoint_load(build(), tmp_path)
    assert "fields that the state does not: baseline, best, ema, name, note, stream" in caplog.text


@attrs.frozen(kw_only=True, slots=True, eq=False)
class LaterState(fk.TrainState):
    """Fields that came after some checkpoints had been written."""

    phase: torch.Tensor = attrs.field(metadata={"optional": True})
    stream: Stream = attrs.field(metadata={"optional": True})


def test_optional_fields_come_back_or_keep_their_values(tmp_path):
    def later(phase, position, good_steps):
        state = build(cls=LaterState, phase=torch.tensor(phase), stream=Stream(position))
        return fk.donate(state, good_steps=torch.tensor(good_steps))

    def without(manifest):
        del manifest["fields"]["good_steps"], manifest["tensors"]["state.good_steps"]

    fk.checkpoint_save(later(3, {"at": 4}, 5), tmp_path / "has", blocking=True)
    state = saved(tmp_path / "lacks", 1)
    rewrite(tmp_path / "lacks" / "step_00000001", without)
    new = fk.checkpoint_load(later(0, None, 0), tmp_path / "has")
    assert (new.good_steps, new.phase, new.stream.position) == (5, 3, {"at": 4})
    new = fk.checkpoint_load(later(6, {"at": 7}, 8), tmp_path / "lacks")
    assert (new.step, new.good_steps, new.phase, new.stream.position) == (1, 8, 6, {"at": 7})
    assert_same(model_tensors(new.model), model_tensors(state.model))


UNSAVEABLE = {
    "array": ({"a": [np.ones(2)]}, r"^state\.stream\.a\.0 is a ndarray; "),
    "key": ({(1, 2): 3}, r"^state\.stream is a dict; .* or leave it out"),
}


@pytest.mark.parametrize(("value", "message"), UNSAVEABLE.values(), ids=UNSAVEABLE)
def test_a_field_that_cannot_be_saved_is_named_before_anything_is_written(tmp_path, value, message):
    with pytest.raises(TypeError, match=message):
        fk.checkpoint_save(rich(value), tmp_path)
    assert names(tmp_path) == []


def test_optimizer_state_without_a_parameter_is_refused(tmp_path):
    state = build()
    state.optimizer.state["global"] = {"k": 1}
    with pytest.raises(TypeError, match=r"state under 'global'.* Keep it in optimizer\.state"):
        fk.checkpoint_save(state, tmp_path)


# What may be loaded


def test_without_a_checkpoint_the_state_itself_comes_back(tmp_path, caplog):
    state = build()
    (tmp_path / "torn" / "step_00000009").mkdir(parents=True)
    (tmp_path / "torn" / ".step_00000010.0123456789ab.new").mkdir()
    for directory in (tmp_path / "nowhere", tmp_path, tmp_path / "torn"):
        assert fk.latest_checkpoint(directory) is None
        assert fk.checkpoint_load(state, directory) is state
    assert state.step == 0
    assert "step_00000009 does not count: its manifest.json is missing" in caplog.text


DAMAGES = {
    "truncated": (truncate, r"rank_00000\.safetensors has \d+ bytes instead of \d+"),
    "flipped bit": (flip, r"rank_00000\.safetensors has crc32 \w{8} instead of \w{8}"),
    "missing": (Path.unlink, r"rank_00000\.safetensors is missing \(\d+ bytes expected\)"),
}


@pytest.mark.parametrize(("spoil", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_newest_is_skipped_and_one_asked_for_raises(tmp_path, caplog, spoil, message):
    saved(tmp_path, 1, 2)
    spoil(tmp_path / "step_00000002" / "rank_00000.safetensors")
    state = build(seed=1)
    before = everything(state)
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(state, tmp_path, step=2)
    assert_same(everything(state), before)
    state = fk.checkpoint_load(state, tmp_path)
    assert "skipped a damaged checkpoint: " in caplog.text
    assert_same(everything(state), everything(train(build(), 1)))


def _renamed():
    model = Net()
    model.unusual, model.unused = model.unused, None
    return fk.TrainState.create(model, adamw(model.parameters()))


def _fewer_held():
    return fk.TrainState.create(model := Net(), adamw([model.unused]))


REFUSALS = {
    "shape": (
        lambda: build(dim=5),
        {},
        r"another model.*'first.weight' is float32 \[6, 6\] there",
    ),
    "name": (_renamed, {}, r"lacks 'unusual' \(nearest: 'unused'\); only it has 'unused'\. Build"),
    "fewer held": (_fewer_held, {}, r"other parameters: only it has 'first.weight'\. Build the op"),
    "optimizer": (
        lambda: build(optimizer=momentum),
        {},
        r"another optimizer: 'unused' is AdamW there and SGD here, .*\. Build",
    ),
    "field": (
        rich,
        {},
        r"has other fields: it lacks 'ema'.*\. Leave a field out with metadata={'",
    ),
    "step": (build, {"step": 7}, r"has no committed step 7; it has 1, 2\."),
    "data": (
        build,
        {"fingerprint": lambda _: "other"},
        r"'phases up to', \d+\] and today's is 'other'\. Choose",
    ),
}


@pytest.mark.parametrize(("make", "options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_does_not_belong_is_refused_and_changes_nothing(tmp_path, make, options, message):
    fingerprint = {"fingerprint": lambda samples: ["phases up to", samples]}
    saved(tmp_path, 1, 2, **fingerprint)
    state = make()
    before = everything(state)
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(state, tmp_path, **options)
    assert_same(everything(state), before)
    assert fk.checkpoint_load(build(), tmp_path, **fingerprint).step == 2


def test_another_format_is_refused_rather_than_skipped(tmp_path):
    saved(tmp_path, 1, 2)
    rewrite(tmp_path / "step_00000002", lambda manifest: manifest.update(format=99))
    message = r"2 has format 99, and this version of .* format 3"
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(build(), tmp_path)


def test_a_checkpoint_itself_is_no_directory_of_a_new_run(tmp_path):
    saved(tmp_path, 1)
    with pytest.raises(fk.CheckpointError, match=r"is a checkpoint itself; name the folder that"):
        fk.checkpoint_load(build(), tmp_path / "step_00000001")


# Parts of a checkpoint


def test_a_model_alone_starts_a_new_run_whatever_optimizer_and_data_were(tmp_path):
    old = everything(saved(tmp_path, 3, fingerprint="books"))
    state = train(build(seed=1, optimizer=momentum), 1)
    before = everything(state)
    loaded = fk.checkpoint_load(state, tmp_path, fingerprint="poems", parts=("model",))
    assert loaded.seed == 1
    models = [name for name in before if name.startswith("model.")]
    assert len(models) == 3
    assert_same(everything(loaded), before | {name: old[name] for name in models})


def test_another_optimizer_goes_on_at_the_same_step(tmp_path):
    old = saved(tmp_path, 3)
    loaded = fk.checkpoint_load(build(optimizer=momentum), tmp_path, parts=("model", "fields"))
    assert not loaded.optimizer.state
    by_hand = build(optimizer=momentum)
    by_hand.model.load_state_dict(old.model.state_dict())
    by_hand = fk.donate(by_hand, step=3, samples=12)
    assert_same(everything(train(loaded, 2)), everything(train(by_hand, 2)))


@pytest.mark.parametrize("parts", [("optimizer",), "model"])
def test_parts_that_are_none_are_refused(tmp_path, parts):
    with pytest.raises(ValueError, match=r"must be some of \['model', 'optimizer', 'fields'\], t"):
        fk.checkpoint_load(build(), tmp_path, parts=parts)


# Faults and leftovers


def test_whichever_sync_fails_the_newest_committed_one_is_whole(tmp_path, monkeypatch, caplog):
    """The order of contents, manifest, rename and symlink, from the outside."""
    fsync, calls, failing = os.fsync, [], [0]

    def fail_at(descriptor):
        calls.append(descriptor)
        if len(calls) == failing[0]:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_at)
    (tmp_path / "good").mkdir()
    expected = {1: everything(saved(tmp_path / "good", 1)), 2: everything(train(build(), 2))}
    syncs = len(calls)
    newest = []
    for failing[0] in range(1, syncs + 1):
        calls.clear()
        directory = tmp_path / str(failing[0])
        shutil.copytree(tmp_path / "good", directory, symlinks=True)
        caplog.clear()
        pending = fk.checkpoint_save(train(build(), 2), directory, keep=1)
        if failing[0] < syncs:  # until the new name is durable; then comes `latest`
            message = r"Input/output error\. Checkpoints that .*: step_0000000\d is good"
            with pytest.raises(fk.CheckpointError, match=message):
                pending.wait()
            assert (directory / "step_00000001").exists()  # nothing older is deleted for it
        else:
            assert pending.wait() == directory / "step_00000002"
            assert "Input/output error" in caplog.text
        state = fk.checkpoint_load(build(seed=1), directory)
        assert_same(everything(state), expected[state.step])
        assert (directory / "latest" / "manifest.json").exists()
        assert not list(directory.glob(".*"))
        newest.append(state.step)
    # Before the sync of its new name the checkpoint is there, and is not reported as saved.
    assert newest == [1] * (syncs - 2) + [2] * 2


def test_a_failure_nobody_waited_for_is_raised_once_by_the_next_save(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    state = train(build(), 1)
    fk.checkpoint_save(state, tmp_path / "file" / "checkpoints")
    message = r"step 1 could not be saved to .*/file/checkpoints: Not a directory .*there is none"
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_save(state, tmp_path / "good")
    assert "could not be saved" in caplog.text
    assert fk.checkpoint_save(state, tmp_path / "good").wait().name == "step_00000001"
    fk.checkpoint_save(state, tmp_path / "file" / "checkpoints")
    with pytest.raises(fk.CheckpointError, match=message):
        fk.run.wait_for_saves(state)
    fk.run.wait_for_saves(state)


def test_going_back_keeps_what_was_just_saved_and_says_what_is_newer(tmp_path, caplog):
    saved(tmp_path, 3, 4, keep=2)
    saved(tmp_path, 1, keep=2)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000003", "step_00000004"]
    assert os.readlink(tmp_path / "latest") == "step_00000001"
    assert "holds step 4, newer than step 1 that was just saved" in caplog.text


def test_failing_to_replace_a_step_keeps_the_one_that_was_there(tmp_path, monkeypatch):
    expected = everything(saved(tmp_path, 2))
    rename = Path.rename

    def fail_from_temporary(path, target):  # where names cannot be exchanged
        if path.name.endswith(".new"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return rename(path, target)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)
    monkeypatch.setattr(Path, "rename", fail_from_temporary)
    with pytest.raises(fk.CheckpointError, match="Input/output error"):
        fk.checkpoint_save(train(build(seed=1), 2), tmp_path, blocking=True)
    assert names(tmp_path) == ["latest", "step_00000002"]
    assert_same(everything(fk.checkpoint_load(build(), tmp_path)), expected)


def test_only_what_dead_saves_left_is_deleted(tmp_path):
    dead, alive = (tmp_path / f".step_00000007.{digit * 12}.new" for digit in "ab")
    for folder in (dead, alive, other := tmp_path / ".step_00000001.mine.new"):
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    (tmp_path / f".step_00000001.{'c' * 12}.new").symlink_to(other.name)
    (tmp_path / ".latest.new").symlink_to("step_00000007")
    with locked(alive):
        saved(tmp_path, 3)
    assert not dead.exists()
    assert not (tmp_path / ".latest.new").is_symlink()
    assert all((folder / "notes.txt").exists() for folder in (alive, other))
