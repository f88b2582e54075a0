"""A contrastive loss between two views of images; no language model.

The number of rows is the count. Rows are compared with those of their micro-batch, so the size
of a micro-batch is part of this loss, as it is in every such loss.
"""

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import nn

import forgekit as fk

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(16 * 9, 32), nn.GELU(),
    nn.Linear(32, 16),
)  # fmt: skip


def loss_fn(model, batch):
    first, second = (F.normalize(model(batch[view]), dim=-1) for view in ("first", "second"))
    logits = first @ second.T / 0.1
    own = torch.arange(len(logits))
    loss = F.cross_entropy(logits, own, reduction="sum")
    found = (logits.argmax(-1) == own).sum()
    return fk.Loss(loss, len(logits), metrics={"found": (found, len(logits))})


def pairs(seed, rows=32):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(rows, 1, 8, 8, generator=generator)
    noise = torch.randn(2, rows, 1, 8, 8, generator=generator)
    views = {"first": image + 0.4 * noise[0], "second": (image + 0.4 * noise[1]).flip(-1)}
    return TensorDict(views, [rows])


torch.manual_seed(0)
for layer in model:
    if hasattr(layer, "reset_parameters"):
        layer.reset_parameters()
state = fk.TrainState.create(model, fk.adamw(model, weight_decay=0.01))
step = fk.make_step(loss_fn, schedule=fk.warmup_cosine(peak=5e-3, warmup=5, total=60))
before = fk.evaluate(state, [pairs(1000)], loss_fn)["found"]
for number in range(60):
    state, metrics = step(state, [pairs(2 * number), pairs(2 * number + 1)])
after = fk.evaluate(state, [pairs(1000)], loss_fn)["found"]
print(f"found among 32 held-out images {before:.2f}, then {after:.2f}")
