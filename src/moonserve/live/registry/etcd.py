"""The registry over etcd 3.4 or later, by aetcd.

One lease per process holds its entries and duties; one task renews it. A watch of etcd only wakes
the reader, which then reads all entries again. It also reads every ten seconds, so that a watch
that ended silently, or a compacted history, loses nothing. If etcd loses entries without a lease,
the processes that watched them put them there again.

A duty has a term, which rises with every holder. It is kept in etcd without a lease, and is a time
in microseconds where that is higher: so it rises also if etcd lost its data. A holder keeps its
duty until it reads of a higher term. See ports.Registry for who must refuse the lower one.

No call here is without a deadline. An address etcds://… is called by TLS only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec

from moonserve.core.errors import UNREADABLE, ConfigError, RegistryError
from moonserve.invalid import without_password
from moonserve.live.registry.history import History, Read
from moonserve.live.tasks import keep_doing
from moonserve.live.tls.contexts import TlsFiles

log = logging.getLogger(__name__)
T = TypeVar("T")

_FORM = "write it like etcd://127.0.0.1:2379 or etcd://a:2379,b:2379/prefix"
_PORT = 2379
_CALL_S = 2.0
_OPEN_S = 5.0
_READ_AGAIN_S = 10.0
_PAUSE_S = 0.5
_REMOVED_S = 60
_GATHER_S = 0.02  # changes come in bursts, which are read together
_OPTIONS = {"grpc.initial_reconnect_backoff_ms": 200, "grpc.max_reconnect_backoff_ms": 1_000}


class RegistryAddress(msgspec.Struct, frozen=True):
    """The members of one etcd, and the root of moonserve's keys, which ends with a slash.

    Users write it as etcd://host:port[,host:port][/prefix], or as etcds://… for TLS.
    """

    hosts: tuple[tuple[str, int], ...]
    root: str
    secure: bool = False
    """Whether it is called by TLS."""

    def __str__(self) -> str:
        return ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.hosts)


def parse(text: str) -> RegistryAddress:
    """Parse the address of a registry. Raises ConfigError."""
    scheme, at, rest = text.partition("://")
    members, _, prefix = rest.partition("/")
    if scheme not in ("etcd", "etcds") or not at or not members:
        what = f"{without_password(text)!r} is no registry address"
        raise ConfigError(f"{what}; {_FORM}", "registry")
    hosts = []
    for member in members.split(","):
        try:
            parts = urlsplit(f"//{member}")
            host = parts.hostname
            port = parts.port or _PORT
        except ValueError:
            host = None
        if not host or "@" in member:
            what = f"{without_password(member)!r} is no address of etcd"
            raise ConfigError(f"{what}; {_FORM}", "registry")
        hosts.append((host, port))
    root = f"/{prefix.strip('/') or 'moonserve'}/"
    return RegistryAddress(tuple(hosts), root, scheme == "etcds")


class Entry(msgspec.Struct, eq=False):
    """A value under a key, for as long as its process lives."""

    registry: EtcdRegistry
    key: str
    value: bytes

    async def close(self) -> None:
        """See ports.Registration."""
        await self.registry.withdraw(self)


class LeaderEntry(msgspec.Struct, frozen=True):
    """The value under leaders/DUTY: which process has the duty, and in which term."""

    name: str
    term: int


_decode_leader = msgspec.json.Decoder(LeaderEntry).decode


def leader_of(value: bytes) -> LeaderEntry:
    """Read an entry of a leader; one that cannot be read names nobody."""
    try:
        return _decode_leader(value)
    except UNREADABLE:
        return LeaderEntry("", 0)


class LeaderCandidate(msgspec.Struct, eq=False):
    """One process as a candidate for a duty."""

    registry: EtcdRegistry
    duty: str
    who: str
    changed: Callable[[int], None]
    """Called with its term when it gets the duty, and with 0 when it has lost it."""
    patience_s: float = 0.0
    """How long the duty must be free before this process takes it."""
    term: int = 0
    """Its term; 0: it has not the duty."""
    deposes: int = 0
    """The term whose holder it may replace, since that one is lost."""
    free_since_s: float | None = None
    """Since when the duty is free, by the loop's time; None: it is not."""

    @property
    def key(self) -> str:
        """Where the leader's name is."""
        return f"leaders/{self.duty}"

    @property
    def term_key(self) -> str:
        """Where the highest term is, without a lease."""
        return f"terms/{self.duty}"

    def set_term(self, term: int) -> None:
        """Set whether this process has the duty, and report a change."""
        if term != self.term:
            self.term = term
            self.changed(term)

    async def depose(self, term: int) -> None:
        """See ports.Candidacy."""
        self.deposes = term
        await self.registry.stand()

    def give_way(self, term: int) -> None:
        """See ports.Candidacy."""
        if 0 < self.term < term:
            self.set_term(0)

    async def close(self) -> None:
        """See ports.Registration."""
        await self.registry.stand_down(self)


