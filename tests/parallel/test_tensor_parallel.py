"""Tensor parallelism against one process in float64: full gradients of every parameter."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from covering import covering
from lab import LOSSES, SPEC, full_tensors, relative_error
from ranks import run_again
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import forgekit as fk
from forgekit.parallel.tensor.plan import read_plan
from forgekit.parallel.tensor.tensor_parallel import apply_plan

VOCAB, PLACES = 40, 8
WIDE = attrs.evolve(SPEC, vocab_size=VOCAB, dim=32, heads=8, kv_heads=4)  # four ranks can share it
MODELS: dict[str, dict[str, Any]] = {
    "untied, norms of heads": {},
    "tied": {"tied": True, "qk_norm": False},
    "dropout": {"dropout": 0.3},
}


def draw_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (2, PLACES + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.randint(0, 10, labels.shape, generator=generator) < 3] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


BATCHES = [draw_batch(0), draw_batch(1)]
BATCHES[1]["labels"][:] = -100  # a data-parallel rank without targets


def build(kind: str = "untied, norms of heads") -> fk.Transformer:
    return fk.Transformer(attrs.evolve(WIDE, **MODELS[kind]))


def reference(model: nn.Module, batches: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of torch's cross-entropies and its gradients."""
    model = model.double()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        torch.manual_seed(1)  # data-parallel ranks may draw alike here
        logits = model(batch["input_ids"]).flatten(0, 1)
        total = total + F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
    total.backward()
    return total.detach(), full_tensors(model, gradients=True)


def measure(model: nn.Module, batch: Any, loss: str = "logits") -> tuple[Tensor, Any]:
    torch.manual_seed(1)
    found = LOSSES[loss](model, batch).sum
    assert type(found) is Tensor
    found.backward()
    return found.detach().double(), full_tensors(model, gradients=True)


def tensor_mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))


# Gradients


def _gradients(rank, world, kind, loss, dtype):
    model = build(kind).to(dtype)
    names = [name for name, _ in model.named_parameters()]
    apply_plan(model, tensor_mesh(world), read_plan(model, world))
    assert [name for name, _ in model.named_parameters()] == names
    result = measure(model, BATCHES[0], loss)
    with torch.no_grad():
        torch.manual_seed(1)
        assert torch.equal(LOSSES[loss](model, BATCHES[0]).sum.double(), result[0])
    return result


@pytest.mark.parametrize(
    ("kind", "loss", "how"),
    covering(list(MODELS), list(LOSSES), [(2, torch.float64, 1e-10), (4, torch.float32, 5e-7)]),
)
def test_gradients_are_those_of_one_process(kind, loss, how):
    world, dtype, most = how
    expected_loss, expected = reference(build(kind), BATCHES[:1])
    everyone = run_again(_gradients, world, kind, loss, dtype)
    for found_loss, found in everyone:
        assert torch.equal(found_loss, everyone[0][0])
        torch.testing.assert_close(found_loss, expected_loss, rtol=most, atol=0)
        assert relative_error(found, expected) < most


# Placements and initial values


