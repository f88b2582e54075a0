"""Data behind URLs: objects read and written with retries, and a local cache of blocks."""
