"""Policies: the contract between kernel and advisers, and a simple built-in for each group."""
