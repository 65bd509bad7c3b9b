"""Files of others: models, traces, settings. A bad one gives a ConfigError, and nothing else."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hypothesis import example
from hypothesis import strategies as st

from moonserve.cli.instances import named_in_file
from moonserve.config import FIELDS, load
from moonserve.core.errors import ConfigError
from moonserve.live.engine.weights import FolderSource
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.model.config import load_config
from moonserve.live.model.gguf import open_gguf
from moonserve.live.text.tokenizer import load_tokenizer
from moonserve.sim.trace import read_trace, validate
from tests.fuzz.cases import damaged, fuzz, in_time, numbers, words
from tests.support.tiny import tiny_config, write_folder, write_gguf, write_gguf_model

with TemporaryDirectory() as _folder:
    _here = Path(_folder)
    GGUF = write_gguf_model(_here / "m.gguf").read_bytes()
    SMALL = write_gguf(
        _here / "s.gguf",
        {"a": "x", "n": 3, "t": ["b", "c"], "general.alignment": 32},
        {
            "w": ("Q4_1", (2, 32), bytes(40)),
            "v": ("F32", (2,), bytes(8)),
            "q": ("Q8_0", (1, 32), bytes(34)),
        },
    ).read_bytes()
    TENSORS = (write_folder(_here / "f") / "model.safetensors").read_bytes()
REST = GGUF[4096:]


@contextlib.contextmanager
def file_of(data: bytes, name: str) -> Any:
    """A file with these bytes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


@fuzz(st.tuples(damaged(SMALL), st.just(b"")) | st.tuples(damaged(GGUF[:4096]), st.just(REST)))
def test_gguf(parts: tuple[bytes, bytes]) -> None:
    """A GGUF file gives its tensors and its configuration, or a ConfigError."""
    data = b"".join(parts)
    with in_time(), file_of(data, "m.gguf") as path, contextlib.suppress(ConfigError):
        file = open_gguf(path)
        for name in file.tensors:
            with contextlib.suppress(ConfigError):
                file.load(name)
                file.quants(name)
        with contextlib.suppress(ConfigError):
            load_config(path)
        load_tokenizer(path)


@fuzz(damaged(TENSORS[:2048]))
def test_safetensors(head: bytes) -> None:
    """A .safetensors file gives its tensors, or a ConfigError."""
    data = head + TENSORS[2048:]
    with in_time(), file_of(data, "model.safetensors") as path, contextlib.suppress(ConfigError):
        FolderSource(path.parent).tensor("model.norm.weight")


CONFIG_VALUES = (
    st.none() | st.booleans() | numbers | st.floats() | words | st.just({}) | st.just([])
)


@fuzz(st.dictionaries(st.sampled_from(list(tiny_config())), CONFIG_VALUES, max_size=3))
def test_model_config(changes: dict[str, Any]) -> None:
    """A model's config.json gives a configuration, or a ConfigError."""
    text = json.dumps(tiny_config() | changes).encode()
    with in_time(), file_of(text, "config.json") as path, contextlib.suppress(ConfigError):
        load_config(path.parent)


ROW = (
    b'{"timestamp": 27, "input_length": 1400, "output_length": 52, "hash_ids": [46, 47, 48],'
    b' "priority": 1, "tenant": "a"}\n'
)
TRACES = (
    ROW * 2,
    b"timestamp_ms,input_length,output_length,hash_ids\n0,600,5,1 2\n12.5,10,5,9\n",
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n",
)
CELLS = numbers.map(str) | words | st.floats().map(str) | st.just("2023-11-16")
LINES = st.lists(st.lists(CELLS, min_size=2, max_size=5).map(",".join), max_size=4).map("\n".join)


@fuzz(
    st.sampled_from(TRACES).flatmap(damaged)
    | st.builds(
        lambda head, lines: head.split(b"\n")[0] + b"\n" + lines.encode("utf-8", "replace"),
        st.sampled_from(TRACES[1:]),
        LINES,
    )
    | st.fixed_dictionaries(
        {},
        optional={
            name: numbers | st.floats() | words | st.lists(numbers, max_size=3)
            for name in (
                "timestamp",
                "input_length",
                "output_length",
                "hash_ids",
                "priority",
                "tenant",
            )
        },
    ).map(lambda row: json.dumps(row).encode())
)
def test_traces(data: bytes) -> None:
    """A trace is read, or its first fault is named; what validates is read."""
    with in_time(), file_of(data, "t.jsonl") as path:
        good, faults = _validated(path)
        try:
            trace = read_trace(path)
        except ConfigError:
            assert faults or not good
        else:
            assert not faults
            assert len(trace.rows) == good


def _validated(path: Path) -> tuple[int, list[Any]]:
    try:
        return validate(path, 5)
    except ConfigError as error:
        return 0, [error]


YAML_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | numbers
    | st.floats()
    | words
    | st.sampled_from(["off", "512MiB", "9" * 400 + "T"]),
    lambda it: st.lists(it, max_size=3) | st.dictionaries(words, it, max_size=3),
    max_leaves=5,
)
ENGINE = {
    "name": "e0", "url": "http://10.0.0.5:8000", "role": "both", "engine": "vllm", "dp_size": 1,
    "events": "tcp://10.0.0.5:5557", "tokenizer": "m",
}  # fmt: skip
ENGINES = st.lists(
    st.dictionaries(
        st.sampled_from(InstanceSpec.__struct_fields__),
        YAML_VALUES
        | st.sampled_from(["tcp://[", "http://[::1]:99999", "tcp://h:65536", "http://h:0"]),
        max_size=3,
    ).map(lambda changes: ENGINE | changes),
    max_size=2,
)
TEXTS = st.text(st.sampled_from("[]{}:,-&*!|>'\"#%@` \n\tab0~?."), max_size=60).map(str.encode)


@fuzz(
    st.dictionaries(st.sampled_from(FIELDS), YAML_VALUES, max_size=3).map(
        _dump := lambda it: yaml.safe_dump(it).encode()
    )
    | ENGINES.map(lambda it: yaml.safe_dump({"instances": it}).encode())
    | TEXTS
    | st.binary(max_size=40)
)
@example(b"[" * 5_000)
@example(b"port: " + b"9" * 5_000)
@example(b"port: 2001-13-45")
@example(b"port: !!bool x")
@example(b"port: !!int ''")
@example(b"port: !!timestamp x")
def test_settings(data: bytes) -> None:
    """A settings file gives settings and engines, or a ConfigError that names a field."""
    with in_time(), file_of(data, "s.yaml") as path, contextlib.suppress(ConfigError):
        settings = load(path, {}, {})
        if settings.instances is not None:
            named_in_file(settings.instances, path)


@fuzz(
    st.sampled_from(FIELDS).map(str.upper)
    | st.sampled_from(["LOGGING__LEVEL", "LOGGING__MODULES"]),
    words | TEXTS.map(bytes.decode) | numbers.map(str),
)
def test_environment(name: str, value: str) -> None:
    """A variable is a setting, or gives a ConfigError."""
    with in_time(), contextlib.suppress(ConfigError):
        load(None, {"MOONSERVE_" + name: value}, {})
