"""The explicit state of a training run, and the rule that a consumed state cannot be read.

``TrainState`` is a frozen record that each step takes and returns. The model and the optimizer in
it are updated in place, so a state that was passed to a step no longer describes anything: its
weights have moved on. ``donate`` therefore empties the old record, and reading it afterwards raises
an error that names the line that consumed it. Normal reads pay nothing for this: Python asks
``__getattr__`` only for a field that is missing.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from forgekit.environment import is_library

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


DEFAULT_LOSS_SCALE = 2.0**-12
"""Keeps gradients of summed losses in the range of 16-bit floats (one count in 4,096 targets)."""

_ATTRIBUTE = "_forgekit_layout"
"""The attribute of a model under which ``parallelize`` stores its layout; there is no other."""


@attrs.frozen(kw_only=True, eq=False)
class Layout:
    """How a model was laid out, as seen from one rank.

    Attributes:
        ring: Size of the ring-attention group.
        ulysses: Ranks that exchange positions for heads; ``ring * ulysses`` is the size of ``cp``.
        context_rank: This rank's position on ``cp``, ``ring_rank * ulysses + ulysses_rank``.
        sockets: The model's own ``attend``, ``locate`` and ``sum_slices`` by module name, for
            whole sequences; empty where they were not replaced.
        experts: Ranks that share the experts.
        tensor: Ranks that share each matrix.
        sequence: Ranks over which tensor parallelism shards the positions of the residual stream.
        longest: Maximum sequence length; None if unknown.
        attention: The kernel for each use of attention, as ``parallelize`` found it: of ``"rows"``
            and ``"documents"``, or of the blocks of a ``"ring"``.
        documents: Where batches note the document ids that they move to a device; None where no
            kernel needs them on the host.
        owns_loss: Whether this rank's losses and counts enter the step's sums: every slice of a
            batch is counted on one tensor-parallel rank of the last stage.
        stages: This rank's pipeline stages; None where it holds the whole model.
        styles: The tensor-parallel plan: style by module name; empty without one.
        unsharded: By module the attributes that tensor parallelism replaced, as one rank has them.
        loss_scale: The loss scale to start from.
        dynamic_loss_scale: Whether the loss scale follows overflows (float16).
    """

    ring: int = 1
    ulysses: int = 1
    context_rank: int = 0
    sockets: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    experts: int = 1
    tensor: int = 1
    sequence: int = 1
    longest: int | None = None
    attention: Mapping[str, str] = attrs.field(factory=dict)
    documents: Any = None
    owns_loss: bool = True
    stages: Any = None
    styles: Mapping[str, Any] = attrs.field(factory=dict)
    unsharded: Mapping[nn.Module, Mapping[str, Any]] = attrs.field(factory=dict, repr=False)
    loss_scale: float = DEFAULT_LOSS_SCALE
    dynamic_loss_scale: bool = False

    @property
    def context(self) -> int:
        """Ranks that share a sequence."""
        return self.ring * self.ulysses

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the losses: the last pipeline stage does."""
        return self.stages is None or self.stages.has_last

    def roots(self, model: nn.Module) -> list[nn.Module]:
        """The modules that FSDP wraps as roots: the model, or this rank's pipeline stages."""
        return [model] if self.stages is None else [model, *self.stages.modules]

    @property
    def positions_multiple(self) -> int:
        """Divides the length of every sequence that all ranks can share evenly."""
        chunks = 2 * self.ring if self.ring > 1 else 1  # zigzag gives each rank two
        return chunks * self.ulysses * self.sequence


def layout_of(model: nn.Module) -> Layout:
    """Return the layout of a model, or of a module in it; by default one rank holds all of it.

    ``TrainState`` does so once. Callers without a state, such as ``generate``, ask the model.
    """
    layouts = (getattr(module, _ATTRIBUTE, None) for module in model.modules())
    # Of several layouts take the float16 one: without its loss scale gradients would underflow.
    plain = Layout(longest=longest_of(model))
    return max(filter(None, layouts), key=lambda one: one.dynamic_loss_scale, default=plain)


def was_parallelized(model: nn.Module) -> bool:
    """Whether ``parallelize`` has laid a model out, or a module in it."""
    return any(hasattr(module, _ATTRIBUTE) for module in model.modules())


