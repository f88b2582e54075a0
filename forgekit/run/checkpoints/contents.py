"""What a checkpoint holds: a ``TrainState`` as named tensors and a description in JSON.

Tensors go into flat keys: ``model.<name>``, ``optimizer.<parameter name>.<entry>``,
``average.<parameter name>``, ``state.<field>``. Everything else goes into trees of JSON values, in
which ``{"$tensor": key}`` stands for a tensor. Optimizer state is filed under parameter names,
never under positions, so that it finds its parameter again when groups are reordered or another
rank holds it. The trees also say which tensors there are: loading builds what a fresh optimizer
does not have yet.
Fields that each rank has for itself are kept rank by rank: see ``per_rank_fields.py``.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import empty as distributed_empty
from torch.optim import Optimizer

from forgekit.optim.average import average_of
from forgekit.optim.chain import Chained
from forgekit.run.checkpoints.json_trees import decode, encode
from forgekit.run.checkpoints.per_rank_fields import (
    find_difference,
    is_per_rank,
    is_stateful,
    join,
    own_tree,
    tag,
)
from forgekit.run.checkpoints.savable_optimizers import name_of
from forgekit.state import TrainState

NAMES_SHOWN = 3
PARTS = ("model", "optimizer", "fields")
"""What ``checkpoint_load`` can load alone; the fields are all else that a state holds."""
AVERAGE, AVERAGE_COUNT = "average.", "average"
"""Keys of averages, before the name of a parameter; and of how many steps they hold."""
_NOT_FACTS = (
    *("max_seq_len", "dropout", "capacity", "aux_loss", "sequence_aux_loss", "z_loss"),
    *("bias_rate", "centered", "force_balance"),
)
"""Of a model's ``spec``: how it is trained, and not what it computes; a run may change them."""
_ROTARY = ("rope_theta", "rope_scaling")
"""What a new run may change to lengthen the context of a model."""
_NOT_FIELDS = ("model", "optimizer", "mesh")


