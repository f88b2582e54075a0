"""From gradients to updates: parameter groups, optimizers, learning-rate schedules."""
