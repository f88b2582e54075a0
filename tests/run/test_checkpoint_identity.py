"""A checkpoint is of one run and one model; what cannot be read is not taken for damage."""

from __future__ import annotations

import errno
import os
import shutil
import time

import attrs
import pytest
import torch
from saved import build, save
from torch import nn

import forgekit as fk

SPEC = fk.TransformerSpec(
    vocab_size=11, dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=8, max_seq_len=8, head_dim=4
)
MOE = attrs.evolve(SPEC, moe=fk.MoESpec(experts=4, top_k=2, ffn_dim=4))


def of(spec, **lora):
    model = fk.Transformer(spec)
    model = fk.add_lora(model, rank=2, **lora) if lora else model
    return fk.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("name", ["manifest.json", "rank_00000.safetensors"])
def test_no_older_checkpoint_is_taken_for_one_that_cannot_be_read(tmp_path, monkeypatch, name):
    """As over a network: for a moment, which costs no step, and for longer."""
    save(tmp_path, 1, 2)
    real, left, pauses = os.open, [2], []

    def opened(path, *args, **kwargs):
        if str(path).endswith(f"step_00000002/{name}") and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert fk.checkpoint_load(build(), tmp_path).step == 2
    assert len(pauses) == 2
    assert pauses[0] < pauses[1]
    left[0], state = 10**6, build(step=7)
    with pytest.raises(fk.CheckpointError, match=f"{name} cannot be read: .* choose another"):
        fk.checkpoint_load(state, tmp_path)
    assert state.step == 7


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    save(tmp_path / "a", 1, 2)
    save(tmp_path / "b", 5)
    shutil.copytree(tmp_path / "b" / "step_00000005", tmp_path / "a" / "step_00000005")
    with pytest.raises(fk.CheckpointError, match="newest are of steps 2 and 5"):
        fk.checkpoint_load(build(), tmp_path / "a")
    assert fk.checkpoint_load(build(), tmp_path / "a", step=2).step == 2


def test_a_run_goes_on_in_a_copy_of_its_directory_or_of_one_checkpoint(tmp_path):
    save(tmp_path / "a", 1, 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    shutil.copytree(tmp_path / "a" / "step_00000002", tmp_path / "c" / "step_00000002")
    for folder in ("b", "c"):
        save(tmp_path / folder, 3, state=fk.checkpoint_load(build(), tmp_path / folder))
        assert fk.checkpoint_load(build(), tmp_path / folder).step == 3


OTHER = {
    "heads": {"heads": 8, "kv_heads": 4, "head_dim": 2},
    "rope_theta": {"rope_theta": 500.0},
    "norm_eps": {"norm_eps": 1e-3},
    "rope_scaling": {"rope_scaling": fk.RopeScaling(kind="linear", factor=2.0)},
    "moe.top_k": {"moe": attrs.evolve(MOE.moe, top_k=1)},
}


@pytest.mark.parametrize("name", OTHER)
def test_equal_shapes_are_not_an_equal_model(tmp_path, name):
    spec = MOE if "moe" in name else SPEC
    fk.checkpoint_save(of(spec), tmp_path, blocking=True)
    state = of(attrs.evolve(spec, **OTHER[name]))
    before = {key: value.clone() for key, value in state.model.state_dict().items()}
    with pytest.raises(fk.CheckpointError, match=rf"of another model: .*'{name}"):
        fk.checkpoint_load(state, tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in state.model.state_dict().items())


def test_what_a_run_may_change_of_its_model_is_no_fact_of_it(tmp_path):
    fk.checkpoint_save(of(MOE), tmp_path, blocking=True)
    loads = attrs.evolve(MOE.moe, aux_loss=0.1, capacity=2.0)
    changed = attrs.evolve(MOE, max_seq_len=16, dropout=0.1, moe=loads)
    fk.checkpoint_load(of(changed), tmp_path)
    longer = attrs.evolve(MOE, rope_theta=1e6, max_seq_len=64)  # a new run's context
    fk.checkpoint_load(of(longer), tmp_path, parts=("model",))
    heads = attrs.evolve(longer, **OTHER["heads"])
    with pytest.raises(fk.CheckpointError, match="'heads' is 4 there and 8 here"):
        fk.checkpoint_load(of(heads), tmp_path, parts=("model",))


ADAPTERS = {
    "alpha": ({"alpha": 16.0}, r"'layers\.0\.\S*lora_A' is .*'alpha': 8\.0.* there and .* 16\.0"),
    "rslora": ({"alpha": 8.0, "rslora": True}, r".*'rslora': False\} there and .*'rslora': True"),
}


@pytest.mark.parametrize(("options", "message"), ADAPTERS.values(), ids=ADAPTERS)
def test_the_scale_of_adapters_is_a_fact_of_a_model(tmp_path, options, message):
    fk.checkpoint_save(of(SPEC, alpha=8.0), tmp_path, blocking=True)
    fk.checkpoint_load(of(SPEC, alpha=8.0, dropout=0.1), tmp_path)
    for parts in (("model", "optimizer", "fields"), ("model",)):
        with pytest.raises(fk.CheckpointError, match=rf"of another model: {message}"):
            fk.checkpoint_load(of(SPEC, **options), tmp_path, parts=parts)


def test_no_checkpoint_is_saved_with_the_average_in_the_place_of_the_weights(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = fk.TrainState.create(model, optimizer, average=fk.EMA(0.9))
    with fk.averaged(state), pytest.raises(ValueError, match=r"within forgekit\.averaged"):
        fk.checkpoint_save(state, tmp_path, blocking=True)
    assert not list(tmp_path.iterdir())
    fk.checkpoint_save(state, tmp_path, blocking=True)
