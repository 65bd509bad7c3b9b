"""External engines that Kubernetes lists: sources, the state of list and watch, follower."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from moonserve.cli.instances import engines_of, sources_of
from moonserve.config import load
from moonserve.core.errors import ConfigError
from moonserve.live.control.config import GatewayConfig
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import HttpClient
from moonserve.live.kubernetes.api import account_of
from moonserve.live.kubernetes.engines import KubernetesEngines
from moonserve.live.kubernetes.objects import (
    MAX_OBJECTS,
    ApiObject,
    BadAnswer,
    EndpointSlice,
    Expired,
    InferencePool,
    Known,
    Pod,
    TooMany,
)
from moonserve.live.kubernetes.reflector import WatchTimes
from moonserve.live.kubernetes.sources import Found, Source, Unusable, by_family
from moonserve.live.process import external
from moonserve.live.process.gateway import Gateway
from tests.support.engines import Engine, Rig, rig
from tests.support.kubernetes import (
    PODS,
    POOLS,
    SLICES,
    FakeApi,
    endpoint,
    endpoint_slice,
    pod,
    pool,
)

QUICK = WatchTimes(watch_s=30, answer_s=2.0, first_pause_s=0.02, longest_pause_s=0.1)
POOL = msgspec.convert(pool("p", 8000, app="llm"), InferencePool)


def of_pod(source: Source, *args: Any, at: InferencePool = POOL, **meta: Any) -> dict[str, Found]:
    """The engines of one pod."""
    return source.of_pod(msgspec.convert(pod(*args, **meta), Pod), at)


def spec_of(found: dict[str, Found]) -> InstanceSpec:
    """The one engine that is found."""
    (one,) = found.values()
    assert isinstance(one, InstanceSpec), one
    return one


def why(found: dict[str, Found]) -> str:
    """Why the one endpoint cannot be used."""
    (one,) = found.values()
    assert isinstance(one, Unusable), one
    return f"{one.field}: {one.why}"


# Sources.


def test_a_ready_pod_is_an_engine_with_its_label_and_annotations() -> None:
    """Role by the label, fields by annotations over those of all, addresses with its own host."""
    source = Source(
        pool="p", each={"connector": "nixl", "tokenizer": "t", "events": "tcp://HOST:5557"}
    ).checked()
    found = of_pod(
        source,
        "p0",
        "10.0.0.7",
        labels={"moonserve/role": "prefill"},
        annotations={"moonserve/dp_size": "2", "moonserve/replay": "tcp://HOST:5558", "x/y": "z"},
    )
    assert found == {
        "p0": InstanceSpec(
            name="p0",
            url="http://10.0.0.7:8000",
            role="prefill",
            connector="nixl",
            tokenizer="t",
            events="tcp://10.0.0.7:5557",
            replay="tcp://10.0.0.7:5558",
            dp_size=2,
        )
    }


def test_an_ipv6_address_has_brackets() -> None:
    """In the URL and in the addresses of events."""
    source = Source(pool="p", port=9, https=True, each={"tokenizer": "t", "events": "tcp://HOST:1"})
    spec = spec_of(of_pod(source, "p0", "fd00::7"))
    assert (spec.url, spec.events) == ("https://[fd00::7]:9", "tcp://[fd00::7]:1")


def test_each_port_of_a_pool_is_an_engine() -> None:
    """A pool with several ports has several engines in each pod."""
    two = msgspec.convert(pool("p", 8000, 8001), InferencePool)
    found = of_pod(Source(pool="p"), "p0", "10.0.0.7", at=two)
    assert list(found) == ["p0.8000", "p0.8001"]


@pytest.mark.parametrize(
    "meta", [{"ready": False}, {"ip": ""}, {"deletionTimestamp": "2026-11-29T12:00:00Z"}]
)
def test_a_pod_that_takes_no_requests_is_no_engine(meta: dict[str, Any]) -> None:
    """Not ready, without an address, or terminating."""
    assert of_pod(Source(pool="p"), "p0", **meta) == {}


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"annotations": {"moonserve/dp_size": "two"}}, "annotation moonserve/dp_size: "),
        ({"annotations": {"moonserve/url": "http://x"}}, "annotation moonserve/url: leave it out"),
        ({"annotations": {"moonserve/colour": "1"}}, "annotation moonserve/colour: there is no"),
        ({"annotations": {"moonserve/api_key_env": "HOME"}}, "may not be sent to an engine"),
        ({"labels": {"moonserve/role": "boss"}}, "label moonserve/role: must be"),
        ({"labels": {"moonserve/role": "prefill"}}, "connector: role prefill needs a way"),
    ],
)
def test_a_wrong_description_names_label_or_annotation(meta: dict[str, Any], says: str) -> None:
    """The pod is not used, and the reason says where to correct it."""
    assert says in why(of_pod(Source(pool="p"), "p0", **meta))


def test_llm_ds_label_is_understood() -> None:
    """Another label may say the role, in llm-d's words too."""
    source = Source(pool="p", role_label="llm-d.ai/role", each={"connector": "nixl"})
    for word, role in (("decode", "decode"), ("prefill-decode", "both")):
        assert spec_of(of_pod(source, "p0", labels={"llm-d.ai/role": word})).role == role