def _placed(rank, world, on_meta):
    mesh = tensor_mesh(world)
    with torch.device("meta" if on_meta else "cpu"):
        model = build()
    with _Collectives() as sent:
        apply_plan(model, mesh, read_plan(model, world))
    assert not sent.names
    assert all(isinstance(p, DTensor) and p.is_meta == on_meta for p in model.parameters())
    if on_meta:
        model._apply(lambda t: torch.empty_like(t, device="cpu"))
        fk.init_weights(model, 0)
    held = {n: p.to_local().untyped_storage().nbytes() // 4 for n, p in model.named_parameters()}
    return held, full_tensors(model), {n: p.placements[0] for n, p in model.named_parameters()}


@pytest.mark.parametrize("on_meta", [False, True])
def test_ranks_cut_what_they_hold_and_keep_no_more_than_their_part(on_meta):
    model = build()
    for held, values, placements in run_again(_placed, 2, on_meta):
        for name, parameter in model.named_parameters():
            assert torch.equal(values[name], parameter)
            is_cut = not placements[name].is_replicate()
            assert is_cut == ("norm" not in name)
            assert held[name] == parameter.numel() // (2 if is_cut else 1)
        assert placements["layers.0.attention.key.weight"] == Shard(0)
        assert placements["layers.1.feed_forward.down.weight"] == Shard(1)
        assert placements["embedding.weight"] == placements["output.weight"] == Shard(0)


# Communication, masks, memory


class _Collectives(TorchDispatchMode):
    """Names of the collectives and the elements of the largest plain tensor computed."""

    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = re.match(r"(?:c10d|_c10d_functional)::(?!wait|_wrap)_?(.*?)_?$", func.name())
        if found:
            self.names[found[1].replace("_", "").removesuffix("base")] += 1
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if type(tensor) is Tensor:
                self.largest = max(self.largest, tensor.numel())
        return out


def _counted(rank, world, layers, loss):
    model = fk.Transformer(attrs.evolve(WIDE, layers=layers))
    apply_plan(model, tensor_mesh(world), read_plan(model, world))
    with _Collectives() as forward:
        found = LOSSES[loss](model, BATCHES[0]).sum
    with _Collectives() as backward:
        found.backward()
    return forward.names, backward.names


@pytest.mark.parametrize("loss", LOSSES)
def test_a_block_takes_two_gathers_and_two_scatters_each_way(loss):
    gathers, scatters = "allgatherintotensor", "reducescattertensor"
    for rank, (forward, backward) in enumerate(run_again(_counted, 2, 3, loss)):
        less, less_back = run_again(_counted, 2, 1, loss)[rank]
        assert forward - less == {gathers: 4, scatters: 4}
        assert backward - less_back == {gathers: 4, scatters: 4}
        # The embedding's scatter, the last norm's gather, and the loss.
        of_loss = {"head": {gathers: 3, "allgather": 1}, "logits": {gathers: 4}}[loss]
        assert less == {scatters: 3, **of_loss}
        assert less_back == {gathers: 3, scatters: 3}


def _embedding_memory(rank, world):
    model = nn.Sequential(nn.Embedding(1000, 8))
    apply_plan(model, tensor_mesh(world), read_plan(model, world, {"0": "embedding"}))
    with _Collectives() as seen:
        model(torch.tensor([[1, 999]])).sum().backward()
    return seen.largest


def test_an_embedding_has_the_gradient_of_its_own_rows_only():
    assert run_again(_embedding_memory, 2) == [500 * 8] * 2


def _masks(rank, world):
    model = nn.ModuleDict({"drop": nn.Dropout(0.5)})
    apply_plan(model, tensor_mesh(world), read_plan(model, world, {"drop": "sequence"}))
    torch.manual_seed(3)
    return model["drop"](torch.ones(4, 8, 16)), model["drop"].eval()(torch.ones(1, 2, 3))


def test_dropout_masks_are_slices_of_one_mask():
    torch.manual_seed(3)
    whole = F.dropout(torch.ones(4, 16, 16), 0.5)
    (first, quiet), (second, _) = run_again(_masks, 2)
    assert torch.equal(torch.cat([first, second], dim=1), whole)
    assert torch.equal(quiet, torch.ones(1, 2, 3))


ONE_LAYER = attrs.evolve(WIDE, **MODELS["tied"], layers=1)


def _compiled(rank, world):
    model = fk.Transformer(ONE_LAYER).double()
    apply_plan(model, tensor_mesh(world), read_plan(model, world))
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        result = measure(model, BATCHES[0], "head")
    return *result, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_blocks_compile_into_whole_graphs():
    expected_loss, expected = reference(fk.Transformer(ONE_LAYER), BATCHES[:1])
    for loss, found, graphs in run_again(_compiled, 2, timeout_s=150):
        assert graphs >= 1
        torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=0)
        assert relative_error(found, expected) < 1e-10
