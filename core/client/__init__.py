"""The client library: submission, the journal of what was delivered, resuming after a lost process."""
