"""Load a Hugging Face directory into a model; each rank reads only its shards.

All headers are checked before the first value is written. A rank then goes through the files and
copies the boxes that its shards need, straight into them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from forgekit.checks import differences, path_of
from forgekit.files import restore_replaced
from forgekit.huggingface.families import Family, compare_specs, family_of, rules
from forgekit.huggingface.names import NameMap, Part
from forgekit.huggingface.safetensors_files import (
    Stored,
    read_json,
    reading,
    same_bits,
    stored_tensors,
    view_of,
)
from forgekit.huggingface.transformers_models import is_of_transformers, transformers_names
from forgekit.lora.adapters import reset_magnitudes
from forgekit.lora.peft_files import CONFIG as ADAPTER
from forgekit.model.initial import copy_full
from forgekit.model.lora import lora_layers
from forgekit.model.nf4 import is_packed
from forgekit.model.transformer import Transformer, TransformerSpec
from forgekit.ranks import CheckpointError, Ranks, explain, ranks_sharing
from forgekit.tensors import Box, index_in, local, named_tensors, overlap, ranges_of

IGNORED = ".rotary_emb.inv_freq"
"""Suffix of obsolete tensors in old directories, which are computed from config.json."""
ROWS = 4096
"""Rows of a table read at a time to compute their mean."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def huggingface_spec(
    directory: str | os.PathLike[str], *, max_seq_len: int | None = None
) -> TransformerSpec:
    """Read a model's spec from the ``config.json`` of a Hugging Face directory.

    Args:
        directory: Of a model of a family in ``forgekit.huggingface.families``.
        max_seq_len: Longest sequence; the model's own if None. A shorter one makes a model with a
            sliding window that of a ``Transformer``, as long as it fits into the window.

    Returns:
        The spec; ``attrs.evolve`` changes dropout, a padded vocabulary, or router terms.

    Raises:
        CheckpointError: If the architecture is not known, or has what a ``Transformer`` has not.

    Examples:
        >>> import json, tempfile
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
        >>> sizes |= {"intermediate_size": 16, "vocab_size": 32, "max_position_embeddings": 64}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = json.dumps({"model_type": "llama", **sizes})
        ...     _ = Path(folder, "config.json").write_text(text)
        ...     huggingface_spec(folder).dim
        8
    """
    path = restore_replaced(path_of("directory", directory))
    config = read_config(path)
    try:
        return family_of(config).read(config, max_seq_len)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"cannot use the config.json of {path}: {explain(error)}.") from None


def load_huggingface(
    model: nn.Module, directory: str | os.PathLike[str], *, names: NameMap | None = None
) -> None:
    """Load the weights of a Hugging Face directory into a model, in place.

    The model may be laid out in any way; then every rank calls it. Values are cast to the dtype
    that they have in the model. Rows of tokens that the directory has not become the mean of its
    rows, and those of padding zero. What a ``Transformer`` has besides its own parameters, such as
    adapters, stays; but magnitudes of DoRA whose adapter has not learned yet become the lengths of
    the rows that were read. Everything is checked before the first change: a directory that is
    refused leaves the model as it was.

    Args:
        model: What ``parallelize`` returned, or a plain model.
        directory: The directory.
        names: How a model of your own is named there; a ``Transformer`` and the models of
            transformers know their names.

    Raises:
        TypeError: If ``model`` is neither of them and ``names`` is None.
        ValueError: If parameters are on meta.
        CheckpointError: If the model in the directory is another one, tensors are missing, too
            many, of other shapes, or integers where the model's are not, or a file is damaged. The
            same on every rank. So are values that are not finite, which are found while they are
            read: then the model holds some of the others.
    """
    path = restore_replaced(path_of("directory", directory))
    check_named(model, names)
    tensors = named_tensors(model)
    if on_meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(
            f"{on_meta[0]!r} is on meta, so it has no memory to load into. Call parallelize first."
        )
    ranks = ranks_sharing(tensors.values())
    names, stored = ranks.together(lambda: _check(model, tensors, path, names))
    check_held(names, tensors, ranks, path)
    ranks.together(lambda: read_into(tensors, names, stored))
    reset_magnitudes(model)


