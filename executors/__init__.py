"""Executors: they own weights and KV bytes, run bound steps and sample. They choose no work."""
