"""Checkpoints: save a state and load it in any layout."""
