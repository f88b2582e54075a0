"""State is in the open: no module keeps a value that can change, and a step plants nothing."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections import deque
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import pytest
import torch
from oracle import SPEC, global_batch, logits_loss

import forgekit as fk

OUTSIDE = ("cli", "data", "model", "optim", "recipes", "__main__")
"""Rooms that no state passes through, and commands."""
NAMES = [module.name for module in pkgutil.walk_packages(fk.__path__, "forgekit.")]
NAMES = [name for name in NAMES if name.split(".")[1] not in OUTSIDE]
MUTABLE = (dict, list, set, bytearray, deque, WeakKeyDictionary, WeakSet, WeakValueDictionary)


def _kept(module: ModuleType, source: str) -> list[str]:
    """A module's values, and its classes', that can change; its caches and ``global`` names."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = {
        a.asname or a.name for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names
    }
    values = {name: value for name, value in vars(module).items() if name not in imported}
    for kind in [value for value in values.values() if isinstance(value, type)]:
        values |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items()}
    shared = [node for node in nodes if isinstance(node, ast.Global)]
    return [name for node in shared for name in node.names] + [
        name
        for name, value in values.items()
        if not name.split(".")[-1].startswith(("__", "_field_defaults"))  # Python's own
        and (isinstance(value, MUTABLE) or hasattr(value, "cache_clear"))
    ]


def test_no_module_keeps_a_value_that_can_change():
    modules = {name: importlib.import_module(name) for name in NAMES}
    kept = {name: _kept(m, Path(str(m.__file__)).read_text()) for name, m in modules.items()}
    assert {name: names for name, names in kept.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "seen = {}",
        "seen = [1]",
        "seen = weakref.WeakKeyDictionary()",
        "class Kind:\n    seen = set()",
        "def count():\n    global seen",
        "@functools.cache\ndef seen(): ...",
    ],
)
def test_the_rule_sees_a_value_that_can_change(source):
    module = ModuleType("room")
    exec(f"import functools, weakref\n{source}", vars(module))
    assert [name.split(".")[-1] for name in _kept(module, source)] == ["seen"]


def _planted(model: torch.nn.Module) -> dict[str, object]:
    """What lies on each module and tensor by name, and how many hooks."""
    things = [*model.named_modules(), *model.named_parameters(), *model.named_buffers()]
    return {
        f"{type(x).__name__} {name}": {
            key: len(value) if "hook" in key and value else None for key, value in vars(x).items()
        }
        for name, x in things
    }


def test_a_step_leaves_nothing_on_modules_and_tensors():
    model = fk.Transformer(SPEC)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
    before = _planted(model)
    step = fk.make_step(logits_loss, schedule=fk.constant(0.1))
    for number in range(2):
        state, _ = step(state, [row[0] for row in global_batch(1, seed=number)])
    assert len(before) > 20
    assert _planted(state.model) == before
