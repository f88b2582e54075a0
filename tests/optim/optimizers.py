"""The table of optimizers that every contract is tested for, and steps with given gradients.

Gradients are given, not computed: a function of a parameter's name and the step, so that layouts
differ in nothing but how tensors are sharded.
"""

from __future__ import annotations

import zlib
from functools import partial

import torch
from lab import full
from tensordict import TensorDict
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import forgekit as fk

SIZES = {"vocab_size": 22, "dim": 24, "heads": 6, "kv_heads": 2, "ffn_dim": 22, "max_seq_len": 8}
"""22 rows are shared evenly neither by three ranks nor by four."""


def join(model):
    """Matrices to Muon, all else to Lion: a chain of our own."""
    muon = fk.muon(model, ns_dtype=torch.float64).members[0]
    taken = {p for group in muon.param_groups for p in group["params"]}
    rest = fk.lion(model, weight_decay=0.1)
    for group in rest.param_groups:
        group["params"] = [p for p in group["params"] if p not in taken]
    return fk.chain_optimizers(muon, rest)


def subtract_mean(directions, state, at):
    """Whole: reads the values too, and its state is smaller than a matrix."""
    means = [m.lerp(d.mean(), 0.5) for m, d in zip(state["means"], directions, strict=True)]
    pairs = zip(directions, means, at.values, strict=True)
    return [(d - m) * (1 + w.mean(0)) for d, m, w in pairs], {"means": means}


def divide_by_norm(directions, state, at):
    """Summed: of each whole parameter."""
    norms = [n.sqrt() for n in at.total([d.square().sum() for d in directions])]
    return [d / n.clamp(min=1e-9) for d, n in zip(directions, norms, strict=True)], state


OWN = (
    fk.optim.transform(subtract_mean, state={"means": lambda w: w.new_zeros(())}, whole=True),
    fk.optim.transform(divide_by_norm),
)
parts = fk.optim
CENTER = parts.transform(lambda d, state, at: ([x - x.mean() for x in d], state), whole=True)
EXACT = {"dtype": torch.float64, "coefficients": "polar_express"}
CHAINS = {
    "normuon": {
        "matrix": (
            parts.momentum(warmup=3),
            parts.orthogonal(**EXACT),
            parts.row_norm(),
            parts.cautious_decay(),
        ),
        "*": (parts.adam(), parts.decay(), parts.scale(2.0)),
    },
    "soap": {
        "matrix": (parts.soap(every=3), parts.clip_value(3.0), parts.decay()),
        "norm": (parts.lion_sign(),),
        "*": (
            parts.adam(),
            parts.cautious_mask(),
            parts.trust_ratio(),
            parts.clip_norm(0.5),
            parts.decay(),
        ),
    },
    "own": {
        "matrix": (parts.momentum(nesterov=False), *OWN, CENTER, OWN[1], parts.decay()),
        "embedding": (parts.adafactor(), parts.momentum()),
        "*": (OWN[1], parts.adam(), parts.decay()),
    },
}


def compose(name):
    """Some queries of NorMuon's are two matrices each."""
    split = {"*.query.weight": (16, 8)} if name == "normuon" else None
    return lambda model: fk.optimizer(model, CHAINS[name], split=split)


BUILDERS = {
    "adamw": lambda model: fk.adamw(model, weight_decay=0.1),
    "stochastic": lambda model: fk.adamw(model, weight_decay=0.1, stochastic_rounding=True, seed=4),
    "muon": lambda model: fk.muon(model, weight_decay=0.1, ns_dtype=torch.float64),
    "lion": lambda model: fk.lion(model, weight_decay=0.1),
    "schedule_free": lambda model: fk.schedule_free(model, weight_decay=0.1),
    "chain": join,
    **{name: compose(name) for name in CHAINS},
}
DTYPES = dict.fromkeys(BUILDERS, torch.float64) | {"stochastic": torch.bfloat16}


def build(dtype=torch.float64, *, moe=False, mesh=None, layers=1):
    experts = fk.MoESpec(experts=6, top_k=2, ffn_dim=10, shared=1) if moe else None
    spec = fk.TransformerSpec(**SIZES, layers=layers, qk_norm=True, qkv_bias=True, moe=experts)
    model = fk.Transformer(spec, seed=1).to(dtype)
    return model if mesh is None else fk.parallelize(model, mesh)


def step_with(model, optimizer, step, *, bad=False, lr=0.01):
    """One step with the gradients of a number; a bad one has NaN and is skipped on the device."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
        if "state_step" in group:
            group["state_step"] = step
    for name, parameter in model.named_parameters():
        whole = draw(*parameter.shape, seed=zlib.crc32(f"{name}/{step}".encode()))
        whole = (whole * (torch.nan if bad else 1.0)).to(parameter.dtype)
        parameter.grad = whole
        if isinstance(parameter, DTensor):
            where = parameter.device_mesh, parameter.placements
            parameter.grad = distribute_tensor(whole, *where, src_data_rank=None)
    optimizer.found_inf = torch.tensor(float(bad))
    try:
        optimizer.step()
    finally:
        optimizer.found_inf = None


def parameters_of(model):
    return {name: full(p.detach()).clone() for name, p in model.named_parameters()}


def entries_of(model, optimizer):
    """Tensors of the optimizer's state, whole, by parameter and entry; what owners hold, theirs."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = full(value).clone()
            elif isinstance(value, dict):
                found |= {f"{name}.{key}.{n}": tensor.clone() for n, tensor in value.items()}
    return found


def assert_close(found, expected, bound=0.0):
    """Tensors by name: the same bits unless there is a bound."""
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def small_model(dtype=torch.float64):
    """Two matrices and two biases, which ``square_loss`` trains on ``rows``."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def square_loss(model, batch):
    error = (model(batch["x"]) - batch["y"]).square()
    return fk.Loss(error.sum(), torch.tensor(error.numel()))


def rows(index, scale=1.0, dtype=torch.float64):
    """The micro-batch of a number; each is another."""
    make = partial(torch.randn, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    return TensorDict({"x": make(4, 5), "y": scale * make(4, 3)}, [4]).to(dtype)
