"""Usage in an engine's reply: read and put right where it stands, with nothing else looked at.

In JSON the bytes `"usage":` are a key and never part of a string, whose quotes are escaped. The
last one counts. A decode instance reports as cached whatever it was handed, vLLM's Mooncake
connector the whole prompt: what was cached is prefill's to say, and is never more than the prompt.
"""

from __future__ import annotations

import re

import msgspec

from moonserve.core.units import Tokens

MARK = b'"usage":'
_FIELD = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)":\s*(\d{1,15})')
_CACHED = re.compile(rb'("cached_tokens":\s*)\d+')


class Usage(msgspec.Struct):
    """Tokens as an engine counts them; None: not said."""

    prompt: Tokens | None = None
    completion: Tokens | None = None
    cached: Tokens | None = None


def read(data: bytes) -> Usage:
    """The last usage in a piece of a reply; nothing in it where there is none."""
    at = data.rfind(MARK)
    if at < 0:
        return Usage()
    said = {name: int(count) for name, count in _FIELD.findall(data, at)}
    cached, prompt = said.get(b"cached_tokens"), said.get(b"prompt_tokens")
    if cached is not None and prompt is not None:
        cached = min(cached, prompt)
    return Usage(prompt, said.get(b"completion_tokens"), cached)


def patched(data: bytes, cached: Tokens) -> bytes:
    """The same with `cached` as its cached_tokens, where it says any."""
    at = data.rfind(MARK)
    if at < 0:
        return data
    return data[:at] + _CACHED.sub(rb"\g<1>%d" % cached, data[at:], count=1)