def test_a_slices_endpoints_are_engines_unless_they_terminate() -> None:
    """An unknown condition counts as ready; the Service's labels are those of the slice."""
    made = endpoint_slice(
        "s0",
        8000,
        endpoint("a", "10.0.0.1"),
        endpoint("b", "10.0.0.2", ready=True),
        endpoint("c", "10.0.0.3", ready=False),
        endpoint("d", "10.0.0.4", ready=True, terminating=True),
        {"addresses": ["fd00::1"], "conditions": {}},
        **{"moonserve/role": "decode"},
    )
    source = Source(service="s", each={"connector": "nixl"}).checked()
    found = source.of_slice(msgspec.convert(made, EndpointSlice))
    assert list(found) == ["a", "b", "fd00--1"]
    assert {it.role for it in found.values() if isinstance(it, InstanceSpec)} == {"decode"}


def test_a_port_by_name_or_number() -> None:
    """The Service's first port unless the source names one; without that port there is none."""
    made = msgspec.convert(endpoint_slice("s0", 8000, endpoint("a")), EndpointSlice)
    ports = {}
    for port in (None, "http", 9000, "metrics"):
        found = Source(service="s", port=port).of_slice(made)
        ports[port] = [urlsplit(it.url).port for it in found.values() if type(it) is InstanceSpec]
    assert ports == {None: [8000], "http": [8000], 9000: [9000], "metrics": []}


def test_ipv4_comes_first() -> None:
    """Of a Service with two addresses of each endpoint, the same one is used every time."""
    slices = [EndpointSlice(address_type=it) for it in ("FQDN", "IPv6", "IPv4")]
    assert [it.address_type for it in sorted(slices, key=by_family)] == ["IPv4", "IPv6", "FQDN"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "service: name a Service"),
        ({"service": "a", "pool": "b"}, "service: name a Service"),
        ({"service": "a/../b"}, "service: 'a/../b' is no name"),
        ({"service": "a", "namespace": "A"}, "namespace: 'A' is no name"),
        ({"pool": "a", "port": "http"}, "port: must be a number"),
        ({"pool": "a", "each": {"url": "x"}}, "each.url: leave it out"),
        ({"pool": "a", "each": {"role": "prefill"}}, "each.connector: role prefill needs"),
        (
            {"pool": "a", "each": {"events": "tcp://HOST", "tokenizer": "t"}},
            "each.events: 'tcp://HOST'",
        ),
        ({"pool": "a", "each": {"block_size": "x"}}, "each.block_size: "),
    ],
)
def test_a_wrong_source_names_its_field(fields: dict[str, Any], says: str) -> None:
    """What cannot work is an error at the start."""
    with pytest.raises(ConfigError) as error:
        Source(**fields).checked()
    assert says in str(error.value)


# The state that a list and a watch make.


def line(kind: str, name: str, version: int) -> bytes:
    """One event about a pod."""
    meta = {"name": name, "resourceVersion": str(version)}
    return msgspec.json.encode({"type": kind, "object": {"metadata": meta}})


def page(*names: str, more: str = "", version: str = "5") -> bytes:
    """One page of a list."""
    meta = {"resourceVersion": version, "continue": more}
    return msgspec.json.encode(
        {"metadata": meta, "items": [{"metadata": {"name": name}} for name in names]}
    )


def test_pages_replace_the_objects_together() -> None:
    """The objects stay until the last page is here; a list that breaks off changes nothing."""
    known = Known(Pod)
    assert known.page(page("old")) == ""
    known.begin()
    assert (known.page(page("a", more="next")), list(known.objects)) == ("next", ["old"])
    known.begin()
    assert known.page(page("b", version="9")) == ""
    assert (list(known.objects), known.version) == (["b"], "9")


