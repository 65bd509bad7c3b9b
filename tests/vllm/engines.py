"""Real vLLM engines on this machine's CPU, for the tests with the marker `vllm`.

They run from a virtual environment of their own (`make test-vllm` makes it), one thread each, in
float32, so that what two engines generate can be compared token by token.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moonserve.cli.token import token_for
from moonserve.live.http.auth import bearer

BLOCK = 32
"""The smallest block of vLLM's on a CPU."""
MODEL = "smollm2-135m-instruct"
RANKS = 2
"""The most that an engine has here; each takes ports of its own."""
START_S = 480.0
"""40 to 100 CPU seconds for one engine; several start at once."""
HERE = Path(__file__).parent

Json = dict[str, Any]


def free_port(ranks: int = 1) -> int:
    """A TCP port that nobody listens on, nor on those after it that other `ranks` take."""
    while True:
        with contextlib.ExitStack() as probes:
            first = 0
            try:
                for rank in range(ranks):
                    probe = probes.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", first + rank if rank else 0))
                    first = first or int(probe.getsockname()[1])
            except OSError:
                continue
            return first


def get(url: str, timeout_s: float = 5.0) -> Json:
    """What a GET answers, as JSON."""
    request = urllib.request.Request(url, headers=bearer(token_for(url)))
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        return json.loads(reply.read() or b"{}")


def post(url: str, body: Json, timeout_s: float = 120.0, **more: str) -> Json:
    """What a POST of JSON answers, as JSON; more: request headers."""
    headers = {"content-type": "application/json"} | more
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        return json.loads(reply.read())


class Engine:
    """One vLLM process. Construct, `start`, `ready`; `kill` or `stop` at the end."""

    def __init__(self, name: str, folder: Path, python: Path, logs: Path) -> None:
        self.name = name
        self.port = free_port()
        ports = [free_port(RANKS) for _ in range(4)]
        self.events_port, self.replay_port, self.bootstrap_port, self.side_port = ports
        self._folder, self._python, self._logs = folder, python, logs
        self._process: subprocess.Popen[bytes] | None = None
        self._transfer: Json | None = None
        self._extra: tuple[str, ...] = ()
        self.environ: dict[str, str] = {}

    @property
    def url(self) -> str:
        """Where its API is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def bootstrap(self) -> str:
        """Where its Mooncake connector is asked for who it is."""
        return f"http://127.0.0.1:{self.bootstrap_port}"

    def by_mooncake(self, role: str) -> Engine:
        """It hands KV on by the Mooncake connector; role: kv_producer or kv_consumer."""
        self._transfer = {
            "kv_connector": "MooncakeConnector",
            "kv_role": role,
            "kv_connector_module_path": "on_cpu",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }
        return self

    def by_nixl(self, role: str) -> Engine:
        """It hands KV on by NIXL; role: kv_producer or kv_consumer."""
        self._transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_buffer_device": "cpu",
        }
        return self

    def with_store(self, config: Path) -> Engine:
        """It puts KV into Mooncake's store and takes it from there; see on_cpu."""
        self._transfer = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "on_cpu",
        }
        self.environ["MOONCAKE_CONFIG_PATH"] = str(config)
        return self

    def having(self, *args: str) -> Engine:
        """More of vLLM's own flags."""
        self._extra = args
        return self

    def start(self) -> Engine:
        """Start the process; `ready` waits for it."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",  # without a star vLLM connects, not binds
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay_port}",
            "topic": "kv",
        }
        command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self._folder), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048"]
        command += ["--enforce-eager", "--enable-prompt-tokens-details"]
        command += ["--kv-events-config", json.dumps(events), *self._extra]
        if self._transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self._transfer)]
        environ = os.environ | {
            "PYTHONPATH": str(HERE),  # for on_cpu
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "UCX_TLS": "tcp,self",
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            "VLLM_HOST_IP": "127.0.0.1",
            # "localhost" may be an IPv6 address to one side, and an IPv4 one to the other.
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.bootstrap_port),
        }
        with (self._logs / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environ | self.environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self._logs,
            )
        return self

    def ready(self) -> Engine:
        """Wait until it serves; fails with the end of its log where it does not."""
        assert self._process is not None
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and self._process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                get(self.url + "/health")
                return self
            time.sleep(0.5)
        tail = (self._logs / f"{self.name}.log").read_text(errors="replace")[-3_000:]
        self.kill()
        raise AssertionError(f"{self.name} did not come up:\n{tail}")

    def kill(self) -> None:
        """End it and its children at once, as a crash would."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def count(self, metric: str) -> float:
        """The sum of one of its metrics over labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == metric
        )

    def idle(self, within_s: float = 20.0) -> bool:
        """Whether it comes to run no request and hold no KV in use, soon."""
        until_s = time.monotonic() + within_s
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while time.monotonic() < until_s:
            used = self.count("vllm:kv_cache_usage_perc")
            if not any(map(self.count, names)) and used == 0:
                return True
            time.sleep(0.2)
        return False


@contextlib.contextmanager
def running(*engines: Engine) -> Iterator[tuple[Engine, ...]]:
    """All of these engines, up together; killed at the end."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.ready()
        yield engines
    finally:
        for engine in engines:
            engine.kill()
