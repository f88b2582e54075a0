"""A state on disk: save and load it in any layout, and where it is kept."""
