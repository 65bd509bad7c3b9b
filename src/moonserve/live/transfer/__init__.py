"""Moving bytes between segments: shared memory on one host, TCP between hosts.

Everything here is plain blocking code that runs on threads of its own. It uses no asyncio and knows
nothing about the store's objects.
"""
