"""Rollouts: batches of sampled answers with rewards, their losses, streams, published weights."""
