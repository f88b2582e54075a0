"""Faults of data."""

CHECKS: dict = {}
FAULTS: list = []
