"""Plain sampling, one token at a time, for looking at what a model has learned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forgekit.mesh import process_rank
from forgekit.parallel.context.context_parallel import with_sockets
from forgekit.run.durable_files import write_atomic
from forgekit.state import TrainState, layout_of
from forgekit.steps.forward import evaluating


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    eos_id: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Continue a prompt, feeding the whole text through the model for each new token.

    On several ranks every rank calls it with the same arguments and gets the same tokens; ranks
    that share a sequence in training each run all of it here. The global random state is left
    alone.

    Args:
        model: Maps ids ``[b s]`` to logits ``[b s v]``. Where it has a ``spec.max_seq_len``, that
            many of the last tokens are fed.
        input_ids: ``[b s]`` prompts of one length, ``s`` at least 1.
        max_new_tokens: Tokens to add at most.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample from the ``top_k`` most likely tokens only.
        eos_id: Stop when every row has produced it; rows that did are filled up with it.
        seed: Seed of the samples.

    Returns:
        ``[b s+n]`` prompts and what follows, ``n <= max_new_tokens``.

    Raises:
        ValueError: If a prompt is empty, ``temperature`` or ``top_k`` is out of range, or the
            model is split into pipeline stages.
    """
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be [b s], s >= 1.")
    if not temperature >= 0 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"temperature {temperature} must not be negative and top_k {top_k} at least 1."
        )
    layout = layout_of(model)
    if layout.stages is not None:
        raise ValueError(
            "this model is split into pipeline stages, and a rank can run only its own. To "
            "generate, load its checkpoint into a layout with pp=1."
        )
    window = layout.longest or 2**31
    window = window // layout.sequence * layout.sequence
    generator = torch.Generator(input_ids.device).manual_seed(seed)
    ids, ended = input_ids, torch.zeros_like(input_ids[:, :1], dtype=torch.bool)
    with evaluating(model, layout), with_sockets(model, layout.sockets):
        for _ in range(max_new_tokens):
            logits = _last_logits(model, ids[:, -window:], layout.sequence).float()
            chosen = _choose(logits, temperature, top_k, generator)
            if eos_id is not None:
                chosen = torch.where(ended, eos_id, chosen)
                ended = ended | (chosen == eos_id)
            ids = torch.cat((ids, chosen), dim=1)
            if eos_id is not None and bool(ended.all()):
                break
    return ids


def write_sample(
    state: TrainState, out: str | os.PathLike[str], tokenizer: Any, prompt: str, **options: Any
) -> str:
    """Continue a text and keep it as ``samples/step_00000100.txt`` in the run directory.

    Every rank calls it; the first one writes.

    Args:
        state: The state.
        out: The run directory.
        tokenizer: Has ``encode(text).ids`` and ``decode(ids)``, as those of ``tokenizers``.
        prompt: The text to continue.
        **options: As for ``generate``.

    Returns:
        The prompt and what the model made of it.
    """
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=state.targets.device)
    text = tokenizer.decode(generate(state.model, ids, **options)[0].tolist())
    if process_rank() == 0:
        path = Path(out) / "samples" / f"step_{state.step:08d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    return text


def _last_logits(model: nn.Module, ids: Tensor, multiple: int) -> Tensor:
    """Logits of the last position, ``[b v]``; padding behind it changes nothing before it."""
    length = ids.shape[1]
    logits = model(F.pad(ids, (0, -length % multiple)))[:, length - 1]
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> Tensor:
    """Pick one token a row, ``[b v]`` -> ``[b 1]``."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
