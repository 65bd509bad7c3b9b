"""The embedded engine server: a worker that speaks vLLM's HTTP wire over any Engine and KVStore.

Started by the CLI through `main.run_worker`; other rooms reach a worker by HTTP only.
"""
