"""Train a model that is cut into pipeline stages, and show what its schedule costs.

Every rank of `mesh.pp` holds some layers and passes micro-batches on. The same loss function
works as on one rank; only its call of the model is spread over the stages. A schedule decides who
works on what and when; the time in which a rank waits is its bubble, and more micro-batches
make it smaller.

python pipeline.py
torchrun --nproc-per-node 2 pipeline.py
torchrun --nproc-per-node 4 pipeline.py pipeline_schedule=zbv micro_batches=16 layers=8
"""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import attrs
import torch
from tensordict import TensorDict

import forgekit as fk
from forgekit.config import key, load_config


@attrs.frozen(kw_only=True)
class Config:
    """Four small layers that learn to count."""

    steps: int = key(60, "Optimizer steps.", at_least=1)
    micro_batches: int = key(8, "Micro-batches; more make the bubble smaller.", at_least=1)
    batch_size: int = key(2, "Rows per rank and micro-batch.", at_least=1)
    seq_len: int = key(32, "Places in a row.", at_least=1)
    layers: int = key(4, "Layers, cut into stages.", at_least=1)
    lr: float = key(3e-3, "Highest learning rate.", at_least=0)
    seed: int = key(0, "Seed of weights and data.")
    log_every: int = key(20, "Steps between two lines.", at_least=1)
    pipeline_schedule: fk.PipelineSchedule = key("1f1b", "Order of work between stages.")
    mesh: fk.MeshSpec = fk.MeshSpec(dp_shard=1, pp=-1)


VOCAB = 64


def micro_batches(config, mesh):
    """Counting sequences without end, others on each data-parallel rank."""
    rank, world = fk.data_ranks(mesh)
    for number in count(rank, world):
        generator = torch.Generator().manual_seed(number)
        start = torch.randint(VOCAB, (config.batch_size, 1), generator=generator)
        tokens = (start + torch.arange(config.seq_len + 1)) % VOCAB
        rows = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        yield TensorDict(rows, [config.batch_size])


def loss_fn(model, batch):
    """The model is called once: the call is recorded here and made by the stages."""
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


@attrs.frozen(kw_only=True)
class Setup:
    """What a run works with; `forgekit verify` reads it too."""

    state: fk.TrainState
    step: Callable[..., Any]
    loader: Iterable[TensorDict]
    loss_fn: Callable[..., fk.Loss]


def setup(config):
    """Build this rank's part of the model, the step and the data."""
    mesh = fk.build_mesh(config.mesh)
    spec = fk.TransformerSpec(
        vocab_size=VOCAB,
        dim=64,
        layers=config.layers,
        heads=4,
        kv_heads=2,
        ffn_dim=128,
        max_seq_len=config.seq_len,
    )
    with torch.device("meta"):
        model = fk.Transformer(spec)
    model = fk.parallelize(
        model, mesh, pipeline_schedule=config.pipeline_schedule, seed=config.seed
    )
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh, seed=config.seed)
    schedule = fk.warmup_cosine(config.lr, warmup=10, total=config.steps)
    step = fk.make_step(loss_fn, schedule=schedule)
    loader = micro_batches(config, mesh)
    return Setup(state=state, step=step, loader=loader, loss_fn=loss_fn)


def main():
    """Say what each rank holds and what the schedule costs, then train."""
    config = load_config(Config)
    built = setup(config)
    state, step = built.state, built.step
    groups = fk.groups(built.loader, config.micro_batches)  # a schedule has to know how many
    held = [name for name, _ in state.model.named_parameters()]
    print(f"rank {fk.process_rank()} holds {len(held)} parameters: {held[0]} .. {held[-1]}")
    while state.step < config.steps:
        state, metrics = step(state, next(groups))
        if fk.process_rank() == 0 and fk.every(config.log_every, state):
            print(f"step {state.step}  loss {metrics['loss']:.4f}")
    fk.shutdown()


if __name__ == "__main__":
    main()
