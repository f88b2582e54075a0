"""One pipeline stage: the model's own forward, with stand-ins for absent parts.

What crosses from stage to stage is what the last block before the boundary returned. On the next
stage that block, which is absent there, returns it; every other absent part returns NaN. So code
between the parts (a scale, a mask, positions) runs on each stage as it is written. A model in which
anything else of an absent part matters is refused by a rehearsal, see ``rehearsal.py``. The first
part of a later stage ends the forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from forgekit.parallel.module_forward import wrap_forward

RETURN_IT = "Let the blocks take and return it (a tuple of tensors), or use pp=1."


@attrs.frozen
class Leaf:
    """Shape and dtype of a tensor in a part's output."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def scaled(self, given: Sequence[int], shape: Sequence[int]) -> Leaf:
        """Return the leaf for an input ``[b s]`` of another shape than ``given``.

        Rows come first; positions are the first dimension of just that size, else the second one
        of three, which ranks may share. The rest stays.
        """
        sizes, has_rows = list(self.shape), self.shape[:1] == tuple(given[:1])
        if has_rows:
            sizes[0] = shape[0]
        shared = 1 if has_rows and len(sizes) > 2 else None
        at = next((n for n in range(has_rows, len(sizes)) if sizes[n] == given[1]), shared)
        if at is not None:
            sizes[at] = sizes[at] * shape[1] // given[1]
        return Leaf(tuple(sizes), self.dtype)


@attrs.frozen
class Forms:
    """The outputs of earlier stages' parts, by part, for an input of ``shape``, ``[b s]``."""

    shape: tuple[int, ...]
    by_part: Mapping[str, Any]

    def at(self, part: str, shape: Sequence[int]) -> Any:
        """Return a part's output for an input of another shape, with leaves for tensors."""
        form = self.by_part[part]
        if tuple(shape) == self.shape:
            return form
        return mapped(lambda leaf: leaf.scaled(self.shape, shape), form, Leaf)


StandIn = Callable[[Leaf], Tensor]
"""Makes a tensor of an absent part's output."""


@attrs.define(eq=False)
class Run:
    """One forward of a stage.

    Attributes:
        forms: What parts of earlier stages return.
        shape: ``[b s]`` of the micro-batch.
        received: What the stage before has sent.
        stand_in: Makes what all other absent parts return.
        arrive: Called where the stream arrives.
        has_arrived: Whether it has.
        sent: What the stage's last block returned.
        versions: Of its tensors, to see whether they were changed in place since.
    """

    forms: Forms
    shape: Sequence[int]
    received: Sequence[Tensor]
    stand_in: StandIn
    arrive: Callable[[], Any] = lambda: None
    has_arrived: bool = False
    sent: Any = None
    versions: Sequence[int] = ()


