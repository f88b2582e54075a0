"""What experts cost beside a dense layer that multiplies as much, and beside transformers' block.

Forward and backward, to the input too. Tokens go to two experts each, 512 to each of eight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
import torch
from pairs import Times, band, ratio, take_turns
from torch import Tensor, nn

import forgekit as fk
from forgekit.model.layers import FeedForward
from forgekit.model.moe import Experts, MoE

DIM, WIDTH, ROWS, TOP_K = 256, 512, 4096, 2
ROUNDS = 40
DENSE, AGAIN = "dense layer", "dense layer again"
GROUPED, MANY = "8 experts", "64 experts"
THEIRS, EAGER = "transformers, grouped", "transformers, eager"


def passes(module: nn.Module, x: Tensor, *more: Any) -> Callable[[], Tensor]:
    """Build a forward and backward pass of a module."""
    x = x.clone().requires_grad_()
    gradient = torch.randn_like(x)

    def run() -> Tensor:
        module.zero_grad()
        x.grad = None
        out = module(x, *more)
        out.backward(gradient)
        return out.detach()

    return run


def filled(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Draw parameters."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=DIM**-0.5, generator=generator)
    return module.to(dtype)


def products(dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Grouped products of sorted rows, and a dense layer on as many rows."""
    x = torch.randn(ROWS, DIM, dtype=dtype)
    entries = {name: passes(filled(FeedForward(DIM, WIDTH), dtype), x) for name in (DENSE, AGAIN)}
    for name, experts in ((GROUPED, 8), (MANY, 64)):
        counts = torch.full((experts,), ROWS // experts)
        entries[name] = passes(filled(Experts(DIM, WIDTH, experts), dtype), x, counts)
    return entries


def blocks(dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Whole layers: router, sorting, products, sum; a dense one that is as wide as two experts."""
    x = torch.randn(4, ROWS // TOP_K // 4, DIM, dtype=dtype)
    entries = {
        name: passes(filled(FeedForward(DIM, TOP_K * WIDTH), dtype), x) for name in (DENSE, AGAIN)
    }
    ours = {}
    for name, experts in ((GROUPED, 8), (MANY, 64)):
        spec = fk.MoESpec(experts=experts, top_k=TOP_K, ffn_dim=WIDTH, shared=0)
        ours[name] = filled(MoE(DIM, spec, "layer"), dtype)
        entries[name] = passes(ours[name], x)
    for name, way in ((THEIRS, "grouped_mm"), (EAGER, "eager")):
        entries[name] = passes(_of_transformers(ours[GROUPED], way), x)
    if dtype == torch.float32:
        outs = [entries[name]() for name in (GROUPED, THEIRS, EAGER)]
        assert all(torch.allclose(out, outs[0], atol=1e-5) for out in outs), "not the same layer"
    return entries


def _of_transformers(ours: Any, way: str) -> nn.Module:
    """The block of Qwen3-MoE with the same weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=DIM,
        moe_intermediate_size=WIDTH,
        num_experts=8,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
    )
    config._experts_implementation = way
    block = Qwen3MoeSparseMoeBlock(config).to(ours.router.weight.dtype)
    experts = ours.experts
    with torch.no_grad():
        block.gate.weight.copy_(ours.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat((experts.gate, experts.up), dim=1))
        block.experts.down_proj.copy_(experts.down)
    return block


@attrs.frozen
class Case:
    """What is measured, and the most that each entry may take of another one."""

    entries: Callable[[torch.dtype], Mapping[str, Callable[[], Tensor]]]
    dtype: torch.dtype
    most: Mapping[tuple[str, str], float] = {}


CASES = {
    "grouped products": Case(products, torch.float32, {(GROUPED, DENSE): 1.15}),
    "layer": Case(
        blocks,
        torch.float32,
        {(GROUPED, DENSE): 1.35, (GROUPED, THEIRS): 1.03, (GROUPED, EAGER): 1.0},
    ),
    "grouped products, bfloat16": Case(products, torch.bfloat16),
    "layer, bfloat16": Case(blocks, torch.bfloat16),
}
ENTRIES = [
    (case, name)
    for case in CASES
    for name in (DENSE, AGAIN, GROUPED, MANY, *((THEIRS, EAGER) if "layer" in case else ()))
]


@pytest.fixture(scope="module")
def measured() -> dict[str, Times]:
    torch.manual_seed(0)
    return {name: take_turns(case.entries(case.dtype), ROUNDS) for name, case in CASES.items()}


@pytest.mark.parametrize(("case", "name"), ENTRIES)
def test_experts(show, measured, case, name):
    times = measured[case]
    noise = band(times, AGAIN, DENSE)
    others = {f"of {other}": ratio(times, name, other) for other in times if other != AGAIN}
    show(f"experts: {case}", times, name, band=noise, **others)
    for (mine, other), most in CASES[case].most.items():
        if name == mine:
            here = ratio(times, mine, other)
            assert here <= most + noise, f"{here:.3f} of {other}, A/A {noise:.3f}"
