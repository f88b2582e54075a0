"""Pretrain a language model on token files, in any layout; resumes automatically.

forgekit prepare stdlib --out data/stdlib && python pretrain.py
torchrun --nproc-per-node 8 pretrain.py mesh.tp=2 mesh.cp=2 model.dim=1024 precision=bf16
"""

from functools import partial
from pathlib import Path
from typing import Literal

import attrs
import torch

import forgekit as fk
from forgekit.config import key, load_config, to_dict

SMALL = fk.TransformerSpec(
    vocab_size=4096, dim=192, layers=4, heads=4, kv_heads=2, ffn_dim=512, max_seq_len=256, tied=True
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
    """A small model that learns on two CPU cores."""

    out: fk.Location = key(Path("runs/pretrain"), "Run directory; an existing run is resumed.")
    seed: int = key(0, "Seed of weights, data order and dropout.", at_least=0)
    steps: int = key(400, "Optimizer steps of the whole run.", at_least=0)
    global_batch_size: int = key(8, "Rows per optimizer step, over all ranks.", at_least=1)
    batch_size: int | None = key(None, "Rows of a rank's micro-batch; none: up to 8.", at_least=1)
    log_every: int = key(10, "Steps between rows of metrics.", at_least=1)
    eval_every: int = key(200, "Steps between evaluations; 0: only at the end.", at_least=0)
    save_every: int = key(100, "Steps between checkpoints; 0: only at the end.", at_least=0)
    keep: int = key(3, "Checkpoints to keep.", at_least=1)
    precision: fk.Precision = key("fp32", "fp32, or bf16 with float32 masters.")
    compile: bool = key(False, "Whether each block is compiled.")
    activation_checkpoint: fk.ActivationCheckpoint = key("none", "What backward recomputes.")
    pipeline_schedule: fk.PipelineSchedule = key("1f1b", "Schedule where mesh.pp > 1.")
    context_parallel: fk.ContextParallel = key("ring", "How ranks of mesh.cp share a sequence.")
    attention: fk.AttentionChoice = key("auto", "The kernel; auto: the device's best.")
    max_norm: float = key(1.0, "Bound of the gradient norm; inf: none.", at_least=0, inf=True)
    spikes: float | None = key(None, "Deviations above recent steps that make one bad.", at_least=0)
    bad_steps: fk.BadSteps = key("raise", "What to do after bad steps: spikes, or not finite.")
    patience: int = key(1, "Bad steps at which bad_steps acts.", at_least=1)
    device: str | None = key(None, "Default: an accelerator if there is one.")
    trackers: tuple[str, ...] = key((), "Beside metrics.jsonl: tensorboard, wandb.")
    prompt: str = key("def ", "Prompt of the sample at the end.", at_least=1)
    phases: tuple[fk.data.SizePhase, ...] = key((), "Changes of sizes and rate at samples.")
    data: Data = Data()
    mesh: fk.MeshSpec = fk.MeshSpec()
    optim: Optim = Optim()
    model: fk.TransformerSpec = SMALL


def loss_fn(model, batch):
    """Cross-entropy that never holds all logits; documents are separate by their ids."""
    position_ids, doc_ids = batch.get("position_ids"), batch.get("doc_ids")
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    return model(batch["input_ids"], position_ids=position_ids, doc_ids=doc_ids, head=head)


def setup(config):
    """Build state, step and data, without taking a step."""
    mesh = fk.build_mesh(config.mesh, device=config.device)
    sizes = fk.data.make_sizes(config.global_batch_size, config.data.seq_len, config.phases)
    rows = fk.token_dataset(config.data.path, config.data.seq_len, doc_ids=config.data.doc_ids)
    data = fk.data.vary_length(rows, sizes, config.seed)
    fk.check_vocabulary(data, config.model.tokens)
    with torch.device("meta"):
        model = fk.Transformer(config.model)
    model = fk.parallelize(
        model,
        mesh,
        precision=config.precision,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        pipeline_schedule=config.pipeline_schedule,
        context_parallel=config.context_parallel,
        attention=config.attention,
        seed=config.seed,
    )
    build_optimizer, lr = OPTIMIZERS[config.optim.name]
    optimizer = build_optimizer(model, weight_decay=config.optim.weight_decay)
    state = fk.TrainState.create(model, optimizer, mesh=mesh, seed=config.seed)
    state = fk.checkpoint_load(state, config.out / "checkpoints", fingerprint=data.fingerprint_at)
    lr = lr if config.optim.lr is None else config.optim.lr
    warmup, total = config.optim.warmup, round(sizes.progress(sizes.samples(config.steps)))
    rate = fk.with_phases(fk.warmup_linear(lr, warmup=warmup, total=total), config.phases, sizes)
    limit, stop = None if config.spikes is None else fk.SpikeLimit(config.spikes), fk.StopSignal()
    step = fk.make_step(loss_fn, schedule=rate, max_norm=config.max_norm, spikes=limit, stop=stop)
    batch_size = config.batch_size or fk.fitting_batch_size(config.global_batch_size, mesh)
    loader = fk.train_loader(state, data, batch_size, sizes=sizes, workers=config.data.workers)
    dev = fk.held_out_loader(state, rows.held_out(), batch_size)
    return fk.Setup(state=state, step=step, loader=loader, loss_fn=loss_fn, stop=stop, held_out=dev)


def train(config, run):
    """Evaluate, step, log, save; stop cleanly on request."""
    built = setup(config)
    state, step, loader, stop = built.state, built.step, built.loader, built.stop
    held_out, health = built.held_out, fk.Health(run.out, state.mesh, loader=loader)
    log = run.start(built, every=config.log_every, total=config.steps, keep=config.keep)
    must_roll_back = fk.bad_step_policy(config.bad_steps, patience=config.patience)
    with log, loader, stop, health:
        for batches in fk.groups(loader):
            if held_out and fk.every(config.eval_every, state, last=config.steps):
                log.event(state, fk.evaluate(state, held_out, loss_fn, name="heldout", stop=stop))
            if run.is_over(state):  # after the evaluation, which is repeated if a stop cut it short
                break
            state, metrics = step(state, batches)
            if must_roll_back(log(state, metrics)):
                state = run.roll_back(state)
            log.event(state, health(state), show=False)
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
