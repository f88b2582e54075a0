"""What a tensor-parallel plan forgets: refused at the first step on all ranks, or exact."""

from __future__ import annotations

import re
import warnings
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from covering import one_at_a_time, some_of
from flash_kernels import flash_kernels
from lab import SPEC, full_tensors, logits_loss, relative_error
from ranks import run_again, run_ranks
from tensordict import TensorDict
from torch import Tensor, nn

import forgekit as fk

VOCAB, PLACES, WIDTH, FFN, HEADS = 12, 6, 8, 20, 4


ACROSS = {
    "norm": lambda h: F.gelu(h) / h.norm(dim=-1, keepdim=True),
    "softmax": lambda h: h.softmax(-1),
    "rms": lambda h: F.rms_norm(F.gelu(h), h.shape[-1:]),
    "centred": lambda h: F.gelu(h - h.mean(-1, keepdim=True)),
}


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
        elif kind == "escape times":
            return x * h.abs().mean(-1, keepdim=True) + self.down(F.gelu(h))
        elif kind == "noisy":
            return x + F.dropout(self.down(F.gelu(h)), 0.5)
        elif kind in ACROSS:
            return x + self.down(ACROSS[kind](h))
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


def _gradients(rank, world, layout, kind, plan, options, audit=True):
    state, batches = _started(layout, kind, plan, **options)
    totals = fk.accumulate(state, batches, loss_fn, audit=audit)
    totals = fk.reduce_totals(totals, state)
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
        r"the gradient of 'layers\.[01]\.act\.weight' differs",
    ),
    "a temperature": (
        "temperature",
        MIX,
        r"the gradient of 'layers\.[01]\.temperature\.factor' differs",
    ),
    "a norm across channels": ("norm", FEED, r"what 'layers\.[01]' returns differs"),
    "a softmax across channels": ("softmax", FEED, r"what 'layers\.[01]' returns differs"),
    "an rms norm across channels": ("rms", FEED, r"what 'layers\.[01]' returns differs"),
    "a mean across channels": ("centred", FEED, r"what 'layers\.[01]' returns differs"),
}


@pytest.mark.parametrize("case", FORGOTTEN)
def test_what_is_refused_would_train_another_model(case):
    kind, plan, _ = FORGOTTEN[case]
    expected = reference(kind, 1)
    wrong = max(
        relative_error(found, expected)
        for found in run_again(_gradients, 2, {"tp": 2}, kind, plan, {}, False)
    )
    # A mean that leaves beside the stream is taken out again by the next LayerNorm.
    assert wrong > 1e-2 or case == "channels leave"


def _refused(rank, world, layout, kind, plan, options):
    state, batches = _started(layout, kind, plan, **options)
    before = full_tensors(state.model)
    step = fk.make_step(loss_fn, schedule=fk.constant(0.1))
    with pytest.raises(ValueError, match=r"^tensor parallelism \(tp 2\): ") as caught:
        step(state, batches)
    raised = str(caught.value)
    assert all(torch.equal(value, before[n]) for n, value in full_tensors(state.model).items())
    assert all(p.grad is None for p in state.model.parameters())
    return raised


@pytest.mark.parametrize(("case", "where"), one_at_a_time(FORGOTTEN, LAYOUTS))
def test_what_a_plan_forgets_is_refused_before_the_first_update(case, where):
    (kind, plan, message), (world, layout) = FORGOTTEN[case], LAYOUTS[where]
    everyone = run_again(_refused, world, layout, kind, plan, {})
    for raised in everyone:
        assert re.search(message, raised), raised
        assert raised == everyone[0]


def _compiled(rank, world, layout, kind, plan, is_right):
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
    calls = []

    def backend(graph, _inputs):
        calls.append(graph)
        return graph.forward

    state, batches = _started(layout, kind, plan, backend)
    if not is_right:
        with pytest.raises(ValueError, match=r"^tensor parallelism \(tp 2\): ") as caught:
            fk.accumulate(state, batches, loss_fn)
        return str(caught.value)
    totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
    factor = fk.clip(totals).factor
    gradients = full_tensors(state.model, gradients=True)
    return {n: g * factor for n, g in gradients.items()}, len(calls)


