"""Checkpoints: save, load, what is in them, and where they are stored."""
