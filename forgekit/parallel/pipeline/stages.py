"""Pipeline stages of one rank: how the model was split, and what their ranks agree on.

The order of work and the sending is torch's, see ``runtime.py``; what a stage computes comes from
``steps/pipelined.py``. Ranks that disagree would wait for each other until a time-out. So they
compare their micro-batches before each step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forgekit.parallel.module_forward import wrap_forward
from forgekit.parallel.pipeline.schedule import (
    PipelineSchedule,
    check_micro_batches,
    forward_at,
    stages_of,
    stages_per_rank,
)
from forgekit.parallel.pipeline.split import SplitModel, split_model
from forgekit.parallel.pipeline.stage_tensors import Flow
from forgekit.parallel.pipeline.tracing import Report, join, rehearse, restored

if TYPE_CHECKING:
    from forgekit.parallel.pipeline.runtime import Compute, Passed


CPU = torch.device("cpu")

SOCKETS = ("attend", "dispatch", "locate")


def split_stages(
    model: nn.Module,
    mesh: DeviceMesh,
    schedule: PipelineSchedule,
    blocks: str | None = None,
    *,
    splits_backward: bool = True,
) -> Stages:
    """Keep of a model what this rank's pipeline stages need, in place.

    The model keeps the names of its parameters and can no longer be called; a step and an
    evaluation run its stages. ``parallelize`` has compared models and options over the ranks.

    Args:
        model: The same model on every rank, on meta or filled, not yet wrapped by FSDP.
        mesh: What ``build_mesh`` returned.
        schedule: The pipeline schedule.
        blocks: Name of the list of repeated layers; ``"layers"`` if None.
        splits_backward: Whether schedules that fill bubbles with gradients of weights may find
            these apart from gradients of inputs. Recomputed blocks would be recomputed twice (and
            selective recomputation refuses), compiled ones run their backward twice: pass False.

    Returns:
        The stages. Each of ``Stages.modules`` is to be wrapped by FSDP as a root of its own, after
        its blocks and with ``reshard_after_forward=False``: a backward in two parts finds
        parameters only while they are gathered.

    Raises:
        ValueError: If the model cannot be split (see ``split_model``).
    """
    mine = stages_of(schedule, mesh["pp"].size(), mesh.get_local_rank("pp"))
    count = mesh["pp"].size() * stages_per_rank(schedule)
    blocks = blocks or "layers"
    pieces = split_model(model, blocks, count, mine)
    shown = f"{len(mine)} of {count} pipeline stages ({', '.join(map(str, mine))})"
    wrap_forward(model, partial(_refuse_call, f"this rank holds {shown} of {type(model).__name__}"))
    return Stages(schedule, mesh, pieces, splits_backward=splits_backward)


class Stages:
    """A rank's stages of a pipeline.

    Attributes:
        count: Number of stages of all ranks.
        mine: The stages of this rank.
        modules: Their modules, in the same order.
        device: Where the stages compute.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        mesh: DeviceMesh,
        pieces: SplitModel,
        *,
        splits_backward: bool,
    ) -> None:
        self._schedule: PipelineSchedule = schedule
        self._ranks, self._rank = mesh["pp"].size(), mesh.get_local_rank("pp")
        self.count = self._ranks * stages_per_rank(schedule)
        self.mine = stages_of(schedule, self._ranks, self._rank)
        self._owners = {
            stage: rank
            for rank in range(self._ranks)
            for stage in stages_of(schedule, self._ranks, rank)
        }
        self.modules = pieces.modules
        self._relays = dict(zip(self.mine, pieces.relays, strict=True))
        self._copies = pieces.copies
        self._shared, self._holders = pieces.shared, pieces.holders
        self._group = mesh["pp"].get_group()
        self._globals = dist.get_process_group_ranks(self._group)
        kind = mesh.device_type
        index = torch.get_device_module(kind).current_device()
        self.device = CPU if kind == "cpu" else torch.device(kind, index)
        # Small exchanges go over the processors, so that no host waits for a device.
        has_gloo = "cpu:" in dist.get_backend_config(self._group)
        self._wire = CPU if has_gloo else self.device
        by_number = dict(zip(self.mine, self.modules, strict=True))
        # Imported here, because it imports torch's pipelining, which most runs do not need.
        from forgekit.parallel.pipeline.runtime import Engine

        self._engine = Engine(
            schedule, by_number, self.count, self._group, self.device, splits_backward
        )
        self._flows: dict[tuple[Hashable, Any], Flow] = {}
        self._flow = Flow()
        self._failures = 0

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.count - 1 in self.mine

    @property
    def _tag(self) -> int:
        """Sets what is sent on processors apart from what was before an exception; torch's own: 0.

        Accelerators ignore it; see ``check_unbroken``.
        """
        return self._failures + 1

    def follow(self) -> None:
        """Bring the copies in the stages up to date with the model's modes and sockets."""
        for original, twin in self._copies:
            twin.training = original.training
            for name in SOCKETS:
                if name in vars(original):
                    setattr(twin, name, vars(original)[name])

    def agree(
        self,
        micro_batches: int | None,
        shape: Sequence[int],
        kind: str = "",
        error: Exception | None = None,
    ) -> None:
        """Make sure that all ranks of the pipeline are about to run the same; a small exchange.

        Args:
            micro_batches: Their number; None if not known.
            shape: Shape of the first one as the model takes it.
            kind: The kind of call; it must be the same on all ranks.
            error: What went wrong on this rank before, if anything did.

        Raises:
            Exception: ``error``, on its rank.
            RuntimeError: On the other ranks, if there was one.
            ValueError: On every rank, with what each of them has.
        """
        rows, positions = (*shape, 1, 1)[:2]
        number = -1 if micro_batches is None else micro_batches
        digest = int.from_bytes(hashlib.blake2b(kind.encode(), digest_size=7).digest(), "little")
        values = [number, rows, positions, digest, error is not None, self._failures]
        mine = torch.tensor(values, device=self._wire)
        everyone = [torch.empty_like(mine) for _ in range(self._ranks)]
        dist.all_gather(everyone, mine, group=self._group)
        found = [values.tolist() for values in everyone]
        failures = max(values.pop() for values in found)
        if failures > self._failures:
            self._start_afresh(failures)
        if error is not None:
            raise error
        if failed := [self._globals[rank] for rank, values in enumerate(found) if values.pop()]:
            raise RuntimeError(
                f"rank {failed[0]} of the pipeline raised before the first micro-batch; its own "
                "message says what went wrong."
            )
        if any(values != found[0] for values in found):
            each = [_shown(rank, *values[:3]) for rank, values in enumerate(found)]
            raise ValueError(
                f"the ranks of a pipeline came with different micro-batches: {'; '.join(each)}"
                f"{'' if len({v[3] for v in found}) == 1 else ', or other arguments'}. Give all "
                "of them the same: forgekit.data_ranks(mesh) counts them as one."
            )

    def check_unbroken(self) -> None:
        """Raise if messages of a schedule that an exception broke off could arrive in the next.

        Accelerators match messages by their order alone; on processors a tag sets them apart.

        Raises:
            RuntimeError: On an accelerator, after an exception in a schedule.
        """
        if self._failures and self.device.type != "cpu":
            raise RuntimeError(
                "an exception broke off an earlier schedule of this pipeline, and messages between "
                f"devices of type {self.device.type} carry no tags: what is still on its way would "
                "arrive in this step. Start all ranks again and load the last checkpoint."
            )

    def check_count(self, micro_batches: int) -> None:
        """Raise unless the schedule can run a number of micro-batches."""
        check_micro_batches(self._schedule, self._ranks, micro_batches)

    def knows(self, kind: Hashable, shape: Sequence[int]) -> bool:
        """Say whether a kind of call was rehearsed, and use what was learned from it."""
        found = self._flows.get((kind, None)) or self._flows.get((kind, tuple(shape)))
        self._flow = found or Flow()
        return found is not None

    def learn(
        self,
        kind: Hashable,
        shape: Sequence[int],
        call: Callable[[nn.Module], Any],
        loss: Callable[[Any], list[Tensor]],
    ) -> None:
        """Run the stages one after the other, to learn what has to travel between them.

        Needed before the first step or evaluation of each kind. Mistakes in the model or the loss
        come up here, on every rank, where in the middle of a schedule one rank would raise and
        the others wait for it.

        Args:
            kind: What the result holds for.
            shape: Shape of the model's input.
            call: Calls a stage's module.
            loss: Makes the tensors of the loss from what the last stage returns.

        Raises:
            RuntimeError: On the ranks whose stages went well, if another's did not; that one
                raises what went wrong.
        """
        reports: list[Report] = []
        for stage in range(self.count):
            told: list[Any] = [None]
            error: Exception | None = None
            if stage in self.mine:
                try:
                    told = [self._rehearse(stage, reports, shape, call, loss)]
                except Exception as raised:
                    told, error = [f"{type(raised).__name__}: {raised}"], raised
            source = self._globals[self._owners[stage]]
            dist.broadcast_object_list(told, src=source, group=self._group, device=self._wire)
            if error is not None:
                raise error
            if isinstance(told[0], str):
                raise RuntimeError(f"stage {stage} of the pipeline, on rank {source}: {told[0]}")
            reports.append(told[0])
        # NCCL wants a group's first batch of sends to come from all of its ranks.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self._group)
        self._flow = join(reports, self._holders)
        self._flows[kind, None if self._flow.is_plain else tuple(shape)] = self._flow

    def _rehearse(
        self,
        stage: int,
        before: list[Report],
        shape: Sequence[int],
        call: Callable[[nn.Module], Any],
        loss: Callable[[Any], list[Tensor]],
    ) -> Report:
        module = self._module(stage)
        known = Flow({c: out for report in before for c, out in report.outputs.items()})
        with restored(module, self._shared):
            return rehearse(
                self._relays[stage],
                known,
                partial(call, module),
                loss,
                given=shape,
                device=self.device,
                parameters=module.parameters(),
            )

    def forward(
        self,
        stage: int,
        call: Callable[[nn.Module], Any],
        shape: Sequence[int],
        received: Sequence[Tensor],
    ) -> Any:
        """Run one micro-batch through a stage of this rank.

        Args:
            stage: The stage.
            call: Calls the stage's module.
            shape: Shape of the model's input.
            received: What the stage before has sent.

        Returns:
            What the model returns, of the last stage; of the others the tensors to send.

        Raises:
            ValueError: If they are not what the next stage is waiting for.
        """
        run, forward = self._relays[stage].run, partial(call, self._module(stage))
        out = run(forward, self._flow, received, given=shape, device=self.device)
        return out if stage == self.count - 1 else self._check(stage, shape, out)

    def _module(self, stage: int) -> nn.Module:
        return self.modules[self.mine.index(stage)]

    def _passed(self, stage: int, shape: Sequence[int]) -> Passed:
        """Shape and dtype of what a stage sends."""
        leaves = map(self._flow.leaf, self._flow.travels[stage])
        return tuple((leaf.at(shape), leaf.dtype) for leaf in leaves)

    def _check(self, stage: int, shape: Sequence[int], out: Sequence[Tensor]) -> tuple[Tensor, ...]:
        expected = self._passed(stage, shape)
        for source, tensor, due in zip(self._flow.travels[stage], out, expected, strict=True):
            if (tuple(tensor.shape), tensor.dtype) != due:
                leaf = self._flow.leaf(source)
                raise ValueError(
                    f"{source[0]} in stage {stage} returned {tuple(tensor.shape)} of "
                    f"{tensor.dtype} for an input of {tuple(shape)}; the next stage awaits "
                    f"{due[0]} of {due[1]}, since it was {leaf.shape} for {leaf.given}. What "
                    "passes between stages must be [rows positions ...] and of one dtype."
                )
        return tuple(tensor.contiguous() for tensor in out)  # only such tensors can be sent

    def run(self, micro_batches: int, shape: Sequence[int], compute: Compute) -> None:
        """Run all forward and backward passes of a step; leaves reduced gradients.

        Args:
            micro_batches: Their number.
            shape: Shape of the model's input, the same for all.
            compute: See ``Compute``. The sum of what the last stage returns is differentiated.
        """
        passed = [self._passed(stage, shape) for stage in range(self.count - 1)]
        with self.guarded():
            self._engine.run(micro_batches, passed, compute, tag=self._tag)

    def at(self, slot: int) -> tuple[int, int] | None:
        """What this rank does in a slot of an evaluation; see ``forward_at``."""
        return forward_at(self._schedule, self._ranks, self._rank, slot)

    def pass_on(
        self,
        sent: tuple[int, tuple[Tensor, ...]] | None,
        due: tuple[int, Sequence[int]] | None,
    ) -> tuple[Tensor, ...]:
        """End a slot of an evaluation: send what a stage returned, receive what comes next.

        Args:
            sent: Stage of this slot and what it sends; None if this rank did nothing.
            due: Stage of the next slot and the shape of the model's input; None for none.

        Returns:
            What the stage of the next slot is given; nothing if it is the first or there is none.
        """
        operations: list[dist.P2POp] = []
        # After the last stage there is none to send to.
        target = self._rank if sent is None else self._owners.get(sent[0] + 1, self._rank)
        if sent is not None and target != self._rank:
            operations += [self._operation(dist.isend, tensor, target) for tensor in sent[1]]
        received: tuple[Tensor, ...] = ()
        if due is not None and due[0] > 0:
            source = self._owners[due[0] - 1]
            if source == self._rank and sent is not None:
                received = sent[1]
            else:
                passed = self._passed(due[0] - 1, due[1])
                received = tuple(torch.empty(s, dtype=d, device=self.device) for s, d in passed)
                operations += [self._operation(dist.irecv, tensor, source) for tensor in received]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """After an exception inside, start afresh: what is on its way is never received."""
        try:
            yield
        except BaseException:
            self._start_afresh(self._failures + 1)
            raise

    def _start_afresh(self, failures: int) -> None:
        self._failures = failures
        self._engine.clear()

    def _operation(self, kind: Callable[..., Any], tensor: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._globals[rank], self._group, tag=self._tag)


def _refuse_call(what: str, *_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError(
        f"{what}, so it cannot be called on its own. A step (forgekit.accumulate) and "
        "forgekit.evaluate run it through the pipeline: loss_fn(model, batch) calls its model."
    )


def _shown(rank: int, micro_batches: int, rows: int, positions: int) -> str:
    number = "an unknown number" if micro_batches < 0 else str(micro_batches)
    return f"rank {rank} has {number} of {rows} rows and {positions} positions"
