"""Text ⇄ tokens: chat templates, incremental detokenising, stop strings. Knows nothing of scheduling or weights."""
