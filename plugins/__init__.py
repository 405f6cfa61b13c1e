"""Optional parts, loaded by entry point only."""
