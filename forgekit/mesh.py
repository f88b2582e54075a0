"""The processes and their device mesh: ranks, data-parallel ranks, start and shutdown.

Three ways of starting lead to the same mesh: torchrun (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``),
srun (``SLURM_PROCID``, ``SLURM_NTASKS``, ``SLURM_LOCALID``), or one plain process. Every size is
checked before the first process group is made, because a mesh that does not fit would otherwise
fail on some ranks and leave the others waiting.
"""

from __future__ import annotations

import atexit
import gc
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from forgekit.checks import RankCountError, counted, divisors
from forgekit.devices import check_device, devices_here
from forgekit.environment import identity, local_world, rendezvous
from forgekit.ranks import GroupThread

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_DIMENSIONS = ("dp_replicate", "dp_shard")
EXPERT_DIMENSIONS = ("pp", "dp_replicate", "fsdp_ep", "ep", "tp")
"""Dimensions of the root mesh under expert parallelism: ``fsdp_ep * ep == dp_shard * cp``."""
START_TIMEOUT = timedelta(minutes=30)
PATIENCE_S = 5.0
"""How long ``shutdown`` waits for pending collectives."""
POLL_S = 0.001

_log = logging.getLogger("forgekit")


@attrs.frozen(kw_only=True)
class MeshSpec:
    """Sizes of the mesh dimensions; one may be -1: the remaining ranks.

    Attributes:
        dp_replicate: Replicas of the sharded model; gradients are summed across them.
        dp_shard: Ranks that share one copy of parameters, gradients and optimizer state (FSDP).
        cp: Ranks that share a sequence.
        tp: Ranks that share each matrix.
        pp: Pipeline stages.
        ep: Ranks that share the experts, a view over ``dp_shard * cp``.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __attrs_post_init__(self) -> None:
        sizes = attrs.asdict(self)
        for name, size in sizes.items():
            if size < 1 and (size != -1 or name == "ep"):
                raise ValueError(
                    f"{name} is {size}; a mesh dimension must be at least 1, or -1 once (not ep)."
                )
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise ValueError(f"{' and '.join(free)} are -1; only one dimension can be.")


def build_mesh(
    spec: MeshSpec | None = None, device: str | torch.device | None = None
) -> DeviceMesh:
    """Initialise the process group if needed and build the device mesh.

    Args:
        spec: Sizes of the dimensions; all ranks on ``dp_shard`` if not given.
        device: ``"cpu"`` or an accelerator that torch finds, as ``"cuda"``; by default the
            accelerator where there is one. Ranks of a launcher get one each; without a launcher an
            index, as in ``"cuda:1"``, chooses one.

    Returns:
        A torch ``DeviceMesh`` with dimensions ``pp, dp_replicate, dp_shard, cp, tp``. Where ranks
        share experts, its root mesh has them as the dimension ``ep``. A default process group that
        exists is used as it is.

    Raises:
        ValueError: If the sizes do not fit the number of ranks, the device is not there, or what
            the launcher says in the environment is not a rank, world size, address or port.

    Examples:
        >>> mesh = build_mesh(MeshSpec(), device="cpu")
        >>> data_ranks(mesh)
        (0, 1)
        >>> shutdown()
    """
    spec = spec or MeshSpec()
    devices = devices_here(bindable=True)
    kind, index = check_device(devices[0] if device is None else device, devices)
    rank, world, local = identity(os.environ)
    sizes = resolve_sizes(spec, dist.get_world_size() if dist.is_initialized() else world)
    if kind != "cpu":
        _bind(kind, index, world, local)
    if not dist.is_initialized():
        _start(kind, rank, world)
    return _arrange(kind, sizes, spec.ep)


def resolve_sizes(spec: MeshSpec, world: int) -> tuple[int, ...]:
    """Return the sizes in mesh order with -1 resolved; needs no processes.

    Args:
        spec: Sizes of the dimensions.
        world: Number of ranks.

    Returns:
        Sizes of ``pp, dp_replicate, dp_shard, cp, tp``; their product is ``world``.

    Raises:
        RankCountError: A ``ValueError``, if no size of the free dimension, or the product as given,
            makes ``world``.

    Examples:
        >>> resolve_sizes(MeshSpec(dp_replicate=2), world=8)
        (1, 2, 4, 1, 1)
    """
    sizes = {name: getattr(spec, name) for name in DIMENSIONS}
    product = math.prod(size for size in sizes.values() if size != -1)
    free = next((name for name, size in sizes.items() if size == -1), None)
    given = [f"{name} {size}" for name, size in sizes.items() if size not in (1, -1)]
    shown, ranks = " * ".join(given) or "1", counted(world, "rank")
    if world % product or (free is None and world != product):
        verb = "fit" if free is None else "divide"
        raise RankCountError(
            f"{shown} = {product} does not {verb} {ranks}; {_nearest(sizes, world)}"
        )
    if free is not None:
        sizes[free] = world // product
    shared = sizes["dp_shard"] * sizes["cp"]
    if shared % spec.ep:
        raise RankCountError(
            f"ep {spec.ep} does not divide dp_shard * cp = {shared}; it can be one of "
            f"{divisors(shared)}."
        )
    return tuple(sizes[name] for name in DIMENSIONS)


def data_ranks(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return this process's data-parallel rank and world size.

    Ranks that differ only in their tensor, context or pipeline position read the same samples.

    Args:
        mesh: What ``build_mesh`` returned, or None for one process.

    Returns:
        ``(rank, world)`` over ``dp_replicate * dp_shard``.

    Raises:
        ValueError: If the mesh has other dimensions than ours.
    """
    if mesh is None:
        return 0, 1
    check_dimensions(mesh)
    rank, world = 0, 1
    # A mesh that a user built may lack some. Not mesh[name]: that builds a submesh, each time.
    for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
        if name in DATA_DIMENSIONS:
            rank, world = rank * size + mesh.get_local_rank(name), world * size
    return rank, world


