"""Names and passwords in URLs: refused where a URL comes in, and shown nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from moonserve.cli.client import Client
from moonserve.cli.instances import Named, by_address, named_by_flags
from moonserve.core.errors import BadRequest, ConfigError
from moonserve.core.schedule.conductor import Conductor
from moonserve.invalid import without_password
from moonserve.live.control.join import Internal
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.external.registry_engines import register
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import check_url
from moonserve.live.registry.entries import ENGINES
from moonserve.live.registry.etcd import parse
from tests.support.cluster import info
from tests.support.registry import MemoryRegistry

SECRET = "hunter2"
FORMS = (
    f"http://me:{SECRET}@host:8000",
    f"http://{SECRET}@host:8000",
    f"http://me:{SECRET}@:8000",
    f"ftp://me:{SECRET}@host",
    f"http://me:{SECRET}@host:port",
    f"http://me:p@{SECRET}@host:8000/v1",
)


def engine(**fields: str) -> InstanceSpec:
    """A description of an engine that is right but for these fields."""
    right = {"name": "e", "url": "http://host:8000", "tokenizer": "t"}
    return msgspec.convert(right | fields, InstanceSpec).checked()


def joined(url: str) -> None:
    """A worker with this URL joins."""
    loop = ConductorLoop(Conductor(), lambda lease: None)
    worker = msgspec.structs.replace(info("p0", "prefill"), url=url)
    Internal(loop, ["m"]).admit(worker)


ENTRANCES: dict[str, Callable[[str], object]] = {
    "url": lambda url: engine(url=url),
    "bootstrap": lambda url: engine(bootstrap=url),
    "events": lambda url: engine(events=url.replace("http", "tcp")),
    "replay": lambda url: engine(events="tcp://h:5557", replay=url.replace("http", "tcp")),
    "--url": lambda url: named_by_flags(Named(url=(url,))),
    "gateway": lambda url: check_url(url, "gateway"),
    "registry": lambda url: parse(url.replace("http", "etcd")),
    "registry of another form": parse,
    "a command's --url": lambda url: Client(url, token=""),
    "a worker's URL": joined,
}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("url", FORMS)
def test_a_url_with_a_password_is_refused_and_not_shown(url: str, entrance: str) -> None:
    """The error has the URL without what may be a secret."""
    with pytest.raises((ConfigError, BadRequest)) as caught:
        ENTRANCES[entrance](url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", FORMS)
def test_the_rest_of_a_url_is_shown(url: str) -> None:
    """A user finds the URL again by its host. A URL without a password is shown as it is."""
    shown = without_password(url)
    assert SECRET not in shown
    assert shown.endswith("***@" + url.rpartition("@")[2])
    for plain in ("http://host:8000/a", "etcd://a,b/x", "host:1", ""):
        assert without_password(plain) == plain


def test_a_list_of_the_registry_shows_no_password() -> None:
    """Anybody may have written an entry; a command that replaces it prints the URL it had."""

    async def main() -> None:
        registry = MemoryRegistry()
        before = {"name": "e", "url": f"http://me:{SECRET}@host:8000"}
        await registry.put(ENGINES + "e", msgspec.json.encode(before))
        changed = await register(registry, [engine(url="http://host:8001")])
        assert changed == {"e": "http://***@host:8000"}

    asyncio.run(main())


def test_a_name_is_not_made_of_a_password() -> None:
    """`moonserve register` names an engine by its address."""
    assert by_address(f"http://me:{SECRET}@host:8000") == "host-8000"
