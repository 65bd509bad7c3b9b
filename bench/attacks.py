"""An interactive client beside attackers: its latency alone and beside each attack.

    python bench/attacks.py [--secs 15] [--rate 8] [--only NAME,...] [--list]

Each attack runs against a cluster of its own (`moonserve up --engine fake`, one prefill and one
decode worker) that is started from the `moonserve` that Python finds: to measure another tree, set
PYTHONPATH. The attackers are one process with connections from 127.0.0.2 and no token; they go on
for `--secs`, and the interactive client, from 127.0.0.1, sends `--rate` short chats a second, each
on a new connection, for as long before and beside.

A line for each attack: p50 and p99 in milliseconds, alone and beside; p99 beside over p99 alone;
the chats that were refused (429) or failed, of all; the gateway's memory in MiB before, at its most
beside, and 3 s after. The goal is a p99 of at most three times the undisturbed one, and no refusal.
Timings of a shared machine vary; run attacks that matter more than once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

from common import machine_line

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ATTACKER, CLIENT = "127.0.0.2", "127.0.0.1"
MIB = 1 << 20
BODY_BYTES = 8 * MIB - 64
READY_S, PATIENCE_S = 120.0, 60.0


class Connection:
    """One connection of an attacker or a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int, address: str) -> Connection:
        """Connect from this address."""
        local = (address, 0)
        return cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=local))

    async def send(self, *parts: bytes) -> None:
        """Send all of it."""
        for part in parts:
            self.writer.write(part)
        await self.writer.drain()

    async def status(self) -> int:
        """The status of the next reply; its body stays unread."""
        return int((await self.reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])

    def close(self) -> None:
        """Close it at once."""
        self.writer.transport.abort()


def head(path: str, size: int, *headers: str, method: str = "POST") -> bytes:
    """The head of a request."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {size}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def tenant(name: str) -> str:
    """The header that names a tenant."""
    return f"x-moonserve-tenant: {name}"


# The attacks: each is a coroutine that goes on until it is cancelled.


async def forever(count: int, each: Callable[[int], Awaitable[None]]) -> None:
    """`count` attackers at a time; each begins again when it has ended or was cut off."""

    async def one(number: int) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError):
                await each(number)
            await asyncio.sleep(0.01)

    await asyncio.gather(*(one(number) for number in range(count)))


async def left_bodies(port: int, model: str) -> None:
    """Clients that leave before their bodies of 8 MiB are complete."""
    body = bytes(7 * MIB)

    async def each(number: int) -> None:
        connection = await Connection.open(port, ATTACKER)
        await connection.send(head(CHAT, BODY_BYTES), body)
        connection.close()
        await asyncio.sleep(0.05)

    await forever(1, each)


async def absent_bodies(port: int, model: str) -> None:
    """1,200 requests whose bodies never come, each for a tenant of its own."""

    async def each(number: int) -> None:
        connection = await Connection.open(port, ATTACKER)
        await connection.send(head(CHAT, 150, tenant(f"t{number}")))
        await connection.reader.read()
        connection.close()

    await forever(1_200, each)


async def brackets(port: int, model: str) -> None:
    """48 clients with bodies of 8 MiB, all of them empty lists."""
    await _bodies(port, b'{"model":"%b","prompt":[%b]}', b"[]", model)


async def fields(port: int, model: str) -> None:
    """48 clients with bodies of 700,000 fields."""
    many = b",".join(b'"f%d":1' % number for number in range(700_000))
    await _same(port, TEXT, b'{"model":"%b","prompt":"x",%b}' % (model.encode(), many))


async def messages(port: int, model: str) -> None:
    """48 clients with bodies of half a million messages."""
    await _bodies(port, b'{"model":"%b","messages":[%b]}', b'{"role":"user"}', model, CHAT)


async def _bodies(port: int, form: bytes, item: bytes, model: str, path: str = TEXT) -> None:
    many = b",".join([item] * ((BODY_BYTES - len(form) - len(model)) // (len(item) + 1)))
    await _same(port, path, form % (model.encode(), many))


async def _same(port: int, path: str, body: bytes, clients: int = 48) -> None:
    async def each(number: int) -> None:
        connection = await Connection.open(port, ATTACKER)
        try:
            await connection.send(head(path, len(body), tenant(f"t{number}")), body)
            await connection.status()
        finally:
            connection.close()

    await forever(clients, each)


async def pipelined(port: int, model: str) -> None:
    """Four clients that ask again and again for large replies, and read none."""
    asked = head("/metrics", 0, method="GET") * 500

    async def each(number: int) -> None:
        connection = await Connection.open(port, ATTACKER)
        connection.writer.transport.pause_reading()
        try:
            while True:
                await connection.send(asked)
        finally:
            connection.close()

    await forever(4, each)


async def internal_bodies(port: int, model: str) -> None:
    """16 clients without a token that send 60 MiB to a path of the cluster's own."""
    body = bytes(MIB)

    async def each(number: int) -> None:
        connection = await Connection.open(port, ATTACKER)
        try:
            await connection.send(head("/internal/join", 60 * MIB), *[body] * 60)
            await connection.status()
        finally:
            connection.close()

    await forever(16, each)


