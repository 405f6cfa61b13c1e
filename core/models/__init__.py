"""Where a model's files are, and how to read the GGUF format. Knows nothing of weights' arithmetic or of text."""
