"""SGLang's disaggregation: prefill and decode get the same request at once, with a room to meet in.

Written from SGLang's public documentation, its source and its load balancer; not run against a real
SGLang here. Prefill waits in the room until decode sends where the KV goes, so neither can be
called alone. With several data-parallel ranks, the room's number selects the rank that prefills
(SGLang's rule `follow_bootstrap_room`); a call that was sent to another rank fails.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from moonserve.core.errors import MoonserveError
from moonserve.core.units import Micros
from moonserve.live.drive.handover import Handed, PrefillCall
from moonserve.live.drive.lost import CallLost, Passed
from moonserve.live.http.client import ClientStream
from moonserve.live.openai import usage

_ROOMS = 1 << 63
"""Room numbers are below this."""
HELD_US: Micros = 300_000_000
"""How long after the calls the Conductor may name the decode instance."""


def room(drawn: int, rank: int | None, ranks: int) -> int:
    """The number of a room for a prefill on that rank. drawn: a random number of at most 63
    bits."""
    number = drawn % (_ROOMS // ranks)
    return number * ranks + (rank or 0)


def fields(bootstrap: str, rooms: Sequence[int]) -> dict[str, bytes]:
    """The fields that both bodies get: JSON by name. bootstrap: URL of prefill's bootstrap server;
    rooms: one for each generated sequence."""
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
    """The fields that only decode's body gets: the rank that prefills, if there are several."""
    return {} if rank is None else {"disagg_prefill_dp_rank": msgspec.json.encode(rank)}


class Sglang:
    """A handover.HandoverConnector that also calls decode, because neither half can go on alone."""

    async def prefill(self, call: PrefillCall) -> Handed:
        """See HandoverConnector. Prefill's reply shows that both halves have met."""
        caller = call.caller
        asked = call.asked
        action = call.action
        to = action.to
        limits = caller.limits
        decision = action.decision
        ranks, sequences = call.member.spec.dp_size, asked.choices * asked.prompts
        rooms = [room(secrets.randbits(63), to.dp_rank, ranks) for _ in range(sequences)]
        both = fields(call.member.bootstrap, rooms)
        limit_s = limits.whole_s(limits.first_byte_s + limits.handover_s, asked.max_tokens)
        of_decode = asked.with_fields(both | decode_fields(to.dp_rank))
        stream = caller.stream(action.decode, asked, call.request, of_decode, limit_s)
        second: asyncio.Task[ClientStream] = asyncio.create_task(stream.__aenter__())
        note = call.noted()
        whole = caller.whole(to, asked, call.request, asked.with_fields(both), limit_s)
        first = asyncio.create_task(whole)
        handed = Handed(to, None, caller.conductor.now_us() + HELD_US)
        handed.at, handed.stream = action.decode.id, second
        handed.note = caller.observer.began(
            action.decode.id, "decode", decision.prompt_tokens, 0, asked.stream
        )
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                await _decode_answered(call, handed)
            # a streamed reply has its usage in an event
            handed.cached = usage.read((await first).body).cached
            note.answered(handed.cached)
        except BaseException:
            first.cancel()
            handed.drop()
            raise
        finally:
            note.ended()
        return handed


async def _decode_answered(call: PrefillCall, handed: Handed) -> None:
    """Decode answers before its prefill does. Raises Passed, or CallLost that blames decode."""
    decode = call.action.decode
    assert handed.stream is not None, "it was just called"
    try:
        begun = await handed.stream
        if begun.status != 200:
            handed.stream = None
            # raises, since the status is no success
            await call.caller.rest(decode, call.asked, call.request, begun)
    except Passed:
        raise
    except MoonserveError as error:
        lost = CallLost.of(error)
        lost.member = decode.id
        raise lost from None
