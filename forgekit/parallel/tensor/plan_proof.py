"""Proof of a tensor-parallel plan: a type check of the autograd graph of one forward pass.

Every activation is of one of three kinds: *whole*, the same on all ranks; this rank's *channels*,
between a ``colwise`` and a ``rowwise`` module; or this rank's *positions*, where the residual
stream is sharded over them. Only named modules turn one kind into another. A parameter that is the
same on all ranks has the whole gradient on each where it meets whole activations, and a part of it
anywhere else. So a walk from the model's output back to its parameters finds what a plan forgot:
a learned scale or activation among the channels, channels that leave without a ``rowwise`` module,
an activation that enters them past the ``colwise`` one. Training would go on with wrong gradients.

What computes across sharded channels without parameters (a mean over them) it cannot see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from forgekit.parallel.agreement import raise_together
from forgekit.parallel.tensor.plan import GROUPED, ROUTED
from forgekit.state import Layout

Kind = Literal["whole", "channels", "positions"]

SHOWN = MappingProxyType(
    {
        "whole": "all channels",
        "channels": "this rank's channels",
        "positions": "this rank's positions",
    }
)
USES: Mapping[Any, Kind] = MappingProxyType(
    {"replicate": "whole", "heads": "channels", "channels": "channels"}
)
"""Kind of activations that a style's parameters must meet."""


@attrs.frozen(eq=False)
class _Border:
    """Where one kind of activation becomes another.

    Attributes:
        name: The module's.
        after: Kind of what it returns; None for anything, such as logits.
        before: Kind of what it takes.
        edge: Where the graph goes on behind what it takes, if gradients flow there.
    """

    name: str
    after: Kind | None
    before: Kind
    edge: Any


@attrs.define(eq=False)
class _Walk:
    """What one forward pass showed, and what is wrong about it."""

    positions: Kind
    logits: frozenset[str]
    borders: dict[Any, _Border] = attrs.field(factory=dict)
    uses: dict[Tensor, tuple[str, Any]] = attrs.field(factory=dict)
    problems: list[str] = attrs.field(factory=list)

    def note(self, name: str, style: Any, module: nn.Module, args: Any, output: Any) -> None:
        """Remember a module's border, after its forward pass; dropout changes no kind."""
        kinds = None if isinstance(module, nn.Dropout) else self._kinds(name, style)
        if kinds is not None and isinstance(output, Tensor) and output.requires_grad:
            given = next((value for value in args if isinstance(value, Tensor)), None)
            edge = None if given is None or not given.requires_grad else get_gradient_edge(given)
            self.borders[get_gradient_edge(output).node] = _Border(name, *kinds, edge)

    def note_uses(self, name: str, style: Any, module: nn.Module) -> None:
        """Remember a module's parameters, before its forward pass: FSDP has gathered them."""
        if style in USES:
            for leaf, parameter in module.named_parameters(recurse=False):
                self.uses[parameter] = (f"{name}.{leaf}" if name else leaf, style)

    def check(self, output: Any) -> None:
        """Walk from a model's output to its parameters; each node once for each kind.

        A stage of a pipeline returns nothing of its own before the last, so the walk starts at
        what each named module takes, too.
        """
        tensors = [value for value in tree_leaves(_values(output)) if isinstance(value, Tensor)]
        waiting: list[tuple[Any, Any, str]] = [
            (border.edge, border.before, border.name)
            for border in self.borders.values()
            if border.edge is not None
        ]
        waiting += [(get_gradient_edge(t), "whole", "") for t in tensors if t.requires_grad]
        seen = set()
        while waiting:
            edge, kind, inside = waiting.pop()
            node, number = edge[:2]
            if (node, number, kind) in seen:
                continue
            seen.add((node, number, kind))
            border = self.borders.get(node)
            if border is not None:
                self._check_border(border, kind, inside)
                if border.edge is not None:
                    waiting.append((border.edge, border.before, border.name))
                continue
            self._check_use(getattr(node, "variable", None), kind, inside)
            waiting += [(edge, kind, inside) for edge in _edges(node, number)]

    def _kinds(self, name: str, style: Any) -> tuple[Kind | None, Kind] | None:
        if name in self.logits:
            return None, "whole"
        kinds: dict[str, tuple[Kind | None, Kind]] = {
            "colwise": ("channels", "whole"),
            "rowwise": (self.positions, "channels"),
            "embedding": (self.positions, "whole"),
            "sequence": ("whole", "positions"),
            ROUTED: (self.positions, "whole"),
            GROUPED: ("whole", "whole"),
        }
        return kinds.get(style) if isinstance(style, str) else None

    def _check_border(self, border: _Border, kind: Kind, inside: str) -> None:
        if border.after not in (None, kind):
            where = f"on the way to {inside!r}" if inside else "in the model's output"
            self.problems.append(
                f"{border.name!r} returns {SHOWN[str(border.after)]}, which are used as "
                f"{SHOWN[kind]} {where}; gradients would be parts of sums. Name a module between "
                "them 'colwise' (all channels to this rank's), 'rowwise' (back) or 'sequence', or "
                "leave the whole block out of the plan."
            )

    def _check_use(self, parameter: Tensor | None, kind: Kind, inside: str) -> None:
        if parameter is None:
            return
        if not isinstance(parameter, nn.Parameter) and kind == "channels":
            self.problems.append(
                f"an input of the model or of its stage, with {SHOWN[self.positions]}, is used as "
                f"{SHOWN[kind]} on the way to {inside!r}; gradients would be parts of sums. Let a "
                "'colwise' module take it."
            )
        name, style = self.uses.get(parameter, ("", None))
        if style is None or USES[style] == kind:
            return
        module = name.rpartition(".")[0]
        where = f"on the way to {inside!r}" if inside else "in the model's output"
        remedy = {
            "channels": f"Add {module!r} to the plan as 'heads' (the same on all ranks, gradients "
            "summed) or 'channels' (sharded like them)",
            "positions": f"Add {module!r} to the plan as 'sequence', or move it behind a norm",
            "whole": f"Name {module!r} 'replicate', or leave it out",
        }[kind]
        self.problems.append(
            f"the parameter {name!r} has the style {style!r}, for {SHOWN[USES[style]]}, and is "
            f"used on {SHOWN[kind]} {where}; its gradient would be wrong, and copies of it would "
            f"drift apart. {remedy}, or put it into a module of its own that you name so."
        )


