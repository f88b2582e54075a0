"""From a micro-batch to logits: layers, attention, the transformer, its initial weights."""