def test_events_change_objects_and_version() -> None:
    """Bookmarks change the version only."""
    known = Known(Pod)
    known.page(page("a"))
    assert known.line(line("ADDED", "b", 6))
    assert known.line(line("DELETED", "a", 7))
    assert known.line(line("DELETED", "never-seen", 8))
    assert not known.line(line("BOOKMARK", "", 9))
    assert (list(known.objects), known.version) == (["b"], "9")


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (b'{"type": "ERROR", "object": {"code": 410, "message": "too old"}}', Expired),
        (b'{"type": "ERROR", "object": {"code": 500}}', BadAnswer),
        (b'{"type": "SHOUT", "object": {}}', BadAnswer),
        (b'{"type": "ADDED", "object": {"metadata": 5}}', BadAnswer),
        (b'{"type": "ADDED", "obj', BadAnswer),
        (b"\xff\xfe\x00", BadAnswer),
        (b"[" * 100_000, BadAnswer),
    ],
)
def test_what_is_no_event_changes_nothing(bad: bytes, error: type[Exception]) -> None:
    """The objects stay as they were."""
    known = Known(Pod)
    known.page(page("a"))
    with pytest.raises(error):
        known.line(bad)
    assert list(known.objects) == ["a"]


@pytest.mark.parametrize("bad", [b"", b"<html>", b'{"items": []}', page("a", version=""), b"[" * 9])
def test_what_is_no_list_is_refused(bad: bytes) -> None:
    """A list without a version would be asked for again at once."""
    with pytest.raises(BadAnswer):
        Known(Pod).page(bad)


def test_the_number_of_objects_is_bounded() -> None:
    """The remedy is to select fewer; a known object may still change."""
    known = Known(ApiObject)
    known.page(page(*map(str, range(MAX_OBJECTS))))
    with pytest.raises(TooMany, match="select fewer"):
        known.line(line("ADDED", "one-more", 6))
    assert known.line(line("MODIFIED", "7", 7))


def test_pauses_double_up_to_a_bound() -> None:
    """The number of failures has no bound."""
    pauses = [WatchTimes().pause_s(count) for count in (1, 2, 3, 7, 10_000)]
    assert pauses == [0.5, 1.0, 2.0, 30.0, 30.0]


# The follower, with an API server.


class Site:
    """A fleet that follows an API server, and engines in pods."""

    def __init__(self, api: FakeApi, rig: Rig, kubernetes: KubernetesEngines) -> None:
        self.api, self.rig, self.kubernetes = api, rig, kubernetes

    async def has(self, *names: str) -> None:
        """Wait until the fleet has these engines."""
        await self.rig.until(lambda: self.names() == sorted(names))

    async def saying(self, text: str) -> None:
        """Wait for an alarm with this text; empty: until there is none."""
        alarms = self.kubernetes.alarms
        await self.rig.until(lambda: any(text in it for it in alarms()) if text else not alarms())

    def names(self) -> list[str]:
        """The engines that the fleet has."""
        return [it.member.spec.name for _, it in self.rig.fleet.monitors()]

    def urls(self) -> list[str]:
        """The addresses of these engines."""
        return [it.member.spec.url for _, it in self.rig.fleet.monitors()]


@asynccontextmanager
async def site(folder: Path, *sources: Source, **fails: Any) -> AsyncIterator[Site]:
    """Follow sources on a new API server. fails: attributes of it."""
    api = FakeApi(folder)
    await api.start()
    for name, value in fails.items():
        setattr(api, name, value)
    async with rig() as made:
        kubernetes = KubernetesEngines(api.account, sources, made.fleet, QUICK)
        kubernetes.start()
        try:
            yield Site(api, made, kubernetes)
        finally:
            await kubernetes.stop()
            await api.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine with a deadline."""

    async def main() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(main())


SERVICE = Source(service="vllm", port=1)
"""Its engines do not answer; only the fleet's list is of interest."""


def put(api: FakeApi, *names: str) -> None:
    """Let the Service have these endpoints."""
    made = [endpoint(name, f"127.0.0.{len(name) + at}") for at, name in enumerate(names, 1)]
    api.put(SLICES, endpoint_slice("s0", 8000, *made))


