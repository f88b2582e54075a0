"""What a loss function calls its model with: noted once, given to each pipeline stage.

A pipeline cannot run the model where ``loss_fn(model, batch)`` calls it. So a stand-in takes the
model's place: one that notes the call and leaves, and later, on the last stage, one that returns
what the stages have computed.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from forgekit.steps.forward import LossFn

__all__ = ["Call", "first_tensor", "note_call", "once"]


@attrs.frozen(eq=False)
class Call:
    """A call of the model by a loss function.

    Attributes:
        batch: The micro-batch.
        first: The first argument, which travels from stage to stage.
        rest: Further positional arguments, given to each stage.
        keywords: Keywords, given to each stage.
        autocast: Whether autocasting was on around the call, and its dtype.
        takes_head: Whether the model takes ``head``.
    """

    batch: TensorDictBase
    first: Tensor
    rest: tuple[Any, ...]
    keywords: dict[str, Any]
    autocast: tuple[bool, torch.dtype]
    takes_head: bool

    def run(self, module: nn.Module, first: Tensor, *, is_last: bool) -> Any:
        """Call a stage as the loss function called the model; only the last one has a head."""
        keywords = self.keywords
        if self.takes_head and not is_last:
            keywords = {**keywords, "head": _pass_hidden}
        enabled, dtype = self.autocast
        if not enabled:
            return module(first, *self.rest, **keywords)
        with torch.autocast(first.device.type, dtype=dtype):
            return module(first, *self.rest, **keywords)

    def check_hollow(self, hollow: nn.Module, received: Tensor) -> None:
        """Raise if the model works on its stream outside of its parts, as each stage would again.

        Args:
            hollow: The model with all parts absent; must give back what it is given.
            received: Something of the shape that passes between stages.

        Raises:
            ValueError: If it does not.
        """
        given = torch.rand_like(received)
        found = first_tensor(self.run(hollow, given, is_last=False), "the model")
        if found.shape != given.shape or not torch.equal(found.to(given.dtype), given):
            raise ValueError(
                f"{type(hollow).__name__}.forward changes what passes between its blocks outside "
                "of its modules, and would do so once more in each pipeline stage. Move that into "
                "a module with parameters, before or after the list of blocks, or into the blocks."
            )


def note_call(model: nn.Module, batch: TensorDictBase, loss_fn: LossFn) -> Call:
    """Call a loss function up to its call of the model, and note that.

    Where the model has a ``locate`` socket and got no position ids, they are added: later stages
    see hidden states, whose places tensor parallelism may have spread.

    Args:
        model: The model, whose attributes the loss function may read.
        batch: The micro-batch.
        loss_fn: ``loss_fn(model, batch) -> Loss``.

    Returns:
        The call.

    Raises:
        ValueError: If the loss function returns without calling the model.
        TypeError: If the model's first argument is no tensor.
    """
    try:
        loss_fn(_Stand(model, _leave), batch)  # pyright: ignore[reportArgumentType]
    except _Called as raised:
        called = raised
    else:
        raise ValueError(
            "loss_fn returned without calling its model; in a pipeline it must call it once for "
            "each micro-batch, with or without targets."
        )
    args, keywords = called.given
    names = _parameter_names(model)
    if not args and names and names[0] in keywords:
        args = (keywords.pop(names[0]),)
    if not args or not isinstance(args[0], Tensor):
        got = type(args[0]).__name__ if args else "no positional argument"
        raise TypeError(
            f"loss_fn called the model with {got} first; a pipeline sends its first argument from "
            "stage to stage, so it must be a tensor: model(batch['input_ids'], ...)."
        )
    first, *rest = args
    if hasattr(model, "locate") and not rest and keywords.get("position_ids") is None:
        locate: Any = model.locate
        keywords["position_ids"] = locate(first.shape[1], first.device)
    autocast = called.autocast.get(first.device.type, (False, first.dtype))
    return Call(batch, first, tuple(rest), keywords, autocast, "head" in names)


def once(model: nn.Module, output: Any) -> Any:
    """Stand in for a model whose one call has been computed.

    Args:
        model: The model, whose attributes the loss function may read.
        output: What the call returns.

    Returns:
        A callable that returns ``output``, and raises ``RuntimeError`` the second time.
    """
    left = [output]

    def answer(*_args: Any, **_keywords: Any) -> Any:
        if not left:
            raise RuntimeError(
                "loss_fn called its model twice; in a pipeline the stages run once for each "
                "micro-batch. Compute the loss from one call, or use a mesh with pp=1."
            )
        return left.pop()

    return _Stand(model, answer)


def first_tensor(output: Any, who: str) -> Tensor:
    """The first tensor in what a stage returned: what travels on to the next.

    Args:
        output: A tensor, or a tuple, mapping or dataclass with tensors.
        who: Who returned it, for the error.

    Raises:
        TypeError: If there is no floating-point tensor in it, or it is a TensorDict.
    """
    found = output
    if isinstance(output, Mapping):
        found = next((v for v in output.values() if isinstance(v, Tensor)), None)
    elif isinstance(output, tuple | list):
        found = next((v for v in output if isinstance(v, Tensor)), None)
    elif dataclasses.is_dataclass(output):
        values = (getattr(output, field.name) for field in dataclasses.fields(output))
        found = next((v for v in values if isinstance(v, Tensor)), None)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise TypeError(
            f"{who} of a pipeline returned a {type(output).__name__}; to pass it on it must be, or "
            "hold, a floating-point tensor. Blocks and models return tensors, not TensorDicts."
        )
    return found


class _Called(BaseException):
    """Leaves a loss function at its call of the model; no ``except Exception`` holds it up."""

    def __init__(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.given = args, keywords
        self.autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        }


class _Stand:
    """Stands for the model inside a loss function; all but the call is the model's own."""

    def __init__(self, model: nn.Module, answer: Callable[..., Any]) -> None:
        self._model = model
        self._answer = answer

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._answer(*args, **keywords)

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _parameter_names(model: nn.Module) -> list[str]:
    """Names of what ``forward`` takes, through subclasses that hand on ``**kwargs``."""
    names: list[str] = []
    for kind in type(model).__mro__:
        if "forward" in vars(kind):
            _, *parameters = inspect.signature(vars(kind)["forward"]).parameters.values()
            names += [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return names


def _leave(*args: Any, **keywords: Any) -> None:
    raise _Called(args, keywords)


def _pass_hidden(hidden: Tensor, _weight: Tensor | None) -> Tensor:
    """The head of a stage that has none."""
    return hidden
