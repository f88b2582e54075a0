"""Hooks: norms by layer, gradient noise, histograms and captured activations, in layouts."""

import dataclasses
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import packed
import pytest
import torch
from device.pretend import NAME, watching
from oracle import SPEC, full_tensors, logits_loss, reference_gradients
from ranks import run_again, run_ranks
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import nn

import forgekit as fk
from forgekit.run import capture_activations, every_steps, gradient_noise, histograms, layer_norms

SMALL = attrs.evolve(SPEC, vocab_size=38)  # two ranks can share it
LAYOUTS = {
    "one process": (1, 1, {}),
    "fsdp 2": (2, 2, {}),
    "hsdp 2x2": (4, 4, {"dp_replicate": 2, "dp_shard": 2}),
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


def build_state(sizes=None, **options):
    """A state in float64, in a layout or without a mesh."""
    model = fk.Transformer(SMALL).double()
    mesh = None
    if sizes is not None:
        mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
        model = fk.parallelize(model, mesh, **options)
    return fk.TrainState.create(model, fk.adamw(model), mesh=mesh)


def in_layout(function, layout, *args):
    """What each rank returns for ``function(state, batches, *args)``, in float64."""
    world, _, _ = LAYOUTS[layout]
    if world == 1:
        return [_on_rank(0, 1, layout, function, args)]
    return run_again(_on_rank, world, layout, function, args)


def _on_rank(rank, world, layout, function, args):
    _, data, sizes = LAYOUTS[layout]
    state = build_state(sizes if world > 1 else None)
    own = rank if data > 1 else 0
    return function(state, [row[own] for row in micro_batches(data)], *args)


def _reduced(state, batches):
    return fk.reduce_totals(fk.accumulate(state, batches, logits_loss), state)


def _layer_norms(state, batches):
    return {
        name: norm.item() for name, norm in layer_norms(state, _reduced(state, batches)).items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_by_layer_are_those_of_one_process(layout):
    gradients, _ = reference_gradients(fk.Transformer(SMALL), micro_batches(LAYOUTS[layout][1]))
    squares = {}
    for name, gradient in gradients.items():
        parts = name.split(".")
        layer = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
        squares[layer] = squares.get(layer, 0.0) + gradient.square().sum().item()
    expected = {f"grad_norm/{layer}": square**0.5 for layer, square in squares.items()}
    assert {"grad_norm/layers.0", "grad_norm/layers.1"} < set(expected)
    for found in in_layout(_layer_norms, layout):
        assert found == pytest.approx(expected, rel=1e-10)


def _noise(state, batches):
    before = full_tensors(state.model)
    found = gradient_noise(state, batches, logits_loss)
    after = full_tensors(state.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in state.model.parameters())
    return {name: value.item() for name, value in found.items()}


@pytest.mark.parametrize("layout", ["one process", "fsdp 2", "hsdp 2x2", "tp 2"])
def test_gradient_noise_solves_the_two_equations_in_every_layout(layout):
    """Micro-batches with other numbers of targets; a small and a large norm give the unknowns."""
    batches = micro_batches(LAYOUTS[layout][1])
    targets = np.array([sum(int((b["labels"] != -100).sum()) for b in row) for row in batches])
    assert len(set(targets)) == 3
    squares = [_square(fk.Transformer(SMALL), [row]) for row in batches]
    small, large = np.mean(squares), _square(fk.Transformer(SMALL), batches)
    matrix = [[1, np.mean(1 / targets)], [1, 1 / targets.sum()]]
    true, trace = np.linalg.solve(matrix, [small, large])
    for found in in_layout(_noise, layout):
        assert found["noise/gradient_sq"] == pytest.approx(true, rel=1e-8)
        assert found["noise/trace"] == pytest.approx(trace, rel=1e-8)
        assert found["noise/scale"] == pytest.approx(trace / true, rel=1e-8)


def _square(model, batches):
    gradients, _ = reference_gradients(model, batches)
    return sum(gradient.square().sum().item() for gradient in gradients.values())


def test_gradient_noise_finds_the_mean_and_the_spread_of_gradients_that_are_known():
    """The gradient of each row is the row itself, so both are what the rows were drawn with."""
    mean, spread = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([3.0, 1.0, 2.0])
    rows = torch.randn(3000, 3, generator=torch.Generator().manual_seed(0)) * spread + mean
    model = torch.nn.Linear(3, 1, bias=False)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
    ends = torch.randperm(2999, generator=torch.Generator().manual_seed(1))[:299].sort().values + 1
    batches = [TensorDict({"x": part}, [len(part)]) for part in rows.tensor_split(ends)]
    found = gradient_noise(state, batches, lambda m, b: fk.Loss(m(b["x"]).sum(), len(b["x"])))
    assert found["noise/gradient_sq"].item() == pytest.approx(5.25, rel=0.1)
    assert found["noise/trace"].item() == pytest.approx(14.0, rel=0.1)


@dataclasses.dataclass
class Output:
    """What some models return in place of a tensor."""

    hidden: torch.Tensor
    more: list


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(3, 3)

    def forward(self, x):
        hidden = self.mix(x)
        return Output(hidden, [2 * hidden, None, {"a": Output(hidden.sum(1), ["a note"])}])


class Odd(nn.Module):
    """Returns dataclasses; a weight is shared, others are frozen, unused or not optimized."""

    def __init__(self):
        super().__init__()
        self.block, self.out = Block(), nn.Linear(3, 3)
        self.out.weight = self.block.mix.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused, self.left_out = nn.Linear(2, 2), nn.Linear(3, 3)

    def forward(self, x):
        return Output(self.out(self.left_out(self.frozen(self.block(x).hidden))), [])


def _odd():
    """The model, its state, three micro-batches, and a loss of them."""
    torch.manual_seed(0)
    model = Odd().double()
    trained = [p for name, p in model.named_parameters() if "left_out" not in name]
    rows = [TensorDict({"x": torch.randn(n, 3).double()}, [n]) for n in (2, 5, 3)]

    def loss_fn(model, batch):
        return fk.Loss(model(batch["x"]).hidden.square().sum(), len(batch))

    return fk.TrainState.create(model, torch.optim.AdamW(trained)), rows, loss_fn


def _odd_squares(rows, loss_fn):
    """Squared norms of the parameters' gradients of the mean loss, by torch alone."""
    model = _odd()[0].model
    (sum(loss_fn(model, row).sum for row in rows) / sum(map(len, rows))).backward()
    named = model.named_parameters()
    return {name: p.grad.square().sum().item() for name, p in named if p.grad is not None}


def test_gradient_noise_is_that_of_what_is_trained():
    state, rows, loss_fn = _odd()

    def square(rows):
        found = _odd_squares(rows, loss_fn)
        return sum(value for name, value in found.items() if "left_out" not in name)

    counts = np.array([len(row) for row in rows])
    matrix = [[1, np.mean(1 / counts)], [1, 1 / counts.sum()]]
    both = [np.mean([square([row]) for row in rows]), square(rows)]
    true, trace = np.linalg.solve(matrix, both)
    found = gradient_noise(state, rows, loss_fn)
    assert found["noise/gradient_sq"].item() == pytest.approx(true, rel=1e-12)
    assert found["noise/trace"].item() == pytest.approx(trace, rel=1e-12)


def test_norms_and_histograms_count_a_shared_weight_once_and_frozen_ones_as_nothing():
    state, rows, loss_fn = _odd()
    totals = fk.reduce_totals(fk.accumulate(state, rows, loss_fn), state)
    expected = dict.fromkeys(("block.mix", "out", "frozen", "unused", "left_out"), 0.0)
    for name, square in _odd_squares(rows, loss_fn).items():
        expected[name.rpartition(".")[0]] += square
    norms = {name: norm.item() for name, norm in layer_norms(state, totals).items()}
    assert norms == pytest.approx(
        {f"grad_norm/{layer}": square**0.5 for layer, square in expected.items()}, rel=1e-12
    )
    assert min(expected[layer] for layer in ("block.mix", "out", "left_out")) > 0
    counts = {name[19:]: sum(row) for name, row in histograms(state, totals).items()}
    assert "out.weight" not in counts, "it is block.mix.weight"
    assert (counts["block.mix.weight"], counts["frozen.weight"]) == (9, 0)
    assert sum(map(sum, histograms(state).values())) == sum(p.numel() for p in Odd().parameters())


def test_activations_in_a_dataclass_are_captured(tmp_path):
    """Inside of each other, and beside what is no tensor."""
    state, rows, loss_fn = _odd()
    with capture_activations(state, ["block"], tmp_path):
        fk.accumulate(state, rows[:1], loss_fn)
    found = load_file(tmp_path / "step_00000000" / "rank0.safetensors")
    mixed = _odd()[0].model.block.mix(rows[0]["x"])
    expected = [mixed, 2 * mixed, mixed.sum(1)]
    assert sorted(found) == [f"block/0/{index}" for index in range(3)]
    assert all(torch.equal(found[f"block/0/{i}"], one) for i, one in enumerate(expected))


def _proves(rank, world):
    """Forward passes by the hook and by a step; and what replicas that differ mean to the hook."""
    state, rows = build_state({"cp": 2}), [row[0] for row in micro_batches(1)]
    passes = []
    state.model.register_forward_hook(lambda *_: passes.append(1))
    gradient_noise(state, rows, logits_loss)
    by_hook = len(passes)
    fk.accumulate(state, rows, logits_loss)
    state = build_state({"dp_replicate": 2, "dp_shard": 1})
    with torch.no_grad():
        state.model.norm.weight.mul_(1 + rank)
    noise = gradient_noise(state, rows, logits_loss)
    with pytest.raises(ValueError, match=r"differ"):
        fk.reduce_totals(fk.accumulate(state, rows, logits_loss), state)
    return by_hook, len(passes) - by_hook, noise["noise/trace"].isfinite().item()


def test_gradient_noise_proves_nothing_again_that_a_first_step_proves():
    """Each proof would come once for every micro-batch."""
    for by_hook, by_step, is_finite in run_ranks(_proves, 2):
        assert (by_hook, is_finite) == (3, True)
        assert by_step > 3


@pytest.mark.bad_input
def test_gradient_noise_needs_two_micro_batches():
    (row,) = micro_batches(1)[0]
    with pytest.raises(ValueError, match=r"got 1 of at least 2 micro-batches, .* Lower batch_size"):
        gradient_noise(build_state(), [row], logits_loss)


def test_noise_of_one_micro_batch_with_targets_is_not_known():
    rows = [row[0] for row in micro_batches(1)]
    for row in rows[1:]:
        row["labels"][:] = -100
    found = gradient_noise(build_state(), rows, logits_loss)
    assert not found["noise/scale"].isfinite()


def _histograms(state, batches):
    totals = _reduced(state, batches)
    return histograms(state) | histograms(state, totals, pattern="*weight")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_histograms_count_each_value_once(layout):
    model = fk.Transformer(SMALL)
    gradients, _ = reference_gradients(model, micro_batches(LAYOUTS[layout][1]))
    expected = {f"histogram/weight/{n}": _counts(p.detach()) for n, p in model.named_parameters()}
    expected |= {f"histogram/gradient/{name}": _counts(g) for name, g in gradients.items()}
    for found in in_layout(_histograms, layout):
        assert found.keys() == expected.keys()
        for name, counts in expected.items():
            # A gradient next to a power of two may fall on its other side.
            allowed = 0 if "/weight/" in name else 1
            assert np.abs(np.cumsum(found[name]) - np.cumsum(counts)).max() <= allowed, name
            assert sum(found[name]) == sum(counts)


def _counts(values):
    """The definition, a value at a time."""
    counts = [0] * 63
    for value in values.double().flatten().tolist():
        if not np.isfinite(value):
            counts[62] += 1
        elif value == 0:
            counts[0] += 1
        else:
            exponent = int(np.floor(np.log2(abs(value)))) + 1
            counts[min(max(exponent, -40), 20) + 41] += 1
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_histograms_have_a_bin_for_zeros_extremes_and_what_is_not_finite(dtype):
    values = [0.0, -0.0, 1.0, -1.0, 0.5, 0.75, 2.0**-60, 2.0**30, torch.inf, -torch.inf, torch.nan]
    model = torch.nn.Linear(len(values), 1, bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values]))
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
    counts = histograms(state)["histogram/weight/weight"]
    assert len(counts) == 63
    small = dtype is not torch.float16  # there 2**-60 is 0, and 2**30 infinite
    assert counts[0] == (2 if small else 3)
    assert counts[1] == (1 if small else 0)
    assert counts[0 + 41] == 2  # 0.5 and 0.75
    assert counts[1 + 41] == 2  # 1 and -1
    assert counts[20 + 41] == (1 if small else 0)
    assert counts[62] == (3 if small else 4)


