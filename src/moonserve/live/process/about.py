"""What a process says of itself: a page at / for a person, and /openapi.json for programs.

live.process.parts mounts it beside the parts of a gateway, a front or a Conductor. It shows which
routes there are, and nothing of what they serve, so nobody needs a key for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from html import escape

import msgspec

from moonserve import __version__
from moonserve.core.errors import UNREADABLE
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import Handler, Routes
from moonserve.live.openai.request import BodyShape
from moonserve.live.process.openapi import Document, Route, document, joined, served

_LINKS: Mapping[str, str] = {
    "/ui": "what the cluster does, as a page",
    "/health": "whether this process is well",
    "/ready": "whether it can serve",
    "/v1/models": "the models that are served",
    "/metrics": "metrics for Prometheus",
    "/openapi.json": "every route, for programs",
}
"""Path -> what is there; a page has those that its process serves."""
_APIS = (
    "It serves OpenAI's API below /v1/, with chats (/v1/chat/completions) and Responses"
    " (/v1/responses), and Anthropic's Messages (/v1/messages)."
)
_WHAT = {
    "gateway": f"This is a moonserve gateway. {_APIS}",
    "front": f"This is a front of a moonserve cluster. {_APIS}",
    "picker": "This is a moonserve endpoint picker. Proxies ask it by gRPC (ext_proc) which"
    " engine gets a request; clients ask the proxy.",
    "conductor": "This is the Conductor of a moonserve cluster. Clients ask its gateways.",
}
_DOCS = "The folder docs/ of moonserve's source has the documentation. Commands: moonserve --help"
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>moonserve {version}</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:3em auto;padding:0 1em}}
td{{padding:0 1em 0 0}}</style>
<h1>moonserve {version}</h1>
<p>{what}</p>
<table>{rows}</table>
<p>{docs}</p>
</html>
"""


class About:
    """See the module. Its routes go under those of the parts: a part may serve / itself."""

    def __init__(
        self,
        process: str,
        routes: Collection[Route],
        prefixes: Collection[Route],
        shapes: Mapping[str, BodyShape],
        fallback: Handler | None = None,
    ) -> None:
        """process: gateway, front, picker or conductor; routes, prefixes: of its parts; shapes: of
        bodies, by path; fallback: passes other paths on to a Conductor."""
        self._process = process
        self._routes = {*routes, *self.routes()}
        self._prefixes = {*prefixes}
        self._shapes = shapes
        self._fallback = fallback

    def routes(self) -> Routes:
        """The page and the document."""
        return {("GET", "/"): self._page, ("GET", "/openapi.json"): self._openapi}

    async def _page(self, request: HttpRequest) -> Response:
        """HTML for a browser, JSON for a program that asks for it, else text."""
        links = {path: what for path, what in _LINKS.items() if ("GET", path) in self._routes}
        accepted = request.headers.get("accept", "")
        what = _WHAT[self._process]
        if "text/html" in accepted:
            rows = "".join(
                f'<tr><td><a href="{path}">{path}</a><td>{escape(what)}'
                for path, what in links.items()
            )
            page = _PAGE.format(version=__version__, what=what, rows=rows, docs=escape(_DOCS))
            return Response(body=page.encode(), content_type="text/html; charset=utf-8")
        if "application/json" in accepted:
            return json_response(
                {"name": "moonserve", "version": __version__, "process": self._process}
                | {"links": links}
            )
        lines = [f"  {path:<14} {what}" for path, what in links.items()]
        text = "\n".join([f"moonserve {__version__}", what, "", *lines, "", _DOCS, ""])
        return Response(body=text.encode(), content_type="text/plain; charset=utf-8")

    async def _openapi(self, request: HttpRequest) -> Response:
        own = self._document
        if self._fallback is None:
            return json_response(own)
        reply = await self._fallback(request)
        if not isinstance(reply, Response) or reply.status != 200:
            return json_response(own)  # the Conductor is away
        try:
            other = msgspec.json.decode(reply.body, type=Document)
        except UNREADABLE:
            return json_response(own)
        return json_response(joined(own, other))

    @cached_property
    def _document(self) -> Document:
        """Made once, at the first request: it takes some 15 ms."""
        return document(self._process, served(self._routes, self._prefixes), self._shapes)
