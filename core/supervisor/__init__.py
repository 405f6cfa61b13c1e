"""The supervisor: which processes exist, their generations and endpoints. Touches no request."""
