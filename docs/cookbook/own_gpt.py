"""A GPT of your own in every layout: a plan for its matrices, `blocks` for FSDP and pipelines.

    python own_gpt.py
    torchrun --nproc-per-node 4 own_gpt.py mesh.tp=2
    forgekit verify own_gpt.py mesh.tp=2    # every gradient against one process, in float64
    forgekit verify own_gpt.py mesh.pp=2

Heads are counted from the width at hand, because under `tp` a rank has some of them.
"""

import attrs
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import nn

import forgekit as fk
from forgekit.config import key, load_config

VOCAB, DIM, HEAD, LAYERS, SEQ_LEN = 64, 64, 16, 4, 32
PLAN = {
    "tokens": "embedding",
    "positions": "replicate",
    "*norm": "replicate",
    **dict.fromkeys(["h.*.query", "h.*.key", "h.*.value", "h.*.up", "head"], "colwise"),
    **dict.fromkeys(["h.*.project", "h.*.down"], "rowwise"),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query, self.key, self.value, self.project = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        y = self.attention_norm(x)
        q, k, v = (
            linear(y).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ_LEN, DIM)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


def counting(row):
    """Row number `row`: tokens that count on from a start, modulo the vocabulary."""
    tokens = (7 * row + torch.arange(SEQ_LEN + 1)) % VOCAB
    return TensorDict({"input_ids": tokens[:-1], "labels": tokens[1:]}, [])


@attrs.frozen(kw_only=True)
class Config:
    steps: int = key(40, "Optimizer steps.")
    batch_size: int = key(4, "Rows per rank and micro-batch.")
    global_batch_size: int = key(8, "Rows per step, over all ranks.")
    mesh: fk.MeshSpec = fk.MeshSpec()


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def setup(config):
    mesh = fk.build_mesh(config.mesh, device="cpu")
    with torch.device("meta"):
        model = GPT()
    model = fk.parallelize(model, mesh, plan=PLAN, blocks="h", seed=0)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    schedule = fk.warmup_cosine(3e-3, warmup=5, total=config.steps)
    stop = fk.StopSignal()
    step = fk.make_step(loss_fn, schedule=schedule, max_norm=1.0, stop=stop)
    loader = fk.train_loader(state, [counting(row) for row in range(256)], config.batch_size)
    return fk.Setup(state=state, step=step, loader=loader, loss_fn=loss_fn, stop=stop)


def main():
    config = load_config(Config)
    built = setup(config)
    state, micro_batches = built.state, built.loader.micro_batches(config.global_batch_size)
    with built.stop, built.loader as loader:
        for batches in fk.groups(loader, micro_batches):
            state, metrics = built.step(state, batches)
            if state.step in (1, config.steps) and fk.mesh.process_rank() == 0:
                print(f"step {state.step}  loss {metrics['loss']:.5f}")
            if state.step == config.steps:
                break
    fk.shutdown()


if __name__ == "__main__":
    main()
