"""Ranks that hang, stragglers and memory: found, named and written down."""
