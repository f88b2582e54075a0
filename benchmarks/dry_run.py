"""The memory of a training step, found without any: on fake tensors, which have no values.

What is counted is what torch allocates, operation by operation; what an allocator rounds up to or
leaves between is not. Beside it stands the sum that one does in one's head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from bare import head_loss, our_step
from structure import Counted, saving
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode

import forgekit as fk
from forgekit.parallel.activation_checkpoint import recompute

__all__ = ["SEVEN_BILLION", "Memory", "dry_run", "real_step"]

SEVEN_BILLION = fk.TransformerSpec(
    vocab_size=32000, dim=4096, layers=32, heads=32, kv_heads=32, ffn_dim=11008, max_seq_len=4096
)


@attrs.frozen
class Memory:
    """Bytes of a step that recomputes every block.

    Attributes:
        fixed: Parameters, gradients and the optimizer's moments.
        inputs: What each block keeps: its input.
        block: What one block keeps for its own backward.
        logits: One chunk of logits, and the gradients that its loss finds.
        peak: The most that is alive at once, counted.
    """

    fixed: int
    inputs: int
    block: int
    logits: int
    peak: int

    @property
    def expected(self) -> int:
        """The sum of the parts."""
        return self.fixed + self.inputs + self.block + self.logits


def dry_run(spec: fk.TransformerSpec, rows: int, device: str = "cpu") -> Memory:
    """Take two steps of two micro-batches on fake tensors, and count the second."""
    with torch.device("meta"):
        model = fk.Transformer(spec)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, batch = _placed(model, rows, device)
        block = _saved_by_a_block(model, spec, rows, device)
        for layer in model.layers:
            recompute(layer, "full")
        state = fk.TrainState.create(model, fk.adamw(model))
        step = fk.make_step(head_loss, schedule=fk.constant(1e-3))
        with Counted() as counted:
            counted.hold(*model.parameters())
            state, _ = step(state, [batch] * 2)
            fixed = counted.peak = counted.live
            step(state, [batch] * 2)
    hidden = rows * spec.max_seq_len * spec.dim * 4
    logits = 2 * spec.vocab_size * spec.dim * 4 + hidden
    return Memory(fixed, spec.layers * hidden, block, logits, counted.peak)


def real_step(spec: fk.TransformerSpec, rows: int, device: str) -> Callable[[], Any]:
    """Build the same step with values."""
    with torch.device("meta"):
        model = fk.Transformer(spec)
    model, batch = _placed(model, rows, device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for layer in model.layers:
        recompute(layer, "full")
    return our_step(model, [batch] * 2, head_loss)


def _placed(model: Any, rows: int, device: str) -> tuple[Any, TensorDict]:
    """Move a model from meta to a device, and make a micro-batch there."""
    ids = torch.zeros(rows, model.spec.max_seq_len, dtype=torch.int64, device=device)
    batch = TensorDict(input_ids=ids, labels=ids.clone(), batch_size=[rows])
    return model.to_empty(device=device), batch


def _saved_by_a_block(model: Any, spec: fk.TransformerSpec, rows: int, device: str) -> int:
    x = torch.zeros(rows, spec.max_seq_len, spec.dim, device=device, requires_grad=True)
    cos, sin = model._rotary(torch.arange(spec.max_seq_len, device=device), x.dtype)
    with saving(model) as saved:
        out = model.layers[0](x, cos, sin)
        del out
    return saved.bytes
