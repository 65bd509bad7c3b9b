"""How long simulations take, and whether they still come out the same.

    python bench/simulator.py [NAME …] [--rows N] [--tree DIR] [--traces DIR] [--profile NAME]

It runs the setups of SETUPS, each in a process of its own, one after the other. For each it prints
the CPU seconds of the simulation alone (`run`), of reading and of measuring, and a digest over all
that came out: every event, every figure, every request's row and every sample of the queues.

--tree runs them by the code of another checkout, to compare. --profile writes NAME's cProfile to
NAME.pstats. Timings differ from run to run; digests never.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PUBLIC = Path(os.environ.get("MOONSERVE_TRACES", ROOT.parent / "shared" / "traces"))

SETUPS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"profile": "a800", "seed": 0},
    "loaded": {},
    "overload": {"speed": 3.0, "admission": "predictive"},
    "late": {"speed": 3.0, "policy": "late_binding"},
    "late-refusing": {"speed": 3.0, "policy": "late_binding", "admission": "predictive"},
    "late-synthetic": {
        "trace": "synthetic",
        "speed": 3.0,
        "policy": "late_binding",
        "admission": "ttft",
    },
    "early": {"trace": "synthetic", "speed": 3.0, "admission": "early"},
    "uniform": {"speed": 2.0, "admission": "predictive", "predictor": "uniform"},
    "oracle": {"speed": 2.0, "admission": "predictive", "predictor": "oracle"},
    "mixed": {"split": "16", "chunk_tokens": 2_048, "speed": 1.5},
    "batched": {"prefill_seqs": 4, "chunk_tokens": 8_192, "eviction": "sieve", "speed": 2.0},
    "pooled": {"trace": "synthetic", "pooled": True, "overlap": False},
    "one-copy": {"trace": "synthetic", "policy": "alpha_beta", "one_copy": True, "speed": 2.0},
    "groups": {"trace": "synthetic", "cpp": 8, "speed": 1.5, "admission": "predictive"},
    "layers": {"trace": "synthetic", "cpp": 4, "cpp_form": "layers", "policy": "late_binding"},
    "answers": {"keep_output": True, "first_token": "decode", "speed": 2.0, "racks": 4},
    "short-memory": {"decode": "small", "split": "8+2", "speed": 1.5, "policy": "preble_e2"},
    "faults": {"breakdowns": True, "speed": 2.0, "admission": "predictive"},
    "tenants": {"tenants": True, "speed": 3.0, "policy": "late_binding", "admission": "ttft"},
    "shares": {"tenants": True, "speed": 3.0, "admission": "predictive"},
    "large": {"split": "64+64", "speed": 16.0, "policy": "late_binding"},
}
"""Setups by name: axes of a sweep (moonserve.sim.axes), `conversation` if no trace is named."""
OWN = ("breakdowns", "tenants", "decode", "trace", "speed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SETUPS))
    parser.add_argument("--rows", type=int)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--traces", type=Path, default=PUBLIC)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        print(json.dumps(run(asked.names[0], asked.traces, asked.rows, asked.profile)))
        return
    unknown = [name for name in asked.names if name not in SETUPS]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(SETUPS)}")
    form = subprocess.check_output(
        [sys.executable, "-c", "import moonserve; print(moonserve.CORE.name)"],
        env={**os.environ, "PYTHONPATH": str(asked.tree / "src")},
        text=True,
    )
    print(form, end="")
    print(f"{'setup':<16} {'read':>6} {'run':>7} {'measure':>8}  digest", flush=True)
    total_s = 0.0
    for name in asked.names or SETUPS:
        words = [sys.executable, __file__, name, "--alone", "--traces", str(asked.traces)]
        words += [] if asked.rows is None else ["--rows", str(asked.rows)]
        words += ["--profile"] if asked.profile else []
        env = {**os.environ, "PYTHONPATH": str(asked.tree / "src")}
        done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
        read_s, run_s, measure_s, digest = json.loads(done.stdout)
        total_s += run_s
        print(f"{name:<16} {read_s:6.2f} {run_s:7.2f} {measure_s:8.2f}  {digest}", flush=True)
    print(f"{'all':<16} {'':>6} {total_s:7.2f}")


def run(name: str, traces: Path, rows: int | None, profile: bool) -> tuple[Any, ...]:
    """CPU seconds to read, to simulate and to measure; the digest."""
    import cProfile
    from hashlib import sha256

    import msgspec

    from moonserve.sim.axes import setup_of
    from moonserve.sim.cluster import Simulation
    from moonserve.sim.metrics import measure, queues
    from moonserve.sim.setup import Breakdown
    from moonserve.sim.trace import Trace, read_trace, scale

    values = SETUPS[name]
    began_s = time.process_time()
    trace = read_trace(traces / f"mooncake_{values.get('trace', 'conversation')}.jsonl", rows)
    trace = scale(trace, values.get("speed", 1.0))
    if values.get("tenants"):
        trace = Trace(
            trace.name,
            trace.block_size,
            [
                msgspec.structs.replace(
                    row, tenant="abbccc"[at % 6], priority=(0, 0, 1, 0, -1)[at % 5]
                )
                for at, row in enumerate(trace.rows)
            ],
        )
    setup = setup_of(
        {
            "policy": "kvcache_centric",
            **{field: value for field, value in values.items() if field not in OWN},
        }
    )
    if values.get("breakdowns"):
        end_us = trace.rows[-1].at_us
        what = (
            Breakdown("kill", "p003", end_us // 8),
            Breakdown("kill", "d001", end_us // 6),
            Breakdown("join", "p003", end_us // 4),
            Breakdown("join", "d001", end_us // 3),
            Breakdown("slow", "d002", end_us // 2, 2.0),
        )
        setup = msgspec.structs.replace(setup, breakdowns=what)
    if values.get("decode") == "small":
        small = msgspec.structs.replace(setup.profile, kv_tokens=200_000)
        setup = msgspec.structs.replace(setup, profile=small)
    sim = Simulation(trace, setup)
    read_s = time.process_time()
    profiler = cProfile.Profile() if profile else None
    if profiler is not None:
        profiler.enable()
    sim.run()
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(f"{name}.pstats")
    ran_s = time.process_time()
    result = measure(sim, 0.0)
    measured_s = time.process_time()
    found = [result.summary, result.rows, result.lost, queues(sim), sim.samples]
    digest = sha256(msgspec.json.encode(found) + result.gaps_ms.tobytes()).hexdigest()[:16]
    return read_s - began_s, ran_s - read_s, measured_s - ran_s, digest


if __name__ == "__main__":
    main()
