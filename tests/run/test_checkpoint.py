"""Saving and loading in one process: exactness, damage, refusals, faults and retention."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
import threading
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from manifests import rewrite
from torch import nn

from forgekit.checkpoints.directory import latest_checkpoint
from forgekit.checkpoints.load import checkpoint_load
from forgekit.checkpoints.save import checkpoint_save, wait_for_saves
from forgekit.checkpoints.state_dict import copy_to_host, model_tensors
from forgekit.files import locked
from forgekit.ranks import CheckpointError
from forgekit.state import DonatedStateError, TrainState, donate


class Net(nn.Module):
    """Tied weights, a parameter that is never used, and buffers of both kinds."""

    def __init__(self, dim=4):
        super().__init__()
        self.embed = nn.Embedding(7, dim)
        self.out = nn.Linear(dim, 7, bias=False)
        self.out.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, ids):
        self.seen += ids.numel()
        return self.out(self.embed(ids).tanh())


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def build(seed=0, optimizer="fused adamw", cls=TrainState, dim=4, **fields):
    torch.manual_seed(seed)
    model = Net(dim)
    return cls.create(model, OPTIMIZERS[optimizer](model.parameters()), seed=seed, **fields)


def train(state, steps):
    for _ in range(steps):
        ids = torch.randint(7, (8,), generator=torch.Generator().manual_seed(state.step))
        state.optimizer.zero_grad()
        nn.functional.cross_entropy(state.model(ids), ids).backward()
        state.optimizer.step()
        state = donate(
            state, step=state.step + 1, samples=state.samples + 8, targets=state.targets + 8
        )
    return state


def everything(state):
    """All tensors of a state by name, copied."""
    moments = {
        f"{i}.{key}": value.clone()
        for i, parameter in enumerate(state.model.parameters())
        for key, value in state.optimizer.state.get(parameter, {}).items()
    }
    weights = {name: tensor.clone() for name, tensor in model_tensors(state.model).items()}
    return weights | moments | {"targets": state.targets.clone()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def saved(directory, *steps, **options):
    """Train through ``steps``, save each, and return the state."""
    state = build()
    for step in steps:
        state = train(state, step - state.step)
        checkpoint_save(state, directory, blocking=True, **options)
    return state


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def no_space(monkeypatch):
    """Make the disk full for everything that is synced from now on."""

    def fsync(_):
        raise OSError(errno.ENOSPC, "No space left on device", "shard")

    return lambda: monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture
def gate(monkeypatch):
    """Hold every save at its first fsync until ``gate.opened`` is set."""
    gate = SimpleNamespace(reached=threading.Event(), opened=threading.Event())
    fsync = os.fsync

    def held(descriptor):
        gate.reached.set()
        assert gate.opened.wait(20)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", held)
    yield gate
    gate.opened.set()
    wait_for_saves()


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_training_is_bitwise_the_same(tmp_path, optimizer, blocking):
    straight = train(build(optimizer=optimizer), 5)
    state = train(build(optimizer=optimizer), 3)
    pending = checkpoint_save(state, tmp_path, blocking=blocking)
    assert pending.done or not blocking
    assert pending.wait() == tmp_path / "step_00000003"
    resumed = train(checkpoint_load(build(seed=1, optimizer=optimizer), tmp_path), 2)
    assert_same(everything(resumed), everything(straight))
    assert (resumed.step, resumed.samples, resumed.seed) == (5, 40, 0)


def test_training_goes_on_while_the_state_as_it_was_is_written(tmp_path, gate):
    state = train(build(), 2)
    before = everything(state)
    pending = checkpoint_save(state, tmp_path)
    assert gate.reached.wait(20)
    state = train(state, 2)
    assert not pending.done
    assert latest_checkpoint(tmp_path) is None
    gate.opened.set()
    assert pending.wait() == latest_checkpoint(tmp_path)
    assert_same(everything(checkpoint_load(state, tmp_path)), before)


def test_a_later_copy_of_the_same_layout_takes_no_new_memory():
    tensors, buffers = model_tensors(Net()), {}
    first = {key: tensor.data_ptr() for key, tensor in copy_to_host(tensors, buffers).items()}
    tensors["model.unused"] += 1
    again = copy_to_host(tensors, buffers)
    assert {key: tensor.data_ptr() for key, tensor in again.items()} == first
    assert_same(again, tensors)
    assert not set(first.values()) & {tensor.data_ptr() for tensor in tensors.values()}


def test_tied_weights_are_saved_once_and_a_cache_is_not(tmp_path):
    saved(tmp_path, 1)
    manifest = json.loads((tmp_path / "step_00000001" / "manifest.json").read_text())
    model = {key for key in manifest["tensors"] if key.startswith("model.")}
    assert model == {"model.embed.weight", "model.unused", "model.seen"}
    state = checkpoint_load(build(seed=1), tmp_path)
    assert state.model.out.weight is state.model.embed.weight


def test_loading_a_checkpoint_without_moments_clears_those_that_are_there(tmp_path):
    checkpoint_save(build(), tmp_path, blocking=True)
    state = checkpoint_load(train(build(), 2), tmp_path)
    assert not state.optimizer.state
    assert_same(everything(train(state, 2)), everything(train(build(), 2)))


def test_a_loaded_state_is_donated_and_a_saved_one_is_not(tmp_path):
    state = train(build(), 1)
    checkpoint_save(state, tmp_path, blocking=True)
    new = checkpoint_load(state, tmp_path)
    assert new.step == 1
    with pytest.raises(DonatedStateError, match=r"donated at test_checkpoint\.py"):
        _ = state.step


class Stream:
    """A stateful stream whose position holds everything that JSON would change."""

    def __init__(self, position=None):
        self.position = position

    def state_dict(self):
        return self.position

    def load_state_dict(self, position):
        self.position = position


@attrs.frozen(kw_only=True, slots=True, eq=False)
class RichState(TrainState):
    """One field of each kind."""

    ema: nn.Module
    stream: Stream
    baseline: torch.Tensor
    name: str = ""
    best: float = 0.0
    note: str | None = None
    frozen: object = attrs.field(default=None, metadata={"checkpoint": False})


def test_every_kind_of_field_comes_back_exactly(tmp_path):
    position = {
        0: [1, (2.5, None)],
        "a": {"b": torch.arange(3)},
        "a.b": torch.ones(2, dtype=torch.bfloat16),
        "rng": [torch.tensor([7, 8], dtype=torch.uint8)],
        "inf": float("inf"),
        True: OrderedDict(x=2**70),
    }
    rich = {"ema": Net(), "stream": Stream(position), "baseline": torch.tensor([0.1, 0.2])}
    state = build(cls=RichState, **rich, name="run", best=1 / 3, frozen=object())
    state = donate(state, skipped=state.skipped + 2, loss_scale=state.loss_scale / 4, seed=2**63)
    checkpoint_save(state, tmp_path, blocking=True)
    torch.manual_seed(5)
    mine = object()
    other = {"ema": Net(), "stream": Stream(), "baseline": torch.zeros(2)}
    fresh = build(cls=RichState, **other, note="x", frozen=mine)
    new = checkpoint_load(fresh, tmp_path)
    assert (new.name, new.best, new.note, new.frozen) == ("run", 1 / 3, None, mine)
    assert (new.skipped.item(), new.loss_scale.item(), new.seed) == (2, 2.0**-14, 2**63)
    assert new.baseline.equal(torch.tensor([0.1, 0.2]))
    assert_same(model_tensors(new.ema), model_tensors(rich["ema"]))
    loaded = new.stream.position
    assert (loaded[0], loaded["inf"]) == ([1, (2.5, None)], float("inf"))
    assert loaded[True] == {"x": 2**70}
    assert loaded["a"]["b"].equal(torch.arange(3))
    assert loaded["a.b"].equal(torch.ones(2, dtype=torch.bfloat16))
    assert loaded["rng"][0].equal(torch.tensor([7, 8], dtype=torch.uint8))


@attrs.frozen(kw_only=True, slots=True, eq=False)
class LaterState(TrainState):
    """Fields that came after some checkpoints had been written."""

    phase: torch.Tensor = attrs.field(metadata={"optional": True})
    stream: Stream = attrs.field(metadata={"optional": True})


def test_optional_fields_keep_their_values_where_a_checkpoint_lacks_them(tmp_path):
    state = saved(tmp_path, 1)

    def without(manifest):
        del manifest["fields"]["good_steps"], manifest["tensors"]["state.good_steps"]

    rewrite(tmp_path / "step_00000001", without)
    later = {"phase": torch.tensor(3), "stream": Stream({"at": 4})}
    fresh = donate(build(cls=LaterState, **later), good_steps=torch.tensor(5))
    new = checkpoint_load(fresh, tmp_path)
    assert (new.good_steps, new.phase, new.stream.position) == (5, 3, {"at": 4})
    assert new.step == 1
    assert_same(model_tensors(new.model), model_tensors(state.model))


def test_optional_fields_come_back_where_a_checkpoint_has_them(tmp_path):
    state = build(cls=LaterState, phase=torch.tensor(3), stream=Stream({"at": 4}))
    state = donate(state, good_steps=torch.tensor(5))
    checkpoint_save(state, tmp_path, blocking=True)
    other = build(cls=LaterState, phase=torch.tensor(0), stream=Stream())
    new = checkpoint_load(other, tmp_path)
    assert (new.good_steps, new.phase, new.stream.position) == (5, 3, {"at": 4})


def test_without_a_checkpoint_the_state_itself_comes_back(tmp_path, caplog):
    state = build()
    (tmp_path / "torn" / "step_00000009").mkdir(parents=True)
    (tmp_path / "torn" / ".step_00000010.0123456789ab.new").mkdir()
    for directory in (tmp_path / "nowhere", tmp_path, tmp_path / "torn"):
        assert latest_checkpoint(directory) is None
        assert checkpoint_load(state, directory) is state
    assert state.step == 0
    assert "step_00000009 does not count: its manifest.json is missing" in caplog.text


def _truncate(file):
    os.truncate(file, file.stat().st_size - 1)


def _flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "truncated": (_truncate, r"rank_00000\.safetensors has \d+ bytes instead of \d+"),
    "flipped bit": (_flip, r"rank_00000\.safetensors has crc32 \w{8} instead of \w{8}"),
    "missing": (Path.unlink, r"rank_00000\.safetensors is missing \(\d+ bytes expected\)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_skipped_and_one_asked_for_raises(tmp_path, caplog, damage):
    spoil, message = DAMAGES[damage]
    expected = everything(saved(tmp_path / "good", 1))
    saved(tmp_path / "runs", 1, 2)
    spoil(tmp_path / "runs" / "step_00000002" / "rank_00000.safetensors")
    state = build(seed=1)
    before = everything(state)
    with pytest.raises(CheckpointError, match=message):
        checkpoint_load(state, tmp_path / "runs", step=2)
    assert_same(everything(state), before)
    state = checkpoint_load(state, tmp_path / "runs")
    assert "skipped a damaged checkpoint: " in caplog.text
    assert_same(everything(state), expected)


def _renamed():
    model = Net()
    model.unusual = model.unused
    del model.unused
    return TrainState.create(model, OPTIMIZERS["fused adamw"](model.parameters()))


def _fewer_held():
    model = Net()
    return TrainState.create(model, OPTIMIZERS["fused adamw"]([model.unused]))


REFUSALS = {
    "shape": (
        lambda: build(dim=5),
        {},
        r"another model.*'embed.weight' is float32 \[7, 4\] there ",
    ),
    "name": (
        _renamed,
        {},
        r"lacks 'unusual' \(nearest: 'unused'\); only it has 'unused'\. Build",
    ),
    "fewer held": (
        _fewer_held,
        {},
        r"other parameters: only it has 'embed.weight'\. Build the opt",
    ),
    "optimizer": (
        lambda: build(optimizer="momentum"),
        {},
        r"another optimizer: 'unused' is AdamW there and SGD here, .*\. Build",
    ),
    "field": (
        lambda: build(cls=RichState, ema=Net(), stream=Stream(), baseline=torch.zeros(1)),
        {},
        r"has other fields: it lacks 'ema'.*\. Leave a field out with metadata=",
    ),
    "data": (
        build,
        {"fingerprint": ["b", 2]},
        r"\['a', 1\] and today's is \['b', 2\]\. Choose",
    ),
    "step": (build, {"step": 7}, r"has no committed step 7; it has 1, 2\."),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_belong_is_refused_and_changes_nothing(tmp_path, case):
    make, options, message = REFUSALS[case]
    saved(tmp_path, 1, 2, fingerprint=("a", 1))
    state = make()
    before = everything(state)
    with pytest.raises(CheckpointError, match=message):
        checkpoint_load(state, tmp_path, **options)
    assert_same(everything(state), before)


@pytest.mark.parametrize("where", [str, "file://{}".format])
def test_another_format_is_refused_rather_than_skipped(tmp_path, where):
    saved(tmp_path, 1, 2)
    rewrite(tmp_path / "step_00000002", lambda manifest: manifest.update(format=99))
    with pytest.raises(CheckpointError, match=r"2 has format 99, and this version of .* format 3"):
        checkpoint_load(build(), where(tmp_path))


def test_other_data_can_be_allowed_and_the_same_data_passes(tmp_path):
    saved(tmp_path, 1, fingerprint=("a", 1))
    assert checkpoint_load(build(), tmp_path, fingerprint=("a", 1)).step == 1
    assert checkpoint_load(build(), tmp_path, fingerprint="b", allow_other_data=True).step == 1
    assert checkpoint_load(build(), tmp_path).step == 1


def test_data_may_be_compared_as_far_as_they_are_consumed(tmp_path):
    state = saved(tmp_path, 1, fingerprint=lambda samples: ["phases up to", samples])
    options = {"fingerprint": lambda samples: ["phases up to", samples]}
    assert checkpoint_load(build(), tmp_path, **options).samples == state.samples > 0
    with pytest.raises(CheckpointError, match=r"'phases up to', \d+\] and today's is 'other'"):
        checkpoint_load(build(), tmp_path, fingerprint=lambda _: "other")


UNSAVEABLE = {
    "set": (
        {1},
        r"field 'stream' holds a set at state\.stream and cannot be saved\. .*leave it out",
    ),
    "array": (
        Stream({"a": [np.ones(2)]}),
        r"field 'stream' holds a ndarray at state\.stream\.a\.0",
    ),
    "key": (
        Stream({(1, 2): 3}),
        r"field 'stream' holds a dict at state\.stream and .* \(under",
    ),
    "object": (object(), r"field 'stream' holds a object"),
}


@pytest.mark.parametrize("case", UNSAVEABLE)
def test_a_field_that_cannot_be_saved_is_named_before_anything_is_written(tmp_path, case):
    value, message = UNSAVEABLE[case]
    state = build(cls=RichState, ema=Net(), stream=value, baseline=torch.zeros(1))
    with pytest.raises(TypeError, match=message):
        checkpoint_save(state, tmp_path)
    assert names(tmp_path) == []


def test_optimizer_state_without_a_parameter_is_refused(tmp_path):
    state = build()
    state.optimizer.state["global"] = {"k": 1}
    with pytest.raises(
        TypeError, match=r"keeps state under 'global'.* Keep it in optimizer\.state"
    ):
        checkpoint_save(state, tmp_path)


def test_a_full_disk_leaves_what_was_there(tmp_path, no_space):
    state = saved(tmp_path, 1, 2)
    no_space()
    state = train(state, 1)
    message = r"step 3 could not be saved to .*: No space left on device .*step_00000002 is good"
    pending = checkpoint_save(state, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        pending.wait()
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]
    assert (tmp_path / "latest").resolve().name == "step_00000002"
    with pytest.raises(CheckpointError, match=message):
        checkpoint_save(state, tmp_path, blocking=True)


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
        pending = checkpoint_save(train(build(), 2), directory)
        if failing[0] < syncs:  # until the new name is durable; then comes `latest`
            with pytest.raises(CheckpointError, match=r"Input/output error\. Checkpoints that"):
                pending.wait()
        else:
            assert pending.wait() == directory / "step_00000002"
            assert "Input/output error" in caplog.text
        state = checkpoint_load(build(seed=1), directory)
        assert_same(everything(state), expected[state.step])
        assert (directory / "latest" / "manifest.json").exists()
        assert not list(directory.glob(".*"))
        newest.append(state.step)
    # Before the sync of its new name the checkpoint is there, and is not reported as saved.
    assert newest == [1] * (syncs - 2) + [2] * 2


def test_a_failure_nobody_waited_for_is_raised_once_by_the_next_save(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    state = train(build(), 1)
    checkpoint_save(state, tmp_path / "file" / "checkpoints")
    message = r"step 1 could not be saved to .*/file/checkpoints: Not a directory .*there is none"
    with pytest.raises(CheckpointError, match=message):
        checkpoint_save(state, tmp_path / "good")
    assert "could not be saved" in caplog.text
    assert checkpoint_save(state, tmp_path / "good").wait().name == "step_00000001"
    checkpoint_save(state, tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointError, match=message):
        wait_for_saves(state)
    wait_for_saves(state)


@pytest.mark.parametrize(("keep", "kept"), [(1, [4]), (2, [3, 4]), (None, [1, 2, 3, 4])])
def test_retention_keeps_the_newest(tmp_path, keep, kept):
    (tmp_path / "step_00000008").mkdir()  # torn: neither counted nor touched
    saved(tmp_path, 1, 2, 3, 4, keep=keep)
    assert names(tmp_path) == ["latest", *(f"step_0000000{s}" for s in kept), "step_00000008"]
    assert os.readlink(tmp_path / "latest") == "step_00000004"


def test_going_back_keeps_what_was_just_saved_and_says_what_is_newer(tmp_path, caplog):
    saved(tmp_path, 3, 4, keep=2)
    saved(tmp_path, 1, keep=2)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000003", "step_00000004"]
    assert "holds step 4, newer than step 1 that was just saved" in caplog.text


def test_saving_a_step_twice_replaces_it(tmp_path):
    saved(tmp_path, 2)
    other = train(build(seed=1), 2)
    checkpoint_save(other, tmp_path, blocking=True)
    assert names(tmp_path) == ["latest", "step_00000002"]
    assert_same(everything(checkpoint_load(build(), tmp_path)), everything(other))


def test_failing_to_replace_a_step_keeps_the_one_that_was_there(tmp_path, monkeypatch):
    expected = everything(saved(tmp_path, 2))
    rename = Path.rename

    def fail_from_temporary(path, target):  # where names cannot be exchanged
        if path.name.endswith(".new"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return rename(path, target)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)
    monkeypatch.setattr(Path, "rename", fail_from_temporary)
    with pytest.raises(CheckpointError, match="Input/output error"):
        checkpoint_save(train(build(seed=1), 2), tmp_path, blocking=True)
    assert names(tmp_path) == ["latest", "step_00000002"]
    assert_same(everything(checkpoint_load(build(), tmp_path)), expected)


def test_a_step_that_was_set_aside_when_the_process_died_comes_back(tmp_path):
    saved(tmp_path, 2)
    aside = tmp_path / ".step_00000002.0123456789ab.old"
    (tmp_path / "step_00000002").rename(aside)
    assert checkpoint_load(build(), tmp_path).step == 2
    shutil.copytree(tmp_path / "step_00000002", aside)
    saved(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step_00000002", "step_00000003"]


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(
    tmp_path, monkeypatch, caplog
):
    saved(tmp_path, 1)
    rename = Path.rename

    def refuse_first(path, target):
        if path.name == "step_00000001":
            raise OSError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_first)
    saved(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]
    assert "could not delete the old checkpoint" in caplog.text


def test_only_what_dead_saves_left_is_deleted(tmp_path):
    dead, alive = (tmp_path / f".step_00000007.{digit * 12}.new" for digit in "ab")
    others = [tmp_path / ".old-notes", tmp_path / ".step_00000001.mine.new", tmp_path / ".tmp"]
    for folder in (dead, alive, *others):
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / f".step_00000001.{'c' * 12}.new").symlink_to("mine")
    (tmp_path / ".latest.new").symlink_to("step_00000007")
    with locked(alive):
        saved(tmp_path, 3)
    assert not dead.exists()
    assert not (tmp_path / ".latest.new").is_symlink()
    assert all((folder / "notes.txt").exists() for folder in (alive, *others))
    assert (tmp_path / "mine").is_dir()


def test_fields_that_the_state_does_not_have_are_named(tmp_path, caplog):
    state = build(cls=RichState, ema=Net(), stream=Stream(), baseline=torch.zeros(1))
    checkpoint_save(state, tmp_path, blocking=True)
    with caplog.at_level(logging.WARNING, "forgekit"):
        assert checkpoint_load(build(seed=1), tmp_path).seed == 0
    assert "fields that the state does not: baseline, best, ema, name, note, stream" in caplog.text


def test_optimizer_state_finds_its_parameter_after_reordering(tmp_path):
    state = train(build(), 2)
    checkpoint_save(state, tmp_path, blocking=True)
    model = deepcopy(state.model)
    groups = [{"params": [p], "lr": 0.1} for p in reversed(list(model.parameters()))]
    fresh = TrainState.create(model, torch.optim.AdamW(groups, fused=True))
    assert_same(everything(checkpoint_load(fresh, tmp_path)), everything(state))


# Parts of a checkpoint


def test_a_model_alone_starts_a_new_run_whatever_optimizer_and_data_were(tmp_path):
    old = saved(tmp_path, 3, fingerprint="books")
    state = train(build(seed=1, optimizer="momentum"), 1)
    before = everything(state)
    options = {"fingerprint": "poems", "parts": ("model",)}
    loaded = checkpoint_load(state, tmp_path, **options)
    assert (loaded.step, loaded.samples, int(loaded.targets), loaded.seed) == (1, 8, 8, 1)
    found, expected = everything(loaded), everything(old)
    models = {name for name in found if name.startswith("model.")}
    assert models
    assert_same({n: found[n] for n in models}, {n: expected[n] for n in models})
    assert_same(
        {n: found[n] for n in found.keys() - models}, {n: before[n] for n in before.keys() - models}
    )
    with pytest.raises(DonatedStateError):
        _ = state.step


def test_another_optimizer_goes_on_at_the_same_step(tmp_path):
    old = saved(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"'embed\.weight' is AdamW there and SGD here"):
        checkpoint_load(build(optimizer="momentum"), tmp_path)
    loaded = checkpoint_load(build(optimizer="momentum"), tmp_path, parts=("model", "fields"))
    assert (loaded.step, loaded.samples, int(loaded.targets)) == (3, 24, 24)
    assert not loaded.optimizer.state
    by_hand = build(optimizer="momentum")
    by_hand.model.load_state_dict(old.model.state_dict())
    by_hand = donate(by_hand, step=3)
    found, expected = everything(train(loaded, 2)), everything(train(by_hand, 2))
    del found["targets"], expected["targets"]
    assert_same(found, expected)


@pytest.mark.parametrize("parts", [(), ("optimizer",), ("model", "moments"), "model"])
def test_parts_that_are_none_are_refused(tmp_path, parts):
    with pytest.raises(ValueError, match=r"must be some of \['model', 'optimizer', 'fields'\], t"):
        checkpoint_load(build(), tmp_path, parts=parts)


@pytest.mark.parametrize("where", [str, "file://{}".format])
def test_a_checkpoint_itself_is_no_directory_of_a_new_run(tmp_path, where):
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"is a checkpoint itself; name the directory that"):
        checkpoint_load(build(), where(tmp_path / "step_00000001"))
