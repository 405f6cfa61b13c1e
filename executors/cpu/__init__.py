"""The CPU executor: torch, a paged KV pool, arithmetic that does not depend on the batch."""

import os

# Threads that spin while they wait for each other bring a step from 0.1 s to 2 s as soon as anything else wants a core,
# and the engine's other processes always do. Read once, when torch is loaded: hence here, before any module imports it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
