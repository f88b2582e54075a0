"""Shard one model over many ranks, once, at set-up."""
