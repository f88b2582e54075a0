"""A stage for torch's schedules that calls a function with micro-batch numbers.

``torch.distributed.pipelining`` gives the order of work, sends and receives, and FSDP's gathers and
reductions. What differs from its own ``step``: micro-batches are requested when a stage needs them,
and shapes are given instead of found by running the model once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from forgekit.parallel.pipeline.stage import Leaf

Compute = Callable[[int, int, tuple[Tensor, ...]], Sequence[Tensor]]
"""``compute(stage, micro_batch, received)``: what the stage sends; of the last, the loss."""

# The first stage's input and the loss are not sent, but torch needs an example.
EDGE = (Leaf((), torch.float32),)


class TorchStage(PipelineStage):
    """A stage whose ``compute``, set for each step, returns what it sends; on the last, the loss.

    Args:
        module: The stage's part of the model.
        number: Its number.
        passed: What each stage but the last sends.
        device: Where it computes.
        group: The ranks of the pipeline.
        splits_backward: Whether gradients of weights and of inputs are computed separately.
    """

    compute: Compute
    reduces: bool

    def __init__(
        self,
        module: nn.Module,
        number: int,
        passed: Sequence[Sequence[Leaf]],
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        splits_backward: bool,
    ) -> None:
        edges = [EDGE, *passed, EDGE]
        super().__init__(
            module,
            number,
            len(passed) + 1,
            device,
            input_args=_examples(edges[number]),
            output_args=_examples(edges[number + 1]),
            group=group,
            # Does nothing if gradients of weights were computed with the inputs'.
            dw_builder=None if splits_backward else lambda: lambda: None,
        )
        # Torch's own check, under TORCH_DISTRIBUTED_DEBUG=DETAIL, would miss the first's input.
        self._runtime_validate = False

    def forward_maybe_with_nosync(self, *args: Any, micro_batch: int) -> Any:
        """Compute; torch passes the received input, except on the first stage."""
        out = self.compute(self.stage_index, micro_batch, tuple(map(arrived, args)))
        # Torch detaches outputs in place after a backward to the inputs, which views do not allow.
        sent = tuple(tensor.clone() if tensor._is_view() else tensor for tensor in out)
        return sent[0] if self.is_last else sent

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce gradients after a step's last schedule; until then FSDP holds them."""
        if self.reduces:
            super().perform_reduce_grad(grad_scale_factor)
            return
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def arrived(buffer: Tensor) -> Tensor:
    """Return the received input without its buffer."""
    received = buffer.view_as(buffer)
    if received.requires_grad:
        received.register_hook(Tensor.contiguous)  # only contiguous gradients can be sent
    return received


def _examples(leaves: Sequence[Leaf]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(
            leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.dtype.is_floating_point
        )
        for leaf in leaves
    )
