"""What a step refuses at once: gradients that were never reduced, replicas that differ."""

from __future__ import annotations

import dataclasses
import math
import weakref
from types import SimpleNamespace

import attrs
import pytest
import torch
from covering import covering, in_turn
from lab import SPEC, full_tensors, logits_loss, relative_error
from ranks import run_again, run_ranks
from tensordict import TensorDict
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributions import Categorical

import forgekit as fk
from forgekit.steps.audit.agreement import UnreducedError, check_replicas, digest_rows

WIDTH, CLASSES = 6, 5


@attrs.frozen(eq=False)
class _Record:
    logits: torch.Tensor


@dataclasses.dataclass
class _Visible:
    logits: torch.Tensor


OPAQUE = {
    "distribution": lambda logits: Categorical(logits=logits),
    "namespace": lambda logits: SimpleNamespace(logits=logits),
    "attrs": _Record,
    "closure": lambda logits: lambda: logits,
}
VISIBLE = {"tensor": lambda logits: logits, "dataclass": _Visible, "dict": lambda x: {"logits": x}}


class _Model(nn.Module):
    def __init__(self, wrap="tensor"):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.wrap = wrap

    def forward(self, x):
        return (OPAQUE | VISIBLE)[self.wrap](self.head(self.body(x).tanh()))


def _logits(out):
    if isinstance(out, torch.Tensor):
        return out
    if isinstance(out, dict):
        return out["logits"]
    return out.logits if hasattr(out, "logits") else out()


def _loss(model, batch):
    return fk.cross_entropy(_logits(model(batch["x"])), batch["labels"])


def _batches(rank, micros=2, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    rows = []
    for count in range(micros):
        x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
        labels = torch.randint(CLASSES, (3,), generator=generator)
        labels[: (rank + count) % 3] = -100
        rows.append(TensorDict({"x": x, "labels": labels}, [3]))
    return rows


def _state(model, optimizer=fk.adamw, sizes=None, **options):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes or {}), device="cpu")
    model = fk.parallelize(model, mesh, **options)
    return fk.TrainState.create(model, optimizer(model), mesh=mesh)


def _step(**options):
    return fk.make_step(_loss, schedule=fk.constant(0.1), **options)


def _gradients(state, batches, loss_fn=_loss, **options):
    totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn, **options), state)
    factor = fk.clip(totals).factor
    return {n: g * factor for n, g in full_tensors(state.model, gradients=True).items()}


def _expected(model, batches, loss_fn=_loss):
    return _gradients(fk.TrainState.create(model, fk.adamw(model)), batches, loss_fn)


def _raises_and_keeps(state, act, error, match):
    before = full_tensors(state.model)
    with pytest.raises(error, match=match):
        act()
    after = full_tensors(state.model)
    return all(torch.equal(before[name], after[name]) for name in before)


def _opaque(rank, world, wrap, sizes, sync):
    state = _state(_Model(wrap).double(), sizes=sizes)
    act = lambda: _step(sync=sync)(state, _batches(rank))  # noqa: E731
    return _raises_and_keeps(state, act, UnreducedError, r"never reduced the gradients of 4 param")


@pytest.mark.parametrize(
    ("wrap", "sizes", "sync"),
    covering(list(OPAQUE), [{}, {"dp_replicate": 2, "dp_shard": 1}], ["last", "every"]),
)
def test_an_output_that_fsdp_cannot_see_through_is_refused(wrap, sizes, sync):
    assert run_again(_opaque, 2, wrap, sizes, sync) == [True, True]


def _visible(rank, world, wrap):
    return _gradients(_state(_Model(wrap).double()), _batches(rank))


@pytest.mark.parametrize("wrap", VISIBLE)
def test_an_output_that_fsdp_sees_through_is_exact(wrap):
    expected = _expected(_Model(wrap).double(), _batches(0) + _batches(1))
    for found in run_again(_visible, 2, wrap):
        assert relative_error(found, expected) < 1e-12


