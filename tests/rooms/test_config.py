"""Settings: layers, and errors that name their field and remedy."""

import logging
import re
from pathlib import Path

import click
import msgspec
import pytest

from moonserve.cli.settings import Seconds, unheeded
from moonserve.config import (
    Logging,
    NotYaml,
    Settings,
    all_flags,
    apply_logging,
    load,
    read_yaml,
)
from moonserve.core.errors import ConfigError
from moonserve.core.schedule.tuning import Tuning
from moonserve.live.control.config import GatewayConfig
from moonserve.live.worker.config import WorkerConfig
from moonserve.quantity import parse_bytes, parse_duration_us, shown_duration


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file, to be written."""
    return tmp_path / "moonserve.yaml"


def test_flags_over_environment_over_file_over_defaults(file: Path) -> None:
    """Each layer wins over the one below, field by field."""
    file.write_text("port: 1\nprefill: 2\ndecode: 3\n")
    env = {"MOONSERVE_CONFIG": str(file), "MOONSERVE_PORT": "10", "MOONSERVE_PREFILL": "20"}
    got = load(None, env, {"port": "30", "model": None})
    assert (got.port, got.prefill, got.decode) == (30, 20, 3)
    assert got.model == Settings().model


@pytest.mark.parametrize(
    ("kind", "command"), [(GatewayConfig, "gateway"), (Tuning, "gateway"), (WorkerConfig, "worker")]
)
def test_a_room_has_the_defaults_of_its_settings(kind: type[msgspec.Struct], command: str) -> None:
    """A struct of a room that repeats a setting has the same default; what differs is named."""
    differs = {"cpp", "model", "shared_memory", "kv_memory_bytes", "disk_dir"}
    for field in msgspec.structs.fields(kind):
        flag = all_flags().get(field.name)
        if flag is not None and command in flag.commands and field.name not in differs:
            assert field.default == getattr(Settings(), field.name), field.name


def test_logging_layers_merge(file: Path) -> None:
    """A level from the environment keeps the file's module levels."""
    file.write_text("logging: {level: INFO, modules: {core.schedule.conductor: DEBUG}}")
    got = load(file, {"MOONSERVE_LOGGING__LEVEL": "ERROR"}, {})
    assert got.logging == Logging("ERROR", {"core.schedule.conductor": "DEBUG"})


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 << 20), ("2 GB", 2 << 30), ("1.5K", 1536), ("4096", 4096), ("7b", 7)],
)
def test_sizes_are_human(text: str, size: int) -> None:
    """Sizes are read in units of 1,024, in flags, environment and file alike."""
    assert parse_bytes(text) == size
    assert load(None, {"MOONSERVE_MAX_BODY_BYTES": text}, {}).max_body_bytes == size


@pytest.mark.parametrize(
    ("text", "time_us"),
    [
        *[("30s", 30_000_000), ("100ms", 100_000), ("2.5 ms", 2_500), ("7us", 7)],
        *[("2m", 120_000_000), (".5h", 1_800_000_000), (" 1s ", 1_000_000)],
    ],
)
def test_times_have_units(text: str, time_us: int) -> None:
    """Times are read with their unit, in flags, environment and file alike, and written as read."""
    assert parse_duration_us(text) == time_us
    assert parse_duration_us(shown_duration(time_us)) == time_us
    assert load(None, {"MOONSERVE_TTFT_SLO": text}, {}).ttft_slo == time_us


@pytest.mark.parametrize("text", ["30", "0.1", ".5", "5."])
def test_a_bare_number_is_no_time(text: str) -> None:
    """It may be seconds or milliseconds, so the error says how to write both."""
    with pytest.raises(ValueError, match=f"write {re.escape(text)}s for seconds or") as caught:
        parse_duration_us(text)
    assert f"{text}ms" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60", 60), ("60s", 60), ("1m", 60), ("1500ms", 1.5), (".5", 0.5), (" 2 s", 2)],
)
def test_a_name_that_ends_with_its_unit_takes_both(text: str, seconds: float) -> None:
    """A bare number is in the name's unit, and a time may have a unit, as everywhere."""
    assert load(None, {"MOONSERVE_DRAIN_S": text}, {}).drain_s == seconds
    assert Seconds(0).convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "3 min", "-1s", "[1]"])
