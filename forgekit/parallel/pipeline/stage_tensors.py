"""What the absent parts of a pipeline stage answer, and which tensors travel between stages.

Every stage runs the model's own ``forward`` on the arguments of the call. A part that an earlier
stage holds returns the output that travelled for it, with its gradient, or a stand-in where nothing
in this stage needs the values. The first part of a later stage ends the forward. So code between
the parts runs in each stage that needs its result, and what one part returns may reach any later
part: an embedding that every block takes, the skips of a U-net, auxiliary losses.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from forgekit.parallel.module_forward import wrap_forward

PartCall = tuple[str, int]
"""A part's name, and how often it was called before in this forward."""

Source = tuple[str, int, int]
"""A tensor in what a part returned: the part's name, its call, and the tensor's number."""


@attrs.frozen
class Leaf:
    """Stands for a tensor in what a part returned, as seen for one shape of the model's input."""

    given: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_plain(self) -> bool:
        """Whether it is ``[b s ...]``, so that its shape for any other input is known."""
        return self.shape[:2] == self.given[:2]

    def at(self, given: Sequence[int]) -> tuple[int, ...]:
        """Return the shape for another input.

        Rows come first; positions are the first dimension of just that size, else the second one
        of three, which tensor parallelism may have divided. The rest stays.
        """
        scaled = list(self.shape)
        has_rows = self.shape[:1] == self.given[:1]
        if has_rows:
            scaled[0] = given[0]
        if len(given) > 1:
            sizes = self.shape[has_rows:]
            last = 1 if has_rows and len(scaled) > 2 else None
            found = sizes.index(self.given[1]) + has_rows if self.given[1] in sizes else last
            if found is not None:
                scaled[found] = scaled[found] * given[1] // self.given[1]
        return tuple(scaled)


StandIn = Callable[[Source, Leaf], Tensor]
"""Makes what stands for a tensor of an absent part."""


