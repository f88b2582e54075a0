"""A step without its machines: memory, collectives and time of a layout, found on one CPU."""
