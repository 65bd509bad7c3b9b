"""The first half of a request in two halves: prefill, and what its decode is to be told.

One function per way that KV goes; a way is a connector's, its words are in live/instances. What a
prefill gave is used once, and not after its time: see Handed.
"""

from __future__ import annotations

import asyncio
import secrets

from moonserve.core.errors import EngineFailed, MoonserveError, NobodyAlive
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Prefill
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import MICROS_PER_SECOND, InstanceId, Micros, Tokens
from moonserve.live.drive.calls import Answer, Caller, CallLost, Passed
from moonserve.live.drive.connectors import mooncake, nixl, sglang
from moonserve.live.external.observed import OutgoingCall
from moonserve.live.http.client import ClientStream
from moonserve.live.http.message import UNREADABLE
from moonserve.live.openai import usage
from moonserve.live.openai.external import ExternalRequest
from moonserve.live.openai.reply import ReadReply, read_reply


class Handed:
    """What one prefill left for one decode: take it once, or `drop` it."""

    def __init__(
        self,
        prefill: InstanceInfo,
        params: bytes | None,
        until_us: Micros,
        cached: Tokens | None = None,
    ) -> None:
        """params: JSON for the decode; None: there is nothing to fetch, it computes all itself;
        cached: of the prompt, as prefill says it."""
        self.prefill = prefill
        self.cached = cached
        self.renewed = False
        """nixl: whether the KV is held while decode's engine has the request."""
        self.engine_id = ""
        """mooncake: whose transfer it is."""
        self.at: InstanceId | None = None
        """sglang: where the decode is that was called already, and below its stream."""
        self.stream: asyncio.Task[ClientStream] | None = None
        self.note: OutgoingCall | None = None
        self._params = params
        self._until_us = until_us

    def taken(
        self, caller: Caller, asked: ExternalRequest, to: InstanceInfo
    ) -> tuple[bytes, float]:
        """The body for its decode, and how long that may take to answer. Raises CallLost.

        KV of a prefill instance that is another start by now, or whose time is over, is not its
        KV any more.
        """
        prefill, limits = self.prefill, caller.limits
        left_us = self._until_us - caller.conductor.now_us()
        now = _joined(caller, prefill.id)
        if now is None or now.epoch != prefill.epoch:
            raise CallLost(f"{prefill.id} restarted before decode had its KV", prefill.id)
        if left_us <= 0:
            raise CallLost(f"decode comes too late for the KV of {prefill.id}", prefill.id)
        if self.at not in (None, to.id):
            raise CallLost(f"{self.at} waits for the KV of {prefill.id}, not {to.id}", self.at)
        if self._params is None:
            return asked.raw, limits.first_byte_s
        body = asked.with_fields({"kv_transfer_params": self._params})
        if self.renewed:
            return body, limits.handover_s
        return body, min(limits.handover_s, left_us / MICROS_PER_SECOND)

    async def blamed(self, caller: Caller) -> InstanceId | None:
        """Decode failed: whose fault it was, if not its own.

        mooncake: prefill may have restarted, which its bootstrap server knows first.
        """
        if not self.engine_id:
            return None
        try:
            member = caller.engines.member(self.prefill.id)
            await member.requery()
            same = member.engine_id(self.prefill.dp_rank) == self.engine_id
        except (EngineFailed, NobodyAlive):
            same = False
        return None if same else self.prefill.id

    def drop(self) -> None:
        """Nobody takes it any more."""
        if self.note is not None:
            self.note.ended()
        calling, self.stream = self.stream, None
        if calling is None or calling.cancel() or calling.cancelled():
            return
        if calling.exception() is None:
            calling.result().leave()


