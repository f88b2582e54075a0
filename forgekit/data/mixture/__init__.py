"""A sample number becomes a source and a row: permutation, weights, phases."""
