"""Policy-gradient losses: beside trl's, beside exact expectations, and whatever the packing."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from forgekit.rollouts.batch import group_advantages, rollout_batch
from forgekit.rollouts.losses import (
    KL,
    ImportanceCorrection,
    cispo_loss,
    dapo_loss,
    dr_grpo_loss,
    grpo_loss,
    gspo_loss,
    ppo_loss,
)

SEQUENCES, TOKENS, LONGEST = 5, 7, 11
LENGTHS = [7, 3, 1, 6, 4]


def padded(seed: int = 0) -> tuple[TensorDict, Tensor]:
    """One answer a row, ragged, with masked tokens inside, and the policy's log-probabilities."""
    draw = torch.Generator().manual_seed(seed)
    shape = (SEQUENCES, TOKENS)
    is_trained = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]
    is_trained[0, 2] = is_trained[3, 4] = False  # the output of a tool

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=draw, dtype=torch.float64)

    sampled = -noise(1).abs() - 0.1
    columns = {
        "labels": torch.where(is_trained, 3, -100),
        "log_probs": sampled,
        "old_log_probs": sampled + noise(0.4),
        "reference": sampled + noise(0.5),
        "advantages": torch.randn(SEQUENCES, 1, generator=draw).double().expand(shape),
        "lengths": is_trained.sum(1, keepdim=True).expand(shape),
        "doc_ids": torch.zeros(shape, dtype=torch.int64),
    }
    return TensorDict(columns, [SEQUENCES]), sampled + noise(0.4)


