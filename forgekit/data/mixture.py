"""Rows of several datasets as one endless dataset, in the order of a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import TensorDict

from forgekit.data.batch import check_alike, read_rows
from forgekit.data.hashing import facts_of, state_facts
from forgekit.data.order import Order
from forgekit.inputs import quoted


def mixture_dataset(datasets: Mapping[str, Any], order: Order) -> Mixture:
    """Mix datasets by an order: row ``i`` is sample ``i``.

    It is endless and shuffled by the order, so ``make_loader`` reads row ``i`` for sample ``i`` and
    ignores its own ``seed`` and ``shuffle``.

    Args:
        datasets: Map-style datasets by name, those of the order. Their rows are TensorDicts of the
            same keys, shapes and dtypes.
        order: What ``make_order`` made of their lengths.

    Returns:
        A map-style dataset without a length. Rows carry ``source``, int64, an index into
        ``order.sources``.

    Raises:
        ValueError: If names or numbers of rows differ; on reading, if rows differ in shape.

    Examples:
        >>> from forgekit.data.order import make_order
        >>> code, prose = ([{"input_ids": torch.tensor([n, i])} for i in range(3)] for n in (8, 9))
        >>> order = make_order({"code": 3, "prose": 3})
        >>> rows = mixture_dataset({"code": code, "prose": prose}, order)
        >>> rows[0]["input_ids"], rows[0]["source"]
        (tensor([9, 0]), tensor(1))
    """
    if set(datasets) != set(order.sources):
        raise ValueError(
            f"the datasets are {quoted(datasets)}, the sources of the order "
            f"{quoted(order.sources)}; make the order from the lengths of these datasets."
        )
    for name, size in zip(order.sources, order.sizes, strict=True):
        if len(datasets[name]) != size:
            raise ValueError(
                f"dataset {name!r} has {len(datasets[name])} rows and the order was made for "
                f"{size}; make it from len(dataset)."
            )
    return Mixture(tuple(datasets[name] for name in order.sources), order)


@attrs.frozen(eq=False)
class Mixture:
    """Rows of several datasets; ``mixture_dataset`` makes one.

    Attributes:
        datasets: The datasets, in the sequence of ``order.sources``.
        order: Which row of which of them each sample is.
        is_endless: True: rows are samples, by number, so a loader neither shuffles nor wraps.
    """

    datasets: tuple[Any, ...]
    order: Order
    is_endless: bool = attrs.field(default=True, init=False)

    @property
    def seq_len(self) -> int:
        """Positions in a row; 0 if the datasets have no ``seq_len``."""
        return getattr(self.datasets[0], "seq_len", 0)

    @property
    def fingerprint(self) -> str:
        """Identifies the rows: equal strings mean the same row at each sample."""
        return self._named(self.order.fingerprint)

    def fingerprint_at(self, samples: int) -> str:
        """Identify the first ``samples`` rows: phases that start later are not included."""
        return self._named(self.order.fingerprint_at(samples))

    def __getitem__(self, sample: int) -> TensorDict:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> TensorDict:
        """Build the batch of these samples, reading each dataset once, ``batch_size=[b]``."""
        sources, rows = self.order.find(samples)
        by_source = np.argsort(sources, kind="stable")
        present, counts = np.unique(sources, return_counts=True)
        shares = np.split(rows[by_source], np.cumsum(counts)[:-1])
        parts = {
            self.order.sources[source]: read_rows(self.datasets[source], share.tolist())
            for source, share in zip(present.tolist(), shares, strict=True)
        }
        check_alike({f'source "{name}"': part for name, part in parts.items()}, dim=1)
        back = torch.from_numpy(np.argsort(by_source))
        first, *others = parts.values()
        if "source" in first:
            raise ValueError('rows have a "source", which the mixture adds; rename theirs.')
        keys: list[Any] = list(first.keys())
        joined = {key: torch.cat([first[key], *(part[key] for part in others)]) for key in keys}
        batch = {key: rows.index_select(0, back) for key, rows in joined.items()}
        return TensorDict({**batch, "source": torch.from_numpy(sources)}, [len(samples)])

    def _named(self, order: str) -> str:
        rows = (getattr(dataset, "fingerprint", None) for dataset in self.datasets)
        sources = zip(self.order.sources, rows, strict=True)
        facts = {name: facts_of(row) or {"rows": row} for name, row in sources}
        return state_facts(order=order, sources=facts)
