"""The five parts of a step, written out: one process, random tokens, nothing around the loop.

Run it as it is (`python minimal.py`), or copy it and put your model, your data and your loss in.
"""

import argparse

import torch
from tensordict import TensorDict

import forgekit as fk

STEPS, MICRO_BATCHES, ROWS, SEQ_LEN, VOCAB = 50, 2, 8, 64, 64


def micro_batches(step):
    """Counting sequences: row r counts on from a random start, modulo the vocabulary."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICRO_BATCHES):
        start = torch.randint(VOCAB, (ROWS, 1), generator=generator)
        tokens = (start + torch.arange(SEQ_LEN + 1)) % VOCAB
        yield TensorDict({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}, [ROWS])


def loss_fn(model, batch):
    """Summed cross-entropy and its number of targets; nothing is divided here."""
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def main():
    """Train a small model and print its loss."""
    spec = fk.TransformerSpec(
        vocab_size=VOCAB, dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=128, max_seq_len=SEQ_LEN
    )
    model = fk.Transformer(spec, seed=0)
    state = fk.TrainState.create(model, fk.adamw(model, weight_decay=0.1), seed=0)
    schedule = fk.warmup_cosine(peak=3e-3, warmup=5, total=STEPS)

    while state.step < STEPS:
        totals = fk.accumulate(state, micro_batches(state.step), loss_fn)
        totals = fk.reduce_totals(totals, state)
        correction = fk.clip(totals, max_norm=1.0)
        lr = schedule(state.step)
        state = fk.update(state, correction, lr=lr, totals=totals)
        metrics = fk.step_metrics(totals, correction, lr=lr)
        if fk.every(10, state):
            print(f"step {state.step}  loss {metrics['loss']:.4f}  lr {lr:.2e}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # it has no settings: edit a copy
    main()
