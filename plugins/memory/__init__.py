"""Where memory goes: what a model would take, and what a running executor holds.

shape        what a sequence's KV is made of, read from a model's own description (no weights are loaded)
calculator   what that comes to at a context and a concurrency; pure arithmetic
ledger       an executor's memory at four moments, of measured, estimated and unobservable parts
command      `octavo memory`
"""
