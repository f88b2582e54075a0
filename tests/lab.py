"""What tests build and compare with: a model, batches by kind, states in a layout, the reference.

The reference that every layout is held to is that of ``verify``: one process, float64, plain
backward passes over the whole global batch. Nothing of the step is used there; the loss is torch's
cross-entropy, and clipping and updates are torch's too.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import forgekit as fk
from forgekit.state import donate
from forgekit.verification.measure import plain_backward

SPEC = fk.TransformerSpec(
    vocab_size=37, dim=24, layers=2, heads=6, kv_heads=2, ffn_dim=40, max_seq_len=16, qk_norm=True
)
MICRO_BATCHES = 3
ROWS = 2


def global_batch(world: int, kind: str = "ragged", seed: int = 0) -> list[list[TensorDict]]:
    """``[micro-batch][rank]`` of batches with ragged lengths and ragged numbers of targets."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, generator=generator)
    batches = []
    for micro, places in enumerate([9, 16, 5][:MICRO_BATCHES]):
        row = []
        for rank in range(world):
            ids = draw(0, SPEC.vocab_size, (ROWS, places + 1))
            labels = ids[:, 1:].clone()
            labels[draw(0, 10, labels.shape) < 3 + 2 * rank] = -100
            is_empty = {"ragged": False, "empty_micro_batches": micro != 1, "no_targets": True}
            is_empty["rank_without_targets"] = rank == world - 1 > 0
            if is_empty[kind]:
                labels[:] = -100
            row.append(TensorDict({"input_ids": ids[:, :-1], "labels": labels}, [ROWS]))
        batches.append(row)
    return batches


def token_rows(rows: int, positions: int, vocab: int, seed: int = 0) -> TensorDict:
    """Random ids and the next ones as labels, of which three tenths are masked; ``[b s]``."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(seed))
    ids = draw(0, vocab, (rows, positions + 1))
    labels = ids[:, 1:].masked_fill(draw(0, 10, (rows, positions)) < 3, -100)
    return TensorDict({"input_ids": ids[:, :-1], "labels": labels}, [rows])


def vectors_loss(model: nn.Module, batch: Any) -> fk.Loss:
    return fk.cross_entropy(model(batch["x"]), batch["labels"])


def vectors(rank: int, micros: int = 2, seed: int = 0) -> list[TensorDict]:
    """Micro-batches of three rows ``x [3 6]`` and of labels below 5, ragged, for small models."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    batches = []
    for count in range(micros):
        x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(5, (3,), generator=generator)
        labels[: (rank + count) % 3] = -100
        batches.append(TensorDict({"x": x, "labels": labels}, [3]))
    return batches


def torch_loss(model: Callable[..., Any], batch: Any) -> fk.Loss:
    """Torch's own cross-entropy of what a model or a function returns."""
    places = {key: batch[key] for key in ("position_ids", "doc_ids") if key in batch}
    logits, labels = model(batch["input_ids"], **places), batch["labels"].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    return fk.Loss(total, int((labels != -100).sum()))


