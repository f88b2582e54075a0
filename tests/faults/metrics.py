"""Faults of metrics."""

CHECKS: dict = {}
FAULTS: list = []
