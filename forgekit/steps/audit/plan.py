"""Proof of a tensor-parallel plan: a short slice of the first micro-batch, whole and sharded.

Between two split projections each rank has some of the channels. What computes across them (a norm,
a softmax), a parameter there that no entry names, or channels that leave on another way train
another model, mostly without an error. So the ranks run a slice as one rank would and then as they
train, and compare what each block returns and the gradients of its parameters and inputs.

A block's weights are gathered while it runs and no longer. They and the inputs are float32, so that
what differs is the plan and not rounding; and they are moved a little, since a weight of zero would
hide what is behind it. FSDP sees nothing of this: its hooks are passed over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import attrs
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn.utils.stateless import _reparametrize_module

from forgekit.model.attention import attend_causal
from forgekit.parallel.agreement import exchange, raise_together
from forgekit.parallel.context.context_parallel import with_sockets
from forgekit.parallel.fsdp import fsdp_modules
from forgekit.parallel.tensor.styles import ROUTED, take_whole
from forgekit.state import Layout, TrainState
from forgekit.steps.audit.agreement import compare_modules
from forgekit.steps.audit.copies import (
    Inputs,
    floating_tensors,
    gather_parameter,
    keeping_buffers,
    map_tensors,
    normal,
    placement_of,
    tensors_of,
    widen,
    with_attributes,
)
from forgekit.steps.audit.positions import beside_the_step, first_rows
from forgekit.steps.micro_batch import LossFn, compute_loss, take_part
from forgekit.steps.pipelined import evaluate_staged
from forgekit.tensors import full

CLOSE = 1e-3
"""Largest relative difference that counts as equal; a wrong plan differs by far more."""

NOISE = 1e-5
"""The same over the largest gradient of a block, for gradients that are zero but for rounding."""

POSITIONS = 16
"""Positions of a slice for each rank that shares them."""

MOVED = 0.1
"""Relative size of the perturbation of the weights; absolute where a weight is zero."""

PROBES = 3
"""Random vectors from each side that a tensor is multiplied by, to be compared."""

REMEDY = (
    ". Between a 'colwise' and a 'rowwise' module each rank has some of the channels: compute "
    "nothing across them (a norm, a softmax, a mean), and let nothing else in or out. Name modules "
    "with parameters there 'heads' (the same for all channels, gradients summed), 'channels' "
    "(sharded like them) or, where it sees all of them, 'replicate'; give a parameter of the block "
    "itself a module of its own; or leave the block out of the plan."
)


class _Statement(NamedTuple):
    """What one pass says of a tensor: its shape, and numbers by which another is compared."""

    shape: torch.Size
    size: float
    numbers: Tensor


def check_plan(state: TrainState, batch: TensorDictBase, loss_fn: LossFn) -> None:
    """Raise on every rank if tensor parallelism would train another model than one rank.

    Args:
        state: The state; nothing in it changes. Of a pipeline's stages each part is checked by
            itself, where it runs.
        batch: The first micro-batch, whole sequences ``[b s]``.
        loss_fn: ``loss_fn(model, batch) -> Loss``; called twice more, in evaluation.

    Raises:
        ValueError: With what differs, and the remedy.
    """
    # Ranks that share a sequence run the same slice of it, with the attention of one device.
    layout = attrs.evolve(state.layout, ring=1, ulysses=1, documents=None)
    device, tensor = state.targets.device, layout.tensor
    mesh = cast("DeviceMesh", state.mesh)
    short = first_rows(batch, mesh.get_group("tp"), tensor * POSITIONS, tensor)
    proof = _Proof(layout, mesh, mesh["tp"], device)
    with (
        beside_the_step(state),
        with_sockets(state.model, {**_attending(state.model), **layout.sockets}),
        torch.no_grad(),
        ExitStack() as stack,
    ):
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        if layout.stages is None:
            part = take_part(short, layout, device)
            for proof.is_whole in (True, False):
                with proof.taking(state.model):
                    compute_loss(state.model, part, loss_fn)
                    proof.meet("the end of a short pass")
        else:
            shared = attrs.evolve(state, layout=layout)
            with keeping_buffers(layout.stages.modules):
                evaluate_staged(shared, [short], loss_fn)  # which rehearses
                with proof.checking_parts():
                    evaluate_staged(shared, [short], loss_fn)
    raise_together(proof.problem and f"tensor parallelism (tp {tensor}): {proof.problem}{REMEDY}")


def _attending(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Attention of one device for float32: what was asked for may take 16 bits only."""
    return {
        name: {"attend": attend_causal}
        for name, module in model.named_modules()
        if getattr(vars(module).get("attend"), "func", None) is attend_causal
    }


