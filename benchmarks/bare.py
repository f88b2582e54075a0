"""A step as one writes it by hand, and the model and batches that both it and ours train on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule

import forgekit as fk

SCHEDULE = fk.warmup_cosine(1e-3, warmup=10, total=100_000)
MAX_NORM = 1.0


@attrs.frozen
class Size:
    """A model and the micro-batches of one step."""

    dim: int
    layers: int
    seq_len: int
    vocab_size: int
    heads: int = 4
    rows: int = 4
    micro_batches: int = 4
    moe: fk.MoESpec | None = None

    def model(self, device: str = "cpu") -> fk.Transformer:
        """Build the model; two of the same size have equal weights."""
        spec = fk.TransformerSpec(
            vocab_size=self.vocab_size,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads // 2,
            ffn_dim=self.dim * 8 // 3 // 8 * 8,
            max_seq_len=self.seq_len,
            moe=self.moe,
        )
        return fk.Transformer(spec).to(device)

    def batches(self, device: str = "cpu") -> list[TensorDict]:
        """Draw the micro-batches of a step."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.rows, self.seq_len + 1)
        rows = [
            torch.randint(self.vocab_size, shape, generator=generator).to(device)
            for _ in range(self.micro_batches)
        ]
        return [
            TensorDict(input_ids=row[:, :-1], labels=row[:, 1:].clone(), batch_size=[self.rows])
            for row in rows
        ]

    @property
    def tokens(self) -> int:
        """Targets per step."""
        return self.rows * self.seq_len * self.micro_batches


def bare_step(model: torch.nn.Module, batches: list[TensorDict]) -> Callable[[], Any]:
    """Write the step out: token mean over all micro-batches, clipping, schedule, fused AdamW.

    A model in bfloat16 is wrapped by FSDP, which reduces after the last micro-batch here too.
    """
    optimizer = fk.adamw(model)
    steps_taken = 0

    def step() -> torch.Tensor:
        nonlocal steps_taken
        optimizer.zero_grad()
        targets = sum((batch["labels"] != -100).sum() for batch in batches)
        total = 0.0
        for index, batch in enumerate(batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(index == len(batches) - 1)
            loss = bare_loss(model, batch) / targets
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE(steps_taken)
        optimizer.step()
        steps_taken += 1
        return total

    return step


def bare_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Cross-entropy over all logits, summed."""
    logits = model(batch["input_ids"]).flatten(0, 1).float()
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


def our_state(size: Size) -> fk.TrainState:
    """Build a state that has taken one step, so that the optimizer has its moments."""
    model = size.model()
    state = fk.TrainState.create(model, fk.adamw(model))
    step = fk.make_step(loss_fn, schedule=SCHEDULE, max_norm=MAX_NORM)
    return step(state, size.batches())[0]


def loss_fn(model: torch.nn.Module, batch: Any) -> fk.Loss:
    """Cross-entropy over all logits, as in the bare loop."""
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def head_loss(model: torch.nn.Module, batch: Any) -> fk.Loss:
    """The same without ever holding all logits."""
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    return model(batch["input_ids"], head=head)


def our_step(
    model: torch.nn.Module,
    batches: list[TensorDict],
    loss_fn: Callable[..., Any] = loss_fn,
    mesh: Any = None,
) -> Callable[[], Any]:
    """Do the same with ``make_step``, as a recipe does."""
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    step = fk.make_step(loss_fn, schedule=SCHEDULE, max_norm=MAX_NORM)

    def run() -> torch.Tensor:
        nonlocal state
        state, metrics = step(state, batches)
        return metrics["loss"]

    return run


our_head_step = partial(our_step, loss_fn=head_loss)
