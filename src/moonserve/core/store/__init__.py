"""The rules of the KV store: the master, replicas, leases, eviction, and the recovery of a master.

Pure state machines; `live/store` moves the bytes and carries the calls.
"""
