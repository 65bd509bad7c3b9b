"""What stands in deploy/: its commands and settings are moonserve's own, and its tools accept it.

Commands are parsed by the program's parser and files of settings by its loader. Tests of helm,
kubectl, hadolint, systemd-analyze and kubernetes-validate are skipped without them: `make
test-deploy` brings all but systemd's.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click
import pytest
import yaml

from moonserve import __version__
from moonserve.cli import cli
from moonserve.cli.instances import Named, engines_of, sources_of
from moonserve.cli.roles import _check_front
from moonserve.config import Settings, all_flags, load
from moonserve.core.errors import ConfigError
from moonserve.live.picker.server import LIVENESS, READINESS
from tests.support.metric_names import frozen

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "moonserve"
BASE = DEPLOY / "kustomize" / "base"
WITH_PICKER = DEPLOY / "kustomize" / "picker"
COMPOSE = DEPLOY / "compose"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
FILE = "/etc/moonserve/moonserve.yaml"
SAMPLES = {"POD_IP": "10.0.0.5", "POD_NAME": "vllm-0", "NODE_NAME": "n1", "ROLE": "prefill"}
"""Values of the variables that commands contain."""
WITHOUT_ENGINES = ["workers.enabled=true", "config.kubernetes=null"]
RENDERED: Mapping[str, Sequence[str]] = {
    "defaults": (),
    "standby": (
        "conductor.replicas=2",
        "conductor.registry=etcd://etcd:2379",
        "gateway.autoscaling.enabled=true",
        'config.kubernetes=[{"pool": "llama"}]',
        "autoscaling.kind=hpa",
        "autoscaling.prefill.target.name=vllm-prefill",
        "autoscaling.decode.target.name=vllm-decode",
    ),
    "keys": ("apiKeys.existingSecret=k", "engineKeys.existingSecret=e", "token.existingSecret=t"),
    "picker": (
        "picker.enabled=true",
        "apiKeys.existingSecret=k",
        "picker.inferencePool.name=llama",
        "picker.inferencePool.matchLabels.app=vllm",
        'config.kubernetes=[{"pool": "llama"}]',
    ),
    "TLS": ("picker.enabled=true", "tls.enabled=true", "tls.issuer.name=ca"),
    "workers and TLS": (
        *WITHOUT_ENGINES,
        "tls.enabled=true",
        "tls.issuer.name=ca",
        "serviceMonitor.enabled=true",
    ),
    "standby and TLS": (
        "conductor.replicas=2",
        "conductor.registry=etcds://etcd:2379",
        "tls.enabled=true",
        "tls.issuer.name=ca",
    ),
    "workers, standby and TLS": (
        *WITHOUT_ENGINES,
        "conductor.replicas=2",
        "conductor.registry=etcds://etcd:2379",
        "tls.enabled=true",
        "tls.issuer.name=ca",
    ),
    "workers": (*WITHOUT_ENGINES, "autoscaling.kind=keda", "serviceMonitor.enabled=true"),
    "workers and standby": (
        *WITHOUT_ENGINES,
        "conductor.replicas=2",
        "conductor.registry=etcd://etcd:2379",
        "config.model=smollm2-135m-instruct",
        "models.existingClaim=models",
    ),
}
"""Values of the chart, by what they are for."""


class Run(NamedTuple):
    """One command that something in deploy/ runs, and the file of its settings."""

    argv: tuple[str, ...]
    """Without `moonserve`."""
    settings: str

    def checked(self, folder: Path) -> tuple[str, Settings]:
        """The command's name and its settings as the program reads them. Raises if it cannot."""
        words = [re.sub(r"\$[({](\w+)[)}]", lambda at: SAMPLES[at[1]], it) for it in self.argv]
        command: click.Command = cli
        context = click.Context(cli, info_name="moonserve", **cli.context_settings)
        while isinstance(command, click.Group):
            found = command.get_command(context, words[0])
            assert found is not None, f"there is no command {words[0]}"
            command = found
            words = words[1:]
        file = folder / "moonserve.yaml"
        file.write_text(self.settings)
        words = [it.replace(FILE, str(file)) for it in words]
        params = command.make_context(command.name, words, parent=context).params
        flags = {name: params[name] for name in all_flags() if name in params}
        settings = load(params.get("config"), {}, flags)
        if command.name in ("conductor", "gateway", "picker"):
            engines_of(settings, file, [])
            sources_of(settings)
        if settings.conductor:
            _check_front(settings, Named(), flags, None)
        return command.name or "", settings


