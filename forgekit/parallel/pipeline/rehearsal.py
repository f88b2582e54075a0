"""A trial run of a stage before the first step: only the stream may cross between stages.

Its own parts run on what really crossed, three times: what other absent parts return is NaN, then
numbers of two sizes, and their integers and booleans differ too. Random numbers differ until the
stream arrives. What the stage sends, and the loss, must be equal bit for bit. NaN alone would not
do: a comparison, ``topk`` or ``where`` makes finite numbers of it.

What no stand-in shows, because it takes another way from block to block, is looked for in the
blocks' attributes and arguments, and in the containers that their ``forward`` names: globals and
variables of a function around it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forgekit.parallel.pipeline.stage import (
    RETURN_IT,
    Leaf,
    Stage,
    StandIn,
    form_of,
    poison,
    tensors_of,
)

SIZES = (float("nan"), 1.0, 1e4)
"""Magnitudes of stand-ins; usual thresholds lie between the second and the third."""

PARAMETER_READ = (
    "loss_fn reads a parameter of the model, and in a pipeline those of the last stage alone would "
    "count. Use weight decay for an L2 term, the model's forward (head=), or pp=1."
)


def rehearse(
    stage: Stage,
    run: Callable[[StandIn, Callable[[], Any]], Sequence[Tensor]],
    device: torch.device,
    shared: Collection[nn.Module],
) -> tuple[dict[str, Any], bool]:
    """Run a stage on stand-ins; raise if it needs more from other stages than the stream.

    Args:
        stage: The stage.
        run: ``run(stand_in, arrive)`` computes what the stage sends, or the tensors of the loss.
        device: Where it computes.
        shared: Modules that several stages have.

    Returns:
        What its parts returned, with leaves for tensors, and whether that proves anything: where
        the result is NaN whatever the stand-ins, it does not.

    Raises:
        ValueError: If more than the stream has to cross.
    """
    forms: dict[str, Any] = {}
    results: list[Sequence[Tensor]] = []
    sizes = SIZES if stage.number else SIZES[1:2]  # the first stage lacks nothing
    for number, size in enumerate(sizes):
        # Random numbers differ until the stream arrives, to notice noise that blocks share.
        torch.manual_seed(number + 1)
        arrive = partial(torch.manual_seed, 0)
        generator = torch.Generator(device).manual_seed(number)
        with _restored(stage.module, shared), _watched(stage, forms), _eager():
            results.append(run(partial(draw, size, generator, device), arrive))
    first, *others = results
    if not all(len(first) == len(other) and all(map(_same, first, other)) for other in others):
        raise ValueError(
            f"pipeline stage {stage.number} uses values of earlier stages that the last block "
            f"before it did not return; only what that block returns is sent. {RETURN_IT}"
        )
    real = [t for t in results[-1] if t.is_floating_point() and not isinstance(t, FakeTensor)]
    return forms, not any(tensor.isnan().any() for tensor in real)


class NoReads(TorchDispatchMode):
    """Raise on operations with parameters, in a loss function after its call of the model."""

    supports_higher_order_operators = True

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._parameters = set(map(_storage, parameters))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._parameters.isdisjoint(map(_storage, _tensors((args, kwargs)))):
            raise ValueError(PARAMETER_READ)
        return func(*args, **(kwargs or {}))


@contextmanager
def _eager() -> Iterator[None]:
    """Run eagerly, deterministically and without a graph."""
    before = torch.are_deterministic_algorithms_enabled()
    before_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # A block that the compiler met in here would never be compiled.
    eager = torch.compiler.set_stance("force_eager")
    with warnings.catch_warnings(), saved_tensors_hooks(_forget, _forget), eager:
        warnings.filterwarnings("ignore", ".*deterministic")
        # Bit for bit needs the same order of sums in each of the three runs.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=before_warns)


def draw(size: float, generator: torch.Generator, device: torch.device, leaf: Leaf) -> Tensor:
    """Make a stand-in: floats of a magnitude, or NaN; integers and booleans are random 0 and 1."""
    if size != size and leaf.dtype.is_floating_point:
        return poison(leaf, device)
    drawn = torch.randn(leaf.shape, generator=generator, device=device)
    return (size * drawn if leaf.dtype.is_floating_point else drawn > 0).to(leaf.dtype)


@contextmanager
def _watched(stage: Stage, forms: dict[str, Any]) -> Iterator[None]:
    """Record what the stage's parts return; raise if they pass values to other blocks otherwise."""
    # By part, the tensors of its arguments and their versions at the call.
    given: dict[str, Any] = {}

    def enter(name: str, _module: nn.Module, args: Any, keywords: Any) -> None:
        tensors = _contents((args, keywords))
        given[name] = tensors, [tensor._version for tensor in tensors]

    def leave(name: str, module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
        tensors, versions = given.pop(name)
        now = _contents((args, keywords))
        if len(now) != len(tensors) or any(a is not b for a, b in zip(now, tensors, strict=True)):
            raise ValueError(
                f"{name} puts a tensor into a list, a dictionary or an object that it is given, or "
                f"takes one out, which no other pipeline stage would see. {RETURN_IT}"
            )
        if versions != [tensor._version for tensor in tensors]:
            raise ValueError(
                f"{name} changes a tensor in place that it is given, which no other pipeline stage "
                "would see. Write x = x + y, or use pp=1."
            )
        if not stage.is_last:
            forms[name] = form_of(output)
            _check_kept(name, module, tensors_of(output))

    with ExitStack() as stack:
        for name, part in stage.parts.items():
            before = part.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
            after = part.register_forward_hook(partial(leave, name), with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


def _check_kept(name: str, part: nn.Module, returned: list[Tensor]) -> None:
    """Raise if a part keeps a differentiable tensor that it does not return."""
    of_torch = vars(nn.Module())
    for module in part.modules():
        held = {f"its attribute {n!r}": v for n, v in vars(module).items() if n not in of_torch}
        if inspect.isfunction(forward := type(module).forward):
            read = inspect.getclosurevars(forward)
            held |= {
                f"the variable {n!r}": v
                for n, v in (*read.globals.items(), *read.nonlocals.items())
                if isinstance(v, list | dict | set | tuple)
            }
        for where, value in held.items():
            for tensor in _contents(value):
                if tensor.grad_fn is not None and not any(tensor is other for other in returned):
                    raise ValueError(
                        f"{name} keeps a differentiable tensor of shape {tuple(tensor.shape)} in "
                        f"{where}, which other pipeline stages would not see. {RETURN_IT}"
                    )


@contextmanager
def _restored(module: nn.Module, shared: Collection[nn.Module]) -> Iterator[None]:
    """Restore buffers and plain numbers; raise for shared ones that change.

    Raises:
        ValueError: If the buffers of a module that several stages have are changed.
    """
    before = [
        ({n: (b, b.clone()) for n, b in m._buffers.items() if b is not None}, _numbers(m), m)
        for m in module.modules()
    ]
    try:
        yield
        for buffers, _, each in [entry for entry in before if entry[2] in shared]:
            changed = [n for n, (b, was) in buffers.items() if not _same(each._buffers[n], was)]
            if changed:
                raise ValueError(
                    f"forward changes the buffer {changed[0]!r} of {type(each).__name__}, which "
                    "each pipeline stage has for itself. Move it into a block, or use pp=1."
                )
    finally:
        with torch.no_grad():
            for buffers, numbers, each in before:
                for name in _numbers(each).keys() - numbers:
                    delattr(each, name)  # a counter made in forward
                vars(each).update(numbers)
                for name, (buffer, was) in buffers.items():
                    each._buffers[name] = buffer.copy_(was)


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {n: v for n, v in vars(module).items() if v is None or isinstance(v, int | float)}


def _same(a: Any, b: Any) -> bool:
    """Whether tensors are bitwise equal, except kinds of NaN; fake tensors count as equal."""
    return isinstance(a, FakeTensor) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _contents(value: Any) -> list[Tensor]:
    """Collect the tensors in arguments, containers, and attributes of plain objects."""
    leaves = tree_leaves(value)
    opaque = (Tensor, nn.Module, type)
    objects = [o for o in leaves if hasattr(o, "__dict__") and not isinstance(o, opaque)]
    return _tensors([leaves, [list(vars(o).values()) for o in objects]])


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    """Identify a tensor's storage, which views share."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata if local.layout is torch.strided else id(local)


def _forget(_saved: Any) -> Any:
    """Discard saved tensors."""
