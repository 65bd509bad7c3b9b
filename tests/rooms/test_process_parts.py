"""One process: the order in which its parts start and stop, and what its health reports."""

from __future__ import annotations

import asyncio

import pytest

from moonserve.core.errors import ConfigError
from moonserve.live.access.guard import Guard
from moonserve.live.control.config import GatewayConfig
from moonserve.live.health import Expected, Health
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import ProcessPart, Routes
from moonserve.live.process.parts import Process

CONFIG = GatewayConfig(model="", port=0)


class Noted(ProcessPart):
    """Notes what happens to it; fails where it is told to."""

    def __init__(self, name: str, notes: list[str], fails: str = "") -> None:
        self._name = name
        self._notes = notes
        self._fails = fails

    def _note(self, what: str) -> None:
        self._notes.append(f"{what} {self._name}")
        if what == self._fails:
            raise ConfigError("is wrong", self._name)

    def routes(self) -> Routes:
        """One path that all parts have, and one of its own."""
        return {("GET", "/all"): self._answer, ("GET", f"/{self._name}"): self._answer}

    async def _answer(self, request: HttpRequest) -> Response:
        return Response(body=self._name.encode())

    async def prepare(self) -> None:
        self._note("prepare")

    async def start(self, port: int) -> None:
        assert port > 0, "the process listens already"
        self._note("start")

    async def stop(self) -> None:
        self._note("stop")


def process(notes: list[str], fails: str = "") -> Process:
    """A process with the parts a and b; b fails."""
    parts = [Noted("a", notes), Noted("b", notes, fails)]
    return Process(CONFIG, HttpClient(), parts, guard=Guard("", None, ("admin",)), name="test")


def test_parts_start_in_order_and_stop_in_reverse() -> None:
    """All parts prepare before the process listens; the later part wins a path that two have."""

    async def test() -> None:
        notes: list[str] = []
        one = process(notes)
        await one.listen()
        http = HttpClient()
        try:
            for path, body in (("/all", b"b"), ("/a", b"a"), ("/b", b"b")):
                url = f"http://127.0.0.1:{one.port}{path}"
                assert (await http.request("GET", url, timeout_s=5)).body == body
        finally:
            await http.close()
            await one.stop(0)
        assert notes == ["prepare a", "prepare b", "start a", "start b", "stop b", "stop a"]

    asyncio.run(test())


@pytest.mark.parametrize("fails", ["prepare", "start"])
def test_a_part_that_fails_stops_all_parts(fails: str) -> None:
    """The error comes through, and every part is stopped, also those that did not start."""

    async def test() -> None:
        notes: list[str] = []
        with pytest.raises(ConfigError, match="b: is wrong"):
            await process(notes, fails).listen()
        assert notes[-3:] == [f"{fails} b", "stop b", "stop a"]

    asyncio.run(test())


def test_health_collects_what_parts_report() -> None:
    """Alarms of all parts stand together; the first reason that is left makes it not ready."""
    reasons = {"index": "it gathers what others hold"}
    health = Health(undecided=lambda: reasons.get("conductor", ""))
    health.report_unready(lambda: reasons.get("index", ""))
    health.report_alarms(lambda: ["etcd is away"])
    health.report_alarms(list)
    health.report_alarms(lambda: ["e0: down", "e1: down"])
    assert health.alarms() == ["etcd is away", "e0: down", "e1: down"]
    assert health.not_ready() == "it gathers what others hold"
    reasons["conductor"] = "the Conductor is gone"
    assert health.not_ready() == health.undecided() == "the Conductor is gone"
    reasons.clear()
    assert health.not_ready() == ""


def test_a_gateway_waits_for_its_instances_once_and_only_so_long() -> None:
    """The wait is over when all were there, whoever leaves later; or at its end."""
    joined, now_us = [1], [0]
    for end in ("all", "time"):
        expected = Expected(lambda: joined[0], 3, 1_000, lambda: now_us[0])
        joined[0], now_us[0] = 1, 0
        assert expected.missing() == "1 of 3 instances have joined"
        joined[0], now_us[0] = (3, 999) if end == "all" else (2, 1_000)
        assert expected.missing() == ""
        joined[0], now_us[0] = 0, 0
        assert expected.missing() == ""
