"""Classify images with a small vision transformer, and report its accuracy.

Nothing of the step is about text: a batch is any TensorDict, a loss any sum with a count. Metrics
are (sum, count) pairs, so accuracy is exact over micro-batches and ranks.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from tensordict import TensorDict
from torch import nn

import forgekit as fk


class VisionTransformer(nn.Module):
    def __init__(self, dim=32, classes=4):
        super().__init__()
        self.patches = nn.Linear(16, dim)
        self.positions = nn.Parameter(torch.randn(4, dim))
        self.block = nn.TransformerEncoderLayer(dim, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        patches = rearrange(images, "b (y h) (x w) -> b (y x) (h w)", h=4, w=4)
        return self.head(self.block(self.patches(patches) + self.positions).mean(1))


def loss_fn(model, batch):
    logits, label = model(batch["image"]), batch["label"]
    right = (logits.argmax(-1) == label).sum()
    loss = F.cross_entropy(logits, label, reduction="sum")
    return fk.Loss(loss, len(label), is_nll=True).with_metrics(accuracy=(right, len(label)))


def images(seed, rows=32):
    """Noise with one bright quarter: the class says which."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(rows, 8, 8, generator=generator)
    label = torch.randint(4, (rows,), generator=generator)
    bright = rearrange(F.one_hot(label, 4).float(), "b (y x) -> b y 1 x 1", y=2)
    image += bright.expand(rows, 2, 4, 2, 4).reshape(rows, 8, 8)
    return TensorDict({"image": image, "label": label}, [rows])


torch.manual_seed(0)
model = VisionTransformer()
state = fk.TrainState.create(model, fk.adamw(model))
step = fk.make_step(loss_fn, schedule=fk.warmup_cosine(peak=5e-3, warmup=5, total=60))
for number in range(60):
    state, metrics = step(state, [images(number)])
held_out = fk.evaluate(state, [images(1000), images(1001)], loss_fn)
print(f"accuracy on {int(held_out['targets'])} held-out images {held_out['accuracy']:.2f}")
