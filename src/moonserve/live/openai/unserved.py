"""Fields that bodies for our own workers may not have, and what a client sends instead.

The parsers of this room use it: each API has one `RefusedFields`. A field is refused unless it asks
for nothing, because to ignore it would change the answer. That holds for fields of this API that
workers do not serve, and for fields of its sisters: chat, completions, Responses, Messages, and
what vLLM adds to them. Fields of no API are not known here, and are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

import msgspec

from moonserve.core.errors import BadRequest
from moonserve.live.http.message import decode_json

B = TypeVar("B", bound=msgspec.Struct)

UNTOUCHED = msgspec.Raw(b"")
"""The value of a raw field that the body does not have."""
_NOTHING_BYTES = 256
"""More JSON than any value has that asks for nothing."""
_IN_CHAT = "use /v1/chat/completions, which has it"
_FREE_TEXT: tuple[object, ...] = ({}, {"format": {"type": "text"}})
_FORMAT_IN_CHAT = "use response_format in /v1/chat/completions"


class _NoField(msgspec.Struct):
    """A body of which no field is read."""


class Refused(msgspec.Struct, frozen=True):
    """One field."""

    harmless: tuple[object, ...] = ()
    """The values that ask for nothing; null is always one of them."""
    remedy: str = "leave it out"
    """What to do instead."""


class RefusedFields:
    """The fields that bodies of one API may not have."""

    def __init__(self, own: Mapping[str, Refused], foreign: Mapping[str, Refused]) -> None:
        """own: fields of this API; foreign: fields of its sisters."""
        self.harmless = {name: field.harmless for name, field in own.items()}
        """The fields of this API, each with its values that ask for nothing."""
        self.foreign = frozenset(foreign.keys() - own.keys())
        """The fields of its sisters."""
        self._fields = {**foreign, **own}
        self._none_sent = (UNTOUCHED,) * len(self._fields)
        self._alone = self.added_to(_NoField)

    def added_to(self, body: type[B]) -> type[B]:
        """The struct of a body with these fields as raw JSON: `decode` needs them."""
        fields = [(name, msgspec.Raw, UNTOUCHED) for name in self._fields]
        made = msgspec.defstruct(body.__name__, fields, bases=(body,), kw_only=True)
        assert made.__struct_fields__[-len(fields) :] == (*self._fields,), "`_check` reads the last"
        return cast("type[B]", made)

    def decode(self, body: bytes, shape: type[B]) -> B:
        """The body, which has none of the fields, or asks for nothing by them. Raises BadRequest.

        shape: a struct that `added_to` has made.
        """
        try:
            sent = decode_json(body, shape)
        except BadRequest as error:
            # A body for another API lacks a field here; its own field leads to the remedy.
            if str(error).endswith(": is missing"):
                self._check(decode_json(body, self._alone))
            raise
        self._check(sent)
        return sent

    def _check(self, sent: msgspec.Struct) -> None:
        """Raise BadRequest if the body has one of the fields, and it asks for something."""
        values = msgspec.structs.astuple(sent)[-len(self._none_sent) :]
        if values == self._none_sent:  # the usual case, in one comparison
            return
        for (name, field), value in zip(self._fields.items(), values, strict=True):
            refuse_unless(name, value, field, is_foreign=name in self.foreign)


def refuse_unless(
    path: str, value: msgspec.Raw, field: Refused, *, is_foreign: bool = False
) -> None:
    """Raise BadRequest if this field of a body asks for something.

    path: its full name; is_foreign: whether only sisters of this API have it.
    """
    if value is UNTOUCHED or is_any_of(bytes(value), field.harmless):
        return
    only = " or ".join(msgspec.json.encode(it).decode() for it in field.harmless)
    if is_foreign:
        what = "is no field of this API"
    else:
        what = f"only {only} is supported here" if only else "not supported here"
    raise BadRequest(f"{path}: {what}; {field.remedy}", path, "unsupported_parameter")


def is_any_of(raw: bytes, values: tuple[object, ...]) -> bool:
    """Whether this JSON is null or one of the values."""
    if len(raw) > _NOTHING_BYTES:
        return False
    value = decode_json(raw, object)
    # True == 1 in Python, not in JSON.
    return value is None or any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in values
    )


_GENERATION: dict[str, Refused] = {
    "length_penalty": Refused((1,)),
    "min_p": Refused((0,), "use top_p or top_k"),
    "use_beam_search": Refused((False,)),
    "bad_words": Refused(([],)),
    "allowed_token_ids": Refused(),
    "skip_special_tokens": Refused((True,)),
    "include_stop_str_in_output": Refused((False,)),
    "prompt_logprobs": Refused(),
    "truncate_prompt_tokens": Refused((), "send a shorter prompt"),
    "functions": Refused(([],), "use tools"),
    "function_call": Refused(("none", "auto"), "use tool_choice"),
    "guided_regex": Refused(),
    "guided_choice": Refused(),
    "guided_grammar": Refused(),
    "modalities": Refused((["text"],)),
    "audio": Refused(),
    "prediction": Refused(),
    "web_search_options": Refused(),
    "chat_template": Refused((), "leave it out: the model's own is used"),
    "chat_template_kwargs": Refused(({},)),
    "continue_final_message": Refused((False,)),
    "add_generation_prompt": Refused((True,)),
    "prompt_embeds": Refused(),
    "echo": Refused((False,)),
    "suffix": Refused(("",)),
}
"""What OpenAI's chat or completions have, or vLLM's, and our workers do not serve."""
_BY_OTHERS: dict[str, Refused] = {
    "best_of": Refused((1,), "use n"),
    "guided_json": Refused((), "use response_format"),
    "structured_outputs": Refused((), "use response_format"),
}
"""Fields of chat and completions that another field there replaces."""
_LACKS: dict[str, Refused] = {
    "n": Refused((1,), _IN_CHAT),
    "logprobs": Refused((False,), _IN_CHAT),
    "top_logprobs": Refused((0,), _IN_CHAT),
    "logit_bias": Refused(({},), _IN_CHAT),
    "response_format": Refused(({"type": "text"},), _IN_CHAT),
    "presence_penalty": Refused((0,), _IN_CHAT),
    "frequency_penalty": Refused((0,), _IN_CHAT),
    "repetition_penalty": Refused((1,), _IN_CHAT),
    "min_tokens": Refused((0,), _IN_CHAT),
    "stop_token_ids": Refused(([],), _IN_CHAT),
    "return_token_ids": Refused((False,), _IN_CHAT),
    "best_of": Refused((1,), "use n in /v1/chat/completions"),
    "guided_json": Refused((), _FORMAT_IN_CHAT),
    "structured_outputs": Refused((), _FORMAT_IN_CHAT),
}
"""What our workers serve in chat, and what Responses and Messages have no field for."""
_NOT_KEPT: dict[str, Refused] = {
    "previous_response_id": Refused((), "send the whole conversation: responses are not kept"),
    "conversation": Refused((), "send all of it in each request"),
    "background": Refused((False,), "use stream"),
}
_OF_RESPONSES: dict[str, Refused] = {
    **_NOT_KEPT,
    "max_output_tokens": Refused((), "use max_tokens"),
    "text": Refused(_FREE_TEXT, _FORMAT_IN_CHAT),
    "include": Refused(([],)),
    "truncation": Refused(("disabled",), "send a shorter prompt"),
}
"""Fields of Responses in another API."""
_THINKING: dict[str, Refused] = {"thinking": Refused(({"type": "disabled"},))}

CHAT = RefusedFields(
    _GENERATION | _BY_OTHERS | {"add_special_tokens": Refused((False,))},
    {"prompt": Refused((), "use messages"), "input": Refused((), "use messages")}
    | _OF_RESPONSES
    | _THINKING
    | {
        "max_output_tokens": Refused((), "use max_completion_tokens"),
        "include": Refused(([],), "leave it out; for log probabilities use logprobs"),
        "truncation": Refused(("disabled",), "send fewer messages"),
        "text": Refused(_FREE_TEXT, "use response_format"),
        "stop_sequences": Refused(([],), "use stop"),
        "system": Refused(("", []), "send it as a message of the role system"),
        "instructions": Refused(("",), "send it as a message of the role system"),
    },
)
COMPLETION = RefusedFields(
    _GENERATION
    | _BY_OTHERS
    | {
        "add_special_tokens": Refused((True,)),
        "functions": Refused(([],), "use tools in /v1/chat/completions"),
        "function_call": Refused(("none", "auto"), "use tool_choice in /v1/chat/completions"),
        "tools": Refused(([],), "use /v1/chat/completions"),
        "tool_choice": Refused(("none", "auto"), "use /v1/chat/completions"),
    },
    {"messages": Refused((), "use prompt"), "input": Refused((), "use prompt")}
    | _OF_RESPONSES
    | _THINKING
    | {
        "max_completion_tokens": Refused((), "use max_tokens"),
        "text": Refused(_FREE_TEXT, "use response_format"),
        "stop_sequences": Refused(([],), "use stop"),
        "top_logprobs": Refused((0,), "use logprobs, with a number"),
        "system": Refused(("", []), "write it into prompt"),
        "instructions": Refused(("",), "write it into prompt"),
    },
)
RESPONSES = RefusedFields(
    _NOT_KEPT
    | {
        "prompt": Refused((), "write it into input"),
        "store": Refused((False,), "leave it out: responses are not kept"),
        "include": Refused(([],)),
        "top_logprobs": Refused((0,), _IN_CHAT),
        "truncation": Refused(("disabled",), "send a shorter input"),
        "context_management": Refused(([],), "send a shorter input"),
    },
    {"messages": Refused((), "use input")}
    | _GENERATION
    | _LACKS
    | _THINKING
    | {
        "max_tokens": Refused((), "use max_output_tokens"),
        "max_completion_tokens": Refused((), "use max_output_tokens"),
        "stop": Refused(("", []), _IN_CHAT),
        "stop_sequences": Refused(([],), "use stop in /v1/chat/completions"),
        "system": Refused(("", []), "use instructions"),
    },
)
_MESSAGES: dict[str, Refused] = {
    "thinking": Refused(({"type": "disabled"},)),
    "container": Refused(),
    "mcp_servers": Refused(([],)),
    "output_config": Refused(({},), _FORMAT_IN_CHAT),
    "output_format": Refused((), _FORMAT_IN_CHAT),
    "context_management": Refused((), "send fewer messages"),
}
_NOT_MESSAGES: dict[str, Refused] = {
    "prompt": Refused((), "use messages"),
    "input": Refused((), "use messages"),
    "instructions": Refused(("",), "use system"),
}
MESSAGES = RefusedFields(
    _MESSAGES,
    _NOT_MESSAGES
    | _GENERATION
    | _LACKS
    | _OF_RESPONSES
    | {
        "max_completion_tokens": Refused((), "use max_tokens"),
        "stop": Refused(("", []), "use stop_sequences"),
        "parallel_tool_calls": Refused((True,), "use tool_choice.disable_parallel_tool_use"),
    },
)
COUNT_TOKENS = RefusedFields(_MESSAGES, _NOT_MESSAGES)
"""Other fields of sisters do not change how many tokens a prompt has."""
