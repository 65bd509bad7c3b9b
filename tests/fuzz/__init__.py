"""Arbitrary bytes at every reader of what others send: see `fuzz` in tests/fuzz/cases.py."""
