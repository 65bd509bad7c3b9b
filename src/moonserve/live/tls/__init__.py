"""TLS between all processes: contexts from files that may change, and the authority that signs."""
