"""API keys of clients: what one key may do, and the set of keys that a gateway knows.

`guard` looks keys up, `terms` and `meter` apply their limits, `sources` and `moonserve key` read
and write them. A key is a random secret that only its client has; here is its SHA-256 only. A hash
without salt and stretching is right for it: nobody can guess 256 random bits.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec

from moonserve.core.errors import UNREADABLE, ConfigError
from moonserve.invalid import in_words
from moonserve.live.access.scopes import Scope
from moonserve.live.openai.headers import MAX_PRIORITY

PREFIX = "ms-"
"""With it every key begins, so that people and scanners of secrets recognise one."""
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
_Ms: TypeAlias = Annotated[float, msgspec.Meta(ge=0.001, le=1e9)]
_Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
_TENANT = re.compile(r"[A-Za-z0-9._:@/-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the requests with one key may ask for; None: there is no limit."""

    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    """Of prompts and answers together."""
    under_way: _Count | None = None
    """Requests at one time."""
    least_priority: _Priority = -MAX_PRIORITY
    highest_priority: _Priority = MAX_PRIORITY
    least_ttft_slo_ms: _Ms | None = None
    """The shortest objective for the time to the first token."""
    least_tbt_slo_ms: _Ms | None = None

    @property
    def counted(self) -> bool:
        """Whether its requests have to be counted."""
        counts = (self.requests_per_minute, self.tokens_per_minute, self.under_way)
        return any(count is not None for count in counts)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key, as the file of keys and the registry have it."""

    name: str
    hash: str
    """SHA-256 of the key, in hex."""
    tenant: str
    """The tenant of all its requests."""
    scopes: tuple[Scope, ...] = ("infer",)
    limits: KeyLimits = KeyLimits()
    created: str = ""
    """When, in UTC."""

    def may(self, scope: Scope) -> bool:
        """Whether it may do this; with the scope admin it may do everything."""
        return scope in self.scopes or "admin" in self.scopes

    def checked(self) -> ApiKey:
        """Return the same. Raises ConfigError, with field and remedy."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "must be 1 to 64 letters, digits, dots, dashes, underscores or @, and begin with a"
                f" letter or digit, not {self.name[:80]!r}",
                "name",
            )
        if not _TENANT.fullmatch(self.tenant):
            raise ConfigError(
                "must be 1 to 64 letters, digits and . _ : @ / -, not " + repr(self.tenant[:80]),
                "tenant",
            )
        if not re.fullmatch(r"[0-9a-f]{64}", self.hash):
            raise ConfigError("must be a SHA-256 in hex; `moonserve key create` makes it", "hash")
        if not self.scopes:
            raise ConfigError("must name at least one of infer, metrics and admin", "scopes")
        if self.limits.least_priority > self.limits.highest_priority:
            raise ConfigError("must not be above the highest one", "least_priority")
        return self


def drawn() -> str:
    """Return the secret of a new key, which is shown once."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(secret: str) -> str:
    """Return the hash under which a key is known."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def read_key(text: bytes) -> ApiKey:
    """Read one key from JSON. Raises ConfigError with the field."""
    try:
        return msgspec.json.decode(text, type=ApiKey).checked()
    except msgspec.ValidationError as error:
        field, what = in_words(error, ApiKey)
        raise ConfigError(what, field or "keys") from None
    except UNREADABLE as error:
        raise ConfigError(f"is not JSON: {error}", "keys") from None


class Keys:
    """The keys that a gateway knows now; `use` replaces them."""

    def __init__(self) -> None:
        self._by_hash: dict[str, ApiKey] = {}

    def use(self, keys: Iterable[ApiKey]) -> None:
        """Know these keys from now on, and no others."""
        self._by_hash = {key.hash: key for key in keys}

    def find(self, secret: str) -> ApiKey | None:
        """Return the key with this secret.

        It is found by its hash, so the time shows nothing about how much of a guess is right.
        """
        return self._by_hash.get(hash_of(secret)) if secret else None

    def __len__(self) -> int:
        return len(self._by_hash)
