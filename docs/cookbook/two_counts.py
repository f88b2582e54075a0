"""One loss over tokens and one over rows: each is divided by its own number of targets.

A step divides by one count. `fk.steps.count_ahead` counts both kinds of targets before the first
backward, so the second loss can be rescaled exactly, however the rows are divided.
"""

import torch
from tensordict import TensorDict

import forgekit as fk

rows = TensorDict(
    {
        "input_ids": torch.randint(32, (8, 16), generator=torch.Generator().manual_seed(0)),
        "score": torch.linspace(-1, 1, 8),  # one number for each row; NaN: it has none
    },
    [8],
)
rows["score"][5:] = float("nan")
rows["labels"] = rows["input_ids"].roll(-1, 1)
rows["labels"][:3, 4:] = -100  # ragged: fewer targets in the first rows


class Scorer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.tokens = torch.nn.Linear(16, 32)
        self.score = torch.nn.Linear(16, 1)

    def forward(self, ids):
        hidden = self.embedding(ids)
        return self.tokens(hidden), self.score(hidden.mean(1)).squeeze(-1)


def gradient(batches):
    torch.manual_seed(0)
    model = Scorer().double()
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
    counters = {
        "tokens": lambda batch: (batch["labels"] != -100).sum(),
        "scores": lambda batch: batch["score"].isfinite().sum(),
    }
    batches, counts = fk.steps.count_ahead(state, batches, counters)

    def loss_fn(model, batch):
        logits, score = model(batch["input_ids"])
        loss = fk.cross_entropy(logits, batch["labels"])
        error = torch.where(batch["score"].isfinite(), score - batch["score"], 0.0)
        errors = error.square().sum() * counts["tokens"] / counts["scores"]
        return fk.Loss(loss.sum + errors, loss.count)

    totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
    return torch.cat([g.flatten() for g in fk.gradients(state, totals).values()])


whole, ragged = gradient([rows]), gradient([rows[:1], rows[1:6], rows[6:]])
print(f"largest difference {(whole - ragged).abs().max():.1e} of {whole.abs().max():.1e}")
