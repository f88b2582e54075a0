"""FLOPs of training, and model FLOPs utilization (MFU).

A product of ``[m k]`` and ``[k n]`` takes ``2 m k n`` operations. So a matrix of ``n`` values takes
``2 n`` per token forwards, ``2 n`` for the gradient of its input, and ``2 n`` more for its
own, which a frozen one does not need: ``6 n``, or ``4 n`` of the base under adapters. Attention
takes ``4 h c`` per layer for each query and key that meet (scores and sums over values), and twice
that backwards. What comes before the first trained parameter, in the model's order, has no backward
pass at all. Norms, rotary angles, softmax, the lookup of embeddings, optimizers, and whatever
is computed a second time, as activation checkpointing and flash kernels do, do not count.

Two conventions are in use, and they differ by up to a factor of two for long sequences:

- ``perf/mfu``: a token meets those before it in its own document, as causal kernels compute it;
- ``perf/mfu_palm``: each token of a row meets all of them (``6 N + 12 L h c s`` per token), as
  PaLM and most others report.

Of experts only those that a token goes to count. The peak is that of the dtype that products are
computed in, of all devices.

References:
    PaLM, appendix B, https://arxiv.org/abs/2204.02311
"""

from __future__ import annotations

import math
from typing import Any, Self

import attrs
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from forgekit.metrics.device_specs import peak_flops
from forgekit.model.layers import Attention
from forgekit.model.moe import MoE
from forgekit.model.nf4 import values_in
from forgekit.parallel.fsdp import compute_dtype
from forgekit.parallel.layout import size_of, world_of
from forgekit.state import TrainState

Integers = NDArray[np.int64]


