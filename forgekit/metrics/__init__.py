"""Rows of metrics, where they go, and what they are measured by."""