def test_engines_of_a_service_join_and_drain(tmp_path: Path, caplog: Any) -> None:
    """A ready endpoint is asked and serves; one that terminates is removed and may end its work."""

    async def body() -> None:
        engine = Engine()
        await engine.start()
        port = urlsplit(engine.url).port
        assert port is not None
        source = Source(service="vllm", each={"events": "off"})
        async with site(tmp_path, source) as it:
            api = it.api
            api.put(SLICES, endpoint_slice("s0", port, endpoint("vllm-0", ready=False)))
            await it.kubernetes.read.wait()
            assert it.names() == []
            api.put(SLICES, endpoint_slice("s0", port, endpoint("vllm-0", ready=True)))
            await it.rig.until(lambda: list(it.rig.views) == ["vllm-0"])
            assert [source for source, _ in it.rig.fleet.monitors()] == ["Kubernetes"]
            terminating = endpoint("vllm-0", ready=False, terminating=True)
            api.put(SLICES, endpoint_slice("s0", port, terminating))
            await it.rig.until(lambda: not it.rig.views)
            assert "vllm-0: removed by Kubernetes" in caplog.text
            query = api.asked[0][1]
            assert query["labelSelector"] == "kubernetes.io/service-name=vllm"
        await engine.stop()

    run(body)


def test_the_pods_of_a_pool_are_followed(tmp_path: Path) -> None:
    """The pool's selector and ports count as they are now; a pool that is gone has no engines."""

    async def body() -> None:
        async with site(tmp_path, Source(pool="llama", each={"connector": "nixl"})) as it:
            api = it.api
            await it.saying("no InferencePool llama is in namespace ns")
            for name in ("a", "b", "c"):
                api.put(PODS, pod(name, f"127.0.0.{ord(name)}"))
            api.put(POOLS, pool("llama", 1, app="llm", tier="x"))
            await it.has("a", "b", "c")
            assert it.kubernetes.alarms() == []
            selectors = {query["labelSelector"] for path, query in api.asked if path == PODS}
            assert selectors == {"app=llm,tier=x"}
            api.put(PODS, pod("b", "127.0.0.98", deletionTimestamp="now"))
            api.delete(PODS, "c")
            await it.has("a")
            api.put(POOLS, pool("llama", 2, app="llm", tier="x"))
            await it.rig.until(lambda: it.urls() == ["http://127.0.0.97:2"])
            lists = api.lists(PODS)
            api.put(POOLS, pool("llama", 2, app="other"))
            await it.rig.until(lambda: api.lists(PODS) > lists)
            api.delete(POOLS, "llama")
            await it.has()

    run(body)


def test_a_watch_goes_on_from_its_version(tmp_path: Path) -> None:
    """When a watch ends, nothing is listed again and no change is lost."""

    async def body() -> None:
        async with site(tmp_path, SERVICE) as it:
            put(it.api, "a")
            await it.has("a")
            watches = len(it.api.asked)
            it.api.says.append(b"")  # the watch ends
            put(it.api, "a", "b")
            await it.has("a", "b")
            await it.rig.until(lambda: len(it.api.asked) > watches)
            assert it.api.lists(SLICES) == 1
            assert int(it.api.asked[-1][1]["resourceVersion"]) >= 102

    run(body)


def test_a_bookmark_saves_a_list(tmp_path: Path) -> None:
    """The version of a bookmark is young enough after a compaction up to it."""

    async def body() -> None:
        async with site(tmp_path, SERVICE) as it:
            put(it.api, "a")
            await it.has("a")
            it.api.bookmark(SLICES)
            it.api.compact()
            put(it.api, "a", "b")
            await it.has("a", "b")
            assert it.api.lists(SLICES) == 1

    run(body)


def test_after_410_it_lists_again(tmp_path: Path) -> None:
    """What was deleted in the meantime is gone; the log has no warning of it."""

    async def body() -> None:
        async with site(tmp_path, SERVICE) as it:
            put(it.api, "a")
            await it.has("a")
            await it.api.stop()
            put(it.api, "b")
            it.api.compact()
            it.api.says.clear()
            await it.api.start()
            await it.has("b")
            assert it.api.lists(SLICES) == 2

    run(body)


def test_a_rotated_token_is_read_again(tmp_path: Path, caplog: Any) -> None:
    """A 401 is an alarm until the new token is in the file; no log has a token."""

    async def body() -> None:
        async with site(tmp_path, SERVICE) as it:
            put(it.api, "a")
            await it.has("a")
            it.api.accepted = "second-token"
            it.api.says.append(b"")
            put(it.api, "a", "b")
            await it.saying("the API server answered 401: Unauthorized")
            it.api.rotate("second-token")
            await it.saying("")
            await it.has("a", "b")
            assert it.api.lists(SLICES) == 1

    run(body)
    assert "can be read again" in caplog.text
    assert "-token" not in caplog.text


