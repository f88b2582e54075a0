"""Saving and loading in one process: what comes back bitwise, and what is refused at the save."""

from __future__ import annotations

import json
import math
from collections import OrderedDict

import attrs
import numpy as np
import pytest
import torch
from lab import train
from safetensors.torch import load_file
from saved import Elsewhere, Own, adamw, assert_same, everything, momentum, rewrite, save
from torch import nn
from torch.optim import Adafactor, Adam, AdamW, Optimizer

import forgekit as fk
from forgekit.checkpoints.state_dict import model_tensors
from forgekit.safetensors_files import DTYPES


class Net(nn.Module):
    """Tied weights, a parameter that is never used, and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, rows):
        self.seen += len(rows)
        return self.second(self.first(rows).tanh())


def build(seed=0, optimizer=adamw, cls=fk.TrainState, **fields):
    torch.manual_seed(seed)
    model = Net()
    return cls.create(model, optimizer([*model.parameters()]), seed=seed, **fields)


class Stateless(Own):
    stateless = True

    def __init__(self, parameters):
        super().__init__(parameters, momentum=0.0)


class Sharing(Optimizer):
    """A wrapper of one, whose state it shares."""

    def __init__(self, parameters):
        self.inner = momentum(parameters)
        super().__init__(self.inner.param_groups, {})
        self.state = self.inner.state

    def step(self):
        self.inner.step()


class Several(Sharing):
    """The common wrapper: an empty state of its own."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.inner, self.state = {"a": [self.inner]}, {}

    def step(self):
        self.inner["a"][0].step()


def chain_with(make):
    return lambda parameters: fk.chain_optimizers(momentum(parameters[:1]), make(parameters[1:]))