def test_seconds_that_are_no_time_are_refused(text: str) -> None:
    """The error shows how to write a time, in settings and in other flags."""
    with pytest.raises(
        ConfigError, match=r"^drain_s: .* is not a time; write it like 30s .*\(from"
    ):
        load(None, {}, {"drain_s": text})
    with pytest.raises(click.BadParameter, match="is not a time; write it like 30s"):
        Seconds(0).convert(text, None, None)


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "1e3s", "nans", "infs", "3 min", "0.4us", "9999999h"]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    """Also what would be no time at all, or longer than any."""
    with pytest.raises(ValueError, match=r"is not a time|must be from 1us"):
        parse_duration_us(text)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("prot: 1", r"^prot: unknown setting in .*moonserve.yaml; did you mean port\?"),
        ("port: 99999", r"^port: must be 65535 or less \(99999 from .*moonserve.yaml\)"),
        ("port: [1]", r"^port: must be a whole number \(\[1\] from"),
        (
            "policy: kvcache_centrik",
            r"^policy: did you mean kvcache_centric\? must be one of",
        ),
        ("policy: best", r"^policy: must be one of random, .* \('best' from .*moonserve.yaml\)"),
        ("instances: [3]", r"^instances\[0\]: must be an object \(from .*moonserve.yaml\)"),
        ("admission: all", r"^admission: must be early, none, predictive or ttft \('all' from"),
        ("predictor: oracle", r"^predictor: must be uniform or survival "),
        ("decode_kv: 0", r"^decode_kv: must be off, end or a number of blocks, 1 or more \(0 from"),
        ("ttft_slo: 0s", r"^ttft_slo: '0s' must be above 0; write it like 30s or 100ms \(from "),
        ("ttft_slo: 30", r"^ttft_slo: 30 has no unit; write 30s for seconds or 30ms \(from "),
        ("drain_s: 2h", r"^drain_s: must be 3600 or less \(7200.0 from .*moonserve.yaml\)"),
        ("drain_s: 0", r"^drain_s: must be more than 0 \(0.0 from "),
        ("tbt_slo: soon", r"^tbt_slo: 'soon' is not a time; write it like 30s or 100ms"),
        ("tbt_slo: [1s]", r"^tbt_slo: .* is not a time"),
        ("ttft_slo_ms: 9", r"^ttft_slo_ms: unknown setting in .*; did you mean ttft_slo\?"),
        ("engine: tensorrt", r"^engine: must be fake or torch \('tensorrt' from"),
        ("store: redis", r"^store: must be embedded or mooncake \('redis' from"),
        ("mooncake_master: here", r"^mooncake_master: write it like 127.0.0.1:50051 \('here' from"),
        ("segment_bytes: lots", r"^segment_bytes: 'lots' is not a size; write it like 512MiB"),
        ("segment_bytes: 99999999TiB", r"^segment_bytes: '99999999TiB' is more than any size"),
        ("disk_bytes: 9223372036854775808", r"^disk_bytes: must be 46116860"),
        ("segment_bytes: 10", r"^segment_bytes: must be 1MiB or more \(10 from .*moonserve.yaml\)"),
        ("{disk_bytes: 10, disk_dir: /d}", r"^disk_bytes: must be 1MiB or more \(10 from "),
        ("disk_bytes: 1GiB", r"^disk_bytes: needs a folder: set disk_dir too"),
        ("{store: mooncake, replicas: 2}", r"^replicas: only the embedded store has .* \(2 from "),
        ("{store: mooncake, eviction: lfu}", r"^eviction: .* mooncake_master \('lfu' from "),
        (
            "{store: mooncake, disk_bytes: 1GiB, disk_dir: /d}",
            r"^disk_bytes: only the embedded store has a share on disk",
        ),
        ("{store: mooncake, node: n}", r"^node: only the embedded store has nodes"),
        ("{store: mooncake, store_url: 'http://h'}", r"^store_url: .* with mooncake_master"),
        ("{store: mooncake, transport: mooncake}", r"^transport: only the embedded store has "),
        ("{store: mooncake, shared_memory: never}", r"^shared_memory: only the embedded store "),
        ("transport: rdma", r"^transport: must be mooncake or tcp \('rdma' from"),
        ("shared_memory: no", r"^shared_memory: must be auto or never"),
        ("mooncake_protocol: rdma", r"^mooncake_protocol: .* needs transport mooncake, or store"),
        ("{transport: mooncake, mooncake_device: m}", r"^mooncake_device: is for rdma only: set"),
        ("{store: mooncake, segment_bytes: 4MiB}", r"^segment_bytes: .* 16MiB and more \(4194304 "),
        ("rack: x y z", r"^rack: must be 1 to 64 letters, .*, not 'x y z'"),
        ("node: a:b", r"^node: must be 1 to 64 letters, .*, not 'a:b'"),
        ("disk_dir: /d", r"^disk_dir: needs a size: set disk_bytes too"),
        ("logging: {levle: INFO}", r"^logging.levle: unknown setting in .*; did you mean .*level"),
        ("logging: {modules: {a: LOUD}}", r"^logging.modules: must be DEBUG, ERROR"),
        ("- a list", r"^config: .* must be a map of settings"),
        ("a: [", r"^config: .* is not YAML"),
    ],
)
def test_a_wrong_file_is_named_by_field_and_remedy(file: Path, yaml: str, message: str) -> None:
    """Every error starts with its field, and names the value's source or the known names."""
    file.write_text(yaml)
    with pytest.raises(ConfigError, match=message):
        load(file, {}, {})


