"""KV events over ZMQ in vLLM's format: read from engines, and published for our own workers.

wire has the frames, subscriber follows one engine rank, publisher is the other end.
"""
