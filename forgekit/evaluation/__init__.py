"""Evaluation: losses on other data, generated text, and replays of bad steps."""
