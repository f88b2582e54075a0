"""Tensor parallelism: plans, styles, vocabulary-sharded logits."""
