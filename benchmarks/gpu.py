"""The same comparisons at real sizes on one GPU: ``python benchmarks/gpu.py``.

Prints a table, and the numbers once more as JSON. A turn is several steps and then one wait for
the device, so that the host may run ahead as it does in training.
"""

from __future__ import annotations

import datetime
import gc
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from bare import Size, bare_step, our_step
from losses import FULL, WAYS, LossSize, train
from pairs import Times, band, ratio, take_turns
from rich.console import Console
from rich.table import Table

import forgekit as fk

SIZE = Size(dim=1024, layers=16, seq_len=1024, vocab_size=32768, heads=16, rows=8, micro_batches=2)
LOSS = LossSize(8192, 2048, 131072, device="cuda", dtype=torch.bfloat16)
VARIANTS = [("fp32", False), ("bf16", False), ("bf16", True)]
ROUNDS, STEPS_PER_TURN = 12, 3
BARE, AGAIN, STEP = "bare loop", "bare loop again", "make_step"

Row = dict[str, Any]


def main() -> None:
    """Measure everything, or say that there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit("no GPU: torch.cuda.is_available() is False. `make bench` measures on the CPU.")
    torch.set_float32_matmul_precision("high")
    rows = [row for precision, compiled in VARIANTS for row in steps(SIZE, precision, compiled)]
    rows += losses(LOSS)
    fk.shutdown()
    facts = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }
    show(rows, facts)


def steps(size: Size, precision: fk.Precision, compiled: bool, device: str = "cuda") -> list[Row]:
    """Compare ``make_step`` with the bare loop on models prepared alike."""
    mesh = fk.build_mesh(device=device)
    batches = size.batches(device)

    def prepared() -> torch.nn.Module:
        return fk.parallelize(size.model(), mesh, precision=precision, compile=compiled)

    builders = {BARE: bare_step, AGAIN: bare_step, STEP: our_step}
    entries = {n: _turn(build(prepared(), batches), device) for n, build in builders.items()}
    times = take_turns(entries, ROUNDS)
    kind = f"step, {precision}{', compiled' if compiled else ''}"
    noise = band(times, AGAIN, BARE)
    per_turn = size.tokens * STEPS_PER_TURN
    return [
        _row(kind, name, times, BARE, noise)
        | {"tokens_per_second": per_turn / _median(times, name)}
        for name in entries
    ]


def losses(size: LossSize) -> list[Row]:
    """Compare ways from hidden states to a loss, in time and in the memory of the device."""
    again = f"{FULL} again"
    entries = {name: _turn(train(name, size), size.device, 1) for name in WAYS}
    memory = {name: _peak_gib(entry) for name, entry in entries.items()}
    entries[again] = _turn(train(FULL, size), size.device, 1)
    times = take_turns(entries, ROUNDS)
    kind = f"loss, {size.tokens} x {size.dim} -> {size.vocab_size}"
    noise = band(times, again, FULL)
    return [
        _row(kind, name, times, FULL, noise)
        | {
            "tokens_per_second": size.tokens / _median(times, name),
            "peak_gib": memory.get(name),
        }
        for name in entries
    ]


def show(rows: list[Row], facts: dict[str, str]) -> None:
    """Print a table for the reader and a line of JSON for the next one."""
    table = Table(title=", ".join(facts.values()))
    for column in ("what", "entry", "ms", "ratio", "A/A band", "tokens/s", "peak GiB"):
        table.add_column(column, justify="left" if column in ("what", "entry") else "right")
    for row in rows:
        peak = row.get("peak_gib")
        table.add_row(
            row["what"],
            row["entry"],
            f"{row['ms']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['band']:.3f}",
            f"{row['tokens_per_second']:,.0f}",
            "" if peak is None else f"{peak:.2f}",
        )
    Console(width=120).print(table)
    sys.stdout.write(json.dumps(facts | {"rows": rows}) + "\n")


def _row(kind: str, name: str, times: Times, baseline: str, noise: float) -> Row:
    milliseconds = _median(times, name) * 1e3
    where = {"what": kind, "entry": name}
    return where | {"ms": milliseconds, "ratio": ratio(times, name, baseline), "band": noise}


def _turn(run: Callable[[], Any], device: str, times: int = STEPS_PER_TURN) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(times):
            run()
        if device == "cuda":
            torch.cuda.synchronize()

    return turn


def _peak_gib(run: Callable[[], None]) -> float:
    """Device memory that a first call takes at its highest, the gradients it leaves included."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _median(times: Times, name: str) -> float:
    return statistics.median(times[name])


if __name__ == "__main__":
    main()
