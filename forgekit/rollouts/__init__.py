"""Rollouts: sampled answers with rewards, as batches, losses, streams and published weights."""
