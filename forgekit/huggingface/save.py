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
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgekit.checks import brief, path_of
from forgekit.files import atomic_directory
from forgekit.huggingface.check_export import check_logits as compare_logits
from forgekit.huggingface.check_export import check_values
from forgekit.huggingface.families import (
    FAMILIES,
    Family,
    compare_specs,
    family_named,
    family_of,
)
from forgekit.huggingface.load import (
    check_named,
    huggingface_spec,
    local_part,
    name_map,
    overlaps,
    read_config,
)
from forgekit.huggingface.names import NameMap, Part
from forgekit.huggingface.safetensors_files import (
    INDEX,
    SINGLE,
    read_json,
    write_json,
    write_tensors,
)
from forgekit.huggingface.tokenizer import (
    TOKENIZER_FILES,
    special_ids,
    write_tokenizer,
)
from forgekit.huggingface.transformers_models import transformers_config, transformers_names
from forgekit.model.lora import LoraLinear, adapter_names, lora_layers
from forgekit.model.transformer import Transformer, TransformerSpec
from forgekit.ranks import CheckpointError, Ranks, all_ranks
from forgekit.tensors import full, named_tensors

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
            a directory's generation settings and tokenizer. If None, the first family that
            computes the same; a model of transformers looks like itself.
        names: How a model of your own is named on disk; then ``like`` has its configuration.
        dtype: Of the weights on disk; the parameters' own if None. What has to be float32 stays.
        max_shard_size: Bytes of a file at most, one tensor at least.
        check_logits: Whether logits that transformers computes from the directory are compared with
            a ``Transformer``'s too, by the first rank, which holds both models then.

    Raises:
        TypeError: If nobody knows the names of the model on disk.
        ValueError: If ``like`` is not known.
        CheckpointError: If the directory holds anything else, the model is none of that family, the
            tokenizer has more tokens than the model, a file cannot be written, or what is read back
            differs. The same on every rank; nothing stands under the name then.
    """
    path = path_of("directory", directory)
    spec = model.spec if isinstance(model, Transformer) and names is None else None
    check_named(model, names)
    family, config, source = _resolve(like)
    ranks = all_ranks()
    if names is None and spec is None:
        names = ranks.together(lambda: transformers_names(model))
        config |= transformers_config(model)
    tensors = ranks.together(lambda: _weights(model))
    held = ranks.each(lambda: {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    with ExitStack() as stack:
        new = atomic_directory(path, is_replaceable=_is_export)
        folder = ranks.first(lambda: stack.enter_context(new))
        # The tokenizer first: it says how many rows of a padded vocabulary are tokens.
        tokens = ranks.first(lambda: write_tokenizer(tokenizer, folder, source))
        config = {key: value for key, value in config.items() if key not in STALE}
        if spec is not None:
            names, config = ranks.together(lambda: _describe(spec, family, config, tokens))
        assert names is not None
        plan = ranks.together(lambda: _plan(names, held, dtype, max_shard_size))
        ranks.first(lambda: _write_config(folder, config, plan, tokenizer, source))
        _write(ranks, folder, plan, tensors)
        # Read back before the folder gets its name: what differs is deleted with it.
        ranks.together(lambda: check_values(tensors, names, folder))
        if spec is not None:
            ranks.first(lambda: _check_spec(spec, folder))
            if check_logits:
                ranks.first(lambda: compare_logits(folder))
        ranks.first(stack.close)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors by name, without the factors of adapters that are merged into them."""
    layers, factors = lora_layers(model), set(adapter_names(model))
    if apart := [name for name, layer in layers.items() if not layer.bases]:
        raise CheckpointError(
            f"{apart[0]!r} has an adapter that is not merged into its weight. Call "
            "forgekit.merge_lora(model) first, or forgekit.save_adapter."
        )
    tensors = {name: t for name, t in named_tensors(model).items() if name not in factors}
    for name, layer in layers.items():
        if isinstance(layer, LoraLinear) and layer.merged is not None:
            tensors[f"{name}.weight"] = layer.merged
    return tensors


