"""A loss of your own: focal loss, which gives hard tokens more weight than easy ones.

A loss function returns a sum and the number of its targets, and divides by nothing. Then the
gradient is that of the mean over the global batch, however the rows are split: here it is compared
with autograd on all rows at once.
"""

import torch
from tensordict import TensorDict

import forgekit as fk

GAMMA = 2.0


def focal(logits, labels):
    """Sum of (1 - p)^gamma * -log p over the targets, and their number (arXiv 1708.02002)."""
    is_target = labels != -100
    log_p = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    # `where`, not a product: what is masked may be NaN.
    losses = torch.where(is_target, -((1 - log_p.exp()) ** GAMMA) * log_p, 0.0)
    return losses.sum(), is_target.sum()


def loss_fn(model, batch):
    total, count = focal(model(batch["input_ids"]), batch["labels"])
    return fk.Loss(total, count)


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)).double()


rows = torch.randint(32, (6, 13), generator=torch.Generator().manual_seed(0))
batch = TensorDict({"input_ids": rows[:, :-1], "labels": rows[:, 1:].clone()}, [6])
batch["labels"][:2, 3:] = -100  # two short rows

model = build()
state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
totals = fk.accumulate(state, batch.split([1, 2, 3]), loss_fn)
totals = fk.reduce_totals(totals, state)
gradients = fk.gradients(state, totals)

reference = build()
total, count = focal(reference(batch["input_ids"]), batch["labels"])
(total / count).backward()
difference = max((gradients[n] - p.grad).abs().max() for n, p in reference.named_parameters())
largest = max(p.grad.abs().max() for p in reference.parameters())
print(f"loss {totals['loss'] / totals['targets']:.4f}, by torch alone {total / count:.4f}")
print(f"largest difference of a gradient {difference:.1e} of {largest:.1e}")
