"""A frozen teacher on several ranks: `torchrun --nproc-per-node 2 teacher_on_ranks.py`.

The teacher is sharded over the same mesh as the student, so it may be larger than one device. It
is gathered block by block for its forward pass and has no gradients. The loss is a sum over
positions: the printed divergence does not depend on the number of processes.
"""

from functools import partial

import attrs
import torch
import torch.nn.functional as F
from tensordict import TensorDict

import forgekit as fk

SIZES = {"vocab_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "max_seq_len": 16}


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Distilling(fk.TrainState):
    teacher: torch.nn.Module = attrs.field(repr=False, metadata={"checkpoint": False})


def loss_fn(teacher, model, batch):
    with torch.no_grad():
        target = (20 * teacher(batch["input_ids"])).log_softmax(-1)  # a teacher with an opinion
    learned = model(batch["input_ids"]).log_softmax(-1)
    divergence = F.kl_div(learned, target, reduction="none", log_target=True).sum(-1)
    is_target = batch["labels"] != -100
    return fk.Loss(torch.where(is_target, divergence, 0).sum(), is_target.sum())


def rows(step):
    """Eight rows for all ranks together, the first four of them short."""
    ids = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[:4, 5:] = -100
    return TensorDict({"input_ids": ids, "labels": labels}, [8])


def sharded(mesh, seed, **sizes):
    with torch.device("meta"):
        model = fk.Transformer(fk.TransformerSpec(**sizes, **SIZES))
    return fk.parallelize(model, mesh, seed=seed)


mesh = fk.build_mesh(fk.MeshSpec(dp_shard=-1), device="cpu")
rank, world = fk.data_ranks(mesh)
teacher = sharded(mesh, 1, dim=32, ffn_dim=64).requires_grad_(False).eval()
student = sharded(mesh, 0, dim=16, ffn_dim=32)
state = Distilling.create(student, fk.adamw(student), mesh=mesh, teacher=teacher)
step = fk.make_step(partial(loss_fn, state.teacher), schedule=fk.optim.constant(1e-2))
for number in range(30):
    batch = rows(number)[rank * 8 // world : (rank + 1) * 8 // world]
    state, metrics = step(state, [batch])
    if number % 10 == 9 and fk.mesh.process_rank() == 0:
        print(f"step {state.step}  divergence from the teacher {metrics['loss']:.5f}")
fk.shutdown()