class Stage:
    """A rank's part of one stage.

    Args:
        number: The stage.
        module: A copy of the model in which the parts of other stages are ``Absent``.
        parts: Its own parts by name.
        holders: By name of a part, the stage that holds it.
        last_blocks: Name of the last block of each stage.
    """

    def __init__(
        self,
        number: int,
        module: nn.Module,
        parts: Mapping[str, nn.Module],
        holders: Mapping[str, int],
        last_blocks: Sequence[str],
    ) -> None:
        self.number, self.module, self.parts = number, module, parts
        self.is_last = number == len(last_blocks) - 1
        self._holders = holders
        self._arrival, self._departure = ["", *last_blocks][number : number + 2]
        self._is_hooked = self.is_last
        self._run: Run | None = None
        wrap_forward(module, self._forward)

    def run(self, call: Callable[[nn.Module], Any], run: Run) -> Any:
        """Run the stage.

        Args:
            call: Calls the stage's module as the loss function calls the model.
            run: What the absent parts return.

        Returns:
            The model's output on the last stage, else the output of the stage's last block.
        """
        if not self._is_hooked:  # at the first run, after FSDP's own hook
            block = self.parts[self._departure]
            keep: Callable[..., Any] = self._keep
            if block._compiled_call_impl is not None:
                keep = torch.compiler.disable(keep)  # compiled blocks trace hooks
            block.register_forward_hook(keep)
            self._is_hooked = True
        self._run = run
        try:
            return call(self.module)
        finally:
            self._run = None

    def answer(self, name: str) -> Any:
        """Return an absent part's received output, or stand-ins; stop at a later stage's part."""
        run = self._running(name)
        if self.is_later(name):
            raise _Reached
        if run.has_arrived or name not in run.forms.by_part:
            raise ValueError(
                f"{name} of pipeline stage {self._holders[name]} is called in stage {self.number} "
                "out of turn: what is registered before the blocks runs in the first stage, what "
                "follows them in the last. Move it into the blocks, or use pp=1."
            )
        form = run.forms.at(name, run.shape)
        if name != self._arrival:
            return mapped(run.stand_in, form, Leaf)
        run.has_arrived = True
        run.arrive()
        # The stream has the form of the previous stage's last output.
        tensors = iter(run.received)
        return mapped(lambda _: next(tensors), form, Leaf)

    def is_later(self, name: str) -> bool:
        """Whether a part belongs to a later stage."""
        return self._holders[name] > self.number

    def refuse_use(self, name: str, how: str) -> None:
        """End the stage when a later part is used without a call; raise for an earlier one."""
        if self._run is not None:
            # Not an AttributeError, which `getattr` with a default would swallow.
            raise _Reached if self.is_later(name) else ValueError(elsewhere(name, how))

    def _running(self, name: str) -> Run:
        if self._run is None:
            raise RuntimeError(elsewhere(name, f"called on stage {self.number} outside of a step"))
        return self._run

    def _keep(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._run is not None:  # None: recomputed in backward
            self._run.sent = output
            self._run.versions = [tensor._version for tensor in tensors_of(output)]

    def _forward(self, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        run = self._running("a stage")
        try:
            # The model's forward, up to the first part of a later stage.
            out = forward(*args, **keywords)
        except _Reached:
            out = self._sent(run)
        else:
            if not self.is_last:
                raise ValueError(
                    f"the model's forward ended in pipeline stage {self.number} without calling a "
                    "later stage. Call each block of the model's own list in order."
                )
        if self.number and not run.has_arrived:
            raise ValueError(_dropped(self.number, self._arrival, "receives"))
        return out

    def _sent(self, run: Run) -> Any:
        if run.sent is None:
            raise ValueError(_dropped(self.number, self._departure, "sends"))
        if run.versions != [tensor._version for tensor in tensors_of(run.sent)]:
            raise ValueError(
                f"what {self._departure} returned is changed in place before the next block, and "
                "would be again in the next pipeline stage. Write x = x + y, or use pp=1."
            )
        return run.sent


class Absent(nn.Module):
    """Replaces a part of another stage; has its plain settings (numbers, strings).

    Args:
        of: The part.
        name: Its name.
        stage: In whose copy of the model it stands; None in the model itself.
    """

    is_absent = True

    def __init__(self, of: nn.Module, name: str = "", stage: Stage | None = None) -> None:
        super().__init__()
        self._part, self._stage = name, stage
        for key, value in vars(of).items():
            if key not in self.__dict__ and isinstance(value, int | float | str):
                setattr(self, key, value)

    def forward(self, *_args: Any, **_keywords: Any) -> Any:
        """Return the part's received output."""
        if self._stage is None:
            raise RuntimeError(elsewhere(self._part, "called"))
        return self._stage.answer(self._part)

    def __getattr__(self, name: str) -> Any:
        how = f"read for {name!r}"
        if not name.startswith("_") and self._stage is not None:
            # A later part's weight may be read for code that this stage does not reach.
            if name in ("weight", "bias") and self._stage.is_later(self._part):
                return None
            self._stage.refuse_use(self._part, how)
        raise AttributeError(elsewhere(self._part, how))


def elsewhere(name: str, how: str) -> str:
    """Build the error for the use of a part on another stage."""
    return (
        f"{name or 'a part'}, which another pipeline stage holds, is {how}; only what the blocks "
        "return crosses. Return it, move it into them, or use pp=1."
    )


def poison(leaf: Leaf, device: torch.device) -> Tensor:
    """Make a value that must not be read: NaN, which would show in the loss."""
    empty = float("nan") if leaf.dtype.is_floating_point else 0
    return torch.full(leaf.shape, empty, dtype=leaf.dtype, device=device)


def form_of(value: Any) -> Any:
    """Replace the tensors of a module's output by leaves."""
    return mapped(lambda tensor: Leaf(tuple(tensor.shape), tensor.dtype), value)


def mapped(function: Callable[[Any], Any], value: Any, kind: type = Tensor) -> Any:
    """Rebuild a module's output with each tensor replaced.

    Args:
        function: Takes a tensor, in order.
        value: A tensor, or tuples, lists, dictionaries and dataclasses of them; None, numbers and
            strings stay.
        kind: What stands for the tensors.

    Raises:
        TypeError: If there is something else in it.
    """
    if isinstance(value, kind):
        return function(value)
    again = partial(mapped, function, kind=kind)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{n: again(getattr(value, n)) for n in names})
    if isinstance(value, dict):
        return type(value)((key, again(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        items = map(again, value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a pipeline stage cannot send a {type(value).__name__}. Return tensors from the blocks, "
        "or tuples, lists, dictionaries and dataclasses of them."
    )


def tensors_of(value: Any, kind: type = Tensor) -> list[Any]:
    """List the tensors of a module's output, in the order of ``mapped``."""
    tensors: list[Any] = []
    mapped(tensors.append, value, kind)
    return tensors


def _dropped(number: int, name: str, does: str) -> str:
    return (
        f"pipeline stage {number} ran without {name}, whose output it {does}. Call the parts that "
        "are registered before the blocks, then each block; skip within a block, or use pp=1."
    )


class _Reached(BaseException):
    """Ends the model's forward at a later stage; passes through ``except Exception``."""
