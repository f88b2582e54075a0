"""Logits that ranks share by the vocabulary, which any function of torch sees whole.

``cross_entropy`` computes with each rank's columns. A loss of the user's own (distillation,
preferences, an entropy bonus) is written for whole logits and gets them, gathered once. DTensors
are not handed out: some operators on shards are wrong without an error in torch 2.13 (the backward
pass of a mean ``mse_loss``, the value of ``norm(dim=-1)``), others raise (a sum after ``gather``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from forgekit.parallel.layout import full


class SharedLogits(Tensor):
    """``[... v]`` logits, one part of the vocabulary on each rank.

    Every function of torch takes the whole tensor in its place, and returns plain tensors that are
    the same on all ranks.

    Attributes:
        shards: This rank's columns, a DTensor.
    """

    shards: DTensor
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, shards: DTensor) -> SharedLogits:
        """Wrap a DTensor; nothing is gathered yet."""
        made: Any = Tensor._make_wrapper_subclass(
            cls, shards.shape, dtype=shards.dtype, device=shards.device
        )
        made.shards, made._whole = shards, None
        return made

    def full_tensor(self) -> Tensor:
        """The whole logits, gathered once; differentiable."""
        whole, is_trained = self._whole, self.shards.requires_grad and torch.is_grad_enabled()
        if whole is None or whole.requires_grad != is_trained:
            whole = self._whole = with_plain_gradient(self.shards.full_tensor())
            self._version_gathered = whole._version
        return whole

    def current(self) -> Tensor:
        """The shards, or the whole logits if they were changed in place since."""
        whole = self._whole
        if whole is not None and whole._version != self._version_gathered:
            return whole
        return self.shards

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with whole tensors; sizes and dtypes need no gathering."""
        take = _shards_of if func in _METADATA else _whole_of
        args, kwargs = tree_map(take, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Never reached by functions of torch."""
        raise NotImplementedError(
            f"{func} cannot take logits that ranks share; pass logits.full_tensor()."
        )


def share_logits(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Replace DTensors in a model's output, as a forward hook of the model."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output) if field.init]
        shared = {name: share_logits(_module, _args, getattr(output, name)) for name in names}
        return dataclasses.replace(output, **shared)
    return tree_map(_share, output)


def with_plain_gradient(values: Tensor) -> Tensor:
    """Let a plain tensor meet DTensors in a loss, in place, and return it.

    The gradient of their sum is a DTensor, which the backward pass of what computed the plain one
    could not take: it expects this rank's tensor.

    Args:
        values: A plain tensor, the same on all ranks; DTensors are left as they are.
    """
    if values.requires_grad and not isinstance(values, DTensor):
        values.register_hook(full)
    return values


def _share(value: Any) -> Any:
    if isinstance(value, DTensor):
        return SharedLogits(value)
    return with_plain_gradient(value) if isinstance(value, Tensor) else value


def _whole_of(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, SharedLogits) else value


def _shards_of(value: Any) -> Any:
    return value.current() if isinstance(value, SharedLogits) else value


_METADATA = frozenset(
    (
        *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__),  # pyright: ignore[reportAttributeAccessIssue]
        *(Tensor.ndim.__get__, Tensor.requires_grad.__get__),  # pyright: ignore[reportAttributeAccessIssue]
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point),
    )
)