def check_dimensions(mesh: DeviceMesh) -> None:
    """Raise unless a mesh's dimensions are forgekit's, or some of them, in its order.

    Raises:
        ValueError: With the dimensions that it has.
    """
    names = mesh.mesh_dim_names or ()
    if "dp_shard" not in names or names != tuple(name for name in DIMENSIONS if name in names):
        raise ValueError(
            f"the mesh has dimensions {list(names)}; it needs 'dp_shard' and may have "
            f"{', '.join(DIMENSIONS)}, in this order. Build it with forgekit.build_mesh."
        )


def expert_ranks(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return this process's position among the ranks that share the experts.

    Neighbours on ``dp_shard * cp`` share them, so that tokens stay within a machine where that is
    possible.

    Args:
        mesh: What ``build_mesh`` returned, or None for one process.

    Returns:
        ``(rank, world)``; the world is ``MeshSpec.ep``.
    """
    view = expert_view(mesh)
    return (0, 1) if view is None else (view.get_local_rank("ep"), view["ep"].size())


def expert_view(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the same ranks as a mesh of ``EXPERT_DIMENSIONS``; None without expert parallelism."""
    root = mesh and mesh._get_root_mesh()
    return root if root is not None and root.mesh_dim_names == EXPERT_DIMENSIONS else None


def process_rank() -> int:
    """This process's global rank: 0 for the one that writes, also before ``build_mesh``."""
    return dist.get_rank() if dist.is_initialized() else identity(os.environ)[0]


def rank_name(mesh: DeviceMesh | None) -> str:
    """Name this rank for a file: its number, and its position in each dimension above 1.

    Examples:
        >>> rank_name(None)
        'rank0'
    """
    if mesh is None:
        return "rank0"
    names = mesh.mesh_dim_names or ()
    positions = [
        f"_{name}{mesh.get_local_rank(name)}"
        for name, size in zip(names, mesh.shape, strict=True)
        if size > 1
    ]
    return "".join([f"rank{process_rank()}", *positions])


def shutdown() -> None:
    """Destroy the process groups, so that the process can end; every rank's last call.

    A script that forgets it gets it at the interpreter's exit. It waits for saves. Afterwards no
    thread of gloo holds a tensor: one that frees a tensor while the interpreter ends aborts the
    process. A collective that other ranks never join is given up after five seconds; the process
    then ends without finalization, with all flushed and the code of the exception in flight, or 1.
    """
    for thread in threading.enumerate():
        if isinstance(thread, GroupThread):
            thread.join()
    error = sys.exc_info()[1]
    code = error.code if isinstance(error, SystemExit) else 1
    if stuck := _destroy_groups():
        atexit.register(_leave, code if isinstance(code, int) else int(code is not None), stuck)


def _end(process: int) -> None:
    """Shut down at the interpreter's exit, but not in a fork, which has no gloo threads."""
    if os.getpid() == process and (stuck := _destroy_groups()):
        _leave(1, stuck)


def _leave(code: int, _stuck: list[dist.ProcessGroup]) -> None:
    """End the process at once: finalization would wait for these groups, or abort."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it is None or closed, or nobody reads it
            stream.flush()
    os._exit(code)


def _destroy_groups() -> list[dist.ProcessGroup]:
    """Destroy all groups and drop them from meshes and caches; return those that are still busy."""
    atexit.unregister(_end)
    meshes = [mesh for mesh in gc.get_objects() if type(mesh) is DeviceMesh]
    # Groups of meshes too: their threads live on after a user has destroyed them.
    known = chain(dist.distributed_c10d._world.pg_map, *(m._pg_registry.values() for m in meshes))
    deadline = time.monotonic() + PATIENCE_S
    stuck = [group for group in {*known} if not _is_idle(group, deadline)]
    for group in stuck:
        _log.warning("a collective of group %r never ended; did all ranks join?", group.group_desc)
    if dist.is_initialized():
        dist.destroy_process_group()
    for mesh in meshes:  # or the threads of their groups would go on polling
        mesh._pg_registry.clear()
    _forget_groups()
    return stuck


def _is_idle(group: dist.ProcessGroup, deadline: float) -> bool:
    """Wait until gloo's threads have dropped a group's collectives; False after the deadline.

    A thread drops a collective after its caller has gone on, and before it begins the next one. So
    each gets one more, which sends nothing for it has no elements, and is held in it until all are.
    """
    cpu = torch.device("cpu")
    gloo: Any = group._get_backend(cpu) if cpu in group._device_types else None
    gloo = getattr(gloo, "wrapped_pg", gloo)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    if not isinstance(gloo, getattr(dist, "ProcessGroupGloo", ())):
        return True
    here, threads, all_held = threading.get_ident(), list[int](), threading.Event()
    begin = time.monotonic()

    def hold(_: object) -> None:
        threads.append(threading.get_ident())
        if threads[-1] != here:  # torch calls it here if the collective has ended before
            all_held.wait()

    # The first goes nowhere: it has the number of references of those that threads have dropped.
    tensors = [torch.empty(0, device=cpu)]
    try:
        while is_late := len({*threads} - {here}) < gloo.options._threads:
            if time.monotonic() > max(deadline, begin + 1.0):
                break
            if len(threads) == len(tensors) - 1:
                tensors.append(torch.empty(0, device=cpu))
                gloo.allreduce([tensors[-1]]).get_future().then(hold)
            time.sleep(POLL_S)
    finally:
        all_held.set()
    while not is_late and len({sys.getrefcount(tensor) for tensor in tensors}) > 1:
        time.sleep(POLL_S)
        is_late = time.monotonic() > max(deadline, begin + 1.0)
    return not is_late


def _forget_groups() -> None:
    """Empty DTensor's caches: a later mesh may equal one of those whose groups are gone."""
    if "torch.distributed.tensor" not in sys.modules:  # its import takes a second
        return
    from torch.distributed.tensor import _redistribute, debug

    for module, clear in (
        (debug, "_clear_sharding_prop_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
    ):
        if hasattr(module, clear):
            getattr(module, clear)()


def _bind(kind: str, index: int | None, world: int, local: int) -> None:
    """Make the requested accelerator, by default the one of the local rank, the current device.

    Of the ranks that a launcher started, each has its own: one index for all of them is a mistake.
    """
    module = torch.get_device_module(kind)
    of_rank = local % module.device_count()
    if world > 1 and index not in (None, of_rank):
        raise ValueError(
            f"device is '{kind}:{index}', but this rank, {local} on its machine, gets "
            f"{kind}:{of_rank}. Use {kind!r}: each rank then gets its own device."
        )
    module.set_device(of_rank if index is None else index)


def _start(kind: str, rank: int, world: int) -> None:
    if kind == "cpu":
        _share_cores()
    default = dist.get_default_backend_for_device(kind)
    # gloo beside the accelerator's backend: small exchanges and saves use the hosts' network.
    backend = default if kind == "cpu" else f"cpu:gloo,{kind}:{default}"
    store = HashStore() if world == 1 else None  # one process needs no port
    if world > 1:
        os.environ.update(rendezvous(os.environ))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=START_TIMEOUT
    )
    atexit.register(_end, os.getpid())


def mesh_of(
    kind: str, ranks: Tensor, names: tuple[str, ...], root: DeviceMesh | None = None
) -> DeviceMesh:
    """Make a mesh of ranks; groups that an earlier mesh had are reused.

    torch keeps every group until all are destroyed, and each of gloo's has threads: new ones for
    each mesh of a notebook or a sweep would use up the machine.

    Args:
        kind: The type of device.
        ranks: All ranks, in the shape of the mesh; the same on every rank.
        names: Of its dimensions.
        root: A mesh over the same ranks that this one is a view of.

    Returns:
        The mesh.
    """
    rows = [ranks.movedim(dim, -1).flatten(0, -2).tolist() for dim in range(ranks.ndim)]
    groups = [group_of(f"mesh_{name}", row) for name, row in zip(names, rows, strict=True)]
    mesh = DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=names)
    if root is not None:
        mesh._root_mesh = root
        root._pg_registry.update(mesh._pg_registry)  # where torch looks for the groups of a view
    return mesh


