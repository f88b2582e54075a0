"""What a tensor-parallel plan forgets: refused at the first step on all ranks, or exact."""

from __future__ import annotations

import itertools
import re
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from covering import first_of, some_of
from flash_kernels import flash_kernels
from lab import (
    SPEC,
    full_tensors,
    logits_loss,
    mean_gradients,
    reference_gradients,
    relative_error,
)
from pool import run_again, run_ranks
from tensordict import TensorDict
from torch import Tensor, nn

import forgekit as fk

VOCAB, POSITIONS, WIDTH, FFN = 12, 6, 8, 20


class Scale(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Feed(nn.Module):
    """A feed-forward whose middle is the case."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, FFN)
        self.down = nn.Linear(FFN, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)
        self.act = nn.PReLU() if kind != "each" else Scale(FFN)
        if kind == "held":
            self.scale = nn.Parameter(torch.tensor([1.3]))

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm(x)
        h = self.up(given)
        kind = self.kind
        if kind == "outside":
            return x + self.act(self.down(h)) * self.gate(x)
        if kind == "escape":
            return x + self.down(F.gelu(h)) + h.abs().mean(-1, keepdim=True)
        if kind == "escape times":
            return x * h.abs().mean(-1, keepdim=True) + self.down(F.gelu(h))
        if kind == "noisy":
            return x + F.dropout(self.down(F.gelu(h)), 0.5)
        middle = {
            "act": lambda: self.act(h),
            "each": lambda: self.act(h),
            "held": lambda: F.gelu(h) * self.scale,
            "gated": lambda: F.gelu(h) * self.gate(given),
            "bypass": lambda: F.gelu(h) + x.mean(-1, keepdim=True),
            "softmax": lambda: h.softmax(-1),
            "centred": lambda: F.gelu(h - h.mean(-1, keepdim=True)),
        }
        return x + self.down(middle.get(kind, lambda: F.gelu(h))())


class Model(nn.Module):
    """Two blocks of one kind."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Feed(kind), Feed(kind)])
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x))


FEED: dict[str, Any] = {
    "embed": "embedding",
    "*.up": "colwise",
    "*.down": "rowwise",
    "head": "colwise",
}


def draw_batch(seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (2, POSITIONS), generator=generator)
    labels = torch.randint(0, VOCAB, (2, POSITIONS), generator=generator)
    labels[0, 3:] = -100
    return TensorDict({"input_ids": ids, "labels": labels}, batch_size=[2])


def reference(kind: str, rows: int) -> dict[str, Tensor]:
    model = Model(kind)
    gradients, _ = reference_gradients(model, [[draw_batch(seed) for seed in range(2 * rows)]])
    return {n: gradients.get(n, torch.zeros_like(p)) for n, p in model.named_parameters()}


def started(layout: dict[str, int], kind: str, plan: Any, backend: Any = None) -> Any:
    mesh = fk.build_mesh(fk.MeshSpec(**layout), device="cpu")
    model = Model(kind).double()
    for layer in model.layers if backend else ():
        layer.compile(backend=backend)
    model = fk.parallelize(model, mesh, plan=plan)
    row, rows = fk.data_ranks(mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    return state, [draw_batch(micro * rows + row) for micro in range(2)]


def _gradients(rank, world, layout, kind, plan):
    return mean_gradients(*started(layout, kind, plan), logits_loss)


LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2, fsdp2": (4, {"tp": 2, "dp_shard": 2}),
    "pp2, tp2": (4, {"pp": 2, "tp": 2}),
}
PLACED = {
    **FEED,
    **dict.fromkeys(("*.norm", "last"), "sequence"),
    **dict.fromkeys(("*.gate", "*.act"), "replicate"),
}
EXACT = {
    "one weight": ("act", {**FEED, "*.act": "heads"}),
    "a weight for each channel": ("each", {**FEED, "*.act": "channels"}),
    "outside of the region": ("outside", FEED),
    "named replicate": ("outside", {**FEED, "*.act": "replicate", "*.gate": "replicate"}),
    "beside sharded positions": ("plain", PLACED),
}
CHOSEN = [*((case, "tp2") for case in EXACT), ("one weight", "tp2, fsdp2")]
CHOSEN += [("beside sharded positions", "pp2, tp2")]


@pytest.mark.parametrize(("case", "where"), first_of(CHOSEN, itertools.product(EXACT, LAYOUTS)))
def test_named_parameters_among_sharded_channels_are_exact(case, where):
    (kind, plan), (world, layout) = EXACT[case], LAYOUTS[where]
    expected = reference(kind, layout.get("dp_shard", 1))
    names = set()
    for gradients in run_again(_gradients, world, layout, kind, plan):
        names |= gradients.keys()
        assert relative_error(gradients, {name: expected[name] for name in gradients}) < 1e-10
    assert names == expected.keys()


FORGOTTEN = {
    "one weight": ("act", FEED, r"the gradient of 'layers\.[01]\.act\.weight' differs"),
    "held by the block": ("held", FEED, r"the gradient of 'layers\.[01]\.scale' differs"),
    "a gate of all channels": ("gated", FEED, r"the gradient of .*'layers\.[01](\.gate\.\w+)?'"),
    "the stream enters": ("bypass", FEED, r"the gradient of input 0 of 'layers\.[01]' differs"),
    "channels leave": ("escape", FEED, r"what 'layers\.[01]' returns differs"),
    "channels leave and multiply": ("escape times", FEED, r"what 'layers\.[01]' returns differs"),
    "heads outside": (
        "outside",
        {**FEED, "*.act": "heads"},
        r"'layers\.[01]\.act\.weight' differs",
    ),
    "a softmax beside positions": ("softmax", PLACED, r"what 'layers\.0' returns differs"),
    "a mean beside positions": ("centred", PLACED, r"what 'layers\.0' returns differs"),
}


