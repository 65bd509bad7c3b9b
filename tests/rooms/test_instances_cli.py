"""How a file and flags describe external engines, and which errors mistakes give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.cli.fronts import flags_of
from moonserve.cli.instances import Named, engines_of, named_by_flags
from moonserve.config import Settings, load
from moonserve.core.errors import ConfigError
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.registry import entries
from tests.support.registry import MemoryRegistry, Shared

FILE = """port: 0
instances:
  - name: p0
    url: http://10.0.0.5:8100
    role: prefill
    connector: mooncake
    tokenizer: smollm2-135m-instruct
    events: tcp://10.0.0.5:5557
    replay: tcp://10.0.0.5:6557
    dp_size: 2
  - name: d0
    url: http://10.0.0.6:8200
    role: decode
    connector: mooncake
    events: off
"""


def read(text: str, tmp_path: Path) -> list[InstanceSpec] | None:
    """The engines of a file."""
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return engines_of(load(file, {}, {}), file, [])


def test_a_file_names_engines(tmp_path: Path) -> None:
    """Each rank has its own port and id; YAML's off means events: off."""
    found = read(FILE, tmp_path)
    assert found is not None
    prefill, decode = found
    assert prefill.ids() == ["p0/dp0", "p0/dp1"]
    assert (prefill.events_of(1), prefill.replay_of(1)) == (
        "tcp://10.0.0.5:5558",
        "tcp://10.0.0.5:6558",
    )
    assert (prefill.bootstrap_url(), decode.bootstrap_url()) == ("http://10.0.0.5:8998", "")
    assert (decode.ids(), decode.events_of(0), decode.role) == (["d0"], "", "decode")
    assert read("port: 0\n", tmp_path) is None
    assert read("instances: []\n", tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name: p0", "name: p 0", "instances[0].name (line 3): 'p 0' is not a valid name"),
        ("name: d0", "name: p0", "instances[1].name (line 11): p0 is the name of an engine above"),
        (
            "url: http://10.0.0.6:8200",
            "url: http://10.0.0.5:8100/",
            "instances[1].url (line 12): http://10.0.0.5:8100/ is p0 already: remove p0",
        ),
        ("    url: http://10.0.0.6:8200\n", "", "instances[1].url (line 11): is missing"),
        ("url: http://10.0.0.6", "url: 10.0.0.6", "instances[1].url (line 12): '10.0.0.6:8200' is"),
        (
            "role: decode",
            "role: decoder",
            "instances[1].role (line 13): must be both, decode or prefi",
        ),
        (
            "role: decode",
            "roles: decode",
            "instances[1].roles (line 13): there is no such field; did you mean role?",
        ),
        (
            "connector: mooncake\n    events",
            "connector: none\n    events",
            "(line 14): role dec",
        ),
        (
            "connector: mooncake\n    events",
            "connector: sglang\n    events",
            "use nixl, mooncak",
        ),
        (
            "tcp://10.0.0.5:5557",
            "10.0.0.5:5557",
            "instances[0].events (line 8): '10.0.0.5:5557' ",
        ),
        ("tcp://10.0.0.5:5557", "tcp://10.0.0.5:65535", "and 2 ranks do not fit below 65536"),
        (
            "    tokenizer: smollm2-135m-instruct\n",
            "",
            "instances[0].tokenizer (line 3): is need",
        ),
        ("dp_size: 2", "dp_size: two", "instances[0].dp_size (line 10): must be a whole number"),
        (
            "dp_size: 2",
            "block_size: 0",
            "instances[0].block_size (line 10): must be 1 or more (not 0)",
        ),
        (
            "dp_size: 2",
            "api_key_env: sk-123",
            "(line 10): is not the name of a variable; name the environ",
        ),
        (
            "events: off",
            "events: off\n    replay: tcp://a:1",
            "(line 16): leave it out with event",
        ),
        ("instances:\n", "instances: 3\nx:\n", "unknown setting"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    """Every error names the engine, the field, its line, and the remedy."""
    assert FILE.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        read(FILE.replace(old, new), tmp_path)
    assert says in str(caught.value), caught.value


def flags(**given: Any) -> list[InstanceSpec]:
    """named_by_flags, with the flags that are not given empty."""
    return named_by_flags(Named(**given))


def test_flags_name_addresses_only() -> None:
    """Prefill and decode use NIXL by default; * stands for each engine's own host."""
    found = flags(
        prefill_url=("http://a:1",),
        decode_url=("http://b:2", "http://c:3"),
        events="tcp://*:7000",
        tokenizer="t",
    )
    assert [(it.name, it.role, it.connector) for it in found] == [
        ("p0", "prefill", "nixl"),
        ("d0", "decode", "nixl"),
        ("d1", "decode", "nixl"),
    ]
    assert [it.events for it in found] == ["tcp://a:7000", "tcp://b:7000", "tcp://c:7000"]
    (alone,) = flags(url=("http://a:1",))
    assert (alone.name, alone.role, alone.connector, alone.events) == ("e0", "both", "none", "auto")
    assert flags() == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"prefill_url": ("http://a:1",)},
            "--decode-url: is missing: prefill and decode engines need each other",
        ),
        ({"connector": "nixl"}, "--connector: is for external engines"),
        ({"url": ("http://a", "http://A:80/")}, "--url: http://A:80/ is e0 already"),
        ({"url": ("a:1",)}, "--url: 'a:1' is no address"),
        ({"url": ("http://a:1/v1",)}, "--url: 'http://a:1/v1' ends with /v1; leave that out"),
        ({"url": ("http://a:1",), "connector": "nixl"}, "--connector: is for --prefill-url"),
        ({"url": ("http://a:1",), "events": "on"}, "--events: 'on' is not an endpoint"),
        (
            {"url": ("http://a:1", "http://b:1"), "events": "tcp://a:1"},
            "--events: must be auto or ",
        ),
        (
            {"prefill_url": ("http://a:1",), "decode_url": ("http://b:1",), "connector": "nxl"},
            "--connector: must be mooncake, nixl, none or sglang",
        ),
    ],
)
def test_a_wrong_flag_is_named(given: dict[str, Any], says: str) -> None:
    """The error names the flag and the remedy."""
    with pytest.raises(ConfigError) as caught:
        flags(**given)
    assert str(caught.value).startswith(says), caught.value


