"""Direct preference optimization: losses of pairs of answers that are documents of one row.

Of each pair the model shall prefer the chosen answer, by more than a frozen reference does. With
the log-ratios ``r = log p(answer) - log p_reference(answer)``, sums over the scored tokens of an
answer, and the margin ``m = beta * (r_chosen - r_rejected)``:

    sigmoid   -log(sigmoid(m))
    hinge     max(0, 1 - m)
    ipo       (r_chosen / n_chosen - r_rejected / n_rejected - 1 / (2 * beta)) ** 2

``n`` is the number of scored tokens, those with a label: the first token of a document has none, as
nothing predicts it. The loss is summed over pairs and its count is the number of pairs, so a step
trains their mean over the global batch, however they are packed and split.

References:
    DPO, https://arxiv.org/abs/2305.18290; the hinge, https://arxiv.org/abs/2305.10425;
    IPO, https://arxiv.org/abs/2310.12036
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from forgekit.checks import check_choice
from forgekit.data.batch import IGNORED
from forgekit.model.lora import adapter_names, lora_layers
from forgekit.parallel.context.context_parallel import with_sockets
from forgekit.state import Layout, layout_of
from forgekit.steps.cross_entropy import position_losses
from forgekit.steps.log_probs import linear_log_probs
from forgekit.steps.losses import Loss, check_shapes
from forgekit.steps.micro_batch import evaluating

PreferenceLoss = Literal["sigmoid", "hinge", "ipo"]
Forward = Callable[[nn.Module, TensorDictBase], Tensor]


class DocumentLogProbs(NamedTuple):
    """How likely the documents of packed rows are; document ``d`` of a row is at column ``d``.

    Attributes:
        sums: ``[b s]`` float64, natural logarithms, summed over scored tokens; differentiable.
        counts: ``[b s]`` int64, scored tokens; 0 where there is no document.
    """

    sums: Tensor
    counts: Tensor


def document_log_probs(values: Tensor, labels: Tensor, doc_ids: Tensor) -> DocumentLogProbs:
    """Add up the log-probabilities of each document's labels.

    Sums are in float64, where the order of additions, which a GPU leaves open, changes nothing
    that float32 shows.

    Args:
        values: Log-probabilities of the labels, ``[b s]``, as ``linear_log_probs`` finds them, or
            logits, ``[b s v]``; those may be sharded over the vocabulary, as for ``cross_entropy``.
        labels: ``[b s]``, already shifted; -100 where nothing is scored.
        doc_ids: ``[b s]``, from 0 in each row; -1 on padding.

    Returns:
        Sums and counts of each document.

    Raises:
        ValueError: If ``values`` or ``doc_ids`` have another shape.
        TypeError: If the dtype of the labels cannot hold every id of the vocabulary.

    Examples:
        >>> labels, doc_ids = torch.tensor([[2, 1, -100]]), torch.tensor([[0, 1, 1]])
        >>> scores = document_log_probs(torch.zeros(1, 3, 4), labels, doc_ids)
        >>> scores.sums.numpy().round(4), scores.counts.tolist()
        (array([[-1.3863, -1.3863,  0.    ]]), [[1, 1, 0]])
    """
    check_shapes("doc_ids", doc_ids[..., None], labels)  # rows would be left out, silently
    labels = labels.masked_fill(doc_ids < 0, IGNORED)
    if values.ndim == labels.ndim:
        check_shapes("log_probs", values[..., None], labels)  # another shape would be broadcast
        likely = torch.where(labels != IGNORED, values, 0.0).double()
    else:
        likely = -position_losses(values, labels).view(labels.shape).double()
    documents = doc_ids.long().clamp(min=0)  # padding adds 0 to the first
    counts = torch.zeros_like(documents).scatter_add(1, documents, (labels != IGNORED).long())
    return DocumentLogProbs(torch.zeros_like(likely).scatter_add(1, documents, likely), counts)


def check_dpo(model: nn.Module, *, reference: nn.Module | None = None) -> None:
    """Refuse at set-up what ``dpo_loss`` would refuse in the first step.

    Args:
        model: The model that is trained.
        reference: As for ``dpo_loss``.

    Raises:
        ValueError: As ``dpo_loss``, of the layout and the reference.
    """
    _check_layout(model)
    _sockets_of(model, reference)


def dpo_loss(
    model: nn.Module,
    batch: TensorDictBase,
    *,
    reference: nn.Module | None = None,
    kind: PreferenceLoss = "sigmoid",
    beta: float = 0.1,
    forward: Forward | None = None,
) -> Loss:
    """Compute the preference loss of packed pairs; a step's ``loss_fn`` once its options are given.

    The reference runs in evaluation mode and without gradients. The loss is exact in every layout
    but two, which are refused: pipelines run a model once for each micro-batch, and ranks of ``cp``
    hold slices of each answer.

    Args:
        model: The model that is trained.
        batch: ``input_ids``, ``labels`` and ``doc_ids``, ``[b s]``, as ``preference_dataset`` packs
            them: documents ``2 n`` and ``2 n + 1`` of a row are the chosen and the rejected answer
            of a pair. A pair counts if both have a label.
        reference: A frozen model, which is kept out of ``model``: in a field of the state. If None,
            the model without its adapters.
        kind: The loss of a pair; see the top of ``forgekit/steps/dpo.py``.
        beta: Scale of log-ratios; for ``ipo`` the gap aimed at is ``1 / (2 * beta)``.
        forward: ``forward(model, batch)`` gives log-probabilities of the labels, ``[b s]``, or
            logits, ``[b s v]``; by default those of a ``Transformer``, whose logits are never held.

    Returns:
        ``Loss`` whose count is the number of pairs, with the means over pairs ``dpo/margin``,
        ``dpo/accuracy`` (of margins above 0), ``dpo/chosen_reward`` and ``dpo/rejected_reward``
        (``beta`` times the log-ratio).

    Raises:
        ValueError: If an option is out of range, the layout has ``pp`` or ``cp``, or nothing is a
            frozen reference: the model has no adapters, has them merged, trains other parameters
            besides, or is the reference itself.
    """
    check_choice("kind", kind, get_args(PreferenceLoss))
    if not 0 < beta < math.inf:
        raise ValueError(f"beta is {beta}; it must be positive and finite, such as 0.1.")
    forward = forward or _log_probs

    def log_probs(of: nn.Module) -> DocumentLogProbs:
        return document_log_probs(forward(of, batch), batch["labels"], batch["doc_ids"])

    layout = _check_layout(model)
    # First: the graph of the model that is trained need not be held meanwhile.
    with _frozen(model, reference, layout, batch["doc_ids"]) as frozen:
        base = log_probs(frozen)
    policy = log_probs(model)
    return _loss(policy.sums - base.sums, policy.counts, kind, beta)


def _loss(ratios: Tensor, counts: Tensor, kind: PreferenceLoss, beta: float) -> Loss:
    """Sum the losses of pairs, of log-ratios and scored tokens ``[b s]``."""
    chosen, rejected = _pairs(ratios)
    n_chosen, n_rejected = _pairs(counts)
    margins = beta * (chosen - rejected)
    if kind == "sigmoid":
        losses = -F.logsigmoid(margins)
    elif kind == "hinge":
        losses = F.relu(1 - margins)
    else:
        gaps = chosen / n_chosen.clamp(min=1) - rejected / n_rejected.clamp(min=1)
        # Means over tokens, or a gap would grow with the lengths of the answers.
        losses = (gaps - 1 / (2 * beta)).square()
    is_pair = (n_chosen > 0) & (n_rejected > 0)
    # A selection, not a product: half a pair may be infinite, and its gradient has to be 0.
    losses, count = torch.where(is_pair, losses, 0.0), is_pair.sum()
    measured = {
        "margin": margins,
        "accuracy": margins > 0,
        "chosen_reward": beta * chosen,
        "rejected_reward": beta * rejected,
    }
    metrics = {
        f"dpo/{name}": (torch.where(is_pair, values.detach(), 0).sum(), count)
        for name, values in measured.items()
    }
    return Loss(losses.sum(), count, metrics, rows=(losses.detach().sum(1), is_pair.sum(1)))


def _pairs(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``[b s]`` into what is of chosen and of rejected documents, ``[b s/2]`` each."""
    even = documents[:, : documents.shape[1] // 2 * 2]
    return even[:, 0::2], even[:, 1::2]


def _log_probs(model: nn.Module, batch: TensorDictBase) -> Tensor:
    positions = batch.get("position_ids", None)
    head = partial(linear_log_probs, labels=batch["labels"])
    return model(batch["input_ids"], position_ids=positions, doc_ids=batch["doc_ids"], head=head)


def _check_layout(model: Any) -> Layout:
    layout = layout_of(model) if isinstance(model, nn.Module) else None
    if layout is None or layout.stages is not None:  # inside a pipeline something stands for it
        raise ValueError(
            "dpo_loss needs a forward of both the model and the reference, but a pipeline runs one "
            "model call per micro-batch. Use a mesh with pp=1."
        )
    if layout.context > 1:
        raise ValueError(
            f"dpo_loss needs whole sequences, but with cp={layout.context} each rank holds a "
            "slice. Use a mesh with cp=1."
        )
    return layout


@contextmanager
def _frozen(
    model: nn.Module, reference: nn.Module | None, layout: Layout, doc_ids: Tensor
) -> Iterator[nn.Module]:
    """Give the reference: a model of its own, or the model without its adapters."""
    sockets = _sockets_of(model, reference)
    if reference is not None:
        trained, layout = layout, _check_layout(reference)
        if layout.documents is not None and trained.documents is not None:
            # Where documents end is known on the host already; it does not wait a second time.
            layout.documents.note(doc_ids, trained.documents.host(doc_ids))
    frozen = model if reference is None else reference
    with torch.no_grad(), evaluating(frozen, layout), with_sockets(frozen, sockets):
        yield frozen


def _sockets_of(model: nn.Module, reference: nn.Module | None) -> dict[str, dict[str, Any]]:
    """Sockets with which the reference computes: of the model those that leave its adapters out."""
    if reference is model:
        raise ValueError(
            "reference is the model that is trained, so margins would stay 0. Pass a frozen copy "
            "of it, or None for the model without its adapters."
        )
    if reference is not None:
        return {}
    layers = lora_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no adapters, so it cannot serve as its own reference. "
            "Pass reference= (in the recipe reference=model), or add adapters (lora.rank=16)."
        )
    if merged := [name for name, layer in layers.items() if layer.bases]:
        raise ValueError(
            f"the adapters of {merged[0]!r} are merged into its weights, so the reference weights "
            "are unavailable. Call forgekit.unmerge_lora(model) first."
        )
    factors = set(adapter_names(model))
    trained = (name for name, p in model.named_parameters() if p.requires_grad)
    if moving := next((name for name in trained if name not in factors), None):
        raise ValueError(
            f"{moving!r} is trained besides the adapters, so a reference without them would move "
            "with it. Freeze it, or pass reference=, a frozen copy of the model."
        )
    return {name: {"adapters": {}} for name in layers}
