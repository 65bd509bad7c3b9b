"""Record real vLLM engines under a made-up load, simulate the recording, and print both.

    python -m tests.vllm.recorded --python .venv-vllm/bin/python [--nixl] [--requests N] [--rps X]

One engine serves whole requests; with --nixl one prefills and another one decodes. The figures say
something about the simulator only if nothing else runs on the machine. `test_recorded` runs it with
few requests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from moonserve.live.engine.export import export_folder
from moonserve.live.model.catalog import DEFAULT_MODEL, resolve
from tests.vllm.engines import Engine, running
from tests.vllm.gateways import Gateway, described, gateway

_SHAPE = ("--system-prompts", "4", "--system-tokens", "200", "--user-tokens", "120")
_SEQS = 128
_CHUNK = 2_048
"""What vLLM takes by default on a CPU. An engine does not report it; the cluster file does."""
_FLAGS = ("--max-num-seqs", str(_SEQS), "--max-num-batched-tokens", str(_CHUNK))
_ANSWERS = ("--output-tokens", "24", "--sigma", "0.6", "--most-tokens", "1500")


def record(front: Gateway, folder: Path, requests: int, rps: float) -> str:
    """Send a made-up load to a gateway that records in `folder`, and compare. Returns the text."""
    trace = folder / "trace.jsonl"
    load = ("--requests", str(requests), "--rps", str(rps), "--block-size", "32")
    _moonserve("trace", "synthesize", *_SHAPE, *_ANSWERS, *load, "-o", str(trace))
    _moonserve("replay", str(trace), "--url", front.url)
    front.until(front.idle)
    return _moonserve("simulate", str(front.recording), "--compare")


def _moonserve(*argv: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "moonserve", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout[-2_000:]}{done.stderr[-2_000:]}"
    return done.stdout


def main() -> None:
    """Run one recording."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="the interpreter with vLLM")
    parser.add_argument("--nixl", action="store_true", help="one engine prefills, one decodes")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rps", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, help="for all files; default: one that is removed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / "smollm2"
        export_folder(resolve(DEFAULT_MODEL).path, model, "float32")
        engines = [Engine("e0", model, args.python, folder).having(*_FLAGS)]
        if args.nixl:
            engines = [
                Engine("p0", model, args.python, folder).by_nixl("kv_producer").having(*_FLAGS),
                Engine("d0", model, args.python, folder).by_nixl("kv_consumer").having(*_FLAGS),
            ]
        roles = ("prefill", "decode") if args.nixl else ("both",)
        connector = "nixl" if args.nixl else "none"
        with running(*engines):
            instances = [
                described(it, role, connector, model, max_seqs=_SEQS, chunk_tokens=_CHUNK)
                for it, role in zip(engines, roles, strict=True)
            ]
            with gateway(instances, folder, recorded=True) as front:
                print(record(front, folder, args.requests, args.rps))


if __name__ == "__main__":
    main()
