"""Models in a pipeline: exact against one process in float64, or refused on all ranks alike.

What crosses from stage to stage is what the last block before the boundary returned. A model that
needs anything else of an earlier stage is in the second table.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from covering import first_of, in_turn
from distributed.matrix import SCHEDULES
from lab import full, lay_out, reference_gradients, relative_error, token_rows
from pool import RankError, on_ranks, run_again, run_ranks
from tensordict import TensorDict
from torch import nn

import forgekit as fk

WIDTH, WORDS = 6, 11


class Mix(nn.Module):
    """A block of the stream and whatever else it takes, no two arguments alike."""

    def __init__(self, takes=1):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(takes))

    def forward(self, *given):
        parts = zip(self.inner, given, strict=True)
        return given[0] + sum(
            linear(x.cumsum(1)).tanh() / (1 + n) for n, (linear, x) in enumerate(parts)
        )


class Form(nn.Module):
    """Embedding, blocks, output; what lies between is each form's own."""

    takes = 1
    block = Mix

    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.before()
        self.layers = nn.ModuleList(self.block(self.takes) for _ in range(layers))
        self.after()
        self.top = nn.Linear(WIDTH, WORDS)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def before(self):
        pass

    def after(self):
        pass

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.top(x)


def form(forward=Form.forward, *, block=Mix, **also):
    """A model whose forward, or whose parts, are something of its own."""
    block = block if isinstance(block, type) else type("Own", (Mix,), {"forward": block})
    return type("Model", (Form,), {"forward": forward, "block": block, **also})


def each(step, begin=lambda self, x: x):
    """A forward with something done at each block, also with what ``begin`` makes first."""

    def forward(self, ids):
        x = self.embed(ids)
        begun = begin(self, x)
        for n, layer in enumerate(self.layers):
            x = step(self, n, layer, x, begun)
        return self.top(x)

    return forward


def loss_fn(model, batch):
    """Cross-entropy, and a term for each auxiliary output."""
    out = model(batch["input_ids"])
    logits, aux = out if isinstance(out, tuple) else (out, 0.0)
    loss = fk.cross_entropy(logits, batch["labels"])
    return fk.Loss(loss.sum + 3.0 * aux, loss.count)


# What crosses: the stream, in any container


class Pair(NamedTuple):
    x: torch.Tensor
    first: list


@dataclasses.dataclass
class Out:
    pair: dict
    is_first: bool


def _pack(x, first):
    return Out({"pair": Pair(x, [first, None, 3])}, is_first=False)


def _unpack(out):
    return out.pair["pair"].x, out.pair["pair"].first[0]


def _passes_containers(self, given):
    x, first = _unpack(given)
    return _pack(Mix.forward(self, x, first), first)


def _containers_passed(self, ids):
    x = self.embed(ids)
    out = _pack(x, x)
    for layer in self.layers:
        out = layer(out)
    return self.top(_unpack(out)[0])


def _passes_more(self, x, first, aux, at, keep):
    """The last stages compute nothing with the second tensor, so it gets no gradient there."""
    out = Mix.forward(self, x if self.is_late else x + first)
    out = torch.where(keep[..., None], out + x.gather(1, at[..., None].expand_as(x)), x)
    return out, first, aux + out.square().mean(), at.flip(1), ~keep


class _More(form(block=_passes_more)):
    def after(self):
        for n, layer in enumerate(self.layers):
            layer.is_late = n >= len(self.layers) // 2

    def forward(self, ids):
        x = first = self.embed(ids)
        aux, at, keep = torch.zeros((), dtype=x.dtype), ids % ids.shape[1], ids > 4
        for layer in self.layers:
            x, first, aux, at, keep = layer(x, first, aux, at, keep)
        return self.top(x * keep[..., None]), aux


class NormBlock(Mix):
    def __init__(self, takes):
        super().__init__(takes)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.steps += 1
        self.calls += 1
        self.begun = getattr(self, "begun", 0) + 1
        return super().forward(self.norm(x.mT).mT)


