"""Train a mixture of experts on token files, in any layout, and see how its experts are loaded.

forgekit prepare stdlib --out data/stdlib && python moe.py
torchrun --nproc-per-node 8 moe.py mesh.ep=4 model.moe.experts=64 precision=bf16
"""

from functools import partial
from pathlib import Path
from typing import Literal

import attrs
import torch

import forgekit as fk
from forgekit.config import key, load_config, to_dict

EXPERTS = fk.MoESpec(experts=16, top_k=2, ffn_dim=192, shared=0, z_loss=1e-3, bias_rate=1e-3)
SMALL = fk.TransformerSpec(
    vocab_size=4096,
    dim=128,
    layers=4,
    heads=4,
    kv_heads=2,
    ffn_dim=384,
    max_seq_len=256,
    tied=True,
    moe=EXPERTS,
)
MUON = partial(fk.muon, momentum=0.85, betas=(0.8, 0.95), rest_lr_scale=4.0)
OPTIMIZERS = {"muon": (MUON, 1e-2), "adamw": (fk.adamw, 3e-3)}


@attrs.frozen(kw_only=True)
class Data:
    """What to train on."""

    path: fk.Location = key(Path("data/stdlib"), "A token file, as `forgekit prepare` makes.")
    seq_len: int = key(256, "Positions in a row.", at_least=1)
    workers: int = key(2, "Threads that read ahead.", at_least=0)
    doc_ids: bool = key(False, "Whether attention stays inside documents.")


@attrs.frozen(kw_only=True)
class Optim:
    """Muon for matrices and AdamW for all else, or AdamW alone; the rate falls linearly to 0."""

    name: Literal["muon", "adamw"] = key("muon", "The optimizer.")
    lr: float | None = key(None, "Highest learning rate; none: the optimizer's.", at_least=0)
    weight_decay: float = key(0.1, "Decay of the matrices, per unit of rate.", at_least=0)
    warmup: int = key(20, "Steps until the highest rate.", at_least=0)


@attrs.frozen(kw_only=True)
class Config:
    """Each token goes to two of sixteen small feed-forwards; biases keep these evenly busy."""

    out: fk.Location = key(Path("runs/moe"), "Run directory; an existing run is resumed.")
    seed: int = key(0, "Seed of weights, data order and dropout.", at_least=0)
    steps: int = key(400, "Optimizer steps of the whole run.", at_least=0)
    global_batch_size: int = key(8, "Rows per optimizer step, over all ranks.", at_least=1)
    batch_size: int | None = key(None, "Rows of a rank's micro-batch; none: up to 8.", at_least=1)
    log_every: int = key(10, "Steps between rows of metrics.", at_least=1)
    loads_every: int = key(10, "Steps between rows for each expert; 0: none.", at_least=0)
    eval_every: int = key(200, "Steps between evaluations; 0: only at the end.", at_least=0)
    save_every: int = key(100, "Steps between checkpoints; 0: only at the end.", at_least=0)
    precision: fk.Precision = key("fp32", "fp32, or bf16 with float32 masters.")
    compile: bool = key(False, "Whether each block is compiled.")
    activation_checkpoint: fk.ActivationCheckpoint = key("none", "What backward recomputes.")
    pipeline_schedule: fk.PipelineSchedule = key("1f1b", "Schedule where mesh.pp > 1.")
    prompt: str = key("def ", "Prompt of the sample at the end.", at_least=1)
    data: Data = Data()
    mesh: fk.MeshSpec = fk.MeshSpec()
    optim: Optim = Optim()
    model: fk.TransformerSpec = SMALL


def loss_fn(model, batch):
    """Cross-entropy that never holds all logits; router terms are summed where it has targets."""
    return model(
        batch["input_ids"],
        position_ids=batch.get("position_ids"),
        doc_ids=batch.get("doc_ids"),
        targets=batch["labels"] != -100,
        head=partial(fk.linear_cross_entropy, labels=batch["labels"]),
    )


def setup(config):
    """Build state, step and data, without taking a step."""
    mesh = fk.build_mesh(config.mesh)
    dataset = fk.token_dataset(config.data.path, config.data.seq_len, doc_ids=config.data.doc_ids)
    fk.check_vocabulary(dataset, config.model.tokens)
    with torch.device("meta"):
        model = fk.Transformer(config.model)
    model = fk.parallelize(
        model,
        mesh,
        precision=config.precision,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        pipeline_schedule=config.pipeline_schedule,
        seed=config.seed,
    )
    build_optimizer, lr = OPTIMIZERS[config.optim.name]
    optimizer = build_optimizer(model, weight_decay=config.optim.weight_decay)
    state = fk.TrainState.create(model, optimizer, mesh=mesh, seed=config.seed)
    state = fk.checkpoint_load(state, config.out / "checkpoints", fingerprint=dataset.fingerprint)
    lr = lr if config.optim.lr is None else config.optim.lr
    schedule = fk.warmup_linear(lr, warmup=config.optim.warmup, total=config.steps)
    stop = fk.StopSignal()
    step = fk.make_step(loss_fn, schedule=schedule, stop=stop, total=config.steps)
    batch_size = config.batch_size or fk.fitting_batch_size(config.global_batch_size, mesh)
    loader = fk.train_loader(state, dataset, batch_size, workers=config.data.workers)
    dev = fk.held_out_loader(state, dataset.held_out(), batch_size)
    return fk.Setup(state=state, step=step, loader=loader, loss_fn=loss_fn, stop=stop, held_out=dev)


def train(config, run):
    """Evaluate, step, log, save; stop cleanly on request."""
    built = setup(config)
    state, step, loader, stop = built.state, built.step, built.loader, built.stop
    held_out = built.held_out
    groups = fk.groups(loader, loader.micro_batches(config.global_batch_size))
    log = run.start(built, every=config.log_every, total=config.steps)
    check = fk.bad_step_policy("raise")
    with log, loader, stop:
        for batches in groups:
            if held_out and fk.every(config.eval_every, state, last=config.steps):
                log.event(state, fk.evaluate(state, held_out, loss_fn, name="heldout", stop=stop))
            if run.is_over(state):  # after the evaluation, which is repeated if a stop cut it short
                break
            state, metrics = step(state, batches)
            check(log(state, metrics))
            if fk.every(config.loads_every, state):
                log.event(state, fk.metrics.expert_loads(state), show=False)
            if fk.every(config.save_every, state):
                run.save(state)
        if run.end(state):
            log.message(fk.wrap_up(state, run.out, config.data.path, prompt=config.prompt))


def main():
    """Hold the run directory while training, and write how the run ended."""
    config = load_config(Config)
    with fk.open_run(config.out, to_dict(config)) as run:
        train(config, run)


if __name__ == "__main__":
    main()
