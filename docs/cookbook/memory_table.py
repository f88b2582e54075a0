"""List the tensors that Python holds, the largest kinds first.

Views share a storage, which counts once. What only a graph of autograd holds is not seen, and
neither is what `gc.freeze` has set aside.
"""

import gc
from collections import Counter

import torch

import forgekit as fk

spec = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=16
)
model = fk.Transformer(spec, seed=0)

sizes, counts, storages = Counter(), Counter(), set()
for tensor in gc.get_objects():
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta":
        kind = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        storage = tensor.untyped_storage()
        counts[kind] += 1
        if storage.data_ptr() not in storages:
            storages.add(storage.data_ptr())
            sizes[kind] += storage.nbytes()

for kind, size in sizes.most_common(5):
    print(f"{size} bytes in {counts[kind]} x {kind}")
held = sum(p.numel() * p.element_size() for p in model.parameters())
print(f"all {sum(sizes.values())} bytes, of which {held} are parameters")
