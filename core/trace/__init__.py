"""The trace: the catalogue of events, and how they are written and read."""
