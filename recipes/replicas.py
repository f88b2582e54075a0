"""Pretrain in several replica groups that may come and go; without a lighthouse, in one.

torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000 &
export TORCHFT_LIGHTHOUSE=http://$(hostname):29510
torchrun --standalone --nproc-per-node 8 replicas.py group=a out=runs/replicas/a &
torchrun --standalone --nproc-per-node 8 replicas.py group=b out=runs/replicas/b
"""

from functools import partial
from pathlib import Path

import attrs
import torch

import forgekit as fk
from forgekit.config import key, load_config, to_dict

SMALL = fk.TransformerSpec(
    vocab_size=4096, dim=192, layers=4, heads=4, kv_heads=2, ffn_dim=512, max_seq_len=256, tied=True
)
MUON = partial(fk.muon, momentum=0.85, betas=(0.8, 0.95), rest_lr_scale=4.0)
OF_A_GROUP = ("group", "lighthouse", "out", "data", "device", "log_every", "save_every", "keep")


@attrs.frozen(kw_only=True)
class Data:
    """What to train on; the same in all groups."""

    path: fk.Location = key(Path("data/stdlib"), "A token file, as `forgekit prepare` makes.")
    seq_len: int = key(256, "Positions in a row.", at_least=1)
    workers: int = key(2, "Threads that read ahead.", at_least=0)


@attrs.frozen(kw_only=True)
class Optim:
    """Muon for matrices and AdamW for all else; after a warm-up the rate falls linearly to 0."""

    lr: float = key(1e-2, "Highest learning rate.", at_least=0)
    weight_decay: float = key(0.1, "Decay of the matrices, per unit of rate.", at_least=0)
    warmup: int = key(20, "Steps until the highest rate.", at_least=0)


@attrs.frozen(kw_only=True)
class Config:
    """A small model that learns on two CPU cores."""

    group: str = key("a", "Name of this replica group; each has its own, and its own out.")
    lighthouse: str | None = key(None, "Of the lighthouse; none: TORCHFT_LIGHTHOUSE, or alone.")
    least: int = key(1, "Minimum number of groups for a step to count.", at_least=1)
    timeout_s: float = key(60.0, "Seconds a group waits for another in a step.", at_least=1)
    out: fk.Location = key(Path("runs/replicas/a"), "This group's run directory.")
    seed: int = key(0, "Seed of weights, data order and dropout.", at_least=0)
    steps: int = key(400, "Optimizer steps of the whole run.", at_least=0)
    global_batch_size: int = key(32, "Rows per optimizer step, over all groups.", at_least=1)
    batch_size: int = key(2, "Rows of a rank's micro-batch.", at_least=1)
    log_every: int = key(10, "Steps between rows of metrics.", at_least=1)
    eval_every: int = key(200, "Steps between evaluations; 0: only at the end.", at_least=0)
    save_every: int = key(100, "Steps between checkpoints; 0: only at the end.", at_least=0)
    keep: int = key(3, "Checkpoints to keep.", at_least=1)
    precision: fk.Precision = key("fp32", "fp32, or bf16 with float32 masters.")
    max_norm: float = key(1.0, "Bound of the gradient norm; inf: none.", at_least=0, inf=True)
    device: str | None = key(None, "Default: an accelerator if there is one.")
    data: Data = Data()
    mesh: fk.MeshSpec = fk.MeshSpec()
    optim: Optim = Optim()
    model: fk.TransformerSpec = SMALL


def loss_fn(model, batch):
    """Cross-entropy that never holds all logits."""
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    return model(batch["input_ids"], head=head)


def take_step(state, batches, *, replicas, schedule, max_norm, stop):
    """Take one step with the other groups; no metrics where it broke off and comes again."""
    batches = fk.steps.audited(state, batches, loss_fn)
    totals = fk.accumulate(state, batches, loss_fn)
    totals = totals.plus(stop=torch.full_like(totals["loss"], stop.vote()))
    totals = fk.sum_replicas(totals, state, replicas)
    if totals is None:
        return state, None
    totals = fk.reduce_totals(totals, state, settings={"max_norm": max_norm})
    stop.receive(totals["stop"])
    correction, lr = fk.clip(totals, max_norm=max_norm), schedule(state.step)
    state = fk.update(state, correction, lr=lr, totals=totals)
    return state, fk.step_metrics(totals, correction, lr=lr)


def setup(config):
    """Build state, step and data, without taking a step."""
    optim, stop, alone = config.optim, fk.StopSignal(), fk.OneGroup()
    mesh = fk.build_mesh(config.mesh, device=config.device)
    dataset = fk.token_dataset(config.data.path, config.data.seq_len)
    fk.check_vocabulary(dataset, config.model.tokens)
    with torch.device("meta"):
        model = fk.Transformer(config.model)
    model = fk.parallelize(model, mesh, precision=config.precision, seed=config.seed)
    optimizer = MUON(model, weight_decay=optim.weight_decay)
    state = fk.TrainState.create(model, optimizer, mesh=mesh, seed=config.seed)
    state = fk.checkpoint_load(state, config.out / "checkpoints", fingerprint=dataset.fingerprint)
    rate = fk.warmup_linear(optim.lr, warmup=optim.warmup, total=config.steps)
    step = partial(take_step, replicas=alone, schedule=rate, max_norm=config.max_norm, stop=stop)
    loader = fk.train_loader(state, dataset, config.batch_size, workers=config.data.workers)
    dev = fk.held_out_loader(state, dataset.held_out(), config.batch_size)
    return fk.Setup(state=state, step=step, loader=loader, loss_fn=loss_fn, stop=stop, held_out=dev)


def train(config, run):
    """Step, log, evaluate, save; stop cleanly, and all groups after the same step."""
    built = setup(config)
    state, loader, stop, held_out = built.state, built.loader, built.stop, built.held_out
    per_step, pp = loader.micro_batches(config.global_batch_size), config.mesh.pp
    log = run.start(built, every=config.log_every, total=config.steps, keep=config.keep)
    check = fk.bad_step_policy("raise")
    joined = fk.join_replicas(
        state,
        config.group,
        lighthouse=config.lighthouse,
        fingerprint=loader.dataset.fingerprint,
        settings={k: v for k, v in to_dict(config).items() if k not in OF_A_GROUP},
        also={"stop": stop},
        least=config.least,
        timeout_s=config.timeout_s,
    )
    with log, loader, stop, joined as replicas:
        while not run.is_over(state):
            state, part = replicas.begin(state)
            batches = loader.share(state.samples, per_step, *part, multiple=pp, skip=state.skips)
            state, metrics = built.step(state, batches, replicas=replicas)
            if metrics is None:  # its rows come again
                continue
            check(log(state, metrics))
            if held_out and fk.every(config.eval_every, state, last=config.steps):
                log.event(state, fk.evaluate(state, held_out, loss_fn, name="heldout"))
            if fk.every(config.save_every, state):
                run.save(state)
        run.end(state)


def main():
    """Hold the run directory while training, and write how the run ended."""
    config = load_config(Config)
    with fk.open_run(config.out, to_dict(config)) as run:
        train(config, run)


if __name__ == "__main__":
    main()
