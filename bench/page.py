"""What the page and the record cost at 200 instances and 2,000 requests a second.

    python bench/page.py [--seconds 60] [--rate 2000] [--instances 200]
    python bench/page.py --live [--seconds 60] [--instances 200]

Without --live no request is served: ended records go straight into what reads them, through the
Conductor's account. So the figures are of this part alone, at a rate that no gateway of one process
serves.
Each part has a run of its own: the account that keeps the last 500, the page's history with its
note of each second, the sums for /metrics, and the recorder, whose thread has CPU time of its own.
Then the page's polls are answered, once a quarter of an hour of samples is there, and a page of
metrics of 1,000 instances and 1,000 tenants is made, beside prometheus_client's generate_latest.

--live: a gateway that records serves as many requests as it can, with fake workers that share one
other process with the clients, while this process polls once a second as the page does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from prometheus_client import CollectorRegistry, generate_latest

from common import machine_line
from moonserve.core.errors import MoonserveError
from moonserve.core.request import Slo
from moonserve.core.schedule.actions import Candidate, Decision
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import Joined
from moonserve.core.schedule.record import Measured, PrefillTimes, Record
from moonserve.core.units import BlockKey, RequestId
from moonserve.live.control.history import Observed
from moonserve.live.control.leadership import Leadership
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.control.usage import UsageSums
from moonserve.live.control.views import Api, Figures, conductor_metrics, instance_metrics
from moonserve.live.exposition import exposed
from moonserve.live.health import Health
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import Handler, Routes
from moonserve.live.record.recorder import Recorder
from moonserve.live.store.external import ExternalPool
from tests.support.cluster import info
from tests.support.inproc import TOKEN, Site

BLOCKS = 60
"""Full blocks of a prompt."""
SAMPLES = 900
"""Seconds of the finest chart."""


class Load:
    """Records of requests that have ended, new ones without end."""

    def __init__(self, loop: ConductorLoop, tenants: int = 50) -> None:
        self._loop = loop
        self._random = Random(0)
        self._numbers = count()
        self._instances = list(loop.views())
        self._tenants = [f"tenant-{number}" for number in range(tenants)]
        self._chains = [
            tuple(BlockKey(self._random.randbytes(32)) for _ in range(BLOCKS)) for _ in range(500)
        ]

    def one(self) -> Record:
        """A request that ended now; one in ten was refused."""
        draw, now_us = self._random, self._loop.now_us()
        prefill, decode = draw.choice(self._instances), draw.choice(self._instances)
        keys = draw.choice(self._chains)
        size = self._loop.views()[prefill].info.namespace.block_size
        length = len(keys) * size + 1
        rows = tuple(
            Candidate(draw.choice(self._instances), 0, 0, None, 0, 0, 90, 0.0) for _ in range(15)
        )
        chosen = Candidate(prefill, size, 2 * size, None, 10, 20, 60, 0.0)
        decision = Decision(
            "late_binding", prefill, decode, length, False, 2 * size, 90_000, 40_000, 3 * size,
            chosen, 1,
        )  # fmt: skip
        record = Record(
            RequestId(f"request-{next(self._numbers)}"), "m", draw.choice(self._tenants), 0,
            length, keys, Slo(2_000_000, 100_000), now_us - 900_000,
            decision=decision, candidates=(chosen, *rows),
        )  # fmt: skip
        record.ended_us, record.is_closed = now_us, True
        if draw.random() < 0.1:
            record.outcome, record.reason, record.error = "refused", "ttft_slo", "it misses"
            return record
        record.attempts, record.outcome, record.is_good = 1, "stop", draw.random() < 0.9
        record.prefill_us, record.prefilled_us = now_us - 890_000, now_us - 800_000
        record.decode_us, record.first_us = now_us - 799_000, now_us - 800_000
        times = PrefillTimes(1_000, 2_000, 80_000, 7_000)
        record.measured = Measured(64, 2 * size, 12_000, 9_000, times)
        return record


def cluster(instances: int) -> ConductorLoop:
    """A Conductor that has half of them for prefill, half for decode."""
    loop = ConductorLoop(Conductor(), lambda lease: None, has_page=True)
    roles = ("prefill", "decode")
    joins = [Joined(info(f"n{number:03}", roles[number % 2])) for number in range(instances)]
    loop.core.step(loop.now_us(), joins)
    return loop


async def cost(
    name: str, loop: ConductorLoop, seconds: int, rate: int, second: Callable[[], None]
) -> None:
    """Print what a second of load costs. second: is called after each."""
    load = Load(loop)
    main_s = all_s = longest_s = 0.0
    for _ in range(seconds):
        records = [load.one() for _ in range(rate)]
        began_s, began_all_s = time.thread_time(), time.process_time()
        for record in records:
            loop.account._complete(record)
        noted_s = time.thread_time()
        second()
        longest_s = max(longest_s, time.thread_time() - noted_s)
        main_s += time.thread_time() - began_s
        await asyncio.sleep(1.1 if name == "recorder" else 0)  # its thread pauses for a second
        all_s += time.process_time() - began_all_s
    thread = f", its thread {1e3 * (all_s - main_s) / seconds:5.1f}" if name == "recorder" else ""
    held = f", {1e3 * longest_s:.1f} of it at once, at most" if longest_s > 1e-3 else ""
    print(f"{name:<10} {1e3 * main_s / seconds:6.1f} ms of the event loop a second{held}{thread}")


async def answer(handler: Handler, target: str) -> tuple[float, float, int]:
    """CPU ms of an answer, the longest time for which it held the loop, in ms, and its bytes."""
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.perf_counter() - last_s)
            last_s = time.perf_counter()

    path, _, query = target.partition("?")
    request = HttpRequest("GET", target, path, query.encode(), {}, None)  # type: ignore[arg-type]
    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    began_s = time.process_time()
    reply = await handler(request)
    took_s = time.process_time() - began_s
    await asyncio.sleep(0)
    watching.cancel()
    assert isinstance(reply, Response)
    return 1e3 * took_s, 1e3 * longest_s, len(reply.body)


def targets(since_ms: float, name: str) -> Iterator[str]:
    """What the page asks for, and /metrics. since_ms: the time of the sample before the last."""
    yield "/api/history?step=1&since=0"
    yield f"/api/history?step=1&since={since_ms}"
    yield "/api/history?step=1&since=0&heat=true"
    yield f"/api/history?step=1&since={since_ms}&heat=true"
    yield "/api/instances"
    yield "/api/decisions?limit=100"
    yield "/api/decisions?limit=1000"
    yield f"/api/decisions/{name}"
    yield "/api/prefixes"
    yield "/api/tenants"
    yield "/metrics"


async def polls(instances: int, rate: int) -> None:
    """Print the answers to the page's polls after a quarter of an hour."""
    loop = cluster(instances)
    pool, health = ExternalPool("none"), Health()
    leads = Leadership()
    observed = Observed(loop, pool, health, lambda: leads)
    usage = UsageSums()
    loop.watch_ended(usage.ended)
    api = Api(loop, pool)
    load = Load(loop)
    for second in range(SAMPLES + 1):
        for _ in range(rate if second > SAMPLES - 60 else rate // 20):
            loop.account._complete(load.one())
        observed._note(1_000 * second)
        last = load.one()
    loop.account._complete(last)

    async def metrics(request: HttpRequest) -> Response:
        return Response(body=await exposed(usage.metrics()))

    routes: Routes = {
        **api.routes(),
        **observed.routes(),
        ("GET", "/api/tenants"): usage.tenants_route,
    }
    routes["GET", "/metrics"] = metrics
    print("\nanswer                                           CPU ms   longest hold ms       bytes")
    for target in targets(1_000 * (SAMPLES - 1), last.id):
        path = target.partition("?")[0]
        handler = routes.get(("GET", path)) or api.prefixes()["GET", "/api/decisions/"]
        took_ms, held_ms, size = min([await answer(handler, target) for _ in range(5)])
        shown = target if len(target) < 48 else target[:45] + "..."
        print(f"{shown:<48} {took_ms:6.1f} {held_ms:17.1f} {size:11,}")


async def scrape(instances: int = 1_000) -> None:
    """Print what a page of metrics costs, with as many tenants as instances."""
    loop, usage = cluster(instances), UsageSums()
    load = Load(loop, tenants=instances)
    loop.watch_ended(usage.ended)
    for _ in range(20 * instances):
        loop.account._complete(load.one())
    registry = CollectorRegistry(auto_describe=False)
    for read in (partial(conductor_metrics, loop), partial(instance_metrics, loop), usage.metrics):
        registry.register(Figures(read))

    async def ours(request: HttpRequest) -> Response:
        return Response(body=await exposed(registry.collect()))

    async def theirs(request: HttpRequest) -> Response:
        return Response(body=generate_latest(registry))

    print(f"\n/metrics of {instances:,} instances, tenants              CPU ms   longest hold ms")
    for name, handler in (("as it is served", ours), ("generate_latest", theirs)):
        took_ms, held_ms, size = min([await answer(handler, "/metrics") for _ in range(7)])
        print(f"{name:<48} {took_ms:6.1f} {held_ms:17.1f} {size:11,}")


class Crowd(Site):
    """Fake workers at a gateway that is another process."""

    def __init__(self, url: str, http: HttpClient, stack: contextlib.AsyncExitStack) -> None:
        super().__init__(None, http, stack)  # type: ignore[arg-type]
        self._at = url

    @property
    def url(self) -> str:
        """The gateway's."""
        return self._at


async def crowd(url: str, instances: int, clients: int) -> None:
    """Run workers and clients until this process is ended."""
    async with contextlib.AsyncExitStack() as stack:
        http = HttpClient()
        stack.push_async_callback(http.close)
        site = Crowd(url, http, stack)
        for number in range(instances):
            await site.add(f"n{number:03}", "decode" if number % 2 else "prefill")
        print("ready", flush=True)
        draw = Random(0)

        async def client(number: int) -> None:
            while True:
                head = [draw.randrange(20)] * 64
                tail = [draw.randrange(250) for _ in range(40)]
                with contextlib.suppress(AssertionError, MoonserveError):
                    tenant = {"x-moonserve-tenant": f"tenant-{number}"}
                    await site.tokens(head + tail, 4, **tenant)

        await asyncio.gather(*(client(number) for number in range(clients)))


def live(seconds: int, instances: int) -> None:
    """Print what the gateway serves, its CPU time, and how long the page waits for its polls."""
    environ = {**os.environ, "MOONSERVE_TOKEN": TOKEN}
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        url = f"http://127.0.0.1:{port}"
        gateway = [sys.executable, "-m", "moonserve", "gateway", "--port", str(port)]
        gateway += ["--record", folder, "--max-connections", "4000"]
        argv = [sys.executable, __file__, "--crowd", url, "--instances", str(instances)]
        with contextlib.ExitStack() as stack:
            served = stack.enter_context(
                subprocess.Popen(gateway, env=environ, stderr=subprocess.DEVNULL)
            )
            stack.callback(served.terminate)
            _listening(url)
            load = stack.enter_context(
                subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(load.kill)
            assert load.stdout is not None
            assert load.stdout.readline() == "ready\n"
            _poll(url, served.pid, seconds)


def _listening(url: str) -> None:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            _read(url + "/health")
            return
        time.sleep(0.1)
    raise TimeoutError(url)


def _poll(url: str, pid: int, seconds: int) -> None:
    paths = ("/api/history?step=1&heat=true", "/api/instances", "/api/decisions?limit=100")
    paths += ("/api/prefixes", "/api/tenants", "/api/recording", "/metrics")
    waited: dict[str, list[tuple[float, int]]] = {path: [] for path in paths}
    since = 0
    began_s, before_s = time.monotonic(), _cpu_s(pid)
    while time.monotonic() - began_s < seconds:
        for path, found in waited.items():
            asked = f"{path}&since={since}" if "history" in path else path
            at_s = time.perf_counter()
            body = _read(url + asked)
            found.append((1e3 * (time.perf_counter() - at_s), len(body)))
            if "history" in path:
                since = json.loads(body)["now_ms"]
        time.sleep(1.0)
    took_s, used_s = time.monotonic() - began_s, _cpu_s(pid) - before_s
    columns = json.loads(_read(f"{url}/api/history?step=1"))["columns"]
    ended = [sum(it) for it in zip(columns["in_time"], columns["late"], strict=True)]
    rate = sum(ended[-int(took_s) :]) / min(len(ended), int(took_s))
    status = json.loads(_read(f"{url}/api/recording"))
    print(f"{rate:,.0f} requests/s served; the gateway used {used_s / took_s:.0%} of a core;"
          f" {status['rows']:,} rows recorded, {status['dropped']:,} dropped\n")  # fmt: skip
    print("poll                             p50 ms    max ms   bytes p50")
    for path, found in waited.items():
        times, sizes = sorted(it[0] for it in found), sorted(it[1] for it in found)
        middle = len(found) // 2
        print(f"{path:<30} {times[middle]:8.1f} {times[-1]:9.1f} {sizes[middle]:11,}")


def _read(url: str) -> bytes:
    asked = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(asked, timeout=30) as reply:
        return bytes(reply.read())


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--rate", type=int, default=2_000)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--crowd", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.crowd:
        await crowd(asked.crowd, asked.instances, clients=64)
        return
    print(machine_line())
    if asked.live:
        live(asked.seconds, asked.instances)
        return
    print(
        f"{asked.instances} instances, {asked.rate:,} requests a second, {asked.seconds} seconds\n"
    )
    given = asked.seconds, asked.rate
    await cost("account", cluster(asked.instances), *given, lambda: None)

    loop, health, leads = cluster(asked.instances), Health(), Leadership()
    observed = Observed(loop, ExternalPool("none"), health, lambda: leads)
    noted = count(1_000, 1_000)
    await cost("history", loop, *given, lambda: observed._note(next(noted)))

    loop = cluster(asked.instances)
    loop.watch_ended(UsageSums().ended)
    await cost("sums", loop, *given, lambda: None)

    with tempfile.TemporaryDirectory() as folder:
        loop = cluster(asked.instances)
        recorder = Recorder(loop, Health(), folder, 1 << 30)
        await recorder.prepare()
        await cost("recorder", loop, min(10, asked.seconds), asked.rate, lambda: None)
        await recorder.stop()
        status = recorder._said()
        print(f"{'':10} {status.rows:,} rows of {status.bytes / max(1, status.rows):.0f} bytes;"
              f" {status.dropped:,} dropped")  # fmt: skip
    await polls(asked.instances, asked.rate)
    await scrape()


if __name__ == "__main__":
    asyncio.run(main())
