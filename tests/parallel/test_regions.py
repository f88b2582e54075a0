"""What a tensor-parallel plan forgets: refused at the first step on all ranks, or exact."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import one_at_a_time, some_of
from oracle import full_tensors, relative_error
from ranks import run_again
from tensordict import TensorDict
from torch import Tensor, nn

import forgekit as fk

VOCAB, PLACES, WIDTH, FFN, HEADS = 12, 6, 8, 20, 4


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
        if kind in ("act", "each"):
            h = self.act(h)
        elif kind == "outside":
            return x + self.act(self.down(h)) * self.gate(x)
        elif kind == "held":
            h = F.gelu(h) * self.scale
        elif kind == "gated":
            h = F.gelu(h) * self.gate(given)
        elif kind == "bypass":
            h = F.gelu(h) + x.mean(-1, keepdim=True)
        elif kind == "escape":
            return x + self.down(F.gelu(h)) + h.abs().mean(-1, keepdim=True)
        return x + self.down(F.gelu(h))


class Mix(nn.Module):
    """Attention with a temperature, sinks for each head, or a scale of channels."""

    def __init__(self, kind: str):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.temperature = Scale(1)
        self.sinks = Scale(HEADS)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)) for p in self.projections)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.kind == "temperature":
            q = self.temperature(q)
        scores = q @ k.mT
        if self.kind == "sinks":
            scores = self.sinks(scores.movedim(1, -1)).movedim(-1, 1)
        mixed = scores.tril().tanh() @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))

    @property
    def projections(self) -> list[nn.Module]:
        return [self.query, self.key, self.value]


class Model(nn.Module):
    """Two blocks of one kind, or of "one then another"."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        block = Mix if kind in ("temperature", "sinks") else Feed
        first, _, second = kind.partition(" then ")
        self.layers = nn.ModuleList([block(first), block(second or first)])
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x))


PLAN: dict[str, Any] = {"embed": "embedding", "head": "colwise"}
FEED = {**PLAN, "*.up": "colwise", "*.down": "rowwise"}
MIX = {
    **PLAN,
    **{f"*.{name}": "colwise" for name in ("query", "key", "value")},
    "*.out": "rowwise",
}


def loss_fn(model: Any, batch: Any) -> fk.Loss:
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def draw_batch(seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (2, PLACES), generator=generator)
    labels = torch.randint(0, VOCAB, (2, PLACES), generator=generator)
    labels[0, 3:] = -100
    return TensorDict({"input_ids": ids, "labels": labels}, batch_size=[2])


def reference(kind: str, rows: int, micro_batches: int = 2) -> dict[str, Tensor]:
    model, targets = Model(kind).double(), 0
    for seed in range(rows * micro_batches):
        batch = draw_batch(seed)
        logits, labels = model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        targets += int((labels != -100).sum())
        F.cross_entropy(logits, labels, reduction="sum").backward()
    used = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {n: used.get(n, torch.zeros_like(p)) / targets for n, p in model.named_parameters()}


def _started(
    layout: dict[str, int], kind: str, plan: Any, backend: Any = None, **options: Any
) -> Any:
    mesh = fk.build_mesh(fk.MeshSpec(**layout), device="cpu")
    model = Model(kind).double()
    for layer in model.layers if backend else ():
        layer.compile(backend=backend)
    model = fk.parallelize(model, mesh, plan=plan, **options)
    row, rows = fk.data_ranks(mesh)
    return (
        fk.TrainState.create(model, fk.adamw(model), mesh=mesh),
        [draw_batch(micro * rows + row) for micro in range(2)],
    )


def _gradients(rank, world, layout, kind, plan, options):
    state, batches = _started(layout, kind, plan, **options)
    totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
    factor = fk.clip(totals).factor
    return {n: g * factor for n, g in full_tensors(state.model, gradients=True).items()}


LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2, fsdp2": (4, {"tp": 2, "dp_shard": 2}),
    "pp2, tp2": (4, {"pp": 2, "tp": 2}),
}
EXACT = {
    "one weight": ("act", {**FEED, "*.act": "heads"}),
    "a weight for each channel": ("each", {**FEED, "*.act": "channels"}),
    "outside of the region": ("outside", FEED),
    "a temperature": ("temperature", {**MIX, "*.temperature": "heads"}),
    "sinks": ("sinks", {**MIX, "*.sinks": "channels"}),
    "named replicate": ("outside", {**FEED, "*.act": "replicate", "*.gate": "replicate"}),
}


@pytest.mark.parametrize(("case", "where"), one_at_a_time(EXACT, LAYOUTS))
def test_named_parameters_among_sharded_channels_are_exact(case, where):
    (kind, plan), (world, layout) = EXACT[case], LAYOUTS[where]
    expected = reference(kind, layout.get("dp_shard", 1))
    names = set()
    for found in run_again(_gradients, world, layout, kind, plan, {}):
        names |= found.keys()
        assert relative_error(found, {name: expected[name] for name in found}) < 1e-10
    assert names == expected.keys()


