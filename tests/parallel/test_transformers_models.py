"""Models of transformers as they are: built on meta, sharded by their own plan, read, written."""

from __future__ import annotations

import pytest
import torch
from oracle import relative_error
from ranks import run_ranks
from run.huggingface_models import MODELS, SIZES, save_model, some_ids
from safetensors.torch import load_file
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

import forgekit as fk
from forgekit.run.huggingface.names import NameMap, named_tensors, rename

EVEN = {"vocab_size": 32}
LAYOUTS = {"fsdp2": {"dp_shard": 2}, "tp2": {"tp": 2, "dp_shard": 1}}


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]).logits, batch["labels"])


def a_batch():
    ids = some_ids(32, (4, 13))
    return TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, batch_size=[4])


def a_step(model, mesh, batch):
    optimizer = torch.optim.SGD(model.parameters())  # Adam's first step knows signs alone
    state = fk.TrainState.create(model, optimizer, mesh=mesh)
    step = fk.make_step(loss_fn, schedule=fk.constant(0.1), max_norm=1.0)
    state, metrics = step(state, [batch])
    return state.model, float(metrics["loss"])


def build(kind, device):
    import transformers

    name = kind.split()[0]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[kind], **EVEN})
    config.use_cache = False
    with torch.device(device):
        return getattr(transformers, f"{name}ForCausalLM")(config).train()


def _as_it_is(rank, world, kind, layout, directory):
    model = build(kind, "meta")
    names = NameMap([rename(name, name) for name in named_tensors(model)], model)
    mesh = fk.build_mesh(fk.MeshSpec(**LAYOUTS[layout]), device="cpu")
    model = fk.parallelize(model, mesh, blocks="model.layers", seed=3)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    fk.load_huggingface(model, directory / "base", names=names)
    like = directory / "base"
    fk.save_huggingface(model, directory / "same", names=names, like=like)
    batch = a_batch()
    rows = batch.chunk(world)[rank] if layout == "fsdp2" else batch
    model, loss = a_step(model, mesh, rows)
    fk.save_huggingface(model, directory / "tuned", names=names, like=like)
    return loss


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("Llama llama3", "fsdp2"),
        ("Qwen3 untied", "tp2"),
        *(
            pytest.param(*case, marks=pytest.mark.oracle)
            for case in (
                ("Llama llama3", "tp2"),
                ("Llama yarn", "fsdp2"),
                ("Qwen3 untied", "fsdp2"),
                ("Mistral", "fsdp2"),
                ("Mistral", "tp2"),
            )
        ),
    ],
)
def test_a_model_of_transformers_is_loaded_stepped_and_written_sharded(kind, layout, tmp_path):
    save_model(kind, tmp_path / "base", **EVEN)
    losses = run_ranks(_as_it_is, 2, kind, layout, tmp_path)
    base, same = (load_all(tmp_path / name) for name in ("base", "same"))
    assert base.keys() == same.keys()
    assert all(torch.equal(tensor, same[name]) for name, tensor in base.items())
    model = build(kind, "cpu")
    names = NameMap([rename(name, name) for name in named_tensors(model)], model)
    fk.load_huggingface(model, tmp_path / "base", names=names)
    model, loss = a_step(model, None, a_batch())
    assert losses == pytest.approx([loss] * 2, rel=1e-5)
    tuned = load_all(tmp_path / "tuned")
    expected = {name: tensor.detach() for name, tensor in model.named_parameters()}
    assert relative_error(tuned, expected) < 1e-4
    assert relative_error(tuned, base) > 1e-3


def load_all(directory):
    found = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.bad_input
def test_a_plan_with_a_style_of_theirs_alone_is_refused():
    from forgekit.parallel.tensor.plan import read_plan

    model = build("Llama", "meta")
    model.config.base_model_tp_plan = {"layers.*.mlp.down_proj": "packed_rowwise"}
    message = r"^the plan of LlamaForCausalLM has 'layers\.\*\.mlp\.down_proj: packed_rowwise', and"
    with pytest.raises(ValueError, match=message):
        read_plan(model, 2)
