"""Policy-gradient losses of sampled tokens, as sums with their normalizing counts.

Each loss is a sum over trained tokens, of which a batch says by ``labels`` which they are, and one
count, which a step adds up over all its micro-batches and ranks before it divides. So the divisor
is that of the global batch, whoever sampled it, however it is packed, split and streamed:

===============  ==============================================  ===============================
loss             divisor                                         ratio and its clip
===============  ==============================================  ===============================
``grpo_loss``    sequences, each the mean over its own tokens    of each token, both sides
``dr_grpo_loss`` sequences times a constant length               of each token, both sides
``dapo_loss``    tokens                                          of each token, higher above
``ppo_loss``     tokens                                          of each token, both sides
``gspo_loss``    sequences                                       of a sequence, geometric mean
``cispo_loss``   tokens                                          of each token, a detached weight
===============  ==============================================  ===============================

With ``r`` the probability of a token now over that when it was sampled, and ``A`` its advantage, a
token's loss is ``-min(r A, clamp(r, 1 - low, 1 + high) A)``. Its gradient at ``r = 1`` is that of
the policy gradient, without bias as long as advantages do not depend on the token itself; a group's
own mean and deviation as a baseline shrink it by a factor that depends on the group's size.
Clipping adds bias against large changes. A mean over each sequence first weights tokens of short
answers more, and tokens or constants as divisor do not.

Ratios are those of the whole softmax, at the temperature of the sampler. Sample without ``top_k``
and ``top_p``: a ratio does not tell what these leave out, and tokens that are never sampled are
never corrected.

A batch holds, ``[b s]`` each: ``labels`` (-100 where nothing is trained), ``log_probs`` of the
sampler, ``advantages``, ``lengths`` (trained tokens of a token's sequence), and where they are
asked for ``reference`` and ``old_log_probs``. ``rollout_batch`` builds it, and for the metrics
``rewards`` and ``empty``, which marks one position of each answer without a trained token. A
``RolloutStream`` adds ``staleness``, the trainer's version minus that of the weights that sampled a
token.

References:
    PPO, https://arxiv.org/abs/1707.06347; GRPO, https://arxiv.org/abs/2402.03300;
    Dr. GRPO, https://arxiv.org/abs/2503.20783; DAPO, https://arxiv.org/abs/2503.14476;
    GSPO, https://arxiv.org/abs/2507.18071; CISPO, https://arxiv.org/abs/2506.13585;
    estimators of KL, http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from typing import Literal

import attrs
import torch
from attrs.validators import gt, in_
from tensordict import TensorDictBase
from torch import Tensor

from forgekit.checks import check_numbers
from forgekit.data.batch import IGNORED
from forgekit.steps.losses import Loss
from forgekit.tensors import wide

Clip = float | tuple[float, float]

LARGEST = 20.0
"""Clamp of log-ratios; beyond it the gradient is 0."""


@attrs.frozen
class KL:
    """A KL penalty towards a reference, added to each token's loss.

    With ``d = log p - log p_reference`` of the sampled token: ``k1`` is ``d``, ``k2`` is
    ``d**2 / 2`` and ``k3`` is ``exp(-d) - 1 + d``. As values ``k1`` and ``k3`` estimate the reverse
    KL divergence without bias where tokens were sampled from the policy itself. As losses it is the
    gradient that counts, and there, on policy and with ``ratio=False``, ``k1``'s vanishes in
    expectation, ``k2``'s is that of the reverse KL, and ``k3``'s is that of the forward KL. With
    ``ratio=True`` a term is multiplied by the unclipped ratio, which makes the gradients of ``k1``
    and ``k3`` those of the reverse KL on and off policy (token by token, given what stands before).

    Attributes:
        weight: Factor of the penalty.
        kind: The estimator.
        ratio: Whether it is weighted by the ratio.
    """

    weight: float
    kind: Literal["k1", "k2", "k3"] = attrs.field(default="k3", validator=in_(("k1", "k2", "k3")))
    ratio: bool = False

    def __call__(self, log_probs: Tensor, reference: Tensor, ratio: Tensor) -> Tensor:
        """Estimate the KL at each position, without the weight."""
        moved = log_probs - reference
        estimate = moved
        if self.kind == "k2":
            estimate = moved.square() / 2
        elif self.kind == "k3":
            estimate = (-moved).exp() - 1 + moved
        return estimate * ratio if self.ratio else estimate


@attrs.frozen
class ImportanceCorrection:
    """Importance weights for samplers whose log-probabilities differ from the trainer's.

    A batch then holds ``old_log_probs``, which the trainer found before its update. Ratios are
    taken to these, and each token is weighted by ``p_old / p_sampler``, without a gradient.

    Attributes:
        most: The weight's upper bound.
        kind: ``"truncate"`` cuts larger weights off to it, with little variance and a bias towards
            what the sampler liked; ``"mask"`` leaves such tokens out of the sum. They still count.
    """

    most: float = attrs.field(default=2.0, validator=gt(0))
    kind: Literal["truncate", "mask"] = attrs.field(
        default="truncate", validator=in_(("truncate", "mask"))
    )

    def __call__(self, old: Tensor, sampled: Tensor) -> Tensor:
        """Compute the weight of each position."""
        weight = (old - sampled).exp()
        if self.kind == "mask":
            return torch.where(weight <= self.most, weight, 0.0)
        return weight.clamp(max=self.most)


def grpo_loss(
    log_probs: Tensor,
    batch: TensorDictBase,
    *,
    clip: Clip = 0.2,
    kl: KL | None = None,
    correction: ImportanceCorrection | None = None,
) -> Loss:
    """Group relative policy optimization (GRPO): mean over sequences of their mean over tokens.

    A token of a short sequence weighs more than one of a long sequence.

    Args:
        log_probs: ``[b s]`` of the labels, differentiable, at the temperature of the sampler.
        batch: See the top of ``forgekit/rollouts/losses.py``.
        clip: How far a ratio may leave 1 before its gradient ends: below and above.
        kl: A penalty against ``batch["reference"]``.
        correction: For a sampler whose log-probabilities differ from the trainer's.

    Returns:
        ``Loss`` whose count is the number of sequences with a trained token, with the means over
        trained tokens ``rollout/ratio``, ``rollout/clipped`` (the share whose gradient the clip has
        ended), ``rollout/mismatch_kl`` (k3 of this policy against the sampler's), with a penalty
        ``rollout/kl`` and, where the batch has ``staleness``, ``rollout/staleness``; and those over
        answers ``rollout/length`` and, where it has ``rewards``, ``rollout/reward``: over all of
        them, those without a trained token too, if the batch has ``empty``.

    Raises:
        KeyError: If the batch lacks a required key.
    """
    terms = _terms(log_probs, batch, clip, kl, correction)
    return terms.over_sequences(1 / terms.lengths)


def dr_grpo_loss(
    log_probs: Tensor,
    batch: TensorDictBase,
    *,
    max_length: int,
    clip: Clip = 0.2,
    kl: KL | None = None,
    correction: ImportanceCorrection | None = None,
) -> Loss:
    """GRPO without length bias: mean over sequences of token sums divided by one constant length.

    Take advantages that are not divided by a deviation (``rollout_batch(..., scale=None)``).

    Args:
        log_probs: As for ``grpo_loss``.
        batch: As for ``grpo_loss``.
        max_length: Tokens that every sequence counts as.
        clip: As for ``grpo_loss``.
        kl: As for ``grpo_loss``.
        correction: As for ``grpo_loss``.

    Returns:
        ``Loss`` as of ``grpo_loss``.

    Raises:
        ValueError: If ``max_length`` is below 1 or not finite.
    """
    check_numbers(max_length=(max_length, 1))
    terms = _terms(log_probs, batch, clip, kl, correction)
    return terms.over_sequences(torch.full_like(terms.lengths, 1 / max_length))


def dapo_loss(
    log_probs: Tensor,
    batch: TensorDictBase,
    *,
    clip: Clip = (0.2, 0.28),
    kl: KL | None = None,
    correction: ImportanceCorrection | None = None,
) -> Loss:
    """DAPO: mean over tokens of the global batch, with a higher upper than lower clip.

    Args:
        log_probs: As for ``grpo_loss``.
        batch: As for ``grpo_loss``.
        clip: As for ``grpo_loss``.
        kl: As for ``grpo_loss``.
        correction: As for ``grpo_loss``.

    Returns:
        ``Loss`` as of ``grpo_loss``, whose count is the number of trained tokens.
    """
    return _terms(log_probs, batch, clip, kl, correction).over_tokens()


def ppo_loss(
    log_probs: Tensor,
    batch: TensorDictBase,
    *,
    clip: Clip = 0.2,
    kl: KL | None = None,
    correction: ImportanceCorrection | None = None,
) -> Loss:
    """Proximal policy optimization (PPO): the clipped objective, mean over tokens.

    Without bias at a ratio of 1 for any ``advantages`` of tokens that do not depend on the token
    and what follows but through its return, as generalized advantage estimation gives them.

    Args:
        log_probs: As for ``grpo_loss``.
        batch: As for ``grpo_loss``.
        clip: As for ``grpo_loss``.
        kl: As for ``grpo_loss``.
        correction: As for ``grpo_loss``.

    Returns:
        ``Loss`` as of ``grpo_loss``, whose count is the number of trained tokens.
    """
    return _terms(log_probs, batch, clip, kl, correction).over_tokens()


def gspo_loss(
    log_probs: Tensor,
    batch: TensorDictBase,
    *,
    clip: Clip = (3e-4, 4e-4),
    kl: KL | None = None,
    correction: ImportanceCorrection | None = None,
) -> Loss:
    """Group sequence policy optimization (GSPO): one ratio per sequence, mean over sequences.

    The ratio is ``exp`` of the mean of its tokens' log-ratios: the geometric mean, which is no
    importance weight of the sequence, so off policy the gradient is biased. It needs whole
    sequences: ranks that hold slices of them (``cp``) are refused by the first step's proof.

    Args:
        log_probs: As for ``grpo_loss``.
        batch: As for ``grpo_loss``, and ``doc_ids``, from 0 in each row.
        clip: As for ``grpo_loss``; much narrower than of a token.
        kl: As for ``grpo_loss``; a ratio in it is the sequence's.
        correction: As for ``grpo_loss``.

    Returns:
        ``Loss`` as of ``grpo_loss``.
    """
    terms = _terms(log_probs, batch, clip, kl, correction, documents=batch["doc_ids"])
    return terms.over_sequences(1 / terms.lengths)


def cispo_loss(
    log_probs: Tensor,
    batch: TensorDictBase,
    *,
    most: float = 5.0,
    kl: KL | None = None,
    correction: ImportanceCorrection | None = None,
) -> Loss:
    """CISPO: the policy gradient, weighted by a clipped, detached ratio.

    No token loses its gradient; where a ratio exceeds ``most`` it is biased towards the sampler.

    Args:
        log_probs: As for ``grpo_loss``.
        batch: As for ``grpo_loss``.
        most: The largest weight.
        kl: As for ``grpo_loss``.
        correction: As for ``grpo_loss``.

    Returns:
        ``Loss`` as of ``grpo_loss``, whose count is the number of trained tokens.
    """
    return _terms(log_probs, batch, (1.0, most - 1), kl, correction, detached=True).over_tokens()


@attrs.frozen
class _Terms:
    """Losses of positions, ``[b s]``, 0 where nothing is trained, and metrics of positions."""

    losses: Tensor
    is_trained: Tensor
    lengths: Tensor
    metrics: dict[str, Tensor]
    rewards: Tensor | None
    is_empty: Tensor | None

    def over_tokens(self) -> Loss:
        return self._loss(self.losses, self.is_trained.sum())

    def over_sequences(self, weights: Tensor) -> Loss:
        """Sum tokens with a weight, ``[b s]``, and count sequences as a sum over tokens."""
        sequences = torch.where(self.is_trained, 1 / self.lengths, 0.0).sum()
        return self._loss(torch.where(self.is_trained, self.losses * weights, 0.0), sequences)

    def _loss(self, losses: Tensor, count: Tensor) -> Loss:
        tokens, share = self.is_trained.sum(), torch.where(self.is_trained, 1 / self.lengths, 0.0)
        if self.is_empty is not None:
            share = torch.where(self.is_empty, 1.0, share)
        means = {f"rollout/{n}": (values.sum(), tokens) for n, values in self.metrics.items()}
        means["rollout/length"] = tokens, share.sum()
        if self.rewards is not None:
            means["rollout/reward"] = (share * self.rewards).sum(), share.sum()
        return Loss(losses.sum(), count, means)


def _terms(
    log_probs: Tensor,
    batch: TensorDictBase,
    clip: Clip,
    kl: KL | None,
    correction: ImportanceCorrection | None,
    *,
    documents: Tensor | None = None,
    detached: bool = False,
) -> _Terms:
    is_trained = batch["labels"] != IGNORED

    def masked(values: Tensor) -> Tensor:
        # `where`, not a product at the end: values at masked positions may be NaN.
        return torch.where(is_trained, values, 0.0).to(wide(log_probs.dtype))

    new, sampled, advantages = map(masked, (log_probs, batch["log_probs"], batch["advantages"]))
    lengths = torch.where(is_trained, batch["lengths"], 1).double()
    old = sampled if correction is None else masked(batch["old_log_probs"])
    log_ratio = new - old
    if documents is not None:
        log_ratio = _sequence_means(log_ratio, documents, lengths)
    # Beyond it exp overflows, and the gradient 0 * inf is NaN.
    ratio = log_ratio.clamp(-LARGEST, LARGEST).exp()
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    near = ratio.clamp(1 - low, 1 + high)
    if detached:
        losses, is_clipped = -near.detach() * advantages * new, ratio > near
    else:
        losses = -torch.minimum(ratio * advantages, near * advantages)
        is_clipped = near * advantages < ratio * advantages
    if correction is not None:
        losses = losses * correction(old, sampled)
    mismatch = new.detach() - sampled
    metrics = {"ratio": ratio, "clipped": is_clipped, "mismatch_kl": mismatch.exp() - 1 - mismatch}
    if "staleness" in batch:
        metrics["staleness"] = batch["staleness"]
    if kl is not None:
        penalty = kl(new, masked(batch["reference"]), ratio)
        losses, metrics["kl"] = losses + kl.weight * penalty, penalty
    metrics = {n: torch.where(is_trained, v.detach(), 0) for n, v in metrics.items()}
    losses, rewards = torch.where(is_trained, losses, 0.0), batch.get("rewards", None)
    # Rows without document ids are padding of a rank without further rollouts.
    is_empty = batch["empty"] & (batch["doc_ids"] >= 0) if "empty" in batch else None
    return _Terms(losses, is_trained, lengths, metrics, rewards, is_empty)


def _sequence_means(log_ratio: Tensor, documents: Tensor, lengths: Tensor) -> Tensor:
    """Compute the mean of each position's sequence, ``[b s]``."""
    at = documents.long().clamp(min=0)  # padding adds 0 to the first
    sums = torch.zeros_like(log_ratio, dtype=torch.float64).scatter_add(1, at, log_ratio.double())
    return (sums.gather(1, at) / lengths).to(log_ratio.dtype)
