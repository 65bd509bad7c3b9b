"""What one request asks for in its headers, as far as its API key allows: tenant, SLO, priority.

The gateway's API calls it once for each generation, so the tenant comes from one place: from the
key if there is one, otherwise from the header.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256

import msgspec

from moonserve.core.errors import Forbidden
from moonserve.core.request import Slo
from moonserve.core.shares import Party
from moonserve.core.units import Micros
from moonserve.live.access.keys import ApiKey
from moonserve.live.openai import headers as of


class ClientTerms(msgspec.Struct, frozen=True):
    """See the module."""

    party: Party = Party()
    """Whose request it is, for limits that clients share."""
    slo: Slo = Slo()
    priority: int = 0
    salted: bool = False
    """Whether tenants share no KV."""

    @property
    def tenant(self) -> str:
        """The tenant that the request belongs to; "" if there is none."""
        return self.party.tenant

    def salt(self, given: str | None) -> str:
        """Return the cache salt of the request; given: the one that the client sent.

        With `salted`, tenant and salt are hashed together. Each has its length before it, so that
        two pairs never give one text; the hash has the same length for all, and hides both.
        """
        if not self.salted:
            return given or ""
        parts = [part.encode("utf-8", "surrogatepass") for part in (self.tenant, given or "")]
        return sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).hexdigest()


@lru_cache(1_024)
def _usual(address: str, salted: bool) -> ClientTerms:
    """The terms of a client of this address that has no key and says nothing in its headers."""
    return ClientTerms(Party("", address), salted=salted)


def terms_of(
    headers: Mapping[str, str], key: ApiKey | None, salted: bool, address: str = ""
) -> ClientTerms:
    """Read the headers. address: of the client, as limits count it.

    Raises BadRequest, and Forbidden for what the key does not allow.
    """
    if key is None and of.NAMES.isdisjoint(headers):
        return _usual(address, salted)
    slo, priority, tenant = of.slo(headers), of.priority(headers), of.tenant(headers)
    if key is None:
        return ClientTerms(Party(tenant, address), slo, priority, salted)
    if tenant not in ("", key.tenant):
        raise Forbidden(
            f"{of.TENANT}: key {key.name} belongs to another tenant than {tenant}; leave the header"
            " out",
            of.TENANT,
        )
    limits = key.limits
    if of.PRIORITY not in headers:
        priority = min(max(0, limits.least_priority), limits.highest_priority)
    if not limits.least_priority <= priority <= limits.highest_priority:
        raise Forbidden(
            f"{of.PRIORITY}: key {key.name} allows {limits.least_priority} to"
            f" {limits.highest_priority}, not {priority}",
            of.PRIORITY,
        )
    _check(key, of.TTFT, slo.ttft_us, limits.least_ttft_slo_ms)
    _check(key, of.TBT, slo.tbt_us, limits.least_tbt_slo_ms)
    return ClientTerms(Party(key.tenant, address), slo, priority, salted)


def _check(key: ApiKey, header: str, us: Micros | None, least_ms: float | None) -> None:
    if us is not None and least_ms is not None and us < least_ms * 1_000:
        raise Forbidden(f"{header}: key {key.name} allows {least_ms:g} ms or more", header)