class EtcdRegistry:
    """The port ports.Registry over etcd. `open` makes it."""

    def __init__(
        self,
        aetcd: Any,
        usage_error: type[Exception],
        address: RegistryAddress,
        ttl_s: float,
        files: TlsFiles | None,
    ) -> None:
        self._aetcd = aetcd
        # OSError includes TimeoutError; usage_error is of a connection that was just closed.
        self._failures = (aetcd.ClientError, OSError, usage_error)
        self._address = address
        self._files = files if address.secure else None
        beside = address.root.rstrip("/")  # beside the root: a removal of all entries keeps these
        self._mark = f"{beside}-history".encode()
        self._removed = f"{beside}-removed/".encode()
        """The prefix for keys that were removed lately, so that no watch restores them."""
        self._at = 0
        """The index of the etcd member in use."""
        self.ttl_s = ttl_s
        self._client = self._connect()
        self._lease: int | None = None
        self._entries: dict[str, bytes] = {}
        self._put: dict[str, bytes] = {}
        """The entries that are put under the present lease."""
        self._candidates: dict[str, LeaderCandidate] = {}
        self._busy = asyncio.Lock()
        self._away = False
        self._patient_until_s = 0.0
        """Until this time of the loop a missing entry may still be registered again."""
        self._keeping: asyncio.Task[None] | None = None
        self._histories: list[History] = []

    @classmethod
    async def open(
        cls, address: RegistryAddress, ttl_s: float = 5.0, files: TlsFiles | None = None
    ) -> EtcdRegistry:
        """Connect. files: the certificate that etcd sees, and whom it trusts, if the address is
        secure. Raises ConfigError if etcd does not answer in time: the address may be wrong."""
        if address.secure and files is None:
            raise ConfigError(
                "etcds:// needs a certificate: set --tls-dir, or --tls-cert, --tls-key and"
                " --tls-ca",
                "registry",
            )
        try:
            import aetcd
            from grpc.aio import UsageError
        except ImportError:
            raise ConfigError(
                "etcd needs the package aetcd: pip install 'moonserve[etcd]'", "registry"
            ) from None
        self = cls(aetcd, UsageError, address, ttl_s, files)
        try:
            await self._patiently(lambda: self._marked(self._client))
        except RegistryError as error:
            await self.close()
            hint = ""
            if address.secure:
                hint = "; it must speak TLS with a certificate of --tls-ca for that host"
            raise ConfigError(
                f"no etcd answers at {address} within {_OPEN_S:g} s: {error}{hint}", "registry"
            ) from None
        self._keeping = keep_doing("renewing the registry's lease", self._keep)
        return self

    async def _patiently(self, call: Callable[[], Awaitable[object]]) -> None:
        """Repeat a call for up to _OPEN_S. Raises the last RegistryError."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _OPEN_S
        while True:
            try:
                await call()
                return
            except RegistryError:
                if loop.time() + _PAUSE_S > end_s:
                    raise
                self._next_address()
                await asyncio.sleep(_PAUSE_S)

    async def register(self, key: str, value: bytes) -> Entry:
        """See ports.Registry."""
        before = self._entries.get(key)
        self._entries[key] = value
        try:
            await self._calling(self._register())
        except RegistryError:
            self._entries.pop(key)
            if before is not None:
                self._entries[key] = before
            raise
        return Entry(self, key, value)

    async def put(self, key: str, value: bytes) -> None:
        """See ports.Registry."""
        await self._calling(self._client.put(self._full(key), value))

    async def remove(self, key: str) -> bool:
        """See ports.Registry."""
        lease = await self._calling(self._client.lease(_REMOVED_S))
        of = self._client.transactions
        full = self._full(key)
        gone = of.put(self._removed + key.encode(), b"", lease=lease.id)
        call = self._client.transaction([], [of.get(full), of.delete(full), gone], [])
        return bool((await self._calling(call))[1][0])

    async def read(self, prefix: str) -> dict[str, bytes]:
        """See ports.Registry."""
        return dict((await self._read(self._client, prefix)).entries)

    def alarms(self) -> list[str]:
        """See ports.Registry."""
        alarms = [f"etcd {self._address} does not answer"] if self._away else []
        lost = sorted({key for history in self._histories for key in history.lost})
        if lost:
            what = f"etcd {self._address} has lost entries: {', '.join(lost)}"
            alarms.append(f"{what}; they stay in use and will be put there again")
        return alarms

    async def _read(self, client: Any, prefix: str) -> Read:
        """Read all entries under a prefix, and the mark of etcd's history, in one transaction."""
        of = client.transactions
        full = self._full(prefix)
        asked = [of.get(full, self._aetcd.utils.prefix_range_end(full)), of.get(self._mark)]
        _, (found, marks) = await self._calling(client.transaction([], asked, []))
        skip = len(self._address.root)
        entries = {kv.key.decode("utf-8", "replace")[skip:]: value for value, kv in found}
        leased = [key for key, (_, kv) in zip(entries, found, strict=True) if kv.lease]
        revision = max((kv.header.revision for _, kv in (*found, *marks)), default=0)
        return Read(marks[0][0] if marks else b"", revision, entries, leased)

    async def _marked(self, client: Any) -> None:
        """Put a mark into etcd, if there is none, so that a loss of its data is found out."""
        await self._create(client, self._mark, uuid4().hex.encode())

    async def _create(self, client: Any, key: bytes, value: bytes, *absent: bytes) -> bool:
        """Put a value if neither `key` nor a key in `absent` exists; return whether it was put."""
        of = client.transactions
        nothing = [of.create(it) == 0 for it in (key, *absent)]
        return bool((await self._calling(client.transaction(nothing, [of.put(key, value)], [])))[0])

    async def _restore(self, client: Any, lost: Mapping[str, bytes]) -> None:
        """Put lost entries into etcd again, unless they were put or removed since."""
        for key, value in sorted(lost.items()):
            if await self._create(client, self._full(key), value, self._removed + key.encode()):
                log.warning("etcd %s had lost entry %s; put it there again", self._address, key)

    async def watch(self, prefix: str) -> AsyncIterator[Mapping[str, bytes]]:
        """See ports.Registry."""
        loop = asyncio.get_running_loop()
        known: dict[str, bytes] | None = None
        patient_until_s = 0.0
        was_away = False
        history = History()
        self._histories.append(history)
        while True:
            try:
                async with self._watching(prefix) as (client, changed):
                    while True:
                        changed.clear()
                        lost = history.lost
                        found = await self._read(client, prefix)
                        now = history.read(found)
                        if not found.mark:
                            await self._marked(client)
                        if history.lost and not lost:
                            log.warning("%s", self.alarms()[-1])
                        if was_away:
                            was_away = False
                            patient_until_s = loop.time() + 2 * self.ttl_s
                        left_s = max(patient_until_s, self._patient_until_s) - loop.time()
                        if known is not None and left_s > 0:
                            now = dict(sorted({**known, **now}.items()))
                        if now != known:
                            known = now
                            yield dict(now)
                        if history.lost and left_s <= 0:  # entries with a lease are there again
                            await self._restore(client, history.lost)
                            history.lost = {}
                            continue
                        wait_s = _PAUSE_S if self._away else _READ_AGAIN_S
                        wait_s = min(wait_s, left_s) if left_s > 0 else wait_s
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(wait_s):
                                await changed.wait()
                        await asyncio.sleep(_GATHER_S)
            except (RegistryError, *self._failures) as error:
                log.debug("watch of %s: %s", prefix, error)
                was_away = True
                await asyncio.sleep(_PAUSE_S)

    @contextlib.asynccontextmanager
    async def _watching(self, prefix: str) -> AsyncIterator[tuple[Any, asyncio.Event]]:
        """Yield a connection, and an event that is set at each change and when the watch ends."""
        client = self._connect()
        changed = asyncio.Event()

        async def listen(watch: AsyncIterator[object]) -> None:
            with contextlib.suppress(*self._failures):
                async for _ in watch:
                    changed.set()
            changed.set()

        listening = None
        try:
            watch = await self._calling(client.watch_prefix(self._full(prefix)))
            listening = asyncio.create_task(listen(watch))
            yield client, changed
        finally:
            if listening is not None:
                listening.cancel()
            await self._quietly(client.close())

    async def elect(
        self, duty: str, who: str, changed: Callable[[int], None], patience_s: float = 0.0
    ) -> LeaderCandidate:
        """See ports.Registry."""
        candidate = LeaderCandidate(self, duty, who, changed, patience_s)
        self._candidates[duty] = candidate
        try:
            await self._calling(self._register())
        except RegistryError:
            del self._candidates[duty]
            raise
        return candidate

    async def close(self) -> None:
        """See ports.Registry."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        for candidate in list(self._candidates.values()):
            await self.stand_down(candidate)
        self._entries.clear()
        if self._lease is not None:
            await self._quietly(self._client.revoke_lease(self._lease))
            self._lease = None
        await self._quietly(self._client.close())

    async def withdraw(self, entry: Entry) -> None:
        """Remove an entry, unless this process has replaced it. Entry.close calls it."""
        if self._entries.get(entry.key) is entry.value:
            del self._entries[entry.key]
            self._put.pop(entry.key, None)
            await self._quietly(self._delete_own(self._full(entry.key), entry.value))

    async def stand_down(self, candidate: LeaderCandidate) -> None:
        """Give up a duty and the candidacy. Candidate.close calls it."""
        if self._candidates.get(candidate.duty) is candidate:
            del self._candidates[candidate.duty]
            if candidate.term:
                mine = LeaderEntry(candidate.who, candidate.term)
                candidate.set_term(0)
                key = self._full(candidate.key)
                await self._quietly(self._delete_own(key, msgspec.json.encode(mine)))

    async def stand(self) -> None:
        """Look at all duties now. Raises RegistryError. LeaderCandidate.depose calls it."""
        await self._calling(self._register())

    # Inside

    async def _delete_own(self, key: bytes, value: bytes) -> None:
        """Delete a value of this process; another process's later value stays."""
        of = self._client.transactions
        await self._client.transaction([of.value(key) == value], [of.delete(key)], [])

    async def _keep(self) -> None:
        """Renew the lease and ask for duties, for ever; note whether etcd answers."""
        while True:
            pause_s = self.ttl_s / 5
            try:
                await self._calling(self._renew())
            except RegistryError as error:
                if not self._away:
                    log.warning("registry: %s; trying again", error)
                self._away = True
                self._patient_until_s = math.inf
                self._next_address()
                pause_s = _PAUSE_S
            else:
                if self._away:
                    log.warning("etcd %s answers again", self._address)
                    now_s = asyncio.get_running_loop().time()
                    self._away = False
                    self._patient_until_s = now_s + 2 * self.ttl_s
            await asyncio.sleep(pause_s)

    async def _renew(self) -> None:
        async with self._busy:
            if self._lease is None:
                if self._entries or self._candidates:
                    await self._hold()
                else:
                    await self._client.get(b"moonserve")  # only to see whether etcd answers
                return
            reply = await self._client.refresh_lease(self._lease)
            if reply is None or reply.TTL <= 0:
                log.info("registry: the lease of this process has ended; registering again")
                self._lease = None
            await self._hold()

    async def _register(self) -> None:
        async with self._busy:
            await self._hold()

    async def _hold(self) -> None:
        """Take a lease if there is none, put all entries under it, and take free duties."""
        if self._lease is None:
            lease = await self._client.lease(round(self.ttl_s))
            self._lease = lease.id
            self._put = {}
        for key, value in list(self._entries.items()):
            if self._put.get(key) != value:
                await self._client.put(self._full(key), value, lease=self._lease)
                self._put[key] = value
        for candidate in list(self._candidates.values()):
            await self._stand(candidate)

    async def _stand(self, candidate: LeaderCandidate) -> None:
        """Take the duty if no process has it, keep it, or learn that another one has it."""
        key, term_key = self._full(candidate.key), self._full(candidate.term_key)
        of = self._client.transactions
        _, (held, kept) = await self._client.transaction([], [of.get(key), of.get(term_key)], [])
        highest = _term_of(kept[0][0]) if kept else 0
        found = LeaderEntry("", 0)
        is_mine = False
        if held:
            found = leader_of(held[0][0])
            is_mine = held[0][1].lease == self._lease and found.name == candidate.who
        if max(found.term, highest) > candidate.term and not is_mine:
            candidate.set_term(0)  # another one had it since
        if is_mine or not self._may_take(candidate, found):
            if self._candidates.get(candidate.duty) is candidate:
                candidate.set_term(found.term if is_mine else candidate.term)
            return
        term = candidate.term or max(highest + 1, found.term + 1, time.time_ns() // 1_000)
        unchanged = [
            of.mod(key) == (held[0][1].mod_revision if held else 0),
            of.mod(term_key) == (kept[0][1].mod_revision if kept else 0),
        ]
        value = msgspec.json.encode(LeaderEntry(candidate.who, term))
        puts = [of.put(key, value, lease=self._lease), of.put(term_key, str(term).encode())]
        taken, _ = await self._client.transaction(unchanged, puts, [])
        if taken and self._candidates.get(candidate.duty) is candidate:
            candidate.free_since_s = None
            candidate.set_term(term)

    def _may_take(self, candidate: LeaderCandidate, found: LeaderEntry) -> bool:
        """Whether a candidate may take the duty now. found: who has it; term 0: nobody."""
        if candidate.term:
            return True  # it has it, and its entry is lost
        if found.term:
            candidate.free_since_s = None
            return found.term == candidate.deposes
        now_s = asyncio.get_running_loop().time()
        if candidate.free_since_s is None:
            candidate.free_since_s = now_s
        is_known_lost = bool(candidate.deposes)
        return is_known_lost or now_s - candidate.free_since_s >= candidate.patience_s

    def _connect(self) -> Any:
        hosts = self._address.hosts
        host, port = hosts[self._at % len(hosts)]
        client = self._aetcd.Client(host, port, timeout=_CALL_S, options=_OPTIONS)
        if self._files is not None:
            _encrypt(client, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", self._files)
        return client

    def _next_address(self) -> None:
        """Use the next member of etcd from now on, if there are several.

        By TLS connect again in any case: the certificates may be new.
        """
        if len(self._address.hosts) > 1 or self._files is not None:
            self._at += 1
            old = self._client
            self._client = self._connect()
            self._closing = asyncio.create_task(self._quietly(old.close()))

    async def _calling(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call to etcd. Raises RegistryError, also at the deadline.

        The call runs in a task of its own: if it is cancelled just as it ends, gRPC may swallow the
        cancellation, and the caller would wait for ever.
        """
        task = asyncio.create_task(call)
        try:
            await asyncio.wait({task}, timeout=_CALL_S * 2)
        finally:
            if not task.done():
                task.add_done_callback(_drop_result)
                task.cancel()
        if not task.done():
            raise RegistryError(f"etcd {self._address} did not answer in time")
        try:
            return task.result()
        except self._failures as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            raise RegistryError(f"etcd {self._address}: {why}") from None
        except asyncio.CancelledError:  # gRPC cancels the call when its channel is closed
            raise RegistryError(f"etcd {self._address}: the connection was closed") from None

    async def _quietly(self, call: Coroutine[Any, Any, object]) -> None:
        """Await a call, and ignore that etcd does not answer: leases end by themselves."""
        with contextlib.suppress(RegistryError):
            await self._calling(call)

    def _full(self, key: str) -> bytes:
        return (self._address.root + key).encode()


def _term_of(value: bytes) -> int:
    """The highest term so far; a value that is none is as if it were absent."""
    return int(value) if value.isdigit() else 0


def _encrypt(client: Any, target: str, files: TlsFiles) -> None:
    """Connect a client of aetcd by TLS, which aetcd cannot do itself. May raise OSError."""
    from aetcd import rpc, watcher
    from grpc import ssl_channel_credentials

    authority = None if files.ca is None else files.ca.read_bytes()
    credentials = ssl_channel_credentials(
        authority, files.key.read_bytes(), files.cert.read_bytes()
    )
    client.channel = rpc.secure_channel(target, credentials, options=list(_OPTIONS.items()))
    client.kvstub = rpc.KVStub(client.channel)
    client.clusterstub = rpc.ClusterStub(client.channel)
    client.leasestub = rpc.LeaseStub(client.channel)
    client.maintenancestub = rpc.MaintenanceStub(client.channel)
    client._watcher = watcher.Watcher(rpc.WatchStub(client.channel), timeout=_CALL_S)
    client._connected.set()  # so that its `connect` does nothing


def _drop_result(task: asyncio.Task[Any]) -> None:
    """Read a task's error, so that asyncio does not report it: no caller waits for the task."""
    if not task.cancelled():
        task.exception()