def longest_of(model: nn.Module) -> int | None:
    """Return a model's maximum sequence length, ``spec.max_seq_len``; None if unknown."""
    return getattr(getattr(model, "spec", None), "max_seq_len", None)


def set_layout(model: nn.Module, layout: Layout) -> None:
    """Store a layout on a model, in place."""
    setattr(model, _ATTRIBUTE, layout)


class DonatedStateError(RuntimeError):
    """A ``TrainState`` was read after a function had consumed it and returned a new one."""


@attrs.frozen
class AgreedNames:
    """The names that all ranks agreed on at a run's first step.

    Attributes:
        sums: Names of the sums that a step adds up over the ranks, in their order.
        parameters: Names of all parameters, those of other pipeline stages too.
        waiting: Of the last steps whether a rank had a problem, and this rank's own; empty on a
            CPU, where it is read at once.
    """

    sums: tuple[Any, ...]
    parameters: tuple[str, ...]
    waiting: deque[Any] = attrs.field(factory=deque, repr=False)


@attrs.define(eq=False)
class SaveHandle:
    """What the saves of a run share; a state has the handle of the state that it came from.

    ``checkpoint_save`` fills it in, so two runs in one process never wait for each other.

    Attributes:
        pending: The last save; it may still be running.
        group: Process group of the saves, after the default group and the ranks that it was made
            for; None before the first save on several ranks.
        buffers: Copies in host memory by key, which the next save writes into again.
        is_averaged: Whether an average stands in the place of the weights, so nothing may be saved.
    """

    pending: Any = None
    group: tuple[Any, Any] | None = None
    buffers: dict[str, Tensor] = attrs.field(factory=dict)
    is_averaged: bool = False


@attrs.define(eq=False)
class GradientOwner:
    """Which step the gradients in the parameters belong to; later states share this record.

    Attributes:
        step: The step that ``begin_step`` returned last, or None.
    """

    step: Any = None


