"""What a loss function calls its model with: noted once, given to each pipeline stage.

A pipeline cannot run the model where ``loss_fn(model, batch)`` calls it. So a stand-in takes the
model's place: one that notes the call and leaves, and later, on the last stage, one that returns
what the stages have computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from forgekit.parallel.pipeline.tracing import PARAMETER_READ
from forgekit.steps.forward import LossFn


@attrs.frozen(eq=False)
class Call:
    """A call of the model by a loss function.

    Attributes:
        batch: The micro-batch.
        first: The first argument, a tensor.
        rest: Further positional arguments.
        keywords: Keywords.
        autocast: Whether autocasting was on around the call, and its dtype.
    """

    batch: TensorDictBase
    first: Tensor
    rest: tuple[Any, ...]
    keywords: dict[str, Any]
    autocast: tuple[bool, torch.dtype]

    @property
    def kind(self) -> str:
        """What decides which way a forward takes: which arguments there are, and of what type."""
        named = [f"{name} {type(value).__name__}" for name, value in self.keywords.items()]
        rest = [type(value).__name__ for value in self.rest]
        return f"{self.first.dtype} {self.first.ndim} {rest} {sorted(named)} {self.autocast}"

    def run(self, module: nn.Module) -> Any:
        """Call a stage as the loss function called the model."""
        enabled, dtype = self.autocast
        if not enabled:
            return module(self.first, *self.rest, **self.keywords)
        with torch.autocast(self.first.device.type, dtype=dtype):
            return module(self.first, *self.rest, **self.keywords)


def note_call(model: nn.Module, batch: TensorDictBase, loss_fn: LossFn) -> Call:
    """Call a loss function up to its call of the model, and note that.

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
        called = raised.with_traceback(None)  # whose frames hold `called`, and all that ran then
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
            f"loss_fn called the model with {got} first; a pipeline takes from its first argument "
            "how large a micro-batch is, so it must be a tensor: model(batch['input_ids'], ...)."
        )
    first, *rest = args
    autocast = called.autocast.get(first.device.type, (False, first.dtype))
    return Call(batch, first, tuple(rest), keywords, autocast)


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


_PARAMETERS = frozenset(
    {"parameters", "named_parameters", "state_dict", "modules", "named_modules"}
)
"""What gives a model's parameters."""


class _Called(BaseException):
    """Leaves a loss function at its call of the model; no ``except Exception`` holds it up."""

    def __init__(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.given = args, keywords
        accelerator = torch.accelerator.current_accelerator()
        self.autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", *([accelerator.type] if accelerator else []))
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
        value = getattr(self._model, name)
        if name in _PARAMETERS or isinstance(value, nn.Module | nn.Parameter):
            raise ValueError(f"{type(self._model).__name__}.{name}: {PARAMETER_READ}")
        return value


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
