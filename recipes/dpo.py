"""Train a model to prefer one answer to another (DPO), against a frozen reference; resumes.

Lines of the data are {"prompt": ..., "chosen": ..., "rejected": ...}. With r = log(p / p_reference)
of an answer's n scored tokens and m = beta * (r_chosen - r_rejected), a step trains the mean of
    sigmoid   -log(sigmoid(m))
    hinge     max(0, 1 - m)
    ipo       (r_chosen / n_chosen - r_rejected / n_rejected - 1 / (2 * beta))^2

python dpo.py base=path/to/model data.path=preferences.jsonl export=preferred
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

import forgekit as fk
from forgekit.config import key, load_config, to_dict
from forgekit.huggingface import check_new_directory, export_tuned


@attrs.frozen(kw_only=True)
class Data:
    """Pairs of answers; both of a pair are in one row."""

    path: fk.Location = key(Path("recipes/examples/preferences.jsonl"), "A file of lines or rows.")
    held_out_every: int = key(10, "Every n-th pair is held out.", at_least=2)
    long: Literal["error", "drop"] = key("error", "What to do with longer pairs.")
    template: dict[str, bool | int | float | str] = key({}, "Options of the chat template.")


@attrs.frozen(kw_only=True)
class Lora:
    """Adapters; the base is frozen."""

    rank: int = key(16, "Rank of the adapters; 0, with reference=model: all is trained.")
    alpha: float = key(32.0, "The scale is alpha / rank.", at_least=0)
    targets: tuple[str, ...] = key(("*.query", "*.value"), "Patterns of names of matrices.")
    dora: bool = key(False, "DoRA: row magnitudes are trained separately.")
    rslora: bool = key(False, "The scale is alpha / sqrt(rank).")


@attrs.frozen(kw_only=True)
class Config:
    """A few passes over a small set of pairs."""

    base: Path = key(Path("runs/tuned"), "A Hugging Face directory, with its tokenizer.")
    out: fk.Location = key(Path("runs/dpo"), "Run directory; an existing run is resumed.")
    export: Path | None = key(None, "A new directory for the tuned model, written at the end.")
    reference: Literal["adapter", "model"] = key("adapter", "adapters off, or a frozen copy.")
    kind: Literal["sigmoid", "hinge", "ipo"] = key("sigmoid", "The loss of a pair; see above.")
    beta: float = key(0.1, "Scale of the log-ratios.", at_least=0)
    seed: int = key(0, "Seed of the data order.", at_least=0)
    steps: int = key(50, "Optimizer steps of the whole run.", at_least=0)
    global_batch_size: int = key(8, "Rows per optimizer step, over all ranks.", at_least=1)
    batch_size: int | None = key(None, "Rows of a rank's micro-batch; none: up to 8.", at_least=1)
    seq_len: int = key(256, "Positions in a row; pairs are packed.", at_least=1)
    log_every: int = key(10, "Steps between rows of metrics.", at_least=1)
    eval_every: int = key(25, "Steps between evaluations; 0: only at the end.", at_least=0)
    save_every: int = key(25, "Steps between checkpoints; 0: only at the end.", at_least=0)
    lr: float = key(5e-5, "Highest learning rate; it falls along a cosine.", at_least=0)
    warmup: int = key(10, "Steps until the highest rate.", at_least=0)
    precision: fk.Precision = key("fp32", "fp32, or bf16 with float32 masters.")
    device: str | None = key(None, "Default: an accelerator if there is one.")
    data: Data = Data()
    lora: Lora = Lora()
    mesh: fk.MeshSpec = fk.MeshSpec()


@attrs.frozen(kw_only=True, slots=True, eq=False)
class State(fk.TrainState):
    """A state with the frozen reference, which is the base and so not in checkpoints."""

    reference: Any = attrs.field(default=None, repr=False, metadata={"checkpoint": False})


def load(config, spec, mesh, has_adapters):
    """Load the base, with adapters that add zero."""
    with torch.device("meta"):
        model, lora = fk.Transformer(spec), config.lora
    if has_adapters:
        add = partial(fk.add_lora, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
        add(model, dora=lora.dora, rslora=lora.rslora)
    model = fk.parallelize(model, mesh, precision=config.precision)
    fk.load_huggingface(model, config.base)
    return model


def loss_fn(model, batch, config, reference):
    """Compute the preference loss, counted in pairs."""
    return fk.dpo_loss(model, batch, reference=reference, kind=config.kind, beta=config.beta)


def setup(config):
    """Build state, step and data, without taking a step."""
    mesh, data = fk.build_mesh(config.mesh, device=config.device), config.data
    spec, is_copy = fk.huggingface_spec(config.base), config.reference == "model"
    read = partial(fk.data.preference_dataset, template=data.template, long=data.long)
    dataset = read(data.path, config.base, config.seq_len, held_out_every=data.held_out_every)
    fk.check_vocabulary(dataset, spec.tokens)
    reference = load(config, spec, mesh, False).requires_grad_(False) if is_copy else None
    model = load(config, spec, mesh, config.lora.rank > 0)
    fk.check_dpo(model, reference=reference)
    optimizer = fk.adamw(model, weight_decay=0.0)
    state = State.create(model, optimizer, mesh=mesh, seed=config.seed, reference=reference)
    state = fk.checkpoint_load(state, config.out / "checkpoints", fingerprint=dataset.fingerprint)
    schedule = fk.warmup_cosine(config.lr, warmup=config.warmup, total=config.steps)
    stop, loss = fk.StopSignal(), partial(loss_fn, config=config, reference=reference)
    step = fk.make_step(loss, schedule=schedule, max_norm=1.0, stop=stop)
    batch_size = config.batch_size or fk.fitting_batch_size(config.global_batch_size, mesh)
    loader = fk.train_loader(state, dataset, batch_size)
    held = fk.held_out_loader(state, dataset.held_out(), batch_size)
    return fk.Setup(state=state, step=step, loader=loader, loss_fn=loss, stop=stop, held_out=held)


def train(config, run):
    """Evaluate, step, log, save, export; stop cleanly on request."""
    check_new_directory(export=config.export)
    built, check = setup(config), fk.bad_step_policy("raise")
    state, step, loader, stop = built.state, built.step, built.loader, built.stop
    groups = fk.groups(loader, loader.micro_batches(config.global_batch_size))
    log = run.start(built, every=config.log_every, total=config.steps)
    with log, loader, stop:
        for batches in groups:
            if built.held_out and fk.every(config.eval_every, state, last=config.steps):
                found = fk.evaluate(state, built.held_out, built.loss_fn, name="heldout", stop=stop)
                log.event(state, found)
            if run.is_over(state):  # after the evaluation, which is repeated if a stop cut it short
                break
            state, metrics = step(state, batches)
            check(log(state, metrics))
            if fk.every(config.save_every, state):
                run.save(state)
        run.save(state)
        if config.export and not stop.requested:
            log.message(export_tuned(state, run.out, config.export, base=config.base))
        run.end(state)


def main():
    """Hold the run directory while training, and write how the run ended."""
    config = load_config(Config)
    with fk.open_run(config.out, to_dict(config)) as run:
        train(config, run)


if __name__ == "__main__":
    main()
