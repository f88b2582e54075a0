"""Faults of huggingface."""

CHECKS: dict = {}
FAULTS: list = []