def group_of(description: str, rows: list[list[int]], *, alone: bool = False) -> dist.ProcessGroup:
    """Return this rank's group among rows of ranks; reuse an earlier one of that description.

    Args:
        description: What the group is for.
        rows: Ranks of each group, of all ranks; the same on every rank, which all call this.
        alone: Whether it must not be the group of all ranks, which others use.

    Returns:
        The group.
    """
    here = next(row for row in rows if dist.get_rank() in row)
    # gloo alone cannot serve accelerators, and there a group of all ranks is another one.
    is_whole = not torch.cuda.is_available() or dist.get_backend() != "gloo"
    if len(here) == dist.get_world_size() and is_whole and not alone:
        return cast("dist.ProcessGroup", dist.group.WORLD)
    for group in dist.distributed_c10d._world.pg_map:  # torch's own list has no public name
        if group.group_desc == description and dist.get_process_group_ranks(group) == here:
            return group
    group, _ = dist.new_subgroups_by_enumeration(rows, group_desc=description)
    return cast("dist.ProcessGroup", group)


def _arrange(kind: str, sizes: tuple[int, ...], ep: int) -> DeviceMesh:
    """Make the mesh, as a view of a root mesh under expert parallelism."""
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    if ep == 1:
        return mesh_of(kind, ranks, DIMENSIONS)
    pp, replicate, shards, context, tensor = sizes
    view = pp, replicate, shards * context // ep, ep, tensor
    root = mesh_of(kind, ranks.view(view), EXPERT_DIMENSIONS)
    return mesh_of(kind, ranks, DIMENSIONS, root)


def _share_cores() -> None:
    """Limit torch to this process's share of the machine's cores, unless the user has set it.

    Two ranks with two threads each on two cores ran seven times slower than with one each.
    """
    here = local_world(os.environ)
    if here is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))


def _nearest(sizes: Mapping[str, int], world: int) -> str:
    """Suggest data-parallel sizes that fit, with the other dimensions kept."""
    model = math.prod(sizes[name] for name in ("pp", "cp", "tp") if sizes[name] != -1)
    if world % model:
        product = math.prod(size for size in sizes.values() if size != -1)
        lower = world // product * product if -1 in sizes.values() else 0
        return f"that takes {f'{lower} or ' if lower else ''}{lower + product} ranks."
    data = world // model
    replicate = min(divisors(data), key=lambda d: abs(d - sizes["dp_replicate"]))
    return f"the nearest is dp_replicate={replicate}, dp_shard={data // replicate}."
