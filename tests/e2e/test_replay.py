"""`moonserve replay` against a cluster of real workers with fake engines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from moonserve.cli import cli
from moonserve.core.schedule.profiles import profile_from_json
from moonserve.live.engine.fake import fake_cost
from moonserve.sim.synthesize import Shape, synthesize
from moonserve.sim.trace import write_trace
from tests.support.inproc import BLOCK, TOKEN, site

pytestmark = pytest.mark.model  # for its tokenizer and chat template

ROWS = 12


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Requests that share a system prompt, in blocks twice the cluster's."""
    file = tmp_path / "chat.jsonl"
    shape = Shape(system_prompts=1, system_tokens=300, sigma=0.1, user_tokens=80, output_tokens=8)
    with file.open("w") as out:
        write_trace(synthesize(5, ROWS, 20.0, shape, 2 * BLOCK), out)
    return file


def test_a_run_its_profile_and_the_same_simulated(trace: Path, tmp_path: Path) -> None:
    """All are served with reuse; the profile is read by simulate; both sides have all figures."""
    out, rows = tmp_path / "mine.json", tmp_path / "rows.csv"
    blocks = ["--block-size", str(2 * BLOCK)]
    runner = CliRunner(env={"MOONSERVE_TOKEN": TOKEN})
    flags = ["--scale", "2", "--profile-out", str(out), "--rows", str(rows), "--json"]

    async def main() -> tuple[Result, Result]:
        async with asyncio.timeout(60), site() as it:
            await it.add("p0", "prefill", fake_cost(5_000))
            await it.add("p1", "prefill", fake_cost(5_000))
            await it.add("d0", "decode")
            argv = ["replay", str(trace), "--url", it.url, *blocks, "--compare"]
            done = await asyncio.to_thread(runner.invoke, cli, [*argv, *flags])
            await it.settle()
            return done, await asyncio.to_thread(runner.invoke, cli, argv)

    done, unequal = asyncio.run(main())
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["requests"], found["completed"], found["failed"]) == (ROWS, ROWS, 0)
    assert found["hit_rate_tokens"] > 0
    compared = {it["name"]: it for it in found["compared"]}
    assert compared["ttft_ms"]["requests"] == ROWS
    assert compared["cached_tokens"]["recorded"]["mean"] > 0
    assert compared["cached_tokens"]["simulated"]["mean"] > 0
    assert len(rows.read_text().splitlines()) == ROWS + 1
    profile = profile_from_json(out.read_bytes(), "mine.json")
    assert profile.call.us(100, 1.0) > 0
    assert profile.publish.us(100, 1.0) > 0
    again = CliRunner().invoke(cli, ["simulate", str(trace), *blocks, "--profile", str(out)])
    assert again.exit_code == 0, again.output
    assert unequal.exit_code == 2
    assert unequal.output.startswith(
        "error: scale: the cluster's blocks have 16 tokens, the trace's 32"
    )
