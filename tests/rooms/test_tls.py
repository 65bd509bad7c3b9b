"""TLS: the authority's files, handshakes that succeed and that fail, and files that change."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509

from moonserve.core.errors import ConfigError
from moonserve.live.external.spec import InstanceSpec, normal
from moonserve.live.http import handshakes
from moonserve.live.http.client import HttpClient, UpstreamError
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import App, serve
from moonserve.live.tls import contexts
from moonserve.live.tls.authority import ROLES, init
from moonserve.live.tls.contexts import ClientAuth, ServerTrust, Tls, TlsFiles, trusting
from tests.support.certificates import tls_of
from tests.support.loops import both_loops as both_loops


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an authority, and certificates of all roles."""
    init(tmp_path / "ours")
    return tmp_path / "ours"


@asynccontextmanager
async def listening(
    tls: Tls | None,
    clients: ClientAuth = "required",
    host: str = "127.0.0.1",
) -> AsyncIterator[str]:
    """A server; gives its port, as text."""

    async def hello(request: HttpRequest) -> Response:
        return Response(body=b"hello")

    routes = {("GET", "/x"): hello, ("GET", "/internal/x"): hello}
    app = App(routes, certified=("/internal/",) if clients != "none" else ())
    server = await serve(app, host, 0, tls=tls.listener(clients) if tls else None)
    try:
        yield str(server.port)
    finally:
        await server.stop(0)


async def get(url: str, trust: ServerTrust) -> tuple[int, bytes]:
    """Status and body of one GET on a connection of its own."""
    client = HttpClient(trust)
    try:
        async with asyncio.timeout(5):
            reply = await client.request("GET", url, timeout_s=5)
        return reply.status, reply.body
    finally:
        await client.close()


async def error_of(url: str, trust: ServerTrust) -> str:
    """What the client says if the GET fails."""
    with pytest.raises(UpstreamError) as caught:
        await get(url, trust)
    return str(caught.value)


