"""Faults of checkpoints."""

CHECKS: dict = {}
FAULTS: list = []