def _single(tensor):
    return tensor.float() if tensor.is_floating_point() else tensor


def _skipping_loss(model, batch):
    if batch["labels"].eq(-100).all():
        return fk.Loss(torch.zeros((), dtype=torch.float64, requires_grad=True) * 1, 0)
    return _loss(model, batch)


def _without_the_last(rank, steps_before):
    batches = _batches(rank)
    if not steps_before:
        batches[-1]["labels"][:] = -100
    return batches


WAYS = {
    "fp64": (2, {}, {}, {}),
    "bf16": (2, {}, {"precision": "bf16"}, {}),
    "hsdp_last": (4, {"dp_replicate": 2, "dp_shard": 2}, {}, {"sync": "hsdp_last"}),
}


def _skips_the_model(rank, world, steps_before, way):
    _, sizes, options, of_step = WAYS[way]
    model = _Model() if options else _Model().double()
    state = _state(model, sizes=sizes, **options)
    step = fk.make_step(_skipping_loss, schedule=fk.constant(0.1), **of_step)
    for _ in range(steps_before):
        state, _ = step(state, _batches(rank))
    act = lambda: step(state, _without_the_last(rank, 0))  # noqa: E731
    is_kept = _raises_and_keeps(state, act, UnreducedError, "Call the model for every micro-batch")
    state, metrics = step(state, _batches(rank, seed=1))  # nothing stale, nothing donated
    return is_kept, float(metrics["skipped"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_loss_that_skips_the_model_in_the_last_micro_batch_is_refused(steps_before, way):
    world = WAYS[way][0]
    assert run_again(_skips_the_model, world, steps_before, way) == [(True, 0.0)] * world


def _one_rank_hides(rank, world):
    """The second tensor-parallel rank alone holds its gradients back, after a good step."""
    plan = {"body": "colwise", "head": "rowwise"}
    state = _state(_Model().double(), sizes={"tp": 2}, plan=plan)
    state, _ = _step()(state, _batches(0))
    state.model.wrap = "namespace" if rank else "tensor"
    act = lambda: _step()(state, _batches(0, seed=1))  # noqa: E731
    told = "never red" if rank else "rank 1 could not .* never red"
    return _raises_and_keeps(state, act, UnreducedError if rank else RuntimeError, told)


def test_all_ranks_raise_where_one_refuses_a_later_step():
    assert run_ranks(_one_rank_hides, 2) == [True, True]


class _Branches(nn.Module):
    """The third is never used; the second from the last micro-batch on, or where data say so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = (nn.Linear(WIDTH, CLASSES) for _ in range(3))

    def forward(self, x, use):
        return self.a(x) + (self.b(x) * use if use else 0)


class _Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([_Branches(), _Branches()])

    def forward(self, x, use):
        return self.layers[0](x, use) + self.layers[1](x, use)


def _branch_loss(model, batch):
    return fk.cross_entropy(model(batch["x"], float(batch["use"][0])), batch["labels"])


def _with_use(batches, uses):
    for batch, use in zip(batches, uses, strict=True):
        batch["use"] = torch.full((3,), use, dtype=torch.float64)
    return batches


USES = {
    "in the last": {0: (0, 0, 2), 1: (0, 0, 2)},
    "in the middle": {0: (0, 2, 0), 1: (0, 2, 0)},
    "by data": {0: (0, 2, 0), 1: (0, 0, 0)},
    "by data, last": {0: (0, 0, 0), 1: (0, 0, 2)},
    "never": {0: (0, 0, 0), 1: (0, 0, 0)},
}


def _mixed(rank, world, precision, uses, sync, build):
    state = _state(build(), precision=precision)
    batches = [b.apply(_single) for b in _with_use(_batches(rank, 3), USES[uses][rank])]
    return _gradients(state, batches, _branch_loss, sync=sync)


@pytest.mark.parametrize(
    ("how", "uses", "world", "build"),
    in_turn(
        [("bf16", "last"), ("bf16", "every"), ("fp16", "last")],
        list(USES),
        [1, 2],
        [_Branches, _Blocks],
    ),
)
def test_parameters_that_are_used_late_or_never_are_exact_in_16_bits(how, uses, world, build):
    precision, sync = how
    batches = [b for rank in range(world) for b in _with_use(_batches(rank, 3), USES[uses][rank])]
    expected = _expected(build().double(), batches, _branch_loss)
    for found in run_again(_mixed, world, precision, uses, sync, build):
        assert relative_error(found, expected) < {"bf16": 2e-2, "fp16": 2e-3}[precision]
        assert all(found[name].any() == expected[name].any() for name in expected)


class _Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, use):
        return self.a(x).tanh() + (self.b(x) * use if use else 0)


class _Stack(nn.Module):
    """Branches in a row, for stages of a pipeline."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([_Branch() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, use):
        for layer in self.layers:
            x = layer(x, use)
        return self.head(x)


def _mixed_stages(rank, world, schedule, uses):
    state = _state(_Stack(), sizes={"pp": 2}, precision="bf16", pipeline_schedule=schedule)
    at = fk.data_ranks(state.mesh)[0]
    batches = [b.apply(_single) for b in _with_use(_batches(at, 4), USES_OF_FOUR[uses][at])]
    return _gradients(state, batches, _branch_loss)


USES_OF_FOUR = {
    "in the last": {0: (0, 0, 0, 2), 1: (0, 0, 0, 2)},
    "by data": {0: (0, 2, 0, 0), 1: (0, 0, 0, 2)},
    "never": {0: (0,) * 4, 1: (0,) * 4},
}


@pytest.mark.parametrize(
    ("uses", "schedule", "world"),
    in_turn(list(USES_OF_FOUR), ["1f1b", "interleaved_zero_bubble"], [2, 4]),
)
def test_stages_reduce_in_16_bits_what_is_used_late_or_never(uses, schedule, world):
    each = range(world // 2)
    batches = [b for at in each for b in _with_use(_batches(at, 4), USES_OF_FOUR[uses][at])]
    expected = _expected(_Stack().double(), batches, _branch_loss)
    found: dict[str, torch.Tensor] = {}
    for gradients in run_again(_mixed_stages, world, schedule, uses):
        found |= gradients
    assert relative_error(found, expected) < 3e-2
    assert all(found[name].any() == expected[name].any() for name in expected)


def _differing_replica(rank, world, sizes, what):
    plan = {"body": "colwise", "head": "rowwise"} if "tp" in sizes else None
    state = _state(_Model().double(), sizes=sizes, plan=plan)
    if what == "values" and rank == world - 1:
        with torch.no_grad():
            state.model.head.bias.to_local().add_(1e-3)
    totals = fk.accumulate(state, _batches(0), _loss)
    if what == "gradients" and rank == world - 1:
        state.model.head.bias.grad.to_local().mul_(1.5)
    if what == "signs" and rank == world - 1:  # of the same norm
        with torch.no_grad():
            state.model.head.bias.to_local().neg_()
    if what == "every other value" and rank == world - 1:
        with torch.no_grad():
            state.model.head.bias.to_local()[1] += 1e-3
    if what == "signs of gradients" and rank == world - 1:
        state.model.head.bias.grad.to_local().neg_()
    before = full_tensors(state.model)
    with pytest.raises(ValueError, match="Nothing was updated") as caught:
        fk.reduce_totals(totals, state)
    fk.reduce_totals(fk.accumulate(state, _batches(0), _loss, audit=False), state)
    after = full_tensors(state.model)
    return str(caught.value), all(torch.equal(before[n], after[n]) for n in before)


WHATS = ["values", "every other value", "gradients", "signs", "signs of gradients"]


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("name", ["dp_replicate", "tp"])
def test_replicas_that_differ_are_refused_on_every_rank(name, what):
    sizes = {"dp_shard": 1, name: 2}
    for message, is_kept in run_again(_differing_replica, 2, sizes, what):
        assert is_kept
        assert "ranks 0 and 1 hold the same part of 'head.bias'" in message
        kind = "gradients" if "gradients" in what else "values"
        assert f"its {kind} differ (" in message
        assert f"along {name}. Likely cause: " in message


def _not_finite(rank, world):
    state = _state(_Model().double(), sizes={"dp_replicate": 2, "dp_shard": 1})
    batches = _batches(rank)
    if rank:
        batches[0]["x"][0, 0] = math.nan
    state, metrics = _step()(state, batches)
    return float(metrics["skipped"])


def test_a_first_step_that_is_not_finite_is_a_bad_step_and_no_difference():
    assert run_again(_not_finite, 2) == [1.0, 1.0]


def _drift_later(rank, world, out):
    state = _state(_Model().double(), sizes={"dp_replicate": 2, "dp_shard": 1})
    state, _ = _step()(state, _batches(rank))
    check_replicas(state)
    if rank:
        with torch.no_grad():
            state.model.body.weight.to_local()[0, 0] += 1e-2
    with pytest.raises(ValueError, match=r"'body.weight', but its values differ .* dp_replicate"):
        check_replicas(state)
    with (
        fk.Health(out, state.mesh, every=1) as health,
        pytest.raises(ValueError, match=r"'body.weight', but its values differ"),
    ):
        health(state)
    return True


def test_replicas_are_compared_again_now_and_then(tmp_path):
    assert run_ranks(_drift_later, 2, str(tmp_path)) == [True, True]


class _Counting(nn.Module):
    """Keeps what it has seen in buffers, each rank its own."""

    def __init__(self, buffer):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm = nn.BatchNorm1d(WIDTH) if buffer == "norm" else nn.Identity()
        self.from_step = {"later": 1, "norm": 0, "table": 0}[buffer]
        self.calls = 0
        self.register_buffer("seen", torch.zeros(3, 2), persistent=buffer != "table")

    def forward(self, x):
        self.calls += 1
        if self.calls > 2 * self.from_step and isinstance(self.norm, nn.Identity):
            self.seen += x.mean()
        return self.head(self.norm(self.body(x)).tanh())


def _own_buffers(rank, world, buffer, sizes):
    state = _state(_Counting(buffer).double(), sizes=sizes)
    row, _ = fk.data_ranks(state.mesh)
    raised = []
    for _ in range(2):
        try:
            state, _ = _step()(state, _batches(row))
            check_replicas(state)
        except ValueError as error:
            raised.append(str(error))
            break
    return raised, state.step


@pytest.mark.parametrize(("buffer", "step"), [("norm", 0), ("later", 2)])
def test_buffers_that_ranks_update_apart_are_refused_on_every_rank(buffer, step):
    """At the first step, or where replicas are compared again."""
    name = "norm.running_mean" if buffer == "norm" else "seen"
    for (message,), steps in run_again(_own_buffers, 2, buffer, {"dp_shard": 2}):
        assert f"ranks 0 and 1 hold the same part of '{name}', but its values differ" in message
        assert "along dp_shard. Likely cause: a buffer that each rank updates" in message
        assert steps == step


@pytest.mark.parametrize(
    ("buffer", "sizes"),
    [("table", {"dp_shard": 2}), ("norm", {"dp_shard": 1, "cp": 1, "tp": 2})],
    ids=["no checkpoint keeps it", "same rows"],
)
def test_buffers_that_are_the_same_or_kept_nowhere_pass(buffer, sizes):
    if "tp" in sizes:
        assert run_again(_norm_beside_tp, 2) == [2, 2]
    else:
        assert run_again(_own_buffers, 2, buffer, sizes) == [([], 2)] * 2


def _norm_beside_tp(rank, world):
    plan = {"body": "replicate", "norm": "replicate", "head": "replicate"}
    state = _state(_Counting("norm").double(), sizes={"tp": 2}, plan=plan)
    for _ in range(2):
        state, _ = _step()(state, _batches(0))
        check_replicas(state)
    return state.step


def _counts_apart(rank, world, sizes, when):
    """The second rank alone adds losses of different counts."""
    state, more = _state(_Model().double(), sizes=sizes), []

    def two_losses(model, batch):
        loss = _loss(model, batch)
        return loss + dataclasses.replace(loss, count=loss.count + sum(more))

    step = fk.make_step(two_losses, schedule=fk.constant(0.1))
    for index in range(when):
        state, _ = step(state, _batches(rank, seed=index))
    before = full_tensors(state.model)
    more += [1] * rank
    with pytest.raises((ValueError, RuntimeError)) as raised:
        step(state, _batches(rank, seed=when))
    after = full_tensors(state.model)
    with pytest.raises(ValueError, match=r"^rank 1 cannot add losses with counts 2 and 3"):
        fk.evaluate(state, _batches(rank, micros=1, seed=when), two_losses)
    return str(raised.value), all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}])
