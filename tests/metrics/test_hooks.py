"""Hooks: norms by layer, in layouts."""

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
from torch import nn

import forgekit as fk
from forgekit.metrics import every_steps, layer_norms

SMALL = attrs.evolve(SPEC, vocab_size=38)  # two ranks can share it
LAYOUTS = {
    "one process": (1, 1, {}),
    "fsdp 2": (2, 2, {}),
    "pp 2": (2, 1, {"pp": 2}),
    "tp 2": (2, 1, {"tp": 2}),
}
"""Ranks, those among them that see other data, and sizes."""


def micro_batches(data, seed=0):
    """``[micro-batch][rank]``: of one length, with other numbers of targets."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for micro in range(3):
        row = []
        for rank in range(data):
            ids = torch.randint(0, 38, (2, 9), generator=generator)
            labels = ids[:, 1:].clone()
            labels[0, : 1 + 2 * micro + rank] = -100
            row.append(TensorDict({"input_ids": ids[:, :-1], "labels": labels}, [2]))
        batches.append(row)
    return batches


def build_state(sizes=None):
    """A state in float64, in a layout or without a mesh."""
    model = fk.Transformer(SMALL).double()
    return alone(model) if sizes is None else lay_out(model, sizes)


def _norms(rank, world, layout):
    _, data, sizes = LAYOUTS[layout]
    state = build_state(sizes if world > 1 else None)
    batches = [row[rank if data > 1 else 0] for row in micro_batches(data)]
    norms = layer_norms(state, fk.reduce_totals(fk.accumulate(state, batches, logits_loss), state))
    return {name: norm.item() for name, norm in norms.items()}


def squares(model, batches, loss_fn=torch_loss):
    """The squared norm of each parameter's mean gradient, as one process finds it."""
    gradients, _ = reference_gradients(model, batches, loss_fn)
    return {name: gradient.square().sum().item() for name, gradient in gradients.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_are_those_of_one_process_in_every_layout(layout):
    """Micro-batches have other numbers of targets."""
    batches, model = micro_batches(LAYOUTS[layout][1]), fk.Transformer(SMALL)
    expected = dict.fromkeys(["embedding", "layers.0", "layers.1", "norm", "output"], 0.0)
    for name, square in squares(model, batches).items():
        parts = name.split(".")
        expected[".".join(parts[: 1 + (parts[0] == "layers")])] += square
    expected = {f"grad_norm/{layer}": square**0.5 for layer, square in expected.items()}
    for norms in run_again(_norms, LAYOUTS[layout][0], layout):
        assert norms == pytest.approx(expected, rel=1e-10)


class Odd(nn.Module):
    """A weight is shared, others are frozen, unused or not optimized."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(3, 3), nn.Linear(3, 3)
        self.out.weight = self.mix.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused, self.left_out = nn.Linear(2, 2), nn.Linear(3, 3)

    def forward(self, x):
        return self.out(self.left_out(self.frozen(self.mix(x))))


def test_a_shared_weight_counts_once():
    model = Odd().double()
    trained = [p for name, p in model.named_parameters() if "left_out" not in name]
    state = fk.TrainState.create(model, torch.optim.AdamW(trained))
    rows = [TensorDict({"x": torch.randn(n, 3).double()}, [n]) for n in (2, 5, 3)]

    def loss_fn(model, batch):
        kept = batch["x"].any(1)
        return fk.Loss(model(batch["x"])[kept].square().sum(), kept.sum())

    def by_layer(rows):
        found = dict.fromkeys(("mix", "out", "frozen", "unused", "left_out"), 0.0)
        for name, square in squares(model, [rows], loss_fn).items():
            found[name.rpartition(".")[0]] += square
        return found

    expected = by_layer(rows)
    totals = fk.reduce_totals(fk.accumulate(state, rows, loss_fn), state)
    norms = {name: norm.item() for name, norm in layer_norms(state, totals).items()}
    assert norms == pytest.approx({f"grad_norm/{n}": v**0.5 for n, v in expected.items()})


def _waits(rank, world):
    mesh = fk.build_mesh(fk.MeshSpec(), device=NAME)
    model = fk.parallelize(fk.Transformer(SMALL), mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    rows = [row[0].to(NAME) for row in micro_batches(1)]
    totals = fk.reduce_totals(fk.accumulate(state, rows, logits_loss), state)
    with watching() as ledger:
        layer_norms(state, totals)
    return [*ledger.waits]


def test_the_host_waits_for_no_hook():
    assert run_ranks(_waits, 1, setup="device.pretend:install") == [[]]


def test_a_hook_of_gradients_joins_the_metrics_of_its_steps_and_changes_nothing():
    def trained(hook):
        state, rows = build_state(), []
        step = fk.make_step(logits_loss, schedule=fk.constant(0.01), gradient_hook=hook)
        for number in range(3):
            state, metrics = step(state, [row[0] for row in micro_batches(1, seed=number)])
            rows.append(metrics)
        return state, rows

    plain, _ = trained(None)
    state, rows = trained(every_steps(2, layer_norms))
    assert is_kept(state.model, full_tensors(plain.model))
    norms = [[v for name, v in row.items() if name.startswith("grad_norm/")] for row in rows]
    assert [len(each) for each in norms] == [0, 5, 0]
    whole = torch.stack(norms[1]).square().sum().sqrt()
    torch.testing.assert_close(whole, rows[1]["grad_norm"], rtol=1e-12, atol=0)


def test_the_code_of_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    names = {"fk": fk, "state": build_state(), "loss_fn": logits_loss}
    names |= {"batches": [row[0] for row in micro_batches(1)], "schedule": fk.constant(0.01)}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S):
        exec(compile(block, "hooks.md", "exec"), names)
    assert names["totals"]["grad_sq"] > 0
