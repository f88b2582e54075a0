"""A tracker of your own: a function of (step, values), called with each logged row.

`log(state, metrics)` returns the row where one is due, with plain numbers, else None; one copy
from the device has been made by then. Every rank gets the row; let rank 0 write it.
"""

import csv
from pathlib import Path

import torch
from tensordict import TensorDict

import forgekit as fk


class CsvTracker:
    """Columns `step`, and the values that were asked for."""

    def __init__(self, path, names):
        self.names = names
        self.file = Path(path).open("w", newline="")
        self.rows = csv.writer(self.file)
        self.rows.writerow(["step", *names])

    def __call__(self, step, values):
        self.rows.writerow([step, *(values.get(name, "") for name in self.names)])
        self.file.flush()

    def close(self):
        self.file.close()


def loss_fn(model, batch):
    error = (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square()
    return fk.Loss(error.sum(), len(error))


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
state = fk.TrainState.create(model, fk.adamw(model))
step = fk.make_step(loss_fn, schedule=fk.constant(0.05))
tracker = CsvTracker("losses.csv", ["train/loss", "train/lr"])
with fk.MetricsLog("runs/tracked", every=10) as log:
    for number in range(40):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        state, metrics = step(state, [TensorDict({"x": x}, [8])])
        if (row := log(state, metrics)) is not None and fk.process_rank() == 0:
            tracker(state.step, row)
tracker.close()
print(Path("losses.csv").read_text())