def test_packed_weights_have_no_magnitudes():
    """Their bytes are numbers of levels; what is trained beside them is counted."""
    model = packed.build(torch.float32)
    state = fk.TrainState.create(model, fk.adamw(model))
    names = {name for name, _ in model.named_parameters()} - set(packed.packed_of(model))
    assert packed.packed_of(model)
    assert any("lora_A" in name for name in names)
    found = histograms(state)
    assert found.keys() == {f"histogram/weight/{name}" for name in names}
    assert all(sum(counts) == model.get_parameter(n[17:]).numel() for n, counts in found.items())


def _waits(rank, world):
    mesh = fk.build_mesh(fk.MeshSpec(), device=NAME)
    model = fk.parallelize(fk.Transformer(SMALL), mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    rows = [row[0].to(NAME) for row in micro_batches(1)]
    totals = fk.reduce_totals(fk.accumulate(state, rows, logits_loss), state)
    found = []
    for look in (
        lambda: layer_norms(state, totals),
        lambda: histograms(state, totals, pattern="layers.0.*"),
        lambda: gradient_noise(state, rows, logits_loss),
    ):
        with watching() as ledger:
            look()
        found.append([*ledger.waits])
    return found


def test_the_host_waits_for_no_hook_but_once_for_histograms():
    ((norms, counts, noise),) = run_ranks(_waits, 1, setup="device.pretend:install")
    assert norms == noise == []
    assert len(counts) == 1


def _returned(model, rows, names):
    """What modules of a plain model return, written down by hooks of this test's own."""
    wanted = {}
    for call, row in enumerate(rows):
        for name in names:

            def note(_module, _args, output, name=f"{name}/{call}"):
                wanted[name] = output.detach().clone()

            handle = model.get_submodule(name).register_forward_hook(note)
            logits_loss(model, row)
            handle.remove()
    return wanted


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_captured_activations_are_what_modules_return(recompute, tmp_path):
    rows = [row[0] for row in micro_batches(1)]
    names = ["layers.0", "layers.1", "layers.0.attention", "layers.1.attention", "norm"]
    wanted = _returned(fk.Transformer(SMALL).double(), rows, names)
    state = build_state({}, activation_checkpoint=recompute)
    hooks = [len(module._forward_hooks) for module in state.model.modules()]
    with capture_activations(state, ["layers.?", "*.attention", "norm"], tmp_path):
        fk.accumulate(state, rows, logits_loss)
    fk.shutdown()
    assert [len(module._forward_hooks) for module in state.model.modules()] == hooks
    found = load_file(tmp_path / "step_00000000" / "rank0.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def _captured(state, batches, folder):
    fk.accumulate(state, batches, logits_loss)  # a pipeline's first step runs modules once more
    with capture_activations(state, ["layers.1", "layers.1.attention"], folder):
        fk.accumulate(state, batches, logits_loss)


def test_each_rank_writes_its_part_under_its_position(tmp_path):
    in_layout(partial(_captured, folder=tmp_path / "fsdp"), "fsdp 2")
    names = sorted(path.name for path in (tmp_path / "fsdp" / "step_00000000").iterdir())
    assert names == ["rank0_dp_shard0.safetensors", "rank1_dp_shard1.safetensors"]
    in_layout(partial(_captured, folder=tmp_path / "one"), "one process")
    whole = load_file(tmp_path / "one" / "step_00000000" / "rank0.safetensors")
    first = load_file(tmp_path / "fsdp" / "step_00000000" / names[0])
    assert {f"layers.1/{call}" for call in range(3)} < set(first)
    assert {name: value.shape[0] for name, value in first.items()} == {
        name: value.shape[0] for name, value in whole.items()
    }
    in_layout(partial(_captured, folder=tmp_path / "pp"), "pp 2")
    sizes = {
        path.name: len(load_file(path)) for path in (tmp_path / "pp" / "step_00000000").iterdir()
    }
    assert sizes == {"rank0_pp0.safetensors": 0, "rank1_pp1.safetensors": len(first)}


@pytest.mark.bad_input
def test_patterns_and_modules_that_give_nothing_are_named(tmp_path):
    state = build_state()
    with (
        pytest.raises(
            ValueError, match=r"\['layer.0'\] match no module; the first modules are \['"
        ),
        capture_activations(state, ["layer.0"], tmp_path),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r'^modules returned no tensor: "layers\.1"\. They did'),
        capture_activations(state, ["layers.1"], tmp_path),
    ):
        pass
    assert [*tmp_path.iterdir()] == []


def test_a_hook_of_gradients_joins_the_metrics_of_its_steps_and_changes_nothing(tmp_path):
    def trained(hook):
        state = build_state()
        step = fk.make_step(logits_loss, schedule=fk.constant(0.01), gradient_hook=hook)
        rows = []
        for number in range(4):
            state, metrics = step(state, [row[0] for row in micro_batches(1, seed=number)])
            rows.append(metrics)
        return state, rows

    plain, _ = trained(None)
    state, rows = trained(every_steps(2, layer_norms))
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.model.parameters(), state.model.parameters(), strict=True)
    )
    for number, row in enumerate(rows, start=1):
        norms = [value for name, value in row.items() if name.startswith("grad_norm/")]
        assert len(norms) == (5 if number % 2 == 0 else 0)
        if norms:
            whole = torch.stack(norms).square().sum().sqrt()
            torch.testing.assert_close(whole, row["grad_norm"], rtol=1e-12, atol=0)


