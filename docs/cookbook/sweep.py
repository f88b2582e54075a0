"""A sweep in one script: a run directory for each setting, then a table of what came out.

Each run starts from the same weights and sees the same rows. `MetricsLog` writes one JSON object
per logged step, which `read_metrics` gives back.
"""

import torch
from tensordict import TensorDict

import forgekit as fk
from forgekit.metrics import read_metrics

SPEC = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=16
)
RATES, STEPS = (1e-5, 1e-3, 1e-2), 30


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def rows(step):
    start = torch.randint(32, (8, 1), generator=torch.Generator().manual_seed(step))
    ids = (start + torch.arange(17)) % 32
    return TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, [8])


def run(lr, out):
    model = fk.Transformer(SPEC, seed=0)
    state = fk.TrainState.create(model, fk.adamw(model), seed=0)
    schedule = fk.warmup_cosine(peak=lr, warmup=3, total=STEPS)
    step = fk.make_step(loss_fn, schedule=schedule)
    with fk.MetricsLog(out, every=10, total=STEPS) as log:
        while state.step < STEPS:
            state, metrics = step(state, [rows(state.step)])
            log(state, metrics)


for lr in RATES:
    run(lr, f"runs/lr_{lr:g}")
last = {}
for lr in RATES:
    last[lr] = read_metrics(f"runs/lr_{lr:g}/metrics.jsonl")[-1]["train/loss"]
    print(f"lr {lr:g}  loss {last[lr]:.3f}")
print(f"best lr {min(last, key=last.get):g}")
