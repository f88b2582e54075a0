"""The content of a checkpoint: a ``TrainState`` as named tensors and a JSON description.

Tensors have flat keys: ``model.<name>``, ``optimizer.<parameter name>.<entry>``,
``average.<parameter name>``, ``state.<field>``. Everything else goes into trees of JSON values:
a dict is ``{"$dict": [[key, value], ...]}``, lists and tuples are ``{"$list": [...]}`` and
``{"$tuple": [...]}``, and ``{"$tensor": key}`` stands for a tensor. Optimizer state is filed under
parameter names, never under positions, so that it finds its parameter again when groups are
reordered or another rank holds it; that of whole matrices, which one rank owns, also under the
matrix's number in its stack. The trees also say which tensors there are: loading builds what a
fresh optimizer does not have yet.

A sharded tensor is written in chunks, each by one of the ranks that hold it; the description says
which part of the whole a chunk is, so that any layout can read it. What each rank has for itself,
above all a stream, is kept rank by rank, as ``{"$ranks": [[rank, tree], ...]}``, with its tensors
under ``state.<field>.rank<rank>``; it loads on the same number of ranks.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from forgekit.checks import differences
from forgekit.model.lora import lora_layers
from forgekit.optim.average import average_of
from forgekit.optim.chain import Chained
from forgekit.optim.groups import name_of
from forgekit.optim.optimizer import Composed
from forgekit.ranks import CheckpointError
from forgekit.safetensors_files import DTYPES
from forgekit.state import TrainState
from forgekit.tensors import box_of, local, named_tensors

PARTS = ("model", "optimizer", "fields")
"""Parts that ``checkpoint_load`` can load alone; ``fields`` is the rest of the state."""

_AVERAGE = "average."
"""Key prefix of averaged parameters, and key of their number of steps."""
_BY_NAME = ("optimizer", "steppers", "adapters")
"""Parts of a description that are keyed by parameter name."""
_RANKS = "$ranks"
_NOT_FACTS = (
    *("max_seq_len", "dropout", "capacity", "aux_loss", "sequence_aux_loss", "z_loss"),
    *("bias_rate", "centered", "force_balance", "qkv_bias"),
)
"""Fields of a ``spec`` not compared: training options, and sizes that tensors show."""
_TOKENS = "unpadded_vocab_size"
_ROTARY = ("rope_theta", "rope_scaling")
"""Fields of a ``spec`` that a new run may change to extend the context."""
_NOT_FIELDS = ("model", "optimizer", "mesh")


def collect(state: TrainState, rank: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """List the tensors to save and describe the rest, without copying a tensor.

    Args:
        state: The state.
        rank: This rank among those that hold it, under which a stream's position is filed.

    Returns:
        This rank's tensors by key, sharded ones as DTensors, and its share of the manifest:

        - ``tensors``: global shape and dtype of each tensor, and whether it is in host memory;
        - ``boxes``: where this rank's part of a sharded tensor begins, and its size; None if whole;
        - ``optimizer``: for each parameter that the optimizer holds, its entries as trees. One
          without state is there too, so that a forgotten parameter can be told from a new one;
        - ``steppers``: what steps each of them: the class of the optimizer, of several the
          member's, or the names of its transforms;
        - ``model``: the facts of its ``spec`` that no shape shows, such as the number of heads;
        - ``adapters``: those of each adapter, by the name of its first factor;
        - ``fields``: the other fields of the state as trees.

    Raises:
        TypeError: If something cannot be saved; names it and the remedy.
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
    tensors |= _average_tensors(state)
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{key} is {tensor.dtype}, which safetensors files cannot store. Keep it as "
                "torch.view_as_real(tensor), or as numbers of another dtype."
            )
    description = {
        "tensors": {key: _describe(tensor) for key, tensor in tensors.items()},
        "boxes": {key: box_of(t) if isinstance(t, DTensor) else None for key, t in tensors.items()},
        "model": _model_facts(state.model),
        "adapters": _adapter_facts(state.model),
        "optimizer": optimizer,
        "steppers": _steppers(state),
        "fields": fields,
    }
    return tensors, description


