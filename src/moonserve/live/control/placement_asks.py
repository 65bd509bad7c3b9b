"""PlacementRequests: the bodies of /api/select and /api/reserve as Requests with their block keys.

Called by control.placement_api. It knows the namespace of the instances, in which block keys are
made, and the tokenizers of the models served here. Nothing here decides where a request goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeAlias

import msgspec

from moonserve.core.errors import BadRequest, ModelNotFound, NobodyAlive
from moonserve.core.kv.keys import Namespace, chain_keys
from moonserve.core.request import Request, Slo, Stopping
from moonserve.core.units import BlockKey, Micros, RequestId, Tokens
from moonserve.live.openai.headers import MAX_PRIORITY
from moonserve.live.openai.prompts import Prompts
from moonserve.live.openai.request import CompletionRequest, context_exceeded
from moonserve.live.ports import Conducting
from moonserve.live.text.tools import TextTools

_KEY_BYTES = 32

_Id: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(?!\.\.?$)[A-Za-z0-9._:@-]{1,128}$",
        description="1 to 128 letters, digits, or . _ : @ - (and not . or ..)",
    ),
]
_Tenant: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9._:@/-]{0,64}$",
        description="at most 64 letters, digits, or . _ : @ / -",
    ),
]
_Ms: TypeAlias = Annotated[float, msgspec.Meta(ge=0.001, le=1e9)]


class PlacementBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request to place; its prompt as text, as token ids, or as block keys and a length."""

    model: str
    prompt: str | None = None
    token_ids: list[int] | None = None
    block_keys: list[str] | None = None
    """In hex, as core.kv.keys makes them."""
    prompt_tokens: Tokens | None = None
    """The prompt's length; only with block_keys."""
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1_024)] | None = None
    """The salt that the request will have at its engine. block_keys include it already."""
    max_tokens: Annotated[Tokens, msgspec.Meta(ge=1)] = 16
    """The most tokens that it will generate, or the expected number if that is known."""
    ttft_slo_ms: _Ms | None = None
    tbt_slo_ms: _Ms | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    tenant: _Tenant = ""
    id: _Id | None = None
    ttl_s: Annotated[float, msgspec.Meta(ge=0.001, le=3_600)] = 120.0
    """How long a reservation lasts, in seconds; as long again from the end of prefill."""


class PlacementRequests:
    """Makes Requests. tools: a model's text tools; None: it has no tokenizer here."""

    def __init__(self, conductor: Conducting, tools: Callable[[str], TextTools | None]) -> None:
        self._conductor = conductor
        self._tools = tools
        self._prompts = Prompts(16 << 10, 16 << 20)

    async def request(self, ask: PlacementBody, name: str) -> tuple[Request, tuple[BlockKey, ...]]:
        """The request as the Conductor sees it, with its key chain. Raises BadRequest."""
        infos = [info for info in self._conductor.instances() if info.model == ask.model]
        if not infos:
            raise NobodyAlive(f"no instance of model {ask.model} is alive")
        namespace, max_len = infos[0].namespace, min(info.max_len for info in infos)
        length, keys = await self._prompt(ask, namespace, max_len)
        left = max_len - length
        if left < 1:
            raise context_exceeded("prompt", f"{length} tokens and 1 to generate", max_len)
        request = Request(
            id=RequestId(name),
            model=ask.model,
            length=length,
            stopping=Stopping(max_tokens=min(ask.max_tokens, left)),
            slo=Slo(_us(ask.ttft_slo_ms), _us(ask.tbt_slo_ms)),
            priority=ask.priority,
            tenant=ask.tenant,
        )
        return request, keys

    async def _prompt(
        self, ask: PlacementBody, namespace: Namespace, max_len: Tokens
    ) -> tuple[Tokens, tuple[BlockKey, ...]]:
        """Its length, and the keys of its full blocks."""
        given = [ask.prompt, ask.token_ids, ask.block_keys]
        if sum(each is not None for each in given) != 1:
            raise BadRequest("give one of prompt, token_ids and block_keys", "prompt")
        if ask.block_keys is not None:
            keys, size = [_key(text) for text in ask.block_keys], namespace.block_size
            length = ask.prompt_tokens or 0
            if length < 1 or len(keys) != length // size:
                what = f"there must be one for each {size} of prompt_tokens, so {length // size}"
                raise BadRequest(f"block_keys: {len(keys)} are given; {what}", "block_keys")
            return length, tuple(keys)
        tokens = ask.token_ids
        if tokens is None:
            fields = CompletionRequest(model=ask.model, prompt=ask.prompt or "")
            tokens = await self._prompts.tokens(fields, self._text(ask.model), max_len)
        if not 1 <= len(tokens) <= max_len:
            what = (
                f"{len(tokens)} tokens are given; there must be 1 to {max_len}, the model's context"
            )
            raise BadRequest(f"token_ids: {what}", "token_ids")
        try:
            keys = chain_keys(namespace.salted(ask.cache_salt or ""), tokens, namespace.block_size)
        except OverflowError:
            raise BadRequest("token_ids: each must be from 0 to 2^32 - 1", "token_ids") from None
        return len(tokens), tuple(keys)

    def _text(self, model: str) -> TextTools:
        tools = self._tools(model)
        if tools is None:
            what = f"{model} has no tokenizer here; send token_ids instead"
            raise ModelNotFound(f"prompt: {what}", "prompt")
        return tools


def _us(ms: float | None) -> Micros | None:
    return None if ms is None else round(ms * 1_000)


def _key(text: str) -> BlockKey:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise BadRequest(f"block_keys: {text[:80]!r} is not 32 bytes in hex", "block_keys")
    return BlockKey(key)