def runs_compiled(model: nn.Module) -> bool:
    """Whether the model, or a module in it, runs compiled code in place of its own forward."""
    return any(module._compiled_call_impl is not None for module in model.modules())


@contextmanager
def proving_plan(model: nn.Module, layout: Layout, *, is_due: bool = True) -> Iterator[None]:
    """Check the plan on the first forward pass inside the block, on all ranks together.

    Nothing is computed: hooks note what passes, and one small collective at the end of the block
    brings the ranks' findings together. The graph of a compiled model is opaque: pass a micro-batch
    through it as it was written first, see ``runs_compiled``.

    Args:
        model: What ``parallelize`` returned.
        layout: Its layout.
        is_due: Whether to do anything.

    Raises:
        ValueError: On every rank, with the parameters and modules that the plan has to name.
    """
    if not is_due or layout.tensor == 1:
        yield
        return
    roots = [model] if layout.stages is None else layout.stages.modules
    problems: list[str] = []
    with ExitStack() as stack:
        for hook in (hook for root in roots for hook in _hooks(root, layout, problems)):
            stack.enter_context(hook)
        yield
    raise_together(*(f"the tensor-parallel plan leaves something out: {p}" for p in problems))


def _hooks(root: nn.Module, layout: Layout, problems: list[str]) -> Iterable[Any]:
    """Register what notes each named module, and what checks the first pass through ``root``."""
    positions: Kind = "positions" if layout.sequence > 1 else "whole"
    walk = _Walk(positions, layout.logits, problems=problems)
    stages = layout.stages
    is_last = stages is None or (stages.has_last and root is stages.modules[-1])
    hooks: list[Any] = []

    def check(_module: nn.Module, _args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():  # a pipeline's rehearsal of shapes
            return
        for hook in hooks:
            hook.remove()
        walk.check(output if is_last else None)

    for name, module in root.named_modules():
        if name in layout.styles:
            style = layout.styles[name]
            uses, note = partial(walk.note_uses, name, style), partial(walk.note, name, style)
            hooks.append(module.register_forward_pre_hook(lambda m, _args, uses=uses: uses(m)))
            hooks.append(module.register_forward_hook(note))
    hooks.append(root.register_forward_hook(check))
    return hooks


def _values(output: Any) -> Any:
    return vars(output) if dataclasses.is_dataclass(output) else output


def _edges(node: Any, number: int) -> list[Any]:
    """Where a node's gradient goes on; FSDP's node passes each tensor's on by itself."""
    edges = node.next_functions
    if type(node).__name__.startswith("RegisterPostBackwardFunction"):
        edges = edges[number : number + 1]
    return [edge for edge in edges if edge[0] is not None]
