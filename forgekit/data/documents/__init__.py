"""Text, JSON lines, parquet files and Hugging Face datasets become documents."""
