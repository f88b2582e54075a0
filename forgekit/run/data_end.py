"""Ends of data that come at different steps on different ranks.

Ranks with streams of their own run out at different steps, and one that stops alone leaves the
others waiting in the next collective. So a rank without data goes on with micro-batches that carry
no loss, and says so in the step's one collective; after that step every rank knows as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch.distributed as dist
from torch import Tensor

from forgekit.checks import check_choice
from forgekit.tensors import HostCopy

EndPolicy = Literal["pad", "drop"]


class DataEnd:
    """Make all ranks end their data after the same step; pass it to ``groups`` and ``make_step``.

    ``data_end.has_ended`` reads one number from the device between two steps. Loaders do not need
    it: those with an end have the same number of micro-batches on each rank.

    Args:
        policy: ``"pad"`` goes on until no rank has data, ``"drop"`` ends as soon as one has none
            (what the others have left is not used). A stream that should repeat itself does so
            itself: ``stream_documents(..., epochs=None)``.

    Raises:
        ValueError: If the policy is neither.

    Examples:
        Streams of one epoch, with any number of documents on each rank::

            end = DataEnd("pad")
            step = make_step(loss_fn, schedule=schedule, end=end)
            for batches in groups(stream, micro_batches, end=end):
                state, metrics = step(state, batches)
    """

    def __init__(self, policy: EndPolicy = "pad") -> None:
        check_choice("policy", policy, get_args(EndPolicy))
        self.policy = policy
        self._has_more: Callable[[], bool] | None = None
        self._heard = 0
        self._last: HostCopy | None = None

    def watch(self, has_more: Callable[[], bool]) -> None:
        """Register a function that says whether this rank has more data; reset the votes."""
        self._has_more, self._heard, self._last = has_more, 0, None

    def vote(self) -> float:
        """Return 1.0 if this rank's data have ended, else 0.0; reads ahead by one micro-batch.

        Raises:
            RuntimeError: If no groups are made with it.
        """
        if self._has_more is None:
            raise RuntimeError(
                "end= was passed to make_step but not to groups; pass the same one to "
                "forgekit.groups."
            )
        return 0.0 if self._has_more() else 1.0

    def receive(self, votes: Tensor) -> None:
        """Take the votes of all ranks, ``[]`` on the device."""
        self._heard += 1
        self._last = HostCopy(votes)

    def goes_on(self, groups: int) -> bool:
        """Whether another group follows after so many; the same on all ranks.

        Raises:
            RuntimeError: If steps have voted less often than there were groups.
        """
        if self._heard < groups:
            raise RuntimeError(
                "end= was passed to groups but not to make_step, so ranks would wait for each "
                "other forever; pass the same one to forgekit.make_step."
            )
        return not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether no further step follows; the same on all ranks."""
        if self._last is None:
            return False
        world = dist.get_world_size() if dist.is_initialized() else 1
        ended = float(self._last.read())
        return ended > 0 if self.policy == "drop" else ended == world
