"""moonserve: an open implementation of Mooncake, KVCache-centric disaggregated LLM serving."""

__version__ = "0.1.0"
