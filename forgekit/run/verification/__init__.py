"""A recipe in a layout against one process in float64."""