def test_absent_file_is_an_error() -> None:
    """A file that was named must exist."""
    with pytest.raises(ConfigError, match="cannot read /no/such: No such file"):
        load(Path("/no/such"), {}, {})


def test_environment_typos_are_errors_but_strangers_are_not() -> None:
    """A name close to a setting is a typo; variables of a Kubernetes service are ignored."""
    with pytest.raises(ConfigError, match=r"MOONSERVE_PREFIL: .*did you mean MOONSERVE_PREFILL"):
        load(None, {"MOONSERVE_PREFIL": "2"}, {})
    load(None, {"MOONSERVE_SERVICE_HOST": "10.0.0.1", "MOONSERVE_TOKEN": "x"}, {})


def test_variables_that_nobody_reads_are_named() -> None:
    """An unknown variable gives a warning with the nearest name; secrets and folders do not."""
    env = dict.fromkeys(
        (
            "MOONSERVE_WORKER_COUNT",
            "MOONSERVE_TOKEN",
            "MOONSERVE_URL",
            "MOONSERVE_KEY_A",
            "MOONSERVE_LIFELINE",
            "MOONSERVE_TRACES",
            "MOONSERVE_VLLM_PYTHON",
            "MOONSERVE_LOGGING__LEVEL",
            "MOONSERVE_SERVICE_PORT_HTTP",
            "MOONSERVE_PORT_80_TCP_ADDR",
            "MOONSERVE_PORT",
            "HOME",
        ),
        "1",
    )
    [said] = unheeded(env)
    assert said.startswith("environment: MOONSERVE_WORKER_COUNT is no setting and is ignored; did")
    assert "MOONSERVE_WORKERS" in said


def test_environment_has_no_variable_for_lists() -> None:
    """The list of external engines stands in the file only."""
    with pytest.raises(ConfigError, match="MOONSERVE_INSTANCES: is read from the YAML file only"):
        load(None, {"MOONSERVE_INSTANCES": "[]"}, {})


