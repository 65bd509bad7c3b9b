"""schemathesis over /openapi.json: requests that conform and requests that do not.

SCHEMATHESIS_EXAMPLES is the number of requests for each operation and way of making them.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, Cluster, python_of_moonserve, started

pytestmark = pytest.mark.clients
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
LEFT_OUT = r"^/internal/|^/start_profile|/{order}$"
"""Calls of the cluster itself, which may end it, and what takes long by its nature."""
HOOKS = {
    "SCHEMATHESIS_HOOKS": "tests.clients.schemathesis_hooks",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
LEAST = 20_000
CONTEXT = 128
"""Tokens. In the default model's 8,192, a request for 32 long answers may take minutes."""
_CONTEXT_KEY = b"llama.context_length" + struct.pack("<I", 4)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of the default model with a short context."""
    words = [python_of_moonserve(), "-m", "moonserve", "model", "pull"]
    pulled = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    model = Path(pulled.stdout.strip()).read_bytes()
    start, key, rest = model.partition(_CONTEXT_KEY)
    assert key, "the default model is no GGUF file of a Llama"
    short = tmp_path / f"{MODEL}.gguf"
    short.write_bytes(start + key + struct.pack("<I", CONTEXT) + rest[4:])
    with started(tmp_path / "keys.json", "--model", str(short)) as running:
        yield running


def test_the_api_keeps_its_description(cluster: Cluster, tmp_path: Path) -> None:
    """Over 20,000 requests, no reply is a 5xx or one that /openapi.json does not describe; each
    comes within a minute."""
    pytest.importorskip("schemathesis")
    log = tmp_path / "schemathesis.log"
    with log.open("w") as output:
        done = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("schemathesis")), "run"),
                *(
                    cluster.url + "/openapi.json",
                    "-H",
                    f"Authorization: Bearer {cluster.admin_key}",
                ),
                *("--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing"),
                *("--max-examples", os.environ.get("SCHEMATHESIS_EXAMPLES", "800")),
                *("--workers", "2", "--request-timeout", "60", "--continue-on-failure"),
                *("--suppress-health-check", "all", "--exclude-path-regex", LEFT_OUT),
            ],
            cwd=tmp_path,
            env={**os.environ, **HOOKS},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=7_200,
        )
    said = log.read_text()
    assert done.returncode == 0, said[-20_000:]
    count = re.search(r"(\d+) generated", said)
    assert count is not None, said
    assert int(count[1]) >= LEAST or "SCHEMATHESIS_EXAMPLES" in os.environ
