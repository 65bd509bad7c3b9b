"""Server-sent events, read from the pieces of a reply's body.

Whoever reads a stream uses it: the client of our workers' wire, `replay`, the tests. It keeps one
event at most, and knows nothing about what an event says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from moonserve.live.http.client import UpstreamError

_MAX_EVENT_BYTES = 16 << 20


async def sse_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event in body chunks, up to `[DONE]` or their end.

    Comments and other fields are skipped; line feeds join the data lines of one event. Raises
    UpstreamError if an event is larger than 16 MiB. It does not close `chunks`.
    """
    rest = b""
    data: list[bytes] = []
    async for chunk in chunks:
        lines = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
        rest = lines.pop()
        if len(rest) > _MAX_EVENT_BYTES:
            raise UpstreamError("server-sent event over 16 MiB", sent=True)
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and data:
                event = data[0] if len(data) == 1 else b"\n".join(data)
                data.clear()
                if event == b"[DONE]":
                    return
                yield event
