"""Chunking policies: how a step's token budget is split over prefills."""