def collect(state: TrainState, rank: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """List what is to be saved of a state, without copying a tensor.

    Args:
        state: The state.
        rank: This rank among those that hold it, under which a stream's position is filed.

    Returns:
        This rank's tensors by key, sharded ones as DTensors, and what it adds to the manifest:

        - ``tensors``: global shape and dtype of each tensor, and whether it is in host memory;
        - ``optimizer``: for each parameter that the optimizer holds, its entries as trees. One
          without state is there too, so that a forgotten parameter can be told from a new one;
        - ``optimizer_class``: its class's name;
        - ``optimizer_members``: of a chain, the class of the member that steps each parameter;
        - ``model``: the facts of its ``spec`` that no shape shows, such as the number of heads;
        - ``average``: keys of averages by parameter name; empty if the state has none;
        - ``fields``: the other fields of the state as trees.

    Raises:
        TypeError: If a field or an optimizer entry cannot be saved; names it and the remedy.
    """
    tensors = model_tensors(state.model)
    optimizer = {
        name: _encode_entries(name, parameter, state.optimizer.state.get(parameter, {}), tensors)
        for name, parameter in _optimizer_parameters(state).items()
    }
    fields = {
        name: _encode_field(state, name, rank if is_per_rank(state, field) else None, tensors)
        for name, field in saved_fields(state).items()
    }
    averages = _average_tensors(state)
    tensors |= averages
    description = {
        "tensors": {key: describe(tensor) for key, tensor in tensors.items()},
        "model": _model_facts(state.model),
        "average": {key.removeprefix(AVERAGE): key for key in averages if key != AVERAGE_COUNT},
        "optimizer": optimizer,
        "optimizer_class": name_of(state.optimizer),
        "optimizer_members": _members(state),
        "fields": fields,
    }
    return tensors, description


def merge(descriptions: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join what the ranks described; where they differ, the first rank counts.

    Pipeline stages hold different parameters, so no rank knows all of them.
    """
    # Of tensors and optimizer entries the first rank's win as well: it comes last in the union.
    merged, *others = [dict(description) for description in descriptions]
    for other in others:
        for part in ("tensors", "optimizer", "optimizer_members", "average"):
            merged[part] = other[part] | merged[part]
        merged["fields"] = join(merged["fields"], other["fields"])
    return merged


def choose(description: dict[str, Any], parts: Collection[str]) -> dict[str, Any]:
    """Remove the parts that are not to be loaded from a description or manifest."""
    chosen = dict(description)
    if "optimizer" not in parts:
        chosen |= {"optimizer": {}, "optimizer_class": None}
    if "fields" not in parts:
        facts = {k: v for k, v in chosen["model"].items() if not k.startswith(_ROTARY)}
        chosen |= {"fields": {}, "average": {}, "model": facts}
    return chosen


def saved_fields(state: TrainState) -> dict[str, Any]:
    """Return the attrs fields that a checkpoint keeps besides model and optimizer, by name."""
    return {
        field.name: field
        for field in attrs.fields(type(state))
        if field.init and field.name not in _NOT_FIELDS and field.metadata.get("checkpoint", True)
    }


def optional_fields(state: TrainState) -> set[str]:
    """Return the saved fields that keep their value where a checkpoint was written without them."""
    return {name for name, f in saved_fields(state).items() if f.metadata.get("optional", False)}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by key; tied parameters appear once."""
    # state_dict also makes FSDP put back the shards of modules that are still gathered after an
    # evaluation; until then named_parameters yields full tensors that the optimizer has never seen.
    kept = model.state_dict(keep_vars=True)
    persistent = {id(tensor) for tensor in kept.values()}
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if id(buffer) in persistent)
    named = itertools.chain(model.named_parameters(), buffers)
    return {f"model.{name}": tensor.detach() for name, tensor in named}


def _model_facts(model: nn.Module) -> dict[str, Any]:
    spec = getattr(model, "spec", None)
    if not attrs.has(type(spec)):
        return {}
    facts: dict[str, Any] = {}
    for name, value in attrs.asdict(spec).items():  # pyright: ignore[reportArgumentType]
        inner = value if isinstance(value, dict) else {}
        facts |= {f"{name}.{key}": each for key, each in inner.items() if key not in _NOT_FACTS}
        facts |= {} if inner or name in _NOT_FACTS else {name: value}
    return {k: v for k, v in facts.items() if isinstance(v, str | int | float | None)}


def _average_tensors(state: TrainState) -> dict[str, Tensor]:
    if (average := average_of(state)) is None:
        return {}
    values = {f"{AVERAGE}{name}": value for name, value in average.values.items()}
    return values | {AVERAGE_COUNT: average.count}


@torch.no_grad()
def copy_to_host(tensors: dict[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors into host memory, so that training may go on while they are written.

    Args:
        tensors: What to copy.
        buffers: The copies of an earlier call, written into again where the layout is the same:
            page faults of fresh memory cost more than the copy itself. Changed in place.

    Returns:
        The copies by key; DTensors keep their placements.
    """
    for key in buffers.keys() - tensors.keys():
        del buffers[key]
    for key, tensor in tensors.items():
        if key not in buffers or _layout(buffers[key]) != _layout(tensor):
            pin = _local(tensor).device.type != "cpu"
            buffers[key] = torch.empty_like(tensor, device="cpu", pin_memory=pin)
        _local(buffers[key]).copy_(_local(tensor), non_blocking=True)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # the copies run beside the host until here
    return dict(buffers)


@attrs.frozen
class Allocation:
    """Memory for a checkpoint's tensors, and the values that hold them once they are read.

    Attributes:
        tensors: Tensors by key, to be read into in place; the model's are the model's own.
        optimizer: The optimizer's new state; None leaves it as it is.
        fields: New values of the state's fields; what ``load_state_dict`` takes for those with one.
        has_average: Whether the averages' own memory is read into, as the model's is.
    """

    tensors: dict[str, Tensor]
    optimizer: dict[Tensor, dict[str, Any]] | None
    fields: dict[str, Any]
    has_average: bool


def allocate(state: TrainState, manifest: dict[str, Any], rank: int = 0) -> Allocation:
    """Allocate what a checkpoint holds without changing the state.

    Args:
        state: The state.
        manifest: The checkpoint's manifest, without what is not to be loaded.
        rank: As in ``collect``.
    """
    tensors, specs = model_tensors(state.model), manifest["tensors"]
    is_chosen = manifest["optimizer_class"] is not None
    optimizer = _allocate_optimizer(state, manifest, tensors) if is_chosen else None
    fields = {}
    # An older checkpoint may lack fields that are optional.
    for name in saved_fields(state).keys() & manifest["fields"].keys():
        tree = own_tree(manifest["fields"][name], rank)
        make = _field_maker(getattr(state, name), specs)
        fields[name] = decode(tree, _value(state, name), tensors, make)
    has_average = average_of(state) is not None and bool(manifest.get("average"))
    if has_average:
        tensors |= _average_tensors(state)
    return Allocation(tensors, optimizer, fields, has_average)


def _allocate_optimizer(
    state: TrainState, manifest: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[Tensor, dict[str, Any]]:
    groups = {p: group for group in state.optimizer.param_groups for p in group["params"]}
    optimizer: dict[Tensor, dict[str, Any]] = {}
    for name, parameter in _optimizer_parameters(state).items():
        make = partial(_optimizer_tensor, manifest["tensors"], parameter, groups[parameter])
        before = state.optimizer.state.get(parameter, {})
        if entries := manifest["optimizer"][name]:
            optimizer[parameter] = {
                key: decode(node, before.get(key), tensors, make) for key, node in entries.items()
            }
    return optimizer


def restore(state: TrainState, allocation: Allocation) -> dict[str, Any]:
    """Give optimizer and stateful fields what was read; return the changes of the other fields."""
    if allocation.optimizer is not None:
        # In place: optimizers that share their state with others hold the same dictionary.
        state.optimizer.state.clear()
        state.optimizer.state.update(allocation.optimizer)
    if (average := average_of(state)) is not None and not allocation.has_average:
        average.restart()  # with the weights that were read
    changes = {}
    for name, field in saved_fields(state).items():
        if name not in allocation.fields:
            continue
        value = getattr(state, name)
        if is_stateful(value):
            value.load_state_dict(allocation.fields[name])
        else:
            changes[field.alias] = allocation.fields[name]
    return changes


def find_mismatch(
    described: dict[str, Any], manifest: dict[str, Any], optional: Collection[str] = ()
) -> str | None:
    """Compare a state with a checkpoint; return what does not fit, or None.

    Args:
        described: What all ranks' states hold, merged; see ``collect``.
        manifest: The checkpoint's manifest.
        optional: Fields that may be missing there; see ``optional_fields``.
    """
    here = {k: spec for k, spec in described["tensors"].items() if k.startswith("model.")}
    there = {k: spec for k, spec in manifest["tensors"].items() if k.startswith("model.")}
    differences = [d for what in ("shape", "dtype") for d in _spec_difference(what, here, there)]
    facts, saved = described["model"], manifest["model"]
    differences += [
        f"{name} is {saved.get(name)!r} there and {facts.get(name)!r} here"
        for name in {**saved, **facts}
        if saved and facts and saved.get(name) != facts.get(name)
    ]
    if parts := [*_name_difference(here, there), *differences]:
        what = f"is of another model: {'; '.join(parts)}"
        return f"{what}. Build the model that was saved, or choose another run directory"
    if parts := _name_difference(described["optimizer"], manifest["optimizer"]):
        what = f"is of an optimizer over other parameters: {'; '.join(parts)}"
        return f"{what}. Build the optimizer over the parameters that it had"
    stateful = any(manifest["optimizer"].values())
    if stateful and described["optimizer_class"] != manifest["optimizer_class"]:
        saved, now = manifest["optimizer_class"], described["optimizer_class"]
        return f"has the state of {saved}, and the optimizer is {now}. Build a {saved}"
    if stateful and (moved := _other_members(described, manifest)):
        return f"has the state of another split: {moved}. Give each optimizer what it had"
    here, there = described["average"], manifest.get("average") or {}
    if here and there and (parts := _name_difference(here, there)):
        return f"has averages of other parameters: {'; '.join(parts)}. Train what was trained"
    known = {*manifest["fields"], *optional}
    if missing := [name for name in described["fields"] if name not in known]:
        return (
            f"has no field {missing[0]!r}. Mark it with "
            'attrs.field(metadata={"checkpoint": False}) to keep the value that it has, '
            "or give it one with migrate"
        )
    return find_difference(described["fields"], manifest["fields"])


def _optimizer_parameters(state: TrainState) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters by name; refuses state that belongs to none of them."""
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    for key in state.optimizer.state.keys() - set(parameters):
        raise TypeError(
            f"the optimizer keeps state under {key!r:.80}, not one of its parameters, so it has no "
            "name to be saved under. Keep it in optimizer.state[parameter]."
        )
    return {names[parameter]: parameter for parameter in parameters}


def _members(state: TrainState) -> dict[str, str]:
    """Return by a parameter's name the class of the chain's member that steps it."""
    members = state.optimizer.members if isinstance(state.optimizer, Chained) else ()
    steps = {p: m for m in members for group in m.param_groups for p in group["params"]}
    named = _optimizer_parameters(state).items() if members else ()
    return {name: type(steps[parameter]).__qualname__ for name, parameter in named}


def _other_members(described: dict[str, Any], manifest: dict[str, Any]) -> str:
    """Say which parameters another class of optimizer steps now; older checkpoints do not know."""
    here, there = described["optimizer_members"], manifest.get("optimizer_members") or {}
    moved = [n for n in here if here[n] != there.get(n, here[n])]
    shown = [f"is stepped by {there[n]} there and {here[n]} here" for n in moved]
    return "; ".join(f"{n!r} {by}" for n, by in zip(moved[:NAMES_SHOWN], shown, strict=False))


def _value(state: TrainState, name: str) -> Any:
    """Return a field's value, or what its ``state_dict`` makes of it."""
    value = getattr(state, name)
    return value.state_dict() if is_stateful(value) else value


def _encode_field(
    state: TrainState, name: str, rank: int | None, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    key = f"state.{name}" if rank is None else f"state.{name}.rank{rank}"
    tree = encode(_value(state, name), key, tensors, f"field {name!r}")
    return tree if rank is None else tag(tree, rank)


def _encode_entries(
    name: str, parameter: nn.Parameter, entries: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    encoded = {}
    for key, value in entries.items():
        what = f"optimizer entry {key!r} of {name!r}"
        _check_whole(value, parameter, what)
        encoded[key] = encode(value, f"optimizer.{name}.{key}", tensors, what)
    return encoded


def _check_whole(value: Any, parameter: nn.Parameter, what: str) -> None:
    """Refuse a shard that looks like a whole tensor: one rank's would overwrite all others'."""
    sharded = isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
    if sharded and isinstance(value, Tensor) and value.ndim and not isinstance(value, DTensor):
        raise TypeError(
            f"{what} is a plain tensor of shape {tuple(value.shape)} beside a sharded parameter, "
            "so nothing says which part of it this is. Make it with torch.zeros_like(parameter)."
        )


def _optimizer_tensor(
    specs: dict[str, Any], parameter: nn.Parameter, group: dict[str, Any], key: str, now: Any
) -> Tensor:
    """Make an entry as the optimizer would have made it, for this layout and device."""
    spec = specs[key]
    shape, dtype = torch.Size(spec["shape"]), getattr(torch, spec["dtype"])
    if isinstance(now, Tensor) and now.shape == shape and now.dtype == dtype:
        return torch.empty_like(now)
    # Guess what the optimizer would have made: a counter, a value per element, or one per row or
    # column (Adafactor), which every rank holds whole.
    if not shape:
        # Optimizers keep step counters in host memory unless their kernels read them.
        on_host = spec["host"] and not (group.get("fused") or group.get("capturable"))
        return torch.empty((), dtype=dtype, device="cpu" if on_host else parameter.device)
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor):
        whole = [Replicate()] * parameter.device_mesh.ndim
        return distributed_empty(
            shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=whole
        )
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _field_maker(value: Any, specs: dict[str, Any]) -> Callable[[str, Any], Tensor]:
    """Return what makes the tensors of a field; those of an optimizer follow its parameters."""
    groups = value.param_groups if isinstance(value, Optimizer) else []
    owners = [(parameter, group) for group in groups for parameter in group["params"]]

    def make(key: str, now: Any) -> Tensor:
        # An optimizer's state_dict files entries under the position of their parameter.
        number = re.match(r"state\.\w+\.state\.(\d+)\.", key) if owners else None
        if number:
            return _optimizer_tensor(specs, *owners[int(number[1])], key, now)
        shape, dtype = torch.Size(specs[key]["shape"]), getattr(torch, specs[key]["dtype"])
        if isinstance(now, Tensor) and now.shape == shape:
            return torch.empty_like(now, dtype=dtype, requires_grad=False)
        device = now.device if isinstance(now, Tensor) else "cpu"
        return torch.empty(shape, dtype=dtype, device=device)

    return make


def describe(tensor: Tensor) -> dict[str, Any]:
    """Return what a manifest says of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "host": tensor.device.type == "cpu"}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    mesh = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.dtype, mesh


def with_nearest(name: str, known: Iterable[str]) -> str:
    """Write a name that is not known for a message, with the most similar one that is."""
    nearest = difflib.get_close_matches(name, [*known], n=1)
    return f"{name!r} (nearest: {nearest[0]!r})" if nearest else f"{name!r}"


def _name_difference(here: Iterable[str], there: Iterable[str]) -> list[str]:
    here, there = dict.fromkeys(here), dict.fromkeys(there)
    missing = [with_nearest(name, there) for name in here if name not in there]
    extra = [f"{name!r}" for name in there if name not in here]
    return _some("it lacks", missing) + _some("only it has", extra)


def _spec_difference(what: str, here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    different = [
        f"{name!r} is {there[name][what]} there and {here[name][what]} here"
        for name in here
        if name in there and here[name][what] != there[name][what]
    ]
    return _some(f"{what}s differ:", different)


def _some(what: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return [f"{what} {', '.join(names[:NAMES_SHOWN])}{more}"] if names else []