async def streams(port: int, model: str) -> None:
    """300 streams of one tenant, 400 tokens each."""
    body = json.dumps(
        {"model": model, "prompt": "Tell me", "max_tokens": 400, "stream": True, "ignore_eos": True}
    ).encode()

    async def each(number: int) -> None:
        connection = await Connection.open(port, ATTACKER)
        try:
            await connection.send(head(TEXT, len(body), tenant("flood")), body)
            status = await connection.status()
            while status == 200 and b"[DONE]" not in await connection.reader.read(1 << 16):
                pass
            await asyncio.sleep(0 if status == 200 else 1)
        finally:
            connection.close()

    await forever(300, each)


async def long_texts(port: int, model: str) -> None:
    """Eight clients that send texts as long as the context allows, one after the other."""
    text = "The quick brown fox jumps over the lazy dog. " * 8_000
    body = json.dumps({"model": model, "prompt": text}).encode()
    await _same(port, TEXT, body, clients=8)


Attack = Callable[[int, str], Awaitable[None]]
LONG = 24_000
"""Characters of the interactive client's prompt, where it is about long prompts."""


class Plan(NamedTuple):
    """One attack, the cluster it needs, and how long the client's prompts are."""

    attack: Attack
    flags: Sequence[str] = ()
    characters: int = 40


PLANS = {
    "left-bodies": Plan(left_bodies),
    "absent-bodies": Plan(absent_bodies),
    "brackets": Plan(brackets),
    "fields": Plan(fields),
    "messages": Plan(messages),
    "pipelined": Plan(pipelined),
    "internal-bodies": Plan(internal_bodies, ("--workers", "2")),
    "streams": Plan(streams, ("--profile", "h800")),
    "long-texts": Plan(long_texts, (), LONG),
}


def attack_until(name: str, port: int, model: str, stop: Event) -> None:
    """The attackers' process."""

    async def main() -> None:
        attack = asyncio.ensure_future(PLANS[name].attack(port, model))
        stopped = asyncio.create_task(asyncio.to_thread(stop.wait))
        await asyncio.wait({attack, stopped}, return_when=asyncio.FIRST_COMPLETED)
        attack.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attack

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(main())


# The interactive client.


class Seen(NamedTuple):
    """What the interactive client saw in one phase."""

    took_ms: Sequence[float]
    refused: int
    failed: int

    def share_ms(self, share: float) -> float:
        """The latency that this share of the chats did not exceed; a failed one takes for ever."""
        took = sorted([*self.took_ms, *[float("inf")] * (self.refused + self.failed)])
        return took[min(len(took) - 1, int(share * len(took)))]


