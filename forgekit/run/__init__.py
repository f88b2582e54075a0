"""Around the loop: checkpoints, metrics, evaluation, generation, and stopping cleanly."""
