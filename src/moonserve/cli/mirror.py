"""What a running cluster did with some requests: a simulation of the same, and a profile of it.

`moonserve replay --profile-out` and `--compare` use it. It reads the gateway's API, which says of
each request what a recording would say; sim.fitted and sim.compared do the rest. It tunes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from moonserve.cli.client import Client
from moonserve.cli.serving import serving
from moonserve.core.errors import ConfigError, EngineFailed
from moonserve.core.schedule.account import KEPT
from moonserve.core.schedule.explain import Explanation
from moonserve.core.schedule.recorded import RecordedCluster, RecordedInstance
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import Micros, Tokens

if TYPE_CHECKING:
    from moonserve.core.schedule.profiles import Profile
    from moonserve.live.replay import ReplayResult
    from moonserve.sim.compared import Compared
    from moonserve.sim.trace import Trace

_MUCH, _MUCH_US = 1 / 3, 20_000
"""The share of a TTFT, or the time, above which the sending of requests was too late."""


class _Stats(msgspec.Struct):
    """The part of /api/stats that is read here."""

    tuning: Tuning
    placed: int


class ClusterWatch:
    """Looks at a cluster when created, and again at `end`; then it can compare."""

    def __init__(self, client: Client, block_size: Tokens) -> None:
        """`block_size`: the trace's; the cluster's must be equal. Raises ConfigError."""
        self._client = client
        cluster, self._placed = self._look()
        roles = {it.role for it in cluster.instances}
        if roles not in ({"both"}, {"prefill", "decode"}):
            raise ConfigError("this cluster has no prefill or no decode instances", "url")
        own = cluster.instances[0].block_size
        if own != block_size:
            raise ConfigError(
                f"the cluster's blocks have {own} tokens, the trace's {block_size}; "
                "choose --scale (or up's --block-size) so that they are equal",
                "scale",
            )

    def end(self, name: str, answers: Sequence[ReplayResult]) -> None:
        """The run is over: read what became of its requests, and fit the profile."""
        from moonserve.sim.fitted import fit

        self._cluster, placed = self._look()
        self._rows = self._explanations(answers)
        self.doubts = list(_doubts(answers, placed - self._placed))
        """Reasons why the profile may describe this run more than the cluster."""
        self._fitted = fit(f"live-{name}", self._cluster, self._rows.values())
        self.profile: Profile = self._fitted.profile

    def compare(self, trace: Trace) -> list[Compared]:
        """The figures of the same rows on the same cluster, simulated with the fitted profile,
        beside those of the gateway."""
        from moonserve.sim.cluster import Simulation
        from moonserve.sim.compared import compare
        from moonserve.sim.recording import setup_of_cluster

        at, first = next(iter(self._rows.items()))
        start_us = 1e3 * (first.arrived_ms or 0) - trace.rows[at].at_us
        # the texts are made up: no prompt has the tokens of an answer
        setup = setup_of_cluster(self._cluster, self.profile, trace.block_size, False)
        paces = self._fitted.paces_since(start_us)
        sim = Simulation(trace, msgspec.structs.replace(setup, paces=paces))
        sim.run()
        return compare((row, sim.served[at]) for at, row in self._rows.items())

    def _look(self) -> tuple[RecordedCluster, int]:
        """The cluster, and how many requests it has placed."""
        try:
            instances = serving(self._client, RecordedInstance)
            stats = self._client.get_as("/api/stats", _Stats)
        except EngineFailed as err:
            raise ConfigError(
                f"no moonserve gateway of this version ({err}); leave out --profile-out and "
                "--compare",
                "url",
            ) from None
        return RecordedCluster(instances, stats.tuning), stats.placed

    def _explanations(self, answers: Sequence[ReplayResult]) -> dict[int, Explanation]:
        """What the gateway knows of the requests of which it still knows something, by number."""
        found: dict[int, Explanation] = {}
        for at in range(max(0, len(answers) - KEPT), len(answers)):
            try:
                path = f"/api/decisions/{answers[at].id}"
                found[at] = self._client.get_as(path, Explanation)
            except EngineFailed:
                continue  # it was refused before the Conductor, or is not kept any more
        return found


def _doubts(answers: Sequence[ReplayResult], placed: int) -> Iterator[str]:
    """placed: requests that the cluster has placed meanwhile."""
    others = placed - len(answers)
    if others > 0:
        yield f"requests of others were served meanwhile ({others:,}), and slowed these"
    ttfts_us = [it.tokens_us[0] - it.late_us for it in answers if it.tokens_us]
    ttft_us = sum(ttfts_us) / max(1, len(ttfts_us))
    late_us: Micros = max((it.late_us for it in answers), default=0)
    if late_us > max(_MUCH_US, _MUCH * ttft_us):
        yield f"requests were sent up to {late_us / 1e3:,.0f} ms late: this client was overloaded"
