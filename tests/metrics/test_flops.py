"""Operations of training against torch's own count."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import torch
from huggingface_models import make_model
from lab import alone, lay_out
from pool import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import forgekit as fk
from forgekit.metrics.device_specs import MACHINES
from forgekit.metrics.flops import Flops, Utilization, count_pairs
from forgekit.model import moe

ROWS, LENGTH = 2, 8
DENSE = fk.TransformerSpec(
    vocab_size=48, dim=16, layers=2, heads=4, kv_heads=4, ffn_dim=24, max_seq_len=LENGTH
)
MOE = fk.MoESpec(experts=8, top_k=3, ffn_dim=8, shared=2, first=1)
SPECS = {
    "dense": {},
    "gqa": {"kv_heads": 2, "qkv_bias": True},
    "wide heads": {"head_dim": 8, "kv_heads": 1},
    "tied": {"tied": True, "qk_norm": True},
    "moe": {"moe": MOE},
}


def loader_of_one_row():
    return fk.make_loader(fk.packed_dataset([np.ones(3, int)], fk.pack([3], 8)), 1)


def counted(model, monkeypatch, call=None):
    """Torch's count of one forward and backward pass: in matrices, in attention, in experts.

    The kernels that a CPU takes by itself are counted as nothing, without a word: so attention is
    computed by torch's plain formulas, and experts one after another.
    """
    monkeypatch.setattr(moe, "_fits_grouped", lambda tokens, weight: False)
    ids = torch.randint(0, 48, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = (call or model)(ids)
        fk.cross_entropy(logits, labels).sum.backward()
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    attention = counts.get("aten.bmm", 0)
    return sum(counts.values()) - attention, attention


@pytest.mark.parametrize("kind", ["Llama tied", "Qwen3Moe dense first"])
def test_attention_of_a_model_of_transformers_is_not_known(kind, monkeypatch):
    """Two of four or six experts here: all of them would be one and a half times as many."""
    eager = {"experts_implementation": "eager"} if "Moe" in kind else {}
    model = make_model(kind, vocab_size=48, attn_implementation="eager", **eager)
    flops = Flops.of(model)
    assert flops.parameters == sum(p.numel() for p in model.parameters())
    matrices, _ = counted(model, monkeypatch, lambda ids: model(ids).logits)
    assert flops.per_token * ROWS * LENGTH == pytest.approx(matrices, rel=1e-12)
    assert math.isnan(flops.of_row(1, 1))
    assert Utilization.of(flops, alone(model), loader_of_one_row(), peak=1e9) is None


@pytest.mark.parametrize("case", SPECS)
def test_operations_are_those_that_torch_counts(case, monkeypatch):
    spec = attrs.evolve(DENSE, **SPECS[case])
    matrices, attention = counted(fk.Transformer(spec), monkeypatch)
    flops = Flops.of(fk.Transformer(spec))
    assert flops.per_token * ROWS * LENGTH == matrices > 0
    # top_k of the routed experts for each token, and all of the shared one
    idle = (MOE.experts - MOE.top_k) * 3 * 16 * MOE.ffn_dim if case == "moe" else 0
    assert flops.active_parameters == flops.parameters - idle
    # torch's plain formula computes each pair of a row, also those that the mask takes out
    assert flops.per_pair * ROWS * LENGTH**2 == attention > 0
    if case == "moe":  # torch counts experts at all: by hand beside a dense layer alone
        dense, _ = counted(fk.Transformer(attrs.evolve(DENSE, layers=1)), monkeypatch)
        experts = (MOE.top_k + MOE.shared) * 3 * 16 * 8
        assert matrices - dense == 6 * ROWS * LENGTH * (4 * 16 * 16 + experts + 16 * 8)


def test_a_frozen_base_takes_four_and_its_adapters_six(monkeypatch):
    """Of the first layers nothing before the first adapter needs gradients: compare two more."""

    def build(layers):
        torch.manual_seed(0)
        spec = attrs.evolve(DENSE, layers=layers, moe=attrs.evolve(MOE, first=1))
        return fk.add_lora(fk.Transformer(spec), rank=4, targets=("*.experts.*", "*.attention.*"))

    few, many = (counted(build(layers), monkeypatch) for layers in (2, 4))
    one, other = (Flops.of(build(layers)) for layers in (2, 4))
    tokens = ROWS * LENGTH
    assert (other.per_token - one.per_token) * tokens == many[0] - few[0]
    assert (other.per_pair - one.per_pair) * ROWS * LENGTH**2 == many[1] - few[1]


LATE = [
    ("layers.3.*.down", True, 0),
    ("layers.2.attention.output", False, 0),
    (("layers.3.*.query", "layers.3.*.value"), False, 0.1),  # two of three beside each other
]


@pytest.mark.parametrize(("targets", "tied", "error"), LATE)
def test_what_comes_before_the_first_adapter_has_no_backward(targets, tied, error, monkeypatch):
    def build():
        model = fk.Transformer(attrs.evolve(DENSE, layers=4, tied=tied))
        return fk.add_lora(model, rank=4, targets=targets)

    matrices, attention = counted(build(), monkeypatch)
    flops, whole = Flops.of(build()), Flops.of(fk.Transformer(attrs.evolve(DENSE, layers=4)))
    assert flops.per_token * ROWS * LENGTH == pytest.approx(matrices, rel=error)
    assert flops.per_pair * ROWS * LENGTH**2 == pytest.approx(attention, rel=error)
    assert flops.per_token < 0.6 * whole.per_token


def by_hand(batch):
    """Tokens that are no padding, and pairs of one and those up to it in its document."""
    if "doc_ids" not in batch:
        lengths = (batch["labels"] != -100).sum(1).tolist()
        return sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    pairs = tokens = 0
    for row in batch["doc_ids"].tolist():
        for at, document in enumerate(row):
            tokens += document >= 0
            pairs += (document >= 0) * sum(other == document for other in row[: at + 1])
    return tokens, pairs


def dataset_of(kind, folder):
    """Rows of eight positions; a window ends where a document does, and in the middle of others."""
    sizes = [3, 11, 1, 7, 20, 2, 5]
    documents = [np.arange(size) + 1 for size in sizes]
    if kind == "packed":
        return fk.packed_dataset(documents, fk.pack(sizes, 8))
    file = fk.write_tokens(folder / kind, documents, vocab_size=48, eos_id=0)
    return fk.token_dataset(file, 8, doc_ids=kind == "documents")


@pytest.mark.parametrize("kind", ["windows", "documents", "packed"])
def test_pairs_of_rows_are_those_within_documents(kind, tmp_path):
    dataset = dataset_of(kind, tmp_path)
    for row in range(len(dataset)):
        assert count_pairs(dataset, np.array([row])) == by_hand(dataset.__getitems__([row])), row
    some = [*range(len(dataset)), 1, 1, 0]
    assert count_pairs(dataset, np.array(some)) == by_hand(dataset.__getitems__(some))
    assert count_pairs(dataset, np.arange(0)) == (0, 0)


def test_utilization_is_the_work_of_the_very_samples_over_the_peak_of_all_devices(tmp_path):
    """Of a mixture whose weights change among them, with samples left out, over two epochs."""
    kinds = ("documents", "packed")
    datasets = {kind: dataset_of(kind, tmp_path) for kind in kinds}
    sizes = {kind: len(dataset) for kind, dataset in datasets.items()}
    phase = fk.Phase(start=10, weights={"documents": 1, "packed": 30})
    order = fk.make_order(sizes, weights={"documents": 9, "packed": 1}, phases=(phase,))
    model = fk.Transformer(DENSE)
    state, flops = alone(model), Flops.of(model)
    for dataset in (fk.mixture_dataset(datasets, order), datasets["packed"]):
        with fk.make_loader(dataset, 3, seed=5, skip=[(4, 2)]) as loader:
            found = Utilization.of(flops, state, loader, peak=1e9)
            batches = [next(iter(loader)) for _ in range(6)]
        assert found is not None
        for number in (0, 1, 3, 5):
            tokens, pairs = by_hand(batches[number])
            assert found.ideal(3 * number, 3 * number + 3) == {
                "perf/mfu": pytest.approx(flops.of_row(tokens, pairs) / 1e9, rel=1e-12),
                "perf/mfu_palm": pytest.approx(flops.of_row(tokens, tokens * 8) / 1e9, rel=1e-12),
            }
        assert Utilization.of(flops, state, loader) is None, "a CPU has no peak in the table"
    with fk.make_loader([1, 2], 1) as loader:
        assert Utilization.of(flops, state, loader, peak=1e9) is None, "rows of an unknown length"
    assert Utilization.of(flops, state, [1, 2], peak=1e9) is None, "nobody knows which rows"


def model_of(case):
    return fk.Transformer(attrs.evolve(DENSE, **SPECS[case]))


def _flops(rank, world, layouts):
    found = []
    for layout, case in layouts:
        state = lay_out(model_of(case), layout)
        flops = Flops.of(state.model).over_stages(state)
        use = Utilization.of(flops, state, loader_of_one_row(), peak=1e9)
        found.append((attrs.astuple(flops), use and use.peak))
    return found


def test_every_rank_of_a_layout_counts_the_whole_model():
    layouts = [({"pp": 2}, "dense"), ({"tp": 2}, "tied"), ({"ep": 2}, "moe")]
    whole = {case: attrs.astuple(Flops.of(model_of(case))) for _, case in layouts}
    for found in run_ranks(_flops, 2, layouts):
        for (numbers, peak), (layout, case) in zip(found, layouts, strict=True):
            assert numbers == pytest.approx(whole[case]), (layout, case)
            assert peak == 2e9, "that of all devices"


PEAKS = [("bf16", "highest", "bf16"), ("fp32", "highest", "fp32"), ("fp32", "high", "tf32")]


@pytest.mark.parametrize(("precision", "matmul", "peak"), PEAKS)
def test_the_peak_is_that_of_the_dtype_of_products(precision, matmul, peak, monkeypatch):
    """Masters may be wider, and float32 may be computed as TF32."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: matmul)
    state = lay_out(fk.Transformer(DENSE), precision=precision)
    with FakeTensorMode():
        state = attrs.evolve(state, targets=torch.zeros((), dtype=torch.int64, device="cuda"))
    found = Utilization.of(Flops.of(state.model), state, loader_of_one_row())
    fk.shutdown()
    assert found.peak == MACHINES["h100"].peaks[peak]
