"""Usage in the bytes of an engine's reply: read and corrected in place, without parsing the rest.

`live/drive` calls it for replies that pass through. In JSON the bytes `"usage":` are always a key,
since quotes inside strings are escaped; the last one counts. A decode instance reports all KV that
it received as cached (vLLM's Mooncake connector: the whole prompt). So the prefill instance's count
replaces it, and it is never more than the prompt. If prefill reports none, the client gets null.
"""

from __future__ import annotations

import re

import msgspec

from moonserve.core.units import Tokens

MARK = b'"usage":'
_FIELD = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)":\s*(\d{1,15})')
_CACHED = re.compile(rb'("cached_tokens":\s*)\d+')


class SeenUsage(msgspec.Struct):
    """Tokens as an engine counts them; None: the engine does not report them."""

    prompt: Tokens | None = None
    completion: Tokens | None = None
    cached: Tokens | None = None


def read(data: bytes) -> SeenUsage:
    """The last usage in these bytes; all fields are None where there is none."""
    at = data.rfind(MARK)
    if at < 0:
        return SeenUsage()
    counts = {name: int(count) for name, count in _FIELD.findall(data, at)}
    cached = counts.get(b"cached_tokens")
    prompt = counts.get(b"prompt_tokens")
    if cached is not None and prompt is not None:
        cached = min(cached, prompt)
    return SeenUsage(prompt, counts.get(b"completion_tokens"), cached)


def patched(data: bytes, cached: Tokens | None) -> bytes:
    """The same bytes with `cached` as cached_tokens, where the reply has that field; None: null."""
    at = data.rfind(MARK)
    if at < 0:
        return data
    value = b"null" if cached is None else b"%d" % cached
    return data[:at] + _CACHED.sub(rb"\g<1>" + value, data[at:], count=1)
