"""Pretrain on several sources whose shares, and the learning rate, change along the way.

Three folders of Python's own library stand for the sources; data.sources takes any others.
Documents are packed into rows and attend to themselves only. What a step sees, and its rate,
follow from its number alone, so a run resumes exactly, also around a change.

python curriculum.py
python curriculum.py 'phases=[{step=50, weights={tables=0}, lr_scale=0.3}]'
torchrun --nproc-per-node 4 curriculum.py mesh.tp=2 precision=bf16
"""

import sysconfig
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import torch

import forgekit as fk
from forgekit.config import key, load_config, to_dict


@attrs.frozen(kw_only=True)
class Data:
    """Sources by name, and how they are mixed at first."""

    path: Path = key(Path("data/curriculum"), "Folder for the token files of the sources.")
    sources: dict[str, Path] = key(
        {"asyncio": Path("asyncio"), "mail": Path("email"), "tables": Path("encodings")},
        "Files or folders; relative ones are in the folder of Python's own library.",
    )
    weights: dict[str, float] = key({"asyncio": 1, "mail": 1, "tables": 2}, "At the start.")
    temperature: float = key(1.0, "Above 1 small weights count for more; inf makes all alike.")
    seq_len: int = key(256, "Places in a row.", at_least=1)
    workers: int = key(2, "Threads that read ahead.", at_least=0)


@attrs.frozen(kw_only=True)
class Phase:
    """A change; what it does not name is as at the start, whatever the phase before it said."""

    step: int = attrs.field(metadata={"help": "The first step that it governs, counted from 0."})
    weights: dict[str, float] = key({}, "Weights of sources.")
    lr_scale: float = key(1.0, "What the learning rate is multiplied by.")


@attrs.frozen(kw_only=True)
class Config:
    """Many tables at first, then more mail, at last no tables while the rate cools down."""

    out: Path = key(Path("runs/curriculum"), "Run directory; a run that is there goes on.")
    seed: int = key(0, "Seed of weights and data order.")
    steps: int = key(200, "Optimizer steps of the whole run.", at_least=0)
    global_batch_size: int = key(8, "Rows per optimizer step, over all ranks.", at_least=1)
    batch_size: int = key(8, "Rows per rank and micro-batch.", at_least=1)
    log_every: int = key(10, "Steps between two rows of metrics.", at_least=1)
    save_every: int = key(50, "Steps between checkpoints; 0: only at the end.", at_least=0)
    precision: fk.Precision = key("fp32", "fp32, or bf16 with float32 masters.")
    lr: float = key(3e-3, "Highest learning rate.", at_least=0)
    warmup: int = key(20, "Steps until the highest rate.", at_least=0)
    decay: int = key(50, "Steps of the cool-down at the end.", at_least=1)
    phases: tuple[Phase, ...] = key(
        (Phase(step=80, weights={"mail": 3}), Phase(step=150, weights={"tables": 0}, lr_scale=0.5)),
        "Changes along the way, by increasing step.",
    )
    data: Data = Data()
    mesh: fk.MeshSpec = fk.MeshSpec()
    model: fk.TransformerSpec = fk.TransformerSpec(
        vocab_size=2048, dim=192, layers=4, heads=4, kv_heads=2, ffn_dim=512, max_seq_len=256
    )


def loss_fn(model, batch):
    """Cross-entropy that never holds all logits; documents that share a row stay apart."""
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    where = {key: batch[key] for key in ("position_ids", "doc_ids")}
    return model(batch["input_ids"], **where, head=head)


def write_token_files(data, vocab_size):
    """Make what is not there yet: one tokenizer for all, and the token file of each source."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = {name: library / path for name, path in data.sources.items()}
    whole = fk.data.prepare(paths.values(), data.path / "all", vocab_size=vocab_size)
    for name, path in paths.items():
        fk.data.prepare(path, data.path / name, tokenizer=whole.path / "tokenizer.json")


def build_dataset(data, phases, seed):
    """Packed rows of each source, mixed."""
    files = {name: fk.data.open_tokens(data.path / name) for name in data.sources}
    pack = partial(fk.data.cached_bins, data.path / "bins", capacity=data.seq_len)
    rows = {name: fk.packed_dataset(file, pack(file)) for name, file in files.items()}
    sizes = {name: len(dataset) for name, dataset in rows.items()}
    options = {"temperature": data.temperature, "seed": seed, "phases": phases}
    return fk.mixture_dataset(rows, fk.make_order(sizes, data.weights, **options))


@attrs.frozen(kw_only=True)
class Setup:
    """What a run works with; `forgekit verify` and `forgekit replay` read it too."""

    state: fk.TrainState
    step: Callable[..., Any]
    loader: Any
    loss_fn: Callable[..., fk.Loss]
    stop: fk.StopSignal


def setup(config):
    """Build the state, the step and the data; no step is taken."""
    if fk.process_rank() == 0:  # the others wait for it in build_mesh
        write_token_files(config.data, config.model.vocab_size)
    mesh = fk.build_mesh(config.mesh)
    rows = config.global_batch_size
    phases = [fk.Phase(p.step * rows, p.weights, p.lr_scale) for p in config.phases]
    dataset = build_dataset(config.data, phases, config.seed)
    with torch.device("meta"):
        model = fk.Transformer(config.model)
    model = fk.parallelize(model, mesh, precision=config.precision, seed=config.seed)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh, seed=config.seed)
    fingerprint = dataset.fingerprint_at
    state = fk.checkpoint_load(state, config.out / "checkpoints", fingerprint=fingerprint)
    rates = fk.wsd(config.lr, warmup=config.warmup, decay=config.decay, total=config.steps)
    schedule = fk.with_phases(rates, phases, config.global_batch_size)
    by_source = fk.losses_by_source(loss_fn, dataset.order.sources)
    stop = fk.StopSignal()
    step = fk.make_step(by_source, schedule=schedule, stop=stop)
    rank, world = fk.data_ranks(mesh)
    load = partial(fk.make_loader, batch_size=config.batch_size, rank=rank, world=world)
    ahead = {"workers": config.data.workers, "device": mesh.device_type}
    loader = load(dataset, start=state.samples, skip=state.skips, **ahead)
    return Setup(state=state, step=step, loader=loader, loss_fn=by_source, stop=stop)


def main():
    """Train and save; stop cleanly when asked to."""
    config = load_config(Config)
    with fk.open_run(config.out, to_dict(config)) as run:
        built = setup(config)
        state, step, loader, stop = built.state, built.step, built.loader, built.stop
        groups = fk.groups(loader, loader.micro_batches(config.global_batch_size))
        save = partial(fk.checkpoint_save, fingerprint=loader.dataset.fingerprint_at)
        check = fk.bad_step_policy("raise")
        log = run.start(state, every=config.log_every, total=config.steps, loader=loader)
        with log, loader, stop:
            for batches in islice(groups, max(config.steps - state.step, 0)):
                state, metrics = step(state, batches)
                check(log(state, metrics))
                is_done = state.step == config.steps
                if is_done or stop.requested or fk.every(config.save_every, state):
                    save(state, run.checkpoints)
                if stop.requested:
                    break
            run.end(state, stopped=None if state.step >= config.steps else stop.reason)


if __name__ == "__main__":
    main()
