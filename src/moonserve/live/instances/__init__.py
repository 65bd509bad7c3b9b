"""Clients of engine instances: one HTTP client speaking vLLM's wire, one module per connector."""