async def client(port: int, model: str, plan: Plan, secs: float, rate: float) -> Seen:
    """Chats at a steady rate, each begun at its time whether or not those before have ended."""
    took_ms: list[float] = []
    statuses: list[int] = []

    async def chat(number: int) -> None:
        began_s = time.monotonic()
        text = f"{number} " + "Hello there, friend. " * (plan.characters // 20)
        ask = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
        body = json.dumps({**ask, "stream": True, "ignore_eos": True}).encode()
        status = 0
        with contextlib.suppress(OSError, EOFError, TimeoutError, ValueError):
            async with asyncio.timeout(PATIENCE_S):
                connection = await Connection.open(port, CLIENT)
                try:
                    await connection.send(head(CHAT, len(body), "connection: close"), body)
                    status = await connection.status()
                    whole = await connection.reader.read()
                finally:
                    connection.close()
            if status == 200 and b"[DONE]" in whole:
                took_ms.append((time.monotonic() - began_s) * 1e3)
            elif status == 200:
                status = 0
        statuses.append(status)

    begin_s = time.monotonic()
    chats = []
    for number in range(int(secs * rate)):
        await asyncio.sleep(max(0.0, begin_s + number / rate - time.monotonic()))
        chats.append(asyncio.create_task(chat(number)))
    await asyncio.gather(*chats)
    refused = statuses.count(429)
    return Seen(took_ms, refused, len(statuses) - len(took_ms) - refused)


# The cluster.


class Cluster(NamedTuple):
    """A running cluster."""

    pid: int
    port: int
    model: str


@contextlib.contextmanager
def cluster(flags: Sequence[str]) -> Iterator[Cluster]:
    """Start a cluster; it ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "moonserve", "up", "--engine", "fake", "--port", "0"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *flags], stdout=output, stderr=output, start_new_session=True
            )
        try:
            deadline_s = time.monotonic() + READY_S
            while (
                ready := re.search(r"^Ready at http://\S+:(\d+)$", log.read_text(), re.M)
            ) is None:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    sys.exit("the cluster did not start; it printed:\n" + log.read_text()[-2_000:])
                time.sleep(0.1)
            port = int(ready[1])
            yield Cluster(process.pid, port, asyncio.run(first_model(port)))
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def first_model(port: int) -> str:
    """The name of the model that is served."""
    connection = await Connection.open(port, CLIENT)
    await connection.send(head("/v1/models", 0, "connection: close", method="GET"))
    await connection.status()
    models = json.loads(await connection.reader.read())
    connection.close()
    return str(models["data"][0]["id"])


def gateway_mib(pid: int) -> float:
    """The memory of the gateway's processes: the child of this one that is a gateway, and those
    below it."""
    children: dict[int, list[int]] = {}
    words: dict[int, list[bytes]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(folder.name))
            words[int(folder.name)] = (folder / "cmdline").read_bytes().split(b"\0")
    found = [child for child in children.get(pid, []) if b"gateway" in words.get(child, [])]
    total = 0
    for one in found:
        found += children.get(one, [])
        with contextlib.suppress(OSError):
            memory = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{one}/status").read_text())
            total += int(memory[1]) if memory else 0
    return total / 1024


def measure(name: str, args: argparse.Namespace) -> None:
    """Run one attack and print its line."""
    plan = PLANS[name]
    with cluster(plan.flags) as it:
        asyncio.run(client(it.port, it.model, plan, 2.0, args.rate))
        alone = asyncio.run(client(it.port, it.model, plan, args.secs, args.rate))
        memory = [gateway_mib(it.pid)]
        context = multiprocessing.get_context("spawn")
        stop = context.Event()
        attackers = context.Process(target=attack_until, args=(name, it.port, it.model, stop))
        attackers.start()
        time.sleep(2.0)
        beside, most = asyncio.run(watched(it, plan, args))
        stop.set()
        attackers.join(10)
        attackers.kill()
        time.sleep(3.0)
        memory += [max(most, memory[0]), gateway_mib(it.pid)]
    show(name, alone, beside, memory)


async def watched(it: Cluster, plan: Plan, args: argparse.Namespace) -> tuple[Seen, float]:
    """The client beside the attack, and the most memory meanwhile."""
    running = asyncio.create_task(client(it.port, it.model, plan, args.secs, args.rate))
    most = 0.0
    while not running.done():
        most = max(most, await asyncio.to_thread(gateway_mib, it.pid))
        await asyncio.wait({running}, timeout=0.5)
    return running.result(), most


def show(name: str, alone: Seen, beside: Seen, memory: Sequence[float]) -> None:
    """One line of the table."""
    a50, a99, b50, b99 = (seen.share_ms(share) for seen in (alone, beside) for share in (0.5, 0.99))
    count = len(beside.took_ms) + beside.refused + beside.failed
    print(
        f"{name:16} {a50:8.0f} {a99:8.0f} {b50:8.0f} {b99:8.0f} {b99 / a99:6.1f}"
        f" {beside.refused:5} {beside.failed:5} {count:5} "
        + " ".join(f"{mib:6.0f}" for mib in memory),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--secs", type=float, default=15.0)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--only", type=lambda given: given.split(","), default=list(PLANS))
    parser.add_argument("--list", action="store_true", help="print the attacks and what they do")
    args = parser.parse_args()
    if args.list:
        for name, plan in PLANS.items():
            print(f"{name:16} {plan.attack.__doc__}")
        return
    for name in args.only:
        if name not in PLANS:
            sys.exit(f"--only: {name!r} is no attack; there are {', '.join(PLANS)}")
    print(machine_line())
    print(
        f"{'':16} {'p50':>8} {'p99':>8} {'p50':>8} {'p99':>8} {'ratio':>6} {'429':>5} {'fail':>5}"
        f" {'chats':>5} {'MiB':>6} {'most':>6} {'after':>6}"
    )
    for name in args.only:
        measure(name, args)


if __name__ == "__main__":
    main()