class Copies(Form):
    """The ids once more near the end, parts in lists, work in place, an activation between."""

    def before(self):
        self.stems = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.act = nn.Tanh()

    def after(self):
        self.tops = nn.ModuleDict({"gate": nn.Linear(WIDTH, 1)})

    def forward(self, ids):
        x = self.embed(ids)
        x += torch.arange(ids.shape[1])[:, None] / 10
        for stem in self.stems:
            x = stem(x).relu()
        for layer in self.layers:
            x = self.act(layer(x))
        return self.top(x) + self.tops["gate"](x) * F.one_hot(ids, WORDS)


def _early_weight(self, ids):
    weight, x = self.top.weight, self.embed(ids)
    for layer in self.layers:
        x = layer(x)
    return F.linear(x, weight)


def _no_effect(self, n, layer, x, x0):
    return layer(x) + (x0 * 0.0).nan_to_num()


EXACT = {
    "the stream": Form,
    "containers": form(_containers_passed, block=_passes_containers, takes=2),
    "a loss, numbers, and what later stages only pass on": _More,
    "statistics and counters in blocks": form(block=NormBlock),
    "ids near the end, lists of parts, work in place": Copies,
    "a weight that is read early": form(_early_weight),
    "an embedding of no effect": form(each(_no_effect)),
}


# What is refused


def _noise(self, x):
    return torch.rand(x.shape, dtype=x.dtype)


def _keep_in_attribute(self, x):
    self.aux = Mix.forward(self, x).square().mean()
    return Mix.forward(self, x)


def _sum_attributes(self, ids):
    return Form.forward(self, ids) * sum(layer.aux for layer in self.layers)


def _along(make):
    return each(lambda self, n, layer, x, along: layer(x, along), begin=lambda *_: make())


def _append(self, x, along):
    along.append(Mix.forward(self, x).mean())
    return x + along[-1]


def _add_up(self, x, along):
    out = Mix.forward(self, x)
    along += out.mean()
    return out


def _closures():
    """Blocks and a model that share a list of the function around both."""
    along = []

    def block(self, x):
        along.append(Mix.forward(self, x).square().mean())
        return Mix.forward(self, x)

    def forward(self, ids):
        along.clear()
        out = Form.forward(self, ids)
        return out, sum(along)

    return form(forward, block=block)


def _norms(self):
    self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(8))


def _count(self, ids):
    self.seen += ids.numel()
    return Form.forward(self, ids)


CROSSES = (
    r"uses values of earlier stages that .* returns is sent\. Let the blocks take and return it"
)
TURN = r"is called in stage \d out of turn: .* or use pp=1"
SENT = r"puts a tensor into a list, .* no other pipeline stage would see\. Let the blocks"

REFUSED = {
    "noise that all blocks take": (
        form(each(lambda self, n, layer, x, noise: layer(x) + noise, begin=_noise)),
        CROSSES,
    ),
    "a loss in an attribute": (
        form(_sum_attributes, block=_keep_in_attribute),
        r"layers\.0 keeps a differentiable tensor of shape \(\) in its attribute 'aux'",
    ),
    "a loss in a list of a closure": (
        _closures(),
        r"layers\.0 keeps a differentiable tensor of shape \(\) in the variable 'along'",
    ),
    "a loss in a list that is passed along": (form(_along(list), block=_append), SENT),
    "a sum that is passed along": (
        form(_along(lambda: torch.zeros((), dtype=torch.float64)), block=_add_up),
        r"layers\.0 changes a tensor in place that it is given",
    ),
    "norms in a list of modules": (
        form(each(lambda self, n, layer, x, _: layer(self.norms[n](x))), before=_norms),
        TURN,
    ),
    "a counter of the model's own": (
        form(_count, before=lambda self: self.register_buffer("seen", torch.zeros(()))),
        r"forward changes the buffer 'seen' of \w+, which each pipeline stage has",
    ),
    "work in place between the blocks": (
        form(each(lambda self, n, layer, x, _: layer(x).add_(0.5))),
        r"what layers\.\d returned is changed in place before the next block, .* Write x = x \+ y",
    ),
    "a block that returns an object": (
        form(block=lambda self, x: SimpleNamespace(x=x)),
        "a pipeline stage cannot send a SimpleNamespace. Return tensors from the blocks",
    ),
    "a TensorDict": (
        form(lambda self, ids: TensorDict({"logits": Form.forward(self, ids)}, [len(ids)])),
        "returned a TensorDict; gradients through it would stay",
    ),
    "an embedding's weight": (
        form(each(lambda self, n, layer, x, _: layer(x + self.embed.weight[0]))),
        r"embed, which another pipeline stage holds, is read for 'weight'",
    ),
}