def reference_gradients(
    model: nn.Module,
    batches: list[list[TensorDict]],
    loss_fn: Callable[[Any, Any], fk.Loss] = torch_loss,
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of the token-mean loss of the global batch, and the loss, in float64."""
    loss = plain_backward(model.double(), chain.from_iterable(batches), loss_fn)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients, torch.tensor(loss, dtype=torch.float64)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None = None) -> Tensor:
    """Causal softmax inside each document of ``[b s]``, by the formula; all are ``[b s h c]``."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()[None]
    if doc_ids is not None:
        seen = seen & (doc_ids[:, :, None] == doc_ids[:, None, :])
    scores = torch.einsum("bihc,bjhc->bhij", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhc->bihc", weights, v)


def exact_attention(doc_ids: Tensor | None, *inputs: Tensor) -> list[Tensor]:
    """Of queries, keys, values and a gradient of the output: output and gradients, in float64."""
    *leaves, upstream = (x.detach().double() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    out = plain_attention(*leaves, doc_ids)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def logits_loss(model: nn.Module, batch: Any) -> fk.Loss:
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def head_loss(model: nn.Module, batch: Any) -> fk.Loss:
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    return model(batch["input_ids"], head=head)


def build_state(
    layout: dict[str, int],
    world: int,
    build: Callable[[nn.Module], torch.optim.Optimizer] = fk.adamw,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> fk.TrainState:
    """A state of a small transformer in a layout, of one process if ``world`` is 1."""
    model = fk.Transformer(SPEC).to(dtype)
    return lay_out(model, layout, build, **options) if world > 1 else alone(model, build)


def lay_out(
    model: nn.Module,
    sizes: dict[str, int] | DeviceMesh | None = None,
    build: Callable[[nn.Module], torch.optim.Optimizer] = fk.adamw,
    device: str = "cpu",
    **options: Any,
) -> fk.TrainState:
    """A state of any model on the ranks that there are; by default sharded over all of them."""
    is_mesh = isinstance(sizes, DeviceMesh)
    mesh = sizes if is_mesh else fk.build_mesh(fk.MeshSpec(**sizes or {}), device=device)
    model = fk.parallelize(model, mesh, **options)
    return fk.TrainState.create(model, build(model), mesh=mesh)


def count_tensors() -> int:
    """How many tensors Python holds."""
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


def alone(
    model: nn.Module, build: Callable[[nn.Module], torch.optim.Optimizer] = fk.adamw
) -> fk.TrainState:
    """A state of any model in one process."""
    return fk.TrainState.create(model, build(model))


def mean_gradients(
    state: fk.TrainState, batches: Any, loss_fn: Callable[..., fk.Loss], **options: Any
) -> dict[str, Tensor]:
    """Full gradients of the token mean as a step finds them, by name."""
    totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn, **options), state)
    return {name: full(gradient) for name, gradient in fk.gradients(state, totals).items()}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_tensors(model: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """Full parameters, or full gradients, by name."""
    named = ((n, p.grad if gradients else p) for n, p in model.named_parameters())
    return {n: full(t).detach().clone() for n, t in named if t is not None}


def is_kept(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """Whether parameters are bitwise those of before, as ``full_tensors`` gave them."""
    after = full_tensors(model)
    return all(torch.equal(before[name], after[name]) for name in before)


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference over the largest expected value; NaN does not pass a comparison."""
    assert found.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    worst = [float((found[n].double() - expected[n].double()).abs().max()) for n in expected]
    assert all(error == error for error in worst), "NaN"
    return max(worst) / scale if scale else max(worst)


class Watch(TorchDispatchMode):
    """What torch dispatches inside ``with``: the one counter of tests.

    Attributes:
        operations: Names in order, such as ``mm``.
        largest: Elements of the largest plain tensor that was computed.
        dtypes: Floating dtypes of what was computed.
    """

    HOST = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.collectives: list[str] = []
        self.largest = 0
        self.dtypes: set[torch.dtype] = set()

    @property
    def host_reads(self) -> list[str]:
        """Operations for which the host waits."""
        return [name for name in self.operations if name in self.HOST]

    def count(self, word: str) -> int:
        """How many collectives have a word in their name."""
        return sum(word in name for name in self.collectives)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self.operations.append(name)
        if "c10d" in func.namespace:
            self.collectives.append(name)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is Tensor or isinstance(tensor, nn.Parameter):
                self.largest = max(self.largest, tensor.numel())
                if tensor.is_floating_point():
                    self.dtypes.add(tensor.dtype)
        return out


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Names of all for which the host waits: what torch dispatches, and methods beside that."""
    reads: list[str] = []
    with pytest.MonkeyPatch.context() as patch, Watch() as watch:
        for name in ("tolist", "numpy", "item", "__bool__", "__float__", "__int__"):
            patch.setattr(Tensor, name, _noting(reads, name))
        yield reads
    reads += watch.host_reads


def _noting(reads: list[str], name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)
    return lambda tensor, *args: (reads.append(name), method(tensor, *args))[1]


def train(state: Any, steps: int) -> Any:
    """Every rank sees the same rows, so that the steps do not depend on the number of ranks."""
    for _ in range(steps):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(state.step))
        state.optimizer.zero_grad()
        state.model(rows).square().sum().backward()
        state.optimizer.step()
        state = donate(state, step=state.step + 1, samples=state.samples + 4)
    return state


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A disk on which a file may have so many bytes: it takes the first part of what is longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def run_with_torchao(code: str, *arguments: str) -> None:
    """Run a program that imports torchao, which lies beside the environment; it must succeed."""
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), str(root / ".venv" / "torchao")])
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
