"""Text, JSON lines, parquet and Hugging Face data sets become documents."""
