"""External engines as the settings file and the flags of `moonserve gateway` describe them.

In the file, `instances` is a list of maps with the fields of live.external.spec. Flags only give
addresses. Called by `gateway` and `register`. Every error names the engine, the field, the line and
the remedy.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import msgspec

from moonserve.config import ENV_PREFIX, Settings
from moonserve.core.errors import ConfigError
from moonserve.invalid import in_words

if TYPE_CHECKING:
    from moonserve.live.external.spec import InstanceSpec
    from moonserve.live.kubernetes.sources import Source

_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("--prefill-url", "p", "URL of a vLLM server that only prefills; repeatable"),
    ("--decode-url", "d", "URL of a vLLM server that only decodes; repeatable"),
    ("--url", "e", "URL of a vLLM server that does both; repeatable"),
)
_ROLES: Mapping[str, str] = {"p": "prefill", "d": "decode", "e": "both"}


class Named(msgspec.Struct, frozen=True):
    """The values of the flags that describe engines."""

    prefill_url: tuple[str, ...] = ()
    decode_url: tuple[str, ...] = ()
    url: tuple[str, ...] = ()
    connector: str | None = None
    events: str | None = None
    tokenizer: str | None = None


def instances_options(wanted: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags that describe engines; it gets their values as `named`."""

    @functools.wraps(wanted)
    def command(**params: Any) -> None:
        own = {name: params.pop(name) for name in Named.__struct_fields__}
        wanted(named=Named(**own), **params)

    for flag, text, default in (
        (
            "--tokenizer",
            "files of the engines' model: a name, folder or .gguf; needed for KV events",
            "none",
        ),
        ("--events", "KV events of the engines: off, auto, or tcp://*:PORT", "auto"),
        ("--connector", "how prefill engines pass KV to decode engines: nixl or mooncake", "nixl"),
    ):
        command = click.option(flag, metavar="NAME", help=f"{text} [default: {default}]")(command)
    for flag, _, text in reversed(_FLAGS):
        command = click.option(flag, metavar="URL", multiple=True, help=text)(command)
    return command


def named_by_flags(named: Named, halves: bool = False) -> list[InstanceSpec]:
    """The engines that the flags describe: p0, p1, …, d0, …, e0, …; none without an address.

    halves: prefill engines may come without decode engines, which are described elsewhere. Raises
    ConfigError.
    """
    prefill_url, decode_url, url, connector, events, tokenizer = msgspec.structs.astuple(named)
    urls = [
        (f"{kind}{number}", kind, flag, address)
        for (flag, kind, _), given in zip(_FLAGS, (prefill_url, decode_url, url), strict=True)
        for number, address in enumerate(given)
    ]
    if not urls:
        for field in ("connector", "events", "tokenizer"):
            if getattr(named, field) is not None:
                remedy = "is for external engines: give their addresses, such as --prefill-url"
                raise ConfigError(remedy, f"--{field}")
        return []
    if bool(prefill_url) != bool(decode_url) and not halves:
        lacking = "--decode-url" if prefill_url else "--prefill-url"
        raise ConfigError("is missing: prefill and decode engines need each other", lacking)
    if connector is not None and not prefill_url and not decode_url:
        raise ConfigError("is for --prefill-url and --decode-url; leave it out", "--connector")
    if events not in (None, "off", "auto") and "*" not in (events or "") and len(urls) > 1:
        raise ConfigError(
            "must be auto or tcp://*:PORT for several engines; or describe them in a file",
            "--events",
        )
    found: list[InstanceSpec] = []
    for name, kind, flag, address in urls:
        fields = {
            "name": name,
            "url": address,
            "role": _ROLES[kind],
            "connector": "none" if kind == "e" else connector or "nixl",
            "events": _own(events or "auto", address),
            "tokenizer": tokenizer or "",
        }
        spec = _of_flag(fields, flag)
        if twin := _twin(spec, found):
            raise ConfigError(f"{address} is {twin} already; give each engine once", flag)
        found.append(spec)
    return found


def _twin(spec: InstanceSpec, found: Sequence[InstanceSpec]) -> str | None:
    """The name of the engine at the same URL, if there is one."""
    return next((it.name for it in found if it.place() == spec.place()), None)


def _of_flag(fields: dict[str, Any], flag: str) -> InstanceSpec:
    named = {"url": flag} | {it: f"--{it}" for it in ("connector", "events", "tokenizer")}
    return _described(fields, lambda field: named.get(field, field))


