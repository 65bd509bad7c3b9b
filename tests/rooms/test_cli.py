"""The command line: light, clear in error, and `ask` against a scripted gateway."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from moonserve.cli import cli, fleet
from moonserve.cli.settings import child_env
from moonserve.cli.up import cluster
from moonserve.config import Logging, Settings, load
from moonserve.core.request import Slo
from moonserve.live.control.config import LIVE, GatewayConfig
from moonserve.live.registry.entries import CONDUCTORS, LEADER, ConductorEntry, LeaderEntry
from moonserve.live.store.settings import StoreSettings
from moonserve.live.worker.config import WorkerConfig
from tests.support.registry import MemoryRegistry


def run(*argv: str, stdin: str | None = None) -> Result:
    """Run the program in this process."""
    return CliRunner().invoke(cli, argv, input=stdin, prog_name="moonserve")


def test_help_loads_nothing_heavy() -> None:
    """`moonserve --help` stays instant: no heavy package is imported for it."""
    code = (
        "import sys\nfrom moonserve.cli import cli\n"
        "cli(['--help'], prog_name='moonserve', standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2', 'yaml', 'asyncio'}\n"
        "print('HEAVY', sorted((heavy - {'asyncio'}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "moonserve up" in done.stdout
    assert "HEAVY []" in done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["up", "--port", "0"],
        ["worker", "--role", "prefill", "--name", "p0", "--gateway", "http://127.0.0.1:1"],
        ["model", "export", "smollm2-135m-instruct", "exported"],
    ],
)
@pytest.mark.parametrize("package", ["torch", "safetensors"])
def test_a_real_model_without_its_engine_says_what_to_install(
    argv: list[str], package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the extra `engine`, commands that compute a model name it, and leave nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOONSERVE_TOKEN", "x" * 32)
    monkeypatch.setitem(sys.modules, package, None)
    result = run(*argv)
    assert result.exit_code == 2
    assert f"a real model needs {package}; install with: pip install 'moonserve[engine]'" in (
        result.output
    )
    assert result.output.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_runs_as_a_module() -> None:
    """`python -m moonserve` is the program, and knows its version."""
    done = subprocess.run(
        [sys.executable, "-m", "moonserve", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("moonserve 0.")


_INTERRUPTED = """
import os, runpy, signal, sys
class Interrupting:
    def find_spec(self, name, *more):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv[0] = PROGRAM
if PROGRAM == "-m":
    runpy.run_module("moonserve", run_name="__main__")
else:
    from moonserve.cli import main
    main()
