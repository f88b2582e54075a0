"""One rank of a replica group that trains in float64 and logs which rows each step had.

``replica_rank.py JSON``: ``name``, ``folder``, ``lighthouse``, ``steps``; ``go``, a file to wait
for once everything is built; ``layout``; ``seconds`` that a step takes at least; ``other``, what
this group has that the others do not; ``stop_at``, the step before which it asks to stop;
``die_at``, the step in which its last rank is killed; ``resume`` and ``save``, folders of
checkpoints; ``stop_file``, on which it asks to stop; ``layers`` of the model.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import attrs
import torch
from lab import full, full_tensors, logits_loss
from tensordict import TensorDict

import forgekit as fk

GLOBAL_BATCH, ROWS, SEQ_LEN = 12, 1, 8
LR = 1e-3
"""At ten times as much AdamW makes 1 of a rounding of 1e-16 in 300 steps, in float64 too."""
SPEC = fk.TransformerSpec(
    vocab_size=37, dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=24, max_seq_len=SEQ_LEN
)


class Rows:
    """Rows with ragged numbers of targets; each says which it is."""

    fingerprint = "rows"

    def __len__(self):
        return 10_000

    def __getitem__(self, row):
        draw = torch.Generator().manual_seed(1000 + row)
        ids = torch.randint(SPEC.vocab_size, (SEQ_LEN + 1,), generator=draw)
        labels = ids[1:].clone()
        labels[: int(torch.randint(SEQ_LEN, (), generator=draw))] = -100
        return TensorDict({"input_ids": ids[:-1], "labels": labels, "row": torch.tensor(row)})


def build(layout=None, *, model=SPEC, seed=0, optimizer=fk.adamw):
    """A state in float64, with an average of its weights."""
    module, mesh = fk.Transformer(model, seed=seed).double(), None
    if layout:
        mesh = fk.build_mesh(fk.MeshSpec(**layout), device="cpu")
        module = fk.parallelize(module, mesh)
    average = fk.EMA(0.9)
    return fk.TrainState.create(module, optimizer(module), mesh=mesh, seed=0, average=average)


def load(state, batch_size=ROWS):
    """The rows that a group's rank trains on."""
    rank, world = fk.data_ranks(state.mesh)
    start = state.samples
    return fk.make_loader(Rows(), batch_size, start=start, shuffle=False, rank=rank, world=world)


def whole(state):
    """Full parameters and averages by name."""
    average = {f"average.{name}": full(value) for name, value in state.average.values.items()}
    return full_tensors(state.model) | average


def train(
    state, loader, replicas, *, steps, stop=None, watch=lambda **_: None, least_s=0.0, multiple=1
):
    """The loop of the recipe, written out."""
    micro_batches = loader.micro_batches(GLOBAL_BATCH)
    while state.step < steps and not (stop and stop.requested):
        began = time.monotonic()
        state, part = replicas.begin(state)
        batches = loader.share(
            state.samples, micro_batches, *part, multiple=multiple, skip=state.skips
        )
        rows = []

        def seen(batches=batches, rows=rows):
            for batch in batches:
                rows.extend(batch["row"].tolist() if batches.samples else [])
                yield batch

        part_of = _Counted(batches, seen)
        totals = fk.accumulate(state, part_of, logits_loss)
        time.sleep(max(0.0, least_s - (time.monotonic() - began)))
        totals = totals.plus(stop=torch.full_like(totals["loss"], stop.vote() if stop else 0.0))
        at = {"step": state.step, "part": part, "rows": rows}
        watch(event="tries", **at)
        totals = fk.sum_replicas(totals, state, replicas)
        watch(event="commits" if totals else "breaks off", **at)
        if totals is None:
            continue
        totals = fk.reduce_totals(totals, state)
        if stop:
            stop.receive(totals["stop"])
        correction = fk.clip(totals, max_norm=1.0)
        state = fk.update(state, correction, lr=LR, totals=totals)
        watch(event="updates", **at, samples=state.samples, loss=float(totals["loss"]))
    return state


class _Counted:
    def __init__(self, share, seen):
        self.samples, self.first_number = share.samples, share.first_number
        self._size, self._seen = len(share), seen

    def __len__(self):
        return self._size

    def __iter__(self):
        return self._seen()


def main(given):
    import faulthandler

    faulthandler.enable()
    import torchft  # noqa: F401 (a second that nobody should wait for)

    torch.set_num_threads(1)
    folder, name = Path(given["folder"]), given["name"]
    other = given.get("other", "")
    spec = attrs.evolve(SPEC, layers=given.get("layers", SPEC.layers))
    layout = given.get("layout") or {}
    state = build(layout, model=spec)
    if given.get("resume"):
        state = fk.checkpoint_load(state, given["resume"])
    stop = fk.StopSignal(signals=(), file=given.get("stop_file"))
    rank, last = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")) - 1
    log = (folder / f"{name}.{rank}.jsonl").open("a", buffering=1)

    def watch(**event):
        if event["step"] == given.get("stop_at") and event["event"] == "tries":
            stop.request("a test")
        if event["step"] == given.get("die_at") and event["event"] == "tries" and rank == last:
            os.kill(os.getpid(), signal.SIGKILL)
        log.write(json.dumps({"t": time.time(), "pid": os.getpid(), **event}) + "\n")

    loader = load(state)
    if go := given.get("go"):
        Path(f"{go}.ready{rank}").touch()
        while not Path(go).exists():
            time.sleep(0.01)
    facts = {"fingerprint": "other rows" if other == "data" else "rows", "also": {"stop": stop}}
    facts["settings"] = {"lr": 2 * LR if other == "settings" else LR}
    times = {"timeout_s": 20, "quorum_timeout_s": 60}
    options = {"least_s": given.get("seconds", 0.0), "multiple": layout.get("pp", 1)}
    options |= {"steps": given["steps"], "stop": stop, "watch": watch}
    address = given["lighthouse"]
    with fk.join_replicas(state, name, lighthouse=address, **facts, **times) as replicas:
        state = train(state, loader, replicas, **options)
    if save := given.get("save"):
        fk.checkpoint_save(state, save, blocking=True)
    parameters = whole(state)
    if rank == 0 or "pp" in layout:  # each stage has parameters of its own
        numbers = {"step": state.step, "samples": state.samples}
        torch.save(numbers | parameters, folder / f"{name}.{rank}.pt")
    fk.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
