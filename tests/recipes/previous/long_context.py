"""Train on rows that are longer than a rank may hold: context parallelism, documents packed.

Every rank of `mesh.cp` holds a part of each row; attention goes round in a ring, exchanges heads
for places (Ulysses), or does both. The documents are a task that needs it: random tokens, then
the same tokens again. Only attention that reaches back by half a document, so to other ranks'
parts of the row, predicts the second half.

python long_context.py
torchrun --nproc-per-node 2 long_context.py seq_len=4096
torchrun --nproc-per-node 4 long_context.py context_parallel=both seq_len=8192
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count, islice
from typing import Any

import attrs
import torch
from tensordict import TensorDict

import forgekit as fk
from forgekit.config import key, load_config


@attrs.frozen(kw_only=True)
class Config:
    """A model of two layers, as many as copying needs."""

    steps: int = key(300, "Optimizer steps.", at_least=1)
    seq_len: int = key(512, "Places in a row, over all ranks that share it.", at_least=8)
    documents: int = key(4, "Documents in a row.", at_least=1)
    batch_size: int = key(4, "Rows per step.", at_least=1)
    vocab_size: int = key(64, "Tokens to draw from.", at_least=2)
    lr: float = key(3e-3, "Highest learning rate.", at_least=0)
    seed: int = key(0, "Seed of weights and data.")
    log_every: int = key(50, "Steps between two lines.", at_least=1)
    precision: fk.Precision = key("fp32", "fp32, bf16 or fp16; masters are float32.")
    activation_checkpoint: fk.ActivationCheckpoint = key("none", "What backward recomputes.")
    context_parallel: fk.ContextParallel = key("ring", "ring, ulysses or both.")
    mesh: fk.MeshSpec = fk.MeshSpec(dp_shard=1, cp=-1)


def micro_batch(config, step):
    """Whole rows, the same on every rank that shares them; a step slices them by itself."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    half = config.seq_len // (2 * config.documents) + 1
    shape = (config.batch_size, config.documents, half)
    first = torch.randint(config.vocab_size, shape, generator=generator)
    ids = torch.cat([first, first], dim=-1).flatten(1)[:, : config.seq_len + 1]
    place = torch.arange(ids.shape[1]).expand_as(ids)
    rows = {"input_ids": ids, "doc_ids": place // (2 * half), "position_ids": place % (2 * half)}
    batch = fk.shift_labels(TensorDict(rows, [config.batch_size]))
    batch["labels"][batch["position_ids"] < half] = -100  # nothing to know in the first half
    return batch


def loss_fn(model, batch):
    """Cross-entropy of the copied halves; attention and positions stay inside documents."""
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    return model(
        batch["input_ids"],
        position_ids=batch["position_ids"],
        doc_ids=batch["doc_ids"],
        head=head,
    )


@attrs.frozen(kw_only=True)
class Setup:
    """What a run works with; `forgekit verify` reads it too."""

    state: fk.TrainState
    step: Callable[..., Any]
    loader: Iterable[TensorDict]
    loss_fn: Callable[..., fk.Loss]


def setup(config):
    """Build the state, the step and the data."""
    mesh = fk.build_mesh(config.mesh)
    spec = fk.TransformerSpec(
        vocab_size=config.vocab_size,
        dim=128,
        layers=2,
        heads=4,
        kv_heads=4,
        ffn_dim=256,
        max_seq_len=config.seq_len,
    )
    with torch.device("meta"):
        model = fk.Transformer(spec)
    model = fk.parallelize(
        model,
        mesh,
        precision=config.precision,
        activation_checkpoint=config.activation_checkpoint,
        context_parallel=config.context_parallel,
        seed=config.seed,
    )
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh, seed=config.seed)
    schedule = fk.warmup_cosine(config.lr, warmup=20, total=config.steps)
    step = fk.make_step(loss_fn, schedule=schedule)
    loader = (micro_batch(config, number) for number in count())
    return Setup(state=state, step=step, loader=loader, loss_fn=loss_fn)


def main():
    """Train, and print the loss of the copied halves; guessing costs log(vocab_size)."""
    config = load_config(Config)
    built = setup(config)
    state, step = built.state, built.step
    for batches in islice(fk.groups(built.loader, 1), config.steps):
        state, metrics = step(state, batches)
        if fk.process_rank() == 0 and fk.every(config.log_every, state):
            print(f"step {state.step}  loss {metrics['loss']:.4f}")
    fk.shutdown()


if __name__ == "__main__":
    main()
