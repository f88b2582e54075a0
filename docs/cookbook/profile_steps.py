"""Profile two steps with torch's profiler, after one that warms up.

`schedule` waits and warms up as long as it says; the trace opens in https://ui.perfetto.dev.
"""

from pathlib import Path

import torch
from tensordict import TensorDict
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import forgekit as fk

spec = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, max_seq_len=16
)


def loss_fn(model, batch):
    with record_function("loss"):
        return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


model = fk.Transformer(spec, seed=0)
state = fk.TrainState.create(model, fk.adamw(model))
step = fk.make_step(loss_fn, schedule=fk.optim.constant(1e-3))
ids = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(0))
batch = TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, [8])

activities = [ProfilerActivity.CPU]
if torch.cuda.is_available():
    activities.append(ProfilerActivity.CUDA)
window = schedule(wait=0, warmup=1, active=2, repeat=1)
with profile(activities=activities, schedule=window, acc_events=True) as profiler:
    for _ in range(3):
        with record_function("step"):
            state, _ = step(state, [batch, batch])
        profiler.step()
profiler.export_chrome_trace("trace.json")

calls = {event.key: event.count for event in profiler.key_averages()}
print(f"steps {calls['step']}, losses {calls['loss']}, trace {Path('trace.json').exists()}")
print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=5))
