"""The native CPU executor: one call into the C++ step library runs a whole step. No torch in its arithmetic."""
