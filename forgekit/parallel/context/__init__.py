"""Context parallelism: ring attention, Ulysses, and both."""
