"""Inside a checkpoint: what is in it, how it gets to its place, what is read of it and who may."""
