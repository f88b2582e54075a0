"""Replica groups that come and go: who takes part in a step, and the state of one that joins."""
