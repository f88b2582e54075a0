"""What a model can do now: losses of other data, text, and bad steps looked at again."""
