"""moonserve: an open implementation of Mooncake, KVCache-centric disaggregated LLM serving."""

from moonserve.interrupt import quiet_while_importing

quiet_while_importing()

from pathlib import Path  # noqa: E402 - an interrupt of the imports is quiet from here on

from moonserve.native import choose  # noqa: E402 - as above

__version__ = "0.1.0"
CORE = choose(Path(__file__).parent)
"""Which form of core runs here, compiled or Python; chosen before any import of core."""
