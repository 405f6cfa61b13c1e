"""The scheduler: which requests exist, their tokens, order, slots and credit."""
