"""The first half of a request that two engines serve: the prefill, and what it leaves for its
decode.

The modules in `connectors` implement `HandoverConnector`, one per way in which engines hand KV on.
`external` uses what a prefill left once, and only in time: see Handed.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from moonserve.core.errors import UNREADABLE, EngineFailed, NobodyAlive
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Prefill
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import MICROS_PER_SECOND, InstanceId, Micros, Tokens
from moonserve.live.drive.calls import Caller
from moonserve.live.drive.lost import CallLost, EngineAnswer
from moonserve.live.drive.passing import NAMED, NamedPassing
from moonserve.live.external.member import Member
from moonserve.live.http.client import ClientStream
from moonserve.live.openai.external import ExternalRequest
from moonserve.live.openai.reply import ReadChoice, ReadDetails, ReadReply, ReadUsage, read_reply
from moonserve.live.openai.request import Form
from moonserve.live.ports import OutgoingCall


class Handed:
    """What one prefill left for one decode: `taken` once, or dropped."""

    def __init__(
        self,
        prefill: InstanceInfo,
        params: bytes | None,
        until_us: Micros,
        cached: Tokens | None = None,
    ) -> None:
        """params: JSON for the decode, None if there is no KV to fetch and decode computes
        everything; cached: prompt tokens that prefill reused, as the engine reports them."""
        self.prefill = prefill
        self.cached = cached
        self.renewed = False
        """NIXL: whether decode's engine renews the lease on the KV while the request waits there.
        """
        self.engine_id = ""
        """Mooncake: the engine that has the KV."""
        self.at: InstanceId | None = None
        """SGLang: the instance of the decode call that is out already. `stream` is that call,
        `note` the observer's note of it."""
        self.stream: asyncio.Task[ClientStream] | None = None
        self.note: OutgoingCall | None = None
        self._params = params
        self._until_us = until_us

    @property
    def has_kv(self) -> bool:
        """Whether decode gets KV from prefill. If not, decode computes everything."""
        return self._params is not None or self.at is not None

    def taken(
        self, caller: Caller, asked: ExternalRequest, to: InstanceInfo
    ) -> tuple[bytes, float]:
        """The body of the decode call, and the seconds that it may take to answer. Raises CallLost.

        If the prefill instance has restarted, or the time is over, its KV may belong to another
        request.
        """
        prefill, limits = self.prefill, caller.limits
        left_us = self._until_us - caller.conductor.now_us()
        now = _joined(caller, prefill.id)
        if now is None or now.epoch != prefill.epoch:
            raise CallLost(f"{prefill.id} restarted before decode had its KV", member=prefill.id)
        if left_us <= 0:
            raise CallLost(
                f"the KV of {prefill.id} is held no longer; decode came too late", member=prefill.id
            )
        if self.at not in (None, to.id):
            raise CallLost(f"the decode call went to {self.at}, not to {to.id}", member=self.at)
        if self._params is None:
            return asked.raw, limits.first_byte_s
        body = asked.with_fields({"kv_transfer_params": self._params})
        if self.renewed:
            return body, limits.handover_s
        return body, min(limits.handover_s, left_us / MICROS_PER_SECOND)

    async def blamed(self, caller: Caller) -> InstanceId | None:
        """The instance to blame for a failed decode. None: the decode instance itself.

        Mooncake: prefill may have restarted; its bootstrap server knows that first.
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
        """Give up what was not taken."""
        if self.note is not None:
            self.note.ended()
        calling, self.stream = self.stream, None
        if calling is None or calling.cancel() or calling.cancelled():
            return
        if calling.exception() is None:
            calling.result().leave()


class PrefillCall(msgspec.Struct, frozen=True):
    """What a connector needs to call a prefill engine for one request."""

    caller: Caller
    asked: ExternalRequest
    request: Request
    action: Prefill

    @property
    def member(self) -> Member:
        """The prefill engine. Raises NobodyAlive where it is gone."""
        return self.caller.engines.member(self.action.to.id)

    def noted(self) -> OutgoingCall:
        """Report to the observer that the prefill call goes out now."""
        decision = self.action.decision
        return self.caller.observer.began(
            self.action.to.id, "prefill", decision.prompt_tokens, decision.reused_tokens
        )

    async def reply(self, params: bytes) -> ReadReply:
        """Prefill with these kv_transfer_params (JSON) and return the parsed reply. Raises as
        Caller.whole does."""
        to, caller = self.action.to, self.caller
        note = self.noted()
        try:
            body = self.asked.for_prefill(params)
            limit_s = caller.limits.first_byte_s
            answer = await caller.whole(to, self.asked, self.request, body, limit_s)
            reply = _parsed(to, self.asked.form, answer)
            note.count = 1
            note.answered(reply.cached_tokens())
            return reply
        finally:
            note.ended()


class HandoverConnector(Protocol):
    """One way in which engines hand KV to each other.

    It knows its wire. What it returns has its retry rule: how long the KV may be used, and which
    instance is to blame.
    """

    async def prefill(self, call: PrefillCall) -> Handed:
        """Call the prefill engine. Raises as Caller.whole does."""


class _Params(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def _parsed(to: InstanceInfo, form: Form, answer: EngineAnswer) -> ReadReply:
    named = NAMED.get(form)
    try:
        if named is None:
            return read_reply(answer.body)
        params = msgspec.json.decode(answer.body, type=_Params).kv_transfer_params
    except UNREADABLE as error:
        raise CallLost(f"{to.id} sent no valid reply: {error}") from None
    read = NamedPassing(named)
    read.answered(answer.body)
    usage = ReadUsage(read.counted.prompt, ReadDetails(read.counted.cached))
    return ReadReply([ReadChoice(finish_reason=read.finish)], usage, params)


def _joined(caller: Caller, instance: InstanceId) -> InstanceInfo | None:
    """The instance as it is now. None: it is gone."""
    try:
        return caller.engines.member(instance).infos.get(instance)
    except NobodyAlive:
        return None
