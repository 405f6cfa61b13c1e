"""The KV-manager: block ids, reference counts, block tables and the prefix tree."""