@attrs.frozen(eq=False)
class Flow:
    """What parts return and stages send, learned once for each kind of call.

    Attributes:
        outputs: What each call of a part returned, with a ``Leaf`` in place of each tensor.
        travels: By stage, the tensors that it sends to the next one.
        mutated: Tensors that the model's forward changes in place after a part returned them.
    """

    outputs: Mapping[PartCall, Any] = attrs.field(factory=dict)
    travels: Sequence[Sequence[Source]] = ()
    mutated: frozenset[Source] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether the flow holds for inputs of other shapes too."""
        return all(self.leaf(source).is_plain for due in self.travels for source in due)

    def leaf(self, source: Source) -> Leaf:
        """Return what is known of a tensor that travels."""
        return parts_of(self.outputs[source[:2]], Leaf)[source[2]]


@attrs.define(eq=False)
class _Run:
    """One forward of a stage."""

    flow: Flow
    given: tuple[int, ...]
    arrived: Mapping[Source, Tensor]
    device: torch.device
    stand_in: StandIn | None
    kept: dict[Source, Tensor] = attrs.field(factory=dict)
    calls: Counter[str] = attrs.field(factory=Counter)

    def next_call(self, name: str) -> PartCall:
        self.calls[name] += 1
        return name, self.calls[name] - 1

    def tensor(self, source: Source, leaf: Leaf) -> Tensor:
        """What travelled, or NaN: what was never meant to be read shows in the loss."""
        if self.stand_in is not None:
            return self.stand_in(source, leaf)
        found = self.arrived.get(source)
        if found is None:
            empty = float("nan") if leaf.dtype.is_floating_point else 0
            found = torch.full((), empty, dtype=leaf.dtype, device=self.device)
            found = found.expand(leaf.at(self.given))
        return found.clone() if source in self.flow.mutated else found


class Relay:
    """One stage's side of the exchange: answers for absent parts and keeps what is to be sent.

    Args:
        stage: The stage.
        holders: By name of a part, the stage that holds it.
        count: Number of stages.
    """

    def __init__(self, stage: int, holders: Mapping[str, int], count: int) -> None:
        self.stage = stage
        self.holders = holders
        self.is_last = stage == count - 1
        self.parts: dict[str, nn.Module] = {}
        self._hooked: set[str] = set()
        self._run: _Run | None = None

    def attach(self, module: nn.Module, parts: Mapping[str, nn.Module]) -> None:
        """Make a copy of the model this relay's stage, in place.

        Args:
            module: The copy; its forward will end where the next stage begins.
            parts: The parts that it has, by name.
        """
        self.parts.update(parts)
        wrap_forward(module, self._forward)

    def run(
        self,
        forward: Callable[[], Any],
        flow: Flow,
        received: Sequence[Tensor],
        *,
        given: Sequence[int],
        device: torch.device,
        stand_in: StandIn | None = None,
    ) -> Any:
        """Run the stage.

        Args:
            forward: Calls the stage's module.
            flow: What travels.
            received: What the stage before has sent.
            given: Shape of the model's input.
            device: Where stand-ins are made.
            stand_in: Makes what absent parts return in a rehearsal, which sends nothing.

        Returns:
            What the model returns, of the last stage; of the others the tensors to send.
        """
        is_rehearsal = stand_in is not None
        arriving = flow.travels[self.stage - 1] if self.stage and not is_rehearsal else ()
        arrived = dict(zip(arriving, received, strict=True))
        if not (is_rehearsal or self.is_last):
            self._hook({source[0] for source in flow.travels[self.stage]})
        self._run = _Run(flow, tuple(given), arrived, device, stand_in)
        try:
            return forward()
        finally:
            self._run = None

    def answer(self, name: str) -> Any:
        """Return what travelled for an absent part, or a stand-in.

        Raises:
            ValueError: If the part's stage did not call it, as it would run after this one.
        """
        run = self._running(name)
        if self.is_later(name):
            raise _Reached
        call = run.next_call(name)
        if call not in run.flow.outputs:
            raise ValueError(
                f"{name}, which pipeline stage {self.holders[name]} holds, is called in stage "
                f"{self.stage} and was not called in its own: a stage runs all of its parts before "
                "the next stage runs any. What is registered before the list of blocks belongs to "
                "the first stage, what follows it to the last. Move it into the blocks, or use "
                "pp=1."
            )
        numbers = itertools.count()
        return mapped(
            lambda leaf: run.tensor((*call, next(numbers)), leaf), run.flow.outputs[call], Leaf
        )

    def reach(self, name: str) -> None:
        """End the stage if a part that is used without being called is one of a later stage."""
        if self._run is not None and self.is_later(name):
            raise _Reached

    def is_later(self, name: str) -> bool:
        """Whether a part is one of a later stage."""
        return self.holders[name] > self.stage

    def _running(self, name: str) -> _Run:
        if self._run is None:
            raise RuntimeError(
                f"{name} is held by pipeline stage {self.holders[name]} and was called on stage "
                f"{self.stage} outside of the model's forward; only its stage can run it."
            )
        return self._run

    def _forward(self, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        try:
            out = forward(*args, **keywords)
        except _Reached:
            return self._sent()
        if self.is_last:
            return out
        raise ValueError(
            f"the model's forward ended in pipeline stage {self.stage} without a call of a later "
            "stage's part. Call each block in order through the model's own list of blocks."
        )

    def _sent(self) -> tuple[Tensor, ...]:
        run = self._running("a stage's last part")
        if run.stand_in is not None:
            return ()
        found = {**run.arrived, **run.kept}
        due = run.flow.travels[self.stage]
        if lost := [
            f"{name}, call {call}" for name, call, n in due if (name, call, n) not in found
        ]:
            raise ValueError(
                f"pipeline stage {self.stage} ran without {lost[0]}, whose output it sends since "
                "the first micro-batch. A pipeline needs a forward that always calls the same "
                "parts: skip within a block, or use pp=1."
            )
        return tuple(found[source] for source in due)

    def _hook(self, names: set[str]) -> None:
        """Keep outputs of parts from here on; hooks stay, and are of no effect between runs."""
        for name in (names - self._hooked) & self.parts.keys():
            keep: Callable[..., Any] = partial(self._keep, name)
            if self.parts[name]._compiled_call_impl is not None:
                keep = torch.compiler.disable(keep)  # compiled parts trace their hooks
            self.parts[name].register_forward_hook(keep)
            self._hooked.add(name)

    def _keep(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        run = self._run
        if run is None or run.stand_in is not None:  # None: recomputed by a backward pass
            return
        call = run.next_call(name)
        for number, tensor in enumerate(parts_of(output)):
            source = (*call, number)
            if source in run.flow.travels[self.stage]:
                run.kept[source] = tensor.clone() if source in run.flow.mutated else tensor


class Absent(nn.Module):
    """Stands where a part of another stage would be.

    Reads of the part's plain settings (numbers, strings) are answered as the part would.

    Args:
        of: The part.
        name: Its name.
        relay: Of the stage in whose copy of the model it stands; None in the model itself.
    """

    is_absent = True

    def __init__(self, of: nn.Module, name: str = "", relay: Relay | None = None) -> None:
        super().__init__()
        self._part, self._relay = name, relay
        for key, value in vars(of).items():
            if key not in self.__dict__ and isinstance(value, int | float | str):
                setattr(self, key, value)

    def forward(self, *_args: Any, **_keywords: Any) -> Any:
        """Return what travelled for the part."""
        if self._relay is None:
            raise RuntimeError(self._elsewhere("called"))
        return self._relay.answer(self._part)

    def __getattr__(self, name: str) -> Any:
        # A later part's weight is read for code that this stage does not reach.
        if name in ("weight", "bias") and self._relay and self._relay.is_later(self._part):
            return None
        raise AttributeError(self._elsewhere(f"read for {name!r}"))

    def __getitem__(self, _index: Any) -> Any:
        return self._used("indexed")

    def __iter__(self) -> Any:
        return self._used("iterated over")

    def _used(self, how: str) -> Any:
        if self._relay is not None:
            self._relay.reach(self._part)
        raise TypeError(self._elsewhere(how))

    def _elsewhere(self, how: str) -> str:
        return (
            f"{self._part or 'a part'}, which another pipeline stage holds, is {how}; a stage can "
            "only call the parts of others, and gets what they return. Return what is needed from "
            "the part's forward, move it into the blocks, or use pp=1."
        )


def mapped(function: Callable[[Any], Any], value: Any, kind: type = Tensor) -> Any:
    """Rebuild what a module returned with each tensor replaced.

    Args:
        function: Takes a tensor, in order.
        value: A tensor, or tuples, lists, dictionaries and dataclasses of them; None, booleans
            and strings stay.
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
    if value is None or isinstance(value, bool | str):
        return value
    raise TypeError(
        f"a pipeline stage cannot send a {type(value).__name__}. Return tensors from the blocks, "
        "or tuples, lists, dictionaries and dataclasses of tensors."
    )


def parts_of(value: Any, kind: type = Tensor) -> list[Any]:
    """List the tensors in what a module returned, in the order of ``mapped``."""
    found: list[Any] = []
    mapped(found.append, value, kind)
    return found


class _Reached(BaseException):
    """Leaves the model's forward where a later stage begins; no ``except Exception`` holds it."""
