"""Adapters of a model in any layout, and their files."""
