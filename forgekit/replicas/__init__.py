"""Replica groups that join and leave: a step's participants, and the state of a joining one."""
