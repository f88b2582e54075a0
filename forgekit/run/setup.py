"""Set-up that recipes share: the record that ``setup`` returns, and loaders.

Which samples come next, on which rank, follows from a state and its mesh alone. So a recipe does
not write it out, and cannot forget one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh

from forgekit.checks import divisors
from forgekit.data.loader import Loader, make_loader
from forgekit.data.order import Sizes
from forgekit.mesh import data_ranks
from forgekit.parallel.layout import size_of
from forgekit.state import TrainState
from forgekit.steps.losses import Loss
from forgekit.steps.micro_batch import check_positions


@attrs.frozen(kw_only=True)
class Setup:
    """The result of a recipe's ``setup(config)``: all that the first step needs.

    Tools such as ``forgekit verify`` and ``forgekit replay`` read it by these names. A recipe that
    needs more returns a record of its own, with these and others.

    Attributes:
        state: The state to start from, a checkpoint's if there is one.
        step: What ``make_step`` returned, or as it: a state and metrics, or None where it does not
            count.
        loader: This rank's micro-batches, from ``state.samples`` on.
        loss_fn: ``loss_fn(model, batch) -> Loss``, the one that ``step`` has.
        stop: What ``make_step`` has as ``stop``; None if nothing can stop the run.
        held_out: Micro-batches to evaluate; None if there are none.
    """

    state: TrainState
    step: Callable[..., tuple[Any, TensorDict | None]]
    loader: Any
    loss_fn: Callable[..., Loss]
    stop: Any = None
    held_out: Any = None


def fitting_batch_size(global_batch_size: int, mesh: DeviceMesh | None, most: int = 8) -> int:
    """Choose the micro-batch size of a rank so that it divides the global batch.

    Args:
        global_batch_size: Rows per optimizer step, over all ranks.
        mesh: What ``build_mesh`` returned, or None for one process.
        most: Rows that a micro-batch may have.

    Returns:
        The largest divisor of this rank's share; on pipelines one that leaves two micro-batches for
        each stage, if there is one. 1 where the ranks cannot share the global batch: the loader's
        ``micro_batches`` then says so.

    Examples:
        >>> fitting_batch_size(12, None)
        6
    """
    _, world = data_ranks(mesh)
    share, rest = divmod(global_batch_size, world)
    least = 2 * stages if (stages := size_of(mesh, "pp")) > 1 else 1
    fitting = (n for n in divisors(share) if n <= most and share // n >= least and not rest)
    return max(fitting, default=1)


def train_loader(
    state: TrainState,
    dataset: Any,
    batch_size: int,
    *,
    sizes: Sizes | None = None,
    workers: int = 0,
    transforms: Sequence[Callable[[TensorDict], TensorDict]] = (),
) -> Loader:
    """Load a dataset endlessly, from a state's position; ``make_loader`` has all options.

    Seed, samples, and what is left out of them are those of the state; rank, world and device
    those of its mesh.

    Args:
        state: The state to start from.
        dataset: As for ``make_loader``.
        batch_size: Rows per rank and micro-batch; of sizes those of the first phase. Later ones
            have the most rows that divide their batch and hold no more positions.
        sizes: How batch size and length of the rows change; see ``forgekit.data.make_sizes``.
        workers: Threads that read ahead.
        transforms: As for ``make_loader``.

    Returns:
        This rank's loader.

    Raises:
        TypeError: If the dataset has no length.
        ValueError: If it is empty, or a number is out of range.
    """
    position = {"seed": state.seed, "start": state.samples, "skip": state.skips}
    position |= _place_of(state)
    rows = [batch_size]
    if sizes is not None:
        (*_, first), *later = sizes.spans
        most = {length: max(1, batch_size * first // length) for *_, length in later}
        rows += [fitting_batch_size(n, state.mesh, most[length]) for _, _, n, length in later]
    options = {"sizes": sizes, "workers": workers, "transforms": transforms}
    return make_loader(dataset, rows, **options, **position)


def held_out_loader(state: TrainState, dataset: Any, batch_size: int) -> Loader | None:
    """Load each row of a dataset once, unshuffled, to evaluate a state.

    Args:
        state: A state, for its mesh.
        dataset: As for ``make_loader``; None or an empty one if there is nothing to evaluate.
        batch_size: Rows per rank and micro-batch.

    Returns:
        This rank's loader; None if there is nothing to evaluate.

    Raises:
        TypeError: If the dataset has no length.
        ValueError: If it is empty, or a number is out of range.
    """
    if not dataset:
        return None
    return make_loader(dataset, batch_size, shuffle=False, epochs=1, **_place_of(state))


def check_length(state: TrainState, dataset: Any) -> None:
    """Raise if rows are longer than the model's maximum, before the first one is read.

    Of several lengths, also if ranks cannot share one of them: its phase may be days away.

    Raises:
        ValueError: If the rows are longer than the model's longest, or cannot be shared.
    """
    lengths = {getattr(one, "seq_len", 0) for one in getattr(dataset, "datasets", (dataset,))}
    seq_len, limit = max(lengths), state.layout.longest
    if len(lengths) > 1:
        for length in sorted(lengths):
            check_positions(length, state.layout)
    if limit is not None and seq_len > limit:
        raise ValueError(
            f"seq_len {seq_len} of the data is above max_seq_len {limit} of the model; set "
            f"data.seq_len={limit} or less, or model.max_seq_len={seq_len} or more."
        )


def _place_of(state: TrainState) -> dict[str, Any]:
    """Return the loader arguments that follow from a state's mesh and device."""
    rank, world = data_ranks(state.mesh)
    note = None if (documents := state.layout.documents) is None else documents.note
    return {"rank": rank, "world": world, "device": state.targets.device, "note_documents": note}
