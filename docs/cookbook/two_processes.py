"""One script for one process or many: `torchrun --nproc-per-node 2 two_processes.py`.

`build_mesh` reads what torchrun or srun says; `parallelize` shards the model with FSDP. Loss and
norm are those of one process, because ranks add sums and divide once.
"""

import torch
from tensordict import TensorDict

import forgekit as fk

spec = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=16
)


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def rows(step):
    """Eight rows for all ranks together, the first four of them short."""
    ids = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(step))
    labels = ids[:, 1:].clone()
    labels[:4, 3:] = -100
    return TensorDict({"input_ids": ids[:, :-1], "labels": labels}, [8])


mesh = fk.build_mesh(fk.MeshSpec(dp_shard=-1), device="cpu")
rank, world = fk.data_ranks(mesh)
with torch.device("meta"):
    model = fk.Transformer(spec)
model = fk.parallelize(model, mesh, seed=0)
state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh, seed=0)
step = fk.make_step(loss_fn, schedule=fk.optim.constant(1e-2))
for number in range(5):
    batch = rows(number)[rank * 8 // world : (rank + 1) * 8 // world]
    state, metrics = step(state, [batch])
    if fk.mesh.process_rank() == 0:
        print(f"step {state.step}  loss {metrics['loss']:.5f}  norm {metrics['grad_norm']:.5f}")
fk.shutdown()
