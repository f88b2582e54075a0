"""A policy gradient: sample with `fk.generate`, score the samples, take an ordinary step.

The log-probabilities of sampling are those that the trainer computes, so the ratio of the two
policies starts at 1. The reward here is the share of even tokens.
"""

import torch
from tensordict import TensorDict

import forgekit as fk

ROWS, NEW, VOCAB = 32, 12, 16
spec = fk.TransformerSpec(
    vocab_size=VOCAB, dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=NEW + 1
)


def rollouts(model, seed):
    """One micro-batch: prompts of one token, what followed, and how much better than the mean."""
    prompts = torch.zeros(ROWS, 1, dtype=torch.int64)
    ids, log_probs = fk.generate(model, prompts, max_new_tokens=NEW, seed=seed, log_probs=True)
    reward = (ids[:, 1:] % 2 == 0).float().mean(1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    values = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "old": log_probs}
    return TensorDict(values | {"advantage": advantage, "reward": reward}, [ROWS])


def loss_fn(model, batch):
    logits = model(batch["input_ids"]).log_softmax(-1)
    log_probs = logits.gather(-1, batch["labels"][..., None]).squeeze(-1)
    ratio = (log_probs - batch["old"]).exp()
    advantage = batch["advantage"][:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    metrics = {
        "reward": (batch["reward"].sum(), ROWS),
        "ratio": (ratio.detach().sum(), ratio.numel()),
    }
    return fk.Loss(-gain.sum(), gain.numel(), metrics=metrics)


model = fk.Transformer(spec, seed=0)
state = fk.TrainState.create(model, fk.adamw(model))
step = fk.make_step(loss_fn, schedule=fk.optim.constant(1e-2))
rewards, ratios = [], []
for number in range(25):
    # a generator: the second micro-batch is sampled after the first one's backward
    batches = (rollouts(state.model, seed=2 * number + half) for half in range(2))
    state, metrics = step(state, batches)
    rewards.append(metrics["reward"].item())
    ratios.append(metrics["ratio"].item())
print(f"mean ratio {min(ratios):.4f} to {max(ratios):.4f}")
print(f"reward {rewards[0]:.2f}, then {rewards[-1]:.2f}")