def _batches(count, places=5):
    return [token_rows(2, places, WORDS, seed) for seed in range(count)]


def _sgd(model):
    return torch.optim.SGD(model.parameters())


def _state(kind, schedule, layers=4, **sizes):
    return lay_out(kind(layers).double(), sizes, _sgd, pipeline_schedule=schedule)


def _found(state, batches, loss_fn=loss_fn):
    """Gradients of the mean, and the loss, as a step finds them."""
    totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
    gradients = {name: full(g) for name, g in fk.gradients(state, totals).items()}
    return gradients, totals["loss"] / totals["targets"]


def _assert_exact(found, expected):
    """Of a step against one process; what has no gradient there has one of zeros here."""
    (gradients, loss), (wanted, wanted_loss) = found, expected
    wanted = {n: wanted.get(n, torch.zeros_like(g)) for n, g in gradients.items()}
    assert relative_error(gradients, wanted) < 1e-10
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-10, atol=0)


def _counts(layer):
    return {value for name, value in vars(layer).items() if name in ("calls", "begun")}


def _check_exact(rank, world, name, schedule, sizes):
    kind, count = EXACT[name], 2 * sizes["pp"]
    state = _state(kind, schedule, count, **sizes)
    data, of = fk.data_ranks(state.mesh)
    for places in (5, 3):
        batches = _batches(count * of, places=places)
        model = kind(count)
        expected = reference_gradients(model, [batches], loss_fn)
        _assert_exact(_found(state, batches[data::of]), expected)
        if places == 5:  # also of blocks which were rehearsed
            buffers = dict(model.named_buffers())
            for n, buffer in state.model.named_buffers():
                torch.testing.assert_close(buffer, buffers[n].to(buffer.dtype), msg=n)
            for layer in state.model.layers:
                assert getattr(layer, "is_absent", False) or _counts(layer) <= {count}


SIZES = ({"pp": 2}, {"pp": 4}, {"pp": 2, "dp_shard": 2})
EVERY = [(name, schedule, sizes) for name in EXACT for schedule in SCHEDULES for sizes in SIZES]
EVERY = [row for row in EVERY if "statistics" not in row[0] or row[2] != SIZES[2]]  # refused
SOME = [
    *((name, SCHEDULES[at % len(SCHEDULES)], SIZES[0]) for at, name in enumerate(EXACT)),
    ("containers", "interleaved_1f1b", SIZES[1]),
]
"""Each on two ranks, and one on four."""


@pytest.mark.parametrize(("name", "schedule", "sizes"), first_of(SOME, EVERY))
def test_models_in_which_the_stream_crosses_are_exact(name, schedule, sizes):
    run_again(_check_exact, math.prod(sizes.values()), name, schedule, sizes)


@pytest.mark.parametrize(("name", "schedule"), in_turn(list(REFUSED), ["1f1b", "zbv"]))
@on_ranks(2, timeout_s=30)
def test_models_in_which_more_crosses_are_refused_on_all_ranks(rank, world, name, schedule):
    kind, message = REFUSED[name]
    state = _state(kind, schedule, pp=world)
    before = {n: b.clone() for n, b in state.model.named_buffers()}
    for run in (fk.accumulate, fk.accumulate, fk.evaluate):
        with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError), match=message):
            run(state, _batches(4), loss_fn)
        assert all(parameter.grad is None for parameter in state.model.parameters())
    for n, buffer in state.model.named_buffers():
        assert torch.equal(buffer, before[n])


