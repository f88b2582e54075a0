"""Which parameters decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from forgekit.inputs import check_numbers


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into matrices that decay and the rest, which does not.

    Embeddings, norms and biases do not decay: pulling a rare token's embedding or a norm's scale
    towards zero regularises nothing. An output projection tied to the embedding is an embedding.

    Args:
        model: The model, after ``parallelize`` where there is more than one rank.
        weight_decay: Decay of the matrices, per unit of learning rate.

    Returns:
        Parameter groups for any ``torch.optim.Optimizer``; groups without parameters are left out.

    Raises:
        ValueError: If ``weight_decay`` is negative or not finite, or nothing is trainable.

    Examples:
        >>> groups = decay_groups(nn.Linear(2, 2), weight_decay=0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.1), (1, 0.0)]
    """
    check_numbers(weight_decay=(weight_decay, 0))
    embedded = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter; set requires_grad on some.")
    decayed = [p for p in trainable if p.ndim >= 2 and p not in embedded]
    kept = [p for p in trainable if p.ndim < 2 or p in embedded]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
