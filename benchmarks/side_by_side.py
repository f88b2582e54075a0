"""One training step by hand, in forgekit, in Accelerate, in Fabric and in the Trainer.

Model, optimizer, batches on the device and learning rates are the same. bfloat16 comes from each
library's own autocast; ``parallelize`` casts parameters.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from bare import MAX_NORM, SCHEDULE, Size, bare_loss, bare_step, our_step
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

import forgekit as fk

Step = Callable[[], Any]


@attrs.frozen
class Task:
    """A model of a size on a device, its blocks compiled if there is a backend for it."""

    size: Size
    device: str
    backend: str | None = None
    closing: ExitStack = attrs.field(factory=ExitStack)


def build(task: Task) -> tuple[fk.Transformer, list[Any]]:
    """Build the model and the micro-batches of every step, the same at every call."""
    model = task.size.model(task.device)
    for layer in model.layers if task.backend else ():
        layer.compile(backend=task.backend)
    return model, task.size.batches(task.device)


def by_hand(task: Task) -> Step:
    model, batches = build(task)
    model.forward = torch.autocast(task.device, torch.bfloat16)(model.forward)
    return bare_step(model, batches)


def with_make_step(task: Task) -> Step:
    def loss_fn(model: nn.Module, batch: Any) -> fk.Loss:
        with torch.autocast(task.device, torch.bfloat16):
            logits = model(batch["input_ids"])
        return fk.cross_entropy(logits, batch["labels"])

    return our_step(*build(task), loss_fn)


def with_parallelize(task: Task) -> Step:
    mesh, is_compiled = fk.build_mesh(device=task.device), task.backend == "inductor"
    model = fk.parallelize(task.size.model(), mesh, precision="bf16", compile=is_compiled)
    return our_step(model, task.size.batches(task.device), mesh=mesh)


def with_accelerate(task: Task) -> Step:
    from accelerate import Accelerator

    model, batches = build(task)
    options = {"gradient_accumulation_steps": len(batches), "cpu": task.device == "cpu"}
    accelerator = Accelerator(mixed_precision="bf16", **options)
    model, optimizer = accelerator.prepare(model, fk.adamw(model))
    clip = partial(accelerator.clip_grad_norm_, model.parameters(), MAX_NORM)
    around = partial(accelerator.accumulate, model)  # whose backward divides the loss
    return _looped(model, optimizer, batches, lambda _: around(), accelerator.backward, clip)


def with_fabric(task: Task) -> Step:
    from lightning.fabric import Fabric

    model, batches = build(task)
    fabric = Fabric(accelerator=task.device, devices=1, precision="bf16-mixed")
    model, optimizer = fabric.setup(model, fk.adamw(model))
    # By default it reads the norm on the host.
    options = {"max_norm": MAX_NORM, "error_if_nonfinite": False}
    clip = partial(fabric.clip_gradients, model, optimizer, **options)
    around = partial(fabric.no_backward_sync, model)
    backward = lambda loss: fabric.backward(loss / len(batches))  # noqa: E731
    return _looped(model, optimizer, batches, lambda last: around(enabled=not last), backward, clip)


def _looped(
    model: Any, optimizer: Any, batches: list[Any], around: Any, backward: Any, clip: Any
) -> Step:
    """Write the loop of both libraries' guides on gradient accumulation."""
    rates = map(SCHEDULE, count())

    def step() -> Tensor:
        rate, losses = next(rates), []
        for group in optimizer.param_groups:
            group["lr"] = rate
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)
            with around(is_last):
                losses.append(bare_loss(model, batch) / batch["labels"].numel())
                backward(losses[-1])
                if is_last:
                    clip()
                    optimizer.step()
                    optimizer.zero_grad()
        return torch.stack([loss.detach() for loss in losses]).mean()

    return step


def with_trainer(task: Task) -> Step:
    """Run the Trainer's own loop in a thread that waits before each step until it may go on."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, batches = build(task)
    barrier, losses = threading.Barrier(2), []

    class Waiting(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            barrier.wait()

        on_step_end = on_step_begin

    def loss_of(logits: Tensor, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        losses.append(loss.detach() / num_items_in_batch)
        return loss / num_items_in_batch

    options: dict[str, Any] = {"max_steps": 10**6, "max_grad_norm": MAX_NORM, "bf16": True}
    options |= {"gradient_accumulation_steps": len(batches), "use_cpu": task.device == "cpu"}
    options |= {"logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
    folder = task.closing.enter_context(tempfile.TemporaryDirectory())
    arguments = TrainingArguments(folder, remove_unused_columns=False, report_to=[], **options)
    optimizer = fk.adamw(model, lr=1.0)
    pair = optimizer, LambdaLR(optimizer, SCHEDULE)
    trainer = Trainer(model, arguments, compute_loss_func=loss_of, optimizers=pair)
    trainer.add_callback(Waiting())
    loader = DataLoader(batches * 1000, batch_size=None, collate_fn=dict)
    trainer.get_train_dataloader = lambda: loader

    def work() -> None:
        try:
            trainer.train()
        except threading.BrokenBarrierError:
            return  # nobody asks for further steps
        finally:
            barrier.abort()

    def step() -> Tensor:
        losses.clear()
        barrier.wait()  # it begins
        barrier.wait()  # it has ended
        return torch.stack(losses).sum()

    thread = threading.Thread(target=work, daemon=True)
    task.closing.callback(thread.join)
    task.closing.callback(barrier.abort)
    thread.start()
    return step


def captured(step: Step) -> Step:
    """Replay a step as one CUDA graph: it can be captured, as it reads nothing on the host."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    hook = register_optimizer_step_pre_hook(_make_capturable)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # what a first step sets up belongs to no graph
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        loss = step()
    hook.remove()
    return lambda: graph.replay() or loss


def _make_capturable(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["capturable"] = True


BARE, AGAIN, STEP = "by hand", "by hand again", "make_step"
OURS: dict[str, Callable[[Task], Step]] = {BARE: by_hand, AGAIN: by_hand, STEP: with_make_step}
THEIRS = {"Accelerate": with_accelerate, "Fabric": with_fabric, "Trainer": with_trainer}
LAST = {"make_step, parallelize": with_parallelize}
"""Last, because it starts a process group, which the others would find."""
