"""moonserve: an open implementation of Mooncake, KVCache-centric disaggregated LLM serving."""

from pathlib import Path

from moonserve.native import choose

__version__ = "0.1.0"
CORE = choose(Path(__file__).parent)
"""Which form of core runs here, compiled or Python; chosen before any import of core."""
