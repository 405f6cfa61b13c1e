"""Eviction policies: which cached blocks go first."""
