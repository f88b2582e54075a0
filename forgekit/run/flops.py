"""Floating-point operations of training, and which share of the devices' peak they are (MFU).

A product of ``[m k]`` and ``[k n]`` takes ``2 m k n`` operations. So a matrix of ``n`` values takes
``2 n`` per token forwards, ``2 n`` for the gradient of what it is given, and ``2 n`` more for its
own, which a frozen one does not need: ``6 n``, or ``4 n`` of the base under adapters. Attention
takes ``4 h c`` per layer for each query and key that meet (scores and sums over values), and twice
that backwards. Norms, rotary angles, softmax, the lookup of embeddings, optimizers, and whatever
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

from typing import Any, Self

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgekit.model.layers import Attention
from forgekit.model.moe import MoE
from forgekit.parallel.fsdp import compute_dtype
from forgekit.parallel.layout import size_of, world_of
from forgekit.run.machines import peak_flops
from forgekit.state import TrainState

MIXED = 4096
"""Samples of a mixture that its mean row is taken from."""


@attrs.frozen(kw_only=True)
class Flops:
    """What a model computes in training, and its size.

    Attributes:
        per_token: Operations in matrices per token, forwards and backwards.
        per_pair: Operations in attention, of all layers, per query and key that meet.
        parameters: Number of parameters, frozen ones included.
        active_parameters: Those that a token meets: of routed experts ``top_k``.

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
        """Count a model's, or of a pipeline what this rank's stages hold; on meta as well.

        Args:
            model: A ``Transformer``, with or without adapters and in any layout. Of another model
                each matrix counts once per token, and attention by the numbers of its ``config``.
        """
        uses = _uses(model)
        per_token = active = total = 0.0
        for parameter in model.parameters():
            use, looked_up = uses.get(parameter, (1.0, False))
            total += parameter.numel()
            active += use * parameter.numel()
            if parameter.ndim > 1 and not looked_up:
                per_token += use * parameter.numel() * (6 if parameter.requires_grad else 4)
        return cls(
            per_token=per_token,
            per_pair=12.0 * _head_channels(model),
            parameters=round(total),
            active_parameters=round(active),
        )

    def of_row(self, tokens: float, pairs: float) -> float:
        """Operations of a row of so many tokens, in which so many pairs of them meet."""
        return self.per_token * tokens + self.per_pair * pairs

    def over_stages(self, state: TrainState) -> Flops:
        """Add up what the stages of a pipeline compute; every rank calls it."""
        if size_of(state.mesh, "pp") == 1:
            return self
        sums = torch.tensor(attrs.astuple(self), dtype=torch.float64, device=state.targets.device)
        dist.all_reduce(sums)
        per_token, per_pair, *sizes = (sums * size_of(state.mesh, "pp")).tolist()
        world = world_of(state.mesh)
        parameters, active = (round(size / world) for size in sizes)
        return Flops(
            per_token=per_token / world,
            per_pair=per_pair / world,
            parameters=parameters,
            active_parameters=active,
        )


@attrs.frozen(kw_only=True)
class Utilization:
    """Turns samples per second into utilisations.

    Attributes:
        per_sample: Operations of a mean row, each token meeting those before it in its document.
        per_sample_palm: The same where each token of a row meets all of them.
        peak: Operations per second of all devices at best.
    """

    per_sample: float
    per_sample_palm: float
    peak: float

    @classmethod
    def of(
        cls, flops: Flops, state: TrainState, dataset: Any, peak: float | None = None
    ) -> Self | None:
        """Read what a run's utilisation needs; None where the rows or the peak are unknown.

        Args:
            flops: Of the whole model.
            state: The state to start from.
            dataset: What the run reads, see ``mean_row``.
            peak: Operations per second of one device; by default that of ``forgekit.run.machines``
                for the dtype that the model computes in.
        """
        row = mean_row(dataset, state.samples)
        if peak is None:
            peak = peak_flops(state.targets.device, compute_dtype(state.model))
        if row is None or peak is None:
            return None
        tokens, pairs, length = row
        return cls(
            per_sample=flops.of_row(tokens, pairs),
            per_sample_palm=flops.of_row(tokens, tokens * length),
            peak=peak * world_of(state.mesh),
        )

    def metrics(self, samples: float, seconds: float) -> dict[str, float]:
        """``perf/mfu`` and ``perf/mfu_palm`` of so many samples in so many seconds."""
        rate = samples / seconds / self.peak
        return {
            "perf/mfu": self.per_sample * rate,
            "perf/mfu_palm": self.per_sample_palm * rate,
        }


def mean_row(dataset: Any, samples: int = 0) -> tuple[float, float, int] | None:
    """How many tokens a mean row of a dataset has, and how many pairs of them meet.

    A mean over the whole dataset, of a mixture over the next samples, costs a step nothing, unlike
    the documents of its own rows. Padding does not count.

    Args:
        dataset: A dataset of forgekit's. Of another with a ``seq_len`` rows are taken as full.
        samples: Where a mixture is.

    Returns:
        Tokens, pairs of a token and one up to itself in its document, and positions of a row;
        None where the dataset does not say.

    Examples:
        >>> from forgekit.data.packing.bins import Bins
        >>> from forgekit.data.packing.packed_dataset import packed_dataset
        >>> bins = Bins([0, 2], documents=[0, 1], starts=[0, 0], lengths=[3, 2], capacity=8)
        >>> mean_row(packed_dataset([[1, 2, 3], [4, 5]], bins))
        (5.0, 9.0, 8)
    """
    dataset = getattr(dataset, "rows", dataset)  # of conversations
    length = getattr(dataset, "seq_len", 0)
    if not length:
        return None
    if hasattr(dataset, "order"):
        sources, _ = dataset.order.span(samples, MIXED)
        shares = np.bincount(sources, minlength=len(dataset.datasets)) / MIXED
        rows = [mean_row(one) or (0.0, 0.0, length) for one in dataset.datasets]
        tokens, pairs = (float(shares @ column) for column in np.transpose([r[:2] for r in rows]))
        return tokens, pairs, length
    pieces = _pieces(dataset)
    if pieces is None:
        return float(length), length * (length + 1) / 2, length
    return float(pieces.sum() / len(dataset)), float(_pairs(pieces) / len(dataset)), length


def _pieces(dataset: Any) -> np.ndarray | None:
    """Lengths of the runs of tokens that see each other; None if the rows are full."""
    if hasattr(dataset, "bins"):
        return dataset.bins.lengths
    file, length = getattr(dataset, "file", None), dataset.seq_len
    if file is None:
        return None
    cuts = np.arange(0, file.tokens - 1, length)
    if dataset.doc_ids:
        cuts = np.union1d(cuts, file.offsets[file.offsets < file.tokens - 1])
    return np.diff(cuts, append=file.tokens - 1)


def _pairs(lengths: np.ndarray) -> float:
    sizes = lengths.astype(np.float64)
    return float((sizes * (sizes + 1) / 2).sum())


def _uses(model: nn.Module) -> dict[Tensor, tuple[float, bool]]:
    """Share of the tokens that meet a parameter, and whether it is only looked up."""
    uses: dict[Tensor, tuple[float, bool]] = {}
    is_head = bool(getattr(getattr(model, "spec", None), "tied", False))
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


def _head_channels(model: nn.Module) -> float:
    """``h c`` of all layers together."""
    own = [module for module in model.modules() if isinstance(module, Attention)]
    config = getattr(model, "config", None)
    if own or config is None:
        return float(sum(module.query.weight.shape[0] for module in own))
    heads = getattr(config, "num_attention_heads", 0)
    channels = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return float(config.num_hidden_layers * heads * channels)
