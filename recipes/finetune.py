"""Fine-tune published weights on conversations, whole or through adapters; resumes automatically.

Lines: {"messages": [...]}, or {"prompt": ..., "completion": ...}.
python finetune.py base=path/to/model data.path=chats.jsonl lora.rank=16 export=tuned
torchrun --nproc-per-node 8 finetune.py base=path/to/model data.path=chats.jsonl precision=bf16
"""

from functools import partial
from pathlib import Path
from typing import Literal

import attrs
import torch

import forgekit as fk
from forgekit.config import key, load_config, to_dict
from forgekit.huggingface import check_new_directory, export_tuned, read_base


@attrs.frozen(kw_only=True)
class Data:
    """Conversations, or prompts and completions."""

    path: fk.Location = key(Path("recipes/examples/chats.jsonl"), "A file of lines or rows.")
    held_out_every: int = key(20, "Every n-th line is held out.", at_least=2)
    long: Literal["error", "truncate", "drop"] = key("error", "What to do with longer examples.")
    train_on: Literal["all", "last"] = key("all", "All of the assistant's turns, or the last.")
    template: dict[str, bool | int | float | str] = key({}, "Options of the chat template.")


@attrs.frozen(kw_only=True)
class Lora:
    """Adapters; the base is frozen."""

    rank: int = key(0, "Rank of the adapters; 0: all weights are trained.", at_least=0)
    alpha: float = key(32.0, "The scale is alpha / rank.", at_least=0)
    targets: tuple[str, ...] = key(("*.query", "*.value"), "Patterns of names of matrices.")
    dropout: float = key(0.0, "Dropout of an adapter's input.", at_least=0)
    dora: bool = key(False, "DoRA: row magnitudes are trained separately.")
    rslora: bool = key(False, "The scale is alpha / sqrt(rank).")
    base: Literal["nf4"] | None = key(None, "nf4: adapted matrices of the base in four bits.")


@attrs.frozen(kw_only=True)
class Optim:
    """AdamW with warm-up and cosine decay of the learning rate to a tenth."""

    lr: float = key(2e-5, "Highest learning rate; ten times as much for adapters.", at_least=0)
    weight_decay: float = key(0.0, "Decay of the matrices, per unit of rate.", at_least=0)
    warmup: int = key(10, "Steps until the highest rate.", at_least=0)


@attrs.frozen(kw_only=True)
class Config:
    """A few passes over a small set of conversations."""

    base: Path = key(Path("runs/tiny_llama"), "A Hugging Face directory, with its tokenizer.")
    new_tokens: tuple[str, ...] = key((), 'Added to the tokenizer, such as ["<tool>"].')
    out: fk.Location = key(Path("runs/finetune"), "Run directory; an existing run is resumed.")
    export: Path | None = key(None, "A new directory for the tuned model, written at the end.")
    seed: int = key(0, "Seed of data order and dropout.", at_least=0)
    steps: int = key(100, "Optimizer steps of the whole run.", at_least=0)
    global_batch_size: int = key(8, "Rows per optimizer step, over all ranks.", at_least=1)
    batch_size: int | None = key(None, "Rows of a rank's micro-batch; none: up to 8.", at_least=1)
    seq_len: int = key(256, "Positions in a row; examples are packed.", at_least=1)
    log_every: int = key(10, "Steps between rows of metrics.", at_least=1)
    eval_every: int = key(50, "Steps between evaluations; 0: only at the end.", at_least=0)
    save_every: int = key(50, "Steps between checkpoints; 0: only at the end.", at_least=0)
    precision: fk.Precision = key("fp32", "fp32, or bf16 with float32 masters.")
    activation_checkpoint: fk.ActivationCheckpoint = key("none", "What backward recomputes.")
    device: str | None = key(None, "Default: an accelerator if there is one.")
    data: Data = Data()
    lora: Lora = Lora()
    mesh: fk.MeshSpec = fk.MeshSpec()
    optim: Optim = Optim()


def loss_fn(model, batch):
    """Cross-entropy of the assistant's tokens; conversations in a row are separate."""
    return model(
        batch["input_ids"],
        position_ids=batch["position_ids"],
        doc_ids=batch["doc_ids"],
        head=partial(fk.linear_cross_entropy, labels=batch["labels"]),
    )


def setup(config):
    """Build state, step and data, without taking a step."""
    mesh, stop = fk.build_mesh(config.mesh, device=config.device), fk.StopSignal()
    data, lora, lr = config.data, config.lora, config.optim.lr
    tokenizer, spec = read_base(config.base, config.new_tokens, has_adapters=lora.rank > 0)
    read = partial(fk.data.chat_dataset, train_on=data.train_on, template=data.template)
    every = data.held_out_every
    dataset = read(data.path, tokenizer, config.seq_len, long=data.long, held_out_every=every)
    fk.check_vocabulary(dataset, spec.tokens)
    with torch.device("meta"):
        model = fk.Transformer(spec)
    if lora.rank or lora.base:
        add = partial(fk.add_lora, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
        add(model, dropout=lora.dropout, dora=lora.dora, rslora=lora.rslora, base=lora.base)
    precision, recompute = config.precision, config.activation_checkpoint
    model = fk.parallelize(model, mesh, precision=precision, activation_checkpoint=recompute)
    fk.load_huggingface(model, config.base)
    optimizer = fk.adamw(model, weight_decay=config.optim.weight_decay)
    state = fk.TrainState.create(model, optimizer, mesh=mesh, seed=config.seed)
    state = fk.checkpoint_load(state, config.out / "checkpoints", fingerprint=dataset.fingerprint)
    schedule = fk.warmup_cosine(lr, warmup=config.optim.warmup, total=config.steps, final=lr / 10)
    step = fk.make_step(loss_fn, schedule=schedule, max_norm=1.0, stop=stop)
    batch_size = config.batch_size or fk.fitting_batch_size(config.global_batch_size, mesh)
    loader = fk.train_loader(state, dataset, batch_size)
    dev = fk.held_out_loader(state, dataset.held_out(), batch_size)
    return fk.Setup(state=state, step=step, loader=loader, loss_fn=loss_fn, stop=stop, held_out=dev)


def train(config, run):
    """Evaluate, step, log, save, export; stop cleanly on request."""
    check_new_directory(export=config.export)
    built, check = setup(config), fk.bad_step_policy("raise")
    state, step, loader, stop = built.state, built.step, built.loader, built.stop
    groups = fk.groups(loader, loader.micro_batches(config.global_batch_size))
    log = run.start(built, every=config.log_every, total=config.steps)
    with log, loader, stop:
        log.message(f"{config.data.path}: {loader.dataset.counts}")
        for batches in groups:
            if built.held_out and fk.every(config.eval_every, state, last=config.steps):
                found = fk.evaluate(state, built.held_out, loss_fn, name="heldout", stop=stop)
                log.event(state, found)
            if run.is_over(state):  # after the evaluation, which is repeated if a stop cut it short
                break
            state, metrics = step(state, batches)
            check(log(state, metrics))
            if fk.every(config.save_every, state):
                run.save(state)
        run.save(state)
        if config.export and not stop.requested:
            export, base, new = config.export, config.base, config.new_tokens
            log.message(export_tuned(state, run.out, export, base=base, new_tokens=new))
        run.end(state)


def main():
    """Hold the run directory while training, and write how the run ended."""
    config = load_config(Config)
    with fk.open_run(config.out, to_dict(config)) as run:
        train(config, run)


if __name__ == "__main__":
    main()
