"""Train a model of transformers as it is, from its directory to another, in any layout.

python foreign.py base=DIRECTORY data.path=TOKENS export=TUNED
torchrun --nproc-per-node 8 foreign.py base=DIRECTORY data.path=TOKENS mesh.tp=2
"""

from functools import partial
from pathlib import Path
from typing import Any

import attrs

import forgekit as fk
from forgekit.config import key, load_config, to_dict


@attrs.frozen(kw_only=True)
class Data:
    """What to train on, in tokens of the model's own tokenizer."""

    path: fk.Location = key(Path("data/tokens"), "A token file.")
    seq_len: int = key(256, "Positions in a row.", at_least=1)


@attrs.frozen(kw_only=True)
class Config:
    """AdamW on all weights."""

    base: Path = key(Path("base"), "A directory with config.json and safetensors.")
    export: Path | None = key(None, "Where the result is written for transformers.")
    out: fk.Location = key(Path("runs/foreign"), "Run directory; an existing run is resumed.")
    steps: int = key(100, "Optimizer steps of the whole run.", at_least=0)
    global_batch_size: int = key(8, "Rows per optimizer step, over all ranks.", at_least=1)
    batch_size: int | None = key(None, "Rows of a rank's micro-batch; none: up to 4.", at_least=1)
    lr: float = key(2e-5, "Highest learning rate.", at_least=0)
    log_every: int = key(10, "Steps between rows of metrics.", at_least=1)
    save_every: int = key(100, "Steps between checkpoints; 0: at the end.", at_least=0)
    precision: fk.Precision = key("fp32", "fp32, or bf16 with float32 masters.")
    head: str | None = key("lm_head", "The projection to logits; none: the loss takes logits.")
    activation_checkpoint: fk.ActivationCheckpoint = key("none", "What backward recomputes.")
    data: Data = Data()
    mesh: fk.MeshSpec = fk.MeshSpec()


def loss_of_logits(model, batch):
    """For a model that scales or caps its logits; beside tp each rank holds all of them."""
    return fk.cross_entropy(model(batch["input_ids"]).logits, batch["labels"])


def loss_fn(model, batch):
    """Linear cross-entropy replaces the projection, so full logits never exist."""
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    return model(batch["input_ids"], head=head)


def setup(config):
    """Build the model on meta, shard it by its own plan, and read each rank's shards."""
    mesh = fk.build_mesh(config.mesh)
    model: Any = fk.huggingface.transformers_model(config.base, use_cache=False)
    vocab_size = model.config.vocab_size
    model = fk.parallelize(
        model,
        mesh,
        precision=config.precision,
        activation_checkpoint=config.activation_checkpoint,
        head=config.head,
    )
    fk.load_huggingface(model, config.base)
    dataset = fk.token_dataset(config.data.path, config.data.seq_len)
    fk.check_vocabulary(dataset, vocab_size)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    state = fk.checkpoint_load(state, config.out / "checkpoints", fingerprint=dataset.fingerprint)

    schedule = fk.warmup_cosine(config.lr, warmup=10, total=config.steps)
    stop = fk.StopSignal()
    loss = loss_of_logits if config.head is None else loss_fn
    step = fk.make_step(loss, schedule=schedule, max_norm=1.0, stop=stop)
    batch_size = config.batch_size or fk.fitting_batch_size(config.global_batch_size, mesh, 4)
    loader = fk.train_loader(state, dataset, batch_size)
    return fk.Setup(state=state, step=step, loader=loader, loss_fn=loss, stop=stop)


def train(config, run):
    """Step, log, save; write the result for transformers."""
    fk.huggingface.check_new_directory(export=config.export)
    built = setup(config)
    state, step, loader, stop = built.state, built.step, built.loader, built.stop
    groups = fk.groups(loader, loader.micro_batches(config.global_batch_size))
    log = run.start(built, every=config.log_every, total=config.steps)
    check = fk.bad_step_policy("raise")
    with log, loader, stop:
        for batches in groups:
            if run.is_over(state):
                break
            state, metrics = step(state, batches)
            check(log(state, metrics))
            if fk.every(config.save_every, state):
                run.save(state)
        run.save(state)
        if config.export and not stop.requested:
            log.message(
                fk.huggingface.export_tuned(state, run.out, config.export, base=config.base)
            )
        run.end(state)


def main():
    """Hold the run directory while training, and write how the run ended."""
    config = load_config(Config)
    with fk.open_run(config.out, to_dict(config)) as run:
        train(config, run)


if __name__ == "__main__":
    main()