def test_the_model_that_is_asked_for_is_what_engines_must_serve(tmp_path: Path) -> None:
    """--model, or the setting where it is not the default, holds for every engine that says none
    itself; the default named aloud counts; of nobody it is an error."""
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE.replace("name: d0", "name: d0\n    model: own"))
    default = load(None, {}, {})

    def served(model: str | None, settings: Settings, file: Path | None) -> list[str]:
        by_flags = flags(url=("http://a:1",))
        return [it.model for it in engines_of(settings, file, by_flags, model) or ()]

    assert served("big", load(file, {}, {"model": "big"}), file) == ["big", "own", "big"]
    assert served(None, load(None, {"MOONSERVE_MODEL": "big"}, {}), None) == ["big"]
    assert served(None, default, None) == [""]
    assert served(default.model, default, None) == [default.model]
    with pytest.raises(ConfigError, match=r"^model: is for engines that a file or flags describe"):
        engines_of(msgspec.structs.replace(default, instances=()), None, [], "big")
    words = flags_of({"model": default.model, "url": ("http://a:1",), "config": None}, default)
    assert words == ["--model", default.model, "--url", "http://a:1"]


def test_what_only_workers_of_ours_have_is_refused_beside_engines(tmp_path: Path) -> None:
    """A store for workers excludes external engines; two engines cannot share a name."""
    with pytest.raises(ConfigError, match=r"^store: is for workers, but"):
        read("store: mooncake\n" + FILE, tmp_path)
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE)
    both = flags(prefill_url=("http://a:1",), decode_url=("http://b:1",))
    with pytest.raises(ConfigError, match="the file and the flags both have an engine p0"):
        engines_of(load(file, {}, {}), file, both)


def test_register_names_by_address_and_says_what_it_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two addresses are two engines; the later of a name replaces the earlier."""
    shared = Shared()

    async def open_one(*_: object) -> MemoryRegistry:
        return MemoryRegistry(shared)

    monkeypatch.setattr(entries, "open_registry", open_one)

    def call(*argv: str) -> str:
        given = ["register", "--registry", "etcd://x", *argv]
        ran = CliRunner().invoke(cli, given)  # by itself it would keep another -h
        return ran.output or str(ran.exception)

    assert call("--url", "http://10.0.0.5:8000") == "registered: 10.0.0.5-8000\n"
    assert call("--prefill-url", "http://[::1]:80", "--name", "p") == "registered: p\n"
    says = "registered: p (replaced the one at http://[::1]:80)\n"
    assert call("--prefill-url", "http://b:80", "--name", "p") == says
    assert call("--url", "http://b:80") == (
        "error: url: http://b:80 is registered as p; "
        "remove that first, or describe it anew under that name\n"
    )
    assert call("--url", "http://c:80", "--url", "http://d:80", "--name", "p").startswith(
        "error: --name:"
    )
    assert sorted(shared.entries) == ["engines/10.0.0.5-8000", "engines/p"]
