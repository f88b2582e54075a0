"""Torch's pipeline schedules, run on stages that compute through a function.

``torch.distributed.pipelining`` gives the order of work, sends and receives, and FSDP's gathers
and reductions. What differs from its own ``step``: micro-batches are asked for when a stage needs
them, shapes are given instead of found by running the model and the loss once more, and errors
come out as they were raised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from forgekit.parallel.pipeline.schedule import PipelineSchedule, schedule_class, stages_per_rank

CACHED = 4
"""Schedules that are kept; each keeps a receive buffer for each of its micro-batches."""

Compute = Callable[[int, int, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""``compute(stage, micro_batch, received)``: what the stage sends; of the last, the loss."""

Passed = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and dtype of each tensor that a stage sends."""


@attrs.frozen(eq=False)
class Engine:
    """Runs steps of one schedule on a rank's stages.

    Args:
        schedule: The schedule.
        modules: This rank's stages by number.
        count: Number of stages of all ranks.
        group: The ranks of the pipeline.
        device: Where they compute.
        splits_backward: See ``split_stages``.
    """

    _schedule: PipelineSchedule
    _modules: Mapping[int, nn.Module]
    _count: int
    _group: dist.ProcessGroup
    _device: torch.device
    _splits_backward: bool
    _built: OrderedDict[Any, tuple[Any, list[_Stage]]] = attrs.field(
        factory=OrderedDict, init=False
    )

    def run(self, micro_batches: int, passed: Sequence[Passed], compute: Compute, tag: int) -> None:
        """Run all forward and backward passes of a step; leaves reduced gradients.

        Args:
            micro_batches: Their number, which must fit the schedule.
            passed: What each stage but the last sends.
            compute: See ``Compute``.
            tag: Marks what is sent.

        Raises:
            Exception: What ``compute`` raises, as it is.
        """
        # Torch's schedule walks this rank's row of the table of work: before each forward it waits
        # for the activations, after it sends them on; backward the same the other way round. The
        # stage below computes in between, and pulls its micro-batch when its turn comes.
        schedule, stages = self._find(micro_batches, tuple(passed), tag)
        for stage in stages:
            stage.compute = compute
            stage.has_backward = True
            stage.clear_runtime_states()
        # Torch is given numbers only: as keywords to forward, as targets to the loss.
        numbers = list(range(micro_batches))
        by_name = [{"micro_batch": number} for number in numbers]
        try:
            schedule._step_microbatches([()] * micro_batches, by_name, numbers)
        except _Failed as failed:
            raise failed.error from None
        finally:
            for stage in stages:
                del stage.compute  # and with it what it holds of this step

    def clear(self) -> None:
        """Forget the schedules: an exception has left them in the middle."""
        self._built.clear()

    def _find(
        self, micro_batches: int, passed: tuple[Passed, ...], tag: int
    ) -> tuple[Any, list[_Stage]]:
        """Build a schedule, or take one that was built for the same numbers."""
        key = micro_batches, passed
        if key not in self._built:
            stages = [self._stage(stage, passed, tag) for stage in self._modules]
            given = stages[0] if stages_per_rank(self._schedule) == 1 else stages
            build = schedule_class(self._schedule)
            schedule = build(given, micro_batches, loss_fn=_first, scale_grads=False)
            self._built[key] = schedule, stages
            if len(self._built) > CACHED:
                self._built.popitem(last=False)
        self._built.move_to_end(key)
        return self._built[key]

    def _stage(self, stage: int, passed: tuple[Passed, ...], tag: int) -> _Stage:
        # The first stage's input and the loss are not sent; torch wants an example all the same.
        edge: Passed = (((), torch.float32),)
        received = passed[stage - 1] if stage else edge
        sent = passed[stage] if stage < self._count - 1 else edge
        built = _Stage(
            self._modules[stage],
            stage,
            self._count,
            self._device,
            input_args=_examples(received),
            output_args=_examples(sent),
            group=self._group,
            dw_builder=None if self._splits_backward else _no_weight_gradients,
        )
        built.tag = tag
        # Torch's own check, under TORCH_DISTRIBUTED_DEBUG=DETAIL, would miss the first's input.
        built._runtime_validate = False
        return built


class _Stage(PipelineStage):
    """A stage of torch's that computes through a function and marks what it sends."""

    compute: Compute
    tag: int

    def forward_maybe_with_nosync(self, *args: Any, micro_batch: int) -> Any:
        """Compute; torch gives what was received, if the stage is not the first."""
        try:
            out = self.compute(self.stage_index, micro_batch, tuple(map(_arrived, args)))
            # Torch detaches them in place after a backward to the inputs; views cannot be.
            sent = tuple(tensor.clone() if tensor._is_view() else tensor for tensor in out)
        except Exception as error:
            raise _Failed(error) from error
        return sent[0] if self.is_last else sent

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._tagged(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._tagged(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._tagged(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._tagged(super().get_bwd_send_ops(bwd_chunk_id))

    def _tagged(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        for operation in operations:
            operation.tag = self.tag
        return operations


class _Failed(BaseException):
    """Carries an error past torch, which would wrap it and log its whole schedule."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def _arrived(buffer: Tensor) -> Tensor:
    """What was received, apart from the buffer that it came in."""
    received = buffer.view_as(buffer)
    if received.requires_grad:
        received.register_hook(Tensor.contiguous)  # only such gradients can be sent
    return received


def _examples(passed: Passed) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
        for shape, dtype in passed
    )


def _first(loss: Tensor, _micro_batch: int) -> Tensor:
    """The loss function of torch's schedule: the last stage returns the loss already."""
    return loss


def _no_weight_gradients() -> Callable[[], None]:
    """What torch runs for the gradients of weights, where they came along with the inputs'."""
    return lambda: None
