"""Faults of verify."""

CHECKS: dict = {}
FAULTS: list = []
