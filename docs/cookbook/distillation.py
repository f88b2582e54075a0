"""Distillation: a small model learns the distribution of a frozen teacher.

The teacher is a field of the state that checkpoints leave out. The loss is a sum over positions
like any other, so every layout and every split of the batch gives the same gradient.
"""

from functools import partial

import attrs
import torch
import torch.nn.functional as F
from tensordict import TensorDict

import forgekit as fk

sizes = {"vocab_size": 64, "layers": 1, "heads": 2, "kv_heads": 1, "max_seq_len": 16}
teacher = fk.Transformer(fk.TransformerSpec(dim=32, ffn_dim=64, **sizes), seed=1)
teacher.output.weight.data *= 20  # one that has an opinion
student = fk.Transformer(fk.TransformerSpec(dim=16, ffn_dim=32, **sizes), seed=0)


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Distilling(fk.TrainState):
    teacher: torch.nn.Module = attrs.field(repr=False, metadata={"checkpoint": False})


def loss_fn(teacher, model, batch):
    with torch.no_grad():
        target = teacher(batch["input_ids"]).log_softmax(-1)
    learned = model(batch["input_ids"]).log_softmax(-1)
    divergence = F.kl_div(learned, target, reduction="sum", log_target=True)
    return fk.Loss(divergence, batch["input_ids"].numel())


state = Distilling.create(student, fk.adamw(student), teacher=teacher.requires_grad_(False))
step = fk.make_step(partial(loss_fn, state.teacher), schedule=fk.optim.constant(1e-2))
before = teacher.output.weight.clone()
losses = []
for seed in range(40):
    ids = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(seed))
    state, metrics = step(state, [TensorDict({"input_ids": ids}, [8])])
    losses.append(metrics["loss"].item())
print(f"divergence from the teacher {losses[0]:.3f}, then {losses[-1]:.3f}")

fk.checkpoint_save(state, "checkpoints", blocking=True)
loaded = fk.checkpoint_load(state, "checkpoints")
print(f"teacher unchanged {torch.equal(loaded.teacher.output.weight, before)}")
