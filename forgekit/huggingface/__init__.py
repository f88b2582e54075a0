"""Reading and writing of Hugging Face directories, for a model in any layout."""
