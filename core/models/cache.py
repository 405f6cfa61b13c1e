"""The user's cache folder: models that were fetched, tokenizers that were converted. Safe to delete at any time."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$OCTAVO_CACHE`, else `octavo` in `$XDG_CACHE_HOME`, else `~/.cache/octavo`. Not created here."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "octavo"
    return Path.home() / ".cache" / "octavo"
