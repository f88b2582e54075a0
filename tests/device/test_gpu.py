"""``benchmarks/gpu.py`` from end to end on the pretend device, with tiny sizes."""

from __future__ import annotations

import gpu
import pytest
from device.pretend import NAME
from pool import run_ranks

import forgekit as fk

GIB = 2**30


def measure(_rank, _world):
    rows = gpu.measure(gpu.Bench(NAME, memory=GIB, is_tiny=True))
    gpu.show(rows, {"device": NAME})
    return rows


@pytest.mark.oracle
def test_every_part_runs_and_gives_verdicts():
    """Kernels, memory and the waits of CUDA are not on this device, and the table says so."""
    (rows,) = run_ranks(measure, 1, setup="device.pretend:install", timeout_s=120)
    verdicts = {(row["what"], row["entry"]): row["verdict"] for row in rows}
    assert "FAIL" not in verdicts.values(), [row for row in rows if row["verdict"] == "FAIL"]
    absent = {what.partition(",")[0] for (what, _), v in verdicts.items() if "not on" in v}
    assert absent == {"no wait of the host", "attention", "memory of a step", "step"}
    for name in ("logits", "head", "packed", "autocast"):
        assert verdicts["two steps as on the CPU", name] == "ok"
    assert verdicts["log-probabilities as in training", "torch.bfloat16, LoRA"] == "ok"
    shown = {what.partition(",")[0] for what, _ in verdicts}
    assert shown > {*absent, "loss", "product in bf16", "MFU"}


def test_flops_are_those_of_every_product_and_of_keys_that_are_seen():
    """By hand: 6 per parameter of a product and token; 12 per channel and key."""
    spec = fk.TransformerSpec(
        vocab_size=10, dim=4, layers=2, heads=2, kv_heads=1, ffn_dim=3, max_seq_len=8
    )
    products = 10 * 4 + 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 3)
    keys = (1 + 2 + 3) + (1 + 2 + 3 + 4 + 5)
    assert gpu.flops(spec, [3, 5]) == 6 * products * 8 + 12 * 2 * 4 * keys
