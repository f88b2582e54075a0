"""Estimates of time against training runs that others have published; see docs/plan.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forgekit.cli.program import main

NAMES = ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim")
LLAMA_8B = (128_256, 4096, 32, 32, 8, 14_336)
LLAMA_13B = (32_000, 5120, 40, 40, 40, 13_824)
MPT_1B = (50_368, 2048, 24, 16, 16, 5461)
MPT_7B = (50_368, 4096, 32, 32, 32, 10_923)
MPT_13B = (50_368, 5120, 40, 40, 40, 13_653)
NANOTRON_1B = (50_264, 2048, 24, 32, 32, 4096)
QWEN3_30B = (151_936, 2048, 48, 32, 4, 6144)
QWEN3_MORE = (
    "model.head_dim=128 model.qk_norm=true model.moe.experts=128 model.moe.top_k=8 "
    "model.moe.ffn_dim=768 model.moe.bias_rate=none activation_checkpoint=full mesh.ep=8"
)
REPLICAS = "mesh.dp_shard=1 mesh.dp_replicate"
SELECTIVE, UNTIED = "activation_checkpoint=selective", "model.tied=false"
ROWS = [
    (LLAMA_8B, "a100", 64, 8192, 1, 64, f"{SELECTIVE} {UNTIED}", 2973),
    (LLAMA_13B, "a100", 64, 4096, 2, 128, UNTIED, 2162),
    (MPT_1B, "a100", 8, 2048, 14, 448, "", 20_513),
    (MPT_7B, "a100", 8, 2048, 6, 96, "", 4641),
    (MPT_13B, "a100", 8, 2048, 2, 48, "", 2262),
    (MPT_1B, "h100", 8, 2048, 14, 112, "", 45_455),
    (MPT_7B, "h100", 8, 2048, 6, 48, "", 10_643),
    (MPT_13B, "h100", 64, 2048, 2, 128, "", 4800),
    (NANOTRON_1B, "h100", 16, 4096, 2, 1024, f"{REPLICAS}=16", 28_700),
    (NANOTRON_1B, "h100", 8, 4096, 8, 1024, f"{REPLICAS}=2 mesh.tp=4", 27_750),
    (NANOTRON_1B, "h100", 16, 4096, 16, 1024, f"{REPLICAS}=4 mesh.tp=4", 25_500),
    (NANOTRON_1B, "h100", 8, 4096, 8, 256, f"{UNTIED} mesh.pp=2 mesh.tp=4", 25_800),
    (NANOTRON_1B, "h100", 16, 4096, 32, 1024, f"{UNTIED} mesh.pp=2 mesh.tp=8", 15_600),
    (QWEN3_30B, "h100", 8, 4096, 4, 512, QWEN3_MORE, 12_040),
]
"""Model, device, devices, positions, rows of a micro-batch and of a step, settings, tokens/s."""
PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
RATIOS = {
    int(published.replace(",", "")): float(ratio)
    for published, ratio in re.findall(r"\| ([\d,]+) \| [\d,]+ \| ([\d.]+) \|", PAGE)
}
"""By the tokens per second that were published what a plan has of them, as the page says."""


def test_each_run_stands_on_the_page():
    assert {published for *_, published in ROWS} <= RATIOS.keys()


@pytest.mark.oracle
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[-1]} tokens per second")
def test_a_plan_has_the_ratio_to_a_published_run_that_the_page_states(capsys, row):
    model, device, world, length, rows, in_all, settings, published = row
    sizes = [f"model.{name}={size}" for name, size in zip(NAMES, model, strict=True)]
    sizes += [f"model.max_seq_len={length}", f"data.seq_len={length}", "precision=bf16"]
    sizes += [f"batch_size={rows}", f"global_batch_size={in_all}", "optim.name=adamw"]
    options = ["--world", str(world), "--device", device, "--memory", "1000", "--json"]
    recipe = "moe" if model is QWEN3_30B else "pretrain"
    assert main(["plan", recipe, *sizes, *settings.split(), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    ratio = found["tokens_per_second_per_device"] / published
    assert ratio == pytest.approx(RATIOS[published], abs=0.02)
