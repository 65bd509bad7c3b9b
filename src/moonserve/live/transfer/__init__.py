"""Moving bytes between segments: shared memory on one host, TCP between hosts.

Everything here is plain blocking code for threads of its own; no asyncio, no knowledge of objects.
"""