def test_while_the_server_is_away_the_engines_stay(tmp_path: Path) -> None:
    """There is an alarm; when it is back, the changes since then are read."""

    async def body() -> None:
        async with site(tmp_path, SERVICE) as it:
            put(it.api, "a", "b")
            await it.has("a", "b")
            await it.api.stop()
            await it.saying("cannot connect")
            assert it.names() == ["a", "b"]
            put(it.api, "b")
            await it.api.start()
            await it.has("b")
            await it.saying("")

    run(body)


@pytest.mark.parametrize(
    "bad",
    [b"\xff\xfe garbage\n", b'{"type":"ADDED","object":{"metadata":7}}\n', b"x" * (5 << 20), b"{"],
)
def test_garbage_of_a_watch_is_survived(tmp_path: Path, bad: bytes) -> None:
    """Bytes that make no sense, a line without an end, half an event: it lists or watches again."""

    async def body() -> None:
        async with site(tmp_path, SERVICE, says=[bad, bad]) as it:
            put(it.api, "a")
            await it.has("a")
            await it.rig.until(lambda: not it.api.says)
            put(it.api, "a", "b")
            await it.has("a", "b")
            await it.saying("")

    run(body)


def test_a_slow_stream_is_read_piece_by_piece(tmp_path: Path) -> None:
    """An event may come in pieces of any size."""

    async def body() -> None:
        async with site(tmp_path, SERVICE, piece=7) as it:
            await it.kubernetes.read.wait()
            put(it.api, *"abcdefg")
            await it.has(*"abcdefg")

    run(body)


def test_a_list_has_pages(tmp_path: Path) -> None:
    """All pages count; objects of a list that expires on its way are asked for again."""

    async def body() -> None:
        async with site(tmp_path, SERVICE, statuses=[410, 429, 500]) as it:
            for at in range(5):
                made = endpoint(f"e{at}", f"127.0.0.{at + 1}")
                it.api.put(SLICES, endpoint_slice(f"s{at}", 8000, made))
            await it.has("e0", "e1", "e2", "e3", "e4")
            assert any(query.get("continue") == "4" for _, query in it.api.asked)

    run(body)


def test_one_source_that_cannot_be_read_keeps_no_other_back(tmp_path: Path) -> None:
    """The alarm names the remedy: a role for the service account."""

    async def body() -> None:
        async with site(tmp_path, Source(pool="x"), SERVICE, forbidden={POOLS}) as it:
            put(it.api, "a")
            await it.has("a")
            await it.saying("answered 403: no; bind a role to the service account")
            assert not it.kubernetes.read.is_set()
            it.api.forbidden.clear()
            await it.kubernetes.read.wait()
            await it.saying("no InferencePool x is in namespace ns")

    run(body)


def test_an_unusable_endpoint_is_an_alarm(tmp_path: Path, caplog: Any) -> None:
    """The others are used; it is logged once, and forgotten with the endpoint."""

    async def body() -> None:
        source = Source(service="vllm", port=1, role_label="role")
        async with site(tmp_path, source) as it:
            wrong = endpoint_slice("s1", 1, endpoint("bad", "127.0.0.9"), role="boss")
            it.api.put(SLICES, wrong)
            put(it.api, "a")
            await it.has("a")
            await it.saying("bad is not used: label role: must be")
            it.api.delete(SLICES, "s1")
            await it.saying("")

    run(body)
    assert caplog.text.count("bad is not used") == 1


def test_the_first_of_two_sources_has_an_engine(tmp_path: Path) -> None:
    """Two sources may list one endpoint; it is used once."""

    async def body() -> None:
        one = Source(service="vllm", port=1, each={"rack": "r1"})
        two = Source(service="vllm", port=2, each={"rack": "r2"})
        async with site(tmp_path, one, two) as it:
            put(it.api, "a")
            await it.has("a")
            await it.kubernetes.read.wait()
            await it.rig.until(lambda: it.rig.monitor("a").member.spec.rack == "r1")

    run(body)


def test_outside_of_a_pod_it_is_an_error(tmp_path: Path) -> None:
    """The start fails, with the remedy, before anything is asked."""
    with pytest.raises(ConfigError, match="does not run in a pod"):
        account_of({}, tmp_path)
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "abc"}
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_PORT is 'abc'"):
        account_of(environ, tmp_path)
    environ["KUBERNETES_SERVICE_PORT"] = "443"
    with pytest.raises(ConfigError, match=r"token: .*automountServiceAccountToken"):
        account_of(environ, tmp_path)
    (tmp_path / "token").write_text("two words")
    with pytest.raises(ConfigError, match="it is no token"):
        account_of(environ, tmp_path)
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"ca\.crt: it is no certificate"):
        account_of(environ, tmp_path)


