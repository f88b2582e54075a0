"""Micro-batches: their keys, masks, transforms and sequence slices."""
