"""Estimates of time against training runs that others have published; see docs/plan.md."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from forgekit.cli.program import main
from forgekit.metrics.device_specs import MACHINES
from forgekit.plan.estimate import estimate
from forgekit.plan.watch import Call, Work

SPREAD = 0.17
"""What docs/plan.md states of boards as their data sheets describe them."""
LLAMA_8B = (128_256, 4096, 32, 32, 8, 14_336)
LLAMA_13B = (32_000, 5120, 40, 40, 40, 13_824)
MPT_1B = (50_368, 2048, 24, 16, 16, 5461)
MPT_7B = (50_368, 4096, 32, 32, 32, 10_923)
MPT_13B = (50_368, 5120, 40, 40, 40, 13_653)
NAMES = ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim")
ROWS = [
    (LLAMA_8B, "a100", 64, 8192, 1, "selective", 2973),
    (LLAMA_13B, "a100", 64, 4096, 2, "none", 2162),
    (MPT_1B, "a100", 8, 2048, 14, "none", 20_513),
    (MPT_7B, "a100", 8, 2048, 6, "none", 4641),
    (MPT_13B, "a100", 8, 2048, 2, "none", 2262),
    (MPT_1B, "h100", 8, 2048, 14, "none", 45_455),
    (MPT_7B, "h100", 8, 2048, 6, "none", 10_643),
    (MPT_13B, "h100", 64, 2048, 2, "none", 4800),
]
"""Model, device, devices, positions, rows of a micro-batch, recomputation, tokens/s/device."""
COUNTS = {
    "7B on 8 H100": (
        ("h100", 10_643, 98_304 // 8),
        (510000522854400, 1094137814700, 4767),
        8,
        [("all_gather", 402759680, 64), ("reduce_scatter", 805519360, 32)],
    ),
    "13B on 64 A100": (
        ("a100", 2162, 524_288 // 64),
        (672914001100800, 1170251639720, 5848),
        64,
        [("all_gather", 634408960, 80), ("reduce_scatter", 1268817920, 40)],
    ),
}
"""What plans of two rows counted: FLOPs, bytes of other kernels, kernels, and collectives."""


@pytest.mark.parametrize("name", COUNTS)
def test_time_is_that_of_published_runs_within_the_stated_spread(name):
    (device, published, targets), (flops, moved, kernels), world, sent = COUNTS[name]
    calls = Counter({Call(op, tuple(range(world)), size): count for op, size, count in sent})
    counted = Counter({"bytes": moved, "count": kernels})
    work = Work(calls, Counter({torch.bfloat16: flops}), kernels=counted)
    seconds = estimate(MACHINES[device], 8, work, frozenset(calls))
    assert targets / seconds.busy == pytest.approx(published, rel=SPREAD)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("model", "device", "world", "length", "rows", "recomputed", "published"), ROWS
)
def test_plans_are_published_runs(
    capsys, model, device, world, length, rows, recomputed, published
):
    sizes = [f"model.{name}={size}" for name, size in zip(NAMES, model, strict=True)]
    sizes += [f"model.max_seq_len={length}", f"data.seq_len={length}", f"batch_size={rows}"]
    count = {MPT_1B: 4, MPT_7B: 2, MPT_13B: 3}[model] if (device, world) == ("a100", 8) else 1
    sizes += [f"global_batch_size={count * rows * world}", "precision=bf16"]
    sizes += [f"model.tied={str(model[0] == 50_368).lower()}"]
    run = [*sizes, f"activation_checkpoint={recomputed}", "--json"]
    options = ["--world", str(world), "--device", device, "--memory", "1000"]
    assert main(["plan", "pretrain", *run, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    speed = found["tokens_per_second_per_device"]
    assert speed == pytest.approx(published, rel=SPREAD + 0.005)


NANOTRON_1B = (50_264, 2048, 24, 32, 32, 4096)
QWEN3_30B = (151_936, 2048, 48, 32, 4, 6144)
QWEN3_MORE = (
    "model.head_dim=128 model.qk_norm=true model.moe.experts=128 model.moe.top_k=8 "
    "model.moe.ffn_dim=768 model.moe.bias_rate=none activation_checkpoint=full mesh.ep=8"
)
REPLICAS, STAGES = "mesh.dp_shard=1 mesh.dp_replicate", "mesh.pp=2 model.tied=false"
LAYOUTS = {
    "dp 16": (NANOTRON_1B, 16, 2, 1024, f"{REPLICAS}=16", 28_700, 1.43),
    "dp 2 x tp 4": (NANOTRON_1B, 8, 8, 1024, f"{REPLICAS}=2 mesh.tp=4", 27_750, 1.01),
    "dp 4 x tp 4": (NANOTRON_1B, 16, 16, 1024, f"{REPLICAS}=4 mesh.tp=4", 25_500, 1.11),
    "pp 2 x tp 4": (NANOTRON_1B, 8, 8, 256, f"{STAGES} mesh.tp=4", 25_800, 1.04),
    "pp 2 x tp 8": (NANOTRON_1B, 16, 32, 1024, f"{STAGES} mesh.tp=8", 15_600, 1.20),
    "ep 8": (QWEN3_30B, 8, 4, 512, QWEN3_MORE, 12_040, 0.51),
}
"""Model, H100 devices, rows of a micro-batch and of a step, settings, tokens/s/device, ratio."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_ratios_of_layouts_stand_in_the_page(name):
    *_, published, ratio = LAYOUTS[name]
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    assert re.search(rf"\| {published:,} \| [\d,]+ \| {ratio:.2f} \|", page)


@pytest.mark.oracle
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LAYOUTS)
def test_plans_of_layouts_are_published_runs_in_the_stated_ratio(capsys, name):
    model, world, rows, in_all, settings, published, ratio = LAYOUTS[name]
    recipe = "moe" if model is QWEN3_30B else "pretrain"
    sizes = [f"model.{name}={size}" for name, size in zip(NAMES, model, strict=True)]
    sizes += ["model.max_seq_len=4096", "data.seq_len=4096", "precision=bf16"]
    sizes += [f"batch_size={rows}", f"global_batch_size={in_all}", *settings.split()]
    options = ["--world", str(world), "--device", "h100", "--memory", "1000", "--json"]
    assert main(["plan", recipe, *sizes, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_second_per_device"] / published == pytest.approx(ratio, abs=0.02)