def test_a_hook_that_raises_has_donated_nothing():
    def fails(state, totals):
        raise KeyError("mine")

    state, rows = build_state(), [row[0] for row in micro_batches(1)]
    before = full_tensors(state.model)
    with pytest.raises(KeyError, match="mine"):
        fk.make_step(logits_loss, schedule=fk.constant(0.01), gradient_hook=fails)(state, rows)
    after = full_tensors(state.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    plain = fk.make_step(logits_loss, schedule=fk.constant(0.01))
    expected, _ = plain(build_state(), rows)
    again, _ = plain(state, rows)
    found, wanted = full_tensors(again.model), full_tensors(expected.model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.bad_input
def test_a_hook_is_called_every_step_at_most():
    with pytest.raises(ValueError, match=r"^steps 0 must be at least 1\.$"):
        every_steps(0, layer_norms)


def test_the_code_of_the_page_runs(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == 4
    state = build_state()
    with fk.MetricsLog(tmp_path, every=1) as log:
        names = {
            "fk": fk,
            "state": fk.donate(state, step=500),
            "batches": [row[0] for row in micro_batches(1)],
            "loss_fn": logits_loss,
            "schedule": fk.constant(0.01),
            "log": log,
            "run": SimpleNamespace(out=tmp_path),
            "nullcontext": nullcontext,
            "capture_activations": capture_activations,
            "gradient_noise": gradient_noise,
        }
        for block in blocks:
            exec(compile(block, "hooks.md", "exec"), names)
    (row,) = fk.run.read_metrics(tmp_path / "metrics.jsonl")
    assert {"noise/scale", "noise/trace", "noise/gradient_sq"} < row.keys()
    captured = load_file(tmp_path / "activations" / "step_00000500" / "rank0.safetensors")
    assert captured.keys() == {f"layers.{i}.attention/{n}" for i in range(2) for n in range(3)}
    assert names["state"].step == 501
