"""Before torch is loaded: its threads must not spin while ours work."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
