"""Train a model that is cut into pipeline stages, and show what its schedule costs.

Every rank of `mesh.pp` holds some layers and passes micro-batches on. The same loss function
works as on one rank; only its call of the model is spread over the stages. A schedule decides who
works on what and when; the time in which a rank waits is its bubble, and more micro-batches
make it smaller.

python pipeline.py
torchrun --nproc-per-node 2 pipeline.py
torchrun --nproc-per-node 4 pipeline.py pipeline_schedule=zbv micro_batches=16 layers=8
"""

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


def micro_batches(config, state):
    """Counting sequences; the list says how many there are, which a schedule has to know."""
    rank, _ = fk.data_ranks(state.mesh)
    generator = torch.Generator().manual_seed(state.step * 1_000_003 + rank)
    shape = (config.micro_batches, config.batch_size, 1)
    start = torch.randint(VOCAB, shape, generator=generator)
    tokens = (start + torch.arange(config.seq_len + 1)) % VOCAB
    return [
        TensorDict({"input_ids": rows[:, :-1], "labels": rows[:, 1:]}, [config.batch_size])
        for rows in tokens
    ]


def loss_fn(model, batch):
    """The model is called once: the call is recorded here and made by the stages."""
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def setup(config):
    """Build this rank's part of the model and the step."""
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
    return state, fk.make_step(loss_fn, schedule=schedule)


def main():
    """Say what each rank holds and what the schedule costs, then train."""
    config = load_config(Config)
    state, step = setup(config)
    held = [name for name, _ in state.model.named_parameters()]
    print(f"rank {fk.process_rank()} holds {len(held)} parameters: {held[0]} .. {held[-1]}")
    while state.step < config.steps:
        state, metrics = step(state, micro_batches(config, state))
        if fk.process_rank() == 0 and fk.every(config.log_every, state):
            print(f"step {state.step}  loss {metrics['loss']:.4f}")
    fk.shutdown()


if __name__ == "__main__":
    main()