def _resolve(like: Any) -> tuple[Family | None, dict[str, Any], Path | None]:
    """The family that is asked for, the configuration to begin with, and where that is from."""
    if like is None:
        return None, {}, None
    if isinstance(like, str) and (family := family_named(like)) is not None:
        return family, {}, None
    source = None
    if isinstance(like, str | os.PathLike):
        source = path_of("like", like)
        if not source.is_dir():
            families = ", ".join(family.name for family in FAMILIES)
            raise ValueError(f"like is {brief(like)}: no directory, and no family of {families}.")
        config = read_config(source)
    else:
        config = dict(like if isinstance(like, Mapping) else like.to_dict())
    return family_named(str(config.get("model_type"))), config, source


def _is_export(path: Path) -> bool:
    if not (path / "config.json").is_file() or WRITER not in read_json(path / "config.json"):
        return False
    names = {"config.json", GENERATION, INDEX, *TOKENIZER_FILES}
    return all(
        p.is_file() and (p.name in names or WEIGHTS.fullmatch(p.name)) for p in path.iterdir()
    )


def _describe(
    spec: TransformerSpec, family: Family | None, base: dict[str, Any], tokens: int | None
) -> tuple[NameMap, dict[str, Any]]:
    """The names and the configuration of a ``Transformer``, its vocabulary without padding."""
    rows = spec.vocab_size
    if tokens is not None and tokens > rows:
        raise CheckpointError(
            f"the tokenizer has {tokens} tokens and the model {rows} rows for them."
        )
    if 0 < base.get("vocab_size", rows) < rows:
        rows = max(base["vocab_size"], tokens or 0)
    if base and family is None:
        family = family_of(base)  # raises: it is of none
    reasons = []
    for one in FAMILIES if family is None else [family]:
        try:
            config = one.write(attrs.evolve(spec, vocab_size=rows))
        except ValueError as error:
            reasons.append(str(error))
        else:
            return name_map(one, spec, rows), {**base, **config}
    raise CheckpointError(" ".join(reasons))


def _check_spec(spec: TransformerSpec, directory: Path) -> None:
    """Compare a model's spec with that of the files; a vocabulary may have lost its padding."""
    written = compare_specs(huggingface_spec(directory), spec)
    if different := [one for one in written if not one.startswith("vocab_size")]:
        raise CheckpointError(f"config.json was read back as another model: {different}.")


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


def _plan(
    names: NameMap, held: list[Entries], dtype: torch.dtype | None, max_shard_size: int
) -> _Plan:
    owners: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
    for rank, entries in enumerate(held):
        owners = {name: (rank, *entry) for name, entry in entries.items()} | owners
    if unnamed := [name for name in owners if name not in names.parts]:
        raise CheckpointError(
            f"the model has {unnamed[0]!r}, which has no name on disk. Pass names= with a rule "
            "for it."
        )
    if lost := [name for name, parts in names.parts.items() if parts and name not in owners]:
        raise CheckpointError(f"no rank has {lost[0]!r}, which has a name on disk.")
    groups: list[Entries] = [{}]
    for key, shape in names.shapes.items():
        written = owners[names.names[key][0]][1]
        if dtype is not None and written.is_floating_point:
            written = dtype
        entry = names.dtypes.get(key, written), shape
        if groups[-1] and sum(map(_bytes, [*groups[-1].values(), entry])) > max_shard_size:
            groups.append({})
        groups[-1][key] = entry
    count = len(groups)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return _Plan(names, dict(zip(files if count > 1 else [SINGLE], groups, strict=True)), owners)


