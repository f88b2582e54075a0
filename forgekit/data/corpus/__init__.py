"""Documents become token files: tokenizer, prepare, binary shards and their index."""
