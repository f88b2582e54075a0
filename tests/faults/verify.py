"""Mistakes of recipes that ``verify`` has to find, and to name the dimension that has them."""

from __future__ import annotations

from functools import partial
from typing import Any

import verified
from faults.planting import value
from faults.table import Check, Fault

import forgekit as fk

__all__ = ["CHECKS", "FAULTS"]

USER: dict[str, Any] = {"build": partial(verified.build, "right", ())}


def _verify(rank: int, world: int) -> str:
    report = fk.verify(USER["build"], fk.MeshSpec(dp_shard=2))
    return "" if report.equal else str(report)


CHECKS = {"verify": Check(measure=_verify, world=1, alone=True)}
FAULTS = [
    Fault(
        "a mean per micro-batch",
        "verify",
        value(USER, "build", partial(verified.build, "a mean per micro-batch", ())),
        "different: micro-batches break",
    ),
    Fault(
        "outputs that FSDP cannot look into",
        "verify",
        value(USER, "build", partial(verified.build, "opaque", ())),
        "UnreducedError",
    ),
    Fault(
        "a forgotten mesh",
        "verify",
        value(USER, "build", partial(verified.build, "a forgotten mesh", ())),
        "the state got no mesh",
    ),
    Fault(
        "a rank that dies",
        "verify",
        value(USER, "build", verified.dies),
        r"rank 1 of 2 died",
    ),
    Fault(
        "a rank that raises",
        "verify",
        value(USER, "build", verified.raises),
        "rank 1 of 2 raised RuntimeError: the disk of rank 1 is full",
    ),
]
