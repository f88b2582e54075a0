"""Pretrain a language model on token files, in any layout; resumes by itself.

forgekit prepare stdlib --out data/stdlib
python pretrain.py
torchrun --nproc-per-node 8 pretrain.py mesh.tp=2 mesh.cp=2 model.dim=1024 precision=bf16
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

import forgekit as fk
from forgekit.config import key, load_config, to_dict


@attrs.frozen(kw_only=True)
class Data:
    """What to train on."""

    path: Path = key(Path("data/stdlib"), "A token file, as `forgekit prepare` makes.")
    seq_len: int = key(256, "Places in a row.", at_least=1)
    workers: int = key(2, "Threads that read ahead.", at_least=0)
    doc_ids: bool = key(False, "Whether attention stays inside documents.")


@attrs.frozen(kw_only=True)
class Optim:
    """AdamW; its learning rate warms up, then falls along a cosine to a tenth."""

    lr: float = key(3e-3, "Highest learning rate.", at_least=0)
    weight_decay: float = key(0.1, "Decay of the matrices, per unit of rate.", at_least=0)
    warmup: int = key(20, "Steps until the highest rate.", at_least=0)


@attrs.frozen(kw_only=True)
class Config:
    """A small model that learns on two CPU cores."""

    out: Path = key(Path("runs/pretrain"), "Run directory; a run that is there goes on.")
    seed: int = key(0, "Seed of weights, data order and dropout.")
    steps: int = key(400, "Optimizer steps of the whole run.", at_least=0)
    global_batch_size: int = key(8, "Rows per optimizer step, over all ranks.", at_least=1)
    batch_size: int = key(8, "Rows per rank and micro-batch.", at_least=1)
    log_every: int = key(10, "Steps between two rows of metrics.", at_least=1)
    eval_every: int = key(200, "Steps between evaluations; 0: only at the end.", at_least=0)
    save_every: int = key(100, "Steps between checkpoints; 0: only at the end.", at_least=0)
    keep: int = key(3, "Checkpoints to keep.", at_least=1)
    precision: fk.Precision = key("fp32", "fp32, or bf16 with float32 masters.")
    compile: bool = key(False, "Whether each block is compiled.")
    activation_checkpoint: fk.ActivationCheckpoint = key("none", "What backward recomputes.")
    pipeline_schedule: fk.PipelineSchedule = key("1f1b", "Order of work where mesh.pp is above 1.")
    context_parallel: fk.ContextParallel = key("ring", "How ranks of mesh.cp share a sequence.")
    max_norm: float = key(1.0, "Upper bound of the gradient norm; inf does not clip.")
    spikes: float | None = key(None, "Deviations above recent steps that make a step bad.")
    bad_steps: fk.BadSteps = key("raise", "What bad steps mean: a spike, or what is not finite.")
    patience: int = key(1, "Bad steps at which bad_steps acts.", at_least=1)
    device: Literal["cpu", "cuda"] | None = key(None, "none takes an accelerator if there is one.")
    prompt: str = key("def ", "What the sample at the end continues.", at_least=1)
    data: Data = Data()
    mesh: fk.MeshSpec = fk.MeshSpec()
    optim: Optim = Optim()
    model: fk.TransformerSpec = fk.TransformerSpec(
        vocab_size=4096,
        dim=192,
        layers=4,
        heads=4,
        kv_heads=2,
        ffn_dim=512,
        max_seq_len=256,
        tied=True,
    )


def loss_fn(model, batch):
    """Cross-entropy that never holds all logits; documents stay apart where the batch says so."""
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    where = {key: batch[key] for key in ("position_ids", "doc_ids") if key in batch}
    return model(batch["input_ids"], **where, head=head)


@attrs.frozen(kw_only=True)
class Setup:
    """What a run works with; `forgekit verify` and `forgekit replay` read it too."""

    state: fk.TrainState
    step: Callable[..., Any]
    loader: Any
    loss_fn: Callable[..., fk.Loss]
    held_out: Any
    stop: fk.StopSignal


def setup(config):
    """Build the state, the step and the data; no step is taken."""
    mesh = fk.build_mesh(config.mesh, device=config.device)
    dataset = fk.token_dataset(config.data.path, config.data.seq_len, doc_ids=config.data.doc_ids)
    fk.check_vocabulary(dataset, config.model.vocab_size)
    with torch.device("meta"):
        model = fk.Transformer(config.model)
    names = "precision activation_checkpoint compile pipeline_schedule context_parallel seed"
    options = {name: getattr(config, name) for name in names.split()}
    model = fk.parallelize(model, mesh, **options)
    optimizer = fk.adamw(model, weight_decay=config.optim.weight_decay)
    state = fk.TrainState.create(model, optimizer, mesh=mesh, seed=config.seed)
    state = fk.checkpoint_load(state, config.out / "checkpoints", fingerprint=dataset.fingerprint)

    lr, warmup = config.optim.lr, config.optim.warmup
    schedule = fk.warmup_cosine(lr, warmup=warmup, total=config.steps, final=lr / 10)
    stop = fk.StopSignal()
    spikes = None if config.spikes is None else fk.SpikeLimit(config.spikes)
    limits = {"max_norm": config.max_norm, "spikes": spikes}
    step = fk.make_step(loss_fn, schedule=schedule, stop=stop, **limits)
    rank, world = fk.data_ranks(mesh)
    where = {"rank": rank, "world": world, "device": mesh.device_type}
    load = partial(fk.make_loader, batch_size=config.batch_size, **where)
    place = {"seed": state.seed, "start": state.samples, "skip": state.skips}
    loader = load(dataset, **place, workers=config.data.workers)
    held = dataset.held_out()
    held_out = load(held, shuffle=False, epochs=1) if held else None
    data = {"loader": loader, "held_out": held_out}
    return Setup(state=state, step=step, loss_fn=loss_fn, stop=stop, **data)


def main():
    """Train, evaluate, save; stop cleanly when asked to."""
    config = load_config(Config)
    with fk.open_run(config.out, to_dict(config)) as run:
        built = setup(config)
        state, step, stop = built.state, built.step, built.stop
        loader, held_out = built.loader, built.held_out
        groups = fk.groups(loader, loader.micro_batches(config.global_batch_size))
        save = partial(fk.checkpoint_save, keep=config.keep, fingerprint=loader.dataset.fingerprint)
        evaluate = partial(fk.evaluate, loss_fn=loss_fn, name="heldout", stop=stop)
        check = fk.bad_step_policy(config.bad_steps, patience=config.patience)
        log = run.start(state, every=config.log_every, total=config.steps, loader=loader)
        health = fk.Health(run.out, state.mesh, loader=loader)
        with log, loader, stop, health:
            saved = state.step
            while state.step < config.steps:
                if held_out and state.step and fk.every(config.eval_every, state):
                    log.event(state, evaluate(state, held_out))  # cut short: when it is resumed
                if stop.requested:
                    break
                state, metrics = step(state, next(groups))
                if check(log(state, metrics)):
                    state = run.roll_back(state, save)
                log.event(state, health(state) or {}, show=False)
                if fk.every(config.save_every, state):
                    save(state, run.checkpoints)
                    saved = state.step
            if saved != state.step:
                save(state, run.checkpoints)
            is_done = state.step >= config.steps
            if held_out and is_done:
                log.event(state, evaluate(state, held_out))
            is_done = is_done and not stop.requested
            run.end(state, stopped=None if is_done else stop.reason)
            if is_done:
                log.message(fk.wrap_up(state, run.out, config.data.path, prompt=config.prompt))


if __name__ == "__main__":
    main()
