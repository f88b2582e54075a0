"""Write a model as a Hugging Face directory, from any layout, one tensor at a time.

Every rank takes part; the first one writes. A tensor is gathered, written and let go before the
next, so that no rank ever holds more than its own shards and one whole tensor. The directory is
filled under a temporary name, read back and compared, and only then it gets its own.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forgekit.files import atomic_directory
from forgekit.huggingface.check_export import check_spec, check_transformers, check_values
from forgekit.huggingface.families import FAMILIES, Family, family_named, family_of
from forgekit.huggingface.load import name_map, overlaps, read_config
from forgekit.huggingface.names import NameMap, Part, named_tensors
from forgekit.huggingface.safetensors_files import (
    INDEX,
    SINGLE,
    read_json,
    write_json,
    write_tensors,
)
from forgekit.huggingface.tokenizer import (
    TOKENIZER_FILES,
    check_tokenizer,
    count_tokens,
    special_ids,
    write_tokenizer,
)
from forgekit.huggingface.transformers_models import (
    class_of,
    is_of_transformers,
    transformers_names,
)
from forgekit.inputs import brief, check_integers, path_of, wrong_type
from forgekit.model.lora import LoraLinear, adapter_names, lora_layers
from forgekit.model.transformer import Transformer, TransformerSpec
from forgekit.ranks import CheckpointError, Ranks, all_ranks

WRITER = "forgekit_version"
"""Key of a config.json by which a directory that was written here is known."""

GENERATION = "generation_config.json"

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Names of files with weights that are written here, and so may be replaced."""

STALE = ("auto_map", "_name_or_path", "original_max_position_embeddings", "quantization_config")
"""Keys of another model's config.json that say nothing about the one that is written."""

