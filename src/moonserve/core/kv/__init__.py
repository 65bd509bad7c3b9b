"""Who holds which KV blocks, under which names: keys, the prefix index, and KV events as facts.

Knows instances by id only; places nothing.
"""