def tool(name: str) -> str:
    """The path of a tool; the test is skipped without it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; make test-deploy brings it")
    return path


def output(*words: str) -> str:
    """What a tool prints; it must succeed."""
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def documents(text: str) -> list[dict[str, Any]]:
    """The objects in a text of YAML documents."""
    return [it for it in yaml.safe_load_all(text) if it]


def given(values: Sequence[str]) -> list[str]:
    """Flags of helm with these values; one with a bracket is JSON."""
    flag = {True: "--set-json", False: "--set"}
    return [word for value in values for word in (flag["[" in value], value)]


def rendered(name: str) -> list[dict[str, Any]]:
    """The objects of the chart with these values."""
    words = given(RENDERED[name])
    return documents(output(tool("helm"), "template", "t", str(CHART), *words))


def pods(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The pods' descriptions in these objects."""
    for it in objects:
        if it["kind"] in ("Deployment", "StatefulSet"):
            yield it["spec"]["template"]["spec"]


def of_objects(objects: list[dict[str, Any]]) -> list[Run]:
    """The commands of these objects, with the settings in their ConfigMap."""
    (settings,) = (it["data"]["moonserve.yaml"] for it in objects if it["kind"] == "ConfigMap")
    return [Run(tuple(c["args"]), settings) for pod in pods(objects) for c in pod["containers"]]


def base(*more: Path) -> list[dict[str, Any]]:
    """The objects of the kustomize base, and those of further files, without kustomize."""
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    files = [*(BASE / name for name in listed["resources"]), *more]
    data = {"moonserve.yaml": (BASE / "moonserve.yaml").read_text()}
    made = {"kind": "ConfigMap", "data": data}
    return [*(it for file in files for it in documents(file.read_text())), made]


def compose() -> dict[str, Run]:
    """The commands of the compose file by service, with the defaults of its variables."""
    text = (COMPOSE / "compose.yaml").read_text()
    text = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", text)
    services = yaml.safe_load(text)["services"]
    settings = (COMPOSE / "moonserve.yaml").read_text()
    return {name: Run(tuple(it["command"]), settings) for name, it in services.items()}


def unit(file: Path) -> tuple[str, ...]:
    """The words of a unit's command."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(file.read_text())
    return tuple(shlex.split(parser["Service"]["ExecStart"].replace("%i", "p0")))


# Without tools.


def test_commands_of_the_kustomize_base(tmp_path: Path) -> None:
    """Every flag exists, and the file of settings is valid."""
    runs = of_objects(base(WITH_PICKER / "picker.yaml"))
    assert [it.checked(tmp_path)[0] for it in runs] == ["conductor", "gateway", "picker"]


def test_commands_of_the_compose_file(tmp_path: Path) -> None:
    """Every flag exists; workers find the gateway by its service's name and port."""
    found = {name: run.checked(tmp_path) for name, run in compose().items()}
    names = {name: command for name, (command, _) in found.items()}
    assert names == {"gateway": "gateway", "prefill": "worker", "decode": "worker"}
    settings = found["gateway"][1]
    assert f"http://gateway:{settings.port}" in compose()["prefill"].argv


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.name)
def test_commands_of_the_units(tmp_path: Path, file: Path) -> None:
    """Every flag exists. SIGTERM goes to the first process, which lets its children drain."""
    program, *words = unit(file)
    assert program == "/opt/moonserve/bin/moonserve"
    command, settings = Run(tuple(words), "").checked(tmp_path)
    assert command in file.name
    assert "KillMode=mixed" in file.read_text()
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", file.read_text(), re.MULTILINE)
    assert int(stop_s) > settings.drain_s


def test_the_containerfile_starts_a_gateway(tmp_path: Path) -> None:
    """Its default command and its variables are the program's; it copies files that there are."""
    text = (DEPLOY / "container" / "Containerfile").read_text()
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    Run(tuple(json.loads(command)), "").checked(tmp_path)
    (host,) = re.findall(r"MOONSERVE_HOST=(\S+)", text)
    assert load(None, {"MOONSERVE_HOST": host}, {}).host == "0.0.0.0"
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists(), name
            assert f"!{name}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_scalers_read_a_metric_that_there_is() -> None:
    """The gauge in KEDA's query and in the external metric is one that the Conductor exports."""
    text = (CHART / "templates" / "autoscaling.yaml").read_text()
    names = re.findall(r"moonserve_wanted\w+", text)
    assert len(names) == 2
    assert all("role" in frozen()[name].partition(" ")[0] for name in names)


def test_a_wrong_flag_or_setting_is_found(tmp_path: Path) -> None:
    """The checks above can fail."""
    with pytest.raises(click.NoSuchOption):
        Run(("gateway", "--conducter=x"), "").checked(tmp_path)
    with pytest.raises(ConfigError, match="kubernetes"):
        Run(("conductor", f"--config={FILE}"), "kubernetes: [{servise: x}]").checked(tmp_path)
    with pytest.raises(AssertionError):
        Run(("gatway",), "").checked(tmp_path)


