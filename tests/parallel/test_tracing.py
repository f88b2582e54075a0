"""What pipeline stages cannot compute together is refused before the first update."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from forms import WIDTH, WORDS, Aux, Form, Mix, ValueResidual
from tensordict import TensorDict
from torch import nn

from forgekit.parallel.pipeline.split import split_model
from forgekit.parallel.pipeline.stage_tensors import Flow
from forgekit.parallel.pipeline.tracing import join, rehearse, restored


def _rehearse(model, loss=lambda out: [out], stages=2):
    pieces = split_model(model, "layers", stages, list(range(stages)))
    ids = torch.arange(10).reshape(2, 5)
    reports, outputs = [], {}
    for relay, module in zip(pieces.relays, pieces.modules, strict=True):
        with restored(module, pieces.shared):
            report = rehearse(
                relay,
                Flow(outputs),
                lambda module=module: module(ids),
                loss,
                given=ids.shape,
                device=ids.device,
                parameters=module.parameters(),
            )
        reports.append(report)
        outputs = {**outputs, **report.outputs}
    return join(reports, pieces.holders)


def blocks(forward):
    """A block that computes something of its own."""
    return type("Own", (Mix,), {"forward": forward})


def form(forward, *, block=Mix, **also):
    """A model whose forward, or whose parts, are something of its own."""
    return type("Model", (Form,), {"forward": forward, "block": block, **also})


def _keep_in_attribute(self, x):
    self.aux = Mix.forward(self, x).square().mean()
    return Mix.forward(self, x)


def _sum_attributes(self, ids):
    out = Form.forward(self, ids)
    return out * sum(layer.aux for layer in self.layers)


def _append(self, x, found):
    found.append(Mix.forward(self, x).mean())
    return x + found[-1]


def _with(container):
    def forward(self, ids):
        x, found = self.embed(ids), container()
        for layer in self.layers:
            x = layer(x, found)
        return self.top(x)

    return forward


def _note(self, x, found):
    found.last = Mix.forward(self, x)
    return x + found.last.mean()


def _append_detached(self, x, found):
    out = Mix.forward(self, x)
    found.append(out.detach())
    return out


def _note_detached(self, x, found):
    out = Mix.forward(self, x)
    found.last = out.detach()
    return out


def _enter_detached(self, x, found):
    out = Mix.forward(self, x)
    found["last"] = [out.detach()]
    return out


def _take_out(self, x, found):
    return Mix.forward(self, x) * found.pop()


def _with_scales(self, ids):
    x, scales = self.embed(ids), [torch.full((), float(n)) for n in range(len(self.layers))]
    for layer in self.layers:
        x = layer(x, scales)
    return self.top(x)


def _loop(step):
    """A forward with something done at each block."""

    def forward(self, ids):
        x = self.embed(ids)
        for n, layer in enumerate(self.layers):
            x = step(self, n, layer, x)
        return self.top(x)

    return forward


def _scales(self):
    self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(6))


def _norms(self):
    self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))


def _drop(self):
    self.drop = nn.Dropout(0.1)


def _stem(self):
    self.stem = nn.Linear(WIDTH, WIDTH)


def _batch_norm(self):
    self.norm = nn.BatchNorm1d(5, affine=False)


def _counter(self):
    self.register_buffer("seen", torch.zeros(()))


def _count(self, ids):
    self.seen += ids.numel()
    return Form.forward(self, ids)


def _count_anew(self, ids):
    self.seen = self.seen + ids.numel()
    return Form.forward(self, ids)


def _twice(self, ids):
    x = self.embed(ids)
    for layer in [*self.layers, *self.layers]:
        x = layer(x)
    return self.top(x)


def _noisy(self, ids):
    x = noise = F.dropout(self.embed(ids), 0.1)
    for layer in self.layers:
        x = layer(x) + noise
    return self.top(x)


def _in_place(self, x):
    x += Mix.forward(self, x)
    return x


def _apart(self, ids):
    found = [layer(torch.ones(2, len(ids[0]), WIDTH)) for layer in self.layers]
    return self.top(found[-1])


class _Inner(Form):
    """A part that is also inside of the blocks."""

    def after(self):
        self.inside = self.layers[0].inner[0]

    forward = _loop(lambda self, n, layer, x: layer(x) if n else layer(self.inside(x)))


def _helped(self, x):
    return Mix.forward(self, self.helpers[0](x) if hasattr(self, "helpers") else x)


class _Helper(form(Form.forward, block=blocks(_helped))):
    """A part of the model that a block reaches past the list of its own modules."""

    def before(self):
        self.helper = nn.Linear(WIDTH, WIDTH)

    def after(self):
        self.layers[0].helpers = [self.helper]


def _two_draws(self, ids):
    x = F.dropout(self.embed(ids), 0.1)
    for layer in self.layers:
        x = layer(x)
    return self.top(F.dropout(x, 0.1))


def _early_weight(self, ids):
    weight, x = self.top.weight, self.embed(ids)
    for layer in self.layers:
        x = layer(x)
    return F.linear(x, weight)


def _by_foreach(self, ids):
    x = self.embed(ids)
    for layer in self.layers:
        sums = [torch.zeros(x.shape)]
        torch._foreach_add_(sums, [layer(x)])  # returns nothing
        (x,) = sums
    return self.top(x)


REFUSED = {
    "a loss in an attribute": (
        form(_sum_attributes, block=blocks(_keep_in_attribute)),
        r"layers\.0 keeps a differentiable tensor of shape \(\) which it does not return",
    ),
    "a loss in a list that is passed along": (
        form(_with(list), block=blocks(_append)),
        r"layers\.0 keeps a differentiable tensor of shape \(\) .*Return it, detach it",
    ),
    "states in an object that is passed along": (
        form(_with(SimpleNamespace), block=blocks(_note)),
        r"layers\.0 keeps a differentiable tensor of shape \(2, 5, 6\) which it does not return",
    ),
    "detached states in a list that is passed along": (
        form(_with(list), block=blocks(_append_detached)),
        r"layers\.0 puts a tensor into a list, a dictionary or an object that it is given",
    ),
    "detached states in an object that is passed along": (
        form(_with(SimpleNamespace), block=blocks(_note_detached)),
        r"layers\.0 puts a tensor into a list, a dictionary or an object that it is given",
    ),
    "detached states in a dictionary that is passed along": (
        form(_with(dict), block=blocks(_enter_detached)),
        r"layers\.0 puts a tensor into a list, .* Return it, or use pp=1",
    ),
    "scales that are taken out of a list": (
        form(_with_scales, block=blocks(_take_out)),
        r"layers\.0 puts a tensor into a list, .* or takes one out, which no other pipeline stage",
    ),
    "scales in a list of parameters": (
        form(_loop(lambda self, n, layer, x: layer(x) * self.scales[n]), before=_scales),
        r"scales, which another pipeline stage holds, is indexed; .* move it into the blocks",
    ),
    "norms in a list of modules": (
        form(_loop(lambda self, n, layer, x: layer(self.norms[n](x))), before=_norms),
        r"norms\.5, which pipeline stage 0 holds, is called in stage 1 and was not called in its",
    ),
    "norms in a list after the blocks": (
        form(_loop(lambda self, n, layer, x: layer(self.norms[n](x))), after=_norms),
        r"layers\.0, which pipeline stage 0 holds, is called in stage 1 and was not called",
    ),
    "one dropout between all blocks": (
        form(_loop(lambda self, n, layer, x: self.drop(layer(x))), before=_drop),
        r"drop, which pipeline stage 0 holds, is called in stage 1 .* registered before the list",
    ),
    "a stem that is registered last": (
        form(_loop(lambda self, n, layer, x: layer(x if n else self.stem(x))), after=_stem),
        r"layers\.0, which pipeline stage 0 holds, .* what follows it to the last",
    ),
    "blocks that run twice": (form(_twice), r"layers\.0, which pipeline stage 0 holds"),
    "a look at the stream": (
        form(_loop(lambda self, n, layer, x: layer(x) if x.abs().max() < 9 else x)),
        r"reads a number from what its blocks computed .* Use torch\.where",
    ),
    "noise that all blocks take": (
        form(_noisy),
        "draws random numbers outside of its modules .* each would draw its own",
    ),
    "a counter of the model's own": (
        form(_count, before=_counter),
        "forward changes the buffer 'seen' of Model, which each pipeline stage has",
    ),
    "a counter that is replaced": (
        form(_count_anew, before=_counter),
        "forward changes the buffer 'seen' of Model, which each pipeline stage has",
    ),
    "statistics between the blocks": (
        form(_loop(lambda self, n, layer, x: self.norm(layer(x))), before=_batch_norm),
        "forward changes the buffer 'running_mean' of BatchNorm1d, which each pipeline stage",
    ),
    "a block that works in place": (
        form(Form.forward, block=blocks(_in_place)),
        r"layers\.0 changes a tensor in place that it is given.* Write x = x \+ y",
    ),
    "a block that returns an object": (
        form(Form.forward, block=blocks(lambda self, x: SimpleNamespace(x=x))),
        "a pipeline stage cannot send a SimpleNamespace. Return tensors from the blocks",
    ),
    "a block that returns a TensorDict": (
        form(Form.forward, block=blocks(lambda self, x: TensorDict({"x": x}, [2]))),
        "a pipeline stage cannot send a TensorDict. Return tensors from the blocks",
    ),
    "a block whose inside is called": (
        form(_loop(lambda self, n, layer, x: layer.inner[0](x))),
        r"layers\.4, which another pipeline stage holds, is read for 'inner'",
    ),
    "an embedding's weight": (
        form(_loop(lambda self, n, layer, x: layer(x + self.embed.weight[0]))),
        r"embed, which another pipeline stage holds, is read for 'weight'",
    ),
    "a part inside of another": (
        _Inner,
        r"inside is called inside of layers\.0, and both are parts|are one tensor",
    ),
    "a part that a block calls": (
        _Helper,
        r"helper is called inside of layers\.0, and both are parts of the pipelined model",
    ),
    "a forward that calls the first stage's parts only": (
        form(lambda self, ids: self.layers[0](self.embed(ids))),
        r"forward ended in pipeline stage 0 without a call of a later stage's part\. Call each",
    ),
    "stages that do nothing for later ones": (
        form(_apart),
        "nothing that pipeline stages up to 0 compute reaches a later one",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_cannot_share_is_refused(name):
    model, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError, AttributeError), match=message):
        _rehearse(model(6))


def test_what_is_only_looked_at_may_be_kept():
    def looked_at(self, x):
        self.seen = Mix.forward(self, x).detach()
        return Mix.forward(self, x)

    assert _rehearse(form(Form.forward, block=blocks(looked_at))(4)).travels == [
        [("layers.2", 0, 0)]
    ]


def test_what_a_thread_lets_go_of_soon_is_not_kept():
    """As a thread of gloo does with what it has sent."""

    def sent(self, x):
        threading.Timer(0.1, lambda _: None, [x * 2]).start()
        return Mix.forward(self, x)

    flow = _rehearse(form(Form.forward, block=blocks(sent))(4))
    assert flow.travels == [[("layers.2", 0, 0)]]


@pytest.mark.parametrize("forward", [_two_draws, _early_weight, _by_foreach])
def test_what_one_stage_alone_depends_on_is_no_matter_of_the_others(forward):
    """Draws of its own, a weight that another stage reads and does not use, sums in place."""
    assert _rehearse(form(forward)(4)).travels == [[("layers.2", 0, 0)]]


def test_only_what_is_needed_travels():
    flow = _rehearse(ValueResidual(6), stages=3)
    assert flow.travels == [
        [("layers.0", 0, 1), ("layers.1", 0, 0)],
        [("layers.0", 0, 1), ("layers.3", 0, 0)],
    ]
    flow = _rehearse(Aux(4), loss=lambda out: [out[0]])  # a loss that leaves the rest out
    assert flow.travels == [[("layers.2", 0, 0)]]
    flow = _rehearse(Aux(4), loss=list)
    sums = [(f"layers.{n}", 0, 1) for n in range(3)]
    assert flow.travels == [sorted([*sums, ("layers.2", 0, 0)])]


def test_a_rehearsal_leaves_buffers_and_numbers_as_they_were():
    class Counting(Mix):
        def __init__(self, takes):
            super().__init__(takes)
            self.norm = nn.BatchNorm1d(WIDTH)
            self.register_buffer("steps", torch.ones(()))
            self.register_buffer("last", torch.full((2,), float("nan")))
            self.calls = 3

        def forward(self, x):
            self.steps += 1
            self.last = x.detach()[0, 0, :2]
            self.calls += 1
            self.begun = getattr(self, "begun", 0) + 1
            return super().forward(self.norm(x.mT).mT)

    model = form(Form.forward, block=Counting)(4)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kept = dict(model.named_buffers())
    held = list(model.layers)
    _rehearse(model)
    for layer in held:
        assert layer.calls == 3
        assert not hasattr(layer, "begun")
    after = {f"layers.{n}.{b}": t for n, layer in enumerate(held) for b, t in layer.named_buffers()}
    assert after.keys() == before.keys()
    for name, buffer in after.items():
        assert buffer is kept[name]
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0, equal_nan=True)


def test_a_rehearsal_that_fails_leaves_buffers_as_they_were():
    model = form(_count, before=_counter)(4)
    with pytest.raises(ValueError, match="forward changes the buffer 'seen'"):
        _rehearse(model)
    assert float(model.seen) == 0


def test_hooks_of_a_rehearsal_are_gone_after_it():
    model = Form(4)
    parts = [model.embed, *model.layers, model.top]
    _rehearse(model)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in parts)


def _closure(model):
    weight = model.top.weight
    return lambda out: [out.sum() + weight.square().sum()]


def test_a_parameter_that_a_loss_takes_from_around_it_is_refused():
    model = Form(4)
    with pytest.raises(ValueError, match="loss_fn reads a parameter of the model; in a pipeline"):
        _rehearse(model, loss=_closure(model))


def test_what_a_head_does_with_weights_inside_the_forward_is_fine():
    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.top.weight) + WORDS

    assert _rehearse(form(forward)(4)).travels == [[("layers.2", 0, 0)]]