def share_out(descriptions: list[dict[str, Any]]) -> list[list[str]]:
    """Assign each chunk to the rank that writes it.

    Of values that are not sharded the first rank's are kept; a chunk that several ranks hold is
    written by the one with the least to write.

    Returns:
        The keys that each rank writes.
    """
    holders: dict[tuple[str, Any], list[int]] = {}
    for rank, description in enumerate(descriptions):
        for key, box in description["boxes"].items():
            holders.setdefault((key, box), []).append(rank)
    keys: list[list[str]] = [[] for _ in descriptions]
    load = [0] * len(descriptions)
    for (key, box), ranks in holders.items():
        shape = descriptions[ranks[0]]["tensors"][key]["shape"] if box is None else box[1]
        writer = ranks[0] if box is None else min(ranks, key=lambda rank: load[rank])
        if math.prod(shape):  # uneven shards may be empty
            keys[writer].append(key)
            load[writer] += math.prod(shape)
    return keys


def merge(descriptions: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the ranks' descriptions; where they differ, the first rank's counts.

    Pipeline stages hold different parameters, so no rank knows all of them.
    """
    # The first rank comes last in the union, so its tensors and optimizer entries win.
    merged, *others = [dict(description) for description in descriptions]
    for other in others:
        for name in other["optimizer"].keys() & merged["optimizer"].keys():
            pair = merged["optimizer"][name], other["optimizer"][name]
            merged["optimizer"] = merged["optimizer"] | {name: _join_entries(*pair)}
        for part in ("tensors", *_BY_NAME):
            merged[part] = other[part] | merged[part]
        trees = {name: _per_rank(tree) for name, tree in other["fields"].items()}
        merged["fields"] = merged["fields"] | {
            name: {_RANKS: _per_rank(merged["fields"][name]) + added}
            for name, added in trees.items()
            if added
        }
    del merged["boxes"]
    return merged


def _join_entries(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Join one parameter's entries; of a dict, ranks may hold different items."""
    joined = second | first
    for key in first.keys() & second.keys():
        nodes = [node for node in (second[key], first[key]) if isinstance(node, dict)]
        if len(nodes) == 2 and all("$dict" in node for node in nodes):
            items = dict(pair for node in nodes for pair in node["$dict"])
            joined[key] = {"$dict": [*items.items()]}
    return joined


def rename(manifest: dict[str, Any], renames: Mapping[str, str]) -> dict[str, Any]:
    """Rename a checkpoint's parameters and buffers, with their optimizer state and averages.

    Args:
        manifest: The checkpoint's manifest.
        renames: Names then by names now, of a tensor or of a module with all that is inside.

    Raises:
        CheckpointError: If two get one name.
    """
    saved = [key.removeprefix("model.") for key in manifest["tensors"] if key.startswith("model.")]
    names = {}
    for name in saved:
        fitting = [new for new, old in renames.items() if f"{name}.".startswith(f"{old}.")]
        longest = max(fitting, key=lambda new: len(renames[new]), default=None)
        names[name] = name if longest is None else longest + name[len(renames[longest]) :]
    if twice := [new for new, count in Counter(names.values()).items() if count > 1]:
        raise CheckpointError(f"renames maps two tensors to the name {twice[0]!r}.")
    keys = {p + old: p + new for p in ("model.", _AVERAGE) for old, new in names.items()}
    parts = {
        part: {names.get(name, name): value for name, value in manifest[part].items()}
        for part in _BY_NAME
    }
    tensors = {keys.get(key, key): spec for key, spec in manifest["tensors"].items()}
    return manifest | parts | {"tensors": tensors}


def choose(description: dict[str, Any], parts: Collection[str]) -> dict[str, Any]:
    """Remove parts that are not loaded from a description or manifest."""
    chosen = dict(description)
    if "optimizer" not in parts:
        chosen |= {"optimizer": {}, "steppers": None}
    if "fields" not in parts:
        facts = {k: v for k, v in chosen["model"].items() if not k.startswith(_ROTARY)}
        tensors = {k: v for k, v in chosen["tensors"].items() if not k.startswith(_AVERAGE)}
        chosen |= {"fields": {}, "model": facts, "tensors": tensors}
    return chosen


def saved_fields(state: TrainState) -> dict[str, Any]:
    """Return the attrs fields that are saved besides model and optimizer, by name."""
    return {
        field.name: field
        for field in attrs.fields(type(state))
        if field.init and field.name not in _NOT_FIELDS and field.metadata.get("checkpoint", True)
    }


def optional_fields(state: TrainState) -> set[str]:
    """Return the saved fields that keep their value if a checkpoint lacks them."""
    return {name for name, f in saved_fields(state).items() if f.metadata.get("optional", False)}


def is_per_rank(state: TrainState, field: Any) -> bool:
    """Whether each rank has its own value: streams, and fields marked so."""
    value = getattr(state, field.name)
    is_stream = hasattr(value, "__iter__") and not isinstance(value, nn.Module)
    return field.metadata.get("per_rank", _is_stateful(value) and is_stream)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by key, tied ones once."""
    return {f"model.{name}": tensor for name, tensor in named_tensors(model).items()}


@torch.no_grad()
def copy_to_host(tensors: dict[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to host memory, so that training may continue while they are written.

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
            pin = local(tensor).device.type != "cpu"
            buffers[key] = torch.empty_like(tensor, device="cpu", pin_memory=pin)
        local(buffers[key]).copy_(local(tensor), non_blocking=True)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # copies are asynchronous until here
    return dict(buffers)


@attrs.frozen
class Allocation:
    """Memory for a checkpoint's tensors, and the values built from them.

    Attributes:
        tensors: Tensors by key, to be read into in place; the model's are the model's own.
        optimizer: The optimizer's new state; None leaves it as it is.
        fields: New values of the state's fields; what ``load_state_dict`` takes for those with one.
    """

    tensors: dict[str, Tensor]
    optimizer: dict[Tensor, dict[str, Any]] | None
    fields: dict[str, Any]


def allocate(state: TrainState, manifest: dict[str, Any], rank: int = 0) -> Allocation:
    """Allocate a checkpoint's tensors without changing the state.

    Args:
        state: The state.
        manifest: The checkpoint's manifest, without what is not to be loaded.
        rank: As in ``collect``.
    """
    tensors, specs = model_tensors(state.model), manifest["tensors"]
    optimizer = None
    if manifest["steppers"] is not None:
        optimizer = _allocate_optimizer(state, manifest, tensors)
    fields = {}
    # A checkpoint may lack optional fields.
    for name in saved_fields(state).keys() & manifest["fields"].keys():
        tree = manifest["fields"][name]
        tree = dict(_per_rank(tree)).get(rank, tree)
        make = _field_maker(getattr(state, name), specs)
        fields[name] = decode(tree, _value(state, name), tensors, make)
    if has_average(manifest):
        tensors |= _average_tensors(state)
    return Allocation(tensors, optimizer, fields)


def restore(state: TrainState, allocation: Allocation) -> dict[str, Any]:
    """Load optimizer and stateful fields; return the changes of the other fields."""
    if allocation.optimizer is not None:
        # In place: optimizers that share their state with others hold the same dictionary.
        state.optimizer.state.clear()
        state.optimizer.state.update(allocation.optimizer)
    if (average := average_of(state)) is not None and not any(
        key.startswith(_AVERAGE) for key in allocation.tensors
    ):
        average.restart()  # together with the weights
    changes = {}
    for name, field in saved_fields(state).items():
        if name not in allocation.fields:
            continue
        value = getattr(state, name)
        if _is_stateful(value):
            value.load_state_dict(allocation.fields[name])
        else:
            changes[field.alias] = allocation.fields[name]
    return changes


def find_mismatch(
    described: dict[str, Any], manifest: dict[str, Any], optional: Collection[str] = ()
) -> str | None:
    """Compare a state with a checkpoint; return the first mismatch, or None.

    Args:
        described: What all ranks' states hold, merged; see ``collect``.
        manifest: The checkpoint's manifest.
        optional: Fields that may be missing there; see ``optional_fields``.
    """
    both, saved = (described, manifest), manifest["fields"]
    has_state = any(manifest["optimizer"].values())
    has_averages = has_average(described) and has_average(manifest)
    due = [name for name in described["fields"] if name in saved or name not in optional]
    compared = [
        (
            "is of another model: {}. Build the model that was saved, give renames= where only "
            "names changed, or choose another run directory",
            [_below("model.", each) | each["adapters"] | each["model"] for each in both],
        ),
        (
            "is of an optimizer over other parameters: {}. Build the optimizer over the parameters "
            "that it had",
            [dict.fromkeys(each["optimizer"]) for each in both],
        ),
        (
            "is of another optimizer: {}. Build the optimizer that it had",
            [each["steppers"] if has_state else {} for each in both],
        ),
        (
            "has averages of other parameters: {}. Train what was trained",
            [dict.fromkeys(_below(_AVERAGE, each)) if has_averages else {} for each in both],
        ),
        (
            "has other fields: {}. Leave a field out with metadata={{'checkpoint': False}}, mark "
            "one that later checkpoints will have with {{'optional': True}}, and resume a stream "
            "on as many ranks as saved it",
            [{n: _holders(d["fields"][n]) for n in due if n in d["fields"]} for d in both],
        ),
    ]
    texts = ((text, differences(*pair)) for text, pair in compared)
    return next((text.format(difference) for text, difference in texts if difference), None)


def encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a value to a JSON tree, moving its tensors to ``tensors``.

    Args:
        value: The value.
        key: Under which a tensor is filed; those inside get longer ones.
        tensors: Changed in place.

    Raises:
        TypeError: If it holds something that cannot be saved.
    """
    if isinstance(value, Tensor):
        while key in tensors:  # {"a": {"b": t}, "a.b": t} has two tensors at a.b
            key += "'"
        tensors[key] = value.detach()
        return {"$tensor": key}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict) and all(isinstance(k, bool | int | float | str) for k in value):
        return {"$dict": [[k, encode(v, f"{key}.{k}", tensors)] for k, v in value.items()]}
    if type(value) in (list, tuple):  # a named tuple would be read back as a tuple
        tag = "$list" if type(value) is list else "$tuple"
        return {tag: [encode(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]}
    raise TypeError(
        f"{key} is a {type(value).__name__}; checkpoints keep tensors, numbers, strings, None, and "
        "lists, tuples and dicts of them. Give the field state_dict and load_state_dict, or leave "
        'it out with attrs.field(metadata={"checkpoint": False}).'
    )


def _field_maker(value: Any, specs: Mapping[str, Any]) -> Callable[[str, Any], Tensor]:
    """Return the allocator of a field's tensors; an optimizer's follow its parameters."""
    groups = value.param_groups if isinstance(value, Optimizer) else []
    owners = [(parameter, group) for group in groups for parameter in group["params"]]

    def make(key: str, current: Any) -> Tensor:
        # An optimizer's state_dict keys entries by the index of their parameter.
        number = re.match(r"state\.\w+\.state\.(\d+)\.", key) if owners else None
        owner = owners[int(number[1])] if number else (None, {})
        return _new_tensor(specs, *owner, key, current)

    return make


def _new_tensor(
    specs: Mapping[str, Any],
    parameter: Tensor | None,
    group: Mapping[str, Any],
    key: str,
    current: Any,
) -> Tensor:
    """Allocate an optimizer entry as the optimizer would, for this layout and device.

    Args:
        specs: Shapes and dtypes in the checkpoint, by key.
        parameter: Whose entry of an optimizer it is, if it is one.
        group: The optimizer's group of that parameter.
        key: The entry's key.
        current: The state's value there, if it has one.
    """
    spec = specs[key]
    shape, dtype = torch.Size(spec["shape"]), getattr(torch, spec["dtype"])
    if isinstance(current, Tensor) and current.shape == shape:
        return torch.empty_like(current, dtype=dtype, requires_grad=False)
    if parameter is None:
        device = current.device if isinstance(current, Tensor) else "cpu"
        return torch.empty(shape, dtype=dtype, device=device)
    # Guess what the optimizer would have made: a counter, a value per element, or one per row or
    # column (Adafactor), which every rank holds whole.
    if not shape:
        # Optimizers keep step counters in host memory unless their kernels read them.
        on_host = spec["host"] and not (group.get("fused") or group.get("capturable"))
        return torch.empty((), dtype=dtype, device="cpu" if on_host else parameter.device)
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return parameter.new_empty(shape, dtype=dtype)  # replicated if it is a DTensor


def decode(
    node: Any,
    current: Any,
    tensors: dict[str, Any],
    make: Callable[[str, Any], Tensor],
) -> Any:
    """Rebuild a value from a tree.

    Args:
        node: The tree.
        current: The state's value, after which tensors are modelled.
        tensors: Gets every tensor that was made, by key; changed in place.
        make: Makes a tensor from its key and the state's value.
    """
    if not isinstance(node, dict):
        return node
    ((tag, inner),) = node.items()
    if tag == "$tensor":
        return tensors.setdefault(inner, make(inner, current))
    if tag == "$dict":
        before = current if isinstance(current, dict) else {}
        return {k: decode(value, before.get(k), tensors, make) for k, value in inner}
    before = [*current] if isinstance(current, list | tuple) else []
    before += [None] * len(inner)
    built = [decode(v, b, tensors, make) for v, b in zip(inner, before, strict=False)]
    return built if tag == "$list" else tuple(built)


def check_optimizer_state(state: TrainState) -> set[str]:
    """Raise for optimizers that keep state where a checkpoint does not find it.

    Returns:
        Members of the optimizer that should have state after a good step and have none on this
        rank; it is lost if they have none on any rank. torch's own keep it where a checkpoint finds
        it, so they are not asked; one that needs none has an attribute ``stateless = True``.

    Raises:
        TypeError: If an optimizer holds others whose state it does not share; names the remedy.
    """
    optimizer = state.optimizer
    _check_inner(optimizer)
    if state.step <= int(state.skipped):  # after bad steps alone no optimizer has any state
        return set()
    return {
        f"{number} {type(member).__name__}"
        for number, member in enumerate(_members(optimizer))
        if not _may_lack_state(member)
        and not any(optimizer.state.get(p) for g in member.param_groups for p in g["params"])
    }


def _check_inner(optimizer: Any) -> None:
    for name, value in vars(optimizer).items():
        for inner in tree_leaves(value):
            if not isinstance(inner, Optimizer):
                continue
            if inner.state is not optimizer.state:
                raise TypeError(
                    f"{type(optimizer).__name__} holds {type(inner).__name__} in {name!r}, whose "
                    "state a checkpoint would not keep. Join optimizers with "
                    "forgekit.chain_optimizers(first, second); a wrapper of one shares its state "
                    "with self.state = optimizer.state."
                )
            _check_inner(inner)


def has_average(description: dict[str, Any]) -> bool:
    """Whether a description or a checkpoint has averaged weights."""
    return any(_below(_AVERAGE, description))


def _average_tensors(state: TrainState) -> dict[str, Tensor]:
    if (average := average_of(state)) is None:
        return {}
    return {f"{_AVERAGE}{n}": v for n, v in {**average.values, "": average.count}.items()}


def _allocate_optimizer(
    state: TrainState, manifest: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[Tensor, dict[str, Any]]:
    groups = {p: group for group in state.optimizer.param_groups for p in group["params"]}
    composed = [member for member in _members(state.optimizer) if isinstance(member, Composed)]
    owned = {p: numbers for member in composed for p, numbers in member.owned().items()}
    optimizer: dict[Tensor, dict[str, Any]] = {}
    for name, parameter in _optimizer_parameters(state).items():
        make = partial(_new_tensor, manifest["tensors"], parameter, groups[parameter])
        before = state.optimizer.state.get(parameter, {})
        if entries := dict(manifest["optimizer"][name]):
            optimizer[parameter] = kept = {}
            for key, node in entries.items():
                if parameter in owned and isinstance(node, dict) and "$dict" in node:
                    # Whole matrices, on their owner alone.
                    mine = [pair for pair in node["$dict"] if pair[0] in owned[parameter]]
                    like = dict.fromkeys(owned[parameter], local(parameter).new_empty(0))
                    whole = partial(_new_tensor, manifest["tensors"], None, {})
                    kept[key] = decode({"$dict": mine}, like, tensors, whole)
                else:
                    kept[key] = decode(node, before.get(key), tensors, make)
    return optimizer


def _optimizer_parameters(state: TrainState) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters by name; raise for state that belongs to none."""
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    for key in state.optimizer.state.keys() - set(parameters):
        raise TypeError(
            f"the optimizer keeps state under {key!r:.80}, not one of its parameters, so no "
            "checkpoint would find it. Keep it in optimizer.state[parameter]."
        )
    return {names[parameter]: parameter for parameter in parameters}


def _steppers(state: TrainState) -> dict[str, str]:
    """Return by a parameter's name what steps it."""
    members = _members(state.optimizer)
    steppers = {p: m for m in members for group in m.param_groups for p in group["params"]}
    named = _optimizer_parameters(state).items()
    return {name: name_of(steppers[parameter]) for name, parameter in named}


def _members(optimizer: Optimizer) -> Sequence[Optimizer]:
    return optimizer.members if isinstance(optimizer, Chained) else (optimizer,)


def _may_lack_state(optimizer: Any) -> bool:
    module = type(optimizer).__module__
    return getattr(optimizer, "stateless", False) or module.startswith(("torch.", "forgekit."))


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _value(state: TrainState, name: str) -> Any:
    """Return a field's value, or its ``state_dict``."""
    value = getattr(state, name)
    return value.state_dict() if _is_stateful(value) else value


def _encode_field(
    state: TrainState, name: str, rank: int | None, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    key = f"state.{name}" if rank is None else f"state.{name}.rank{rank}"
    tree = encode(_value(state, name), key, tensors)
    return tree if rank is None else {_RANKS: [[rank, tree]]}


def _encode_entries(
    name: str, parameter: nn.Parameter, entries: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    is_sharded = isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
    encoded = {}
    for entry, value in entries.items():
        key = f"optimizer.{name}.{entry}"
        # A shard taken for a whole tensor: one rank's would overwrite all others'.
        is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if is_sharded and is_plain and value.ndim:
            raise TypeError(
                f"{key} is a plain tensor beside a sharded parameter, so nothing says which part "
                "of it this is. Make it with torch.zeros_like(parameter)."
            )
        encoded[entry] = encode(value, key, tensors)
    return encoded


def _model_facts(model: nn.Module) -> dict[str, Any]:
    spec = getattr(model, "spec", None)
    if not attrs.has(type(spec)):
        return {}
    facts: dict[str, Any] = {}
    for name, value in attrs.asdict(spec).items():  # pyright: ignore[reportArgumentType]
        inner = value if isinstance(value, dict) else {}
        facts |= {f"{name}.{key}": each for key, each in inner.items() if key not in _NOT_FACTS}
        facts |= {} if inner or name in _NOT_FACTS else {name: value}
    if facts.get(_TOKENS) in (None, facts.get("vocab_size")):  # no padding
        facts.pop(_TOKENS, None)
    return {k: v for k, v in facts.items() if isinstance(v, str | int | float | None)}


def _adapter_facts(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the settings of adapters that shapes do not show, by the first factor's name."""
    return {
        f"{name}.{layer.factor_names(matrix)[0]}".lstrip("."): {
            "alpha": adapter.alpha,
            "rslora": adapter.rslora,
        }
        for name, layer in lora_layers(model).items()
        for matrix, adapter in layer.adapters.items()
    }


def _describe(tensor: Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "host": tensor.device.type == "cpu"}


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    mesh = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.dtype, mesh


def _per_rank(tree: Any) -> list[Any]:
    """Return the ranks and trees of a field with one value per rank."""
    return tree.get(_RANKS, []) if isinstance(tree, dict) else []


def _holders(tree: Any) -> str:
    return f"of each of {len(ranks)} ranks" if (ranks := _per_rank(tree)) else "of all ranks"


def _below(prefix: str, description: dict[str, Any]) -> dict[str, str]:
    """Return dtype and shape of the tensors under a key prefix, by the rest of the key."""
    return {
        key.removeprefix(prefix): f"{spec['dtype']} {spec['shape']}"
        for key, spec in description["tensors"].items()
        if key.startswith(prefix)
    }
