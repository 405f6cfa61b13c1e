"""Speculation policies: how many tokens to draft for each sequence."""