def test_losses_whose_counts_differ_on_one_rank_are_refused_on_all(sizes, when):
    """In the first step and in a later one."""
    for rank, (told, is_kept) in enumerate(run_ranks(_counts_apart, 2, sizes, when, timeout_s=20)):
        assert is_kept
        assert "cannot add losses with counts 2 and 3: a step divides by one count. " in told
        assert (rank == when == 1) or told.startswith("rank 1 ")


PLANS = {
    "styles": ({"body": "colwise", "head": "rowwise"}, {"body": "replicate", "head": "replicate"}),
    "order": ({"*": "replicate", "body": "heads"}, {"body": "heads", "*": "replicate"}),
    "torch's own": (
        {"body": ColwiseParallel(), "head": "rowwise"},
        {"body": ColwiseParallel(output_layouts=Replicate()), "head": "rowwise"},
    ),
}


def _other_plan(rank, world, kind, is_of_model):
    plan, model = PLANS[kind][rank], _Model()
    if is_of_model:
        model.plan = plan
    mesh = fk.build_mesh(fk.MeshSpec(tp=2), device="cpu")
    with pytest.raises(ValueError, match="ranks differ in plan: ") as caught:
        fk.parallelize(model, mesh, plan=None if is_of_model else plan)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "is_of_model"), [("styles", False), ("order", False), ("torch's own", True)]
)
def test_ranks_with_other_styles_are_refused(kind, is_of_model):
    first, second = run_again(_other_plan, 2, kind, is_of_model)
    assert first == second
    assert "0x" not in first


