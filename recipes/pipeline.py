"""Train a model that is split into pipeline stages, and show what its schedule costs.

Every rank of `mesh.pp` holds some layers and passes micro-batches on. The same loss function
works as on one rank; only its call of the model runs on several stages. A schedule decides who
works on what and when; the time in which a rank waits is its bubble, and more micro-batches
make it smaller.

python pipeline.py
torchrun --nproc-per-node 2 pipeline.py
torchrun --nproc-per-node 4 pipeline.py pipeline_schedule=zbv micro_batches=16 layers=8
"""

from itertools import count
from pathlib import Path

import attrs
import torch
from tensordict import TensorDict

import forgekit as fk
from forgekit.config import key, load_config, to_dict

VOCAB = 64


@attrs.frozen(kw_only=True)
class Config:
    """Four small layers that learn to count."""

    out: fk.Location = key(Path("runs/pipeline"), "Run directory; an existing run is resumed.")
    seed: int = key(0, "Seed of weights and data.", at_least=0)
    steps: int = key(60, "Optimizer steps of the whole run.", at_least=0)
    micro_batches: int = key(8, "Micro-batches; more make the bubble smaller.", at_least=1)
    batch_size: int = key(2, "Rows per rank and micro-batch.", at_least=1)
    seq_len: int = key(32, "Positions in a row.", at_least=1)
    layers: int = key(4, "Layers, split into stages.", at_least=1)
    lr: float = key(1e-2, "Highest learning rate; it falls linearly to 0.", at_least=0)
    log_every: int = key(20, "Steps between rows of metrics.", at_least=1)
    pipeline_schedule: fk.PipelineSchedule = key("1f1b", "Pipeline schedule.")
    mesh: fk.MeshSpec = fk.MeshSpec(dp_shard=1, pp=-1)


def micro_batches(config, mesh, seed, samples):
    """Counting sequences without end, others on each data-parallel rank, from a sample on."""
    rank, world = fk.data_ranks(mesh)
    for number in count(samples // config.batch_size + rank, world):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        start = torch.randint(VOCAB, (config.batch_size, 1), generator=generator)
        tokens = (start + torch.arange(config.seq_len + 1)) % VOCAB
        rows = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        yield TensorDict(rows, [config.batch_size])


def loss_fn(model, batch):
    """The model is called once: the call is recorded here and made by the stages."""
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


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
    optimizer = fk.muon(model, momentum=0.85, rest_lr_scale=4.0)
    state = fk.TrainState.create(model, optimizer, mesh=mesh, seed=config.seed)
    state = fk.checkpoint_load(state, config.out / "checkpoints")

    schedule = fk.warmup_linear(config.lr, warmup=10, total=config.steps)
    stop = fk.StopSignal()
    step = fk.make_step(loss_fn, schedule=schedule, stop=stop)
    loader = micro_batches(config, mesh, state.seed, state.samples)
    return fk.Setup(state=state, step=step, loader=loader, loss_fn=loss_fn, stop=stop)


def train(config, run):
    """Say what each rank holds, then step and log; stop cleanly on request."""
    built = setup(config)
    state, step, loader, stop = built.state, built.step, built.loader, built.stop
    held = [name for name, _ in state.model.named_parameters()]
    print(f"rank {fk.process_rank()} holds {len(held)} parameters: {held[0]} .. {held[-1]}")
    groups = fk.groups(loader, config.micro_batches)  # a schedule must know how many
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
