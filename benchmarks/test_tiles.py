"""Memory and time of a block whose feed-forward runs in tiles of a long row's positions."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from losses import resident

import forgekit as fk
from forgekit.model.layers import rotary_angles, rotary_turns

POSITIONS, DIM, FFN_DIM, TILES, ROUNDS = 16_384, 256, 768, 8, 3
MOST_MEMORY, MOST_TIME = 0.6, 1.1


def measure(tiles: int) -> dict[str, float]:
    """MiB by which this process grows at its highest, and CPU seconds, of forward and backward."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "layers": 1,
        "heads": DIM // 64,
        "kv_heads": 1,
        "dim": DIM,
    }
    spec = fk.TransformerSpec(ffn_dim=FFN_DIM, max_seq_len=POSITIONS, **sizes)
    block: Any = fk.Transformer(spec).layers[0]
    block.mlp_tiles = tiles

    def run(positions: int) -> None:
        angles = rotary_angles(torch.arange(positions), 64, 1e4)
        cos, sin = (turns.float() for turns in rotary_turns(angles))
        block(torch.randn(1, positions, DIM, requires_grad=True), cos, sin).sum().backward()

    run(256)  # libraries load on first use
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest value so far
    before, began = resident("VmRSS"), time.process_time()
    run(POSITIONS)
    return {"mib": resident("VmHWM") - before, "seconds": time.process_time() - began}


def test_a_block_in_tiles(show):
    rows: dict[int, list[dict[str, float]]] = {1: [], TILES: []}
    for _ in range(ROUNDS):
        for tiles, found in rows.items():
            command = [sys.executable, __file__, str(tiles)]
            found.append(json.loads(subprocess.check_output(command)))
    mib, seconds = ({t: [r[k] for r in f] for t, f in rows.items()} for k in ("mib", "seconds"))
    memory = sorted(mib[TILES])[ROUNDS // 2] / sorted(mib[1])[ROUNDS // 2]
    spent = sorted(seconds[TILES])[ROUNDS // 2] / sorted(seconds[1])[ROUNDS // 2]
    group = f"block, {POSITIONS} positions, width {DIM}, feed-forward {FFN_DIM}, {TILES} tiles"
    times = {str(tiles): values for tiles, values in seconds.items()}
    show(group, times, str(TILES), memory_ratio=memory, time_ratio=spent)
    assert memory <= MOST_MEMORY
    assert spent <= MOST_TIME


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]))))
