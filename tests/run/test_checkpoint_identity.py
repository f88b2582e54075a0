"""A checkpoint is of one run and one model; what cannot be read is not taken for damage."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import attrs
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from manifests import rewrite
from torch import nn

import forgekit as fk
from forgekit.cli import main

SPEC = fk.TransformerSpec(
    vocab_size=11,
    dim=16,
    layers=2,
    heads=4,
    kv_heads=2,
    ffn_dim=8,
    max_seq_len=8,
    head_dim=4,
)
MOE = attrs.evolve(SPEC, moe=fk.MoESpec(experts=4, top_k=2, ffn_dim=4))


def build(step=0, seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return fk.donate(state, step=step, samples=4 * step)


def of(spec):
    model = fk.Transformer(spec)
    return fk.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))


def save(directory, *steps, seed=0):
    for step in steps:
        fk.checkpoint_save(build(step, seed), directory, blocking=True)


def failing(times, error, monkeypatch, name="rank_00000.safetensors"):
    """Let reading a file fail so many times, as a storage over a network does."""
    real, left, pauses = os.open, [times], []

    def opened(path, *args, **kwargs):
        if str(path).endswith(f"step_00000002/{name}") and left[0]:
            left[0] -= 1
            raise error
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


ERRORS = {
    "OSError": OSError(errno.EIO, "Input/output error"),
    "ConnectionError": ConnectionError("the store does not answer"),
}


@pytest.mark.parametrize("name", ["manifest.json", "rank_00000.safetensors"])
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_a_file_that_cannot_be_read_for_a_moment_costs_no_step(tmp_path, monkeypatch, error, name):
    save(tmp_path, 1, 2)
    pauses = failing(2, error, monkeypatch, name)
    assert fk.checkpoint_load(build(), tmp_path).step == 2
    assert len(pauses) == 2
    assert pauses[0] < pauses[1]


@pytest.mark.parametrize("name", ["manifest.json", "rank_00000.safetensors"])
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_no_older_checkpoint_is_taken_for_one_that_cannot_be_read(
    tmp_path, monkeypatch, error, name
):
    save(tmp_path, 1, 2)
    failing(10**6, error, monkeypatch, name)
    state = build(7)
    with pytest.raises(fk.CheckpointError, match=f"{name} cannot be read: .* choose another"):
        fk.checkpoint_load(state, tmp_path)
    assert state.step == 7


def test_a_store_that_does_not_answer_for_a_moment_costs_no_step(monkeypatch):
    url = "memory://patient/run"
    save(url, 1, 2)
    real, left = MemoryFileSystem.open, [2]

    def opened(self, path, *args, **kwargs):
        if "step_00000002" in path and left[0]:
            left[0] -= 1
            raise RuntimeError("SlowDown: reduce your request rate")  # no OSError, as botocore's
        return real(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "open", opened)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert fk.checkpoint_load(build(), url).step == 2
    left[0] = 10**6
    with pytest.raises(fk.CheckpointError, match=r"cannot be read: the store has .* SlowDown"):
        fk.checkpoint_load(build(), url)
    MemoryFileSystem().rm("/patient", recursive=True)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    save(tmp_path / "a", 1, 2)
    save(tmp_path / "b", 5, seed=1)
    shutil.copytree(tmp_path / "b" / "step_00000005", tmp_path / "a" / "step_00000005")
    with pytest.raises(fk.CheckpointError, match="newest are of steps 2 and 5"):
        fk.checkpoint_load(build(), tmp_path / "a")
    assert fk.checkpoint_load(build(), tmp_path / "a", step=2).step == 2
    shutil.rmtree(tmp_path / "a" / "step_00000005")
    assert fk.checkpoint_load(build(), tmp_path / "a").step == 2


def test_a_run_goes_on_in_a_copy_of_its_directory(tmp_path):
    save(tmp_path / "a", 1, 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    (tmp_path / "a").rename(tmp_path / "c")
    for folder in ("b", "c"):
        state = fk.checkpoint_load(build(), tmp_path / folder)
        fk.checkpoint_save(fk.donate(state, step=3, samples=12), tmp_path / folder, blocking=True)
        assert fk.checkpoint_load(build(), tmp_path / folder).step == 3


def test_one_checkpoint_that_was_copied_begins_a_directory(tmp_path):
    save(tmp_path / "a", 1, 2)
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a" / "step_00000002", tmp_path / "b" / "step_00000002")
    save(tmp_path / "b", 3)
    assert fk.checkpoint_load(build(), tmp_path / "b").step == 3


@pytest.mark.parametrize("name", ["step", "samples"])
def test_a_counter_below_zero_is_damage(tmp_path, name):
    save(tmp_path, 1)
    rewrite(tmp_path / "step_00000001", lambda manifest: manifest["fields"].update({name: -4}))
    with pytest.raises(fk.CheckpointError, match="a step or a number of samples that is no count"):
        fk.checkpoint_load(build(), tmp_path)


@pytest.mark.parametrize("folder", ["..", "../../b", "/tmp", "data/../.."])
def test_a_folder_outside_of_the_checkpoint_is_damage(tmp_path, folder):
    save(tmp_path, 1)
    rewrite(tmp_path / "step_00000001", lambda manifest: manifest.update(folder=folder))
    with pytest.raises(fk.CheckpointError, match="names a file outside the checkpoint"):
        fk.checkpoint_load(build(), tmp_path)


def test_pipes_in_a_checkpoint_do_not_hang(tmp_path):
    save(tmp_path, 1, 2)
    for path in [*(tmp_path / "step_00000002").iterdir()]:
        path.unlink()
        os.mkfifo(path)
    os.mkfifo(tmp_path / "step_00000003")
    os.mkfifo(tmp_path / ".step_00000003.0123456789ab.new")
    assert fk.checkpoint_load(build(), tmp_path).step == 1
    save(tmp_path, 4)


OTHER = {
    "heads": {"heads": 8, "kv_heads": 4, "head_dim": 2},
    "rope_theta": {"rope_theta": 500.0},
    "norm_eps": {"norm_eps": 1e-3},
    "rope_scaling": {"rope_scaling": fk.RopeScaling(kind="linear", factor=2.0)},
}


@pytest.mark.parametrize("name", OTHER)
def test_equal_shapes_are_not_an_equal_model(tmp_path, name):
    fk.checkpoint_save(of(SPEC), tmp_path, blocking=True)
    state = of(attrs.evolve(SPEC, **OTHER[name]))
    before = {key: value.clone() for key, value in state.model.state_dict().items()}
    with pytest.raises(fk.CheckpointError, match=rf"of another model: .*'{name}"):
        fk.checkpoint_load(state, tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in state.model.state_dict().items())


ADAPTERS = {
    "alpha": ({"alpha": 16.0}, r"'layers\.0\.\S*lora_A' is .*'alpha': 8\.0.* there and .* 16\.0"),
    "rslora": ({"alpha": 8.0, "rslora": True}, r".*'rslora': False\} there and .*'rslora': True"),
}


@pytest.mark.parametrize(("options", "message"), ADAPTERS.values(), ids=ADAPTERS)
def test_the_scale_of_adapters_is_a_fact_of_a_model(tmp_path, options, message):
    def adapted(**lora):
        model = fk.add_lora(fk.Transformer(SPEC), rank=2, **lora)
        return fk.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))

    fk.checkpoint_save(adapted(alpha=8.0), tmp_path, blocking=True)
    fk.checkpoint_load(adapted(alpha=8.0, dropout=0.1), tmp_path)
    for parts in (("model", "optimizer", "fields"), ("model",)):
        with pytest.raises(fk.CheckpointError, match=rf"of another model: {message}"):
            fk.checkpoint_load(adapted(**options), tmp_path, parts=parts)


def test_experts_for_a_token_are_facts_of_a_model(tmp_path):
    fk.checkpoint_save(of(MOE), tmp_path, blocking=True)
    other = attrs.evolve(MOE, moe=attrs.evolve(MOE.moe, top_k=1))
    with pytest.raises(fk.CheckpointError, match=r"'moe.top_k' is 2 there and 1 here"):
        fk.checkpoint_load(of(other), tmp_path)


def test_what_a_run_may_change_of_its_model_is_no_fact_of_it(tmp_path):
    fk.checkpoint_save(of(MOE), tmp_path, blocking=True)
    loads = attrs.evolve(MOE.moe, aux_loss=0.1, capacity=2.0)
    fk.checkpoint_load(of(attrs.evolve(MOE, max_seq_len=16, dropout=0.1, moe=loads)), tmp_path)


def test_a_new_run_may_lengthen_the_context_and_not_change_the_heads(tmp_path):
    fk.checkpoint_save(of(SPEC), tmp_path, blocking=True)
    longer = attrs.evolve(SPEC, rope_theta=1e6, max_seq_len=64)
    fk.checkpoint_load(of(longer), tmp_path, parts=("model",))
    with pytest.raises(fk.CheckpointError, match="'heads' is 4 there and 8 here"):
        fk.checkpoint_load(of(attrs.evolve(SPEC, **OTHER["heads"])), tmp_path, parts=("model",))


@pytest.mark.parametrize("change", ['"heads": 4', '"rope_theta": 10000.0'])
def test_an_export_takes_the_model_from_the_checkpoint(tmp_path, capsys, change):
    import json

    tree = {"model": attrs.asdict(SPEC)}
    (tmp_path / "run").mkdir()
    text = json.dumps(tree)
    other = {'"heads": 4': '"heads": 8', '"rope_theta": 10000.0': '"rope_theta": 500.0'}[change]
    (tmp_path / "run" / "config.json").write_text(text)
    fk.checkpoint_save(of(SPEC), tmp_path / "run" / "checkpoints", blocking=True)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "good")]) == 0
    assert change in text
    (tmp_path / "run" / "config.json").write_text(text.replace(change, other))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "bad")]) == 2
    assert "is of another model: " in capsys.readouterr().err
    assert not Path(tmp_path / "bad").exists()


def test_no_checkpoint_is_saved_with_the_average_in_the_place_of_the_weights(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = fk.TrainState.create(model, optimizer, average=fk.EMA(0.9))
    with fk.averaged(state), pytest.raises(ValueError, match=r"within forgekit\.averaged"):
        fk.checkpoint_save(state, tmp_path, blocking=True)
    assert not list(tmp_path.iterdir())
    fk.checkpoint_save(state, tmp_path, blocking=True)
