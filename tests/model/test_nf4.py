"""A base in four bits: torchao's values, gradients of what they unpack to, merging, refusals."""

from __future__ import annotations

import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
from adapted import PACKED, batches_of, build, loss_fn, move, packed_of, rounded
from lab import alone, lay_out, mean_gradients, relative_error, run_with_torchao
from torch import nn

import forgekit as fk
from forgekit.lora import relora
from forgekit.model.nf4 import pack, unpack
from forgekit.parallel.activation_checkpoint import compile_blocks
from forgekit.parallel.tensor.plan import read_plan
from forgekit.ranks import CheckpointError

TORCHAO = """
import torch
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
from forgekit.model.nf4 import CODES, pack, unpack
generator = torch.Generator().manual_seed(0)
for shape in ((128, 128), (256, 192), (64, 768), (1000, 2048)):
    for scale, zeros in ((1.0, 0), (0.02, 100), (1e-4, 30_000)):
        weight = torch.randn(shape, generator=generator) * scale
        weight.view(-1)[:zeros] = 0
        theirs, ours = to_nf4(weight, 64, 256), pack(weight)
        assert torch.equal(theirs.quantized_data, ours[:, :CODES].flatten())
        assert torch.equal(theirs.get_original_weight(), unpack(ours, shape, torch.float32))
        half = weight.bfloat16()
        theirs, ours = to_nf4(half.float(), 64, 256), pack(half)
        assert torch.equal(theirs.get_original_weight(), unpack(ours, shape, torch.float32))
"""


@pytest.mark.oracle
def test_packed_values_are_those_of_torchao():
    run_with_torchao(TORCHAO)


def test_a_matrix_is_rounded_to_sixteen_levels_of_its_blocks():
    weight = torch.randn(96, 512, generator=torch.Generator().manual_seed(1))
    found = unpack(pack(weight), (96, 512), torch.float32)
    assert torch.allclose(found, rounded(weight), rtol=0, atol=1e-6)
    assert float((found - weight).norm() / weight.norm()) == pytest.approx(0.092, abs=0.002)
    assert len(found[0, :64].unique()) <= 16
    assert pack(weight.to("meta")).shape == pack(weight).shape


def test_a_base_takes_a_quarter_of_16_bits_and_backward_keeps_no_unpacked_weight():
    model = fk.Transformer(PACKED).bfloat16()
    fk.add_lora(model, rank=1, targets=("*.attention.*", "*.gate", "*.up", "*.down"), base="nf4")
    held = packed_of(model).values()
    values = sum(16_384 * len(p) for p in held)
    assert values == 2 * (4 * 128 * 128 + 3 * 384 * 128)
    assert 0.25 < sum(p.nbytes for p in held) / (2 * values) < 0.261
    floats = []

    def note(tensor):
        if tensor.is_floating_point() and tensor.shape in ((384, 128), (128, 384), (128, 128)):
            floats.append(tensor.shape)
        return tensor

    layer = model.layers[0].feed_forward.gate
    x = torch.randn(5, 128, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(x).sum().backward()
    assert floats == []
    assert x.grad is not None
    fk.merge_lora(model)
    assert layer.merged.dtype == torch.bfloat16


@pytest.mark.oracle
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_have_the_gradient_of_plain_ones(backend):
    def gradients(**options):
        state = lay_out(move(build("packed", torch.float32)), **options)
        return mean_gradients(state, [row[0] for row in batches_of(1)], loss_fn)

    expected = gradients()
    with warnings.catch_warnings():
        # torch's own compiler does all three, at import and while it traces.
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", ".*Function.*should not be instantiated")
        chosen = partial(compile_blocks, backend=backend)
        with patch("forgekit.parallel.parallelize.compile_blocks", chosen):
            found = gradients(compile=True)
    fk.shutdown()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    for name, wanted in expected.items():
        assert relative_error({name: found[name]}, {name: wanted}) < 1e-5, name


def test_published_weights_are_packed_as_they_are_read_and_what_is_merged_is_exported(tmp_path):
    source = fk.Transformer(PACKED, seed=9)
    fk.save_huggingface(source, tmp_path / "base")
    model = move(build("packed", torch.float32))
    fk.load_huggingface(model, tmp_path / "base")
    weights = dict(source.named_parameters())
    for name, found in packed_of(model).items():
        assert torch.equal(found, pack(weights[name])), name
    assert torch.equal(model.embedding.weight, source.embedding.weight)
    with pytest.raises(CheckpointError, match="has an adapter that is not merged"):
        fk.save_huggingface(model, tmp_path / "merged")
    fk.merge_lora(model)
    fk.save_huggingface(model, tmp_path / "merged")
    again = fk.Transformer(PACKED)
    fk.load_huggingface(again, tmp_path / "merged")
    ids = torch.arange(12).view(1, 12)
    assert torch.allclose(again(ids), model(ids), rtol=0, atol=1e-5)
    assert not torch.equal(
        again.layers[0].attention.query.weight, weights["layers.0.attention.query.weight"]
    )


def in_4_bits(targets, base="nf4", **changes):
    sizes = {"vocab_size": 128, "dim": 128, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_dim": 128}
    spec = fk.TransformerSpec(**sizes, max_seq_len=8, **changes)
    return fk.add_lora(fk.Transformer(spec), targets=targets, base=base)


MOE = fk.MoESpec(experts=2, top_k=1, ffn_dim=128)
REFUSED = [
    (lambda: in_4_bits(("*.query", "*.value")), r"value' has shape \[64, 128\]; .* packs 16384 v"),
    (lambda: in_4_bits(("*.query", "output")), "'output' is the output projection; base="),
    (lambda: in_4_bits("*.experts.up", moe=MOE), r"experts\.up' is of experts; base="),
    (lambda: in_4_bits("*.query", base="int4"), r"base is 'int4'; it must be one of \"nf4\"\."),
    (lambda: read_plan(in_4_bits("*.query"), 2), "query' is packed .*, which FSDP alone can shard"),
    (lambda: relora(alone(in_4_bits("*.query")), every=1), "a merge into four bits would round"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_packed_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_foreign_model_is_filled_as_it_would_be_unpacked():
    with torch.device("meta"):
        model = fk.add_lora(nn.Sequential(nn.Linear(128, 128)), targets="0", base="nf4")
    model.to_empty(device="cpu")
    fk.init_weights(model, 4)
    plain = nn.Sequential(nn.Linear(128, 128))
    fk.init_weights(plain, 4)
    assert torch.equal(model[0].weight, pack(plain[0].weight))
    assert torch.equal(model[0].bias, plain[0].bias)
