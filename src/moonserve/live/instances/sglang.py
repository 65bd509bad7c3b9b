"""SGLang's disaggregation: both sides get one request with a room to meet in, at the same time.

As its public documentation and load balancer have it; not run against a real SGLang here. Prefill
waits in the room for decode to say where the KV goes, so neither can be called alone.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

ROOMS = 1 << 63
"""Room numbers are below this."""


def fields(bootstrap: str, room: int) -> dict[str, bytes]:
    """What both bodies get, as JSON by name. bootstrap: URL of prefill's bootstrap server."""
    parts = urlsplit(bootstrap)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return {
        "bootstrap_host": msgspec.json.encode(host),
        "bootstrap_port": msgspec.json.encode(parts.port),
        "bootstrap_room": msgspec.json.encode(room),
    }