def _bytes(entry: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return math.prod(entry[1]) * entry[0].itemsize


def _write_config(
    folder: Path, config: dict[str, Any], plan: _Plan, tokenizer: Any, source: Path | None
) -> None:
    sizes = Counter[torch.dtype]()
    for entries in plan.files.values():
        for entry in entries.values():
            sizes[entry[0]] += _bytes(entry)
    ((most, _),) = sizes.most_common(1)
    dtype = str(most).removeprefix("torch.")
    ids = special_ids(tokenizer, folder)
    config = {**_with_end(ids, config, tokenizer), "dtype": dtype, "torch_dtype": dtype}
    config[WRITER] = importlib.metadata.version("forgekit")
    write_json(folder / "config.json", config)
    settings = {key: config[key] for key in ids} if config["eos_token_id"] is not None else {}
    if source is not None and (source / GENERATION).is_file():
        settings = _with_end(ids, read_json(source / GENERATION), tokenizer)
    if settings := {key: value for key, value in settings.items() if value is not None}:
        write_json(folder / GENERATION, settings)
    if len(plan.files) > 1:
        where = {key: file for file, entries in plan.files.items() for key in entries}
        total = {"total_size": sizes.total()}
        write_json(folder / INDEX, {"metadata": total, "weight_map": where})


def _with_end(ids: dict[str, Any], settings: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Keep the token ids of settings, but for an end of text that a given tokenizer has not."""
    kept, end = settings.get("eos_token_id"), ids["eos_token_id"]
    kept = kept if isinstance(kept, list) else [kept]
    is_other = tokenizer is not None and end is not None and end not in kept
    return {**ids, **settings, **({"eos_token_id": end} if is_other else {})}


def _write(ranks: Ranks, folder: Path, plan: _Plan, tensors: Mapping[str, Tensor]) -> None:
    """Gather and write file by file."""
    values = _values(ranks, plan, tensors)
    for file, entries in plan.files.items():
        mine = islice(values, len(entries))
        if ranks.rank:
            deque(mine, maxlen=0)
        ranks.first(partial(_write_file, folder / file, entries, mine))


def _write_file(path: Path, entries: Entries, tensors: Iterator[Tensor]) -> None:
    try:
        write_tensors(path, entries, tensors)
    finally:
        deque(tensors, maxlen=0)  # the others are in the same collectives, also if a disk is full


@torch.no_grad()
def _values(ranks: Ranks, plan: _Plan, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield each tensor on disk on the first rank, and nothing of use on the others."""
    parts: dict[str, list[Part]] = {key: [] for key in plan.names.shapes}
    for part in (part for parts_of in plan.names.parts.values() for part in parts_of):
        parts[part.key].append(part)
    last = {part.name: key for key, sharing in parts.items() for part in sharing}
    whole: dict[str, Tensor] = {}
    for key, (dtype, shape) in (item for file in plan.files.values() for item in file.items()):
        for part in parts[key]:
            if part.name not in whole:
                whole[part.name] = _gather(ranks, plan, tensors.get(part.name), part.name)
        yield _assemble(parts[key], whole, dtype, shape) if ranks.rank == 0 else torch.empty(0)
        whole = {name: one for name, one in whole.items() if last[name] != key}


def _assemble(
    parts: list[Part], whole: Mapping[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    pieces = [
        piece
        for part in parts
        if (piece := overlaps(one := whole[part.name], local_part(one)[1], part)) is not None
    ]
    if len(pieces) == 1:
        return pieces[0][0].to(dtype)
    made = torch.empty(shape, dtype=dtype)
    for view, box in pieces:
        made[tuple(slice(*bounds) for bounds in box)] = view.to(dtype)
    return made


def _gather(ranks: Ranks, plan: _Plan, tensor: Tensor | None, name: str) -> Tensor:
    """A whole tensor in the first rank's memory; what the others return is of no use."""
    owner, dtype, shape = plan.owners[name]
    whole = torch.empty(0) if tensor is None else full(tensor)
    if owner == 0:
        return whole.cpu() if ranks.rank == 0 else whole.new_empty(0)
    if ranks.rank == owner:  # as bytes: gloo does not know every dtype
        dist.send(whole.cpu().contiguous().view(-1).view(torch.uint8), 0)
    elif ranks.rank == 0:
        whole = torch.empty(shape, dtype=dtype)
        dist.recv(whole.view(-1).view(torch.uint8), owner)
        return whole
    return whole.new_empty(0)
