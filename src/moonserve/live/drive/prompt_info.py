"""How long a prompt is and which prefix it has, before any engine has it.

`api.engine_text` calls it. If the model's engines send KV events, block keys are those of the
prompt's tokens: the gateway tokenizes it, or asks an engine's /tokenize where it cannot (tools,
images). If they send none, keys are over the prompt's text and nothing is tokenized: see
core.kv.inferred.

A prompt that cannot be read is not refused: it is placed without knowledge of its prefix, and
counted.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from moonserve.core.errors import UNREADABLE, BadRequest, MoonserveError
from moonserve.core.kv.inferred import Ratio, text_keys
from moonserve.core.kv.keys import Namespace, chain_keys
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.shares import Party
from moonserve.core.units import BlockKey, Bytes, Tokens
from moonserve.live.drive.engines import Engines
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import decode_json
from moonserve.live.openai import request as openai
from moonserve.live.openai.external import ExternalRequest
from moonserve.live.openai.prompts import Prompts
from moonserve.live.openai.request import PATHS
from moonserve.live.text.tools import TextTools

How: TypeAlias = Literal["ids", "tokens", "engine", "text", "unread"]
"""How the prompt was read. ids: token ids of the client; tokens: tokenized here; engine: tokenized
by an engine; text: not tokenized, keys over the text; unread: no prefix is known."""
_TOKENIZE_S = 2.0
_MAX_MESSAGES = 4_096
_MAX_KEYS = 65_536
_MAX_ITEMS = 32_768
"""JSON with more marks of structure is not brought into a normal form: that takes too long."""
_LONG_BYTES: Bytes = 64 << 10
_CHANGING = re.compile(
    rb',"cache_control":(?:null|\{[^{}]*\})|"cache_control":(?:null|\{[^{}]*\}),'
    rb'|\{"type":"text","text":"x-anthropic-billing-header[^"]*"\},?'
)
"""What coding agents change in each turn, and engines leave out of the prompt: where a prefix ends
that Anthropic should keep, and a block with a hash of the request."""
_LOOK = 64
"""So many bytes of a list show what it begins with."""


class PromptInfo(msgspec.Struct, frozen=True):
    """A prompt as the Conductor needs it."""

    length: Tokens
    keys: tuple[BlockKey, ...]
    how: How
    text_bytes: Bytes = 0
    """Size of its text, if its length is an estimate."""


class PromptReader:
    """Reads prompts of any model; one per gateway process."""

    def __init__(self, engines: Engines, http: HttpClient, prompts: Prompts) -> None:
        self._engines = engines
        self._http = http
        self._prompts = prompts
        self._roots: dict[str, tuple[Namespace, bytes]] = {}
        self._ratios: dict[str, Ratio] = {}
        self._longest: dict[str, tuple[Sequence[InstanceInfo], Tokens]] = {}
        """The longest prompt that an instance of a model can take, and of which instances."""
        self._turn = 0
        """Which of a model's engines tokenizes: the next one after each that failed."""
        self.read = Counter[How]()
        """How many prompts were read in which way."""

    async def read_prompt(
        self, asked: ExternalRequest, infos: Sequence[InstanceInfo], party: Party
    ) -> PromptInfo:
        """Read this prompt; infos: instances of its model; party: whose it is.

        Raises BadRequest, Overloaded.
        """
        keyed = asked.generates
        found = self._given(asked, infos)
        if found is None and keyed and self._engines.follows_events(asked.model):
            keyed = False
            found = await self._tokens(asked, infos, party)
        if found is None:
            if len(asked.raw) > _LONG_BYTES:
                await asyncio.sleep(0)  # each step takes milliseconds: let streams go on between
            found = self._text(asked, infos, keyed)
        self.read[found.how] += 1
        return found

    def learn(self, model: str, info: PromptInfo, prompt: Tokens | None) -> None:
        """Learn from the number of tokens that an engine has counted."""
        if prompt and info.text_bytes:
            self._ratios[model].learn(info.text_bytes, prompt)

    def _given(self, asked: ExternalRequest, infos: Sequence[InstanceInfo]) -> PromptInfo | None:
        """Read token ids that the client sent. Sets on `asked` how many prompts there are."""
        namespace = infos[0].namespace
        raw = asked.prompt
        if asked.form != "completion" or raw[:1] == b'"':
            return None
        if raw.count(b",") > max(info.max_len for info in infos) and _begins_with_ids(raw):
            return None  # too long for every engine, which will refuse it
        ids = _only_ids(raw)
        if ids is None:
            asked.prompts = _count_prompts(raw)
            return None
        try:
            keys = chain_keys(self._root(asked, namespace), ids, namespace.block_size)
        except (TypeError, OverflowError):
            return None  # the engine reports what is wrong with it
        return PromptInfo(max(1, len(ids)), tuple(keys), "ids")

    async def _tokens(
        self, asked: ExternalRequest, infos: Sequence[InstanceInfo], party: Party
    ) -> PromptInfo | None:
        """Read the prompt by its tokens, made here or by an engine. None: neither is possible."""
        how: How = "tokens"
        tools, namespace = self._engines.text(asked.model), infos[0].namespace
        ids = None
        own = asked.form in ("chat", "completion") and not asked.tools
        if tools is not None and asked.prompts == 1 and own:
            ids = await self._own(asked, tools, infos[0].max_len, party)
        if ids is None and asked.prompts == 1:
            ids = await self._theirs(asked, infos[self._turn % len(infos)])
            how = "engine"
        if not ids:
            return None
        keys = chain_keys(self._root(asked, namespace), ids, namespace.block_size)
        return PromptInfo(len(ids), tuple(keys), how)

    async def _own(
        self, asked: ExternalRequest, tools: TextTools, max_len: Tokens, party: Party
    ) -> list[int] | None:
        """The ids as this gateway's template and tokenizer make them. None: they cannot."""
        try:
            if asked.form == "chat":
                fields = openai.parse_chat(
                    b'{"model":"","messages":%b}' % asked.prompt, _MAX_MESSAGES
                )
                if fields.tool_field is not None:
                    return None
                return await self._prompts.tokens(fields, tools, max_len, party)
            prompt = openai.parse_completion(b'{"model":"","prompt":%b}' % asked.prompt, max_len)
            return await self._prompts.tokens(prompt, tools, max_len, party)
        except BadRequest as error:
            if error.code == "context_length_exceeded":
                raise
            return None

    async def _theirs(self, asked: ExternalRequest, info: InstanceInfo) -> list[int] | None:
        """The ids as an engine makes them. None: it fails, cannot, or takes too long."""
        path, body = _question(asked)
        try:
            member = self._engines.member(info.id)
            headers = {"content-type": "application/json", **member.headers}
            reply = await self._http.request(
                "POST", member.url + path, headers=headers, body=body, timeout_s=_TOKENIZE_S
            )
            if reply.status == 200:
                tokenized = msgspec.json.decode(reply.body, type=_Tokenized)
                return tokenized.tokens or tokenized.token_ids
        except (MoonserveError, *UNREADABLE):
            pass
        self._turn += 1
        return None

    def _text(
        self, asked: ExternalRequest, infos: Sequence[InstanceInfo], keyed: bool
    ) -> PromptInfo:
        """Read the prompt's text: estimate its length and, if `keyed`, make keys over pieces of it.

        The engine decides whether it is too long: images are much text and few tokens.
        """
        namespace = infos[0].namespace
        ratio = self._ratios.setdefault(asked.model, Ratio(namespace.block_size))
        text = _canonical(asked)
        length = max(1, min(ratio.tokens(len(text)), self._most(asked.model, infos)))
        if not keyed or asked.prompts > 1:
            return PromptInfo(length, (), "unread", len(text))
        keys = text_keys(self._root(asked, namespace), text, ratio.piece)[:_MAX_KEYS]
        return PromptInfo(length, tuple(keys), "text", len(text))

    def _most(self, model: str, infos: Sequence[InstanceInfo]) -> Tokens:
        known = self._longest.get(model)
        if known is None or known[0] is not infos:
            most = max(min(it.max_len, it.kv_blocks * it.namespace.block_size) for it in infos)
            known = self._longest[model] = infos, most
        return known[1]

    def _root(self, asked: ExternalRequest, namespace: Namespace) -> bytes:
        if asked.salt:
            return namespace.salted(asked.salt)
        known = self._roots.get(asked.model)
        if known is None or known[0] is not namespace:
            known = self._roots[asked.model] = namespace, namespace.root()
        return known[1]


