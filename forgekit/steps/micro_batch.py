"""One micro-batch through the model: this rank's part of it, and its loss as plain tensors.

Training, evaluation and pipelines share these lines. A micro-batch arrives as whole sequences;
ranks that share a sequence take their positions of it here. Under tensor parallelism what ``head=``
is given may be sharded; a loss function may mix it with plain tensors, which every rank has.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forgekit.checks import nearest_multiples
from forgekit.data.batch import shard_sequence
from forgekit.mesh import data_ranks
from forgekit.parallel.fsdp import fsdp_modules, release, reset_iteration
from forgekit.ranges import NOTHING
from forgekit.state import Layout, TrainState
from forgekit.steps.losses import Loss, LossFn
from forgekit.tensors import full

P = TypeVar("P")
RESERVED = frozenset({"loss", "grad_norm", "lr", "targets", "skipped"})

OUTSIDE = (
    "loss_fn computes with sharded parameters outside the model's forward. Call the model itself, "
    "not a module in it; use the output weight through head=, and weight decay for an L2 term."
)
FREED = (
    "backward reached a module whose parameters FSDP has freed. Either FSDP saw no tensor in what "
    "the module returned (it sees tensors, tuples, lists, dicts and dataclasses), or loss_fn "
    "differentiates through the model, as a gradient penalty does: penalise finite differences of "
    "two calls, or train on one rank in fp32."
)
EXPLAINED = MappingProxyType(
    {
        "got mixed torch.Tensor and DTensor": OUTSIDE,
        "on inputs with different meshes": OUTSIDE,
        "'FSDPCommContext' object has no attribute": OUTSIDE,
        "has already been lazily initialized": OUTSIDE,
        "out of bounds for storage of size 0": FREED,
    }
)
"""Parts of torch's error messages, and what they mean in a step."""


def take_part(batch: TensorDictBase, layout: Layout, device: torch.device) -> TensorDictBase:
    """Move a micro-batch to the device and keep the positions that belong to this rank.

    Args:
        batch: Whole sequences, ``[b s]``.
        layout: How the model was laid out.
        device: The model's device.

    Returns:
        ``[b s/cp]``: for a ring a zigzag slice, and of that a contiguous one for Ulysses.

    Raises:
        TypeError: If it is not a TensorDict with rows.
        ValueError: If the positions cannot be shared evenly.
    """
    check_rows(batch)
    documents = layout.documents
    given = None if documents is None else batch.get("doc_ids", None)
    if layout.positions_multiple > 1 and (ids := batch.get("input_ids", None)) is not None:
        check_positions(ids.shape[1], layout)
    if device.type != "cpu":  # whole, since slices of it would not be in pinned memory
        batch = batch.to(device, non_blocking=True)
    if layout.context > 1:
        ring_rank, ulysses_rank = divmod(layout.context_rank, layout.ulysses)
        whole = TensorDict(dict(batch.items()), batch.batch_size)
        whole = shard_sequence(whole, rank=ring_rank, world=layout.ring, method="zigzag")
        batch = shard_sequence(whole, rank=ulysses_rank, world=layout.ulysses, method="contiguous")
    if documents is not None and given is not None:
        is_here = given.device.type == "cpu"
        documents.note(batch["doc_ids"], given if is_here else documents.host(given))
    return batch


def check_rows(batch: Any) -> None:
    """Raise a TypeError unless a micro-batch is a TensorDict with rows."""
    if not isinstance(batch, TensorDictBase) or not batch.batch_size:
        raise TypeError(
            "a micro-batch must be a TensorDict with a batch dimension; got a "
            f"{type(batch).__name__} without. Pass a list of TensorDict(tensors, batch_size=[b])."
        )


def seed_micro_batch(state: TrainState, number: int, stage: int | None = None) -> None:
    """Seed the default generators of this process for one micro-batch's forward pass.

    Args:
        state: The state, which is not changed.
        number: Number of the micro-batch in its step, from 0.
        stage: Pipeline stage; other layers draw other numbers.
    """
    rank, _ = data_ranks(state.mesh)
    # Ranks with other positions draw other numbers; tensor-parallel ranks draw the same.
    context_rank = state.layout.context_rank
    text = f"{state.seed}/{state.step}/{rank}/{context_rank}/{stage}/{number}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    # Not torch.manual_seed: it formats a stack trace for each accelerator that is not in use.
    torch.default_generator.manual_seed(seed)
    if state.targets.device.type != "cpu":
        torch.get_device_module(state.targets.device).manual_seed(seed)


def compute_loss(model: Any, batch: TensorDictBase, loss_fn: LossFn) -> Loss:
    """Call a loss function and return its loss, whose sum and count are plain.

    Raises:
        TypeError: If it does not return a ``Loss``.
    """
    loss: Any = loss_fn(model, batch)
    if not isinstance(loss, Loss):
        needed = "forgekit.Loss(sum, count), the summed loss and the number of targets"
        raise TypeError(f"loss_fn returned a {type(loss).__name__}; a step needs {needed}.")
    if isinstance(loss.sum, DTensor) or isinstance(loss.count, DTensor):
        numbers = {name: full(getattr(loss, name)) for name in ("sum", "count", "means")}
        return dataclasses.replace(loss, **numbers)
    return loss


