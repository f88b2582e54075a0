"""Published weights: what arrives is what the trainer has, and anything else is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from lab import SPEC, alone, build_state, full_tensors, global_batch, head_loss, is_kept, lay_out
from pool import RankError, run_again, run_ranks
from safetensors import safe_open
from safetensors.torch import save_file

import forgekit as fk
from forgekit.rollouts import weights
from forgekit.rollouts.weights import publish_weights, read_weights


def stepped(state: fk.TrainState, world: int = 1, rank: int = 0) -> fk.TrainState:
    step = fk.make_step(head_loss, schedule=fk.constant(0.05))
    return step(state, [global_batch(world)[1][rank]])[0]


def build(tied: bool = True, adapters: bool = False, seed: int = 0) -> fk.Transformer:
    model = fk.Transformer(attrs.evolve(SPEC, tied=tied), seed=seed)
    return fk.add_lora(model, rank=2) if adapters else model


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_generator_has_the_trainers_bits_in_the_dtype_that_is_asked_for(tmp_path, dtype):
    state = stepped(alone(build()))
    canary = publish_weights(state, tmp_path, version=1, dtype=dtype)
    model = build(seed=7).to(dtype or torch.float32)
    assert read_weights(model, tmp_path) == canary
    assert canary.version == 1
    assert is_kept(model, full_tensors(state.model.to(dtype or torch.float32)))


def test_adapters_are_published_alone_where_only_they_are_trained(tmp_path):
    state = stepped(alone(build(adapters=True)))
    canary = publish_weights(state, tmp_path, version=1)
    assert canary.are_adapters
    assert all("lora" in name for name in canary.names)
    model = build(adapters=True)
    read_weights(model, tmp_path)
    ids = torch.arange(8)[None]
    assert torch.equal(model.eval()(ids), state.model.eval()(ids))


def test_what_is_there_already_is_not_read_again(tmp_path, monkeypatch):
    state = alone(build())
    publish_weights(state, tmp_path, version=1)
    model = build(seed=7)
    canary = read_weights(model, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "copy_full", None)
        assert read_weights(model, tmp_path, have=canary) is canary
    # The same version of a run that was killed and trained on otherwise is another one.
    publish_weights(stepped(state), tmp_path, version=1)
    assert read_weights(model, tmp_path, have=canary) != canary


def test_a_generator_waits_for_the_first_weights(tmp_path):
    state = alone(build())
    with pytest.raises(fk.CheckpointError, match=r"no trainer has published weights at .* 0.1 s"):
        read_weights(build(), tmp_path, timeout_s=0.1)
    later = threading.Timer(0.3, publish_weights, (state, tmp_path / "new" / "folder", 4))
    later.start()
    assert read_weights(build(), tmp_path / "new" / "folder").version == 4
    later.join()


def make_old(folder: Path) -> None:
    """Put the tensors from before the step into the file, and leave its canary what it is."""
    with safe_open(folder / weights.FILE, "pt") as file:
        names, metadata = [*file.keys()], file.metadata()
    old = build().state_dict()
    save_file({name: old[name].contiguous() for name in names}, folder / weights.FILE, metadata)


FAULTS: dict[str, Any] = {  # what the trainer has, what the generator has, and damage
    "a part is missing or old": ({}, {}, make_old),
    r"lacks .*, adds \['output.weight'\]": ({}, {"tied": False}, None),
    "is of another model: .*lora": ({}, {"adapters": True}, None),
    r"lacks \['layers.0.*adds \[\]": ({"adapters": True}, {}, None),
    "nats on the .* another one": ({"adapters": True}, {"adapters": True, "seed": 3}, None),
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_is_not_the_trainers_is_refused(tmp_path, message):
    trainer, generator, damage = FAULTS[message]
    publish_weights(stepped(alone(build(**trainer))), tmp_path, version=2)
    if damage is not None:
        damage(tmp_path)
    with pytest.raises(fk.CheckpointError, match=message):
        read_weights(build(**generator), tmp_path)


def test_a_generator_that_shares_what_the_trainer_has_apart_is_refused(tmp_path):
    publish_weights(stepped(alone(build())), tmp_path, version=2)
    model = build()
    shared = model.layers[0].feed_forward
    model.layers[1].feed_forward.up.weight.data = shared.up.weight.data
    with pytest.raises(fk.CheckpointError, match="it shares memory between parameters"):
        read_weights(model, tmp_path)


def test_a_damaged_file_is_refused(tmp_path):
    publish_weights(alone(build()), tmp_path, version=2)
    path = tmp_path / weights.FILE
    for end in (-7, 40, 0):
        path.write_bytes(path.read_bytes()[:end])
        with pytest.raises(fk.CheckpointError, match="holds no published weights"):
            read_weights(build(), tmp_path)


def test_a_trainer_that_dies_while_it_writes_leaves_the_last_weights(tmp_path, monkeypatch):
    state = alone(build())
    first = publish_weights(state, tmp_path, version=1)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights.os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            publish_weights(state, tmp_path, version=2)
    assert read_weights(build(), tmp_path) == first
    assert publish_weights(state, tmp_path, version=3).version == 3
    assert [path.name for path in tmp_path.iterdir()] == [weights.FILE]


@pytest.mark.parametrize("version", [2, 2 * 10**9])
def test_weights_that_are_replaced_while_they_are_opened_are_read_whole(
    tmp_path, monkeypatch, version
):
    """Opened twice, for its header and for its values; in files of another size and of the same."""
    state = alone(build())
    publish_weights(state, tmp_path, version=1)
    open_values, later = torch.UntypedStorage.from_file, stepped(state)

    def published_between(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(torch.UntypedStorage, "from_file", open_values)
        publish_weights(later, tmp_path, version=version)
        return open_values(*arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", published_between)
    model = build(seed=7)
    assert read_weights(model, tmp_path).version == version
    assert is_kept(model, full_tensors(later.model))


def test_weights_that_are_no_numbers_are_not_published(tmp_path):
    state = alone(build())
    with torch.no_grad():
        next(iter(state.model.parameters()))[3] = torch.nan
    with pytest.raises(fk.CheckpointError, match="log-probabilities of version 2 are not finite"):
        publish_weights(state, tmp_path, version=2, probe=torch.tensor([3, 3]))
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_say_its_vocabulary_needs_a_probe(tmp_path):
    state = alone(torch.nn.Embedding(5, 5))
    with pytest.raises(ValueError, match="Embedding has no vocab_size"):
        publish_weights(state, tmp_path, version=0)
    for probe, shape in (([3], r"\(1,\)"), ([[3, 4]], r"\(1, 2\)")):
        with pytest.raises(ValueError, match=f"probe has shape {shape}; it must be .* at least 2"):
            publish_weights(state, tmp_path, version=0, probe=torch.tensor(probe))
    canary = publish_weights(state, tmp_path, version=0, probe=torch.tensor([1, 2]))
    answer = torch.tensor(canary.log_probs)
    canary.check(answer[None])
    for wrong in (answer.repeat(3), answer[:0]):  # equal, if they were broadcast
        with pytest.raises(fk.CheckpointError, match=r"log_probs has shape .* it must be \[1\]"):
            canary.check(wrong)
    assert read_weights(torch.nn.Embedding(5, 5), tmp_path) == canary


EVEN = attrs.evolve(SPEC, vocab_size=40)
CP = pytest.param({"cp": 2}, marks=pytest.mark.oracle)


def layout_job(rank: int, world: int, folder: str, layout: dict[str, int]) -> Any:
    state, generator = (lay_out(fk.Transformer(EVEN, seed=s).double(), layout) for s in (0, 3))
    state = stepped(state, world, fk.data_ranks(state.mesh)[0])
    canary = publish_weights(state, folder, version=1)
    whole = full_tensors(state.model)
    assert read_weights(generator.model, folder) == canary
    assert is_kept(generator.model, whole)
    return whole if rank == 0 else None


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, CP], ids=["fsdp", "tp", "cp"])
def test_every_layout_publishes_the_whole_for_one_process(tmp_path, layout):
    whole, _ = run_again(layout_job, 2, str(tmp_path), layout)
    model = fk.Transformer(EVEN).double()
    read_weights(model, tmp_path)
    assert is_kept(model, whole)


def pipelined(rank: int, world: int, folder: str) -> None:
    publish_weights(build_state({"pp": 2}, world), folder, version=1)


def test_pipelines_are_refused(tmp_path):
    with pytest.raises(RankError, match="split into pipeline stages"):
        run_ranks(pipelined, 2, str(tmp_path))
