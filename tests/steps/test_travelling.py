"""Models in which several tensors travel between stages, against one process in float64."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from covering import first_of
from forms import FORMS, WORDS, Form, loss_fn
from oracle import full_tensors, relative_error
from ranks import RankError, run_again, run_ranks
from tensordict import TensorDict

import forgekit as fk

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)


def _batches(count, places=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(0, WORDS, (2, places + 1), generator=generator)
        batches.append(TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, [2]))
    return batches


def _expected(kind, layers, batches):
    """Gradients, loss and buffers after plain forward and backward passes."""
    model = FORMS[kind](layers).double()
    losses = [loss_fn(model, batch).sum for batch in batches]
    sum(losses).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients, float(sum(losses).detach()), dict(model.named_buffers())


def _state(kind, layers, schedule, **sizes):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    model = FORMS[kind](layers).double()
    model = fk.parallelize(model, mesh, pipeline_schedule=schedule)
    return fk.TrainState.create(model, torch.optim.SGD(model.parameters()), mesh=mesh)


def _gradients(state):
    scale = float(state.loss_scale)
    return {n: g / scale for n, g in full_tensors(state.model, gradients=True).items()}


def _check_form(rank, world, kind, schedule, sizes):
    layers = 8
    state = _state(kind, layers, schedule, **sizes)
    data, of = fk.data_ranks(state.mesh)
    for places in (5, 3):
        batches = _batches(8 * of, places=places)
        model = FORMS[kind](layers)
        expected, loss, buffers = _expected(kind, layers, batches[data::of])
        buffers = {**dict(model.named_buffers()), **buffers}
        if of > 1:
            expected, loss, _ = _expected(kind, layers, batches)
        before = {n: b.clone() for n, b in state.model.named_buffers()}
        totals = fk.accumulate(state, batches[data::of], loss_fn)
        found = _gradients(state)
        assert relative_error(found, {n: expected[n] for n in found}) < 1e-10, kind
        if places == 5:
            for name, buffer in state.model.named_buffers():
                torch.testing.assert_close(buffer, buffers[name].to(buffer.dtype), msg=name)
        assert before.keys() == dict(state.model.named_buffers()).keys()
        totals = fk.reduce_totals(totals, state)
        assert float(totals["loss"]) == pytest.approx(loss, rel=1e-10)


SIZES = ({"pp": 2}, {"pp": 4}, {"pp": 2, "dp_shard": 2})
EVERY = [(kind, schedule, sizes) for kind in FORMS for schedule in SCHEDULES for sizes in SIZES]
SOME = [
    *((kind, SCHEDULES[at % len(SCHEDULES)], SIZES[0]) for at, kind in enumerate(FORMS)),
    ("EmbeddingToAll", "interleaved_1f1b", SIZES[1]),
    ("Statistics", "1f1b", SIZES[2]),
]
"""Each form on two ranks, and one in each layout of four."""


@pytest.mark.parametrize(("kind", "schedule", "sizes"), first_of(SOME, EVERY))
def test_forms_have_the_gradients_of_one_process(kind, schedule, sizes):
    run_again(_check_form, math.prod(sizes.values()), kind, schedule, sizes)


def _check_evaluation(rank, world, kind, schedule):
    state = _state(kind, 8, schedule, pp=world)
    batches = [batch for n in range(5) for batch in _batches(1, places=4 + n % 3, seed=n)]
    model = FORMS[kind](8).double().eval()
    with torch.no_grad():
        losses = [loss_fn(model, batch) for batch in batches]
    expected = float(sum(loss.sum for loss in losses)) / sum(float(loss.count) for loss in losses)
    for _ in range(2):
        found = fk.evaluate(state, iter(batches), loss_fn)
        assert float(found["loss"]) == pytest.approx(expected, rel=1e-10)
    buffers = dict(model.named_buffers())
    for name, buffer in state.model.named_buffers():
        torch.testing.assert_close(
            buffer, buffers[name].to(buffer.dtype) * (2 if "steps" in name else 1)
        )


@pytest.mark.parametrize("kind", FORMS)
def test_forms_are_evaluated(kind):
    run_again(_check_evaluation, 2, kind, "zbv" if kind < "D" else "1f1b")


class _Fickle(FORMS["EmbeddingToAll"]):
    """Trains and evaluates in different ways."""

    def forward(self, ids, *, late=False):
        x = x0 = self.embed(ids)
        for layer in self.layers:
            x = layer(x, x0 if self.training else x)
        return self.top(x + x0 if late else x)


def _late_loss(model, batch):
    return fk.cross_entropy(model(batch["input_ids"], late=True), batch["labels"])


def _check_kinds(rank, world):
    """What travels is learned for each mode and for each set of arguments."""
    mesh = fk.build_mesh(fk.MeshSpec(pp=world), device="cpu")
    model = fk.parallelize(_Fickle(4).double(), mesh)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()), mesh=mesh)
    whole, batches = _Fickle(4).double(), _batches(4)
    for loss_of in (loss_fn, _late_loss, loss_fn):
        whole.eval()
        expected = sum(float(loss_of(whole, batch).sum.detach()) for batch in batches) / 40
        found = fk.evaluate(state, batches, loss_of)
        assert float(found["loss"]) == pytest.approx(expected, rel=1e-10)
        whole.train().zero_grad()
        sum(loss_of(whole, batch).sum for batch in batches).backward()
        fk.accumulate(state, batches, loss_of)
        expected, found = {n: p.grad for n, p in whole.named_parameters()}, _gradients(state)
        assert relative_error(found, {n: expected[n] for n in found}) < 1e-10


def test_another_mode_and_other_arguments_are_rehearsed_anew():
    run_again(_check_kinds, 2)


def _penalty(read):
    def loss(model, batch):
        out = loss_fn(model, batch)
        return fk.Loss(out.sum + read(model), out.count)

    return loss


def _squares(parameters):
    return sum(parameter.square().sum() for parameter in parameters)


READS = {
    "parameters": lambda model: _squares(model.parameters()),
    "named_parameters": lambda model: _squares(p for _, p in model.named_parameters()),
    "state_dict": lambda model: _squares(model.state_dict().values()),
    "modules": lambda model: _squares(m.weight for m in model.modules() if hasattr(m, "weight")),
    "top": lambda model: model.top.weight.square().sum(),
    "embed": lambda model: model.embed.weight.square().sum(),
    "layers": lambda model: _squares(model.layers[0].parameters()),
}


def _check_reads(rank, world):
    state = _state("UNet", 4, "1f1b", pp=world)
    batches = _batches(2)
    for name, read in READS.items():
        with pytest.raises((ValueError, RuntimeError), match=f"{name}: loss_fn reads a parameter"):
            fk.accumulate(state, batches, _penalty(read))
        assert all(parameter.grad is None for parameter in state.model.parameters())
    around = _penalty(lambda _: _squares(state.model.parameters()))
    with pytest.raises((ValueError, RuntimeError), match="loss_fn reads a parameter of the model"):
        fk.accumulate(state, batches, around)
    before = _penalty(lambda model: 0.0 * (model.training + len(model.__class__.__name__)))
    fk.accumulate(state, batches, before)
    expected, found = _expected("UNet", 4, batches)[0], _gradients(state)
    assert relative_error(found, {n: expected[n] for n in found}) < 1e-10


def test_a_loss_that_reads_parameters_is_refused_on_all_ranks():
    run_ranks(_check_reads, 2)


class _Held(FORMS["Statistics"]):
    """Blocks in a plain list, which no stage could leave out."""

    def after(self):
        self.held = (list(self.layers),)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.held[0]:
            x = layer(x)
        return self.top(x)


class _Kept(FORMS["Aux"]):
    """A loss in an attribute of each block."""

    class block(FORMS["Aux"].block):
        def forward(self, x):
            out, (self.aux, _) = super().forward(x)
            return out

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.top(x), sum(layer.aux for layer in self.layers)


REFUSED = {
    _Held: r"layers\.\d was called on a rank whose pipeline stages do not have it",
    _Kept: r"layers\.0 keeps a differentiable tensor of shape \(\) which it does not return",
}


def _check_refused(rank, world, schedule):
    mesh = fk.build_mesh(fk.MeshSpec(pp=world), device="cpu")
    for kind, message in REFUSED.items():
        model = fk.parallelize(kind(8).double(), mesh, pipeline_schedule=schedule)
        state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()), mesh=mesh)
        for _ in range(2):
            with pytest.raises((ValueError, RuntimeError), match=message):
                fk.accumulate(state, _batches(4), loss_fn)
            assert all(parameter.grad is None for parameter in state.model.parameters())


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_models_that_stages_cannot_share_are_refused_on_all_ranks(schedule):
    run_ranks(_check_refused, 2, schedule)


def _check_one_rank_fails(rank, world):
    state, batches = _state("UNet", 4, "1f1b", pp=world), _batches(2)

    def loss(model, batch):
        return loss_fn(model, batch if rank == 0 else batch.exclude("input_ids"))

    message = "rank 1 of the pipeline raised before the first micro-batch; its own message"
    kind, match = (RuntimeError, message) if rank == 0 else (KeyError, "input_ids")
    for _ in range(2):
        with pytest.raises(kind, match=match):
            fk.accumulate(state, batches, loss)
    fk.accumulate(state, batches, loss_fn)
    expected, found = _expected("UNet", 4, batches)[0], _gradients(state)
    assert relative_error(found, {n: expected[n] for n in found}) < 1e-10


def test_an_error_of_one_rank_before_the_first_micro_batch_reaches_the_others():
    run_ranks(_check_one_rank_fails, 2, timeout_s=20)


class _Dropping(FORMS["UNet"]):
    """Leaves out a block now and then."""

    seen = 0

    def forward(self, ids):
        self.seen += 1
        x = self.embed(ids)
        for n, layer in enumerate(self.layers):
            if not (n == 1 and self.seen > 2):
                x = layer(x, x)
        return self.top(x)


class _Shortening(Form):
    """A stage that sends fewer positions now and then."""

    seen = 0

    def forward(self, ids):
        self.seen += 1
        x = self.embed(ids)
        for n, layer in enumerate(self.layers):
            x = layer(x[:, 1:] if n == 1 and self.seen > 2 else x)
        return self.top(x)


def _change(rank, world, kind):
    mesh = fk.build_mesh(fk.MeshSpec(pp=world), device="cpu")
    model = fk.parallelize(kind(4).double(), mesh)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()), mesh=mesh)
    fk.accumulate(state, _batches(4), loss_fn)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Dropping, r"pipeline stage 0 ran without layers\.1, call 0, whose"),
        (_Shortening, r"stage 0 returned \(2, 4, 6\) .*awaits \(2, 5, 6\) of torch.float64"),
    ],
)
def test_a_stage_that_sends_something_else_later_is_refused(kind, message):
    with pytest.raises(RankError, match=message):
        run_ranks(_change, 2, kind)


def _count_compiled(rank, world, kind):
    """Blocks are compiled although nothing was in the rehearsal, and what they return is kept."""
    # The compiler's own look at what it traces.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    compiled = []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    mesh = fk.build_mesh(fk.MeshSpec(pp=world), device="cpu")
    model = FORMS[kind](4).double()
    for layer in model.layers:
        layer.compile(backend=backend)
    model = fk.parallelize(model, mesh)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()), mesh=mesh)
    counts = []
    for _ in range(3):
        fk.accumulate(state, _batches(4), loss_fn)
        counts.append(len(compiled))
    expected, found = _expected(kind, 4, _batches(4))[0], _gradients(state)
    assert relative_error(found, {n: expected[n] for n in found}) < 1e-10
    return counts


@pytest.mark.parametrize(
    "kind", ["EmbeddingToAll", pytest.param("ValueResidual", marks=pytest.mark.oracle)]
)
def test_compiled_blocks_send_what_they_return(kind):
    for counts in run_again(_count_compiled, 2, kind):
        assert counts[0] > 0
        assert counts[2] == counts[0]
