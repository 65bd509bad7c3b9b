"""The tree of operating errors: what may go wrong while everything works as designed.

    MoonserveError
    ├── BadRequest          400  the client sent something wrong; `param` names the field
    ├── Unauthorized        401  the cluster's token, or an API key, is missing or wrong
    ├── Forbidden           403  the caller may not do this
    ├── ModelNotFound       404  no such model here
    ├── BodyTooLarge        413  over a stated limit
    ├── Overloaded          429  refused for a lack of capacity; `reason`, `retry_after_s`
    ├── EngineFailed        502  an instance failed and no retry was left
    ├── NobodyAlive         503  no instance could serve this
    ├── DeadlineExceeded    504  a wait ran past its deadline
    ├── StoreError               the pool could not do as asked
    │   ├── UnknownSegment       no such segment is mounted
    │   └── Recovering           the master has started and gathers what segments hold
    ├── RegistryError            the registry cannot be read or written
    ├── TransferFailed           bytes did not arrive; `done` says which slices did
    └── ConfigError              a setting is wrong; `field` names it and the remedy

Catch MoonserveError at an edge and turn it into a reply; anything else that escapes is a bug.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for bytes that it cannot decode. They may come from anywhere, so
whoever decodes bytes catches all of them."""


class MoonserveError(Exception):
    """Root of all operating errors; `status` is the HTTP status a gateway answers with."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal_error"


class BadRequest(MoonserveError):
    """The client's request is wrong; `param` names the field, `code` the fault."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Unauthorized(BadRequest):
    """The cluster's token, or an API key, is missing or wrong."""

    status = 401


class Forbidden(BadRequest):
    """The caller is known, or is a web page, and may not do this."""

    status = 403


class Conflict(BadRequest):
    """It contradicts something that exists already."""

    status = 409


class ModelNotFound(BadRequest):
    """No model of this name is served here."""

    status = 404


class BodyTooLarge(BadRequest):
    """The request body is over the limit."""

    status = 413


class Overloaded(MoonserveError):
    """Refused for a lack of capacity; try again after `retry_after_s`.

    No prefill was spent on it, except for the reason `tbt_slo_late`. retry_after_s None: no retry
    helps, since an idle cluster could not serve it either.
    """

    status = 429
    kind = "overloaded_error"

    def __init__(self, message: str, reason: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class EngineFailed(MoonserveError):
    """An instance failed while serving, and no retry was left."""

    status = 502
    kind = "engine_error"


class PackageMissing(MoonserveError):
    """An instance has not installed the optional package that a request needs."""

    status = 501
    kind = "engine_error"


class NobodyAlive(MoonserveError):
    """No live instance can serve this request."""

    status = 503
    kind = "unavailable_error"


class DeadlineExceeded(MoonserveError):
    """A wait ran past its deadline."""

    status = 504
    kind = "timeout_error"


class StoreError(MoonserveError):
    """The store could not execute a request."""

    status = 500
    kind = "store_error"


class UnknownSegment(StoreError):
    """No segment of this name is mounted."""


class Recovering(StoreError):
    """The master has just started and does not know all objects yet: try again soon."""

    status = 503


class RegistryError(MoonserveError):
    """The registry, such as etcd, cannot be reached or did not execute a request."""

    status = 503
    kind = "registry_error"


class TransferFailed(MoonserveError):
    """A transfer ended without all of its bytes."""

    kind = "transfer_error"


class ConfigError(MoonserveError):
    """A setting is wrong; `field` names it."""

    kind = "config_error"

    def __init__(self, message: str, field: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