@attrs.define(eq=False)
class _Proof:
    """Two passes of the slice: as one rank runs it, and, where that is known, sharded.

    Attributes:
        layout: The model's layout.
        mesh: All ranks.
        ranks: Those that share each matrix.
        device: The model's.
        is_whole: Whether this is the whole pass, which states, or the sharded one, which compares.
        problem: What differs first.
        stated: What the whole pass stated, by what it is of.
    """

    layout: Layout
    mesh: DeviceMesh
    ranks: DeviceMesh
    device: torch.device
    is_whole: bool = True
    problem: str | None = None
    stated: dict[str, _Statement] = attrs.field(factory=dict)
    _names: dict[nn.Module, str] = attrs.field(factory=dict)
    _calls: Counter[Any] = attrs.field(factory=Counter)
    _depth: int = 0
    _kept: ExitStack[Any] = attrs.field(factory=ExitStack)

    def meet(self, at: str) -> None:
        """Raise on every rank if not all are here."""
        if self.layout.stages is None:  # whose ranks run other modules
            compare_modules(self.mesh, at)

    @contextmanager
    def taking(self, model: nn.Module) -> Iterator[None]:
        """Run each FSDP module of a model, inside the block, with copies of its weights."""
        units = set(fsdp_modules(model))
        self._names = {module: name for name, module in model.named_modules()}
        with ExitStack() as stack, self._kept:
            for module, name in self._names.items():
                if module in units:  # in place of its hooks, and of compiled code
                    run = partial(self._run, module, units)
                    stack.enter_context(with_attributes(module, {"_compiled_call_impl": run}))
                self._prepare(module, name, stack)
            yield

    def _prepare(self, module: nn.Module, name: str, stack: ExitStack) -> None:
        """Let a module compute as in this pass, for a while."""
        if self.layout.experts > 1 and self.layout.styles.get(name) == ROUTED:
            stack.enter_context(with_attributes(module, {"forward": self._stand_in}))
        elif self.is_whole:
            stack.enter_context(with_attributes(module, self.layout.unsharded.get(module, {})))

    @contextmanager
    def checking_parts(self) -> Iterator[None]:
        """Check the parts of this rank's pipeline stages inside the block, where they are called.

        A rank has no whole pass there, only what the ranks are given: what they have alike is
        whole, and else it is their positions, or their channels.
        """
        self._depth = 1
        with ExitStack() as stack:
            for root in self.layout.stages.modules:
                self._names |= {module: name for name, module in root.named_modules()}
                for part in _parts_of(root, self.layout):
                    check = partial(self._check_part, part, part.forward)
                    stack.enter_context(with_attributes(part, {"forward": check}))
            yield

    def _check_part(
        self, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a part of a pipeline stage whole and sharded, before it runs as it is."""
        whole = self._gather_inputs(args, kwargs)
        with with_attributes(part, {"forward": forward}):
            try:
                self._run_part(part, whole, is_whole=True)
                self._run_part(part, (args, kwargs), is_whole=False)
            except Exception as error:  # reported to the ranks of other stages, which would wait
                self._note(f"{self._names[part]!r} does not run as on one rank ({error!r})")
        return forward(*args, **kwargs)

    def _run_part(self, part: nn.Module, inputs: Any, *, is_whole: bool) -> None:
        self.is_whole = is_whole
        args, kwargs = inputs
        with ExitStack() as stack:
            for module in part.modules():
                self._prepare(module, self._names[module], stack)
            self._run(part, set(), *args, **kwargs)

    def _gather_inputs(self, *inputs: Any) -> Any:
        """Inputs as one rank would have them: joined, unless they are equal on all ranks."""
        tensors: list[Tensor] = []
        map_tensors(tensors.append, inputs)
        digests = [
            _state(widen(full(t))).numbers.tolist() if t.is_floating_point() else 0 for t in tensors
        ]
        by_tensor = zip(*exchange(digests, group=self.ranks.get_group()), strict=True)
        are_equal = iter([all(other == first for other in others) for first, *others in by_tensor])

        def gather(tensor: Tensor) -> Tensor:
            if next(are_equal):
                return full(tensor)
            dim = 1 if self.layout.sequence > 1 and tensor.ndim > 2 else tensor.ndim - 1
            return self._join(tensor, dim)

        return map_tensors(gather, inputs)

    def _run(self, module: nn.Module, units: set[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Run a module forward and backward; return what it returns, detached from its graph."""
        name = self._names[module]
        self._calls[name, self.is_whole] += 1
        call = f"{name} {self._calls[name, self.is_whole]}"
        at = name or type(module).__name__
        shown = repr(at)
        self.meet(at)  # before its parameters are gathered
        inputs = Inputs(is_inner=self._depth > 0)
        if not inputs.is_inner:
            self._kept.close()  # of the call before
        self._depth += 1
        copies: dict[Tensor, Tensor] = {}  # of tied parameters one
        given: dict[str, Tensor] = {}
        for leaf, tensor in tensors_of(module, units):
            if tensor not in copies:
                copies[tensor] = self._copy(tensor)
            given[leaf] = copies[tensor]
        weights = {repr(f"{name}.{leaf}".lstrip(".")): copy for leaf, copy in given.items()}
        with torch.enable_grad(), ExitStack() as held:
            held.enter_context(_reparametrize_module(module, given))
            args, kwargs = map_tensors(inputs.take, (args, kwargs))
            torch.manual_seed(0)  # what draws in evaluation too draws the same in both passes
            output = module.forward(*args, **kwargs)
            tensors = floating_tensors(output)
            self.meet(f"the end of {at}")
            if not self._is_alike(tensors):  # other audits say so
                tensors = []
            for number, tensor in enumerate(tensors):
                self._compare(f"{call} {number}", f"what {shown} returns", tensor)
            ends = [(t, self._slope(f"{call} {n}", t)) for n, t in enumerate(tensors)]
            starts = {f"input {n} of {shown}": one for n, one in enumerate(inputs.taken)} | weights
            self._differentiate(call, ends, starts)
            if not inputs.is_inner:  # FSDP keeps a root's parameters too: a loss may read them
                self._kept.push(held.pop_all())
        self._depth -= 1
        return map_tensors(inputs.leave, output)

    def _differentiate(
        self, call: str, ends: list[tuple[Tensor, Tensor]], starts: Mapping[str, Tensor]
    ) -> None:
        """Compare gradients of inputs and parameters, for given gradients of what is returned."""
        starts = {key: tensor for key, tensor in starts.items() if tensor.requires_grad}
        ends = [(tensor, slope) for tensor, slope in ends if tensor.requires_grad]
        if not ends or not starts:
            return
        outputs, slopes = zip(*ends, strict=True)
        # `grad`, not `backward`: nothing is added to what parameters hold, and no hook runs.
        partials = torch.autograd.grad(outputs, [*starts.values()], slopes, materialize_grads=True)
        gradients = dict(zip(starts, map(full, partials), strict=True))
        largest = max(float(gradient.norm()) for gradient in gradients.values())
        for key, gradient in gradients.items():
            self._compare(f"{call} {key}", f"the gradient of {key}", gradient, largest)

    def _compare(self, key: str, shown: str, tensor: Tensor, largest: float = 0.0) -> None:
        """State a tensor, or compare it with what was stated of it."""
        tensor = tensor.detach()
        if self.is_whole:
            self.stated[key] = _state(tensor)
            return
        whole = self.stated.get(key)
        if whole is None:
            return
        dim = self._shared(tensor.shape, whole.shape)
        if dim is not None:
            tensor = self._join(tensor, dim)
        here = _state(tensor)
        if here.shape != whole.shape:
            self._note(f"{shown} has shape {tuple(here.shape)} and not {tuple(whole.shape)}")
            return
        error = float((here.numbers - whole.numbers).square().mean().sqrt())
        # Not finite: a bad step anyway.
        if not error <= CLOSE * whole.size + NOISE * largest and math.isfinite(whole.size):
            self._note(f"{shown} differs from that of one rank")

    def _note(self, problem: str) -> None:
        """Keep the first problem."""
        self.problem = self.problem or problem

    def _is_alike(self, tensors: list[Tensor]) -> bool:
        """Whether all ranks return the same kind of tensors; otherwise they would hang."""
        shapes = [(tensor.shape, tensor.requires_grad) for tensor in tensors]
        return all(others == shapes for others in exchange(shapes, group=self.ranks.get_group()))

    def _join(self, part: Tensor, dim: int) -> Tensor:
        """The ranks' parts of a tensor, beside each other."""
        shards = DTensor.from_local(part, self.ranks, (Shard(dim),), run_check=False)
        return shards.full_tensor()

    def _slope(self, key: str, tensor: Tensor) -> Tensor:
        """The gradient to begin with: of one rank's part of a tensor that part of the whole's."""
        shape = tensor.shape if self.is_whole or key not in self.stated else self.stated[key].shape
        dim, slope = self._shared(tensor.shape, shape), normal(shape, tensor)
        if dim is not None:
            return slope.chunk(self.layout.tensor, dim)[self.ranks.get_local_rank()]
        return slope if tensor.shape == shape else normal(tensor.shape, tensor)

    def _shared(self, part: torch.Size, whole: torch.Size) -> int | None:
        """The dimension of a tensor of which each rank has a part; None if there is none."""
        if len(part) != len(whole):
            return None
        dims = [dim for dim, size in enumerate(part) if size != whole[dim]]
        is_part = len(dims) == 1 and part[dims[0]] * self.layout.tensor == whole[dims[0]]
        return dims[0] if is_part else None

    def _copy(self, parameter: Tensor) -> Tensor:
        """A parameter as the pass has it, wide and moved a little; a copy of a buffer."""
        if not isinstance(parameter, nn.Parameter):
            return widen(parameter.clone())
        value = widen(gather_parameter(parameter.detach()).to(self.device))
        if value.is_floating_point():
            size = value.square().mean().sqrt()
            # Initial values are neutral (zeros, ones, equal rows), which would hide an error.
            value = value + normal(value.shape, value) * torch.where(size > 0, size, 1.0) * MOVED
        if not self.is_whole and (placement := placement_of(parameter)) is not None:
            value = distribute_tensor(value, self.ranks, [placement], src_data_rank=None)
        return value.requires_grad_(parameter.requires_grad)

    def _stand_in(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """In place of experts that other ranks hold too: what a layer of them takes and returns."""
        if self.is_whole:
            return x
        x = take_whole(x, self.ranks)
        # The redistribution below adds the parts up.
        parts = DTensor.from_local(
            x / self.layout.tensor, self.ranks, (Partial(),), run_check=False
        )
        output = Shard(1) if self.layout.sequence > 1 else Replicate()
        return parts.redistribute(placements=(output,)).to_local()


def _parts_of(root: nn.Module, layout: Layout) -> Iterator[nn.Module]:
    """The blocks of a stage, and modules of the plan outside of them."""
    blocks = set(fsdp_modules(root)) - {root}
    waiting = list(root.children())
    while waiting:
        module = waiting.pop(0)
        if module in blocks or module in layout.unsharded:
            yield module
        else:
            waiting += module.children()


def _state(tensor: Tensor) -> _Statement:
    """Measure a tensor by its norm and by products with random vectors from both sides."""
    rows = tensor.reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1)
    # A norm does not change when rows are in another order or have another sign; products do.
    left, right = normal((PROBES, rows.shape[0]), rows), normal((rows.shape[1], PROBES), rows)
    return _Statement(tensor.shape, float(rows.norm()), (left @ rows @ right).double().cpu())
