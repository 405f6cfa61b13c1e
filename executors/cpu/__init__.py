"""The CPU executor: torch, a paged KV pool, arithmetic that does not depend on the batch."""

import os

# How long threads spin for each other before they sleep. For long (the default) brings a step from 0.1 s to 2 s as soon
# as anything else wants a core, and the engine's other processes always do; not at all costs a third of the speed when
# nothing does. Read once, when torch is loaded: hence here, before any module imports it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
