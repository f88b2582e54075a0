"""Verification of a recipe's layout against one process in float64."""

from forgekit.verification.verify import VerifyReport

__all__ = ["VerifyReport"]
