"""Models of transformers as they are: built on meta, sharded by their own plan, read, written."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from huggingface_models import MODELS, MORE, SIZES, save_model, some_ids
from lab import full_tensors, relative_error
from pool import run_ranks
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import forgekit as fk
from forgekit.huggingface.transformers_models import transformers_names
from forgekit.parallel.expert import find_experts
from forgekit.parallel.tensor.plan import read_plan

EVEN = {"vocab_size": 32}
LAYOUTS = {"fsdp2": {"dp_shard": 2}, "tp2": {"dp_shard": 1, "tp": 2}}
LAYOUTS |= {"pp2": {"pp": 2, "dp_shard": 1}, "fsdp2-tp2": {"dp_shard": 2, "tp": 2}}
LAYOUTS |= {"pp2-tp2": {"pp": 2, "dp_shard": 1, "tp": 2}}
STEPS = 2


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]).logits, batch["labels"])


def micro_batches(step):
    """Two of four rows, with ragged numbers of targets."""
    ids = some_ids(32, (8, 13))
    labels = ids[:, 1:].clone()
    labels[:, : 3 + step] = -100
    labels[1, 2:] = -100
    batch = TensorDict({"input_ids": ids[:, :-1], "labels": labels}, batch_size=[8])
    return batch.chunk(2)


def build(kind, device, dtype=torch.float64, **changes):
    import transformers

    name = kind.split()[0]
    sizes = {**SIZES, **{**MODELS, **MORE}.get(kind, {}), **EVEN, **changes}
    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = model_class.config_class(**sizes, use_cache=False)
    if dtype == torch.float64:  # grouped products know no other
        config._experts_implementation = "eager"
    with torch.device(device):
        model = model_class(config).train().to(dtype)
    for module in model.modules():  # theirs compute in float32, whatever they are given
        if dtype == torch.float64 and "RMSNorm" in type(module).__name__:
            module.forward = partial(_norm, module)
        if dtype == torch.float64 and hasattr(module, "scalar_embed_scale") and device == "cpu":
            module.embed_scale.fill_(module.scalar_embed_scale)  # it was rounded to float32
    return model


def _norm(module, x):
    if hasattr(module, "eps"):  # Gemma's
        return F.rms_norm(x, x.shape[-1:], 1 + module.weight, module.eps)
    return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def train(model, mesh, rank=0, world=1, steps=STEPS, loss=loss_fn):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained)  # Adam's first step knows signs alone
    state = fk.TrainState.create(model, optimizer, mesh=mesh)
    step = fk.make_step(loss, schedule=fk.constant(0.5), max_norm=1.0)
    losses = []
    for number in range(steps):
        state, metrics = step(state, [b.chunk(world)[rank] for b in micro_batches(number)])
        losses.append(float(metrics["loss"]))
    return state, losses


def train_plainly(model, parameters, weights=dict):
    """What plain torch makes of all rows in one process: each step's loss."""
    for number in range(STEPS):
        batch, optimizer = torch.cat(micro_batches(number)), torch.optim.SGD(parameters, lr=0.5)
        logits = torch.func.functional_call(model, weights(), (batch["input_ids"],)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def evaluated(state):
    return float(fk.evaluate(state, micro_batches(5), loss_fn)["loss"])


def continued(model):
    prompts = [torch.tensor([3, 1, 4]), torch.tensor([1, 5]), torch.tensor([9, 2, 6, 5])]
    return fk.generate(model, prompts, max_new_tokens=5, temperature=0)


def _trained(rank, world, kinds, layout, directory, dtype):
    found = {}
    # A mesh that a user makes, with the dimensions that there are.
    sizes = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data_rank, data_world = fk.data_ranks(mesh)
    for kind in kinds:
        model = fk.parallelize(build(kind, "meta", dtype), mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        base = directory / kind / "base"
        fk.load_huggingface(model, base)
        state, losses = train(model, mesh, data_rank, data_world)
        fk.save_huggingface(state.model, directory / kind / "tuned", like=base)
        text = None if "pp" in layout else continued(state.model)
        found[kind] = full_tensors(state.model), losses, evaluated(state), text
    return found


def check(kinds, layout, world, directory, dtype=torch.float64):
    models = {kind: save_model(kind, directory / kind / "base", **EVEN) for kind in kinds}
    results = run_ranks(_trained, world, kinds, layout, directory, dtype, timeout_s=120)
    for kind, model in models.items():
        has_router = kind in ("Qwen3Moe", "Mixtral", "GptOss")  # which computes in float32
        tolerance = 1e-3 if dtype == torch.float32 else 1e-6 if has_router else 1e-10
        base, tuned = (load_all(directory / kind / name) for name in ("base", "tuned"))
        assert tuned.keys() == base.keys()
        before = {name: p.detach().to(dtype).clone() for name, p in model.named_parameters()}
        reference = build(kind, "cpu", dtype)
        reference.load_state_dict(model.state_dict())
        losses = [*train_plainly(reference, [*reference.parameters()])]
        expected = full_tensors(reference)
        loss, text = evaluated(train(reference, None, steps=0)[0]), continued(reference)
        found = {}
        for result in results:
            found |= result[kind][0]
            assert result[kind][1] == pytest.approx(losses, rel=tolerance)
            assert result[kind][2] == pytest.approx(loss, rel=tolerance)
            assert result[kind][3] is None or all(map(torch.equal, result[kind][3], text))
        moved = {name: p - before[name] for name, p in expected.items()}
        assert found.keys() == moved.keys()
        assert all(float(change.abs().max()) > 1e-4 for change in moved.values())
        assert relative_error({n: p - before[n] for n, p in found.items()}, moved) < tolerance
        fk.load_huggingface(reference, directory / kind / "tuned")
        assert relative_error(full_tensors(reference), found) == 0


SOME = [("Mixtral", "tp2"), ("Llama llama3", "pp2"), ("Olmo2", "tp2")]


@pytest.mark.parametrize(("kind", "layout"), SOME)
def test_a_model_of_transformers_trains_as_in_one_process(kind, layout, tmp_path):
    """From its directory into shards, two steps in float64, and every parameter out again."""
    check((kind,), layout, 2, tmp_path)


ALL = ("Llama llama3", "Llama yarn", "Mistral", "Qwen2", "Qwen3 untied", "Qwen3Moe", "Mixtral")
ALL = (*ALL, "Gemma3 untied", "Olmo2", "Phi3")
TIED = ("Llama tied", "Qwen3", "Gemma3")


@pytest.mark.oracle
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_kinds_train_as_in_one_process(layout, tmp_path):
    world = 4 if "-" in layout else 2
    kinds = ALL if "pp" in layout else (*ALL, *TIED)
    kinds = kinds if "tp" in layout else (*kinds, "GptOss")  # it has no plan
    check(kinds, layout, world, tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_grouped_products_of_experts_train_as_in_one_process(layout, tmp_path):
    check(("Qwen3Moe", "Mixtral"), layout, 2, tmp_path, torch.float32)


TARGETS = dict.fromkeys(("Gemma3", "Olmo2"), ("*.q_proj", "*.o_proj", "*.down_proj"))
TARGETS |= {"GptOss": ("*.q_proj", "*.o_proj")}
TARGETS |= {"Phi3": ("*.qkv_proj", "*.o_proj", "*.gate_up_proj")}
"""Matrices with adapters, by kind."""


def head_loss(model, batch):
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    return model(batch["input_ids"], head=head)


def adapted(kind, device):
    return fk.add_lora(build(kind, device), rank=2, alpha=6.0, targets=TARGETS[kind], seed=3)


def _tuned(rank, world, kinds, layout, directory):
    mesh = fk.build_mesh(fk.MeshSpec(**LAYOUTS[layout]), device="cpu")
    data_rank, data_world = fk.data_ranks(mesh)
    for kind in kinds:
        model = fk.parallelize(adapted(kind, "meta"), mesh, head="lm_head")
        fk.load_huggingface(model, directory / kind / "base")
        state, _ = train(model, mesh, data_rank, data_world, loss=head_loss)
        fk.save_adapter(state.model, directory / kind / "adapter")
        fk.merge_lora(state.model)
        fk.save_huggingface(state.model, directory / kind / layout, like=directory / kind / "base")


def tuned_plainly(kind, model):
    """What plain torch makes of the factors, added to each weight by hand."""
    reference = build(kind, "cpu")
    reference.load_state_dict(model.state_dict())
    base = full_tensors(reference)
    drawn = {n: p for n, p in adapted(kind, "cpu").named_parameters() if "lora_" in n}
    factors = {name: p.detach().clone().requires_grad_() for name, p in drawn.items()}

    def weights():
        ends = [name.removesuffix("lora_A") for name in factors if name.endswith("lora_A")]
        moved = {f"{e}weight": factors[f"{e}lora_B"] @ factors[f"{e}lora_A"] for e in ends}
        return base | {name: base[name] + 3.0 * product for name, product in moved.items()}

    assert len([*train_plainly(reference, [*factors.values()], weights)]) == STEPS
    return {name: weight.detach() for name, weight in weights().items()}, base


@pytest.mark.oracle
@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_adapters_and_a_head_of_other_kinds_train_as_in_one_process(layout, tmp_path):
    """And what is exported, merged, opens in transformers."""
    import transformers

    kinds = [kind for kind in TARGETS if (kind, layout) != ("GptOss", "tp2")]
    models = {kind: save_model(kind, tmp_path / kind / "base", **EVEN) for kind in kinds}
    run_ranks(_tuned, 2, kinds, layout, tmp_path, timeout_s=120)
    for kind, model in models.items():
        expected, base = tuned_plainly(kind, model)
        opened = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / kind / layout, dtype=torch.float64
        )
        found = full_tensors(opened)
        moved = {n: p - base[n] for n, p in expected.items() if not torch.equal(p, base[n])}
        assert len(moved) == 3 * len(TARGETS[kind])
        assert all(torch.equal(found[n], p) for n, p in base.items() if n not in moved)
        tolerance = 1e-6 if kind == "GptOss" else 1e-10
        assert relative_error({n: found[n] - base[n] for n in moved}, moved) < tolerance


def test_other_kinds_compute_what_transformers_does_and_are_written_as_they_were(tmp_path):
    """Built on meta, so that each module's buffers are computed again."""
    import transformers

    mesh, ids = fk.build_mesh(fk.MeshSpec(), device="cpu"), some_ids(32)
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    try:
        for kind in TARGETS:
            theirs = save_model(kind, tmp_path / kind, **EVEN)
            model = fk.huggingface.transformers_model(tmp_path / kind, use_cache=False)
            model = fk.parallelize(model, mesh, head="lm_head").eval()
            fk.load_huggingface(model, tmp_path / kind)
            assert torch.equal(model(ids).logits, theirs(ids).logits)
            fk.save_huggingface(model, tmp_path / kind / "ours", like=tmp_path / kind)
            again = load(tmp_path / kind / "ours").eval()
            assert torch.equal(again(ids).logits, theirs(ids).logits)
    finally:
        fk.shutdown()  # other tests of this process have no process group


def load_all(directory):
    return dict(
        item for path in directory.glob("*.safetensors") for item in load_file(path).items()
    )


def test_what_other_kinds_do_not_have_is_refused(tmp_path):
    model = build("GptOss", "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"^tp is 2 and GptOssForCausalLM has no plan of its own"):
        read_plan(model, 2)
    for pattern in ("*.experts", "*.router"):
        with pytest.raises(ValueError, match="no linear layer or stack of experts matches"):
            fk.add_lora(model, targets=pattern)
    save_model("GptOss", tmp_path, max_shard_size="1GB", **EVEN)
    tensors = load_file(tmp_path / "model.safetensors")
    packed = {name: t for name, t in tensors.items() if not name.endswith("gate_up_proj")}
    packed |= {f"{name}_blocks": tensors[name].byte() for name in tensors.keys() - packed}
    save_file(packed, tmp_path / "model.safetensors")
    with pytest.raises(fk.CheckpointError, match=r"fit the model: it lacks '.*gate_up_proj'"):
        fk.load_huggingface(model, tmp_path)


def test_models_that_do_not_fit_are_refused(tmp_path):
    save_model("Mistral", tmp_path, **EVEN)
    with pytest.raises(fk.CheckpointError, match="its model_type is 'mistral', not 'llama'"):
        fk.load_huggingface(build("Llama", "cpu"), tmp_path)
    model = build("Qwen3Moe", "meta")
    with pytest.raises(ValueError, match="no plan names the experts of Qwen3Moe"):
        find_experts(model, None)
    model.config.model_type = "other"
    with pytest.raises(fk.CheckpointError, match="gate_up_proj' contains all experts of a layer; "):
        transformers_names(model)
    model.config.base_model_tp_plan = {"layers.*.mlp.down_proj": "packed_rowwise"}
    with pytest.raises(ValueError, match=r"layers\.\*\.mlp\.down_proj: packed_rowwise', an un"):
        read_plan(model, 2)