def _only_ids(raw: bytes) -> list[int] | None:
    """The token ids, if the prompt is one list of them. Anything else ends the decoding at once."""
    try:
        return msgspec.json.decode(raw, type=list[int])
    except UNREADABLE:
        pass
    try:
        return msgspec.json.decode(raw, type=tuple[list[int]])[0]
    except UNREADABLE:
        return None


def _begins_with_ids(raw: bytes) -> bool:
    return raw[1:_LOOK].lstrip(b" \t\r\n[")[:1] != b'"'


def _count_prompts(raw: bytes) -> int:
    """How many prompts a list has: one, or 2 for several. A second one ends the decoding."""
    try:
        msgspec.json.decode(raw, type=tuple[msgspec.Raw])
    except UNREADABLE:
        return 2
    return 1


class _Tokenized(msgspec.Struct):
    tokens: list[int] = []
    """Of /tokenize."""
    token_ids: list[int] = []
    """Of vLLM's /render."""


def _question(asked: ExternalRequest) -> tuple[str, bytes]:
    """The path and the body by which an engine makes the tokens of a prompt.

    Only the engine knows how it makes a chat of Responses and Messages: vLLM's /render does it.
    """
    if asked.form not in ("chat", "completion"):
        return PATHS[asked.form] + "/render", asked.with_fields({"mm_payload": b'"none"'})
    fields = {"model": msgspec.json.encode(asked.model)}
    fields["messages" if asked.form == "chat" else "prompt"] = asked.prompt
    if asked.tools:
        fields["tools"] = asked.tools
    raws = {name: msgspec.Raw(raw) for name, raw in fields.items()}
    return "/tokenize", msgspec.json.encode(raws)


def _canonical(asked: ExternalRequest) -> bytes:
    """The prompt's text in a normal form: equal prompts give equal bytes, and a longer conversation
    begins with the bytes of a shorter one. So tools come first, as in templates, then the messages
    without the end of the list. JSON of very many items stays as it is."""
    prompt = asked.prompt
    if asked.form == "completion":
        if prompt[:1] != b'"':
            return prompt
        return decode_json(prompt, str).encode("utf-8", "replace")
    if not asked.generates:
        return b"".join((*asked.before, prompt))
    if asked.form == "responses" and prompt[:1] == b'"':  # the same as one message
        prompt = b'[{"role":"user","content":%b}]' % prompt
    text = _normal(prompt).removesuffix(b"]")
    if asked.before:
        text = b"".join([*map(_normal, asked.before), text])
    return _CHANGING.sub(b"", text) if asked.form == "messages" else text


def _normal(raw: bytes) -> bytes:
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > _MAX_ITEMS:
        return raw
    return msgspec.json.encode(decode_json(raw, object))
