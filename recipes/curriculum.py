"""Pretrain on several sources whose shares, and the learning rate, change along the way.

Three folders of Python's own library are the sources; others take their place in data.sources,
data.weights and phases. What a step sees follows from its number alone, so a run resumes exactly.

python curriculum.py
torchrun --nproc-per-node 4 curriculum.py 'phases=[{step=50, weights={tables=0}, lr_scale=0.3}]'
"""

import sysconfig
from functools import partial
from pathlib import Path

import attrs
import torch

import forgekit as fk
from forgekit.config import key, load_config, to_dict

LIB = Path(sysconfig.get_path("stdlib"))
SOURCES = {"asyncio": LIB / "asyncio", "mail": LIB / "email", "tables": LIB / "encodings"}


@attrs.frozen(kw_only=True)
class Data:
    """Sources by name, and how they are mixed at first."""

    path: Path = key(Path("data/curriculum"), "Folder for the token files of the sources.")
    sources: dict[str, fk.Location] = key(SOURCES, "Files or folders by name.")
    weights: dict[str, float] = key({"asyncio": 1, "mail": 1, "tables": 2}, "Shares.", at_least=0)
    temperature: float = key(1.0, "Above 1 evens the weights; inf: equal.", at_least=0, inf=True)
    seq_len: int = key(256, "Positions in a row.", at_least=1)
    workers: int = key(2, "Threads that read ahead.", at_least=0)


@attrs.frozen(kw_only=True)
class Phase:
    """A change; what it does not name is as at the start, whatever the phase before it said."""

    step: int = key(attrs.NOTHING, "The first step that it governs, counted from 0.", at_least=0)
    weights: dict[str, float] = key({}, "Weights of sources.", at_least=0)
    lr_scale: float = key(1.0, "Factor of the learning rate.", at_least=0)


@attrs.frozen(kw_only=True)
class Config:
    """Many tables at first, then more mail, at last no tables while the rate cools down."""

    out: fk.Location = key(Path("runs/curriculum"), "Run directory; an existing run is resumed.")
    seed: int = key(0, "Seed of weights and data order.", at_least=0)
    steps: int = key(200, "Optimizer steps of the whole run.", at_least=0)
    global_batch_size: int = key(8, "Rows per optimizer step, over all ranks.", at_least=1)
    batch_size: int | None = key(None, "Rows of a rank's micro-batch; none: up to 8.", at_least=1)
    log_every: int = key(10, "Steps between rows of metrics.", at_least=1)
    save_every: int = key(50, "Steps between checkpoints; 0: only at the end.", at_least=0)
    precision: fk.Precision = key("fp32", "fp32, or bf16 with float32 masters.")
    lr: float = key(1e-2, "Highest learning rate.", at_least=0)
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
    """Cross-entropy that never holds all logits; documents in a row are separate."""
    return model(
        batch["input_ids"],
        position_ids=batch["position_ids"],
        doc_ids=batch["doc_ids"],
        head=partial(fk.linear_cross_entropy, labels=batch["labels"]),
    )


def write_token_files(data, vocab_size):
    """Write what is missing: one tokenizer, and a token file per source."""
    whole = fk.data.prepare(data.sources.values(), data.path / "all", vocab_size=vocab_size)
    for name, path in data.sources.items():
        fk.data.prepare(path, data.path / name, tokenizer=whole.path / "tokenizer.json")


def build_dataset(data, phases, seed):
    """Packed rows of each source, mixed."""
    rows = {}
    for name in data.sources:
        documents = fk.data.open_tokens(data.path / name)
        bins = fk.data.cached_bins(data.path / "bins", documents, data.seq_len)
        rows[name] = fk.packed_dataset(documents, bins)
    sizes = {name: len(dataset) for name, dataset in rows.items()}
    mix = fk.make_order(sizes, data.weights, temperature=data.temperature, seed=seed, phases=phases)
    return fk.mixture_dataset(rows, mix)


def setup(config):
    """Build state, step and data, without taking a step."""
    if fk.process_rank() == 0:  # the others wait for it in build_mesh
        write_token_files(config.data, config.model.vocab_size)
    mesh, rows = fk.build_mesh(config.mesh), config.global_batch_size
    phases = [fk.Phase(p.step * rows, p.weights, p.lr_scale) for p in config.phases]
    dataset = build_dataset(config.data, phases, config.seed)
    with torch.device("meta"):
        model = fk.Transformer(config.model)
    model = fk.parallelize(model, mesh, precision=config.precision, seed=config.seed)
    optimizer = fk.muon(model, momentum=0.85, betas=(0.8, 0.95), rest_lr_scale=4.0)
    state = fk.TrainState.create(model, optimizer, mesh=mesh, seed=config.seed)
    seen = dataset.fingerprint_at  # of the rows consumed so far: later phases may change
    state = fk.checkpoint_load(state, config.out / "checkpoints", fingerprint=seen)
    rates = fk.wsd(config.lr, warmup=config.warmup, decay=config.decay, total=config.steps)
    schedule = fk.with_phases(rates, phases, rows)
    by_source = fk.losses_by_source(loss_fn, dataset.order.sources)
    stop = fk.StopSignal()
    step = fk.make_step(by_source, schedule=schedule, stop=stop)
    batch_size = config.batch_size or fk.fitting_batch_size(config.global_batch_size, mesh)
    loader = fk.train_loader(state, dataset, batch_size, workers=config.data.workers)
    return fk.Setup(state=state, step=step, loader=loader, loss_fn=by_source, stop=stop)


def train(config, run):
    """Step, log, save; stop cleanly on request."""
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
        run.end(state)


def main():
    """Hold the run directory while training, and write how the run ended."""
    config = load_config(Config)
    with fk.open_run(config.out, to_dict(config)) as run:
        train(config, run)


if __name__ == "__main__":
    main()
