"""The kernel: what must never go wrong, whatever a policy does and whatever process dies."""
