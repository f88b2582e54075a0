"""Read an export back: the values that each rank holds, and the logits that come out of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forgekit.inputs import brief
from forgekit.model.transformer import Transformer
from forgekit.parallel.context.context_parallel import with_sockets
from forgekit.run.checkpoints.errors import CheckpointError
from forgekit.run.checkpoints.ranks import Ranks
from forgekit.run.huggingface.families import differences, family_of
from forgekit.run.huggingface.files import fill, reading, stored_tensors
from forgekit.run.huggingface.load import (
    check_stored,
    local_part,
    name_map,
    overlaps,
    read_config,
    read_into,
)
from forgekit.run.huggingface.names import NameMap, named_tensors
from forgekit.state import layout_of
from forgekit.steps.forward import evaluating

POSITIONS = 16

CLOSE, CLOSE_16_BITS = 1e-3, 0.25
"""Relative differences; in 16 bits a router may choose other experts."""


@torch.no_grad()
def check_values(tensors: Mapping[str, Tensor], names: NameMap, directory: Path) -> None:
    """Compare what a rank holds with the files, bit for bit after the cast to their dtype.

    Raises:
        CheckpointError: If anything differs.
    """
    stored = stored_tensors(directory)
    check_stored(names, stored, directory)
    for name, tensor in tensors.items():
        local, box = local_part(tensor)
        for part in names.parts[name]:
            if (found := overlaps(local, box, part)) is None:
                continue
            view, there = found
            source = stored[part.theirs]
            expected = view.to("cpu", source.dtype).contiguous()
            read = torch.empty_like(expected)
            with reading(source.file) as file:
                fill(read, file, source, there)
            if not torch.equal(_bits(read), _bits(expected)):
                raise CheckpointError(
                    f"{part.theirs!r} was read back with other values than {name!r} has."
                )


def check_logits(ranks: Ranks, model: Transformer, directory: Path) -> None:
    """Compare the logits of a few tokens with those that come out of the files.

    Args:
        ranks: All ranks; each calls it.
        model: The model, in its layout. A pipeline cannot be called for logits and is passed over.
        directory: The export.

    Raises:
        CheckpointError: If they differ, or the files describe another model. On every rank.
    """
    config = ranks.first(lambda: read_config(directory))
    spec = family_of(config).read(config)
    rows = spec.vocab_size
    if different := [d for d in differences(spec, model.spec) if not d.startswith("vocab_size")]:
        raise CheckpointError(f"config.json was read back as another model: {different}.")
    layout = layout_of(model)
    positions = min(POSITIONS * layout.sequence, spec.max_seq_len)
    positions = positions // layout.sequence * layout.sequence
    if layout.stages is not None or not positions:
        return
    ids = (torch.arange(positions) * 7919 % rows).unsqueeze(0)
    found, dtype = _live_logits(model, ids)

    def compare() -> None:
        wanted = streamed_logits(directory, ids)
        error = float((found[..., :rows] - wanted).norm() / wanted.norm())
        is_rounded = dtype.itemsize == 2 or config.get("dtype") in ("bfloat16", "float16")
        bound = CLOSE_16_BITS if is_rounded else CLOSE
        if bool(found.isfinite().all()) and not error <= bound:
            raise CheckpointError(
                f"the export computes other logits than the model: they differ by {error:.1e} "
                f"(at most {bound} in {brief(dtype)}), so it was not kept."
            )

    ranks.first(compare)


@torch.no_grad()
def streamed_logits(directory: Path, ids: Tensor) -> Tensor:
    """Compute logits from a directory, with one block of the model in memory at a time.

    Args:
        directory: In the Hugging Face layout.
        ids: ``[b s]``.

    Returns:
        ``[b s v]`` float32.
    """
    config = read_config(directory)
    family = family_of(config)
    spec = family.read(config)
    names, stored = name_map(family, spec, spec.vocab_size), stored_tensors(directory)
    with torch.device("meta"):
        model = Transformer(spec).float().eval()

    def arrive(part: nn.Module, prefix: str) -> None:
        part.to_empty(device="cpu")
        for module in part.modules():
            if hasattr(module, "reset_buffers"):
                module.reset_buffers()  # pyright: ignore[reportCallIssue]
        own = {f"{prefix}.{name}": tensor for name, tensor in named_tensors(part).items()}
        read_into(own, names, stored)

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        if model.output is not None:
            arrive(model.output, "output")
            weight = model.output.weight
        return F.linear(hidden, weight)

    def leave(part: nn.Module, *_: object) -> None:
        part.to("meta")

    parts = {"embedding": model.embedding, "norm": model.norm}
    parts |= {f"layers.{number}": layer for number, layer in enumerate(model.layers)}
    with ExitStack() as stack:
        for name, part in parts.items():
            hook = part.register_forward_pre_hook(lambda p, _, n=name: arrive(p, n))
            stack.callback(hook.remove)
            if part is not model.embedding or not spec.tied:
                stack.callback(part.register_forward_hook(leave).remove)
        return model(ids, head=head)


@torch.no_grad()
def _live_logits(model: Transformer, ids: Tensor) -> tuple[Tensor, torch.dtype]:
    """``[b s v]`` logits in host memory, and in what dtype the model computes."""
    layout, dtypes = layout_of(model), []

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        dtypes.append(weight.dtype)
        return F.linear(hidden, weight)

    parameter = next(model.parameters())
    is_sharded = isinstance(parameter, DTensor)
    device = parameter.device_mesh.device_type if is_sharded else parameter.device
    with (
        evaluating(model, layout),
        with_sockets(model, layout.sockets),
        torch.compiler.set_stance("force_eager"),
    ):
        logits = model(ids.to(device), head=head)
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return logits.float().cpu(), dtypes[0]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