def _refused(rank, world, layout, kind, plan):
    state, batches = started(layout, kind, plan)
    wrong = None if "pp" in layout else mean_gradients(state, batches, logits_loss, audit=False)
    before = full_tensors(state.model)
    step = fk.make_step(logits_loss, schedule=fk.constant(0.1))
    with pytest.raises(ValueError, match=r"^tensor parallelism \(tp 2\): ") as caught:
        step(state, batches)
    assert all(torch.equal(value, before[n]) for n, value in full_tensors(state.model).items())
    assert all(p.grad is None for p in state.model.parameters())
    return str(caught.value), wrong


CHOSEN = [*((case, "tp2") for case in FORGOTTEN), ("one weight", "tp2, fsdp2")]
CHOSEN += [("a softmax beside positions", "pp2, tp2")]


@pytest.mark.parametrize(("case", "where"), first_of(CHOSEN, itertools.product(FORGOTTEN, LAYOUTS)))
def test_what_a_plan_forgets_is_refused_before_the_first_update(case, where):
    """What is refused would train another model."""
    (kind, plan, message), (world, layout) = FORGOTTEN[case], LAYOUTS[where]
    expected = reference(kind, layout.get("dp_shard", 1))
    by_rank = run_again(_refused, world, layout, kind, plan)
    for raised, wrong in by_rank:
        assert re.search(message, raised), raised
        assert raised == by_rank[0][0]
        # A mean that leaves beside the stream is taken out again by the next LayerNorm.
        is_harmless = wrong is None or case == "channels leave"
        assert is_harmless or relative_error(wrong, expected) > 1e-2


class Hands(nn.Module):
    """A block that hands this rank's channels of its value on to the next one, in a dict."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, FFN)
        self.mix = nn.PReLU()
        self.down = nn.Linear(FFN, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, stream: dict[str, Any], *, angles: Tensor) -> dict[str, Any]:
        self.calls += 1
        x, before = stream["x"], stream.get("value")
        value = self.up(self.norm(x) * angles)
        value = value if before is None else value + self.mix(before)
        return {"x": x + self.drop(self.down(F.gelu(value))), "value": value}


class Handing(Model):
    def __init__(self):
        super().__init__("plain")
        self.layers = nn.ModuleList(Hands() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = torch.arange(ids.shape[1], dtype=x.dtype).cos()[:, None]
        stream = {"x": x}
        for layer in self.layers:
            stream = layer(stream, angles=angles)
        return self.head(stream["x"])


def _handed(rank, world, options):
    """What one step leaves, with the proof and without."""
    options, left = dict(options), []
    mesh = fk.build_mesh(fk.MeshSpec(tp=2, pp=options.pop("pp", 1)), device="cpu")
    plan = {**FEED, "*.mix": "heads"}
    for audit in (True, False):
        model = fk.parallelize(Handing(), mesh, plan=plan, **options)
        state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
        fk.accumulate(state, [draw_batch(0), draw_batch(1)], logits_loss, audit=audit)
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        generator = {"generator": torch.get_rng_state()}
        left.append({**full_tensors(model, gradients=True), **buffers, **generator})
    return left


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "recomputed": {"activation_checkpoint": "full"},
    "offloaded": {"cpu_offload": True},
    "stages": {"pp": 2},
}


@pytest.mark.parametrize("name", some_of(OPTIONS, "fp32", "offloaded"))
def test_a_right_plan_passes_and_the_step_is_the_same_to_the_bit(name):
    """Blocks hand sharded channels on in a dict, drop out, and count their calls in a buffer."""
    options = OPTIONS[name]
    for proved, bare in run_again(_handed, 2 * options.get("pp", 1), options):
        assert proved.keys() == bare.keys()
        assert all(torch.equal(value, bare[key]) for key, value in proved.items())


def _edges(rank, world):
    mesh = fk.build_mesh(fk.MeshSpec(tp=2), device="cpu")
    model = Model("act").double()
    for layer in model.layers:
        nn.init.zeros_(layer.down.weight)
    model = fk.parallelize(model, mesh, plan=FEED)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    with pytest.raises(ValueError, match=r"the gradient of 'layers\.0\.act\.weight' differs"):
        fk.accumulate(state, [draw_batch(0)], logits_loss)
    # Dropout that evaluation does not end passes: all tensor-parallel ranks draw it alike.
    mean_gradients(*started({"tp": 2}, "noisy", FEED), logits_loss)


def test_weights_of_zero_hide_nothing_and_noise_is_no_difference():
    """The gradient of what stands before a projection of zeros is zero, until that has moved."""
    run_again(_edges, 2)


def _narrow_kernel(rank, world, kernel):
    with flash_kernels():
        mesh = fk.build_mesh(fk.MeshSpec(tp=2), device="cpu")
        model = fk.Transformer(attrs.evolve(SPEC, vocab_size=38, head_dim=8))
        model = fk.parallelize(model, mesh, precision="bf16", attention=kernel)
        state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
        ids = torch.arange(32).view(2, 16)
        documents = {"doc_ids": torch.zeros_like(ids)} if kernel == "varlen" else {}
        batch = TensorDict({"input_ids": ids, "labels": ids, **documents}, [2])
        return fk.accumulate(state, [batch], logits_loss)["targets"].item()


@pytest.mark.parametrize("kernel", ["flash", pytest.param("varlen", marks=pytest.mark.oracle)])
def test_a_plan_is_proved_where_the_kernel_takes_16_bits_only(kernel):
    assert run_ranks(_narrow_kernel, 2, kernel) == [32, 32]
