"""What only SGLang reports of itself, and whether it agrees with the engine's description.

Called by the handshake. The names are those of SGLang's server arguments. Which parts of SGLang
were run against this code: docs/explanation/external-engines.md.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from moonserve.live.external.member import Member, Mismatch


class ServerInfo(msgspec.Struct):
    """The part of SGLang's /server_info that is read."""

    page_size: int | None = None
    max_total_num_tokens: int | None = None
    context_length: int | None = None
    version: str = ""
    dp_size: int | None = None
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: int | None = None
    enable_cache_report: bool = True


def check(member: Member, server: ServerInfo, warnings: list[str]) -> None:
    """Check that it was started in the role of its description. Raises Mismatch."""
    spec, mode = member.spec, server.disaggregation_mode
    if not server.enable_cache_report:
        warnings.append("replies do not say what was cached: start it with --enable-cache-report")
    if mode is None:
        return
    wanted = "null" if spec.role == "both" else spec.role
    if mode != wanted:
        role = "both" if mode == "null" else mode
        raise Mismatch(
            f"it runs with --disaggregation-mode {mode}, not {wanted}: set it to {role}, or start "
            "it so",
            "role",
        )
    port = server.disaggregation_bootstrap_port
    assumed = urlsplit(member.bootstrap).port
    if member.bootstrap and not spec.bootstrap and port not in (None, assumed):
        where = f"http://{urlsplit(member.url).hostname}:{port}"
        raise Mismatch(f"its bootstrap server is at port {port}: set it to {where}", "bootstrap")
