"""Processes: each is a list of parts, with signals, readiness and a drain at its end."""