def of_trl(batch: TensorDict, log_probs: Tensor, **options: Any) -> Tensor:
    """What trl computes from the same numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOTrainer

    class Stub(SimpleNamespace):
        def __getattr__(self, name: str) -> None:
            return None

    corrects = options.pop("corrects", False)
    args = Stub(use_bias_correction_kl=options.pop("weighs_kl", False), steps_per_generation=1)
    nothing = torch.zeros_like(log_probs)
    stub = Stub(
        loss_type="grpo",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        importance_sampling_level="token",
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        use_vllm=corrects,
        vllm_importance_sampling_correction=corrects,
        args=args,
        accelerator=Stub(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, nothing, None),
    )
    vars(stub).update(options, model=SimpleNamespace(training=True))
    mask = (batch["labels"] != -100).long()
    ids = torch.zeros_like(mask)
    weights = (batch["old_log_probs"] - batch["log_probs"]).exp().clamp(max=1.3)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": batch["advantages"][:, 0],
        "old_per_token_logps": batch["old_log_probs" if corrects else "log_probs"],
        "ref_per_token_logps": batch["reference"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": weights,
    }
    return GRPOTrainer._compute_loss(stub, stub.model, inputs)


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_high": 0.1}
CAPPED = ImportanceCorrection(1.3)
PARITY = {
    "grpo": (grpo_loss, {}, {}),
    "asymmetric": (grpo_loss, {"clip": (0.1, 0.3)}, {"epsilon_low": 0.1, "epsilon_high": 0.3}),
    "k3": (grpo_loss, {"kl": KL(0.3)}, {"beta": 0.3}),
    "k3 by ratio": (grpo_loss, {"kl": KL(0.3, ratio=True)}, {"beta": 0.3, "weighs_kl": True}),
    "bnpo": (ppo_loss, {}, {"loss_type": "bnpo"}),
    "dapo": (dapo_loss, {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": (dr_grpo_loss, {"max_length": LONGEST}, {"loss_type": "dr_grpo"}),
    "gspo, k3 by ratio": (
        *(gspo_loss, {"clip": (0.05, 0.1), "kl": KL(0.2, ratio=True)}),
        SEQUENCE | {"epsilon_low": 0.05, "beta": 0.2, "weighs_kl": True},
    ),
    "cispo": (cispo_loss, {"most": 1.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    "truncated": (ppo_loss, {"correction": CAPPED}, {"loss_type": "bnpo", "corrects": 1}),
}


@pytest.mark.parametrize("case", PARITY)
def test_losses_and_gradients_are_those_of_trl(case):
    loss_fn, ours, theirs = PARITY[case]
    batch, log_probs = padded()
    mine, other = (log_probs.clone().requires_grad_() for _ in range(2))
    loss = loss_fn(mine, batch, **ours)
    value = loss.sum / loss.count
    expected = of_trl(batch, other, **theirs)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-12)
    assert other.grad.abs().max() > 1e-3


EVERY = [grpo_loss, dapo_loss, ppo_loss, gspo_loss, cispo_loss]


@pytest.mark.parametrize("loss_fn", EVERY)
def test_what_is_masked_adds_nothing_whatever_stands_there(loss_fn):
    batch, log_probs = padded()
    is_trained = batch["labels"] != -100
    poisoned = batch.clone()
    for name in ("log_probs", "reference", "old_log_probs", "advantages"):
        poisoned[name] = torch.where(is_trained, batch[name], torch.nan)
    options: Any = {"kl": KL(0.1, "k2"), "correction": ImportanceCorrection(1.5, "mask")}
    plain = log_probs.clone().requires_grad_()
    odd = torch.where(is_trained, log_probs, torch.nan).requires_grad_()
    loss, same = loss_fn(plain, batch, **options), loss_fn(odd, poisoned, **options)
    loss.sum.backward()
    same.sum.backward()
    exactly = {"rtol": 0, "atol": 0}
    values = [[one.sum, one.count, one.metrics] for one in (same, loss)]
    torch.testing.assert_close(*values, **exactly)
    torch.testing.assert_close(odd.grad, plain.grad, **exactly)
    assert not plain.grad[~is_trained].any()


def test_ratios_too_large_for_a_number_leave_gradients_finite():
    batch, log_probs = padded()
    batch["log_probs"] = batch["log_probs"] - 2000
    grpo_loss(log_probs.requires_grad_(), batch).sum.backward()
    assert log_probs.grad.isfinite().all()


VOCABULARY = 3


def texts() -> list[tuple[int, int]]:
    return list(itertools.product(range(VOCABULARY), repeat=2))


def log_policy(parameters: Tensor) -> Tensor:
    """Log-probabilities of both tokens of all nine texts, ``[9 2]``, from ``[4 3]`` logits."""
    tables = parameters.log_softmax(-1)
    pairs = [torch.stack([tables[0, one], tables[1 + one, two]]) for one, two in texts()]
    return torch.stack(pairs)


def expected_gradient(
    sampler: Tensor, policy: Tensor, rewards: Tensor, kl: KL | None = None
) -> Tensor:
    """Of ``ppo_loss`` over all texts, each as often as the sampler draws it; times tokens."""
    leaf = policy.clone().requires_grad_()
    log_probs, sampled = log_policy(leaf), log_policy(sampler).detach()
    columns = {
        "labels": torch.tensor(texts()),
        "log_probs": sampled,
        "advantages": rewards[:, None].expand(9, 2),
        "lengths": torch.full((9, 2), 2),
        "reference": log_policy(REFERENCE),
    }
    total = torch.zeros((), dtype=torch.float64)
    for number, chance in enumerate(sampled.sum(1).exp()):
        batch = TensorDict(columns, [9])[number : number + 1]
        loss = ppo_loss(log_probs[number : number + 1], batch, clip=OPEN, kl=kl)
        total = total + chance * loss.sum
    return torch.autograd.grad(total, leaf)[0]


def drawn(seed: int) -> Tensor:
    return torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(seed)).double()


REFERENCE = drawn(1)
OPEN: Any = (1.0, 1e9)
"""A clip that ends no gradient."""


def test_on_policy_the_gradient_is_that_of_the_expected_reward():
    policy, rewards = drawn(0).requires_grad_(), drawn(5).flatten()[:9]
    reward = (log_policy(policy).sum(1).exp() * rewards).sum()
    truth = torch.autograd.grad(-reward, policy)[0]
    found = expected_gradient(policy.detach(), policy.detach(), rewards)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)


def test_a_groups_mean_shrinks_the_gradient_and_does_not_turn_it():
    """Over all pairs of texts that a group of two may be."""
    policy, rewards = drawn(0).requires_grad_(), drawn(5).flatten()[:9]
    of_text = log_policy(policy).sum(1)
    truth = torch.autograd.grad(-(of_text.exp() * rewards).sum(), policy, retain_graph=True)[0]
    chances, total = of_text.exp().detach(), torch.zeros((), dtype=torch.float64)
    for both in map(list, itertools.product(range(9), repeat=2)):
        advantages = group_advantages(rewards[both], [0, 0], scale=None)
        total = total - chances[both].prod() * (advantages * of_text[both]).mean()
    gradient = torch.autograd.grad(total, policy)[0]
    torch.testing.assert_close(gradient, truth / 2, rtol=0, atol=1e-12)


def divergence(policy: Tensor, sampler: Tensor, *, forward: bool) -> Tensor:
    """KL of both tokens to the reference, given what the sampler put before them."""
    tables, reference = policy.log_softmax(-1), REFERENCE.log_softmax(-1)
    weights = torch.cat([torch.ones(1).double(), sampler[0].softmax(-1)])
    one, two = (reference, tables) if forward else (tables, reference)
    return (weights * (one.exp() * (one - two)).sum(-1)).sum()


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("ratio", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradients_of_penalties_are_what_their_docstring_says(kind, ratio, off_policy):
    policy = drawn(0)
    sampler = drawn(2) if off_policy else policy
    found = expected_gradient(sampler, policy, torch.zeros(9), KL(1.0, kind, ratio=ratio))
    leaf = policy.clone().requires_grad_()
    truths = {
        way: torch.autograd.grad(divergence(leaf, sampler, forward=way == "forward"), leaf)[0]
        for way in ("reverse", "forward")
    } | {"none": torch.zeros_like(policy)}
    exact = {name for name, truth in truths.items() if torch.allclose(found, truth, atol=1e-12)}
    unbiased = {"k1": "none", "k2": "reverse", "k3": "forward"}[kind]
    if ratio:
        assert exact == ({"reverse"} if kind != "k2" else set())
    else:
        assert exact == (set() if off_policy else {unbiased})


@pytest.mark.parametrize("scale", ["std", None])
def test_advantages_are_those_of_groups_in_any_order(scale):
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0)).double()
    groups = [f"prompt {n % 4}" for n in range(12)]
    advantages = group_advantages(rewards, groups, scale=scale)
    for first in range(4):
        of_group = rewards[first::4]
        expected = of_group - of_group.mean()
        expected = expected / of_group.std(correction=0) if scale else expected
        torch.testing.assert_close(advantages[first::4], expected, rtol=0, atol=1e-13)
    assert group_advantages([7.0, 0.0], ["alone", "too"], scale=scale).tolist() == [0.0, 0.0]


def test_a_batch_holds_the_sampled_ids_and_its_metrics_are_means_over_answers():
    ids = [torch.tensor(x) for x in ([4, 5, 1, 2, 3], [6, 9], [4, 5, 8])]
    log_probs = [torch.tensor(x) for x in ([-1.0, -2.0, -3.0], [-0.5], [-0.25])]
    batch = rollout_batch(
        [ids[0][:2], ids[1][:1], ids[2][:2]],
        SimpleNamespace(ids=ids, log_probs=log_probs),
        [1.0, 5.0, 0.0],
        ["p", "q", "p"],
        trained=[[True, False, True], [True], [True]],
        versions=[[7, 7, 8], [7], [7]],
        pad_to=9,
    )
    assert {name: column[0, :7].tolist() for name, column in batch.items()} == {
        "input_ids": [4, 5, 1, 2, 6, 4, 5],
        "labels": [-100, 1, -100, 3, 9, -100, 8],
        "log_probs": [0, -1.0, 0, -3.0, -0.5, 0, -0.25],
        "advantages": [0, 1.0, 0, 1.0, 0, 0, -1.0],
        "rewards": [0, 1.0, 0, 1.0, 5.0, 0, 0],
        "versions": [0, 7, 0, 8, 7, 0, 7],
        "lengths": [0, 2, 0, 2, 1, 0, 1],
        "empty": [0] * 7,
        "doc_ids": [0, 0, 0, 0, 1, 2, 2],
        "position_ids": [0, 1, 2, 3, 0, 0, 1],
    }
    assert batch["labels"][:, 7:].tolist() == [[-100, -100]]
    for loss in (grpo_loss(batch["log_probs"], batch), dapo_loss(batch["log_probs"], batch)):
        means = {name: float(a / b) for name, (a, b) in loss.metrics.items()}
        assert means["rollout/reward"] == pytest.approx((1.0 + 5.0 + 0.0) / 3)
        assert means["rollout/length"] == pytest.approx((2 + 1 + 1) / 3)


@pytest.mark.parametrize("prompts", [[], [[5], [6]]])
def test_without_a_position_to_train_there_is_a_row_of_padding(prompts):
    empty = SimpleNamespace(ids=prompts, log_probs=[[] for _ in prompts])
    batch = rollout_batch(prompts, empty, [1.0] * len(prompts), prompts and [0, 0], pad_to=3)
    assert batch["labels"].tolist() == [[-100] * 3]
    assert float(grpo_loss(batch["log_probs"], batch).count) == 0


def test_a_mistyped_word_is_refused_where_it_would_choose_another_loss():
    for build, mistyped in ((KL, "K3"), (ImportanceCorrection, "masked")):
        with pytest.raises(ValueError, match="'kind' must be in"):
            build(2.0, mistyped)
    with pytest.raises(ValueError, match=r"'most' must be > 0: -2\.0"):
        ImportanceCorrection(-2.0, "mask")
    for length in (0, -9, float("nan")):
        with pytest.raises(ValueError, match=r"max_length is .*; it must be finite and at least 1"):
            dr_grpo_loss(padded()[1], padded()[0], max_length=length)
    with pytest.raises(ValueError, match="scale is 'Std'"):
        group_advantages([1.0], [0], scale="Std")