Entries = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def save_huggingface(
    model: nn.Module,
    directory: str | os.PathLike[str],
    tokenizer: Any = None,
    like: Any = None,
    *,
    names: NameMap | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5_000_000_000,
    check_logits: bool = False,
) -> None:
    """Write a model as a directory that transformers opens; every rank calls it.

    It is read back before it gets its name: each rank compares its shards with the files, bit for
    bit, and the first one the configuration with the model's spec.

    Args:
        model: What ``parallelize`` returned, or a plain model; does not change.
        directory: A new one, or one that was written by this function.
        tokenizer: Of transformers or tokenizers, or the path of one; that of ``like`` if None.
        like: Which model it shall look like: a family's name; or a directory, or a configuration,
            whose other keys (token ids, the number of tokens of a padded vocabulary) are kept, and
            a directory's generation settings and tokenizer. If None, the first of llama, mistral,
            qwen3, mixtral, qwen3_moe, dots1 that computes the same; a model of transformers
            looks like itself.
        names: How a model of your own is named on disk; then ``like`` has its configuration.
        dtype: Of the weights on disk; the parameters' own if None. What has to be float32 stays.
        max_shard_size: Bytes of a file at most, one tensor at least.
        check_logits: Whether logits that transformers computes from the directory are compared with
            a ``Transformer``'s too, by the first rank, which holds both models then.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If ``like`` is not known.
        CheckpointError: If the directory holds anything else, the model is none of that family, the
            tokenizer has more tokens than the model, a file cannot be written, or what is read back
            differs. The same on every rank; nothing stands under the name then.
    """
    path = path_of("directory", directory)
    check_integers(max_shard_size=(max_shard_size, 1))
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise wrong_type("dtype", dtype, "a torch.dtype such as torch.bfloat16")
    is_theirs = names is None and not isinstance(model, Transformer) and is_of_transformers(model)
    if names is None and not isinstance(model, Transformer) and not is_theirs:
        raise TypeError(
            f"model is a {type(model).__name__}; pass names=NameMap(rules, model), made of the "
            "whole model before parallelize, and like= with its configuration."
        )
    check_tokenizer(tokenizer)
    is_ours = isinstance(model, Transformer) and names is None
    family, base, source = _resolve(like)
    ranks = all_ranks()
    if is_theirs:
        names = ranks.together(lambda: transformers_names(model))
        base = {**base, **_own_config(model)}
    tensors = ranks.together(lambda: _weights(model))
    held = ranks.each(lambda: {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    with ExitStack() as stack:
        folder = ranks.first(lambda: _enter_new(stack, path))
        tokens = ranks.first(lambda: _add_tokenizer(tokenizer, folder, source))
        if names is None:
            spec: TransformerSpec = model.spec  # pyright: ignore[reportAssignmentType]
            names, config = ranks.together(lambda: _describe(spec, family, base, tokens))
        else:
            config = {key: value for key, value in base.items() if key not in STALE}
        plan = ranks.together(lambda: _plan(names, held, dtype, max_shard_size))
        ranks.first(lambda: _write_config(folder, config, plan, tokenizer, source))
        _write(ranks, folder, plan, tensors)
        ranks.together(lambda: check_values(tensors, names, folder))
        if isinstance(model, Transformer) and is_ours:
            spec = model.spec
            ranks.first(lambda: check_spec(spec, folder))
            if check_logits:
                ranks.first(lambda: check_transformers(folder))
        ranks.first(stack.close)


def _own_config(model: Any) -> dict[str, Any]:
    return {**model.config.to_dict(), "architectures": [class_of(model).__name__]}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors by name, without the factors of adapters that are merged into them."""
    layers, factors = lora_layers(model), set(adapter_names(model))
    if apart := [name for name, layer in layers.items() if not layer.bases]:
        raise CheckpointError(
            f"{apart[0]!r} has an adapter that is not merged into its weight. Call "
            "forgekit.merge_lora(model) first, or write the adapter: forgekit.save_adapter."
        )
    tensors = {name: t for name, t in named_tensors(model).items() if name not in factors}
    for name, layer in layers.items():
        if isinstance(layer, LoraLinear) and layer.merged is not None:
            tensors[f"{name}.weight"] = layer.merged
    return tensors


@attrs.frozen
class _Plan:
    """What is written where, the same on every rank.

    Attributes:
        names: Names on disk.
        files: Dtype and shape of each tensor by name, by file, in the order of writing.
        owners: By name in the model the first rank that has a part of a tensor, its dtype, shape.
    """

    names: NameMap
    files: dict[str, Entries]
    owners: dict[str, tuple[int, torch.dtype, tuple[int, ...]]]


def _resolve(like: Any) -> tuple[Family | None, dict[str, Any], Path | None]:
    """The family that is asked for, the configuration to begin with, and where that is from."""
    if like is None:
        return None, {}, None
    if isinstance(like, str) and (named := family_named(like)) is not None:
        return named, {}, None
    source = None
    if isinstance(like, str | os.PathLike):
        source = path_of("like", like)
        if not source.is_dir():
            known = ", ".join(family.name for family in FAMILIES)
            raise ValueError(f"like is {brief(like)}: no directory, and no family of {known}.")
        base = read_config(source)
    elif hasattr(like, "to_dict"):
        base = like.to_dict()
    elif isinstance(like, Mapping):
        base = dict(like)
    else:
        raise wrong_type("like", like, "a family's name, a directory, or a configuration")
    is_known = base.get("model_type") in {family.name for family in FAMILIES}
    return (family_of(base) if is_known else None), base, source


def _enter_new(stack: ExitStack, path: Path) -> Path:
    try:
        return stack.enter_context(atomic_directory(path, is_replaceable=_is_ours))
    except FileExistsError as error:
        raise CheckpointError(str(error)) from None


def _is_ours(path: Path) -> bool:
    if not (path / "config.json").is_file() or WRITER not in read_json(path / "config.json"):
        return False
    names = {"config.json", GENERATION, INDEX, *TOKENIZER_FILES}
    return all(
        p.is_file() and (p.name in names or WEIGHTS.fullmatch(p.name)) for p in path.iterdir()
    )


def _add_tokenizer(tokenizer: Any, folder: Path, source: Path | None) -> int | None:
    write_tokenizer(tokenizer, folder, source)
    return count_tokens(folder)


def _describe(
    spec: TransformerSpec, family: Family | None, base: dict[str, Any], tokens: int | None
) -> tuple[NameMap, dict[str, Any]]:
    """The names and the configuration of a ``Transformer``, its vocabulary without padding."""
    if base and family is None:
        family_of(base)  # raises: it is not known
    if tokens is not None and tokens > spec.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokens} tokens and the model {spec.vocab_size} rows for them; "
            "pass the tokenizer that it was trained with."
        )
    rows = spec.vocab_size
    if 0 < base.get("vocab_size", rows) < rows:
        rows = max(base["vocab_size"], tokens or 0)
    written = attrs.evolve(spec, vocab_size=rows)
    chosen, config = _choose(family, written)
    kept = {key: value for key, value in base.items() if key not in STALE}
    return name_map(chosen, spec, rows), {**kept, **config}


def _choose(family: Family | None, spec: TransformerSpec) -> tuple[Family, dict[str, Any]]:
    """The first family that computes what a spec says."""
    reasons = []
    for one in [family] if family is not None else FAMILIES:
        try:
            return one, one.write(spec)
        except ValueError as error:
            reasons.append(str(error))
    raise CheckpointError(" ".join(reasons))


def _plan(
    names: NameMap,
    held: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]],
    dtype: torch.dtype | None,
    max_shard_size: int,
) -> _Plan:
    owners = {
        name: (rank, *what)
        for rank, described in reversed([*enumerate(held)])
        for name, what in described.items()
    }
    if odd := [name for name in owners if name not in names.parts]:
        raise CheckpointError(
            f"the model has {odd[0]!r}, which has no name on disk. Merge adapters before the "
            "export, or pass names= with a rule for it."
        )
    if lost := [part.name for parts in names.parts.values() for part in parts
                if part.name not in owners]:  # fmt: skip
        raise CheckpointError(f"no rank has {lost[0]!r}, which has a name on disk.")
    entries: Entries = {}
    for name, shape in names.shapes.items():
        own = owners[names.names[name][0]][1]
        given = dtype if dtype is not None and own.is_floating_point else own
        entries[name] = names.dtypes.get(name, given), shape
    return _Plan(names, _into_files(entries, max_shard_size), owners)


def _into_files(entries: Entries, max_shard_size: int) -> dict[str, Entries]:
    groups: list[Entries] = [{}]
    size = 0
    for name, (dtype, shape) in entries.items():
        own = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + own > max_shard_size:
            groups.append({})
            size = 0
        groups[-1][name] = dtype, shape
        size += own
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def _write_config(
    folder: Path, config: dict[str, Any], plan: _Plan, tokenizer: Any, source: Path | None
) -> None:
    sizes: dict[torch.dtype, int] = {}
    for entries in plan.files.values():
        for dtype, shape in entries.values():
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape) * dtype.itemsize
    dtype = str(max(sizes, key=lambda one: sizes[one])).removeprefix("torch.")
    ids = special_ids(tokenizer, folder)
    config = {**_with_end(ids, config, tokenizer), "dtype": dtype, "torch_dtype": dtype}
    config[WRITER] = importlib.metadata.version("forgekit")
    write_json(folder / "config.json", config)
    if source is not None and (source / GENERATION).is_file():
        settings = _with_end(ids, read_json(source / GENERATION), tokenizer)
        write_json(folder / GENERATION, {k: v for k, v in settings.items() if v is not None})
    elif config["eos_token_id"] is not None:
        write_json(
            folder / GENERATION, {key: config[key] for key in ids if config[key] is not None}
        )
    if len(plan.files) > 1:
        where = {name: file for file, entries in plan.files.items() for name in entries}
        total = {"total_size": sum(sizes.values())}
        write_json(folder / INDEX, {"metadata": total, "weight_map": where})


def _with_end(ids: dict[str, Any], settings: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Keep the token ids of settings, but for an end of text that a given tokenizer has not."""
    known, own = settings.get("eos_token_id"), ids["eos_token_id"]
    known = known if isinstance(known, list) else [known]
    is_other = tokenizer is not None and own is not None and own not in known
    return {**ids, **settings, **({"eos_token_id": own} if is_other else {})}


def _write(ranks: Ranks, folder: Path, plan: _Plan, tensors: Mapping[str, Tensor]) -> None:
    """Gather and write file by file; the other ranks go on to the end if the first one cannot."""
    values = _values(ranks, plan, tensors)
    failed: list[OSError] = []
    for file, entries in plan.files.items():
        mine = (next(values) for _ in entries)
        if ranks.rank == 0 and not failed:
            try:
                write_tensors(folder / file, entries, mine)
            except OSError as error:
                failed.append(error)
        for _ in mine:  # the others wait in the same collectives
            pass

    def report() -> None:
        if failed:
            raise failed[0]

    ranks.first(report)


@torch.no_grad()
def _values(ranks: Ranks, plan: _Plan, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield each tensor on disk on the first rank, and nothing of use on the others."""
    parts: dict[str, list[Part]] = {name: [] for name in plan.names.shapes}
    for one in plan.names.parts.values():
        for part in one:
            parts[part.key].append(part)
    left = {name: len(own) for name, own in plan.names.parts.items()}
    whole: dict[str, Tensor] = {}
    for name, (dtype, shape) in (pair for file in plan.files.values() for pair in file.items()):
        for part in parts[name]:
            if part.name not in whole:
                whole[part.name] = _gather(ranks, plan, tensors.get(part.name), part.name)
        yield _assemble(parts[name], whole, dtype, shape) if ranks.rank == 0 else torch.empty(0)
        for part in parts[name]:
            left[part.name] -= 1
            if not left[part.name]:
                del whole[part.name]


def _assemble(
    parts: list[Part], whole: Mapping[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    pieces = []
    for part in parts:
        full = whole[part.name]
        found = overlaps(full, tuple((0, size) for size in full.shape), part)
        if found is not None:
            pieces.append(found)
    if len(pieces) == 1:
        return pieces[0][0].to(dtype)
    made = torch.empty(shape, dtype=dtype)
    for view, box in pieces:
        made[tuple(slice(*bounds) for bounds in box)] = view.to(dtype)
    return made


def _gather(ranks: Ranks, plan: _Plan, tensor: Tensor | None, name: str) -> Tensor:
    """A whole tensor in the first rank's memory; what the others return is of no use."""
    owner, dtype, shape = plan.owners[name]
    full = torch.empty(0)
    if tensor is not None:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if owner == 0:
        return full.cpu() if ranks.rank == 0 else full.new_empty(0)
    if ranks.rank == owner:  # as bytes: gloo does not know every dtype
        dist.send(full.cpu().contiguous().view(-1).view(torch.uint8), 0)
    elif ranks.rank == 0:
        full = torch.empty(shape, dtype=dtype)
        dist.recv(full.view(-1).view(torch.uint8), owner)
        return full
    return full.new_empty(0)
