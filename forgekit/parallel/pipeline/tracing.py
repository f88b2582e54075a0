"""Which tensors a stage needs from the ones before it, found by running it once.

A rehearsal runs a stage's own parts; those of earlier stages return labelled stand-ins. Below
autograd every operation hands labels on from its inputs to its outputs, so what reaches a part of
the stage, or the loss, is what has to travel. What a stage cannot send is refused here, before
the first update: see ``Trace``.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forgekit.parallel.pipeline.stage_tensors import (
    Flow,
    Leaf,
    PartCall,
    Relay,
    Source,
    mapped,
    parts_of,
)

Label = Source | int
"""A stand-in's source, or the number of a random draw outside of the parts."""

OPAQUE = (Tensor, nn.Module, type)
"""Arguments whose attributes are no messages from part to part."""

PATIENCE = 0.5
"""Seconds in which a thread may let go: one of gloo holds what it sent a little longer."""

PARAMETER_READ = (
    "loss_fn reads a parameter of the model; in a pipeline each rank holds some of them, and the "
    "term would count those of the last stage alone. Use the optimizer's weight decay for an L2 "
    "term, do it in the model's forward (head=), or use pp=1."
)


@attrs.frozen
class Report:
    """What a stage's rehearsal found, to be told to the other ranks.

    Attributes:
        outputs: See ``Flow``; of this stage's parts.
        needs: Tensors of earlier stages, and random draws, on which the stage depends.
        mutated: See ``Flow``.
    """

    outputs: Mapping[PartCall, Any]
    needs: frozenset[Label]
    mutated: frozenset[Source]