# Calls of other kinds, losses that read parameters, and what changes later


class _Fickle(Form):
    """Needs more in one way of calling it than in another."""

    def forward(self, ids, *, late=False):
        x = x0 = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.top(x * (x0 > 0) if late else x)


def _late_loss(model, batch):
    return fk.cross_entropy(model(batch["input_ids"], late=True), batch["labels"])


@on_ranks(2)
def test_another_mode_and_other_arguments_are_rehearsed_anew(rank, world):
    """What crosses is learned for each mode and for each set of arguments."""
    state, batches = _state(_Fickle, "1f1b", pp=world), _batches(4)
    expected = reference_gradients(_Fickle(4), [batches], loss_fn)
    for _ in range(2):
        _assert_exact(_found(state, batches), expected)
        found = fk.evaluate(state, batches, loss_fn)
        torch.testing.assert_close(found["loss"], expected[1])
        for run in (fk.accumulate, fk.evaluate):
            with pytest.raises((ValueError, RuntimeError), match=CROSSES):
                run(state, batches, _late_loss)


def _penalty(read):
    def loss(model, batch):
        out = loss_fn(model, batch)
        return fk.Loss(out.sum + read(model), out.count)

    return loss


READS = {
    "named_parameters": lambda model: sum(p.square().sum() for _, p in model.named_parameters()),
    "top": lambda model: model.top.weight.square().sum(),
}


@on_ranks(2)
def test_a_loss_that_reads_parameters_is_refused_on_all_ranks(rank, world):
    state = _state(Form, "1f1b", pp=world)
    batches = _batches(2)
    for name, read in READS.items():
        with pytest.raises((ValueError, RuntimeError), match=f"{name}: loss_fn reads a parameter"):
            fk.accumulate(state, batches, _penalty(read))
        assert all(parameter.grad is None for parameter in state.model.parameters())
    reads_none = _penalty(lambda model: 0.0 * (model.training + len(model.__class__.__name__)))
    expected = reference_gradients(Form(4), [batches], loss_fn)
    _assert_exact(_found(state, batches, reads_none), expected)


def _later(change):
    """A forward that does something else at the third block, from the third call on."""

    def begin(self, _):
        self.calls = getattr(self, "calls", 0) + 1

    def step(self, n, layer, x, _):
        return change(layer, x) if n == 2 and self.calls > 2 else layer(x)

    return form(each(step, begin))


LATER = {
    "a block less": (lambda layer, x: x, r"pipeline stage \d ran without layers\.2, whose output"),
    "fewer positions": (
        lambda layer, x: layer(x[:, 1:]),
        r"in stage 2 returned .*\(2, 4, 6\).*expects .*\(2, 5, 6\), .*torch.float64",
    ),
}


def _changes(rank, world, name):
    state = _state(_later(LATER[name][0]), "zbv", pp=world)
    fk.accumulate(state, _batches(4), loss_fn)


@pytest.mark.parametrize("name", LATER)
def test_a_stage_that_sends_something_else_later_is_refused(name):
    with pytest.raises(RankError, match=LATER[name][1]):
        run_ranks(_changes, 2, name)


def _count_compiled(rank, world):
    """Blocks are compiled although nothing was in the rehearsal, and what they return is kept."""
    # The compiler's own look at what it traces.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    compiled = []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    kind = EXACT["containers"]
    model = kind(4).double()
    for layer in model.layers:
        layer.compile(backend=backend)
    state = lay_out(model, {"pp": world}, _sgd)
    counts, batches = [], _batches(4)
    expected = reference_gradients(kind(4), [batches], loss_fn)
    for _ in range(2):
        _assert_exact(_found(state, batches), expected)
        counts.append(len(compiled))
    return counts


def test_compiled_blocks_send_what_they_return():
    for counts in run_again(_count_compiled, 2):
        assert counts[0] > 0
        assert counts[1] == counts[0]