class explaining:
    """Translate errors of torch that sharded parameters cause.

    Raises:
        ValueError: Instead of an error that is explained; others are raised unchanged.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        """Look the message up in ``EXPLAINED``."""
        if isinstance(error, RuntimeError | AttributeError):
            meaning = next((m for said, m in EXPLAINED.items() if said in str(error)), None)
            if meaning is not None:
                raise ValueError(f"{meaning} (torch: {str(error).splitlines()[0]})") from error


def check_loss(loss: Loss) -> Loss:
    """Raise unless a loss can be trained on and reported.

    Raises:
        ValueError: If it depends on no trainable parameter, its count depends on one, or it reports
            what every step reports.
    """
    if loss.metrics and (taken := RESERVED & loss.metrics.keys()):
        raise ValueError(f"metric names {sorted(taken)} are reserved; rename them.")
    if isinstance(loss.count, Tensor) and loss.count.requires_grad:
        raise ValueError(
            "loss_fn returned a count that carries a gradient, which the step would drop: it "
            "divides by the sum of all counts. Return Loss(sum, count.detach())."
        )
    if not loss.sum.requires_grad:
        raise ValueError(
            "the loss does not depend on any trainable parameter; run the model for every "
            "micro-batch, also without targets (forgekit.cross_entropy does)."
        )
    return loss


def check_output(module: nn.Module, _args: Any, output: Any) -> None:
    """Raise if the model, or a module that FSDP wraps, returns a TensorDict.

    FSDP does not find the tensors in it and would leave their gradients unreduced, silently.
    """
    if isinstance(output, TensorDictBase):
        raise TypeError(
            f"{type(module).__name__} returned a TensorDict; gradients through it would stay "
            "unreduced under FSDP. Return tensors, or a stdlib dataclass of tensors."
        )


def length_of(batches: Iterable[TensorDictBase]) -> int | None:
    """Number of micro-batches; None if it is not known before the end."""
    try:
        return len(batches)  # pyright: ignore[reportArgumentType]
    except TypeError:  # a DataLoader over a stream raises it as well
        return None


@runtime_checkable
class CountedBatches(Protocol):
    """Micro-batches that count what they consume, as those of ``forgekit.groups`` do.

    Attributes:
        samples: Rows that all ranks have consumed with those pulled so far, without padding; None
            if they do not count.
    """

    samples: Any


@runtime_checkable
class SharedBatches(CountedBatches, Protocol):
    """One replica group's part of a step's micro-batches, as ``loader.share`` gives it.

    Attributes:
        first_number: Number of the first one in the step.
        whole: Micro-batches of the whole step, and rows of each.
    """

    first_number: Any
    whole: Any


class Listed(list[TensorDictBase]):
    """Micro-batches that were pulled ahead; ``source`` is what they come from, which may count."""

    source: Any


class Peeked:
    """Micro-batches whose first one was pulled ahead; it comes again, as the first.

    Attributes:
        first: The first micro-batch, in a list; an empty one where there is none.
        source: What they come from, which may count.
    """

    def __init__(self, batches: Iterable[TensorDictBase]) -> None:
        self.source: Any = batches
        self._rest = iter(batches)
        self.first = list(islice(self._rest, 1))

    def __iter__(self) -> Iterator[TensorDictBase]:
        return chain(self.first, self._rest)

    def __len__(self) -> int:
        return len(self.source)


def samples_of(batches: Iterable[TensorDictBase]) -> int | None:
    """Rows that all ranks have consumed; None where every rank consumed the same number."""
    known = _counting(batches, CountedBatches)
    return None if known is None else known.samples


def share_of(batches: Iterable[TensorDictBase]) -> SharedBatches | None:
    """The same micro-batches where they are a replica group's part of a step, else None."""
    return _counting(batches, SharedBatches)


def _counting(batches: Any, protocol: type[P]) -> P | None:
    if type(batches) is list:  # Python 3.11 takes 10 us to find that it has no such attributes
        return None
    source = batches.source if isinstance(batches, Listed | Peeked) else batches
    return source if isinstance(source, protocol) else None


def mixing_tensors(layout: Layout) -> AbstractContextManager[object]:
    """Let plain tensors meet those that tensor parallelism shards, in a loss and its backward.

    The plain ones (labels, masks) are the same on all tensor-parallel ranks.
    """
    if layout.tensor == 1:
        return NOTHING
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()


@contextmanager
def evaluating(model: nn.Module, layout: Layout) -> Iterator[None]:
    """Put a model into evaluation mode, and each module back into its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    except BaseException:
        reset_iteration(fsdp_modules(*layout.roots(model)))
        raise
    finally:
        for module in training:  # not `model.train()`: a part may be frozen in evaluation mode
            module.training = True
        release(fsdp_modules(*layout.roots(model)))


def check_positions(positions: int, layout: Layout) -> None:
    """Raise unless ranks can share the positions evenly and the model's maximum is not exceeded."""
    multiple = layout.positions_multiple
    if layout.longest is not None and positions > layout.longest:
        raise ValueError(
            f"input_ids has {positions} positions, more than max_seq_len, which is "
            f"{layout.longest} for a whole sequence."
        )
    if positions % multiple:
        raise ValueError(
            f"sequence length {positions} must be a multiple of {multiple} (cp {layout.context}, "
            f"tp {layout.sequence}; a ring has two slices for each rank); "
            f"{nearest_multiples(positions, multiple)}. Change data.seq_len or the mesh."
        )
