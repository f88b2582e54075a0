"""A trainer's weights for generators: one file, replaced atomically, with a canary.

Generators that keep old weights, or parts of them, sample on without an error, and all that shows
is a policy that learns badly. So the trainer writes into the file what it computes itself: the
log-probabilities of a few tokens. A generator answers with its own, and is refused where these
differ, before it samples. The checksum of all values, their names and their version go with them.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from forgekit.checks import brief, check_integers, path_of
from forgekit.files import make_folder
from forgekit.huggingface.names import named_tensors
from forgekit.huggingface.safetensors_files import reading, same_bits
from forgekit.lora.adapters import reshard
from forgekit.model.initial import copy_full
from forgekit.model.lora import adapter_names, check_unmerged
from forgekit.model.vocabulary import tokens_of
from forgekit.parallel.context.context_parallel import with_sockets
from forgekit.ranks import CheckpointError, all_ranks, explain, ranks_sharing
from forgekit.rollouts.sources import LOOK_S
from forgekit.safetensors_files import bytes_of, contents
from forgekit.state import TrainState, layout_of, longest_of
from forgekit.steps.micro_batch import evaluating
from forgekit.tensors import full, wide

FILE = "weights.safetensors"
PROBED = 32
"""Maximum number of tokens of a probe."""

_KEY, _UNKNOWN = "forgekit", "crc32---"
"""Header keys of the canary, and of the checksum that is filled in last."""


@attrs.frozen
class Canary:
    """Log-probabilities of a probe, published with weights to check them by.

    Attributes:
        version: Of the weights.
        crc32: Of all values.
        names: Of the tensors, in the order of the file.
        are_adapters: Whether they are adapters, for a base that a generator has.
        probe: Token ids.
        log_probs: What the trainer found for each of them but the first.
        tolerance: How far, in nats, a generator's may be from these.
    """

    version: int
    crc32: str
    names: tuple[str, ...] = attrs.field(repr=False, converter=tuple)
    are_adapters: bool
    probe: tuple[int, ...] = attrs.field(repr=False, converter=tuple)
    log_probs: tuple[float, ...] = attrs.field(repr=False, converter=tuple)
    tolerance: float

    def check(self, log_probs: Tensor, tolerance: float = 0.0) -> None:
        """Check a generator's log-probabilities; for engines that read the file themselves.

        Args:
            log_probs: ``[len(probe) - 1]``, of each token of ``probe`` after the first.
            tolerance: The generator's own, where it is larger.

        Raises:
            CheckpointError: If they differ, or are others in number.
        """
        expected = torch.tensor(self.log_probs, dtype=torch.float64)
        if log_probs.numel() != len(expected):
            shape = f"log_probs has shape {tuple(log_probs.shape)}"
            raise CheckpointError(f"{shape} for {brief(self.probe)}; it must be [{len(expected)}].")
        gap = float((log_probs.detach().double().cpu().flatten() - expected).abs().max())
        if not gap <= max(tolerance, self.tolerance):
            raise CheckpointError(
                f"with version {self.version} trainer and generator differ by {gap:.2g} nats on "
                f"the probe ({self.tolerance:g} at most): the weights are old or incomplete, or "
                "the base is another one. Do not sample with them."
            )


def publish_weights(
    state: TrainState,
    where: str | os.PathLike[str],
    version: int,
    *,
    probe: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
) -> Canary:
    """Publish a model's weights for generators; every rank calls it.

    Tensors are gathered one after the other and written by rank 0, into a file beside the last one,
    which it then replaces; who reads the last one goes on reading it. If nothing but adapters is
    trained they are published alone.

    Publish after the state was saved: a version of a state that a kill has undone is one that the
    trainer has never had.

    Args:
        state: The state; does not change.
        where: A directory; one in ``/dev/shm`` is shared memory.
        version: A number that grows, such as ``state.step``.
        probe: ``[n]`` token ids, 2 or more; drawn from the vocabulary if left out.
        dtype: Of the weights in the file; the parameters' own if left out.
        tolerance: Largest difference in nats that is one of arithmetic; by default 1e-8 in float64,
            1e-4 in float32 and 0.1 below, whichever of trainer and generator computes in less.

    Returns:
        What goes with them.

    Raises:
        ValueError: If the model is split into pipeline stages, its adapters are merged, its
            vocabulary is unknown, or ``probe`` holds fewer than 2 tokens.
        CheckpointError: On every rank, if log-probabilities are not finite, or the file cannot be
            written; what was published before stays.
    """
    check_integers(version=(version, 0))
    path, model = path_of("where", where) / FILE, state.model
    if state.layout.stages is not None:
        raise ValueError(
            "this model is split into pipeline stages, so no rank can run the probe. Publish from "
            "a layout with pp=1."
        )
    check_unmerged(model, "generators have their base without them")
    ids = _draw(model, version) if probe is None else probe
    if ids.ndim != 1 or len(ids) < 2:
        raise ValueError(
            f"probe has shape {tuple(ids.shape)}; it must be [n] token ids, at least 2: the first "
            "one has no log-probability."
        )
    log_probs, arithmetic = probe_log_probs(model, ids)
    if not log_probs.isfinite().all():
        raise CheckpointError(
            f"log-probabilities of version {version} are not finite; it is not published."
        )
    reshard(model)
    tensors, are_adapters = _published(model)
    canary = Canary(
        version=version,
        crc32=_UNKNOWN,
        names=tensors,
        are_adapters=are_adapters,
        probe=ids.tolist(),
        log_probs=log_probs.tolist(),
        tolerance=arithmetic if tolerance is None else tolerance,
    )
    casts = {n: dtype if dtype and t.is_floating_point() else t.dtype for n, t in tensors.items()}
    entries = {name: (casts[name], tuple(tensor.shape)) for name, tensor in tensors.items()}
    ranks = all_ranks()
    values = (full(tensor).to(casts[n]).cpu().contiguous() for n, tensor in tensors.items())
    if ranks.rank:
        deque(values, maxlen=0)
    return ranks.first(lambda: _write(path, entries, values, canary))


@torch.no_grad()
def read_weights(
    model: nn.Module,
    where: str | os.PathLike[str],
    *,
    have: Canary | None = None,
    timeout_s: float = 600.0,
) -> Canary:
    """Load the last published weights and verify them by the canary.

    ``generate`` keeps no cache from one call to the next, so nothing that old weights computed is
    used again. Ranks that share the model all call it.

    Args:
        model: A model of the same parameters; changes in place.
        where: As for ``publish_weights``.
        have: What the last call returned: if it is still the one, nothing is read.
        timeout_s: Seconds to wait for a first publication.

    Returns:
        What goes with the weights; stamp samples with its ``version``.

    Raises:
        TimeoutError: If nothing is published in time.
        CheckpointError: If the file is damaged, has other tensors than the model (an adapter, a
            tied head, half of them), the model does not hold the values that were read, or its
            log-probabilities are not the trainer's. The model must not be sampled from then.
    """
    path = path_of("where", where) / FILE
    ranks = ranks_sharing(model.parameters())
    ranks.together(lambda: _wait_for(path, timeout_s))
    with ExitStack() as stack:
        while True:
            # The open file keeps its content, whatever is published meanwhile.
            file, canary = ranks.together(lambda: _open(stack, path))
            if len(set(ranks.each(lambda: (canary.version, canary.crc32)))) == 1:  # noqa: B023
                break
        if have is not None and (have.version, have.crc32) == (canary.version, canary.crc32):
            return have
        check_unmerged(model, "loaded values would not be what is merged")
        reshard(model)
        tensors = ranks.together(lambda: _check_file(model, file, canary))
        for name, tensor in tensors.items():
            copy_full(tensor, file.get_tensor(name))
        wrong = [n for n, t in tensors.items() if not _is_read(full(t), file.get_tensor(n))]
    if wrong:
        raise CheckpointError(
            f"the model does not have the values that were loaded ({brief(wrong[0])} and "
            f"{len(wrong) - 1} more): it shares memory between parameters that are "
            "separate in the trainer."
        )
    log_probs, arithmetic = probe_log_probs(model, torch.tensor(canary.probe))
    canary.check(log_probs, arithmetic)
    return canary


@torch.no_grad()
def probe_log_probs(model: nn.Module, ids: Tensor) -> tuple[Tensor, float]:
    """Compute a canary's log-probabilities; all ranks that share the model call it.

    Args:
        model: Maps ids ``[b s]`` to logits ``[b s v]``, or to an object with them as ``logits``.
        ids: ``[n]``.

    Returns:
        ``[n-1]`` log-probability of each token after the first, and how exact the arithmetic of the
        model is, in nats.
    """
    layout = layout_of(model)
    device = next(model.parameters()).device
    padding = -len(ids) % layout.sequence
    row = torch.cat([ids.to(device), ids[:1].to(device).expand(padding)])[None]
    with evaluating(model, layout), with_sockets(model, layout.sockets):
        output = model(row)
        logits = full(output if isinstance(output, Tensor) else output.logits)[0, : len(ids) - 1]
    dtypes = {logits.dtype, *(p.dtype for p in model.parameters() if p.is_floating_point())}
    exactness = {torch.float64: 1e-8, torch.float32: 1e-4}
    likely = logits.to(wide(logits.dtype)).log_softmax(-1)
    at = torch.as_tensor(ids[1:], device=device).long()
    return likely.gather(1, at[:, None])[:, 0], max(exactness.get(d, 0.1) for d in dtypes)


def _draw(model: nn.Module, version: int) -> Tensor:
    """Draw a probe's token ids from the version."""
    described = getattr(model, "spec", None) or getattr(model, "config", None)
    rows = tokens_of(described)
    if rows is None:
        raise ValueError(
            f"{type(model).__name__} has no vocab_size, so no probe can be drawn. Pass probe=, "
            "some token ids."
        )
    count = min(PROBED, longest_of(model) or PROBED)
    return torch.randint(rows, (count,), generator=torch.Generator().manual_seed(version))


