"""The ranks that hold a state, over a process group that only its saves use."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from forgekit.ranks import CheckpointError, Ranks
from forgekit.state import TrainState

GROUP_NAME = "forgekit checkpoints"
"""Description of the process groups of saves, by which ``Health`` leaves their time-outs alone."""


def ranks_of(state: TrainState) -> Ranks:
    """Return the ranks that hold a state, with the process group of its saves.

    The first call on every rank makes the group; the state's handle keeps it.
    """
    mesh = state.mesh
    if mesh is None:
        sharded = (p for p in state.model.parameters() if isinstance(p, DTensor))
        mesh = next((p.device_mesh for p in sharded), None)
    if mesh is None or mesh.size() == 1:
        return Ranks()
    members = tuple(mesh.mesh.flatten().tolist())
    default = dist.group.WORLD if dist.is_initialized() else None
    if default is None or dist.get_rank() not in members:
        raise CheckpointError(
            f"this process is not one of the ranks {members} that hold the state, or its process "
            "groups are gone. Save and load on every rank, before forgekit.shutdown()."
        )
    key = default, members
    if state.saves.group is None or state.saves.group[0] != key:
        # A save runs in a thread beside the collectives of training. On the group of training
        # both would take each other's messages, which aborts the process.
        # In a plan the other ranks are not there, and its group can reach none.
        backend = "fake" if dist.get_backend() == "fake" else "gloo"
        options = {"backend": backend, "use_local_synchronization": True, "group_desc": GROUP_NAME}
        state.saves.group = key, dist.new_group(list(members), **options)
    group = state.saves.group[1]
    return Ranks(group, dist.get_rank(group), len(members))
