"""Batching policies: which waiting sequences to admit, in which order, and which to decode."""
