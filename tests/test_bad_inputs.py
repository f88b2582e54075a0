"""That enough is refused: the tables of bad inputs, counted as pytest collects them."""

from __future__ import annotations

LEAST = 1_000


def test_there_are_hundreds_of_bad_inputs(bad_inputs):
    assert len(set(bad_inputs)) == len(bad_inputs)
    assert len(bad_inputs) >= LEAST


def test_every_kind_of_input_has_bad_ones(bad_inputs):
    """A kind is a folder or a file of tests, of the library or of ``bad_inputs``."""
    kinds = {
        "configuration": ("test_config", "recipes", "command_lines"),
        "files": ("data/test_token_files", "data/test_text_files", "bad_inputs/test_files"),
        "meshes": ("test_mesh", "parallel"),
        "checkpoints": ("checkpoint",),
        "batches": ("data/test_batch", "data/test_loader", "bad_inputs/test_batches"),
    }
    for kind, places in kinds.items():
        files = [name.split("::")[0] for name in bad_inputs]
        found = [file for file in files if any(place in file for place in places)]
        assert len(found) >= 15, f"{kind}: {found}"
