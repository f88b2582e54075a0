"""A teacher runs once, students learn from what it stored: distillation from top-k rows.

For each position of a text the teacher's eight most likely tokens and their log-probabilities are
written to two arrays, in 16 bits. A student reads them by row number like any other dataset. What
the eight leave over is one further outcome on both sides, so nothing is lost or made up.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

import forgekit as fk

K, SEQ_LEN = 8, 32
sizes = {"vocab_size": 256, "layers": 2, "heads": 2, "kv_heads": 1, "max_seq_len": SEQ_LEN}


def train(model, dataset, loss_fn, steps):
    state = fk.TrainState.create(model, fk.adamw(model))
    step = fk.make_step(loss_fn, schedule=fk.warmup_linear(peak=1e-2, warmup=5, total=steps))
    losses = []
    loader = fk.make_loader(dataset, batch_size=16, seed=0)
    for batches in fk.groups(loader, 1):
        state, metrics = step(state, batches)
        losses.append(metrics["loss"].item())
        if state.step == steps:
            break
    return losses


def learn_text(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


text = np.frombuffer(Path(fk.data.__file__).read_bytes() * 8, np.uint8)
fk.write_tokens("tokens", [text], vocab_size=256, eos_id=0)
rows = fk.token_dataset("tokens", seq_len=SEQ_LEN)

teacher = fk.Transformer(fk.TransformerSpec(dim=64, ffn_dim=128, **sizes), seed=1)
train(teacher, rows, learn_text, 120)
shape = (len(rows), SEQ_LEN, K)
ids = np.lib.format.open_memmap("ids.npy", "w+", np.int16, shape)
log_probs = np.lib.format.open_memmap("log_probs.npy", "w+", np.float16, shape)
with torch.no_grad():
    for i in range(len(rows)):
        top = teacher(rows[i]["input_ids"][None]).log_softmax(-1).topk(K)
        ids[i], log_probs[i] = top.indices[0], top.values[0]
print(f"mass of the {K} most likely tokens {np.exp(log_probs.astype(float)).sum(-1).mean():.2f}")


class Taught:
    """Rows of text, each with the teacher's."""

    def __len__(self):
        return len(rows)

    def __getitem__(self, i):
        taught = {"ids": torch.from_numpy(ids[i]), "log_probs": torch.from_numpy(log_probs[i])}
        return TensorDict({**rows[i], "teacher": TensorDict(taught, [SEQ_LEN])})


def learn_from_teacher(model, batch):
    taught = batch["teacher"]
    head = partial(fk.steps.sparse_kl, ids=taught["ids"], log_probs=taught["log_probs"])
    return model(batch["input_ids"], head=head)


for dim in (16, 32):
    student = fk.Transformer(fk.TransformerSpec(dim=dim, ffn_dim=2 * dim, **sizes), seed=0)
    losses = train(student, Taught(), learn_from_teacher, 60)
    print(f"width {dim}: divergence from the teacher {losses[0]:.2f}, then {losses[-1]:.2f}")
