"""Multiple choice, as lm-eval scores it: the answer whose tokens are likeliest after a question.

`acc` takes the sum over an answer's tokens, `acc_norm` the mean, so that long answers lose nothing.
lm-eval's own tasks take what `forgekit export RUN DIR` writes:
`lm_eval --model hf --model_args pretrained=DIR --tasks hellaswag`.
"""

import torch
from tensordict import TensorDict

import forgekit as fk

SPEC = fk.TransformerSpec(
    vocab_size=32, dim=32, layers=1, heads=2, kv_heads=1, ffn_dim=64, max_seq_len=16
)


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


@torch.no_grad()
def log_likelihood(model, question, answer):
    """The log-probability of each token of an answer, after the question and those before it."""
    ids = torch.tensor([question + answer])
    log_probs = model(ids[:, :-1]).log_softmax(-1)
    picked = log_probs.gather(-1, ids[:, 1:, None])[0, :, 0]
    return picked[len(question) - 1 :]


def accuracies(model, tasks):
    """Share of questions whose right answer, the first, scores best: by the sum, by the mean."""
    model.eval()
    right = torch.zeros(2)
    for question, answers in tasks:
        scores = [log_likelihood(model, question, answer) for answer in answers]
        right[0] += max(range(len(answers)), key=lambda n: scores[n].sum()) == 0
        right[1] += max(range(len(answers)), key=lambda n: scores[n].mean()) == 0
    model.train()
    return (right / len(tasks)).tolist()


def count(start, by, length):
    return [(start + by * n) % 32 for n in range(length)]


# Questions count by one; wrong answers go on from elsewhere, by twos, or stop short of it.
tasks = [
    (count(at, 1, 4), [count(at + 4, 1, 3), count(at + 9, 1, 3), count(at + 4, 2, 2)])
    for at in range(0, 32, 2)
]
rows = torch.tensor([count(at, 1, 17) for at in range(32)])
batch = TensorDict({"input_ids": rows[:, :-1], "labels": rows[:, 1:]}, [32])
model = fk.Transformer(SPEC, seed=0)
state = fk.TrainState.create(model, fk.adamw(model))
step = fk.make_step(loss_fn, schedule=fk.optim.constant(1e-2))
print("before: acc {:.2f}, acc_norm {:.2f}".format(*accuracies(model, tasks)))
for _ in range(60):
    state, _ = step(state, [batch])
print("after: acc {:.2f}, acc_norm {:.2f}".format(*accuracies(model, tasks)))
