"""Kernel sources and their plain-torch references, with loaders. Knows nothing else of Octavo."""
