"""KV blocks: their names (keys), the facts about who holds them, the indexes, and KV events.

Called by the Conductor, the store and the Indexer API. Nothing here places a request.
"""
