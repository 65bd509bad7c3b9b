"""schemathesis over /openapi.json: requests that conform and requests that do not.

SCHEMATHESIS_EXAMPLES is the number of requests for each operation and way of making them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import Cluster

pytestmark = pytest.mark.clients
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
LEFT_OUT = r"^/internal/|^/start_profile|/{order}$"
"""Calls of the cluster itself, which may end it, and what takes long by its nature."""
LEAST = 20_000


def test_the_api_keeps_its_description(cluster: Cluster, tmp_path: Path) -> None:
    """Over 20,000 requests, no reply is a 5xx or one that /openapi.json does not describe; each
    comes within a minute."""
    pytest.importorskip("schemathesis")
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("schemathesis")), "run"),
            *(cluster.url + "/openapi.json", "-H", f"Authorization: Bearer {cluster.admin_key}"),
            *("--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing"),
            *("--max-examples", os.environ.get("SCHEMATHESIS_EXAMPLES", "700")),
            *("--workers", "2", "--request-timeout", "60", "--continue-on-failure"),
            *("--suppress-health-check", "all", "--exclude-path-regex", LEFT_OUT),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    count = re.search(r"(\d+) generated", done.stdout)
    assert count is not None, done.stdout
    assert int(count[1]) >= LEAST or "SCHEMATHESIS_EXAMPLES" in os.environ
