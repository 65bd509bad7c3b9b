"""An API server of Kubernetes for tests: lists and watches of some collections, over TLS.

It keeps the history of changes, so that a watch goes on from any version that was not compacted.
Attributes such as `accepted`, `away`, `statuses` and `says` make it fail; `asked` has its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from moonserve.live.http.message import HttpRequest, Response, StreamingResponse, json_response
from moonserve.live.http.server import App, Server, serve
from moonserve.live.kubernetes.api import ServiceAccount
from moonserve.live.tls.authority import CA, cert_of, init
from tests.support.certificates import tls_of

PODS = "/api/v1/namespaces/ns/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/ns/inferencepools"
PAGE = 2
"""Objects of a page, whatever limit was asked for."""


class FakeApi:
    """See the module. Call `start` and `stop`."""

    def __init__(self, folder: Path) -> None:
        self.account = ServiceAccount("", folder / "account")
        self.accepted = "first-token"
        """The token that it accepts."""
        self.statuses: list[int] = []
        """Error replies for the next requests."""
        self.forbidden: set[str] = set()
        """Collections that the account may not read."""
        self.says: list[bytes] = []
        """What the next watches send first, as it is; they end with it."""
        self.piece = 0
        """Bytes of each piece of a watch; 0: whole lines."""
        self.asked: list[tuple[str, dict[str, str]]] = []
        self._folder = folder
        self._objects: dict[str, dict[str, Any]] = {}
        self._history: list[tuple[int, str, bytes]] = []
        """(version, path, line) of all changes."""
        self._version = 100
        self._compacted = 0
        self._changed = asyncio.Event()
        self._server: Server | None = None
        self._port = 0

    async def start(self) -> None:
        """Listen; at the second time at the same port."""
        tls = self._folder / "tls"
        if not tls.exists():
            init(tls)
            self.account.folder.mkdir()
            (self.account.folder / "ca.crt").write_bytes(cert_of(tls, CA).read_bytes())
            (self.account.folder / "namespace").write_text("ns")
            self.rotate(self.accepted)
        app = App({("GET", path): self._serve for path in (PODS, SLICES, POOLS)})
        context = tls_of(tls, "gateway").listener("none")
        self._server = await serve(app, "127.0.0.1", self._port, tls=context)
        self._port = self._server.port
        url = f"https://127.0.0.1:{self._port}"
        self.account = msgspec.structs.replace(self.account, url=url)

    async def stop(self) -> None:
        """Cut all watches and listen no more."""
        assert self._server is not None
        await self._server.stop(0)

    def rotate(self, token: str) -> None:
        """Put another token into the pod, as the kubelet does."""
        (self.account.folder / "token").write_text(token + "\n")

    def put(self, path: str, made: dict[str, Any]) -> None:
        """Create or change an object; a watch gets it at once."""
        name = made["metadata"]["name"]
        kind = "MODIFIED" if name in self._objects.get(path, {}) else "ADDED"
        self._objects.setdefault(path, {})[name] = self._change(path, kind, made)

    def delete(self, path: str, name: str) -> None:
        """Delete an object."""
        self._change(path, "DELETED", self._objects[path].pop(name))

    def bookmark(self, path: str) -> None:
        """Let the version rise without a change of this collection."""
        self._change(path, "BOOKMARK", {"metadata": {}})

    def compact(self) -> None:
        """Forget the history, and cut the watches: no watch goes on from an earlier version."""
        self._compacted = self._version
        self.says.append(b"")
        self._wake()

    def lists(self, path: str) -> int:
        """How many lists of a collection were begun."""
        return sum(1 for at, query in self.asked if at == path and _begins_list(query))

    def _change(self, path: str, kind: str, made: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        meta = {**made["metadata"], "resourceVersion": str(self._version)}
        made = {**made, "metadata": meta}
        line = msgspec.json.encode({"type": kind, "object": made}) + b"\n"
        self._history.append((self._version, path, line))
        self._wake()
        return made

    def _wake(self) -> None:
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()

    async def _serve(self, request: HttpRequest) -> Response | StreamingResponse:
        query = request.query
        self.asked.append((request.path, query))
        if request.headers.get("authorization") != f"Bearer {self.accepted}":
            return json_response({"kind": "Status", "code": 401, "message": "Unauthorized"}, 401)
        if self.statuses or request.path in self.forbidden:
            status = self.statuses.pop(0) if self.statuses else 403
            return json_response({"kind": "Status", "code": status, "message": "no"}, status)
        if query.get("watch") == "true":
            return StreamingResponse(self._watch(request.path, int(query["resourceVersion"])))
        return self._page(request.path, query)

    def _page(self, path: str, query: dict[str, str]) -> Response:
        begin = int(query.get("continue", "0"))
        items = list(self._objects.get(path, {}).values())
        meta = {"resourceVersion": str(self._version)}
        if begin + PAGE < len(items):
            meta["continue"] = str(begin + PAGE)
        return json_response({"metadata": meta, "items": items[begin : begin + PAGE]})

    async def _watch(self, path: str, version: int) -> AsyncIterator[bytes]:
        if self.says and self.says[0]:
            yield self.says.pop(0)
            return
        if version < self._compacted:
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            yield msgspec.json.encode({"type": "ERROR", "object": status}) + b"\n"
            return
        while True:
            changed = self._changed
            for at, where, line in [it for it in self._history if it[0] > version]:
                version = at
                if where == path:
                    for piece in self._pieces(line):
                        yield piece
            if self.says:
                self.says.pop(0)
                return
            await changed.wait()

    def _pieces(self, line: bytes) -> list[bytes]:
        size = self.piece or len(line)
        return [line[at : at + size] for at in range(0, len(line), size)]


def _begins_list(query: dict[str, str]) -> bool:
    return "watch" not in query and "continue" not in query


def pod(name: str, ip: str = "127.0.0.1", ready: bool = True, **meta: Any) -> dict[str, Any]:
    """A pod. meta: labels, annotations, deletionTimestamp."""
    status = {"podIP": ip, "conditions": [{"type": "Ready", "status": str(ready)}]}
    return {"metadata": {"name": name, **meta}, "status": status}


def pool(name: str, *ports: int, **labels: str) -> dict[str, Any]:
    """An InferencePool of the pods with these labels."""
    numbers = [{"number": port} for port in ports]
    spec = {"selector": {"matchLabels": labels}, "targetPorts": numbers}
    return {"metadata": {"name": name}, "spec": spec}


def endpoint(name: str, ip: str = "127.0.0.1", **conditions: bool) -> dict[str, Any]:
    """One endpoint of a slice, which a pod has."""
    ref = {"kind": "Pod", "name": name}
    return {"addresses": [ip], "conditions": conditions, "targetRef": ref}


def endpoint_slice(
    name: str, port: int, *endpoints: dict[str, Any], **labels: str
) -> dict[str, Any]:
    """A slice of a Service."""
    return {
        "metadata": {"name": name, "labels": labels},
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": [{"name": "http", "port": port}],
    }
