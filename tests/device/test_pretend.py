"""The pretend device: each strictness and each delay in a small case that fails without it."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from device.pretend import NAME, watching
from pool import run_ranks
from torch.distributed.tensor import DTensor

SETUP = "device.pretend:install"


def filled(*values, pinned=True):
    tensor = torch.tensor(values)
    return tensor.pin_memory() if pinned else tensor


# Strict


def two_devices_in_one_operation_are_refused(_rank, _world):
    here, there = torch.ones(2), torch.ones(2, device=NAME)
    with pytest.raises(RuntimeError, match=r"all tensors to be on the same device, but aten.add"):
        there + here
    with pytest.raises(RuntimeError, match=r"all tensors to be on the same device, but aten.index"):
        there[torch.tensor([1])] = here[:1]
    assert (there + torch.tensor(2.0)).tolist() == [3.0, 3.0]
    with pytest.raises(TypeError, match="can't convert pretend:0 device type tensor to numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="Expected a 'pretend' device type for generator"):
        torch.randn(2, device=NAME, generator=torch.Generator())


WAITS = {
    "aten._local_scalar_dense": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "aten._local_scalar_dense, of a bool": lambda x: bool((x > 0).any()),
    "aten.nonzero": lambda x: x.nonzero(),
    "aten.index.Tensor": lambda x: x[x > 1],
    "aten.index_put_": lambda x: x.__setitem__(x > 1, x[:2].clone()),
    "aten.masked_select": lambda x: x.masked_select(x > 1),
    "aten.repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "aten.equal": lambda x: torch.equal(x, x),
    "aten._unique2": lambda x: x.unique(),
    "copy from the device": lambda x: x.cpu(),
    "copy to the device": lambda x: x.copy_(torch.zeros(3)),
    "copy to the device, of a number": lambda _: torch.tensor([1.0], device=NAME),
    "copy from the device, not pinned": lambda x: torch.empty(3).copy_(x, non_blocking=True),
    "pickle": lambda x: torch.save(x, "/dev/null"),
}


def each_wait_of_the_host_is_counted_with_its_lines(_rank, _world):
    for name, wait in WAITS.items():
        there = torch.tensor([1.0, 2.0, 3.0]).to(NAME)
        with watching() as ledger:
            wait(there)
        assert len(ledger.waits) == 1, (name, ledger.waits)
        assert ledger.waits[0].startswith(name.partition(", ")[0])
        assert re.search(r"test_pretend.py:\d+ <lambda>", ledger.waits[0])


def what_a_gpu_does_alone_is_no_wait(_rank, _world):
    there = torch.tensor([1.0, 2.0, 3.0]).to(NAME)
    with watching() as ledger:
        there.repeat_interleave(there.long(), output_size=6)
        there[there > 1] = 0.0
        there[torch.arange(0, 3, 2, device=NAME)] = there[:2].clone()
        there.add_(torch.full((), 2.0, device=NAME)).add_(torch.tensor(1.0)).mul_(3)
        there.to(torch.float64).to("cpu", non_blocking=True)
        there.copy_(filled(1.0, 2.0, 3.0), non_blocking=True)
        torch.zeros(3, device=NAME) + torch.arange(3, device=NAME)
    assert not ledger.waits
    assert ledger.copied == {"from": 24, "to": 12, "pageable": 0}


def its_random_numbers_are_its_own(_rank, _world):
    torch.manual_seed(0)
    device = torch.get_device_module(NAME)
    before, state = torch.get_rng_state(), device.get_rng_state()
    first = torch.randn(3, device=NAME)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, torch.randn(3, device=NAME))
    device.set_rng_state(state)
    torch.default_generator.manual_seed(5)
    assert torch.equal(first, torch.randn(3, device=NAME))


# Late


def a_copy_to_the_device_is_garbage_until_its_stream_goes_on(_rank, _world):
    host = filled(1.0, 2.0)
    there = host.to(NAME, non_blocking=True)
    assert there.raw.isnan().all()
    host[0] = 5.0
    assert (there + 1).tolist() == [6.0, 3.0]


def a_copy_in_another_stream_is_garbage_until_that_is_waited_for(_rank, _world):
    device = torch.get_device_module(NAME)
    side = device.Stream()
    with device.stream(side):
        there = filled(1.0, 2.0).to(NAME, non_blocking=True)
        event = side.record_event()
        late = filled(3.0).to(NAME, non_blocking=True)
    assert (there + 1).isnan().all()
    device.current_stream().wait_event(event)
    assert (there + 1).tolist() == [2.0, 3.0]
    assert (late + 1).isnan().all()
    device.current_stream().wait_stream(side)
    assert (late + 1).tolist() == [4.0]


def a_copy_to_the_host_is_garbage_until_the_host_waits(_rank, _world):
    device = torch.get_device_module(NAME)
    there = torch.ones(2, device=NAME)
    event, stream = device.Event(), device.current_stream()
    read = there.sum
    for wait in (event.synchronize, stream.synchronize, device.synchronize, lambda: read().item()):
        there.fill_(1.0)
        host = there.to("cpu", non_blocking=True)
        event.record()
        there.fill_(2.0)  # behind the copy in its stream
        assert host.isnan().all()
        wait()
        assert host.tolist() == [1.0, 1.0]


def copies_of_pageable_memory_are_counted(_rank, _world):
    with watching() as ledger:
        torch.ones(3).to(NAME, non_blocking=True)
        torch.cat([filled(1.0), filled(2.0)]).to(NAME, non_blocking=True)
        filled(1.0, 2.0, 3.0, 4.0)[::2].to(NAME, non_blocking=True)  # gathered on the host
        filled(1.0, 2.0).to(NAME, torch.float64, non_blocking=True)  # converted there
    assert ledger.copied["pageable"] == 36
    assert not ledger.waits


CASES = [
    two_devices_in_one_operation_are_refused,
    each_wait_of_the_host_is_counted_with_its_lines,
    what_a_gpu_does_alone_is_no_wait,
    its_random_numbers_are_its_own,
    a_copy_to_the_device_is_garbage_until_its_stream_goes_on,
    a_copy_in_another_stream_is_garbage_until_that_is_waited_for,
    a_copy_to_the_host_is_garbage_until_the_host_waits,
    copies_of_pageable_memory_are_counted,
]


@pytest.mark.parametrize("case", CASES)
def test_the_device_is_strict_and_late(case):
    run_ranks(case, 1, group=False, setup=SETUP)


# Ranks


def collect(rank, world):
    there = torch.full((3,), float(rank + 1), device=NAME)
    dist.all_reduce(there)
    dist.all_reduce(here := torch.ones(1))  # small exchanges go over the host
    mesh = dist.init_device_mesh(NAME, (world,))
    whole = DTensor.from_local(there, mesh, [torch.distributed.tensor.Shard(0)]).full_tensor()
    return there.tolist(), here.tolist(), whole.device.type, whole.shape[0]


def test_collectives():
    assert run_ranks(collect, 2, setup=SETUP) == [([3.0] * 3, [2.0], NAME, 6)] * 2
