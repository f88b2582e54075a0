"""Faults of plan."""

CHECKS: dict = {}
FAULTS: list = []