@attrs.frozen(kw_only=True, slots=True, eq=False)
class TrainState:
    """Everything that a step needs and changes; passed in, returned, never hidden.

    The learning rate, the data order and the random state are pure functions of
    ``(seed, step, samples, rank)``, so there is no scheduler, sampler or generator to keep.

    A subclass adds fields. Fields with a ``state_dict``, plain tensors, numbers and strings are
    checkpointed; ``attrs.field(metadata={"checkpoint": False})`` leaves one out, and with
    ``metadata={"optional": True}`` it keeps its value if a checkpoint was written without it.

    Attributes:
        model: The model; its parameters change in place at each step.
        optimizer: Any ``torch.optim.Optimizer`` over the model's parameters; changes in place.
        mesh: The device mesh, or None for one process.
        step: Optimizer steps taken, bad ones included.
        samples: Rows consumed globally; the only number that the data needs to resume.
        targets: ``[]`` int64: targets trained on.
        skipped: ``[]`` int64: consecutive bad steps up to now.
        loss_scale: ``[]`` float32, a power of two that multiplies summed losses before backward.
        seed: Seed of data order and dropout.
        good_steps: ``[]`` int64: good steps since the loss scale last changed; moves in float16
            only.
        recent: ``[window 2]`` float64: loss and gradient norm of the last good steps, oldest
            first, NaN where there were none; None unless steps limit spikes.
        skips: Skipped ranges (first sample, rows), in the numbering in force when each was added.
            Grows when a run is rolled back.
        average: Running average of the weights, or None; changes in place. ``create`` makes it of
            a rule, and ``averaged`` puts it in place of the weights.
        bad_since: ``[]`` int64: samples before the first of the last bad steps; the step's own
            while there are none, and -1 where an older checkpoint does not say.
        layout: How ``parallelize`` laid the model out; read off the model once, here. Not part of
            checkpoints: a run may resume in another one.
        agreed_names: What the ranks agreed to add up; None before the first step of a process.
            Not part of checkpoints.

    Examples:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> state = TrainState.create(model, optimizer, seed=1)
        >>> new = donate(state, step=state.step + 1)
        >>> new.step
        1
    """

    model: nn.Module = attrs.field(repr=False)
    optimizer: Optimizer = attrs.field(repr=False)
    mesh: DeviceMesh | None = attrs.field(default=None, repr=False)
    step: int = 0
    samples: int = 0
    targets: Tensor
    skipped: Tensor
    loss_scale: Tensor
    seed: int = 0
    good_steps: Tensor = attrs.field(
        default=attrs.Factory(lambda self: torch.zeros_like(self.targets), takes_self=True),
        metadata={"optional": True},
    )
    recent: Tensor | None = attrs.field(default=None, repr=False, metadata={"optional": True})
    skips: tuple[tuple[int, int], ...] = attrs.field(default=(), metadata={"optional": True})
    average: Any = attrs.field(default=None, repr=False, metadata={"checkpoint": False})
    bad_since: Tensor = attrs.field(
        default=attrs.Factory(lambda self: torch.full_like(self.targets, -1), takes_self=True),
        repr=False,
        metadata={"optional": True},
    )
    layout: Layout = attrs.field(
        default=attrs.Factory(lambda self: layout_of(self.model), takes_self=True),
        repr=False,
        metadata={"checkpoint": False},
    )
    agreed_names: AgreedNames | None = attrs.field(
        default=None, repr=False, metadata={"checkpoint": False}
    )
    saves: SaveHandle = attrs.field(factory=SaveHandle, repr=False, metadata={"checkpoint": False})
    gradient_owner: GradientOwner = attrs.field(
        factory=GradientOwner, repr=False, metadata={"checkpoint": False}
    )
    _donated_at: str | None = attrs.field(
        default=None, init=False, repr=False, metadata={"checkpoint": False}
    )

    @classmethod
    def create(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        loss_scale: float | None = None,
        average: Any = None,
        **fields: Any,
    ) -> Self:
        """Build the state before the first step.

        Args:
            model: The model, after ``parallelize`` where there is more than one rank.
            optimizer: An optimizer over the model's parameters.
            mesh: What ``build_mesh`` returned, or None for one process.
            seed: Seed of data order and dropout.
            loss_scale: A power of two. Gradients do not depend on it as long as they stay in range.
                By default 1 in float16, where 2**-12 loses small gradients, else 2**-12.
            average: Rule of a running average of the weights, as ``forgekit.EMA(0.999)``.
            **fields: Values of a subclass's own fields.

        Returns:
            A state at step 0, its counters on the model's device.

        Raises:
            TypeError: If ``optimizer`` is not an optimizer, such as a list of several; if
                ``average`` is not a rule of an average.
            ValueError: If ``loss_scale`` is not a power of two, the optimizer holds a parameter
                that the model does not, parameters are complex or sparse, there are several ranks
                and no mesh, or parameters are not sharded on a mesh of several ranks (their
                gradients would never be reduced).
        """
        _check_optimizer(optimizer)
        layout = _read_layout(model, mesh)
        if loss_scale is None:
            loss_scale = layout.loss_scale
        if math.frexp(loss_scale)[0] != 0.5:
            rule = "others round the gradients that they scale. Use for example 2.0**-12."
            raise ValueError(f"loss_scale {loss_scale} is not a positive power of two; {rule}")
        check_dense(model)
        _check_blocks(optimizer)
        _check_parameters(model, optimizer, mesh)
        device = _device_of(model, mesh)
        return cls(
            model=model,
            optimizer=optimizer,
            mesh=mesh,
            average=_begin_average(cls, average, model, device),
            targets=torch.zeros((), dtype=torch.int64, device=device),
            skipped=torch.zeros((), dtype=torch.int64, device=device),
            loss_scale=torch.full((), loss_scale, dtype=torch.float32, device=device),
            seed=seed,
            **{"layout": layout, **fields},
        )

    def __getattr__(self, name: str) -> Any:
        # Called for missing names only: a field that `donate` removed, or a misspelt one.
        if name in {field.name for field in attrs.fields(type(self))}:
            where = object.__getattribute__(self, "_donated_at")
            raise DonatedStateError(
                f"read {name!r} of a TrainState that was donated at {where}. "
                "Keep the state the step returned: state, metrics = step(state, batches)."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


StateT = TypeVar("StateT", bound=TrainState)


def donate(state: StateT, **changes: Any) -> StateT:
    """Return a copy of ``state`` with ``changes``, and empty ``state``: reading it raises.

    For functions that change the model or the optimizer in place: they return a new state, and
    whoever still holds the old one learns so at the first read instead of training on a mixture.

    Args:
        state: The state to consume.
        **changes: New values of its fields.

    Returns:
        A state of the same class.

    Raises:
        DonatedStateError: If ``state`` was donated before.
    """
    new = attrs.evolve(state, **changes)
    object.__setattr__(state, "_donated_at", _caller())
    for field in attrs.fields(type(state)):
        if field.name == "_donated_at":
            continue
        if not field.init:  # evolve passes these over
            object.__setattr__(new, field.name, getattr(state, field.name))
        object.__delattr__(state, field.name)
    return new


def _check_optimizer(optimizer: Any) -> None:
    """Raise unless there is one optimizer."""
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; a state has one torch.optim.Optimizer. "
            "forgekit.chain_optimizers(first, second) makes one of several."
        )


