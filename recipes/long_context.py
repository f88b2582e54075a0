"""Train on rows that are longer than a rank may hold: context parallelism, documents packed.

Every rank of `mesh.cp` holds a part of each row; attention goes round in a ring, exchanges heads
for positions (Ulysses), or does both. The documents are a task that needs it: random tokens, then
the same tokens again. Only attention that reaches back by half a document, so to other ranks'
parts of the row, predicts the second half.

python long_context.py
torchrun --nproc-per-node 2 long_context.py seq_len=4096
torchrun --nproc-per-node 4 long_context.py context_parallel=both seq_len=8192
"""

from functools import partial
from itertools import count
from pathlib import Path

import attrs
import torch
from tensordict import TensorDict

import forgekit as fk
from forgekit.config import key, load_config, to_dict


@attrs.frozen(kw_only=True)
class Config:
    """A model of two layers, as many as copying needs."""

    out: fk.Location = key(Path("runs/long_context"), "Run directory; an existing run is resumed.")
    seed: int = key(0, "Seed of weights and data.", at_least=0)
    steps: int = key(300, "Optimizer steps of the whole run.", at_least=0)
    seq_len: int = key(512, "Positions in a row, over all ranks that share it.", at_least=8)
    documents: int = key(4, "Documents in a row.", at_least=1)
    batch_size: int = key(4, "Rows per step and data-parallel rank.", at_least=1)
    vocab_size: int = key(64, "Tokens to draw from.", at_least=2)
    lr: float = key(1e-2, "Highest learning rate; it falls linearly to 0.", at_least=0)
    log_every: int = key(50, "Steps between rows of metrics.", at_least=1)
    precision: fk.Precision = key("fp32", "fp32, bf16 or fp16; masters are float32.")
    activation_checkpoint: fk.ActivationCheckpoint = key("none", "What backward recomputes.")
    mlp_tiles: int = key(1, "Tiles of positions in a feed-forward, to save memory.", at_least=1)
    context_parallel: fk.ContextParallel = key("ring", "ring, ulysses or both.")
    mesh: fk.MeshSpec = fk.MeshSpec(dp_shard=1, cp=-1)


def micro_batches(config, mesh, seed, samples):
    """Whole rows, the same on all ranks that share them: a step slices them by itself."""
    rank, world = fk.data_ranks(mesh)
    for number in count(samples // config.batch_size + rank, world):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        half = config.seq_len // (2 * config.documents) + 1
        shape = (config.batch_size, config.documents, half)
        first = torch.randint(config.vocab_size, shape, generator=generator)
        ids = torch.cat([first, first], dim=-1).flatten(1)[:, : config.seq_len + 1]
        at = torch.arange(ids.shape[1]).expand_as(ids)
        rows = {"input_ids": ids, "doc_ids": at // (2 * half), "position_ids": at % (2 * half)}
        batch = fk.shift_labels(TensorDict(rows, [config.batch_size]))
        batch["labels"][batch["position_ids"] < half] = -100  # nothing to know in the first half
        yield batch


def loss_fn(model, batch):
    """Cross-entropy of the copied halves; attention and positions stay inside documents."""
    return model(
        batch["input_ids"],
        position_ids=batch["position_ids"],
        doc_ids=batch["doc_ids"],
        head=partial(fk.linear_cross_entropy, labels=batch["labels"]),
    )


def setup(config):
    """Build state, step and data."""
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
        mlp_tiles=config.mlp_tiles,
        context_parallel=config.context_parallel,
        seed=config.seed,
    )
    optimizer = fk.muon(model, momentum=0.85, rest_lr_scale=4.0)
    state = fk.TrainState.create(model, optimizer, mesh=mesh, seed=config.seed)
    state = fk.checkpoint_load(state, config.out / "checkpoints")

    schedule = fk.warmup_linear(config.lr, warmup=20, total=config.steps)
    stop = fk.StopSignal()
    step = fk.make_step(loss_fn, schedule=schedule, stop=stop)
    loader = micro_batches(config, mesh, state.seed, state.samples)
    return fk.Setup(state=state, step=step, loader=loader, loss_fn=loss_fn, stop=stop)


def train(config, run):
    """Step and log the loss of the copied halves; guessing costs log(vocab_size)."""
    built = setup(config)
    state, step, loader, stop = built.state, built.step, built.loader, built.stop
    groups = fk.groups(loader, 1)
    log = run.start(built, every=config.log_every, total=config.steps)
    check = fk.bad_step_policy("raise")
    with log, stop:
        for batches in groups:
            if run.is_over(state):
                break
            state, metrics = step(state, batches)
            check(log(state, metrics))
        run.end(state)


def main():
    """Hold the run directory while training, and write how the run ended."""
    config = load_config(Config)
    with fk.open_run(config.out, to_dict(config)) as run:
        train(config, run)


if __name__ == "__main__":
    main()