def test_environment_values_are_checked() -> None:
    """A wrong value in the environment names the environment."""
    with pytest.raises(ConfigError, match=r"port: .*'tcp://10.0.0.1:80' from the environment"):
        load(None, {"MOONSERVE_PORT": "tcp://10.0.0.1:80"}, {})


def test_log_lines_are_single_and_levels_are_per_module(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One record is one line on stderr, at its module's level."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        apply_logging(Logging("WARNING", {"core.schedule.conductor": "DEBUG"}))
        logging.getLogger("moonserve.core.schedule.conductor").debug("two\nlines")
        logging.getLogger("moonserve.live.store").info("not shown")
        try:
            raise ValueError("oops")
        except ValueError:
            logging.getLogger("moonserve.live.store").exception("failed")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name in ("moonserve", "moonserve.core.schedule.conductor"):
            logging.getLogger(name).setLevel(logging.NOTSET)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("DEBUG   core.schedule.conductor: two lines")
    assert "live.store: failed | Traceback" in second
    assert second.endswith("ValueError: oops")


def test_a_level_for_no_module_is_refused() -> None:
    """A misspelt module name is an error: otherwise its level would have no effect."""
    with pytest.raises(ConfigError, match=r"logging\.modules: there is no module 'core\.conductr'"):
        apply_logging(Logging("INFO", {"core.conductr": "DEBUG"}))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port: 1\nhost: a\nport: 2", "line 3: the key port is in line 1 already"),
        ('port: 1\n"port": 2', "line 2: the key port is in line 1 already"),
        ("logging: {level: INFO, level: DEBUG}", "line 1: the key level is in line 1 already"),
        (
            "instances:\n- name: a\n  url: http://a\n  role: prefill\n  role: decode",
            "line 5: the key role is in line 4 already",
        ),
        ("host: &a [*a, {b: 1, b: 2}]", "line 1: the key b is in line 1 already"),
        ("? [1, 2]\n: a\n? {x: 1, x: 2}\n: b", "line 3: the key x is in line 3 already"),
    ],
)
def test_a_key_that_is_there_twice_is_named(tmp_path: Path, text: str, says: str) -> None:
    """With its line, at any depth: PyYAML would take the last one in silence."""
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file, {}, {})
    assert says in str(caught.value)
    with pytest.raises(NotYaml, match=says):
        read_yaml(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", "None"),
        ("a: 1\nb: {a: 1}", "{'a': 1, 'b': {'a': 1}}"),
        ("[{a: 1}, {a: 1}]", "[{'a': 1}, {'a': 1}]"),
        ("&a [*a]", "[[...]]"),
        ("{1: a, '1': b}", "{1: 'a', '1': 'b'}"),
    ],
)
def test_keys_of_other_maps_are_other_keys(text: str, value: str) -> None:
    """Only a map that has a key twice is wrong."""
    assert str(read_yaml(text)) == value


@pytest.mark.parametrize(
    "text",
    ["[" * 5_000, "port: " + "9" * 5_000, "port: 2001-13-45", "port: !!bool x", "port: !!int ''"],
    ids=["too deep", "too many digits", "no date", "no bool", "no number"],
)
def test_yaml_that_its_reader_cannot_read(tmp_path: Path, text: str) -> None:
    """PyYAML raises errors of many types; each is a wrong settings file."""
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not YAML"):
        load(file, {}, {})


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"tls_cert": "a.crt"}, "tls_cert: needs its key: set tls_key too"),
        ({"tls_key": "a.key"}, "tls_key: needs its certificate: set tls_cert too"),
        ({"tls_client_auth": "required"}, "tls_client_auth: needs an authority: set tls_dir"),
    ],
)
def test_tls_settings_belong_together(given: dict[str, object], error: str) -> None:
    """Half of a TLS setup is an error that names the other half."""
    with pytest.raises(ConfigError, match=error):
        load(None, {}, given)
