"""What goes wrong with a model's files; the text is meant for the person who gave the model's name."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be found, fetched or read."""


class GgufError(ModelError):
    """A file is not a GGUF file that can be read: foreign, cut short, or inconsistent."""
