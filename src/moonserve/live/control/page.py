"""The page for operators at /ui: static files, with headers that bind a browser to this server.

Control mounts it unless `no_ui` is set. The files have no secrets, so they need no key: what the
page shows comes from the admin API, for which it asks its reader for a key.
"""

from __future__ import annotations

from moonserve import page
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import NotFound, Routes

PATH = "/ui"
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_START = "index.html"


class PageFiles:
    """The files, which are read once."""

    def __init__(self) -> None:
        self._files = {
            name: Response(
                200, page.text(name).encode(), _HEADERS, page.TYPES[name.rpartition(".")[2]]
            )
            for name in page.names()
        }

    def routes(self) -> Routes:
        """The page itself."""
        return {("GET", PATH): self._start}

    def prefixes(self) -> Routes:
        """The files that it loads."""
        return {("GET", PATH + "/"): self._file}

    async def _start(self, request: HttpRequest) -> Response:
        return self._files[_START]

    async def _file(self, request: HttpRequest) -> Response:
        name = request.path.removeprefix(PATH + "/")
        if not name:  # the page names its files relative to its own address, without a slash
            return Response(308, b"", {"location": f"..{PATH}"}, "text/plain")
        if name not in self._files:
            raise NotFound(f"the page has no file {name[:80]!r}; it is at {PATH}")
        return self._files[name]