def _begin_average(
    cls: type[TrainState], average: Any, model: nn.Module, device: torch.device
) -> Any:
    """Build the average that a rule describes; a subclass's own field keeps the given value."""
    if hasattr(average, "begin"):
        return average.begin(model, device)
    if average is None or attrs.fields(cls).average != attrs.fields(TrainState).average:
        return average
    raise TypeError(
        f"average is a {type(average).__name__}; pass a rule such as forgekit.EMA(0.999) "
        "or forgekit.UniformAverage(start_step=1000)."
    )


def _caller() -> str:
    """Return file and line of the innermost frame outside the library; recipes are outside."""
    frame = innermost = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _device_of(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """Return the device that the model computes on; its parameters may be offloaded to the host."""
    if mesh is not None and mesh.device_type != "cpu":
        return torch.device(mesh.device_type, torch.accelerator.current_device_index())
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def check_dense(model: nn.Module) -> None:
    """Raise if a parameter, or its future gradient, is complex or sparse.

    Raises:
        ValueError: With the parameter or module, and what to use.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_complex() or parameter.layout != torch.strided:
            raise ValueError(
                f"{name!r} is {parameter.dtype} and {parameter.layout}; a step trains real, dense "
                "parameters. Store real and imaginary parts (torch.view_as_real), or dense values."
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False):
            rule = "a step adds up dense gradients. Build it with sparse=False."
            raise ValueError(f"{name!r} is an embedding with sparse=True; {rule}")


def _read_layout(model: nn.Module, mesh: DeviceMesh | None) -> Layout:
    """Return a model's layout; raise if several ranks share it and it has none."""
    sizes = {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if not hasattr(model, _ATTRIBUTE):
        for name in ("pp", "cp", "tp"):
            if (size := sizes.get(name, 1)) > 1:
                raise ValueError(
                    f"{type(model).__name__} is not the model that forgekit.parallelize returned: "
                    f"with {name}={size} losses would count {size} times. Pass the returned one."
                )
    return layout_of(model)


def _check_blocks(optimizer: Optimizer) -> None:
    """Raise for torchao's optimizers with states of 8 bits or fewer."""
    if any(kind.__module__ == "torchao.optim.adam" for kind in type(optimizer).__mro__):
        raise ValueError(
            f"{type(optimizer).__name__} of torchao keeps its state in blocks that begin with each "
            "rank's shard, so a run would depend on its layout, and not be resumed. Use "
            "forgekit.lion, or forgekit.adamw(model, stochastic_rounding=True)."
        )


def _check_parameters(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh | None) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the "
                    "model does not. Build it from what parallelize returned: fk.adamw(model)."
                )
    if mesh is None and dist.is_initialized() and (world := dist.get_world_size()) > 1:
        raise ValueError(
            f"there are {world} ranks, but the state got no mesh, so each would train its own "
            "model. Pass mesh=mesh, and the model through forgekit.parallelize(model, mesh)."
        )
    plain = [name for parameter, name in names.items() if not isinstance(parameter, DTensor)]
    if mesh is not None and mesh.size() > 1 and plain:
        raise ValueError(
            f"{len(plain)} parameters (first: {plain[0]!r}) are not sharded on a mesh of "
            f"{mesh.size()} ranks, so their gradients would not be reduced. "
            "Pass the model through forgekit.parallelize(model, mesh) first."
        )