OPTIMIZERS = {
    "momentum": momentum,
    "fused adamw": adamw,
    "amsgrad": lambda p: Adam(p, lr=0.1, amsgrad=True),
    "adafactor": lambda p: Adafactor(p, lr=0.1),
    "of one's own": Own,
    "without state": Stateless,
    "a member without state": chain_with(Stateless),
    "a wrapper of one": Sharing,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_resumed_training_is_bitwise_the_same(tmp_path, optimizer):
    straight = train(build(optimizer=optimizer), 5)
    state = train(build(optimizer=optimizer), 3)
    pending = fk.checkpoint_save(state, tmp_path)
    assert pending.wait() == tmp_path / "step_00000003"
    assert_same(everything(train(state, 2)), everything(straight))  # saving consumes nothing
    fresh = build(seed=1, optimizer=optimizer)
    resumed = train(fk.checkpoint_load(fresh, tmp_path), 2)
    assert_same(everything(resumed), everything(straight))
    assert resumed.seed == 0
    assert resumed.model.second.weight is resumed.model.first.weight
    with pytest.raises(fk.DonatedStateError, match=r"donated at test_checkpoint\.py"):
        _ = fresh.step


def test_moments_are_cleared_and_find_their_parameters_in_another_order(tmp_path):
    fk.checkpoint_save(build(), tmp_path / "without", blocking=True)
    state = fk.checkpoint_load(train(build(), 2), tmp_path / "without")
    assert not state.optimizer.state
    assert_same(everything(state := train(state, 2)), everything(train(build(), 2)))
    save(tmp_path, 2, state=state)
    fresh = build(1, lambda parameters: AdamW(parameters[::-1], lr=0.1, fused=True))
    assert_same(everything(fk.checkpoint_load(fresh, tmp_path)), everything(state))


def test_any_tool_opens_a_checkpoint_which_has_tied_weights_once_and_no_cache(tmp_path):
    state = save(tmp_path, 1, state=build())
    path = tmp_path / "step_00000001"
    assert {file.name for file in path.iterdir()} == {"manifest.json", "rank_00000.safetensors"}
    tensors = load_file(path / "rank_00000.safetensors")
    expected = {**model_tensors(state.model)}
    for key, value in state.optimizer.state[state.model.first.weight].items():
        expected[f"optimizer.first.weight.{key}"] = value
    assert {key for key in tensors if not key.startswith("state.")} == expected.keys()
    assert_same({key: tensors[key] for key in expected}, expected)
    assert json.loads((path / "manifest.json").read_text())["fields"]["step"] == 1


# Fields


class Stream:
    """A stateful stream whose position holds everything that JSON would change."""

    def __init__(self, position=None):
        self.position = position

    def state_dict(self):
        return self.position

    def load_state_dict(self, position):
        self.position = position


@attrs.frozen(kw_only=True, slots=True, eq=False)
class RichState(fk.TrainState):
    """One field of each kind; ``phase`` came after some checkpoints had been written."""

    ema: nn.Module
    stream: Stream = attrs.field(metadata={"optional": True})
    phase: torch.Tensor = attrs.field(metadata={"optional": True})
    name: str = ""
    note: str | None = None
    frozen: object = attrs.field(default=None, metadata={"checkpoint": False})


def rich(stream=None, phase=0.0, seed=5, **fields):
    fields |= {"ema": Net(), "stream": Stream(stream), "phase": torch.tensor(phase)}
    return build(seed, cls=RichState, **fields)


def odd_values():
    """Each dtype in two shapes, what no decimal notation keeps, and one value several times."""
    values = {}
    for dtype in DTYPES:
        whole = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
        values |= {f"{dtype} 2-D": whole, f"{dtype} 0-D": whole[0, 1].clone()}
    payload = torch.tensor(0x7FF8_0000_0000_1234, dtype=torch.int64).view(torch.float64)
    shared = torch.arange(4.0)
    return values | {
        "0-d float64": torch.tensor(1 / 3, dtype=torch.float64),
        "a NaN with a payload": payload,
        "negative zero": torch.tensor(-0.0),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "shared": shared,
        "again": shared,
        "a part": shared[1:],
    }


def bits(tensor):
    content = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return tensor.shape, tensor.dtype, content


def test_every_kind_of_field_and_every_dtype_comes_back_exactly(tmp_path, caplog):
    one, other = torch.arange(3), torch.ones(2, dtype=torch.bfloat16)
    position = {0: [1, (2.5, None)], "a": {"b": one}, "a.b": other, "odd": odd_values()}
    position |= {True: OrderedDict(x=2**70), "inf": math.inf}
    mine, state = object(), rich(position, 1 / 3, name="run", frozen=object())
    state = fk.donate(state, skipped=state.skipped + 2, loss_scale=state.loss_scale / 4, seed=2**63)
    assert fk.checkpoint_save(state, tmp_path, blocking=True).done
    new = fk.checkpoint_load(rich(seed=6, note="x", frozen=mine), tmp_path)
    assert (new.name, new.note, new.frozen) == ("run", None, mine)
    assert (new.skipped.item(), new.loss_scale.item(), new.seed) == (2, 2.0**-14, 2**63)
    assert bits(new.phase) == bits(state.phase)
    assert_same(model_tensors(new.ema), model_tensors(state.ema))
    loaded = new.stream.position
    assert (loaded[0], loaded["inf"], loaded[True]) == ([1, (2.5, None)], math.inf, {"x": 2**70})
    assert bits(loaded["a"]["b"]) == bits(one)
    assert bits(loaded["a.b"]) == bits(other)
    odd = {name: bits(value) for name, value in loaded["odd"].items()}
    assert odd == {name: bits(value) for name, value in odd_values().items()}
    fk.checkpoint_load(build(), tmp_path)
    assert "fields that the state does not: ema, name, note, phase, stream" in caplog.text


def test_optional_fields_keep_their_values_where_a_checkpoint_lacks_them(tmp_path):
    def without(manifest):
        for name in ("good_steps", "phase", "stream"):
            del manifest["fields"][name]

    state = save(tmp_path, 1, state=rich({"at": 4}))
    rewrite(tmp_path / "step_00000001", without)
    new = fk.donate(rich({"at": 7}, 6.0), good_steps=torch.tensor(8))
    new = fk.checkpoint_load(new, tmp_path)
    assert (new.step, new.good_steps, new.phase, new.stream.position) == (1, 8, 6, {"at": 7})
    assert_same(model_tensors(new.model), model_tensors(state.model))


# Parts of a checkpoint


def test_a_model_alone_starts_a_new_run_whatever_optimizer_and_data_were(tmp_path):
    old = everything(save(tmp_path, 3, state=build(), fingerprint="books"))
    # An optimizer that holds others could not be saved; here it does not matter.
    state = train(build(seed=1, optimizer=Several), 1)
    before = everything(state)
    loaded = fk.checkpoint_load(state, tmp_path, fingerprint="poems", parts=("model",))
    assert loaded.seed == 1
    models = [name for name in before if name.startswith("model.")]
    assert len(models) == 3
    assert_same(everything(loaded), before | {name: old[name] for name in models})
    with pytest.raises(ValueError, match=r"must include the model and be among \['model', "):
        fk.checkpoint_load(loaded, tmp_path, parts="model")


def test_another_optimizer_goes_on_at_the_same_step(tmp_path):
    old = save(tmp_path, 3, state=build())
    loaded = fk.checkpoint_load(build(optimizer=momentum), tmp_path, parts=("model", "fields"))
    by_hand = build(optimizer=momentum)
    by_hand.model.load_state_dict(old.model.state_dict())
    by_hand = fk.donate(by_hand, step=3, samples=12)
    assert_same(everything(train(loaded, 2)), everything(train(by_hand, 2)))


# What would be lost


class OfNone(Own):
    """Keeps something that belongs to no parameter."""

    def step(self):
        self.state["global"]["k"] = 1


def trained_with(optimizer):
    return lambda: train(build(optimizer=optimizer), 2)


LOST = r"^Elsewhere has no state after step 2; .* stateless = True in its class\.$"
HOLDS = r"^Several holds SGD in 'inner', .* with forgekit.chain_optimizers"
REFUSED = {
    "an array": (lambda: rich({"a": [np.ones(2)]}), r"^state\.stream\.a\.0 is a ndarray; "),
    "a key": (lambda: rich({(1, 2): 3}), r"^state\.stream is a dict; .* or leave it out"),
    "complex numbers": (lambda: rich(torch.ones(2).cdouble()), r"\.stream is torch\.complex128, "),
    "state of no parameter": (trained_with(OfNone), r"under 'global'.* in optimizer\.state"),
    "an optimizer that holds others": (trained_with(Several), HOLDS),
    "one in a chain": (trained_with(lambda p: fk.chain_optimizers(Several(p))), HOLDS),
    "state that is elsewhere": (trained_with(Elsewhere), LOST),
    "a member's": (trained_with(chain_with(Elsewhere)), LOST),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_checkpoint_would_lose_is_named_before_anything_is_written(tmp_path, make, message):
    with pytest.raises(TypeError, match=message):
        fk.checkpoint_save(make(), tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_an_optimizer_has_no_state_before_its_first_good_step(tmp_path):
    state = fk.donate(build(optimizer=Elsewhere), step=2, skipped=torch.tensor(2))
    fk.checkpoint_save(state, tmp_path, blocking=True)


def test_the_average_is_not_saved_in_the_place_of_the_weights(tmp_path):
    state = build(average=fk.EMA(0.9))
    with fk.averaged(state), pytest.raises(ValueError, match=r"within forgekit\.averaged"):
        fk.checkpoint_save(state, tmp_path)
    assert not list(tmp_path.iterdir())
    fk.checkpoint_save(state, tmp_path, blocking=True)
