"""What a tensor-parallel plan forgets: refused at the first step on all ranks, or exact."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from covering import some_of
from flash_kernels import flash_kernels
from lab import (
    SPEC,
    full_tensors,
    is_kept,
    lay_out,
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
        if kind == "factors":
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, FFN))
        if kind == "zero":
            nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm(x)
        h = self.up(given)
        kind = self.kind
        if kind == "outside":
            return x + self.act(self.down(h)) * self.gate(x)
        if kind == "escape times":
            return x * h.abs().mean(-1, keepdim=True) + self.down(F.gelu(h))
        if kind == "noisy":
            return x + F.dropout(self.down(F.gelu(h)), 0.5)
        middle = {
            **dict.fromkeys(("act", "each", "zero"), lambda: self.act(h)),
            **dict.fromkeys(("held", "factors"), lambda: F.gelu(h) * self.scale),
            "gated": lambda: F.gelu(h) * self.gate(given),
            "bypass": lambda: F.gelu(h) + x.mean(-1, keepdim=True),
            "softmax": lambda: h.softmax(-1),
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


FEED = {"embed": "embedding", "*.up": "colwise", "*.down": "rowwise", "head": "colwise"}


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


def started(layout: dict[str, int], kind: str, plan: Any) -> Any:
    state = lay_out(Model(kind).double(), layout, plan=plan)
    row, rows = fk.data_ranks(state.mesh)
    return state, [draw_batch(micro * rows + row) for micro in range(2)]


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
    "beside sharded positions": ("plain", PLACED),
}
FORGOTTEN = {
    "one weight": ("act", FEED, r"the gradient of 'layers\.[01]\.act\.weight' differs"),
    "one weight before zeros": ("zero", FEED, r"gradient of 'layers\.0\.act\.weight' differs"),
    "held by the block": ("held", FEED, r"the gradient of 'layers\.[01]\.scale' differs"),
    "a gate of all channels": ("gated", FEED, r"the gradient of .*'layers\.[01](\.gate\.\w+)?'"),
    "the stream enters": ("bypass", FEED, r"the gradient of input 0 of 'layers\.[01]' differs"),
    "channels leave": ("escape times", FEED, r"what 'layers\.[01]' returns differs"),
    "heads outside": ("outside", {**FEED, "*.act": "heads"}, r"'layers\.[01]\.act\.weight' diff"),
    "a softmax beside positions": ("softmax", PLACED, r"what 'layers\.0' returns differs"),
}
"""What a plan leaves out, and what is refused: with weights of zero after it, whose gradient is
zero until they move, too."""


def _planned(rank, world, layout):
    """Gradients of plans that are right; of the others what is raised, and wrong gradients."""
    gradients = {
        case: mean_gradients(*started(layout, kind, plan), logits_loss)
        for case, (kind, plan) in EXACT.items()
    }
    # Dropout that evaluation does not end passes: all tensor-parallel ranks draw it alike.
    mean_gradients(*started(layout, "noisy", FEED), logits_loss)
    refused = {}
    for case, (kind, plan, _) in FORGOTTEN.items():
        state, batches = started(layout, kind, plan)
        wrong = None if "pp" in layout else mean_gradients(state, batches, logits_loss)
        before = full_tensors(state.model)
        step = fk.make_step(logits_loss, schedule=fk.constant(0.1))
        with pytest.raises(ValueError, match=r"^tensor parallelism \(tp 2\): ") as caught:
            step(state, batches)
        assert is_kept(state.model, before)
        assert all(p.grad is None for p in state.model.parameters())
        refused[case] = str(caught.value), wrong
    return gradients, refused


@pytest.mark.parametrize("where", some_of(LAYOUTS, "tp2, fsdp2", "pp2, tp2"))
def test_a_plan_is_exact_or_what_it_forgets_is_refused_before_the_first_update(where):
    """What is refused would train another model."""
    world, layout = LAYOUTS[where]
    rows = layout.get("dp_shard", 1)
    by_rank = run_again(_planned, world, layout)
    for case, (kind, _) in EXACT.items():
        expected = reference(kind, rows)
        for gradients in [found[case] for found, _ in by_rank]:
            assert relative_error(gradients, {n: expected[n] for n in gradients}) < 1e-10, case
        assert {name for found, _ in by_rank for name in found[case]} == expected.keys()
    for case, (kind, _, message) in FORGOTTEN.items():
        expected, told = reference(kind, rows), [refused[case] for _, refused in by_rank]
        for raised, wrong in told:
            assert re.search(message, raised), raised
            assert raised == told[0][0]
            is_far = wrong is None or relative_error(wrong, expected) > 1e-2
            assert is_far or kind == "zero", case


def _held(rank, world):
    state, batches = started({"tp": 2}, "factors", FEED)
    with pytest.raises(ValueError, match=r"'scale' \[20\] of Feed") as caught:
        fk.make_step(logits_loss, schedule=fk.constant(0.1))(state, batches)
    return str(caught.value)


def test_factors_that_a_block_holds_are_named_with_their_remedy():
    for message in run_again(_held, 2):
        assert re.search(r'10 of 20.* a module of its own, .* "channels"', message), message


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
        stream = {"x": self.embed(ids)}
        angles = torch.arange(ids.shape[1], dtype=stream["x"].dtype).cos()[:, None]
        for layer in self.layers:
            stream = layer(stream, angles=angles)
        return self.head(stream["x"])


def _handed(rank, world, options):
    """What one step leaves, with the proof and without."""
    (sizes, options), left = options, []
    for audit in (True, False):
        model = Handing()
        state = lay_out(model, {"tp": 2, **sizes}, plan={**FEED, "*.mix": "heads"}, **options)
        generator = torch.get_rng_state()
        if audit:
            fk.audit(state, draw_batch(0), logits_loss)
        assert torch.equal(generator, torch.get_rng_state())
        fk.accumulate(state, [draw_batch(0), draw_batch(1)], logits_loss)
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        generator = {"generator": torch.get_rng_state()}
        left.append({**full_tensors(model, gradients=True), **buffers, **generator})
    return left


OPTIONS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "bf16, recomputed": ({}, {"precision": "bf16", "activation_checkpoint": "full"}),
    "stages": ({"pp": 2}, {}),
    "offloaded": ({}, {"cpu_offload": True}),
}


@pytest.mark.parametrize("name", some_of(OPTIONS, "offloaded"))
def test_a_right_plan_passes_and_the_step_is_the_same_to_the_bit(name):
    """Blocks hand sharded channels on in a dict, drop out, and count their calls in a buffer."""
    options = OPTIONS[name]
    for proved, bare in run_again(_handed, 2 * options[0].get("pp", 1), options):
        assert proved.keys() == bare.keys()
        assert all(torch.equal(value, bare[key]) for key, value in proved.items())


def _narrow_kernel(rank, world):
    with flash_kernels() as calls:
        model = fk.Transformer(attrs.evolve(SPEC, vocab_size=38, head_dim=8))
        state = lay_out(model, {"tp": 2}, precision="bf16", attention="flash")
        fk.audit(state, draw_batch(0), logits_loss)
    return {call["dtype"] for call in calls}


def test_a_plan_is_proved_where_the_kernel_takes_16_bits_only():
    assert run_ranks(_narrow_kernel, 2) == [{torch.bfloat16}] * 2
