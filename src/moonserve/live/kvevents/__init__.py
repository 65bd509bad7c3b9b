"""KV events over ZMQ in vLLM's format: followed from engines, and published for our workers.

wire has the frames, subscriber follows one engine rank, follower gives its blocks to an index, and
publisher is the other end.
"""
