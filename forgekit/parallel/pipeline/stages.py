"""This rank's pipeline stages: the split model, what crosses, and torch's schedules.

What a stage computes comes from ``steps/pipelined.py``. Ranks that disagree would wait for each
other until a time-out. So they compare their micro-batches before each step, and the first one of
each kind is rehearsed stage by stage, so that all ranks raise together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forgekit.parallel.agreement import Difference, exchange, find_difference
from forgekit.parallel.module_forward import wrap_forward
from forgekit.parallel.pipeline.rehearsal import draw, rehearse
from forgekit.parallel.pipeline.schedule import (
    PipelineSchedule,
    check_micro_batches,
    schedule_class,
    stages_of,
    stages_per_rank,
)
from forgekit.parallel.pipeline.split import split_model
from forgekit.parallel.pipeline.stage import (
    Forms,
    Leaf,
    Run,
    StandIn,
    form_of,
    poison,
    tensors_of,
)

if TYPE_CHECKING:
    from forgekit.parallel.pipeline.torch_stage import Compute

CPU = torch.device("cpu")
SOCKETS = ("attend", "dispatch", "locate")
CACHED = 4
"""Number of cached schedules; each holds receive buffers for its micro-batches."""


class Stages:
    """A rank's pipeline stages.

    The model keeps only what they need, in place: it keeps the names of its parameters and can no
    longer be called. ``parallelize`` has compared models and options over the ranks. Each of
    ``modules`` is to be wrapped by FSDP as a root of its own, after its blocks and with
    ``reshard_after_forward=False``: a backward in two parts finds parameters only while they are
    gathered.

    Args:
        model: The same model on every rank, on meta or filled, not yet wrapped by FSDP.
        mesh: What ``build_mesh`` returned.
        schedule: The pipeline schedule.
        blocks: Name of the list of repeated layers.
        splits_backward: Whether schedules that fill bubbles with gradients of weights may compute
            them separately from gradients of inputs. Recomputed blocks would be recomputed twice
            (selective recomputation raises), compiled ones run backward twice: pass False.

    Attributes:
        count: Number of stages of all ranks.
        mine: The stages of this rank.
        modules: Their modules, in the same order.
        device: Where the stages compute.

    Raises:
        ValueError: If the model cannot be split (see ``split_model``).
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        schedule: PipelineSchedule,
        blocks: str = "layers",
        *,
        splits_backward: bool = True,
    ) -> None:
        self._schedule: PipelineSchedule = schedule
        self._splits_backward = splits_backward
        self._ranks = mesh["pp"].size()
        self.count = self._ranks * stages_per_rank(schedule)
        self.mine = stages_of(schedule, self._ranks, mesh.get_local_rank("pp"))
        self._group = mesh["pp"].get_group()
        self._globals = dist.get_process_group_ranks(self._group)
        self._owners = {
            stage: self._globals[rank]
            for rank in range(self._ranks)
            for stage in stages_of(schedule, self._ranks, rank)
        }
        kind = mesh.device_type
        index = torch.get_device_module(kind).current_device()
        self.device = CPU if kind == "cpu" else torch.device(kind, index)
        # Small exchanges go over the CPUs, so that no host waits for a device.
        has_gloo = "cpu:" in dist.get_backend_config()
        self._wire = CPU if has_gloo else self.device
        self._split = split_model(model, blocks, self.count, self.mine)
        self._stages = dict(zip(self.mine, self._split.stages, strict=True))
        self.modules = [stage.module for stage in self._split.stages]
        self._rehearsed: dict[Hashable, Forms] = {}
        self._forms = Forms((), {})
        self._built = lru_cache(CACHED)(self._build)
        self._is_broken = False
        shown = f"the pipeline stages {self.mine} of {self.count} of {type(model).__name__}"
        wrap_forward(model, partial(_refuse_call, shown))

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.count - 1 in self.mine

    def follow(self) -> None:
        """Update the stages' copies with the model's modes and sockets."""
        for original, twin in self._split.copies:
            twin.training = original.training
            vars(twin).update({n: s for n, s in vars(original).items() if n in SOCKETS})

    def agree(
        self,
        shown: str,
        error: Exception | None = None,
        *,
        is_new: bool = False,
        is_alone: bool = False,
    ) -> bool:
        """Raise unless all ranks of the pipeline are about to run the same; a small exchange.

        Data-parallel pipelines wait for each other in FSDP's collectives, so they take part.

        Args:
            shown: What this rank is about to run.
            error: What went wrong on this rank before, if anything did.
            is_new: Whether this rank has to rehearse it first.
            is_alone: Whether the ranks of this pipeline compare among themselves.

        Returns:
            Whether any rank has to rehearse.

        Raises:
            Exception: ``error``, on its rank.
            RuntimeError: On the other ranks, if there was one; at once, without them, after an
                exception in the middle of a schedule.
            ValueError: On every rank, with what each of them has.
        """
        if self._is_broken:
            raise RuntimeError("an exception broke off an earlier schedule. Restart all ranks.")
        group = self._group if is_alone else None
        # Each pipeline's largest and smallest digest, which are equal if all are.
        digests = torch.full((dist.get_world_size() // self._ranks, 2), -(2**62), device=self._wire)
        digest = int.from_bytes(hashlib.blake2b(shown.encode(), digest_size=7).digest(), "little")
        digests[self._globals[0]] = torch.tensor([digest, -digest])
        flags = torch.tensor([[error is not None, is_new]], device=self._wire)
        table = torch.cat([digests, flags])
        dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
        *pairs, (failed, rehearses) = table.tolist()
        if not failed and all(largest == -least for largest, least in pairs if largest > -(2**62)):
            return bool(rehearses)
        members = self._globals if is_alone else range(dist.get_world_size())
        text = None if error is None else f"{type(error).__name__}: {error}"
        reports = exchange(({self._globals[0]: shown}, text), group=group)
        if error is not None:
            raise error
        for rank, (_, message) in zip(members, reports, strict=True):
            if message is not None:
                raise RuntimeError(f"rank {rank} of the pipeline: {message}")
        by_pipeline = [stated for stated, _ in reports]
        pipeline, *differing = cast("Difference", find_difference(by_pipeline))
        raise ValueError(
            "the ranks of a pipeline got different micro-batches: "
            + "; ".join(f"rank {members[at]} has {by_pipeline[at][pipeline]}" for at in differing)
            + ". Give all of them the same: forgekit.data_ranks(mesh) counts them as one."
        )

    def knows(self, kind: Hashable, shape: Sequence[int]) -> bool:
        """Whether a kind of call was rehearsed; if so, use its forms."""
        rehearsed = self._rehearsed.get((kind, None)) or self._rehearsed.get((kind, tuple(shape)))
        self._forms = rehearsed or self._forms
        return rehearsed is not None

    def rehearse(
        self,
        kind: Hashable,
        shape: Sequence[int],
        compute: Callable[[int, Sequence[Tensor], StandIn, Callable[[], Any]], Sequence[Tensor]],
    ) -> None:
        """Run the stages one after the other, to record what crosses between them.

        Needed before the first step or evaluation of each kind. Mistakes in the model or the loss
        come up here, on every rank, where in the middle of a schedule one rank would raise and
        the others wait for it.

        Args:
            kind: What the result holds for.
            shape: ``[b s]`` of the micro-batch.
            compute: ``compute(stage, received, stand_in, arrive)``.

        Raises:
            RuntimeError: On the ranks whose stages went well, if another's did not; that one
                raises what went wrong.
        """
        forms: dict[str, Any] = {}
        proofs = []
        for stage in range(self.count):
            self._forms = Forms(tuple(shape), forms)
            report: list[Any] = [None]
            error: Exception | None = None
            if stage in self.mine:
                run = partial(compute, stage, self._drawn(stage, shape))
                try:
                    report = [rehearse(self._stages[stage], run, self.device, self._split.shared)]
                except Exception as raised:
                    report, error = [f"{type(raised).__name__}: {raised}"], raised
            source = self._owners[stage]
            dist.broadcast_object_list(report, src=source, group=self._group, device=self._wire)
            if error is not None:
                raise error
            if isinstance(report[0], str):
                raise RuntimeError(f"stage {stage} of the pipeline, on rank {source}: {report[0]}")
            forms.update(report[0][0])
            proofs.append(report[0][1])
        # NCCL needs all ranks of a group in its first batch of sends.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self._group)
        self._forms = Forms(tuple(shape), forms)
        if all(proofs):
            crossing = [leaf for stage in range(self.count - 1) for leaf in self.passed(stage)]
            holds_for_all = all(_has_positions(leaf, shape) for leaf in crossing)
            self._rehearsed[kind, None if holds_for_all else tuple(shape)] = self._forms

    def _drawn(self, stage: int, shape: Sequence[int]) -> tuple[Tensor, ...]:
        """Draw a stage's input, the same on all ranks, as it would arrive in a step."""
        generator = torch.Generator(self.device).manual_seed(stage)
        leaves = self.passed(stage - 1, shape) if stage else ()
        drawn = [draw(1.0, generator, self.device, leaf) for leaf in leaves]
        return tuple(t.requires_grad_(t.is_floating_point()).view_as(t) for t in drawn)

    def passed(self, stage: int, shape: Sequence[int] | None = None) -> list[Leaf]:
        """Return the form of a stage's output for ``[b s]``, by default the rehearsed shape."""
        part, shape = self._split.last_blocks[stage], self._forms.shape if shape is None else shape
        return tensors_of(self._forms.at(part, shape), Leaf)

    def forward(
        self,
        stage: int,
        call: Callable[[nn.Module], Any],
        shape: Sequence[int],
        received: Sequence[Tensor],
        stand_in: StandIn | None = None,
        arrive: Callable[[], Any] = lambda: None,
    ) -> Any:
        """Run one micro-batch through a stage of this rank.

        Args:
            stage: The stage.
            call: Calls the stage's module.
            shape: ``[b s]`` of the micro-batch.
            received: What the stage before has sent.
            stand_in: Makes what other absent parts return in a rehearsal.
            arrive: Called where the stream arrives.

        Returns:
            What the model returns, of the last stage; of the others the tensors to send.

        Raises:
            ValueError: If they are not what the next stage is waiting for.
        """
        make = partial(poison, device=self.device) if stand_in is None else stand_in
        out = self._stages[stage].run(call, Run(self._forms, shape, received, make, arrive))
        if stage == self.count - 1:
            return out
        block = self._split.last_blocks[stage]
        if stand_in is None and (due := self._forms.at(block, shape)) != form_of(out):
            raise ValueError(
                f"{block} in stage {stage} returned {form_of(out)} for a micro-batch of "
                f"{tuple(shape)}; the next stage expects {due}, as in the first micro-batch."
            )
        return tuple(tensor.contiguous() for tensor in tensors_of(out))  # else it cannot be sent

    def run(
        self,
        micro_batches: int,
        shape: Sequence[int],
        compute: Compute,
        *,
        reduces: bool = True,
    ) -> None:
        """Run all forward and backward passes of a step; leaves reduced gradients.

        Args:
            micro_batches: Their number.
            shape: ``[b s]``, the same for all.
            compute: See ``Compute``. The sum of the last stage's outputs is differentiated.
            reduces: Whether gradients are reduced over data-parallel ranks at the end.

        Raises:
            Exception: What ``compute``, or the backward pass, raises. The other ranks wait for what
                this one does not send: the process has to end.
        """
        # Torch's schedule executes this rank's row of the table of work: it receives activations
        # before each forward and sends them after it; backward likewise in reverse. The stages
        # compute in between, and pull a micro-batch when its turn comes.
        passed = tuple(tuple(self.passed(stage, shape)) for stage in range(self.count - 1))
        schedule, stages = self._built(micro_batches, passed)
        for stage in stages:
            stage.compute, stage.has_backward, stage.reduces = compute, True, reduces
            stage.clear_runtime_states()
        # Torch gets numbers only, as keywords of forward and as targets of the loss.
        numbers = list(range(micro_batches))
        by_name = [{"micro_batch": number} for number in numbers]
        with self.guarded():
            try:
                schedule._step_microbatches([()] * micro_batches, by_name, numbers)
            except RuntimeError as error:
                raise error.__cause__ or error from None  # torch's own error lists all tensors
            finally:
                for stage in stages:
                    del stage.compute  # and with it this step's data

    def evaluate(self, shapes: Mapping[int, Sequence[int]], compute: Compute) -> None:
        """Run forward passes of some micro-batches.

        Each stage of this rank takes all of them before the next one does, so the number of
        micro-batches in flight is theirs; on a V a rank passes them on to itself.

        Args:
            shapes: By number of a micro-batch its ``[b s]``.
            compute: See ``Compute``.
        """
        kept: dict[int, Sequence[Tensor]] = {}
        on_their_way = []
        for stage in self.mine:
            source, target = self._owners.get(stage - 1), self._owners.get(stage + 1)
            if source == target:
                # NCCL orders everything that two ranks send each other: a send between two
                # receives here would wait for a send of the other rank that waits for this one.
                kept = {number: self._receive(stage, shape) for number, shape in shapes.items()}
            for number, shape in shapes.items():
                received = kept.pop(number) if number in kept else self._receive(stage, shape)
                out = compute(stage, number, tuple(received))
                if target == self._owners[stage]:
                    kept[number] = out
                elif target is not None:
                    on_their_way += [(dist.isend(t, target, self._group), t) for t in out]
        for work, _ in on_their_way:
            work.wait()

    def _receive(self, stage: int, shape: Sequence[int]) -> list[Tensor]:
        leaves = self.passed(stage - 1, shape) if stage else []
        received = [torch.empty(x.shape, dtype=x.dtype, device=self.device) for x in leaves]
        for tensor in received:
            dist.recv(tensor, self._owners[stage - 1], self._group)
        return received

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """After an exception in the block raise from then on: messages are left unreceived."""
        try:
            yield
        except BaseException:
            self._is_broken = True
            raise

    def check_count(self, micro_batches: int) -> None:
        """Raise unless the schedule supports a number of micro-batches."""
        check_micro_batches(self._schedule, self._ranks, micro_batches)

    def _build(
        self, micro_batches: int, passed: tuple[tuple[Leaf, ...], ...]
    ) -> tuple[Any, list[Any]]:
        """Build a schedule; torch allocates receive buffers for its micro-batches of one shape."""
        from forgekit.parallel.pipeline.torch_stage import TorchStage

        where = passed, self.device, self._group
        stages = [
            TorchStage(module, number, *where, splits_backward=self._splits_backward)
            for number, module in zip(self.mine, self.modules, strict=True)
        ]
        given = stages[0] if stages_per_rank(self._schedule) == 1 else stages
        build = schedule_class(self._schedule)
        # Torch's schedule wants a loss function; the last stage already returns the loss.
        return build(given, micro_batches, loss_fn=lambda x, _: x, scale_grads=False), stages


def _has_positions(leaf: Leaf, shape: Sequence[int]) -> bool:
    """Whether a tensor is ``[b s ...]`` or a scalar, so that its shape for any input is known."""
    rows, positions = (*leaf.shape, 0, 0)[:2]
    return not leaf.shape or (rows == shape[0] and positions > 0 and shape[1] % positions == 0)


def _refuse_call(part: str, *_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError(
        f"this rank holds {part}, so it cannot be called on its own. forgekit.accumulate and "
        "forgekit.evaluate run it through the pipeline."
    )
