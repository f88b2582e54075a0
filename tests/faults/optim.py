"""Faults of optim."""

CHECKS: dict = {}
FAULTS: list = []
