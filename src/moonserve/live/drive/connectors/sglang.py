"""SGLang's disaggregation: both sides get one request with a room to meet in, at the same time.

As its public documentation, its source and its load balancer have it; not run against a real SGLang
here. Prefill waits in the room for decode to say where the KV goes, so neither can be called alone.
Of several data-parallel ranks the room's number says which one prefills (SGLang's rule
`follow_bootstrap_room`); a call that was sent to another rank fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

_ROOMS = 1 << 63
"""Room numbers are below this."""


def room(drawn: int, rank: int | None, ranks: int) -> int:
    """The number of a room for a prefill on that rank. drawn: at random, of 63 bits at most."""
    number = drawn % (_ROOMS // ranks)
    return number * ranks + (rank or 0)


def fields(bootstrap: str, rooms: Sequence[int]) -> dict[str, bytes]:
    """What both bodies get, as JSON by name. bootstrap: URL of prefill's bootstrap server; rooms:
    one for each sequence that is generated."""
    parts = urlsplit(bootstrap)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    said: dict[str, Sequence[object]] = {
        "bootstrap_host": [host] * len(rooms),
        "bootstrap_port": [parts.port] * len(rooms),
        "bootstrap_room": rooms,
    }
    several = len(rooms) > 1
    return {name: msgspec.json.encode(it if several else it[0]) for name, it in said.items()}


def decode_fields(rank: int | None) -> dict[str, bytes]:
    """What decode's body gets beyond that: the rank that prefills, where there are several."""
    return {} if rank is None else {"disagg_prefill_dp_rank": msgspec.json.encode(rank)}