def _published(model: nn.Module) -> tuple[dict[str, Tensor], bool]:
    """Return the tensors that generators need, tied ones once, and whether only adapters."""
    adapters = set(adapter_names(model))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    are_adapters = bool(adapters) and trained <= adapters
    tensors = named_tensors(model)
    return {n: t for n, t in tensors.items() if n in adapters or not are_adapters}, are_adapters


def _write(
    path: Path,
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterator[Tensor],
    canary: Canary,
) -> Canary:
    make_folder(path.parent)
    new, crc32 = path.with_name(f".{path.name}.new"), 0
    try:
        with new.open("wb") as file:
            pieces = contents(entries, tensors, {_KEY: json.dumps(attrs.asdict(canary))})
            header = next(pieces)
            file.write(header)
            for piece in pieces:
                crc32 = zlib.crc32(piece, crc32)
                file.write(piece)
            file.seek(header.index(_UNKNOWN.encode()))
            file.write(f"{crc32:08x}".encode())
            file.flush()
            os.fsync(file.fileno())
    finally:
        deque(tensors, maxlen=0)  # the others are in the same collectives, even if a disk is full
    new.replace(path)
    return attrs.evolve(canary, crc32=f"{crc32:08x}")


def _wait_for(path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no trainer has published weights at {path} in {timeout_s:g} s.")
        time.sleep(LOOK_S / 20)


def _open(stack: ExitStack, path: Path) -> tuple[Any, Canary]:
    while True:
        before = None
        try:
            before = _identity(path)
            file = stack.enter_context(reading(path))
            canary = Canary(**json.loads((file.metadata() or {})[_KEY]))
            if _identity(path) == before:  # header and values are opened separately
                return file, canary
        except Exception as error:  # of the file system, the format or the header
            if before is None or _identity(path) == before:
                problem = f"{path} holds no published weights: {explain(error)}."
                raise CheckpointError(problem) from None


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _check_file(model: nn.Module, file: Any, canary: Canary) -> dict[str, Tensor]:
    """Check a file against its canary and the model; return the tensors to read into."""
    adapters, tensors = set(adapter_names(model)), named_tensors(model)
    if canary.are_adapters:
        tensors = {name: tensor for name, tensor in tensors.items() if name in adapters}
    names = set(file.keys())
    shared = {n: tuple(t.shape) for n, t in tensors.items() if n in names}
    here = {n: tuple(file.get_slice(n).get_shape()) for n in shared}
    crc32 = 0
    for name in canary.names if names == {*canary.names} else ():
        crc32 = zlib.crc32(bytes_of(file.get_tensor(name)).numpy().data, crc32)
    if f"{crc32:08x}" != canary.crc32:
        raise CheckpointError(
            f"the values of version {canary.version} are not those that the trainer wrote (crc32 "
            f"{crc32:08x} instead of {canary.crc32}); a part is missing or old."
        )
    if names != tensors.keys() or here != shared:
        lacking, further = sorted(names - tensors.keys()), sorted(tensors.keys() - names)
        other = [n for n in shared if here[n] != shared[n]]
        raise CheckpointError(
            f"version {canary.version} is of another model: this one lacks {brief(lacking)}, adds "
            f"{brief(further)}, and has other shapes of {brief(other)}. Build it as the trainer "
            "does, with its adapters and its tied head."
        )
    return tensors


def _is_read(held: Tensor, read: Tensor) -> bool:
    return same_bits(held.cpu(), read.to(held.dtype))
