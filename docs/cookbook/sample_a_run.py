"""Sample from a finished run: one line loads its model and its tokenizer.

Neither the recipe nor its data or optimizer are needed. The model has its adapters if it was
trained with some; `step=` takes an older checkpoint. Here a tiny run is made first.
"""

from itertools import islice

import torch
from tensordict import TensorDict

import forgekit as fk
from forgekit.config import to_dict

TEXT = "to be, or not to be, that is the question: "
SPEC = fk.TransformerSpec(
    vocab_size=280, dim=32, layers=1, heads=2, kv_heads=1, ffn_dim=64, max_seq_len=64
)


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def train(steps):
    tokenizer = fk.data.train_tokenizer([TEXT] * 4, SPEC.vocab_size)
    tokenizer.save("tokenizer.json")
    ids = torch.tensor(tokenizer.encode(TEXT * 4).ids)
    batch = TensorDict({"input_ids": ids[None, :-1], "labels": ids[None, 1:]}, [1])
    config = {"model": to_dict(SPEC), "data": {"path": "."}, "steps": steps}
    with fk.open_run("run", config) as run:
        model = fk.Transformer(SPEC, seed=0)
        state = fk.TrainState.create(model, fk.adamw(model))
        step = fk.make_step(loss_fn, schedule=fk.optim.constant(1e-2))
        with run.start(state, every=steps, total=steps) as log:
            for batches in islice(iter(lambda: [batch], None), steps):
                state, metrics = step(state, batches)
                log(state, metrics)
            fk.checkpoint_save(state, run.checkpoints, blocking=True)
            run.end(state)


train(steps=60)

model, tokenizer, config = fk.load_run("run")
prompt = torch.tensor([tokenizer.encode("to be, or ").ids])
answer = fk.generate(model, prompt, max_new_tokens=8, temperature=0)
print(f"after {config['steps']} steps: {tokenizer.decode(answer[0].tolist())}")

batch = TensorDict({"input_ids": answer[:, :-1], "labels": answer[:, 1:]}, [1])
print(f"of the sample: {fk.evaluate(model, [batch], loss_fn)}")