def check_named(model: nn.Module, names: NameMap | None) -> None:
    """Raise if a model's names on disk are unknown."""
    if names is None and not isinstance(model, Transformer) and not is_of_transformers(model):
        raise TypeError(
            f"model is a {type(model).__name__}; pass names=NameMap(rules, model), made of the "
            "whole model before parallelize; save_huggingface needs its configuration as like=."
        )


def read_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        CheckpointError: If it is not there or no object.
    """
    return read_json(directory / "config.json")


def name_map(family: Family, spec: TransformerSpec, rows: int) -> NameMap:
    """Return the names of a ``Transformer`` in a family's directories with ``rows`` tokens."""
    with torch.device("meta"):
        return NameMap(rules(family, spec, rows), Transformer(spec))


def unpadded(spec: TransformerSpec, rows: int) -> TransformerSpec:
    """Return the spec of the same model with ``rows`` tokens and no padding."""
    return attrs.evolve(spec, vocab_size=rows, unpadded_vocab_size=None)


def check_stored(names: NameMap, stored: Mapping[str, Stored], where: Path) -> None:
    """Compare a directory's tensors with those that a model needs.

    Raises:
        CheckpointError: If tensors are missing, too many, or of another shape.
    """
    here = {key: f"of shape {shape}" for key, shape in names.shapes.items()}
    there = {k: f"of shape {one.shape}" for k, one in stored.items() if not k.endswith(IGNORED)}
    if different := differences(here, there):
        raise CheckpointError(f"{where} does not fit the model: {different}.")


def check_held(names: NameMap, tensors: Mapping[str, Tensor], ranks: Ranks, where: Path) -> None:
    """Raise, on every rank, if the model has only some of the named tensors."""
    held = {name for one in ranks.each(lambda: [*tensors]) for name in one}
    if lost := [name for name, parts in names.parts.items() if parts and name not in held]:
        raise CheckpointError(f"{where} has values for {lost[0]!r}, which the model lacks.")


