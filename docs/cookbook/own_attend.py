"""Attention of your own in the model's `attend` socket: a sliding window of four positions.

The socket takes `q [b s h c]`, `k` and `v [b s k c]` and the document ids, and returns `[b s h c]`.
`parallelize` replaces it under context parallelism, where ranks share sequences.
"""

from functools import partial

import torch
import torch.nn.functional as F

import forgekit as fk


def attend_window(q, k, v, *, doc_ids=None, window):
    positions = torch.arange(q.shape[1], device=q.device)
    distance = positions[:, None] - positions
    mask = (distance >= 0) & (distance < window)
    if doc_ids is not None:
        mask = mask & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)


spec = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=32, max_seq_len=16
)
model = fk.Transformer(spec, seed=0).double()
ids = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
everything = model(ids)

for layer in model.layers:
    layer.attention.attend = partial(attend_window, window=16)
print(f"a window of all positions changes {(model(ids) - everything).abs().max():.1e}")

for layer in model.layers:
    layer.attention.attend = partial(attend_window, window=4)
other = ids.clone()
other[:, 0] = (ids[:, 0] + 1) % 32
change = (model(ids) - model(other)).abs().amax((0, 2))
reached = int(change.nonzero().max())
print(f"position 0 reaches up to position {reached}")  # two layers of three positions each
