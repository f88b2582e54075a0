"""Faults of lora."""

CHECKS: dict = {}
FAULTS: list = []
