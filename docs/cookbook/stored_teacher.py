"""A teacher runs once, students learn from what it stored: distillation from top-k rows.

For each byte of some texts the teacher's eight most likely next bytes and their log-probabilities
are written beside it, into the token file. A loader yields them with the rows of text, shuffled,
packed and resumed like these. What the eight leave over is one further outcome on both sides, so
nothing is lost or made up. A twin of each student learns from the text alone: a plain file, as a
step refuses rows that its loss does not read.

    python stored_teacher.py           # 40 steps, one seed
    python stored_teacher.py 160 3     # the table on the page
"""

import sys
from functools import partial
from itertools import islice

import numpy as np
import torch

import forgekit as fk

K, SEQ_LEN = 8, 64
STEPS, SEEDS = map(int, sys.argv[1:] or (40, 1))
sizes = {"vocab_size": 256, "heads": 4, "kv_heads": 2, "max_seq_len": SEQ_LEN}


def write(path, documents):
    file = fk.write_tokens(path, documents, vocab_size=256, eos_id=0)
    return fk.token_dataset(file, seq_len=SEQ_LEN)


def train(model, rows, loss_fn, steps, seed=0, every=None):
    """Yield the held-out bits per byte after each ``every`` steps, and after the last."""
    state = fk.TrainState.create(model, fk.adamw(model), seed=seed)
    step = fk.make_step(loss_fn, schedule=fk.warmup_linear(peak=4e-3, warmup=10, total=steps))
    loader = fk.make_loader(rows, batch_size=8, seed=seed)
    for batches in islice(fk.groups(loader, 1), steps):
        state, _ = step(state, batches)
        if state.step % (every or steps) == 0:
            loss = fk.evaluate(state, fk.make_loader(held_out, batch_size=8, epochs=1), read_text)
            yield loss["loss"].item() / np.log(2)


def read_text(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def follow_teacher(model, batch):
    stored = {"ids": batch["teacher_ids"], "log_probs": batch["teacher_log_probs"]}
    return model(batch["input_ids"], head=partial(fk.steps.sparse_kl, **stored))


def with_teacher(document):
    """A document with the teacher's rows: for each byte those of the next one."""
    with torch.no_grad():
        pieces = torch.from_numpy(document).long().split(SEQ_LEN)
        tops = [teacher(piece[None])[0].log_softmax(-1).topk(K) for piece in pieces]
    log_probs, ids = (torch.cat(column) for column in zip(*tops, strict=True))
    return {"input_ids": document, "teacher_ids": ids, "teacher_log_probs": log_probs}


sources = (bytearray(text.encode()) for _, text in fk.data.stdlib_documents())
texts = [np.frombuffer(source, np.uint8) for source in islice(sources, 100)]
few = texts[: 1 + STEPS // 20]  # of which the teacher's rows are stored
held_out = write("held_out", [text[:1500] for text in texts[9::10]])
everything = write("text", [text for n, text in enumerate(texts) if n % 10 != 9])

teacher = fk.Transformer(fk.TransformerSpec(dim=96, layers=3, ffn_dim=256, **sizes), seed=1)
(known,) = train(teacher, everything, read_text, 4 * STEPS)
print(f"teacher: {known:.3f} bits per byte")
taught, plain = write("taught", map(with_teacher, few)), write("plain", few)
print(f"{taught.file.tokens} positions with {K} tokens each")
for seed in range(SEEDS):
    for name, rows, loss_fn in (("text", plain, read_text), ("rows", taught, follow_teacher)):
        student = fk.Transformer(fk.TransformerSpec(dim=48, layers=2, ffn_dim=128, **sizes), seed)
        bits = train(student, rows, loss_fn, STEPS, seed, every=STEPS // 4)
        print(f"seed {seed}, {name}:", *(f"{each:.3f}" for each in bits))
