"""The rules of the KV store: the master, replicas, leases, eviction, and the recovery of a master.

Pure state machines; `live/store` moves the bytes and carries the calls. Read words, then master,
then its parts: catalog, placement, replicas, owners. evict has the orders of eviction.
"""
