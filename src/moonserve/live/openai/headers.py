"""The request headers for a request's SLO, priority, tenant and trace.

The gateway's API calls it. Every refusal is a BadRequest that names the header and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from moonserve.core.errors import BadRequest
from moonserve.core.request import Slo
from moonserve.core.shares import Party
from moonserve.core.units import Micros

TTFT = "x-moonserve-ttft-slo-ms"
TBT = "x-moonserve-tbt-slo-ms"
PRIORITY = "x-moonserve-priority"
TENANT = "x-moonserve-tenant"
ADDRESS = "x-moonserve-address"
"""Between gateway and workers only: the address of the client."""
NAMES = frozenset({TTFT, TBT, PRIORITY, TENANT})
"""What clients may say."""
TERM = "x-moonserve-term"
"""Between gateway and workers only: the term of the Conductor that ordered the call."""
_TRACE = ("traceparent", "tracestate", "baggage")
"""W3C's headers by which spans of several services form one trace."""
MAX_PRIORITY = 100
_MS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,20})?")
_NAME = re.compile(r"^[A-Za-z0-9._:@/-]{0,64}$")

Ms: TypeAlias = Annotated[float, msgspec.Meta(ge=0.001, le=999_999_999)]
"""An objective, in milliseconds."""
Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Tenant: TypeAlias = Annotated[
    str,
    msgspec.Meta(pattern=_NAME.pattern, description="at most 64 letters, digits, or . _ : @ / -"),
]
_WHOLE = re.compile(r"[+-]?[0-9]{1,3}")


def slo(headers: Mapping[str, str]) -> Slo:
    """The request's own SLO; a target without a header is None. Raises BadRequest."""
    return Slo(_ms(headers, TTFT), _ms(headers, TBT))


def priority(headers: Mapping[str, str]) -> int:
    """The request's priority, 0 without a header; a higher one goes first. Raises BadRequest."""
    text = headers.get(PRIORITY)
    if text is None:
        return 0
    text = text.strip()
    if _WHOLE.fullmatch(text) and abs(int(text)) <= MAX_PRIORITY:
        return int(text)
    raise BadRequest(
        f"{PRIORITY}: {text[:40]!r} is no whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}",
        PRIORITY,
    )


def tenant(headers: Mapping[str, str]) -> str:
    """The tenant that the request belongs to; "" without a header. Raises BadRequest."""
    text = headers.get(TENANT)
    if text is None:
        return ""
    text = text.strip()
    if _NAME.fullmatch(text):
        return text
    raise BadRequest(
        f"{TENANT}: {text[:40]!r} is no name of up to 64 letters, digits and . _ : @ / -", TENANT
    )


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of distributed tracing, which go on to the engine unchanged."""
    return {name: headers[name] for name in _TRACE if name in headers}


def of_party(party: Party) -> dict[str, str]:
    """The headers by which a worker learns whose request it is."""
    named = {TENANT: party.tenant, ADDRESS: party.address}
    return {name: value for name, value in named.items() if value}


def party(headers: Mapping[str, str]) -> Party:
    """Whose request it is, as the gateway says."""
    return Party(headers.get(TENANT, ""), headers.get(ADDRESS, ""))


def _ms(headers: Mapping[str, str], name: str) -> Micros | None:
    text = headers.get(name)
    if text is None:
        return None
    if _MS.fullmatch(text.strip()):
        if us := round(float(text) * 1_000):
            return us
        raise BadRequest(
            f"{name}: {text[:40]} is less than 0.001, a microsecond; write it like 500", name
        )
    raise BadRequest(
        f"{name}: {text[:40]!r} is no plain decimal number of milliseconds above 0; "
        "write it like 500",
        name,
    )
