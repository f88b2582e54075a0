"""The lines at the start of a run: layout, size, memory, tokens of a step, and optimizers."""

from types import SimpleNamespace

import attrs
import torch
from pool import run_ranks

import forgekit as fk
from forgekit.metrics.flops import Flops
from forgekit.run.summary import start_summary

SPEC = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=2, heads=2, kv_heads=2, ffn_dim=24, max_seq_len=8
)
LAYER = 4 * 16 * 16 + 3 * 16 * 24 + 2 * 16
SIZE = 2 * LAYER + 2 * 32 * 16 + 16
ROWS, CONFIG = SimpleNamespace(seq_len=8), {"global_batch_size": 4}


def table(state, dataset=ROWS, config=CONFIG):
    """Name and text of each line."""
    flops = Flops.of(state.model).over_stages(state)
    lines = start_summary(state, flops, dataset, config)
    return {name: text.strip() for name, text in (line.split(":", 1) for line in lines)}


def create(model, optimizer=None, mesh=None):
    optimizer = optimizer or fk.adamw(model, weight_decay=0.1)
    return fk.TrainState.create(model, optimizer, mesh=mesh)


def test_the_lines_say_what_is_there_under_the_greeting_of_a_run(tmp_path, capsys):
    assert sum(p.numel() for p in fk.Transformer(SPEC).parameters()) == SIZE
    state, mib = create(fk.Transformer(SPEC)), 4 * SIZE / 2**20
    assert table(state) == {
        "layout": "1 rank, products in float32 on cpu",
        "parameters": f"{SIZE:,}, of which a token meets {SIZE:,}",
        "memory": f"{mib:.1f} MiB of parameters and {mib:.1f} MiB of gradients on this rank",
        "step": "32 tokens, 4 rows of 8",
        "AdamW": f"21 tensors, {SIZE:,}: embedding.weight, layers.*.attention_norm.weight, "
        "layers.*.attention.query.weight and 9 more kinds",
    }
    with fk.open_run(tmp_path / "run", CONFIG) as run, run.start(state, every=1):
        pass
    lines = capsys.readouterr().err.partition(": step 0, sample 0; ")[2].splitlines()
    assert lines[1] == "  layout:      1 rank, products in float32 on cpu"


def test_frozen_parameters_experts_and_a_chain_have_their_own_numbers():
    moe = fk.MoESpec(experts=4, top_k=1, ffn_dim=24, first=1)
    model = fk.Transformer(attrs.evolve(SPEC, moe=moe))
    size = sum(p.numel() for p in model.parameters())
    model.embedding.weight.requires_grad_(False)
    found = table(create(model, fk.muon(model)), dataset=None)
    active, trained = size - 3 * 3 * 16 * 24, size - 32 * 16
    assert not {"step", "attention"} & found.keys(), "what is not known has no line"
    held, due = (f"{4 * count / 2**20:.1f} MiB" for count in (size, trained))
    assert found["memory"] == f"{held} of parameters and {due} of gradients on this rank"
    met = f"{size:,}, of which a token meets {active:,}; {trained:,} are trained"
    assert found["parameters"] == met
    assert found["Muon"].startswith("17 tensors, ")
    assert found["AdamW"].startswith("7 tensors, 656: layers.*.attention_norm.weight, ")


def test_parameters_that_nobody_steps_are_named():
    model = fk.Transformer(SPEC)
    found = table(create(model, torch.optim.SGD(model.layers.parameters(), lr=0.1)))
    assert found["no optimizer"] == f"3 tensors, {SIZE - 2 * LAYER:,}: " + ", ".join(
        name for name, _ in model.named_parameters() if not name.startswith("layers.")
    )


LAYOUTS = {"dp_shard 2": {}, "tp 2": {"tp": 2}, "pp 2": {"pp": 2}}


def _in_layouts(rank, world):
    for layout, sizes in LAYOUTS.items():
        mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
        model = fk.parallelize(fk.Transformer(SPEC), mesh, precision="bf16")
        found = table(create(model, mesh=mesh))
        assert found["layout"] == f"{layout} = 2 ranks, products in bfloat16 on cpu"
        assert found["parameters"].startswith(f"{SIZE:,}, of which a token meets {SIZE:,}")
        assert found["attention"].startswith("rows sdpa")


def test_in_a_layout_the_whole_model_is_counted_and_the_ranks_part_held():
    run_ranks(_in_layouts, 2)
