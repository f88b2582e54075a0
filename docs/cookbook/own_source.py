"""Data of your own: any iterable of TensorDicts. With a state it resumes where it was.

A field of the state that can be iterated and has `state_dict` and `load_state_dict` is saved and
loaded with it, for each rank its own.
"""

import attrs
import torch
from tensordict import TensorDict

import forgekit as fk


class Numbers:
    """An endless stream; its state is one generator."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            x = torch.randn(8, 4, generator=self.generator)
            yield TensorDict({"x": x}, [8])

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, saved):
        self.generator.set_state(saved["generator"])


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Streaming(fk.TrainState):
    source: Numbers = attrs.field(repr=False)


def loss_fn(model, batch):
    error = (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square()
    return fk.Loss(error.sum(), len(error))


def train(steps, directory):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    source = Numbers(seed=0)  # on several ranks: seed=fk.data_ranks(mesh)[0]
    state = Streaming.create(model, fk.adamw(model), source=source)
    state = fk.checkpoint_load(state, directory)
    step = fk.make_step(loss_fn, schedule=fk.optim.constant(0.05))
    stream = iter(state.source)
    while state.step < steps:
        state, _ = step(state, [next(stream) for _ in range(2)])
    fk.checkpoint_save(state, directory, blocking=True)
    return model.weight.detach()


straight = train(6, "straight")
train(3, "resumed")
print(f"resumed bit for bit {torch.equal(train(6, 'resumed'), straight)}")
