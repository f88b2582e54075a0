"""What `prepare` and token files are made of: documents read, counted, encoded, kept on disk."""
