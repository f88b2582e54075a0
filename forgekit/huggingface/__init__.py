"""Directories in the Hugging Face layout, into a model and out of it, in any layout."""
