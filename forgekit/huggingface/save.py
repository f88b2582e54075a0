"""Save a model in any layout as a Hugging Face directory, one tensor at a time.

Every rank takes part; the first one writes. The others send it what they hold of a tensor, which is
written and let go before the next, so that no rank ever holds more than its own shards and one
whole tensor. The directory is filled under a temporary name, read back and compared, and only then
it gets its own.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgekit.checks import brief, path_of
from forgekit.files import atomic_directory
from forgekit.huggingface.families import (
    FAMILIES,
    Family,
    compare_specs,
    family_named,
    family_of,
)
from forgekit.huggingface.load import (
    check_named,
    check_stored,
    held_parts,
    huggingface_spec,
    name_map,
    read_config,
    unpadded,
)
from forgekit.huggingface.names import NameMap
from forgekit.huggingface.safetensors_files import (
    INDEX,
    SINGLE,
    WEIGHTS_KEY,
    read_json,
    reading,
    same_bits,
    slices,
    stored_tensors,
    view_of,
    write_json,
    write_tensors,
)
from forgekit.huggingface.tokenizer import (
    TEMPLATES,
    special_ids,
    tokenizer_files,
    write_tokenizer,
)
from forgekit.huggingface.transformers_models import transformers_config, transformers_names
from forgekit.model.lora import LoraLinear, adapter_names, lora_layers
from forgekit.model.transformer import Transformer, TransformerSpec
from forgekit.ranks import CheckpointError, Ranks, all_ranks
from forgekit.safetensors_files import bytes_of
from forgekit.tensors import Box, named_tensors, volume

WRITER = "forgekit_version"
"""Key of config.json that marks directories written by forgekit."""

GENERATION = "generation_config.json"

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Names of weight files that are written here, and so may be replaced."""

STALE = (
    *("auto_map", "_name_or_path", "original_max_position_embeddings", "quantization_config"),
    WEIGHTS_KEY,
)
"""Keys of the base's config.json that do not apply to the written model."""

Key = tuple[str, Box]
"""A rank's part of a tensor on disk: name and box there."""
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
) -> None:
    """Save a model as a directory for transformers; every rank calls it.

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
    with ExitStack() as stack:
        new = atomic_directory(path, is_replaceable=_is_export)
        folder = ranks.first(lambda: stack.enter_context(new))
        # The tokenizer first: it determines how many rows of a padded vocabulary are tokens.
        tokens = ranks.first(lambda: write_tokenizer(tokenizer, folder, source))
        config = {key: value for key, value in config.items() if key not in STALE}
        if spec is not None:
            names, config = ranks.together(lambda: _describe(spec, family, config, tokens))
        assert names is not None
        views = ranks.together(lambda: _views(tensors, names))
        held = ranks.each(lambda: {key: view.dtype for key, view in views.items()})
        senders = ranks.together(lambda: _senders(names, held))
        files = _files(names, held, dtype, max_shard_size)
        ranks.first(lambda: _write_config(folder, config, files, tokenizer, source))
        _write(ranks, folder, files, senders, views)
        # Verified before the folder gets its name, so that a wrong one is deleted.
        ranks.together(lambda: _check_values(views, names, folder))
        if spec is not None:
            ranks.first(lambda: _check_spec(spec, folder))
        ranks.first(stack.close)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors by name, without the factors of merged adapters."""
    layers, factors = lora_layers(model), set(adapter_names(model))
    if unmerged := [name for name, layer in layers.items() if not layer.bases]:
        raise CheckpointError(
            f"{unmerged[0]!r} has an adapter that is not merged into its weight. Call "
            "forgekit.merge_lora(model) first, or forgekit.save_adapter."
        )
    tensors = {name: t for name, t in named_tensors(model).items() if name not in factors}
    for name, layer in layers.items():
        if isinstance(layer, LoraLinear) and layer.merged is not None:
            tensors[f"{name}.weight"] = layer.merged
    return tensors