def held_parts(tensors: Mapping[str, Tensor], names: NameMap) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield this rank's parts of tensors on disk.

    Args:
        tensors: A model's, by name.
        names: Their names on disk; what is in none of them is left out.

    Yields:
        The name on disk, where in that tensor it is, and a view of the values, laid out as there.
    """
    for name, tensor in tensors.items():
        box = ranges_of(tensor)
        for part in names.parts.get(name, ()):
            if (common := _overlap(local(tensor), box, part)) is not None:
                yield (part.key, *common)


def _check(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    path: Path,
    names: NameMap | None,
) -> tuple[NameMap, dict[str, Stored]]:
    """Check a directory against a model; return the name map and the stored tensors."""
    if (path / ADAPTER).is_file() and not lora_layers(model):
        raise CheckpointError(
            f"{path} has an {ADAPTER} beside its weights, so transformers adds an adapter to "
            "them. Add it with forgekit.add_lora and load_adapter, or move its files elsewhere."
        )
    names = names or _names_of(model, path)
    stored = stored_tensors(path)
    if {HEAD, EMBEDDING} <= stored.keys() and HEAD not in names.shapes:
        files = [stored[key].file for key in (HEAD, EMBEDDING)]
        with reading(files[0]) as first, reading(files[1]) as second:
            is_same = same_bits(first.get_tensor(HEAD), second.get_tensor(EMBEDDING))
        if not is_same:
            raise CheckpointError(
                f"{path}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}, so one "
                "of them would be lost."
            )
        del stored[HEAD]
    check_stored(names, stored, path)
    for name, tensor in tensors.items():
        for part in names.parts.get(name, ()):
            dtype = stored[part.key].dtype
            # Quantized weights are integers, which a cast would neither scale nor unpack.
            if dtype.is_floating_point != (tensor.is_floating_point() or is_packed(tensor)):
                raise CheckpointError(
                    f"{part.key!r} is {dtype}, but the model's is {tensor.dtype}: quantized "
                    "weights are not unpacked."
                )
    return names, stored


def _names_of(model: nn.Module, path: Path) -> NameMap:
    config = read_config(path)
    if not isinstance(model, Transformer):
        kind = getattr(model.config, "model_type", None)
        if config.get("model_type") != kind:
            raise CheckpointError(
                f"{path} is of another model: its model_type is {config.get('model_type')!r}, "
                f"not {kind!r}. Build it with forgekit.huggingface.transformers_model."
            )
        return transformers_names(model)
    spec = model.spec
    family = family_of(config)
    stored = family.read(config, spec.max_seq_len)
    rows = stored.tokens  # the first rows; new tokens and padding follow
    here = spec if spec.tokens < rows else unpadded(spec, rows)
    if different := compare_specs(stored, here):
        raise CheckpointError(
            f"{path} is of another model: {', '.join(different)}. Build it with "
            "forgekit.huggingface_spec(directory)."
        )
    return name_map(family, spec, rows)


@torch.no_grad()
def read_into(tensors: Mapping[str, Tensor], names: NameMap, stored: Mapping[str, Stored]) -> None:
    """Read this rank's parts, in place, file by file."""
    packed = {n: t for n, t in tensors.items() if n in names.parts and is_packed(t)}
    plain = {name: tensor for name, tensor in tensors.items() if name not in packed}
    for name, (rows, tokens) in names.padded.items():
        if name in plain and local(plain[name]).numel():
            (start, stop), *columns = ranges_of(plain[name])
            others = local(plain[name])[max(rows - start, 0) :].zero_()
            if (first := max(rows, start)) < min(tokens, stop):
                others[: tokens - first].copy_(_mean_row(names.parts[name], stored, rows, columns))
    boxes: dict[Path, list[tuple[str, Box, Tensor]]] = {}
    for part in held_parts(plain, names):
        boxes.setdefault(stored[part[0]].file, []).append(part)
    for path, parts in boxes.items():
        with reading(path) as file:
            for key, box, target in parts:
                target.copy_(view_of(file, key, box))
                if target.is_floating_point() and not _is_finite(target):
                    raise CheckpointError(f"{key!r} in {path} contains values that are not finite.")
    for name, tensor in packed.items():
        # Each piece needs the mean over the whole tensor, so a rank reads all, one at a time.
        parts = names.parts[name]
        shape = [max(stops) for stops in zip(*([b for _, b in p.box] for p in parts), strict=True)]
        whole = torch.empty(shape, dtype=stored[parts[0].key].dtype)
        read_into({name: whole}, names, stored)
        copy_full(tensor, whole)


def _mean_row(
    parts: Sequence[Part], stored: Mapping[str, Stored], rows: int, columns: Sequence[Any]
) -> Tensor:
    """Compute the float64 mean of the rows on disk, for a range of columns, in pieces."""
    shape = [stop - start for start, stop in columns]
    total = torch.zeros(shape, dtype=torch.float64)
    for start in range(0, rows, ROWS):
        stop = min(start + ROWS, rows)
        some = torch.empty(stop - start, *shape, dtype=stored[parts[0].key].dtype)
        for part in parts:
            if (common := _overlap(some, ((start, stop), *columns), part)) is not None:
                with reading(stored[part.key].file) as file:
                    common[1].copy_(view_of(file, part.key, common[0]))
        total += some.double().sum(0)
    return total / rows


def _overlap(values: Tensor, box: Box, part: Part) -> tuple[Box, Tensor] | None:
    """Return the overlap of a part with a rank's shard.

    Args:
        values: The rank's values.
        box: Where they are in the whole tensor.
        part: A part of the whole tensor.

    Returns:
        Where on disk, and a view of the rank's values, laid out as there; None if it holds nothing
        of the part.
    """
    if (shared := overlap(box, part.box)) is None:
        return None
    view = values[index_in(shared, box)]
    view = view[0] if part.is_stacked else view
    view = view.mT if part.is_transposed else view
    # From the box's offset in the model's tensor to its offset on disk.
    begins = part.to_key([start for start, _ in part.box])
    moved = [there - here for here, (there, _) in zip(begins, part.key_box, strict=True)]
    pairs = zip(part.to_key(shared), moved, strict=True)
    return tuple((start + by, stop + by) for (start, stop), by in pairs), view


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.stack(tensor.aminmax()).isfinite().all())  # no mask of the tensor's size
