"""Sharding of a model over ranks, once, at set-up."""