def _differing_option(rank, world, options):
    state = _state(_Model().double())
    name, values = options
    step = _step(**{name: values[rank]})
    with pytest.raises(ValueError, match="Use one configuration") as caught:
        step(state, _batches(rank))
    return str(caught.value)


@pytest.mark.parametrize(
    "options", [("max_norm", (1.0, 2.0)), ("spikes", (None, fk.SpikeLimit(3.0)))]
)
def test_ranks_with_other_options_are_refused(options):
    name, (a, b) = options
    for message in run_again(_differing_option, 2, options):
        assert message.startswith(f"ranks differ in {name}: {a!r} on rank 0, {b!r} on rank 1.")


def _own_loop(rank, world, audit):
    """Parts of a step, written out, with settings that differ between the ranks."""
    state = _state(_Model().double())
    totals = fk.accumulate(state, _batches(rank), _loss, audit=audit)
    try:
        fk.reduce_totals(totals, state, settings={"my own": rank})
    except ValueError as error:
        return str(error)
    return ""


def test_one_switch_leaves_out_all_proofs_of_a_first_step():
    for message in run_ranks(_own_loop, 2, True):
        assert message.startswith("ranks differ in my own: 0 on rank 0, 1 on rank 1.")
    assert run_again(_own_loop, 2, False) == ["", ""]