# With tools.


@pytest.mark.parametrize("name", RENDERED)
def test_the_chart_runs_moonserves_commands(name: str, tmp_path: Path) -> None:
    """Every flag exists, the ConfigMap is a valid file of settings, and pods are confined."""
    objects = rendered(name)
    commands = [it.checked(tmp_path)[0] for it in of_objects(objects)]
    workers = "workers" in name
    store = ["serve"] if "workers" in name and "standby" in name else []
    picker = ["picker"] if name in ("picker", "TLS") else []
    expected = ["conductor", "gateway", *picker, *store, *(["worker", "worker"] if workers else [])]
    assert sorted(commands) == sorted(expected)
    for pod in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["enableServiceLinks"] is False, "else Kubernetes may set MOONSERVE_PORT"
        assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
        may_ask = pod["automountServiceAccountToken"]
        assert may_ask == (pod["containers"][0]["name"] == "conductor" and not workers)


@pytest.mark.parametrize("name", RENDERED)
def test_the_charts_names_meet(name: str) -> None:
    """Services select pods, mounts have volumes, scalers have targets, accounts have roles."""
    objects = rendered(name)
    templates = [
        it["spec"]["template"] for it in objects if it["kind"] in ("Deployment", "StatefulSet")
    ]
    labels = [it["metadata"]["labels"] for it in templates]
    for it in objects:
        if it["kind"] == "Service":
            wanted = it["spec"]["selector"].items()
            assert any(wanted <= have.items() for have in labels), it["metadata"]["name"]
    for template in templates:
        volumes = {it["name"] for it in template["spec"]["volumes"]}
        mounts = {it["name"] for it in template["spec"]["containers"][0]["volumeMounts"]}
        assert mounts == volumes
    made = {(it["kind"], it["metadata"]["name"]) for it in objects}
    for it in objects:
        if it["kind"] == "StatefulSet":  # its pods have names if a Service without an address does
            (service,) = [
                has
                for has in objects
                if (has["kind"], has["metadata"]["name"]) == ("Service", it["spec"]["serviceName"])
            ]
            assert service["spec"]["clusterIP"] == "None"
            assert service["spec"]["publishNotReadyAddresses"]
            have = it["spec"]["template"]["metadata"]["labels"].items()
            assert service["spec"]["selector"].items() <= have
        if it["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = it["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in made or "vllm-" in target["name"]
        if it["kind"] == "RoleBinding":
            assert ("Role", it["roleRef"]["name"]) in made
            assert ("ServiceAccount", it["subjects"][0]["name"]) in made


@pytest.mark.parametrize("name", [it for it in RENDERED if "TLS" in it])
def test_with_tls_nothing_is_called_in_clear(name: str) -> None:
    """Processes call each other by names that the certificate has. Kubelets, which have no
    certificate, ask only those for /health that ask for none."""
    objects = rendered(name)
    (certificate,) = (it["spec"] for it in objects if it["kind"] == "Certificate")
    assert set(certificate["usages"]) == {"server auth", "client auth"}
    for pod in pods(objects):
        (container,) = pod["containers"]
        variables = {it["name"]: it.get("value") for it in container["env"]}
        files = {variables[f"MOONSERVE_TLS_{it}"] for it in ("CERT", "KEY", "CA")}
        (mount,) = [it for it in container["volumeMounts"] if it["name"] == "tls"]
        assert {it.rpartition("/")[0] for it in files} == {mount["mountPath"]}
        for word in container["args"]:
            flag, _, value = word.partition("=")
            if value.startswith("etcd"):
                assert value.startswith("etcds://"), word
                continue
            if flag in ("--conductor", "--gateway", "--store-url"):
                assert value.startswith("https://"), word
                value = str(urlsplit(value).hostname)
            elif flag != "--advertise-host":
                continue
            value = re.sub(r"\$\((\w+)\)", lambda at: SAMPLES[at[1]], value)
            assert any(fnmatch(value, it) for it in certificate["dnsNames"]), value
        probes = [asks for name, asks in container.items() if name.endswith("Probe")]
        assert len(probes) >= 2
        for asks in probes:
            serves_clients = container["name"] in ("gateway", "picker")
            assert ("tcpSocket" in asks) != serves_clients
            assert not serves_clients or asks["httpGet"]["scheme"] == "HTTPS"
    for it in objects:
        if it["kind"] == "ServiceMonitor":
            (endpoint,) = it["spec"]["endpoints"]
            assert endpoint["scheme"] == "https"
            assert endpoint["tlsConfig"]["serverName"] in certificate["dnsNames"]


def test_gateways_find_the_picker() -> None:
    """The pool names its Service, and the probes are services of its gRPC server."""
    objects = rendered("picker")
    (pool,) = (it["spec"] for it in objects if it["kind"] == "InferencePool")
    named = pool["endpointPickerRef"]
    (service,) = (
        it["spec"]
        for it in objects
        if it["kind"] == "Service" and it["metadata"]["name"] == named["name"]
    )
    (port,) = service["ports"]
    assert port["port"] == named["port"]["number"]
    for template in (*pods(objects), *pods(base(WITH_PICKER / "picker.yaml"))):
        (container,) = template["containers"]
        if container["name"] != "picker":
            continue
        assert {"name": "grpc", "containerPort": 9002} in container["ports"]
        assert "--picker-port=9002" in container["args"]
        assert container["livenessProbe"]["grpc"] == {"port": 9002, "service": LIVENESS}
        assert container["readinessProbe"]["grpc"]["service"] in READINESS


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["workers.enabled=true"], "workers.enabled contradicts"),
        (["config.kubernetes=null"], "no engines: set config.kubernetes"),
        (["conductor.replicas=2"], "a standby needs etcd"),
        (["conductor.registry=http://x"], "registry"),
        (["gatway.replicas=2"], "gatway"),
        (["autoscaling.kind=keda"], "name the Deployment of the engines"),
        (["tls.enabled=true"], "name a secret with tls.crt"),
        (
            ["tls.enabled=true", "tls.existingSecret=t", "conductor.registry=etcd://e:2379"],
            "conductor.registry: with tls.enabled write etcds://",
        ),
        ([*WITHOUT_ENGINES, "picker.enabled=true"], "picker.enabled: workers of ours"),
        (
            ["picker.enabled=true", "picker.inferencePool.name=x"],
            "picker.inferencePool.matchLabels: name the labels",
        ),
    ],
)
def test_contradicting_values_are_refused(values: list[str], says: str) -> None:
    """The error names the value and the remedy."""
    ran = subprocess.run(
        [tool("helm"), "template", "t", str(CHART), *given(values)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode != 0
    assert says in ran.stderr


def test_helm_lints_the_chart() -> None:
    """Also what only warnings say is an error."""
    output(tool("helm"), "lint", "--strict", str(CHART))


def test_the_chart_has_the_packages_version() -> None:
    """A release is one version of all."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version == __version__
    assert (chart["version"], chart["appVersion"]) == (version, version)
    for folder in (BASE, WITH_PICKER):
        made = yaml.safe_load((folder / "kustomization.yaml").read_text())
        assert made["images"][0]["newTag"] == version
    for file in (COMPOSE / "compose.yaml", DEPLOY / "container" / "Containerfile"):
        assert f"moonserve:{version}" in file.read_text(), file


KINDS_OF_OTHERS = ("ScaledObject", "ServiceMonitor", "InferencePool", "Certificate")


@pytest.mark.parametrize("name", [*RENDERED, "kustomize", "kustomize picker"])
def test_kubernetes_accepts_the_objects(name: str, tmp_path: Path) -> None:
    """By the schemas of a version of Kubernetes; kinds of operators have none there."""
    validate = tool("kubernetes-validate")
    if "kustomize" in name:
        folder = WITH_PICKER if "picker" in name else BASE
        objects = documents(output(tool("kubectl"), "kustomize", str(folder)))
    else:
        objects = rendered(name)
    known = [it for it in objects if it["kind"] not in KINDS_OF_OTHERS]
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(known))
    said = output(validate, "--strict", "-k", "1.37", str(file))
    assert said.count(" passed for ") == len(known) >= 9


def test_hadolint_accepts_the_containerfile() -> None:
    """Every rule."""
    output(tool("hadolint"), str(DEPLOY / "container" / "Containerfile"))


def test_zizmor_accepts_the_workflows() -> None:
    """Actions are pinned by hash, and jobs have the least permissions."""
    workflows = ROOT / ".github" / "workflows"
    output(tool("zizmor"), "--offline", "--persona", "pedantic", str(workflows))


def test_shellcheck_accepts_the_scripts() -> None:
    """Warnings are errors; hints are not, since words are split on purpose."""
    scripts = [ROOT / ".ci" / "run", *(ROOT / "tests").rglob("*.sh")]
    found = [str(it) for it in scripts if it.exists() and "node_modules" not in it.parts]
    assert found
    output(tool("shellcheck"), "--severity=warning", *found)


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """Every directive is known; the program's path is that of this interpreter here."""
    analyze = tool("systemd-analyze")
    for file in UNITS:
        text = file.read_text().replace("/opt/moonserve/bin/moonserve", sys.executable)
        (tmp_path / file.name).write_text(text)
    ran = subprocess.run(
        [analyze, "verify", *(str(tmp_path / file.name) for file in UNITS)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