def test_another_authority_is_not_trusted(tmp_path: Path) -> None:
    """A server whose certificate another authority signed gets no token."""

    async def body() -> None:
        other = FakeApi(tmp_path / "other")
        (tmp_path / "other").mkdir()
        await other.start()
        async with site(tmp_path, SERVICE) as it:
            await it.kubernetes.read.wait()
            ca = (other.account.folder / "ca.crt").read_bytes()
            (it.api.account.folder / "ca.crt").write_bytes(ca)
            asked = len(it.api.asked)
            it.api.says.append(b"")
            it.api.put(PODS, pod("x"))
            await it.api.stop()
            await it.api.start()
            await it.saying("certificate verify failed")
            assert len(it.api.asked) == asked
        await other.stop()

    run(body)


def test_a_gateway_serves_with_engines_of_kubernetes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready once Kubernetes has listed the engines. A stream goes on to its end while the pod
    terminates."""

    async def test() -> None:
        engine = Engine(token_s=0.02)
        await engine.start()
        port = urlsplit(engine.url).port
        assert port is not None
        api = FakeApi(tmp_path)
        await api.start()
        server = urlsplit(api.account.url)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(server.hostname))
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        monkeypatch.setattr(external, "ACCOUNT", api.account.folder)
        sources = (Source(service="vllm", each={"events": "off"}),)
        config = GatewayConfig(model="m", port=0, drain_s=0.1, kubernetes=sources)
        api.forbidden.add(SLICES)
        gateway = await Gateway.start(config, [])
        http = HttpClient()
        url = f"http://127.0.0.1:{gateway.port}"

        async def ready() -> bytes:
            return (await http.request("GET", f"{url}/ready", timeout_s=5)).body

        assert b"Kubernetes has not listed the engines yet" in await ready()
        api.put(SLICES, endpoint_slice("s0", port, endpoint("vllm-0")))
        api.forbidden.clear()
        while not gateway.conductor.instances():
            await asyncio.sleep(0.02)
        assert b'"status":"ready"' in await ready()
        asked = {"model": "m", "prompt": "Hello", "max_tokens": 20, "stream": True}
        async with http.stream(
            "POST",
            f"{url}/v1/completions",
            headers={"content-type": "application/json"},
            body=msgspec.json.encode(asked),
            timeout_s=10,
            idle_timeout_s=10,
        ) as reply:
            terminating = endpoint("vllm-0", ready=False, terminating=True)
            api.put(SLICES, endpoint_slice("s0", port, terminating))
            while gateway.conductor.instances():
                await asyncio.sleep(0.005)
            body = await reply.read()
        assert (reply.status, body.count(b'"text"'), b"[DONE]" in body) == (200, 20, True), body
        assert [it.path for it in engine.calls] == ["/v1/completions"]
        await http.close()
        await gateway.stop(0)
        await api.stop()
        await engine.stop()

    run(test)


def test_the_setting_names_source_and_field(tmp_path: Path) -> None:
    """An entry of the file becomes a source; `model` counts for its engines too."""
    file = tmp_path / "m.yaml"
    file.write_text("model: llama\nkubernetes: [{service: vllm, each: {events: off}}]\n")
    settings = load(file, {}, {})
    (source,) = sources_of(settings)
    assert source.each == {"model": "llama", "events": False}
    assert engines_of(settings, file, []) == []
    found = source.of_slice(
        msgspec.convert(endpoint_slice("s", 1, endpoint("a", "10.0.0.1")), EndpointSlice)
    )
    spec = spec_of(found)
    assert (spec.model, spec.events) == ("llama", "off")
    for entry, says in (
        ("{service: vllm, port: 0}", "kubernetes[1].port: "),
        ("{servise: vllm}", "kubernetes[1].servise: there is no such field"),
        ("{pool: p, each: {connector: pigeon}}", "kubernetes[1].each.connector: must be"),
    ):
        file.write_text(f"kubernetes: [{{service: vllm}}, {entry}]\n")
        with pytest.raises(ConfigError) as error:
            sources_of(load(file, {}, {}))
        assert says in str(error.value)
    file.write_text("kubernetes: vllm\n")
    with pytest.raises(ConfigError, match="must be a list of sources"):
        load(file, {}, {})
