"""Mistakes of recipes that ``verify`` has to find, and to name the dimension that has them."""

from __future__ import annotations

from functools import partial
from typing import Any

import verified
from faults.planting import Plant, value
from faults.table import Check, Fault

import forgekit as fk

USER: dict[str, Any] = {"build": partial(verified.build, "right", ())}


def _verify(rank: int, world: int) -> str:
    report = fk.verify(USER["build"], fk.MeshSpec(dp_shard=2))
    return "" if report.equal else str(report)


CHECKS = {"verify": Check(measure=_verify, world=1, alone=True)}


def _built(kind: str) -> Plant:
    return value(USER, "build", partial(verified.build, kind, ()))


DIES, RAISES = value(USER, "build", verified.dies), value(USER, "build", verified.raises)
MEAN, OPAQUE = _built("a mean per micro-batch"), _built("opaque")
ON_RANK_1 = "rank 1 of 2 raised RuntimeError: the disk of rank 1 is full"
FAULTS = [
    Fault("a forgotten mesh", "verify", _built("a forgotten mesh"), "the state got no mesh"),
    Fault("a mean per micro-batch", "verify", MEAN, "different: micro-batches break"),
    Fault("outputs that FSDP cannot look into", "verify", OPAQUE, "UnreducedError"),
    Fault("a rank that dies", "verify", DIES, "rank 1 of 2 died"),
    Fault("a rank that raises", "verify", RAISES, ON_RANK_1),
]
