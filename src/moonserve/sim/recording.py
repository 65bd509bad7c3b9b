"""A recording as a simulation: the cluster that served it as a Setup, and the times it recorded.

`moonserve simulate`, `plan`, `sweep` and `replay` use it. sim.trace reads the requests of a
recording, sim.fitted makes a profile of their times. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path

import msgspec

from moonserve.core.errors import UNREADABLE, ConfigError
from moonserve.core.schedule.profiles import Profile
from moonserve.core.schedule.recorded import CLUSTER_FILE, RecordedCluster, RecordedRequest
from moonserve.core.units import Tokens
from moonserve.sim.fitted import Fitted, fit
from moonserve.sim.setup import Setup
from moonserve.sim.trace import Trace, is_recording, lines_of, read_trace, recorded_requests


class Recording(msgspec.Struct, frozen=True):
    """The cluster of a recording, and its rows in the order in which sim.trace gives them.

    All of it comes from one reading: a gateway that still records makes the files longer.
    """

    where: Path
    cluster: RecordedCluster
    rows: list[RecordedRequest]
    lines: list[str]
    """The text of the rows, in the order of the files."""

    @property
    def why_not(self) -> str:
        """Why its cluster cannot be simulated; empty: it can."""
        instances = self.cluster.instances
        if {it.role for it in instances} not in ({"both"}, {"prefill", "decode"}):
            return "has not both roles, or mixed instances beside them"
        if len({it.connector for it in instances}) > 1:
            return "has instances with different connectors"
        for it in instances:
            sizes = [it.block_size, it.kv_blocks, it.max_seqs, it.chunk_tokens]
            if it.connector == "embedded":
                sizes.append(it.block_bytes)
            if min(sizes) < 1:
                return f"has an instance that does not say its sizes, {it.id}"
        return ""

    def fitted(self) -> Fitted:
        """What its instances cost, and how fast their machine was. Raises ConfigError: it has too
        few requests."""
        if self.why_not:
            raise ConfigError(self.why_not, str(self.where))
        return fit(str(self.where), self.cluster, self.rows)

    @property
    def start_us(self) -> float:
        """When its trace begins, in microseconds since 1970."""
        return 1e3 * self.rows[0].timestamp

    def setup(self, profile: Profile) -> Setup:
        """Its cluster, with instances of this profile."""
        size = self.rows[0].block_size
        return setup_of_cluster(self.cluster, profile, size, finds_output(self.rows))

    def trace(self, limit: int | None, block_size: Tokens) -> Trace:
        """The first `limit` of its requests, or all; see read_trace."""
        return read_trace(self.where, limit, block_size, self.lines)


def read_recording(path: Path) -> Recording | None:
    """Read a recording: a folder, or one of its files. Raises ConfigError.

    None: it is none, or one that does not say which cluster served it.
    """
    if not is_recording(path):
        return None
    file = (path if path.is_dir() else path.parent) / CLUSTER_FILE
    try:
        cluster = msgspec.json.decode(file.read_bytes(), type=RecordedCluster)
    except FileNotFoundError:
        return None
    except OSError as err:
        raise ConfigError(f"cannot be read: {err.strerror}", str(file)) from None
    except UNREADABLE as err:
        raise ConfigError(f"is none that --record has written: {err}", str(file)) from None
    lines = list(lines_of(path))
    rows = sorted(recorded_requests(path, lines), key=attrgetter("timestamp"))
    if not rows:
        raise ConfigError("has no requests", str(path))
    return Recording(path, cluster, rows, lines)


def recorded_profile(path: Path) -> Profile:
    """What the instances of a recording cost. Raises ConfigError."""
    recording = read_recording(path)
    if recording is None:
        raise ConfigError(f"has no {CLUSTER_FILE}: no gateway of this version wrote it", str(path))
    return recording.fitted().profile


def finds_output(rows: Iterable[RecordedRequest]) -> bool:
    """Whether some request found a block cached that no earlier prompt had: one of an output.

    A next turn need not begin with the tokens of the last answer. Its client may have shortened it,
    or its tokens may be others than those that were generated.
    """
    seen: set[int] = set()
    for row in rows:
        blocks = row.hash_ids[: (row.actual_cached_tokens or 0) // row.block_size]
        if not seen.issuperset(blocks):
            return True
        seen.update(row.hash_ids[: row.input_length // row.block_size])
    return False


def setup_of_cluster(
    cluster: RecordedCluster, profile: Profile, block_size: Tokens, keeps_output: bool = True
) -> Setup:
    """The cluster as the simulator takes it, for a trace with this block size. keeps_output:
    whether next turns find the KV of outputs, at external engines that serve whole requests."""
    at_prefill = [it for it in cluster.instances if it.role != "decode"]
    at_decode = [it for it in cluster.instances if it.role != "prefill"]
    one = at_prefill[0]
    mixed = one.role == "both"
    embedded = one.connector == "embedded"
    room = [it.segment_bytes // it.block_bytes if embedded else it.kv_blocks for it in at_prefill]
    return Setup(
        prefill=0 if mixed else len(at_prefill),
        decode=0 if mixed else len(at_decode),
        mixed=len(at_prefill) if mixed else 0,
        profile=profile,
        tuning=cluster.tuning,
        goal=cluster.tuning.slo,
        cache_blocks=min(room) * one.block_size // block_size,
        one_copy=embedded,
        embedded_store=embedded,
        prefill_seqs=one.max_seqs,
        chunk_tokens=one.chunk_tokens,
        decode_seqs=at_decode[0].max_seqs,
        keep_output=not embedded and (keeps_output or not mixed),
        connector=one.connector,
        ahead=0,
        first_token="prefill" if embedded or mixed else "decode",
        overlap=False,
    )
