"""Hooks: norms by layer."""

import re
from pathlib import Path

import attrs
import pytest
import torch
from device.pretend import NAME, watching
from lab import (
    SPEC,
    alone,
    full_tensors,
    is_kept,
    lay_out,
    logits_loss,
    reference_gradients,
    torch_loss,
)
from pool import run_again, run_ranks
from tensordict import TensorDict

import forgekit as fk
from forgekit.metrics import layer_norms

SMALL = attrs.evolve(SPEC, vocab_size=38)  # two ranks can share it


def micro_batches(seed=0):
    """Micro-batches of one length, with other numbers of targets."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for micro in range(3):
        ids = torch.randint(0, 38, (2, 9), generator=generator)
        labels = ids[:, 1:].clone()
        labels[0, : 1 + 2 * micro] = -100
        batches.append(TensorDict({"input_ids": ids[:, :-1], "labels": labels}, [2]))
    return batches


def _norms(rank, world):
    model = fk.Transformer(SMALL).double()
    state = lay_out(model, {"pp": 2}) if world > 1 else alone(model)
    totals = fk.reduce_totals(fk.accumulate(state, micro_batches(), logits_loss), state)
    return {name: norm.item() for name, norm in layer_norms(state, totals).items()}


@pytest.mark.parametrize("stages", [1, 2])
def test_norms_are_those_of_one_process_on_every_stage(stages):
    """``test_units`` has the norms of parameters in other layouts."""
    expected = dict.fromkeys(["embedding", "layers.0", "layers.1", "norm", "output"], 0.0)
    rows = [[batch] for batch in micro_batches()]
    gradients, _ = reference_gradients(fk.Transformer(SMALL), rows, torch_loss)
    for name, gradient in gradients.items():
        parts = name.split(".")
        expected[".".join(parts[: 1 + (parts[0] == "layers")])] += gradient.square().sum().item()
    expected = {f"grad_norm/{layer}": square**0.5 for layer, square in expected.items()}
    for norms in run_again(_norms, stages):
        assert norms == pytest.approx(expected, rel=1e-10)


def _waits(rank, world):
    mesh = fk.build_mesh(fk.MeshSpec(), device=NAME)
    model = fk.parallelize(fk.Transformer(SMALL), mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    rows = [row.to(NAME) for row in micro_batches()]
    totals = fk.reduce_totals(fk.accumulate(state, rows, logits_loss), state)
    with watching() as ledger:
        layer_norms(state, totals)
    return [*ledger.waits]


def test_the_host_waits_for_no_hook():
    assert run_ranks(_waits, 1, setup="device.pretend:install") == [[]]


def test_a_hook_of_gradients_joins_the_metrics_of_its_steps_and_changes_nothing():
    def trained(hook):
        state, rows = alone(fk.Transformer(SMALL).double()), []
        step = fk.make_step(logits_loss, schedule=fk.constant(0.01), gradient_hook=hook)
        for number in range(3):
            state, metrics = step(state, micro_batches(seed=number))
            rows.append(metrics)
        return state, rows

    plain, _ = trained(None)
    state, rows = trained(lambda s, totals: layer_norms(s, totals) if s.step == 1 else {})
    assert is_kept(state.model, full_tensors(plain.model))
    norms = [[v for name, v in row.items() if name.startswith("grad_norm/")] for row in rows]
    assert [len(each) for each in norms] == [0, 5, 0]
    whole = torch.stack(norms[1]).square().sum().sqrt()
    torch.testing.assert_close(whole, rows[1]["grad_norm"], rtol=1e-12, atol=0)


def test_the_code_of_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    names = {"fk": fk, "state": alone(fk.Transformer(SMALL).double()), "loss_fn": logits_loss}
    names |= {"batches": micro_batches(), "schedule": fk.constant(0.01)}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S):
        exec(compile(block, "hooks.md", "exec"), names)
    assert names["totals"]["grad_sq"] > 0