def engines_of(
    settings: Settings,
    file: Path | None,
    by_flags: Sequence[InstanceSpec],
    model: str | None = None,
) -> list[InstanceSpec] | None:
    """All external engines of a gateway; None: it serves with workers.

    model: the value of --model, if it was given. Raises ConfigError.
    """
    if settings.instances is None and settings.kubernetes is None and not by_flags:
        return None
    for name in ("store", "store_url"):
        if getattr(settings, name) != getattr(Settings(), name):
            remedy = (
                "is for workers, but external engines are described too: leave one of the two out"
            )
            raise ConfigError(remedy, name)
    named = os.environ.get(ENV_PREFIX + "CONFIG")
    file = file or (Path(named) if named else None)
    found = named_in_file(settings.instances or (), file)
    for spec in by_flags:
        if spec.name in [it.name for it in found]:
            raise ConfigError(
                f"the file and the flags both have an engine {spec.name}; rename it in the file",
                "instances",
            )
        if twin := _twin(spec, found):
            raise ConfigError(
                f"{spec.url} is {twin} in the file already; remove one of the two", "instances"
            )
    if model and not settings.instances and not by_flags:
        remedy = (
            "is for engines that a file or flags describe; give each engine its own model instead"
        )
        raise ConfigError(remedy, "model")
    if model is None and settings.model != Settings().model:
        model = settings.model
    # Every engine must serve the model that was given; the handshake checks that.
    engines = [*found, *by_flags]
    return [msgspec.structs.replace(it, model=it.model or model or "") for it in engines]


def sources_of(settings: Settings) -> tuple[Source, ...]:
    """Where Kubernetes lists external engines, as `kubernetes` in the file says. Raises
    ConfigError."""
    from moonserve.live.kubernetes.sources import Source

    found: list[Source] = []
    model = {} if settings.model == Settings().model else {"model": settings.model}
    for number, entry in enumerate(settings.kubernetes or ()):
        try:
            source = msgspec.convert(entry, Source).checked()
            found.append(msgspec.structs.replace(source, each={**model, **source.each}))
        except msgspec.ValidationError as error:
            field, what = in_words(error, Source)
            raise ConfigError(what, f"kubernetes[{number}].{field}".rstrip(".")) from None
        except ConfigError as error:
            what = str(error).removeprefix(f"{error.field}: ")
            raise ConfigError(what, f"kubernetes[{number}].{error.field}") from None
    return tuple(found)


def by_address(url: str) -> str:
    """A name for the engine at this URL, like 10.0.0.5-8000."""
    place = urlsplit(url).netloc.rpartition("@")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", place).strip("-")


def _own(events: str, address: str) -> str:
    """The address of the KV events, with the engine's host for * as in tcp://*:PORT."""
    host = urlsplit(address).hostname or ""
    return events.replace("*", f"[{host}]" if ":" in host else host, 1)


def named_in_file(entries: Sequence[Mapping[str, object]], file: Path | None) -> list[InstanceSpec]:
    """The engines of a file's `instances`. Raises ConfigError."""
    found: list[InstanceSpec] = []
    for number, entry in enumerate(entries):

        def place(field: str, number: int = number) -> str:
            line = None if file is None else _line(file.read_text(), number, field)
            return f"instances[{number}].{field}" + (f" (line {line})" if line else "")

        spec = _described(dict(entry), place)
        if spec.name in [it.name for it in found]:
            raise ConfigError(
                f"{spec.name} is the name of an engine above; choose another", place("name")
            )
        if twin := _twin(spec, found):
            what = f"{spec.url} is {twin} already: remove {twin} or {spec.name}"
            raise ConfigError(what, place("url"))
        found.append(spec)
    return found


def _described(fields: dict[str, Any], place: Callable[[str], str]) -> InstanceSpec:
    from moonserve.live.external.spec import InstanceSpec

    if fields.get("events") is False:  # YAML reads off as False
        fields["events"] = "off"
    try:
        return msgspec.convert(fields, InstanceSpec).checked()
    except msgspec.ValidationError as error:
        field, what = in_words(error, InstanceSpec)
        if field in fields and hasattr(InstanceSpec, field):
            what += f" (not {fields[field]!r})"
        raise ConfigError(what, place(field)) from None
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix(f"{error.field}: "), place(error.field)) from None


def _line(text: str, number: int, field: str) -> int | None:
    """The line of an engine's field in the file; the engine's own line if it lacks the field."""
    import yaml

    engines = next((value for key, value in _pairs(yaml.compose(text)) if key == "instances"), None)
    if not isinstance(engines, yaml.SequenceNode) or number >= len(engines.value):
        return None
    engine = engines.value[number]
    at = next((value for key, value in _pairs(engine) if key == field), engine)
    return int(at.start_mark.line) + 1


def _pairs(node: Any) -> list[tuple[str, Any]]:
    """The keys of a YAML map, with the nodes of their values; empty for another node."""
    import yaml

    return [(key.value, it) for key, it in node.value] if isinstance(node, yaml.MappingNode) else []