def rehearse(
    relay: Relay,
    flow: Flow,
    forward: Callable[[], Any],
    loss: Callable[[Any], Any],
    *,
    given: Sequence[int],
    device: torch.device,
    parameters: Iterable[Tensor] = (),
) -> Report:
    """Run a stage once, on stand-ins, and report what it needs.

    Args:
        relay: The stage's.
        flow: With the outputs of the stages before.
        forward: Calls the stage's module.
        loss: Makes the tensors of the loss from what the last stage returns.
        given: Shape of the model's input.
        device: Where the stage computes.
        parameters: The model's, of which a loss function must read none.

    Returns:
        The report.

    Raises:
        ValueError: If the model or the loss does what stages cannot do together.
        TypeError: If a part returns what cannot be sent.
    """
    trace = Trace(relay, given, device)
    with ExitStack() as stack:
        for name, part in relay.parts.items():
            enter, leave = partial(trace.enter, name), partial(trace.leave, name)
            stack.enter_context(part.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(part.register_forward_hook(leave))
        # Nothing is kept for a backward pass, so what lives on after a part is held by the model.
        # A block that the compiler met in here would never be compiled.
        eager = torch.compiler.set_stance("force_eager")
        with torch.enable_grad(), saved_tensors_hooks(_forget, _forget), eager, trace:
            out = relay.run(forward, flow, (), given=given, device=device, stand_in=trace.stand_in)
            if relay.is_last:
                with trace.computing_loss(parameters):
                    found = loss(out)
                trace.need(found)
    return Report(trace.outputs, frozenset(trace.needs), frozenset(trace.mutated))


def join(reports: Sequence[Report], holders: Mapping[str, int]) -> Flow:
    """Find what each stage sends: what earlier parts returned and later stages need.

    Args:
        reports: Of all stages, in order.
        holders: By name of a part, the stage that holds it.

    Raises:
        ValueError: If several stages depend on one random draw, or a stage has nothing to send.
    """
    outputs = {call: output for report in reports for call, output in report.outputs.items()}
    order = {call: number for number, call in enumerate(outputs)}
    draws = [need for report in reports for need in report.needs if isinstance(need, int)]
    if len(draws) > len(set(draws)):
        raise ValueError(
            "the model's forward draws random numbers outside of its modules (dropout on what "
            "several blocks take, for instance), and more than one pipeline stage depends on one "
            "draw; each would draw its own. Draw them in a module with parameters, or in the "
            "blocks, or use pp=1."
        )
    travels: list[list[Source]] = []
    for stage in range(len(reports) - 1):
        later = {
            s for report in reports[stage + 1 :] for s in report.needs if not isinstance(s, int)
        }
        due = [source for source in later if holders[source[0]] <= stage]
        travels.append(sorted(due, key=lambda source: (order[source[:2]], source[2])))
        if not due:
            raise ValueError(
                f"nothing that pipeline stages up to {stage} compute reaches a later one, so they "
                "could not be trained. Pass the blocks' outputs on, or use pp=1."
            )
    return Flow(outputs, travels, frozenset(s for report in reports for s in report.mutated))


class Trace(TorchDispatchMode):
    """Follows labelled stand-ins through a stage's forward, and refuses what stages cannot share.

    Refused are parts that keep a differentiable tensor which they do not return, put tensors into
    what they are given, or change it in place; decisions of the host on values that only one
    stage has; and loss functions that read parameters, of which every rank has some.
    """

    supports_higher_order_operators = True

    def __init__(self, relay: Relay, given: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self.outputs: dict[PartCall, Any] = {}
        self.needs: set[Label] = set()
        self.mutated: set[Source] = set()
        self._relay, self._given, self._device = relay, tuple(given), device
        self._labels: dict[int, set[Label]] = {}
        self._stand_ins: dict[int, Source] = {}
        self._alive: list[Tensor] = []  # so that no other storage gets the number of a labelled one
        self._inside: str | None = None
        self._versions: list[tuple[Tensor, int]] = []
        self._given_values: Any = ()
        self._contents: list[Tensor] = []
        self._made: list[weakref.ref[Tensor]] = []
        self._draws = 0
        self._parameters: set[int] = set()

    def stand_in(self, source: Source, leaf: Leaf) -> Tensor:
        """Make a labelled tensor of zeros."""
        shape, dtype = leaf.at(self._given), leaf.dtype
        zeros = torch.zeros(
            shape, dtype=dtype, device=self._device, requires_grad=dtype.is_floating_point
        )
        made = zeros.clone()  # it may be changed in place, which a leaf may not
        self._stand_ins[_storage(made)] = source
        self._label(made, {source})
        return made

    def need(self, found: Any) -> None:
        """Note that what is found here is needed."""
        for tensor in _tensors(found):
            self.needs |= self._labels.get(_storage(tensor), set())

    def enter(self, name: str, _module: nn.Module, args: Any, keywords: Any) -> None:
        """Begin a part of this stage."""
        if self._inside is not None:
            raise ValueError(
                f"{name} is called inside of {self._inside}, and both are parts of the pipelined "
                "model. Register it in one place only, or use pp=1."
            )
        given = _tensors((args, keywords))
        self.need(given)
        self._inside, self._made = name, []
        self._versions = [(tensor, tensor._version) for tensor in given]
        self._given_values = args, keywords
        self._contents = _contents(self._given_values)

    def leave(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        """End a part of this stage, and note what it returned."""
        self._inside = None
        if any(tensor._version != version for tensor, version in self._versions):
            raise ValueError(
                f"{name} changes a tensor in place that it is given, which no other pipeline stage "
                "would see. Write x = x + y in place of x += y, or use pp=1."
            )
        self._versions = []
        if self._relay.is_last:
            return
        numbers = sum(1 for known, _ in self.outputs if known == name)
        shapes = mapped(lambda t: Leaf(self._given, tuple(t.shape), t.dtype), output)
        self.outputs[name, numbers] = shapes
        self._check_kept(name, parts_of(output))
        self._check_contents(name)

    @contextmanager
    def computing_loss(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Follow a loss function, which may do with outputs what it likes, but not read weights."""
        self._inside = "loss_fn"
        self._parameters = {_storage(parameter) for parameter in parameters}
        yield
        self._inside, self._parameters = None, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and hand labels on."""
        given = _tensors((args, kwargs))
        storages = [_storage(tensor) for tensor in given]
        labels = {label for storage in storages for label in self._labels.get(storage, ())}
        self._check_operation(func, storages, labels)
        out = func(*args, **(kwargs or {}))
        made = _tensors(out)
        if self._inside is not None:
            self.needs |= labels
            self._made += map(weakref.ref, made)
            return out
        is_plain = isinstance(func, torch._ops.OpOverload)
        if is_plain and torch.Tag.nondeterministic_seeded in func.tags:
            labels.add(self._draws)
            self._draws += 1
        if is_plain and func._schema.is_mutable:
            written = _written(func, args, kwargs or {})
            self.mutated |= {s for t in written if (s := self._stand_ins.get(_storage(t)))}
            made += written
        for tensor in made if labels else ():
            self._label(tensor, labels)
        return out

    def _label(self, tensor: Tensor, labels: set[Label]) -> None:
        self._labels.setdefault(_storage(tensor), set()).update(labels)
        self._alive.append(tensor)

    def _check_operation(self, func: Any, storages: list[int], labels: set[Label]) -> None:
        if self._inside is None and labels and func is torch.ops.aten._local_scalar_dense.default:
            raise ValueError(
                "the model's forward reads a number from what its blocks computed (an if, .item() "
                "or a print), and other pipeline stages do not have it. Use torch.where, do it "
                "in a block, or use pp=1."
            )
        if not self._parameters.isdisjoint(storages):
            raise ValueError(PARAMETER_READ)

    def _check_kept(self, name: str, returned: list[Tensor]) -> None:
        """Raise if a differentiable tensor lives on that a part made and did not return."""
        known = {_storage(tensor) for tensor in returned}
        if not self._kept(known):
            return
        torch.clear_autocast_cache()  # of weights, which it keeps until autocast ends
        gc.collect()  # what only a cycle holds is not kept
        patience = time.monotonic() + PATIENCE
        while (kept := self._kept(known)) and time.monotonic() < patience:
            time.sleep(0.01)
        if not kept:
            return
        raise ValueError(
            f"{name} keeps a differentiable tensor of shape {kept[-1]} which it does "
            "not return: in an attribute, or in a list or an object that it was given. Other "
            "pipeline stages would not see it. Return it, detach it if it is only looked at "
            "(of transformers: config.use_cache = False), or use pp=1."
        )

    def _check_contents(self, name: str) -> None:
        """Raise if a part put a tensor into what it was given: detached ones show in no graph."""
        now, before = _contents(self._given_values), self._contents
        self._given_values, self._contents = (), []
        if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
            raise ValueError(
                f"{name} puts a tensor into a list, a dictionary or an object that it is given, or "
                "takes one out, which no other pipeline stage would see. Return it, or use pp=1."
            )

    def _kept(self, returned: set[int]) -> list[tuple[int, ...]]:
        """Shapes of the differentiable tensors that a part made, apart from what it returned."""
        alive = [tensor for made in self._made if (tensor := made()) is not None]
        return [
            tuple(tensor.shape)
            for tensor in alive
            if tensor.grad_fn is not None and _storage(tensor) not in returned
        ]


@contextmanager
def restored(module: nn.Module, shared: Collection[nn.Module]) -> Iterator[None]:
    """Bring buffers and plain numbers of a module back to what they were before.

    Args:
        module: The module, with all that it contains.
        shared: Modules that several stages have.

    Raises:
        ValueError: If the buffers of a shared module have changed.
    """
    before = [_note(each) for each in module.modules()]
    try:
        yield
        for noted in before:
            if noted[0] in shared and (changed := _changed(noted)):
                raise ValueError(
                    f"forward changes the buffer {changed[0]!r} of {type(noted[0]).__name__}, "
                    "which each pipeline stage has and would change on its own. Move it into a "
                    "block, count in the training loop, or use pp=1."
                )
    finally:
        with torch.no_grad():
            for noted in before:
                _restore(noted)


_Before = tuple[nn.Module, dict[str, tuple[Tensor, Tensor]], dict[str, Any], frozenset[str]]


def _note(module: nn.Module) -> _Before:
    buffers = {name: (b, b.clone()) for name, b in module._buffers.items() if b is not None}
    plain = {n: v for n, v in vars(module).items() if _is_plain(v)}
    return module, buffers, plain, frozenset(vars(module))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _changed(before: _Before) -> list[str]:
    # By value: batch norm writes its statistics without a new version.
    module, buffers, *_ = before
    return [
        name
        for name, (buffer, was) in buffers.items()
        if module._buffers[name] is not buffer
        or not (
            _has_no_values(buffer) or torch.allclose(buffer, was, rtol=0, atol=0, equal_nan=True)
        )
    ]


def _has_no_values(buffer: Tensor) -> bool:
    """Whether it is the stand-in of a plan; of those none can be compared."""
    return isinstance(buffer, FakeTensor)


def _restore(before: _Before) -> None:
    module, buffers, plain, names = before
    for name in [n for n, v in vars(module).items() if n not in names and _is_plain(v)]:
        delattr(module, name)  # a counter that forward begins
    vars(module).update(plain)
    for name in _changed(before):
        buffer, was = buffers[name]
        module._buffers[name] = buffer.copy_(was)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _contents(value: Any) -> list[Tensor]:
    """The tensors in arguments: in containers, and in the attributes of plain objects."""
    leaves = tree_leaves(value)
    objects = [o for o in leaves if hasattr(o, "__dict__") and not isinstance(o, OPAQUE)]
    return _tensors([leaves, [list(vars(o).values()) for o in objects]])


def _storage(tensor: Tensor) -> int:
    """A number for where a tensor's values are; views have that of what they look at."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata if local.layout is torch.strided else id(local)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes in place."""
    changed = [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    names = {a.name for a in changed}
    given = zip((a.name for a in func._schema.arguments), args, strict=False)
    return _tensors([v for n, v in (*given, *kwargs.items()) if n in names])


def _forget(_saved: Any) -> Any:
    """Keep nothing for backward."""