def test_compiled_blocks_that_are_right_stay_exact_and_compiled():
    kind, plan = EXACT["one weight"]
    expected = reference(kind, 1)
    for found, compiled in run_again(_compiled, 2, {"tp": 2}, kind, plan, True):
        assert relative_error(found, expected) < 1e-10
        assert compiled


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


class Handing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Hands() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = torch.arange(ids.shape[1], dtype=x.dtype).cos()[:, None]
        stream = {"x": x}
        for layer in self.layers:
            stream = layer(stream, angles=angles)
        return self.head(stream["x"])


def _handed(rank, world, plan, audit, options):
    options = dict(options)
    mesh = fk.build_mesh(fk.MeshSpec(tp=2, pp=options.pop("pp", 1)), device="cpu")
    torch.manual_seed(5)
    model = fk.parallelize(Handing(), mesh, plan=plan, **options)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    called = []

    def counted(model: Any, batch: Any) -> fk.Loss:
        called.append(tuple(batch["input_ids"].shape))
        return loss_fn(model, batch)

    fk.accumulate(state, [draw_batch(0), draw_batch(1)], counted, audit=audit)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    generator = torch.get_rng_state()
    return full_tensors(model, gradients=True), buffers, generator, called


HANDED = {**FEED, "*.mix": "heads"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16"},
        {"activation_checkpoint": "full"},
        {"cpu_offload": True},
        {"pp": 2},
    ],
    ids=["fp32", "bf16", "recomputed", "offloaded", "stages"],
)
def test_a_right_plan_passes_and_the_step_is_the_same_to_the_bit(options):
    """Blocks hand sharded channels on in a dict, drop out, and count their calls in a buffer."""
    for one, other in zip(
        run_again(_handed, 2 * options.get("pp", 1), HANDED, True, options),
        run_again(_handed, 2 * options.get("pp", 1), HANDED, False, options),
        strict=True,
    ):
        gradients, buffers, generator, called = one
        assert gradients.keys() == other[0].keys()
        assert all(torch.equal(gradients[name], other[0][name]) for name in gradients)
        assert buffers.keys() == other[1].keys()
        assert all(torch.equal(buffers[name], other[1][name]) for name in buffers)
        assert torch.equal(generator, other[2])
        assert len(called) == len(other[3]) + 2 or "pp" in options


def _from_zero(rank, world):
    mesh = fk.build_mesh(fk.MeshSpec(tp=2), device="cpu")
    model = Model("act").double()
    for layer in model.layers:
        nn.init.zeros_(layer.down.weight)
    model = fk.parallelize(model, mesh, plan=FEED)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    with pytest.raises(ValueError, match=r"the gradient of 'layers\.0\.act\.weight' differs"):
        fk.accumulate(state, [draw_batch(0)], loss_fn)
    return True


def test_weights_of_zero_hide_nothing_from_the_check():
    """The gradient of what stands before a projection of zeros is zero, until that has moved."""
    assert all(run_again(_from_zero, 2))


PLACED = {
    **FEED,
    **dict.fromkeys(("*.norm", "last"), "sequence"),
    **dict.fromkeys(("*.gate", "*.act"), "replicate"),
}


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kind", some_of(["norm", "softmax", "rms", "centred"], "norm", "rms"))
def test_operations_across_channels_are_refused_beside_sharded_positions(kind, pp):
    for raised in run_again(_refused, 2 * pp, {"pp": pp, "tp": 2}, kind, PLACED, {}):
        assert "what 'layers.0' returns differs" in raised


@pytest.mark.parametrize("pp", [1, 2])
def test_a_feed_forward_beside_sharded_positions_is_exact(pp):
    expected = reference("plain", 1)
    for found in run_again(_gradients, 2 * pp, {"pp": pp, "tp": 2}, "plain", PLACED, {}):
        assert relative_error(found, {name: expected[name] for name in found}) < 1e-10


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


@pytest.mark.parametrize("kernel", ["flash", "varlen"])
def test_a_plan_is_proved_where_the_kernel_takes_16_bits_only(kernel):
    assert run_ranks(_narrow_kernel, 2, kernel) == [32, 32]


def test_dropout_that_evaluation_does_not_end_passes():
    """All tensor-parallel ranks draw it alike."""
    assert len(run_again(_gradients, 2, {"tp": 2}, "noisy", FEED, {})) == 2
