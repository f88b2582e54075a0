"""Metrics: rows, trackers, FLOPs, profiles."""
