"""A tracker of your own: a callable of (step, values) with `close()`, called with each row.

`values` are plain numbers by name. Only rank 0 calls trackers, each from a thread of its own, so
that one which is slow or fails costs a message and no step. `start` and `status` are optional.
"""

import csv
from pathlib import Path

import torch
from tensordict import TensorDict

import forgekit as fk


class CsvTracker:
    """Columns `step`, and the values that were asked for."""

    def __init__(self, path, names):
        self.path, self.names = Path(path), names

    def start(self, step, config):
        """The run begins at this step, or goes on from it: keep the rows up to it."""
        old = list(csv.reader(self.path.read_text().splitlines())) if self.path.exists() else []
        self.file = self.path.open("w", newline="")
        self.rows = csv.writer(self.file)
        self.rows.writerow(["step", *self.names])
        self.rows.writerows(row for row in old[1:] if int(row[0]) <= step)

    def __call__(self, step, values):
        if not values.keys().isdisjoint(self.names):  # an evaluation comes in a call of its own
            self.rows.writerow([step, *(values.get(name, "") for name in self.names)])
            self.file.flush()

    def close(self):
        self.file.close()


def loss_fn(model, batch):
    error = (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square()
    return fk.Loss(error.sum(), len(error))


def train(steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    state = fk.TrainState.create(model, fk.adamw(model))
    state = fk.checkpoint_load(state, "checkpoints")  # none there: the state as it is
    step = fk.make_step(loss_fn, schedule=fk.optim.constant(0.05))
    tracker = CsvTracker("losses.csv", ["train/loss", "train/lr"])
    with fk.MetricsLog("run", start_step=state.step, every=10, trackers=(tracker,)) as log:
        while state.step < steps:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(state.step))
            state, metrics = step(state, [TensorDict({"x": x}, [8])])
            log(state, metrics)
            if state.step == 20:
                fk.checkpoint_save(state, "checkpoints", blocking=True)


train(30)  # stops ten steps after its checkpoint
train(40)  # goes on from step 20, and logs step 30 again
print(Path("losses.csv").read_text())