def _rows_later(rank, world):
    state = _state(_Model().double())
    state, first = _step()(state, _batches(rank))
    before = full_tensors(state.model)
    batches = [batch[: 3 - rank] for batch in _batches(rank, seed=1)]
    state, metrics = _step()(state, batches)
    after = full_tensors(state.model)
    is_kept = all(torch.equal(before[name], after[name]) for name in before)
    return float(first["skipped"]), float(metrics["skipped"]), is_kept


def test_rows_that_differ_after_the_first_step_make_a_bad_step_on_every_rank():
    assert run_ranks(_rows_later, 2) == [(0.0, 1.0, True)] * 2


def _rows_by_rank(rank, world, name):
    spec = attrs.evolve(SPEC, vocab_size=38)
    mesh = fk.build_mesh(fk.MeshSpec(**{name: 2}), device="cpu")
    model = fk.parallelize(fk.Transformer(spec).double(), mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    step = fk.make_step(logits_loss, schedule=fk.constant(0.1))
    before = full_tensors(state.model)
    with pytest.raises(ValueError, match=rf"along {name} only, .* forgekit.data_ranks\(mesh\)"):
        step(state, [_tokens(rank), _tokens(2)])
    after = full_tensors(state.model)
    assert all(torch.equal(before[n], after[n]) for n in before)
    state, metrics = step(state, [_tokens(2), _tokens(3)])
    return float(metrics["skipped"])


@pytest.mark.parametrize("change", ["shape", "dtype", "key", "value"])
def test_a_digest_of_rows_tells_all_of_them(change):
    """Of the same bytes in another shape or dtype, too."""
    batch = _tokens(2)
    ids = batch["input_ids"]
    other = {
        "shape": {"input_ids": ids.reshape(2, 8, 2), "labels": batch["labels"]},
        "dtype": {"input_ids": ids.view(torch.float64), "labels": batch["labels"]},
        "key": {"inputs": ids, "labels": batch["labels"]},
        "value": {"input_ids": ids + (ids == ids.max()), "labels": batch["labels"]},
    }[change]
    assert digest_rows(batch) == digest_rows(_tokens(2))
    assert digest_rows(batch) != digest_rows(TensorDict(other, [2]))
    nested, changed = (TensorDict({"image": b}, [2]) for b in (batch, TensorDict(other, [2])))
    assert digest_rows(nested) == digest_rows(TensorDict({"image": _tokens(2)}, [2]))
    assert digest_rows(nested) != digest_rows(changed)


def _tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(38, (2, 17), generator=generator)
    return TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:].clone()}, [2])


