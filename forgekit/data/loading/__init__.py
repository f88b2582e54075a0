"""Rows become a resumable stream of one rank's micro-batches."""
