"""A fake vLLM of several data-parallel ranks, each with its own cache, and its events on a port."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from moonserve.core.kv.events import StoredEvent
from moonserve.core.kv.vllm_hash import block_hash, event_hash, root_hash
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.kvevents.publisher import Publisher
from tests.support.engines import Engine
from tests.support.fake_vllm import Refused


class Ranks(Engine):
    """See the module. Its events are at `events`, replayed at `replay`, N higher for rank N."""

    def __init__(self, name: str, dp_size: int = 2, **more: Any) -> None:
        super().__init__(name, dp_size=dp_size, **more)
        self.dead: set[int] = set()
        """Ranks whose core has died though the server answers."""
        self.prompt_token_s = 0.0005
        self._base = _ports(2 * dp_size)
        self._publishers: list[Publisher] = []
        self._told: list[set[int]] = []

    @property
    def events(self) -> str:
        """Where rank 0 publishes."""
        return f"tcp://127.0.0.1:{self._base}"

    @property
    def replay(self) -> str:
        """Where rank 0 replays."""
        return f"tcp://127.0.0.1:{self._base + self.dp_size}"

    async def start(self) -> Ranks:
        """Listen, and publish anew from number 0."""
        await super().start()
        self._told = [set() for _ in range(self.dp_size)]
        for rank in range(self.dp_size):
            port = self._base + rank
            replay = f"tcp://127.0.0.1:{port + self.dp_size}"
            self._publishers.append(Publisher(f"tcp://127.0.0.1:{port}", replay))
        return self

    async def stop(self) -> None:
        """Gone, events too."""
        while self._publishers:
            await self._publishers.pop().close()
        await super().stop()

    def asked(self, rank: int) -> list[str]:
        """The prompts that this rank got."""
        wanted = [it for it in self.calls if it.headers["x-data-parallel-rank"] == str(rank)]
        return [call.body["prompt"] for call in wanted]

    def computed(self, prompt: Sequence[int], rank: int) -> None:
        """Publish the blocks that are new there."""
        digest, before, told = root_hash("sha256"), None, self._told[rank]
        for at in range(0, len(prompt) - self.block_size + 1, self.block_size):
            run = list(prompt[at : at + self.block_size])
            digest = block_hash("sha256", digest, run)
            name = event_hash(digest)
            if name not in told:
                told.add(name)
                event = StoredEvent([name], before, run, self.block_size, None, "GPU")
                self._publishers[rank].publish([event])
            before = name

    def _rank(self, request: HttpRequest) -> int:
        rank = super()._rank(request)
        if rank in self.dead:
            raise Refused(
                500, "EngineCore encountered an issue. See stack trace for the root cause."
            )
        return rank

    async def _metrics(self, request: HttpRequest) -> Response:
        """The load of each rank; all requests there are those of the test."""
        running, self.running = self.running, 0
        try:
            return await super()._metrics(request)
        finally:
            self.running += running


def _ports(count: int) -> int:
    """The first of so many that are free, one after the other."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            base = int(probe.getsockname()[1])
        if base + count < 65_536 and all(_free(base + it) for it in range(count)):
            return base


def _free(port: int) -> bool:
    with socket.socket() as it:
        try:
            it.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
