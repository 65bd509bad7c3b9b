"""The deciding half: pure and synchronous, no I/O, no clock, no randomness of its own.

Anyone may import it; it imports itself, msgspec, hash functions and pure stdlib only.
Nothing in core knows what time it is, sleeps, logs or iterates a set.
"""
