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


class UsageNames(msgspec.Struct, frozen=True):
    """How a form names the counts of its usage, where it differs from chat."""

    cached: bytes
    """Prompt tokens that were reused."""
    apart: tuple[bytes, ...] = ()
    """Counts that `input_tokens` leaves out, and that belong to the prompt."""


_NAMED = re.compile(rb'"usage":\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_COUNT = re.compile(rb'"(\w+)":\s*(\d{1,15})')


def read_named(data: bytes, names: UsageNames) -> SeenUsage:
    """As `read`, of a reply with names of its own."""
    for found in reversed(_NAMED.findall(data)):
        usage = _counted(found, names)
        if usage.prompt is not None:
            return usage
    return SeenUsage()


def patched_named(data: bytes, names: UsageNames, cached: Tokens | None) -> bytes:
    """As `patched`, in each usage of a reply with names of its own."""

    def put(found: re.Match[bytes]) -> bytes:
        usage = _counted(found[1], names)
        if usage.prompt is None or usage.cached is None:
            return found[0]
        reused = None if cached is None else min(cached, usage.prompt)
        text = _set(found[0], names.cached, reused)
        return _set(text, b"input_tokens", usage.prompt - (reused or 0)) if names.apart else text

    return _NAMED.sub(put, data)


def _counted(usage: bytes, names: UsageNames) -> SeenUsage:
    counts = {name: int(count) for name, count in _COUNT.findall(usage)}
    prompt = counts.get(b"input_tokens")
    if prompt is None:
        return SeenUsage()
    prompt += sum(counts.get(name, 0) for name in names.apart)
    cached = counts.get(names.cached)
    cached = None if cached is None else min(cached, prompt)
    return SeenUsage(prompt, counts.get(b"output_tokens"), cached)


def _set(usage: bytes, name: bytes, count: Tokens | None) -> bytes:
    value = b"null" if count is None else b"%d" % count
    return re.sub(rb'("%b":\s*)\d+' % name, rb"\g<1>" + value, usage, count=1)


def patched(data: bytes, cached: Tokens | None) -> bytes:
    """The same bytes with `cached` as cached_tokens, where the reply has that field; None: null."""
    at = data.rfind(MARK)
    if at < 0:
        return data
    value = b"null" if cached is None else b"%d" % cached
    return data[:at] + _CACHED.sub(rb"\g<1>" + value, data[at:], count=1)
