"""Planning: memory, collectives and time of a step in a layout, estimated on one CPU."""