@attrs.frozen
class Flops:
    """FLOPs of a model in training, and its size.

    Attributes:
        per_token: Operations in matrices per token, forwards and backwards.
        per_pair: Operations in attention, of all layers, per query and key that meet.
        parameters: Number of parameters, frozen ones included.
        active_parameters: Those that each token uses: of routed experts ``top_k``.

    Examples:
        >>> from forgekit.model.transformer import Transformer, TransformerSpec
        >>> spec = TransformerSpec(vocab_size=8, dim=4, layers=1, heads=2, kv_heads=1, ffn_dim=6,
        ...                        max_seq_len=4)
        >>> flops = Flops.of(Transformer(spec))
        >>> flops.per_token == 6 * (4 * 4 * 2 + 4 * 2 * 2 + 3 * 4 * 6 + 4 * 8), flops.per_pair
        (True, 48.0)
    """

    per_token: float
    per_pair: float
    parameters: int
    active_parameters: int

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Count a model's FLOPs, in a pipeline those of this rank's stages; works on meta.

        Args:
            model: A ``Transformer``, with or without adapters and in any layout. Of another model
                each matrix counts once per token, and stacked experts by the numbers of its
                ``config``; its attention is unknown, NaN.
        """
        uses, passes = _uses(model), _passes(model)
        per_token = active = total = 0.0
        for parameter in model.parameters():
            use, looked_up = uses.get(parameter, (math.nan if parameter.ndim > 2 else 1.0, False))
            values = values_in(parameter)
            total += values
            active += values if math.isnan(use) else use * values
            if parameter.ndim > 1 and not looked_up:
                per_token += 2 * use * values * passes[parameter]
        return cls(per_token, 4.0 * _head_channels(model), round(total), round(active))

    def of_row(self, tokens: float, pairs: float) -> float:
        """Return the FLOPs of a row with so many tokens and attended pairs."""
        return self.per_token * tokens + self.per_pair * pairs

    def over_stages(self, state: TrainState) -> Flops:
        """Sum over the stages of a pipeline; every rank calls it."""
        if size_of(state.mesh, "pp") == 1:
            return self
        sums = torch.tensor(attrs.astuple(self), dtype=torch.float64, device=state.targets.device)
        dist.all_reduce(sums)
        copies = world_of(state.mesh) / size_of(state.mesh, "pp")  # of each stage
        *flops, parameters, active = (sums / copies).tolist()
        return Flops(*flops, parameters=round(parameters), active_parameters=round(active))


@attrs.frozen(kw_only=True)
class Utilization:
    """Computes MFU from a loader's samples.

    Attributes:
        flops: Of the whole model.
        peak: Operations per second of all devices at best.
        loader: Finds the rows that samples are, ``rows(first, stop)``, of its ``dataset``.
    """

    flops: Flops
    peak: float
    loader: Any

    @classmethod
    def of(
        cls, flops: Flops, state: TrainState, loader: Any, peak: float | None = None
    ) -> Self | None:
        """Build for a run; None if peak, FLOPs or row contents are unknown.

        Args:
            flops: Of the whole model.
            state: The state to start from.
            loader: What the run reads, as ``make_loader`` makes it.
            peak: Operations per second of one device; by default that of
                ``forgekit.metrics.device_specs`` for the dtype that the model computes in.
        """
        if peak is None:
            peak = peak_flops(state.targets.device, compute_dtype(state.model))
        has_rows = hasattr(loader, "rows") and row_length(getattr(loader, "dataset", None))
        if peak is None or not has_rows or math.isnan(flops.of_row(1, 1)):
            return None
        return cls(flops=flops, peak=peak * world_of(state.mesh), loader=loader)

    def ideal(self, first: int, stop: int) -> dict[str, float]:
        """Return the seconds that samples take at peak, for ``perf/mfu`` and ``perf/mfu_palm``.

        Tokens attend to those before them in their own document; as PaLM counts, to all of the row.
        """
        rows = self.loader.rows(first, stop)
        counts = {
            "perf/mfu": count_pairs(self.loader.dataset, rows),
            "perf/mfu_palm": count_pairs(self.loader.dataset, rows, whole=True),
        }
        return {name: self.flops.of_row(*count) / self.peak for name, count in counts.items()}


def row_length(dataset: Any) -> int:
    """Return the positions of a row; 0 if unknown."""
    return getattr(getattr(dataset, "rows", dataset), "seq_len", 0)  # "rows" of conversations


def count_pairs(dataset: Any, rows: Integers, *, whole: bool = False) -> tuple[float, float]:
    """Count the tokens and attended pairs of rows.

    Padding does not count. Ten thousand rows take some milliseconds; nothing but the ends of
    documents is read.

    Args:
        dataset: A dataset of forgekit's, or a mixture. Of another with a ``seq_len`` rows are
            taken as full.
        rows: Which rows, any number of times; of a mixture which samples.
        whole: Pair each token with all positions of its row.

    Returns:
        Tokens, and pairs of a token and one up to itself in its document.

    Examples:
        >>> from forgekit.data.packing import Bins
        >>> from forgekit.data.rows import packed_dataset
        >>> bins = Bins([0, 2], documents=[0, 1], starts=[0, 0], lengths=[3, 2], capacity=8)
        >>> count_pairs(packed_dataset([[1, 2, 3], [4, 5]], bins), np.array([0, 0]))
        (10.0, 18.0)
    """
    if hasattr(dataset, "order"):
        sources, rows = dataset.order.find(rows)
        by_source = ((one, rows[sources == i]) for i, one in enumerate(dataset.datasets))
        parts = [count_pairs(*part, whole=whole) for part in by_source]
        return sum(tokens for tokens, _ in parts), sum(pairs for _, pairs in parts)
    lengths = _pieces(dataset, rows).astype(np.float64)
    seen = row_length(dataset) if whole else (lengths + 1) / 2
    return float(lengths.sum()), float((lengths * seen).sum())


def _pieces(dataset: Any, rows: Integers) -> Integers:
    """Return the lengths of runs of tokens that attend to each other."""
    if getattr(dataset, "bins", None) is not None:
        offsets = dataset.bins.offsets
        return dataset.bins.lengths[_ranges(offsets[rows], offsets[rows + 1])]
    length, file = row_length(dataset), getattr(dataset, "file", None)
    if file is None:
        return np.full(len(rows), length)
    starts, ends = (np.minimum(at * length, file.tokens - 1) for at in (rows, rows + 1))
    if not dataset.doc_ids:
        return ends - starts
    first = np.searchsorted(file.offsets, starts, side="right") - 1
    stop = np.searchsorted(file.offsets, ends)
    documents, counts = _ranges(first, stop), stop - first
    begun = np.maximum(file.offsets[documents], np.repeat(starts, counts))
    return np.minimum(file.offsets[documents + 1], np.repeat(ends, counts)) - begun


def _ranges(first: Integers, stop: Integers) -> Integers:
    """Concatenate ranges of integers."""
    counts = stop - first
    return np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)


def _uses(model: nn.Module) -> dict[Tensor, tuple[float, bool]]:
    """Return the share of tokens that use a parameter, and whether it is only looked up."""
    uses: dict[Tensor, tuple[float, bool]] = {}
    is_head = any(getattr(getattr(m, "spec", None), "tied", False) for m in model.modules())
    config = getattr(model, "config", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((count for name in names if (count := getattr(config, name, None))), None)
    top_k = getattr(config, "num_experts_per_tok", None)
    if top_k and experts:  # of transformers, stacked
        stacked = (p for p in model.parameters() if p.ndim == 3 and p.shape[0] == experts)
        uses |= dict.fromkeys(stacked, (top_k / experts, False))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            uses[module.weight] = (1.0, not is_head)
        elif isinstance(module, MoE):
            share = module.spec.top_k / module.spec.experts
            uses |= dict.fromkeys(module.experts.parameters(), (share, False))
    for module in model.modules():  # a head that shares its weight with the embedding
        if isinstance(module, nn.Linear) and module.weight in uses:
            uses[module.weight] = (1.0, False)
    return uses


def _passes(model: nn.Module) -> dict[nn.Module | Tensor, int]:
    """Return the matmuls per token: forward, weight gradient, input gradient.

    Of a module: what attention computes in it, forwards and twice backwards.
    """
    passes: dict[nn.Module | Tensor, int] = {}
    looked_up, is_reached = [], False
    for module in model.modules():
        is_reached |= getattr(module, "is_absent", False)  # trained on another stage
        inside = (p for n, p in module.named_parameters() if not n.startswith("output."))
        passes[module] = 3 if is_reached or any(p.requires_grad for p in inside) else 1
        for parameter in module.parameters(recurse=False):
            passes.setdefault(parameter, 1 + parameter.requires_grad + is_reached)
            is_reached |= parameter.requires_grad
        looked_up += [module.weight] if isinstance(module, nn.Embedding) else []
    for weight in looked_up:  # multiplied as the head
        passes[weight] = 1 + weight.requires_grad + is_reached
    return passes


def _head_channels(model: nn.Module) -> float:
    """Return the sum of ``h c`` over layers, times passes; NaN for another kind of attention."""
    passes = _passes(model)
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    channels = float(sum(module.query.out_features * passes[module] for module in attentions))
    return channels if attentions else math.nan
