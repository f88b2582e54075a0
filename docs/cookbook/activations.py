"""Keep what modules return, micro-batch by micro-batch, in a safetensors file.

Under FSDP each rank keeps its own rows (give each a file of its own); under tensor parallelism the
parts are DTensors, and `output.to_local()` is this rank's. With activation checkpointing a module
runs a second time in the backward pass, which would be kept too.
"""

from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

import forgekit as fk

spec = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=16
)


@contextmanager
def captured(model, patterns, path):
    """Write the outputs of modules whose names match as `<module>/<call>`."""
    kept = {}

    def keep(name):
        def hook(_module, _inputs, output):
            call = sum(key.startswith(f"{name}/") for key in kept)
            kept[f"{name}/{call}"] = output.detach().to("cpu", copy=True).contiguous()

        return hook

    hooks = [
        module.register_forward_hook(keep(name))
        for name, module in model.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    save_file(kept, path)


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


ids = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(0))
batches = TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, [8]).split(4)
model = fk.Transformer(spec, seed=0)
state = fk.TrainState.create(model, fk.adamw(model))
with captured(model, ["layers.*.attention", "norm"], "activations.safetensors"):
    fk.accumulate(state, batches, loss_fn)

found = load_file("activations.safetensors")
for name, value in sorted(found.items()):
    print(f"{name:22} {list(value.shape)} rms {value.square().mean().sqrt():.4f}")
for call, batch in enumerate(batches):
    logits = found[f"norm/{call}"] @ model.output.weight.T
    print("logits as of the model:", torch.allclose(logits, model(batch["input_ids"]), atol=1e-6))
