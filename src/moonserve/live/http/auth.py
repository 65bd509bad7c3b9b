"""The cluster's shared token: how calls send it, and which hosts are this machine alone.

Calls between processes use `bearer`. live.access checks what arrives.
"""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a process that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def bearer(token: str) -> dict[str, str]:
    """Return the header that sends `token`; no header for an empty token."""
    return {"authorization": f"Bearer {token}"} if token else {}