START = r"^the tensor-parallel plan leaves something out: "
FORGOTTEN = {
    "one weight": (
        "act",
        FEED,
        rf"{START}the parameter 'layers\.[01]\.act\.weight' has the style 'replicate', for all "
        r"channels, and is used on this rank's channels on the way to 'layers\.[01]\.down'; its "
        r"gradient would be wrong, and copies of it would drift apart\. Add 'layers\.[01]\.act' to "
        r"the plan as 'heads' .* or 'channels' ",
    ),
    "held by the block": (
        "held",
        FEED,
        rf"{START}the parameter 'layers\.[01]\.scale' .* or put it into a module of its own",
    ),
    "a gate of all channels": (
        "gated",
        FEED,
        rf"{START}the parameter 'layers\.[01]\.gate\.(bias|weight)' has the style 'replicate'",
    ),
    "the stream enters": (
        "bypass",
        FEED,
        rf"{START}('(layers\.0\.down|embed)' returns|an input of .* stage, with) all channels, .*"
        r"used as this rank's channels on the way to 'layers\.[01]\.down'; .* 'colwise'",
    ),
    "channels leave": (
        "escape",
        FEED,
        rf"{START}'layers\.[01]\.up' returns this rank's channels, which are used as all channels "
        r"on the way to '.*'; gradients would be parts of sums",
    ),
    "heads outside": (
        "outside",
        {**FEED, "*.act": "heads"},
        rf"{START}the parameter 'layers\.[01]\.act\.weight' has the style 'heads', for this rank's "
        r"channels, and is used on all channels .* Name 'layers\.[01]\.act' 'replicate', or",
    ),
    "a temperature": (
        "temperature",
        MIX,
        rf"{START}the parameter 'layers\.[01]\.temperature\.factor' .* to 'layers\.[01]\.out'",
    ),
}


def _refused(rank, world, layout, kind, plan, options):
    state, batches = _started(layout, kind, plan, **options)
    before = full_tensors(state.model)
    step = fk.make_step(loss_fn, schedule=fk.constant(0.1))
    with pytest.raises(ValueError, match=r"^the tensor-parallel plan leaves") as caught:
        step(state, batches)
    raised = str(caught.value)
    assert all(torch.equal(value, before[n]) for n, value in full_tensors(state.model).items())
    assert all(p.grad is None for p in state.model.parameters())
    return raised


@pytest.mark.bad_input
@pytest.mark.parametrize(("case", "where"), one_at_a_time(FORGOTTEN, LAYOUTS))
def test_what_a_plan_forgets_is_refused_before_the_first_update(case, where):
    (kind, plan, message), (world, layout) = FORGOTTEN[case], LAYOUTS[where]
    everyone = run_again(_refused, world, layout, kind, plan, {})
    for raised in everyone:
        assert re.search(message, raised), raised
        assert raised == everyone[0]


OF_A_STAGE = {
    "the first": ("act then right", r"the parameter 'layers\.0\.act\.weight' has the style 'repl"),
    "what the last takes": ("right then bypass", "an input of the model or of its stage, with all"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("stage", OF_A_STAGE)
def test_each_stage_is_proved_by_itself(stage):
    kind, message = OF_A_STAGE[stage]
    for raised in run_again(_refused, 4, {"pp": 2, "tp": 2}, kind, FEED, {}):
        assert re.search(START + message, raised), raised


@pytest.mark.parametrize("mode", some_of(["full", "selective"], "full"))
def test_recomputed_blocks_are_proved_too(mode):
    kind, plan, message = FORGOTTEN["one weight"]
    for raised in run_again(_refused, 2, {"tp": 2}, kind, plan, {"activation_checkpoint": mode}):
        assert re.search(message, raised), raised


def _compiled(rank, world, layout, kind, plan, is_right):
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
    calls = []

    def backend(graph, _inputs):
        calls.append(graph)
        return graph.forward

    state, batches = _started(layout, kind, plan, backend)
    if not is_right:
        with pytest.raises(ValueError, match=r"^the tensor-parallel plan leaves") as caught:
            fk.accumulate(state, batches, loss_fn)
        return str(caught.value)
    totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
    factor = fk.clip(totals).factor
    gradients = full_tensors(state.model, gradients=True)
    return {n: g * factor for n, g in gradients.items()}, len(calls)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2}, pytest.param({"pp": 2, "tp": 2}, marks=pytest.mark.oracle)],
    ids=["tp2", "pp2, tp2"],
)
@pytest.mark.parametrize("name", some_of(["one weight", "channels leave"], "channels leave"))
def test_compiled_blocks_are_proved_too(name, layout):
    kind, plan, message = FORGOTTEN[name]
    for raised in run_again(_compiled, 2 * layout.get("pp", 1), layout, kind, plan, False):
        assert re.search(message, raised), raised


def test_compiled_blocks_that_are_right_stay_exact_and_compiled():
    kind, plan = EXACT["one weight"]
    expected = reference(kind, 1)
    for found, compiled in run_again(_compiled, 2, {"tp": 2}, kind, plan, True):
        assert relative_error(found, expected) < 1e-10
        assert compiled
