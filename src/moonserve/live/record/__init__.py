"""Recordings: what became of each request, as a trace on disk."""
