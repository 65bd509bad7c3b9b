"""What a request is told: its pieces, and its end. Used by the runner and by parts of prompts."""

from __future__ import annotations

from moonserve.core.errors import MoonserveError
from moonserve.live.ports import Clock
from moonserve.live.worker.job import Live, Piece
from moonserve.live.worker.kv import WorkerKV
from moonserve.live.worker.metrics import Metrics


class Replies:
    """Puts pieces and errors into requests' queues, and notes when."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock

    def emit(self, live: Live, item: Piece | MoonserveError) -> None:
        """Tell a request of its next piece, or of its failure."""
        live.pieces.put_nowait(item)
        if isinstance(item, Piece):
            now_us = self._clock.now_us()
            if live.last_us is None:
                self._metrics.first_token(now_us - live.arrived_us)
            else:
                self._metrics.next_token(now_us - live.last_us)
            live.last_us = now_us
            self._metrics.generation_tokens.inc()

    async def hand_over(self, live: Live, piece: Piece, kv: WorkerKV) -> None:
        """The last piece of a hand-over tells that all KV is in the store: wait until it is."""
        ended_us = self._clock.now_us()
        await kv.flushed(live.job.request)
        if not live.ended:
            self._metrics.handed_over(self._clock.now_us() - ended_us)
            kv.note("handed_over", live.job.lease, ended_us)
            kv.hand_over(live.job)
            self.emit(live, piece)
