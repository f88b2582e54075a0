"""Any torch module trains: this one is a recurrent network with an optimizer of torch.

Its parameters after five steps do not depend on how the rows are divided into micro-batches.
"""

import torch
from tensordict import TensorDict
from torch import nn

import forgekit as fk


class Recurrent(nn.Module):
    def __init__(self, vocab_size=32, dim=24):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.output = nn.Linear(dim, vocab_size)

    def forward(self, ids):
        return self.output(self.gru(self.embedding(ids))[0])


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def rows(step):
    ids = torch.randint(32, (6, 13), generator=torch.Generator().manual_seed(step))
    labels = ids[:, 1:].clone()
    labels[:2, 3:] = -100  # two short rows
    return TensorDict({"input_ids": ids[:, :-1], "labels": labels}, [6])


def train(micro_batches):
    torch.manual_seed(0)
    model = Recurrent().double()
    state = fk.TrainState.create(model, torch.optim.AdamW(model.parameters()))
    step = fk.make_step(loss_fn, schedule=fk.optim.constant(1e-2))
    for number in range(5):
        state, _ = step(state, rows(number).split(micro_batches))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


difference = (train([6]) - train([1, 2, 3])).abs().max()
print(f"largest difference of a parameter {difference:.1e}")
