"""Tensor parallelism: plans, styles, logits sharded by the vocabulary."""
