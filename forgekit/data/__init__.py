"""Tokens on disk become one rank's micro-batches."""