@pytest.mark.parametrize("name", ["tp", "cp", "pp"])
def test_ranks_that_share_rows_and_bring_different_ones_are_refused(name):
    assert run_again(_rows_by_rank, 2, name) == [0.0, 0.0]


def _forgotten(rank, world):
    model = _Model().double()
    with pytest.raises(ValueError, match=r"2 ranks and the state got no mesh.*mesh=mesh"):
        fk.TrainState.create(model, fk.adamw(model))
    return True


def test_a_forgotten_mesh_beside_a_plain_model_is_refused():
    assert run_again(_forgotten, 2) == [True, True]


def test_a_metric_lets_its_graph_go():
    """The graph of a micro-batch is freed by its backward; a metric with a graph keeps it."""
    model = _Model().double()
    state = fk.TrainState.create(model, fk.adamw(model))
    alive, seen = [], []

    class Watched:  # what a graph holds as long as it lives
        pass

    def loss_fn(model, batch):
        seen.append(sum(reference() is not None for reference in alive))
        loss = _loss(model, batch)
        metric, watched = loss.sum * 2, Watched()
        metric.grad_fn.metadata["watched"] = watched
        alive.append(weakref.ref(watched))
        return dataclasses.replace(loss, metrics={"twice": (metric, loss.count)})

    totals = fk.reduce_totals(fk.accumulate(state, _batches(0, 3), loss_fn), state)
    metrics = fk.step_metrics(totals, fk.clip(totals), lr=0.0)
    assert seen == [0, 0, 0]
    assert float(metrics["twice"]) == pytest.approx(2 * float(metrics["loss"]))
