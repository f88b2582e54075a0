"""Ways from hidden states to a loss, and the memory that each takes on a CPU.

Run as a script it measures one of them: ``python benchmarks/losses.py "full logits"`` prints the
MiB by which the process grew at its highest, and the seconds. Only the system knows that number,
buffers inside kernels included, so each way needs a process of its own: memory that an earlier one
left behind would be used again and not be counted.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

import forgekit as fk

FULL, TORCH, OURS, LOG_PROBS = "full logits", "torch chunked", "forgekit", "forgekit, log-probs"
SPARSE_KL = "forgekit, a teacher's 16"


@attrs.frozen
class LossSize:
    """Targets, width and vocabulary of a loss, on some device."""

    tokens: int
    dim: int
    vocab_size: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Draw hidden states, the projection and labels."""
        make: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        hidden = torch.randn(self.tokens, self.dim, **make)
        weight = torch.randn(self.vocab_size, self.dim, **make) * self.dim**-0.5
        labels = torch.randint(self.vocab_size, (self.tokens,), device=self.device)
        return hidden.requires_grad_(), weight.requires_grad_(), labels


def full(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Hold all logits, as every model without a fused loss does."""
    return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Let torch take the rows in chunks; it does so only when it is given options."""
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    options = LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Take the rows in chunks, each chunk's gradient at once."""
    return fk.linear_cross_entropy(hidden, weight, labels).sum


def log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Find each label's log-probability; its gradient needs a chunk's logits once more."""
    return -fk.linear_log_probs(hidden, weight, labels).sum()


def sparse_kl(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Diverge from a teacher who gives 16 tokens half of the mass, the label among them."""
    ids = (labels[:, None] + torch.arange(16, device=labels.device)) % weight.shape[0]
    log_probs = torch.full(ids.shape, -math.log(32), device=labels.device)
    return fk.steps.sparse_kl(hidden, weight, ids, log_probs).sum


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    FULL: full,
    OURS: ours,
    LOG_PROBS: log_probs,
    SPARSE_KL: sparse_kl,
}
if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    WAYS[TORCH] = chunked


def train(name: str, size: LossSize) -> Callable[[], Tensor]:
    """Build a function that runs one forward and backward and returns the loss."""
    hidden, weight, labels = size.inputs()

    def run() -> Tensor:
        hidden.grad = weight.grad = None
        loss = WAYS[name](hidden, weight, labels)
        loss.backward()
        return loss.detach()

    return run


def peak_growth(name: str, size: LossSize) -> dict[str, float]:
    """Run once and return by how many MiB this process grew, and the seconds that it took."""
    train(name, attrs.evolve(size, tokens=64, vocab_size=64))()  # libraries load on first use
    run = train(name, size)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest value so far
    before, began = resident("VmRSS"), time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    return {"mib": resident("VmHWM") - before, "seconds": seconds}


def resident(what: str) -> float:
    """MiB of a line of this process's status, such as its resident memory ``VmRSS``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) / 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    growth = peak_growth(sys.argv[1], LossSize(tokens=4096, dim=256, vocab_size=32768))
    sys.stdout.write(json.dumps(growth))
