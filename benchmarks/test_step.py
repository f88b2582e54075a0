"""What ``make_step`` costs over a loop written by hand that does the same work."""

from __future__ import annotations

import attrs
import pytest
from bare import Size, bare_step, our_head_step, our_step
from pairs import Times, band, ratio, take_turns

import forgekit as fk

BARE, AGAIN, OURS, HEAD = "bare loop", "bare loop again", "make_step", "make_step, head"
BUILDERS = {BARE: bare_step, AGAIN: bare_step, OURS: our_step, HEAD: our_head_step}
EXPERTS = fk.MoESpec(experts=16, top_k=2, ffn_dim=192, shared=0, z_loss=1e-3, bias_rate=1e-3)


@attrs.frozen
class Case:
    """A size, how often it is measured, and the most that ours may take of the bare loop.

    With ``head`` the loss never holds all logits, which costs time where there are few of them.
    """

    size: Size
    rounds: int
    most: float
    most_with_head: float | None = None


CASES = {
    "dim 256": Case(
        Size(dim=256, layers=4, seq_len=256, vocab_size=4096),
        rounds=30,
        most=1.02,
    ),
    "dim 64": Case(
        Size(dim=64, layers=1, seq_len=32, vocab_size=512),
        rounds=200,
        most=1.10,
        most_with_head=1.20,
    ),
    "experts": Case(  # those of the recipe, which has a head
        Size(128, 4, seq_len=256, vocab_size=4096, rows=8, micro_batches=1, moe=EXPERTS),
        rounds=30,
        most=1.03,
        most_with_head=1.03,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def measured(request) -> tuple[Case, Times]:
    case = CASES[request.param]
    batches = case.size.batches()
    entries = {name: build(case.size.model(), batches) for name, build in BUILDERS.items()}
    first = {name: float(step()) for name, step in entries.items()}
    for name in (OURS, HEAD):
        assert first[name] == pytest.approx(first[BARE], rel=1e-5), "the two do different work"
    return case, take_turns(entries, case.rounds)


@pytest.mark.parametrize("name", BUILDERS)
def test_step(show, measured, name):
    case, times = measured
    here, noise = ratio(times, name, BARE), band(times, AGAIN, BARE)
    tokens_per_second = case.size.tokens / sorted(times[name])[len(times[name]) // 2]
    kind = "" if case.size.moe is None else f", {case.size.moe.experts} experts"
    group = f"step, {case.size.tokens} targets, dim {case.size.dim}{kind}"
    show(group, times, name, ratio=here, band=noise, tokens_per_second=tokens_per_second)
    most = {OURS: case.most, HEAD: case.most_with_head}.get(name)
    assert most is None or here <= most + noise, f"{here:.3f} of the bare loop, A/A {noise:.3f}"