def contents(folder: Path) -> dict[str, bytes]:
    """All files, by their path in the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_init_makes_files_that_only_their_owner_reads(folder: Path) -> None:
    """Keys are 0600 in a folder of 0700; every certificate is the authority's, for this machine."""
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    for role in ROLES:
        made = x509.load_pem_x509_certificate((folder / f"{role}.crt").read_bytes())
        made.verify_directly_issued_by(authority)
        names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["localhost"]
        addresses = [str(it) for it in names.get_values_for_type(x509.IPAddress)]
        assert addresses == ["127.0.0.1", "::1"]
    for path in (folder / "events").glob("*.key_secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_init_overwrites_only_what_it_is_asked_to(folder: Path) -> None:
    """Without a flag nothing changes; renew keeps the authority; force replaces all."""
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"exists; --renew makes new certificates .* --force"):
        init(folder)
    assert contents(folder) == before
    init(folder, ["gw.example", "10.0.0.5"], renew=True)
    same = {name for name, content in contents(folder).items() if before[name] == content}
    assert {"ca.crt", "ca.key", "events/publisher.key"} <= same
    assert not same & {f"{role}.crt" for role in ROLES}
    made = x509.load_pem_x509_certificate((folder / "gateway.crt").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "gw.example" in names.get_values_for_type(x509.DNSName)
    init(folder, force=True)
    assert all(content != before[name] for name, content in contents(folder).items())
    with pytest.raises(ConfigError, match="write a name or an address"):
        init(folder, ["http://gw"], renew=True)


def test_wrong_files_are_named(folder: Path, tmp_path: Path) -> None:
    """An error names the setting and the file, and never asks for a password."""
    cert, key = folder / "worker.crt", folder / "worker.key"
    with pytest.raises(ConfigError, match=r"tls_cert: cannot read .*none.crt: No such file"):
        Tls(TlsFiles(folder / "none.crt", key))
    with pytest.raises(ConfigError, match=r"tls_cert: .* they do not belong together"):
        Tls(TlsFiles(cert, folder / "store.key"))
    with pytest.raises(ConfigError, match=r"tls_ca: cannot use .*: it must be a PEM file"):
        Tls(TlsFiles(cert, key, key))
    with pytest.raises(ConfigError, match="engine_ca: cannot read"):
        trusting(str(folder / "none.crt"))


def test_members_reach_each_other(folder: Path) -> None:
    """A client with a certificate of the authority is served, by address and by name."""

    async def main() -> None:
        async with listening(tls_of(folder, "gateway")) as port:
            for host in ("127.0.0.1", "localhost"):
                trust = tls_of(folder, "worker").trust
                assert await get(f"https://{host}:{port}/x", trust) == (200, b"hello")

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_wrong_server_is_refused_with_its_reason(folder: Path, tmp_path: Path) -> None:
    """The client names the host, what is wrong with its certificate, and the setting."""

    async def main() -> None:
        trust = tls_of(folder, "worker").trust
        init(tmp_path / "theirs")
        async with listening(tls_of(tmp_path / "theirs", "gateway")) as port:
            said = await error_of(f"https://127.0.0.1:{port}/x", trust)
            assert said.startswith(f"certificate verify failed for 127.0.0.1:{port}: ")
            assert said.endswith("set --tls-ca to the certificate of the authority that signed it")
            said = await error_of(f"https://127.0.0.1:{port}/x", trusting(""))
            assert "set --engine-ca" in said
        async with listening(tls_of(folder, "gateway"), host="127.0.0.2") as port:
            said = await error_of(f"https://127.0.0.2:{port}/x", trust)
            assert "not valid for '127.0.0.2'" in said
        init(folder, days=-1, renew=True)
        async with listening(tls_of(folder, "gateway")) as port:
            said = await error_of(f"https://127.0.0.1:{port}/x", trust)
            assert "certificate has expired" in said

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_client_alone_is_no_server(folder: Path) -> None:
    """The certificate of a client cannot be used to pose as a server of the cluster."""

    async def main() -> None:
        async with listening(tls_of(folder, "client")) as port:
            said = await error_of(f"https://127.0.0.1:{port}/x", tls_of(folder, "worker").trust)
            assert "unsuitable certificate purpose" in said or "unsupported" in said

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_wrong_client_is_refused_with_its_reason(folder: Path, tmp_path: Path) -> None:
    """No certificate, an expired one, or one of another authority: no request is served."""

    async def main() -> None:
        ours = tls_of(folder, "gateway")
        init(tmp_path / "theirs")
        shutil.copytree(folder, tmp_path / "old")
        init(tmp_path / "old", days=-1, renew=True)
        async with listening(ours) as port:
            url = f"https://127.0.0.1:{port}/x"
            said = await error_of(url, trusting(str(folder / "ca.crt")))
            assert f"127.0.0.1:{port}: closed after the TLS handshake" in said
            assert "set --tls-cert and --tls-key" in said
            for other in ("theirs", "old"):
                cert, key = tmp_path / other / "worker.crt", tmp_path / other / "worker.key"
                trust = Tls(TlsFiles(cert, key, folder / "ca.crt")).trust
                said = await error_of(url, trust)
                assert f"it may not accept {cert}, by its authority or its dates" in said

    asyncio.run(asyncio.wait_for(main(), 30))


def test_only_members_call_internal_paths(folder: Path, tmp_path: Path) -> None:
    """With client auth optional, clients need no certificate, but internal paths do."""

    async def main() -> None:
        public = trusting(str(folder / "ca.crt"))
        member = tls_of(folder, "worker").trust
        async with listening(tls_of(folder, "gateway"), "optional") as port:
            url = f"https://127.0.0.1:{port}"
            assert await get(f"{url}/x", public) == (200, b"hello")
            assert await get(f"{url}/internal/x", member) == (200, b"hello")
            for path in ("/internal/x", "/%69nternal/x"):
                status, body = await get(url + path, public)
                assert status == 403
                assert b"needs a client certificate" in body
        async with listening(tls_of(folder, "gateway"), "none") as port:
            assert (await get(f"https://127.0.0.1:{port}/internal/x", public))[0] == 200

    asyncio.run(asyncio.wait_for(main(), 30))


def test_plain_and_tls_do_not_hang_on_each_other(folder: Path) -> None:
    """Whoever speaks the other language gets an error at once that says what to write."""

    async def main() -> None:
        async with listening(tls_of(folder, "gateway")) as port:
            said = await error_of(f"http://127.0.0.1:{port}/x", trusting(""))
            assert said.startswith(
                f"127.0.0.1:{port}: closed before a reply; if it speaks TLS, write"
            )
        async with listening(None) as port:
            trust = tls_of(folder, "worker").trust
            said = await error_of(f"https://127.0.0.1:{port}/x", trust)
            assert said.startswith(f"127.0.0.1:{port} does not speak TLS; write http://")
            with pytest.raises(ConfigError, match="this process uses TLS; write https://"):
                await get(f"http://127.0.0.1:{port}/x", trust)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_silent_handshake_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that connects and is silent is dropped, at either end."""

    async def main() -> None:
        monkeypatch.setattr(handshakes, "HANDSHAKE_S", 0.1)
        monkeypatch.setattr("moonserve.live.http.client.HANDSHAKE_S", 0.1)
        async with listening(tls_of(folder, "gateway")) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
        over = asyncio.Event()
        silent = await asyncio.start_server(lambda r, w: over.wait(), "127.0.0.1", 0)  # type: ignore[arg-type]
        port = silent.sockets[0].getsockname()[1]
        said = await error_of(f"https://127.0.0.1:{port}/x", tls_of(folder, "worker").trust)
        assert "SSL handshake is taking longer than" in said
        over.set()
        silent.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_silent_handshakes_hold_up_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of too many handshakes is dropped; a member is served meanwhile."""
    monkeypatch.setattr(handshakes, "_MOST_OF_ONE", 5)

    async def main() -> None:
        async with listening(tls_of(folder, "gateway")) as port:
            silent = [await asyncio.open_connection("127.0.0.1", int(port)) for _ in range(20)]
            for reader, _ in silent[:15]:
                assert await reader.read() == b""
            trust = tls_of(folder, "worker").trust
            assert await get(f"https://127.0.0.1:{port}/x", trust) == (200, b"hello")
            for _, writer in silent:
                writer.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_the_log_has_the_reason_of_a_failed_handshake(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No certificate, one of another authority, and no TLS at all: each gives a line."""

    async def main() -> None:
        init(tmp_path / "theirs")
        foreign = tmp_path / "theirs" / "worker.crt", tmp_path / "theirs" / "worker.key"
        async with listening(tls_of(folder, "gateway")) as port:
            url = f"https://127.0.0.1:{port}/x"
            await error_of(url, trusting(str(folder / "ca.crt")))
            await error_of(url, Tls(TlsFiles(*foreign, folder / "ca.crt")).trust)
            await error_of(url.replace("https", "http"), trusting(""))
            while len(caplog.messages) < 3:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert caplog.messages[0].startswith("127.0.0.1: TLS handshake failed: it has shown no cert")
    assert "its certificate is not accepted: " in caplog.messages[1]
    assert caplog.messages[2].endswith("it must use https://")


async def serial_of(port: str, ca: Path) -> int:
    """The serial number of the certificate that a server shows to a new connection."""
    context = ssl.create_default_context(cafile=str(ca))
    _, writer = await asyncio.open_connection("127.0.0.1", int(port), ssl=context)
    raw = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(raw).serial_number


def test_changed_files_are_used_without_a_restart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """New handshakes use the new files, of servers and clients; wrong ones are logged once."""

    async def main() -> None:
        monkeypatch.setattr(contexts, "_LOOK_S", 0)
        gateway, worker = tls_of(folder, "gateway"), tls_of(folder, "worker")
        async with listening(gateway) as port:
            url = f"https://127.0.0.1:{port}/x"
            old = await serial_of(port, folder / "ca.crt")
            assert await serial_of(port, folder / "ca.crt") == old
            init(folder, renew=True)
            new = await serial_of(port, folder / "ca.crt")
            assert new != old
            (folder / "gateway.crt").write_text("no certificate")
            with caplog.at_level(logging.ERROR):
                for _ in range(3):
                    assert await serial_of(port, folder / "ca.crt") == new
            errors = [it.getMessage() for it in caplog.records if it.levelno == logging.ERROR]
            assert len(errors) == 1
            assert "the old ones stay in use: tls_cert: cannot use" in errors[0]
            os.unlink(folder / "gateway.key")
            assert await get(url, worker.trust) == (200, b"hello")
            init(folder, force=True)  # a new authority: both ends follow it
            assert await get(url, worker.trust) == (200, b"hello")
            assert await serial_of(port, folder / "ca.crt") not in (old, new)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_engines_may_have_https_urls(folder: Path) -> None:
    """An https:// URL is an engine's address like any other, with a port of its own kind."""
    engine = InstanceSpec(name="e", url="https://engine.example").checked()
    assert engine.place() == "https://engine.example:443"
    assert normal("http://engine.example/") == "http://engine.example:80"
    with pytest.raises(ConfigError, match="url: 'ftp://e' is no address"):
        InstanceSpec(name="e", url="ftp://e").checked()
