"""Preemption policies: who gives up a slot when blocks run short."""
