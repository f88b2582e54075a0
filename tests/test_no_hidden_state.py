"""State is in the open: no module keeps a value that can change, and a step plants nothing."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import MutableMapping, MutableSequence, MutableSet
from pathlib import Path
from types import ModuleType

import torch
from lab import SPEC, global_batch, logits_loss

import forgekit as fk

OUTSIDE = ("cli", "data", "model", "optim", "recipes", "__main__")
"""Rooms that no state passes through, and commands."""
MUTABLE = (MutableMapping, MutableSequence, MutableSet)


def kept(module: ModuleType, source: str) -> list[str]:
    """A module's values, and its classes', that can change; its caches and ``global`` names."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [name for node in nodes if isinstance(node, ast.Global) for name in node.names]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    own = {name: value for name, value in vars(module).items() if name not in imported}
    kinds = [value for value in own.values() if isinstance(value, type)]
    values = [*own.items(), *(item for kind in kinds for item in vars(kind).items())]
    return names + [
        name
        for name, value in values
        if not name.startswith(("__", "_field_defaults"))  # Python's own
        and (isinstance(value, MUTABLE) or hasattr(value, "cache_clear"))
    ]


def test_no_module_keeps_a_value_that_can_change():
    modules = [m.name for m in pkgutil.walk_packages(fk.__path__, "forgekit.")]
    for name in [name for name in modules if name.split(".")[1] not in OUTSIDE]:
        module = importlib.import_module(name)
        assert kept(module, Path(str(module.__file__)).read_text()) == [], name


def test_the_rule_sees_a_value_that_can_change():
    source = """
import functools, weakref
a, b, c = {}, [1], weakref.WeakKeyDictionary()
class Kind:
    d = set()
@functools.cache
def e():
    global f
"""
    exec(source, vars(module := ModuleType("room")))
    assert sorted(kept(module, source)) == ["a", "b", "c", "d", "e", "f"]


def planted(model: torch.nn.Module) -> dict[str, object]:
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
    before = planted(model)
    step = fk.make_step(logits_loss, schedule=fk.constant(0.1))
    for number in range(2):
        state, _ = step(state, [row[0] for row in global_batch(1, seed=number)])
    assert len(before) > 20
    assert planted(state.model) == before
