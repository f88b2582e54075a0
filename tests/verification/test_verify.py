"""Layouts against one process: what is right is equal to 1e-13, what is wrong is named."""

from __future__ import annotations

import re
from functools import partial

import pytest
import verified
from covering import some_of

import forgekit as fk

EXACT = 1e-12
UNREDUCED = ("forgekit.parallel.fsdp_step:FsdpStep._unreduced", ())
COPIES = ("forgekit.steps.audit.first_step:replicas_of", {})
NO_MESH = ("forgekit.state:_check_parameters", None)
FIRST = ("forgekit.parallel.pipeline.stage:Stage._sent", verified.first_alone)
PLANNED = ("forgekit.steps.audit.first_step:check_plan", None)
POSITIONS = ("forgekit.steps.audit.first_step:check_positions", None)
WRONG = {
    "opaque": ({"dp_shard": 2}, "dp_shard", (UNREDUCED, COPIES)),
    "a forgotten mesh": ({"dp_replicate": 2}, "dp_replicate", (NO_MESH,)),
    "own positions": ({"cp": 2}, "cp", (POSITIONS,)),
    "x0": ({"pp": 2}, "pp", (FIRST,)),
}

FAILED = {
    "hangs": (verified.hangs, r"of 2 ranks 0, 1 did not finish within 4 s.*verified.py.* in hangs"),
    "dies": (verified.dies, r"rank 1 of 2 died without raising an error\."),
    "another mesh": (verified.another_mesh, r"setup built a mesh of .*, not .*'tp': 2.* as asked"),
    "no targets": (verified.no_targets, r"the gradient of the first step has norm (0|nan)"),
    "16 bits": (verified.in_16_bits, r"asks parallelize to compute in torch.bfloat16, but verify"),
}


def layout(**sizes):
    return fk.MeshSpec(**{"dp_shard": 1, **sizes})


@pytest.mark.parametrize("kind", some_of(WRONG, "a forgotten mesh"))
def test_what_is_wrong_is_found_and_its_dimension_named(kind):
    sizes, dimension, off = WRONG[kind]
    report = fk.verify(partial(verified.build, kind, off), layout(**sizes))
    assert report.failure is None, report
    assert report.broken == (dimension,)
    assert not report.equal
    assert max(report.error, *(check.error for check in report.checks)) > 1e-3, report
    assert re.search(rf"^different: {dimension} breaks?; ", str(report), re.M)


EQUAL = {
    "experts and their balance": (partial(verified.build, "experts", ()), {"dp_shard": 2, "ep": 2}),
    "what crosses between stages": (partial(verified.build, "x0", ()), {"pp": 2}),
    "a sum that crosses": (partial(verified.build, "aux", ()), {"pp": 2}),
    "float32, dropout and weights of chance": (verified.with_adapters, {"dp_shard": 2}),
}


@pytest.mark.parametrize("name", some_of(EQUAL, "a sum that crosses"))
def test_what_is_right_is_equal(name):
    build, sizes = EQUAL[name]
    report = fk.verify(build, layout(**sizes))
    assert report.equal, report
    assert 0 < report.error < EXACT
    is_noted = any("other initial values in one process" in note for note in report.notes)
    assert is_noted == ("weights of chance" in name)
    names = {row.name for row in report.rows}
    assert ("layers.1.feed_forward.router.weight" in names) == name.startswith("experts")
    assert all(".lora_" in name for name in names) == is_noted, "a base that is frozen has no row"


@pytest.mark.parametrize("name", FAILED)
def test_a_rank_that_fails_is_reported_with_its_message(name):
    build, message = FAILED[name]
    report = fk.verify(build, layout(tp=2), timeout_s=4 if name == "hangs" else 60)
    assert not report.equal
    assert report.rows == report.broken == ()
    assert re.search(message, report.failure, re.S), report.failure
    assert str(report).startswith("failed: tp=2: ")


def test_one_dimension_of_two_is_named_where_only_it_breaks():
    said = []
    build = partial(verified.build, "unnamed weight", (PLANNED, COPIES))
    report = fk.verify(build, layout(tp=2, dp_shard=2), progress=said.append)
    assert report.broken == ("tp",)
    equal = {check.name: check.error < EXACT for check in report.checks}
    alone = dict.fromkeys(("micro-batches", "one process", "dp_shard=2"), True)
    assert equal == alone | {"dp_shard=2 tp=2": False, "tp=2": False}
    assert re.fullmatch(r"layers\.\d\.act\.weight", report.rows[0].name)
    assert len(said) == 5
    assert "looking for what breaks: tp=2 on 2 ranks" in said


def test_a_loss_that_depends_on_the_split_is_equal_where_that_is_meant():
    build = partial(verified.build, "a mean per micro-batch", ())
    report = fk.verify(build, layout(dp_shard=2), split=False)
    assert report.equal, report
    assert [check.name for check in report.checks] == ["dp_shard=2"]


def test_what_cannot_be_verified_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="has 4,096 ranks, each a process here, but"):
        fk.verify(verified.raises, layout(dp_shard=64, tp=64))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="this is one of 4 ranks; run verify without"):
        fk.verify(verified.raises, layout(tp=2))
