"""One optimizer step, its parts in the order in which they happen."""