def _views(tensors: Mapping[str, Tensor], names: NameMap) -> dict[Key, Tensor]:
    """Yield this rank's part of each tensor on disk: name, box and view."""
    if unnamed := [name for name in tensors if name not in names.parts]:
        raise CheckpointError(
            f"the model has {unnamed[0]!r}, which has no name on disk. Pass names= with a rule "
            "for it."
        )
    return {(key, box): view for key, box, view in held_parts(tensors, names)}


def _resolve(like: Any) -> tuple[Family | None, dict[str, Any], Path | None]:
    """Return the requested family, the base configuration, and its source."""
    if like is None:
        return None, {}, None
    if isinstance(like, str) and (family := family_named(like)) is not None:
        return family, {}, None
    source = None
    if isinstance(like, str | os.PathLike):
        source = path_of("like", like)
        if not source.is_dir():
            families = ", ".join(family.name for family in FAMILIES)
            raise ValueError(f"like is {brief(like)}, neither a directory nor one of {families}.")
        config = read_config(source)
    else:
        config = dict(like if isinstance(like, Mapping) else like.to_dict())
    return family_named(str(config.get("model_type"))), config, source


def _is_export(path: Path) -> bool:
    if not (path / "config.json").is_file() or WRITER not in read_json(path / "config.json"):
        return False
    names = {"config.json", GENERATION, INDEX, *tokenizer_files(path)}
    files = [p for p in (*path.iterdir(), *(path / TEMPLATES).glob("*")) if p != path / TEMPLATES]
    return all(
        p.is_file() and (str(p.relative_to(path)) in names or WEIGHTS.fullmatch(p.name))
        for p in files
    )


def _describe(
    spec: TransformerSpec, family: Family | None, base: dict[str, Any], tokens: int | None
) -> tuple[NameMap, dict[str, Any]]:
    """Return name map and configuration of a ``Transformer`` without vocabulary padding."""
    rows = spec.tokens
    if tokens is not None and tokens > rows:
        raise CheckpointError(
            f"the tokenizer has {tokens} tokens, but the model only {rows} rows. Train rows for "
            f"the new tokens: unpadded_vocab_size={tokens} in the model's spec."
        )
    if spec.unpadded_vocab_size is None and 0 < base.get("vocab_size", rows) < rows:
        rows = max(base["vocab_size"], tokens or 0)
    if base and family is None:
        family = family_of(base)  # raises: it is of none
    reasons = []
    for one in FAMILIES if family is None else [family]:
        try:
            config = one.write(unpadded(spec, rows))
        except ValueError as error:
            reasons.append(str(error))
        else:
            return name_map(one, spec, rows), {**base, **config}
    raise CheckpointError(" ".join(reasons))


def _check_spec(spec: TransformerSpec, directory: Path) -> None:
    """Compare a model's spec with the files'; the vocabulary's padding may be gone."""
    written = compare_specs(huggingface_spec(directory), spec)
    if different := [one for one in written if not one.startswith("vocab_size")]:
        raise CheckpointError(f"the written config.json describes another model: {different}.")


def _senders(
    names: NameMap, held: Sequence[Mapping[Key, torch.dtype]]
) -> dict[str, dict[Box, int]]:
    """Return each tensor's boxes, by name on disk, with the first rank that holds each."""
    senders: dict[str, dict[Box, int]] = {key: {} for key in names.shapes}
    for rank, boxes in enumerate(held):
        for key, box in boxes:
            senders[key].setdefault(box, rank)
    for key, shape in names.shapes.items():
        if sum(map(volume, senders[key])) != math.prod(shape):
            raise CheckpointError(f"no rank has all of {names.names[key]}, {key!r} on disk.")
    return senders


