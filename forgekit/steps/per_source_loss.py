"""The losses of each source, out of the rows of one loss: no second forward, no second loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from forgekit.steps.forward import LossFn
from forgekit.steps.losses import Loss


def losses_by_source(loss_fn: LossFn, sources: Sequence[str]) -> LossFn:
    """Let a loss function report the loss and the targets of each source as well.

    They travel as metrics in the step's one collective, so they are exact and global whatever the
    layout, and nothing is read by the host.

    Args:
        loss_fn: Returns a ``Loss`` with ``rows``, as those of this library have.
        sources: Names of the sources; ``source`` in a micro-batch, ``[b]``, is an index into them.
            Of a mixture: ``order.sources``.

    Returns:
        A loss function with the further metrics ``source/<name>/loss``, the mean over the targets
        of rows of this source (NaN without any), and ``source/<name>/targets``.

    Raises:
        ValueError: If there is no source or one twice; when called, if the micro-batch has no
            ``source`` or the loss no rows.

    Examples:
        >>> def loss_fn(model, batch):
        ...     rows = torch.tensor([2.0, 4.0]), torch.tensor([4, 1])
        ...     return Loss(torch.tensor(6.0), 5, rows=rows)
        >>> batch = {"source": torch.tensor([1, 0])}
        >>> loss = losses_by_source(loss_fn, ("code", "prose"))(None, batch)
        >>> loss.metrics["source/prose/loss"]
        (tensor(2., dtype=torch.float64), tensor(4., dtype=torch.float64))
    """
    if isinstance(sources, str):
        raise TypeError(
            f"sources is the text {sources!r}; pass a sequence of names: order.sources."
        )
    names = tuple(sources)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"sources are {list(names)}; name at least one, each once: order.sources.")

    def by_source(model: Any, batch: TensorDictBase) -> Loss:
        loss = loss_fn(model, batch)
        sums, counts = _split(loss, batch, len(names))
        pairs = zip(sums, counts, strict=True)
        return loss.with_metrics(
            **{f"source/{n}/loss": pair for n, pair in zip(names, pairs, strict=True)}
        )

    return by_source


def _split(loss: Loss, batch: TensorDictBase, sources: int) -> Tensor:
    """Sums and counts of each source, ``[2 sources]`` float64."""
    if loss.rows is None:
        raise ValueError(
            "the loss has no rows, so it cannot be told apart by source. Return "
            "Loss(sum, count, rows=(sums, counts)) with tensors [b]; forgekit.cross_entropy does "
            "for labels [b s]."
        )
    if "source" not in batch:
        raise ValueError(
            f'the micro-batch has no "source"; it has {sorted(batch.keys())}. '  # pyright: ignore[reportArgumentType]
            "forgekit.mixture_dataset adds it."
        )
    rows = torch.stack([part.detach().double() for part in loss.rows])
    return rows.new_zeros(2, sources).index_add_(1, batch["source"].to(rows.device), rows)