"""


@pytest.mark.parametrize(
    "module", ["moonserve.native", "moonserve.cli", "click", "moonserve.cli.ask"]
)
@pytest.mark.parametrize("program", ["-m", "/usr/bin/moonserve"])
def test_an_interrupted_start_ends_quietly(program: str, module: str) -> None:
    """Whatever is imported just then; the code is that of an interrupted program."""
    code = _INTERRUPTED.replace("PROGRAM", repr(program)).replace("MODULE", repr(module))
    done = subprocess.run(
        [sys.executable, "-c", code, "ask", "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


WORKER = ["worker", "--role", "both", "--name", "w0"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["up", "--port", "99999"], "error: port: must be 65535 or less"),
        (["up", "--engine", "vllm"], "error: engine: must be fake or torch"),
        (["up", "--segment-bytes", "lots"], "error: segment_bytes: 'lots' is not a size"),
        (["up", "--config", "/no/such.yaml"], "error: config: cannot read /no/such.yaml"),
        (["gateway", "--host", "0.0.0.0"], "error: keys: bound to 0.0.0.0, so clients need"),
        (["up", "--host", "0.0.0.0"], "error: keys: bound to 0.0.0.0, so clients need"),
        (["key", "list"], "error: keys: name the file with the keys"),
        ([*WORKER, "--host", "192.0.2.1"], "error: token: bound to 192.0.2.1, so other machines"),
        (["up", "--policy", "best"], "error: policy: must be one of random, round_robin"),
        (["gateway", "--ttft-slo", "30"], "error: ttft_slo: 30 has no unit; write 30s for seconds"),
        (["explain", "r1", "--url", "ftp://x"], "error: url: 'ftp://x' is no address"),
        (["up", "--kv-memory-bytes", "much"], "error: kv_memory_bytes: 'much' is not a size"),
        (["ask", "hi", "--url", "ftp://x"], "error: url: 'ftp://x' is no address"),
        (["ask", "hi", "--url", "http://x/y"], "error: url: 'http://x/y' has a path; leave it out"),
        (["ask", "hi", "--url", "http://[::1"], "error: url: 'http://[::1' is no address: "),
        (["ask", "hi", "--url", "http://a b"], "error: url: 'http://a b' has a space or a line"),
        (["ask", "hi", "--url", "http://a\nb"], r"error: url: 'http://a\nb' has a space or a line"),
        (["top", "--url", "http://a?b"], "error: url: 'http://a?b' has a query or a fragment; wri"),
        (["ask", "hi", "--url", "http://a#b"], "error: url: 'http://a#b' has a query or a fragme"),
        (["ask", "hi", "--url", "http://a<b"], "error: url: 'http://a<b' is no address; write"),
        (["ask", "hi", "--url", "http://a..b"], "error: url: 'http://a..b' has a host that is no"),
        (["ask", "hi", "--url", "a:99999"], "error: url: 'a:99999' is no address: Port out of"),
        (["explain", ""], "error: REQUEST_ID: must not be empty; take the x-request-id of a reply"),
        (["drain", "d0", "--timeout", "9s"], "error: --timeout: is for --wait; add --wait"),
        (["store", "get", "ab", "--url", "http://[::1"], "error: url: 'http://[::1': Invalid IPv6"),
        (["store", "get", "ab", "--url", "x:1"], "error: url: 'x:1' is no address; write it like"),
        (
            ["segment", "--name", "s", "--store-url", "http://[::1"],
            "error: store_url: 'http://[::1': Invalid IPv6",
        ),
        (
            ["segment", "--name", "s", "--store-url", "127.0.0.1:1"],
            "error: store_url: '127.0.0.1:1' is no address; write it like http://",
        ),
        (
            ["store", "evict", "s", "99999999TiB"],
            "error: size: '99999999TiB' is more than any size can be: 4194304TiB",
        ),
        (
            [*WORKER, "--store", "mooncake", "--card", "127.0.0.1"],
            "error: card: is for the embedded store only",
        ),
        (
            ["up", "--store", "mooncake", "--segment-bytes", "4MiB"],
            "error: segment_bytes: Mooncake takes segments of 16MiB and more",
        ),
        (["segment", "--name", "../x"], "error: name: must be 1 to 64 letters"),
        (["segment", "--name", "s", "--disk-dir", "/d"], "error: disk_dir: needs a size"),
        (["store", "get", "--text", "k" * 300], "error: key: must be at most 256 bytes, not 300"),
        (["worker", "--role", "both", "--name", ""], "error: name: must be 1 to 64 letters"),
        (
            ["conductor", "--workers", "4"],
            "error: --workers: is no flag of `moonserve conductor`; give it to `moonserve gateway`",
        ),
        (["conductor", "--open"], "error: --open: is no flag of `moonserve conductor`; give it to"),
        (["conductor", "--engine", "fake"], "error: --engine: is no flag of `moonserve conductor`"),
        (
            ["store", "serve", "--policy", "random"],
            "error: --policy: is no flag of `moonserve store serve`; give it to `moonserve",
        ),
        (["ups"], "error: ups: is no command of `moonserve`; did you mean up?"),
        (
            ["trace", "x"],
            "error: x: is no command of `moonserve trace`; see `moonserve trace --help`",
        ),
        (["--bogus"], "error: --bogus: is no flag of `moonserve`; see `moonserve --help`"),
        (
            ["up", "--prefil", "3"],
            "error: --prefil: is no flag of `moonserve up`; did you mean --pre",
        ),
        (["ask"], "error: PROMPT: is missing; see `moonserve ask --help`"),
        (["worker"], "error: --role: is missing; see `moonserve worker --help`"),
        (
            ["ask", "a", "--max-tokens", "x"],
            "error: --max-tokens: 'x' is not a whole number; see `moonserve ask --help`",
        ),
        (["ask", "a", "--max-tokens"], "error: --max-tokens: requires an argument"),
        (["ask", "a", "--json=3"], "error: --json: does not take a value"),
        (["ask", "a", "b"], "error: got unexpected extra argument (b); see `moonserve ask --help`"),
        (["profile", "--seconds", "1d"], "error: --seconds: '1d' is not a time; write it like 30s"),
        (["conductor", "--socket", "/tmp/" + "x" * 200], "error: socket: has 205 bytes, and the"),
        (["gateway", "--conductor", "/tmp/" + "x" * 200], "error: conductor: has 205 bytes, and"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_code_2(argv: list[str], message: str) -> None:
    """A wrong setting is one line on stderr that names it; never a traceback."""
    result = run(*argv)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [
        *(["ask", "hi"], ["explain", "r1"], ["top", "--once"], ["advise"], ["profile"]),
        *(["record", "status"], ["drain", "d0"], ["twin", "--once"], ["instances"]),
        *(["store", "stat"], ["replay", "one.jsonl"]),
    ],
    ids=" ".join,
)
def test_every_command_that_asks_a_gateway_takes_its_url_from_the_environment(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MOONSERVE_URL is what --url is, and a flag wins over it; the error names both."""
    monkeypatch.chdir(tmp_path)
    row = {"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [0]}
    Path("one.jsonl").write_text(json.dumps(row))
    result = CliRunner().invoke(cli, argv, env={"MOONSERVE_URL": "ftp://x"})
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: url: 'ftp://x' is no address; write --url or MOONSERVE_URL"
    )
    assert "env var: MOONSERVE_URL" in " ".join(run(*argv, "--help").stdout.split())
    flagged = CliRunner().invoke(
        cli, [*argv, "--url", "gopher://y"], env={"MOONSERVE_URL": "ftp://x"}
    )
    assert flagged.stderr.startswith("error: url: 'gopher://y' is no address")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_worker_everywhere_must_say_where(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wildcard address cannot be reached: the error names the flag that gives another."""
    monkeypatch.setenv("MOONSERVE_TOKEN", "secret")
    result = run(*WORKER, "--host", host)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: advertise_host: ")
    assert "--advertise-host" in result.stderr


@pytest.mark.parametrize("token", ["sch\u014dn", "two\nlines", "\udcff"])
@pytest.mark.parametrize(
    "argv",
    [
        ["gateway"],
        WORKER,
        ["store", "serve", "--listen", "0"],
        ["segment", "--name", "s", "--store-url", "http://127.0.0.1:1"],
    ],
    ids=" ".join,
)
def test_a_token_that_no_header_can_carry_is_refused(argv: list[str], token: str) -> None:
    """One line names the token but does not show it."""
    result = CliRunner().invoke(cli, argv, env={"MOONSERVE_TOKEN": token})
    assert result.exit_code == 2
    assert result.stderr == (
        "error: token: MOONSERVE_TOKEN has characters beyond Latin-1 or unprintable ones\n"
    )


def test_a_workers_flags_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address, advertised address, token and sizes arrive in the worker's own settings."""
    given: list[tuple[WorkerConfig, StoreSettings]] = []

    async def note(config: WorkerConfig, share: StoreSettings) -> None:
        given.append((config, share))

    monkeypatch.setattr("moonserve.live.process.worker.run_worker", note)
    monkeypatch.setenv("MOONSERVE_TOKEN", "secret")
    flags = ["--host", "0.0.0.0", "--advertise-host", "w0.lan", "--kv-memory-bytes", "2GiB"]
    assert run(*WORKER, *flags, "--segment-bytes", "1MiB", "--rack", "r7").exit_code == 0
    [(config, share)] = given
    assert (config.host, config.advertise_host, config.token) == ("0.0.0.0", "w0.lan", "secret")
    assert (config.kv_memory_bytes, share.capacity_bytes) == (2 << 30, 1 << 20)
    assert (share.host, share.advertise_host, share.token) == ("0.0.0.0", "w0.lan", b"secret")
    assert (config.rack, share.rack, share.port) == ("r7", "r7", 0)


def test_a_gateways_flags_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policy, SLOs and admission reach the gateway; without flags it has the defaults."""
    given: list[GatewayConfig] = []

    async def note(config: GatewayConfig, engines: object) -> None:
        assert engines is None
        given.append(config)

    monkeypatch.setattr("moonserve.live.process.gateway.run_gateway", note)
    flags = ["--policy", "late_binding", "--ttft-slo", "1500.5ms", "--admission", "ttft"]
    assert run("gateway", *flags).exit_code == 0
    assert run("gateway").exit_code == 0
    told, plain = given
    assert (told.tuning.policy, told.tuning.admission) == ("late_binding", "ttft")
    assert told.tuning.slo == Slo(1_500_500, None)
    assert plain.tuning == LIVE


@pytest.mark.parametrize(
    ("host", "joined"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("192.0.2.1", "http://192.0.2.1:8000"),
    ],
)
def test_only_the_gateway_gets_the_public_address(host: str, joined: str) -> None:
    """`up --host` exposes no worker, and gives workers an address that they can connect to."""
    settings = Settings(host=host)
    gateway, *workers = cluster(settings, 8000, child_env(settings))
    assert "--host" not in gateway.argv
    assert gateway.env["MOONSERVE_HOST"] == host
    for worker in workers:
        assert worker.argv[worker.argv.index("--host") + 1] == "127.0.0.1"
        assert worker.argv[worker.argv.index("--gateway") + 1] == joined


def test_up_refuses_a_port_in_use() -> None:
    """A taken port is reported before anything is fetched or started."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run("up", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "port: " in result.stderr


def test_up_refuses_a_folder_that_it_cannot_record_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, or a folder below one, is reported before anything is fetched or started."""
    monkeypatch.setattr("moonserve.cli.up._fetch_model", lambda ref: pytest.fail("too late"))
    (tmp_path / "file").touch()
    result = run("up", "--engine", "fake", "--port", "0", "--record", str(tmp_path / "file" / "x"))
    assert result.exit_code == 2
    assert result.output.startswith(f"error: record: {tmp_path}/file/x: recordings cannot be")
    assert "Not a directory; name another folder" in result.output


def test_up_names_the_flags_of_the_objectives_that_advice_needs() -> None:
    """Before anything is fetched or started."""
    result = run("up", "--engine", "fake", "--port", "0", "--advise")
    assert result.exit_code == 2
    assert "advise: needs objectives: set --ttft-slo or --tbt-slo too" in result.stderr


def test_a_cluster_keeps_secrets_out_of_argv_and_shares_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token travels by environment; threads are divided among the workers."""
    monkeypatch.setattr("moonserve.cli.up._cores", lambda: 8)
    children = cluster(Settings(prefill=2, decode=1), 8000, {"MOONSERVE_TOKEN": "secret"})
    assert [child.name for child in children] == ["gateway", "p0", "p1", "d0"]
    assert all("secret" not in " ".join(child.argv) for child in children)
    assert all(child.env["MOONSERVE_TOKEN"] == "secret" for child in children)
    assert {child.env["OMP_NUM_THREADS"] for child in children} == {"2"}
    assert [child.rank for child in children] == [0, 1, 1, 1]


def test_children_read_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child reads the settings of its parent from its environment, whatever their source."""
    monkeypatch.setenv("MOONSERVE_CONFIG", "/only/the/parent/reads/this.yaml")
    settings = Settings(
        model="m",
        block_size=16,
        kv_memory_bytes=1 << 20,
        drain_s=1.5,
        tbt_slo=2_500,
        logging=Logging("ERROR", {"core.x": "DEBUG"}),
    )
    assert load(None, child_env(settings), {}) == settings


CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "Grüß"}}]},
    {"choices": [{"index": 0, "delta": {"content": " Gott 🌙"}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 2051,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2016},
        },
    },
]
DECISION = {
    "prefill": "p0",
    "decode": "d0",
    "reused_tokens": 2016,
    "holder": "p0",
    "predicted_ttft_ms": 320.4,
    "candidates": [],
    "page": "/ui#/requests/r1",
}


ROW = {"role": "prefill", "model": "tiny", "running": 1, "waiting": 2, "free_blocks": 3}
ROWS = [
    ROW | {"id": name, "url": f"http://{name}", "heard_ms_ago": 250.0, "more": {}}
    for name in ("p1", "p0")
]
LOST = {"id": "e0", "role": "both", "model": "m", "url": "http://e0", "state": "lost", "more": {}}
STANDING = {"leads": True, "term": 7, "instances": 2, "index": "as told by the engines", "me": {}}


class Gateway(BaseHTTPRequestHandler):
    """Answers as a gateway would; `asked` keeps the last chat request."""

    asked: ClassVar[dict[str, Any]] = {}
    drained: ClassVar[list[dict[str, Any]]] = []
    """The replies to the orders to come."""
    events: ClassVar[list[dict[str, Any]]] = CHUNKS
    done = True

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("x-request-id", "r1")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Models and decisions."""
        if self.path == "/v1/models":
            self._send(200, b'{"data": [{"id": "tiny"}]}')
        elif self.path == "/api/decisions/r1":
            self._send(200, json.dumps(DECISION).encode())
        elif self.path == "/api/decisions/a%2Fb":
            self._send(200, b'{"request": "a/b", "outcome": "refused", "why": "Too late."}')
        elif self.path == "/api/instances":
            self._send(200, json.dumps(ROWS).encode())
        elif self.path == "/api/conductor":
            self._send(200, json.dumps(STANDING).encode())
        elif self.path == "/api/decisions/new":
            self._send(200, b'{"request": "new"}')
        else:
            self._send(404, b'{"error": {"message": "no decision is kept"}}')

    def do_POST(self) -> None:
        """A chat, streamed; or an order to an instance."""
        if self.path.endswith(("/drain", "/resume")):
            self._send(200, json.dumps(self.drained.pop(0)).encode())
            return
        type(self).asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.asked["model"] == "nope":
            self._send(404, b'{"error": {"message": "no model nope; there is tiny"}}')
            return
        lines = [f"data: {json.dumps(event)}\n\n" for event in self.events]
        body = "".join(lines) + ("data: [DONE]\n\n" if self.done else "")
        self._send(200, body.encode(), "text/event-stream")


@pytest.fixture
def url() -> Iterator[str]:
    """A scripted gateway's address."""
    server = HTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_ask_prints_the_answer_and_how_it_came_about(url: str) -> None:
    """The text goes to stdout; times, reuse and the decision go to stderr."""
    result = run("ask", "-", "--url", url, "--system", "Be kind.", stdin="Hello?")
    assert result.exit_code == 0
    assert result.stdout == "Grüß Gott 🌙\n"
    assert "5 tokens, reused 2,016 of 2,051 prompt tokens" in result.stderr
    assert (
        "prefill p0 (expected to reuse 2,016 of 2,051 tokens, from p0) → decode d0,"
        " predicted TTFT 320 ms" in result.stderr
    )
    assert f"see this request on the page: {url}/ui#/requests/r1\n" in result.stderr
    roles = [(m["role"], m["content"]) for m in Gateway.asked["messages"]]
    assert roles == [("system", "Be kind."), ("user", "Hello?")]
    assert Gateway.asked["model"] == "tiny"


def test_ask_expects_no_more_reuse_than_there_is_prompt(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed request is placed with what it had generated, which is no part of its prompt."""
    monkeypatch.setitem(DECISION, "reused_tokens", 2_080)
    result = run("ask", "Hello?", "--url", url)
    assert "expected to reuse 2,051 of 2,051 tokens" in result.stderr


def test_ask_names_the_page_only_where_it_is_served(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway with --no-ui reports no page for a request."""
    monkeypatch.setitem(DECISION, "page", None)
    result = run("ask", "Hello?", "--url", url)
    assert "prefill p0" in result.stderr
    assert "page" not in result.stderr


def test_every_flag_shows_what_its_value_is() -> None:
    """A TIME, a URL, a NAME: TEXT is for what a model reads only."""
    texts = []

    def look(command: click.Command, path: str) -> None:
        context = click.Context(command, info_name=path)
        flags = (it for it in command.params if isinstance(it, click.Option) and not it.is_flag)
        texts.extend(f"{path} {it.opts[0]}" for it in flags if it.make_metavar(context) == "TEXT")
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                assert below is not None
                look(below, f"{path} {name}")

    look(cli, "moonserve")
    assert texts == ["moonserve ask --system"]


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_a_url_may_end_as_openais_clients_write_it(url: str, end: str) -> None:
    """All that is printed has the gateway's own address."""
    result = CliRunner().invoke(cli, ["ask", "Hello?"], env={"MOONSERVE_URL": url + end})
    assert f"page: {url}/ui#/requests/r1\n" in result.stderr


def test_ask_json_is_one_object(url: str) -> None:
    """`--json` prints one object with the text, the counts and the decision."""
    result = run("ask", "Hi", "--url", url, "--json", "--model", "tiny")
    got = json.loads(result.stdout)
    assert got["text"] == "Grüß Gott 🌙"
    assert got["cached_tokens"] == 2016
    assert got["decision"] == DECISION
    assert got["request_id"] == "r1"
    assert got["ttft_ms"] > 0


def test_instances_lists_them_and_the_conductors_of_a_registry(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Conductor that does not answer is shown with the reason. The leader comes first."""
    instances = [
        "instance  role     model  url        running  waiting  free blocks      heard",
        "p0        prefill  tiny   http://p0        1        2            3  0.2 s ago",
        "p1        prefill  tiny   http://p1        1        2            3  0.2 s ago",
    ]
    result = run("instances", "--url", url)
    assert (result.exit_code, result.stdout.splitlines()) == (0, instances)

    registry, there = MemoryRegistry(), ["instances", "--registry", "etcd://one"]
    monkeypatch.setenv("MOONSERVE_URL", "http://of.another.command")

    @contextlib.asynccontextmanager
    async def opened(settings: Settings) -> AsyncIterator[MemoryRegistry]:
        assert settings.registry == "etcd://one"
        yield registry

    monkeypatch.setattr(fleet, "opened_registry", opened)
    result = run(*there)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no Conductor is in etcd://one; start one with: moonserve conductor" in result.stderr
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{dead.getsockname()[1]}"
        for entry in (ConductorEntry("a", 1, away, "tiny"), ConductorEntry("b", 2, url, "tiny")):
            asyncio.run(registry.put(CONDUCTORS + entry.name, msgspec.json.encode(entry)))
        asyncio.run(registry.put(LEADER, msgspec.json.encode(LeaderEntry("b", 7))))
        result = run(*there)
        said = result.stdout.splitlines()
        assert result.exit_code == 0
        words = f"b {url} leads in term 7 as told by the engines 2"
        assert said[1].split() == words.split()
        assert said[2].endswith("no answer")
        assert said[3].startswith(f"a: nothing listens at {away}")
        assert said[4:] == ["", *instances]
        found = json.loads(run(*there, "--json").stdout)
        assert [it["name"] for it in found["conductors"]] == ["b", "a"]
        assert [it["id"] for it in found["instances"]] == ["p0", "p1"]
        asyncio.run(registry.remove(CONDUCTORS + "b"))
        result = run(*there)
        assert result.exit_code == 1
        assert "no Conductor of the registry answers" in result.stderr


def test_an_engine_that_has_not_joined_is_listed_with_state_and_reason(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the others stay as they are, so that a script that waits for one finds it."""
    others = [it | {"state": "up", "why": ""} for it in ROWS]
    rows = [*others, LOST | {"why": "GET /health answered 503"}, LOST | {"id": "e1"}]
    monkeypatch.setattr(sys.modules[__name__], "ROWS", rows)
    result = run("instances", "--url", url)
    assert result.exit_code == 0, result.stderr
    said = result.stdout.splitlines()
    assert said[1].split() == ["e0", "both", "m", "http://e0", "lost"]
    assert said[2].split() == ["e1", "both", "m", "http://e0", "lost"]
    assert said[3].endswith("0.2 s ago")
    assert said[5:] == ["e0: lost: GET /health answered 503"]
    found = json.loads(run("instances", "--url", url, "--json").stdout)["instances"]
    assert (found[0]["state"], found[0]["running"]) == ("lost", None)


def drained(state: str, requests: int, blocks: int, warning: str = "") -> dict[str, Any]:
    """The reply to a drain of d0."""
    counts = {"requests": requests, "blocks": blocks}
    return {"instance": "d0", "state": state, "warning": warning} | counts


def test_drain_waits_and_says_what_is_left_and_who_is_missed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning of the gateway goes to stderr, once."""
    monkeypatch.setattr("moonserve.cli.drain._POLL_S", 0)
    replies = [drained("draining", 1, 0, "nobody decodes"), drained("idle", 0, 0, "nobody decodes")]
    monkeypatch.setattr(Gateway, "drained", replies)
    result = run("drain", "d0", "--wait", "--url", url)
    assert (result.exit_code, result.stdout) == (0, "d0 is idle and may be stopped\n")
    said = ["warning: nobody decodes", "d0 still has 1 request and 0 blocks"]
    assert result.stderr.splitlines() == said


@pytest.mark.parametrize(
    ("requests", "blocks", "says"),
    [
        (1, 0, "d0 still has 1 request and 0 blocks after 0.001 s; its requests go on: wait"),
        (0, 2, "d0 still has 0 requests and 2 blocks after 0.001 s; a block moves only if"),
    ],
)
def test_a_drain_that_takes_too_long_says_what_helps(
    requests: int, blocks: int, says: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are spoken of only if some are left."""
    monkeypatch.setattr("moonserve.cli.drain._POLL_S", 0.002)
    replies = [drained("draining", requests, blocks)] * 3
    monkeypatch.setattr(Gateway, "drained", replies)
    result = run("drain", "d0", "--wait", "--timeout", "1ms", "--url", url)
    assert result.exit_code == 1
    assert says in result.stderr


def test_drain_cannot_wait_for_what_it_takes_back(url: str) -> None:
    """The error names both flags, and nothing is sent."""
    result = run("drain", "d0", "--wait", "--resume", "--url", url)
    assert result.exit_code == 2
    assert "--wait: contradicts --resume" in result.stderr


def test_explain_shows_what_the_gateway_says(url: str) -> None:
    """A decision is shown as text, or with --json unchanged; ids may have any characters."""
    result = run("explain", "a/b", "--url", url)
    assert result.exit_code == 0
    assert result.stdout == "request a/b: refused\nToo late.\n"
    assert json.loads(run("explain", "r1", "--url", url, "--json").stdout) == DECISION


@pytest.mark.parametrize(
    ("request_id", "message"),
    [
        ("gone", "error: GET /api/decisions/gone: 404 no decision is kept"),
        ("new", "answers in a form that this version cannot read"),
    ],
)
def test_explain_says_what_it_cannot_show(url: str, request_id: str, message: str) -> None:
    """An unknown request, and a gateway of another version: one line, exit code 1."""
    result = run("explain", request_id, "--url", url)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_ask_shows_the_gateways_own_error(url: str) -> None:
    """A refusal is shown in the gateway's words."""
    result = run("ask", "Hi", "--url", url, "--model", "nope")
    assert result.exit_code == 1
    assert "404 no model nope; there is tiny" in result.stderr


def test_ask_says_when_an_answer_breaks_off(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that ends without its end is an error, not an answer."""
    monkeypatch.setattr(Gateway, "done", False)
    result = run("ask", "Hi", "--url", url)
    assert result.exit_code == 1
    assert "stopped in the middle" in result.stderr


def test_ask_shows_an_error_inside_the_stream(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error event in the stream ends it with that error's message."""
    monkeypatch.setattr(Gateway, "events", [{"error": {"message": "d0 is gone"}}])
    result = run("ask", "Hi", "--url", url)
    assert result.exit_code == 1
    assert "error: d0 is gone" in result.stderr


def test_ask_tells_how_to_start_a_gateway() -> None:
    """If nothing listens, the error says so and gives the remedy."""
    result = run("ask", "Hi", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "start one with: moonserve up" in result.stderr


def test_doctor_says_where_segments_go_that_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small /dev/shm is a warning if the temporary folder takes the segments, with its price."""
    from moonserve.cli.doctor import _shared_memory
    from moonserve.live.transfer import region

    monkeypatch.setattr(region, "folders", lambda: [Path("/proc"), tmp_path])
    (finding,) = _shared_memory()
    assert (finding.verdict, "--shm-size" in finding.remedy) == ("warn", True)
    assert f"segments without room go to {tmp_path}" in finding.detail
    monkeypatch.setattr(region, "folders", lambda: [Path("/proc")])
    assert [it.verdict for it in _shared_memory()] == ["bad"]


def test_doctor_prints_json() -> None:
    """`doctor --json` is a list of findings, each with a verdict."""
    result = run("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert findings["python"]["verdict"] == "ok"
    assert findings["core"]["detail"].startswith(("compiled: ", "Python: "))
    assert set(findings) >= {"torch", "cpu", "cores", "shared memory", "model", "port"}


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (("ask", "\udcff\udcfe"), "prompt"),
        (("ask", "hello", "--temperature", "nan"), "temperature"),
    ],
)
def test_ask_names_what_it_cannot_send(argv: tuple[str, ...], field: str) -> None:
    """Bytes that are no text, and numbers that are none, give one error line each."""
    result = run(*argv)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {field}:")


def test_ask_refuses_stdin_that_is_not_text() -> None:
    """The same holds for input from a pipe."""
    result = CliRunner().invoke(cli, ["ask", "-"], input=b"\xff\xfe bad", prog_name="moonserve")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: prompt:")


def test_up_names_a_host_it_cannot_listen_on() -> None:
    """An address of another machine is an error of --host, not of --port."""
    result = run("up", "--host", "203.0.113.1", "--port", "0", "--open")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: host:")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full: nothing is ever full")
@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["trace", "synthesize", "-n", "9"],
        ["trace", "synthesize", "-n", "9", "-o", "/dev/full"],
        ["trace", "stats", "TRACE", "--json"],
        ["simulate", "TRACE", "--json"],
    ],
)
def test_a_full_disk_is_one_line_and_exit_code_1(argv: list[str], tmp_path: Path) -> None:
    """No traceback, not even from the interpreter's own flush at its end."""
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0]}\n')
    words = [str(trace) if word == "TRACE" else word for word in argv]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "moonserve", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "error: cannot write: No space left on device\n")


@pytest.mark.parametrize(("status", "says"), [(200, "answers, but is no"), (404, "is no")])
def test_what_is_no_moonserve_is_said_in_one_line(
    url: str, monkeypatch: pytest.MonkeyPatch, status: int, says: str
) -> None:
    """A page in HTML gives one error line; it is neither printed nor a traceback."""
    monkeypatch.setattr(
        Gateway, "do_GET", lambda self: self._send(status, b"<html>\n<p>", "text/html")
    )
    result = run("store", "stat", "--url", url)
    assert result.exit_code == 1
    assert url in result.stderr
    assert f"{says} moonserve\n" in result.stderr
    assert result.stderr.count("\n") == 1


def test_flags_that_are_no_settings_reach_the_parts_of_a_gateway() -> None:
    """Engines by flag and the file go to every process as words; settings go by environment."""
    from moonserve.cli.fronts import conductor_and_fronts, flags_of
    from moonserve.config import Settings

    params = {"config": Path("a.yaml"), "port": "0", "url": ("http://a", "http://b")}
    words = flags_of({**params, "prefill_url": (), "events": "off"}, Settings())
    assert words == [
        "--config",
        "a.yaml",
        "--url",
        "http://a",
        "--url",
        "http://b",
        "--events",
        "off",
    ]
    cast = conductor_and_fronts("gateway", "secret", words)
    children = cast.children(Settings(workers=2, port=81), Path("/x"))
    assert [child.name for child in children] == ["conductor", "front0", "front1"]
    first, *fronts = children
    assert " ".join(words) in " ".join(first.argv)
    assert "--socket /x/link --host 127.0.0.1 --port 0" in " ".join(first.argv)
    assert all(child.argv[-3:] == ("--shared", "--config", "a.yaml") for child in fronts)
    assert {child.env["MOONSERVE_CONDUCTOR"] for child in fronts} == {"/x/link"}
    assert {child.env["MOONSERVE_PORT"] for child in fronts} == {"81"}
    assert {child.env["MOONSERVE_TOKEN"] for child in children} == {"secret"}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--conductor", "nowhere"), "conductor: write it like 10.0.0.4:8000, /run/moonserve.sock"),
        (("--conductor", "127.0.0.1:1", "--policy", "random"), "policy: is for the process that"),
        (("--conductor", "127.0.0.1:1", "--url", "http://a"), "url: is for the process that has"),
        (
            ("--conductor", "/nowhere/s", "--conductor-s", "0.1"),
            "conductor: no Conductor accepts fronts at /nowhere/s within 0.1 s: /nowhere/s: cannot"
            " connect: No such file or directory; start `moonserve conductor`, or wait longer",
        ),
    ],
)
def test_a_front_without_a_conductor_ends_with_the_remedy(
    words: tuple[str, ...], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong address, a setting that fronts do not read, and a Conductor that is not there."""
    monkeypatch.setenv("MOONSERVE_TOKEN", "x")
    result = run("gateway", *words)
    assert result.exit_code == 2
    assert wanted in result.stderr
