"""Chunked pipeline parallelism: one long prompt prefilled by a group of near instances.

The seeds' form: instance k computes the k-th chunk of the prompt, layer by layer, from the KV of
the chunks before it, which the instances before it hand on layer by layer. Read by placement.
"""

from __future__ import annotations

import msgspec

from moonserve.core.units import InstanceId, Micros, Tokens


class Stage(msgspec.Struct, frozen=True):
    """One instance of a group, and the tokens [start, end) of the prompt that it computes.

    Stages follow each other: the first starts at the reused prefix, the last ends with the prompt.
    All starts are multiples of the block size. A stage is one pass, whatever chunk_tokens says:
    else the next one could begin only with the last of its passes, not one layer behind.
    """

    instance: InstanceId
    start: Tokens
    end: Tokens
    work_us: Micros = 0
    """Predicted: its engine's time, waiting for layers of the one before included."""