def _files(
    names: NameMap,
    held: Sequence[Mapping[Key, torch.dtype]],
    dtype: torch.dtype | None,
    max_shard_size: int,
) -> dict[str, Entries]:
    """Return dtype and shape of each tensor, by file, in the order of writing."""
    dtypes = {key: of_model for boxes in held for (key, _), of_model in boxes.items()}
    groups: list[Entries] = [{}]
    for key, shape in names.shapes.items():
        written = dtypes[key]
        if dtype is not None and written.is_floating_point:
            written = dtype
        entry = names.dtypes.get(key, written), shape
        if groups[-1] and sum(map(_bytes, [*groups[-1].values(), entry])) > max_shard_size:
            groups.append({})
        groups[-1][key] = entry
    count = len(groups)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return dict(zip(files if count > 1 else [SINGLE], groups, strict=True))


def _bytes(entry: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return math.prod(entry[1]) * entry[0].itemsize


def _write_config(
    folder: Path,
    config: dict[str, Any],
    files: dict[str, Entries],
    tokenizer: Any,
    source: Path | None,
) -> None:
    sizes = Counter[torch.dtype]()
    for entries in files.values():
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
    if len(files) > 1:
        where = {key: file for file, entries in files.items() for key in entries}
        total = {"total_size": sizes.total()}
        write_json(folder / INDEX, {"metadata": total, "weight_map": where})


def _with_end(ids: dict[str, Any], settings: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Keep the token ids of settings, except an end of text that the tokenizer lacks."""
    kept, end = settings.get("eos_token_id"), ids["eos_token_id"]
    kept = kept if isinstance(kept, list) else [kept]
    is_other = tokenizer is not None and end is not None and end not in kept
    return {**ids, **settings, **({"eos_token_id": end} if is_other else {})}


def _write(
    ranks: Ranks,
    folder: Path,
    files: Mapping[str, Entries],
    senders: Mapping[str, Mapping[Box, int]],
    views: Mapping[Key, Tensor],
) -> None:
    """Write all files on the first rank, to which the others send their parts."""
    entries = {key: entry for file in files.values() for key, entry in file.items()}

    def part(key: str, box: Box, sender: int) -> Tensor:
        """Return this rank's part of a tensor, or on the first rank another's."""
        if sender == ranks.rank:
            return views[key, box].to("cpu", entries[key][0]).contiguous()
        received = torch.empty([stop - start for start, stop in box], dtype=entries[key][0])
        dist.recv(bytes_of(received), sender)
        return received

    def whole(key: str) -> Tensor:
        if len(senders[key]) == 1:
            return part(key, *next(iter(senders[key].items())))
        tensor = torch.empty(entries[key][1], dtype=entries[key][0])
        for box, sender in senders[key].items():
            tensor[slices(box)] = part(key, box, sender)
        return tensor

    def write() -> None:
        tensors = map(whole, entries)
        try:
            for file, inside in files.items():
                write_tensors(folder / file, inside, islice(tensors, len(inside)))
        finally:
            deque(tensors, maxlen=0)  # the others are sending, even if the disk is full

    if ranks.rank:
        for key in entries:
            for box, sender in senders[key].items():
                if sender == ranks.rank:  # as bytes: gloo lacks some dtypes
                    dist.send(bytes_of(part(key, box, sender)), 0)
    ranks.first(write)


@torch.no_grad()
def _check_values(views: Mapping[Key, Tensor], names: NameMap, directory: Path) -> None:
    """Compare this rank's tensors with the files, bit for bit after the cast to their dtype."""
    stored = stored_tensors(directory)
    check_stored(names, stored, directory)
    with ExitStack() as stack:  # each file is opened once: headers with many experts are long
        paths = {one.file for one in stored.values()}
        files = {path: stack.enter_context(reading(path)) for path in paths}
        for (key, box), view in views.items():
            written = view_of(files[stored[key].file], key, box)
            if not same_bits(written, view.to("cpu", written.dtype)):
                raise CheckpointError(
                    f"{key!r} on disk has values that differ from {names.names[key]}."
                )