async def prefill(
    caller: Caller, asked: ExternalRequest, request: Request, action: Prefill
) -> Handed:
    """Call a prefill instance as its connector wants it. Raises as Caller.whole."""
    to = action.to
    match to.connector:
        case "nixl":
            reply = await _reply(caller, asked, request, action, nixl.PREFILL)
            said = bytes(reply.kv_transfer_params)
            params = None if said == b"null" else said  # its first token may have been its last
            until_us = caller.conductor.now_us() + nixl.LEASE_US
            handed = Handed(to, params, until_us, reply.cached_tokens())
            handed.renewed = nixl.renewed(said)
            return handed
        case "mooncake":
            member, transfer = caller.engines.member(to.id), f"xfer-{caller.new_id()}"
            engine_id = await _engine_id(caller, to)
            params = mooncake.prefill_params(transfer)
            reply = await _reply(caller, asked, request, action, params)
            kept = [choice.finish_reason for choice in reply.choices] == ["length"]
            said = mooncake.decode_params(member.bootstrap, engine_id, transfer)
            until_us = caller.conductor.now_us() + mooncake.HELD_US
            handed = Handed(to, said if kept else None, until_us, reply.cached_tokens())
            handed.engine_id = engine_id
            return handed
        case "sglang":
            return await _meet(caller, asked, request, action)
        case _:
            raise AssertionError(f"{to.connector} hands nothing on")


def _joined(caller: Caller, instance: InstanceId) -> InstanceInfo | None:
    """As it is now; None: it is gone."""
    try:
        return caller.engines.member(instance).infos.get(instance)
    except NobodyAlive:
        return None


async def _engine_id(caller: Caller, to: InstanceInfo) -> str:
    member = caller.engines.member(to.id)
    try:
        return member.engine_id(to.dp_rank)
    except EngineFailed:
        await member.requery()
        return member.engine_id(to.dp_rank)


async def _reply(
    caller: Caller, asked: ExternalRequest, request: Request, action: Prefill, params: bytes
) -> ReadReply:
    """A prefill's reply, read."""
    to, decision = action.to, action.decision
    note = caller.observer.began(to.id, "prefill", decision.prompt_tokens, decision.reused_tokens)
    body = asked.for_prefill(params)
    try:
        answer = await caller.whole(to, asked, request, body, caller.limits.first_byte_s)
        reply = _parsed(to, answer)
        note.count = 1
        note.answered(reply.cached_tokens())
        return reply
    finally:
        note.ended()


def _parsed(to: InstanceInfo, answer: Answer) -> ReadReply:
    try:
        return read_reply(answer.body)
    except UNREADABLE as error:
        raise CallLost(f"{to.id} sent no valid reply: {error}") from None


async def _meet(
    caller: Caller, asked: ExternalRequest, request: Request, action: Prefill
) -> Handed:
    """Both halves at once: neither goes on without the other. Prefill's reply is the sign."""
    to, limits, decision = action.to, caller.limits, action.decision
    member = caller.engines.member(to.id)
    ranks, sequences = member.spec.dp_size, asked.choices * asked.prompts
    rooms = [sglang.room(secrets.randbits(63), to.dp_rank, ranks) for _ in range(sequences)]
    both = sglang.fields(member.bootstrap, rooms)
    limit_s = limits.whole_s(limits.first_byte_s + limits.handover_s, asked.max_tokens)
    of_decode = asked.with_fields(both | sglang.decode_fields(to.dp_rank))
    stream = caller.stream(action.decode, asked, request, of_decode, limit_s)
    second: asyncio.Task[ClientStream] = asyncio.create_task(stream.__aenter__())
    note = caller.observer.began(to.id, "prefill", decision.prompt_tokens, decision.reused_tokens)
    whole = caller.whole(to, asked, request, asked.with_fields(both), limit_s)
    first = asyncio.create_task(whole)
    handed = Handed(to, None, caller.conductor.now_us() + mooncake.HELD_US)
    handed.at, handed.stream = action.decode.id, second
    handed.note = caller.observer.began(
        action.decode.id, "decode", decision.prompt_tokens, 0, asked.stream
    )
    try:
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            await _answers(caller, action.decode, handed)
        handed.cached = usage.read((await first).body).cached  # as events, where it streams
        note.answered(handed.cached)
    except BaseException:
        first.cancel()
        handed.drop()
        raise
    finally:
        note.ended()
    return handed


async def _answers(caller: Caller, decode: InstanceInfo, handed: Handed) -> None:
    """Decode answers before its prefill has. Raises Passed, and CallLost that blames it."""
    assert handed.stream is not None, "it was just called"
    try:
        begun = await handed.stream
        if begun.status != 200:
            handed.stream = None
            await caller.rest(decode, begun)  # raises
    except Passed:
        raise
    except MoonserveError as error:
        busy = error.busy if isinstance(error, CallLost) else None
        raise CallLost(str(error), decode.id, busy) from None
